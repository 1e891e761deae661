//! Parameters and launch geometry of the kernels other than products and attention.
//!
//! Most take a block for each row, whose threads stride over its columns. All are bound by memory: they move each element once.

use super::attention::KvView;
use super::{Launch, WARP};
use bytemuck::{Pod, Zeroable};
use lagoon_backend::Activation;

/// Threads of a block that works on one row.
const ROW_THREADS: u32 = 256;

/// Parameters of `embed`: `out[r] (=|+=) table[ids[r]]`, widened. One block a row.
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
    /// 1: adds to `out` (learned position embeddings); 0: replaces it.
    pub add: u32,
}

/// Parameters of `gather_rows`: `out[r] = x[rows[r]]`. One block a row.
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

/// Parameters of `rms_norm` and `layer_norm`. If `delta` is not 0, `x[r] += delta[r]` is stored first (the residual
/// connection). Then `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`, or with the mean subtracted and `bias` added
/// for `layer_norm`. One block a row.
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

/// Parameters of `silu_mul`, `gelu_tanh_mul` and `clamped_swiglu`, the gated ones of [`Activation`]: gates are the first
/// `n` columns of `x`, ups the others. Grid: rows, blocks of columns.
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

/// Parameters of `gelu` on `count` elements; `tanh != 0` takes the tanh approximation, else the error function.
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

/// Parameters of `add_bias`: `x[r] += bias`. One block a row.
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

/// Parameters of `add`: `x[i] += y[i]` for `count` elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct AddParams {
    /// f32 `[count]`.
    pub x: u64,
    pub y: u64,
    pub count: u64,
}

/// Parameters of `scale`, `x[i] *= factor` for `count` elements, and of [`softcap`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct ScaleParams {
    /// f32 `[count]`.
    pub x: u64,
    pub count: u64,
    pub factor: f32,
    pub pad: u32,
}

/// Parameters of `head_norm`: see `lagoon_backend::Device::head_norm`. One warp a query or key head of a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct HeadNormParams {
    /// f32 `[rows][(heads + 2 kv_heads) * head_dim]`, normalised in place.
    pub qkv: u64,
    /// `[head_dim]` in `q_type`.
    pub q_weight: u64,
    /// `[head_dim]` in `k_type`.
    pub k_weight: u64,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub rows: u32,
    pub q_type: u32,
    pub k_type: u32,
    pub eps: f32,
    pub pad: u32,
}

/// Parameters of `sink`: see `lagoon_backend::Device::sink`. One warp a head of a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SinkParams {
    /// f32 `[rows][heads * head_dim]` and `[rows][heads]`.
    pub out: u64,
    pub lse: u64,
    /// `[heads]` in `sink_type`.
    pub sinks: u64,
    /// u32 `[rows]`, keys seen by the rows; 0 if each has seen some.
    pub count: u64,
    pub heads: u32,
    pub head_dim: u32,
    pub rows: u32,
    pub sink_type: u32,
}

/// Parameters of `rope_append`: see `lagoon_backend::Device::rope_append`. Grid: rows. If `rope` is 0 nothing is
/// rotated.
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

/// Parameters of `kv_pack` (store to canonical bytes `[n][k | v][kv_heads][head_dim]`) and `kv_unpack` (the reverse),
/// for `n` consecutive slots. One block a token.
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

/// Parameters of `kv_check`: XXH3-128 of extents in device memory. Eight threads an extent.
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

/// Bytes in device memory to hash: more than 240; address and size are multiples of 16.
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

/// Parameters of `merge`: scale-reduce of one partial into another (formulas in `lagoon_types::partial`). One block a
/// row.
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

/// Launch of a gated activation's kernel.
#[must_use]
pub const fn gated(name: &'static str, rows: u32, params: GateParams) -> Launch<GateParams> {
    Launch { name, grid: row_parts(rows, params.n), block: ROW_THREADS, shared_bytes: 0, params }
}

/// Grid of a kernel whose threads have four columns of a row each.
pub(super) const fn row_parts(rows: u32, cols: u32) -> [u32; 3] {
    [rows, cols.div_ceil(4 * ROW_THREADS), 1]
}

/// Launch of a kernel whose threads have four elements each, of `count`, which is below `2^41`.
fn by_four<P>(name: &'static str, count: u64, params: P) -> Launch<P> {
    let blocks = count.div_ceil(4 * u64::from(ROW_THREADS));
    Launch::flat(name, u32::try_from(blocks).expect("a tensor's blocks fit"), ROW_THREADS, params)
}

/// Launch of `gelu`; `params.count` below `2^41`.
#[must_use]
pub fn gelu(params: GeluParams) -> Launch<GeluParams> {
    by_four("gelu", params.count, params)
}

/// Launch of `add`; `params.count` below `2^41`.
#[must_use]
pub fn add(params: AddParams) -> Launch<AddParams> {
    by_four("add", params.count, params)
}

/// Launch of `scale`; `params.count` below `2^41`.
#[must_use]
pub fn scale(params: ScaleParams) -> Launch<ScaleParams> {
    by_four("scale", params.count, params)
}

/// Launch of `softcap`: `x[i] = factor * tanh(x[i] / factor)` for `count` elements; `params.count` below `2^41`.
#[must_use]
pub fn softcap(params: ScaleParams) -> Launch<ScaleParams> {
    by_four("softcap", params.count, params)
}

/// Launch of `head_norm`.
#[must_use]
pub const fn head_norm(params: HeadNormParams) -> Launch<HeadNormParams> {
    Launch::flat("head_norm", head_blocks(params.rows, params.heads + params.kv_heads), ROW_THREADS, params)
}

/// Launch of `sink`.
#[must_use]
pub const fn sink(params: SinkParams) -> Launch<SinkParams> {
    Launch::flat("sink", head_blocks(params.rows, params.heads), ROW_THREADS, params)
}

/// Blocks of warps for the heads of all rows.
const fn head_blocks(rows: u32, heads: u32) -> u32 {
    (rows * heads).div_ceil(ROW_THREADS / WARP)
}

/// The launch of an activation alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activate {
    Gated(Launch<GateParams>),
    Plain(Launch<GeluParams>),
}

/// `out[r] = activation(x[r])` for `rows` rows; `x` is f32 `[rows][n * inputs]`, `out` `[rows][n]`.
#[must_use]
pub fn activate(activation: Activation, rows: u32, n: u32, x: u64, out: u64) -> Activate {
    let name = match activation {
        Activation::SiluMul => "silu_mul",
        Activation::GeluTanhMul => "gelu_tanh_mul",
        Activation::ClampedSwiglu => "clamped_swiglu",
        Activation::Gelu | Activation::GeluTanh => {
            let tanh = u32::from(activation == Activation::GeluTanh);
            let count = u64::from(rows) * u64::from(n);
            return Activate::Plain(gelu(GeluParams { x, out, count, tanh, pad: 0 }));
        }
    };
    Activate::Gated(gated(name, rows, GateParams { x, out, n, pad: 0 }))
}

const _: () = assert!(size_of::<EmbedParams>() == 40);
const _: () = assert!(size_of::<GatherParams>() == 32);
const _: () = assert!(size_of::<NormParams>() == 56);
const _: () = assert!(size_of::<GateParams>() == 24);
const _: () = assert!(size_of::<GeluParams>() == 32);
const _: () = assert!(size_of::<BiasParams>() == 24);
const _: () = assert!(size_of::<AddParams>() == 24 && size_of::<ScaleParams>() == 24);
const _: () = assert!(size_of::<HeadNormParams>() == 56 && size_of::<SinkParams>() == 48);
const _: () = assert!(size_of::<RopeParams>() == 72);
const _: () = assert!(size_of::<KvCopyParams>() == 56);
const _: () = assert!(size_of::<KvCheckParams>() == 32);
const _: () = assert!(size_of::<MergeParams>() == 56);
