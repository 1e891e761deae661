//! Micro attention: queries against runs, giving partials.

use super::threads::{Disjoint, Threads};
use super::widen::widen;
use super::{CpuKv, CpuTensor};
use crate::{AttnBatch, Partials};

/// See [`crate::Device::attention`]; counts are filled by the caller.
pub(super) fn attention(
    threads: &Threads,
    q: &CpuTensor,
    batch: &AttnBatch<'_>,
    kv: &CpuKv,
    layer: usize,
    partials: &mut Partials<CpuTensor>,
) {
    let geometry = batch.geometry;
    let (heads, dim, group) = (geometry.heads as usize, geometry.head_dim as usize, geometry.group() as usize);
    let (q_dim, kv_dim, rows) = (geometry.q_dim(), geometry.kv_dim(), batch.rows());
    assert!(q.cols >= q_dim && partials.out.cols == q_dim && partials.lse.cols == heads, "columns of attention");
    let rows_of: Vec<(usize, &crate::AttnRows)> =
        batch.seqs.iter().flat_map(|s| (0..s.rows as usize).map(move |i| (i, s))).collect();
    let out = Disjoint::new(partials.out.head_mut(rows));
    let lse = Disjoint::new(partials.lse.head_mut(rows));
    let store = kv.layer(layer);
    threads.run(rows_of.len(), |task| {
        let (i, seq) = rows_of[task];
        let (row, pos) = (seq.row0 as usize + i, seq.pos0 + u32::try_from(i).expect("row fits"));
        // SAFETY: each row belongs to one task.
        let (out, lse) =
            unsafe { (out.slice(row * q_dim..(row + 1) * q_dim), lse.slice(row * heads..(row + 1) * heads)) };
        out.fill(0.0);
        let (mut max, mut sum, mut token) =
            (vec![f32::NEG_INFINITY; heads], vec![0.0f32; heads], vec![0.0; 2 * kv_dim]);
        let seen = lagoon_types::run::visible(pos, batch.window);
        for run in &batch.runs[seq.run0 as usize..][..seq.runs as usize] {
            for p in run.positions().start.max(seen.start)..run.positions().end.min(seen.end) {
                widen(kv.shape.dtype, &store[kv.span(run.base + (p - run.first_pos), 1)], &mut token);
                for h in 0..heads {
                    let at = h / group * dim;
                    let (k, v) = (&token[at..][..dim], &token[kv_dim + at..][..dim]);
                    let query = &q.data[row * q.cols + h * dim..][..dim];
                    let score = batch.scale * query.iter().zip(k).map(|(a, b)| a * b).sum::<f32>();
                    let next = max[h].max(score);
                    let (keep, weight) = ((max[h] - next).exp(), (score - next).exp());
                    max[h] = next;
                    sum[h] = sum[h] * keep + weight;
                    for (out, v) in out[h * dim..][..dim].iter_mut().zip(v) {
                        *out = *out * keep + weight * v;
                    }
                }
            }
        }
        for h in 0..heads {
            if sum[h] > 0.0 {
                out[h * dim..][..dim].iter_mut().for_each(|v| *v /= sum[h]);
                lse[h] = max[h] + sum[h].ln();
            }
        }
    });
}
