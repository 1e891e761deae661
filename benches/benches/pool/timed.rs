//! A host device that records when layers wait and when remote requests are served, and that computes decode steps
//! only.
//!
//! Prefill (steps of more than [`DECODE_ROWS_MAX`] rows) moves all its bytes and keeps all its counts but computes
//! nothing: otherwise a benchmark of decoding over 64k tokens would first spend minutes on attention. Attention takes
//! the same time for all values of KV.

use bytes::Bytes;
use lagoon_backend::cpu::{CpuKv, CpuTensor, CpuWeight};
use lagoon_backend::{
    Activation, AttnBatch, CpuDevice, Device, DeviceError, DeviceInfo, ExpertBuffers, Experts, HeadStrides, LatentRow,
    Mode, Partials, forward, without,
};
use lagoon_model::{LoadedTensor, ModelError, ModelSpec, Weights};
use lagoon_runner::Report;
use lagoon_types::{AttentionGeometry, DType};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Steps with more rows than this are prefill.
pub(crate) const DECODE_ROWS_MAX: usize = 64;

/// Waiting time of one layer in the remote micro-batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    /// From the hand-out of the queries until the device thread begins to merge.
    pub(crate) trip: Duration,
    /// The part of `trip` after local attention, when the device was idle.
    pub(crate) idle: Duration,
}

/// Stages of a layer's queries and partials, in order: the debtor's device thread hands out queries (0), its loop
/// takes (1) and sends them (2); the creditor's loop receives them (3), its device thread begins (4) and ends (5),
/// its loop takes (6) and sends the partials (7); the debtor's loop receives them (8), its device thread merges them
/// (9).
pub(crate) const STAGES: usize = 10;

#[derive(Debug, Default)]
struct Notes {
    /// Times of each stage, once a layer, in microseconds of the machine's clock.
    stages: [Vec<f64>; STAGES],
    queries_at: Option<Instant>,
    attended_at: Option<Instant>,
    remote_request_at: Option<Instant>,
    /// Whether this is a creditor, which writes tensors for remote requests only.
    serves: bool,
    waits: Vec<Wait>,
    served: Vec<Duration>,
}

/// Records of one device thread, in the order of its layers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Arc<Mutex<Notes>>);

impl Notes {
    fn mark(&mut self, stage: usize) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.stages[stage].push(now.as_secs_f64() * 1e6);
    }
}

impl Clock {
    pub(crate) fn creditor() -> Self {
        Self(Arc::new(Mutex::new(Notes { serves: true, ..Notes::default() })))
    }

    fn notes(&self) -> std::sync::MutexGuard<'_, Notes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn mark(&self, stage: usize) {
        self.notes().mark(stage);
    }

    pub(crate) fn stages(&self) -> [Vec<f64>; STAGES] {
        self.notes().stages.clone()
    }

    /// Called with every report, on the device thread.
    pub(crate) fn on_report(&self, report: &Report) {
        let mut notes = self.notes();
        match report {
            // A first chunk may have no remote KV.
            Report::Queries { frames, .. } if frames.is_empty() => notes.queries_at = None,
            Report::Queries { .. } => {
                notes.queries_at = Some(Instant::now());
                notes.mark(0);
            }
            Report::RemotePartial { .. } => {
                notes.mark(5);
                let served = notes.remote_request_at.take().map(|at| at.elapsed());
                notes.served.extend(served);
            }
            _ => {}
        }
    }

    pub(crate) fn waits(&self) -> Vec<Wait> {
        self.notes().waits.clone()
    }

    /// How long each remote request's query took, from the first write of its queries to the encoded partial.
    pub(crate) fn served(&self) -> Vec<Duration> {
        self.notes().served.clone()
    }

    pub(crate) fn served_len(&self) -> usize {
        self.notes().served.len()
    }

    /// Called when a tensor is written: at the start of a pass, for a remote request's queries, and when partials are
    /// merged.
    fn on_write(&self) {
        let mut notes = self.notes();
        let now = Instant::now();
        notes.remote_request_at = Some(now);
        if notes.serves {
            notes.mark(4);
        }
        if let Some(at) = notes.queries_at.take() {
            let since = notes.attended_at.map_or(at, |attended| attended.max(at));
            notes.mark(9);
            notes.waits.push(Wait { trip: now - at, idle: now - since });
        }
    }
}

#[derive(Debug)]
pub(crate) struct Timed {
    inner: CpuDevice,
    clock: Clock,
}

impl Timed {
    pub(crate) fn new(threads: usize, clock: Clock) -> Self {
        Self { inner: CpuDevice::with_threads(threads), clock }
    }

    /// Random weights of `config`, small enough that activations stay finite.
    pub(crate) fn weights(&mut self, config: &ModelSpec, dtype: DType) -> Result<Weights<Self>, ModelError> {
        let mut state = 7u64;
        Weights::build(self, config, dtype, &mut |_, _| {}, &mut |_, shape| {
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (f32::from(u16::try_from(state >> 48).unwrap_or(0)) / 32768.0 - 1.0) / 16.0
                })
                .collect();
            let mut bytes = Vec::new();
            dtype.encode(&values, &mut bytes);
            Ok(LoadedTensor::plain(dtype, Bytes::from(bytes)))
        })
    }
}

fn skipped(rows: usize) -> bool {
    rows > DECODE_ROWS_MAX
}

impl Device for Timed {
    type Tensor = CpuTensor;
    type Weight = CpuWeight;
    type Kv = CpuKv;

    forward!(
        inner: takes, tensor, weight, kv, kv_shape, read, kv_write, kv_read, kv_read_pieces, sync, embed, embed_add, sink, gather_rows
    );

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    // The host's capabilities without shared arenas: no transport reads this KV.
    without!(queued, sampling, virtual_memory, shared_arenas, shared_regions, peer_access);

    fn write(&mut self, tensor: &mut CpuTensor, row0: usize, data: &[f32]) -> Result<(), DeviceError> {
        self.clock.on_write();
        self.inner.write(tensor, row0, data)
    }

    fn rms_norm(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        eps: f32,
        rows: usize,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.rms_norm(x, weight, eps, rows, out) }
    }

    fn layer_norm(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        eps: f32,
        rows: usize,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.layer_norm(x, weight, eps, rows, out) }
    }

    fn matmul(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        rows: usize,
        mode: Mode,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.matmul(x, weight, rows, mode, out) }
    }

    fn matmul_activated(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        rows: usize,
        activation: Activation,
        product: &mut CpuTensor,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.matmul_activated(x, weight, rows, activation, product, out) }
    }

    fn rope_append(
        &mut self,
        qkv: &mut CpuTensor,
        rope: &CpuTensor,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut CpuKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        if skipped(slots.len()) { Ok(()) } else { self.inner.rope_append(qkv, rope, geometry, slots, kv, layer) }
    }

    fn head_matmul(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        heads: HeadStrides,
        rows: usize,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.head_matmul(x, weight, heads, rows, out) }
    }

    fn latent_append(
        &mut self,
        qkv: &mut CpuTensor,
        row: LatentRow<'_, CpuTensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut CpuKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        if skipped(slots.len()) { Ok(()) } else { self.inner.latent_append(qkv, row, geometry, slots, kv, layer) }
    }

    fn attention(
        &mut self,
        q: &CpuTensor,
        batch: &AttnBatch<'_>,
        kv: &CpuKv,
        layer: usize,
        out: &mut Partials<CpuTensor>,
    ) -> Result<(), DeviceError> {
        if skipped(batch.rows()) {
            batch.fill_counts(&mut out.count);
        } else {
            self.inner.attention(q, batch, kv, layer, out)?;
        }
        self.clock.notes().attended_at = Some(Instant::now());
        Ok(())
    }

    fn merge(
        &mut self,
        acc: &mut Partials<CpuTensor>,
        other: &Partials<CpuTensor>,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        if skipped(other.count.len()) {
            acc.count.iter_mut().zip(&other.count).for_each(|(acc, other)| *acc += other);
            return Ok(());
        }
        self.inner.merge(acc, other, geometry)
    }

    fn head_norm(
        &mut self,
        qkv: &mut CpuTensor,
        weights: (&CpuWeight, &CpuWeight),
        eps: f32,
        geometry: AttentionGeometry,
        rows: usize,
    ) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.head_norm(qkv, weights, eps, geometry, rows) }
    }

    fn experts(
        &mut self,
        x: &CpuTensor,
        logits: &CpuTensor,
        experts: &Experts<'_, CpuWeight>,
        rows: usize,
        buffers: &mut ExpertBuffers<CpuTensor>,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.experts(x, logits, experts, rows, buffers, out) }
    }

    fn activate(
        &mut self,
        product: &CpuTensor,
        rows: usize,
        activation: Activation,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.activate(product, rows, activation, out) }
    }

    fn add(&mut self, x: &mut CpuTensor, y: &CpuTensor, rows: usize) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.add(x, y, rows) }
    }

    fn scale(&mut self, x: &mut CpuTensor, factor: f32, rows: usize) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.scale(x, factor, rows) }
    }

    fn softcap(&mut self, x: &mut CpuTensor, cap: f32, rows: usize) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.softcap(x, cap, rows) }
    }

    fn add_bias(&mut self, x: &mut CpuTensor, bias: &CpuWeight, rows: usize) -> Result<(), DeviceError> {
        if skipped(rows) { Ok(()) } else { self.inner.add_bias(x, bias, rows) }
    }
}
