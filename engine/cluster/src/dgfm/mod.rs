//! DGFM: resolves circular debts by swaps (Infinite-LLM v1 §4.5; docs/adr/0006-dgfm.md).
//!
//! A cycle is a list of members: each owes rBlocks to the next, and the last to the first. The coordinator
//!
//! 1. finds cycles with at least [`DgfmConfig::blocks_min`] on every edge ([`Dgfm::tick`]);
//! 2. sends every member [`Freeze`] for its debt and waits for all [`Frozen`]; at the deadline it aborts the cycle;
//! 3. orders the members to take blocks home one after the other, starting with the member with most free memory: each
//!    move frees memory at the member's creditor, which takes as many blocks home from *its* creditor, and so on, until
//!    the last move frees memory at the first member. A few free blocks (the reserve that is never lent) therefore suffice
//!    between full instances; larger debts take several rounds;
//! 4. sends every member [`Thaw`] in every case: after the swap, and whenever it cannot continue (a refusal, a departed
//!    member, a deadline). The deadline in the `Freeze` replaces a lost `Thaw`.
//!
//! Each step is an ordinary move (reserve, copy, switch, free), so that stopping at any point leaves every sequence's
//! tokens covered exactly once; the coordinator holds soft state only, and its loss needs no repair. Invariants: an
//! instance is in at most one cycle; no order outlives the freeze.

mod coordinator;
mod cycles;
#[cfg(test)]
mod tests;

pub use coordinator::{Dgfm, DgfmStats};

use lagoon_types::InstanceId;

/// Row of the global debt ledger: rBlocks that an instance lends to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LedgerRow {
    pub creditor: InstanceId,
    pub debtor: InstanceId,
    pub blocks: u32,
}

/// Configuration of DGFM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DgfmConfig {
    /// Smallest debt that is an edge of a cycle, in rBlocks: a swap costs a freeze (v1 §4.5: an empirical threshold).
    pub blocks_min: u32,
    /// rBlocks of one order at most.
    pub order_blocks_max: u32,
    /// Members of a cycle at most.
    pub members_max: usize,
    /// Concurrent cycles.
    pub cycles_max: usize,
    /// Edges that one search visits at most.
    pub edges_max: usize,
    /// Time between searches.
    pub period_ms: u64,
    /// Time for all members to answer a freeze.
    pub answer_ms: u64,
    /// Deadline of a freeze, answers included.
    pub freeze_ms: u64,
    /// Pause before an order that moved nothing is sent again: the needed memory may have its release in flight.
    pub retry_ms: u64,
    /// Orders in a row that move nothing before the swap ends.
    pub tries_max: u32,
    /// Pause of an instance after a cycle, until its heartbeat has reported the new debts.
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
