//! Addresses that the caller gives out: random holds, releases, shares and failures on the model of memory.

use super::tests::{CONFIG, Memory, shape};
use super::{Vmm, VmmConfig, VmmError, VmmLayout};
use proptest::prelude::*;
use std::collections::BTreeMap;

const BLOCKS: u32 = 20;

#[derive(Clone, Debug)]
enum Op {
    Hold(Vec<u32>),
    Release(u32, u32),
    Share(u32, u32, u32),
    Expect(u32, u32),
    Ahead(bool),
}

fn op() -> impl Strategy<Value = Op> {
    let block = 0..BLOCKS;
    prop_oneof![
        6 => prop::collection::vec(block.clone(), 1..5).prop_map(Op::Hold),
        4 => (block.clone(), 1..5u32).prop_map(|(a, n)| Op::Release(a, n)),
        2 => (block.clone(), block.clone(), 1..4u32).prop_map(|(a, b, n)| Op::Share(a, b, n)),
        3 => (block.clone(), block).prop_map(|(a, b)| Op::Expect(a, b)),
        3 => any::<bool>().prop_map(Op::Ahead),
    ]
}

struct World {
    vmm: Vmm,
    memory: Memory,
    /// By held block: what its tokens hold. Sharers have the same value.
    held: BTreeMap<u32, u64>,
    values: u64,
}

impl World {
    fn run(&mut self, op: Op, fail: Option<usize>) {
        match op {
            Op::Hold(blocks) => {
                let before = self.vmm.counters();
                match self.vmm.hold(blocks.iter().copied()) {
                    Ok(plan) => {
                        if self.memory.run(&mut self.vmm, plan, fail) {
                            blocks.into_iter().for_each(|block| self.fill(block));
                        } else {
                            assert_eq!(self.vmm.counters(), before, "a plan that was undone counts nothing");
                        }
                    }
                    Err(VmmError::OutOfMemory { needed, available }) => {
                        assert!(needed > available);
                        // A group of layers has two tensors, and a block three stripes.
                        let wanted = blocks.iter().filter(|b| !self.held.contains_key(b)).count() as u64;
                        assert!(wanted * 6 > available, "{wanted} blocks, {available} page groups");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Op::Release(block, n) => {
                let blocks = block..(block + n).min(BLOCKS);
                let plan = self.vmm.release(blocks.clone());
                if self.memory.run(&mut self.vmm, plan, fail) {
                    self.held.retain(|at, _| !blocks.contains(at));
                }
            }
            Op::Share(from, to, n) => {
                let apart = from + n <= to || to + n <= from;
                let sources = (from..from + n).all(|at| self.held.contains_key(&at));
                let targets = to + n <= BLOCKS && (to..to + n).all(|at| !self.held.contains_key(&at));
                if apart && sources && targets {
                    let plan = self.vmm.share_direct(from..from + n, to);
                    if self.memory.run(&mut self.vmm, plan, fail) {
                        for i in 0..n {
                            self.held.insert(to + i, self.held[&(from + i)]);
                        }
                    }
                }
            }
            Op::Expect(ahead, next) => self.vmm.expect([ahead].into_iter(), [next].into_iter()),
            Op::Ahead(reclaim) => {
                let plan = self.vmm.ahead(reclaim);
                self.memory.run(&mut self.vmm, plan, fail);
            }
        }
    }

    /// What is newly held is written; what is held already may be shared and is left alone.
    fn fill(&mut self, block: u32) {
        if !self.held.contains_key(&block) {
            self.values += 1;
            let per = self.vmm.layout().block_tokens();
            (block * per..(block + 1) * per).for_each(|slot| self.memory.write(self.vmm.layout(), slot, self.values));
            self.held.insert(block, self.values);
        }
    }

    fn check(&self) {
        self.vmm.check();
        let per = self.vmm.layout().block_tokens();
        for block in 0..BLOCKS {
            assert_eq!(self.vmm.is_held(block), self.held.contains_key(&block));
        }
        for (block, value) in &self.held {
            (block * per..(block + 1) * per).for_each(|slot| self.memory.assert_holds(self.vmm.layout(), slot, *value));
        }
    }
}

fn vmm(stripes: u32, reclaim_below: u32) -> Vmm {
    let config = VmmConfig {
        direct_blocks: BLOCKS,
        batch_max: 0,
        lent_rows_max: 0,
        lent_row_blocks_max: 0,
        stripes,
        reclaim_below,
        ..CONFIG
    };
    Vmm::new(VmmLayout::new(shape()).unwrap(), config).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_held_is_there_once_and_stays(
        stripes in 6..50u32,
        reclaim_below in 0..6u32,
        ops in prop::collection::vec((op(), prop::option::weighted(0.15, 0..8usize)), 1..80),
    ) {
        let vmm = vmm(stripes, reclaim_below);
        let mut world = World { vmm, memory: Memory::default(), held: BTreeMap::new(), values: 0 };
        for (op, fail) in ops {
            world.run(op, fail);
            world.check();
        }
        let plan = world.vmm.release(0..BLOCKS);
        world.memory.run(&mut world.vmm, plan, None);
        prop_assert_eq!(world.vmm.free_stripes() + world.vmm.kept_stripes(), stripes, "nothing leaks");
    }
}

#[test]
fn what_was_released_is_found_again_and_the_longest_kept_is_reclaimed_first() {
    let mut vmm = vmm(12, 0);
    let _ = vmm.hold(0..3).unwrap();
    let _ = vmm.release(0..3);
    assert_eq!((vmm.free_stripes(), vmm.kept_stripes()), (3, 9));
    assert!(vmm.hold(0..2).unwrap().commands().is_empty());
    assert_eq!((vmm.counters().reused, vmm.counters().in_step), (6, 9));
    let _ = vmm.release(0..2);
    // Two blocks elsewhere: one is free, the other is what has been kept longest.
    let _ = vmm.hold(10..12).unwrap();
    assert_eq!(vmm.counters().reclaimed, 3);
    assert!(vmm.hold(0..2).unwrap().commands().is_empty(), "block 2 was kept longer than 0 and 1");
    let error = vmm.hold(5..6).unwrap_err();
    assert_eq!((error, vmm.counters().refused), (VmmError::OutOfMemory { needed: 6, available: 0 }, 1));
    vmm.check();
}

#[test]
fn what_is_expected_is_mapped_for_nobody_until_it_is_held() {
    let mut vmm = vmm(20, 4);
    let _ = vmm.hold(0..1).unwrap();
    vmm.expect([1].into_iter(), 8..10);
    let _ = vmm.ahead(true);
    assert_eq!((vmm.counters().ahead, vmm.counters().eager, vmm.kept_stripes()), (3, 6, 9));
    assert!(vmm.ahead(true).commands().is_empty(), "it is done once");
    assert!(vmm.hold([1, 8].into_iter()).unwrap().commands().is_empty());
    assert_eq!(vmm.counters().in_step, 3);
    vmm.check();
}

#[test]
fn a_shared_block_outlives_its_first_holder() {
    let mut vmm = vmm(9, 0);
    let _ = vmm.hold(0..2).unwrap();
    let _ = vmm.share_direct(0..2, 6);
    assert_eq!((vmm.free_stripes(), vmm.counters().shared), (3, 6));
    assert!(vmm.release(0..2).unmaps(), "what others see is not kept for a new holder");
    let _ = vmm.hold(0..1).unwrap();
    assert!(vmm.hold(1..2).is_err(), "the sharer still has it");
    assert!(!vmm.release(6..8).unmaps());
    let _ = vmm.hold(1..2).unwrap();
    vmm.check();
}
