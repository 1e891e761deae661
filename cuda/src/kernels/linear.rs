//! Linear layers, `out[r] (=|+=) x[r] · weightᵀ (+ bias)`: parameters, choice of the kernel and geometry.
//!
//! * Up to [`GEMV_ROWS_MAX`] rows, `gemv_*` streams the weights once: in plain arithmetic for one or two rows,
//!   straight into tensor-core fragments for more, with activations split into three terms, which is all of an f32, or into
//!   one (bf16) or two (f16) where [`Precision::Fast`] allows it.
//! * For more rows, `split_*` writes the activations as one or two terms of the weights' type (in f16 with a
//!   power-of-two scale a row against overflow), and `gemm_*` multiplies tiles on tensor cores. A product with too
//!   few tiles to fill the device is cut along the inner dimension, and `gemm_reduce` adds the parts in a fixed
//!   order.
//! * `gemv_*` applies a following SwiGLU or GELU as it writes; otherwise the activation is a kernel of its own.
//! * f32 weights take `gemm_f32`, plain f32 arithmetic.

use super::attention::Precision;
use super::{Launch, weight_ld};
use bytemuck::{Pod, Zeroable};
use lagoon_backend::Activation;
use lagoon_types::DType;

/// Most rows for which weights are streamed.
pub const GEMV_ROWS_MAX: u32 = 16;
/// Most rows for which f32 weights are streamed: without tensor cores, each two rows read them again.
const GEMV_F32_ROWS_MAX: u32 = 4;
/// Weight rows of a block for one or two rows of activations, and for more.
const GEMV_FEW_COLS: u32 = 16;
const GEMV_COLS: u32 = 32;
/// Threads of a `gemv` block.
const GEMV_THREADS: u32 = 256;
/// Shortest part of the inner dimension that justifies a block.
const SPLIT_K_MIN: u32 = 512;
/// Most parts of the inner dimension.
const SPLITS_MAX: u32 = 16;

/// Parameters of `gemv_*`. Grid: blocks of weight rows (and of 2 rows of `x` for f32).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GemvParams {
    /// f32 `[rows][x_stride]`, 16-byte aligned rows are faster.
    pub x: u64,
    /// `[n][ldw]` in the kernel's type; packed rows are `ldw` bytes apart.
    pub w: u64,
    /// `[n]` in the weights' type, or 0.
    pub bias: u64,
    /// f32 `[rows][out_stride]`.
    pub out: u64,
    pub rows: u32,
    pub n: u32,
    pub k: u32,
    pub ldw: u32,
    pub x_stride: u32,
    pub out_stride: u32,
    /// 1 adds to `out`.
    pub add: u32,
    /// 0 for none, 1 for [`Activation::SiluMul`] (`out` has `n / 2` columns), 2 for [`Activation::Gelu`].
    pub activation: u32,
}

/// Parameters of `split_f16`, `split_bf16`: `x[r] * 2^-e = hi + lo` (rounded), `scale[r] = 2^e * factor`. One block a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SplitParams {
    /// f32 `[rows][x_stride]`.
    pub x: u64,
    /// `[rows][ld]` in the type; columns from `k` to `ld` are set to zero.
    pub hi: u64,
    /// The same, or 0 for one term.
    pub lo: u64,
    /// f32 `[rows]`.
    pub scale: u64,
    pub k: u32,
    pub x_stride: u32,
    pub ld: u32,
    /// That of the weight: see [`Product::factor`].
    pub factor: f32,
}

/// Parameters of `gemm_*`. Grid: tiles of m, tiles of n, parts of k.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GemmParams {
    /// `[m][lda]`: the first term in the weights' type; `x` itself for `gemm_f32`.
    pub hi: u64,
    /// The second term, for `_exact` kernels.
    pub lo: u64,
    /// f32 `[m]`; unused by `gemm_f32`.
    pub scale: u64,
    /// `[n][ldw]`.
    pub w: u64,
    /// `[n]` in the weights' type, or 0; unused where `partial` is not 0.
    pub bias: u64,
    /// f32 `[m][ldo]`.
    pub out: u64,
    /// f32 `[parts][m][n]` for `gemm_reduce`; 0 where there is one part, which writes `out`.
    pub partial: u64,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub lda: u32,
    pub ldw: u32,
    pub ldo: u32,
    /// Inner length of a part, a multiple of 64.
    pub k_part: u32,
    /// 1 adds to `out`.
    pub add: u32,
}

/// Parameters of `gemm_reduce`: `out (=|+=) scale · Σ partial (+ bias)`. Grid: blocks of columns, rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GemmReduceParams {
    pub partial: u64,
    /// f32 `[m]`, or 0 for parts that are scaled already.
    pub scale: u64,
    pub bias: u64,
    pub out: u64,
    pub m: u32,
    pub n: u32,
    pub ldo: u32,
    pub parts: u32,
    pub add: u32,
    pub bias_type: u32,
}

const _: () = assert!(size_of::<GemvParams>() == 64 && size_of::<SplitParams>() == 48);
const _: () = assert!(size_of::<GemmParams>() == 88 && size_of::<GemmReduceParams>() == 56);

/// One product of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// f32 `[rows][x_stride]`.
    pub x: u64,
    pub x_stride: u32,
    /// `[n][weight_ld(k)]` in `dtype`.
    pub w: u64,
    pub dtype: DType,
    /// The weight is this times what is stored: 1, or a power of two for f16 elements that were unpacked
    /// ([`super::packed::factor_of`]).
    pub factor: f32,
    /// `[n]` in `dtype`, or 0.
    pub bias: u64,
    /// f32 `[rows][out_stride]`.
    pub out: u64,
    pub out_stride: u32,
    pub rows: u32,
    pub n: u32,
    pub k: u32,
    pub add: bool,
    /// Activation applied before the write ([`is_fused`]).
    pub activation: Option<Activation>,
}

/// The launches of one product, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "on the stack of one call")]
pub enum Launches {
    Stream(Launch<GemvParams>),
    Tiles { split: Option<Launch<SplitParams>>, gemm: Launch<GemmParams>, reduce: Option<Launch<GemmReduceParams>> },
}

/// Activations as terms; see [`Product::terms`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    pub split: Launch<SplitParams>,
    /// 1 or 2.
    pub terms: u32,
    pub hi: u64,
    /// Address of the second term, directly behind the first.
    pub lo: u64,
    pub scale: u64,
    /// Row stride in elements.
    pub ld: u32,
    /// End of the terms and scales.
    pub end: u64,
}

/// A tile of `gemm_*`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tile {
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) threads: u32,
}

pub(super) const LARGE: Tile = Tile { m: 128, n: 128, threads: 256 };
pub(super) const SMALL: Tile = Tile { m: 64, n: 64, threads: 128 };
/// Inner length of a tile and stages of its pipeline.
const TILE_K: u32 = 32;
const STAGES: u32 = 3;

/// Division of a product into tiles and parts.
#[derive(Clone, Copy, Debug)]
struct Cut {
    tile: Tile,
    parts: u32,
    k_part: u32,
}

/// Whether a product of `rows` rows is bound by reading the weight, and streams it.
#[must_use]
pub fn is_streamed(rows: u32, dtype: DType) -> bool {
    rows <= if dtype == DType::F32 { GEMV_F32_ROWS_MAX } else { GEMV_ROWS_MAX }
}

/// Whether a product of `rows` rows applies this activation as it writes.
#[must_use]
pub fn is_fused(rows: u32, dtype: DType, activation: Activation) -> bool {
    is_streamed(rows, dtype) && matches!(activation, Activation::SiluMul | Activation::Gelu)
}

/// An activation in a product's parameters, where 0 is none.
pub(super) const fn activation_code(activation: Activation) -> u32 {
    match activation {
        Activation::SiluMul => 1,
        Activation::Gelu => 2,
        Activation::GeluTanh => 3,
        Activation::GeluTanhMul => 4,
        Activation::ClampedSwiglu => 5,
    }
}

fn cut(rows: u32, n: u32, k: u32, dtype: DType, sms: u32) -> Cut {
    if dtype == DType::F32 {
        return Cut { tile: Tile { threads: 256, ..SMALL }, parts: 1, k_part: k.next_multiple_of(64) };
    }
    let tiles = |tile: Tile| rows.div_ceil(tile.m) * n.div_ceil(tile.n);
    // Large tiles move fewer bytes, if there are enough of them to fill the device.
    let tile = if rows > SMALL.m && tiles(LARGE) >= sms { LARGE } else { SMALL };
    let parts = (2 * sms / tiles(tile).max(1)).min(k / SPLIT_K_MIN).clamp(1, SPLITS_MAX);
    let k_part = k.div_ceil(parts).next_multiple_of(64);
    Cut { tile, parts: k.div_ceil(k_part), k_part }
}

/// Scratch of a product in bytes, to be aligned to 16: terms and scales of `x`, and parts.
#[must_use]
pub fn workspace_bytes(rows: u32, n: u32, k: u32, dtype: DType, sms: u32) -> u64 {
    if is_streamed(rows, dtype) || dtype == DType::F32 {
        return 0;
    }
    let (terms, scales) = terms_bytes(rows, k);
    let cut = cut(rows, n, k, dtype, sms);
    let parts = if cut.parts > 1 { u64::from(cut.parts) * u64::from(rows) * u64::from(n) * 4 } else { 0 };
    2 * terms + scales + parts
}

/// Bytes of one term of the activations, and of their scales, both multiples of 16.
pub(super) fn terms_bytes(rows: u32, k: u32) -> (u64, u64) {
    (u64::from(rows) * weight_ld(k as usize, 2) as u64 * 2, u64::from(rows.next_multiple_of(4)) * 4)
}

impl Product {
    /// The launches, with [`workspace_bytes`] of scratch at `workspace`.
    #[must_use]
    pub fn launches(&self, workspace: u64, precision: Precision, sms: u32) -> Launches {
        let ldw = u32::try_from(weight_ld(self.k as usize, self.dtype.size())).expect("columns fit");
        if is_streamed(self.rows, self.dtype) {
            return Launches::Stream(self.stream(ldw, precision));
        }
        assert_eq!(self.activation, None, "an activation of many rows is a kernel of its own");
        let cut = cut(self.rows, self.n, self.k, self.dtype, sms);
        let (terms, scales) = terms_bytes(self.rows, self.k);
        let plain = self.dtype == DType::F32;
        let exact = precision == Precision::Exact && !plain;
        let lo = if exact { workspace + terms } else { 0 };
        let scale = workspace + 2 * terms;
        let partial = if cut.parts > 1 { scale + scales } else { 0 };
        let (hi, lda) = if plain { (self.x, self.x_stride) } else { (workspace, ldw) };
        let params = GemmParams {
            hi,
            lo,
            scale,
            w: self.w,
            bias: self.bias,
            out: self.out,
            partial,
            m: self.rows,
            n: self.n,
            k: self.k,
            lda,
            ldw,
            ldo: self.out_stride,
            k_part: cut.k_part,
            add: u32::from(self.add),
        };
        let gemm = Launch {
            name: gemm_name(self.dtype, exact, cut.tile.m == LARGE.m),
            grid: [self.rows.div_ceil(cut.tile.m), self.n.div_ceil(cut.tile.n), cut.parts],
            block: cut.tile.threads,
            shared_bytes: if plain { 0 } else { gemm_shared_bytes(cut.tile, exact) },
            params,
        };
        let (k, x_stride, factor) = (self.k, self.x_stride, self.factor);
        let split = SplitParams { x: self.x, hi, lo, scale, k, x_stride, ld: lda, factor };
        let split = (!plain).then_some(Launch::flat(
            if self.dtype == DType::F16 { "split_f16" } else { "split_bf16" },
            self.rows,
            256,
            split,
        ));
        Launches::Tiles { split, gemm, reduce: (cut.parts > 1).then(|| self.reduce(partial, 0, cut.parts)) }
    }

    /// The activations as terms of the weights' type, for a library's product: `terms` matrices `[rows][ld]` one
    /// after the other at `workspace`, then a scale for each row. `None` for f32, which needs none.
    #[must_use]
    pub fn terms(&self, workspace: u64, precision: Precision) -> Option<Terms> {
        let name = match self.dtype {
            DType::F32 => return None,
            DType::F16 => "split_f16",
            DType::BF16 => "split_bf16",
        };
        let terms = if precision == Precision::Exact { 2 } else { 1 };
        let (bytes, scales) = terms_bytes(self.rows, self.k);
        let (lo, scale) = (workspace + bytes, workspace + 2 * bytes);
        let ld = u32::try_from(weight_ld(self.k as usize, 2)).expect("columns fit");
        let lo_or_none = if terms == 2 { lo } else { 0 };
        let params = SplitParams {
            x: self.x,
            hi: workspace,
            lo: lo_or_none,
            scale,
            k: self.k,
            x_stride: self.x_stride,
            ld,
            factor: self.factor,
        };
        let split = Launch::flat(name, self.rows, 256, params);
        Some(Terms { split, terms, hi: workspace, lo, scale, ld, end: scale + scales })
    }

    /// `out (=|+=) scale · Σ partial`, where `partial` is f32 `[parts][rows][n]`.
    #[must_use]
    pub fn reduce(&self, partial: u64, scale: u64, parts: u32) -> Launch<GemmReduceParams> {
        let params = GemmReduceParams {
            partial,
            scale,
            bias: self.bias,
            out: self.out,
            m: self.rows,
            n: self.n,
            ldo: self.out_stride,
            parts,
            add: u32::from(self.add),
            bias_type: u32::from(self.dtype.code()),
        };
        Launch { name: "gemm_reduce", grid: [self.n.div_ceil(256), self.rows, 1], block: 256, shared_bytes: 0, params }
    }

    /// Parameters of a kernel that streams the weight, with rows `ldw` apart.
    pub(super) fn gemv(&self, ldw: u32) -> GemvParams {
        GemvParams {
            x: self.x,
            w: self.w,
            bias: self.bias,
            out: self.out,
            rows: self.rows,
            n: self.n,
            k: self.k,
            ldw,
            x_stride: self.x_stride,
            out_stride: self.out_stride,
            add: u32::from(self.add),
            activation: self.activation.map_or(0, activation_code),
        }
    }

    /// Blocks for `n` weight rows where a block has few of them.
    fn few_blocks(n: u32, activation: Option<Activation>) -> u32 {
        blocks(n, activation, GEMV_FEW_COLS)
    }

    fn stream(&self, ldw: u32, precision: Precision) -> Launch<GemvParams> {
        assert!(self.activation.is_none_or(|a| is_fused(self.rows, self.dtype, a)), "a kernel of its own");
        let params = self.gemv(ldw);
        let few = [Self::few_blocks(self.n, self.activation), self.rows.div_ceil(2), 1];
        let more = [blocks(self.n, self.activation, GEMV_COLS), 1, 1];
        // For one row, for two, for up to 8 and for up to 16, the last two by precision.
        let (one, two, upto_8, upto_16) = match self.dtype {
            DType::F32 => ("gemv_f32_1", "gemv_f32_2", ["gemv_f32_2"; 2], ["gemv_f32_2"; 2]),
            DType::F16 => (
                "gemv_f16_1",
                "gemv_f16_2",
                ["gemv_f16_8_exact", "gemv_f16_8_fast"],
                ["gemv_f16_16_exact", "gemv_f16_16_fast"],
            ),
            DType::BF16 => (
                "gemv_bf16_1",
                "gemv_bf16_2",
                ["gemv_bf16_8_exact", "gemv_bf16_8_fast"],
                ["gemv_bf16_16_exact", "gemv_bf16_16_fast"],
            ),
        };
        let fast = usize::from(precision == Precision::Fast);
        let name = match self.rows {
            1 => one,
            2 => two,
            3..=8 => upto_8[fast],
            _ => upto_16[fast],
        };
        let grid = if self.rows <= 2 || self.dtype == DType::F32 { few } else { more };
        Launch { name, grid, block: GEMV_THREADS, shared_bytes: 0, params }
    }
}

/// Blocks of `each` weight rows, which have whole columns of the output.
pub(super) fn blocks(n: u32, activation: Option<Activation>, each: u32) -> u32 {
    let inputs = activation.map_or(1, |activation| u32::try_from(activation.inputs()).expect("one or two"));
    (n / inputs).div_ceil(each / inputs)
}

const fn gemm_name(dtype: DType, exact: bool, large: bool) -> &'static str {
    match (dtype, exact, large) {
        (DType::F32, _, _) => "gemm_f32",
        (DType::F16, true, true) => "gemm_f16_exact_128",
        (DType::F16, true, false) => "gemm_f16_exact_64",
        (DType::F16, false, true) => "gemm_f16_fast_128",
        (DType::F16, false, false) => "gemm_f16_fast_64",
        (DType::BF16, true, true) => "gemm_bf16_exact_128",
        (DType::BF16, true, false) => "gemm_bf16_exact_64",
        (DType::BF16, false, true) => "gemm_bf16_fast_128",
        (DType::BF16, false, false) => "gemm_bf16_fast_64",
    }
}

/// Stages of one or two terms of A and of B, rows padded by 16 bytes.
pub(super) const fn gemm_shared_bytes(tile: Tile, exact: bool) -> u32 {
    let terms = if exact { 2 } else { 1 };
    STAGES * (terms * tile.m + tile.n) * (TILE_K * 2 + 16)
}

/// Most shared memory of any `gemm_*` launch, in bytes.
pub(super) const GEMM_SHARED_BYTES_MAX: u32 = gemm_shared_bytes(LARGE, true);
