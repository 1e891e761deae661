//! Parameters and launch geometry of the kernels of latent attention beside attention itself: products by head, and the append of
//! rows.

use super::Launch;
use super::attention::KvView;
use super::linear::GEMV_ROWS_MAX;
use bytemuck::{Pod, Zeroable};
use lagoon_types::DType;

/// Parameters of `latent_append`: see `lagoon_backend::Device::latent_append`. Grid: rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct LatentParams {
    /// f32 `[rows][heads + 1][2 head_dim]`.
    pub qkv: u64,
    /// f32 `[rows][heads][query]`.
    pub queries: u64,
    /// f32 `[rows][latent]`.
    pub latents: u64,
    /// f32 `[rows][rotated]`.
    pub keys: u64,
    /// f32 `[rows][rotated]`: cosines, then sines.
    pub rope: u64,
    /// u32 `[rows]`; `u32::MAX` stores nothing.
    pub slots: u64,
    /// A row's first half lies in K, its second one in V.
    pub kv: KvView,
    pub heads: u32,
    /// Half of a row.
    pub head_dim: u32,
    /// Elements of a row that are not rotated, and those that are: `2 head_dim` together.
    pub latent: u32,
    pub rotated: u32,
    /// Elements of a head in `queries`.
    pub query: u32,
    pub kv_type: u32,
}

/// Parameters of `head_gemv_*` and `head_gemm_*`: see `lagoon_backend::Device::head_matmul`. Grid: blocks of weight rows and of
/// rows, or tiles of rows, tiles of a head's outputs and heads.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct HeadProductParams {
    /// f32 `[rows][x_stride]`; heads `x_step` apart.
    pub x: u64,
    /// `[heads * n][ldw]` in the kernel's type.
    pub w: u64,
    /// f32 `[rows][out_stride]`; heads `out_step` apart.
    pub out: u64,
    pub rows: u32,
    /// Outputs and inputs of a head.
    pub n: u32,
    pub k: u32,
    pub ldw: u32,
    pub heads: u32,
    pub x_stride: u32,
    pub x_step: u32,
    pub out_stride: u32,
    pub out_step: u32,
    /// 1 if a kernel ahead writes `w`: the product waits for it before it reads any weight.
    pub unpacked: u32,
}

const _: () = assert!(size_of::<LatentParams>() == 104 && size_of::<HeadProductParams>() == 64);

/// Threads of a block of either product, and weight rows of one of `head_gemv_*`.
const THREADS: u32 = 256;
const GEMV_WEIGHTS: u32 = 32;
/// Rows of `x` that share a read of the weights in `head_gemv_*_4`.
const GEMV_ROWS: u32 = 4;
/// Rows and columns of a tile of `head_gemm_*`.
const TILE: u32 = 64;

/// Launch of a product by head; `params.rows`, `n` and `heads` are not 0.
#[must_use]
pub const fn head_product(dtype: DType, params: HeadProductParams) -> Launch<HeadProductParams> {
    let (one, few, many) = match dtype {
        DType::F32 => ("head_gemv_f32_1", "head_gemv_f32_4", "head_gemm_f32"),
        DType::F16 => ("head_gemv_f16_1", "head_gemv_f16_4", "head_gemm_f16"),
        DType::BF16 => ("head_gemv_bf16_1", "head_gemv_bf16_4", "head_gemm_bf16"),
    };
    let blocks = (params.heads * params.n).div_ceil(GEMV_WEIGHTS);
    let (name, grid) = match params.rows {
        1 => (one, [blocks, 1, 1]),
        2..=GEMV_ROWS_MAX => (few, [blocks, params.rows.div_ceil(GEMV_ROWS), 1]),
        _ => (many, [params.rows.div_ceil(TILE), params.n.div_ceil(TILE), params.heads]),
    };
    Launch { name, grid, block: THREADS, shared_bytes: 0, params }
}
