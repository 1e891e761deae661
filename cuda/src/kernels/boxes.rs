//! Boxes: a KV plane as the copy engine of compute capability 9.0 sees it, for `attention_wgmma_*`.
//!
//! A plane is a matrix of one row a slot; a box is 64 columns (128 bytes, the width of the swizzle) of some consecutive
//! slots. A box that ends within a run touches no memory of others, so there is a map for each of [`BOX_HEIGHTS`]: the kernel
//! cuts what a run has left into the largest. Maps are made once for each layer of a store; they name addresses, not what is
//! mapped there.

use super::attention::{AttentionParams, KvView};
use bytemuck::{Pod, Zeroable};
use lagoon_types::DType;

/// Slots of a box, by map.
pub const BOX_HEIGHTS: [u32; 4] = [64, 16, 4, 1];
/// Columns of a box: 128 bytes.
const BOX_COLUMNS: u32 = 64;
/// What addresses and strides of a plane under the 128-byte swizzle are multiples of.
const ALIGNMENT: u64 = 128;

/// What `cuTensorMapEncodeTiled` writes.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct TensorMap(pub [u64; 16]);

/// What a map is made of: a matrix of 16-bit elements, and boxes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapShape {
    pub dtype: DType,
    pub address: u64,
    /// Columns and rows.
    pub dims: [u64; 2],
    /// Bytes from row to row.
    pub stride: u64,
    /// Columns and rows.
    pub boxed: [u32; 2],
}

/// The maps of a layer's planes, by height.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct KvMaps {
    pub k: [TensorMap; 4],
    pub v: [TensorMap; 4],
}

/// `attention_wgmma_*`. Grid as in [`AttentionParams`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct AttentionBoxesParams {
    pub attention: AttentionParams,
    pub maps: KvMaps,
}

const _: () = assert!(size_of::<TensorMap>() == 128 && size_of::<AttentionBoxesParams>() == 1152);

impl KvView {
    /// Whether planes of 16-bit elements can be seen as boxes.
    #[must_use]
    pub const fn takes_boxes(&self, head_dim: u32) -> bool {
        (self.k | self.v | (self.token_stride * 2)).is_multiple_of(ALIGNMENT)
            && self.head_stride == head_dim as u64
            && head_dim.is_multiple_of(BOX_COLUMNS)
    }
}

impl KvMaps {
    /// The maps of planes that take boxes, of so many KV heads and slots.
    ///
    /// # Errors
    /// What `encode` fails with.
    pub fn new<E>(
        view: KvView,
        dtype: DType,
        kv_heads: u32,
        slots: u64,
        mut encode: impl FnMut(&MapShape) -> Result<TensorMap, E>,
    ) -> Result<Self, E> {
        let mut maps = Self::default();
        for (plane, address) in [(&mut maps.k, view.k), (&mut maps.v, view.v)] {
            for (map, height) in plane.iter_mut().zip(BOX_HEIGHTS) {
                *map = encode(&MapShape {
                    dtype,
                    address,
                    dims: [u64::from(kv_heads) * view.head_stride, slots],
                    stride: view.token_stride * 2,
                    boxed: [BOX_COLUMNS, height],
                })?;
            }
        }
        Ok(maps)
    }
}

/// Dynamic shared memory of `attention_wgmma_*`: alignment, 128 queries, two stages of 128 keys, values and positions, barriers.
#[must_use]
pub const fn wgmma_shared_bytes(head_dim: u32) -> u32 {
    1024 + 128 * 2 * head_dim + 2 * 128 * (4 * head_dim + 4) + 12 * 8
}
