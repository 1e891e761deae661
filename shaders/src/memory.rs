//! Tensors and KV stores in device memory.
//!
//! Invariants: rows are padded with zeros to whole quads (four elements), and every kernel keeps the padding zero, so
//! that kernels load quads without bounds checks at the end of a row. KV larger than a binding is split into shards by slots.

use crate::gpu::{Buf, Gpu};
use lagoon_backend::{DeviceError, KvPiece, take_columns};
use lagoon_types::KvShape;
use std::borrow::Cow;
use std::ops::Range;

/// Largest head, in elements: that of `rope_append.wgsl`.
const HEAD_DIM_MAX: u32 = 512;

/// Quads of a row of `cols` elements.
pub(crate) fn quads(cols: usize) -> usize {
    cols.div_ceil(4)
}

/// A size or count as kernels see it.
///
/// # Panics
/// If it does not fit u32, which shapes are far below.
pub(crate) fn word(n: usize) -> u32 {
    u32::try_from(n).expect("shapes fit u32")
}

/// f32 activations `[rows][cols]`.
#[derive(Debug)]
pub struct WgpuTensor {
    pub(crate) buf: Buf,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl WgpuTensor {
    pub(crate) fn new(gpu: &mut Gpu, rows: usize, cols: usize) -> Result<Self, DeviceError> {
        let bytes = (rows * quads(cols) * 16) as u64;
        Ok(Self { buf: gpu.buffer("a tensor", bytes)?, rows, cols })
    }

    /// Row stride in floats.
    pub(crate) fn stride(&self) -> usize {
        quads(self.cols) * 4
    }

    pub(crate) fn write(&self, gpu: &mut Gpu, row0: usize, data: &[f32]) -> Result<(), DeviceError> {
        let rows = data.len() / self.cols;
        assert!(data.len().is_multiple_of(self.cols) && row0 + rows <= self.rows, "rows beyond the tensor");
        let stride = self.stride();
        let padded = if stride == self.cols {
            Cow::Borrowed(data)
        } else {
            let mut padded = vec![0.0; rows * stride];
            for (to, from) in padded.chunks_exact_mut(stride).zip(data.chunks_exact(self.cols)) {
                to[..self.cols].copy_from_slice(from);
            }
            Cow::Owned(padded)
        };
        gpu.write(&self.buf, (row0 * stride * 4) as u64, bytemuck::cast_slice(&padded))
    }

    pub(crate) fn read(
        &self,
        gpu: &mut Gpu,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        assert!(rows.end <= self.rows && cols.end <= self.cols, "a range beyond the tensor");
        if rows.is_empty() || cols.is_empty() {
            return Ok(());
        }
        let stride = self.stride();
        out.reserve(rows.len() * cols.len());
        // One copy from the first wanted element to the last, whole rows between.
        let first = rows.start * stride + cols.start;
        let last = (rows.end - 1) * stride + cols.end;
        let mut at = first;
        gpu.read([(&self.buf, (first * 4) as u64, ((last - first) * 4) as u64)], |bytes| {
            take_columns(stride, &cols, at, bytes, out);
            at += bytes.len() / 4;
        })
    }
}

/// Rows of `from` bytes, each padded with zeros to `to` bytes.
pub(crate) fn pad_rows(bytes: &[u8], from: usize, to: usize) -> Vec<u8> {
    let mut out = vec![0; bytes.len() / from * to];
    for (to, from) in out.chunks_exact_mut(to).zip(bytes.chunks_exact(from)) {
        to[..from.len()].copy_from_slice(from);
    }
    out
}

/// A KV store: for each layer its shards, each `[slot][k | v][kv_heads][row_quads]` quads.
#[derive(Debug)]
pub struct WgpuKv {
    pub(crate) shape: KvShape,
    pub(crate) slots: usize,
    /// Slots of each shard; the last one may have fewer.
    pub(crate) shard_slots: usize,
    pub(crate) layers: Vec<Vec<Buf>>,
}

impl WgpuKv {
    pub(crate) fn new(gpu: &mut Gpu, shape: KvShape, slots: usize) -> Result<Self, DeviceError> {
        if shape.head_dim > HEAD_DIM_MAX || !shape.head_dim.is_multiple_of(2) {
            return Err(DeviceError::Unsupported(format!(
                "heads of {} elements: they must be even and at most {HEAD_DIM_MAX}",
                shape.head_dim
            )));
        }
        let mut kv = Self { shape, slots, shard_slots: slots, layers: Vec::new() };
        let fit = usize::try_from(gpu.binding_bytes_max()).unwrap_or(usize::MAX) / kv.slot_bytes().max(1);
        kv.shard_slots = slots.min(fit).max(1);
        for _ in 0..shape.layers {
            let shards = (0..slots.max(1)).step_by(kv.shard_slots).map(|slot0| {
                let slots = kv.shard_slots.min(slots.max(1) - slot0);
                gpu.buffer("KV", (slots * kv.slot_bytes()) as u64)
            });
            kv.layers.push(shards.collect::<Result<_, _>>()?);
        }
        Ok(kv)
    }

    pub(crate) fn head_quads(&self) -> usize {
        quads(self.shape.head_dim as usize)
    }

    /// Quads of a head's row: of its elements, and of its scale where rows have one.
    pub(crate) fn row_quads(&self) -> usize {
        quads(self.shape.dtype.row_elements(self.shape.head_dim))
    }

    /// Bytes of a slot in one layer, padding included.
    fn slot_bytes(&self) -> usize {
        2 * self.shape.kv_heads as usize * self.head_bytes().1
    }

    /// Bytes of one head, as given and as stored.
    fn head_bytes(&self) -> (usize, usize) {
        (self.shape.row_bytes(), self.row_quads() * 4 * self.shape.dtype.element_bytes())
    }

    /// Parts of `slots` by shard: shard, first slot in it, slots.
    fn parts(&self, slots: Range<usize>) -> Vec<(usize, usize, usize)> {
        let mut parts = Vec::new();
        let mut at = slots.start;
        while at < slots.end {
            let shard = at / self.shard_slots;
            let count = ((shard + 1) * self.shard_slots).min(slots.end) - at;
            parts.push((shard, at - shard * self.shard_slots, count));
            at += count;
        }
        parts
    }

    pub(crate) fn write(&self, gpu: &mut Gpu, layer: usize, slot0: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let token = self.shape.layer_token_bytes();
        let slots = slot0..slot0 + bytes.len() / token;
        assert!(bytes.len().is_multiple_of(token) && slots.end <= self.slots, "tokens beyond the store");
        let (given, stored) = self.head_bytes();
        let mut rest = bytes;
        for (shard, slot, count) in self.parts(slots) {
            let (part, after) = rest.split_at(count * token);
            rest = after;
            let part = if given == stored { Cow::Borrowed(part) } else { Cow::Owned(pad_rows(part, given, stored)) };
            gpu.write(&self.layers[layer][shard], (slot * self.slot_bytes()) as u64, &part)?;
        }
        Ok(())
    }

    pub(crate) fn read(&self, gpu: &mut Gpu, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let (slot_bytes, (given, stored)) = (self.slot_bytes(), self.head_bytes());
        let from = out.len();
        let parts = pieces.iter().flat_map(|piece| {
            let slots = piece.slot0 as usize..(piece.slot0 + piece.tokens) as usize;
            assert!(slots.end <= self.slots, "tokens beyond the store");
            self.parts(slots).into_iter().map(|(shard, slot, count)| {
                let buf = &self.layers[piece.layer as usize][shard];
                (buf, (slot * slot_bytes) as u64, (count * slot_bytes) as u64)
            })
        });
        gpu.read(parts, |bytes| out.extend_from_slice(bytes))?;
        if given != stored {
            let padded = out.split_off(from);
            out.extend(padded.chunks_exact(stored).flat_map(|head| &head[..given]));
        }
        Ok(())
    }
}
