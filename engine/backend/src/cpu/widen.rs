//! Widening of stored elements to f32 and rounding back, on slices.

use half::{bf16, f16, slice::HalfFloatSliceExt};
use lagoon_types::DType;

/// Widens `bytes`, aligned for `dtype`, into `out` of as many elements.
pub(crate) fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(bytes)),
        DType::F16 => bytemuck::cast_slice::<u8, f16>(bytes).convert_to_f32_slice(out),
        DType::BF16 => bytemuck::cast_slice::<u8, bf16>(bytes).convert_to_f32_slice(out),
    }
}

/// Rounds `values` to nearest even into `out`, aligned for `dtype`, of as many elements.
pub(crate) fn narrow(dtype: DType, values: &[f32], out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
        DType::F16 => bytemuck::cast_slice_mut::<u8, f16>(out).convert_from_f32_slice(values),
        DType::BF16 => bytemuck::cast_slice_mut::<u8, bf16>(out).convert_from_f32_slice(values),
    }
}
