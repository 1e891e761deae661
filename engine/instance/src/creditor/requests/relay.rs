//! Relays: a debtor asks the creditors of one other host through one of them (docs/adr/0039).
//!
//! The **relay** passes each layer's queries on to the **members**, waits for their partials, has the device merge them with
//! its own one in the order of its ticket, and answers for all. Every member has a ticket of the debtor's own session, which
//! names the relay: nobody else's queries are served under it. Whatever goes wrong between relay and members is refused as
//! `NotRelayed`: the debtor then asks all of them directly, and loses no KV for it.

use super::{Creditor, Outstanding, Refusal, Requests, Waiting, refuse, refuse_step};
use crate::cx::Cx;
use crate::cx::tags::TagOwner;
use crate::event::{Effect, PeerKey};
use bytes::Bytes;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_protocol::{PartialsFrame, RefuseCode, Route};
use lagoon_runner::{Command, RemoteMerge, RemotePart};
use lagoon_types::limits::{RELAY_EARLY_MAX, SEQUENCE_TOKENS_MAX};
use lagoon_types::{DType, InstanceId, StepId};
use std::collections::BTreeSet;

/// A layer of a debtor's step whose partials come from several creditors.
#[derive(Debug)]
pub(super) struct Merging {
    opened: u64,
    layer: u32,
    rows: u32,
    dtype: DType,
    members: Vec<InstanceId>,
    /// This instance's partial, then the members' in their order.
    parts: Vec<Option<RemotePart>>,
    deadline_ms: u64,
    /// Bytes of all partials.
    pub(super) bytes: usize,
}

/// A query that a relay passed on.
#[derive(Debug)]
pub(super) struct RelayedQuery {
    pub(super) debtor: InstanceId,
    pub(super) step: StepId,
    pub(super) layer: u32,
    pub(super) rows: u32,
    pub(super) queries: Bytes,
}

/// The device's partial of a query whose ticket was the `opened`-th.
#[derive(Debug)]
pub(super) struct OwnPart {
    pub(super) opened: u64,
    pub(super) out: Bytes,
    pub(super) lse: Bytes,
    pub(super) count: Bytes,
}

/// Checks that a debtor's route is possible here: the other creditors are connected.
pub(super) fn check_route(cx: &Cx, debtor: InstanceId, route: &Route) -> Result<(), Refusal> {
    let others = match route {
        Route::Direct => return Ok(()),
        Route::Through(relay) => std::slice::from_ref(relay),
        Route::Relay(members) => members,
    };
    let distinct: BTreeSet<InstanceId> = others.iter().copied().chain(cx.standing.id).chain([debtor]).collect();
    if distinct.len() < others.len() + 1 + usize::from(cx.standing.id.is_some()) {
        return refuse(RefuseCode::Malformed, "a route names an instance twice");
    }
    match others.iter().find(|other| cx.peers.key(**other).is_none()) {
        None => Ok(()),
        Some(other) => refuse(RefuseCode::NotRelayed, format!("{other} is not connected")),
    }
}

impl Requests {
    /// Whether a relayed query of a step without a ticket may wait for it: only one of a debtor that is connected, of a step that is not over,
    /// and few of each debtor, as nobody vouches for them.
    fn takes_early(&self, cx: &Cx, debtor: InstanceId, step: StepId) -> bool {
        let early = self.waiting.iter();
        let early = early.filter(|(_, _, _, w)| matches!(w, Waiting::Early { debtor: of, .. } if *of == debtor));
        cx.peers.key(debtor).is_some()
            && self.last.get(&debtor).is_none_or(|last| step > *last)
            && early.count() < RELAY_EARLY_MAX
    }

    /// Notes the ticket or the end of a debtor's step, and takes the queries that have overtaken it. Those of earlier steps are dropped.
    pub(super) fn take_early(
        &mut self,
        debtor: InstanceId,
        step: StepId,
    ) -> Vec<((PeerKey, InstanceId), RelayedQuery)> {
        let last = self.last.entry(debtor).or_insert(step);
        *last = step.max(*last);
        let due =
            |w: &Waiting| matches!(w, Waiting::Early { debtor: of, step: at, .. } if *of == debtor && *at <= step);
        let early = self.waiting.extract_if(.., |(_, _, _, waiting)| due(waiting));
        let query = |(peer, from, _, waiting)| match waiting {
            Waiting::Early { debtor, step: of, layer, rows, queries } if of == step => {
                Some(((peer, from), RelayedQuery { debtor, step, layer, rows, queries }))
            }
            _ => None,
        };
        early.filter_map(query).collect()
    }
}

impl Creditor {
    /// Layers merged as a relay.
    pub(crate) fn merged_layers(&self) -> u64 {
        self.requests.merged
    }

    /// Passes a debtor's query on to the members, and begins to wait for their partials.
    pub(super) fn pass_on(
        &mut self,
        cx: &mut Cx,
        (debtor, step): (InstanceId, StepId),
        (layer, deadline_ms): (u32, u64),
        members: Vec<InstanceId>,
        queries: &Bytes,
    ) -> Result<(), Refusal> {
        let Some(ticket) = self.requests.tickets.get(&(debtor, step)) else { return Ok(()) };
        if self.requests.merging.contains_key(&(debtor, step)) {
            return refuse(RefuseCode::Malformed, "the layer before is not answered yet");
        }
        let (opened, rows, dtype) = (ticket.opened, ticket.rows, ticket.dtype);
        let (out, lse, count) = part_sizes(cx, rows, dtype);
        let bytes = (out + lse + count) * (1 + members.len());
        self.requests.admit(debtor, bytes).map_err(|(_, why)| (RefuseCode::NotRelayed, why))?;
        for member in &members {
            let Some(peer) = cx.peers.key(*member) else {
                return refuse(RefuseCode::NotRelayed, format!("{member} is not connected"));
            };
            let frame = PartialsFrame::RelayedQuery { debtor, step, layer, rows, queries: queries.clone() };
            cx.effects.push(Effect::Partials { peer, frame });
        }
        let parts = vec![None; 1 + members.len()];
        let merging = Merging { opened, layer, rows, dtype, members, parts, deadline_ms, bytes };
        self.requests.merging.insert((debtor, step), merging);
        Ok(())
    }

    /// A query from a relay. It waits for its ticket if it has overtaken that; one of a step that is over is dropped.
    pub(super) fn on_relayed_query(&mut self, cx: &mut Cx, (peer, from): (PeerKey, InstanceId), query: RelayedQuery) {
        let RelayedQuery { debtor, step, layer, rows, queries } = query;
        let (deadline_ms, waiting) = match self.requests.tickets.get(&(debtor, step)) {
            Some(ticket) if ticket.route == Route::Through(from) => {
                let bytes = ticket.rows as usize * cx.config.geometry.q_dim() * ticket.dtype.size();
                if rows != ticket.rows || queries.len() != bytes || layer >= cx.config.kv.layers {
                    let why = format!("{from} passed on {rows} rows, layer {layer}, which do not fit the ticket");
                    return self.not_relayed(cx, (debtor, step), why);
                }
                let (opened, deadline_ms) = (ticket.opened, u64::from(ticket.deadline_ms));
                (deadline_ms, Waiting::Query { debtor, step, opened, layer, queries })
            }
            // Another relay's.
            Some(_) => return,
            None if !self.requests.takes_early(cx, debtor, step) => return,
            None => (cx.step_deadline_ms, Waiting::Early { debtor, step, layer, rows, queries }),
        };
        let bytes = match &waiting {
            Waiting::Query { queries, .. } | Waiting::Early { queries, .. } => queries.len(),
            Waiting::Read { .. } => 0,
        };
        let admitted = self.requests.admit_frame(debtor).and_then(|()| self.requests.admit(debtor, bytes));
        match admitted {
            Ok(()) => {}
            // Nobody vouches for a query without a ticket: it is dropped, and the debtor hears nothing of it.
            Err(_) if matches!(waiting, Waiting::Early { .. }) => return,
            Err((_, why)) => return self.not_relayed(cx, (debtor, step), why),
        }
        self.requests.waiting.push((peer, from, cx.now_ms + deadline_ms, waiting));
        self.serve_waiting(cx);
    }

    /// A member's partial of a layer.
    pub(super) fn on_relayed_partial(&mut self, cx: &mut Cx, key: (InstanceId, StepId), layer: u32, part: RemotePart) {
        // The step may have been cancelled, or refused by another member.
        let Some(merging) = self.requests.merging.get(&key).filter(|merging| merging.layer == layer) else { return };
        let Some(at) = merging.members.iter().position(|member| *member == part.creditor) else { return };
        let is_too_large = |n: &[u8]| u32::from_le_bytes([n[0], n[1], n[2], n[3]]) > SEQUENCE_TOKENS_MAX;
        let sizes = (part.out.len(), part.lse.len(), part.count.len());
        let fits = sizes == part_sizes(cx, merging.rows, merging.dtype);
        if !fits || part.count.chunks_exact(4).any(is_too_large) {
            let why = format!("partials from {} do not fit layer {layer}", part.creditor);
            return self.not_relayed(cx, key, why);
        }
        self.take_part(cx, key, 1 + at, part);
    }

    /// The device's own partial of a layer.
    pub(super) fn on_own_part(&mut self, cx: &mut Cx, key: (InstanceId, StepId), layer: u32, own: OwnPart) {
        let OwnPart { opened, out, lse, count } = own;
        let merging = self.requests.merging.get(&key);
        if merging.is_some_and(|merging| (merging.opened, merging.layer) == (opened, layer)) {
            let creditor = cx.standing.id.unwrap_or(InstanceId(0));
            self.take_part(cx, key, 0, RemotePart { creditor, out, lse, count });
        }
    }

    /// Keeps a partial; has the device merge them when all are there.
    fn take_part(&mut self, cx: &mut Cx, key: (InstanceId, StepId), at: usize, part: RemotePart) {
        let Some(merging) = self.requests.merging.get_mut(&key) else { return };
        // One answer each.
        merging.parts[at].get_or_insert(part);
        if merging.parts.iter().any(Option::is_none) {
            return;
        }
        let (Some(peer), Some(merging)) = (cx.peers.key(key.0), self.requests.merging.remove(&key)) else { return };
        let Merging { layer, rows, dtype, parts, bytes, .. } = merging;
        let mut parts: Vec<RemotePart> = parts.into_iter().flatten().collect();
        if mutants::is(Mutant::MemberMergedTwice) {
            parts.push(parts[1].clone());
        }
        let tag = cx.tags.take(TagOwner::Request);
        let what = Outstanding::Merge { peer, from: key.0, bytes, step: key.1, layer, rows };
        self.requests.outstanding.insert(tag, what);
        self.requests.merged += 1;
        cx.effects.push(Effect::Runner(Command::RemoteMerge(RemoteMerge { tag, dtype, rows, parts })));
    }

    /// Ends a debtor's step here: its queries or partials cannot come through its relay.
    fn not_relayed(&mut self, cx: &mut Cx, (debtor, step): (InstanceId, StepId), why: String) {
        self.requests.forget_step(debtor, step);
        refuse_step(cx, debtor, step, RefuseCode::NotRelayed, why);
    }

    /// The connection to an instance was lost, or a frame to it: steps with it on their route end here.
    pub(in crate::creditor) fn end_routes(&mut self, cx: &mut Cx, instance: InstanceId) {
        let routed = self.requests.tickets.iter().filter(|(_, ticket)| match &ticket.route {
            Route::Direct => false,
            Route::Through(relay) => *relay == instance,
            Route::Relay(members) => members.contains(&instance),
        });
        let merging = self.requests.merging.iter().filter(|(_, merging)| merging.members.contains(&instance));
        let steps: BTreeSet<_> = routed.map(|(key, _)| *key).chain(merging.map(|(key, _)| *key)).collect();
        steps.into_iter().for_each(|key| self.not_relayed(cx, key, format!("{instance} cannot be reached")));
    }

    /// Ends steps whose members have not all answered in time.
    pub(super) fn expire_merging(&mut self, cx: &mut Cx) {
        let late = self.requests.merging.iter().filter(|(_, merging)| merging.deadline_ms <= cx.now_ms);
        let late: Vec<_> = late.map(|(key, _)| *key).collect();
        late.into_iter().for_each(|key| self.not_relayed(cx, key, "members did not answer in time".to_owned()));
    }
}

/// Bytes of outputs, log-sum-exps and counts of a partial.
fn part_sizes(cx: &Cx, rows: u32, dtype: DType) -> (usize, usize, usize) {
    let (rows, geometry) = (rows as usize, &cx.config.geometry);
    (rows * geometry.q_dim() * dtype.size(), rows * geometry.heads as usize * 4, rows * 4)
}
