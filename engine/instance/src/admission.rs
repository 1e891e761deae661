//! Memory for sequences: all-or-nothing admission, growth, borrowing, preemption, and recovery of lost KV.
//!
//! A prompt is planned whole: its oldest rBlocks go to creditors, its newest stay here, so that decoding grows in local
//! memory. What cannot be placed waits, holding nothing. When a growing sequence finds no memory it borrows; when
//! nobody lends, the youngest sequence yields (it is computed again later): the oldest always advances.

use crate::instance::Instance;
use crate::sequence::{HeldLease, Hold, Sequence};
use lagoon_cluster::{BorrowFailure, BorrowedLease, Output};
use lagoon_kv::{Freed, LeaseHasher, RemoteEntries, RemoteGrant};
use lagoon_types::limits::{
    ADMISSION_DEADLINE_MS, ADMISSION_RETRY_MAX_MS, ADMISSION_RETRY_MS, GROWTH_BLOCKS, RECOVERIES_MAX,
};
use lagoon_types::{InstanceId, Lane, PhysBlock, RequestError, SeqId};

impl Instance {
    /// Hands the rManager's outputs on.
    pub(crate) fn drain_rmanager(&mut self) {
        while let Some(output) = self.rm.poll() {
            match output {
                Output::ToGManager(body) => self.effects.push(crate::Effect::ToGManager(body)),
                Output::ToPeer { instance, quic_addr, body } => self.send_control(instance, &quic_addr, body),
                Output::Borrowed { borrow: _, seq, leases } => self.on_borrowed(seq, &leases),
                Output::BorrowFailed { borrow: _, seq, reason } => self.on_borrow_failed(seq, &reason),
                Output::LeaseLost { seq, creditor, lease: _ } => {
                    self.lose(seq, creditor, "a creditor no longer has the sequence's blocks");
                }
            }
        }
    }

    /// Admits from the head of the queue for as long as there is memory.
    pub(crate) fn admit(&mut self) {
        self.admit_placed();
        while let Some(head) = self.sched.next_waiting() {
            let Some(seq) = self.seqs.get(&head.seq) else { return };
            match seq.hold {
                Hold::Borrowing(_) => return,
                Hold::RetryAt(at) if at > self.now_ms && seq.blocks.shortfall(seq.len() + 1) > self.rm.available() => {
                    return;
                }
                Hold::None | Hold::RetryAt(_) => {}
            }
            if !self.place(head.seq) {
                return;
            }
            self.admit_placed();
        }
    }

    /// Waiting sequences that have all their memory join the batch, wherever they stand in the queue: they would
    /// otherwise hold memory that the head waits for.
    fn admit_placed(&mut self) {
        let placed =
            |s: &SeqId| Self::is_ready(&self.seqs, *s) && self.seqs.get(s).is_some_and(|s| s.blocks.blocks() > 0);
        let placed: Vec<SeqId> = self.sched.waiting().map(|w| w.seq).filter(placed).collect();
        for seq in placed {
            if self.sched.running_len() >= self.config.sched.running {
                return;
            }
            let lane = self.lane_of(seq);
            self.sched.admit(seq, lane);
        }
    }

    fn lane_of(&self, seq: SeqId) -> Lane {
        let remote = self.seqs.get(&seq).is_some_and(|s| s.blocks.remote_blocks() > 0);
        if remote { Lane::Remote } else { Lane::Local }
    }

    /// Finds memory for a whole waiting sequence. True if it has it now; false if it negotiates or must retry.
    fn place(&mut self, id: SeqId) -> bool {
        let Some(seq) = self.seqs.get(&id) else { return false };
        // One token more than is known: the next one must have a place.
        let needed = seq.blocks.shortfall(seq.len() + 1);
        let local = needed.min(self.rm.available());
        if local < needed && !self.registered {
            self.retry_later(id);
            return false;
        }
        // The newest blocks stay here; the table is built oldest first, so they wait aside while it borrows.
        let Some(blocks) = self.rm.allocate(id, local, None) else {
            self.retry_later(id);
            return false;
        };
        let borrow = (local < needed).then(|| self.rm.borrow(id, needed - local, self.now_ms));
        let Some(seq) = self.seqs.get_mut(&id) else { return false };
        match borrow {
            None => {
                (seq.hold, seq.misses) = (Hold::None, 0);
                seq.blocks.push_local(&blocks);
                true
            }
            Some(borrow) => {
                seq.hold = Hold::Borrowing(borrow);
                seq.aside = blocks;
                false
            }
        }
    }

    /// The pause grows with every miss and differs between instances and sequences: two that hold what the other one
    /// wants, and give it up at the same time, do not meet again for ever.
    fn retry_later(&mut self, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let longest = (ADMISSION_RETRY_MS << seq.misses.min(10)).min(ADMISSION_RETRY_MAX_MS);
        seq.misses += 1;
        let salt = self.config.incarnation ^ id.0.rotate_left(32) ^ u64::from(seq.misses).rotate_left(48);
        let spread = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        seq.hold = Hold::RetryAt(self.now_ms + longest / 2 + spread % (longest / 2 + 1));
    }

    fn on_borrowed(&mut self, id: SeqId, leases: &[BorrowedLease]) {
        let (block_tokens, kv) = (self.config.block_tokens, self.config.kv);
        let Some(seq) = self.seqs.get_mut(&id) else {
            for &BorrowedLease { creditor, lease, epoch, blocks, .. } in leases {
                let all = RemoteEntries { creditor, lease, epoch, first: 0, entries: blocks };
                self.rm.release(&all, self.now_ms);
            }
            return;
        };
        for lease in leases {
            let &BorrowedLease { creditor, lease, epoch, blocks, .. } = lease;
            seq.blocks.push_remote(&RemoteGrant { creditor, lease, epoch, blocks });
            let hasher = LeaseHasher::new(kv.layers as usize, block_tokens, kv.layer_token_bytes());
            seq.leases.insert((creditor, lease), HeldLease { blocks, hasher });
        }
        let aside: Vec<PhysBlock> = std::mem::take(&mut seq.aside);
        seq.blocks.push_local(&aside);
        seq.hold = Hold::None;
        (seq.misses, seq.frugal) = (0, false);
        if self.sched.is_running(id) {
            self.sched.set_lane(id, Lane::Remote);
        } else {
            self.admit_placed();
        }
        // A connection that broke during the negotiation has taken nothing, but nothing would dial it again either.
        if let Some(gone) = leases.iter().find(|l| self.peers.key(l.creditor).is_none()) {
            self.lose(id, gone.creditor, "a creditor's connection was lost during a negotiation");
        }
    }

    fn on_borrow_failed(&mut self, id: SeqId, reason: &BorrowFailure) {
        if !self.seqs.contains_key(&id) {
            return;
        }
        if self.sched.is_running(id) {
            match self.seqs.get_mut(&id) {
                // More than it needs was asked for: less may do.
                Some(seq) if !seq.frugal => (seq.frugal, seq.hold) = (true, Hold::None),
                _ => self.yield_memory(id),
            }
            return;
        }
        self.release_memory(id);
        let Some(seq) = self.seqs.get(&id) else { return };
        if let BorrowFailure::PoolTooSmall { pool_blocks_total } = reason {
            // It fitted when it was accepted: instances have left since.
            let (needed, limit) = (seq.len() + 1, pool_blocks_total * u64::from(self.config.block_tokens));
            let message = format!("the request needs room for {needed} tokens and the pool has shrunk to {limit}");
            self.fail(id, RequestError::Unavailable(message));
        } else {
            self.retry_later(id);
        }
    }

    /// Gives every idle running sequence that has filled its blocks another one.
    pub(crate) fn grow(&mut self) {
        for lane in Lane::ALL {
            let idle: Vec<(SeqId, u32)> = self.sched.idle(lane).collect();
            for (id, tokens) in idle {
                self.free_behind_window(id);
                if self.sched.is_running(id) {
                    self.grow_one(id, tokens);
                }
            }
        }
    }

    fn grow_one(&mut self, id: SeqId, tokens: u32) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let shortfall = seq.blocks.shortfall(tokens);
        let retry = match seq.hold {
            Hold::None => true,
            Hold::RetryAt(at) => at <= self.now_ms,
            Hold::Borrowing(_) => false,
        };
        if shortfall == 0 || !retry {
            return;
        }
        if self.grow_here(id) {
            return;
        }
        if !self.registered {
            self.yield_memory(id);
        } else if let Some(seq) = self.seqs.get_mut(&id) {
            let wanted = if seq.frugal { shortfall } else { shortfall.max(GROWTH_BLOCKS) };
            seq.hold = Hold::Borrowing(self.rm.borrow(id, wanted, self.now_ms));
        }
    }

    /// Gives a sequence the own blocks that it is short of, if there are as many.
    fn grow_here(&mut self, id: SeqId) -> bool {
        let Some(seq) = self.seqs.get_mut(&id) else { return false };
        let blocks = self.rm.allocate(id, seq.blocks.shortfall(seq.len()), seq.blocks.last_local());
        let Some(blocks) = blocks else { return false };
        seq.blocks.push_local(&blocks);
        seq.hold = Hold::None;
        true
    }

    /// A running sequence cannot grow and nobody lends: the youngest idle sequence that holds memory here gives it up,
    /// and what it gave goes first to the one that grows.
    fn yield_memory(&mut self, id: SeqId) {
        let victim = self.sched.victim(|seq| self.seqs.get(&seq).is_some_and(|s| s.blocks.local_blocks() > 0));
        let victim = victim.unwrap_or(id);
        self.preempt(victim);
        self.preemptions += 1;
        self.retry_later(victim);
        if victim == id {
            return;
        }
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.hold = Hold::None;
        }
        self.grow_here(id);
    }

    /// Takes a sequence that is in no step out of the batch; it will be computed again.
    fn preempt(&mut self, id: SeqId) {
        self.release_memory(id);
        self.sched.preempt(id, self.now_ms);
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.admit_by_ms = self.now_ms + ADMISSION_DEADLINE_MS;
        }
    }

    /// Gives back everything that a sequence holds or negotiates for.
    pub(crate) fn release_memory(&mut self, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        if let Hold::Borrowing(borrow) = seq.hold {
            self.rm.cancel(borrow, self.now_ms);
        }
        seq.hold = Hold::None;
        let aside = std::mem::take(&mut seq.aside);
        self.rm.free(id, &aside);
        let freed = seq.blocks.clear();
        seq.leases.clear();
        self.give_back(id, &freed);
    }

    fn give_back(&mut self, id: SeqId, freed: &Freed) {
        self.rm.free(id, &freed.local);
        for entries in &freed.remote {
            self.rm.release(entries, self.now_ms);
        }
    }

    fn free_behind_window(&mut self, id: SeqId) {
        let (Some(window), Some(seq)) = (self.config.window, self.seqs.get_mut(&id)) else { return };
        let freed = seq.blocks.free_behind_window(seq.blocks.written(), window);
        for entries in &freed.remote {
            let key = (entries.creditor, entries.lease);
            let Some(held) = seq.leases.get_mut(&key) else { continue };
            held.blocks -= entries.entries - entries.first;
            if held.blocks == 0 {
                seq.leases.remove(&key);
            }
        }
        if !freed.is_empty() {
            self.give_back(id, &freed);
            let lane = self.lane_of(id);
            self.sched.set_lane(id, lane);
        }
    }

    /// A creditor is gone: every sequence with blocks there has lost them.
    pub(crate) fn lose_creditor(&mut self, creditor: InstanceId, why: &str) {
        let holds = |s: &Sequence| s.leases.keys().any(|(c, _)| *c == creditor);
        let lost: Vec<SeqId> = self.seqs.values().filter(|s| holds(s)).map(|s| s.id).collect();
        for seq in lost {
            self.lose(seq, creditor, why);
        }
    }

    /// A sequence has lost KV at a creditor. Its step, if it is in one, is aborted first: the other sequences of that
    /// step are planned again as they were.
    pub(crate) fn lose(&mut self, id: SeqId, creditor: InstanceId, why: &str) {
        if self.sched.in_step(id) {
            self.abort_lane_of(id);
        }
        if self.seqs.contains_key(&id) {
            self.recover(id, &format!("{why} ({creditor})"));
        }
    }

    /// Computes a sequence that is in no step again from its tokens, a bounded number of times.
    pub(crate) fn recover(&mut self, id: SeqId, why: &str) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        seq.recoveries += 1;
        self.recoveries += 1;
        if seq.cancelled {
            self.remove(id);
        } else if seq.recoveries > RECOVERIES_MAX {
            let message = format!("{why}; given up after computing the sequence again {RECOVERIES_MAX} times");
            self.fail(id, RequestError::Unavailable(message));
        } else if self.sched.is_running(id) {
            self.preempt(id);
        } else {
            self.release_memory(id);
        }
    }
}
