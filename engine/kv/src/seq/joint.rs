//! The block table of a sequence in joint prefill: what others compute lies in their leases from the start, and counts as written;
//! what this instance computes has its places, and is a lost range until it is computed.

use super::lost::union;
use super::{RemoteEntries, SeqBlocks};
use lagoon_types::PhysBlock;

/// Next part of a table in joint prefill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JointPart {
    /// Blocks that this instance computes.
    Own(Vec<PhysBlock>),
    /// Entries of another member's lease, which it computes or has computed.
    Leased(RemoteEntries),
}

impl SeqBlocks {
    /// Appends the parts of a joint prefill to a table whose blocks are all written (or that is empty). Other members' parts
    /// count as written: attention to them waits at their creditors.
    ///
    /// # Panics
    /// If a block of the table is not written.
    pub fn begin_joint(&mut self, parts: &[JointPart]) {
        assert!(
            self.written == self.capacity_tokens() && self.lost.is_empty(),
            "joint prefill begins behind what is known"
        );
        let mut due = Vec::new();
        for part in parts {
            let first = self.capacity_tokens();
            match part {
                JointPart::Own(blocks) => {
                    self.push_local(blocks);
                    due.push(first..self.capacity_tokens());
                }
                JointPart::Leased(entries) => self.push_entries(*entries),
            }
        }
        self.written = self.capacity_tokens();
        self.lost = union(&[], &due);
    }

    /// Number of positions in lost ranges.
    #[must_use]
    pub fn lost_tokens(&self) -> u32 {
        self.lost.iter().map(|lost| lost.end - lost.start).sum()
    }
}
