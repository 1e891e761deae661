//! Operators' requests: drains, roles, empty caches, moves, the placement map, the planner's next orders.

use super::GManager;
use super::member::Drain;
use super::orders::Move;
use lagoon_protocol::{
    AdminBody, AdminDrain, AdminMove, AdminOrder, AdminPlacements, AdminQuery, AdminReply, MoveReason, OrderOutcome,
    PlacementRow, PlannedMove,
};
use lagoon_types::{InstanceId, SeqId, limits};

/// Refusal of a query, with a hint.
pub(super) struct Refused {
    error: String,
    hint: &'static str,
}

pub(super) fn refused<T>(error: impl Into<String>, hint: &'static str) -> Result<T, Refused> {
    Err(Refused { error: error.into(), hint })
}

pub(super) const SEE_STATUS: &str = "`lagoon status` lists the pool's instances";
const SEE_REQUESTS: &str = "`lagoon kv ls` shows requests with their blocks";

impl GManager {
    /// Handles an operator's request.
    pub fn on_admin(&mut self, m: &AdminQuery, now_ms: u64) -> AdminReply {
        self.on_time(now_ms);
        self.notice_silence();
        let mut reply = AdminReply { query: m.query, ..AdminReply::default() };
        let done = match &m.body {
            None => refused("this gManager does not know the question", "use a client of the same version"),
            Some(AdminBody::Drain(drain)) => self.admin_drain(drain),
            Some(AdminBody::Move(order)) => self.admin_move(order).map(|planned| reply.moves.push(planned)),
            Some(AdminBody::Placements(which)) => {
                (reply.placements, reply.more) = self.page(which, limits::ADMIN_ROWS_MAX);
                Ok(())
            }
            Some(AdminBody::Order(m)) => self.admin_order(m).map(|outcome| reply.outcome = Some(outcome)),
            Some(AdminBody::Role(m)) => self.admin_role(m),
            Some(AdminBody::CacheDrop(m)) => self.admin_cache_drop(m).map(|dropped| reply.dropped = Some(dropped)),
            Some(AdminBody::Plan(_)) => self.admin_plan().map(|moves| reply.moves = moves),
        };
        if let Err(Refused { error, hint }) = done {
            (reply.error, reply.hint) = (error, hint.to_owned());
        }
        reply
    }

    /// At most `rows_max` rows, and whether there are more.
    pub(super) fn page(&self, which: &AdminPlacements, rows_max: usize) -> (Vec<PlacementRow>, bool) {
        let mut rows = self.placements_of(*which);
        let page = rows.by_ref().take(rows_max).collect();
        (page, rows.next().is_some())
    }

    fn admin_order(&self, m: &AdminOrder) -> Result<OrderOutcome, Refused> {
        match self.orders.outcome(m.order) {
            Some(outcome) => Ok(outcome),
            None => refused(
                format!("no operator's order has the number {}", m.order),
                "a gManager remembers the last orders of its own term",
            ),
        }
    }

    fn admin_drain(&mut self, m: &AdminDrain) -> Result<(), Refused> {
        let id = InstanceId(m.instance);
        let Some(member) = self.members.get(&id) else {
            return refused(format!("there is no instance {}", m.instance), SEE_STATUS);
        };
        // Another gManager may have ordered it.
        if m.cancel && !member.is_draining() {
            return refused(format!("instance {} is not being drained", m.instance), SEE_STATUS);
        }
        if !member.is_live(self.now_ms) {
            return refused(format!("instance {} is not alive", m.instance), SEE_STATUS);
        }
        let others = self.members.iter().any(|(o, i)| *o != id && i.is_live(self.now_ms) && !i.is_draining());
        if !m.cancel && !others {
            return refused(
                format!("instance {} is the last one that serves", m.instance),
                "start another instance before this one is drained",
            );
        }
        self.set_drain(id, Drain { on: !m.cancel, stop: m.stop });
        Ok(())
    }

    fn admin_move(&mut self, m: &AdminMove) -> Result<PlannedMove, Refused> {
        let (debtor, seq) = (InstanceId(m.debtor), SeqId(m.seq));
        let rows = self.rows_of(debtor, seq);
        if rows.is_empty() {
            return refused(format!("instance {} has no request {}", m.debtor, m.seq), SEE_REQUESTS);
        }
        let target = if m.target == 0 { debtor } else { InstanceId(m.target) };
        let source = match m.source {
            0 => rows.iter().filter(|(h, _)| *h != target).max_by_key(|(_, b)| b.sealed).map(|r| r.0),
            source => Some(InstanceId(source)),
        };
        let Some(source) = source else {
            return refused(format!("all blocks of the request lie on instance {} already", target.0), SEE_REQUESTS);
        };
        let there = rows.iter().find(|(h, _)| *h == source).map_or(0, |(_, b)| b.sealed);
        let blocks = if m.blocks == 0 { there } else { m.blocks };
        if blocks > there {
            return refused(
                format!("instance {} has {there} blocks of the request that can move, not {blocks}", source.0),
                "only blocks that are full in every layer can move; leave the number out to move all of them",
            );
        }
        let order = Move { debtor, seq, blocks, first: m.first, source, target, reason: MoveReason::Operator };
        if let Err(error) = self.check_move(&order) {
            return refused(error, "try again when that is over, or choose another target");
        }
        let number = if m.dry_run { 0 } else { self.give(order).unwrap_or(0) };
        Ok(PlannedMove {
            order: number,
            debtor: debtor.0,
            seq: seq.0,
            blocks,
            source: source.0,
            target: target.0,
            gain_tokens_per_s: 0.0,
        })
    }

    fn admin_plan(&mut self) -> Result<Vec<PlannedMove>, Refused> {
        let Some(plan) = self.plan() else {
            return refused("the planner is off", "start the gManager with its planner on");
        };
        let planned = plan.orders.iter().take(limits::ADMIN_ROWS_MAX).map(|o| PlannedMove {
            order: 0,
            debtor: o.debtor.0,
            seq: o.seq.0,
            blocks: o.blocks,
            source: o.source.0,
            target: o.target.0,
            gain_tokens_per_s: o.gain_tokens_per_s,
        });
        Ok(planned.collect())
    }
}
