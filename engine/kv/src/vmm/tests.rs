//! Random requests, lent rows, shares and failures, carried out on a model of memory that knows every token's contents.
//!
//! The model maps, unmaps and writes as a device would: a double map, an unmap of nothing, a write to what somebody
//! else sees or a read of what is not mapped fails the test.

use super::{Command, Plan, Plane, Vmm, VmmConfig, VmmError, VmmLayout, VmmShape};
use lagoon_types::KvRun;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// 3 stripes hold 4 tokens.
pub(super) fn shape() -> VmmShape {
    VmmShape { layers: 3, kv_heads: 1, head_dim: 2, element_bytes: 2, page_group_bytes: 16, layers_per_group: 3 }
}

pub(super) const CONFIG: VmmConfig = VmmConfig {
    direct_blocks: 0,
    batch_max: 3,
    context_max: 24,
    lent_rows_max: 2,
    lent_row_blocks_max: 5,
    stripes: 40,
    address_bytes_max: 1 << 30,
    grow: false,
    eager_stripes: 3,
    reclaim_below: 4,
};

/// Memory by stripe and byte, and what is mapped where. One tensor stands for all, as they are alike.
#[derive(Default)]
pub(super) struct Memory {
    places: BTreeMap<u32, u32>,
    cells: BTreeMap<(u32, u64), u64>,
}

impl Memory {
    fn apply(&mut self, command: Command) {
        match command {
            Command::Map { stripe, place } => {
                assert_eq!(self.places.insert(place, stripe.0), None, "double map at {place}");
            }
            Command::Unmap { stripe, place } => {
                assert_eq!(self.places.remove(&place), Some(stripe.0), "unmap of another stripe at {place}");
            }
        }
    }

    fn reverse(&mut self, command: Command) {
        match command {
            Command::Map { stripe, place } => self.apply(Command::Unmap { stripe, place }),
            Command::Unmap { stripe, place } => self.apply(Command::Map { stripe, place }),
        }
    }

    /// Carries a plan out, unless the `fail`th command fails: then everything is taken back.
    pub(super) fn run(&mut self, vmm: &mut Vmm, plan: Plan, fail: Option<usize>) -> bool {
        let commands = plan.commands().to_vec();
        if let Some(at) = fail.filter(|at| *at < commands.len()) {
            commands[..at].iter().for_each(|c| self.apply(*c));
            commands[..at].iter().rev().for_each(|c| self.reverse(*c));
            vmm.undo(plan);
            return false;
        }
        commands.into_iter().for_each(|c| self.apply(c));
        true
    }

    fn bytes(layout: &VmmLayout, slot: u32) -> std::ops::Range<u64> {
        let at = u64::from(slot) * layout.slot_bytes();
        at..at + layout.slot_bytes()
    }

    fn cell(&self, layout: &VmmLayout, byte: u64) -> (u32, u64) {
        let page = layout.shape().page_group_bytes;
        let place = u32::try_from(byte / page).unwrap();
        (*self.places.get(&place).unwrap_or_else(|| panic!("place {place} is not mapped")), byte % page)
    }

    pub(super) fn write(&mut self, layout: &VmmLayout, slot: u32, value: u64) {
        for byte in Self::bytes(layout, slot) {
            let cell = self.cell(layout, byte);
            self.cells.insert(cell, value);
        }
    }

    pub(super) fn assert_holds(&self, layout: &VmmLayout, slot: u32, value: u64) {
        for byte in Self::bytes(layout, slot) {
            assert_eq!(self.cells.get(&self.cell(layout, byte)), Some(&value), "slot {slot}");
        }
    }
}

/// A request's or lent row's tokens: what each position holds, if it is here.
type Tokens = BTreeMap<u32, u64>;

struct World {
    vmm: Vmm,
    memory: Memory,
    /// By row: tokens, and how many are at the front of the others.
    requests: BTreeMap<usize, (u32, Tokens)>,
    lent_rows: BTreeMap<usize, (Vec<Option<u32>>, Tokens)>,
    values: u64,
}

#[derive(Clone, Debug)]
enum Op {
    Alloc,
    Free(usize),
    Step(Vec<u32>),
    Ahead(bool),
    Share(usize, u32),
    Vacate(usize, u32),
    Restore(usize, u32),
    Open,
    Lend(usize, u32, u32),
    Recall(usize, u32, u32),
    Compact(usize),
    Close(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..4usize;
    prop_oneof![
        3 => Just(Op::Alloc),
        2 => n.clone().prop_map(Op::Free),
        8 => prop::collection::vec(0..6u32, 3).prop_map(Op::Step),
        4 => any::<bool>().prop_map(Op::Ahead),
        2 => (n.clone(), 0..24u32).prop_map(|(a, b)| Op::Share(a, b)),
        2 => (n.clone(), 0..6u32).prop_map(|(a, b)| Op::Vacate(a, b)),
        2 => (n.clone(), 0..6u32).prop_map(|(a, b)| Op::Restore(a, b)),
        1 => Just(Op::Open),
        3 => (n.clone(), 1..3u32, 0..50u32).prop_map(|(a, b, c)| Op::Lend(a, b, c)),
        2 => (n.clone(), 0..5u32, 1..3u32).prop_map(|(a, b, c)| Op::Recall(a, b, c)),
        2 => n.clone().prop_map(Op::Compact),
        1 => n.prop_map(Op::Close),
    ]
}

fn pick<T>(map: &BTreeMap<usize, T>, n: usize) -> Option<usize> {
    map.keys().nth(n.checked_rem(map.len())?).copied()
}

impl World {
    fn new(config: VmmConfig) -> Self {
        let vmm = Vmm::new(VmmLayout::new(shape()).unwrap(), config).unwrap();
        Self { vmm, memory: Memory::default(), requests: BTreeMap::new(), lent_rows: BTreeMap::new(), values: 0 }
    }

    fn value(&mut self) -> u64 {
        self.values += 1;
        self.values
    }

    fn per(&self) -> u32 {
        self.vmm.layout().block_tokens()
    }

    fn run(&mut self, op: Op, fail: Option<usize>) {
        match op {
            Op::Alloc => match self.vmm.alloc_reqid() {
                Ok(row) => assert!(self.requests.insert(row, (0, Tokens::new())).is_none(), "a row given twice"),
                Err(error) => assert_eq!((error, self.requests.len()), (VmmError::NoRow, 3)),
            },
            Op::Free(n) => {
                let Some(row) = pick(&self.requests, n) else { return };
                let plan = self.vmm.free_reqid(row);
                if self.memory.run(&mut self.vmm, plan, fail) {
                    self.requests.remove(&row);
                }
            }
            Op::Step(more) => self.step(&more, fail),
            Op::Ahead(reclaim) => {
                let plan = self.vmm.ahead(reclaim);
                self.memory.run(&mut self.vmm, plan, fail);
            }
            Op::Share(n, tokens) => self.share(n, tokens, fail),
            Op::Vacate(n, block) => {
                let Some(row) = pick(&self.requests, n) else { return };
                let (per, (len, tokens)) = (self.per(), self.requests.get_mut(&row).unwrap());
                if (block + 1) * per <= *len {
                    let plan = self.vmm.vacate(row, block..block + 1);
                    if self.memory.run(&mut self.vmm, plan, fail) {
                        tokens.retain(|pos, _| *pos / per != block);
                    }
                }
            }
            Op::Restore(n, block) => self.restore(n, block, fail),
            Op::Open => {
                if let Ok(row) = self.vmm.open_lent_row() {
                    self.lent_rows.insert(row, (Vec::new(), Tokens::new()));
                }
            }
            Op::Lend(n, blocks, first) => self.lend(n, blocks, first, fail),
            Op::Recall(n, at, blocks) => {
                let Some(row) = pick(&self.lent_rows, n) else { return };
                let (per, (entries, tokens)) = (self.per(), self.lent_rows.get_mut(&row).unwrap());
                let end = (at + blocks).min(u32::try_from(entries.len()).unwrap());
                let plan = self.vmm.recall(row, at.min(end)..end);
                if self.memory.run(&mut self.vmm, plan, fail) {
                    for entry in &mut entries[at.min(end) as usize..end as usize] {
                        if let Some(first) = entry.take() {
                            tokens.retain(|pos, _| !(first..first + per).contains(pos));
                        }
                    }
                }
            }
            Op::Compact(n) => {
                let Some(row) = pick(&self.lent_rows, n) else { return };
                let plan = self.vmm.compact(row);
                if self.memory.run(&mut self.vmm, plan, fail) {
                    self.lent_rows.get_mut(&row).unwrap().0.retain(Option::is_some);
                }
            }
            Op::Close(n) => {
                let Some(row) = pick(&self.lent_rows, n) else { return };
                let plan = self.vmm.close_lent_row(row);
                if self.memory.run(&mut self.vmm, plan, fail) {
                    self.lent_rows.remove(&row);
                }
            }
        }
    }

    fn step(&mut self, more: &[u32], fail: Option<usize>) {
        let mut lengths = vec![0; 3];
        for (row, (len, _)) in &self.requests {
            lengths[*row] = (len + more[*row]).min(24);
        }
        match self.vmm.step(&lengths) {
            Ok(plan) => {
                if !self.memory.run(&mut self.vmm, plan, fail) {
                    return;
                }
                for row in self.requests.keys().copied().collect::<Vec<_>>() {
                    for pos in self.requests[&row].0..lengths[row] {
                        let value = self.value();
                        self.memory.write(self.vmm.layout(), self.vmm.slot0(row) + pos, value);
                        self.requests.get_mut(&row).unwrap().1.insert(pos, value);
                    }
                    self.requests.get_mut(&row).unwrap().0 = lengths[row];
                }
            }
            Err(VmmError::OutOfMemory { needed, available }) => assert!(needed > available),
            Err(VmmError::TooLong { .. }) => assert!(self.vmm.config().grow, "full ranges always suffice"),
            Err(error) => panic!("{error}"),
        }
    }

    fn share(&mut self, n: usize, tokens: u32, fail: Option<usize>) {
        let (Some(from), Some(to)) = (pick(&self.requests, n), pick(&self.requests, n + 1)) else { return };
        let (len, held) = self.requests[&from].clone();
        if from == to || self.requests[&to].0 != 0 {
            return;
        }
        let Ok((plan, shared)) = self.vmm.share(from, to, tokens.min(len)) else {
            assert!(self.vmm.config().grow, "full ranges always suffice");
            return;
        };
        assert!(shared <= tokens.min(len) && shared.is_multiple_of(self.per()));
        if self.memory.run(&mut self.vmm, plan, fail) {
            let front = held.range(..shared).map(|(p, v)| (*p, *v)).collect::<Tokens>();
            assert_eq!(front.len(), shared as usize, "only what is here is shared");
            self.requests.insert(to, (shared, front));
        }
    }

    fn restore(&mut self, n: usize, block: u32, fail: Option<usize>) {
        let Some(row) = pick(&self.requests, n) else { return };
        let per = self.per();
        let first = block * per;
        let (len, tokens) = &self.requests[&row];
        if first + per > *len || tokens.contains_key(&first) {
            return;
        }
        if let Ok(plan) = self.vmm.restore(row, block..block + 1)
            && self.memory.run(&mut self.vmm, plan, fail)
        {
            for pos in first..first + per {
                let value = self.value();
                self.memory.write(self.vmm.layout(), self.vmm.slot0(row) + pos, value);
                self.requests.get_mut(&row).unwrap().1.insert(pos, value);
            }
        }
    }

    fn lend(&mut self, n: usize, blocks: u32, first: u32, fail: Option<usize>) {
        let Some(row) = pick(&self.lent_rows, n) else { return };
        let (per, (entries, tokens)) = (self.per(), self.lent_rows.get_mut(&row).unwrap());
        // Lent rows' positions ascend, with gaps.
        let first = tokens.keys().last().map_or(0, |p| p + 1) + first;
        match self.vmm.lend(row, blocks, first) {
            Ok(plan) => {
                if !self.memory.run(&mut self.vmm, plan, fail) {
                    return;
                }
                let at = u32::try_from(entries.len()).unwrap();
                entries.extend((0..blocks).map(|b| Some(first + b * per)));
                for i in 0..blocks * per {
                    self.values += 1;
                    self.memory.write(self.vmm.layout(), self.vmm.slot0(row) + at * per + i, self.values);
                    tokens.insert(first + i, self.values);
                }
            }
            Err(VmmError::TooLong { .. }) => assert!(entries.len() + blocks as usize > 5),
            Err(VmmError::OutOfMemory { needed, available }) => assert!(needed > available),
            Err(error) => panic!("{error}"),
        }
    }

    fn check(&self) {
        self.vmm.check();
        let mapped: std::collections::BTreeSet<u32> = self.memory.places.values().copied().collect();
        assert_eq!(mapped.len(), (self.vmm.config().stripes - self.vmm.free_stripes()) as usize, "a leak");
        let holds = |runs: Vec<KvRun>, tokens: &Tokens| {
            let positions: Vec<u32> = runs.iter().flat_map(KvRun::positions).collect();
            assert!(positions.iter().eq(tokens.keys()), "{runs:?} are the tokens that are here");
            for run in runs {
                for (slot, pos) in (run.base..).zip(run.positions()) {
                    self.memory.assert_holds(self.vmm.layout(), slot, tokens[&pos]);
                }
            }
        };
        for (row, (len, tokens)) in &self.requests {
            holds(self.vmm.runs(*row, *len), tokens);
        }
        for (row, (_, tokens)) in &self.lent_rows {
            holds(self.vmm.lent_row_runs(*row), tokens);
        }
    }
}

fn config() -> impl Strategy<Value = VmmConfig> {
    (8..40u32, 0..6u32, 0..6u32, any::<bool>()).prop_map(|(stripes, eager, reclaim_below, tight)| {
        let config = VmmConfig { stripes, eager_stripes: eager, reclaim_below, ..CONFIG };
        // An rBlock of addresses is 3 stripes of 2 page groups of 16 bytes.
        if tight { VmmConfig { grow: true, address_bytes_max: 22 * 96, ..config } } else { config }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_mapped_twice_or_overwritten(
        config in config(),
        ops in prop::collection::vec((op(), prop::option::weighted(0.15, 0..8usize)), 1..80),
    ) {
        let mut world = World::new(config);
        for (op, fail) in ops {
            world.run(op, fail);
            world.check();
        }
    }
}

fn small() -> Vmm {
    Vmm::new(VmmLayout::new(shape()).unwrap(), CONFIG).unwrap()
}

#[test]
fn a_new_request_finds_what_the_last_one_left() {
    let mut vmm = small();
    let row = vmm.alloc_reqid().unwrap();
    assert_eq!(vmm.step(&[9, 0, 0]).unwrap().commands().len(), 7);
    assert!(vmm.free_reqid(row).commands().is_empty(), "reclamation is deferred");
    assert_eq!(vmm.alloc_reqid().unwrap(), row, "the row with most mapped comes first");
    assert!(vmm.step(&[9, 0, 0]).unwrap().commands().is_empty());
    assert_eq!((vmm.counters().reused, vmm.counters().in_step), (7, 7));
}

#[test]
fn decode_never_maps_in_a_step_when_it_is_mapped_ahead() {
    let mut vmm = small();
    vmm.alloc_reqid().unwrap();
    let _ = vmm.step(&[1, 0, 0]).unwrap();
    for tokens in 2..=24 {
        let _ = vmm.ahead(true);
        assert!(vmm.step(&[tokens, 0, 0]).unwrap().commands().is_empty(), "token {tokens}");
    }
    assert_eq!(vmm.counters().in_step, 1);
    assert_eq!(vmm.counters().ahead, 17);
}

#[test]
fn the_next_request_is_prepared_and_cached_memory_reclaimed() {
    let mut vmm = small();
    vmm.alloc_reqid().unwrap();
    let _ = vmm.step(&[4, 0, 0]).unwrap();
    let plan = vmm.ahead(true);
    assert_eq!((plan.commands().len(), vmm.counters().eager), (1 + 3, 3));
    let next = vmm.alloc_reqid().unwrap();
    assert_eq!(next, 1);
    assert!(vmm.step(&[4, 4, 0]).unwrap().commands().is_empty(), "the prompt fits what was mapped eagerly");
    // Everything is used; what is cached is taken.
    let _ = vmm.step(&[24, 24, 0]).unwrap();
    let _ = vmm.free_reqid(1);
    assert_eq!((vmm.free_stripes(), vmm.kept_stripes()), (40 - 36, 18));
    let _ = vmm.alloc_reqid().unwrap();
    assert_eq!(vmm.kept_stripes(), 0, "the new request took the cached row");
    let _ = vmm.free_reqid(1);
    let third = vmm.open_lent_row().unwrap();
    let _ = vmm.lend(third, 4, 0).unwrap();
    assert_eq!((vmm.counters().reclaimed, vmm.counters().lent), (8, 4));
    vmm.check();
}

#[test]
fn without_memory_a_step_changes_nothing() {
    let mut vmm = Vmm::new(VmmLayout::new(shape()).unwrap(), VmmConfig { stripes: 10, ..CONFIG }).unwrap();
    vmm.alloc_reqid().unwrap();
    vmm.alloc_reqid().unwrap();
    let _ = vmm.step(&[8, 0, 0]).unwrap();
    let error = vmm.step(&[8, 8, 0]).unwrap_err();
    assert_eq!(error, VmmError::OutOfMemory { needed: 12, available: 8 });
    assert_eq!((vmm.free_stripes(), vmm.counters().refused), (4, 1));
    vmm.check();
    // Preempting the first makes room.
    let _ = vmm.free_reqid(0);
    let _ = vmm.step(&[0, 8, 0]).unwrap();
    vmm.check();
}

#[test]
fn addresses_that_do_not_suffice_are_refused_or_grown_into() {
    let layout = VmmLayout::new(shape()).unwrap();
    // Three requests of 6 rBlocks and two lent rows of 5, 96 bytes each.
    let tight = VmmConfig { address_bytes_max: 22 * 96, ..CONFIG };
    assert_eq!(Vmm::new(layout, tight).unwrap_err(), VmmError::Addresses { needed: 28 * 96, available: 22 * 96 });
    let mut vmm = Vmm::new(layout, VmmConfig { grow: true, ..tight }).unwrap();
    assert_eq!(vmm.tensor_bytes() * 2, 22 * 96);
    vmm.alloc_reqid().unwrap();
    let _ = vmm.step(&[8, 0, 0]).unwrap();
    let before = vmm.slot0(0);
    let plan = vmm.step(&[9, 0, 0]).unwrap();
    assert_eq!((plan.commands().len(), vmm.counters().moved), (6 + 6 + 1, 6), "moved by mapping");
    assert_ne!(vmm.slot0(0), before);
    vmm.check();
    // Paper §5.1.3: Yi-34B with two-way tensor parallelism, 500 requests of 200K tokens: 12 TB of addresses.
    let yi = VmmShape {
        layers: 60,
        kv_heads: 4,
        head_dim: 128,
        element_bytes: 2,
        page_group_bytes: 2 << 20,
        layers_per_group: 1,
    };
    let huge = VmmConfig {
        batch_max: 500,
        context_max: 200_000,
        lent_rows_max: 0,
        lent_row_blocks_max: 0,
        address_bytes_max: 1 << 47,
        ..CONFIG
    };
    let vmm = Vmm::new(VmmLayout::new(yi).unwrap(), huge).unwrap();
    let tensor_gb = vmm.tensor_bytes() / 1_000_000_000;
    assert!(
        (102..=104).contains(&tensor_gb),
        "100 GB a tensor in the paper, which counts K and MB loosely: {tensor_gb}"
    );
    assert_eq!(vmm.layout().tensors(), 120);
}

#[test]
fn recalling_from_the_middle_keeps_positions_and_compacting_keeps_runs() {
    let mut vmm = small();
    let lent_row = vmm.open_lent_row().unwrap();
    let _ = vmm.lend(lent_row, 4, 100).unwrap();
    let base = vmm.slot0(lent_row);
    assert_eq!(vmm.lent_row_runs(lent_row), [KvRun { base, len: 16, first_pos: 100 }]);
    let _ = vmm.recall(lent_row, 1..2);
    let halves = [KvRun { base, len: 4, first_pos: 100 }, KvRun { base: base + 8, len: 8, first_pos: 108 }];
    assert_eq!(vmm.lent_row_runs(lent_row), halves);
    let plan = vmm.compact(lent_row);
    assert!(plan.unmaps() && plan.commands().len() == 12);
    let together = [KvRun { base, len: 4, first_pos: 100 }, KvRun { base: base + 4, len: 8, first_pos: 108 }];
    assert_eq!(vmm.lent_row_runs(lent_row), together);
    // A new loan lies behind, where there was none.
    let _ = vmm.lend(lent_row, 2, 116).unwrap();
    assert_eq!(vmm.lent_row_runs(lent_row)[1], KvRun { base: base + 4, len: 16, first_pos: 108 });
    vmm.check();
    let _ = vmm.close_lent_row(lent_row);
    assert_eq!(vmm.free_stripes(), 40);
}

#[test]
fn tensors_are_distinguished_by_layer_group() {
    let layout = VmmLayout::new(VmmShape { layers_per_group: 1, ..shape() }).unwrap();
    assert_eq!(layout.tensors(), 6);
    assert_eq!(layout.tensor_of(2, Plane::V), (5, 0));
    assert_eq!(VmmLayout::new(shape()).unwrap().tensor_of(2, Plane::V), (1, 8));
}
