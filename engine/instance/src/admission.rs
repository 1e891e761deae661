//! Memory for sequences: all-or-nothing admission, growth, borrowing and preemption.
//!
//! A prompt is planned whole: its oldest rBlocks go to creditors, its newest stay here, so that decoding grows in local
//! memory. What cannot be placed waits, holding nothing. When a growing sequence finds no memory it borrows; when
//! nobody lends, the youngest sequence yields (it is computed again later): the oldest always advances.

use crate::instance::Instance;
use crate::sequence::{HeldLease, Hold, Sequence};
use lagoon_cluster::{BorrowFailure, BorrowedLease, Output};
use lagoon_kv::{Freed, LeaseHasher, RemoteEntries, RemoteGrant};
use lagoon_protocol::TierWish;
use lagoon_types::limits::{
    ADMISSION_DEADLINE_MS, ADMISSION_RETRY_MAX_MS, ADMISSION_RETRY_MS, GMANAGER_WAIT_MS, GROWTH_BLOCKS,
};
use lagoon_types::{Lane, PhysBlock, RequestError, SeqId};

/// A sequence that the whole pool cannot hold is given up after so many misses (some ten seconds).
const OUTGROWN_MISSES: u32 = 10;
/// At most one of so many of this instance's blocks is kept for growth.
const GROWTH_RESERVE_SHARE: u32 = 16;
/// A sequence that is computed again in less time yields at once to one that cannot grow.
const RATHER_WAIT_US: f64 = 500_000.0;

/// Whether memory can be borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Market {
    /// The gManager is there.
    Open,
    /// It was there, and is waited for.
    Away,
    /// There is none, or it did not come back in time.
    Closed,
}

impl Instance {
    /// Hands the rManager's outputs on.
    pub(crate) fn drain_rmanager(&mut self) {
        while let Some(output) = self.rm.poll() {
            match output {
                Output::ToGManager(body) => self.effects.push(crate::Effect::ToGManager(body)),
                Output::ToPeer { instance, quic_addr, body } => self.send_control(instance, &quic_addr, body),
                Output::Borrowed { borrow: _, seq, leases } => self.on_borrowed(seq, &leases),
                Output::BorrowFailed { borrow: _, seq, reason } => self.on_borrow_failed(seq, &reason),
                Output::LeaseLost { seq, creditor, lease } if self.lose_handed(seq, creditor, lease) => {}
                Output::EntriesLost { seq, creditor, lease, .. } if self.lose_handed(seq, creditor, lease) => {}
                Output::LeaseLost { seq, creditor, lease } => {
                    self.end_move_to(creditor, lease, "the target's lease was lost", false);
                    self.lose(seq, creditor, Some(lease), "a creditor no longer has the sequence's blocks");
                }
                Output::EntriesLost { seq, creditor, lease, entries } => {
                    self.end_move_to(creditor, lease, "the target took its blocks back", false);
                    self.lose_entries(seq, creditor, lease, &entries);
                }
                Output::Reserved { borrow, seq: _, lease } => self.on_reserved(borrow, &lease),
                Output::NotReserved { borrow, seq: _, blocks_lendable } => {
                    self.on_not_reserved(borrow, blocks_lendable)
                }
                Output::Sealed { seq: _, creditor, lease, entries } => self.on_sealed(creditor, lease, &entries),
                Output::ReservationLost { seq: _, creditor, lease } => {
                    self.end_move_to(creditor, lease, "the reservation was not written in time", true);
                }
            }
        }
    }

    /// Admits whatever there is memory for.
    pub(crate) fn admit(&mut self) {
        self.admit_in_turn();
        self.admit_pushed();
    }

    /// A prompt for which its asker keeps memory waits for this instance's memory only: not behind a head that waits for
    /// others' (it may be the asker's), and not for an elder (the asker keeps nothing for what is younger).
    fn admit_pushed(&mut self) {
        let head = self.sched.next_waiting().and_then(|head| self.seqs.get(&head.seq));
        let elsewhere = |s: &Sequence| s.blocks.shortfall(s.len() + 1) > self.config.blocks_total;
        if !head.is_some_and(|head| elsewhere(head) || self.gives_way(head.since_ms)) {
            return;
        }
        let pushed = self.sched.waiting().map(|w| w.seq).filter(|seq| self.prefills.is_pushed(*seq));
        let pushed: Vec<SeqId> = pushed.collect();
        for id in pushed {
            let full = self.sched.running_len() >= self.config.sched.running;
            let room = self.room() + self.shareable(id);
            let fits = |s: &Sequence| s.blocks.shortfall(s.len()) <= room;
            if !full && self.seqs.get(&id).is_some_and(fits) && self.place(id) {
                self.admit_placed();
            }
        }
    }

    /// Admits from the head of the queue for as long as there is memory.
    fn admit_in_turn(&mut self) {
        self.admit_placed();
        while let Some(head) = self.sched.next_waiting() {
            let Some(seq) = self.seqs.get(&head.seq) else { return };
            if self.gives_way(seq.since_ms) {
                return;
            }
            let (hold, needed) = (seq.hold, seq.blocks.shortfall(seq.len() + 1));
            match hold {
                Hold::Borrowing(_) => return,
                Hold::RetryAt(at) if at > self.now_ms && needed > self.room() + self.shareable(head.seq) => return,
                Hold::None | Hold::RetryAt(_) => {}
                Hold::Parking | Hold::Parked => panic!("{} waits and runs", head.seq),
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
        let placed = |s: &SeqId| self.seqs.get(s).is_some_and(|s| s.is_placed() && s.blocks.blocks() > 0);
        let placed: Vec<SeqId> = self.sched.waiting().map(|w| w.seq).filter(placed).collect();
        for seq in placed {
            if self.sched.running_len() >= self.config.sched.running {
                return;
            }
            let lane = self.lane_of(seq);
            let known = self.seqs.get(&seq).map_or(0, |s| s.blocks.written());
            self.sched.admit(seq, lane, known);
            self.note_admitted(seq);
            self.division.changed();
        }
    }

    /// Blocks that are kept for what runs: some for each sequence, as each will need them soon, but not more than a
    /// share. Without them what is admitted makes what runs borrow for every block, wait or yield.
    pub(crate) fn growth_reserve(&self) -> u32 {
        let running = u32::try_from(self.sched.running_len()).unwrap_or(u32::MAX);
        running.saturating_mul(GROWTH_BLOCKS).min(self.config.blocks_total / GROWTH_RESERVE_SHARE)
    }

    /// Blocks for what is to be admitted, or to come home.
    pub(crate) fn room(&self) -> u32 {
        self.rm.available().saturating_sub(self.growth_reserve())
    }

    /// Whether what came at `since_ms` waits until the pool's elder has its memory.
    pub(crate) fn gives_way(&self, since_ms: u64) -> bool {
        let elder = self.membership.elder(self.now_ms);
        elder.is_some_and(|(debtor, since)| Some(debtor) != self.id && since < since_ms)
    }

    /// Since when the head of the queue waits for memory that this instance has by itself, if it does.
    pub(crate) fn waiting_since_ms(&self) -> Option<u64> {
        let head = self.seqs.get(&self.sched.next_waiting()?.seq)?;
        let needed = head.blocks.shortfall(head.len() + 1);
        (needed <= self.config.blocks_total).then_some(head.since_ms)
    }

    /// Finds memory for a whole waiting sequence. True if it has it now; false if it negotiates or must retry.
    fn place(&mut self, id: SeqId) -> bool {
        let Some(seq) = self.seqs.get(&id) else { return false };
        let since_ms = seq.since_ms;
        // One token more than is known: the next one must have a place. What is computed for others ends before it, and
        // lies here as a whole.
        let job = self.prefills.is_job(id);
        let needed = seq.blocks.shortfall(seq.len() + u32::from(!job));
        let end = seq.blocks.blocks() + needed;
        // Under a window a sequence may grow longer than the pool; once it is preempted, no memory is enough for it. It
        // must not hold up what waits behind it for longer than an instance may need to come back.
        let capacity = self.pool_blocks_total.max(u64::from(self.config.blocks_total));
        if u64::from(needed) > capacity && seq.misses >= OUTGROWN_MISSES {
            self.fail_outgrown(id, capacity);
            return false;
        }
        // What others have of it needs no memory, unless its oldest blocks are to be elsewhere.
        let room = self.room();
        let here = needed <= room || needed <= room + self.shareable(id);
        let local = if here { needed } else { needed.min(room) };
        if local < needed && job {
            self.retry_later(id);
            return false;
        }
        let market = self.market();
        if local < needed && market != Market::Open {
            self.wait_for_gmanager(id, market, needed);
            return false;
        }
        let (known, after) = if local == needed { self.adopt_prefix(id) } else { (0, None) };
        // The newest blocks stay here; the table is built oldest first, so they wait aside while it borrows.
        let Some(blocks) = self.rm.allocate(id, end - local + known..end, after) else {
            self.release_memory(id);
            self.retry_later(id);
            return false;
        };
        let borrow = (local < needed).then(|| self.rm.borrow_to_admit(id, needed - local, since_ms, self.now_ms));
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
    pub(crate) fn retry_later(&mut self, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let longest = (ADMISSION_RETRY_MS << seq.misses.min(10)).min(ADMISSION_RETRY_MAX_MS);
        seq.misses += 1;
        let salt = self.config.incarnation ^ id.0.rotate_left(32) ^ u64::from(seq.misses).rotate_left(48);
        let spread = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        seq.hold = Hold::RetryAt(self.now_ms + longest / 2 + spread % (longest / 2 + 1));
    }

    /// A waiting sequence needs others' memory and there is no gManager to ask. What could not run here alone waits for
    /// one until the deadline.
    fn wait_for_gmanager(&mut self, id: SeqId, market: Market, needed: u32) {
        let (alone, total) = (market == Market::Closed && self.id.is_some(), self.config.blocks_total);
        if alone && needed > total {
            let room = u64::from(total) * u64::from(self.config.block_tokens);
            let message = format!(
                "the request needs more than this instance's {room} tokens of memory, and no gManager was there to \
                 borrow through for {} s",
                GMANAGER_WAIT_MS / 1000
            );
            self.fail(id, RequestError::Unavailable(message));
        } else {
            self.retry_later(id);
        }
    }

    /// Whether borrowing is possible now.
    pub(crate) fn market(&mut self) -> Market {
        if self.registered {
            self.away_since_ms = None;
            return Market::Open;
        }
        if self.id.is_none() {
            return Market::Closed;
        }
        let since = *self.away_since_ms.get_or_insert(self.now_ms);
        if self.now_ms < since + GMANAGER_WAIT_MS { Market::Away } else { Market::Closed }
    }

    fn on_borrowed(&mut self, id: SeqId, leases: &[BorrowedLease]) {
        let (block_tokens, kv) = (self.config.block_tokens, self.config.kv);
        self.borrowed_blocks += leases.iter().map(|lease| u64::from(lease.blocks)).sum::<u64>();
        let Some(seq) = self.seqs.get_mut(&id) else {
            for &BorrowedLease { creditor, lease, epoch, blocks, .. } in leases {
                let all = RemoteEntries { creditor, lease, epoch, first: 0, entries: blocks };
                self.rm.release(&all, self.now_ms);
            }
            return;
        };
        let restores = seq.blocks.holes() > 0;
        for lease in leases {
            let &BorrowedLease { creditor, lease, epoch, blocks, .. } = lease;
            let grant = RemoteGrant { creditor, lease, epoch, blocks };
            if restores {
                seq.blocks.fill_remote(&grant)
            } else {
                seq.blocks.push_remote(&grant)
            }
            let hasher = LeaseHasher::new(kv.layers as usize, block_tokens, kv.layer_token_bytes());
            seq.leases.insert((creditor, lease), HeldLease::new(blocks, hasher));
        }
        let aside: Vec<PhysBlock> = std::mem::take(&mut seq.aside);
        if restores {
            seq.blocks.fill_local(&aside)
        } else {
            seq.blocks.push_local(&aside)
        }
        (seq.hold, seq.restore_by_ms) = (Hold::None, None);
        (seq.misses, seq.frugal) = (0, false);
        if self.sched.is_running(id) {
            self.sched.set_lane(id, Lane::Remote);
            self.division.changed();
        } else {
            self.admit_placed();
        }
        // A connection that broke during the negotiation has taken nothing, but nothing would dial it again either.
        if let Some(gone) = leases.iter().find(|l| self.peers.key(l.creditor).is_none()) {
            self.lose(id, gone.creditor, None, "a creditor's connection was lost during a negotiation");
        }
    }

    fn on_borrow_failed(&mut self, id: SeqId, reason: &BorrowFailure) {
        let Some(seq) = self.seqs.get(&id) else { return };
        if seq.blocks.holes() > 0 {
            self.on_restore_failed(id, reason);
            return;
        }
        if self.sched.is_running(id) {
            match self.seqs.get_mut(&id) {
                // More than it needs was asked for: less may do.
                Some(seq) if !seq.frugal => (seq.frugal, seq.hold) = (true, Hold::None),
                // Growth goes before lending: if nobody else lends, what was lent comes back, or is taken.
                Some(seq) if self.rm.recallable() > 0 => {
                    seq.hold = Hold::RetryAt(self.now_ms + ADMISSION_RETRY_MS);
                    let shortfall = seq.blocks.shortfall(seq.len());
                    self.want_back(shortfall, true);
                }
                _ => self.yield_memory(id),
            }
            return;
        }
        self.release_memory(id);
        let Some(seq) = self.seqs.get(&id) else { return };
        if let BorrowFailure::PoolTooSmall { pool_blocks_total } = reason
            && seq.misses >= OUTGROWN_MISSES
        {
            // It fitted when it was accepted: instances have left since, for longer than one needs to come back.
            self.fail_outgrown(id, *pool_blocks_total);
        } else {
            // What is lent stays lent: the planner takes it back where there is another place for it.
            self.retry_later(id);
        }
    }

    /// Ends a request that a pool of `capacity` blocks cannot hold: the pool has shrunk since it was accepted, or the
    /// sequence outgrew it under a window and was preempted.
    fn fail_outgrown(&mut self, id: SeqId, capacity: u64) {
        let Some(seq) = self.seqs.get(&id) else { return };
        let (needed, limit) = (seq.len() + 1, capacity * u64::from(self.config.block_tokens));
        let message = format!("the request needs room for {needed} tokens and the pool now has room for {limit}");
        self.fail(id, RequestError::Unavailable(message));
    }

    /// Gives every idle running sequence that has filled its blocks another one.
    pub(crate) fn grow(&mut self) {
        for lane in Lane::ALL {
            let idle: Vec<(SeqId, u32)> = self.sched.idle(lane).collect();
            for (id, tokens) in idle {
                self.free_behind_window(id);
                self.catch_up(id);
                if self.sched.is_running(id) {
                    self.grow_one(id, tokens);
                }
            }
        }
    }

    fn grow_one(&mut self, id: SeqId, tokens: u32) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        if seq.blocks.holes() > 0 {
            self.restore(id);
            return;
        }
        let shortfall = seq.blocks.shortfall(tokens);
        let retry = match seq.hold {
            Hold::None => true,
            Hold::RetryAt(at) => at <= self.now_ms,
            Hold::Borrowing(_) | Hold::Parking | Hold::Parked => false,
        };
        let negotiates = matches!(seq.hold, Hold::Borrowing(_) | Hold::Parking | Hold::Parked);
        if shortfall == 0 || negotiates || self.grow_here(id) || !retry {
            return;
        }
        if self.end_a_move_home() && self.grow_here(id) {
            return;
        }
        let market = self.market();
        if self.rm.recallable() > 0 {
            // Debtors that have room give it back; it is taken only if nobody else lends.
            self.want_back(shortfall, market != Market::Open);
        }
        match (market, self.seqs.get_mut(&id)) {
            (Market::Open, Some(seq)) => {
                // Host memory is the last resort of a sequence that runs: first a younger one is parked there.
                let (wanted, tier) = if seq.frugal {
                    (shortfall, TierWish::Any)
                } else {
                    (shortfall.max(GROWTH_BLOCKS), TierWish::DeviceOnly)
                };
                if tier == TierWish::Any && self.park_for(id) {
                    return;
                }
                let borrow = self.rm.borrow_in(tier, id, wanted, self.now_ms);
                self.seqs.entry(id).and_modify(|seq| seq.hold = Hold::Borrowing(borrow));
            }
            (Market::Away, Some(_)) => self.retry_later(id),
            (Market::Closed, _) => self.yield_memory(id),
            (_, None) => {}
        }
    }

    /// Gives a sequence the own blocks that it is short of, if there are as many.
    fn grow_here(&mut self, id: SeqId) -> bool {
        let Some(seq) = self.seqs.get_mut(&id) else { return false };
        if seq.blocks.holes() > 0 {
            return self.restore_here(id);
        }
        let (first, short) = (seq.blocks.blocks(), seq.blocks.shortfall(seq.len()));
        let blocks = self.rm.allocate(id, first..first + short, seq.blocks.last_local());
        let Some(blocks) = blocks else { return false };
        seq.blocks.push_local(&blocks);
        seq.hold = Hold::None;
        true
    }

    /// A running sequence cannot grow and nobody lends: another one gives its memory up, and what it gave goes first to
    /// the one that grows.
    pub(crate) fn yield_memory(&mut self, id: SeqId) {
        let victim = self.victim(id);
        if self.waits_rather(id, victim) {
            self.retry_later(id);
            return;
        }
        if self.sched.in_step(victim) {
            self.yielding = Some((victim, id));
            if let Some(seq) = self.seqs.get_mut(&id) {
                seq.hold = Hold::RetryAt(self.now_ms + ADMISSION_RETRY_MS);
            }
            return;
        }
        self.yield_to(victim, id);
    }

    /// Whether `id` waits until another sequence has ended, rather than that `victim` is computed again: that would take
    /// long, and somebody else advances meanwhile. When nobody does, somebody yields.
    fn waits_rather(&self, id: SeqId, victim: SeqId) -> bool {
        let row_us = self.config.calibration.as_ref().map_or(self.prefill_us, |c| c.prefill_us_per_token);
        let again_us = self.seqs.get(&victim).map_or(0.0, |s| f64::from(s.blocks.written())) * row_us;
        let advances = |seq: &SeqId| {
            let has_room = |s: &Sequence| s.is_ready() && s.blocks.shortfall(s.len()) == 0;
            *seq != id && (self.sched.in_step(*seq) || self.seqs.get(seq).is_some_and(has_room))
        };
        again_us > RATHER_WAIT_US && self.sched.running().any(|seq| advances(&seq))
    }

    /// The sequence that yields, so that `id` can grow: the one that is soonest computed again, the youngest of equals;
    /// never the oldest, unless it is alone. So the oldest always advances, and a long one does not start anew for the
    /// sake of a short one.
    fn victim(&self, id: SeqId) -> SeqId {
        let holds = |seq: &SeqId| {
            !self.is_frozen(*seq) && self.seqs.get(seq).is_some_and(|s| s.blocks.local_blocks() > 0 && !s.cancelled)
        };
        let cost = |seq: &SeqId| self.seqs.get(seq).map_or(0, |s| s.blocks.written());
        let younger = self.sched.running().skip(1).filter(holds);
        // The last of several minima, in order of admission.
        younger.collect::<Vec<_>>().into_iter().rev().min_by_key(cost).unwrap_or(id)
    }

    fn yield_to(&mut self, victim: SeqId, id: SeqId) {
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

    /// A sequence that was to yield when its step ends does, if that is still wanted.
    pub(crate) fn end_yielding(&mut self) {
        let Some((victim, id)) = self.yielding.take_if(|(victim, _)| !self.sched.in_step(*victim)) else { return };
        let short = |s: &Sequence| matches!(s.hold, Hold::RetryAt(_));
        let wanted = self.sched.is_running(id) && self.seqs.get(&id).is_some_and(short);
        if wanted && self.sched.is_running(victim) && !self.is_frozen(victim) && !self.grow_here(id) {
            self.yield_to(victim, id);
        }
    }

    /// Takes a sequence that is in no step out of the batch; it will be computed again.
    pub(crate) fn preempt(&mut self, id: SeqId) {
        if self.ends_pushed(id) {
            return;
        }
        if let Some(seq) = self.seqs.get(&id) {
            let lost = seq.blocks.holes() > 0 || !seq.blocks.lost().is_empty();
            let counter = if lost { &mut self.recomputed_tokens } else { &mut self.preempted_tokens };
            *counter += u64::from(seq.blocks.written());
        }
        self.release_memory(id);
        self.sched.preempt(id, self.now_ms);
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.admit_by_ms = self.now_ms + ADMISSION_DEADLINE_MS;
        }
        self.send_preempted_away(id);
    }

    /// Gives back everything that a sequence holds or negotiates for.
    pub(crate) fn release_memory(&mut self, id: SeqId) {
        // What a freeze protects is given up: nothing is left to swap.
        self.unfreeze(id);
        self.end_moves_of(id, "the sequence ended or was preempted");
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        seq.restore_by_ms = None;
        self.stop_waiting(id);
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        let freed = seq.blocks.clear();
        seq.leases.clear();
        (seq.named, seq.sharing) = (0, None);
        if !self.withhold(id, &freed.local) {
            self.give_back(id, &freed);
        }
    }

    /// Ends what a sequence negotiates or waits for.
    pub(crate) fn stop_waiting(&mut self, id: SeqId) {
        let Some(seq) = self.seqs.get_mut(&id) else { return };
        if let Hold::Borrowing(borrow) = seq.hold {
            self.rm.cancel(borrow, self.now_ms);
        }
        seq.hold = Hold::None;
        let aside = std::mem::take(&mut seq.aside);
        self.rm.free(id, &aside);
    }

    fn give_back(&mut self, id: SeqId, freed: &Freed) {
        self.rm.free(id, &freed.local);
        for entries in &freed.remote {
            self.rm.release(entries, self.now_ms);
        }
    }

    fn free_behind_window(&mut self, id: SeqId) {
        if self.is_frozen(id) || self.prefills.is_job(id) {
            return;
        }
        let (Some(window), Some(seq)) = (self.config.window, self.seqs.get_mut(&id)) else { return };
        let freed = seq.blocks.free_behind_window(seq.blocks.next_position(), window);
        for entries in &freed.remote {
            seq.forget_entries(entries);
        }
        if !freed.is_empty() {
            self.end_moves_behind_window(id);
            self.give_back(id, &freed);
            let lane = self.lane_of(id);
            self.sched.set_lane(id, lane);
        }
    }
}
