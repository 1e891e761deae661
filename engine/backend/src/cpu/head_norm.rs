//! Root-mean-square normalisation of query and key heads, in place.

use super::simd::Isa;
use super::threads::{Disjoint, Threads};
use super::{CpuTensor, CpuWeight, rms_norm};
use lagoon_types::AttentionGeometry;

/// Rows that one task normalises.
const ROWS: usize = 16;

/// See [`crate::Device::head_norm`].
pub(super) fn head_norm(
    (threads, isa): (&Threads, Isa),
    qkv: &mut CpuTensor,
    (q, k): (&CpuWeight, &CpuWeight),
    eps: f32,
    geometry: AttentionGeometry,
    rows: usize,
) {
    let (dim, cols, q_dim) = (geometry.head_dim as usize, qkv.cols, geometry.q_dim());
    assert_eq!((q.rows, q.cols, k.rows, k.cols), (1, dim, 1, dim), "weights of a head's norm");
    assert_eq!(cols, geometry.qkv_dim(), "columns of the fused projection");
    let heads = Disjoint::new(qkv.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        for row in range {
            let (start, end) = (row * cols, row * cols + q_dim + geometry.kv_dim());
            // SAFETY: each row is of one task, and its ranges are disjoint.
            let (queries, keys) = unsafe { (heads.slice(start..start + q_dim), heads.slice(start + q_dim..end)) };
            rms_norm::in_place(isa, queries, q, eps);
            rms_norm::in_place(isa, keys, k, eps);
        }
    });
}
