//! [`CudaDevice`]: the operations of [`Device`] as kernel launches.
//!
//! Two streams: the instance's own steps, and peers' queries on a stream of the highest priority
//! ([`Queued::urgent`]). Each stream runs its work in the order of the calls. The streams share KV only: a stream
//! waits for the other's copies into the store ([`CudaDevice::kv_written`]). Peers' queries read a step's own writes
//! only after the step has ended, which the caller has waited for.
//!
//! A repeatable step ([`Queued::begin_repeatable`]) is recorded, captured as a CUDA graph and replayed ([`graphs`]).

mod capabilities;
mod experts;
mod graphs;
mod latent;
#[cfg(target_os = "linux")]
mod lent;
mod linear;
mod memory;
mod plans;
#[cfg(target_os = "linux")]
mod regions;
#[cfg(target_os = "linux")]
mod shared_region;
mod span;
mod stores;
mod trial;
mod tuner;
mod weight;
mod work_stream;

pub use linear::LinearLayers;
pub use memory::{CudaKv, CudaTensor};
pub use trial::Tried;
pub use tuner::TuneFor;
pub use weight::CudaWeight;

use crate::driver::{Context, Event, Priority};
use crate::kernels::attention::{Buffers, SHARED_BYTES_LEAST, SHARED_BYTES_MAX, SHARED_BYTES_RESERVED, Tuning};
use crate::kernels::packed::Encoding;
use crate::kernels::pointwise::{self as p, per_row};
use crate::kernels::weight_ld;
use bytemuck::Pod;
use lagoon_backend::{
    Activation, AttnBatch, Device, DeviceError, DeviceInfo, ExpertBuffers, Experts, HeadStrides, KvPiece, LatentRow,
    LaunchCounters, Mode, Partials, Queued, Sampling, VirtualMemory, WeightFormat, WeightSource, without,
};
#[cfg(target_os = "linux")]
use lagoon_backend::{PeerAccess, SharedRegions};
use lagoon_types::{AttentionGeometry, KvShape};
use linear::Linear;
use memory::word;
use plans::Plans;
#[cfg(target_os = "linux")]
use regions::Regions;
use span::{Span, Staged};
use std::ops::Range;
use std::sync::Arc;
use work_stream::{Kernels, WorkStream};

/// Bytes of KV that are staged at a time.
const KV_PIECE_BYTES: usize = 1 << 20;

/// Options of a CUDA device.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Index of the device.
    pub ordinal: u32,
    /// Layers that share page groups of KV, if they divide the model's; `None` is 1.
    pub layers_per_group: Option<u32>,
    /// Launch shapes of attention; `None` takes untuned values.
    pub tuning: Option<Tuning>,
    /// Choice of the kernels for linear layers.
    pub linear: LinearLayers,
    /// Whether cuBLASLt may multiply f32 weights in TF32 (factors of 10 bits); own kernels never do.
    pub tf32: bool,
    /// Launch every step kernel by kernel, without CUDA graphs.
    pub no_graphs: bool,
    /// Launch each kernel when its predecessor has completed, without programmatic dependent launch (compute
    /// capability 9.0).
    pub no_dependent_launch: bool,
}

/// The CUDA backend: one device, driven by one thread.
#[derive(Debug)]
pub struct CudaDevice {
    context: Arc<Context>,
    options: CudaOptions,
    tuning: Tuning,
    /// The streams of own steps (0) and of peers' queries (1).
    work_streams: [WorkStream; 2],
    plans: [Plans; 2],
    linear: Linear,
    /// Events behind the last copy into a store, by stream; and whether the other stream has still to wait for it.
    copied: [Event; 2],
    unseen: [bool; 2],
    /// Event behind the own work queued at the last release of memory; and whether the other stream has still to wait
    /// for it.
    released: (Event, bool),
    /// Marks of the two micro-batches, and their reads ahead.
    marks: [Event; 2],
    /// Marks set while a step was recorded, whose events are not recorded yet.
    noted: [bool; 2],
    staged: [Staged; 2],
    #[cfg(target_os = "linux")]
    regions: Regions,
    /// Index of the stream of the next calls.
    at: usize,
}

impl CudaDevice {
    /// Whether every device of this backend computes with matrices in `format` as they are ([`Device::takes`]).
    #[must_use]
    pub fn reads(format: WeightFormat) -> bool {
        Encoding::of(format).is_some()
    }

    /// Opens a device with the kernels of this image (a fatbin, see [`crate::kernels`]).
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] without a driver, without that device or if the kernels do not load; the text
    /// says why.
    pub fn open(image: &[u8], options: CudaOptions) -> Result<Self, DeviceError> {
        let context = Context::open(options.ordinal)?;
        let kernels = Kernels::load(&context, image)?;
        let attributes = context.attributes();
        let shared_bytes_max = attributes.shared_bytes_per_block.min(SHARED_BYTES_MAX);
        if shared_bytes_max < SHARED_BYTES_LEAST {
            return Err(DeviceError::Unsupported(format!(
                "{} gives a block {shared_bytes_max} bytes of shared memory; the kernels need {SHARED_BYTES_LEAST}",
                attributes.name,
            )));
        }
        let mut tuning = options.tuning.unwrap_or_else(|| Tuning::untuned(attributes.multiprocessors));
        tuning.shared_bytes_max = tuning.shared_bytes_max.min(shared_bytes_max);
        tuning.sm_shared_bytes = attributes.shared_bytes_per_block + SHARED_BYTES_RESERVED;
        let linear = Linear::open(&context, &options.linear, options.tf32);
        let work_stream = |priority| WorkStream::new(&context, kernels.clone(), priority, !options.no_dependent_launch);
        let work_streams = [work_stream(Priority::Normal)?, work_stream(Priority::High)?];
        let copied = [Event::new(&context, false)?, Event::new(&context, false)?];
        let plans = [Plans::default(), Plans::default()];
        let marks = [Event::new(&context, false)?, Event::new(&context, false)?];
        let staged = [Staged::default(), Staged::default()];
        let (unseen, released) = ([false; 2], (Event::new(&context, false)?, false));
        Ok(Self {
            context,
            options,
            tuning,
            work_streams,
            plans,
            linear,
            copied,
            unseen,
            released,
            marks,
            noted: [false; 2],
            staged,
            #[cfg(target_os = "linux")]
            regions: Regions::default(),
            at: 0,
        })
    }

    /// The kernels of linear layers, for people.
    #[must_use]
    pub fn linear_layers(&self) -> String {
        self.linear.name()
    }

    /// Launch shapes of attention on this device.
    #[must_use]
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Whether the kernels on warpgroup products are loaded, which only compute capability 9.x has.
    #[must_use]
    pub fn has_warpgroups(&self) -> bool {
        self.work_streams[0].kernels().has_warpgroups()
    }

    /// Cuts attention in another way from now on.
    ///
    /// # Panics
    /// If they need more shared memory than the device has, or kernels that it lacks.
    pub fn set_tuning(&mut self, tuning: Tuning) {
        let attributes = self.context.attributes();
        assert!(tuning.shared_bytes_max <= attributes.shared_bytes_per_block, "tiles for another device");
        assert!(!tuning.wgmma || self.has_warpgroups(), "warpgroup products on another device");
        self.tuning = tuning;
        // Cached plans are of the old tuning.
        self.plans = [Plans::default(), Plans::default()];
    }

    /// Launches of repeatable steps, the number of graphs, and why capturing has stopped, if it has.
    #[must_use]
    pub fn graphs(&self) -> (LaunchCounters, usize, Option<&str>) {
        self.work_streams[0].graphs()
    }

    /// Records an event, with timing, behind all calls so far in the current stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn timestamp(&mut self) -> Result<Event, DeviceError> {
        self.work_stream().settle()?;
        let event = Event::new(&self.context, true)?;
        event.record(&self.work_streams[self.at].stream)?;
        Ok(event)
    }

    /// Attributes of the device.
    #[must_use]
    pub fn attributes(&self) -> &crate::driver::Attributes {
        self.context.attributes()
    }

    fn work_stream(&mut self) -> &mut WorkStream {
        &mut self.work_streams[self.at]
    }

    fn per_row<P: Pod>(&mut self, name: &'static str, rows: usize, params: P) -> Result<(), DeviceError> {
        if rows > 0 {
            self.work_stream().launch(&per_row(name, word(rows), params))?;
        }
        Ok(())
    }

    fn norm(
        &mut self,
        name: &'static str,
        x: &CudaTensor,
        weight: &CudaWeight,
        eps: f32,
        rows: usize,
        out: &CudaTensor,
    ) -> Result<(), DeviceError> {
        assert!(weight.cols == x.cols && out.cols == x.cols && rows <= x.rows.min(out.rows), "norm shapes");
        assert_eq!(weight.rows, 1, "a norm's weight is one row");
        let (weight, dtype) = weight.layout.plain();
        let params = p::NormParams {
            x: x.address(),
            delta: 0,
            weight,
            bias: 0,
            out: out.address(),
            cols: word(x.cols),
            eps,
            weight_type: u32::from(dtype.code()),
            pad: 0,
        };
        self.per_row(name, rows, params)
    }

    /// `out[i] (=|+=) table[ids[i]]`.
    fn table_rows(&mut self, table: &CudaWeight, ids: &[u32], add: bool, out: &CudaTensor) -> Result<(), DeviceError> {
        assert!(table.cols == out.cols && ids.len() <= out.rows, "embedding rows");
        assert!(ids.iter().all(|id| (*id as usize) < table.rows), "token ids beyond the vocabulary");
        if ids.is_empty() {
            return Ok(());
        }
        let segment = table.layout.only()?;
        let (at, rows) = (self.work_stream().upload(bytemuck::cast_slice(ids))?, word(ids.len()));
        if let Some(stored) = table.layout.packed(segment) {
            return Ok(self.work_stream().launch(&stored.rows(at, rows, add, out.address()))?);
        }
        let dtype = segment.encoding.dtype();
        let params = p::EmbedParams {
            table: segment.address,
            ids: at,
            out: out.address(),
            cols: word(table.cols),
            ld: word(weight_ld(table.cols, dtype.size())),
            table_type: u32::from(dtype.code()),
            add: u32::from(add),
        };
        self.per_row("embed", ids.len(), params)
    }
}

impl Device for CudaDevice {
    type Tensor = CudaTensor;
    type Weight = CudaWeight;
    type Kv = CudaKv;

    fn info(&self) -> DeviceInfo {
        let a = self.context.attributes();
        let ((major, minor), version) = (a.compute_capability, a.driver_version);
        DeviceInfo {
            backend: "cuda",
            name: format!("{} (sm_{major}{minor}, CUDA {}.{})", a.name, version / 1000, version % 1000 / 10),
            software: false,
            memory_bytes: self.context.memory().ok().map(|(free, _)| free),
            pci: Some(a.pci),
        }
    }

    fn queued(&mut self) -> Option<&mut (impl Queued<Tensor = CudaTensor> + ?Sized)> {
        Some(self)
    }

    fn sampling(&mut self) -> Option<&mut (impl Sampling<Tensor = CudaTensor> + ?Sized)> {
        Some(self)
    }

    fn virtual_memory(&mut self) -> Option<&mut (impl VirtualMemory<Kv = CudaKv> + ?Sized)> {
        Some(self)
    }

    // Device memory: the host reads it through staging buffers and shared regions.
    without!(shared_arenas);

    #[cfg(target_os = "linux")]
    fn shared_regions(&mut self) -> Option<&mut (impl SharedRegions<Kv = CudaKv> + ?Sized)> {
        self.context.attributes().shareable.then_some(self)
    }

    #[cfg(target_os = "linux")]
    fn peer_access(&mut self) -> Option<&mut (impl PeerAccess<Kv = CudaKv> + ?Sized)> {
        self.context.attributes().shareable.then_some(self)
    }

    #[cfg(not(target_os = "linux"))]
    without!(shared_regions, peer_access);

    fn tensor(&mut self, rows: usize, cols: usize) -> Result<CudaTensor, DeviceError> {
        self.work_stream().settle()?;
        Ok(CudaTensor::new(&self.context, &self.work_streams[self.at], rows, cols)?)
    }

    fn takes(&self, format: WeightFormat) -> bool {
        Self::reads(format)
    }

    fn weight(&mut self, source: WeightSource) -> Result<CudaWeight, DeviceError> {
        self.work_stream().settle()?;
        CudaWeight::new(&self.context, &mut self.work_streams[self.at], &source)
    }

    fn kv(&mut self, shape: KvShape, slots: usize) -> Result<CudaKv, DeviceError> {
        let group = self.options.layers_per_group.filter(|group| shape.layers.is_multiple_of(*group)).unwrap_or(1);
        CudaKv::new(&self.context, shape, slots, group)
    }

    fn kv_shape(&self, kv: &CudaKv) -> KvShape {
        kv.shape
    }

    fn write(&mut self, tensor: &mut CudaTensor, row0: usize, data: &[f32]) -> Result<(), DeviceError> {
        let rows = data.len() / tensor.cols;
        assert!(data.len().is_multiple_of(tensor.cols) && row0 + rows <= tensor.rows, "rows beyond the tensor");
        let to = tensor.row(row0);
        Ok(self.work_stream().copy(to, bytemuck::cast_slice(data))?)
    }

    fn read(
        &mut self,
        tensor: &CudaTensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        assert!(rows.end <= tensor.rows && cols.end <= tensor.cols, "a range beyond the tensor");
        if rows.is_empty() || cols.is_empty() {
            return Ok(());
        }
        out.reserve(rows.len() * cols.len());
        let span = Span::of(tensor, &rows, &cols);
        let mut at = span.first;
        Ok(self.work_stream().read(span.address(tensor), span.bytes(), |bytes| {
            span.take(at, bytes, out);
            at += bytes.len() / 4;
        })?)
    }

    fn kv_write(&mut self, kv: &mut CudaKv, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        let token = kv.shape.layer_token_bytes();
        assert!(bytes.len().is_multiple_of(token), "whole tokens");
        self.work_stream().settle()?;
        self.kv_ensure(kv, slot0 + word(bytes.len() / token))?;
        assert!(
            bytes.is_empty() || kv.has_own(slot0..slot0 + word(bytes.len() / token)),
            "slots that are written are held, and not shared"
        );
        kv.open(&self.work_streams[self.at], slot0..slot0 + word(bytes.len() / token))?;
        let mut slot = slot0;
        for piece in bytes.chunks((KV_PIECE_BYTES / token).max(1) * token) {
            let at = self.work_stream().upload(piece)?;
            self.kv_copy("kv_unpack", kv, layer, slot, at, piece.len() / token)?;
            slot += word(piece.len() / token);
        }
        self.kv_written()?;
        kv.used_by(&mut self.work_streams[self.at])
    }

    fn kv_read(
        &mut self,
        kv: &CudaKv,
        layer: usize,
        slot0: u32,
        tokens: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        let token = kv.shape.layer_token_bytes();
        assert!((slot0 + tokens) as usize <= kv.slots, "tokens beyond the store");
        self.work_stream().settle()?;
        self.kv_used()?;
        // Slots that were never used have no memory; they read as zero.
        let there = kv.mapped().clamp(slot0, slot0 + tokens) - slot0;
        let (mut slot, end) = (slot0, slot0 + there);
        while slot < end {
            let count = (end - slot).min(word(KV_PIECE_BYTES / token).max(1));
            let bytes = count as usize * token;
            let at = self.work_stream().room(bytes)?;
            self.kv_copy("kv_pack", kv, layer, slot, at, count as usize)?;
            self.work_stream().read(at, bytes, |piece| out.extend_from_slice(piece))?;
            slot += count;
        }
        out.resize(out.len() + (tokens - there) as usize * token, 0);
        Ok(())
    }

    fn kv_read_pieces(&mut self, kv: &CudaKv, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        pieces.iter().try_for_each(|p| self.kv_read(kv, p.layer as usize, p.slot0, p.tokens, out))
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        Ok(self.work_streams.iter_mut().try_for_each(WorkStream::synchronize)?)
    }

    fn embed(&mut self, table: &CudaWeight, ids: &[u32], out: &mut CudaTensor) -> Result<(), DeviceError> {
        self.table_rows(table, ids, false, out)
    }

    fn embed_add(&mut self, table: &CudaWeight, ids: &[u32], out: &mut CudaTensor) -> Result<(), DeviceError> {
        self.table_rows(table, ids, true, out)
    }
    fn rms_norm(
        &mut self,
        x: &CudaTensor,
        weight: &CudaWeight,
        eps: f32,
        rows: usize,
        out: &mut CudaTensor,
    ) -> Result<(), DeviceError> {
        self.norm("rms_norm", x, weight, eps, rows, out)
    }

    fn layer_norm(
        &mut self,
        x: &CudaTensor,
        weight: &CudaWeight,
        eps: f32,
        rows: usize,
        out: &mut CudaTensor,
    ) -> Result<(), DeviceError> {
        self.norm("layer_norm", x, weight, eps, rows, out)
    }

    fn matmul(
        &mut self,
        x: &CudaTensor,
        weight: &CudaWeight,
        rows: usize,
        mode: Mode,
        out: &mut CudaTensor,
    ) -> Result<(), DeviceError> {
        assert!(weight.rows == out.cols, "product shapes");
        self.multiply(x, weight, rows, (mode == Mode::Add, None), out)
    }

    fn matmul_activated(
        &mut self,
        x: &CudaTensor,
        weight: &CudaWeight,
        rows: usize,
        activation: Activation,
        product: &mut CudaTensor,
        out: &mut CudaTensor,
    ) -> Result<(), DeviceError> {
        self.up_projection(x, weight, rows, activation, product, out)
    }

    fn activate(
        &mut self,
        product: &CudaTensor,
        rows: usize,
        activation: Activation,
        out: &mut CudaTensor,
    ) -> Result<(), DeviceError> {
        self.activation(product, rows, activation, out)
    }

    fn add(&mut self, x: &mut CudaTensor, y: &CudaTensor, rows: usize) -> Result<(), DeviceError> {
        assert!(x.cols == y.cols && rows <= x.rows.min(y.rows), "shapes of a sum");
        if rows == 0 {
            return Ok(());
        }
        let count = (rows * x.cols) as u64;
        Ok(self.work_stream().launch(&p::add(p::AddParams { x: x.address(), y: y.address(), count }))?)
    }

    fn scale(&mut self, x: &mut CudaTensor, factor: f32, rows: usize) -> Result<(), DeviceError> {
        assert!(rows <= x.rows, "rows beyond the tensor");
        if rows == 0 {
            return Ok(());
        }
        let count = (rows * x.cols) as u64;
        Ok(self.work_stream().launch(&p::scale(p::ScaleParams { x: x.address(), count, factor, pad: 0 }))?)
    }

    fn softcap(&mut self, x: &mut CudaTensor, cap: f32, rows: usize) -> Result<(), DeviceError> {
        assert!(rows <= x.rows, "rows beyond the tensor");
        if rows == 0 {
            return Ok(());
        }
        let count = (rows * x.cols) as u64;
        Ok(self.work_stream().launch(&p::softcap(p::ScaleParams { x: x.address(), count, factor: cap, pad: 0 }))?)
    }

    fn head_norm(
        &mut self,
        qkv: &mut CudaTensor,
        (q, k): (&CudaWeight, &CudaWeight),
        eps: f32,
        geometry: AttentionGeometry,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let AttentionGeometry { heads, kv_heads, head_dim, .. } = geometry;
        let dim = head_dim as usize;
        assert_eq!((q.rows, q.cols, k.rows, k.cols), (1, dim, 1, dim), "weights of a head's norm");
        assert!(qkv.cols == geometry.qkv_dim() && rows <= qkv.rows, "projection shapes");
        if rows == 0 {
            return Ok(());
        }
        let ((q_weight, q_type), (k_weight, k_type)) = (q.layout.plain(), k.layout.plain());
        let params = p::HeadNormParams {
            qkv: qkv.address(),
            q_weight,
            k_weight,
            heads,
            kv_heads,
            head_dim,
            rows: word(rows),
            q_type: u32::from(q_type.code()),
            k_type: u32::from(k_type.code()),
            eps,
            pad: 0,
        };
        Ok(self.work_stream().launch(&p::head_norm(params))?)
    }

    fn experts(
        &mut self,
        x: &CudaTensor,
        logits: &CudaTensor,
        experts: &Experts<'_, CudaWeight>,
        rows: usize,
        buffers: &mut ExpertBuffers<CudaTensor>,
        out: &mut CudaTensor,
    ) -> Result<(), DeviceError> {
        self.mixture(x, logits, experts, rows, buffers, out)
    }

    fn sink(
        &mut self,
        partials: &mut Partials<CudaTensor>,
        sinks: &CudaWeight,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        let rows = partials.count.len();
        assert_eq!((sinks.rows, sinks.cols), (1, geometry.heads as usize), "a sink for each head");
        assert!(partials.out.cols == geometry.q_dim() && rows <= partials.out.rows, "partial shapes");
        if rows == 0 {
            return Ok(());
        }
        let count = if partials.count.contains(&0) {
            self.work_stream().upload_again(bytemuck::cast_slice(&partials.count))?
        } else {
            0
        };
        let (sinks, sink_type) = sinks.layout.plain();
        let params = p::SinkParams {
            out: partials.out.address(),
            lse: partials.lse.address(),
            sinks,
            count,
            heads: geometry.heads,
            head_dim: word(geometry.query_dim()),
            rows: word(rows),
            sink_type: u32::from(sink_type.code()),
        };
        Ok(self.work_stream().launch(&p::sink(params))?)
    }

    fn rope_append(
        &mut self,
        qkv: &mut CudaTensor,
        rope: &CudaTensor,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut CudaKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        assert!(qkv.cols == geometry.qkv_dim() && rope.cols == geometry.head_dim as usize, "projection shapes");
        assert!((kv.shape.kv_heads, kv.shape.head_dim) == (geometry.kv_heads, geometry.head_dim), "store shape");
        assert!(slots.len() <= qkv.rows.min(rope.rows), "projection rows");
        let params = p::RopeParams {
            qkv: qkv.address(),
            rope: rope.address(),
            slots: self.slots_of_rows(slots, kv, layer)?,
            kv: kv.view(layer),
            heads: geometry.heads,
            kv_heads: geometry.kv_heads,
            head_dim: geometry.head_dim,
            kv_type: u32::from(kv.shape.dtype.code()),
        };
        self.per_row("rope_append", slots.len(), params)?;
        kv.used_by(&mut self.work_streams[self.at])
    }

    fn head_matmul(
        &mut self,
        x: &CudaTensor,
        weight: &CudaWeight,
        heads: HeadStrides,
        rows: usize,
        out: &mut CudaTensor,
    ) -> Result<(), DeviceError> {
        self.product_by_head(x, weight, heads, rows, out)
    }

    fn latent_append(
        &mut self,
        qkv: &mut CudaTensor,
        row: LatentRow<'_, CudaTensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut CudaKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        self.append_latents(qkv, row, geometry, slots, (kv, layer))
    }

    fn attention(
        &mut self,
        q: &CudaTensor,
        batch: &AttnBatch<'_>,
        kv: &CudaKv,
        layer: usize,
        out: &mut Partials<CudaTensor>,
    ) -> Result<(), DeviceError> {
        let g = batch.geometry;
        assert!((kv.shape.kv_heads, kv.shape.head_dim) == (g.kv_heads, g.head_dim), "store shape");
        assert!(q.cols >= g.q_dim() && out.out.cols == g.q_dim(), "query shapes");
        assert!(batch.rows() <= q.rows.min(out.out.rows).min(out.lse.rows), "query rows");
        assert!(batch.runs.iter().all(|run| kv.has(run.base..run.base + run.len)), "runs of slots that were written");
        self.kv_used()?;
        let store = kv.store();
        let (work_stream, plans) = (&mut self.work_streams[self.at], &mut self.plans[self.at]);
        let kept = plans.get(&self.context, work_stream, batch, store, &self.tuning)?;
        out.count.clone_from(&kept.count);
        let pieces = kept.plan.piece_rows as usize;
        let piece_out = work_stream.scratch(pieces * (g.q_dim() + g.heads as usize) * 4)?;
        let buffers = Buffers {
            plan: kept.address(),
            q: q.address(),
            q_stride: word(q.cols),
            slopes: kept.slopes,
            out: out.out.address(),
            lse: out.lse.address(),
            piece_out,
            piece_lse: piece_out + (pieces * g.q_dim() * 4) as u64,
        };
        for launch in kept.plan.launches(&buffers, kv.view(layer)) {
            work_stream.launch(&launch)?;
        }
        if kept.plan.has_boxes()
            && let Some(launch) = kept.plan.boxes(&buffers, kv.view(layer), &kv.maps()?[layer])
        {
            work_stream.launch(&launch)?;
        }
        if let Some(merge) = kept.plan.merge(&buffers) {
            work_stream.launch(&merge)?;
        }
        kv.used_by(work_stream)
    }

    fn merge(
        &mut self,
        acc: &mut Partials<CudaTensor>,
        other: &Partials<CudaTensor>,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        let rows = other.count.len();
        assert_eq!(acc.count.len(), rows, "partials of the same queries");
        assert!(acc.out.cols == geometry.q_dim() && other.out.cols == geometry.q_dim(), "partial shapes");
        let mut counts = acc.count.clone();
        counts.extend_from_slice(&other.count);
        let at = self.work_stream().upload(bytemuck::cast_slice(&counts))?;
        let params = p::MergeParams {
            acc_out: acc.out.address(),
            acc_lse: acc.lse.address(),
            out: other.out.address(),
            lse: other.lse.address(),
            acc_count: at,
            count: at + 4 * rows as u64,
            heads: geometry.heads,
            head_dim: word(geometry.query_dim()),
        };
        self.per_row("merge", rows, params)?;
        acc.count.iter_mut().zip(&other.count).for_each(|(ours, theirs)| *ours += theirs);
        Ok(())
    }

    fn add_bias(&mut self, x: &mut CudaTensor, bias: &CudaWeight, rows: usize) -> Result<(), DeviceError> {
        assert!((bias.rows, bias.cols) == (1, x.cols) && rows <= x.rows, "shapes of a bias");
        let (bias, bias_type) = bias.layout.plain();
        let params = p::BiasParams { x: x.address(), bias, cols: word(x.cols), bias_type: u32::from(bias_type.code()) };
        self.per_row("add_bias", rows, params)
    }

    fn gather_rows(&mut self, x: &CudaTensor, rows: &[u32], out: &mut CudaTensor) -> Result<(), DeviceError> {
        assert!(x.cols == out.cols && rows.len() <= out.rows, "gathered shapes");
        assert!(rows.iter().all(|row| (*row as usize) < x.rows), "rows beyond the tensor");
        let params = p::GatherParams {
            x: x.address(),
            rows: self.work_stream().upload(bytemuck::cast_slice(rows))?,
            out: out.address(),
            cols: word(x.cols),
            pad: 0,
        };
        self.per_row("gather_rows", rows.len(), params)
    }
}
