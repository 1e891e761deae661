//! Parameters and geometry of the kernels that do not multiply matrices and do not attend.
//!
//! One block works on one row; threads stride over its columns. All are bound by memory: they move each element once.

use super::Launch;
use super::attention::KvView;
use bytemuck::{Pod, Zeroable};

/// Threads of a block that works on one row.
const ROW_THREADS: u32 = 256;

/// `embed`: `out[r] = table[ids[r]]`, widened; then `+ added[r]` where `added` is not 0 (learned positions, gathered
/// before). One block a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct EmbedParams {
    /// `[vocab][ld]` in `table_type`.
    pub table: u64,
    /// u32 `[rows]`.
    pub ids: u64,
    /// f32 `[rows][cols]`.
    pub out: u64,
    pub cols: u32,
    pub ld: u32,
    pub table_type: u32,
    /// 1: add to what `out` holds (learned position embeddings); 0: replace it.
    pub add: u32,
}

/// `gather_rows`: `out[r] = x[rows[r]]`. One block a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GatherParams {
    /// f32 `[..][cols]`.
    pub x: u64,
    /// u32 `[rows]`.
    pub rows: u64,
    /// f32 `[rows][cols]`.
    pub out: u64,
    pub cols: u32,
    pub pad: u32,
}

/// `rms_norm` and `layer_norm`. Where `delta` is not 0, `x[r] += delta[r]` is stored first (the residual connection).
/// Then `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`, or with the mean taken off and `bias` added for
/// `layer_norm`. One block a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct NormParams {
    /// f32 `[rows][cols]`.
    pub x: u64,
    /// f32 `[rows][cols]` or 0.
    pub delta: u64,
    /// `[cols]` in `weight_type`.
    pub weight: u64,
    /// `[cols]` in `weight_type`; 0 for `rms_norm` (and for a layer norm without one).
    pub bias: u64,
    /// f32 `[rows][cols]`; may be `x`.
    pub out: u64,
    pub cols: u32,
    pub eps: f32,
    pub weight_type: u32,
    pub pad: u32,
}

/// `silu_mul`: `out[r][i] = silu(x[r][i]) * x[r][n + i]`. Grid: blocks of columns, rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GateParams {
    /// f32 `[rows][2 n]`.
    pub x: u64,
    /// f32 `[rows][n]`.
    pub out: u64,
    pub n: u32,
    pub pad: u32,
}

/// `gelu`: in place on `count` elements; `tanh != 0` takes the tanh approximation, else the error function.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GeluParams {
    /// f32 `[count]`.
    pub x: u64,
    /// f32 `[count]`; may be `x`.
    pub out: u64,
    pub count: u64,
    pub tanh: u32,
    pub pad: u32,
}

/// `add_bias`: `x[r] += bias`. One block a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct BiasParams {
    /// f32 `[rows][cols]`.
    pub x: u64,
    /// `[cols]` in `bias_type`.
    pub bias: u64,
    pub cols: u32,
    pub bias_type: u32,
}

/// `rope_append`: see `lagoon_backend::Device::rope_append`. Grid: rows. Where `rope` is 0 nothing is rotated.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RopeParams {
    /// f32 `[rows][(heads + 2 kv_heads) * head_dim]`, rotated in place.
    pub qkv: u64,
    /// f32 `[rows][head_dim]`: cosines, then sines; 0 for none.
    pub rope: u64,
    /// u32 `[rows]`; `u32::MAX` stores nothing.
    pub slots: u64,
    pub kv: KvView,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub kv_type: u32,
}

/// `kv_pack` (store to canonical bytes `[n][k | v][kv_heads][head_dim]`) and `kv_unpack` (the reverse), for `n`
/// consecutive slots. One block a token.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct KvCopyParams {
    pub kv: KvView,
    /// Canonical bytes in device-accessible memory, aligned to 4 bytes at least (16 is faster).
    pub packed: u64,
    pub slot0: u32,
    pub kv_heads: u32,
    /// Bytes of one head, `head_dim * size`.
    pub head_bytes: u32,
    pub element_bytes: u32,
}

/// `kv_check`: XXH3-128 of extents in device memory. Eight threads an extent.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct KvCheckParams {
    /// [`KvExtent`] `[count]`.
    pub extents: u64,
    /// The hashes' low and high halves, u64 `[count][2]`.
    pub out: u64,
    /// The algorithm's secret, 192 bytes, and behind it the sums' eight first values, u64.
    pub secret: u64,
    pub count: u32,
    pub pad: u32,
}

/// Bytes in device memory whose hash is wanted: more than 240, the address and the number multiples of 16.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct KvExtent {
    pub address: u64,
    pub bytes: u64,
}

/// Extents of a block of `kv_check`, and its threads.
const CHECK_EXTENTS: u32 = 8;

/// Launch of `kv_check`.
#[must_use]
pub const fn kv_check(params: KvCheckParams) -> Launch<KvCheckParams> {
    Launch::flat("kv_check", params.count.div_ceil(CHECK_EXTENTS), CHECK_EXTENTS * 8, params)
}

/// `merge`: scale-reduce of one partial into another (formulas in `lagoon_types::partial`). One block a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct MergeParams {
    /// f32 `[rows][heads * head_dim]` and `[rows][heads]`.
    pub acc_out: u64,
    pub acc_lse: u64,
    pub out: u64,
    pub lse: u64,
    /// u32 `[rows]`, keys seen by the accumulator's rows and by the other's, before the merge.
    pub acc_count: u64,
    pub count: u64,
    pub heads: u32,
    pub head_dim: u32,
}

/// A launch of a kernel that takes one block a row.
#[must_use]
pub const fn per_row<P>(name: &'static str, rows: u32, params: P) -> Launch<P> {
    Launch::flat(name, rows, ROW_THREADS, params)
}

/// Launch of `silu_mul`.
#[must_use]
pub const fn silu_mul(rows: u32, params: GateParams) -> Launch<GateParams> {
    let blocks = params.n.div_ceil(4 * ROW_THREADS);
    Launch { name: "silu_mul", grid: [blocks, rows, 1], block: ROW_THREADS, shared_bytes: 0, params }
}

/// Launch of `gelu`; `params.count` below `2^41`.
#[must_use]
pub fn gelu(params: GeluParams) -> Launch<GeluParams> {
    let blocks = params.count.div_ceil(4 * u64::from(ROW_THREADS));
    Launch::flat("gelu", u32::try_from(blocks).expect("a tensor's blocks fit"), ROW_THREADS, params)
}

const _: () = assert!(size_of::<EmbedParams>() == 40);
const _: () = assert!(size_of::<GatherParams>() == 32);
const _: () = assert!(size_of::<NormParams>() == 56);
const _: () = assert!(size_of::<GateParams>() == 24);
const _: () = assert!(size_of::<GeluParams>() == 32);
const _: () = assert!(size_of::<BiasParams>() == 24);
const _: () = assert!(size_of::<RopeParams>() == 72);
const _: () = assert!(size_of::<KvCopyParams>() == 56);
const _: () = assert!(size_of::<KvCheckParams>() == 32);
const _: () = assert!(size_of::<MergeParams>() == 56);
