//! Norms and linear layers with an optional bias, of the decoder and of latent attention.

use lagoon_backend::{Device, DeviceError, Mode};
use lagoon_model::spec::{Norm, NormSpec};
use lagoon_model::weights::NormWeights;

/// The norm of `rows` rows of `x`.
pub(crate) fn norm<D: Device>(
    device: &mut D,
    spec: &NormSpec,
    weights: &NormWeights<D::Weight>,
    x: &D::Tensor,
    rows: usize,
    out: &mut D::Tensor,
) -> Result<(), DeviceError> {
    match spec.kind {
        Norm::Rms => device.rms_norm(x, &weights.weight, spec.eps, rows, out)?,
        Norm::Layer => device.layer_norm(x, &weights.weight, spec.eps, rows, out)?,
    }
    match &weights.bias {
        Some(bias) => device.add_bias(out, bias, rows),
        None => Ok(()),
    }
}

/// The product of `rows` rows of `x` and a weight, plus the bias.
pub(crate) fn linear<D: Device>(
    device: &mut D,
    (weight, bias): (&D::Weight, Option<&D::Weight>),
    x: &D::Tensor,
    rows: usize,
    mode: Mode,
    out: &mut D::Tensor,
) -> Result<(), DeviceError> {
    device.matmul(x, weight, rows, mode, out)?;
    match bias {
        Some(bias) => device.add_bias(out, bias, rows),
        None => Ok(()),
    }
}
