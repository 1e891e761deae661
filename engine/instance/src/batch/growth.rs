//! Growth of running sequences: own blocks first, then a borrow, then swap or preemption of another sequence.

use super::policy::{Attempt, Short};
use super::preempt::give_back;
use super::sequence::{Need, Sequence};
use super::{Batch, Others, policy};
use crate::cx::Cx;
use crate::outcome::Outcome;
use lagoon_protocol::TierRequest;
use lagoon_types::{MicroBatch, SeqId};

impl Batch {
    /// Gives every idle running sequence whose blocks are full another one.
    pub(crate) fn grow(&mut self, cx: &mut Cx, others: Others<'_>) {
        for micro_batch in MicroBatch::ALL {
            let idle: Vec<(SeqId, u32)> = self.sched.idle(micro_batch).collect();
            for (id, tokens) in idle {
                self.free_behind_window(cx, id);
                self.catch_up(cx, others, id);
                if self.is_running(id) {
                    self.grow_one(cx, others, id, tokens);
                }
            }
        }
    }

    fn grow_one(&mut self, cx: &mut Cx, others: Others<'_>, id: SeqId, tokens: u32) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        if seq.blocks.lost_blocks() > 0 {
            self.restore(cx, others, id);
            return;
        }
        let (shortfall, frugal) = (seq.blocks.shortfall(tokens), seq.frugal);
        let attempt = policy::attempt(seq.need(), cx.now_ms);
        match attempt {
            Attempt::No => return,
            Attempt::At(at_ms) => self.due.wake_at(at_ms),
            Attempt::Now => {}
        }
        if shortfall == 0 || self.grow_here(cx, id) || attempt != Attempt::Now {
            return;
        }
        if others.moves.is_moving_home() {
            // One move's room at a time: it may be enough for all sequences.
            if !cx.outcomes.iter().any(|outcome| matches!(outcome, Outcome::RoomNeeded)) {
                cx.emit(Outcome::RoomNeeded);
            }
            return;
        }
        cx.standing.note_lending_needed(cx.now_ms);
        let lending = cx.standing.lending(cx.now_ms);
        if cx.memory.rm.creditor.recallable(&cx.memory.rm.pool) > 0 {
            // Debtors with room give blocks back.
            cx.emit(Outcome::WantBack { blocks: shortfall, take: policy::revokes(lending) });
        }
        match policy::growth_short(lending) {
            Short::Borrow => {
                let (wanted, tier) = policy::growth_request(frugal, shortfall);
                if tier == TierRequest::Any && self.swap_out_for(cx, others, id) {
                    return;
                }
                let borrow = cx.memory.rm.debtor.borrow(id, wanted, tier, None, cx.now_ms);
                self.set_need(id, Need::Borrowing(borrow));
            }
            Short::Retry | Short::Fail => self.retry_later(cx, id),
            Short::Preempt => self.preempt_for(cx, others.prefills, id),
        }
    }

    /// Allocates the local blocks that a sequence lacks. False, and nothing allocated, if there are too few.
    pub(crate) fn grow_here(&mut self, cx: &mut Cx, id: SeqId) -> bool {
        let Some(seq) = self.seqs.get_mut(&id) else { return false };
        if seq.blocks.lost_blocks() > 0 {
            return self.restore_here(cx, id);
        }
        let short = seq.blocks.shortfall(seq.len());
        let has_grown = append_local(cx, seq, short);
        if has_grown {
            seq.set_need(Need::Met);
        }
        has_grown
    }

    /// rBlocks that running sequences lack and the pool does not have free.
    pub(crate) fn missing_blocks(&self, cx: &Cx) -> u32 {
        let running = self.seqs().filter(|s| self.is_running(s.id));
        let short: u32 = running.map(|s| s.blocks.shortfall(s.len())).sum();
        short.saturating_sub(cx.memory.rm.available())
    }

    fn free_behind_window(&mut self, cx: &mut Cx, id: SeqId) {
        let frozen = self.is_frozen(id);
        let (Some(window), Some(seq)) = (cx.config.window, self.seqs.get_mut(&id)) else { return };
        if frozen || seq.for_others.is_some() {
            return;
        }
        let freed = seq.blocks.free_behind_window(seq.blocks.next_position(), window);
        for entries in &freed.remote {
            seq.forget_entries(entries);
        }
        if !freed.is_empty() {
            cx.emit(Outcome::BehindWindow { seq: id });
            give_back(cx, id, &freed);
            let micro_batch = self.micro_batch_of(id);
            self.sched.set_micro_batch(id, micro_batch);
        }
    }
}

/// Allocates `blocks` local rBlocks behind a sequence's last one. False, and nothing allocated, if too few are free.
fn append_local(cx: &mut Cx, seq: &mut Sequence, blocks: u32) -> bool {
    let first = seq.blocks.blocks();
    let taken = cx.memory.rm.pool.allocate_for(seq.id, first..first + blocks, seq.blocks.last_local());
    taken.iter().for_each(|blocks| seq.blocks.push_local(blocks));
    taken.is_some()
}

/// Gives a sequence places for `drafts` tokens behind its last one, as far as free local rBlocks beyond `reserve` go. Nothing is
/// preempted or borrowed for a draft. Returns how many of them have a place.
pub(super) fn make_room_for_drafts(cx: &mut Cx, seq: &mut Sequence, reserve: u32, drafts: u32) -> u32 {
    let short = seq.blocks.shortfall(seq.len() + drafts);
    let ahead = policy::growth_ahead(short, cx.memory.rm.available(), reserve);
    if ahead > 0 {
        append_local(cx, seq, ahead);
    }
    drafts.min(seq.blocks.capacity_tokens() - seq.len())
}
