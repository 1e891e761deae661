//! Shared prefixes in virtual memory, over the fake driver: the same memory is mapped at each sequence's addresses, no byte is
//! copied, shared memory is never written, and every address keeps its bytes while others are mapped and released.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "tests")]

#[macro_use]
#[path = "support/fake.rs"]
#[allow(dead_code, unused_macros, reason = "each test binary uses some of it")]
mod fake;
#[path = "support/shim.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses some of it")]
mod shim;

use fake::{Fake, OUT_OF_MEMORY, UNKNOWN};
use lagoon_backend::conformance::Data;
use lagoon_backend::{AttnBatch, AttnRows, Device, DeviceError, Partials, Queued, VirtualMemory};
use lagoon_cuda::{CudaDevice, CudaKv, CudaOptions, LinearLayers};
use lagoon_types::{AttentionGeometry, KvDType, KvRun, KvShape, KvSpace};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

const PAGE: u64 = 1 << 12;
const G: AttentionGeometry = AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 64, latent: false };
const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 64, dtype: KvDType::F32 };
const LAYERS: usize = SHAPE.layers as usize;
/// Tokens of a page group: a layer's K or V.
const TOKENS: u32 = 8;
/// Page groups of such a block.
const GROUPS: u64 = 2 * SHAPE.layers as u64;

fn driver(name: &str, seed: u64) -> Option<Fake> {
    let fake = shim::library().and_then(|kernels| {
        let fake = Fake::new(1 << 30, PAGE, seed)?;
        fake.kernels(&kernels);
        Ok(fake)
    });
    fake.map_err(|reason| fake::skip(name, &reason)).ok()
}

fn open() -> CudaDevice {
    let options = CudaOptions { linear: LinearLayers::Own, layers_per_group: Some(1), ..CudaOptions::default() };
    CudaDevice::open(b"any image", options).unwrap()
}

/// What a layer of a block holds that was filled with `value`.
fn content(value: u32, layer: usize, tokens: u32) -> Vec<u8> {
    let number = (value * 4 + layer as u32) as f32;
    number.to_le_bytes().repeat(tokens as usize * SHAPE.layer_token_bytes() / 4)
}

fn fill(device: &mut CudaDevice, kv: &mut CudaKv, slot: u32, tokens: u32, value: u32) -> Result<(), DeviceError> {
    device.kv_hold(kv, slice::from_ref(&(slot..slot + tokens)))?;
    (0..LAYERS).try_for_each(|layer| device.kv_write(kv, layer, slot, &content(value, layer, tokens)))
}

#[track_caller]
fn assert_holds(device: &mut CudaDevice, kv: &CudaKv, slot: u32, tokens: u32, value: u32) {
    for layer in 0..LAYERS {
        let mut got = Vec::new();
        device.kv_read(kv, layer, slot, tokens, &mut got).unwrap();
        assert!(got == content(value, layer, tokens), "slot {slot}, layer {layer}: {:?}", &got[..8]);
    }
}

/// Bits of attention over some tokens from a slot on, in both layers.
fn attend(device: &mut CudaDevice, kv: &CudaKv, queries: &[f32], base: u32, len: u32) -> Vec<u32> {
    let mut q = device.tensor(1, G.q_dim()).unwrap();
    device.write(&mut q, 0, queries).unwrap();
    let mut out = Partials::new(device, 1, G).unwrap();
    let seqs = [AttnRows { row0: 0, rows: 1, pos0: len, run0: 0, runs: 1 }];
    let runs = [KvRun { base, len, first_pos: 0 }];
    let batch =
        AttnBatch { geometry: G, scale: 0.125, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    let mut got = Vec::new();
    for layer in 0..LAYERS {
        device.attention(&q, &batch, kv, layer, &mut out).unwrap();
        device.read(&out.out, 0..1, 0..G.q_dim(), &mut got).unwrap();
        device.read(&out.lse, 0..1, 0..G.heads as usize, &mut got).unwrap();
    }
    got.into_iter().map(f32::to_bits).collect()
}

/// Two blocks of a row are seen in another one: mapped, with nothing copied and no memory used; attention over them gives
/// the bits that it gives over the first row and over a copy.
#[test]
fn a_prefix_is_mapped_and_not_copied() {
    for seed in 2..8 {
        let Some(fake) = driver("a_prefix_is_mapped_and_not_copied", seed) else { return };
        let mut device = open();
        let space = KvSpace::flat(9, TOKENS).with_rows(3, 4);
        let mut kv = device.kv_in(SHAPE, &space).unwrap();
        let mut data = Data::new(seed);
        let written: Vec<Vec<u8>> = (0..LAYERS).map(|_| data.stored_kv(SHAPE, 16).0).collect();
        device.kv_hold(&mut kv, &[0..16, 64..80]).unwrap();
        for (layer, bytes) in written.iter().enumerate() {
            device.kv_write(&mut kv, layer, 0, bytes).unwrap();
            device.kv_write(&mut kv, layer, 64, bytes).unwrap();
        }
        device.sync().unwrap();
        let before = (fake.counts(), device.kv_counters(&kv).unwrap());
        for slot in [0, TOKENS] {
            device.kv_share(&mut kv, slot, 32 + slot, TOKENS).unwrap();
        }
        device.sync().unwrap();
        let after = (fake.counts(), device.kv_counters(&kv).unwrap());
        assert_eq!((after.0.copies_run, after.0.kernels_run), (before.0.copies_run, before.0.kernels_run));
        assert_eq!(after.0.maps - before.0.maps, 2 * GROUPS);
        assert_eq!((after.1.groups_per_block, after.1.shared, after.1.in_step), (GROUPS, 2 * GROUPS, before.1.in_step));
        assert_eq!((after.1.free, after.1.kept), (before.1.free, before.1.kept), "it costs no memory");

        let queries = data.values(G.q_dim());
        let bits = attend(&mut device, &kv, &queries, 0, 16);
        assert_eq!(attend(&mut device, &kv, &queries, 32, 16), bits, "the shared row");
        assert_eq!(attend(&mut device, &kv, &queries, 64, 16), bits, "the copy");
        // Sequences that share memory end, in either order; the remaining one reads the same bytes.
        device.kv_release(&mut kv, 0..8).unwrap();
        device.kv_release(&mut kv, 40..48).unwrap();
        assert_eq!(attend(&mut device, &kv, &queries, 32, 8), attend(&mut device, &kv, &queries, 64, 8));
        assert_eq!(attend(&mut device, &kv, &queries, 8, 8), attend(&mut device, &kv, &queries, 72, 8));
        drop((kv, device));
        fake.finish();
    }
}

/// Address rows of rBlocks that are no whole page groups are refused before any memory is made; a flat store of such rBlocks has
/// memory for them, and not for more.
#[test]
fn address_rows_of_parts_of_page_groups_are_refused() {
    let Some(fake) = driver("address_rows_of_parts_of_page_groups_are_refused", 9) else { return };
    let mut device = open();
    for tokens in [1, TOKENS / 2, TOKENS + TOKENS / 2] {
        let flat = KvSpace::flat(6, tokens);
        let before = fake.counts();
        let error = device.kv_in(SHAPE, &flat.with_rows(3, 4)).unwrap_err();
        let expected = format!(
            "rBlocks of {tokens} tokens are not whole page groups; --block-tokens {TOKENS} or a multiple are, in the whole \
             pool\nhint: "
        );
        assert!(matches!(&error, DeviceError::Unsupported(why) if why.contains(&expected)), "{error}");
        assert_eq!(fake.counts(), before, "a refusal makes nothing");
        assert_eq!(device.kv_space(SHAPE, flat.with_rows(3, 4)), flat);
        let kv = device.kv_in(SHAPE, &flat).unwrap();
        let stripes = u64::from((6 * tokens).div_ceil(TOKENS));
        let counters = device.kv_counters(&kv).unwrap();
        assert_eq!((counters.free, counters.kept), (stripes * GROUPS, 0), "{tokens} tokens: {counters:?}");
    }
    drop(device);
    fake.finish();
}

/// What two see nobody writes; what one of them has left the other one may write again.
#[test]
fn what_is_shared_is_not_written() {
    let Some(fake) = driver("what_is_shared_is_not_written", 3) else { return };
    let mut device = open();
    let mut kv = device.kv_in(SHAPE, &KvSpace::flat(6, TOKENS).with_rows(3, 4)).unwrap();
    fill(&mut device, &mut kv, 0, TOKENS, 5).unwrap();
    device.kv_share(&mut kv, 0, 32, TOKENS).unwrap();
    for slot in [0, 35] {
        let bytes = content(6, 0, 1);
        let written = catch_unwind(AssertUnwindSafe(|| device.kv_write(&mut kv, 0, slot, &bytes)));
        assert!(written.is_err(), "slot {slot} is shared");
    }
    assert_holds(&mut device, &kv, 0, TOKENS, 5);
    assert_holds(&mut device, &kv, 32, TOKENS, 5);
    device.kv_release(&mut kv, 0..TOKENS).unwrap();
    fill(&mut device, &mut kv, 32, TOKENS, 7).unwrap();
    // The first address has memory of its own when it is wanted again.
    fill(&mut device, &mut kv, 0, TOKENS, 8).unwrap();
    assert_holds(&mut device, &kv, 32, TOKENS, 7);
    assert_holds(&mut device, &kv, 0, TOKENS, 8);
    drop((kv, device));
    fake.finish();
}

/// Refused without a change: a store without address rows, ranges that are no rBlocks, targets that are held, sources that are not.
#[test]
fn what_cannot_be_mapped_is_refused() {
    let Some(fake) = driver("what_cannot_be_mapped_is_refused", 2) else { return };
    let mut device = open();
    let space = KvSpace::flat(8, TOKENS);
    let mut flat = device.kv_in(SHAPE, &space).unwrap();
    fill(&mut device, &mut flat, 0, 16, 5).unwrap();
    assert!(matches!(device.kv_share(&mut flat, 0, 32, TOKENS), Err(DeviceError::Unsupported(_))));
    let mut kv = device.kv_in(SHAPE, &space.with_rows(3, 4)).unwrap();
    fill(&mut device, &mut kv, 0, 16, 5).unwrap();
    for (from, to, tokens) in [(3, 34, 7), (0, 32, 7), (0, TOKENS, TOKENS), (16, 32, TOKENS)] {
        assert!(matches!(device.kv_share(&mut kv, from, to, tokens), Err(DeviceError::Unsupported(_))));
    }
    assert_eq!(device.kv_counters(&kv).unwrap().shared, 0);
    fill(&mut device, &mut kv, 0, 16, 6).unwrap();
    assert_holds(&mut device, &kv, 0, 16, 6);
    drop((kv, flat, device));
    fake.finish();
}

/// Whichever call of the driver fails, nothing is shared, all that was there is there, and it works the next time. The target
/// has memory of a sequence before.
#[test]
fn a_share_that_fails_changes_nothing() {
    for (function, calls) in [("cuMemUnmap", GROUPS), ("cuMemMap", GROUPS), ("cuMemSetAccess", GROUPS)] {
        for nth in 1..=calls {
            let Some(fake) = driver("a_share_that_fails_changes_nothing", nth + 1) else { return };
            let mut device = open();
            let mut kv = device.kv_in(SHAPE, &KvSpace::flat(6, TOKENS).with_rows(3, 4)).unwrap();
            fill(&mut device, &mut kv, 0, TOKENS, 5).unwrap();
            fill(&mut device, &mut kv, 32, TOKENS, 6).unwrap();
            device.kv_release(&mut kv, 32..32 + TOKENS).unwrap();
            let before = (fake.counts().mappings, device.kv_counters(&kv).unwrap());
            fake.fail(function, nth, if nth % 2 == 0 { UNKNOWN } else { OUT_OF_MEMORY });
            let error = device.kv_share(&mut kv, 0, 32, TOKENS).unwrap_err();
            assert_eq!((fake.counts().mappings, device.kv_counters(&kv).unwrap()), before, "{function} {nth}: {error}");
            assert_holds(&mut device, &kv, 0, TOKENS, 5);
            // The kept memory serves a new holder, and the source may be written: it is not shared any more.
            fill(&mut device, &mut kv, 0, TOKENS, 9).unwrap();
            device.kv_share(&mut kv, 0, 32, TOKENS).unwrap();
            assert_holds(&mut device, &kv, 32, TOKENS, 9);
            drop((kv, device));
            fake.finish();
        }
    }
}

/// An address whose unmapping failed is unmapped by the next hold, so that its memory is not lost.
#[test]
fn a_release_that_fails_is_done_later() {
    let Some(fake) = driver("a_release_that_fails_is_done_later", 3) else { return };
    let mut device = open();
    let mut kv = device.kv_in(SHAPE, &KvSpace::flat(2, TOKENS).with_rows(3, 4)).unwrap();
    fill(&mut device, &mut kv, 0, TOKENS, 5).unwrap();
    device.kv_share(&mut kv, 0, 32, TOKENS).unwrap();
    fake.fail("cuMemUnmap", 2, UNKNOWN);
    device.kv_release(&mut kv, 0..TOKENS).unwrap_err();
    assert_holds(&mut device, &kv, 32, TOKENS, 5);
    // The first address has another owner by now, with memory of its own: both rBlocks of memory are in use.
    fill(&mut device, &mut kv, 0, TOKENS, 6).unwrap();
    assert_holds(&mut device, &kv, 0, TOKENS, 6);
    assert_holds(&mut device, &kv, 32, TOKENS, 5);
    fake.fail("", 0, 0);
    drop((kv, device));
    fake.finish();
}

/// The remaining writes of an aborted own step precede the writes of a lent row to the same memory, which was released and
/// stayed mapped, or is that of a flat store.
#[test]
fn a_remote_request_writes_after_an_aborted_step() {
    for seed in 2..32 {
        let Some(fake) = driver("a_remote_request_writes_after_an_aborted_step", seed) else { return };
        let (mut device, rows) = (open(), seed % 2 == 0);
        let space = KvSpace::flat(6, TOKENS);
        let mut kv = device.kv_in(SHAPE, &if rows { space.with_rows(3, 4) } else { space }).unwrap();
        // A flat store gets its memory when slots are first written.
        fill(&mut device, &mut kv, 0, TOKENS, 4).unwrap();
        let (mut qkv, rope) = (device.tensor(8, G.qkv_dim()).unwrap(), device.tensor(8, 64).unwrap());
        let slots: Vec<u32> = (0..TOKENS).collect();
        device.kv_hold(&mut kv, slice::from_ref(&(0..TOKENS))).unwrap();
        device.begin_repeatable().unwrap();
        for layer in 0..LAYERS {
            device.rope_append(&mut qkv, &rope, G, &slots, &mut kv, layer).unwrap();
        }
        device.abort_step().unwrap();
        if rows {
            device.kv_release(&mut kv, 0..TOKENS).unwrap();
        }
        device.urgent(true);
        fill(&mut device, &mut kv, 0, TOKENS, 5).unwrap();
        device.urgent(false);
        device.sync().unwrap();
        assert_holds(&mut device, &kv, 0, TOKENS, 5);
        drop((kv, device, qkv, rope));
        fake.finish();
    }
}

/// The engine's operations on blocks of addresses: sequences' in address rows, lent rows' in loose ones.
#[derive(Clone, Debug)]
enum Op {
    /// A step, or a lent row's write: memory, and KV in all of it.
    Write {
        at: u32,
        blocks: u32,
        urgent: bool,
    },
    Share {
        from: u32,
        to: u32,
    },
    /// The end of a sequence, a recall, or something kept that is dropped.
    Release {
        at: u32,
        blocks: u32,
    },
    Expect {
        at: u32,
    },
    Attend {
        at: u32,
        urgent: bool,
    },
}

const ADDRESSES: u32 = 3 * 4 + 20;

fn op() -> impl Strategy<Value = Op> {
    let at = 0..ADDRESSES;
    prop_oneof![
        5 => (at.clone(), 1..3u32, any::<bool>()).prop_map(|(at, blocks, urgent)| Op::Write { at, blocks, urgent }),
        6 => (any::<u32>(), at.clone()).prop_map(|(from, to)| Op::Share { from, to }),
        4 => (at.clone(), 1..5u32).prop_map(|(at, blocks)| Op::Release { at, blocks }),
        2 => at.prop_map(|at| Op::Expect { at }),
        3 => (any::<u32>(), any::<bool>()).prop_map(|(at, urgent)| Op::Attend { at, urgent }),
    ]
}

struct World {
    device: CudaDevice,
    kv: CudaKv,
    space: KvSpace,
    /// The value with which each block of addresses was filled.
    held: BTreeMap<u32, u32>,
    values: u32,
    shares: u64,
}

impl World {
    /// A driver's error that was asked for; anything else is a bug.
    fn did(result: Result<(), DeviceError>) -> bool {
        if let Err(error) = &result {
            let expected = error.to_string().contains("UNKNOWN") || matches!(error, DeviceError::OutOfMemory { .. });
            assert!(expected && !error.to_string().contains("mappings are lost"), "{error}");
        }
        result.is_ok()
    }

    fn any_held(&self, n: u32) -> Option<(u32, u32)> {
        let at = n as usize % self.held.len().max(1);
        self.held.iter().nth(at).map(|(block, value)| (*block, *value))
    }

    fn run(&mut self, op: &Op) {
        let tokens = self.space.block_tokens;
        // As the block pool counts: each address that is held is a block of memory, also where several share one.
        let room = self.space.blocks as usize - self.held.len();
        match *op {
            Op::Write { at, blocks, urgent } => {
                let free = |block: &u32| *block < ADDRESSES && !self.held.contains_key(block);
                if blocks as usize > room || !(at..at + blocks).all(|block| free(&block)) {
                    return;
                }
                self.values += 1;
                self.device.urgent(urgent);
                if Self::did(fill(&mut self.device, &mut self.kv, at * tokens, blocks * tokens, self.values)) {
                    self.held.extend((at..at + blocks).map(|block| (block, self.values)));
                }
                self.device.urgent(false);
            }
            Op::Share { from, to } => {
                let Some((from, value)) = self.any_held(from).filter(|_| room > 0) else { return };
                if self.held.contains_key(&to) {
                    return;
                }
                let shared = self.device.kv_share(&mut self.kv, from * tokens, to * tokens, tokens);
                if Self::did(shared) {
                    self.held.insert(to, value);
                    self.shares += 1;
                }
            }
            Op::Release { at, blocks } => {
                let end = (at + blocks).min(ADDRESSES);
                // Memory that could not be released is released by the next hold, share or release: it has no owner.
                Self::did(self.device.kv_release(&mut self.kv, at * tokens..end * tokens));
                self.held.retain(|block, _| !(at..end).contains(block));
            }
            Op::Expect { at } => self.device.kv_expect(&mut self.kv, &[at * tokens], Some(at / 2 * tokens)),
            Op::Attend { at, urgent } => {
                let Some((block, value)) = self.any_held(at) else { return };
                self.device.urgent(urgent);
                let queries = vec![0.0; G.q_dim()];
                let bits = attend(&mut self.device, &self.kv, &queries, block * tokens, tokens);
                self.device.urgent(false);
                let mean = f32::from_bits(bits[0]);
                assert!((mean - (value * 4) as f32).abs() < 1e-2, "block {block} has {mean}, not {value} four times");
            }
        }
    }

    fn check(&mut self) {
        let tokens = self.space.block_tokens;
        for (block, value) in self.held.clone() {
            assert_holds(&mut self.device, &self.kv, block * tokens, tokens, value);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn addresses_keep_their_bytes_under_any_sharing(
        groups in 1..3u32,
        blocks in 4..11u32,
        seed in 2..1000u64,
        ops in prop::collection::vec((op(), prop::option::weighted(0.12, (0..3usize, 1..9u64))), 1..50),
    ) {
        let Some(fake) = driver("addresses_keep_their_bytes_under_any_sharing", seed) else { return Ok(()) };
        let mut device = open();
        let space = KvSpace { loose_blocks: 20, ..KvSpace::flat(blocks, TOKENS * groups).with_rows(3, 4) };
        let kv = device.kv_in(SHAPE, &space).unwrap();
        let mut world = World { device, kv, space, held: BTreeMap::new(), values: 0, shares: 0 };
        for (at, (op, fail)) in ops.iter().enumerate() {
            if let Some((function, nth)) = fail {
                let functions = ["cuMemMap", "cuMemSetAccess", "cuMemUnmap"];
                fake.fail(functions[*function], *nth, if at % 3 == 0 { UNKNOWN } else { OUT_OF_MEMORY });
            }
            world.run(op);
            fake.fail("", 0, 0);
            // Not always: work should stay queued over several operations.
            if at % 5 == 0 {
                world.check();
            }
        }
        world.check();
        let tokens = space.block_tokens;
        world.device.kv_release(&mut world.kv, 0..ADDRESSES * tokens).unwrap();
        let counters = world.device.kv_counters(&world.kv).unwrap();
        prop_assert_eq!(counters.free + counters.kept, u64::from(blocks * groups) * GROUPS, "nothing leaks");
        prop_assert!(counters.shared <= world.shares * counters.groups_per_block);
        drop(world);
        fake.finish();
    }
}
