//! Drains. This module alone empties draining instances (the planner does not use them): the instance gets no new
//! requests and lends nothing; its lent blocks move away; KV that its own requests borrowed comes home as far as there is
//! room beyond their growth and the queue; they finish there.
//!
//! A drain order, on or off, is repeated until the instance's heartbeat agrees. An instance whose heartbeat says that it
//! drains by another gManager's order is emptied as well.

use super::GManager;
use super::member::{Drain, Life, Member};
use super::orders::Move;
use lagoon_protocol::{ControlBody, DrainOrder, MoveReason};
use lagoon_types::{InstanceId, limits};
use std::cmp::Reverse;

impl Member {
    /// The drain order to repeat.
    fn drain_unacknowledged(&self) -> Option<Drain> {
        let reported = self.heartbeat.as_ref().is_some_and(|h| h.draining);
        self.drain.filter(|drain| drain.on != reported)
    }
}

impl GManager {
    /// Starts or ends a drain.
    pub(super) fn set_drain(&mut self, id: InstanceId, drain: Drain) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.drain = Some(drain);
        let draining = member.is_draining();
        if let Some(view) = self.instance_view(id) {
            view.draining = draining;
        }
        self.settle(id);
        self.send_drain(id, drain);
        self.drain_at_ms = self.now_ms;
    }

    fn send_drain(&mut self, id: InstanceId, Drain { on, stop }: Drain) {
        self.send(id, ControlBody::DrainOrder(DrainOrder { on, stop: on && stop }));
    }

    /// Repeats unacknowledged drain orders, and moves blocks from and to draining instances.
    pub(super) fn drain_members(&mut self) {
        if self.now_ms < self.drain_at_ms {
            return;
        }
        self.drain_at_ms = self.now_ms + limits::DRAIN_MS;
        let drained = self.members.iter().filter(|(_, m)| m.is_draining() && m.life == Life::Live);
        let drained: Vec<(InstanceId, Option<Drain>, bool)> =
            drained.map(|(id, m)| (*id, m.drain_unacknowledged(), m.drain.is_none_or(|d| d.on))).collect();
        for (id, unacknowledged, leaves) in drained {
            if let Some(drain) = unacknowledged {
                self.send_drain(id, drain);
            }
            if leaves {
                let orders = [self.moves_away(id), self.moves_home(id)].concat();
                orders.into_iter().for_each(|order| _ = self.give(order));
            }
        }
    }

    /// Moves of debtors' blocks away from an instance: home if there is room, else to another creditor.
    fn moves_away(&self, id: InstanceId) -> Vec<Move> {
        let Some(member) = self.members.get(&id) else { return Vec::new() };
        let mut moves = Vec::new();
        let mut room = self.room();
        for ((debtor, seq), row) in &member.rows {
            if *debtor == id || row.sealed == 0 || self.orders.bars(*debtor, *seq, MoveReason::Drain) {
                continue;
            }
            let home = room.iter().position(|r| r.1 == *debtor && r.0 >= row.sealed);
            let away =
                || room.iter().enumerate().filter(|(_, r)| r.1 != id && r.2).max_by_key(|(_, r)| (r.0, Reverse(r.1)));
            let Some(at) = home.or_else(|| away().map(|(at, _)| at)) else { continue };
            let blocks = row.sealed.min(room[at].0);
            if blocks > 0 {
                room[at].0 -= blocks;
                let (source, target, reason) = (id, room[at].1, MoveReason::Drain);
                moves.push(Move { debtor: *debtor, seq: *seq, blocks, first: None, source, target, reason });
            }
        }
        moves
    }

    /// Moves of an instance's remote blocks home, the smallest parts first: they are home soonest.
    fn moves_home(&self, id: InstanceId) -> Vec<Move> {
        let Some(view) = self.pool.instances.get(&id).filter(|v| !v.frozen && !v.paused) else { return Vec::new() };
        let queue = view.load.queue_blocks.iter().copied().fold(0, u32::saturating_add);
        let growth = view.load.batch.saturating_mul(2 * limits::GROWTH_BLOCKS);
        let wanted = [view.blocks_incoming, queue, growth].into_iter().fold(0, u32::saturating_add);
        let mut room = view.blocks_free.saturating_sub(wanted);
        let movable = view.requests.iter().filter(|(seq, _)| !self.orders.bars(id, **seq, MoveReason::Drain));
        let parts = movable.flat_map(|(seq, r)| r.remote.iter().map(move |part| (part.sealed, *seq, part.creditor)));
        let mut parts: Vec<_> = parts.filter(|part| part.0 > 0).collect();
        parts.sort_unstable();
        let mut moves: Vec<Move> = Vec::new();
        for (sealed, seq, source) in parts {
            let blocks = sealed.min(room);
            // A request has one order at a time.
            if blocks > 0 && moves.iter().all(|m| m.seq != seq) {
                room -= blocks;
                moves.push(Move {
                    debtor: id,
                    seq,
                    blocks,
                    first: None,
                    source,
                    target: id,
                    reason: MoveReason::Drain,
                });
            }
        }
        moves
    }

    /// Room of each instance: blocks, instance, and whether it takes blocks of other debtors. For its own requests it may use
    /// all free blocks, also while it drains.
    fn room(&self) -> Vec<(u32, InstanceId, bool)> {
        let live = self.pool.instances.iter().filter(|(_, v)| !v.frozen);
        let room = live.map(|(id, v)| {
            let lends = !v.draining && !v.paused && v.blocks_lendable > v.blocks_incoming;
            let blocks = if lends { v.blocks_lendable.max(v.blocks_free) } else { v.blocks_free };
            (blocks.saturating_sub(v.blocks_incoming), *id, lends)
        });
        room.collect()
    }
}
