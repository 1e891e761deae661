//! DGFM: debts that emergency borrowing made circular are swapped back (Infinite-LLM v1 §4.5; docs/adr/0006-dgfm.md).
//!
//! A cycle is a list of members of which each owes rBlocks to the next and the last owes to the first. The coordinator
//!
//! 1. finds cycles with at least [`DgfmConfig::blocks_min`] on every edge ([`Dgfm::tick`]);
//! 2. sends every member [`Freeze`] for its debt and waits for all [`Frozen`], or gives up;
//! 3. has the members take blocks home one after the other, starting with the one that has most free memory: what it
//!    takes home leaves room at its creditor, which takes as many home from *its* creditor, and so on around, until the
//!    last one frees at the first what the first one spent. A few free blocks (the reserve that is never lent) are thus
//!    enough between instances that are full; larger debts take several rounds;
//! 4. sends every member [`Thaw`], always: when the swap is done, and whenever it cannot go on (a refusal, a member that
//!    is gone, a time limit). A `Thaw` that is lost is made up for by the time limit in the `Freeze`.
//!
//! Each step is an ordinary move (reserve, copy, switch, free), so that stopping between or within steps leaves every
//! sequence's tokens covered exactly once; the coordinator holds soft state only, and one that is lost needs no repair.
//! Invariants: an instance is in at most one cycle; no order is given that could outlive the freeze.

mod coordinator;
mod cycles;
#[cfg(test)]
mod tests;

pub use coordinator::{Dgfm, DgfmStats};

/// When and how much is swapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DgfmConfig {
    /// Debts of fewer rBlocks are no edge of a cycle: a swap costs a freeze (v1 §4.5: an empirical threshold).
    pub blocks_min: u32,
    /// rBlocks of one order at most.
    pub order_blocks_max: u32,
    /// Members of a cycle at most.
    pub members_max: usize,
    /// Cycles that are being swapped at once.
    pub cycles_max: usize,
    /// Edges that a search looks at before it gives up until the next.
    pub edges_max: usize,
    /// Time between searches.
    pub period_ms: u64,
    /// Time for all members to answer a freeze.
    pub answer_ms: u64,
    /// Time limit of a freeze, answers included.
    pub freeze_ms: u64,
    /// Pause before an order that moved nothing is given again: what it waits for may be a release in flight.
    pub retry_ms: u64,
    /// Such orders in a row before the swap ends.
    pub tries_max: u32,
    /// An instance is left alone for so long after a cycle, until its heartbeat has told what became of it.
    pub rest_ms: u64,
}

impl Default for DgfmConfig {
    fn default() -> Self {
        Self {
            blocks_min: 4,
            order_blocks_max: 256,
            members_max: 8,
            cycles_max: 64,
            edges_max: 1 << 20,
            period_ms: 1_000,
            answer_ms: 1_000,
            freeze_ms: 10_000,
            retry_ms: 100,
            tries_max: 5,
            rest_ms: 2_000,
        }
    }
}
