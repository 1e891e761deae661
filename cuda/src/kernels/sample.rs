//! Sampling on the device, by the rules of `lagoon_runner::sampling`: temperature, min-p, top-k, top-p, then one draw in
//! the order of token ids. Ties are broken by the lower id. The uniform number comes from the host, so that a draw is the
//! same on every backend but for rounding.
//!
//! Weights are `exp((logit - max) / temperature)` in f64, rounded to multiples of 2^-40 and summed as integers: the sums
//! do not depend on the order of the threads.

use super::Launch;
use bytemuck::{Pod, Zeroable};
pub use lagoon_backend::{SampleRow, SampledRow};

/// Parameters of `sample`. One block a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SampleParams {
    /// f32 `[rows][stride]`; those that a mask excludes become negative infinity.
    pub logits: u64,
    /// [`SampleRow`] `[rows]`.
    pub rows: u64,
    /// [`SampledRow`] `[rows]`.
    pub out: u64,
    /// Words of all masks; see [`SampleRow::mask`].
    pub masks: u64,
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

const _: () = assert!(size_of::<SampleRow>() == 32 && size_of::<SampledRow>() == 8);
const _: () = assert!(size_of::<SampleParams>() == 40);
