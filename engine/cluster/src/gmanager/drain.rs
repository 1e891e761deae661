//! Draining an instance: it gets no new requests and lends no more, what it lent moves away, and its own requests
//! finish.

use super::GManager;
use super::member::{Life, Member};
use super::orders::Move;
use lagoon_protocol::{ControlBody, DrainOrder, MoveReason};
use lagoon_types::{InstanceId, limits};
use std::cmp::Reverse;

/// A drain that was ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Drain {
    /// The process stops when nothing is left.
    pub(super) stop: bool,
}

impl Member {
    /// Whether its own word agrees with what was ordered.
    fn drains_as_ordered(&self) -> bool {
        self.heartbeat.as_ref().is_some_and(|h| h.draining == self.drain.is_some())
    }
}

impl GManager {
    /// Starts or ends a drain.
    pub(super) fn set_drain(&mut self, id: InstanceId, drain: Option<Drain>) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.drain = drain;
        let draining = member.is_draining();
        if let Some(view) = self.instance_view(id) {
            view.draining = draining;
        }
        self.settle(id);
        let stop = drain.is_some_and(|d| d.stop);
        self.send(id, ControlBody::DrainOrder(DrainOrder { on: drain.is_some(), stop }));
        self.drain_at_ms = self.now_ms;
    }

    /// Repeats what an instance has not taken up, and moves away what others have on drained ones.
    pub(super) fn drain_members(&mut self) {
        if self.now_ms < self.drain_at_ms {
            return;
        }
        self.drain_at_ms = self.now_ms + limits::DRAIN_MS;
        let drained = self.members.iter().filter(|(_, m)| m.drain.is_some() && m.life == Life::Live);
        let drained: Vec<(InstanceId, bool, Drain)> =
            drained.filter_map(|(id, m)| Some((*id, m.drains_as_ordered(), m.drain?))).collect();
        for (id, told, Drain { stop }) in drained {
            if !told {
                self.send(id, ControlBody::DrainOrder(DrainOrder { on: true, stop }));
            }
            for order in self.moves_away(id) {
                self.give(order);
            }
        }
    }

    /// Moves of what others' requests have on an instance: home if there is room, elsewhere otherwise.
    fn moves_away(&self, id: InstanceId) -> Vec<Move> {
        let Some(member) = self.members.get(&id) else { return Vec::new() };
        let mut moves = Vec::new();
        let mut room = self.room();
        for ((debtor, seq), row) in &member.rows {
            if *debtor == id || row.sealed == 0 || self.orders.rests(*debtor, *seq) {
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
                moves.push(Move { debtor: *debtor, seq: *seq, blocks, source, target, reason });
            }
        }
        moves
    }

    /// Blocks that an instance could take, the instance, and whether others' may go there. For its own it may use all
    /// that is free.
    fn room(&self) -> Vec<(u32, InstanceId, bool)> {
        let live = self.pool.instances.iter().filter(|(_, v)| !v.draining && !v.frozen);
        let room = live.map(|(id, v)| {
            let lends = v.blocks_lendable > v.blocks_incoming && !v.paused;
            let blocks = if lends { v.blocks_lendable.max(v.blocks_free) } else { v.blocks_free };
            (blocks.saturating_sub(v.blocks_incoming), *id, lends)
        });
        room.collect()
    }
}
