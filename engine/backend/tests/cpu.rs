//! The host backend against the conformance suite, with every instruction set that this processor has.

use lagoon_backend::CpuDevice;
use lagoon_backend::cpu::Isa;

fn device(isa: Isa) -> Result<CpuDevice, String> {
    CpuDevice::new().with_isa(isa).map_err(|e| e.to_string())
}

mod avx512 {
    lagoon_backend::conformance_suite!(|| super::device(super::Isa::Avx512));
    lagoon_backend::conformance_large_weight!(|| super::device(super::Isa::Avx512));
}

mod avx2 {
    lagoon_backend::conformance_suite!(|| super::device(super::Isa::Avx2));
}

mod portable {
    lagoon_backend::conformance_suite!(|| super::device(super::Isa::Portable));
}

mod three_threads {
    lagoon_backend::conformance_suite!(|| Ok::<_, String>(super::CpuDevice::with_threads(3)));
    lagoon_backend::conformance_latent_wide!(|| Ok::<_, String>(super::CpuDevice::with_threads(3)));
}
