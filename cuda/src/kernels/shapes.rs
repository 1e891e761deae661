//! Launch shapes of attention's kernels and their shared memory: arithmetic only.

use lagoon_types::KvDType;

/// Keys that one warp of the decode kernel processes at a time.
pub(super) const DECODE_KEYS: u32 = 16;
/// Dynamic shared memory of a block on compute capability 8.0 (163 KB); later data-centre devices have more.
pub const SHARED_BYTES_MAX: u32 = 163 << 10;
/// Dynamic shared memory of a block on 8.6, 8.9 and 12.0 (A10, L4, RTX 4090): the least of any supported device.
pub const SHARED_BYTES_LEAST: u32 = 99 << 10;
/// Shared memory of each block that the driver reserves.
pub const SHARED_BYTES_RESERVED: u32 = 1 << 10;

/// Precision of queries, attention weights and activations in tensor-core kernels for many rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The sum of two numbers of the store's or weight's type: about as exact as f32 (22 bits for f16, 16 for bf16 and KV in 8
    /// bits), for twice the products.
    Exact,
    /// Rounded to the type of the store or weight, as in most engines: `2^-11` relative for f16, `2^-8` for bf16. KV in 8 bits
    /// is always attended to exactly.
    #[default]
    Fast,
}

/// Launch shape of the decode kernel for a class of contexts, measured on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeClass {
    /// Warps of a block: 2, 4 or 8.
    pub warps: u32,
    /// Stages of each warp's pipeline: 2 to 4, and to 8 for [`KvDType::Fp8`].
    pub stages: u32,
    /// Blocks wanted on each multiprocessor at once: contexts are cut into whole waves of that many, or as many as
    /// fit.
    pub blocks_per_sm: u32,
    /// Fewest keys of a piece.
    pub piece_keys_min: u32,
}

impl DecodeClass {
    /// This class for a store: rows of 8 bits have twice the stages, so that as many bytes are in flight.
    pub(super) const fn for_store(mut self, dtype: KvDType) -> Self {
        if matches!(dtype, KvDType::Fp8) {
            self.stages *= 2;
        }
        self
    }

    /// This class with the most stages, and then warps, that fit `shared_bytes_max` for heads of this size.
    #[must_use]
    pub const fn fitted(mut self, head_dim: u32, dtype: KvDType, shared_bytes_max: u32) -> Self {
        while decode_shared_bytes(head_dim, dtype, self) > shared_bytes_max && self.stages > 2 {
            self.stages -= 1;
        }
        while decode_shared_bytes(head_dim, dtype, self) > shared_bytes_max && self.warps > 2 {
            self.warps /= 2;
        }
        self
    }
}

/// A shape of `attention_prefill_*`: packed query rows and keys of a tile, and its dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillShape {
    /// Of the `_small` kernels.
    pub small: bool,
    pub tile: u32,
    pub(super) keys: u32,
    pub shared_bytes: u32,
}

/// The shape for heads of this size that fits `shared_bytes_max`; `None` if the decode kernel has to serve.
#[must_use]
pub const fn prefill_shape(head_dim: u32, precision: Precision, shared_bytes_max: u32) -> Option<PrefillShape> {
    let exact = matches!(precision, Precision::Exact);
    let wide = head_dim > 128;
    let large = prefill_bytes(false, if wide { 64 } else { 128 }, if wide { 32 } else { 64 }, head_dim, exact);
    if large.shared_bytes <= shared_bytes_max {
        return Some(large);
    }
    // Two terms of queries of 256 elements do not fit with any keys.
    if head_dim <= 64 || (wide && exact) || (head_dim == 96 && !exact) {
        return None;
    }
    let tile = if wide || (head_dim == 128 && exact) { 64 } else { 128 };
    let small = prefill_bytes(true, tile, if wide { 16 } else { 32 }, head_dim, exact);
    if small.shared_bytes <= shared_bytes_max { Some(small) } else { None }
}

/// Shared memory of a shape: one or two terms of the queries, two stages of K and V with their positions.
const fn prefill_bytes(small: bool, tile: u32, keys: u32, head_dim: u32, exact: bool) -> PrefillShape {
    let row = shared_row_bytes(head_dim);
    let shared_bytes = if exact { 2 } else { 1 } * tile * row + 2 * keys * (2 * row + 4);
    PrefillShape { small, tile, keys, shared_bytes }
}

/// Bytes of a head's row in shared memory: 16 bytes of padding keep `ldmatrix` free of bank conflicts.
const fn shared_row_bytes(head_dim: u32) -> u32 {
    head_dim * 2 + 16
}

/// Dynamic shared memory of `attention_decode_*`: for each warp and stage K and V of 16 keys, and their positions; for 8 bits also where
/// rows begin in their first 16 bytes. The reduction at the end reuses it.
#[must_use]
pub const fn decode_shared_bytes(head_dim: u32, dtype: KvDType, class: DecodeClass) -> u32 {
    let key = match dtype {
        KvDType::Fp8 => 2 * (head_dim + 16) + 8,
        KvDType::F32 | KvDType::F16 | KvDType::BF16 => 2 * shared_row_bytes(head_dim) + 4,
    };
    class.warps * class.stages * DECODE_KEYS * key
}
