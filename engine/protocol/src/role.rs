//! Roles of instances: what each computes and whom it serves.

use prost::Enumeration;

/// Role of an instance in its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Role {
    /// Computes prompts and answers, and lends (`--role both`).
    Instance = 0,
    /// Lends memory and micro attention only (`--role kv`).
    Kv = 1,
    /// Prefill worker: computes prompts for decode workers, takes no client requests. Also lends.
    Prefill = 2,
    /// Decode worker: takes client requests, prefill workers compute their prompts. Also lends.
    Decode = 3,
}

impl Role {
    /// Whether the instance has weights and runs sequences.
    #[must_use]
    pub fn runs(self) -> bool {
        self != Self::Kv
    }

    /// Whether the instance takes client requests.
    #[must_use]
    pub fn serves(self) -> bool {
        matches!(self, Self::Instance | Self::Decode)
    }

    /// Whether the instance computes prompts for decode workers.
    #[must_use]
    pub fn prefills(self) -> bool {
        matches!(self, Self::Instance | Self::Prefill)
    }
}
