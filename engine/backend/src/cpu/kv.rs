//! The KV store of the host backend: per layer one allocation `[slot][k | v][kv_heads][head_dim]` in the store's
//! element type, so that a run of consecutive slots is one contiguous stream and the canonical layout is a copy.

use super::buffer::Buffer;
use crate::DeviceError;
use lagoon_types::KvShape;
use std::ops::Range;

/// A KV store in host memory. Pages are provided as slots are first written.
#[derive(Debug)]
pub struct CpuKv {
    pub(crate) shape: KvShape,
    pub(crate) slots: usize,
    /// Bytes as words, one buffer a layer: a token's K and V in one layer are a whole number of words.
    layers: Vec<Buffer<u32>>,
}

impl CpuKv {
    pub(crate) fn new(shape: KvShape, slots: usize) -> Result<Self, DeviceError> {
        let words = slots.saturating_mul(shape.layer_token_bytes() / 4);
        let layers = (0..shape.layers).map(|_| Buffer::zeroed(words, "KV store")).collect::<Result<_, _>>()?;
        Ok(Self { shape, slots, layers })
    }

    /// All bytes of a layer.
    pub(crate) fn layer(&self, layer: usize) -> &[u8] {
        bytemuck::cast_slice(&self.layers[layer])
    }

    /// All bytes of a layer, for writing.
    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.layers[layer])
    }

    /// Bytes of `tokens` slots from `slot0` within a layer.
    pub(crate) fn span(&self, slot0: u32, tokens: usize) -> Range<usize> {
        let bytes = self.shape.layer_token_bytes();
        let start = slot0 as usize * bytes;
        assert!(slot0 as usize + tokens <= self.slots, "slots within the store");
        start..start + tokens * bytes
    }
}
