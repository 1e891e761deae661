//! What a machine's work means for the others: the router hands it on.

use lagoon_types::{InstanceId, SeqId};

/// What one machine did that another one has to act upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Creditor: a debtor did not return `missing` blocks in time. What the batch lacks of them is taken.
    RecallMissed { debtor: InstanceId, missing: u32 },
    /// Batch: a sequence that ended while its memory was frozen has thawed. Everything of it goes.
    Over { seq: SeqId },
}

/// In order.
pub(crate) type Outcomes = Vec<Outcome>;

/// Rounds in which outcomes of outcomes are handed on, at most. Each kind causes later kinds only: there is a last one.
pub(crate) const ROUNDS_MAX: usize = 4;
