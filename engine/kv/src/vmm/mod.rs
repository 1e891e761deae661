//! Accounting of virtual and physical KV memory (vAttention), as a pure state machine.
//!
//! [`Vmm`] decides which physical page groups are mapped at which virtual addresses and returns [`Command`]s; it owns no
//! memory and calls no driver. The backend executes the commands in order; if one fails, it undoes those before it and
//! returns the [`Plan`] to [`Vmm::undo`], which restores the accounting.
//!
//! Addresses are chosen by the caller ([`Vmm::hold`], [`Vmm::release`]; the engine's [`crate::BlockPool`] does), or here
//! by address rows ("rows" below): ranges of virtual memory, one per running request (the paper's reqIds), and lent rows for
//! rBlocks lent to other instances. The unit of accounting is the stripe, see [`VmmLayout`].
//!
//! Invariants, asserted at every change and recounted by [`Vmm::check`]:
//! * a virtual place holds at most one stripe; `free + stripes mapped at any place == total`;
//! * a stripe that is mapped more than once (a shared prefix) is never written: rows write behind their shared tokens,
//!   and a release unmaps shared stripes instead of keeping them mapped;
//! * only its own release unmaps a held place; only kept places are reclaimed.

#[cfg(test)]
mod direct_tests;
mod layout;
mod lent_rows;
mod places;
mod requests;
mod row;
mod state;
#[cfg(test)]
mod tests;

pub use layout::{Plane, VmmLayout, VmmShape};
pub use state::{Command, Plan, Stripe, Vmm, VmmConfig, VmmCounters};

/// Error of the virtual memory accounting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VmmError {
    /// The shape allows no layout.
    #[error("no layout: {0}")]
    Shape(String),
    /// Batch times context needs more addresses than available.
    #[error("{needed} bytes of addresses are needed and {available} are there: lower the batch or the context")]
    Addresses { needed: u64, available: u64 },
    /// No physical memory is left: the caller preempts a request and retries. State is unchanged.
    #[error("{needed} page groups are needed and {available} are free or kept")]
    OutOfMemory { needed: u64, available: u64 },
    /// All address rows are taken.
    #[error("every request id is in use")]
    NoRow,
    /// The address row cannot grow to `tokens` tokens.
    #[error("{tokens} tokens do not fit the largest range, of {max}")]
    TooLong { tokens: u32, max: u32 },
}
