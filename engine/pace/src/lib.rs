//! [`Paced`]: a device that takes as long as a modelled one: real arithmetic, then a sleep until the modelled time
//! has passed.
//!
//! For benchmarks of a whole pool on one machine: instances that share a processor would disturb each other's times;
//! paced ones mostly sleep.
//!
//! As on a GPU, operations queue their modelled time and only reads wait for it. Urgent work goes ahead of the queue
//! and delays it by its own time (the microseconds that a priority stream waits for running thread blocks are not
//! modelled).
//!
//! The model is a roofline: a matrix product takes the longer of its weight bytes over the memory bandwidth and its
//! operations over the peak rate; attention likewise with the KV bytes that it reads, once a sequence. Scales are the
//! ratio of the modelled model to the real one. If the real arithmetic takes longer than the model, the device is
//! late: [`Lateness`] counts that, and a benchmark with much of it is invalid.

#![forbid(unsafe_code)]
#![allow(clippy::cast_precision_loss, reason = "times are estimates")]

use lagoon_backend::{
    Activation, AttnBatch, Device, DeviceError, DeviceInfo, ExpertBuffers, Experts, HeadStrides, KvPiece, LatentRow,
    LaunchCounters, Mode, Partials, Queued, RegionId, SampleRow, SampledRow, Sampling, SharedArenas, SharedRegions,
    VirtualMemory, WeightSource,
};
use lagoon_types::AttentionGeometry;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Rates and scales of a modelled device. All rates are effective ones, not peaks.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaceProfile {
    /// Bytes of weights and KV that are read per second.
    pub bytes_per_s: f64,
    /// Floating-point operations per second of matrix products and attention.
    pub flops: f64,
    /// Bytes of KV that are copied to and from the store per second.
    pub copy_bytes_per_s: f64,
    /// Fixed time of an operation, in microseconds.
    pub launch_us: f64,
    /// Modelled weights over real ones, in bytes and in operations.
    pub weight_scale: f64,
    /// Modelled KV of a token over the real one, in bytes and in attention operations.
    pub kv_scale: f64,
    /// Modelled rows of a prompt over real ones, in attention: a sequence with several rows in a step is a prompt's chunk.
    #[serde(default = "one")]
    pub prompt_scale: f64,
    /// Time of each row of a prompt's chunk in a layer beside its matrix products', in microseconds.
    #[serde(default)]
    pub prompt_row_us: f64,
}

fn one() -> f64 {
    1.0
}

impl PaceProfile {
    /// Checks that every number is positive and finite.
    ///
    /// # Errors
    /// Names the first one that is not.
    pub fn check(&self) -> Result<(), String> {
        let fields = [
            ("bytes_per_s", self.bytes_per_s),
            ("flops", self.flops),
            ("copy_bytes_per_s", self.copy_bytes_per_s),
            ("weight_scale", self.weight_scale),
            ("kv_scale", self.kv_scale),
            ("prompt_scale", self.prompt_scale),
        ];
        match fields.iter().find(|(_, v)| !v.is_finite() || *v <= 0.0) {
            Some((name, value)) => Err(format!("{name} is {value}: expected a positive number")),
            None => {
                let least = [("launch_us", self.launch_us), ("prompt_row_us", self.prompt_row_us)];
                let wrong = least.iter().find(|(_, v)| !v.is_finite() || *v < 0.0);
                wrong.map_or(Ok(()), |(name, value)| Err(format!("{name} is {value}: expected 0 or more")))
            }
        }
    }

    /// Seconds that a matrix product of `rows` rows takes with a weight of `elements` elements in `bytes` bytes.
    #[must_use]
    pub fn matmul_s(&self, rows: usize, elements: usize, bytes: usize) -> f64 {
        let operations = 2.0 * rows as f64 * elements as f64 * self.weight_scale;
        (bytes as f64 * self.weight_scale / self.bytes_per_s).max(operations / self.flops)
    }

    /// Seconds that a copy of `bytes` bytes of KV to or from the store takes.
    #[must_use]
    pub fn copy_s(&self, bytes: usize) -> f64 {
        bytes as f64 * self.kv_scale / self.copy_bytes_per_s
    }

    /// Seconds that attention of `rows` rows of one sequence, `q_dim` wide, takes over `keys` keys of `token_bytes` bytes
    /// in one layer.
    #[must_use]
    pub fn attention_s(&self, rows: usize, q_dim: usize, keys: usize, token_bytes: usize) -> f64 {
        let scale = if rows > 1 { self.prompt_scale } else { 1.0 };
        let operations = 4.0 * rows as f64 * q_dim as f64 * keys as f64 * self.kv_scale * scale;
        (keys as f64 * token_bytes as f64 * self.kv_scale / self.bytes_per_s).max(operations / self.flops)
    }
}

/// Counters of a paced device, in microseconds: how far real arithmetic fell behind the model, and the modelled time.
#[derive(Debug, Default)]
pub struct Lateness {
    late_us: AtomicU64,
    modelled_us: AtomicU64,
}

impl Lateness {
    /// Late and modelled time so far, in microseconds.
    #[must_use]
    pub fn micros(&self) -> (u64, u64) {
        (self.late_us.load(Ordering::Relaxed), self.modelled_us.load(Ordering::Relaxed))
    }
}

/// A device with modelled times; see the module's documentation.
#[derive(Debug)]
pub struct Paced<D> {
    inner: D,
    profile: PaceProfile,
    busy_until: Instant,
    /// When the queued urgent work is done.
    urgent_until: Instant,
    urgent: bool,
    marks: [Instant; 2],
    /// No [`Queued::reached`] since the mark was set.
    fresh: [bool; 2],
    /// Something was queued since the last wait.
    queued: bool,
    /// A layer's KV was appended since the last attention of a pass.
    appended: bool,
    lateness: Arc<Lateness>,
}

/// A weight of the inner device and its size.
#[derive(Debug)]
pub struct PacedWeight<W> {
    inner: W,
    elements: usize,
    bytes: usize,
}

impl<D: Device> Paced<D> {
    /// A paced device around `inner`.
    ///
    /// # Panics
    /// If the profile is invalid: see [`PaceProfile::check`].
    #[must_use]
    pub fn new(inner: D, profile: PaceProfile) -> Self {
        assert_eq!(profile.check(), Ok(()));
        let now = Instant::now();
        Self {
            inner,
            profile,
            busy_until: now,
            urgent_until: now,
            urgent: false,
            marks: [now; 2],
            fresh: [false; 2],
            queued: false,
            appended: false,
            lateness: Arc::default(),
        }
    }

    /// The device's lateness counters, readable while it works.
    #[must_use]
    pub fn lateness(&self) -> Arc<Lateness> {
        self.lateness.clone()
    }

    /// Queues `seconds` of modelled time.
    fn queue(&mut self, seconds: f64) {
        let cost = Duration::from_secs_f64(seconds + self.profile.launch_us * 1e-6);
        let now = Instant::now();
        if self.urgent {
            self.urgent_until = self.urgent_until.max(now) + cost;
            for due in self.marks.iter_mut().filter(|due| **due > now) {
                *due += cost;
            }
        }
        self.busy_until = self.busy_until.max(now) + cost;
        self.queued = true;
        add(&self.lateness.modelled_us, cost);
    }

    /// Queues the modelled time of a copy of so many tokens of one layer.
    fn queue_copy(&mut self, kv: &D::Kv, tokens: u32) {
        let bytes = tokens as usize * self.inner.kv_shape(kv).layer_token_bytes();
        self.queue(self.profile.copy_s(bytes));
    }

    /// Waits until the queued time has passed.
    fn wait(&mut self) {
        if !std::mem::take(&mut self.queued) {
            return;
        }
        let now = Instant::now();
        let until = if self.urgent { self.urgent_until } else { self.busy_until };
        match until.checked_duration_since(now) {
            Some(left) => std::thread::sleep(left),
            None => add(&self.lateness.late_us, now - until),
        }
    }
}

/// Rows of prompts' chunks.
fn prompt_rows(batch: &AttnBatch<'_>) -> u32 {
    batch.seqs.iter().map(|seq| seq.rows).filter(|rows| *rows > 1).sum()
}

fn add(counter: &AtomicU64, time: Duration) {
    counter.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

fn refused(capability: &str) -> DeviceError {
    DeviceError::Unsupported(format!("the paced device has no {capability}"))
}

/// Always available: the modelled time is a queue, whether the inner device has one or not.
impl<D: Device> Queued for Paced<D> {
    type Tensor = D::Tensor;

    fn urgent(&mut self, urgent: bool) {
        self.urgent = urgent;
        if let Some(inner) = self.inner.queued() {
            inner.urgent(urgent);
        }
    }

    fn begin_repeatable(&mut self) -> Result<(), DeviceError> {
        self.inner.queued().map_or(Ok(()), Queued::begin_repeatable)
    }

    fn launches(&mut self) -> Option<LaunchCounters> {
        self.inner.queued()?.launches()
    }

    fn abort_step(&mut self) -> Result<(), DeviceError> {
        self.inner.queued().map_or(Ok(()), Queued::abort_step)
    }

    fn mark(&mut self, micro_batch: usize) -> Result<(), DeviceError> {
        (self.marks[micro_batch], self.fresh[micro_batch]) = (self.busy_until, true);
        Ok(())
    }

    fn reached(&mut self, micro_batch: usize) -> Result<Option<Duration>, DeviceError> {
        let (now, fresh) = (Instant::now(), std::mem::take(&mut self.fresh[micro_batch]));
        let left = self.marks[micro_batch].checked_duration_since(now).filter(|left| !left.is_zero());
        if left.is_none() && fresh {
            // The mark was passed before the first question: the arithmetic took longer than the model.
            add(&self.lateness.late_us, now - self.marks[micro_batch]);
        }
        Ok(left)
    }

    /// Sets the mark only: [`Queued::read_staged`] reads from the inner device, without a wait of the model.
    fn read_ahead(
        &mut self,
        micro_batch: usize,
        _tensor: &Self::Tensor,
        _rows: Range<usize>,
        _cols: Range<usize>,
    ) -> Result<(), DeviceError> {
        self.mark(micro_batch)
    }

    fn read_staged(
        &mut self,
        _micro_batch: usize,
        tensor: &Self::Tensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        self.inner.read(tensor, rows, cols, out)
    }
}

impl<D: Device> Sampling for Paced<D> {
    type Tensor = D::Tensor;

    fn sample_ahead(
        &mut self,
        micro_batch: usize,
        logits: &mut Self::Tensor,
        rows: &[SampleRow],
        masks: &[u32],
    ) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.sampling().ok_or_else(|| refused("sampling"))?.sample_ahead(micro_batch, logits, rows, masks)?;
        self.mark(micro_batch)
    }

    fn sampled(&mut self, micro_batch: usize, out: &mut Vec<SampledRow>) -> Result<(), DeviceError> {
        self.inner.sampling().ok_or_else(|| refused("sampling"))?.sampled(micro_batch, out)
    }
}

/// Copies through a region take the modelled time of a copy.
impl<D: Device> SharedRegions for Paced<D> {
    type Kv = D::Kv;

    #[cfg(target_os = "linux")]
    fn region(&mut self, bytes: usize) -> Result<lagoon_backend::OwnRegion, DeviceError> {
        self.inner.shared_regions().ok_or_else(|| refused("shared regions"))?.region(bytes)
    }

    fn kv_to_region(
        &mut self,
        kv: &Self::Kv,
        pieces: &[KvPiece],
        region: RegionId,
        at: usize,
    ) -> Result<(), DeviceError> {
        self.queue_copy(kv, pieces.iter().map(|piece| piece.tokens).sum());
        let regions = self.inner.shared_regions().ok_or_else(|| refused("shared regions"))?;
        regions.kv_to_region(kv, pieces, region, at)?;
        self.wait();
        Ok(())
    }

    fn kv_from_region(
        &mut self,
        kv: &mut Self::Kv,
        pieces: &[KvPiece],
        region: RegionId,
        at: usize,
    ) -> Result<(), DeviceError> {
        self.queue_copy(kv, pieces.iter().map(|piece| piece.tokens).sum());
        let regions = self.inner.shared_regions().ok_or_else(|| refused("shared regions"))?;
        regions.kv_from_region(kv, pieces, region, at)?;
        self.wait();
        Ok(())
    }
}

impl<D: Device> Device for Paced<D> {
    type Tensor = D::Tensor;
    type Weight = PacedWeight<D::Weight>;
    type Kv = D::Kv;

    lagoon_backend::forward!(inner: takes, tensor, kv, kv_shape, write);

    fn info(&self) -> DeviceInfo {
        let info = self.inner.info();
        DeviceInfo { name: format!("{}, paced", info.name), ..info }
    }

    fn queued(&mut self) -> Option<&mut (impl Queued<Tensor = Self::Tensor> + ?Sized)> {
        Some(self)
    }

    fn sampling(&mut self) -> Option<&mut (impl Sampling<Tensor = Self::Tensor> + ?Sized)> {
        self.inner.sampling().is_some().then_some(self)
    }

    /// Mapping takes no modelled time.
    fn virtual_memory(&mut self) -> Option<&mut (impl VirtualMemory<Kv = Self::Kv> + ?Sized)> {
        self.inner.virtual_memory()
    }

    /// Transports use arenas beside the device; they take no modelled time.
    fn shared_arenas(&mut self) -> Option<&mut (impl SharedArenas<Kv = Self::Kv> + ?Sized)> {
        self.inner.shared_arenas()
    }

    fn shared_regions(&mut self) -> Option<&mut (impl SharedRegions<Kv = Self::Kv> + ?Sized)> {
        self.inner.shared_regions().is_some().then_some(self)
    }

    // A profile has no rate for attention over another device's memory.
    lagoon_backend::without!(peer_access);

    fn weight(&mut self, source: WeightSource) -> Result<Self::Weight, DeviceError> {
        let elements = source.rows() * source.cols;
        let bytes = source.parts.iter().map(|part| part.bytes.len()).sum();
        Ok(PacedWeight { inner: self.inner.weight(source)?, elements, bytes })
    }

    fn read(
        &mut self,
        tensor: &Self::Tensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        self.inner.read(tensor, rows, cols, out)?;
        self.wait();
        Ok(())
    }

    fn kv_write(&mut self, kv: &mut Self::Kv, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        self.queue(self.profile.copy_s(bytes.len()));
        self.inner.kv_write(kv, layer, slot0, bytes)
    }

    fn kv_read(
        &mut self,
        kv: &Self::Kv,
        layer: usize,
        slot0: u32,
        tokens: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        self.queue_copy(kv, tokens);
        self.inner.kv_read(kv, layer, slot0, tokens, out)?;
        self.wait();
        Ok(())
    }

    fn kv_read_pieces(&mut self, kv: &Self::Kv, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.queue_copy(kv, pieces.iter().map(|piece| piece.tokens).sum());
        self.inner.kv_read_pieces(kv, pieces, out)?;
        self.wait();
        Ok(())
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        self.inner.sync()?;
        self.wait();
        Ok(())
    }

    fn embed(&mut self, table: &Self::Weight, ids: &[u32], out: &mut Self::Tensor) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.embed(&table.inner, ids, out)
    }

    fn rms_norm(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        eps: f32,
        rows: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.rms_norm(x, &weight.inner, eps, rows, out)
    }

    fn layer_norm(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        eps: f32,
        rows: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.layer_norm(x, &weight.inner, eps, rows, out)
    }

    fn matmul(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        rows: usize,
        mode: Mode,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError> {
        self.queue(self.profile.matmul_s(rows, weight.elements, weight.bytes));
        self.inner.matmul(x, &weight.inner, rows, mode, out)
    }

    fn matmul_activated(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        rows: usize,
        activation: Activation,
        product: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError> {
        self.queue(self.profile.matmul_s(rows, weight.elements, weight.bytes));
        self.inner.matmul_activated(x, &weight.inner, rows, activation, product, out)
    }

    fn head_norm(
        &mut self,
        qkv: &mut Self::Tensor,
        (q, k): (&Self::Weight, &Self::Weight),
        eps: f32,
        geometry: AttentionGeometry,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.head_norm(qkv, (&q.inner, &k.inner), eps, geometry, rows)
    }

    /// The time of as many experts as the rows can have chosen, each read once.
    fn experts(
        &mut self,
        x: &Self::Tensor,
        logits: &Self::Tensor,
        experts: &Experts<'_, Self::Weight>,
        rows: usize,
        buffers: &mut ExpertBuffers<Self::Tensor>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError> {
        let Experts { count, up, up_bias, down, down_bias, choice_bias, activation, routing } = *experts;
        let choices = rows * routing.top_k;
        let active = choices.min(count);
        for weight in [up, down] {
            let [elements, bytes] = [weight.elements, weight.bytes].map(|all| all / count);
            let operations = self.profile.matmul_s(choices, elements, 0);
            self.queue(operations.max(self.profile.matmul_s(0, 0, active * bytes)));
        }
        let [up_bias, down_bias, choice_bias] = [up_bias, down_bias, choice_bias].map(|w| w.map(|w| &w.inner));
        let (up, down) = (&up.inner, &down.inner);
        let inner = Experts { count, up, up_bias, down, down_bias, choice_bias, activation, routing };
        self.inner.experts(x, logits, &inner, rows, buffers, out)
    }

    fn rope_append(
        &mut self,
        qkv: &mut Self::Tensor,
        rope: &Self::Tensor,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut Self::Kv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.appended = true;
        self.inner.rope_append(qkv, rope, geometry, slots, kv, layer)
    }

    fn head_matmul(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        heads: HeadStrides,
        rows: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError> {
        self.queue(self.profile.matmul_s(rows, weight.elements, weight.bytes));
        self.inner.head_matmul(x, &weight.inner, heads, rows, out)
    }

    fn latent_append(
        &mut self,
        qkv: &mut Self::Tensor,
        row: LatentRow<'_, Self::Tensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut Self::Kv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.appended = true;
        self.inner.latent_append(qkv, row, geometry, slots, kv, layer)
    }

    fn attention(
        &mut self,
        q: &Self::Tensor,
        batch: &AttnBatch<'_>,
        kv: &Self::Kv,
        layer: usize,
        out: &mut Partials<Self::Tensor>,
    ) -> Result<(), DeviceError> {
        let (q_dim, token_bytes) = (batch.geometry.q_dim(), self.inner.kv_shape(kv).layer_token_bytes());
        let seconds = batch.seqs.iter().map(|seq| {
            let runs = &batch.runs[seq.run0 as usize..][..seq.runs as usize];
            let keys = runs.iter().map(|run| run.len as usize).sum();
            self.profile.attention_s(seq.rows as usize, q_dim, keys, token_bytes)
        });
        let seconds: f64 = seconds.sum();
        // Once a layer: a pass may attend to several stores, and peers' rows have had their products elsewhere.
        let rows = if !self.urgent && std::mem::take(&mut self.appended) { prompt_rows(batch) } else { 0 };
        self.queue(seconds + f64::from(rows) * self.profile.prompt_row_us * 1e-6);
        self.inner.attention(q, batch, kv, layer, out)
    }

    fn merge(
        &mut self,
        acc: &mut Partials<Self::Tensor>,
        other: &Partials<Self::Tensor>,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.merge(acc, other, geometry)
    }

    fn add_bias(&mut self, x: &mut Self::Tensor, bias: &Self::Weight, rows: usize) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.add_bias(x, &bias.inner, rows)
    }

    fn activate(
        &mut self,
        product: &Self::Tensor,
        rows: usize,
        activation: Activation,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.activate(product, rows, activation, out)
    }

    fn add(&mut self, x: &mut Self::Tensor, y: &Self::Tensor, rows: usize) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.add(x, y, rows)
    }

    fn scale(&mut self, x: &mut Self::Tensor, factor: f32, rows: usize) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.scale(x, factor, rows)
    }

    fn softcap(&mut self, x: &mut Self::Tensor, cap: f32, rows: usize) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.softcap(x, cap, rows)
    }

    fn embed_add(&mut self, table: &Self::Weight, ids: &[u32], out: &mut Self::Tensor) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.embed_add(&table.inner, ids, out)
    }

    fn sink(
        &mut self,
        partials: &mut Partials<Self::Tensor>,
        sinks: &Self::Weight,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.sink(partials, &sinks.inner, geometry)
    }

    fn gather_rows(&mut self, x: &Self::Tensor, rows: &[u32], out: &mut Self::Tensor) -> Result<(), DeviceError> {
        self.queue(0.0);
        self.inner.gather_rows(x, rows, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use lagoon_backend::{AttnRows, CpuDevice};
    use lagoon_types::{DType, KvDType, KvRun, KvShape};

    fn profile() -> PaceProfile {
        PaceProfile {
            bytes_per_s: 1e9,
            flops: 1e12,
            copy_bytes_per_s: 1e9,
            launch_us: 0.0,
            weight_scale: 1000.0,
            kv_scale: 1.0,
            prompt_scale: 1.0,
            prompt_row_us: 0.0,
        }
    }

    #[test]
    fn few_rows_are_bound_by_bytes_and_many_by_operations() {
        let p = profile();
        assert_eq!(p.matmul_s(1, 1000, 4000), 4000.0 * 1000.0 / 1e9);
        assert_eq!(p.matmul_s(100_000, 1000, 4000), 2.0 * 1e5 * 1e3 * 1e3 / 1e12);
        assert_eq!(p.attention_s(1, 64, 100, 512), 100.0 * 512.0 / 1e9);
    }

    /// A row that decodes costs the same whatever prompts cost.
    #[test]
    fn prompts_have_a_scale_of_their_own() {
        let (p, scaled) = (profile(), PaceProfile { prompt_scale: 50.0, ..profile() });
        assert_eq!(scaled.attention_s(1, 64, 100_000, 8), p.attention_s(1, 64, 100_000, 8));
        let (rows, keys) = (512, 100_000);
        assert_eq!(scaled.attention_s(rows, 64, keys, 8), 4.0 * 512.0 * 64.0 * 1e5 * 50.0 / 1e12);
    }

    /// Time of the rows beside the products: once a layer, for prompts' rows only, never for peers' rows.
    #[test]
    fn a_prompts_rows_take_their_time_once_a_layer() {
        let per_row = PaceProfile { bytes_per_s: 1e15, flops: 1e18, prompt_row_us: 1000.0, ..profile() };
        let mut device = Paced::new(CpuDevice::new(), per_row);
        let g = AttentionGeometry { heads: 1, kv_heads: 1, head_dim: 8, latent: false };
        let kv = device.kv(KvShape { layers: 1, kv_heads: 1, head_dim: 8, dtype: KvDType::F32 }, 8).unwrap();
        let q = device.tensor(4, 8).unwrap();
        let mut out = Partials::new(&mut device, 4, g).unwrap();
        let runs = [KvRun { base: 0, len: 4, first_pos: 0 }];
        let mut attend = |rows: u32, appended: bool, urgent: bool| {
            let seqs = [AttnRows { row0: 0, rows, pos0: 4 - rows, run0: 0, runs: 1 }];
            let (window, alibi, softcap) = (None, None, None);
            let batch = AttnBatch { geometry: g, scale: 1.0, window, alibi, softcap, seqs: &seqs, runs: &runs };
            (device.appended, device.urgent) = (appended, urgent);
            let before = device.lateness.micros().1;
            device.attention(&q, &batch, &kv, 0, &mut out).unwrap();
            device.lateness.micros().1 - before
        };
        assert_eq!(attend(4, true, false), 4000);
        assert_eq!([attend(4, false, false), attend(4, true, true), attend(1, true, false)], [0, 0, 0]);
    }

    #[test]
    fn reads_wait_until_the_modelled_time_has_passed_and_nothing_else_does() {
        let mut device = Paced::new(CpuDevice::new(), profile());
        let bytes = Bytes::from(vec![0u8; 8 * 8 * 4]);
        let weight = device.weight(WeightSource::plain(DType::F32, 8, vec![(8, bytes)])).unwrap();
        let (x, mut y) = (device.tensor(1, 8).unwrap(), device.tensor(1, 8).unwrap());
        // 256 bytes a thousand times over at 1 GB/s: 256 microseconds each.
        (0..200).for_each(|_| device.matmul(&x, &weight, 1, Mode::Set, &mut y).unwrap());
        let queued = device.busy_until - Instant::now();
        assert!(queued > Duration::ZERO, "the operations only queued their time");
        device.read(&y, 0..1, 0..8, &mut Vec::new()).unwrap();
        assert!(Instant::now() >= device.busy_until);
        assert_eq!(device.lateness().micros().1, 200 * 256);
    }

    #[test]
    fn urgent_work_goes_before_what_is_queued_and_delays_it() {
        let mut device = Paced::new(CpuDevice::new(), PaceProfile { weight_scale: 1e12, ..profile() });
        let bytes = Bytes::from(vec![0u8; 8 * 8 * 4]);
        let weight = device.weight(WeightSource::plain(DType::F32, 8, vec![(8, bytes)])).unwrap();
        let (x, mut y) = (device.tensor(1, 8).unwrap(), device.tensor(1, 8).unwrap());
        // Three days of it.
        device.matmul(&x, &weight, 1, Mode::Set, &mut y).unwrap();
        device.read_ahead(1, &y, 0..1, 0..8).unwrap();
        let before = device.marks[1];
        device.urgent(true);
        device.queue(1e-3);
        device.read(&x, 0..1, 0..8, &mut Vec::new()).unwrap();
        device.urgent(false);
        assert_eq!(device.marks[1] - before, Duration::from_millis(1));
        assert!(device.reached(1).unwrap().is_some_and(|left| left > Duration::from_secs(60_000)));
        assert_eq!(device.reached(0).unwrap(), None);
    }

    #[test]
    fn capabilities_of_the_inner_device_are_handed_out_or_refused_by_name() {
        let mut inner = CpuDevice::with_threads(1);
        let has = (inner.queued().is_some(), inner.sampling().is_some(), inner.virtual_memory().is_some());
        assert_eq!(has, (false, false, false));
        let arenas = inner.shared_arenas().is_some();
        let mut device = Paced::new(inner, profile());
        assert!(device.queued().is_some(), "the modelled time is a queue");
        assert!(device.sampling().is_none() && device.virtual_memory().is_none() && device.shared_regions().is_none());
        assert_eq!((device.shared_arenas().is_some(), device.peer_access().is_some()), (arenas, false));
        let refused = |error: Result<(), DeviceError>| matches!(error, Err(DeviceError::Unsupported(_)));
        let mut logits = device.tensor(1, 8).unwrap();
        assert!(refused(device.sample_ahead(0, &mut logits, &[], &[])) && refused(device.sampled(0, &mut Vec::new())));
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 8, dtype: KvDType::F32 };
        let mut kv = device.kv(shape, 4).unwrap();
        let region = RegionId(1);
        assert!(refused(device.kv_to_region(&kv, &[], region, 0)));
        assert!(refused(device.kv_from_region(&mut kv, &[], region, 0)));
    }

    #[test]
    fn profiles_that_cannot_be_are_refused() {
        assert!(PaceProfile { flops: 0.0, ..profile() }.check().unwrap_err().contains("flops"));
        assert!(PaceProfile { launch_us: -1.0, ..profile() }.check().is_err());
        assert_eq!(profile().check(), Ok(()));
    }
}
