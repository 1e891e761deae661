//! Attention sinks.

use super::threads::with_scratch;
use super::widen::widen;
use super::{CpuTensor, CpuWeight};
use crate::Partials;
use lagoon_types::AttentionGeometry;

/// See [`crate::Device::sink`].
pub(super) fn sink(partials: &mut Partials<CpuTensor>, sinks: &CpuWeight, geometry: AttentionGeometry) {
    let (heads, dim, q_dim) = (geometry.heads as usize, geometry.query_dim(), geometry.q_dim());
    assert_eq!((sinks.rows, sinks.cols), (1, heads), "a sink for each head");
    with_scratch(heads, |logits| {
        widen(sinks.dtype(), sinks.row(0), &mut logits[..heads]);
        for (row, _) in partials.count.iter().enumerate().filter(|(_, seen)| **seen > 0) {
            let lse = &partials.lse.data[row * heads..][..heads];
            let out = &mut partials.out.data[row * q_dim..][..q_dim];
            for ((out, lse), sink) in out.chunks_exact_mut(dim).zip(lse).zip(logits.iter()) {
                let share = 1.0 / (1.0 + (sink - lse).exp());
                out.iter_mut().for_each(|x| *x *= share);
            }
        }
    });
}
