//! Instances that freeze, move block by block and thaw, and a network that delays, loses and cuts.
//!
//! A move is reserve, copy, switch, free: the block is reserved at home first, then visible at home instead of at the
//! creditor, and a release travels to the creditor, which until then counts it as lent.

use crate::dgfm::LedgerRow;
use crate::dgfm::{Dgfm, DgfmConfig};
use lagoon_protocol::{ControlBody, Frozen, MoveKvCache, MoveOutcome};
use lagoon_types::InstanceId;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};

/// Longest way of a message.
const DELAY_MS: u64 = 30;
const RENEW_MS: u64 = 2_000;

#[derive(Debug, Default)]
struct Node {
    total: u32,
    /// Blocks of own sequences that lie here, copies in flight included.
    own: u32,
    /// Lent blocks, by debtor and sequence.
    lent: BTreeMap<(InstanceId, u64), u32>,
    /// Where each block of its sequences is visible.
    seqs: BTreeMap<u64, Vec<InstanceId>>,
    freeze: Option<Freezing>,
    /// A cancellation that waits for the thaw.
    cancelled: Option<u64>,
    moving: Option<MoveKvCache>,
    moved: u32,
    move_by_ms: u64,
}

#[derive(Clone, Copy, Debug)]
struct Freezing {
    cycle: u64,
    seq: u64,
    until_ms: u64,
}

impl Node {
    fn free(&self) -> u32 {
        self.total.checked_sub(self.own + self.lent.values().sum::<u32>()).expect("more is used than there is")
    }
}

#[derive(Clone, Debug)]
enum Event {
    ToNode(InstanceId, ControlBody),
    ToDgfm(InstanceId, ControlBody),
    /// One more block of the move in flight.
    Copy(InstanceId, u64),
    Release(InstanceId, InstanceId, u64),
}

pub(super) struct World {
    pub(super) dgfm: Dgfm,
    pub(super) faults: bool,
    /// No new cycles are looked for.
    pub(super) quiet: bool,
    pub(super) crashes: u64,
    now_ms: u64,
    rng: ChaCha8Rng,
    nodes: BTreeMap<InstanceId, Node>,
    events: BTreeMap<(u64, u64), Event>,
    scheduled: u64,
    arrives_ms: BTreeMap<(InstanceId, bool), u64>,
    dead: BTreeSet<InstanceId>,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            dgfm: Dgfm::new(DgfmConfig::default(), seed),
            faults: false,
            quiet: false,
            crashes: 0,
            now_ms: 1,
            rng: ChaCha8Rng::seed_from_u64(seed),
            nodes: BTreeMap::new(),
            events: BTreeMap::new(),
            scheduled: 0,
            arrives_ms: BTreeMap::new(),
            dead: BTreeSet::new(),
        }
    }

    /// `members` instances of which each has `blocks` at the next one and `reserve` free.
    pub(super) fn circle(seed: u64, members: u32, blocks: u32, reserve: u32) -> Self {
        let mut world = Self::new(seed);
        for i in 0..members {
            world.nodes.insert(InstanceId(i + 1), Node { total: 3 * blocks + reserve, ..Node::default() });
        }
        for i in 0..members {
            world.lend(InstanceId(i + 1), u64::from(i), InstanceId((i + 1) % members + 1), blocks);
            world.keep(InstanceId(i + 1), u64::from(i), 2 * blocks);
        }
        world
    }

    /// Random debts between full instances.
    pub(super) fn tangle(seed: u64) -> Self {
        let mut world = Self::new(seed);
        let count = world.rng.random_range(2..7);
        for i in 1..=count {
            world.nodes.insert(InstanceId(i), Node { total: 60, ..Node::default() });
        }
        for seq in 0..u64::from(3 * count) {
            let (debtor, creditor) = (world.rng.random_range(1..=count), world.rng.random_range(1..=count));
            let blocks = world.rng.random_range(1..16).min(world.nodes[&InstanceId(creditor)].free());
            if debtor != creditor && blocks > 0 {
                world.lend(InstanceId(debtor), seq, InstanceId(creditor), blocks);
            }
        }
        for i in 1..=count {
            let reserve = world.rng.random_range(0..4);
            let blocks = world.nodes[&InstanceId(i)].free().saturating_sub(reserve);
            world.keep(InstanceId(i), 1_000 + u64::from(i), blocks);
        }
        world
    }

    fn node(&mut self, id: InstanceId) -> &mut Node {
        self.nodes.get_mut(&id).unwrap()
    }

    fn lend(&mut self, debtor: InstanceId, seq: u64, creditor: InstanceId, blocks: u32) {
        *self.node(creditor).lent.entry((debtor, seq)).or_default() += blocks;
        self.node(debtor).seqs.entry(seq).or_default().extend((0..blocks).map(|_| creditor));
    }

    fn keep(&mut self, id: InstanceId, seq: u64, blocks: u32) {
        self.node(id).own += blocks;
        self.node(id).seqs.entry(seq).or_default().extend((0..blocks).map(|_| id));
    }

    /// Blocks that lie with somebody else than their debtor.
    pub(super) fn borrowed(&self) -> usize {
        self.nodes.iter().map(|(id, n)| n.seqs.values().flatten().filter(|at| *at != id).count()).sum()
    }

    fn ledger(&self) -> Vec<LedgerRow> {
        let rows = self.nodes.iter().flat_map(|(id, n)| {
            n.lent.iter().map(|((debtor, _), blocks)| LedgerRow { creditor: *id, debtor: *debtor, blocks: *blocks })
        });
        rows.collect()
    }

    fn schedule(&mut self, event: Event) {
        self.scheduled += 1;
        let mut at = self.now_ms + self.rng.random_range(1..DELAY_MS);
        // Control messages of one connection keep their order.
        if let Event::ToNode(to, _) | Event::ToDgfm(to, _) = &event {
            let last = self.arrives_ms.entry((*to, matches!(event, Event::ToNode(..)))).or_default();
            at = at.max(*last);
            *last = at;
        }
        self.events.insert((at, self.scheduled), event);
    }

    /// Messages to and from the gManager may be lost.
    fn send(&mut self, event: Event) {
        if !(self.faults && self.rng.random_bool(0.03)) {
            self.schedule(event);
        }
    }

    pub(super) fn run(&mut self, for_ms: u64) {
        let end = self.now_ms + for_ms;
        while self.now_ms < end {
            self.now_ms += 1;
            while let Some(entry) = self.events.first_entry().filter(|e| e.key().0 <= self.now_ms) {
                let event = entry.remove();
                self.on_event(event);
                self.check();
            }
            self.expire();
            if self.faults {
                self.misfortune();
            }
            if self.now_ms.is_multiple_of(250) || self.now_ms >= self.dgfm.next_wake_ms() {
                let ledger = self.ledger();
                let busy = if self.quiet { self.nodes.keys().copied().collect() } else { self.dead.clone() };
                self.dgfm.tick(self.now_ms, &ledger, &busy);
            }
            while let Some((to, body)) = self.dgfm.poll() {
                self.send(Event::ToNode(to, body));
            }
            self.check();
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::ToNode(to, _) | Event::Copy(to, _) if self.dead.contains(&to) => {}
            Event::ToNode(to, ControlBody::Freeze(m)) => {
                let creditor = InstanceId(m.creditor);
                let node = self.node(to);
                let held = |s: &Vec<InstanceId>| s.iter().filter(|at| **at == creditor).count();
                let best = node.seqs.iter().map(|(seq, s)| (held(s), *seq)).max().unwrap_or_default();
                let refuse = node.freeze.is_some() || best.0 == 0;
                let blocks = if refuse { 0 } else { m.blocks.min(u32::try_from(best.0).unwrap()) };
                let free = node.free();
                if !refuse {
                    let until_ms = self.now_ms + u64::from(m.ttl_ms);
                    self.node(to).freeze = Some(Freezing { cycle: m.cycle, seq: best.1, until_ms });
                }
                let answer = Frozen { cycle: m.cycle, blocks, free, seq: best.1 };
                self.send(Event::ToDgfm(to, ControlBody::Frozen(answer)));
            }
            Event::ToNode(to, ControlBody::Thaw(m)) => {
                if self.node(to).freeze.is_some_and(|f| f.cycle == m.cycle) {
                    self.thaw(to);
                }
            }
            Event::ToNode(to, ControlBody::MoveKvCache(m)) => self.on_move(to, m),
            Event::ToDgfm(from, ControlBody::Frozen(m)) => self.dgfm.on_frozen(from, &m, self.now_ms),
            Event::ToDgfm(from, ControlBody::MoveOutcome(m)) => {
                assert!(self.dgfm.on_move_outcome(from, &m, self.now_ms));
            }
            Event::Copy(at, order) => self.copy(at, order),
            Event::Release(creditor, debtor, seq) => {
                if let Some(blocks) = self.nodes.get_mut(&creditor).and_then(|n| n.lent.get_mut(&(debtor, seq))) {
                    *blocks = blocks.checked_sub(1).expect("more is released than was lent");
                }
            }
            other => panic!("{other:?} is no message of DGFM"),
        }
    }

    fn on_move(&mut self, to: InstanceId, m: MoveKvCache) {
        assert_eq!(m.target, to.0, "a swap brings blocks home");
        let now = self.now_ms;
        let node = self.node(to);
        // A freeze that ended by its time limit takes no late orders.
        let valid = node.freeze.is_some_and(|f| f.cycle == m.cycle && f.seq == m.seq);
        if valid {
            assert!(node.moving.is_none(), "two orders of one cycle at once");
            (node.moved, node.move_by_ms) = (0, now + u64::from(m.deadline_ms));
            let order = m.order;
            node.moving = Some(m);
            self.schedule(Event::Copy(to, order));
        } else {
            let outcome = MoveOutcome { order: m.order, reason: "not frozen".to_owned(), ..Default::default() };
            self.send(Event::ToDgfm(to, ControlBody::MoveOutcome(outcome)));
        }
    }

    /// Brings one block home, or ends the move.
    fn copy(&mut self, at: InstanceId, order: u64) {
        let now = self.now_ms;
        let node = self.node(at);
        let Some(m) = node.moving.clone().filter(|m| m.order == order) else { return };
        let (source, free) = (InstanceId(m.source), node.free());
        let block = node.seqs.get_mut(&m.seq).and_then(|s| s.iter_mut().find(|p| **p == source));
        let goes_on = node.moved < m.blocks && now < node.move_by_ms && free > 0;
        match block.filter(|_| goes_on) {
            Some(place) => {
                *place = at;
                node.own += 1;
                node.moved += 1;
                self.schedule(Event::Release(source, at, m.seq));
                self.schedule(Event::Copy(at, order));
            }
            None => {
                let moved = node.moved;
                node.moving = None;
                let outcome = MoveOutcome { order, moved, ..Default::default() };
                self.send(Event::ToDgfm(at, ControlBody::MoveOutcome(outcome)));
            }
        }
    }

    fn thaw(&mut self, at: InstanceId) {
        let node = self.node(at);
        node.freeze = None;
        if let Some(seq) = node.cancelled.take() {
            self.cancel(at, seq);
        }
    }

    /// A sequence ends; one that is frozen ends at the thaw.
    fn cancel(&mut self, at: InstanceId, seq: u64) {
        let node = self.node(at);
        if node.freeze.is_some_and(|f| f.seq == seq) {
            node.cancelled = Some(seq);
            return;
        }
        for place in node.seqs.remove(&seq).unwrap_or_default() {
            if place == at {
                self.node(at).own -= 1;
            } else {
                self.schedule(Event::Release(place, at, seq));
            }
        }
    }

    fn expire(&mut self) {
        let now = self.now_ms;
        let late = |n: &Node| n.freeze.is_some_and(|f| f.until_ms <= now);
        let over: Vec<InstanceId> = self.nodes.iter().filter(|(_, n)| late(n)).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| self.thaw(id));
        if now.is_multiple_of(RENEW_MS) {
            // Renewal: what a debtor no longer holds of a creditor, dead debtors included, is freed in the end.
            let dead = self.dead.clone();
            self.nodes.values_mut().for_each(|n| n.lent.retain(|(debtor, _), b| *b > 0 && !dead.contains(debtor)));
        }
    }

    fn misfortune(&mut self) {
        let ids: Vec<InstanceId> = self.nodes.keys().filter(|i| !self.dead.contains(i)).copied().collect();
        let Some(victim) = ids.get(self.rng.random_range(0..ids.len().max(1))).copied() else { return };
        if self.rng.random_bool(0.002) {
            let seqs: Vec<u64> = self.nodes[&victim].seqs.keys().copied().collect();
            if let Some(seq) = seqs.get(self.rng.random_range(0..seqs.len().max(1))) {
                self.cancel(victim, *seq);
            }
        }
        if self.rng.random_bool(0.0001) && ids.len() > 1 {
            self.crash(victim);
        }
        // Growth takes what was free, also what a swap counted on.
        if self.rng.random_bool(0.001) && self.nodes[&victim].free() > 0 {
            self.keep(victim, 5_000, 1);
        }
    }

    /// A dead instance's blocks are lost: sequences that had some there are computed again, here: forgotten.
    fn crash(&mut self, victim: InstanceId) {
        self.crashes += 1;
        self.dead.insert(victim);
        *self.node(victim) = Node { total: 60, ..Node::default() };
        let ids: Vec<InstanceId> = self.nodes.keys().copied().collect();
        for id in ids {
            let lost: Vec<u64> =
                self.nodes[&id].seqs.iter().filter(|(_, s)| s.contains(&victim)).map(|(seq, _)| *seq).collect();
            for seq in lost {
                let node = self.node(id);
                // Its freeze protects nothing any more.
                if node.freeze.is_some_and(|f| f.seq == seq) {
                    (node.freeze, node.cancelled) = (None, None);
                }
                self.cancel(id, seq);
            }
        }
        self.dgfm.on_instance_gone(victim, self.now_ms);
    }

    /// At every instant a block is in one place, and a creditor counts at least what is visible there.
    fn check(&self) {
        for (id, node) in &self.nodes {
            let here = node.seqs.values().flatten().filter(|at| *at == id).count();
            assert_eq!(here, node.own as usize, "{id}: own blocks");
            let _ = node.free();
            for (seq, places) in &node.seqs {
                for creditor in places.iter().filter(|at| *at != id) {
                    let held = places.iter().filter(|at| *at == creditor).count();
                    let lent = self.nodes[creditor].lent.get(&(*id, *seq)).copied().unwrap_or(0);
                    assert!(lent as usize >= held, "{creditor} lends {lent} of {held} blocks of {id}'s {seq}");
                }
            }
        }
    }

    /// Nothing is frozen, and nothing is lent that nobody holds.
    pub(super) fn check_at_rest(&self) {
        assert_eq!(self.dgfm.active(), 0, "a cycle is still open");
        for (id, node) in &self.nodes {
            assert!(node.freeze.is_none() && node.cancelled.is_none(), "{id} is frozen");
            let lent: u32 = node.lent.values().sum();
            let held = self.nodes.values().flat_map(|n| n.seqs.values().flatten()).filter(|at| *at == id).count();
            assert_eq!(lent as usize + node.own as usize, held, "{id}: what it lends and what is held of it");
        }
    }
}
