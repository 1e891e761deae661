//! Micro attention against f64: geometries, element types, windows and runs cut anywhere.

use super::Tolerance;
use super::data::{Data, read, tensor};
use super::oracle::{self, Attention};
use crate::{AttnBatch, AttnRows, Device, Partials};
use lagoon_types::{Alibi, AttentionGeometry, KvDType, KvRun, KvShape};

/// A random case: sequences whose past lies in runs of random lengths, at permuted places of one store.
#[derive(Clone)]
pub(super) struct Case {
    pub(super) geometry: AttentionGeometry,
    pub(super) dtype: KvDType,
    pub(super) window: Option<u32>,
    /// Soft cap of the case's second run; see [`Case::check`].
    pub(super) softcap: f32,
    pub(super) alibi: Option<Alibi>,
    /// Rows, and position of the first one, of each sequence.
    pub(super) seqs: Vec<(u32, u32)>,
    /// Longest run, in tokens.
    pub(super) run_max: u32,
    /// One in `missing` runs is not in this store (it is remote); 0 for none.
    pub(super) missing: u32,
    /// Magnitude of the queries.
    pub(super) steepness: f32,
    pub(super) seed: u64,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            geometry: geometry(4, 2, 64),
            dtype: KvDType::F16,
            window: None,
            softcap: 0.75,
            alibi: None,
            seqs: vec![(1, 20)],
            run_max: 16,
            missing: 0,
            steepness: 1.0,
            seed: 40,
        }
    }
}

fn geometry(heads: u32, kv_heads: u32, head_dim: u32) -> AttentionGeometry {
    AttentionGeometry { heads, kv_heads, head_dim, latent: false }
}

/// Rows, and the runs of all sequences in a store of so many slots.
struct Layout {
    seqs: Vec<AttnRows>,
    runs: Vec<KvRun>,
    slots: u32,
}

impl Case {
    /// Cuts `0..pos0 + rows` of each sequence into runs and places them in random order with gaps.
    fn layout(&self, data: &mut Data) -> Layout {
        let (mut seqs, mut runs, mut row0) = (Vec::new(), Vec::new(), 1);
        for (rows, pos0) in &self.seqs {
            let (run0, mut pos) = (runs.len(), 0);
            while pos < pos0 + rows {
                let len = data.number(1..self.run_max + 1).min(pos0 + rows - pos);
                if self.missing == 0 || !data.one_in(self.missing) {
                    runs.push(KvRun { base: 0, len, first_pos: pos });
                }
                pos += len;
            }
            let index = |n: usize| u32::try_from(n).expect("fits");
            seqs.push(AttnRows { row0, rows: *rows, pos0: *pos0, run0: index(run0), runs: index(runs.len() - run0) });
            // A row of no sequence lies between the sequences.
            row0 += rows + 1;
        }
        let mut slots = 0;
        for i in data.permutation(u32::try_from(runs.len()).expect("fits")) {
            slots += data.number(0..3);
            runs[i as usize].base = slots;
            slots += runs[i as usize].len;
        }
        Layout { seqs, runs, slots: slots + 1 }
    }

    /// Without a soft cap, and then with one that most cases' scores exceed several times.
    pub(super) fn check<D: Device>(&self, device: &mut D, tolerance: Tolerance) {
        self.check_capped(device, None, tolerance);
        self.check_capped(device, Some(self.softcap), tolerance);
    }

    fn check_capped<D: Device>(&self, device: &mut D, softcap: Option<f32>, tolerance: Tolerance) {
        let mut data = Data::new(self.seed);
        let g = self.geometry;
        let layout = self.layout(&mut data);
        let shape = KvShape { layers: 2, kv_heads: g.kv_heads, head_dim: g.head_dim, dtype: self.dtype };
        let mut kv = device.kv(shape, layout.slots as usize).expect("kv");
        let (bytes, stored) = data.stored_kv(shape, layout.slots as usize);
        device.kv_write(&mut kv, 1, 0, &bytes).expect("kv_write");
        let batch = AttnBatch {
            geometry: g,
            scale: 1.0 / (g.query_dim() as f32).sqrt(),
            window: self.window,
            softcap,
            alibi: self.alibi,
            seqs: &layout.seqs,
            runs: &layout.runs,
        };
        let (rows, cols) = (batch.rows(), g.qkv_dim());
        let queries: Vec<f32> = data.values(rows * cols).into_iter().map(|v| v * self.steepness).collect();
        let q = tensor(device, cols, &queries);
        let mut out = Partials::new(device, rows + 3, g).expect("partials");
        device.attention(&q, &batch, &kv, 1, &mut out).expect("attention");
        let want = Attention::of(&batch, &queries, cols, &stored);
        let (dtype, window, alibi) = (self.dtype, self.window, self.alibi);
        let what = format!("attention {g:?} {dtype} {window:?} {softcap:?} {alibi:?} sequences {:?}", self.seqs);
        oracle::check(device, &what, &want, &out, (&batch, dtype), tolerance);
    }
}

/// All element types of the store, decode and a chunk.
pub fn attention_dtypes<D: Device>(device: &mut D, tolerance: Tolerance) {
    for dtype in KvDType::ALL {
        for seqs in [vec![(1, 0)], vec![(1, 77)], vec![(17, 30)], vec![(65, 0)]] {
            Case { dtype, seqs, ..Case::default() }.check(device, tolerance);
        }
    }
}

/// Head counts and sizes from one head to many, none of them friendly.
pub fn attention_geometries<D: Device>(device: &mut D, tolerance: Tolerance) {
    let geometries = [
        (1, 1, 40),
        (4, 2, 72),
        (6, 2, 80),
        (12, 4, 64),
        (8, 1, 96),
        (4, 4, 128),
        (2, 1, 172),
        (3, 3, 16),
        (16, 2, 256),
    ];
    let dtypes = KvDType::ALL;
    for (i, (heads, kv_heads, head_dim)) in geometries.into_iter().enumerate() {
        for seqs in [vec![(1, 50)], vec![(2, 3), (3, 40)], vec![(33, 21)]] {
            let dtype = dtypes[i % dtypes.len()];
            let seed = 50 + i as u64;
            Case { geometry: geometry(heads, kv_heads, head_dim), dtype, seqs, seed, ..Case::default() }
                .check(device, tolerance);
        }
    }
}

/// Sliding windows smaller and larger than runs and chunks, with runs that begin or end inside the window.
pub fn attention_windows<D: Device>(device: &mut D, tolerance: Tolerance) {
    for dtype in KvDType::ALL.into_iter().filter(|dtype| matches!(dtype, KvDType::F16 | KvDType::Fp8)) {
        for (window, run_max) in
            [1, 2, 7, 33, 64, 1000].into_iter().flat_map(|window| [1, 9, 100].map(|max| (window, max)))
        {
            let seqs = vec![(1, 90), (40, 60), (5, 2)];
            Case { dtype, window: Some(window), run_max, seqs, seed: 60 + u64::from(window), ..Case::default() }
                .check(device, tolerance);
        }
    }
}

/// ALiBi biases: any number of heads, steep and flat slopes, with and without a window, over runs cut anywhere and
/// partly missing, so that a row's nearest key may be far back.
pub fn attention_alibi<D: Device>(device: &mut D, tolerance: Tolerance) {
    let alibi = |bias_max| Some(Alibi { bias_max });
    let geometries =
        [(1, 1, 40), (8, 8, 16), (12, 4, 64), (6, 2, 80), (3, 3, 128), (14, 2, 96), (5, 1, 172), (7, 7, 8)];
    let dtypes = KvDType::ALL;
    for (i, (heads, kv_heads, head_dim)) in geometries.into_iter().enumerate() {
        let base =
            Case { geometry: geometry(heads, kv_heads, head_dim), dtype: dtypes[i % dtypes.len()], ..Case::default() };
        for (bias_max, window, missing) in [(8.0, None, 0), (8.0, Some(19), 3), (1.0, None, 2), (16.0, Some(50), 0)] {
            let seqs = vec![(1, 150), (40, 60), (1, 0), (3, 200), (70, 0)];
            let seed = 90 + i as u64;
            Case { alibi: alibi(bias_max), window, missing, seqs, seed, run_max: 40, ..base.clone() }
                .check(device, tolerance);
        }
    }
    for (window, seqs) in [(None, vec![(1, 6000), (9, 3000)]), (Some(1500), vec![(1, 5000), (40, 2500)])] {
        let long = Case { geometry: geometry(6, 2, 40), window, seqs, run_max: 2000, seed: 99, ..Case::default() };
        Case { alibi: alibi(8.0), ..long }.check(device, tolerance);
    }
}

/// Missing runs: counts fall, some rows see no key, some sequences have no run.
pub fn attention_missing_runs<D: Device>(device: &mut D, tolerance: Tolerance) {
    for seed in 70u64..78 {
        let seqs = vec![(1, 30), (20, 0), (3, 12), (1, 0), (64, 64)];
        let window = seed.is_multiple_of(2).then_some(10);
        Case { missing: 2, window, seqs, seed, run_max: 24, ..Case::default() }.check(device, tolerance);
    }
    // All runs are missing.
    Case { missing: 1, seqs: vec![(1, 5), (4, 9)], ..Case::default() }.check(device, tolerance);
}

/// Many sequences of one row each, of very different lengths.
pub fn attention_decode_batch<D: Device>(device: &mut D, tolerance: Tolerance) {
    for dtype in KvDType::ALL {
        let seqs = vec![(1, 700), (1, 0), (1, 1), (1, 31), (1, 32), (1, 257), (2, 100), (1, 64)];
        Case { dtype, seqs, run_max: 300, geometry: geometry(12, 4, 64), seed: 80, ..Case::default() }
            .check(device, tolerance);
    }
}

/// Chunks in the middle of a sequence, mixed with decoding rows.
pub fn attention_prefill<D: Device>(device: &mut D, tolerance: Tolerance) {
    for dtype in KvDType::ALL {
        let seqs = vec![(130, 200), (1, 90), (66, 0)];
        Case { dtype, seqs, run_max: 120, geometry: geometry(6, 2, 64), seed: 81, ..Case::default() }
            .check(device, tolerance);
    }
}

/// A few thousand tokens, so that splits over the context and their merge take part.
pub fn attention_long_context<D: Device>(device: &mut D, tolerance: Tolerance) {
    for (window, seqs) in [(None, vec![(1, 5000)]), (None, vec![(7, 4000)]), (Some(1500), vec![(1, 5000), (40, 2500)])]
    {
        Case { window, seqs, run_max: 2000, geometry: geometry(4, 2, 40), seed: 82, ..Case::default() }
            .check(device, tolerance);
    }
}

/// Scores of several hundred, where one key takes all the weight and unshifted exponentials overflow.
pub fn attention_steep_scores<D: Device>(device: &mut D, tolerance: Tolerance) {
    for dtype in KvDType::ALL {
        for seqs in [vec![(1, 150)], vec![(35, 80)]] {
            Case { dtype, seqs, steepness: 300.0, softcap: 50.0, seed: 83, ..Case::default() }.check(device, tolerance);
        }
    }
}

/// Soft caps from far below the scores to far above them, also with windows, biases and missing runs: a score is capped
/// before its bias, and one that is hidden stays so.
pub fn attention_softcap<D: Device>(device: &mut D, tolerance: Tolerance) {
    let geometries = [(1, 1, 40), (4, 2, 64), (6, 2, 80), (4, 2, 128), (3, 3, 96), (8, 4, 256), (2, 1, 172)];
    let dtypes = KvDType::ALL;
    for (i, (heads, kv_heads, head_dim)) in geometries.into_iter().enumerate() {
        let geometry = geometry(heads, kv_heads, head_dim);
        for (softcap, steepness, alibi) in
            [(0.2, 1.0, None), (50.0, 40.0, None), (1e3, 20.0, Some(8.0)), (2.0, 4.0, Some(1.0))]
        {
            let alibi = alibi.map(|bias_max| Alibi { bias_max });
            let (window, missing) = if i % 2 == 0 { (None, 3) } else { (Some(19), 0) };
            let seqs = vec![(1, 150), (40, 60), (1, 0), (3, 200), (70, 0)];
            let (dtype, seed) = (dtypes[i % dtypes.len()], 190 + i as u64);
            Case { geometry, dtype, window, softcap, alibi, seqs, run_max: 40, missing, steepness, seed }.check_capped(
                device,
                Some(softcap),
                tolerance,
            );
        }
    }
}

/// Rows that belong to no sequence keep their place: rows after the batch are not written.
pub fn attention_leaves_other_rows<D: Device>(device: &mut D, _: Tolerance) {
    let g = geometry(4, 2, 64);
    let mut data = Data::new(84);
    let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 64, dtype: KvDType::BF16 };
    let mut kv = device.kv(shape, 40).expect("kv");
    let (bytes, _) = data.stored_kv(shape, 40);
    device.kv_write(&mut kv, 0, 0, &bytes).expect("kv_write");
    let (q, _) = data.tensor(device, 9, g.q_dim());
    for rows in [1, 4] {
        let mut out = Partials::new(device, 9, g).expect("partials");
        let marks = vec![5.0; 9 * g.q_dim()];
        device.write(&mut out.out, 0, &marks).expect("write");
        let seqs = [AttnRows { row0: 0, rows, pos0: 30, run0: 0, runs: 1 }];
        let runs = [KvRun { base: 2, len: 35, first_pos: 0 }];
        let batch =
            AttnBatch { geometry: g, scale: 0.125, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
        device.attention(&q, &batch, &kv, 0, &mut out).expect("attention");
        let got = read(device, &out.out, 9, g.q_dim());
        assert!(got[..rows as usize * g.q_dim()].iter().all(|v| *v != 5.0), "rows of the batch are written");
        assert!(got[rows as usize * g.q_dim()..].iter().all(|v| *v == 5.0), "rows beyond the batch are not");
    }
}
