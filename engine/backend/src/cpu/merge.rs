//! Scale-reduce of two partials in place (Infinite-LLM v1 §4.2; formulas in `lagoon_types::partial`).

use super::CpuTensor;
use crate::Partials;
use lagoon_types::AttentionGeometry;
use lagoon_types::partial::merge_weights;

/// See [`crate::Device::merge`].
pub(super) fn merge(acc: &mut Partials<CpuTensor>, other: &Partials<CpuTensor>, geometry: AttentionGeometry) {
    let (heads, dim, q_dim) = (geometry.heads as usize, geometry.query_dim(), geometry.q_dim());
    assert!(acc.count.len() >= other.count.len(), "rows of merged partials");
    for (row, &seen) in other.count.iter().enumerate() {
        if seen == 0 {
            continue;
        }
        let out = &mut acc.out.data[row * q_dim..][..q_dim];
        let lse = &mut acc.lse.data[row * heads..][..heads];
        let (other_out, other_lse) = (&other.out.data[row * q_dim..][..q_dim], &other.lse.data[row * heads..][..heads]);
        if acc.count[row] == 0 {
            out.copy_from_slice(other_out);
            lse.copy_from_slice(other_lse);
        } else {
            for head in 0..heads {
                merge_head(
                    &mut out[head * dim..][..dim],
                    &mut lse[head],
                    &other_out[head * dim..][..dim],
                    other_lse[head],
                );
            }
        }
        acc.count[row] += seen;
    }
}

/// Merges one head's partial into `out` and `lse`; both have seen keys.
pub(super) fn merge_head(out: &mut [f32], lse: &mut f32, other_out: &[f32], other_lse: f32) {
    let weights = merge_weights(*lse, other_lse);
    for (x, y) in out.iter_mut().zip(other_out) {
        *x = weights.a * *x + weights.b * y;
    }
    *lse = weights.lse;
}
