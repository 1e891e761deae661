//! DGFM, the debtor's side (Infinite-LLM v1 §4.5): blocks of one sequence at one creditor stay as they are while the
//! gManager swaps them home.
//!
//! While a debt is frozen, only moves of its own cycle touch it: nothing is released behind a window, the sequence is not
//! preempted for another's growth, and if it ends (finished, cancelled, failed) its client is told at once but its memory
//! waits for the thaw. A freeze ends by `Thaw`, by its time limit, which the coordinator cannot extend, or when the KV
//! that it protects is lost or of no use any more (the creditor is gone, the sequence is computed again): then a late
//! order of its cycle finds nothing frozen and is refused.

use super::Batch;
use super::sequence::Sequence;
use crate::cx::Cx;
use crate::event::Effect;
use crate::outcome::{Outcome, Outcomes};
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

impl Batch {
    /// The debt that is frozen now. At most one is.
    pub(crate) fn frozen(&self) -> Option<FrozenDebt> {
        self.frozen
    }

    /// Whether a sequence has frozen blocks.
    pub(crate) fn is_frozen(&self, seq: SeqId) -> bool {
        self.frozen.is_some_and(|f| f.seq == seq)
    }

    /// Freezes the sequence with most full blocks at the creditor, or refuses with 0 blocks. A repetition gets the same
    /// answer.
    pub(crate) fn on_freeze(&mut self, cx: &mut Cx, m: &Freeze) {
        let creditor = InstanceId(m.creditor);
        let chosen = match self.frozen {
            Some(f) if f.cycle == m.cycle => self.seq(f.seq).map(|s| (full_blocks_at(s, f.creditor), f.seq)),
            Some(_) => None,
            None => self.debt_to_freeze(creditor),
        };
        let (blocks, seq) = chosen.filter(|(blocks, _)| *blocks > 0).unwrap_or_default();
        if blocks > 0 && self.frozen.is_none() {
            let until_ms = cx.now_ms + u64::from(m.ttl_ms).min(FREEZE_MS_MAX);
            self.frozen = Some(FrozenDebt { cycle: m.cycle, creditor, seq, until_ms });
        }
        let blocks = blocks.min(m.blocks);
        let answer = Frozen { cycle: m.cycle, blocks, free: cx.memory.rm.available(), seq: seq.0 };
        cx.effects.push(Effect::ToGManager(ControlBody::Frozen(answer)));
    }

    /// The running sequence with most full blocks at `creditor`; the oldest of several.
    fn debt_to_freeze(&self, creditor: InstanceId) -> Option<(u32, SeqId)> {
        let runs = |s: &&Sequence| s.is_running() && !s.is_ending();
        let debts = self.seqs().filter(runs).map(|s| (full_blocks_at(s, creditor), s.id));
        debts.max_by_key(|(blocks, seq)| (*blocks, std::cmp::Reverse(*seq)))
    }

    /// The swap is over.
    pub(crate) fn on_thaw(&mut self, cycle: u64) -> Outcomes {
        let over = self.frozen.is_some_and(|f| f.cycle == cycle).then(|| self.thaw()).flatten();
        over.map(|seq| Outcome::Over { seq }).into_iter().collect()
    }

    /// Thaws what was frozen for too long.
    pub(crate) fn expire_freeze(&mut self, now_ms: u64) -> Outcomes {
        let over = self.frozen.is_some_and(|f| f.until_ms <= now_ms).then(|| self.thaw()).flatten();
        over.map(|seq| Outcome::Over { seq }).into_iter().collect()
    }

    /// Ends the freeze. The sequence, if it is over: it can go now.
    fn thaw(&mut self) -> Option<SeqId> {
        self.due.touch();
        self.frozen.take().map(|frozen| frozen.seq).filter(|seq| self.is_over(*seq))
    }

    /// A frozen sequence is over: it leaves the batch, and the rest of its end waits for the thaw. False if it is not
    /// frozen.
    pub(super) fn defer_end(&mut self, cx: &mut Cx, seq: SeqId) -> bool {
        if !self.is_frozen(seq) {
            return false;
        }
        self.stop_waiting(cx, seq);
        self.keep_frozen(seq);
        true
    }

    /// A sequence lost KV at `creditor`. If that is what was frozen, nothing is any more. The sequence, if it was over: it can
    /// go now.
    pub(super) fn lose_frozen(&mut self, seq: SeqId, creditor: InstanceId) -> Option<SeqId> {
        let frozen = self.frozen.filter(|f| f.seq == seq)?;
        if self.is_over(seq) {
            return self.thaw();
        }
        if frozen.creditor == creditor {
            self.unfreeze(seq);
        }
        None
    }

    /// What a freeze of this sequence protects is lost or given up.
    pub(crate) fn unfreeze(&mut self, seq: SeqId) {
        self.frozen.take_if(|f| f.seq == seq);
        self.due.touch();
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
