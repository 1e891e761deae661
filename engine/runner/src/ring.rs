//! Windowed KV: a store of rings, one a running sequence, and a step's rows in it (ADR 24).

use crate::work::{SavedWindow, SeqRows};
use lagoon_backend::{AttnRows, Device, DeviceError};
use lagoon_model::ModelSpec;
use lagoon_types::run::visible;
use lagoon_types::{KvDType, KvRun, RingRows};
use std::ops::Range;

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;

/// The store of windowed KV.
#[derive(Debug)]
pub(crate) struct Rings<D: Device> {
    pub(crate) kv: D::Kv,
    /// Of one ring.
    slots: u32,
    /// The longest window, in tokens.
    window: u32,
    /// Layers whose KV is pooled, and the bytes of a token in one layer of either kind.
    pooled: u32,
    token_bytes: usize,
    /// Of a window that is being copied.
    bytes: Vec<u8>,
}

impl<D: Device> Rings<D> {
    /// `None` if the model's KV is one group.
    pub(crate) fn new(
        device: &mut D,
        spec: &ModelSpec,
        dtype: KvDType,
        (rings, step_rows): (u32, usize),
    ) -> Result<Option<Self>, DeviceError> {
        let (Some(shape), Some(split)) = (spec.windowed_shape(dtype), &spec.split) else { return Ok(None) };
        let slots = spec.ring_slots(u32::try_from(step_rows).unwrap_or(u32::MAX));
        let kv = device.kv(shape, slots as usize * rings as usize)?;
        let (pooled, token_bytes) = (spec.kv_shape(dtype).layers, shape.layer_token_bytes());
        Ok(Some(Self { kv, slots, window: split.window, pooled, token_bytes, bytes: Vec::new() }))
    }

    /// Slots of consecutive positions of a ring, as pieces of consecutive ones: first slot and number.
    fn pieces(&self, ring: u32, positions: Range<u32>) -> impl Iterator<Item = (u32, u32)> + use<D> {
        let (base, slots, mut at) = (ring * self.slots, self.slots, positions.start);
        std::iter::from_fn(move || {
            let within = at % slots;
            let len = (slots - within).min(positions.end - at);
            at += len;
            (len > 0).then_some((base + within, len))
        })
    }

    /// Copies one layer of the windows of a step's sequences from rBlocks into their rings (`load`), or the other way, to be
    /// called before the layer's rows are in the rings, or after. `layer` is its index among layers with a window.
    pub(crate) fn copy_windows(
        &mut self,
        device: &mut D,
        kv: &mut D::Kv,
        (layer, load): (u32, bool),
        seqs: &[SeqRows],
    ) -> Result<(), DeviceError> {
        for seq in seqs {
            let (Some(&RingRows { ring, load: loads, .. }), Some(window)) = (seq.ring.as_ref(), &seq.window) else {
                continue;
            };
            if loads != load {
                continue;
            }
            let tokens = window.positions.end - window.positions.start;
            assert!(tokens <= self.slots, "a ring holds a window");
            let fold = (layer / self.pooled) * tokens;
            let stored = (layer % self.pooled) as usize;
            let mut bytes = std::mem::take(&mut self.bytes);
            bytes.clear();
            let (blocks, ring) = (cut(window, fold..fold + tokens), self.pieces(ring, window.positions.clone()));
            if load {
                for (slot, n) in blocks {
                    device.kv_read(kv, stored, slot, n, &mut bytes)?;
                }
                self.put(device, None, layer as usize, ring, &bytes)?;
            } else {
                for (slot, n) in ring {
                    device.kv_read(&self.kv, layer as usize, slot, n, &mut bytes)?;
                }
                self.put(device, Some(kv), stored, blocks, &bytes)?;
            }
            self.bytes = bytes;
        }
        Ok(())
    }

    /// Writes one layer's KV to pieces of a store, or of the rings.
    fn put(
        &mut self,
        device: &mut D,
        kv: Option<&mut D::Kv>,
        layer: usize,
        pieces: impl Iterator<Item = (u32, u32)>,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let (kv, mut at) = (kv.unwrap_or(&mut self.kv), 0);
        for (slot, n) in pieces {
            let end = at + n as usize * self.token_bytes;
            device.kv_write(kv, layer, slot, &bytes[at..end])?;
            at = end;
        }
        Ok(())
    }

    /// The ring slots of a step's rows, and the runs that they attend to.
    ///
    /// # Panics
    /// If a sequence has no ring, or more rows than rings are made for.
    pub(crate) fn rows(&self, work: &[SeqRows]) -> RingWork {
        let mut rows = RingWork::default();
        for seq in work {
            let ring = seq.ring.as_ref().expect("a split model's sequences have rings");
            let (base, end) = (ring.ring * self.slots, seq.pos0 + seq.rows);
            let first = visible(seq.pos0, Some(self.window)).start.max(ring.from);
            assert!(ring.from <= seq.pos0 && end - first <= self.slots, "a ring holds what a step's rows see");
            rows.slots.extend((seq.pos0..end).map(|pos| base + pos % self.slots));
            let run0 = rows.runs.len();
            let mut first_pos = first;
            for (slot, len) in self.pieces(ring.ring, first..end) {
                rows.runs.push(KvRun { base: slot, len, first_pos });
                first_pos += len;
            }
            let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            let (run0, runs) = (count(run0), count(rows.runs.len() - run0));
            rows.seqs.push(AttnRows { row0: seq.row0, rows: seq.rows, pos0: seq.pos0, run0, runs });
        }
        rows
    }
}

/// Some of the slots in which a window lies, by their order there, as pieces of consecutive ones.
fn cut(window: &SavedWindow, slots: Range<u32>) -> impl Iterator<Item = (u32, u32)> {
    let mut before = 0;
    window.pieces.iter().filter_map(move |&(slot, n)| {
        let at = before;
        before += n;
        let (from, to) = (slots.start.clamp(at, before), slots.end.clamp(at, before));
        (from < to).then_some((slot + from - at, to - from))
    })
}

/// A step's rows in the store of windowed KV.
#[derive(Debug, Default)]
pub(crate) struct RingWork {
    /// Of each row.
    pub(crate) slots: Vec<u32>,
    pub(crate) seqs: Vec<AttnRows>,
    /// Those of a sequence consecutive and ascending.
    pub(crate) runs: Vec<KvRun>,
}
