//! Tuning of the decode kernel on a device: measures times for [`crate::kernels::tune`].
//!
//! Launches only kernels that are used anyway; warpgroup kernels have a trial of their own ([`super::trial`]).

use super::{CudaDevice, CudaKv, CudaTensor};
use crate::driver::Event;
use crate::kernels::attention::Tuning;
use crate::kernels::tune::{CONTEXTS, Tuned, tune};
use lagoon_backend::{AttnBatch, AttnRows, Device, DeviceError, Partials};
use lagoon_types::{AttentionGeometry, DType, KvRun, KvShape};
use std::time::{Duration, Instant};

/// The attention shape to tune for, and the limits of tuning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TuneFor {
    pub geometry: AttentionGeometry,
    /// Element type of the store.
    pub dtype: DType,
    /// Keys at which the three classes are measured; `None` is [`CONTEXTS`].
    pub contexts: Option<[u32; 3]>,
    /// Time after which no further shape is tried.
    pub time_max: Duration,
    /// Device memory that measuring may take for KV, in bytes.
    pub bytes_max: u64,
}

impl TuneFor {
    pub(super) fn contexts(&self) -> [u32; 3] {
        self.contexts.unwrap_or(CONTEXTS)
    }

    pub(super) fn shape(&self, layers: u32) -> KvShape {
        let AttentionGeometry { kv_heads, head_dim, .. } = self.geometry;
        KvShape { layers, kv_heads, head_dim, dtype: self.dtype.into() }
    }

    /// Bytes of `tokens` tokens of one layer.
    fn bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens) * self.shape(1).layer_token_bytes() as u64
    }

    /// Layers of `tokens` tokens that measuring rotates through, as memory allows, so that no call finds KV of an
    /// earlier one in the L2 cache.
    pub(super) fn layers(&self, tokens: u32) -> u32 {
        let layer = self.bytes(tokens);
        u32::try_from(ROTATED_BYTES.min(self.bytes_max) / layer).unwrap_or(u32::MAX).clamp(1, LAYERS_MAX)
    }
}

/// Bytes of KV that measuring rotates through: twice the L2 cache of an H200 (60 MiB).
const ROTATED_BYTES: u64 = 128 << 20;
const LAYERS_MAX: u32 = 8;
/// Sequences of a measured decode step, at most.
const BATCH_MAX: u32 = 8;
/// Fewest calls between two events.
const CALLS: u32 = 3;
/// Period of a decode store's values in tokens: prime, and longer than any cache holds.
const PERIOD: u32 = 4093;

/// Element `index` of the random sequence `seed`, uniform in `[-1, 1)`: a hash (the finalizer of SplitMix64), so the
/// values have no period of tiles or pages.
pub(super) fn random(seed: u64, index: u64) -> f32 {
    f32::from(u16::try_from(hash(seed, index) >> 48).unwrap_or(0)) / 32768.0 - 1.0
}

/// A hash of `index` with `seed`.
pub(super) fn hash(seed: u64, index: u64) -> u64 {
    let mut x = index.wrapping_add(seed.wrapping_mul(0xd1b5_4a32_d192_ed03)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A decode step over `keys` keys a sequence.
struct DecodeStep {
    keys: u32,
    kv: CudaKv,
    q: CudaTensor,
    out: Partials<CudaTensor>,
    seqs: Vec<AttnRows>,
    runs: Vec<KvRun>,
}

impl CudaDevice {
    /// Measures the fastest decode launch shapes on this device, within `time_max`, without changing the tuning: see
    /// [`Tuned::apply`] and [`CudaDevice::set_tuning`]. `None` for stores that tensor cores do not serve.
    ///
    /// # Errors
    /// No memory for one sequence of the longest context; those of the driver.
    pub fn tune(&mut self, what: &TuneFor) -> Result<Option<Tuned>, DeviceError> {
        if what.dtype == DType::F32 || ![64, 96, 128, 256].contains(&what.geometry.head_dim) {
            return Ok(None);
        }
        let before = self.tuning;
        let measured = self.measure(what, before);
        self.set_tuning(before);
        measured.map(Some)
    }

    fn measure(&mut self, what: &TuneFor, base: Tuning) -> Result<Tuned, DeviceError> {
        let until = Instant::now() + what.time_max;
        let mut step: Option<DecodeStep> = None;
        tune(what.geometry.head_dim, &base, what.contexts(), |class, keys| {
            if Instant::now() > until {
                return Ok(f64::INFINITY);
            }
            let mut now = match step.take().filter(|step| step.keys == keys) {
                Some(step) => step,
                None => self.decode_step(what, keys)?,
            };
            let (geometry, scale) = (what.geometry, 0.125);
            let DecodeStep { q, kv, out, seqs, runs, .. } = &mut now;
            let batch = AttnBatch { geometry, scale, window: None, alibi: None, softcap: None, seqs, runs };
            self.set_tuning(Tuning { classes: [class; 3], ..base });
            let ms = self.milliseconds(q, &batch, kv, out);
            step = Some(now);
            ms.map(f64::from)
        })
    }

    fn decode_step(&mut self, what: &TuneFor, keys: u32) -> Result<DecodeStep, DeviceError> {
        let g = what.geometry;
        let rows = u32::try_from(what.bytes_max / what.bytes(keys)).unwrap_or(u32::MAX).clamp(1, BATCH_MAX);
        let shape = what.shape(what.layers(rows * keys));
        let mut kv = self.kv(shape, (rows * keys) as usize)?;
        let token = shape.layer_token_bytes();
        let (mut bytes, elements) = (Vec::new(), token / what.dtype.size());
        let count = PERIOD.min(rows * keys) as usize * elements;
        what.dtype.encode(&(0..count as u64).map(|i| random(1, i)).collect::<Vec<f32>>(), &mut bytes);
        for layer in 0..shape.layers as usize {
            for slot in (0..rows * keys).step_by(PERIOD as usize) {
                let tokens = (rows * keys - slot).min(PERIOD) as usize;
                self.kv_write(&mut kv, layer, slot, &bytes[..tokens * token])?;
            }
        }
        let mut q = self.tensor(rows as usize, g.q_dim())?;
        let queries = (0..rows as usize * g.q_dim()).map(|i| random(2, i as u64));
        self.write(&mut q, 0, &queries.collect::<Vec<f32>>())?;
        let out = Partials::new(self, rows as usize, g)?;
        let seqs = (0..rows).map(|row| AttnRows { row0: row, rows: 1, pos0: keys - 1, run0: row, runs: 1 }).collect();
        let runs = (0..rows).map(|row| KvRun { base: row * keys, len: keys, first_pos: 0 }).collect();
        Ok(DecodeStep { keys, kv, q, out, seqs, runs })
    }

    /// Milliseconds of one call, between two events of the device, rotating through the store's layers after a
    /// warm-up call.
    pub(super) fn milliseconds(
        &mut self,
        q: &CudaTensor,
        batch: &AttnBatch<'_>,
        kv: &CudaKv,
        out: &mut Partials<CudaTensor>,
    ) -> Result<f32, DeviceError> {
        let layers = kv.shape.layers as usize;
        let calls = CALLS.max(kv.shape.layers);
        let (begin, end) = (Event::new(&self.context, true)?, Event::new(&self.context, true)?);
        self.attention(q, batch, kv, layers - 1, out)?;
        begin.record(&self.work_streams[self.at].stream)?;
        (0..calls as usize).try_for_each(|call| self.attention(q, batch, kv, call % layers, out))?;
        end.record(&self.work_streams[self.at].stream)?;
        self.sync()?;
        Ok(end.since_ms(&begin)? / calls as f32)
    }
}
