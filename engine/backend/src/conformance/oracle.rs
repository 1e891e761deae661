//! Attention in f64, by plain loops over each row's visible range.

use super::data::read;
use super::{Tolerance, assert_close};
use crate::{AttnBatch, Device, Partials};
use lagoon_types::run::visible;
use lagoon_types::{DType, KvDType};

/// Attention of a batch in f64, with the inputs of its error bounds.
pub(super) struct Attention {
    /// `[rows][heads][head_dim]`, normalised.
    pub(super) out: Vec<f64>,
    /// `[rows][heads]`, natural log.
    pub(super) lse: Vec<f64>,
    /// `[rows]`, keys seen.
    pub(super) count: Vec<u32>,
    /// `[rows][heads]`: the largest sum of absolute products, and of the bias, behind a score.
    steepest: Vec<f64>,
    /// The same without the bias.
    products: Vec<f64>,
    /// Largest magnitude of a value.
    value_max: f64,
}

impl Attention {
    /// `queries` is `[rows][q_cols]`; `stored` is the layer's whole store, widened: `[slot][k|v][kv_heads][head_dim]`.
    pub(super) fn of(batch: &AttnBatch<'_>, queries: &[f32], q_cols: usize, stored: &[f32]) -> Self {
        let g = batch.geometry;
        let (heads, rows) = (g.heads as usize, batch.rows());
        let mut all = Self {
            out: vec![0.0; rows * g.q_dim()],
            lse: vec![0.0; rows * heads],
            count: vec![0; rows],
            steepest: vec![0.0; rows * heads],
            products: vec![0.0; rows * heads],
            value_max: stored.iter().fold(0.0, |m, v| f64::from(v.abs()).max(m)),
        };
        for seq in batch.seqs {
            for i in 0..seq.rows {
                let (row, seen) = ((seq.row0 + i) as usize, visible(seq.pos0 + i, batch.window));
                let slots: Vec<(usize, f64)> = batch.runs[seq.run0 as usize..][..seq.runs as usize]
                    .iter()
                    .flat_map(|run| run.positions().zip(run.base..))
                    .filter(|(pos, _)| seen.contains(pos))
                    .map(|(pos, slot)| (slot as usize, f64::from(seq.pos0 + i - pos)))
                    .collect();
                all.count[row] = u32::try_from(slots.len()).expect("fits");
                if !slots.is_empty() {
                    (0..heads).for_each(|head| all.head(batch, &queries[row * q_cols..], stored, row, head, &slots));
                }
            }
        }
        all
    }

    /// `slots` are those of the keys that the row sees, with their distances.
    fn head(
        &mut self,
        batch: &AttnBatch<'_>,
        query: &[f32],
        stored: &[f32],
        row: usize,
        head: usize,
        slots: &[(usize, f64)],
    ) {
        let g = batch.geometry;
        let (dim, token, heads) = (g.query_dim(), 2 * g.kv_dim(), g.heads as usize);
        let query = &query[head * dim..][..dim];
        let at = if g.latent { 0 } else { head / g.group() as usize * dim };
        let slope = batch.alibi.map_or(0.0, |alibi| slope(f64::from(alibi.bias_max), head, heads));
        let mut scores = Vec::with_capacity(slots.len());
        let (mut steepest, mut largest) = (0f64, 0f64);
        for (slot, back) in slots {
            let key = &stored[slot * token + at..][..dim];
            let products =
                || query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b) * f64::from(batch.scale));
            let score = products().sum::<f64>();
            let capped = batch.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
            scores.push(capped - slope * back);
            let absolute = products().map(f64::abs).sum::<f64>();
            (steepest, largest) = (steepest.max(absolute + slope * back), largest.max(absolute));
        }
        let max = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let out = &mut self.out[row * heads * dim + head * dim..][..dim];
        for ((slot, _), score) in slots.iter().zip(&scores) {
            let weight = (score - max).exp() / sum;
            let value = &stored[slot * token + g.values_at() + at..][..dim];
            out.iter_mut().zip(value).for_each(|(o, v)| *o += weight * f64::from(*v));
        }
        self.lse[row * heads + head] = max + sum.ln();
        self.steepest[row * heads + head] = steepest;
        self.products[row * heads + head] = largest;
    }
}

/// The slope of a head, from the sorted list of all slopes of the next power of two: every other one from the second
/// on, then from the first on.
fn slope(bias_max: f64, head: usize, heads: usize) -> f64 {
    let mut all = 1;
    while all < heads {
        all *= 2;
    }
    let series: Vec<f64> = (1..=all).map(|i| 2f64.powf(-bias_max * i as f64 / all as f64)).collect();
    if all == heads {
        return series[head];
    }
    let mut order = series.iter().skip(1).step_by(2).chain(series.iter().step_by(2));
    *order.nth(head).expect("as many as heads")
}

/// Compares a device's partials over a store of this type with the oracle, for rows that saw keys.
pub(super) fn check<D: Device>(
    device: &mut D,
    what: &str,
    want: &Attention,
    got: &Partials<D::Tensor>,
    (batch, dtype): (&AttnBatch<'_>, KvDType),
    tolerance: Tolerance,
) {
    assert_eq!(got.count, want.count, "{what}: counts");
    // Tensor cores take codes of 8 bits as f16, which is exact.
    let dtype = dtype.plain().unwrap_or(DType::F16);
    let (heads, dim, rows) = (batch.geometry.heads as usize, batch.geometry.query_dim(), want.count.len());
    let out = read(device, &got.out, rows, heads * dim);
    let lse = read(device, &got.lse, rows, heads);
    let u = 2f64.powi(-24);
    for row in (0..rows).filter(|row| want.count[*row] > 0) {
        for head in 0..heads {
            let at = row * heads + head;
            let what = format!("{what}: row {row} head {head}");
            let cap = batch.softcap.map_or(0.0, f64::from);
            let score_error = ((8.0 + (dim as f64).sqrt()) * want.steepest[at] + 8.0 * cap) * u;
            let sum_error = (16.0 + 2.0 * f64::from(want.count[row]).sqrt()) * u;
            let rounded = 2.0 * tolerance.rounded_products(dim, dtype) * want.products[at];
            let bound = (2.0 * score_error + sum_error) * tolerance.factor + rounded;
            let of_value = bound + tolerance.activation_roundoff(dtype);
            assert_close(&what, &out[at * dim..][..dim], &want.out[at * dim..][..dim], |_| of_value * want.value_max);
            assert_close(&what, &lse[at..=at], &want.lse[at..=at], |_| bound + 4.0 * u * want.lse[at].abs());
        }
    }
}
