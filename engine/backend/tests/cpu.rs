//! The host backend against the conformance suite.

use lagoon_backend::CpuDevice;

fn device() -> Result<CpuDevice, String> {
    Ok(CpuDevice::new())
}

lagoon_backend::conformance_suite!(device);
lagoon_backend::conformance_large_weight!(device);
