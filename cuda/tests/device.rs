//! The backend's contract, proved on the CUDA backend where there is no GPU: the fake driver runs the kernels through
//! the host shim, late and in random orders, and without rounding also with every order of lanes and warps.

#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "support/fake.rs"]
#[allow(dead_code, unused_macros, reason = "each test binary uses some of it")]
mod fake;
#[path = "support/shim.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses some of it")]
mod shim;

use fake::{Fake, OUT_OF_MEMORY};
use lagoon_backend::conformance::Data;
use lagoon_backend::{AttnBatch, AttnRows, CpuDevice, Device, DeviceError, Partials, Queued};
use lagoon_cuda::kernels::attention::{DecodeClass, Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, LinearLayers, TuneFor};
use lagoon_kv::vmm::{VmmConfig, VmmLayout, VmmShape};
use lagoon_types::{Alibi, AttentionGeometry, DType, KvDType, KvRun, KvShape};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Small pages and pieces, so that small shapes meet every path.
const PAGE: u64 = 1 << 16;
const MEMORY: u64 = 1 << 30;
const TUNING: Tuning = Tuning {
    classes: [
        DecodeClass { warps: 2, stages: 4, blocks_per_sm: 1, piece_keys_min: 48 },
        DecodeClass { warps: 4, stages: 2, blocks_per_sm: 2, piece_keys_min: 96 },
        DecodeClass { warps: 8, stages: 3, blocks_per_sm: 2, piece_keys_min: 200 },
    ],
    class_keys: [64, 256],
    precision: Precision::Exact,
    ..Tuning::untuned(8)
};
/// As users get it.
const FAST: Tuning = Tuning { precision: Precision::Fast, ..TUNING };

/// As [`with_tuning`], as exact as f32.
fn with_device(name: &str, layers_per_group: Option<u32>, test: impl FnOnce(&mut CudaDevice, &Fake)) {
    with_tuning(name, layers_per_group, TUNING, test);
}

/// Runs `test` on a device over the fake driver; at the end everything is released and nothing was misused. The device has
/// compute capability 9.0 where the tuning asks for warpgroup kernels, else 8.0.
fn with_tuning(name: &str, layers_per_group: Option<u32>, tuning: Tuning, test: impl FnOnce(&mut CudaDevice, &Fake)) {
    static SEED: AtomicU64 = AtomicU64::new(2);
    let fake = shim::library().and_then(|library| {
        let fake = Fake::new(MEMORY, PAGE, SEED.fetch_add(1, Ordering::Relaxed))?;
        fake.kernels(&library);
        Ok(fake)
    });
    match fake {
        Ok(fake) => {
            if tuning.wgmma {
                fake.device(9, 0, 227 << 10);
            }
            // As users get it in turn only, which is quicker.
            fake.turns(tuning.precision == Precision::Exact);
            let options = CudaOptions {
                layers_per_group,
                tuning: Some(tuning),
                linear: LinearLayers::Own,
                ..CudaOptions::default()
            };
            let mut device = CudaDevice::open(b"any image", options).unwrap();
            test(&mut device, &fake);
            drop(device);
            fake.finish();
        }
        Err(reason) => fake::skip(name, &reason),
    }
}

// As in shim.rs: in bf16 queries, attention weights and activations are two terms of 8 bits.
macro_rules! over_the_fake {
    ($group:expr, $($case:ident),+ $(,)?) => {
        over_the_fake!($group; crate::TUNING; lagoon_backend::conformance::Tolerance::loosened(2.0); $($case,)+);
    };
    ($group:expr; $tuning:expr; $tolerance:expr; $($case:ident),+ $(,)?) => {
        $(
            #[test]
            fn $case() {
                use lagoon_backend::conformance::cases;
                let name = concat!(module_path!(), "::", stringify!($case));
                crate::with_tuning(name, $group, $tuning, |device, _| cases::$case(device, $tolerance));
            }
        )+
    };
}

/// Each layer has page groups of its own.
mod unsliced {
    lagoon_backend::conformance_names!(over_the_fake(Some(1),));
}

/// Layers share page groups: the stores that the suite makes have two or three layers, or one.
mod sliced {
    over_the_fake!(
        Some(2),
        rope_append_then_attention,
        attention_dtypes,
        attention_prefill,
        attention_alibi,
        attention_softcap
    );
    mod by_three {
        over_the_fake!(Some(3), kv_bytes_round_trip);
    }
}

/// Activations rounded, by the bounds of that.
mod fast {
    use lagoon_backend::conformance::Tolerance;
    const TOLERANCE: Tolerance = Tolerance::loosened(2.0).one_term();

    lagoon_backend::conformance_names!(over_the_fake(None; crate::FAST; TOLERANCE;));

    /// Prompts by warpgroup kernels.
    mod warpgroups {
        use super::TOLERANCE;
        use lagoon_cuda::kernels::attention::Tuning;
        const WARPGROUPS: Tuning = Tuning { wgmma: true, ..crate::FAST };

        over_the_fake!(None; WARPGROUPS; TOLERANCE; attention_prefill, attention_dtypes, attention_windows, attention_steep_scores);
    }
}

const G: AttentionGeometry = AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 64, latent: false };
const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 64, dtype: KvDType::F16 };

/// Exhausted memory is an `OutOfMemory` error at every allocation, and leaks nothing.
#[test]
fn out_of_memory_is_an_error_everywhere() {
    with_device("out_of_memory_is_an_error_everywhere", None, |device, fake| {
        for (function, nth) in [("cuMemAlloc", 1), ("cuMemCreate", 1), ("cuMemCreate", 3), ("cuMemAddressReserve", 2)] {
            let before = fake.counts();
            fake.fail(function, nth, OUT_OF_MEMORY);
            let error = if function == "cuMemAlloc" {
                device.tensor(10, 10).map(drop).unwrap_err()
            } else {
                device.kv(SHAPE, 1000).map(drop).unwrap_err()
            };
            assert!(matches!(error, DeviceError::OutOfMemory { .. }), "{function}: {error}");
            let after = fake.counts();
            assert_eq!((before.physical, before.reservations), (after.physical, after.reservations), "{function}");
            assert_eq!((before.buffers, before.bytes_used), (after.buffers, after.bytes_used), "{function}");
        }
        // A map that fails while a step writes: the step fails, the next one goes on.
        let mut kv = device.kv(SHAPE, 1000).unwrap();
        fake.fail("cuMemMap", 2, OUT_OF_MEMORY);
        let bytes = vec![1; SHAPE.layer_token_bytes()];
        assert!(matches!(device.kv_write(&mut kv, 0, 7, &bytes), Err(DeviceError::OutOfMemory { .. })));
        device.kv_write(&mut kv, 0, 7, &bytes).unwrap();
        let mut got = Vec::new();
        device.kv_read(&kv, 0, 7, 1, &mut got).unwrap();
        assert_eq!(got, bytes);
        assert!(matches!(device.kv(SHAPE, 100_000_000), Err(DeviceError::OutOfMemory { .. })));
    });
}

/// A launch that the driver refuses is an error, not a panic, and no lost device.
#[test]
fn a_refused_launch_is_an_error() {
    with_device("a_refused_launch_is_an_error", None, |device, fake| {
        let x = device.tensor(2, 8).unwrap();
        let mut out = device.tensor(2, 8).unwrap();
        fake.fail("cuLaunchKernelEx", 1, fake::UNKNOWN);
        assert!(matches!(device.gather_rows(&x, &[0], &mut out), Err(DeviceError::Failed(_))));
        device.gather_rows(&x, &[0], &mut out).unwrap();
    });
}

/// Peers' writes and queries on their own stream see each other's KV, and what own copies wrote.
#[test]
fn urgent_work_shares_the_store() {
    for _ in 0..12 {
        with_device("urgent_work_shares_the_store", None, |device, _| {
            let mut kv = device.kv(SHAPE, 64).unwrap();
            let token = SHAPE.layer_token_bytes();
            let value = |v: f32| half_bytes(v, token / 2);
            // Own copies into slots 0 to 7, peers' into 8 to 15.
            device.kv_write(&mut kv, 1, 0, &value(1.0).repeat(8)).unwrap();
            device.urgent(true);
            device.kv_write(&mut kv, 1, 8, &value(3.0).repeat(8)).unwrap();
            let q = device.tensor(1, G.q_dim()).unwrap();
            let mut out = Partials::new(device, 1, G).unwrap();
            let seqs = [AttnRows { row0: 0, rows: 1, pos0: 20, run0: 0, runs: 1 }];
            let runs = [KvRun { base: 0, len: 16, first_pos: 0 }];
            let batch = AttnBatch {
                geometry: G,
                scale: 1.0,
                window: None,
                alibi: None,
                softcap: None,
                seqs: &seqs,
                runs: &runs,
            };
            device.attention(&q, &batch, &kv, 1, &mut out).unwrap();
            let mut got = Vec::new();
            device.read(&out.out, 0..1, 0..G.q_dim(), &mut got).unwrap();
            assert!(got.iter().all(|v| (*v - 2.0).abs() < 1e-5), "the mean of eight 1 and eight 3: {got:?}");
            device.urgent(false);
            let mut bytes = Vec::new();
            device.kv_read(&kv, 1, 8, 8, &mut bytes).unwrap();
            assert_eq!(bytes, value(3.0).repeat(8));
        });
    }
}

/// One stream maps and zeroes memory while the urgent stream writes: zeroing never overwrites a later write.
#[test]
fn growth_beside_urgent_writes_keeps_them() {
    for _ in 0..12 {
        with_device("growth_beside_urgent_writes_keeps_them", None, |device, _| {
            let mut kv = device.kv(SHAPE, 2000).unwrap();
            let token = SHAPE.layer_token_bytes();
            let bytes = half_bytes(2.0, token / 2);
            device.kv_write(&mut kv, 0, 1900, &bytes).unwrap();
            device.urgent(true);
            device.kv_write(&mut kv, 0, 100, &bytes).unwrap();
            device.urgent(false);
            device.sync().unwrap();
            for slot in [100, 1900] {
                let mut got = Vec::new();
                device.kv_read(&kv, 0, slot, 1, &mut got).unwrap();
                assert_eq!(got, bytes, "slot {slot}");
            }
        });
    }
}

/// A partial of one query at position 900 over some runs, with a window and ALiBi: output and log-sum-exp.
fn windowed_alibi<D: Device>(device: &mut D, kv: &D::Kv, queries: &[f32], runs: &[KvRun]) -> (Vec<f32>, Vec<f32>, u32) {
    let mut q = device.tensor(1, G.q_dim()).unwrap();
    device.write(&mut q, 0, queries).unwrap();
    let mut out = Partials::new(device, 1, G).unwrap();
    let seqs = [AttnRows { row0: 0, rows: 1, pos0: 900, run0: 0, runs: u32::try_from(runs.len()).unwrap() }];
    let alibi = Some(Alibi { bias_max: 8.0 });
    let batch =
        AttnBatch { geometry: G, scale: 0.125, window: Some(700), alibi, softcap: Some(2.0), seqs: &seqs, runs };
    device.attention(&q, &batch, kv, 1, &mut out).unwrap();
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    device.read(&out.out, 0..1, 0..G.q_dim(), &mut o).unwrap();
    device.read(&out.lse, 0..1, 0..G.heads as usize, &mut lse).unwrap();
    (o, lse, out.count[0])
}

/// A lent row's rBlocks, lent, recalled from the middle and moved together, attend as the same tokens do on the host backend:
/// positions stay right under a window and ALiBi.
#[test]
fn lent_recalled_and_compacted_runs_attend_as_on_the_host() {
    with_device("lent_recalled_and_compacted_runs_attend_as_on_the_host", None, |device, _| {
        let layout = VmmLayout::new(VmmShape {
            layers: SHAPE.layers,
            kv_heads: SHAPE.kv_heads,
            head_dim: SHAPE.head_dim,
            element_bytes: 2,
            page_group_bytes: PAGE,
            layers_per_group: 2,
        })
        .unwrap();
        assert_eq!(layout.block_tokens(), 128);
        let config = VmmConfig {
            direct_blocks: 0,
            batch_max: 1,
            context_max: 256,
            lent_rows_max: 1,
            lent_row_blocks_max: 6,
            stripes: 8,
            address_bytes_max: 1 << 40,
            grow: false,
            eager_stripes: 0,
            reclaim_below: 0,
        };
        let memory = device.virtual_kv(layout, config).unwrap();
        let mut kv = device.kv_over(SHAPE, Arc::clone(&memory)).unwrap();
        let mut data = Data::new(7);
        let token = SHAPE.layer_token_bytes();
        let (bytes, _) = data.stored(DType::F16, 768 * token / 2);
        let queries = data.values(G.q_dim());
        let mut host = CpuDevice::with_threads(1);
        let mut host_kv = host.kv(SHAPE, 768).unwrap();
        host.kv_write(&mut host_kv, 1, 0, &bytes).unwrap();

        let lent_row = memory.open_lent_row().unwrap();
        memory.lend(lent_row, 6, 0).unwrap();
        let base = memory.lent_row_runs(lent_row)[0].base;
        device.kv_write(&mut kv, 1, base, &bytes).unwrap();
        let mut compare = |device: &mut CudaDevice, runs: &[KvRun]| {
            let there: Vec<KvRun> = memory.lent_row_runs(lent_row);
            let positions = |runs: &[KvRun]| runs.iter().flat_map(KvRun::positions).collect::<Vec<_>>();
            assert_eq!(positions(&there), positions(runs));
            let want = windowed_alibi(&mut host, &host_kv, &queries, runs);
            let got = windowed_alibi(device, &kv, &queries, &there);
            assert_eq!(got.2, want.2, "keys seen");
            for (got, want) in got.0.iter().chain(&got.1).zip(want.0.iter().chain(&want.1)) {
                assert!((got - want).abs() < 2e-5 * want.abs().max(1.0), "{got} is {want} on the host");
            }
        };
        compare(device, &[KvRun { base: 0, len: 768, first_pos: 0 }]);
        memory.recall(lent_row, 3..4).unwrap();
        let cut = [KvRun { base: 0, len: 384, first_pos: 0 }, KvRun { base: 512, len: 256, first_pos: 512 }];
        compare(device, &cut);
        assert_eq!(memory.lent_row_runs(lent_row)[1].base, base + 512, "a gap in the addresses");
        memory.compact(lent_row).unwrap();
        assert_eq!(memory.lent_row_runs(lent_row)[1].base, base + 384, "no gap any more");
        compare(device, &cut);
    });
}

/// Many more uploads than the ring holds, each seen by the operation it was for.
#[test]
fn staging_wraps_around() {
    with_device("staging_wraps_around", None, |device, _| {
        let cols = 4096;
        let mut x = device.tensor(300, cols).unwrap();
        let mut out = device.tensor(3, cols).unwrap();
        let rows: Vec<f32> = (0..300 * cols).map(|i| (i % 1021) as f32).collect();
        for round in 0..4 {
            device.write(&mut x, 0, &rows).unwrap();
            for i in 0..50u32 {
                let ids = [i + round, 2 * i, 299 - i];
                device.gather_rows(&x, &ids, &mut out).unwrap();
                if i % 10 == 3 {
                    let mut got = Vec::new();
                    device.read(&out, 0..3, 0..cols, &mut got).unwrap();
                    for (row, id) in ids.iter().enumerate() {
                        assert_eq!(got[row * cols..][..cols], rows[*id as usize * cols..][..cols]);
                    }
                }
            }
        }
    });
}

/// What tuning takes over the fake: short contexts.
fn tune_for(head_dim: u32) -> TuneFor {
    TuneFor {
        geometry: AttentionGeometry { head_dim, ..G },
        dtype: DType::BF16,
        contexts: Some([30, 70, 420]),
        time_max: Duration::from_millis(1500),
        bytes_max: 1 << 18,
    }
}

#[test]
fn tuning_measures_and_changes_nothing() {
    with_device("tuning_measures_and_changes_nothing", None, |device, fake| {
        device.set_tuning(Tuning::untuned(8));
        let before = (*device.tuning(), fake.counts());
        let tuned = device.tune(&tune_for(64)).unwrap().unwrap();
        assert_eq!((*device.tuning(), fake.counts().physical), (before.0, before.1.physical));
        assert!(fake.counts().kernels_run > before.1.kernels_run + 12, "three shapes, four calls each");
        assert_eq!(tuned.to_string().parse(), Ok(tuned));
        device.set_tuning(tuned.apply(*device.tuning()));
        assert_eq!((device.tuning().classes, device.tuning().precision), (tuned.classes, Precision::Fast));
        lagoon_backend::conformance::cases::attention_decode_batch(
            device,
            lagoon_backend::conformance::Tolerance::loosened(2.0),
        );
        // Nothing to tune without tensor cores.
        assert!(device.tune(&TuneFor { dtype: DType::F32, ..tune_for(64) }).unwrap().is_none());
        assert!(device.tune(&tune_for(80)).unwrap().is_none());
        fake.fail("cuMemCreate", 1, OUT_OF_MEMORY);
        assert!(matches!(device.tune(&tune_for(64)), Err(DeviceError::OutOfMemory { .. })));
    });
}

/// A device of capability 9.0 with these kernels.
fn of_capability_9(fake: &Fake, kernels: &Path) -> CudaDevice {
    fake.kernels(kernels);
    fake.device(9, 0, 227 << 10);
    let options = CudaOptions { tuning: Some(FAST), linear: LinearLayers::Own, ..CudaOptions::default() };
    CudaDevice::open(b"any image", options).unwrap()
}

/// Warpgroup kernels are loaded on capability 9.0, tried under fast precision only, and trusted where they agree and are faster.
#[test]
fn warpgroup_kernels_are_compared_first() {
    with_tuning("warpgroup_kernels_are_compared_first", None, FAST, |first, fake| {
        assert!(matches!(first.try_warpgroups(&tune_for(64)), Err(DeviceError::Unsupported(_))), "capability 8.0");
        assert!(
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                first.set_tuning(Tuning { wgmma: true, ..TUNING });
            }))
            .is_err()
        );
        let mut device = of_capability_9(fake, &shim::library().unwrap());
        device.set_tuning(TUNING);
        assert!(matches!(device.try_warpgroups(&tune_for(64)), Err(DeviceError::Unsupported(_))), "exact precision");
        device.set_tuning(FAST);
        assert!(matches!(device.try_warpgroups(&tune_for(96)), Err(DeviceError::Unsupported(_))), "heads of 96");
        fake.fail("cuTensorMapEncodeTiled", 3, fake::UNKNOWN);
        assert!(device.try_warpgroups(&tune_for(64)).is_err());
        for dtype in [DType::F16, DType::BF16] {
            // A layer's two planes have four maps each, made once: the ninth call, which would fail, does not come.
            fake.fail("cuTensorMapEncodeTiled", 9, fake::UNKNOWN);
            let tried = device.try_warpgroups(&TuneFor { dtype, ..tune_for(64) }).unwrap();
            println!("{dtype}: {tried:?}");
            assert!(tried.agree && tried.worst[0] > 0.05 && tried.worst[1] < 0.5, "{tried:?}");
            // The fake's clock counts launches: neither is faster.
            assert!(!tried.faster && !tried.usable() && tried.prefill_ms[0] > 0.0, "{tried:?}");
            assert_eq!(*device.tuning(), FAST);
        }
        // The ninth call is of this trial.
        assert!(matches!(device.try_warpgroups(&tune_for(64)), Err(DeviceError::Failed(_))));
    });
}

/// Each kernel with one mistake gives other results on the trial's data.
#[test]
fn wrong_warpgroup_kernels_are_rejected() {
    with_tuning("wrong_warpgroup_kernels_are_rejected", None, FAST, |_, fake| {
        for mutant in [&shim::STALE_STAGE, &shim::SKIPPED_TILE] {
            let kernels = shim::mutant(mutant).unwrap();
            for head_dim in [64, 128] {
                let tried = of_capability_9(fake, &kernels).try_warpgroups(&tune_for(head_dim)).unwrap();
                println!("{}, heads of {head_dim}: {tried:?}", kernels.display());
                assert!(!tried.agree && tried.worst[0] > 4.0, "{}: {tried:?}", kernels.display());
            }
        }
    });
}

/// A device whose blocks get 99 KB serves the suite's attention with smaller tiles; one with less is refused.
#[test]
fn little_shared_memory_is_enough() {
    with_device("little_shared_memory_is_enough", None, |_, fake| {
        fake.device(8, 9, 99 << 10);
        let options = CudaOptions { tuning: Some(TUNING), linear: LinearLayers::Own, ..CudaOptions::default() };
        let mut device = CudaDevice::open(b"any image", options.clone()).unwrap();
        assert_eq!(device.tuning().shared_bytes_max, 99 << 10);
        use lagoon_backend::conformance::{Tolerance, cases};
        cases::attention_prefill(&mut device, Tolerance::loosened(2.0));
        cases::attention_dtypes(&mut device, Tolerance::loosened(2.0));
        cases::matmul_blocked(&mut device, Tolerance::loosened(2.0));
        drop(device);
        fake.device(7, 5, 64 << 10);
        assert!(CudaDevice::open(b"any image", options.clone()).unwrap_err().to_string().contains("8.0"));
        fake.device(8, 7, 64 << 10);
        let error = CudaDevice::open(b"any image", options).unwrap_err().to_string();
        assert!(error.contains("65536 bytes of shared memory"), "{error}");
    });
}

fn half_bytes(value: f32, n: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    DType::F16.encode(&vec![value; n], &mut bytes);
    bytes
}
