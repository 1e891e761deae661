//! Names of all kernels.

use super::attention::{
    DecodeClass, Precision, SHARED_BYTES_LEAST, SHARED_BYTES_MAX, decode_shared_bytes, prefill_shape,
};
use super::boxes::wgmma_shared_bytes;
use super::linear::GEMM_SHARED_BYTES_MAX;
use super::packed;
use lagoon_types::KvDType;

/// Every kernel that the fatbin has for all devices.
pub const ALL: &[&str] = &[
    "add",
    "add_bias",
    "attention_any_bf16",
    "attention_any_f16",
    "attention_any_f32",
    "attention_any_fp8",
    "attention_decode_bf16_128",
    "attention_decode_bf16_256",
    "attention_decode_bf16_64",
    "attention_decode_bf16_96",
    "attention_decode_f16_128",
    "attention_decode_f16_256",
    "attention_decode_f16_64",
    "attention_decode_f16_96",
    "attention_decode_fp8_128",
    "attention_decode_fp8_256",
    "attention_decode_fp8_64",
    "attention_decode_fp8_96",
    "attention_latent_bf16",
    "attention_latent_f16",
    "attention_latent_f32",
    "attention_latent_fp8",
    "attention_merge",
    "attention_prefill_bf16_128_exact",
    "attention_prefill_bf16_128_exact_small",
    "attention_prefill_bf16_128_fast",
    "attention_prefill_bf16_128_fast_small",
    "attention_prefill_bf16_256_exact",
    "attention_prefill_bf16_256_fast",
    "attention_prefill_bf16_256_fast_small",
    "attention_prefill_bf16_64_exact",
    "attention_prefill_bf16_64_fast",
    "attention_prefill_bf16_96_exact",
    "attention_prefill_bf16_96_exact_small",
    "attention_prefill_bf16_96_fast",
    "attention_prefill_f16_128_exact",
    "attention_prefill_f16_128_exact_small",
    "attention_prefill_f16_128_fast",
    "attention_prefill_f16_128_fast_small",
    "attention_prefill_f16_256_exact",
    "attention_prefill_f16_256_fast",
    "attention_prefill_f16_256_fast_small",
    "attention_prefill_f16_64_exact",
    "attention_prefill_f16_64_fast",
    "attention_prefill_f16_96_exact",
    "attention_prefill_f16_96_exact_small",
    "attention_prefill_f16_96_fast",
    "attention_prefill_fp8_128_exact",
    "attention_prefill_fp8_128_exact_small",
    "attention_prefill_fp8_256_exact",
    "attention_prefill_fp8_64_exact",
    "attention_prefill_fp8_96_exact",
    "attention_prefill_fp8_96_exact_small",
    "clamped_swiglu",
    "combine",
    "embed",
    "gather_rows",
    "gelu",
    "gelu_tanh_mul",
    "gemm_bf16_exact_128",
    "gemm_bf16_exact_64",
    "gemm_bf16_fast_128",
    "gemm_bf16_fast_64",
    "gemm_f16_exact_128",
    "gemm_f16_exact_64",
    "gemm_f16_fast_128",
    "gemm_f16_fast_64",
    "gemm_f32",
    "gemm_reduce",
    "gemv_bf16_1",
    "gemv_bf16_16_exact",
    "gemv_bf16_16_fast",
    "gemv_bf16_2",
    "gemv_bf16_8_exact",
    "gemv_bf16_8_fast",
    "gemv_f16_1",
    "gemv_f16_16_exact",
    "gemv_f16_16_fast",
    "gemv_f16_2",
    "gemv_f16_8_exact",
    "gemv_f16_8_fast",
    "gemv_f32_1",
    "gemv_f32_2",
    "gemv_fp8_1",
    "gemv_fp8_16",
    "gemv_fp8_8",
    "gemv_int4_g128_1",
    "gemv_int4_g128_16",
    "gemv_int4_g128_8",
    "gemv_int4_g32_1",
    "gemv_int4_g32_16",
    "gemv_int4_g32_8",
    "gemv_int4_g64_1",
    "gemv_int4_g64_16",
    "gemv_int4_g64_8",
    "gemv_mxfp4_1",
    "gemv_mxfp4_16",
    "gemv_mxfp4_8",
    "gemv_q4_0_1",
    "gemv_q4_0_16",
    "gemv_q4_0_8",
    "gemv_q4_k_1",
    "gemv_q4_k_16",
    "gemv_q4_k_8",
    "gemv_q5_k_1",
    "gemv_q5_k_16",
    "gemv_q5_k_8",
    "gemv_q6_k_1",
    "gemv_q6_k_16",
    "gemv_q6_k_8",
    "gemv_q8_0_1",
    "gemv_q8_0_16",
    "gemv_q8_0_8",
    "grouped_gemm_bf16_exact_128",
    "grouped_gemm_bf16_exact_64",
    "grouped_gemm_bf16_fast_128",
    "grouped_gemm_bf16_fast_64",
    "grouped_gemm_f16_exact_128",
    "grouped_gemm_f16_exact_64",
    "grouped_gemm_f16_fast_128",
    "grouped_gemm_f16_fast_64",
    "grouped_gemm_f32",
    "grouped_gemv_bf16",
    "grouped_gemv_f16",
    "grouped_gemv_f32",
    "grouped_gemv_fp8",
    "grouped_gemv_int4_g128",
    "grouped_gemv_int4_g32",
    "grouped_gemv_int4_g64",
    "grouped_gemv_mxfp4",
    "grouped_gemv_q4_0",
    "grouped_gemv_q4_k",
    "grouped_gemv_q5_k",
    "grouped_gemv_q6_k",
    "grouped_gemv_q8_0",
    "head_gemm_bf16",
    "head_gemm_f16",
    "head_gemm_f32",
    "head_gemv_bf16_1",
    "head_gemv_bf16_4",
    "head_gemv_f16_1",
    "head_gemv_f16_4",
    "head_gemv_f32_1",
    "head_gemv_f32_4",
    "head_norm",
    "kv_check",
    "kv_pack",
    "kv_unpack",
    "latent_append",
    "layer_norm",
    "merge",
    "rms_norm",
    "rope_append",
    "route",
    "sample",
    "scale",
    "silu_mul",
    "sink",
    "softcap",
    "sort_choices",
    "split_bf16",
    "split_f16",
    "split_packed",
    "unpack_fp8",
    "unpack_int4_g128",
    "unpack_int4_g32",
    "unpack_int4_g64",
    "unpack_mxfp4",
    "unpack_q4_0",
    "unpack_q4_k",
    "unpack_q5_k",
    "unpack_q6_k",
    "unpack_q8_0",
];

/// Kernels that exist only as code for compute capability 9.0.
pub const SM90: &[&str] =
    &["attention_wgmma_bf16_128", "attention_wgmma_bf16_64", "attention_wgmma_f16_128", "attention_wgmma_f16_64"];

/// Most dynamic shared memory of any launch of the kernel, in bytes: a bound over head sizes and classes, within that
/// of compute capability 8.0 (163 KB), or of 9.0 for [`SM90`] (227 KB).
#[must_use]
pub fn dynamic_shared_bytes_max(name: &str) -> u32 {
    let dim = |name: &str| name.split('_').find_map(|part| part.parse::<u32>().ok()).unwrap_or(0);
    let widest = DecodeClass { warps: 8, stages: 4, blocks_per_sm: 1, piece_keys_min: 1 };
    if name.starts_with("attention_wgmma_") {
        wgmma_shared_bytes(dim(name))
    } else if name.starts_with("attention_decode_") {
        let dtype = if name.contains("_fp8_") { KvDType::Fp8 } else { KvDType::BF16 };
        decode_shared_bytes(dim(name), dtype, widest.for_store(dtype)).min(SHARED_BYTES_MAX)
    } else if name.starts_with("attention_prefill_") {
        let precision = if name.contains("_exact") { Precision::Exact } else { Precision::Fast };
        let limit = if name.ends_with("_small") { SHARED_BYTES_LEAST } else { SHARED_BYTES_MAX };
        prefill_shape(dim(name), precision, limit).map_or(0, |shape| shape.shared_bytes)
    } else if name.starts_with("gemm_") && name != "gemm_reduce" && name != "gemm_f32"
        || name.starts_with("grouped_gemm_") && name != "grouped_gemm_f32"
    {
        GEMM_SHARED_BYTES_MAX
    } else if let Some(bytes) = packed::stream_shared_bytes(name) {
        bytes
    } else {
        super::SHARED_BYTES_DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_within_what_a_device_has() {
        assert!(ALL.is_sorted() && SM90.is_sorted());
        assert!(SM90.iter().all(|name| dynamic_shared_bytes_max(name) <= 227 << 10));
        assert!(ALL.iter().all(|name| dynamic_shared_bytes_max(name) <= SHARED_BYTES_MAX));
        let small = |name: &&&str| name.ends_with("_small");
        assert_eq!(ALL.iter().filter(small).count(), 10);
        assert!(ALL.iter().filter(small).all(|name| dynamic_shared_bytes_max(name) <= SHARED_BYTES_LEAST));
    }

    #[test]
    fn every_device_has_a_prefill_kernel_that_is_there() {
        for head_dim in [64, 96, 128, 256] {
            for (precision, kind) in [(Precision::Exact, "exact"), (Precision::Fast, "fast")] {
                for limit in [SHARED_BYTES_LEAST, SHARED_BYTES_MAX] {
                    let Some(shape) = prefill_shape(head_dim, precision, limit) else {
                        assert_eq!((head_dim, precision, limit), (256, Precision::Exact, SHARED_BYTES_LEAST));
                        continue;
                    };
                    let small = if shape.small { "_small" } else { "" };
                    let types: &[&str] = if kind == "exact" { &["bf16", "f16", "fp8"] } else { &["bf16", "f16"] };
                    for dtype in types {
                        let name = format!("attention_prefill_{dtype}_{head_dim}_{kind}{small}");
                        assert!(ALL.contains(&name.as_str()) && shape.shared_bytes <= limit, "{name}: {shape:?}");
                    }
                }
            }
        }
    }
}
