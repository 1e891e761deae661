//! Boxes: a KV plane as the tensor memory accelerator (TMA) of compute capability 9.0 addresses it, for
//! `attention_wgmma_*`.
//!
//! A plane is a matrix of one row a slot; a box is 64 columns (128 bytes, the width of the swizzle) of some
//! consecutive slots. A box must not exceed its run, so there is a map for each of [`BOX_HEIGHTS`], and the kernel
//! cuts the rest of a run into the largest boxes. Maps are made once for each layer of a store; they hold addresses,
//! whatever is mapped there.

use super::attention::{AttentionParams, KvView};
use bytemuck::{Pod, Zeroable};
use lagoon_types::KvDType;

/// Slots of a box, by tensor map.
pub const BOX_HEIGHTS: [u32; 4] = [64, 16, 4, 1];
/// Columns of a box: 128 bytes.
const BOX_COLUMNS: u32 = 64;
/// Alignment in bytes of a plane's address and strides under the 128-byte swizzle.
const ALIGNMENT: u64 = 128;

/// A tensor map as `cuTensorMapEncodeTiled` writes it.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct TensorMap(pub [u64; 16]);

/// Arguments of a tensor map: a matrix of 16-bit elements, and boxes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapShape {
    pub dtype: KvDType,
    pub address: u64,
    /// Columns and rows of the matrix.
    pub dims: [u64; 2],
    /// Row stride in bytes.
    pub stride: u64,
    /// Columns and rows of a box.
    pub boxed: [u32; 2],
}

/// The tensor maps of a layer's planes, by height.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct KvMaps {
    pub k: [TensorMap; 4],
    pub v: [TensorMap; 4],
}

/// Parameters of `attention_wgmma_*`. Grid as in [`AttentionParams`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct AttentionBoxesParams {
    pub attention: AttentionParams,
    pub maps: KvMaps,
}

const _: () = assert!(size_of::<TensorMap>() == 128 && size_of::<AttentionBoxesParams>() == 1152);

impl KvView {
    /// Whether TMA can address these planes of 16-bit elements.
    #[must_use]
    pub const fn takes_boxes(&self, head_dim: u32) -> bool {
        (self.k | self.v | (self.token_stride * 2)).is_multiple_of(ALIGNMENT)
            && self.head_stride == head_dim as u64
            && head_dim.is_multiple_of(BOX_COLUMNS)
    }
}

impl KvMaps {
    /// The tensor maps of planes that take boxes, of so many KV heads and slots.
    ///
    /// # Errors
    /// Those of `encode`.
    pub fn new<E>(
        view: KvView,
        dtype: KvDType,
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
