//! Stored element types as vectors of f32.

use super::Simd;
use bytemuck::Pod;
use half::{bf16, f16};

/// An element type in memory.
///
/// # Safety
/// As for [`Simd`]: the features are there and pointers are valid for `LANES` (or `n`) elements.
pub(crate) trait Element: Pod + Send + Sync {
    /// `LANES` elements, widened.
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
    /// The first `n < LANES` elements, widened, then zeros.
    unsafe fn load_part<S: Simd>(p: *const Self, n: usize) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the same contract.
        unsafe { S::load(p) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(p: *const Self, n: usize) -> S::V {
        // SAFETY: the same contract.
        unsafe { S::load_part(p, n) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the same contract; f16 is a transparent u16.
        unsafe { S::load_f16(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(p: *const Self, n: usize) -> S::V {
        // SAFETY: as above.
        unsafe { S::load_f16_part(p.cast(), n) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the same contract; bf16 is a transparent u16.
        unsafe { S::load_bf16(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(p: *const Self, n: usize) -> S::V {
        // SAFETY: as above.
        unsafe { S::load_bf16_part(p.cast(), n) }
    }
}
