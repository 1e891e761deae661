//! Windowed KV: a store of rings, one a running sequence, and a step's rows in it (ADR 24).

use crate::work::SeqRows;
use lagoon_backend::{AttnRows, Device, DeviceError};
use lagoon_model::ModelSpec;
use lagoon_types::run::visible;
use lagoon_types::{DType, KvRun};

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
}

impl<D: Device> Rings<D> {
    /// `None` if the model's KV is one group.
    pub(crate) fn new(
        device: &mut D,
        spec: &ModelSpec,
        dtype: DType,
        (rings, step_rows): (u32, usize),
    ) -> Result<Option<Self>, DeviceError> {
        let (Some(shape), Some(split)) = (spec.windowed_shape(dtype), &spec.split) else { return Ok(None) };
        let slots = spec.ring_slots(u32::try_from(step_rows).unwrap_or(u32::MAX));
        let kv = device.kv(shape, slots as usize * rings as usize)?;
        Ok(Some(Self { kv, slots, window: split.window }))
    }

    /// The slots of a step's rows, and what they see.
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
            let mut at = first;
            while at < end {
                let within = at % self.slots;
                let len = (self.slots - within).min(end - at);
                rows.runs.push(KvRun { base: base + within, len, first_pos: at });
                at += len;
            }
            let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            let (run0, runs) = (count(run0), count(rows.runs.len() - run0));
            rows.seqs.push(AttnRows { row0: seq.row0, rows: seq.rows, pos0: seq.pos0, run0, runs });
        }
        rows
    }
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
