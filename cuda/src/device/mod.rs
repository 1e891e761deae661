//! [`CudaDevice`]: the operations of [`Device`] as launches.
//!
//! Two lanes: the instance's own steps, and peers' queries on a stream of their own with the highest priority
//! ([`Device::urgent`]). Each lane's work happens in the order of the calls. Between them only KV is shared: a lane
//! waits for what the other has copied into the store ([`CudaDevice::kv_written`]); a step's own writes are read by
//! guests only after the step has ended, which its caller has waited for.

mod lane;
mod memory;
mod plans;

pub use memory::{CudaKv, CudaTensor, CudaWeight};

use crate::driver::{Context, CudaError, Event, Priority};
use crate::kernels::attention::{Buffers, Tuning};
use crate::kernels::linear::{Launches, Product, workspace_bytes};
use crate::kernels::pointwise::{self as p, per_row};
use crate::kernels::{Launch, pointwise};
use crate::virtual_kv::{VirtualKv, VirtualKvError};
use bytemuck::Pod;
use lagoon_backend::{AttnBatch, Device, DeviceError, DeviceInfo, Mode, Partials, WeightSource};
use lagoon_kv::vmm::{VmmConfig, VmmLayout};
use lagoon_types::{AttentionGeometry, KvShape};
use lane::{Kernels, Lane};
use memory::word;
use plans::Plans;
use std::ops::Range;
use std::sync::Arc;

/// Tokens of KV that are staged at once are as many as fit so many bytes.
const KV_PIECE_BYTES: usize = 1 << 20;

/// What may be chosen.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaOptions {
    /// The device's number.
    pub ordinal: u32,
    /// Layers that share page groups of KV, if they divide the model's; 1 where nothing is said.
    pub layers_per_group: Option<u32>,
    /// How kernels are cut; untuned values where nothing is said.
    pub tuning: Option<Tuning>,
}

/// The CUDA backend: one device, used by one thread.
#[derive(Debug)]
pub struct CudaDevice {
    context: Arc<Context>,
    options: CudaOptions,
    tuning: Tuning,
    /// Own steps, and peers' queries.
    lanes: [Lane; 2],
    plans: [Plans; 2],
    /// Behind the last copy into a store, by lane; and whether the other lane has not waited for it yet.
    copied: [Event; 2],
    unseen: [bool; 2],
    /// The lane of the next calls.
    at: usize,
}

impl CudaDevice {
    /// Opens a device with the kernels of this image (a fatbin, see [`crate::kernels`]).
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] without a driver, without that device or where the kernels do not load; the text
    /// says why.
    pub fn open(image: &[u8], options: CudaOptions) -> Result<Self, DeviceError> {
        let context = Context::open(options.ordinal)?;
        let kernels = Kernels::load(&context, image)?;
        let tuning = options.tuning.unwrap_or_else(|| Tuning::untuned(context.attributes().multiprocessors));
        let lanes =
            [Lane::new(&context, kernels.clone(), Priority::Normal)?, Lane::new(&context, kernels, Priority::High)?];
        let copied = [Event::new(&context, false)?, Event::new(&context, false)?];
        let plans = [Plans::default(), Plans::default()];
        Ok(Self { context, options, tuning, lanes, plans, copied, unseen: [false; 2], at: 0 })
    }

    /// KV memory on this device whose rows the caller maps and unmaps: requests, shared prefixes, guests.
    ///
    /// # Errors
    /// As [`VirtualKv::new`].
    pub fn virtual_kv(&self, layout: VmmLayout, config: VmmConfig) -> Result<Arc<VirtualKv>, VirtualKvError> {
        VirtualKv::new(&self.context, layout, config).map(Arc::new)
    }

    /// A store over such memory, for operations. Only slots that have memory may be used, and fresh memory is not zero.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for memory of another shape.
    pub fn kv_over(&self, shape: KvShape, memory: Arc<VirtualKv>) -> Result<CudaKv, DeviceError> {
        CudaKv::over(shape, memory)
    }

    /// What multiplies in linear layers, for people.
    #[must_use]
    pub fn linear_layers(&self) -> &'static str {
        "own kernels"
    }

    fn lane(&mut self) -> &mut Lane {
        &mut self.lanes[self.at]
    }

    fn per_row<P: Pod>(&mut self, name: &'static str, rows: usize, params: P) -> Result<(), DeviceError> {
        if rows > 0 {
            self.lane().launch(&per_row(name, word(rows), params))?;
        }
        Ok(())
    }

    /// Makes memory lie behind the slots before `end`, for the current lane's next operation.
    fn kv_ensure(&mut self, kv: &mut CudaKv, end: u32) -> Result<(), DeviceError> {
        // The other lane may have zeroed or written what this one now uses.
        self.kv_used()?;
        if kv.ensure(&self.lanes[self.at], end)? {
            self.kv_written()?;
        }
        Ok(())
    }

    /// To be called where the current lane has copied into a store.
    fn kv_written(&mut self) -> Result<(), DeviceError> {
        self.copied[self.at].record(&self.lanes[self.at].stream)?;
        self.unseen[self.at] = true;
        Ok(())
    }

    /// To be called before the current lane uses a store: behind the other lane's copies.
    fn kv_used(&mut self) -> Result<(), DeviceError> {
        let other = 1 - self.at;
        if std::mem::take(&mut self.unseen[other]) {
            self.lanes[self.at].stream.wait(&self.copied[other])?;
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
        let params = p::NormParams {
            x: x.address(),
            delta: 0,
            weight: weight.buffer.address(),
            bias: 0,
            out: out.address(),
            cols: word(x.cols),
            eps,
            weight_type: u32::from(weight.dtype.code()),
            pad: 0,
        };
        self.per_row(name, rows, params)
    }

    fn kv_copy(
        &mut self,
        name: &'static str,
        kv: &CudaKv,
        layer: usize,
        slot0: u32,
        at: u64,
        tokens: usize,
    ) -> Result<(), DeviceError> {
        let element_bytes = word(kv.shape.dtype.size());
        let params = p::KvCopyParams {
            kv: kv.view(layer),
            packed: at,
            slot0,
            kv_heads: kv.shape.kv_heads,
            head_bytes: kv.shape.head_dim * element_bytes,
            element_bytes,
        };
        self.per_row(name, tokens, params)
    }

    /// One product, by this project's own kernels.
    fn product(&mut self, product: &Product) -> Result<(), CudaError> {
        let sms = self.tuning.sms;
        let bytes = workspace_bytes(product.rows, product.n, product.k, product.dtype, sms);
        let precision = self.tuning.precision;
        let lane = self.lane();
        let workspace = lane.scratch(usize::try_from(bytes).expect("scratch fits"))?;
        match product.launches(workspace, precision, sms) {
            Launches::Stream(launch) => lane.launch(&launch),
            Launches::Tiles { split, gemm, reduce } => {
                split.iter().try_for_each(|launch| lane.launch(launch))?;
                lane.launch(&gemm)?;
                reduce.iter().try_for_each(|launch| lane.launch(launch))
            }
        }
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
        }
    }

    fn urgent(&mut self, urgent: bool) {
        self.at = usize::from(urgent);
    }

    fn tensor(&mut self, rows: usize, cols: usize) -> Result<CudaTensor, DeviceError> {
        Ok(CudaTensor::new(&self.context, &self.lanes[self.at], rows, cols)?)
    }

    fn weight(&mut self, source: WeightSource) -> Result<CudaWeight, DeviceError> {
        Ok(CudaWeight::new(&self.context, &mut self.lanes[self.at], &source)?)
    }

    fn kv(&mut self, shape: KvShape, slots: usize) -> Result<CudaKv, DeviceError> {
        let group = self.options.layers_per_group.filter(|group| shape.layers.is_multiple_of(*group)).unwrap_or(1);
        CudaKv::new(&self.context, shape, slots, group)
    }

    fn write(&mut self, tensor: &mut CudaTensor, row0: usize, data: &[f32]) -> Result<(), DeviceError> {
        let rows = data.len() / tensor.cols;
        assert!(data.len().is_multiple_of(tensor.cols) && row0 + rows <= tensor.rows, "rows beyond the tensor");
        let to = tensor.row(row0);
        Ok(self.lane().copy(to, bytemuck::cast_slice(data))?)
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
        // From the first wanted element to the last: rows are read whole but for the two ends.
        let first = rows.start * tensor.cols + cols.start;
        let last = (rows.end - 1) * tensor.cols + cols.end;
        let from = tensor.buffer.range(first * 4, (last - first) * 4);
        let (mut at, stride) = (first, tensor.cols);
        Ok(self.lane().read(from, (last - first) * 4, |bytes| {
            for float in bytes.chunks_exact(4) {
                if cols.contains(&(at % stride)) {
                    out.push(f32::from_le_bytes([float[0], float[1], float[2], float[3]]));
                }
                at += 1;
            }
        })?)
    }

    fn kv_write(&mut self, kv: &mut CudaKv, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        let token = kv.shape.layer_token_bytes();
        assert!(bytes.len().is_multiple_of(token), "whole tokens");
        self.kv_ensure(kv, slot0 + word(bytes.len() / token))?;
        let mut slot = slot0;
        for piece in bytes.chunks((KV_PIECE_BYTES / token).max(1) * token) {
            let at = self.lane().upload(piece)?;
            self.kv_copy("kv_unpack", kv, layer, slot, at, piece.len() / token)?;
            slot += word(piece.len() / token);
        }
        self.kv_written()?;
        kv.used_by(&self.lanes[self.at])
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
        self.kv_used()?;
        // Slots that were never used have no memory, and are zero.
        let there = kv.mapped().clamp(slot0, slot0 + tokens) - slot0;
        let (mut slot, end) = (slot0, slot0 + there);
        while slot < end {
            let count = (end - slot).min(word(KV_PIECE_BYTES / token).max(1));
            let bytes = count as usize * token;
            let at = self.lane().room(bytes)?;
            self.kv_copy("kv_pack", kv, layer, slot, at, count as usize)?;
            self.lane().read(at, bytes, |piece| out.extend_from_slice(piece))?;
            slot += count;
        }
        out.resize(out.len() + (tokens - there) as usize * token, 0);
        Ok(())
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        Ok(self.lanes.iter().try_for_each(|lane| lane.stream.synchronize())?)
    }

    fn embed(&mut self, table: &CudaWeight, ids: &[u32], out: &mut CudaTensor) -> Result<(), DeviceError> {
        assert!(table.cols == out.cols && ids.len() <= out.rows, "embedding rows");
        assert!(ids.iter().all(|id| (*id as usize) < table.rows), "token ids beyond the vocabulary");
        let params = p::EmbedParams {
            table: table.buffer.address(),
            ids: self.lane().upload(bytemuck::cast_slice(ids))?,
            out: out.address(),
            cols: word(table.cols),
            ld: table.ld(),
            table_type: u32::from(table.dtype.code()),
            add: 0,
        };
        self.per_row("embed", ids.len(), params)
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
        assert!(weight.cols == x.cols && weight.rows == out.cols && rows <= x.rows.min(out.rows), "product shapes");
        if rows == 0 {
            return Ok(());
        }
        Ok(self.product(&Product {
            x: x.address(),
            x_stride: word(x.cols),
            w: weight.buffer.address(),
            dtype: weight.dtype,
            bias: 0,
            out: out.address(),
            out_stride: word(out.cols),
            rows: word(rows),
            n: word(weight.rows),
            k: word(weight.cols),
            add: mode == Mode::Add,
        })?)
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
        let end = slots.iter().filter(|slot| **slot != u32::MAX).max().map_or(0, |slot| slot + 1);
        assert!(end as usize <= kv.slots, "slots beyond the store");
        self.kv_ensure(kv, end)?;
        let params = p::RopeParams {
            qkv: qkv.address(),
            rope: rope.address(),
            slots: self.lane().upload(bytemuck::cast_slice(slots))?,
            kv: kv.view(layer),
            heads: geometry.heads,
            kv_heads: geometry.kv_heads,
            head_dim: geometry.head_dim,
            kv_type: u32::from(kv.shape.dtype.code()),
        };
        self.per_row("rope_append", slots.len(), params)?;
        kv.used_by(&self.lanes[self.at])
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
        assert!(batch.runs.iter().all(|run| run.base + run.len <= kv.mapped()), "runs of slots that were written");
        self.kv_used()?;
        let store = (kv.shape.dtype, kv.is_aligned());
        let (lane, plans) = (&mut self.lanes[self.at], &mut self.plans[self.at]);
        let kept = plans.get(&self.context, lane, batch, store, &self.tuning)?;
        out.count.clone_from(&kept.count);
        let pieces = kept.plan.piece_rows as usize;
        let piece_out = lane.scratch(pieces * (g.q_dim() + g.heads as usize) * 4)?;
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
            lane.launch(&launch)?;
        }
        if let Some(merge) = kept.plan.merge(&buffers) {
            lane.launch(&merge)?;
        }
        kv.used_by(lane)
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
        let at = self.lane().upload(bytemuck::cast_slice(&counts))?;
        let params = p::MergeParams {
            acc_out: acc.out.address(),
            acc_lse: acc.lse.address(),
            out: other.out.address(),
            lse: other.lse.address(),
            acc_count: at,
            count: at + 4 * rows as u64,
            heads: geometry.heads,
            head_dim: geometry.head_dim,
        };
        self.per_row("merge", rows, params)?;
        acc.count.iter_mut().zip(&other.count).for_each(|(ours, theirs)| *ours += theirs);
        Ok(())
    }

    fn silu_mul(&mut self, x: &CudaTensor, rows: usize, out: &mut CudaTensor) -> Result<(), DeviceError> {
        assert!(x.cols == 2 * out.cols && rows <= x.rows.min(out.rows), "gate and up shapes");
        let params = p::GateParams { x: x.address(), out: out.address(), n: word(out.cols), pad: 0 };
        self.launch_rows(rows, &pointwise::silu_mul(word(rows), params))
    }

    fn gelu(&mut self, x: &CudaTensor, rows: usize, out: &mut CudaTensor) -> Result<(), DeviceError> {
        assert!(x.cols == out.cols && rows <= x.rows.min(out.rows), "shapes of an activation");
        let count = (rows * x.cols) as u64;
        let params = p::GeluParams { x: x.address(), out: out.address(), count, tanh: 0, pad: 0 };
        self.launch_rows(rows, &pointwise::gelu(params))
    }

    fn gather_rows(&mut self, x: &CudaTensor, rows: &[u32], out: &mut CudaTensor) -> Result<(), DeviceError> {
        assert!(x.cols == out.cols && rows.len() <= out.rows, "gathered shapes");
        assert!(rows.iter().all(|row| (*row as usize) < x.rows), "rows beyond the tensor");
        let params = p::GatherParams {
            x: x.address(),
            rows: self.lane().upload(bytemuck::cast_slice(rows))?,
            out: out.address(),
            cols: word(x.cols),
            pad: 0,
        };
        self.per_row("gather_rows", rows.len(), params)
    }
}

impl CudaDevice {
    fn launch_rows<P: Pod>(&mut self, rows: usize, launch: &Launch<P>) -> Result<(), DeviceError> {
        if rows > 0 {
            self.lane().launch(launch)?;
        }
        Ok(())
    }
}
