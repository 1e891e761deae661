//! Counters of moves, for metrics and operators.

use super::{Place, Why};
use lagoon_protocol::{MoveCounts, MoveReason};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;

/// Counters of moves since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MoveStatus {
    /// Moves in flight.
    pub in_progress: usize,
    /// Tokens per growing sequence that may move beside one step.
    pub tokens_per_step: u32,
    /// Blocks moved to a creditor.
    pub blocks_out: u64,
    /// Blocks moved home.
    pub blocks_home: u64,
    /// Blocks moved from one creditor to another.
    pub blocks_between: u64,
    /// The same blocks by reason and direction.
    pub by_reason: MovedBlocks,
    /// Bytes of KV copied.
    pub bytes: u64,
    /// Moves for which no target had room.
    pub refused: u64,
    /// Moves that ended before all of their blocks had moved.
    pub cut_short: u64,
    /// Blocks whose copy did not match its content hash.
    pub damaged: u64,
    /// Recalls by this instance's creditors.
    pub recalls_received: u64,
    /// This instance's own recalls that debtors met.
    pub recalls_met: u64,
    /// Its own recalls that debtors did not meet in time.
    pub recalls_missed: u64,
    /// Blocks revoked after missed recalls.
    pub blocks_revoked: u64,
}

impl MoveStatus {
    /// The counters as heartbeats carry them.
    pub(crate) fn counts(&self) -> MoveCounts {
        MoveCounts {
            in_progress: u32::try_from(self.in_progress).unwrap_or(u32::MAX),
            blocks_out: self.blocks_out,
            blocks_home: self.blocks_home,
            blocks_between: self.blocks_between,
        }
    }

    /// Counts a block that has moved.
    pub(super) fn count(&mut self, why: Why, source: Place, target: Place) {
        let (direction, total) = match (source, target) {
            (_, Place::Here) => (1, &mut self.blocks_home),
            (Place::Here, _) => (0, &mut self.blocks_out),
            _ => (2, &mut self.blocks_between),
        };
        *total += 1;
        let reason = match why {
            Why::Order { reason: MoveReason::Plan, .. } => 0,
            Why::Order { reason: MoveReason::Drain, .. } => 1,
            Why::Order { reason: MoveReason::Operator, .. } => 2,
            Why::Order { reason: MoveReason::Swap, .. } => 3,
            Why::Recall => 4,
            Why::SwapOut => 5,
        };
        self.by_reason.0[reason][direction] += 1;
    }
}

/// Blocks moved, by reason and direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedBlocks([[u64; 3]; 6]);

impl MovedBlocks {
    /// Reasons: three kinds of orders by the gManager, its swaps, a creditor's recall, and swap out.
    const REASONS: [&'static str; 6] = ["plan", "drain", "operator", "swap", "recall", "swap_out"];
    /// Directions: to a creditor, home, from one creditor to another.
    const DIRECTIONS: [&'static str; 3] = ["out", "home", "between"];

    /// Every reason and direction, with its number of blocks.
    pub fn rows(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        let row = |(reason, counts): (&'static str, &[u64; 3])| {
            let counts = *counts;
            Self::DIRECTIONS.into_iter().zip(counts).map(move |(direction, blocks)| (reason, direction, blocks))
        };
        Self::REASONS.into_iter().zip(&self.0).flat_map(row)
    }
}

impl Serialize for MovedBlocks {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut reasons = BTreeMap::<_, BTreeMap<_, u64>>::new();
        for (reason, direction, blocks) in self.rows().filter(|row| row.2 > 0) {
            reasons.entry(reason).or_default().insert(direction, blocks);
        }
        reasons.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_types::InstanceId;

    #[test]
    fn blocks_are_counted_once_by_reason_and_direction() {
        let mut status = MoveStatus::default();
        let (a, b) = (Place::At(InstanceId(1)), Place::At(InstanceId(2)));
        let by = |reason| Why::Order { number: 7, reason };
        status.count(by(MoveReason::Drain), a, b);
        status.count(by(MoveReason::Plan), Place::Here, a);
        status.count(by(MoveReason::Plan), Place::Here, b);
        status.count(Why::Recall, b, Place::Here);
        let rows: Vec<_> = status.by_reason.rows().filter(|row| row.2 > 0).collect();
        assert_eq!(rows, [("plan", "out", 2), ("drain", "between", 1), ("recall", "home", 1)]);
        assert_eq!((status.blocks_out, status.blocks_home, status.blocks_between), (2, 1, 1));
        assert_eq!(status.by_reason.rows().count(), 18);
    }
}
