//! Tuning on a device: times for [`crate::kernels::tune`], and whether warpgroup products can be trusted and are faster.

use super::{CudaDevice, CudaKv};
use crate::driver::Event;
use crate::kernels::attention::{DecodeClass, Precision, Tuning};
use crate::kernels::tune::{CONTEXTS, Tuned, tune};
use lagoon_backend::{AttnBatch, AttnRows, Device, DeviceError, Partials};
use lagoon_types::{Alibi, AttentionGeometry, DType, KvRun, KvShape};
use std::time::{Duration, Instant};

/// What attention is tuned for, and what that may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TuneFor {
    pub geometry: AttentionGeometry,
    /// Of the store.
    pub dtype: DType,
    /// Keys at which the three classes are measured; [`CONTEXTS`] where nothing is said.
    pub contexts: Option<[u32; 3]>,
    /// Shapes that were not tried by then are not.
    pub time_max: Duration,
    /// Bytes of the device that measuring may take, for one layer's KV.
    pub bytes_max: u64,
}

/// What comparing and timing warpgroup products gave. All zero where the device or the kernels have none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tried {
    /// Decode shapes that were timed.
    pub shapes: u32,
    /// Largest difference of outputs and of log-sum-exps between the two kernels, over all cases.
    pub worst: [f32; 2],
    /// Milliseconds of a prompt's attention with `mma.sync` and with warpgroup products.
    pub prefill_ms: [f32; 2],
}

/// Both kernels round queries and weights to the store's type, so they differ by the order of sums and by weights that round
/// the other way: half a unit of bf16's last bit of values about 1, and a wide margin. A wrong layout differs by about 1.
const WORST_MAX: [f32; 2] = [0.02, 0.002];
/// How much faster they have to be.
const GAIN_MIN: f32 = 0.01;
/// Sequences of a measured decode step at most.
const BATCH_MAX: u32 = 8;
/// Tokens of the prompt that is timed.
const PROMPT: u32 = 4096;
/// Calls between two events.
const CALLS: u32 = 3;

/// Values that differ from row to row, between -1 and 1.
fn values(n: usize) -> Vec<f32> {
    let mut state = 0x1234_5678u32;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from(u16::try_from(state >> 16).unwrap_or(0)) / 32768.0 - 1.0
        })
        .collect()
}

impl CudaDevice {
    /// Measures how attention is best cut on this device, within its time. The tuning itself is not changed: see
    /// [`Tuned::apply`] and [`CudaDevice::set_tuning`]. `None` for stores that tensor cores do not serve.
    ///
    /// # Errors
    /// No memory for one sequence of the longest context; what the device says.
    pub fn tune(&mut self, what: &TuneFor) -> Result<Option<(Tuned, Tried)>, DeviceError> {
        let g = what.geometry;
        if what.dtype == DType::F32 || ![64, 96, 128, 256].contains(&g.head_dim) {
            return Ok(None);
        }
        let until = Instant::now() + what.time_max;
        let contexts = what.contexts.unwrap_or(CONTEXTS);
        let longest = contexts.into_iter().max().unwrap_or(1);
        let shape = KvShape { layers: 1, kv_heads: g.kv_heads, head_dim: g.head_dim, dtype: what.dtype };
        let rows = what.bytes_max / (u64::from(longest) * shape.layer_token_bytes() as u64);
        let rows = u32::try_from(rows).unwrap_or(u32::MAX).clamp(1, BATCH_MAX);
        let mut kv = self.kv(shape, (rows * longest) as usize)?;
        self.fill(&mut kv, rows * longest)?;
        let before = self.tuning;
        let measured = self.measure(what, &kv, rows, contexts, until);
        self.set_tuning(before);
        measured.map(Some)
    }

    /// Values in all slots.
    fn fill(&mut self, kv: &mut CudaKv, tokens: u32) -> Result<(), DeviceError> {
        let token = kv.shape.layer_token_bytes();
        let mut bytes = Vec::new();
        kv.shape.dtype.encode(&values(61 * token / 2), &mut bytes);
        for slot in (0..tokens).step_by(61) {
            let count = (tokens - slot).min(61) as usize;
            self.kv_write(kv, 0, slot, &bytes[..count * token])?;
        }
        self.sync()
    }

    fn measure(
        &mut self,
        what: &TuneFor,
        kv: &CudaKv,
        rows: u32,
        contexts: [u32; 3],
        until: Instant,
    ) -> Result<(Tuned, Tried), DeviceError> {
        let (g, base) = (what.geometry, self.tuning);
        let mut q = self.tensor(rows as usize, g.q_dim())?;
        self.write(&mut q, 0, &values(rows as usize * g.q_dim()))?;
        let mut out = self.partials(rows as usize, g)?;
        let longest = contexts.into_iter().max().unwrap_or(1);
        let mut tried = Tried::default();
        let tuned = tune(g.head_dim, &base, contexts, |class: DecodeClass, keys| {
            if Instant::now() > until {
                return Ok(f64::INFINITY);
            }
            tried.shapes += 1;
            let seqs: Vec<AttnRows> =
                (0..rows).map(|row| AttnRows { row0: row, rows: 1, pos0: keys - 1, run0: row, runs: 1 }).collect();
            let runs: Vec<KvRun> =
                (0..rows).map(|row| KvRun { base: row * longest, len: keys, first_pos: 0 }).collect();
            let scale = 0.125;
            let batch = AttnBatch { geometry: g, scale, window: None, alibi: None, seqs: &seqs, runs: &runs };
            self.set_tuning(Tuning { classes: [class; 3], ..base });
            self.milliseconds(&q, &batch, kv, &mut out).map(f64::from)
        })?;
        let wgmma = self.try_warpgroups(what, kv, rows * longest, &mut tried)?;
        Ok((Tuned { wgmma, ..tuned }, tried))
    }

    /// Milliseconds of one call, after one that does not count.
    fn milliseconds(
        &mut self,
        q: &super::CudaTensor,
        batch: &AttnBatch<'_>,
        kv: &CudaKv,
        out: &mut Partials<super::CudaTensor>,
    ) -> Result<f32, DeviceError> {
        let (begin, end) = (Event::new(&self.context, true)?, Event::new(&self.context, true)?);
        self.attention(q, batch, kv, 0, out)?;
        begin.record(&self.lanes[self.at].stream)?;
        (0..CALLS).try_for_each(|_| self.attention(q, batch, kv, 0, out))?;
        end.record(&self.lanes[self.at].stream)?;
        self.sync()?;
        Ok(end.since_ms(&begin)? / CALLS as f32)
    }

    /// Whether warpgroup products are there, agree with the other kernels and are faster: over a prompt, one in the middle of
    /// a context with odd rows, one with a window and biases.
    fn try_warpgroups(
        &mut self,
        what: &TuneFor,
        kv: &CudaKv,
        slots: u32,
        tried: &mut Tried,
    ) -> Result<bool, DeviceError> {
        let g = what.geometry;
        if self.attributes().compute_capability.0 != 9 || ![64, 128].contains(&g.head_dim) {
            return Ok(false);
        }
        let base = Tuning { precision: Precision::Fast, wgmma: false, ..self.tuning };
        let prompt = PROMPT.min(slots);
        let mut agree = true;
        for (rows, first, window, alibi) in [
            (prompt, 0, None, None),
            (133.min(prompt), prompt - 133.min(prompt), None, None),
            (71.min(prompt), prompt - 71.min(prompt), Some(100), Some(Alibi { bias_max: 8.0 })),
        ] {
            let mut q = self.tensor(rows as usize, g.q_dim())?;
            self.write(&mut q, 0, &values(rows as usize * g.q_dim()))?;
            let mut out = self.partials(rows as usize, g)?;
            let seqs = [AttnRows { row0: 0, rows, pos0: first, run0: 0, runs: 2 }];
            let cut = (first + rows) / 3;
            let runs = [
                KvRun { base: 0, len: cut, first_pos: 0 },
                KvRun { base: cut, len: first + rows - cut, first_pos: cut },
            ];
            let batch = AttnBatch { geometry: g, scale: 0.125, window, alibi, seqs: &seqs, runs: &runs };
            let (mut results, mut ms) = (Vec::new(), [0.0; 2]);
            for (ms, wgmma) in ms.iter_mut().zip([false, true]) {
                self.set_tuning(Tuning { wgmma, ..base });
                *ms = self.milliseconds(&q, &batch, kv, &mut out)?;
                let (mut o, mut lse) = (Vec::new(), Vec::new());
                self.read(&out.out, 0..rows as usize, 0..g.q_dim(), &mut o)?;
                self.read(&out.lse, 0..rows as usize, 0..g.heads as usize, &mut lse)?;
                results.push([o, lse]);
            }
            for (i, worst) in tried.worst.iter_mut().enumerate() {
                for (a, b) in results[0][i].iter().zip(&results[1][i]) {
                    // Not numbers disagree.
                    let difference = (a - b).abs();
                    *worst = if difference.is_nan() { f32::INFINITY } else { worst.max(difference) };
                }
            }
            if first == 0 {
                tried.prefill_ms = ms;
            }
            agree &= tried.worst.iter().zip(WORST_MAX).all(|(worst, max)| *worst <= max);
        }
        let [plain, wgmma] = tried.prefill_ms;
        Ok(agree && wgmma < plain * (1.0 - GAIN_MIN))
    }
}
