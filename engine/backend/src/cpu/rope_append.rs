//! Rotary position embedding (Su et al. 2021) of queries and keys, and the append of keys and values to the store.

use super::kv::store_token;
use super::threads::{Disjoint, Threads};
use super::{CpuKv, CpuTensor};
use crate::DeviceError;
use lagoon_types::AttentionGeometry;

/// Rows that one task rotates.
const ROWS: usize = 16;

/// Rotates as many elements as there are angles: cosines, then sines.
pub(super) fn rotate(x: &mut [f32], angles: &[f32]) {
    let half = x.len() / 2;
    let (cos, sin) = angles.split_at(half);
    let (a, b) = x.split_at_mut(half);
    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// See [`crate::Device::rope_append`].
pub(super) fn rope_append(
    threads: &Threads,
    qkv: &mut CpuTensor,
    rope: &CpuTensor,
    geometry: AttentionGeometry,
    slots: &[u32],
    kv: &mut CpuKv,
    layer: usize,
) -> Result<(), DeviceError> {
    let (cols, dim, q_dim) = (geometry.qkv_dim(), geometry.head_dim as usize, geometry.q_dim());
    let rotated = q_dim + geometry.kv_dim();
    let shape = kv.shape;
    assert_eq!((qkv.cols, rope.cols), (cols, dim), "columns of qkv and rope");
    assert_eq!((shape.kv_heads, shape.head_dim), (geometry.kv_heads, geometry.head_dim), "shape of the store");
    assert!(slots.iter().all(|s| *s == u32::MAX || (*s as usize) < kv.slots), "slots within the store");
    let token_bytes = shape.layer_token_bytes();
    let angles = rope.head(slots.len());
    let rows = Disjoint::new(qkv.head_mut(slots.len()));
    let writing = kv.writing(layer, slots)?;
    let store = &writing.bytes;
    threads.run_chunks(slots.len(), ROWS, |range| {
        for row in range {
            // SAFETY: each row belongs to one task.
            let x = unsafe { rows.slice(row * cols..(row + 1) * cols) };
            let angles = &angles[row * dim..][..dim];
            x[..rotated].chunks_exact_mut(dim).for_each(|head| rotate(head, angles));
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
