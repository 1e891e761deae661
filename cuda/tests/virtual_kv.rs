//! KV in virtual memory against the fake driver: any sequence of requests, lent rows, shares and failures keeps contents,
//! leaks nothing, maps nothing twice, and unmaps nothing that queued kernels still use.
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "support/fake.rs"]
#[allow(dead_code, reason = "each test binary uses some of it")]
mod fake;

use fake::{Fake, OUT_OF_MEMORY, UNKNOWN};
use lagoon_cuda::driver::{Context, Function, Launch, Module, Pinned, Priority, Stream, copy_to_host};
use lagoon_cuda::{CudaError, VirtualKv, VirtualKvError};
use lagoon_kv::vmm::{VmmConfig, VmmError, VmmLayout, VmmShape};
use lagoon_types::KvRun;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

const PAGE: u64 = 1 << 12;

/// Two groups of two layers; 3 page groups of a tensor hold 8 tokens, of 1536 bytes each.
const SHAPE: VmmShape =
    VmmShape { layers: 4, kv_heads: 3, head_dim: 128, element_bytes: 2, page_group_bytes: PAGE, layers_per_group: 2 };

const CONFIG: VmmConfig = VmmConfig {
    direct_blocks: 0,
    batch_max: 3,
    context_max: 40,
    lent_rows_max: 2,
    lent_row_blocks_max: 4,
    stripes: 40,
    address_bytes_max: 1 << 30,
    grow: false,
    eager_stripes: 3,
    reclaim_below: 6,
};

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Fill {
    address: u64,
    words: u64,
    value: u32,
    unused: u32,
}

/// KV memory on the fake, with kernels that write tokens.
struct Rig {
    context: Arc<Context>,
    kv: VirtualKv,
    /// Own work, and lent rows'.
    streams: [Stream; 2],
    kernel: Function,
}

impl Rig {
    fn new(config: VmmConfig) -> Result<Self, VirtualKvError> {
        let context = Context::open(0)?;
        let streams = [Stream::new(&context, Priority::Normal)?, Stream::new(&context, Priority::High)?];
        let kernel = Module::load(&context, b"any image")?.function("lagoon_fake_fill", 0)?;
        let layout = VmmLayout::new(SHAPE)?;
        let kv = VirtualKv::new(&context, layout, config)?;
        Ok(Self { context, kv, streams, kernel })
    }

    /// Words of a token in one layer's K or V.
    const WORDS: u64 = 3 * 128 * 2 / 4;

    /// Queues the writing of a token: every layer's K and V get a number of their own.
    fn write(&self, stream: usize, slot: u32, value: u32) {
        let stream = &self.streams[stream];
        for layer in 0..SHAPE.layers {
            let view = self.kv.layer(layer);
            for (plane, base) in [(0, view.k), (1, view.v)] {
                let address = base + u64::from(slot) * view.token_stride * 2;
                let params = Fill { address, words: Self::WORDS, value: value * 8 + layer * 2 + plane, unused: 0 };
                let how = Launch { grid: [1; 3], block: [32, 1, 1], shared_bytes: 0 };
                // SAFETY: the fake's own kernel; the slot is mapped and fenced.
                unsafe { self.kernel.launch(stream, how, &params) }.unwrap();
            }
        }
        self.kv.used_by(stream).unwrap();
    }

    fn assert_holds(&self, slot: u32, value: u32) {
        let mut pinned = Pinned::new(&self.context, "a test", 8).unwrap();
        for layer in 0..SHAPE.layers {
            let view = self.kv.layer(layer);
            for (plane, base) in [(0, view.k), (1, view.v)] {
                let address = base + u64::from(slot) * view.token_stride * 2;
                // The first word and the last.
                copy_to_host(&self.streams[0], &mut pinned, 0, address, 4).unwrap();
                copy_to_host(&self.streams[0], &mut pinned, 4, address + (Self::WORDS - 1) * 4, 4).unwrap();
                self.streams[0].synchronize().unwrap();
                let got: &[u32] = bytemuck::cast_slice(pinned.as_slice());
                assert_eq!(got, [value * 8 + layer * 2 + plane; 2], "slot {slot}, layer {layer}, plane {plane}");
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Alloc,
    Free(usize),
    Step(Vec<u32>),
    Settle,
    Share(usize, u32),
    Vacate(usize, u32),
    Open,
    Lend(usize, u32, u32),
    Recall(usize, u32),
    Compact(usize),
    Close(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..3usize;
    prop_oneof![
        3 => Just(Op::Alloc),
        2 => n.clone().prop_map(Op::Free),
        8 => prop::collection::vec(0..9u32, 3).prop_map(Op::Step),
        2 => Just(Op::Settle),
        2 => (n.clone(), 0..40u32).prop_map(|(a, b)| Op::Share(a, b)),
        2 => (n.clone(), 0..4u32).prop_map(|(a, b)| Op::Vacate(a, b)),
        1 => Just(Op::Open),
        3 => (n.clone(), 1..3u32, 0..50u32).prop_map(|(a, b, c)| Op::Lend(a, b, c)),
        2 => (n.clone(), 0..4u32).prop_map(|(a, b)| Op::Recall(a, b)),
        2 => n.clone().prop_map(Op::Compact),
        1 => n.prop_map(Op::Close),
    ]
}

type Tokens = BTreeMap<u32, u32>;

struct World<'a> {
    rig: &'a Rig,
    requests: BTreeMap<usize, (u32, Tokens)>,
    lent_rows: BTreeMap<usize, (u32, Tokens)>,
    values: u32,
}

fn pick<T>(map: &BTreeMap<usize, T>, n: usize) -> Option<usize> {
    map.keys().nth(n.checked_rem(map.len())?).copied()
}

/// Errors that were injected or are memory's end: the world is as it was before the call.
fn expected(error: &VirtualKvError) -> bool {
    matches!(
        error,
        VirtualKvError::Accounting(VmmError::OutOfMemory { .. } | VmmError::NoRow | VmmError::TooLong { .. })
            | VirtualKvError::Driver(_)
    )
}

impl World<'_> {
    fn did<T>(result: Result<T, VirtualKvError>) -> Option<T> {
        result.map_err(|error| assert!(expected(&error), "{error}")).ok()
    }

    fn per() -> u32 {
        8
    }

    fn run(&mut self, op: Op) {
        let kv = &self.rig.kv;
        match op {
            Op::Alloc => {
                if let Some(row) = Self::did(kv.alloc_reqid()) {
                    assert!(self.requests.insert(row, (0, Tokens::new())).is_none(), "a row given twice");
                }
            }
            Op::Free(n) => {
                let Some(row) = pick(&self.requests, n) else { return };
                if Self::did(kv.free_reqid(row)).is_some() {
                    self.requests.remove(&row);
                }
            }
            Op::Step(more) => self.step(&more),
            Op::Settle => kv.settle(),
            Op::Share(n, tokens) => self.share(n, tokens),
            Op::Vacate(n, block) => {
                let Some(row) = pick(&self.requests, n) else { return };
                let (len, tokens) = self.requests.get_mut(&row).unwrap();
                if (block + 1) * Self::per() <= *len && Self::did(kv.vacate(row, block..block + 1)).is_some() {
                    tokens.retain(|pos, _| *pos / Self::per() != block);
                }
            }
            Op::Open => {
                if let Some(row) = Self::did(kv.open_lent_row()) {
                    self.lent_rows.insert(row, (0, Tokens::new()));
                }
            }
            Op::Lend(n, blocks, gap) => {
                let Some(row) = pick(&self.lent_rows, n) else { return };
                let (next, tokens) = self.lent_rows.get_mut(&row).unwrap();
                let first = *next + gap;
                if Self::did(kv.lend(row, blocks, first)).is_none() {
                    return;
                }
                *next = first + blocks * Self::per();
                let run = kv.lent_row_runs(row).into_iter().last().unwrap();
                for pos in first..*next {
                    self.values += 1;
                    self.rig.write(1, run.base + (pos - run.first_pos), self.values);
                    tokens.insert(pos, self.values);
                }
            }
            Op::Recall(n, block) => self.recall(n, block),
            Op::Compact(n) => {
                let Some(row) = pick(&self.lent_rows, n) else { return };
                let before: u32 = kv.lent_row_runs(row).iter().map(|run| run.len).sum();
                if Self::did(kv.compact(row)).is_some() {
                    let runs = kv.lent_row_runs(row);
                    let base = runs.first().map_or(0, |run| run.base);
                    assert!(runs.last().is_none_or(|run| run.base + run.len == base + before), "{runs:?}");
                }
            }
            Op::Close(n) => {
                let Some(row) = pick(&self.lent_rows, n) else { return };
                if Self::did(kv.close_lent_row(row)).is_some() {
                    self.lent_rows.remove(&row);
                }
            }
        }
    }

    /// Recalls the rBlock of a lent row's token, wherever it lies.
    fn recall(&mut self, n: usize, block: u32) {
        let Some(row) = pick(&self.lent_rows, n) else { return };
        let base = self.rig.kv.slot0(row);
        let runs = self.rig.kv.lent_row_runs(row);
        let Some(run) = runs.iter().find(|run| (run.base..run.base + run.len).contains(&(base + block * 8))) else {
            return;
        };
        let first = run.first_pos + base + block * 8 - run.base;
        if Self::did(self.rig.kv.recall(row, block..block + 1)).is_some() {
            let (_, tokens) = self.lent_rows.get_mut(&row).unwrap();
            tokens.retain(|pos, _| !(first..first + 8).contains(pos));
        }
    }

    fn step(&mut self, more: &[u32]) {
        let mut lengths = vec![0; 3];
        for (row, (len, _)) in &self.requests {
            lengths[*row] = (len + more[*row]).min(CONFIG.context_max);
        }
        if Self::did(self.rig.kv.step(&lengths)).is_none() {
            return;
        }
        for (row, (len, tokens)) in &mut self.requests {
            for pos in *len..lengths[*row] {
                self.values += 1;
                self.rig.write(0, self.rig.kv.slot0(*row) + pos, self.values);
                tokens.insert(pos, self.values);
            }
            *len = lengths[*row];
        }
    }

    fn share(&mut self, n: usize, tokens: u32) {
        let (Some(from), Some(to)) = (pick(&self.requests, n), pick(&self.requests, n + 1)) else { return };
        let (len, held) = self.requests[&from].clone();
        if from != to
            && self.requests[&to].0 == 0
            && let Some(shared) = Self::did(self.rig.kv.share(from, to, tokens.min(len)))
        {
            self.requests.insert(to, (shared, held.range(..shared).map(|(p, v)| (*p, *v)).collect()));
        }
    }

    fn check(&self) {
        let holds = |runs: Vec<KvRun>, tokens: &Tokens| {
            assert!(runs.iter().flat_map(KvRun::positions).eq(tokens.keys().copied()), "{runs:?}");
            for run in runs {
                (run.base..).zip(run.positions()).for_each(|(slot, pos)| self.rig.assert_holds(slot, tokens[&pos]));
            }
        };
        self.rig.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        for (row, (len, tokens)) in &self.requests {
            holds(self.rig.kv.runs(*row, *len), tokens);
        }
        for (row, (_, tokens)) in &self.lent_rows {
            holds(self.rig.kv.lent_row_runs(*row), tokens);
        }
    }
}

fn config() -> impl Strategy<Value = VmmConfig> {
    (10..40u32, 0..6u32, 0..6u32, any::<bool>()).prop_map(|(stripes, eager, reclaim_below, tight)| {
        let config = VmmConfig { stripes, eager_stripes: eager, reclaim_below, ..CONFIG };
        // An rBlock of addresses is 3 stripes of 4 page groups.
        if tight { VmmConfig { grow: true, address_bytes_max: 19 * 12 * PAGE, ..config } } else { config }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn contents_are_kept_whatever_happens(
        config in config(),
        seed in 0..1000u64,
        // Some calls of the driver fail.
        ops in prop::collection::vec((op(), prop::option::weighted(0.1, 1..12u64)), 1..40),
    ) {
        let fake = match Fake::new(1 << 24, PAGE, seed) {
            Ok(fake) => fake,
            Err(reason) => {
                fake::skip("contents_are_kept_whatever_happens", &reason);
                return Ok(());
            }
        };
        let rig = Rig::new(config).unwrap();
        let mut world = World { rig: &rig, requests: BTreeMap::new(), lent_rows: BTreeMap::new(), values: 0 };
        for (at, (op, fail)) in ops.into_iter().enumerate() {
            if let Some(nth) = fail {
                // Not the background thread's call: it would be mended by the next step unseen.
                rig.kv.settle();
                fake.fail(if at % 2 == 0 { "cuMemMap" } else { "cuMemSetAccess" }, nth, if at % 3 == 0 { UNKNOWN } else { OUT_OF_MEMORY });
            }
            world.run(op);
            fake.fail("", 0, 0);
            // Not always: work should stay queued over several operations.
            if at % 4 == 0 {
                world.check();
            }
        }
        world.check();
        drop(rig);
        fake.finish();
    }
}

/// Addresses that the caller gives out, as the engine's block pool does.
#[derive(Clone, Debug)]
enum Direct {
    Hold(Vec<u32>),
    Release(u32, u32),
    Share(u32, u32),
    Expect(u32, u32),
    Settle,
}

fn direct() -> impl Strategy<Value = Direct> {
    let block = 0..DIRECT_BLOCKS;
    prop_oneof![
        6 => prop::collection::vec(block.clone(), 1..4).prop_map(Direct::Hold),
        4 => (block.clone(), 1..4u32).prop_map(|(a, n)| Direct::Release(a, n)),
        2 => (block.clone(), block.clone()).prop_map(|(a, b)| Direct::Share(a, b)),
        2 => (block.clone(), block).prop_map(|(a, b)| Direct::Expect(a, b)),
        2 => Just(Direct::Settle),
    ]
}

const DIRECT_BLOCKS: u32 = 16;
const DIRECT: VmmConfig = VmmConfig {
    direct_blocks: DIRECT_BLOCKS,
    batch_max: 0,
    context_max: 0,
    lent_rows_max: 0,
    lent_row_blocks_max: 0,
    eager_stripes: 0,
    ..CONFIG
};

/// Does one of them. Newly held memory is written by either stream, but by one stream at each address: the order of writes of two
/// streams to memory that stayed mapped is the device's task ([`lagoon_cuda::CudaDevice`]).
fn run_direct(rig: &Rig, held: &mut BTreeMap<u32, u32>, op: Direct, value: u32) {
    match op {
        Direct::Hold(blocks) => {
            if World::did(rig.kv.hold(blocks.iter().copied())).is_some() {
                for block in blocks {
                    held.entry(block).or_insert_with(|| {
                        (block * 8..block * 8 + 8).for_each(|slot| rig.write(block as usize % 2, slot, value));
                        value
                    });
                }
            }
        }
        Direct::Release(block, n) => {
            let blocks = block..(block + n).min(DIRECT_BLOCKS);
            if World::did(rig.kv.release(blocks.clone())).is_some() {
                held.retain(|at, _| !blocks.contains(at));
            }
        }
        Direct::Share(from, to) => {
            if let Some(value) = held.get(&from).copied().filter(|_| !held.contains_key(&to))
                && World::did(rig.kv.share_direct(from..from + 1, to)).is_some()
            {
                held.insert(to, value);
            }
        }
        Direct::Expect(ahead, next) => rig.kv.expect([ahead].into_iter(), [next].into_iter()),
        Direct::Settle => rig.kv.settle(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn held_addresses_keep_what_they_hold(
        stripes in 6..40u32,
        reclaim_below in 0..6u32,
        seed in 0..1000u64,
        ops in prop::collection::vec((direct(), prop::option::weighted(0.1, 1..12u64)), 1..40),
    ) {
        let fake = match Fake::new(1 << 24, PAGE, seed) {
            Ok(fake) => fake,
            Err(reason) => {
                fake::skip("held_addresses_keep_what_they_hold", &reason);
                return Ok(());
            }
        };
        let rig = Rig::new(VmmConfig { stripes, reclaim_below, ..DIRECT }).unwrap();
        let mut held = BTreeMap::new();
        for (value, (op, fail)) in (1u32..).zip(ops) {
            if let Some(nth) = fail {
                rig.kv.settle();
                let function = if value.is_multiple_of(2) { "cuMemMap" } else { "cuMemSetAccess" };
                fake.fail(function, nth, if value.is_multiple_of(3) { UNKNOWN } else { OUT_OF_MEMORY });
            }
            run_direct(&rig, &mut held, op, value);
            fake.fail("", 0, 0);
            if value.is_multiple_of(4) {
                rig.streams.iter().for_each(|stream| stream.synchronize().unwrap());
                held.iter().for_each(|(block, value)| rig.assert_holds(block * 8 + 3, *value));
            }
        }
        rig.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        for (block, value) in &held {
            (block * 8..block * 8 + 8).for_each(|slot| rig.assert_holds(slot, *value));
        }
        World::did(rig.kv.release(0..DIRECT_BLOCKS));
        let (free, kept) = rig.kv.free_and_kept_groups();
        prop_assert_eq!(free + kept, u64::from(stripes) * 4, "nothing leaks");
        drop(rig);
        fake.finish();
    }
}

#[test]
fn every_failure_of_init_releases_what_was_made() {
    let fake = fake_or_skip!(1 << 24, PAGE, 5);
    for function in ["cuMemAddressReserve", "cuMemCreate", "cuStreamCreateWithPriority", "cuModuleGetFunction"] {
        for nth in 1..4 {
            fake.fail(function, nth, OUT_OF_MEMORY);
            let result = Rig::new(CONFIG);
            // The function may be called fewer times.
            assert!(nth > 1 || result.is_err(), "{function}");
            drop(result);
            let counts = fake.counts();
            assert_eq!((counts.physical, counts.reservations, counts.streams), (0, 0, 0), "{function} {nth}");
        }
    }
    fake.fail("", 0, 0);
    // More page groups than memory: out of memory says so.
    let many = VmmConfig { stripes: 2000, ..CONFIG };
    let Err(VirtualKvError::Driver(error)) = Rig::new(many) else { panic!("there is not so much memory") };
    assert_eq!(error, CudaError::OutOfMemory { what: "a page group", bytes: PAGE });
    fake.finish();
}

#[test]
fn a_failing_map_undoes_the_step_and_the_next_one_mends_it() {
    let fake = fake_or_skip!(1 << 24, PAGE, 6);
    let rig = Rig::new(VmmConfig { eager_stripes: 0, reclaim_below: 0, ..CONFIG }).unwrap();
    let row = rig.kv.alloc_reqid().unwrap();
    for nth in 1..=12 {
        fake.fail("cuMemMap", nth, UNKNOWN);
        let mut lengths = [0; 3];
        lengths[row] = 8;
        let error = rig.kv.step(&lengths).unwrap_err();
        assert!(matches!(error, VirtualKvError::Driver(_)), "{error}");
        assert_eq!((fake.counts().mappings, rig.kv.free_and_kept_groups()), (0, (160, 0)), "call {nth}");
    }
    let mut lengths = [0; 3];
    lengths[row] = 8;
    rig.kv.step(&lengths).unwrap();
    assert_eq!(rig.kv.counters().in_step, 3);
    rig.write(0, rig.kv.slot0(row) + 7, 1);
    rig.assert_holds(rig.kv.slot0(row) + 7, 1);
    drop(rig);
    fake.finish();
}

#[test]
fn when_undoing_fails_too_nothing_is_mapped_any_more_and_all_is_released() {
    let fake = fake_or_skip!(1 << 24, PAGE, 6);
    let rig = Rig::new(VmmConfig { eager_stripes: 0, reclaim_below: 0, ..CONFIG }).unwrap();
    let row = rig.kv.alloc_reqid().unwrap();
    let lent_row = rig.kv.open_lent_row().unwrap();
    rig.kv.lend(lent_row, 2, 0).unwrap();
    rig.kv.recall(lent_row, 0..1).unwrap();
    // The second mapping of the compaction fails: the first is taken back.
    fake.fail("cuMemMap", 2, UNKNOWN);
    assert!(matches!(rig.kv.compact(lent_row), Err(VirtualKvError::Driver(_))));
    assert_eq!(rig.kv.lent_row_runs(lent_row), [KvRun { base: rig.kv.slot0(lent_row) + 8, len: 8, first_pos: 8 }]);
    // A mapping fails, and so does every call after it.
    let mut lengths = [0; 3];
    lengths[row] = 40;
    fake.fail_from("*", 14, UNKNOWN);
    let lost = rig.kv.step(&lengths).unwrap_err();
    assert!(matches!(lost, VirtualKvError::Lost(..)), "{lost}");
    fake.fail("", 0, 0);
    assert_eq!(rig.kv.step(&lengths), Err(lost));
    drop(rig);
    fake.finish();
}

#[test]
fn kernels_in_flight_end_before_their_memory_is_unmapped() {
    for seed in 0..20 {
        let fake = fake_or_skip!(1 << 24, PAGE, seed * 7);
        let rig = Rig::new(VmmConfig { stripes: 6, eager_stripes: 0, reclaim_below: 0, ..CONFIG }).unwrap();
        let (lent_row, row) = (rig.kv.open_lent_row().unwrap(), rig.kv.alloc_reqid().unwrap());
        rig.kv.lend(lent_row, 2, 0).unwrap();
        let base = rig.kv.slot0(lent_row);
        (0..16).for_each(|i| rig.write(1, base + i, i));
        // Recalled with the writes still queued, and at once given to a request that writes, too.
        rig.kv.recall(lent_row, 0..2).unwrap();
        let mut lengths = [0; 3];
        lengths[row] = 16;
        rig.kv.step(&lengths).unwrap();
        let slot0 = rig.kv.slot0(row);
        (0..16).for_each(|i| rig.write(0, slot0 + i, 100 + i));
        rig.streams.iter().for_each(|s| s.synchronize().unwrap());
        (0..16).for_each(|i| rig.assert_holds(slot0 + i, 100 + i));
        drop(rig);
        fake.finish();
    }
}

#[test]
fn the_background_thread_maps_one_iteration_ahead() {
    let fake = fake_or_skip!(1 << 24, PAGE, 8);
    let rig = Rig::new(CONFIG).unwrap();
    let row = rig.kv.alloc_reqid().unwrap();
    for tokens in 1..=40 {
        let mut lengths = [0; 3];
        lengths[row] = tokens;
        rig.kv.step(&lengths).unwrap();
        rig.kv.settle();
    }
    let counters = rig.kv.counters();
    assert_eq!((counters.in_step, counters.ahead, counters.eager), (1, 14, 3), "{counters:?}");
    // What it fails with is mended by the step that needs it.
    rig.kv.free_reqid(row).unwrap();
    fake.fail("cuMemMap", 1, UNKNOWN);
    rig.kv.settle();
    fake.fail("", 0, 0);
    let row = rig.kv.alloc_reqid().unwrap();
    let mut lengths = [0; 3];
    lengths[row] = 40;
    rig.kv.step(&lengths).unwrap();
    assert_eq!(rig.kv.counters().reused, 15, "deferred reclamation");
    drop(rig);
    fake.finish();
}

#[test]
fn page_groups_are_whole_pages() {
    let fake = fake_or_skip!(1 << 24, 1 << 16, 8);
    assert!(matches!(Rig::new(CONFIG), Err(VirtualKvError::Driver(CudaError::Unsupported(_)))));
    fake.finish();
}
