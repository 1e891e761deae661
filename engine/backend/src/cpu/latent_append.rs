//! Rows of latent attention (DeepSeek-V2 §2.1): rotation, and the append of latents to the store.

use super::kv::store_token;
use super::threads::{Disjoint, Threads};
use super::{CpuKv, CpuTensor, rope_append};
use crate::{DeviceError, LatentRow};
use lagoon_types::AttentionGeometry;

/// Rows that one task makes.
const ROWS: usize = 16;

/// See [`crate::Device::latent_append`].
pub(super) fn latent_append(
    threads: &Threads,
    qkv: &mut CpuTensor,
    row: LatentRow<'_, CpuTensor>,
    geometry: AttentionGeometry,
    (slots, kv, layer): (&[u32], &mut CpuKv, usize),
) -> Result<(), DeviceError> {
    let (cols, dim, q_dim, heads) = (qkv.cols, geometry.query_dim(), geometry.q_dim(), geometry.heads as usize);
    let (latent, rotated) = (row.latent.cols, row.rope.cols);
    let query = row.queries.cols / heads;
    let shape = kv.shape;
    assert!(geometry.latent && cols == geometry.qkv_dim() && latent + rotated == dim, "columns of a latent row");
    assert!(row.key.cols == rotated && query * heads == row.queries.cols && query >= rotated, "parts of a latent row");
    assert_eq!((shape.kv_heads, shape.head_dim), (geometry.kv_heads, geometry.head_dim), "shape of the store");
    assert!(slots.iter().all(|s| *s == u32::MAX || (*s as usize) < kv.slots), "slots within the store");
    let token_bytes = shape.layer_token_bytes();
    let n = slots.len();
    let (queries, latents, keys, angles) = (row.queries.head(n), row.latent.head(n), row.key.head(n), row.rope.head(n));
    let rows = Disjoint::new(qkv.head_mut(n));
    let writing = kv.writing(layer, slots)?;
    let store = &writing.bytes;
    threads.run_chunks(n, ROWS, |range| {
        for row in range {
            // SAFETY: each row belongs to one task.
            let x = unsafe { rows.slice(row * cols..(row + 1) * cols) };
            let angles = &angles[row * rotated..][..rotated];
            let from = queries[row * heads * query..][..heads * query].chunks_exact(query);
            for (to, from) in x[..q_dim].chunks_exact_mut(dim).zip(from) {
                to[latent..].copy_from_slice(&from[query - rotated..]);
                rope_append::rotate(&mut to[latent..], angles);
            }
            x[q_dim..][..latent].copy_from_slice(&latents[row * latent..][..latent]);
            let key = &mut x[q_dim + latent..];
            key.copy_from_slice(&keys[row * rotated..][..rotated]);
            rope_append::rotate(key, angles);
            if slots[row] != u32::MAX {
                let start = slots[row] as usize * token_bytes;
                // SAFETY: the slots of a call are distinct, so each token of the store belongs to one task.
                let token = unsafe { store.slice(start..start + token_bytes) };
                store_token(shape, &x[q_dim..], token);
            }
        }
    });
    Ok(())
}
