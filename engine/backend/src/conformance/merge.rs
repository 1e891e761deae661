//! Scale-reduce on the device against f64.

use super::data::{Data, read};
use super::oracle::{self, Attention};
use super::{Tolerance, assert_close};
use crate::{AttnBatch, AttnRows, Device, Partials, WeightSource};
use bytes::Bytes;
use lagoon_types::{Alibi, AttentionGeometry, DType, KvDType, KvRun, KvShape};

/// Host values of a partial.
struct Values {
    out: Vec<f32>,
    lse: Vec<f32>,
    count: Vec<u32>,
}

impl Values {
    fn upload<D: Device>(&self, device: &mut D, g: AttentionGeometry) -> Partials<D::Tensor> {
        // More rows than counted, as in a runner's buffers.
        let mut partials = Partials::new(device, self.count.len() + 2, g).expect("partials");
        device.write(&mut partials.out, 0, &self.out).expect("write");
        device.write(&mut partials.lse, 0, &self.lse).expect("write");
        partials.count.clone_from(&self.count);
        partials
    }
}

/// Merges `b` into `a` on the device and compares with f64.
fn check<D: Device>(device: &mut D, what: &str, g: AttentionGeometry, a: &Values, b: &Values, tolerance: Tolerance) {
    let mut acc = a.upload(device, g);
    let other = b.upload(device, g);
    device.merge(&mut acc, &other, g).expect("merge");
    let (rows, heads, dim) = (b.count.len(), g.heads as usize, g.query_dim());
    let sums: Vec<u32> = a.count.iter().zip(&b.count).map(|(a, b)| a + b).collect();
    assert_eq!(acc.count, sums, "{what}: counts");
    let out = read(device, &acc.out, rows, heads * dim);
    let lse = read(device, &acc.lse, rows, heads);
    let u = 2f64.powi(-24);
    for row in (0..rows).filter(|row| sums[*row] > 0) {
        for head in 0..heads {
            let at = row * heads + head;
            let span = at * dim..(at + 1) * dim;
            let (wa, wb, want_lse) = match (a.count[row], b.count[row]) {
                (_, 0) => (1.0, 0.0, f64::from(a.lse[at])),
                (0, _) => (0.0, 1.0, f64::from(b.lse[at])),
                _ => {
                    let (la, lb) = (f64::from(a.lse[at]), f64::from(b.lse[at]));
                    let max = la.max(lb);
                    let sum = (la - max).exp() + (lb - max).exp();
                    ((la - max).exp() / sum, (lb - max).exp() / sum, max + sum.ln())
                }
            };
            let term = |weight: f64, v: f32| if weight == 0.0 { 0.0 } else { weight * f64::from(v) };
            let want: Vec<f64> = span.clone().map(|i| term(wa, a.out[i]) + term(wb, b.out[i])).collect();
            let size = |i: usize| term(wa, a.out[span.start + i]).abs() + term(wb, b.out[span.start + i]).abs();
            let what = format!("{what}: row {row} head {head}");
            assert_close(&what, &out[span.clone()], &want, |i| 12.0 * u * tolerance.factor * size(i) + 1e-30);
            assert_close(&what, &lse[at..=at], &[want_lse], |_| u * tolerance.factor * (4.0 + 2.0 * want_lse.abs()));
        }
    }
}

fn values(data: &mut Data, g: AttentionGeometry, rows: usize, lse_scale: f32) -> Values {
    Values {
        out: data.values(rows * g.q_dim()),
        lse: data.values(rows * g.heads as usize).into_iter().map(|v| v * lse_scale).collect(),
        count: (0..rows).map(|_| data.number(1..1000)).collect(),
    }
}

/// Rows with count 0 are neutral on either side, with any values (NaN included), and merging writes no
/// other rows.
pub fn merge_counts_decide_emptiness<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(90);
    for (rows, heads, kv_heads, head_dim) in
        [(1, 4, 2, 64), (5, 1, 1, 40), (17, 6, 2, 72), (65, 12, 4, 16), (9, 3, 1, 20)]
    {
        let g = AttentionGeometry { heads, kv_heads, head_dim, latent: head_dim == 20 };
        let (mut a, mut b) = (values(&mut data, g, rows, 3.0), values(&mut data, g, rows, 3.0));
        for (i, values) in [&mut a, &mut b].into_iter().enumerate() {
            for row in (0..rows).filter(|row| (row + i) % 3 == 0 || row % 5 == 4) {
                values.count[row] = 0;
                values.out[row * g.q_dim()..][..g.q_dim()].fill(f32::NAN);
                values.lse[row * heads as usize..][..heads as usize].fill(f32::NAN);
            }
        }
        check(device, &format!("merge of {rows} rows {g:?}"), g, &a, &b, tolerance);
    }
}

/// Log-sum-exps of up to 1e4 of either sign, equal, nearly equal and far apart.
pub fn merge_extreme_scores<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(91);
    let g = AttentionGeometry { heads: 3, kv_heads: 1, head_dim: 80, latent: false };
    let pairs = [
        (1e4, -1e4),
        (-1e4, 1e4),
        (1e4, 1e4),
        (-1e4, -1e4),
        (0.0, 0.0),
        (9_999.5, 1e4),
        (-1e4, -9_999.0),
        (1e-3, -1e-3),
        (88.0, 0.0),
        (0.0, 104.0),
    ];
    let (mut a, mut b) = (values(&mut data, g, pairs.len(), 1.0), values(&mut data, g, pairs.len(), 1.0));
    for (row, (x, y)) in pairs.into_iter().enumerate() {
        a.lse[row * 3..][..3].fill(x);
        b.lse[row * 3..][..3].fill(y);
    }
    check(device, "merge of extreme scores", g, &a, &b, tolerance);
}

/// Attention over parts of the context, merged on the device, is attention over the whole.
pub fn merge_of_split_attention<D: Device>(device: &mut D, tolerance: Tolerance) {
    split_attention(device, None, None, tolerance);
}

/// The same with ALiBi biases: far parts weigh as little, relative to near ones, as in the whole.
pub fn merge_of_split_alibi<D: Device>(device: &mut D, tolerance: Tolerance) {
    for bias_max in [1.0, 8.0] {
        split_attention(device, Some(Alibi { bias_max }), None, tolerance);
    }
}

/// The same with soft caps of the scores.
pub fn merge_of_split_softcap<D: Device>(device: &mut D, tolerance: Tolerance) {
    for (cap, alibi) in [(0.75, None), (50.0, None), (1.5, Some(Alibi { bias_max: 8.0 }))] {
        split_attention(device, alibi, Some(cap), tolerance);
    }
}

fn split_attention<D: Device>(device: &mut D, alibi: Option<Alibi>, softcap: Option<f32>, tolerance: Tolerance) {
    let g = AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 64, latent: false };
    let mut data = Data::new(92);
    let (context, rows) = (200u32, 9u32);
    let cases = [(None, KvDType::F32), (None, KvDType::F16), (Some(50), KvDType::BF16), (Some(50), KvDType::Fp8)];
    for (window, dtype) in cases {
        let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 64, dtype };
        let mut kv = device.kv(shape, context as usize).expect("kv");
        let (bytes, stored) = data.stored_kv(shape, context as usize);
        device.kv_write(&mut kv, 0, 0, &bytes).expect("kv_write");
        let (q, queries) = data.tensor(device, rows as usize, g.q_dim());
        let cuts = [0, 3, 150, 151, 196, context];
        let run = |from: u32, to: u32| KvRun { base: from, len: to - from, first_pos: from };
        let seqs = [AttnRows { row0: 0, rows, pos0: context - rows, run0: 0, runs: 1 }];
        let mut acc = Partials::new(device, rows as usize, g).expect("partials");
        acc.count.resize(rows as usize, 0);
        let mut part = Partials::new(device, rows as usize, g).expect("partials");
        // Out of order, as creditors' replies arrive.
        for i in [3, 0, 4, 2, 1] {
            let runs = [run(cuts[i], cuts[i + 1])];
            let batch = AttnBatch { geometry: g, scale: 0.125, window, alibi, softcap, seqs: &seqs, runs: &runs };
            device.attention(&q, &batch, &kv, 0, &mut part).expect("attention");
            device.merge(&mut acc, &part, g).expect("merge");
        }
        let runs = [run(0, context)];
        let batch = AttnBatch { geometry: g, scale: 0.125, window, alibi, softcap, seqs: &seqs, runs: &runs };
        let want = Attention::of(&batch, &queries, g.q_dim(), &stored);
        // Each of the merges adds a rounding to that of the parts.
        let merged = Tolerance { factor: 2.0 * tolerance.factor, ..tolerance };
        let what = format!("merged attention of {dtype}, window {window:?}, {alibi:?}, {softcap:?}");
        oracle::check(device, &what, &want, &acc, (&batch, dtype), merged);
    }
}

/// Sinks of small and large logits, beside small and large scores; empty rows, log-sum-exps and counts stay.
pub fn sink_joins_the_softmax<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(95);
    let u = 2f64.powi(-24) * tolerance.factor;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (rows, heads, kv_heads, head_dim) in
            [(1, 4, 2, 64), (5, 3, 1, 40), (17, 8, 2, 72), (65, 12, 4, 16), (9, 3, 1, 20)]
        {
            let g = AttentionGeometry { heads, kv_heads, head_dim, latent: head_dim == 20 };
            let (heads, dim) = (heads as usize, g.query_dim());
            let mut before = values(&mut data, g, rows, 20.0);
            (0..rows).filter(|row| row % 4 == 3).for_each(|row| before.count[row] = 0);
            let mut partials = before.upload(device, g);
            // Every third is beyond all scores, in turns of either sign; 200 is exact in each type.
            let mut logits = data.values(heads);
            for (i, logit) in logits.iter_mut().enumerate().filter(|(i, _)| i % 3 == 1) {
                *logit = if i % 2 == 0 { 200.0 } else { -200.0 };
            }
            let mut bytes = Vec::new();
            dtype.encode(&logits, &mut bytes);
            logits.clear();
            dtype.decode(&bytes, &mut logits);
            let source = WeightSource::plain(dtype, heads, vec![(1, Bytes::from(bytes))]);
            let sinks = device.weight(source).expect("weight");
            device.sink(&mut partials, &sinks, g).expect("sink");
            assert_eq!(partials.count, before.count, "counts");
            assert_eq!(read(device, &partials.lse, rows, heads), before.lse, "log-sum-exps");
            let share = |i: usize| {
                let (row, head) = (i / dim / heads, i / dim % heads);
                let steep = f64::from(logits[head]) - f64::from(before.lse[row * heads + head]);
                if before.count[row] == 0 { (1.0, 0.0) } else { (1.0 / (1.0 + steep.exp()), 8.0 + 2.0 * steep.abs()) }
            };
            let want: Vec<f64> = before.out.iter().enumerate().map(|(i, x)| f64::from(*x) * share(i).0).collect();
            let got = read(device, &partials.out, rows, heads * dim);
            let bound = |i: usize| u * share(i).1 * want[i].abs() + 1e-30;
            assert_close(&format!("sink {dtype} {rows} rows of {g:?}"), &got, &want, bound);
        }
    }
}
