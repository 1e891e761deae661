//! Tensor maps: descriptors of matrices for the tensor memory accelerator (TMA) of compute capability 9.0.

use super::{CudaError, check};
use crate::kernels::boxes::{MapShape, TensorMap};
use cudarc::driver::sys;
use lagoon_types::KvDType;

/// A tensor map of a matrix of 16-bit elements, in boxes of 128 bytes of columns, swizzled. Reads and allocates
/// nothing.
///
/// # Errors
/// [`CudaError::Driver`] for a shape that TMA does not support.
///
/// # Panics
/// For elements that are not of 16 bits.
pub fn encode_boxes(shape: &MapShape) -> Result<TensorMap, CudaError> {
    use sys::{
        CUtensorMapDataType_enum as Type, CUtensorMapFloatOOBfill_enum as Fill,
        CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Fetch,
        CUtensorMapSwizzle_enum as Swizzle,
    };
    let dtype = match shape.dtype {
        KvDType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        KvDType::BF16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        KvDType::F32 | KvDType::Fp8 => panic!("boxes of 16-bit elements"),
    };
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let steps = [1u32; 2];
    // SAFETY: arrays have as many elements as the rank; the driver fills the live map and only stores the address.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            dtype,
            2,
            shape.address as *mut std::ffi::c_void,
            shape.dims.as_ptr(),
            &raw const shape.stride,
            shape.boxed.as_ptr(),
            steps.as_ptr(),
            Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            // A box's rows are 128 bytes: a larger fetch would be wasted.
            Fetch::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check("cuTensorMapEncodeTiled", code)?;
    Ok(TensorMap(map.opaque))
}
