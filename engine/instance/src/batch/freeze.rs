//! DGFM, the debtor's side (Infinite-LLM v1 §4.5): blocks of one sequence at one creditor stay as they are while the
//! gManager swaps them home.
//!
//! While a debt is frozen, only moves of its own cycle touch it: nothing is released behind a window, the sequence is not
//! preempted for another's growth, and if it ends (finished, cancelled, failed) its client is told at once but its memory
//! waits for the thaw. A freeze ends by `Thaw`, by its time limit, which the coordinator cannot extend, or when the KV
//! that it protects is lost or of no use any more (the creditor is gone, the sequence is computed again): then a late
//! order of its cycle finds nothing frozen and is refused.

use super::sequence::Sequence;
use crate::event::Effect;
use crate::instance::Instance;
use lagoon_kv::Placement;
use lagoon_protocol::{ControlBody, Freeze, Frozen};
use lagoon_types::limits::FREEZE_MS_MAX;
use lagoon_types::{InstanceId, SeqId};

/// What is frozen here. An order to move blocks of `seq` from `creditor` is allowed while it is, if it is a swap of the
/// same cycle; any other one is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrozenDebt {
    pub cycle: u64,
    pub creditor: InstanceId,
    pub seq: SeqId,
    /// When it thaws by itself.
    pub until_ms: u64,
}

impl Instance {
    /// The debt that is frozen now. At most one is.
    #[must_use]
    pub fn frozen(&self) -> Option<FrozenDebt> {
        self.batch.frozen
    }

    /// Whether a sequence has frozen blocks.
    pub(crate) fn is_frozen(&self, seq: SeqId) -> bool {
        self.batch.frozen.is_some_and(|f| f.seq == seq)
    }

    /// Freezes the sequence with most full blocks at the creditor, or refuses with 0 blocks. A repetition gets the same
    /// answer.
    pub(crate) fn on_freeze(&mut self, m: &Freeze) {
        let creditor = InstanceId(m.creditor);
        let chosen = match self.batch.frozen {
            Some(f) if f.cycle == m.cycle => self.batch.seq(f.seq).map(|s| (full_blocks_at(s, f.creditor), f.seq)),
            Some(_) => None,
            None => self.debt_to_freeze(creditor),
        };
        let (blocks, seq) = chosen.filter(|(blocks, _)| *blocks > 0).unwrap_or_default();
        if blocks > 0 && self.batch.frozen.is_none() {
            let until_ms = self.cx.now_ms + u64::from(m.ttl_ms).min(FREEZE_MS_MAX);
            self.batch.frozen = Some(FrozenDebt { cycle: m.cycle, creditor, seq, until_ms });
        }
        let blocks = blocks.min(m.blocks);
        let answer = Frozen { cycle: m.cycle, blocks, free: self.cx.memory.rm.available(), seq: seq.0 };
        self.cx.effects.push(Effect::ToGManager(ControlBody::Frozen(answer)));
    }

    /// The running sequence with most full blocks at `creditor`; the oldest of several.
    fn debt_to_freeze(&self, creditor: InstanceId) -> Option<(u32, SeqId)> {
        let runs = |s: &&Sequence| s.is_running() && !s.is_ending();
        let debts = self.batch.seqs().filter(runs).map(|s| (full_blocks_at(s, creditor), s.id));
        debts.max_by_key(|(blocks, seq)| (*blocks, std::cmp::Reverse(*seq)))
    }

    /// The swap is over.
    pub(crate) fn on_thaw(&mut self, cycle: u64) {
        if self.batch.frozen.is_some_and(|f| f.cycle == cycle) {
            self.thaw();
        }
    }

    /// Thaws what was frozen for too long.
    pub(crate) fn expire_freeze(&mut self) {
        if self.batch.frozen.is_some_and(|f| f.until_ms <= self.cx.now_ms) {
            self.thaw();
        }
    }

    /// Ends the freeze, and the sequence if it is over.
    fn thaw(&mut self) {
        self.batch.due.touch();
        if let Some(frozen) = self.batch.frozen.take()
            && self.batch.is_over(frozen.seq)
        {
            self.remove(frozen.seq);
        }
    }

    /// A frozen sequence is over: it leaves the batch, and the rest of its end waits for the thaw. False if it is not
    /// frozen.
    pub(crate) fn defer_end(&mut self, seq: SeqId) -> bool {
        if !self.is_frozen(seq) {
            return false;
        }
        self.stop_waiting(seq);
        self.batch.keep_frozen(seq);
        true
    }

    /// A sequence lost KV at `creditor`. If that is what was frozen, nothing is any more; if the sequence was over, it
    /// ends now, and true is returned.
    pub(crate) fn lose_frozen(&mut self, seq: SeqId, creditor: InstanceId) -> bool {
        let Some(frozen) = self.batch.frozen.filter(|f| f.seq == seq) else { return false };
        let over = self.batch.is_over(seq);
        if over {
            self.thaw();
        } else if frozen.creditor == creditor {
            self.unfreeze(seq);
        }
        over
    }

    /// What a freeze of this sequence protects is lost or given up.
    pub(crate) fn unfreeze(&mut self, seq: SeqId) {
        self.batch.frozen.take_if(|f| f.seq == seq);
        self.batch.due.touch();
    }
}

/// Blocks of a sequence at a creditor that are full in every layer.
fn full_blocks_at(seq: &Sequence, creditor: InstanceId) -> u32 {
    let full = seq.blocks.written() / seq.blocks.block_tokens();
    let placements = seq.blocks.placements().iter().take(full as usize);
    let there = placements.filter(|p| matches!(p, Placement::Remote(r) if r.creditor == creditor));
    u32::try_from(there.count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
pub(crate) mod tests;
