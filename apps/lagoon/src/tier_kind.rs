//! Kinds of memory beside an instance's own.

use crate::args::EngineArgs;

/// Which memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TierKind {
    Host,
    /// Of the device, lent to be mapped.
    Lent,
}

impl TierKind {
    /// What names end with, and the field of `/lagoon/status`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Lent => "lent",
        }
    }

    /// The flag that asks for it.
    pub(crate) fn flag(self) -> &'static str {
        match self {
            Self::Host => "--host-kv-tokens",
            Self::Lent => "--lend-device-tokens",
        }
    }

    /// Tokens that are asked for; `None` where none are.
    pub(crate) fn tokens(self, args: &EngineArgs) -> Option<u32> {
        match self {
            Self::Host => args.host_kv_tokens,
            Self::Lent => Some(args.lend_device_tokens).filter(|tokens| *tokens > 0),
        }
    }
}
