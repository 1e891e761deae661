//! Kinds of additional memory of an instance.

use crate::args::EngineArgs;

/// Kind of additional memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TierKind {
    Host,
    /// Device memory, lent for mapping.
    Lent,
}

impl TierKind {
    /// Suffix of the node's name, and field of `/lagoon/status`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Lent => "lent",
        }
    }

    /// The flag that configures it.
    pub(crate) fn flag(self) -> &'static str {
        match self {
            Self::Host => "--host-kv-tokens",
            Self::Lent => "--lend-device-tokens",
        }
    }

    /// Configured tokens; `None` without.
    pub(crate) fn tokens(self, args: &EngineArgs) -> Option<u32> {
        match self {
            Self::Host => args.host_kv_tokens,
            Self::Lent => Some(args.lend_device_tokens).filter(|tokens| *tokens > 0),
        }
    }
}
