//! Activations of feed-forward layers and of their experts, as dispatches.

use crate::gpu::Gpu;
use crate::kernel::{Gated, Kernel};
use crate::memory::{WgpuTensor, quads, word};
use crate::params;
use lagoon_backend::{Activation, DeviceError};

/// The activation of the first `rows` rows.
pub(crate) fn activate(
    gpu: &mut Gpu,
    product: &WgpuTensor,
    rows: usize,
    activation: Activation,
    out: &WgpuTensor,
) -> Result<(), DeviceError> {
    assert_eq!(product.cols, activation.inputs() * out.cols, "activation shapes");
    assert!(rows <= product.rows.min(out.rows), "activation rows");
    let buffers = [Some(&product.buf), Some(&out.buf)];
    let gated = match activation {
        Activation::Gelu => {
            let params = params::Gelu { quads: word(rows * quads(out.cols)), ..Default::default() };
            return gpu.dispatch(Kernel::Gelu, &params, &buffers, params.quads.div_ceil(64), 1);
        }
        Activation::SiluMul => Gated::SiluMul,
        Activation::GeluTanh => Gated::GeluTanh,
        Activation::GeluTanhMul => Gated::GeluTanhMul,
        Activation::ClampedSwiglu => Gated::ClampedSwiglu,
    };
    let params = params::Gated {
        rows: word(rows),
        n: word(out.cols),
        x_stride: word(product.stride()),
        out_stride: word(out.stride()),
    };
    gpu.dispatch(Kernel::Gated(gated), &params, &buffers, (params.rows * params.n).div_ceil(64), 1)
}
