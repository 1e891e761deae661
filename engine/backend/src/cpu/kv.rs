//! The KV store of the host backend: one allocation `[slot][k | v][kv_heads]` of rows a layer, in the store's
//! element type. A run of consecutive slots is contiguous, and its canonical layout is a plain copy.
//!
//! A layer is private memory of this process, or an arena that transports read and fill beside the device. Invariant:
//! bytes of an arena are accessed only while their granules are locked ([`Reading`], [`Writing`]).

use super::buffer::Buffer;
use super::threads::Disjoint;
use super::widen::narrow;
use crate::DeviceError;
#[cfg(target_os = "linux")]
use crate::arena::{ArenaError, Locked, SharedArena};
use lagoon_types::{KvShape, kv_dtype};
use std::ops::Range;

/// Rounds a token's K and V, `[k | v][kv_heads][head_dim]`, into its place in a layer.
pub(super) fn store_token(shape: KvShape, values: &[f32], token: &mut [u8]) {
    if let Some(dtype) = shape.dtype.plain() {
        return narrow(dtype, values, token);
    }
    let rows = token.chunks_exact_mut(shape.row_bytes()).zip(values.chunks_exact(shape.head_dim as usize));
    rows.for_each(|(row, values)| kv_dtype::encode_row(values, row));
}

/// A KV store in host memory. The operating system provides pages at the first write to them.
#[derive(Debug)]
pub struct CpuKv {
    pub(crate) shape: KvShape,
    pub(crate) slots: usize,
    layers: Vec<Layer>,
}

#[derive(Debug)]
enum Layer {
    /// Bytes as words: a token's K and V in one layer are a whole number of words.
    Own(Buffer<u32>),
    #[cfg(target_os = "linux")]
    Shared(SharedArena),
}

#[cfg(target_os = "linux")]
fn in_use(error: ArenaError) -> DeviceError {
    DeviceError::Failed(format!("the KV store: {error}"))
}

/// Spans of a layer that may be read as long as this lives.
pub(super) struct Reading<'a> {
    bytes: &'a CpuKv,
    base: *const u8,
    len: usize,
    #[cfg(target_os = "linux")]
    _locked: Option<Locked>,
}

// SAFETY: it only gives out shared references, to memory that nobody writes while it lives.
unsafe impl Sync for Reading<'_> {}

impl Reading<'_> {
    /// Bytes of `tokens` slots from `slot0`.
    ///
    /// # Safety
    /// They lie in the spans that this was made for.
    pub(super) unsafe fn slots(&self, slot0: u32, tokens: usize) -> &[u8] {
        let span = self.bytes.span(slot0, tokens);
        assert!(span.end <= self.len, "slots within the layer");
        // SAFETY: in bounds by the assertion; readable and unwritten by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base.add(span.start), span.len()) }
    }
}

/// Slots of a layer that may be written as long as this lives.
pub(super) struct Writing<'a> {
    /// The whole layer; only slots that this was made for may be taken.
    pub(super) bytes: Disjoint<'a, u8>,
    #[cfg(target_os = "linux")]
    _locked: Option<Locked>,
}

impl CpuKv {
    pub(crate) fn new(shape: KvShape, slots: usize) -> Result<Self, DeviceError> {
        let words = slots.saturating_mul(shape.layer_token_bytes() / 4);
        let layer = |_| Buffer::zeroed(words, "KV store").map(Layer::Own);
        Ok(Self { shape, slots, layers: (0..shape.layers).map(layer).collect::<Result<_, _>>()? })
    }

    /// A store in arenas, one a layer.
    #[cfg(target_os = "linux")]
    pub(crate) fn shared(
        shape: KvShape,
        slots: usize,
        granule_slots: usize,
    ) -> Result<(Self, Vec<SharedArena>), DeviceError> {
        let token_bytes = shape.layer_token_bytes();
        let bytes = slots.saturating_mul(token_bytes);
        let arena = |_| {
            SharedArena::new(bytes, granule_slots * token_bytes)
                .map_err(|error| DeviceError::OutOfMemory { what: format!("KV store ({error})"), bytes: bytes as u64 })
        };
        let arenas = (0..shape.layers).map(arena).collect::<Result<Vec<_>, _>>()?;
        let layers = arenas.iter().cloned().map(Layer::Shared).collect();
        Ok((Self { shape, slots, layers }, arenas))
    }

    /// Locks runs of slots `(first, tokens)` of a layer for reading.
    pub(super) fn reading(
        &self,
        layer: usize,
        runs: impl Iterator<Item = (u32, usize)>,
    ) -> Result<Reading<'_>, DeviceError> {
        match &self.layers[layer] {
            Layer::Own(buffer) => {
                let all: &[u8] = bytemuck::cast_slice(buffer);
                Ok(Reading {
                    bytes: self,
                    base: all.as_ptr(),
                    len: all.len(),
                    #[cfg(target_os = "linux")]
                    _locked: None,
                })
            }
            #[cfg(target_os = "linux")]
            Layer::Shared(arena) => {
                let locked = arena.lock(runs.map(|(first, n)| self.span(first, n)), false).map_err(in_use)?;
                Ok(Reading { bytes: self, base: locked.base(), len: locked.bytes(), _locked: Some(locked) })
            }
        }
    }

    /// Locks slots of a layer for writing; `u32::MAX` stands for none.
    pub(super) fn writing(&mut self, layer: usize, slots: &[u32]) -> Result<Writing<'_>, DeviceError> {
        #[cfg(target_os = "linux")]
        if let Layer::Shared(arena) = &self.layers[layer] {
            let spans = slots.iter().filter(|slot| **slot != u32::MAX).map(|slot| self.span(*slot, 1));
            let locked = arena.lock(spans, true).map_err(in_use)?;
            // SAFETY: the map lives as long as `locked`. Users of it touch only slots that they named here, whose granules
            // nobody else reads or writes until `locked` goes.
            let bytes = unsafe { Disjoint::from_raw(locked.base(), locked.bytes()) };
            return Ok(Writing { bytes, _locked: Some(locked) });
        }
        match &mut self.layers[layer] {
            Layer::Own(buffer) => Ok(Writing {
                bytes: Disjoint::new(bytemuck::cast_slice_mut(buffer)),
                #[cfg(target_os = "linux")]
                _locked: None,
            }),
            #[cfg(target_os = "linux")]
            Layer::Shared(_) => unreachable!("returned above"),
        }
    }

    /// Copies tokens to consecutive slots of a layer.
    pub(super) fn store(&mut self, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        let span = self.span(slot0, bytes.len() / self.shape.layer_token_bytes());
        match &mut self.layers[layer] {
            Layer::Own(buffer) => bytemuck::cast_slice_mut::<_, u8>(buffer)[span].copy_from_slice(bytes),
            #[cfg(target_os = "linux")]
            Layer::Shared(arena) => {
                let copy = &mut |target: &mut [u8]| target.copy_from_slice(bytes);
                arena.fill(span.start as u64, span.len(), copy).map_err(in_use)?;
            }
        }
        Ok(())
    }

    /// Appends consecutive slots of a layer.
    pub(super) fn load(&self, layer: usize, slot0: u32, tokens: usize, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let reading = self.reading(layer, std::iter::once((slot0, tokens)))?;
        // SAFETY: these are the slots that it was made for.
        out.extend_from_slice(unsafe { reading.slots(slot0, tokens) });
        Ok(())
    }

    /// Bytes of `tokens` slots from `slot0` within a layer.
    pub(crate) fn span(&self, slot0: u32, tokens: usize) -> Range<usize> {
        let bytes = self.shape.layer_token_bytes();
        let start = slot0 as usize * bytes;
        assert!(slot0 as usize + tokens <= self.slots, "slots within the store");
        start..start + tokens * bytes
    }
}
