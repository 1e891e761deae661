//! Random operations on a pool and its sequences, compared with a model that knows where every token lies.
//!
//! The model is a plain list per sequence: for each logical block, the memory it is in. Whatever the tables list must
//! be what the model says, position by position, exactly once.

use crate::{BlockPool, BlockState, Freed, Owner, Placement, RemoteBlock, RemoteGrant, Segment, SeqBlocks, SlotRef};
use lagoon_types::{Epoch, InstanceId, KvRun, LeaseId, PhysBlock, SeqId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const TOTAL: u32 = 24;
const BLOCK: u32 = 4;

#[derive(Clone, Debug)]
enum Op {
    Local {
        seq: usize,
        blocks: u32,
        follow: bool,
    },
    Remote {
        seq: usize,
        creditor: u32,
        blocks: u32,
    },
    Write {
        seq: usize,
        tokens: u32,
    },
    Clear {
        seq: usize,
    },
    /// Moves a whole block here, or to an entry of a lease.
    Move {
        seq: usize,
        block: u32,
        to: Option<u32>,
    },
    Segments {
        seq: usize,
        from: u32,
        len: u32,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let seq = 0..3usize;
    prop_oneof![
        3 => (seq.clone(), 0..6u32, any::<bool>()).prop_map(|(seq, blocks, follow)| Op::Local { seq, blocks, follow }),
        2 => (seq.clone(), 1..3u32, 1..5u32).prop_map(|(seq, creditor, blocks)| Op::Remote { seq, creditor, blocks }),
        5 => (seq.clone(), 1..14u32).prop_map(|(seq, tokens)| Op::Write { seq, tokens }),
        1 => seq.clone().prop_map(|seq| Op::Clear { seq }),
        6 => (seq.clone(), 0..30u32, prop::option::of(1..3u32)).prop_map(|(seq, block, to)| Op::Move { seq, block, to }),
        3 => (seq, 0..80u32, 1..40u32).prop_map(|(seq, from, len)| Op::Segments { seq, from, len }),
    ]
}

/// One block in the model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Local(u32),
    Remote(u32, u64, u32),
    Gone,
}

#[derive(Debug)]
struct Model {
    table: SeqBlocks,
    places: Vec<Place>,
    window: Option<u32>,
}

#[derive(Debug)]
struct World {
    pool: BlockPool,
    seqs: Vec<Model>,
    /// Entries of each lease that the model still holds.
    held: BTreeMap<(u32, u64), BTreeSet<u32>>,
    leases: u64,
    /// Entries given to moves.
    moved: u32,
}

impl Model {
    /// Where the model puts a position.
    fn slot(&self, pos: u32) -> Option<SlotRef> {
        let within = pos % BLOCK;
        match self.places[(pos / BLOCK) as usize] {
            Place::Local(block) => Some(SlotRef::Local(block * BLOCK + within)),
            Place::Remote(creditor, lease, entry) => Some(SlotRef::Remote {
                creditor: InstanceId(creditor),
                lease: LeaseId(lease),
                epoch: Epoch(lease + 7),
                offset: entry * BLOCK + within,
            }),
            Place::Gone => None,
        }
    }

    fn window_start(&self) -> u32 {
        let written = self.table.written();
        self.window.map_or(0, |w| (written + 1).saturating_sub(w).min(written))
    }
}

/// The memory of each position of a piece.
fn slots(piece: &Segment) -> Vec<(u32, SlotRef)> {
    let at = |i: u32| match *piece {
        Segment::Local(KvRun { base, first_pos, .. }) => (first_pos + i, SlotRef::Local(base + i)),
        Segment::Remote { creditor, run } => {
            let (lease, epoch, offset) = (run.lease, run.epoch, run.offset + i);
            (run.first_pos + i, SlotRef::Remote { creditor, lease, epoch, offset })
        }
    };
    (0..piece.tokens()).map(at).collect()
}

fn continues(a: &Segment, b: &Segment) -> bool {
    let next = |(pos, slot): (u32, SlotRef)| match slot {
        SlotRef::Local(slot) => (pos + 1, SlotRef::Local(slot + 1)),
        SlotRef::Remote { creditor, lease, epoch, offset } => {
            (pos + 1, SlotRef::Remote { creditor, lease, epoch, offset: offset + 1 })
        }
    };
    next(*slots(a).last().unwrap()) == slots(b)[0]
}

impl World {
    fn new(windows: [Option<u32>; 3]) -> Self {
        let seqs = windows.map(|window| Model { table: SeqBlocks::new(BLOCK), places: Vec::new(), window });
        Self { pool: BlockPool::new(TOTAL), seqs: seqs.into(), held: BTreeMap::new(), leases: 0, moved: 0 }
    }

    fn owner(seq: usize) -> Owner {
        Owner::Own(SeqId(seq as u64))
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Local { seq, blocks, follow } => {
                let free = self.pool.counts().free;
                let after = self.seqs[seq].table.last_local().filter(|_| follow);
                let got = self.pool.allocate(Self::owner(seq), blocks, after);
                assert_eq!(got.is_some(), blocks <= free, "all or nothing");
                if let Some(got) = got {
                    self.seqs[seq].table.push_local(&got);
                    self.seqs[seq].places.extend(got.iter().map(|b| Place::Local(b.0)));
                }
            }
            Op::Remote { seq, creditor, blocks } => {
                self.leases += 1;
                let lease = self.leases;
                let grant = RemoteGrant {
                    creditor: InstanceId(creditor),
                    lease: LeaseId(lease),
                    epoch: Epoch(lease + 7),
                    blocks,
                };
                self.seqs[seq].table.push_remote(&grant);
                self.seqs[seq].places.extend((0..blocks).map(|entry| Place::Remote(creditor, lease, entry)));
                self.held.insert((creditor, lease), (0..blocks).collect());
            }
            Op::Write { seq, tokens } => self.write(seq, tokens),
            Op::Clear { seq } => {
                let freed = self.seqs[seq].table.clear();
                let places = std::mem::take(&mut self.seqs[seq].places);
                self.give_back(seq, &freed, &places);
                assert_eq!(self.seqs[seq].table.leases().next(), None, "a lease outlived its sequence");
            }
            Op::Move { seq, block, to } => self.relocate(seq, block, to),
            Op::Segments { seq, from, len } => self.segments(seq, from, len),
        }
    }

    /// Switches one whole block and frees its source, which nobody else has freed.
    fn relocate(&mut self, seq: usize, block: u32, to: Option<u32>) {
        let movable = self.seqs[seq].table.movable();
        let full = (0..)
            .zip(&self.seqs[seq].places)
            .filter(|(b, p)| (b + 1) * BLOCK <= self.seqs[seq].table.written() && **p != Place::Gone);
        assert!(full.map(|(b, _)| b).eq(movable.clone()), "what is whole and not gone is movable");
        if movable.is_empty() {
            return;
        }
        let block = movable.start + block % (movable.end - movable.start);
        let (place, to) = if let Some(creditor) = to {
            // Two moves to a creditor share a lease, in any order of positions.
            let lease = 1_000_000 + seq as u64 * 10 + u64::from(creditor);
            let entry = self.moved;
            self.moved += 1;
            self.held.entry((creditor, lease)).or_default().insert(entry);
            let (creditor_id, lease_id) = (InstanceId(creditor), LeaseId(lease));
            let remote = RemoteBlock { creditor: creditor_id, lease: lease_id, epoch: Epoch(lease + 7), entry };
            (Place::Remote(creditor, lease, entry), Placement::Remote(remote))
        } else {
            let Some(got) = self.pool.allocate(Self::owner(seq), 1, None) else { return };
            self.pool.mark(got[0], BlockState::Sealed);
            (Place::Local(got[0].0), Placement::Local(got[0]))
        };
        let old = std::mem::replace(&mut self.seqs[seq].places[block as usize], place);
        match (self.seqs[seq].table.relocate(block, to), old) {
            (Placement::Local(b), Place::Local(model)) if b.0 == model => self.pool.free(Self::owner(seq), &[b]),
            (Placement::Remote(b), Place::Remote(creditor, lease, entry)) => {
                assert_eq!((b.creditor.0, b.lease.0, b.entry), (creditor, lease, entry));
                assert!(self.held.get_mut(&(creditor, lease)).unwrap().remove(&entry), "freed once");
            }
            other => panic!("the old place is not the model's: {other:?}"),
        }
    }

    fn write(&mut self, seq: usize, tokens: u32) {
        let model = &mut self.seqs[seq];
        let tokens = tokens.min(model.table.capacity_tokens() - model.table.written());
        model.table.advance(tokens).mark(&mut self.pool);
        let Some(window) = model.window else { return };
        let written = model.table.written();
        let freed = model.table.free_behind_window(written, window);
        // A block is behind the window when its last position is not seen by the next query, at `written`.
        let behind = |block: u32| (block + 1) * BLOCK + window < written + 2;
        let blocks = (0u32..).zip(&mut model.places).filter(|(block, _)| behind(*block));
        let gone: Vec<Place> = blocks.map(|(_, place)| std::mem::replace(place, Place::Gone)).collect();
        self.give_back(seq, &freed, &gone);
    }

    /// What a table gave back is what the model gave up.
    fn give_back(&mut self, seq: usize, freed: &Freed, places: &[Place]) {
        let local: BTreeSet<u32> = freed.local.iter().map(|b| b.0).collect();
        assert_eq!(local.len(), freed.local.len());
        let mut expected = BTreeSet::new();
        let mut entries: BTreeMap<(u32, u64), BTreeSet<u32>> = BTreeMap::new();
        for place in places {
            match *place {
                Place::Local(block) => {
                    expected.insert(block);
                }
                Place::Remote(creditor, lease, entry) => {
                    entries.entry((creditor, lease)).or_default().insert(entry);
                }
                Place::Gone => {}
            }
        }
        assert_eq!(local, expected);
        self.pool.free(Self::owner(seq), &freed.local);
        for r in &freed.remote {
            let key = (r.creditor.0, r.lease.0);
            let held = self.held.get_mut(&key).unwrap();
            for entry in r.first..r.entries {
                let wanted = entries.get_mut(&key).is_some_and(|e| e.remove(&entry));
                // A span may name entries that were given back before, never one that somebody uses.
                assert_eq!(held.remove(&entry), wanted, "an entry in use is given back, or one is given back twice");
            }
        }
        entries.retain(|_, e| !e.is_empty());
        assert!(entries.is_empty(), "{entries:?} were kept");
    }

    fn segments(&self, seq: usize, from: u32, len: u32) {
        let model = &self.seqs[seq];
        let first =
            BLOCK * (0..).zip(&model.places).find(|(_, p)| **p != Place::Gone).map_or(model.table.blocks(), |p| p.0);
        let capacity = model.table.capacity_tokens();
        let from = from.max(first).min(capacity);
        let to = (from + len).min(capacity);
        let mut pieces = Vec::new();
        model.table.segments(from..to, &mut pieces);
        let listed: Vec<_> = pieces.iter().flat_map(slots).collect();
        let expected: Vec<_> = (from..to).map(|pos| (pos, model.slot(pos).unwrap())).collect();
        assert_eq!(listed, expected);
        assert!(pieces.windows(2).all(|p| !continues(&p[0], &p[1])), "pieces are as long as they can be");
    }

    fn check(&self) {
        self.pool.check();
        for (seq, model) in self.seqs.iter().enumerate() {
            self.check_seq(seq, model);
        }
        let own: u32 = self.seqs.iter().map(|m| m.table.local_blocks()).sum();
        assert_eq!(own, self.pool.counts().own);
    }

    fn check_seq(&self, seq: usize, model: &Model) {
        let written = model.table.written();
        for (block, place) in (0u32..).zip(&model.places) {
            if let Place::Local(phys) = *place {
                let state = match written.saturating_sub(block * BLOCK) {
                    0 => BlockState::Reserved,
                    n if n < BLOCK => BlockState::Filling,
                    _ => BlockState::Sealed,
                };
                assert_eq!(self.pool.state(PhysBlock(phys)), state);
                assert_eq!(self.pool.owner(PhysBlock(phys)), Self::owner(seq));
            }
        }
        let mut local = Vec::new();
        model.table.local_runs(written, model.window_start(), &mut local);
        let remote = model.table.remote_runs(written, model.window_start());
        let mut listed: Vec<_> = local.iter().flat_map(|r| slots(&Segment::Local(*r))).collect();
        for (creditor, runs) in &remote {
            listed.extend(runs.iter().flat_map(|run| slots(&Segment::Remote { creditor: *creditor, run: *run })));
        }
        listed.sort_unstable_by_key(|(pos, _)| *pos);
        let first = model.window_start() / BLOCK * BLOCK;
        let expected: Vec<_> = (first..written).map(|pos| (pos, model.slot(pos).expect("visible"))).collect();
        assert_eq!(listed, expected, "every visible position is listed once, where it lies");
        expected.iter().for_each(|(pos, slot)| assert_eq!(model.table.slot(*pos), *slot));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tables_and_pool_do_what_the_model_does(
        windows in prop::array::uniform3(prop::option::of(1..20u32)),
        ops in prop::collection::vec(op(), 1..80),
    ) {
        let mut world = World::new(windows);
        for op in &ops {
            world.apply(op);
            world.check();
        }
        (0..3).for_each(|seq| world.apply(&Op::Clear { seq }));
        prop_assert_eq!(world.pool.counts().free, TOTAL);
        prop_assert!(world.held.values().all(BTreeSet::is_empty), "leases leak");
        // One run again, whatever happened before.
        let all = world.pool.allocate(World::owner(0), TOTAL, None).unwrap();
        prop_assert!(all.iter().map(|b| b.0).eq(0..TOTAL));
    }
}
