//! Micro attention beyond the conformance suite: every size of group, both precisions, biases with windows, stores whose
//! planes and layers interleave, plans padded for graphs, and the invariants of plans.

use crate::support::device::{ShimDevice, TUNING, Tensor, number};
use lagoon_backend::conformance::Data;
use lagoon_backend::{AttnBatch, AttnRows, Partials};
use lagoon_cuda::kernels::SHARED_BYTES_DEFAULT;
use lagoon_cuda::kernels::attention::{
    Buffers, KvView, Plan, Precision, SHARED_BYTES_LEAST, SHARED_BYTES_MAX, Store, Tuning,
};
use lagoon_types::run::visible;
use lagoon_types::{Alibi, AttentionGeometry, KvDType, KvRun, KvShape};

#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) geometry: AttentionGeometry,
    pub(crate) dtype: KvDType,
    pub(crate) precision: Precision,
    pub(crate) wgmma: bool,
    /// Launches that others of the device came before: they choose the order of turns.
    pub(crate) turn: u64,
    pub(crate) window: Option<u32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) alibi: bool,
    /// Rows and position of the first, of each sequence.
    pub(crate) seqs: Vec<(u32, u32)>,
    pub(crate) run_max: u32,
    pub(crate) pad: Option<(usize, usize)>,
    pub(crate) shared_bytes_max: u32,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            geometry: geometry(4, 2, 64),
            dtype: KvDType::BF16,
            precision: Precision::Exact,
            wgmma: false,
            turn: 0,
            window: None,
            softcap: None,
            alibi: false,
            seqs: vec![(1, 100), (40, 30)],
            run_max: 50,
            pad: None,
            shared_bytes_max: SHARED_BYTES_MAX,
        }
    }
}

/// What planes are aligned to under the copy engine's swizzle.
#[repr(C, align(128))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Line([u8; 128]);

/// A store's bytes, which end where its memory does, so that the address sanitizer sees the end.
enum Stored {
    /// With the bytes before the store.
    Words(Vec<u128>, usize),
    Lines(Vec<Line>),
}

impl Stored {
    /// `lines`: aligned for boxes, and of whole lines.
    fn new(bytes: &[u8], lines: bool) -> Self {
        if lines {
            let mut store = vec![Line([0; 128]); bytes.len() / 128];
            bytemuck::cast_slice_mut::<Line, u8>(&mut store).copy_from_slice(bytes);
            return Self::Lines(store);
        }
        let mut store = vec![0; bytes.len().div_ceil(16)];
        let before = 16 * store.len() - bytes.len();
        bytemuck::cast_slice_mut::<u128, u8>(&mut store)[before..].copy_from_slice(bytes);
        Self::Words(store, before)
    }

    fn address(&self) -> u64 {
        match self {
            Self::Words(store, before) => store.as_ptr() as u64 + *before as u64,
            Self::Lines(store) => store.as_ptr() as u64,
        }
    }
}

pub(crate) fn geometry(heads: u32, kv_heads: u32, head_dim: u32) -> AttentionGeometry {
    AttentionGeometry { heads, kv_heads, head_dim, latent: false }
}

/// Sequences of rows over `0..pos0 + rows`, cut into runs that lie in the store in the reverse order, with gaps.
fn layout(case: &Case, data: &mut Data) -> (Vec<AttnRows>, Vec<KvRun>, u32) {
    let (mut seqs, mut runs, mut row0) = (Vec::new(), Vec::new(), 0);
    for &(rows, pos0) in &case.seqs {
        let (run0, mut pos) = (runs.len(), 0);
        while pos < pos0 + rows {
            let len = data.number(1..case.run_max + 1).min(pos0 + rows - pos);
            runs.push(KvRun { base: 0, len, first_pos: pos });
            pos += len;
        }
        seqs.push(AttnRows { row0, rows, pos0, run0: number(run0), runs: number(runs.len() - run0) });
        row0 += rows;
    }
    let mut slots = 1;
    for run in runs.iter_mut().rev() {
        run.base = slots;
        slots += run.len + 1;
    }
    (seqs, runs, slots)
}

/// Expected output and log-sum-exp of one row's head.
fn oracle(
    batch: &AttnBatch<'_>,
    seq: &AttnRows,
    pos: u32,
    head: u32,
    query: &[f32],
    stored: &dyn Fn(bool, u32, usize) -> f64,
) -> (Vec<f64>, f64) {
    let dim = batch.geometry.head_dim as usize;
    let slope = batch.alibi.map_or(0.0, |a| f64::from(a.slope(head, batch.geometry.heads)));
    let seen = visible(pos, batch.window);
    let keys: Vec<(u32, u32)> = batch.runs[seq.run0 as usize..][..seq.runs as usize]
        .iter()
        .flat_map(|run| run.positions().zip(run.base..))
        .filter(|(pos, _)| seen.contains(pos))
        .collect();
    let at = head as usize / batch.geometry.group() as usize * dim;
    let scores: Vec<f64> = keys
        .iter()
        .map(|(key, slot)| {
            let dot: f64 = (0..dim).map(|d| f64::from(query[d]) * stored(false, *slot, at + d)).sum();
            let score = dot * f64::from(batch.scale);
            let capped = batch.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
            capped + slope * (f64::from(*key) - f64::from(pos))
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let mut out = vec![0.0; dim];
    for ((_, slot), score) in keys.iter().zip(&scores) {
        let weight = (score - max).exp() / sum;
        out.iter_mut().enumerate().for_each(|(d, o)| *o += weight * stored(true, *slot, at + d));
    }
    (out, max + sum.ln())
}

/// Asserts that the kernels' results are near the oracle's.
pub(crate) fn check(case: &Case) {
    if let Err(difference) = compare(ShimDevice::open().expect("the shim"), case) {
        panic!("{difference}");
    }
}

/// A random store, a layer of it, and the elements of its tokens: K and V of two layers each, the second of which is the layer.
fn kv(case: &Case, data: &mut Data, tokens: usize) -> (Stored, KvView, Vec<f32>) {
    let g = case.geometry;
    let shape = KvShape { layers: 1, kv_heads: 2 * g.kv_heads, head_dim: g.head_dim, dtype: case.dtype };
    let (mut bytes, mut widened) = data.stored_kv(shape, tokens);
    let row = case.dtype.row_elements(g.head_dim);
    let rows = g.kv_heads as usize * row;
    let part = rows * case.dtype.element_bytes();
    let (mut at, mut token_stride) = ([2 * part, 3 * part], 4 * rows);
    if case.dtype == KvDType::Fp8 {
        // Some tokens are zeros. Planes lie apart, so that rows begin at any multiple of four.
        let token = 4 * g.kv_dim();
        for slot in (0..tokens).step_by(5) {
            bytes[slot * 4 * part..][..4 * part].fill(0);
            widened[slot * token..][..token].fill(0.0);
        }
        let plane = |n: usize| bytes.chunks_exact(4 * part).flat_map(move |token| &token[n * part..][..part]).copied();
        bytes = plane(2).chain(plane(3)).collect();
        (at, token_stride) = ([0, tokens * part], rows);
    }
    let store = Stored::new(&bytes, case.wgmma);
    let [k, v] = at.map(|offset| store.address() + offset as u64);
    let view = KvView { k, v, token_stride: token_stride as u64, head_stride: row as u64 };
    (store, view, widened)
}

/// The first difference beyond the bound. That is absolute: queries, keys and values are below 3 and mostly below 1, so scores and
/// outputs are about 1.
pub(crate) fn compare(mut device: ShimDevice, case: &Case) -> Result<(), String> {
    device.tuning.precision = case.precision;
    device.tuning.wgmma = case.wgmma;
    device.launches = case.turn;
    device.tuning.shared_bytes_max = case.shared_bytes_max;
    let mut data = Data::new(21);
    let g = case.geometry;
    let (seqs, runs, slots) = layout(case, &mut data);
    let (kv_dim, token) = (g.kv_dim(), 4 * g.kv_dim());
    // The last slot is that of a key.
    let (_store, view, widened) = kv(case, &mut data, slots as usize - 1);
    let stored = |value: bool, slot: u32, at: usize| {
        f64::from(widened[slot as usize * token + (2 + usize::from(value)) * kv_dim + at])
    };
    let batch = AttnBatch {
        geometry: g,
        scale: 1.0 / (g.head_dim as f32).sqrt(),
        window: case.window,
        softcap: case.softcap,
        alibi: case.alibi.then_some(Alibi { bias_max: 8.0 }),
        seqs: &seqs,
        runs: &runs,
    };
    let rows = batch.rows();
    let cols = g.qkv_dim();
    let q = Tensor { data: data.values(rows * cols), cols };
    let heads = g.heads as usize;
    let mut out = Partials {
        out: Tensor { data: vec![f32::NAN; rows * g.q_dim()], cols: g.q_dim() },
        lse: Tensor { data: vec![f32::NAN; rows * heads], cols: heads },
        count: Vec::new(),
    };
    device.attend(&q, &batch, view, case.dtype, case.pad, &mut out);
    let boxes = case.wgmma && case.softcap.is_none();
    assert_eq!(device.plan.has_boxes(), boxes, "boxes where they are asked for, and no score is capped");
    let bound = match (case.precision, case.dtype) {
        (Precision::Fast, KvDType::BF16 | KvDType::Fp8) => 2e-2,
        (Precision::Fast, KvDType::F16) => 3e-3,
        _ => 3e-5,
    };
    let dim = g.head_dim as usize;
    for seq in &seqs {
        for i in 0..seq.rows {
            let row = (seq.row0 + i) as usize;
            for head in 0..g.heads {
                let query = &q.data[row * cols + head as usize * dim..][..dim];
                let (want, lse) = oracle(&batch, seq, seq.pos0 + i, head, query, &stored);
                let got = &out.out.data[row * g.q_dim() + head as usize * dim..][..dim];
                let what = format!("{g:?} {} {:?} row {row} head {head}", case.dtype, case.precision);
                for (d, (got, want)) in got.iter().zip(&want).enumerate() {
                    near(*got, *want, bound).map_err(|difference| format!("{what}: element {d} is {difference}"))?;
                }
                let got = out.lse.data[row * heads + head as usize];
                near(got, lse, bound).map_err(|difference| format!("{what}: log-sum-exp is {difference}"))?;
            }
        }
    }
    Ok(())
}

/// Not a number is near nothing.
fn near(got: f32, want: f64, bound: f64) -> Result<(), String> {
    let is_near = (f64::from(got) - want).abs() <= bound;
    if is_near { Ok(()) } else { Err(format!("{got}, not {want}")) }
}

/// Caps below the scores, with every kernel; the plan keeps capped scores from warpgroup kernels.
#[test]
fn soft_caps() {
    for dtype in KvDType::ALL {
        for (head_dim, wgmma) in [(64, false), (96, false), (128, true), (256, false), (40, false)] {
            let wgmma = wgmma && matches!(dtype, KvDType::F16 | KvDType::BF16);
            for (precision, alibi) in [(Precision::Exact, false), (Precision::Fast, true)] {
                let (geometry, seqs) = (geometry(6, 2, head_dim), vec![(1, 90), (40, 61), (3, 500)]);
                let base = Case { geometry, dtype, precision, wgmma, alibi, seqs, ..Case::default() };
                check(&Case { softcap: Some(0.5), window: Some(70), ..base.clone() });
                let shared_bytes_max = SHARED_BYTES_LEAST;
                check(&Case { softcap: Some(1.5), shared_bytes_max, wgmma: false, ..base });
            }
        }
    }
}

#[test]
fn groups_of_every_size() {
    for group in 1..=8 {
        for dtype in [if group % 2 == 0 { KvDType::F16 } else { KvDType::BF16 }, KvDType::Fp8] {
            check(&Case { geometry: geometry(2 * group, 2, 64), dtype, ..Case::default() });
        }
    }
    // More heads than a tile, and more than a tile of many rows.
    check(&Case { geometry: geometry(12, 1, 64), seqs: vec![(1, 70), (2, 9), (20, 3)], ..Case::default() });
    check(&Case { geometry: geometry(71, 1, 64), seqs: vec![(1, 33), (3, 20)], ..Case::default() });
    check(&Case { geometry: geometry(130, 1, 64), seqs: vec![(1, 20), (2, 5)], ..Case::default() });
}

#[test]
fn one_term_is_near() {
    for dtype in [KvDType::F16, KvDType::BF16, KvDType::Fp8] {
        for head_dim in [64, 96, 128, 256] {
            let seqs = vec![(50, 40), (1, 60)];
            let precision = Precision::Fast;
            check(&Case { geometry: geometry(2, 1, head_dim), dtype, precision, seqs, ..Case::default() });
        }
    }
}

/// What devices take whose blocks get 99 KB: smaller tiles, or the decode kernel where none fits.
#[test]
fn little_shared_memory() {
    for dtype in [KvDType::F16, KvDType::BF16, KvDType::Fp8] {
        for (head_dim, precision) in [
            (96, Precision::Exact),
            (128, Precision::Exact),
            (128, Precision::Fast),
            (256, Precision::Exact),
            (256, Precision::Fast),
        ] {
            let (geometry, seqs) = (geometry(3, 1, head_dim), vec![(70, 0), (33, 101), (1, 300)]);
            let shared_bytes_max = SHARED_BYTES_LEAST;
            check(&Case { geometry, dtype, precision, seqs, shared_bytes_max, ..Case::default() });
        }
    }
}

#[test]
fn two_terms_for_every_head_size() {
    for dtype in [KvDType::F16, KvDType::BF16, KvDType::Fp8] {
        for head_dim in [64, 96, 128, 256] {
            let seqs = vec![(70, 0), (33, 101), (1, 300), (5, 250)];
            check(&Case { geometry: geometry(3, 1, head_dim), dtype, seqs, ..Case::default() });
        }
    }
}

#[test]
fn windows_and_biases_together() {
    for window in [1, 15, 16, 17, 64, 65] {
        let seqs = vec![(1, 130), (66, 64), (1, 15), (3, 16)];
        let alibi = window % 2 == 1;
        let case = Case { window: Some(window), alibi, seqs, run_max: 20, ..Case::default() };
        for (dtype, kv_heads) in [(KvDType::BF16, 2), (KvDType::Fp8, 2), (KvDType::Fp8, 1), (KvDType::Fp8, 3)] {
            check(&Case { dtype, geometry: geometry(2 * kv_heads, kv_heads, 64), ..case.clone() });
        }
    }
}

#[test]
fn odd_stores_take_the_general_kernel() {
    for (dtype, head_dim) in [(KvDType::F32, 64), (KvDType::F16, 20), (KvDType::BF16, 130), (KvDType::Fp8, 62)] {
        check(&Case { geometry: geometry(6, 3, head_dim), dtype, alibi: true, ..Case::default() });
    }
}

/// A latent row's halves are no key and value of the kernels on tensor cores, of whatever size and tuning.
#[test]
fn latents_take_their_own_kernels() {
    let mut data = Data::new(4);
    let case = Case { geometry: geometry(8, 1, 64), seqs: vec![(1, 3000), (90, 700)], ..Case::default() };
    let (seqs, runs, _) = layout(&case, &mut data);
    let kernels = [(KvDType::F16, "attention_latent_f16"), (KvDType::BF16, "attention_latent_bf16")];
    for (head_dim, (dtype, name)) in [64, 96, 128, 256, 288].into_iter().flat_map(|dim| kernels.map(|k| (dim, k))) {
        let g = AttentionGeometry { latent: true, ..geometry(8, 1, head_dim) };
        let batch =
            AttnBatch { geometry: g, scale: 1.0, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
        let mut plan = Plan::default();
        let tuning = Tuning { wgmma: true, precision: Precision::Fast, ..TUNING };
        plan.make(&batch, Store { dtype, aligned: true, boxed: true }, &tuning);
        let at = Buffers { plan: 0, q: 0, q_stride: 0, slopes: 0, out: 0, lse: 0, piece_out: 0, piece_lse: 0 };
        let stride = u64::from(head_dim);
        let view = KvView { k: 0, v: 0, token_stride: stride, head_stride: stride };
        let launches: Vec<_> = plan.launches(&at, view).collect();
        assert!(!plan.has_boxes() && launches.len() == 1 && launches[0].name == name, "{launches:?}");
        assert_eq!(launches[0].params.head_dim, 2 * head_dim);
        assert!(launches[0].shared_bytes <= SHARED_BYTES_DEFAULT, "{launches:?}");
    }
}

/// Attends to 70 keys of one KV head in 8 bits by two heads that ask the same, `rows` rows of them. `near` compares each row's position
/// and first head with f64.
fn eight_bits(query: &[f32], values: &[f32], rows: u32, near: impl Fn(u32, &[f32], &[f64])) {
    let (g, keys) = (geometry(2, 1, 64), number(values.len() / 128));
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 64, dtype: KvDType::Fp8 };
    let (mut bytes, mut widened) = (Vec::new(), Vec::new());
    shape.encode(values, &mut bytes);
    shape.decode(&bytes, &mut widened);
    let store = Stored::new(&bytes, false);
    let view = KvView { k: store.address(), v: store.address() + 68, token_stride: 136, head_stride: 68 };
    let runs = [KvRun { base: 0, len: keys, first_pos: 0 }];
    let seqs = [AttnRows { row0: 0, rows, pos0: keys - rows, run0: 0, runs: 1 }];
    let batch =
        AttnBatch { geometry: g, scale: 1.0, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    let rows = rows as usize;
    let q = Tensor { data: query.repeat(2 * rows), cols: 128 };
    let tensor = |cols: usize| Tensor { data: vec![f32::NAN; rows * cols], cols };
    let mut out = Partials { out: tensor(128), lse: tensor(2), count: Vec::new() };
    let mut device = ShimDevice::open().expect("the shim");
    device.tuning.precision = Precision::Exact;
    device.attend(&q, &batch, view, KvDType::Fp8, None, &mut out);
    let stored =
        |value: bool, slot: u32, at: usize| f64::from(widened[slot as usize * 128 + usize::from(value) * 64 + at]);
    for row in 0..rows {
        let pos = seqs[0].pos0 + number(row);
        let (want, _) = oracle(&batch, &seqs[0], pos, 0, query, &stored);
        near(pos, &out.out.data[row * 128..][..64], &want);
    }
}

/// Every other value is 2^30 times as large, and its key's weight about as much smaller, so that neither kind outweighs the other, or
/// no smaller. The decode kernel, and many rows for the other.
#[test]
fn scales_of_eight_bit_values_differ_widely() {
    for (share, rows) in [(1.0, 1), (1.0, 40), (0.0, 1), (0.0, 40)] {
        let (mut data, far) = (Data::new(8), 2f32.powi(30));
        let (query, mut values) = (data.values(64), data.values(70 * 128));
        let norm: f32 = query.iter().map(|x| x * x).sum();
        for token in values.chunks_exact_mut(256) {
            let (key, value) = token[128..].split_at_mut(64);
            key.iter_mut().zip(&query).for_each(|(k, q)| *k = *k * 0.1 - q / norm * share * far.ln());
            value.iter_mut().for_each(|v| *v *= far);
        }
        eight_bits(&query, &values, rows, |pos, got, want| {
            let largest = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            for (got, want) in got.iter().zip(want) {
                near(*got, *want, largest * 2e-4).unwrap_or_else(|difference| panic!("position {pos}: {difference}"));
            }
        });
    }
}

/// The last key's value, or all of its row, is no number: rows of one tile that do not see it are as they were.
#[test]
fn decode_hides_what_is_no_number() {
    for spoilt in [64, 0] {
        let mut data = Data::new(9);
        let (query, mut values) = (data.values(64), data.values(70 * 128));
        values[69 * 128 + spoilt] = f32::INFINITY;
        eight_bits(&query, &values, 2, |pos, got, want| {
            if pos == 69 {
                assert!(got.iter().all(|x| x.is_nan()), "{got:?}");
            } else {
                assert!(got.iter().zip(want).all(|(got, want)| near(*got, *want, 3e-5).is_ok()), "{got:?} {want:?}");
            }
        });
    }
}

#[test]
fn stores_in_eight_bits_take_tensor_cores() {
    let (seqs, runs, _) = layout(&Case::default(), &mut Data::new(5));
    for head_dim in [62, 64, 96, 128, 256] {
        let geometry = geometry(4, 2, head_dim);
        let batch =
            AttnBatch { geometry, scale: 1.0, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
        let row = KvDType::Fp8.row_elements(head_dim) as u64;
        let view = KvView { k: 4, v: 4 + 2 * row, token_stride: 4 * row, head_stride: row };
        let mut plan = Plan::default();
        plan.make(&batch, Store::of(&view, KvDType::Fp8, head_dim), &TUNING);
        let at = Buffers { plan: 0, q: 0, q_stride: 0, slopes: 0, out: 0, lse: 0, piece_out: 0, piece_lse: 0 };
        let names: Vec<_> = plan.launches(&at, view).map(|launch| launch.name.to_owned()).collect();
        let want = match head_dim {
            62 => vec!["attention_any_fp8".to_owned()],
            _ => vec![format!("attention_decode_fp8_{head_dim}"), format!("attention_prefill_fp8_{head_dim}_exact")],
        };
        assert_eq!(names, want);
    }
}

#[test]
fn padded_plans_give_the_same() {
    for dtype in [KvDType::BF16, KvDType::Fp8] {
        let seqs = vec![(1, 500), (1, 3), (2, 90)];
        check(&Case { seqs, dtype, pad: Some((5, 3)), ..Case::default() });
    }
}

#[test]
fn plans_cover_each_visible_key_once() {
    let mut data = Data::new(3);
    let case = Case { seqs: vec![(1, 3000), (90, 700), (2, 0), (1, 64)], run_max: 200, ..Case::default() };
    let (seqs, runs, _) = layout(&case, &mut data);
    for window in [None, Some(100)] {
        let g = case.geometry;
        let batch = AttnBatch { geometry: g, scale: 1.0, window, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
        let mut plan = Plan::default();
        plan.make(&batch, Store { dtype: KvDType::F16, aligned: true, boxed: true }, &TUNING);
        let [decode, prefill, any, merges] = plan.counts();
        assert!(decode > 0 && prefill > 0 && any == 0 && (merges > 0 || window.is_some()));
        let at = Buffers { plan: 0, q: 0, q_stride: 0, slopes: 0, out: 0, lse: 0, piece_out: 0, piece_lse: 0 };
        let view = KvView { k: 0, v: 0, token_stride: 128, head_stride: 64 };
        let names: Vec<_> = plan.launches(&at, view).map(|launch| launch.name).collect();
        assert_eq!(names, ["attention_decode_f16_64", "attention_prefill_f16_64_exact"]);
        let mut bytes = Vec::new();
        plan.bytes(&mut bytes);
        let words: Vec<u32> = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let items = &words[..12 * (decode + prefill)];
        let table = &words[items.len() + 4 * merges..];
        // Positions that each row's items hold, in any order.
        let mut seen = vec![Vec::new(); batch.rows()];
        for item in items.chunks_exact(12) {
            let &[row0, rows, _, count, run0, _, len, first_pos, _, _, keys, _] = item else { unreachable!() };
            let of_table = table.chunks_exact(3).skip(run0 as usize).take(count as usize).map(|r| (r[2], r[1]));
            let runs: Vec<(u32, u32)> = if count == 1 { vec![(first_pos, len)] } else { of_table.collect() };
            assert_eq!(runs.iter().map(|r| r.1).sum::<u32>(), keys);
            for row in row0..row0 + rows {
                seen[row as usize].extend(runs.iter().flat_map(|(first, len)| *first..first + len));
            }
        }
        for seq in &seqs {
            for i in 0..seq.rows {
                let visible = visible(seq.pos0 + i, window);
                let row = &mut seen[(seq.row0 + i) as usize];
                row.retain(|pos| visible.contains(pos));
                row.sort_unstable();
                assert!(row.iter().copied().eq(visible), "row {i} of a sequence at {}", seq.pos0);
            }
        }
    }
}
