//! [`WgpuDevice`]: the operations of [`Device`] as dispatches.

use crate::activation;
use crate::adapter::{self, AdapterChoice, Options};
use crate::experts::{self, Routes};
use crate::gpu::{Buf, Gpu};
use crate::kernel::{Encoding, HeadClass, Kernel, MATVEC_ROWS_MAX, MatvecRows, Tile};
use crate::latent;
use crate::memory::{WgpuKv, WgpuTensor, quads, word};
use crate::params;
use crate::plan::{self, Bounds, Plan};
use crate::weight::WgpuWeight;
use lagoon_backend::{
    Activation, AttnBatch, AttnRows, Device, DeviceError, DeviceInfo, ExpertBuffers, Experts, HeadStrides, KvPiece,
    LatentRow, Mode, Partials, WeightFormat, WeightSource, without,
};
use lagoon_types::{Alibi, AttentionGeometry, KvRun, KvShape};
use std::ops::Range;

/// Scratch for parts of split attention tiles, in bytes; a call that needs more runs in rounds.
const SCRATCH_BYTES_MAX: u64 = 64 << 20;
/// Attention plans kept: the layers of a step repeat a few (each micro-batch's, and those of remote requests).
const PLANS_KEPT: usize = 16;

/// The WebGPU backend: one adapter, driven by one thread.
#[derive(Debug)]
pub struct WgpuDevice {
    gpu: Gpu,
    /// Plans on the device, the latest last.
    plans: Vec<PlanOnDevice>,
    /// Parts of split attention tiles.
    scratch: Buf,
    scratch_bytes: u64,
    routes: Routes,
}

/// A plan and the key of its call.
#[derive(Debug)]
struct PlanOnDevice {
    geometry: AttentionGeometry,
    window: Option<u32>,
    alibi: Option<Alibi>,
    seqs: Vec<AttnRows>,
    runs: Vec<KvRun>,
    bounds: Bounds,
    plan: Plan,
    count: Vec<u32>,
    words: Buf,
    words_capacity: usize,
}

impl PlanOnDevice {
    fn fits(&self, batch: &AttnBatch<'_>, bounds: Bounds) -> bool {
        self.geometry == batch.geometry
            && self.window == batch.window
            && self.alibi == batch.alibi
            && self.bounds == bounds
            && self.seqs == batch.seqs
            && self.runs == batch.runs
    }
}

impl WgpuDevice {
    /// Whether every device of this backend computes with matrices in `format` as they are ([`Device::takes`]).
    #[must_use]
    pub fn reads(format: WeightFormat) -> bool {
        Encoding::new(format).is_some()
    }

    /// Opens an adapter.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if there is no such adapter (the text lists those present) or it is too small.
    pub fn open(choice: &AdapterChoice) -> Result<Self, DeviceError> {
        Self::open_with(choice, Options::default())
    }

    /// As [`WgpuDevice::open`], with restrictions.
    ///
    /// # Errors
    /// As [`WgpuDevice::open`].
    pub fn open_with(choice: &AdapterChoice, options: Options) -> Result<Self, DeviceError> {
        let mut gpu = Gpu::new(adapter::open(choice)?, options)?;
        let scratch = gpu.buffer("attention parts", 16)?;
        let routes = Routes::new(&mut gpu)?;
        Ok(Self { gpu, plans: Vec::new(), scratch, scratch_bytes: 16, routes })
    }

    /// The index in `plans` of the plan for this call, made and uploaded unless a kept one fits.
    fn plan(&mut self, batch: &AttnBatch<'_>, bounds: Bounds) -> Result<usize, DeviceError> {
        if let Some(at) = self.plans.iter().position(|kept| kept.fits(batch, bounds)) {
            let kept = self.plans.remove(at);
            self.plans.push(kept);
            return Ok(self.plans.len() - 1);
        }
        let plan = plan::plan(batch, bounds);
        let reused = if self.plans.len() < PLANS_KEPT { None } else { Some(self.plans.remove(0)) };
        let (words, words_capacity) = match reused {
            Some(old) if old.words_capacity >= plan.words.len() => (old.words, old.words_capacity),
            _ => {
                let capacity = plan.words.len().next_power_of_two().max(4096);
                (self.gpu.buffer("an attention plan", capacity as u64 * 4)?, capacity)
            }
        };
        self.gpu.write(&words, 0, bytemuck::cast_slice(&plan.words))?;
        let mut count = Vec::new();
        batch.fill_counts(&mut count);
        self.plans.push(PlanOnDevice {
            geometry: batch.geometry,
            window: batch.window,
            alibi: batch.alibi,
            seqs: batch.seqs.to_vec(),
            runs: batch.runs.to_vec(),
            bounds,
            plan,
            count,
            words,
            words_capacity,
        });
        Ok(self.plans.len() - 1)
    }

    fn grow_scratch(&mut self, bytes: u64) -> Result<(), DeviceError> {
        if bytes > self.scratch_bytes {
            let rounded = bytes.next_power_of_two().min(self.gpu.binding_bytes_max()).max(bytes);
            self.scratch = self.gpu.buffer("attention parts", rounded)?;
            self.scratch_bytes = rounded;
        }
        Ok(())
    }

    /// A norm of the first `rows` rows, by the kernel for its weight's encoding.
    fn norm(
        &mut self,
        kernel: impl FnOnce(Encoding) -> Kernel,
        x: &WgpuTensor,
        weight: &WgpuWeight,
        eps: f32,
        rows: usize,
        out: &WgpuTensor,
    ) -> Result<(), DeviceError> {
        assert!(weight.cols == x.cols && out.cols == x.cols && rows <= x.rows.min(out.rows), "norm shapes");
        self.gpu.begin()?;
        let weight = weight.vector();
        let params = params::Norm { rows: word(rows), cols: word(x.cols), quads: word(quads(x.cols)), eps };
        let buffers = [Some(&x.buf), Some(&weight.buf), Some(&out.buf)];
        self.gpu.dispatch(kernel(weight.encoding), &params, &buffers, params.rows, 1)
    }

    /// Rows of a table, in place of those of `out` or added to them.
    fn embed_rows(&mut self, table: &WgpuWeight, ids: &[u32], mode: Mode, out: &WgpuTensor) -> Result<(), DeviceError> {
        assert!(table.cols == out.cols && ids.len() <= out.rows, "embedding rows");
        if ids.is_empty() {
            return Ok(());
        }
        assert!(ids.iter().all(|id| (*id as usize) < table.rows), "token ids beyond the vocabulary");
        self.gpu.begin()?;
        let at = self.gpu.upload_words(ids)?;
        for shard in &table.shards {
            let params = params::Embed {
                ids: at,
                rows: word(ids.len()),
                shard_row0: word(shard.row0),
                shard_rows: word(shard.rows),
                quads: word(quads(table.cols)),
                add: u32::from(mode == Mode::Add),
                ..Default::default()
            };
            let groups = (params.rows * params.quads).div_ceil(64);
            let kernel = Kernel::Embed(shard.encoding);
            self.gpu.dispatch(kernel, &params, &[None, Some(&shard.buf), Some(&out.buf)], groups, 1)?;
        }
        Ok(())
    }
}

/// The attention kernels for heads of this geometry.
fn class_of(geometry: AttentionGeometry) -> Result<HeadClass, DeviceError> {
    latent::check(geometry)?;
    let dim = geometry.query_dim();
    HeadClass::new(word(quads(dim))).ok_or_else(|| {
        let most = HeadClass::D576.quads() * 4;
        DeviceError::Unsupported(format!("attention of heads of {dim} elements: there may be {most} at most"))
    })
}

impl Device for WgpuDevice {
    type Tensor = WgpuTensor;
    type Weight = WgpuWeight;
    type Kv = WgpuKv;

    fn info(&self) -> DeviceInfo {
        let summary = self.gpu.summary();
        DeviceInfo {
            backend: "wgpu",
            name: format!("{} ({}, {})", summary.name, summary.backend, summary.driver),
            software: summary.software,
            // WebGPU does not report the size of memory.
            memory_bytes: None,
            pci: summary.pci,
        }
    }

    // WebGPU has no completion query that other work does not delay, and maps no memory of other processes.
    without!(queued, sampling, virtual_memory, shared_arenas, shared_regions, peer_access);

    fn tensor(&mut self, rows: usize, cols: usize) -> Result<WgpuTensor, DeviceError> {
        WgpuTensor::new(&mut self.gpu, rows, cols)
    }

    fn takes(&self, format: WeightFormat) -> bool {
        Self::reads(format)
    }

    fn weight(&mut self, source: WeightSource) -> Result<WgpuWeight, DeviceError> {
        WgpuWeight::new(&mut self.gpu, &source)
    }

    fn kv(&mut self, shape: KvShape, slots: usize) -> Result<WgpuKv, DeviceError> {
        WgpuKv::new(&mut self.gpu, shape, slots)
    }

    fn kv_shape(&self, kv: &WgpuKv) -> KvShape {
        kv.shape
    }

    fn write(&mut self, tensor: &mut WgpuTensor, row0: usize, data: &[f32]) -> Result<(), DeviceError> {
        tensor.write(&mut self.gpu, row0, data)
    }

    fn read(
        &mut self,
        tensor: &WgpuTensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        tensor.read(&mut self.gpu, rows, cols, out)
    }

    fn kv_write(&mut self, kv: &mut WgpuKv, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        kv.write(&mut self.gpu, layer, slot0 as usize, bytes)
    }

    fn kv_read(
        &mut self,
        kv: &WgpuKv,
        layer: usize,
        slot0: u32,
        tokens: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        kv.read(&mut self.gpu, &[KvPiece { layer: word(layer), slot0, tokens }], out)
    }

    fn kv_read_pieces(&mut self, kv: &WgpuKv, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        kv.read(&mut self.gpu, pieces, out)
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        self.gpu.sync()
    }

    fn embed(&mut self, table: &WgpuWeight, ids: &[u32], out: &mut WgpuTensor) -> Result<(), DeviceError> {
        self.embed_rows(table, ids, Mode::Set, out)
    }

    fn embed_add(&mut self, table: &WgpuWeight, ids: &[u32], out: &mut WgpuTensor) -> Result<(), DeviceError> {
        self.embed_rows(table, ids, Mode::Add, out)
    }

    fn rms_norm(
        &mut self,
        x: &WgpuTensor,
        weight: &WgpuWeight,
        eps: f32,
        rows: usize,
        out: &mut WgpuTensor,
    ) -> Result<(), DeviceError> {
        self.norm(Kernel::RmsNorm, x, weight, eps, rows, out)
    }

    fn layer_norm(
        &mut self,
        x: &WgpuTensor,
        weight: &WgpuWeight,
        eps: f32,
        rows: usize,
        out: &mut WgpuTensor,
    ) -> Result<(), DeviceError> {
        self.norm(Kernel::LayerNorm, x, weight, eps, rows, out)
    }

    fn matmul(
        &mut self,
        x: &WgpuTensor,
        weight: &WgpuWeight,
        rows: usize,
        mode: Mode,
        out: &mut WgpuTensor,
    ) -> Result<(), DeviceError> {
        assert!(weight.cols == x.cols && weight.rows == out.cols && rows <= x.rows.min(out.rows), "product shapes");
        self.gpu.begin()?;
        for shard in &weight.shards {
            // Tiles begin at whole quads of the output.
            let before = shard.row0 % 4;
            let outputs = self.gpu.matvec_outputs();
            let (kernel, groups, depth) = match rows {
                0 => return Ok(()),
                1 => (Kernel::Matvec(shard.encoding, MatvecRows::One), shard.rows.div_ceil(outputs), 1),
                2..=MATVEC_ROWS_MAX => {
                    (Kernel::Matvec(shard.encoding, MatvecRows::Four), shard.rows.div_ceil(outputs), rows.div_ceil(4))
                }
                _ if self.gpu.wide_kernels() => {
                    (Kernel::MatmulWide(shard.encoding), shard.rows.div_ceil(128), rows.div_ceil(32))
                }
                _ => (Kernel::MatmulTiled(shard.encoding), (before + shard.rows).div_ceil(64), rows.div_ceil(64)),
            };
            let params = params::Matmul {
                rows: word(rows),
                quads: word(quads(x.cols)),
                n: word(shard.rows),
                out_stride: word(out.stride()),
                out_col0: word(shard.row0),
                add: u32::from(mode == Mode::Add),
                ..Default::default()
            };
            let buffers = [Some(&x.buf), Some(&shard.buf), Some(&out.buf)];
            self.gpu.dispatch(kernel, &params, &buffers, word(groups), word(depth))?;
        }
        Ok(())
    }

    fn matmul_activated(
        &mut self,
        x: &WgpuTensor,
        weight: &WgpuWeight,
        rows: usize,
        activation: Activation,
        product: &mut WgpuTensor,
        out: &mut WgpuTensor,
    ) -> Result<(), DeviceError> {
        assert!(product.cols == activation.inputs() * out.cols && rows <= out.rows, "activation shapes");
        self.matmul(x, weight, rows, Mode::Set, product)?;
        self.activate(product, rows, activation, out)
    }

    fn activate(
        &mut self,
        product: &WgpuTensor,
        rows: usize,
        activation: Activation,
        out: &mut WgpuTensor,
    ) -> Result<(), DeviceError> {
        self.gpu.begin()?;
        activation::activate(&mut self.gpu, product, rows, activation, out)
    }

    fn add(&mut self, x: &mut WgpuTensor, y: &WgpuTensor, rows: usize) -> Result<(), DeviceError> {
        assert!(x.cols == y.cols && rows <= x.rows.min(y.rows), "shapes of a sum");
        self.gpu.begin()?;
        let params = params::Add { quads: word(rows * quads(x.cols)), ..Default::default() };
        self.gpu.dispatch(Kernel::Add, &params, &[Some(&y.buf), Some(&x.buf)], params.quads.div_ceil(64), 1)
    }

    fn scale(&mut self, x: &mut WgpuTensor, factor: f32, rows: usize) -> Result<(), DeviceError> {
        assert!(rows <= x.rows, "rows of a multiple");
        self.gpu.begin()?;
        let params = params::Add { quads: word(rows * quads(x.cols)), factor, ..Default::default() };
        self.gpu.dispatch(Kernel::Scale, &params, &[Some(&x.buf)], params.quads.div_ceil(64), 1)
    }

    fn softcap(&mut self, x: &mut WgpuTensor, cap: f32, rows: usize) -> Result<(), DeviceError> {
        assert!(rows <= x.rows, "rows to cap");
        self.gpu.begin()?;
        let params = params::Add { quads: word(rows * quads(x.cols)), factor: cap, ..Default::default() };
        self.gpu.dispatch(Kernel::Softcap, &params, &[Some(&x.buf)], params.quads.div_ceil(64), 1)
    }

    fn head_norm(
        &mut self,
        qkv: &mut WgpuTensor,
        (q, k): (&WgpuWeight, &WgpuWeight),
        eps: f32,
        geometry: AttentionGeometry,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let dim = geometry.head_dim as usize;
        assert_eq!((q.rows, q.cols, k.rows, k.cols), (1, dim, 1, dim), "weights of a head's norm");
        assert!(qkv.cols == geometry.qkv_dim() && rows <= qkv.rows, "projection shapes");
        let (q, k) = (q.vector(), k.vector());
        if q.encoding != k.encoding {
            let (q, k) = (q.encoding.name(), k.encoding.name());
            let text = format!("a head's norm with weights of {q} for queries and {k} for keys");
            return Err(DeviceError::Unsupported(text));
        }
        self.gpu.begin()?;
        let params = params::HeadNorm {
            rows: word(rows),
            heads: geometry.heads,
            kv_heads: geometry.kv_heads,
            head_dim: geometry.head_dim,
            stride: word(qkv.stride()),
            eps,
            ..Default::default()
        };
        let kernel = Kernel::HeadNorm(q.encoding);
        let buffers = [Some(&q.buf), Some(&k.buf), Some(&qkv.buf)];
        self.gpu.dispatch(kernel, &params, &buffers, params.rows * (geometry.heads + geometry.kv_heads), 1)
    }

    fn experts(
        &mut self,
        x: &WgpuTensor,
        logits: &WgpuTensor,
        experts: &Experts<'_, WgpuWeight>,
        rows: usize,
        buffers: &mut ExpertBuffers<WgpuTensor>,
        out: &mut WgpuTensor,
    ) -> Result<(), DeviceError> {
        experts::experts(&mut self.gpu, &mut self.routes, (x, logits), experts, rows, buffers, out)
    }

    fn rope_append(
        &mut self,
        qkv: &mut WgpuTensor,
        rope: &WgpuTensor,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut WgpuKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        assert!(qkv.cols == geometry.qkv_dim() && rope.cols == geometry.head_dim as usize, "projection shapes");
        assert!((kv.shape.kv_heads, kv.shape.head_dim) == (geometry.kv_heads, geometry.head_dim), "store shape");
        assert!(slots.len() <= qkv.rows.min(rope.rows), "projection rows");
        assert!(slots.iter().all(|s| *s == u32::MAX || (*s as usize) < kv.slots), "slots beyond the store");
        if slots.is_empty() {
            return Ok(());
        }
        self.gpu.begin()?;
        let at = self.gpu.upload_words(slots)?;
        let kernel = Kernel::RopeAppend(Encoding::kv(kv.shape.dtype, false));
        let team = word(kv.head_quads()).next_power_of_two().clamp(8, 64);
        for (index, shard) in kv.layers[layer].iter().enumerate() {
            let shard_slot0 = index * kv.shard_slots;
            let params = params::RopeAppend {
                rows: word(slots.len()),
                heads: geometry.heads,
                kv_heads: geometry.kv_heads,
                head_dim: geometry.head_dim,
                head_quads: word(kv.head_quads()),
                qkv_stride: word(qkv.stride()),
                rope_stride: word(rope.stride()),
                slots: at,
                shard_slot0: word(shard_slot0),
                shard_slots: word(kv.shard_slots.min(kv.slots - shard_slot0)),
                rotate: u32::from(index == 0),
                team,
            };
            let groups = (params.rows * (geometry.heads + 2 * geometry.kv_heads)).div_ceil(64 / team);
            let buffers = [None, Some(&rope.buf), Some(&qkv.buf), Some(shard)];
            self.gpu.dispatch(kernel, &params, &buffers, groups, 1)?;
        }
        Ok(())
    }

    fn head_matmul(
        &mut self,
        x: &WgpuTensor,
        weight: &WgpuWeight,
        heads: HeadStrides,
        rows: usize,
        out: &mut WgpuTensor,
    ) -> Result<(), DeviceError> {
        self.gpu.begin()?;
        latent::head_matmul(&mut self.gpu, x, weight, heads, rows, out)
    }

    fn latent_append(
        &mut self,
        qkv: &mut WgpuTensor,
        row: LatentRow<'_, WgpuTensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut WgpuKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        self.gpu.begin()?;
        latent::latent_append(&mut self.gpu, qkv, row, geometry, slots, (kv, layer))
    }

    fn attention(
        &mut self,
        q: &WgpuTensor,
        batch: &AttnBatch<'_>,
        kv: &WgpuKv,
        layer: usize,
        out: &mut Partials<WgpuTensor>,
    ) -> Result<(), DeviceError> {
        let geometry = batch.geometry;
        assert!((kv.shape.kv_heads, kv.shape.head_dim) == (geometry.kv_heads, geometry.head_dim), "store shape");
        assert!(q.cols >= geometry.q_dim() && out.out.cols == geometry.q_dim(), "query shapes");
        assert!(batch.rows() <= q.rows.min(out.out.rows).min(out.lse.rows), "query rows");
        assert!(batch.runs.iter().all(|run| (run.base + run.len) as usize <= kv.slots), "runs beyond the store");
        let class = class_of(geometry)?;
        // Runs over many shards may need more parts than fit a binding, which wide tiles reach sooner.
        let tile = match self.gpu.wide_kernels() && kv.layers[layer].len() == 1 {
            true => plan::software_tile(batch, class, kv.shape.dtype, self.gpu.lanes()),
            false => Tile::Narrow,
        };
        self.gpu.begin()?;
        let part_bytes = u64::from(geometry.kv_heads * tile.items() * (class.quads() + 1)) * 16;
        let parts = SCRATCH_BYTES_MAX.min(self.gpu.binding_bytes_max()) / part_bytes;
        let parts = u32::try_from(parts).expect("scratch is far below 4 Gi parts");
        let at = self.plan(batch, Bounds { shard_slots: word(kv.shard_slots), items: tile.items(), parts })?;
        self.grow_scratch(u64::from(self.plans[at].plan.parts) * part_bytes)?;
        let Self { gpu, plans, scratch, .. } = self;
        let kept = &plans[at];
        out.count.clone_from(&kept.count);
        let params = params::Attention {
            kv_heads: geometry.kv_heads,
            group: geometry.group(),
            head_dim: word(geometry.query_dim()),
            head_quads: word(quads(geometry.query_dim())),
            q_stride: word(q.stride()),
            out_stride: word(out.out.stride()),
            lse_stride: word(out.lse.stride()),
            // Positions stay below 2^31, so a window of 2^31 is no window.
            window: batch.window.map_or(0, |w| w.min(1 << 31)),
            scale: batch.scale,
            softcap: batch.softcap.unwrap_or(0.0),
            slopes: kept.plan.slopes,
            code_quads: word(kv.head_quads()),
            slot_quads: 2 * geometry.kv_heads * word(kv.row_quads()),
            values: if geometry.latent { 0 } else { geometry.kv_heads * word(kv.row_quads()) },
            ..Default::default()
        };
        let kernel = match tile {
            Tile::Wide => Kernel::AttentionWide(Encoding::kv(kv.shape.dtype, false)),
            Tile::Narrow => Kernel::Attention(gpu.kv(kv.shape.dtype), class),
        };
        let (words, o, lse, parts) = (Some(&kept.words), Some(&out.out.buf), Some(&out.lse.buf), Some(&*scratch));
        for round in &kept.plan.rounds {
            // A call may have many rounds; they read their words from the plan's own buffer, so a batch may end here.
            gpu.begin()?;
            for works in &round.works {
                let params = params::Attention { works: works.at, work_count: works.count, ..params };
                let buffers = [words, Some(&q.buf), Some(&kv.layers[layer][works.shard]), o, lse, parts];
                gpu.dispatch(kernel, &params, &buffers, works.count * geometry.kv_heads, 1)?;
            }
            let params = params::Attention { works: round.tiles_at, work_count: round.tiles, ..params };
            let buffers = [words, o, lse, parts];
            gpu.dispatch(Kernel::AttentionReduce(class, tile), &params, &buffers, round.tiles * geometry.kv_heads, 1)?;
        }
        Ok(())
    }

    fn merge(
        &mut self,
        acc: &mut Partials<WgpuTensor>,
        other: &Partials<WgpuTensor>,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        let rows = other.count.len();
        assert_eq!(acc.count.len(), rows, "partials of the same queries");
        assert!(acc.out.cols == geometry.q_dim() && other.out.cols == geometry.q_dim(), "partial shapes");
        if rows == 0 {
            return Ok(());
        }
        self.gpu.begin()?;
        // As in `merge.wgsl`: 0 keeps ours, 1 takes the other, 2 merges both.
        let action = |(ours, theirs): (&u32, &u32)| match (*ours, *theirs) {
            (_, 0) => 0,
            (0, _) => 1,
            _ => 2,
        };
        let actions: Vec<u32> = acc.count.iter().zip(&other.count).map(action).collect();
        let params = params::Merge {
            rows: word(rows),
            heads: geometry.heads,
            head_dim: word(geometry.query_dim()),
            out_stride: word(acc.out.stride()),
            lse_stride: word(acc.lse.stride()),
            actions: self.gpu.upload_words(&actions)?,
            ..Default::default()
        };
        let buffers = [None, Some(&other.out.buf), Some(&other.lse.buf), Some(&acc.out.buf), Some(&acc.lse.buf)];
        self.gpu.dispatch(Kernel::Merge, &params, &buffers, params.rows * geometry.heads, 1)?;
        acc.count.iter_mut().zip(&other.count).for_each(|(ours, theirs)| *ours += theirs);
        Ok(())
    }

    fn add_bias(&mut self, x: &mut WgpuTensor, bias: &WgpuWeight, rows: usize) -> Result<(), DeviceError> {
        assert!((bias.rows, bias.cols) == (1, x.cols) && rows <= x.rows, "shapes of a bias");
        self.gpu.begin()?;
        let quads = quads(x.cols);
        let params = params::AddBias { all: word(rows * quads), quads: word(quads), ..Default::default() };
        let (bias, groups) = (bias.vector(), params.all.div_ceil(64));
        self.gpu.dispatch(Kernel::AddBias(bias.encoding), &params, &[Some(&bias.buf), Some(&x.buf)], groups, 1)
    }

    fn sink(
        &mut self,
        partials: &mut Partials<WgpuTensor>,
        sinks: &WgpuWeight,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        assert_eq!((sinks.rows, sinks.cols), (1, geometry.heads as usize), "a sink for each head");
        assert_eq!(partials.out.cols, geometry.q_dim(), "partial shapes");
        if partials.count.is_empty() {
            return Ok(());
        }
        self.gpu.begin()?;
        let params = params::Sink {
            rows: word(partials.count.len()),
            heads: geometry.heads,
            head_dim: word(geometry.query_dim()),
            out_stride: word(partials.out.stride()),
            lse_stride: word(partials.lse.stride()),
            counts: self.gpu.upload_words(&partials.count)?,
            ..Default::default()
        };
        let sinks = sinks.vector();
        let kernel = Kernel::Sink(sinks.encoding);
        let buffers = [None, Some(&partials.lse.buf), Some(&sinks.buf), Some(&partials.out.buf)];
        self.gpu.dispatch(kernel, &params, &buffers, params.rows * geometry.heads, 1)
    }

    fn gather_rows(&mut self, x: &WgpuTensor, rows: &[u32], out: &mut WgpuTensor) -> Result<(), DeviceError> {
        assert!(x.cols == out.cols && rows.len() <= out.rows, "gathered shapes");
        assert!(rows.iter().all(|row| (*row as usize) < x.rows), "rows beyond the tensor");
        if rows.is_empty() {
            return Ok(());
        }
        self.gpu.begin()?;
        let params = params::GatherRows {
            index: self.gpu.upload_words(rows)?,
            rows: word(rows.len()),
            quads: word(quads(x.cols)),
            ..Default::default()
        };
        let groups = (params.rows * params.quads).div_ceil(64);
        self.gpu.dispatch(Kernel::GatherRows, &params, &[None, Some(&x.buf), Some(&out.buf)], groups, 1)
    }
}
