//! Heartbeats: incremental updates, in microseconds for an instance of a pool of ten thousand.

use super::GManager;
use super::shape::block_bytes;
use crate::cached::Cached;
use crate::perf::LinkView;
use lagoon_protocol::{Debt, Heartbeat, HeartbeatAck, Link, Load};
use lagoon_types::{InstanceId, limits};
use lagoon_view::{CLASS_UNMEASURED, Link as NearLink, ViewWriter};
use std::collections::BTreeMap;

/// Rate assumed for a link without transfers yet, in bytes per second.
const BYTES_PER_S_UNKNOWN: u64 = 1_000_000_000;

/// Distance class of a link: the power of two of the time of placing one rBlock, in microseconds (a round trip and the
/// block's bytes), so that noise between equally near creditors does not matter.
fn class(link: &Link, block_bytes: u64) -> u8 {
    let rate = if link.bytes_per_s == 0 { BYTES_PER_S_UNKNOWN } else { link.bytes_per_s };
    let copy_us = block_bytes.saturating_mul(1_000_000) / rate;
    let cost_us = u64::from(link.rtt_us).saturating_add(copy_us).max(1);
    u8::try_from(cost_us.ilog2()).expect("at most 63")
}

/// The reported load, clamped to values that an instance can have: the planner computes with it.
fn bounded(load: &Load) -> Load {
    let batch_max = u32::try_from(limits::STEP_ROWS_MAX).unwrap_or(u32::MAX);
    Load {
        batch: load.batch.min(batch_max),
        batch_max: load.batch_max.min(batch_max),
        queue_blocks: load.queue_blocks.iter().take(limits::LOAD_QUEUE_MAX).copied().collect(),
        ..*load
    }
}

/// Each debtor once.
fn debts(lent: &[Debt]) -> Vec<Debt> {
    let mut debts: Vec<Debt> = lent.iter().take(limits::INSTANCES_MAX).cloned().collect();
    debts.sort_by_key(|debt| debt.debtor);
    debts.dedup_by_key(|debt| debt.debtor);
    debts
}

/// The heartbeat without its placement rows, and with lists as long as an honest instance's.
fn without_rows(m: &Heartbeat) -> Heartbeat {
    Heartbeat {
        instance: m.instance,
        incarnation: m.incarnation,
        seq: m.seq,
        blocks_total: m.blocks_total,
        blocks_free: m.blocks_free,
        blocks_lendable: m.blocks_lendable,
        lent: debts(&m.lent),
        blocks_borrowed: m.blocks_borrowed,
        requests_running: m.requests_running,
        requests_waiting: m.requests_waiting,
        links: m.links.iter().take(limits::HEARTBEAT_LINKS_MAX).cloned().collect(),
        placements: Vec::new(),
        placements_full: m.placements_full,
        load: m.load.as_ref().map(bounded),
        draining: m.draining,
        frozen: m.frozen,
        moves: m.moves.clone(),
        workers: m.workers,
        prefill: m.prefill.clone(),
        role: m.role.clone(),
        cached: None,
        cache: m.cache.clone().map(|mut cache| {
            cache.tenants.truncate(limits::CACHE_TENANTS_MAX);
            cache
        }),
    }
}

impl GManager {
    /// Handles a heartbeat and returns its ack. Stale heartbeats, and those of another process with the same number, change
    /// nothing.
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
        self.touch(id);
        let mut ack = HeartbeatAck { known: true, seq: m.seq, term, ..Default::default() };
        if self.members.get(&id).is_some_and(super::member::Member::is_fenced) {
            ack.fenced = true;
            return ack;
        }
        if newer {
            self.take_heartbeat(id, m);
            self.send_workers(id, m);
            self.repeat_drop(id);
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
        member.confirm_role();
        if let Some(summary) = &m.cached {
            member.cached = Cached::new(summary);
        }
        member.confirm_drop();
        member.lendable = m.blocks_lendable;
        member.paused = false;
        self.sorted.set_lendable(member.slot, m.blocks_lendable);
        let (complete, draining, role) = (member.rows_complete, member.is_draining(), member.role());
        member.round = self.rounds.note_heartbeat(member.round);
        let Some(reported) = &member.heartbeat else { return };
        let links_changed = old.as_ref().is_none_or(|h| h.links != reported.links);
        if let Some(view) = self.pool.instances.get_mut(&id) {
            view.load = reported.load.clone().unwrap_or_default();
            view.blocks_total = m.blocks_total;
            view.blocks_free = m.blocks_free;
            view.blocks_lendable = m.blocks_lendable;
            view.lent.clear();
            view.lent.extend(reported.lent.iter().map(|d| (InstanceId(d.debtor), d.blocks)));
            view.borrowed = m.blocks_borrowed;
            view.role = role;
            view.draining = draining;
            view.frozen = m.frozen != 0;
            view.paused = !complete;
            if links_changed {
                view.links.clear();
                view.links.extend(reported.links.iter().map(link_view));
                view.links.sort_unstable_by_key(|l| l.0);
                view.links.dedup_by_key(|l| l.0);
                let mapped = reported.links.iter().filter(|l| l.mapped);
                view.mapped = mapped.map(|l| InstanceId(l.peer)).collect();
            }
        }
        if links_changed {
            self.take_links(id, &m.links);
        }
        self.settle(id);
    }

    /// Updates the distances of both ends from new link measurements of `id`.
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

    /// Writes a member's nearest and farthest links to the view; links of the class `CLASS_UNMEASURED` need no entry.
    fn publish_links(&mut self, id: InstanceId) {
        let Some(member) = self.members.get(&id) else { return };
        let mut links: Vec<(u8, InstanceId)> = Vec::new();
        for (peer, classes) in &member.near {
            let nearer = classes.iter().flatten().min();
            links.extend(nearer.filter(|c| **c != CLASS_UNMEASURED).map(|c| (*c, *peer)));
        }
        links.sort_unstable();
        let far = links.partition_point(|l| l.0 < CLASS_UNMEASURED);
        // At most three quarters are near ones, unless there are too few far ones.
        let near = far.min((ViewWriter::LINKS * 3 / 4).max(ViewWriter::LINKS.saturating_sub(links.len() - far)));
        let chosen = links[..near].iter().chain(links[far..].iter().rev().take(ViewWriter::LINKS - near));
        let of = |(class, peer): &(u8, InstanceId)| {
            let slot = self.members.get(peer)?.slot;
            Some(NearLink { peer: peer.0, slot, class: *class })
        };
        let chosen: Vec<NearLink> = chosen.filter_map(of).collect();
        self.sorted.writer.set_links(member.slot, &chosen);
    }

    /// Removes all links to a departing member.
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
