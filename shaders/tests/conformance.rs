//! The backend's contract, proved on the software adapter, with native f16 and without.

use lagoon_backend::conformance::Tolerance;
use lagoon_shaders::{AdapterChoice, Options, WgpuDevice};

/// Vulkan leaves exp and log to the driver: lavapipe's exp is up to 17 ulp off, and its log some hundred near 1.
const TOLERANCE: Tolerance = Tolerance::loosened(8.0);

fn device() -> Result<WgpuDevice, String> {
    WgpuDevice::open(&AdapterChoice::Software).map_err(|error| error.to_string())
}

lagoon_backend::conformance_suite!(device, TOLERANCE);
lagoon_backend::conformance_large_weight!(device, TOLERANCE);

/// As on an adapter without f16 in shaders.
mod without_f16 {
    use super::{AdapterChoice, Options, TOLERANCE, WgpuDevice};

    fn device() -> Result<WgpuDevice, String> {
        let options = Options { native_f16: false, ..Options::default() };
        WgpuDevice::open_with(&AdapterChoice::Software, options).map_err(|error| error.to_string())
    }

    lagoon_backend::conformance_cases!(
        device,
        TOLERANCE,
        embed_widens_rows,
        matmul_f16,
        rope_append_rotates_and_stores,
        attention_dtypes,
    );
}
