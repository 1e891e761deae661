//! The backend's contract, proved on the software adapter, with native f16 and without.

use lagoon_shaders::{AdapterChoice, Options, WgpuDevice};

fn device() -> Result<WgpuDevice, String> {
    WgpuDevice::open(&AdapterChoice::Software).map_err(|error| error.to_string())
}

lagoon_backend::conformance_suite!(device);
lagoon_backend::conformance_large_weight!(device);
lagoon_backend::conformance_latent_wide!(device);

/// As on an adapter without f16 in shaders.
mod without_f16 {
    use super::{AdapterChoice, Options, WgpuDevice};
    use lagoon_backend::conformance::Tolerance;

    fn device() -> Result<WgpuDevice, String> {
        let options = Options { native_f16: false, ..Options::default() };
        WgpuDevice::open_with(&AdapterChoice::Software, options).map_err(|error| error.to_string())
    }

    lagoon_backend::conformance_cases!(
        device,
        Tolerance::STRICT,
        rope_append_rotates_and_stores,
        latent_append_rotates_and_stores,
        attention_dtypes,
        attention_latent,
        head_matmul_matches,
    );
}

/// As on an adapter without subgroups.
mod without_subgroups {
    use super::{AdapterChoice, Options, WgpuDevice};
    use lagoon_backend::conformance::Tolerance;

    fn device() -> Result<WgpuDevice, String> {
        let options = Options { subgroups: false, ..Options::default() };
        WgpuDevice::open_with(&AdapterChoice::Software, options).map_err(|error| error.to_string())
    }

    lagoon_backend::conformance_cases!(
        device,
        Tolerance::STRICT,
        matmul_f32,
        matmul_bf16,
        matmul_parts,
        matmul_packed,
        experts_match,
        experts_packed,
        head_matmul_matches,
    );
}

/// Products of many rows and attention of many queries as on a GPU.
mod without_wide_kernels {
    use super::{AdapterChoice, Options, WgpuDevice};
    use lagoon_backend::conformance::Tolerance;

    fn device() -> Result<WgpuDevice, String> {
        let options = Options { wide_kernels: false, ..Options::default() };
        WgpuDevice::open_with(&AdapterChoice::Software, options).map_err(|error| error.to_string())
    }

    lagoon_backend::conformance_cases!(
        device,
        Tolerance::STRICT,
        matmul_f32,
        matmul_f16,
        matmul_bf16,
        matmul_parts,
        matmul_packed,
        attention_dtypes,
        attention_geometries,
        attention_windows,
        attention_alibi,
        attention_missing_runs,
        attention_prefill,
        attention_long_context,
        attention_steep_scores,
        attention_softcap,
        attention_latent,
        merge_of_split_attention,
    );
}
