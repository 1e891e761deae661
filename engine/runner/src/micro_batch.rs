//! Activations of one micro-batch, allocated once for the largest step.

use lagoon_backend::{Device, DeviceError, Partials};
use lagoon_model::ModelConfig;

/// Tensors that a forward pass works in. `rows` is the largest step's row count.
#[derive(Debug)]
pub(crate) struct MicroBatchBuffers<D: Device> {
    /// Residual stream, `[rows][hidden]`.
    pub(crate) x: D::Tensor,
    /// Normalised input of a block, `[rows][hidden]`.
    pub(crate) normed: D::Tensor,
    /// Fused projection, `[rows][qkv_dim]`.
    pub(crate) qkv: D::Tensor,
    /// Cosines and sines per row, `[rows][head_dim]`.
    pub(crate) rope: D::Tensor,
    pub(crate) attn: Partials<D::Tensor>,
    /// Scratch of the up projection, `[rows][2 * intermediate]`, or half of that where the activation has no gate.
    pub(crate) up: D::Tensor,
    /// `[rows][intermediate]`.
    pub(crate) act: D::Tensor,
    /// Last rows, `[sequences][hidden]`.
    pub(crate) last: D::Tensor,
    pub(crate) last_normed: D::Tensor,
    /// `[sequences][vocab]`.
    pub(crate) logits: D::Tensor,
}

impl<D: Device> MicroBatchBuffers<D> {
    pub(crate) fn new(device: &mut D, config: &ModelConfig, rows: usize, seqs: usize) -> Result<Self, DeviceError> {
        let geometry = config.geometry;
        Ok(Self {
            x: device.tensor(rows, config.hidden)?,
            normed: device.tensor(rows, config.hidden)?,
            qkv: device.tensor(rows, geometry.qkv_dim())?,
            rope: device.tensor(rows, geometry.head_dim as usize)?,
            attn: Partials::new(device, rows, geometry)?,
            up: device.tensor(rows, config.family.activation().inputs() * config.intermediate)?,
            act: device.tensor(rows, config.intermediate)?,
            last: device.tensor(seqs, config.hidden)?,
            last_normed: device.tensor(seqs, config.hidden)?,
            logits: device.tensor(seqs, config.vocab)?,
        })
    }
}

/// What the remote micro-batch needs besides: a one-layer scratch store for rows whose KV lives elsewhere and for fetched KV,
/// and a second set of partials to merge from.
#[derive(Debug)]
pub(crate) struct RemoteBuffers<D: Device> {
    /// Slots `[0, rows)` hold this step's remote-bound rows, `[rows, rows + fetch_tokens)` a fetched piece.
    pub(crate) scratch: D::Kv,
    pub(crate) part: Partials<D::Tensor>,
}

impl<D: Device> RemoteBuffers<D> {
    pub(crate) fn new(
        device: &mut D,
        config: &ModelConfig,
        kv_dtype: lagoon_types::DType,
        rows: usize,
        fetch_tokens: usize,
    ) -> Result<Self, DeviceError> {
        let shape = lagoon_types::KvShape { layers: 1, ..config.kv_shape(kv_dtype) };
        Ok(Self {
            scratch: device.kv(shape, rows + fetch_tokens)?,
            part: Partials::new(device, rows, config.geometry)?,
        })
    }
}
