//! DGFM, debtor side (Infinite-LLM v1 §4.5): the blocks of one sequence at one creditor are frozen while the gManager
//! swaps them home.
//!
//! While a debt is frozen, only moves of its own cycle touch it: nothing is released behind a window, the sequence is
//! not preempted for another's growth, and if it ends (finished, cancelled, failed) its client gets the end at once but
//! its memory waits for the thaw. A freeze ends by `Thaw`, at its time limit, which the coordinator cannot extend, or
//! when its KV is lost or dropped (the creditor was lost, the sequence is recomputed). A late move order of the cycle
//! then finds no frozen debt and is refused.

use super::Batch;
use super::others::PrefillQueries;
use super::sequence::Sequence;
use crate::cx::Cx;
use crate::event::Effect;
use lagoon_kv::Placement;
use lagoon_protocol::{ControlBody, Freeze, Frozen};
use lagoon_types::limits::FREEZE_MS_MAX;
use lagoon_types::{InstanceId, SeqId};

/// The frozen debt: blocks of `seq` at `creditor`. While frozen, only swap moves of the same `cycle` may move them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrozenDebt {
    pub cycle: u64,
    pub creditor: InstanceId,
    pub seq: SeqId,
    /// When it thaws without a `Thaw`, in milliseconds.
    pub until_ms: u64,
}

impl Batch {
    /// The frozen debt; at most one.
    pub(crate) fn frozen(&self) -> Option<FrozenDebt> {
        self.frozen
    }

    /// Whether a sequence has frozen blocks.
    pub(crate) fn is_frozen(&self, seq: SeqId) -> bool {
        self.frozen.is_some_and(|f| f.seq == seq)
    }

    /// Freezes the running sequence with most full blocks at the creditor, or refuses with 0 blocks. A repeated request
    /// gets the same answer.
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
        let runs = |s: &&Sequence| s.is_running() && !s.is_ending() && s.joint.is_none();
        let debts = self.seqs().filter(runs).map(|s| (full_blocks_at(s, creditor), s.id));
        debts.max_by_key(|(blocks, seq)| (*blocks, std::cmp::Reverse(*seq)))
    }

    /// Thaws the frozen debt if `over` says that its swap or its time is over, and removes its sequence if that has
    /// ended.
    pub(super) fn thaw_if(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, over: impl Fn(&FrozenDebt) -> bool) {
        if let Some(seq) = self.frozen.as_ref().is_some_and(over).then(|| self.thaw()).flatten() {
            self.remove(cx, prefills, seq);
        }
    }

    /// Ends the freeze. Returns the sequence if it has ended and can be removed now.
    fn thaw(&mut self) -> Option<SeqId> {
        self.due.touch();
        self.frozen.take().map(|frozen| frozen.seq).filter(|seq| self.is_over(*seq))
    }

    /// Takes a frozen sequence that has ended out of the batch; its memory waits for the thaw. False if it is not
    /// frozen.
    pub(super) fn defer_end(&mut self, cx: &mut Cx, seq: SeqId) -> bool {
        if !self.is_frozen(seq) {
            return false;
        }
        self.stop_waiting(cx, seq);
        self.keep_frozen(seq);
        true
    }

    /// Ends the freeze if `seq` lost its frozen KV at `creditor`. Returns the sequence if it has ended and can be
    /// removed now.
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

    /// Drops the freeze of `seq`: its KV is lost or dropped.
    pub(crate) fn unfreeze(&mut self, seq: SeqId) {
        self.frozen.take_if(|f| f.seq == seq);
        self.due.touch();
    }
}

/// Blocks of a sequence at a creditor that are written in every layer.
fn full_blocks_at(seq: &Sequence, creditor: InstanceId) -> u32 {
    let full = seq.blocks.written() / seq.blocks.block_tokens();
    let placements = seq.blocks.placements().iter().take(full as usize);
    let there = placements.filter(|p| matches!(p, Placement::Remote(r) if r.creditor == creditor));
    u32::try_from(there.count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
pub(crate) mod tests;
