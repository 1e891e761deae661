//! The accounting of virtual and physical KV memory (vAttention), as a pure state machine.
//!
//! [`Vmm`] decides which physical page groups lie behind which virtual ones and says so as [`Command`]s; it owns no
//! memory and calls no driver. Whoever carries the commands out does it in their order and, if one fails, undoes those
//! before it and gives the [`Plan`] back ([`Vmm::undo`]), after which the accounting is as it was.
//!
//! Addresses are given out by the caller ([`Vmm::hold`], [`Vmm::release`]), as [`crate::BlockPool`] does for the engine, or
//! here by rows: what the paper calls reqIds, ranges of virtual memory, one for each request that runs, and some for
//! lent rows (rBlocks lent to other instances). The unit of accounting is the stripe, see [`VmmLayout`].
//!
//! Invariants, asserted at every change and recounted by [`Vmm::check`]:
//! * a virtual place holds at most one stripe; `free + stripes mapped somewhere == total`;
//! * a stripe that is mapped more than once (a shared prefix) is never written: rows write behind their shared tokens,
//!   and a holder that ends has its shared stripes unmapped rather than kept for the next;
//! * nothing that somebody holds is unmapped but by its own release; only what is kept is reclaimed.

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

/// Why something cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VmmError {
    /// The shape allows no layout.
    #[error("no layout: {0}")]
    Shape(String),
    /// Batch times context needs more addresses than there are.
    #[error("{needed} bytes of addresses are needed and {available} are there: lower the batch or the context")]
    Addresses { needed: u64, available: u64 },
    /// No physical memory is left: the caller preempts a request and tries again. Nothing has changed.
    #[error("{needed} page groups are needed and {available} are free or kept")]
    OutOfMemory { needed: u64, available: u64 },
    /// All rows are taken.
    #[error("every request id is in use")]
    NoRow,
    /// The row's range cannot grow to so many tokens.
    #[error("{tokens} tokens do not fit the largest range, of {max}")]
    TooLong { tokens: u32, max: u32 },
}
