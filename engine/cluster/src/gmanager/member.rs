//! Members: the gManager's state of each instance, and its life: live, silent, fenced, forgotten.

use super::GManager;
use crate::cached::Cached;
use crate::planner::InstanceView;
use lagoon_protocol::{CacheDrop, Heartbeat, MemoryTier, Register, Role};
use lagoon_types::{InstanceId, SeqId, limits};
use lagoon_view::{Flags, Slot};
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Live,
    /// No heartbeat for `HEARTBEAT_STALE_MS`: neither recommended nor planned with.
    Silent,
    /// Declared dead: its messages are ignored until its process registers with a new incarnation.
    Fenced,
}

/// rBlocks of one request on one instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) blocks: u32,
    pub(super) sealed: u32,
}

/// Last drain order to an instance, valid until the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Drain {
    pub(super) on: bool,
    /// Whether the process stops when no block is left.
    pub(super) stop: bool,
}

/// Unconfirmed role order.
#[derive(Clone, Debug)]
pub(super) struct SentRole {
    pub(super) role: Role,
    pub(super) number: u64,
    /// Roles of earlier unconfirmed orders, which it may have received instead.
    pub(super) earlier: Vec<Role>,
}

#[derive(Debug)]
pub(super) struct Member {
    pub(super) registration: Register,
    pub(super) slot: Slot,
    pub(super) life: Life,
    /// Time of its last heartbeat or registration.
    pub(super) seen_ms: u64,
    /// Time of its next silence check.
    pub(super) check_ms: u64,
    /// Its last heartbeat, without placement rows.
    pub(super) heartbeat: Option<Heartbeat>,
    /// Its reported lendable blocks, corrected by refusals.
    pub(super) lendable: u32,
    /// It refused since its last heartbeat.
    pub(super) paused: bool,
    /// Its part of the pool's totals: its lend limit, and its lendable blocks.
    pub(super) counted: (u32, u32),
    /// Its rows of the request placement map.
    pub(super) rows: BTreeMap<(InstanceId, SeqId), Blocks>,
    /// Whether its full rows have arrived.
    pub(super) rows_complete: bool,
    /// The planning round of its last heartbeat.
    pub(super) round: u64,
    /// Distance classes of its links, as measured by it and by the other end.
    pub(super) near: BTreeMap<InstanceId, [Option<u8>; 2]>,
    pub(super) drain: Option<Drain>,
    /// Its unconfirmed role order.
    pub(super) sent_role: Option<SentRole>,
    /// The planner's view of it while it is silent.
    pub(super) withheld: Option<Box<InstanceView>>,
    /// What its prefix cache has.
    pub(super) cached: Cached,
    /// Its unconfirmed orders to empty it, the oldest first, at most `CACHE_DROPS_MAX`.
    pub(super) cache_drops: VecDeque<CacheDrop>,
}

impl Member {
    pub(super) fn new(registration: Register, slot: Slot, now_ms: u64) -> Self {
        Self {
            registration,
            slot,
            life: Life::Live,
            seen_ms: now_ms,
            check_ms: now_ms + limits::HEARTBEAT_STALE_MS,
            heartbeat: None,
            lendable: 0,
            paused: false,
            counted: (0, 0),
            rows: BTreeMap::new(),
            rows_complete: false,
            round: 0,
            near: BTreeMap::new(),
            drain: None,
            sent_role: None,
            withheld: None,
            cached: Cached::default(),
            cache_drops: VecDeque::new(),
        }
    }

    /// Whether it is live at `now_ms`, even if a silence is not detected yet.
    pub(super) fn is_live(&self, now_ms: u64) -> bool {
        self.life != Life::Fenced && now_ms < self.seen_ms + limits::HEARTBEAT_STALE_MS
    }

    pub(super) fn is_fenced(&self) -> bool {
        self.life == Life::Fenced
    }

    /// Its lend limit, in blocks.
    pub(super) fn cap(&self) -> u32 {
        let total = self.registration.blocks_total;
        self.registration.lend_blocks_max.map_or(total, |cap| cap.min(total))
    }

    pub(super) fn is_draining(&self) -> bool {
        self.drain.is_some_and(|d| d.on) || self.heartbeat.as_ref().is_some_and(|h| h.draining)
    }

    /// Its heartbeat for status: a drain counts from its order.
    pub(super) fn with_drain(&self, mut heartbeat: Heartbeat) -> Heartbeat {
        heartbeat.draining |= self.drain.is_some_and(|d| d.on);
        heartbeat
    }

    /// Its flags as a creditor.
    pub(super) fn flags(&self) -> Flags {
        let frozen = self.heartbeat.as_ref().is_some_and(|h| h.frozen != 0);
        let borrows = self.heartbeat.as_ref().is_some_and(|h| h.blocks_borrowed > 0);
        Flags::default()
            .with(Flags::PAUSED, self.paused)
            .with(Flags::BARRED, self.life != Life::Live || self.is_draining() || frozen)
            .with(Flags::BORROWS, borrows)
            .with(Flags::HOST, self.registration.tier == MemoryTier::Host as i32)
    }
}

impl GManager {
    /// The planner's view of an instance, whether it is live or silent.
    pub(super) fn instance_view(&mut self, id: InstanceId) -> Option<&mut InstanceView> {
        match self.pool.instances.get_mut(&id) {
            Some(view) => Some(view),
            None => self.members.get_mut(&id)?.withheld.as_deref_mut(),
        }
    }

    /// Brings the view of creditors and the totals up to date with a member.
    pub(super) fn settle(&mut self, id: InstanceId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let flags = member.flags();
        let live = member.life == Life::Live;
        let counts = (if live { member.cap() } else { 0 }, if flags.has(Flags::BARRED) { 0 } else { member.lendable });
        let old = std::mem::replace(&mut member.counted, counts);
        self.sorted.settle(member.slot, flags, old, counts);
        self.settle_worker(id);
    }

    /// Records a sign of life: postpones its silence check, and revives it if it was silent.
    pub(super) fn touch(&mut self, id: InstanceId) {
        let now_ms = self.now_ms;
        let Some(member) = self.members.get_mut(&id) else { return };
        member.seen_ms = now_ms;
        let at = now_ms + if member.is_fenced() { limits::INSTANCE_FORGET_MS } else { limits::HEARTBEAT_STALE_MS };
        self.checks.remove(&(member.check_ms, id));
        member.check_ms = at;
        self.checks.insert((at, id));
        if member.life == Life::Silent {
            member.life = Life::Live;
            // The open round does not wait for it: it was silent when that opened.
            member.round = self.rounds.joined();
            (self.live, self.silent) = (self.live + 1, self.silent - 1);
            if let Some(view) = member.withheld.take() {
                self.pool.instances.insert(id, *view);
            }
            self.settle(id);
        }
    }

    /// Detects members that became silent, fences or forgets them after their deadlines. Returns the forgotten ones.
    pub(super) fn lapse(&mut self) -> Vec<InstanceId> {
        let mut forgotten = Vec::new();
        while let Some((at, id)) = self.checks.first().copied().filter(|(at, _)| *at <= self.now_ms) {
            self.checks.remove(&(at, id));
            let Some(member) = self.members.get(&id) else { continue };
            let silent_ms = self.now_ms.saturating_sub(member.seen_ms);
            if silent_ms >= limits::INSTANCE_FORGET_MS {
                forgotten.push(id);
                self.remove_member(id);
                continue;
            }
            if member.life == Life::Live {
                self.silence(id);
            }
            let Some(member) = self.members.get(&id) else { continue };
            let next = if member.is_fenced() {
                member.seen_ms + limits::INSTANCE_FORGET_MS
            } else if silent_ms < limits::FENCE_MS {
                member.seen_ms + limits::FENCE_MS
            } else if self.may_fence() {
                self.fence(id);
                self.now_ms.max(at) + limits::INSTANCE_FORGET_MS - silent_ms
            } else {
                // Checked again soon: heartbeats of others may arrive by then.
                self.now_ms + limits::HEARTBEAT_MS
            };
            if let Some(member) = self.members.get_mut(&id) {
                member.check_ms = next;
                self.checks.insert((next, id));
            }
        }
        forgotten
    }

    /// Detects members that became silent, outside of [`GManager::tick`], without fencing or forgetting any.
    pub(super) fn notice_silence(&mut self) {
        let due = self.checks.range(..=(self.now_ms, InstanceId(u32::MAX)));
        let due: Vec<InstanceId> = due.map(|(_, id)| *id).collect();
        for id in due {
            if self.members.get(&id).is_some_and(|m| m.life == Life::Live) {
                self.silence(id);
            }
        }
    }

    /// Marks a live member as silent.
    fn silence(&mut self, id: InstanceId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.life = Life::Silent;
        (self.live, self.silent) = (self.live - 1, self.silent + 1);
        member.withheld = self.pool.instances.remove(&id).map(Box::new);
        self.oldest_heads.forget(id);
        self.rounds.left(member.round);
        self.settle(id);
    }

    /// Removes a member and all state of it.
    pub(super) fn remove_member(&mut self, id: InstanceId) -> Option<Member> {
        self.drop_rows(id);
        self.drop_links(id);
        let member = self.members.remove(&id)?;
        match member.life {
            Life::Live => {
                self.live -= 1;
                self.rounds.left(member.round);
            }
            Life::Silent => self.silent -= 1,
            Life::Fenced => {}
        }
        self.checks.remove(&(member.check_ms, id));
        self.by_incarnation.remove(&member.registration.incarnation);
        if self.by_addr.get(&member.registration.quic_addr) == Some(&id) {
            self.by_addr.remove(&member.registration.quic_addr);
        }
        self.sorted.remove(member.slot, id.0, member.counted);
        self.pool.instances.remove(&id);
        self.oldest_heads.forget(id);
        self.drop_orders_of(id);
        self.workers.remove(id);
        Some(member)
    }
}
