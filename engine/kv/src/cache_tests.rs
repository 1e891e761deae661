//! Random operations on a pool whose blocks keep what they hold, beside a model of the memory: every address with what was
//! last written there. Flat, and in rows.

#![allow(clippy::cast_possible_truncation, reason = "small sizes of tests")]

use crate::{Adopted, BlockHash, BlockPool, BlockState, IdentityRoot, Owner, Unsaved};
use lagoon_types::{KvDType, KvSpace, LeaseId, ModelHash, PhysBlock, SeqId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const TOTAL: u32 = 12;
const BLOCK: u32 = 2;
const ROOT: IdentityRoot<'_> =
    IdentityRoot { model: ModelHash([1; 32]), adapter: b"", dtype: KvDType::F32, rope: b"", block_tokens: BLOCK };

#[derive(Clone, Debug)]
enum Op {
    /// A sequence begins with these tokens, adopting what is kept of all but the last.
    Begin {
        seq: u64,
        tokens: Vec<u32>,
    },
    /// Its next block is written, or it gets another one.
    Write {
        seq: u64,
        token: u32,
    },
    End {
        seq: u64,
    },
    /// It gives back one block of its own, as by a move.
    Leave {
        seq: u64,
        block: usize,
    },
    /// All of it becomes a lease.
    HandOver {
        seq: u64,
    },
    /// Memory for a remote request.
    Lend {
        blocks: u32,
    },
    /// A lease of what is kept of these tokens, behind the first `skip` blocks.
    LeaseRun {
        tokens: Vec<u32>,
        skip: usize,
    },
    /// Blocks of the oldest lease come back, all of them or one.
    Release {
        one: bool,
    },
    DropAll,
    /// The next block without a copy is read for a tier.
    Save,
    /// The oldest such read ends, or fails.
    EndSave {
        fails: bool,
    },
    /// The tier drops its oldest copy.
    DropCopy,
}

fn op() -> impl Strategy<Value = Op> {
    let seq = 0..4u64;
    // Few tokens, so that sequences begin alike.
    let tokens = prop::collection::vec(0..2u32, 1..14);
    prop_oneof![
        6 => (seq.clone(), tokens.clone()).prop_map(|(seq, tokens)| Op::Begin { seq, tokens }),
        3 => (tokens, 0..3usize).prop_map(|(tokens, skip)| Op::LeaseRun { tokens, skip }),
        6 => (seq.clone(), 0..2u32).prop_map(|(seq, token)| Op::Write { seq, token }),
        5 => seq.clone().prop_map(|seq| Op::End { seq }),
        1 => (seq.clone(), 0..8usize).prop_map(|(seq, block)| Op::Leave { seq, block }),
        2 => seq.prop_map(|seq| Op::HandOver { seq }),
        1 => (1..5u32).prop_map(|blocks| Op::Lend { blocks }),
        3 => any::<bool>().prop_map(|one| Op::Release { one }),
        1 => Just(Op::DropAll),
        4 => Just(Op::Save),
        4 => (0..4u32).prop_map(|n| Op::EndSave { fails: n == 0 }),
        1 => Just(Op::DropCopy),
    ]
}

/// What is at an address: the tokens up to its end, or what nobody can name.
#[derive(Clone, Debug, PartialEq)]
enum Content {
    Prefix(Vec<u32>),
    Other,
}

#[derive(Debug, Default)]
struct Seq {
    tokens: Vec<u32>,
    /// By logical block; `None` where one left.
    blocks: Vec<Option<PhysBlock>>,
    /// Blocks that are written and have a hash.
    written: usize,
}

impl Seq {
    fn held(&self) -> Vec<PhysBlock> {
        self.blocks.iter().flatten().copied().collect()
    }
}

struct World {
    pool: BlockPool,
    space: KvSpace,
    memory: BTreeMap<PhysBlock, Content>,
    /// Which memory is behind an address: that of another one where it is mapped there.
    behind: BTreeMap<PhysBlock, u32>,
    mapped: u32,
    seqs: BTreeMap<u64, Seq>,
    leases: BTreeMap<u64, Vec<PhysBlock>>,
    next: u64,
    hits: usize,
    shared: u32,
    joined: u32,
    saves: u64,
    /// Reads in progress, with the content when each began.
    reading: BTreeMap<u64, (Unsaved, Content)>,
    copies: Vec<(BlockHash, Content)>,
}

impl World {
    fn new(space: KvSpace) -> Self {
        let (mut pool, memory, behind) = (BlockPool::over(space), BTreeMap::new(), BTreeMap::new());
        pool.track_unsaved();
        let (seqs, leases, reading) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (mapped, next, hits, shared, joined, saves) = (0, 0, 0, 0, 0, 0);
        let copies = Vec::new();
        Self { pool, space, memory, behind, mapped, seqs, leases, next, hits, shared, joined, saves, reading, copies }
    }

    fn save(&mut self) {
        let Some(unsaved) = self.pool.next_unsaved() else { return };
        self.saves += 1;
        self.pool.begin_save(unsaved.block, self.saves);
        self.reading.insert(self.saves, (unsaved, self.memory[&unsaved.block].clone()));
        assert_ne!(self.pool.next_unsaved().map(|next| next.block), Some(unsaved.block), "once");
    }

    fn end_save(&mut self, fails: bool) {
        let Some((save, (of, content))) = self.reading.pop_first() else { return };
        if !self.pool.end_save(of.block, save) {
            return;
        }
        let Content::Prefix(tokens) = &content else { panic!("{} was read when it held nothing", of.block) };
        assert_eq!(BlockHash::chain(&ROOT, tokens).last(), Some(&of.hash), "{} was another block", of.block);
        assert_eq!(self.memory[&of.block], content, "{} was overwritten while it was read", of.block);
        if !fails {
            self.copies.push((of.hash, content));
        }
    }

    /// What the device is to release is spoiled, and before anything is written anew.
    fn spoil(&mut self) {
        for block in self.pool.take_freed() {
            self.lose(block);
        }
    }

    /// Another memory will lie there.
    fn lose(&mut self, block: PhysBlock) {
        self.memory.insert(block, Content::Other);
        self.mapped += 1;
        self.behind.insert(block, self.mapped);
    }

    /// Has the device map what a sequence begins with.
    fn map(&mut self, adopted: &Adopted) {
        for (from, to) in &adopted.mapped {
            let behind = *self.behind.entry(*from).or_insert_with(|| 1_000_000 + from.0);
            self.behind.insert(*to, behind);
            self.memory.insert(*to, self.memory[from].clone());
        }
        adopted.left.iter().for_each(|block| self.lose(*block));
    }

    /// The memories that somebody has.
    fn in_use(&self) -> usize {
        let seqs = self.seqs.values().flat_map(Seq::held);
        let all = seqs.chain(self.leases.values().flatten().copied());
        all.map(|b| self.behind.get(&b).copied().unwrap_or(1_000_000 + b.0)).collect::<BTreeSet<_>>().len()
    }

    fn got(&mut self, blocks: &[PhysBlock]) {
        self.spoil();
        blocks.iter().for_each(|block| drop(self.memory.insert(*block, Content::Other)));
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Begin { seq, tokens } => self.begin(*seq, tokens),
            Op::Write { seq, token } => self.write(*seq, *token),
            Op::End { seq } => {
                let held = self.seqs.remove(seq).unwrap_or_default().held();
                self.pool.free(Owner::Own(SeqId(*seq)), &held);
            }
            Op::Leave { seq, block } => {
                let Some(entry) = self.seqs.get_mut(seq) else { return };
                if let Some(block) = entry.blocks.get_mut(*block).and_then(Option::take) {
                    self.pool.free(Owner::Own(SeqId(*seq)), &[block]);
                }
            }
            Op::HandOver { seq } => {
                let Some(entry) = self.seqs.remove(seq) else { return };
                self.next += 1;
                let held = entry.held();
                self.pool.hand_over(Owner::Own(SeqId(*seq)), Owner::Lent(LeaseId(self.next)), &held);
                self.leases.insert(self.next, held);
            }
            Op::Lend { blocks } => {
                self.next += 1;
                let owner = Owner::Lent(LeaseId(self.next));
                if let Some(got) = self.pool.allocate(owner, *blocks, None) {
                    self.got(&got);
                    self.leases.insert(self.next, got);
                }
            }
            Op::LeaseRun { tokens, skip } => self.lease_run(tokens, *skip),
            Op::Release { one } => {
                let Some(mut lease) = self.leases.first_entry() else { return };
                let (name, n) = (*lease.key(), if *one { 1 } else { usize::MAX });
                let at = lease.get().len().saturating_sub(n);
                let freed = lease.get_mut().split_off(at);
                if lease.get().is_empty() {
                    lease.remove();
                }
                self.pool.free(Owner::Lent(LeaseId(name)), &freed);
            }
            Op::DropAll => {
                self.pool.drop_all();
                assert_eq!(self.pool.cached(), 0);
            }
            Op::Save => self.save(),
            Op::EndSave { fails } => self.end_save(*fails),
            Op::DropCopy => {
                if !self.copies.is_empty() {
                    let (hash, _) = self.copies.remove(0);
                    self.pool.unsave(&hash);
                }
            }
        }
        self.spoil();
    }

    fn lease_run(&mut self, tokens: &[u32], skip: usize) {
        let hashes = BlockHash::chain(&ROOT, tokens);
        let wanted = &hashes[skip.min(hashes.len())..];
        let (free, found) = (self.pool.counts().free, self.pool.found(wanted));
        self.next += 1;
        // Few of what is free may be lent.
        let blocks = self.pool.adopt_run(Owner::Lent(LeaseId(self.next)), wanted, 2, 4);
        let taken = free - self.pool.counts().free;
        assert!(taken <= 2 && blocks.len() <= 4.min(found as usize));
        assert!(self.space.rows > 0 || blocks.len() == 4.min(found as usize) || taken == 2, "all that may be lent");
        for (depth, block) in (skip + 1..).zip(&blocks) {
            let prefix = Content::Prefix(tokens[..depth * BLOCK as usize].to_vec());
            assert_eq!(self.memory.get(block), Some(&prefix), "{block} holds what was asked for");
            assert_eq!(self.pool.state(*block), BlockState::Sealed);
        }
        if !blocks.is_empty() {
            self.leases.insert(self.next, blocks);
        }
    }

    fn begin(&mut self, seq: u64, tokens: &[u32]) {
        let needed = (tokens.len() as u32).div_ceil(BLOCK);
        if self.seqs.contains_key(&seq) {
            return;
        }
        let hashes = BlockHash::chain(&ROOT, &tokens[..tokens.len() - 1]);
        // As where nothing can be mapped.
        let map = seq != 3;
        let shareable = self.pool.shareable(&hashes, map);
        if needed - shareable > self.pool.counts().free {
            return;
        }
        let adopted = self.pool.adopt(SeqId(seq), &hashes, map);
        assert_eq!(adopted.shared, shareable, "as many as were counted on");
        assert!(map || self.space.rows == 0 || adopted.mapped.is_empty());
        self.spoil();
        self.map(&adopted);
        let owner = Owner::Own(SeqId(seq));
        for (depth, block) in (1..).zip(&adopted.blocks) {
            let prefix = tokens[..depth * BLOCK as usize].to_vec();
            assert_eq!(self.memory.get(block), Some(&Content::Prefix(prefix)), "{block} holds what was asked for");
            assert!(self.pool.state(*block) == BlockState::Sealed && self.pool.has(owner, *block));
        }
        for (_, to) in &adopted.mapped {
            let depth = adopted.blocks.iter().position(|block| block == to).unwrap();
            self.pool.set_hash(*to, hashes[depth], depth as u32);
        }
        self.hits += adopted.blocks.len();
        self.shared += adopted.shared;
        let known = adopted.blocks.len();
        let after = adopted.blocks.last().copied();
        let rest = self.pool.allocate_for(SeqId(seq), known as u32..needed, after).expect("counted before");
        self.got(&rest);
        let blocks = adopted.blocks.into_iter().chain(rest).map(Some).collect();
        self.seqs.insert(seq, Seq { tokens: tokens.to_vec(), blocks, written: known });
    }

    fn write(&mut self, seq: u64, token: u32) {
        let Some(entry) = self.seqs.get_mut(&seq) else { return };
        if entry.written == entry.blocks.len() {
            let next = entry.blocks.len() as u32;
            let after = entry.blocks.last().copied().flatten();
            let Some(got) = self.pool.allocate_for(SeqId(seq), next..next + 1, after) else { return };
            entry.blocks.push(Some(got[0]));
            self.got(&got);
            return;
        }
        let end = (entry.written + 1) * BLOCK as usize;
        entry.tokens.resize(end.max(entry.tokens.len()), token);
        if seq.is_multiple_of(2) && self.join(seq, end) {
            return;
        }
        let entry = self.seqs.get_mut(&seq).unwrap();
        if let Some(block) = entry.blocks[entry.written] {
            assert!(!self.pool.is_shared(block), "{block} is written, and somebody else's, too");
            let tokens = &entry.tokens[..end];
            self.memory.insert(block, Content::Prefix(tokens.to_vec()));
            self.pool.mark(block, BlockState::Sealed);
            let hash = *BlockHash::chain(&ROOT, tokens).last().unwrap();
            self.pool.set_hash(block, hash, entry.written as u32);
        }
        entry.written += 1;
    }

    /// What a sequence is to write next somebody may have: then it has that.
    fn join(&mut self, seq: u64, end: usize) -> bool {
        let entry = &self.seqs[&seq];
        let (at, hash) = (entry.written, *BlockHash::chain(&ROOT, &entry.tokens[..end]).last().unwrap());
        let Some(block) = entry.blocks[at] else { return false };
        let Some(joined) = self.pool.join(Owner::Own(SeqId(seq)), block, &hash, true) else { return false };
        self.spoil();
        if let Some(from) = joined.mapped {
            self.map(&Adopted { mapped: vec![(from, block)], ..Adopted::default() });
            self.pool.set_hash(block, hash, at as u32);
        }
        let entry = self.seqs.get_mut(&seq).unwrap();
        entry.blocks[at] = Some(joined.block);
        entry.written += 1;
        assert_eq!(self.memory.get(&joined.block), Some(&Content::Prefix(entry.tokens[..end].to_vec())));
        self.joined += 1;
        true
    }

    fn check(&self) {
        self.pool.check();
        let own: usize = self.seqs.values().map(|s| s.held().len()).sum();
        let lent: usize = self.leases.values().map(Vec::len).sum();
        let counts = self.pool.counts();
        assert_eq!((counts.own as usize, counts.lent as usize), (own, lent), "what is kept counts as free");
        assert_eq!(counts.free as usize, TOTAL as usize - self.in_use(), "what several have is counted once");
        assert_eq!(counts.shared as usize, own + lent - self.in_use());
        assert!(self.pool.cached() <= counts.free);
        for (seq, entry) in &self.seqs {
            for (depth, block) in (1..).zip(&entry.blocks).filter_map(|(depth, block)| Some((depth, (*block)?))) {
                assert!(self.pool.has(Owner::Own(SeqId(*seq)), block));
                if depth <= entry.written {
                    let prefix = Content::Prefix(entry.tokens[..depth * BLOCK as usize].to_vec());
                    assert_eq!(self.memory.get(&block), Some(&prefix), "{block} was written by somebody else");
                }
            }
        }
        for (lease, blocks) in &self.leases {
            blocks.iter().for_each(|block| assert!(self.pool.has(Owner::Lent(LeaseId(*lease)), *block)));
        }
    }

    /// All memory can be had, whatever keeps it, and is one run where it is flat.
    fn end(mut self) -> usize {
        let seqs: Vec<u64> = self.seqs.keys().copied().collect();
        seqs.into_iter().for_each(|seq| self.apply(&Op::End { seq }));
        while !self.leases.is_empty() {
            self.apply(&Op::Release { one: false });
        }
        self.check();
        assert_eq!(self.pool.counts().free, TOTAL);
        let all = self.pool.allocate(Owner::Lent(LeaseId(0)), TOTAL, None).unwrap();
        assert_eq!((all.len(), self.pool.cached()), (TOTAL as usize, 0));
        assert!(self.space.rows > 0 || all.iter().map(|b| b.0).eq(0..TOTAL));
        self.pool.check();
        self.hits
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_kept_is_what_was_written_and_is_free(
        rows in prop::option::of((1..5u32, 1..9u32)),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let space = KvSpace::flat(TOTAL, BLOCK);
        let mut world = World::new(rows.map_or(space, |(rows, blocks)| space.with_rows(rows, blocks)));
        for op in &ops {
            world.apply(op);
            world.check();
        }
        world.end();
    }
}

fn begin(world: &mut World, seq: u64, tokens: &[u32]) -> usize {
    let hits = world.hits;
    world.apply(&Op::Begin { seq, tokens: tokens.to_vec() });
    while world.seqs[&seq].written < tokens.len() / BLOCK as usize {
        world.apply(&Op::Write { seq, token: 0 });
    }
    world.check();
    world.hits - hits
}

#[test]
fn the_deepest_of_what_was_kept_longest_goes_first_and_the_rest_is_found() {
    for space in [KvSpace::flat(TOTAL, BLOCK), KvSpace::flat(TOTAL, BLOCK).with_rows(4, 8)] {
        let mut world = World::new(space);
        assert_eq!(begin(&mut world, 0, &[0, 0, 0, 0, 0, 0, 0, 0]), 0);
        world.apply(&Op::End { seq: 0 });
        assert_eq!(begin(&mut world, 1, &[1, 1, 1, 1, 1, 1]), 0);
        world.apply(&Op::End { seq: 1 });
        assert_eq!((world.pool.cached(), world.pool.counts().free), (7, TOTAL));
        // Five blocks keep nothing, two are wanted besides.
        world.apply(&Op::Lend { blocks: 7 });
        assert_eq!((world.pool.cached(), world.pool.evictions()), (5, 2));
        // One token is left to compute.
        assert_eq!(begin(&mut world, 2, &[0, 0, 0, 0]), 1);
        world.apply(&Op::End { seq: 2 });
        assert_eq!(begin(&mut world, 3, &[1, 1, 1, 1, 1, 1, 1]), 3);
        world.end();
    }
}

#[test]
fn what_several_begin_with_is_one_memory_until_the_last_gives_it_back() {
    for space in [KvSpace::flat(TOTAL, BLOCK), KvSpace::flat(TOTAL, BLOCK).with_rows(4, 8)] {
        let mut world = World::new(space);
        // Eight blocks of ten are alike: three sequences in the memory of one and two.
        let tokens: Vec<u32> = (0..17).map(|at| at % 2).collect();
        assert_eq!(begin(&mut world, 0, &tokens), 0);
        assert_eq!((begin(&mut world, 1, &tokens), begin(&mut world, 2, &tokens)), (8, 8));
        assert_eq!((world.pool.counts().free, world.pool.counts().shared, world.shared), (1, 16, 16));
        world.apply(&Op::HandOver { seq: 0 });
        world.check();
        world.apply(&Op::End { seq: 1 });
        world.check();
        world.apply(&Op::Release { one: false });
        world.check();
        assert_eq!((world.pool.counts().free, world.pool.counts().shared), (3, 0));
        world.apply(&Op::End { seq: 2 });
        assert_eq!((world.pool.counts().free, world.pool.cached()), (TOTAL, 8));
        assert_eq!((begin(&mut world, 1, &tokens), world.shared), (8, 16), "it is kept when nobody has it");
        world.end();
    }
}

#[test]
fn what_two_compute_at_one_time_is_one_memory() {
    for space in [KvSpace::flat(TOTAL, BLOCK), KvSpace::flat(TOTAL, BLOCK).with_rows(4, 8)] {
        let mut world = World::new(space);
        let tokens: Vec<u32> = vec![0; 9];
        for seq in [0, 2] {
            world.apply(&Op::Begin { seq, tokens: tokens.clone() });
        }
        assert_eq!((world.pool.counts().free, world.shared), (2, 0), "nothing is computed yet");
        for n in 0..4 {
            [0, 2].into_iter().for_each(|seq| world.apply(&Op::Write { seq, token: 0 }));
            world.check();
            assert_eq!((world.pool.counts().free, world.joined), (3 + n, 1 + n));
        }
        world.end();
    }
}

#[test]
fn what_is_kept_in_two_rows_is_had_in_one() {
    let mut world = World::new(KvSpace::flat(TOTAL, BLOCK).with_rows(3, 8));
    assert_eq!(begin(&mut world, 0, &[0, 0, 0, 0, 1]), 0);
    assert_eq!(begin(&mut world, 1, &[0, 0, 0, 0, 1, 1, 1, 1, 1]), 2);
    // The first row keeps nothing of what the other one has still, the other one keeps both.
    world.apply(&Op::End { seq: 1 });
    world.apply(&Op::End { seq: 0 });
    assert_eq!(world.pool.cached(), 4);
    assert_eq!(begin(&mut world, 2, &[0, 0, 0, 0, 1, 1, 1, 1, 1]), 4);
    assert_eq!(world.pool.cached(), 0);
    world.end();
}

#[test]
#[should_panic(expected = "gets its hash before it is sealed")]
fn a_block_that_is_not_sealed_has_no_name() {
    let mut pool = BlockPool::new(2);
    let blocks = pool.allocate(Owner::Own(SeqId(1)), 1, None).unwrap();
    pool.set_hash(blocks[0], BlockHash([0; 32]), 0);
}
