//! Steps replayed as CUDA graphs, over the fake driver: equal to launching each kernel, bit for bit, with all data that may change
//! between steps; captured again where shapes or buffers change; bounded in number; not used where capturing fails.
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "support/fake.rs"]
#[allow(dead_code, unused_macros, reason = "each test binary uses some of it")]
mod fake;
#[path = "support/shim.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses some of it")]
mod shim;

use fake::{Fake, UNKNOWN};
use lagoon_backend::conformance::Data;
use lagoon_backend::{
    Activation, AttnBatch, AttnRows, Device, ExpertBuffers, Experts, GroupScore, HeadStrides, LatentRow, Mode,
    Partials, Queued, Routing, Scoring,
};
use lagoon_cuda::kernels::attention::{DecodeClass, Tuning};
use lagoon_cuda::{CudaDevice, CudaKv, CudaOptions, CudaTensor, CudaWeight, LinearLayers};
use lagoon_types::{Alibi, AttentionGeometry, DType, KvDType, KvRun, KvShape};
use std::sync::atomic::{AtomicU64, Ordering};

const G: AttentionGeometry = AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 64, latent: false };
const SHAPE: KvShape = KvShape { layers: 2, kv_heads: 2, head_dim: 64, dtype: KvDType::F16 };
const HIDDEN: usize = 96;
/// Columns of the feed-forward layer.
const INNER: usize = 72;
const VOCAB: u32 = 40;
/// Experts of a mixture, and those of a row.
const EXPERTS: usize = 5;
const TOP_K: usize = 2;
/// Slots of a sequence in the store.
const ROOM: u32 = 300;

fn with_fake(name: &str, test: impl FnOnce(&Fake)) {
    static SEED: AtomicU64 = AtomicU64::new(2);
    let ready = shim::library().and_then(|kernels| {
        let fake = Fake::new(1 << 30, 1 << 16, SEED.fetch_add(1, Ordering::Relaxed))?;
        fake.kernels(&kernels);
        Ok(fake)
    });
    match ready {
        Ok(fake) => {
            test(&fake);
            fake.finish();
        }
        Err(reason) => fake::skip(name, &reason),
    }
}

fn open(no_graphs: bool, linear: LinearLayers) -> CudaDevice {
    open_with(CudaOptions { no_graphs, linear, ..CudaOptions::default() })
}

fn open_with(options: CudaOptions) -> CudaDevice {
    let class = DecodeClass { warps: 2, stages: 2, blocks_per_sm: 1, piece_keys_min: 64 };
    let tuning = Some(Tuning { classes: [class; 3], ..Tuning::untuned(4) });
    CudaDevice::open(b"any image", CudaOptions { tuning, ..options }).unwrap()
}

/// A model of two layers, and what its steps need.
struct Model {
    embed: CudaWeight,
    norm: CudaWeight,
    qkv: CudaWeight,
    o: CudaWeight,
    up: CudaWeight,
    down: CudaWeight,
    head: CudaWeight,
    sinks: CudaWeight,
    router: CudaWeight,
    ups: CudaWeight,
    downs: CudaWeight,
    kv: CudaKv,
    x: CudaTensor,
    normed: CudaTensor,
    projected: CudaTensor,
    rope: CudaTensor,
    attn: Partials<CudaTensor>,
    product: CudaTensor,
    act: CudaTensor,
    chances: CudaTensor,
    buffers: ExpertBuffers<CudaTensor>,
    logits: CudaTensor,
}

impl Model {
    fn new(device: &mut CudaDevice, batch: usize) -> Self {
        let mut data = Data::new(3);
        Self {
            embed: data.weight(device, DType::BF16, VOCAB as usize, HIDDEN).0,
            norm: data.weight(device, DType::F32, 1, HIDDEN).0,
            qkv: data.weight(device, DType::BF16, G.qkv_dim(), HIDDEN).0,
            o: data.weight(device, DType::F16, HIDDEN, G.q_dim()).0,
            up: data.weight(device, DType::BF16, 2 * INNER, HIDDEN).0,
            down: data.weight(device, DType::BF16, HIDDEN, INNER).0,
            head: data.weight(device, DType::BF16, 1, 64).0,
            sinks: data.weight(device, DType::F32, 1, G.heads as usize).0,
            router: data.weight(device, DType::F16, EXPERTS, HIDDEN).0,
            ups: data.weight(device, DType::BF16, EXPERTS * 2 * INNER, HIDDEN).0,
            downs: data.weight(device, DType::BF16, EXPERTS * HIDDEN, INNER).0,
            kv: device.kv(SHAPE, batch * ROOM as usize).unwrap(),
            x: device.tensor(batch, HIDDEN).unwrap(),
            normed: device.tensor(batch, HIDDEN).unwrap(),
            projected: device.tensor(batch, G.qkv_dim()).unwrap(),
            rope: device.tensor(batch, 64).unwrap(),
            attn: Partials::new(device, batch, G).unwrap(),
            product: device.tensor(batch, 2 * INNER).unwrap(),
            act: device.tensor(batch, INNER).unwrap(),
            chances: device.tensor(batch, EXPERTS).unwrap(),
            buffers: ExpertBuffers::new(device, batch, TOP_K, (HIDDEN, INNER), Activation::SiluMul).unwrap(),
            logits: device.tensor(batch, VOCAB as usize).unwrap(),
        }
    }

    /// One decoding step of the rows at these positions, as the runner makes it; the logits.
    fn step(&mut self, d: &mut CudaDevice, positions: &[u32], alibi: bool) -> Vec<f32> {
        let rows = positions.len();
        d.begin_repeatable().unwrap();
        let angles: Vec<f32> =
            positions.iter().flat_map(|pos| (0..64).map(move |i| ((pos * (i % 32)) as f32 * 0.01).sin())).collect();
        d.write(&mut self.rope, 0, &angles).unwrap();
        let ids: Vec<u32> = positions.iter().map(|pos| pos * 7 % VOCAB).collect();
        d.embed(&self.embed, &ids, &mut self.x).unwrap();
        let at = |row: u32| row * ROOM;
        let slots: Vec<u32> = (0..).zip(positions).map(|(row, pos)| at(row) + pos).collect();
        // Two runs each where there are enough keys, so that a table is read.
        let (mut seqs, mut runs) = (Vec::new(), Vec::new());
        for (row, pos) in (0..).zip(positions) {
            let run0 = u32::try_from(runs.len()).unwrap();
            let cut = pos / 3;
            if cut > 0 {
                runs.push(KvRun { base: at(row), len: cut, first_pos: 0 });
            }
            let rest = pos + 1 - cut - u32::from(cut > 0);
            runs.push(KvRun { base: at(row) + pos + 1 - rest, len: rest, first_pos: pos + 1 - rest });
            let count = u32::try_from(runs.len()).unwrap() - run0;
            seqs.push(AttnRows { row0: row, rows: 1, pos0: *pos, run0, runs: count });
        }
        let alibi = alibi.then_some(Alibi { bias_max: 8.0 });
        let batch =
            AttnBatch { geometry: G, scale: 0.125, window: None, alibi, softcap: None, seqs: &seqs, runs: &runs };
        for layer in 0..2 {
            d.rms_norm(&self.x, &self.norm, 1e-5, rows, &mut self.normed).unwrap();
            d.matmul(&self.normed, &self.qkv, rows, Mode::Set, &mut self.projected).unwrap();
            d.head_norm(&mut self.projected, (&self.head, &self.head), 1e-6, G, rows).unwrap();
            d.rope_append(&mut self.projected, &self.rope, G, &slots, &mut self.kv, layer).unwrap();
            d.attention(&self.projected, &batch, &self.kv, layer, &mut self.attn).unwrap();
            d.sink(&mut self.attn, &self.sinks, G).unwrap();
            d.matmul(&self.attn.out, &self.o, rows, Mode::Add, &mut self.x).unwrap();
            d.rms_norm(&self.x, &self.norm, 1e-5, rows, &mut self.normed).unwrap();
            let silu = Activation::SiluMul;
            d.matmul_activated(&self.normed, &self.up, rows, silu, &mut self.product, &mut self.act).unwrap();
            d.matmul(&self.act, &self.down, rows, Mode::Add, &mut self.x).unwrap();
            self.mixture(d, rows);
            d.mark(0).unwrap();
        }
        d.matmul(&self.x, &self.embed, rows, Mode::Set, &mut self.logits).unwrap();
        let mut out = Vec::new();
        d.read(&self.logits, 0..rows, 0..VOCAB as usize, &mut out).unwrap();
        out
    }

    /// A mixture of experts on the last norm's rows: who is chosen changes from step to step, the launches do not.
    fn mixture(&mut self, d: &mut CudaDevice, rows: usize) {
        let (scoring, group_score) = (Scoring::Softmax, GroupScore::Best);
        let routing =
            Routing { top_k: TOP_K, scoring, normalised: true, scale: 1.0, groups: 1, top_groups: 1, group_score };
        let experts = Experts {
            count: EXPERTS,
            up: &self.ups,
            up_bias: None,
            down: &self.downs,
            down_bias: None,
            choice_bias: None,
            activation: Activation::SiluMul,
            routing,
        };
        d.matmul(&self.normed, &self.router, rows, Mode::Set, &mut self.chances).unwrap();
        d.experts(&self.normed, &self.chances, &experts, rows, &mut self.buffers, &mut self.x).unwrap();
    }
}

/// Bits of what some steps give: growing contexts of `rows` sequences of different lengths, from `first` on.
fn run(device: &mut CudaDevice, model: &mut Model, rows: u32, first: u32, steps: u32) -> Vec<u32> {
    let mut bits = Vec::new();
    for step in 0..steps {
        let positions: Vec<u32> = (0..rows).map(|row| first + step + row * 17 % 90).collect();
        bits.extend(model.step(device, &positions, false).iter().map(|v| v.to_bits()));
    }
    bits
}

#[test]
fn a_replay_equals_launching_bit_for_bit() {
    for _ in 0..2 {
        with_fake("a_replay_equals_launching_bit_for_bit", |_| {
            let mut results = Vec::new();
            for no_graphs in [true, false] {
                let mut device = open(no_graphs, LinearLayers::Own);
                let mut model = Model::new(&mut device, 20);
                // From one piece a sequence to several; streams of weights, then tiles.
                let mut bits = run(&mut device, &mut model, 3, 0, 5);
                bits.extend(run(&mut device, &mut model, 3, 190, 5));
                bits.extend(run(&mut device, &mut model, 18, 150, 4));
                results.push(bits);
                let (counters, kept, off) = device.graphs();
                assert_eq!(off, None);
                if no_graphs {
                    assert_eq!((counters.captured, counters.replayed, counters.eager), (0, 0, 0));
                } else {
                    assert!(counters.replayed >= 4, "{counters:?}");
                    assert_eq!(counters.eager + counters.captured + counters.replayed, 14, "{counters:?}");
                    assert_eq!(kept as u64, counters.captured);
                }
            }
            assert!(results[0].iter().all(|bits| f32::from_bits(*bits).is_finite()));
            assert_eq!(results[0], results[1]);
        });
    }
}

#[test]
fn another_shape_or_buffer_is_captured_again() {
    with_fake("another_shape_or_buffer_is_captured_again", |_| {
        let mut device = open(false, LinearLayers::Own);
        let mut plain = open(true, LinearLayers::Own);
        let (mut model, mut expected) = (Model::new(&mut device, 4), Model::new(&mut plain, 4));
        let mut same = |device: &mut CudaDevice, model: &mut Model, rows, first, steps| {
            let got = run(device, model, rows, first, steps);
            assert_eq!(got, run(&mut plain, &mut expected, rows, first, steps));
            device.graphs().0
        };
        let first = same(&mut device, &mut model, 2, 20, 5);
        assert_eq!((first.eager, first.captured, first.replayed), (1, 1, 3));
        let more_rows = same(&mut device, &mut model, 3, 20, 5);
        assert_eq!((more_rows.captured, more_rows.replayed), (2, 6));
        let back = same(&mut device, &mut model, 2, 25, 2);
        assert_eq!((back.captured, back.replayed), (2, 8), "both shapes are kept");
        // Activations in other buffers: the old graph would read freed memory.
        model.x = device.tensor(4, HIDDEN).unwrap();
        let moved = same(&mut device, &mut model, 2, 27, 3);
        assert_eq!((moved.eager, moved.captured, moved.replayed), (3, 3, 9));
    });
}

#[test]
fn biases_are_uploaded_with_a_listed_step() {
    with_fake("biases_are_uploaded_with_a_listed_step", |_| {
        let mut results = Vec::new();
        for no_graphs in [true, false] {
            let mut device = open(no_graphs, LinearLayers::Own);
            let mut model = Model::new(&mut device, 2);
            let steps = (0..5u32).flat_map(|step| model.step(&mut device, &[step + 60, step + 130], true));
            results.push(steps.collect::<Vec<f32>>());
            assert_eq!(device.graphs().0.replayed, if no_graphs { 0 } else { 3 });
        }
        assert_eq!(results[0], results[1]);
    });
}

#[test]
fn graphs_are_bounded() {
    with_fake("graphs_are_bounded", |fake| {
        let mut device = open(false, LinearLayers::Own);
        let mut model = Model::new(&mut device, 1);
        // Each buffer elsewhere makes another list; all of them stay, so that no address comes twice.
        let mut buffers = Vec::new();
        for _ in 0..34 {
            buffers.push(std::mem::replace(&mut model.x, device.tensor(1, HIDDEN).unwrap()));
            run(&mut device, &mut model, 1, 5, 2);
        }
        let (counters, kept, _) = device.graphs();
        assert_eq!((counters.captured, counters.evicted, kept), (34, 2, 32));
        assert_eq!(fake.counts().graphs, 32, "those that went were released");
    });
}

/// The marks behind each layer do not divide a step's graph while no other step runs.
#[test]
fn a_replayed_step_launches_no_kernel_by_itself() {
    with_fake("a_replayed_step_launches_no_kernel_by_itself", |fake| {
        let mut device = open(false, LinearLayers::Own);
        let mut model = Model::new(&mut device, 2);
        run(&mut device, &mut model, 2, 20, 3);
        fake.fail("cuLaunchKernelEx", 1, UNKNOWN);
        run(&mut device, &mut model, 2, 23, 2);
        fake.fail("", 0, 0);
        assert_eq!((device.graphs().0.captured, device.graphs().0.replayed), (1, 3));
        // Asked for, a mark is behind what was listed before it.
        device.begin_repeatable().unwrap();
        device.gather_rows(&model.x, &[1, 0], &mut model.normed).unwrap();
        device.mark(1).unwrap();
        let before = fake.counts().kernels_run;
        while device.reached(1).unwrap().is_some() {}
        assert_eq!(fake.counts().kernels_run, before + 1);
    });
}

/// A driver that cannot capture costs graphs, not steps.
#[test]
fn a_capture_that_fails_is_launched_as_it_is() {
    for function in ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"] {
        with_fake("a_capture_that_fails_is_launched_as_it_is", |fake| {
            let (mut device, mut plain) = (open(false, LinearLayers::Own), open(true, LinearLayers::Own));
            let (mut model, mut expected) = (Model::new(&mut device, 2), Model::new(&mut plain, 2));
            fake.fail(function, 1, UNKNOWN);
            let got = run(&mut device, &mut model, 2, 20, 4);
            assert_eq!(got, run(&mut plain, &mut expected, 2, 20, 4), "{function}");
            let (counters, kept, off) = device.graphs();
            assert!(off.is_some_and(|reason| reason.contains("UNKNOWN")), "{function}: {off:?}");
            assert_eq!((counters.eager, counters.captured, kept), (4, 0, 0), "{function}");
        });
    }
}

/// Work of other kinds in the middle of a step ends the recorded list, and keeps its place in the order; an aborted step is not
/// executed.
#[test]
fn what_cannot_be_listed_settles_first() {
    with_fake("what_cannot_be_listed_settles_first", |_| {
        let mut device = open(false, LinearLayers::Own);
        let (mut x, mut out) = (device.tensor(2, 8).unwrap(), device.tensor(2, 8).unwrap());
        let spare = device.tensor(2, 8).unwrap();
        let mut kv = device.kv(SHAPE, 10).unwrap();
        let token = vec![0u8; SHAPE.layer_token_bytes()];
        for round in 0..4u16 {
            device.begin_repeatable().unwrap();
            device.write(&mut x, 0, &[f32::from(round) + 1.0; 16]).unwrap();
            device.gather_rows(&x, &[1, 0], &mut out).unwrap();
            device.kv_write(&mut kv, 0, 0, &token).unwrap();
            device.write(&mut x, 0, &[0.0; 16]).unwrap();
            let mut got = Vec::new();
            device.read(&out, 0..2, 0..8, &mut got).unwrap();
            assert_eq!(got, [f32::from(round) + 1.0; 16]);
            // Aborted: the next step begins, and this one writes nothing.
            device.begin_repeatable().unwrap();
            device.gather_rows(&spare, &[0, 1], &mut out).unwrap();
        }
        device.begin_repeatable().unwrap();
        device.sync().unwrap();
    });
}

/// Kernels that begin before the one ahead has ended: results are those of kernels one after the other, bit for bit, launched and
/// replayed; where the device cannot, and where they were not asked for, no kernel does.
#[test]
fn dependents_change_no_bit() {
    for _ in 0..2 {
        with_fake("dependents_change_no_bit", |fake| {
            let mut results = Vec::new();
            for (capability, no_dependent_launch, no_graphs) in
                [(8, false, false), (9, true, false), (9, false, true), (9, false, false)]
            {
                fake.device(capability, 0, 227 << 10);
                let before = fake.counts();
                let linear = LinearLayers::Own;
                let options = CudaOptions { linear, no_graphs, no_dependent_launch, ..CudaOptions::default() };
                let mut device = open_with(options);
                let mut model = Model::new(&mut device, 20);
                // Streams of weights, then tiles; one piece a sequence, then several.
                let mut bits = run(&mut device, &mut model, 3, 60, 4);
                bits.extend(run(&mut device, &mut model, 18, 5, 3));
                results.push(bits);
                let (counters, _, off) = device.graphs();
                // A plan's pieces may change between two steps of a run, by the multiprocessors that are there.
                assert_eq!(off, None);
                assert_eq!(counters.replayed > 0, !no_graphs, "{counters:?}");
                let after = fake.counts();
                let expected = capability == 9 && !no_dependent_launch;
                assert_eq!(after.dependents > before.dependents, expected, "launched as dependents");
                assert_eq!(after.begun_early > before.begun_early, expected, "begun before the kernel ahead");
            }
            assert!(results[0].iter().all(|bits| f32::from_bits(*bits).is_finite()));
            assert!(results.iter().all(|bits| *bits == results[0]));
        });
    }
}

/// Drivers before CUDA 12.3 capture no dependents, and others may refuse: graphs are made without them.
#[test]
fn graphs_do_without_dependents_where_the_driver_does() {
    with_fake("graphs_do_without_dependents_where_the_driver_does", |fake| {
        fake.device(9, 0, 227 << 10);
        for (version, captures_dependents) in [(12_020, false), (13_000, true)] {
            fake.driver(version);
            // The call of a capture that is refused: none, the end, the second kernel.
            for refused in [None, Some(("cuStreamEndCapture", 1)), Some(("cuLaunchKernelEx", 2))] {
                let (mut device, mut plain) = (open(false, LinearLayers::Own), open(true, LinearLayers::Own));
                let (mut model, mut expected) = (Model::new(&mut device, 2), Model::new(&mut plain, 2));
                let mut got = run(&mut device, &mut model, 2, 20, 1);
                if let Some((function, nth)) = refused {
                    fake.fail(function, nth, UNKNOWN);
                }
                got.extend(run(&mut device, &mut model, 2, 21, 3));
                assert_eq!(got, run(&mut plain, &mut expected, 2, 20, 4), "{version} {refused:?}");
                let (counters, _, off) = device.graphs();
                // A capture refused for another reason than programmatic dependents is not tried again.
                let replays = refused.is_none() || captures_dependents;
                assert_eq!(
                    (counters.replayed, off.is_none()),
                    (if replays { 2 } else { 0 }, replays),
                    "{version} {refused:?}"
                );
            }
        }
    });
}

const LATENT: AttentionGeometry = AttentionGeometry { heads: 4, kv_heads: 1, head_dim: 40, latent: true };
/// Of a latent row of 80 elements, those that are rotated; and those of a query before absorption, and of a value, that are not.
const ROTATED: usize = 16;
const PLAIN: usize = 24;

/// A layer of latent attention, and what its steps need.
struct LatentLayer {
    embed: CudaWeight,
    /// Queries, latents and rotated keys of a row.
    down: [CudaWeight; 3],
    /// By head: from queries to the latent, and from it to values.
    absorb: CudaWeight,
    values: CudaWeight,
    o: CudaWeight,
    kv: CudaKv,
    x: CudaTensor,
    parts: [CudaTensor; 3],
    qkv: CudaTensor,
    rope: CudaTensor,
    attn: Partials<CudaTensor>,
    mixed: CudaTensor,
}

impl LatentLayer {
    fn new(device: &mut CudaDevice, batch: usize) -> Self {
        let mut data = Data::new(5);
        let latent = LATENT.query_dim() - ROTATED;
        let parts = [4 * (PLAIN + ROTATED), latent, ROTATED];
        Self {
            embed: data.weight(device, DType::BF16, VOCAB as usize, HIDDEN).0,
            down: parts.map(|cols| data.weight(device, DType::BF16, cols, HIDDEN).0),
            absorb: data.weight(device, DType::BF16, 4 * latent, PLAIN).0,
            values: data.weight(device, DType::F16, 4 * PLAIN, latent).0,
            o: data.weight(device, DType::F16, HIDDEN, 4 * PLAIN).0,
            kv: device.kv(KvShape { layers: 1, kv_heads: 1, head_dim: 40, dtype: KvDType::BF16 }, batch * 300).unwrap(),
            x: device.tensor(batch, HIDDEN).unwrap(),
            parts: parts.map(|cols| device.tensor(batch, cols).unwrap()),
            qkv: device.tensor(batch, LATENT.qkv_dim()).unwrap(),
            rope: device.tensor(batch, ROTATED).unwrap(),
            attn: Partials::new(device, batch, LATENT).unwrap(),
            mixed: device.tensor(batch, 4 * PLAIN).unwrap(),
        }
    }

    /// One decoding step of the rows at these positions; bits of the result.
    fn step(&mut self, d: &mut CudaDevice, positions: &[u32]) -> Vec<u32> {
        let rows = positions.len();
        d.begin_repeatable().unwrap();
        let angles: Vec<f32> =
            positions.iter().flat_map(|pos| (0..16).map(move |i| ((pos * (i % 8)) as f32 * 0.01).sin())).collect();
        d.write(&mut self.rope, 0, &angles).unwrap();
        let ids: Vec<u32> = positions.iter().map(|pos| pos * 7 % VOCAB).collect();
        d.embed(&self.embed, &ids, &mut self.x).unwrap();
        let slots: Vec<u32> = (0..).zip(positions).map(|(row, pos)| row * ROOM + pos).collect();
        let whole = |(row, pos): (u32, &u32)| KvRun { base: row * ROOM, len: pos + 1, first_pos: 0 };
        let runs: Vec<KvRun> = (0..).zip(positions).map(whole).collect();
        let seq = |(row, pos): (u32, &u32)| AttnRows { row0: row, rows: 1, pos0: *pos, run0: row, runs: 1 };
        let seqs: Vec<AttnRows> = (0..).zip(positions).map(seq).collect();
        let (geometry, scale) = (LATENT, 0.1);
        let batch = AttnBatch { geometry, scale, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
        for (weight, part) in self.down.iter().zip(&mut self.parts) {
            d.matmul(&self.x, weight, rows, Mode::Set, part).unwrap();
        }
        let [queries, latent, key] = &self.parts;
        let to_latent = HeadStrides { heads: 4, x_stride: PLAIN + ROTATED, out_stride: LATENT.query_dim() };
        d.head_matmul(queries, &self.absorb, to_latent, rows, &mut self.qkv).unwrap();
        let row = LatentRow { queries, latent, key, rope: &self.rope };
        d.latent_append(&mut self.qkv, row, LATENT, &slots, &mut self.kv, 0).unwrap();
        d.attention(&self.qkv, &batch, &self.kv, 0, &mut self.attn).unwrap();
        let to_values = HeadStrides { heads: 4, x_stride: LATENT.query_dim(), out_stride: PLAIN };
        d.head_matmul(&self.attn.out, &self.values, to_values, rows, &mut self.mixed).unwrap();
        d.matmul(&self.mixed, &self.o, rows, Mode::Add, &mut self.x).unwrap();
        let mut out = Vec::new();
        d.read(&self.x, 0..rows, 0..HIDDEN, &mut out).unwrap();
        assert!(out.iter().all(|value| value.is_finite()));
        out.iter().map(|value| value.to_bits()).collect()
    }
}

#[test]
fn latent_attention_is_replayed_bit_for_bit() {
    with_fake("latent_attention_is_replayed_bit_for_bit", |fake| {
        let mut results = Vec::new();
        // Launched and replayed, and both with kernels that begin before the one ahead has ended.
        for (capability, no_graphs) in [(8, true), (8, false), (9, true), (9, false)] {
            fake.device(capability, 0, 227 << 10);
            let mut device = open(no_graphs, LinearLayers::Own);
            let mut layer = LatentLayer::new(&mut device, 3);
            let steps = (0..6u32).map(|step| layer.step(&mut device, &[step, step + 40, step + 7]));
            results.push(steps.collect::<Vec<_>>());
            assert_eq!(device.graphs().0.replayed, if no_graphs { 0 } else { 4 });
        }
        assert!(fake.counts().begun_early > 0 && results.iter().all(|bits| *bits == results[0]));
    });
}
