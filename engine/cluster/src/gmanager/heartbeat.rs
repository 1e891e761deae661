//! What a heartbeat changes, incrementally: an instance of a pool of ten thousand is served in microseconds.

use super::GManager;
use super::shape::block_bytes;
use crate::perf::LinkView;
use lagoon_protocol::{Heartbeat, HeartbeatAck, Link};
use lagoon_types::{InstanceId, limits};
use lagoon_view::{CLASS_UNMEASURED, Link as NearLink, ViewWriter};
use std::collections::BTreeMap;

/// Assumed of a link on which nothing was transferred yet, in bytes per second.
const BYTES_PER_S_UNKNOWN: u64 = 1_000_000_000;

/// Distance class of a link: the power of two of what placing one rBlock over it takes, in microseconds, a round trip
/// and the block's bytes. Noise between equally near creditors thus decides nothing.
fn class(link: &Link, block_bytes: u64) -> u8 {
    let rate = if link.bytes_per_s == 0 { BYTES_PER_S_UNKNOWN } else { link.bytes_per_s };
    let copy_us = block_bytes.saturating_mul(1_000_000) / rate;
    let cost_us = u64::from(link.rtt_us).saturating_add(copy_us).max(1);
    u8::try_from(cost_us.ilog2()).expect("at most 63")
}

/// Everything but its rows.
fn without_rows(m: &Heartbeat) -> Heartbeat {
    Heartbeat {
        instance: m.instance,
        incarnation: m.incarnation,
        seq: m.seq,
        blocks_total: m.blocks_total,
        blocks_free: m.blocks_free,
        blocks_lendable: m.blocks_lendable,
        lent: m.lent.clone(),
        blocks_borrowed: m.blocks_borrowed,
        requests_running: m.requests_running,
        requests_waiting: m.requests_waiting,
        links: m.links.clone(),
        placements: Vec::new(),
        placements_full: m.placements_full,
        load: m.load.clone(),
        draining: m.draining,
        frozen: m.frozen,
        moves: m.moves.clone(),
        workers: m.workers,
        prefill: m.prefill.clone(),
        role: m.role.clone(),
    }
}

impl GManager {
    /// An instance says how it is. Heartbeats of another process under its number, and older ones, change nothing.
    pub fn on_heartbeat(&mut self, m: &Heartbeat, now_ms: u64) -> HeartbeatAck {
        self.on_time(now_ms);
        let id = InstanceId(m.instance);
        let term = self.config.term;
        let member = self.members.get(&id).filter(|i| i.registration.incarnation == m.incarnation);
        let Some(member) = member else {
            let pool_blocks_total = self.sorted.caps();
            return HeartbeatAck { known: false, pool_blocks_total, seq: m.seq, term, ..Default::default() };
        };
        let newer = member.heartbeat.as_ref().is_none_or(|h| h.seq < m.seq);
        self.heard(id);
        let mut ack = HeartbeatAck { known: true, seq: m.seq, term, ..Default::default() };
        if self.members.get(&id).is_some_and(super::member::Member::is_fenced) {
            ack.fenced = true;
            return ack;
        }
        if newer {
            self.take_heartbeat(id, m);
            self.tell_workers(id, m);
        }
        let member = &self.members[&id];
        ack.placements_wanted = !member.rows_complete;
        let kept = u64::from(member.registration.blocks_total - member.cap());
        ack.pool_blocks_total = self.sorted.caps() + kept;
        ack.oldest_waiting = self.oldest_waiting_for(id);
        ack
    }

    fn take_heartbeat(&mut self, id: InstanceId, m: &Heartbeat) {
        self.take_rows(id, m);
        self.oldest_heads.note(id, m.load.as_ref(), self.now_ms);
        let Some(member) = self.members.get_mut(&id) else { return };
        let old = member.heartbeat.replace(without_rows(m));
        member.hear_role();
        member.lendable = m.blocks_lendable;
        member.paused = false;
        self.sorted.set_lendable(member.slot, m.blocks_lendable);
        let (complete, draining, role) = (member.rows_complete, member.is_draining(), member.role());
        member.round = self.rounds.heard(member.round);
        let links_changed = old.as_ref().is_none_or(|h| h.links != m.links);
        if let Some(view) = self.pool.instances.get_mut(&id) {
            view.load = m.load.clone().unwrap_or_default();
            view.blocks_total = m.blocks_total;
            view.blocks_free = m.blocks_free;
            view.blocks_lendable = m.blocks_lendable;
            view.lent.clear();
            view.lent.extend(m.lent.iter().map(|d| (InstanceId(d.debtor), d.blocks)));
            view.borrowed = m.blocks_borrowed;
            view.role = role;
            view.draining = draining;
            view.frozen = m.frozen != 0;
            view.paused = !complete;
            if links_changed {
                view.links.clear();
                view.links.extend(m.links.iter().take(limits::HEARTBEAT_LINKS_MAX).map(link_view));
                view.links.sort_unstable_by_key(|l| l.0);
                view.links.dedup_by_key(|l| l.0);
                let mapped = m.links.iter().take(limits::HEARTBEAT_LINKS_MAX).filter(|l| l.mapped);
                view.mapped = mapped.map(|l| InstanceId(l.peer)).collect();
            }
        }
        if links_changed {
            self.take_links(id, &m.links);
        }
        self.settle(id);
    }

    /// New measurements of `id`: the distances of both ends follow.
    fn take_links(&mut self, id: InstanceId, links: &[Link]) {
        let block_bytes = self.shape.as_ref().map_or(0, block_bytes);
        let links = links.iter().take(limits::HEARTBEAT_LINKS_MAX).filter(|l| l.peer != id.0 && l.rtt_us > 0);
        let new: BTreeMap<InstanceId, u8> = links.map(|l| (InstanceId(l.peer), class(l, block_bytes))).collect();
        let Some(member) = self.members.get(&id) else { return };
        let gone = member.near.iter().filter(|(peer, c)| c[0].is_some() && !new.contains_key(peer));
        let gone = gone.map(|(peer, _)| (*peer, None));
        let changed = new.iter().filter(|(peer, c)| member.near.get(peer).is_none_or(|n| n[0] != Some(**c)));
        let changed: Vec<_> = gone.chain(changed.map(|(peer, c)| (*peer, Some(*c)))).collect();
        if changed.is_empty() {
            return;
        }
        for (peer, class) in changed {
            if !self.members.contains_key(&peer) {
                continue;
            }
            self.set_near(id, peer, 0, class);
            self.set_near(peer, id, 1, class);
            self.publish_links(peer);
        }
        self.publish_links(id);
    }

    fn set_near(&mut self, of: InstanceId, to: InstanceId, end: usize, class: Option<u8>) {
        let Some(member) = self.members.get_mut(&of) else { return };
        let entry = member.near.entry(to).or_default();
        entry[end] = class;
        if *entry == [None, None] {
            member.near.remove(&to);
        }
    }

    /// Writes a member's nearest and farthest links to the view; what is of the usual distance needs no entry.
    fn publish_links(&mut self, id: InstanceId) {
        let Some(member) = self.members.get(&id) else { return };
        let mut links: Vec<(u8, InstanceId)> = Vec::new();
        for (peer, classes) in &member.near {
            let nearer = classes.iter().flatten().min();
            links.extend(nearer.filter(|c| **c != CLASS_UNMEASURED).map(|c| (*c, *peer)));
        }
        links.sort_unstable();
        let far = links.partition_point(|l| l.0 < CLASS_UNMEASURED);
        // Three quarters at most are near ones, unless there are too few far ones.
        let near = far.min((ViewWriter::LINKS * 3 / 4).max(ViewWriter::LINKS.saturating_sub(links.len() - far)));
        let chosen = links[..near].iter().chain(links[far..].iter().rev().take(ViewWriter::LINKS - near));
        let of = |(class, peer): &(u8, InstanceId)| {
            let slot = self.members.get(peer)?.slot;
            Some(NearLink { peer: peer.0, slot, class: *class })
        };
        let chosen: Vec<NearLink> = chosen.filter_map(of).collect();
        self.sorted.writer.set_links(member.slot, &chosen);
    }

    /// A member leaves: nobody has a link to it any more.
    pub(super) fn drop_links(&mut self, id: InstanceId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let near = std::mem::take(&mut member.near);
        for peer in near.into_keys() {
            if let Some(other) = self.members.get_mut(&peer) {
                other.near.remove(&id);
                self.publish_links(peer);
            }
        }
    }
}

fn link_view(l: &Link) -> (InstanceId, LinkView) {
    let rate = if l.bytes_per_s == 0 { BYTES_PER_S_UNKNOWN } else { l.bytes_per_s };
    #[allow(clippy::cast_precision_loss, reason = "rates are far below 2^53 bytes per second")]
    let bytes_per_s = rate as f64;
    (InstanceId(l.peer), LinkView { rtt_us: f64::from(l.rtt_us), bytes_per_s })
}
