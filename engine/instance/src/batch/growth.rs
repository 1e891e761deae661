//! Growth of running sequences: own blocks first, then a borrow, then swap or preemption of another sequence.

use super::policy;
use super::sequence::Need;
use crate::creditor::CreditorEvent;
use crate::instance::Instance;
use crate::membership::Lending;
use lagoon_protocol::TierRequest;
use lagoon_types::{MicroBatch, SeqId};

impl Instance {
    /// Gives every idle running sequence that has filled its blocks another one.
    pub(crate) fn grow(&mut self) {
        for micro_batch in MicroBatch::ALL {
            let idle: Vec<(SeqId, u32)> = self.batch.sched.idle(micro_batch).collect();
            for (id, tokens) in idle {
                self.free_behind_window(id);
                self.catch_up(id);
                if self.batch.is_running(id) {
                    self.grow_one(id, tokens);
                }
            }
        }
    }

    fn grow_one(&mut self, id: SeqId, tokens: u32) {
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return };
        if seq.blocks.lost_blocks() > 0 {
            self.restore(id);
            return;
        }
        let shortfall = seq.blocks.shortfall(tokens);
        let retry = match seq.need() {
            Some(Need::Met) => true,
            Some(Need::RetryAt(at)) if at > self.cx.now_ms => {
                self.batch.due.wake_at(at);
                false
            }
            Some(Need::RetryAt(_)) => true,
            Some(Need::Borrowing(_)) | None => return,
        };
        if shortfall == 0 || self.grow_here(id) || !retry {
            return;
        }
        if self.end_a_move_home() && self.grow_here(id) {
            return;
        }
        self.membership.need_gmanager(self.cx.now_ms);
        let lending = self.membership.lending(self.cx.now_ms);
        if self.cx.memory.rm.recallable() > 0 {
            // Debtors that have room give it back; it is taken only if nobody else lends.
            let take = lending != Lending::Open;
            self.creditor(CreditorEvent::WantBack { blocks: shortfall, take });
        }
        match (lending, self.batch.seqs.get_mut(&id)) {
            (Lending::Open, Some(seq)) => {
                let (wanted, tier) = policy::growth_request(seq.frugal, shortfall);
                // Before it borrows host memory, a younger one is swapped out there.
                if tier == TierRequest::Any && self.swap_out_for(id) {
                    return;
                }
                let borrow = self.cx.memory.rm.borrow_in(tier, id, wanted, self.cx.now_ms);
                self.batch.set_need(id, Need::Borrowing(borrow));
            }
            (Lending::Away, Some(_)) => self.retry_later(id),
            (Lending::Closed, _) => self.preempt_for(id),
            (_, None) => {}
        }
    }

    /// Gives a sequence the own blocks that it is short of, if there are as many.
    pub(crate) fn grow_here(&mut self, id: SeqId) -> bool {
        let Some(seq) = self.batch.seqs.get_mut(&id) else { return false };
        if seq.blocks.lost_blocks() > 0 {
            return self.restore_here(id);
        }
        let (first, short) = (seq.blocks.blocks(), seq.blocks.shortfall(seq.len()));
        let blocks = self.cx.memory.rm.allocate(id, first..first + short, seq.blocks.last_local());
        let Some(blocks) = blocks else { return false };
        seq.blocks.push_local(&blocks);
        seq.set_need(Need::Met);
        true
    }

    /// Blocks that running sequences lack to go on.
    pub(crate) fn missing_blocks(&self) -> u32 {
        let running = self.batch.seqs().filter(|s| self.batch.is_running(s.id));
        let short: u32 = running.map(|s| s.blocks.shortfall(s.len())).sum();
        short.saturating_sub(self.cx.memory.rm.available())
    }

    fn free_behind_window(&mut self, id: SeqId) {
        if self.batch.is_frozen(id) || self.prefill.is_job(id) {
            return;
        }
        let (Some(window), Some(seq)) = (self.cx.config.window, self.batch.seqs.get_mut(&id)) else { return };
        let freed = seq.blocks.free_behind_window(seq.blocks.next_position(), window);
        for entries in &freed.remote {
            seq.forget_entries(entries);
        }
        if !freed.is_empty() {
            self.end_moves_behind_window(id);
            self.give_back(id, &freed);
            let micro_batch = self.batch.micro_batch_of(id);
            self.batch.sched.set_micro_batch(id, micro_batch);
        }
    }
}
