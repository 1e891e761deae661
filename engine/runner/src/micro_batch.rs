//! Buffers of the remote micro-batch beside its activations.

use lagoon_backend::{Device, DeviceError, Partials};
use lagoon_model::ModelSpec;

/// A one-layer scratch store for rows whose KV is remote and for fetched
/// KV, and a second set of partials to merge from.
#[derive(Debug)]
pub(crate) struct RemoteBuffers<D: Device> {
    /// Slots `[0, rows)` hold this step's remote-bound rows, `[rows, rows + fetch_tokens)` a fetched piece.
    pub(crate) scratch: D::Kv,
    pub(crate) part: Partials<D::Tensor>,
}

impl<D: Device> RemoteBuffers<D> {
    pub(crate) fn new(
        device: &mut D,
        spec: &ModelSpec,
        kv_dtype: lagoon_types::KvDType,
        rows: usize,
        fetch_tokens: usize,
    ) -> Result<Self, DeviceError> {
        let shape = lagoon_types::KvShape { layers: 1, ..spec.kv_shape(kv_dtype) };
        Ok(Self { scratch: device.kv(shape, rows + fetch_tokens)?, part: Partials::new(device, rows, spec.geometry)? })
    }
}
