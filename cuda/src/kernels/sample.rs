//! Sampling on the device, by the rules of `lagoon_runner::sampling`: temperature, min-p, top-k, top-p, then one draw in
//! the order of token ids. Ties are broken by the lower id. The uniform number comes from the host, so that a draw is the
//! same on every backend but for rounding.
//!
//! Weights are `exp((logit - max) / temperature)` in f64, rounded to multiples of 2^-40 and summed as integers: the sums
//! do not depend on the order of the threads.

use super::Launch;
use bytemuck::{Pod, Zeroable};

/// How one row is sampled.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SampleRow {
    /// Uniform in `[0, 1)`.
    pub uniform: f64,
    /// 0 takes the likeliest.
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    /// 0 for all.
    pub top_k: u32,
}

/// What came of a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SampledRow {
    /// The token; where `status` is not 0, the offending one.
    pub token: u32,
    /// 0: sampled; 1: a logit is NaN or infinitely likely; 2: no token is possible.
    pub status: u32,
}

/// `sample`: one block a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SampleParams {
    /// f32 `[rows][stride]`.
    pub logits: u64,
    /// [`SampleRow`] `[rows]`.
    pub rows: u64,
    /// [`SampledRow`] `[rows]`.
    pub out: u64,
    pub vocab: u32,
    pub stride: u32,
}

/// Threads of a sampling block.
const THREADS: u32 = 512;

/// Launch of `sample`.
#[must_use]
pub const fn sample(rows: u32, params: SampleParams) -> Launch<SampleParams> {
    Launch::flat("sample", rows, THREADS, params)
}

const _: () = assert!(size_of::<SampleRow>() == 24 && size_of::<SampledRow>() == 8);
const _: () = assert!(size_of::<SampleParams>() == 32);
