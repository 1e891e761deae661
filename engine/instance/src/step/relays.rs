//! Queries that cross to another host once: a step's creditors there are a group, of which one, the relay, is asked and
//! answers for all (docs/adr/0039).

use super::Steps;
use crate::batch::Batch;
use crate::batch::others::PrefillQueries;
use crate::cx::Cx;
use bytes::Bytes;
use lagoon_protocol::{ControlBody, RefuseCode, RelayMember, RelayMembers, Route, TicketSeq};
use lagoon_runner::{Ship, ShipSegment};
use lagoon_types::limits::{RELAY_CREDITORS_MAX, RELAY_REST_MS, RELAY_REST_MS_MAX};
use lagoon_types::{InstanceId, StepId};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Creditors of a step on one other host, asked as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) relay: InstanceId,
    /// The others, in the order in which their partials are merged.
    pub(super) members: Vec<InstanceId>,
}

impl Group {
    pub(super) fn has(&self, creditor: InstanceId) -> bool {
        self.relay == creditor || self.members.contains(&creditor)
    }

    /// The route in a creditor's ticket.
    pub(super) fn route(groups: &[Self], creditor: InstanceId) -> Route {
        match groups.iter().find(|group| group.has(creditor)) {
            None => Route::Direct,
            Some(group) if group.relay == creditor => Route::Relay(group.members.clone()),
            Some(group) => Route::Through(group.relay),
        }
    }
}

/// Time in which a host's creditors are asked directly.
#[derive(Clone, Copy, Debug)]
struct Rest {
    until_ms: u64,
    pause_ms: u64,
}

/// Counters of queries between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RelayStatus {
    /// Frames of queries sent to other hosts, and their bytes.
    pub queries: u64,
    pub query_bytes: u64,
    /// Steps that were begun again because a relay did not answer for its host.
    pub failed_steps: u64,
    /// Layers of debtors' steps for which this instance merged the partials of its host.
    pub merged_layers: u64,
}

/// Members that relays were notified of, groups' failures, and counters.
#[derive(Debug, Default)]
pub(crate) struct Relays {
    /// Members that each relay was first notified of, and when. Soft state: a relay that does not know one says so.
    notified: BTreeMap<InstanceId, BTreeMap<InstanceId, u64>>,
    rests: BTreeMap<String, Rest>,
    status: RelayStatus,
}

impl Relays {
    /// See [`RelayStatus`]; merged layers are the creditor's.
    pub(crate) fn status(&self) -> RelayStatus {
        self.status
    }

    /// Groups creditors of one other host that are asked for the same rows. Of a group's queries, only those to its relay stay. A
    /// relay is first notified of its members, and has a pause to connect to them. Layers with windows of their own ask different
    /// creditors: such models' queries are not grouped.
    pub(super) fn group(
        &mut self,
        cx: &mut Cx,
        ships: &mut Vec<Ship>,
        tickets: &BTreeMap<InstanceId, Vec<TicketSeq>>,
    ) -> Vec<Group> {
        if ships.len() < 2 || !cx.config.can_relay() {
            return Vec::new();
        }
        let own = cx.config.host.as_str();
        let mut strangers = Vec::new();
        let mut found: Vec<(&str, Vec<usize>)> = Vec::new();
        for (at, ship) in ships.iter().enumerate() {
            let Some(host) = cx.peers.host(ship.creditor).filter(|host| *host != own) else { continue };
            if self.rests.get(host).is_some_and(|rest| cx.now_ms < rest.until_ms) {
                continue;
            }
            let fits = |(of, with): &&mut (&str, Vec<usize>)| {
                *of == host && with.len() < RELAY_CREDITORS_MAX && same_rows(&ships[with[0]], ship)
            };
            match found.iter_mut().find(fits) {
                Some((_, with)) => with.push(at),
                None => found.push((host, vec![at])),
            }
        }
        let keys = |creditor: InstanceId| -> u64 {
            let seqs = tickets.get(&creditor).into_iter().flatten();
            seqs.flat_map(|seq| &seq.runs).map(|run| u64::from(run.len)).sum()
        };
        let (mut groups, mut behind) = (Vec::new(), BTreeSet::<InstanceId>::new());
        for (_, with) in found.iter().filter(|(_, with)| with.len() > 1) {
            let most = |at: &&usize| (keys(ships[**at].creditor), Reverse(**at));
            let Some(&relay_at) = with.iter().max_by_key(most) else { continue };
            let members = with.iter().filter(|at| **at != relay_at).map(|at| ships[*at].creditor);
            let group = Group { relay: ships[relay_at].creditor, members: members.collect() };
            let known = self.notified.get(&group.relay);
            let since = group.members.iter().map(|member| known.and_then(|known| known.get(member)));
            // A member that the relay was not notified of comes before all others.
            match since.min() {
                Some(Some(ms)) if cx.now_ms >= ms + RELAY_REST_MS => {}
                Some(None) => {
                    strangers.push(group);
                    continue;
                }
                _ => continue,
            }
            for &at in with.iter().filter(|at| **at != relay_at) {
                let ends: Vec<u32> = ships[at].segments.iter().map(|segment| segment.end).collect();
                let segments = ships[relay_at].segments.iter_mut();
                segments.zip(ends).for_each(|(segment, end)| segment.end = segment.end.max(end));
            }
            behind.extend(&group.members);
            groups.push(group);
        }
        ships.retain(|ship| !behind.contains(&ship.creditor));
        strangers.iter().for_each(|group| self.notify(cx, group));
        groups
    }

    /// Counts queries that go to other hosts.
    pub(super) fn count(&mut self, cx: &Cx, frames: &[(InstanceId, u32, Bytes)]) {
        let own = cx.config.host.as_str();
        for (creditor, _, queries) in frames {
            if !own.is_empty() && cx.peers.host(*creditor).is_some_and(|host| host != own) {
                self.status.queries += 1;
                self.status.query_bytes += queries.len() as u64;
            }
        }
    }

    /// A step with these groups is done: their hosts need no further pause.
    pub(super) fn worked(&mut self, cx: &Cx, groups: &[Group]) {
        for host in groups.iter().filter_map(|group| cx.peers.host(group.relay)) {
            self.rests.remove(host);
        }
    }

    /// Notifies a relay of the addresses of its members: it connects to them.
    fn notify(&mut self, cx: &mut Cx, group: &Group) {
        let addr = |creditor: &InstanceId| {
            let quic_addr = cx.memory.rm.debtor.held.addr(*creditor)?.to_owned();
            Some(RelayMember { instance: creditor.0, quic_addr })
        };
        let members = group.members.iter().filter_map(addr).collect();
        cx.send_if_connected(group.relay, ControlBody::RelayMembers(RelayMembers { members }));
        let known = self.notified.entry(group.relay).or_default();
        for member in &group.members {
            known.entry(*member).or_insert(cx.now_ms);
        }
    }

    /// A group has not answered a step: its host's creditors are asked directly for a while. Meanwhile its relay connects to the
    /// members again; if it was `late`, the pause outlasts a step's deadline, which shows who does not answer.
    fn failed(&mut self, cx: &mut Cx, group: &Group, late: bool) {
        self.status.failed_steps += 1;
        let Some(host) = cx.peers.host(group.relay) else { return };
        let twice = self.rests.get(host).map_or(RELAY_REST_MS, |rest| 2 * rest.pause_ms);
        let pause_ms = if late { RELAY_REST_MS_MAX } else { twice.min(RELAY_REST_MS_MAX) };
        self.rests.insert(host.to_owned(), Rest { until_ms: cx.now_ms + pause_ms, pause_ms });
        self.notify(cx, group);
    }

    /// Forgets pauses that are long over, and relays that are gone.
    pub(super) fn tick(&mut self, cx: &Cx) {
        self.rests.retain(|_, rest| cx.now_ms < rest.until_ms + RELAY_REST_MS_MAX);
        self.notified.retain(|relay, _| cx.peers.key(*relay).is_some());
    }
}

/// Whether two creditors are asked for the same rows.
fn same_rows(a: &Ship, b: &Ship) -> bool {
    let rows = |segment: &ShipSegment| (segment.row0, segment.rows, segment.pos0);
    a.segments.iter().map(rows).eq(b.segments.iter().map(rows))
}

impl Steps {
    /// Ends a step that a creditor refused. Its KV there is lost, unless only the relay is at fault.
    pub(super) fn on_refused(
        &mut self,
        cx: &mut Cx,
        batch: &mut Batch,
        prefills: &dyn PrefillQueries,
        (creditor, step): (InstanceId, StepId),
        (code, detail): (RefuseCode, &str),
    ) {
        let Some(flight) = self.flight(step).filter(|flight| flight.asks(creditor)) else { return };
        let group = flight.groups.iter().find(|group| group.has(creditor)).cloned();
        match group.filter(|_| code == RefuseCode::NotRelayed) {
            // A creditor that is asked directly has nothing to relay.
            None if code == RefuseCode::NotRelayed => {}
            Some(group) => {
                self.relays.failed(cx, &group, false);
                self.fail_step(cx, batch, prefills, step, &BTreeSet::new(), detail);
            }
            None => {
                let why = format!("{creditor} refused the step: {code:?}, {detail}");
                self.fail_step(cx, batch, prefills, step, &BTreeSet::from([creditor]), &why);
            }
        }
    }

    /// Takes relays out of the creditors that are late for a step: whoever of their groups is at fault, asked directly it shows.
    pub(super) fn excuse_relays(&mut self, cx: &mut Cx, step: StepId, late: &mut BTreeSet<InstanceId>) {
        let groups = self.flight(step).map(|flight| flight.groups.clone()).unwrap_or_default();
        for group in groups {
            if late.remove(&group.relay) {
                self.relays.failed(cx, &group, true);
            }
        }
    }
}
