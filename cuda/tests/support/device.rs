//! A [`Device`] over the host shim: host memory, the kernels, and their launches as `lagoon_cuda::kernels` plans them.
//!
//! It is for tests of the kernels: buffers have exactly the size that they need, so that the address sanitizer sees the first
//! byte beyond, launches take turns in every order, and attention is cut into many small pieces.

use super::shim::{ORDERS, Shim};
use bytemuck::Pod;
use lagoon_backend::{
    Activation, AttnBatch, Device, DeviceError, DeviceInfo, ExpertBuffers, Experts, HeadStrides, KvPiece, LatentRow,
    Mode, Partials, WeightFormat, WeightSource, without,
};
use lagoon_cuda::kernels::attention::{Buffers, DecodeClass, KvView, Plan, Precision, SHARED_BYTES_MAX, Store, Tuning};
use lagoon_cuda::kernels::boxes::KvMaps;
use lagoon_cuda::kernels::experts::{Grouped, Mixture, Stored};
use lagoon_cuda::kernels::latent::{HeadProductParams, LatentParams, head_product};
use lagoon_cuda::kernels::linear::{Launches, Product, is_fused, workspace_bytes};
use lagoon_cuda::kernels::packed::{self, Encoding, PackedProduct, StreamLimits, Streamed, factor_of};
use lagoon_cuda::kernels::pointwise::Activate;
use lagoon_cuda::kernels::weight::{WeightLayout, arrange};
use lagoon_cuda::kernels::{Launch, pointwise, weight_ld};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvShape};
use std::ops::Range;

#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) data: Vec<f32>,
    pub(crate) cols: usize,
}

/// Rows as [`WeightLayout`] says.
#[derive(Debug)]
pub(crate) struct Weight {
    layout: WeightLayout,
    rows: usize,
    cols: usize,
    /// What the layout's addresses are of.
    _data: Vec<u128>,
}

/// Bytes for elements of packed weights: few, so that products have several parts.
const ROOM: u64 = 16 << 10;

#[derive(Debug)]
pub(crate) struct Kv {
    shape: KvShape,
    /// K and V of each layer, in words.
    layers: Vec<[Vec<u32>; 2]>,
}

impl Kv {
    fn view(&mut self, layer: usize) -> KvView {
        let [k, v] = self.layers[layer].each_mut().map(|plane| plane.as_mut_ptr() as u64);
        KvView { k, v, ..view_of(self, layer) }
    }
}

/// The planes of a store that is only read.
fn view_of(kv: &Kv, layer: usize) -> KvView {
    let [k, v] = &kv.layers[layer];
    let head_stride = kv.shape.dtype.row_elements(kv.shape.head_dim) as u64;
    KvView {
        k: k.as_ptr() as u64,
        v: v.as_ptr() as u64,
        token_stride: u64::from(kv.shape.kv_heads) * head_stride,
        head_stride,
    }
}

#[derive(Debug)]
pub(crate) struct ShimDevice {
    shim: &'static Shim,
    /// Launches so far: they choose the order of turns.
    pub(crate) launches: u64,
    pub(crate) tuning: Tuning,
    pub(crate) plan: Plan,
    /// The kernels of the last mixture's products.
    pub(crate) grouped: [&'static str; 2],
}

/// Small pieces, and all shapes of the decode kernel's pipeline.
pub(crate) const TUNING: Tuning = Tuning {
    sms: 8,
    shared_bytes_max: SHARED_BYTES_MAX,
    sm_shared_bytes: SHARED_BYTES_MAX,
    classes: [
        DecodeClass { warps: 2, stages: 4, blocks_per_sm: 1, piece_keys_min: 48 },
        DecodeClass { warps: 4, stages: 2, blocks_per_sm: 2, piece_keys_min: 96 },
        DecodeClass { warps: 8, stages: 3, blocks_per_sm: 2, piece_keys_min: 200 },
    ],
    class_keys: [64, 256],
    precision: Precision::Exact,
    wgmma: false,
};

impl ShimDevice {
    pub(crate) fn open() -> Result<Self, String> {
        Ok(Self::over(Shim::get()?))
    }

    pub(crate) fn over(shim: &'static Shim) -> Self {
        Self { shim, launches: 0, tuning: TUNING, plan: Plan::default(), grouped: [""; 2] }
    }

    pub(crate) fn launch<P: Pod>(&mut self, launch: &Launch<P>) {
        self.launches += 1;
        let order = i32::try_from(self.launches % ORDERS as u64).expect("small");
        self.shim.set_order(order, self.launches.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let params = bytemuck::bytes_of(&launch.params);
        // SAFETY: the tests give addresses of live buffers of the sizes that kernels document.
        let result = unsafe { self.shim.launch(launch.name, launch.grid, launch.block, launch.shared_bytes, params) };
        if let Err(error) = result {
            panic!("{error}");
        }
    }

    fn per_row<P: Pod>(&mut self, name: &'static str, rows: usize, params: P) {
        if rows > 0 {
            self.launch(&pointwise::per_row(name, u32::try_from(rows).expect("rows"), params));
        }
    }

    fn norm(&mut self, name: &'static str, x: &Tensor, weight: &Weight, eps: f32, rows: usize, out: &mut Tensor) {
        let params = pointwise::NormParams {
            x: x.data.as_ptr() as u64,
            delta: 0,
            weight: weight.layout.plain().0,
            bias: 0,
            out: out.data.as_mut_ptr() as u64,
            cols: number(x.cols),
            eps,
            weight_type: u32::from(weight.layout.plain().1.code()),
            pad: 0,
        };
        self.per_row(name, rows, params);
    }

    fn kv_copy(&mut self, name: &'static str, view: KvView, shape: KvShape, slot0: u32, packed: u64, tokens: usize) {
        let params = pointwise::KvCopyParams {
            kv: view,
            packed,
            slot0,
            kv_heads: shape.kv_heads,
            head_bytes: number(shape.row_bytes()),
            element_bytes: number(shape.dtype.element_bytes()),
        };
        self.per_row(name, tokens, params);
    }
}

fn stored(weight: Option<&Weight>) -> Stored {
    let (address, dtype) = weight.map_or((0, DType::F32), |weight| weight.layout.plain());
    Stored { address, dtype }
}

/// Memory of so many bytes, rounded up to 16.
fn room(bytes: u64) -> Vec<u128> {
    vec![u128::MAX; usize::try_from(bytes.div_ceil(16)).expect("fits")]
}

pub(crate) fn number(n: usize) -> u32 {
    u32::try_from(n).expect("fits")
}

impl Device for ShimDevice {
    type Tensor = Tensor;
    type Weight = Weight;
    type Kv = Kv;

    fn info(&self) -> DeviceInfo {
        DeviceInfo { backend: "cuda", name: "host shim".to_owned(), software: true, memory_bytes: None, pci: None }
    }

    without!(queued, sampling, virtual_memory, shared_arenas, shared_regions, peer_access);

    fn tensor(&mut self, rows: usize, cols: usize) -> Result<Tensor, DeviceError> {
        Ok(Tensor { data: vec![0.0; rows * cols], cols })
    }

    fn takes(&self, format: WeightFormat) -> bool {
        Encoding::of(format).is_some()
    }

    fn weight(&mut self, source: WeightSource) -> Result<Weight, DeviceError> {
        let mut layout = WeightLayout::new(&source)?;
        let mut bytes = Vec::new();
        source.parts.iter().for_each(|part| arrange(part.format, source.cols, &part.bytes, &mut bytes));
        let mut data = vec![0u128; layout.bytes() / 16];
        bytemuck::cast_slice_mut(&mut data).copy_from_slice(&bytes);
        layout.place(data.as_ptr() as u64);
        let mut largest = 0.0f32;
        for segment in layout.segments() {
            let Some(rows) = layout.packed(segment) else { continue };
            let mut found = vec![f32::NAN; segment.rows];
            self.launch(&rows.largest(number(segment.rows), found.as_mut_ptr() as u64));
            largest = found.into_iter().fold(largest, f32::max);
        }
        layout.set_factor(factor_of(largest));
        Ok(Weight { layout, rows: source.rows(), cols: source.cols, _data: data })
    }

    fn kv(&mut self, shape: KvShape, slots: usize) -> Result<Kv, DeviceError> {
        let plane = || vec![0u32; (slots * shape.layer_token_bytes() / 2).div_ceil(4)];
        Ok(Kv { shape, layers: (0..shape.layers).map(|_| [plane(), plane()]).collect() })
    }

    fn kv_shape(&self, kv: &Kv) -> KvShape {
        kv.shape
    }

    fn write(&mut self, tensor: &mut Tensor, row0: usize, data: &[f32]) -> Result<(), DeviceError> {
        tensor.data[row0 * tensor.cols..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn read(
        &mut self,
        tensor: &Tensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        rows.for_each(|row| out.extend_from_slice(&tensor.data[row * tensor.cols..][cols.clone()]));
        Ok(())
    }

    fn kv_write(&mut self, kv: &mut Kv, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        let (shape, view) = (kv.shape, kv.view(layer));
        self.kv_copy("kv_unpack", view, shape, slot0, bytes.as_ptr() as u64, bytes.len() / shape.layer_token_bytes());
        Ok(())
    }

    fn kv_read(
        &mut self,
        kv: &Kv,
        layer: usize,
        slot0: u32,
        tokens: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        // A buffer of its own: where `out` ends is aligned to nothing.
        let mut packed = vec![0u32; (tokens as usize * kv.shape.layer_token_bytes()).div_ceil(4)];
        let at = packed.as_mut_ptr() as u64;
        self.kv_copy("kv_pack", view_of(kv, layer), kv.shape, slot0, at, tokens as usize);
        out.extend_from_slice(&bytemuck::cast_slice(&packed)[..tokens as usize * kv.shape.layer_token_bytes()]);
        Ok(())
    }

    fn kv_read_pieces(&mut self, kv: &Kv, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        pieces.iter().try_for_each(|p| self.kv_read(kv, p.layer as usize, p.slot0, p.tokens, out))
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn embed(&mut self, table: &Weight, ids: &[u32], out: &mut Tensor) -> Result<(), DeviceError> {
        self.table_rows(table, ids, false, out);
        Ok(())
    }

    fn embed_add(&mut self, table: &Weight, ids: &[u32], out: &mut Tensor) -> Result<(), DeviceError> {
        self.table_rows(table, ids, true, out);
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        eps: f32,
        rows: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.norm("rms_norm", x, weight, eps, rows, out);
        Ok(())
    }

    fn layer_norm(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        eps: f32,
        rows: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.norm("layer_norm", x, weight, eps, rows, out);
        Ok(())
    }

    fn matmul(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        rows: usize,
        mode: Mode,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.multiply(x, weight, rows, (mode == Mode::Add, None), out);
        Ok(())
    }

    fn matmul_activated(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        rows: usize,
        activation: Activation,
        product: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let fused = weight.layout.only().is_ok_and(|segment| match segment.encoding {
            Encoding::Plain(dtype) => is_fused(number(rows), dtype, activation),
            Encoding::Packed(_) => packed::is_fused(number(rows), activation),
        });
        if fused {
            self.multiply(x, weight, rows, (false, Some(activation)), out);
            return Ok(());
        }
        self.multiply(x, weight, rows, (false, None), product);
        self.activate(product, rows, activation, out)
    }

    fn activate(
        &mut self,
        product: &Tensor,
        rows: usize,
        activation: Activation,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let (x, out_at, n) = (product.data.as_ptr() as u64, out.data.as_mut_ptr() as u64, number(out.cols));
        self.launch_activation(&pointwise::activate(activation, number(rows), n, x, out_at));
        Ok(())
    }

    fn add(&mut self, x: &mut Tensor, y: &Tensor, rows: usize) -> Result<(), DeviceError> {
        if rows > 0 {
            let count = (rows * x.cols) as u64;
            let (x, y) = (x.data.as_mut_ptr() as u64, y.data.as_ptr() as u64);
            self.launch(&pointwise::add(pointwise::AddParams { x, y, count }));
        }
        Ok(())
    }

    fn scale(&mut self, x: &mut Tensor, factor: f32, rows: usize) -> Result<(), DeviceError> {
        if rows > 0 {
            let (count, x) = ((rows * x.cols) as u64, x.data.as_mut_ptr() as u64);
            self.launch(&pointwise::scale(pointwise::ScaleParams { x, count, factor, pad: 0 }));
        }
        Ok(())
    }

    fn softcap(&mut self, x: &mut Tensor, cap: f32, rows: usize) -> Result<(), DeviceError> {
        if rows > 0 {
            let (count, x) = ((rows * x.cols) as u64, x.data.as_mut_ptr() as u64);
            self.launch(&pointwise::softcap(pointwise::ScaleParams { x, count, factor: cap, pad: 0 }));
        }
        Ok(())
    }

    fn head_norm(
        &mut self,
        qkv: &mut Tensor,
        (q, k): (&Weight, &Weight),
        eps: f32,
        geometry: AttentionGeometry,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.launch(&pointwise::head_norm(pointwise::HeadNormParams {
            qkv: qkv.data.as_mut_ptr() as u64,
            q_weight: q.layout.plain().0,
            k_weight: k.layout.plain().0,
            heads: geometry.heads,
            kv_heads: geometry.kv_heads,
            head_dim: geometry.head_dim,
            rows: number(rows),
            q_type: u32::from(q.layout.plain().1.code()),
            k_type: u32::from(k.layout.plain().1.code()),
            eps,
            pad: 0,
        }));
        Ok(())
    }

    fn experts(
        &mut self,
        x: &Tensor,
        logits: &Tensor,
        experts: &Experts<'_, Weight>,
        rows: usize,
        buffers: &mut ExpertBuffers<Tensor>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        if rows == 0 {
            return Ok(());
        }
        self.mixture(&Mixture {
            rows: number(rows),
            hidden: number(x.cols),
            n: number(experts.down.cols),
            count: number(experts.count),
            routing: experts.routing,
            activation: experts.activation,
            up: experts.up.layout.of_experts(experts.count)?,
            up_bias: stored(experts.up_bias),
            down: experts.down.layout.of_experts(experts.count)?,
            down_bias: stored(experts.down_bias),
            choice_bias: stored(experts.choice_bias),
            x: x.data.as_ptr() as u64,
            logits: logits.data.as_ptr() as u64,
            results: buffers.hidden.data.as_mut_ptr() as u64,
            product: buffers.product.data.as_mut_ptr() as u64,
            act: buffers.act.data.as_mut_ptr() as u64,
            out: out.data.as_mut_ptr() as u64,
        });
        Ok(())
    }

    fn sink(
        &mut self,
        partials: &mut Partials<Tensor>,
        sinks: &Weight,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        let all_seen = !partials.count.contains(&0);
        self.launch(&pointwise::sink(pointwise::SinkParams {
            out: partials.out.data.as_mut_ptr() as u64,
            lse: partials.lse.data.as_ptr() as u64,
            sinks: sinks.layout.plain().0,
            count: if all_seen { 0 } else { partials.count.as_ptr() as u64 },
            heads: geometry.heads,
            head_dim: number(geometry.query_dim()),
            rows: number(partials.count.len()),
            sink_type: u32::from(sinks.layout.plain().1.code()),
        }));
        Ok(())
    }

    fn rope_append(
        &mut self,
        qkv: &mut Tensor,
        rope: &Tensor,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut Kv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        let params = pointwise::RopeParams {
            qkv: qkv.data.as_mut_ptr() as u64,
            rope: rope.data.as_ptr() as u64,
            slots: slots.as_ptr() as u64,
            kv: kv.view(layer),
            heads: geometry.heads,
            kv_heads: geometry.kv_heads,
            head_dim: geometry.head_dim,
            kv_type: u32::from(kv.shape.dtype.code()),
        };
        self.per_row("rope_append", slots.len(), params);
        Ok(())
    }

    fn head_matmul(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        strides: HeadStrides,
        rows: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let segment = weight.layout.only()?;
        let stored = weight.layout.packed(segment);
        let mut elements = Vec::new();
        let (mut w, mut dtype) = (segment.address, segment.encoding.dtype());
        if let Some(stored) = stored {
            elements.resize(weight.rows * weight.cols, 0.0f32);
            (w, dtype) = (elements.as_mut_ptr() as u64, DType::F32);
            self.launch(&stored.rows(0, number(weight.rows), false, w));
        }
        let params = HeadProductParams {
            x: x.data.as_ptr() as u64,
            w,
            out: out.data.as_mut_ptr() as u64,
            rows: number(rows),
            n: number(weight.rows / strides.heads),
            k: number(weight.cols),
            ldw: number(weight_ld(weight.cols, dtype.size())),
            heads: number(strides.heads),
            x_stride: number(x.cols),
            x_step: number(strides.x_stride),
            out_stride: number(out.cols),
            out_step: number(strides.out_stride),
            unpacked: 0,
        };
        self.launch(&head_product(dtype, params));
        drop(elements);
        Ok(())
    }

    fn latent_append(
        &mut self,
        qkv: &mut Tensor,
        row: LatentRow<'_, Tensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut Kv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        let params = LatentParams {
            qkv: qkv.data.as_mut_ptr() as u64,
            queries: row.queries.data.as_ptr() as u64,
            latents: row.latent.data.as_ptr() as u64,
            keys: row.key.data.as_ptr() as u64,
            rope: row.rope.data.as_ptr() as u64,
            slots: slots.as_ptr() as u64,
            kv: kv.view(layer),
            heads: geometry.heads,
            head_dim: geometry.head_dim,
            latent: number(row.latent.cols),
            rotated: number(row.rope.cols),
            query: number(row.queries.cols / geometry.heads as usize),
            kv_type: u32::from(kv.shape.dtype.code()),
        };
        self.per_row("latent_append", slots.len(), params);
        Ok(())
    }

    fn attention(
        &mut self,
        q: &Tensor,
        batch: &AttnBatch<'_>,
        kv: &Kv,
        layer: usize,
        out: &mut Partials<Tensor>,
    ) -> Result<(), DeviceError> {
        self.attend(q, batch, view_of(kv, layer), kv.shape.dtype, None, out);
        Ok(())
    }

    fn merge(
        &mut self,
        acc: &mut Partials<Tensor>,
        other: &Partials<Tensor>,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        let params = pointwise::MergeParams {
            acc_out: acc.out.data.as_mut_ptr() as u64,
            acc_lse: acc.lse.data.as_mut_ptr() as u64,
            out: other.out.data.as_ptr() as u64,
            lse: other.lse.data.as_ptr() as u64,
            acc_count: acc.count.as_ptr() as u64,
            count: other.count.as_ptr() as u64,
            heads: geometry.heads,
            head_dim: number(geometry.query_dim()),
        };
        self.per_row("merge", other.count.len(), params);
        acc.count.iter_mut().zip(&other.count).for_each(|(acc, other)| *acc += other);
        Ok(())
    }

    fn add_bias(&mut self, x: &mut Tensor, bias: &Weight, rows: usize) -> Result<(), DeviceError> {
        let params = pointwise::BiasParams {
            x: x.data.as_mut_ptr() as u64,
            bias: bias.layout.plain().0,
            cols: number(x.cols),
            bias_type: u32::from(bias.layout.plain().1.code()),
        };
        self.per_row("add_bias", rows, params);
        Ok(())
    }

    fn gather_rows(&mut self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), DeviceError> {
        let params = pointwise::GatherParams {
            x: x.data.as_ptr() as u64,
            rows: rows.as_ptr() as u64,
            out: out.data.as_mut_ptr() as u64,
            cols: number(x.cols),
            pad: 0,
        };
        self.per_row("gather_rows", rows.len(), params);
        Ok(())
    }
}

impl ShimDevice {
    /// Attention over planes that lie anywhere; `pad` fills the plan up with so many empty decode items and merges.
    pub(crate) fn attend(
        &mut self,
        q: &Tensor,
        batch: &AttnBatch<'_>,
        view: KvView,
        dtype: KvDType,
        pad: Option<(usize, usize)>,
        out: &mut Partials<Tensor>,
    ) {
        batch.fill_counts(&mut out.count);
        let mut plan = std::mem::take(&mut self.plan);
        let g = batch.geometry;
        plan.make(batch, Store::of(&view, dtype, g.head_dim), &self.tuning);
        if let Some((items, merges)) = pad {
            let counts = plan.counts();
            plan.pad(counts[0] + items, counts[3] + merges);
        }
        let mut bytes = Vec::new();
        plan.bytes(&mut bytes);
        let mut uploaded = vec![0u32; bytes.len() / 4];
        bytemuck::cast_slice_mut(&mut uploaded).copy_from_slice(&bytes);
        let heads = batch.geometry.heads;
        let slopes: Vec<f32> = batch.alibi.iter().flat_map(|alibi| alibi.slopes(heads)).collect();
        let pieces = plan.piece_rows as usize;
        let (mut piece_out, mut piece_lse) =
            (vec![f32::NAN; pieces * batch.geometry.q_dim()], vec![f32::NAN; pieces * heads as usize]);
        let buffers = Buffers {
            plan: uploaded.as_ptr() as u64,
            q: q.data.as_ptr() as u64,
            q_stride: number(q.cols),
            slopes: if slopes.is_empty() { 0 } else { slopes.as_ptr() as u64 },
            out: out.out.data.as_mut_ptr() as u64,
            lse: out.lse.data.as_mut_ptr() as u64,
            piece_out: piece_out.as_mut_ptr() as u64,
            piece_lse: piece_lse.as_mut_ptr() as u64,
        };
        for launch in plan.launches(&buffers, view) {
            self.launch(&launch);
        }
        if plan.has_boxes() {
            let slots = batch.runs.iter().map(|run| u64::from(run.base + run.len)).max().unwrap_or(1);
            let shim = self.shim;
            let maps = KvMaps::new(view, dtype, g.kv_heads, slots, |shape| shim.encode(shape).ok_or("not encoded"));
            self.launch(&plan.boxes(&buffers, view, &maps.expect("planes in boxes")).expect("prefill over boxes"));
        }
        if let Some(merge) = plan.merge(&buffers) {
            self.launch(&merge);
        }
        self.plan = plan;
    }

    fn table_rows(&mut self, table: &Weight, ids: &[u32], add: bool, out: &mut Tensor) {
        let segment = table.layout.only().expect("a table of one format");
        if let Some(stored) = table.layout.packed(segment) {
            let rows = number(ids.len());
            return self.launch(&stored.rows(ids.as_ptr() as u64, rows, add, out.data.as_mut_ptr() as u64));
        }
        let dtype = segment.encoding.dtype();
        let params = pointwise::EmbedParams {
            table: segment.address,
            ids: ids.as_ptr() as u64,
            out: out.data.as_mut_ptr() as u64,
            cols: number(table.cols),
            ld: number(weight_ld(table.cols, dtype.size())),
            table_type: u32::from(dtype.code()),
            add: u32::from(add),
        };
        self.per_row("embed", ids.len(), params);
    }

    fn launch_activation(&mut self, launch: &Activate) {
        match launch {
            Activate::Gated(launch) => self.launch(launch),
            Activate::Plain(launch) => self.launch(launch),
        }
    }

    /// Runs a mixture with scratch of exactly the size that it asks for.
    fn mixture(&mut self, mixture: &Mixture) {
        let mut scratch = vec![u128::MAX; usize::try_from(mixture.scratch_bytes().div_ceil(16)).expect("fits")];
        let launches = mixture.launches(scratch.as_mut_ptr() as u64, self.tuning.precision);
        self.launch(&launches.route);
        self.launch(&launches.sort);
        launches.up.iter().flatten().for_each(|product| self.launch_grouped(product));
        launches.activate.iter().for_each(|launch| self.launch_activation(launch));
        launches.down.iter().flatten().for_each(|product| self.launch_grouped(product));
        self.launch(&launches.combine);
        self.grouped = [&launches.up, &launches.down].map(|product| product[0].expect("a product").product.name);
    }

    fn launch_grouped(&mut self, product: &Grouped) {
        product.split.iter().for_each(|launch| self.launch(launch));
        let mut elements = room(product.batch_bytes(ROOM));
        for batch in product.batches(elements.as_mut_ptr() as u64, ROOM) {
            batch.unpack.iter().for_each(|launch| self.launch(launch));
            batch.products.iter().flatten().for_each(|launch| self.launch(launch));
        }
    }

    fn multiply(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        rows: usize,
        (add, activation): (bool, Option<Activation>),
        out: &mut Tensor,
    ) {
        for segment in weight.layout.segments() {
            let product = Product {
                x: x.data.as_ptr() as u64,
                x_stride: number(x.cols),
                w: segment.address,
                dtype: segment.encoding.dtype(),
                factor: 1.0,
                bias: 0,
                out: out.data.as_mut_ptr() as u64 + 4 * segment.row0 as u64,
                out_stride: number(out.cols),
                rows: number(rows),
                n: number(segment.rows),
                k: number(weight.cols),
                add,
                activation,
            };
            match weight.layout.packed(segment) {
                None => self.product(&product),
                Some(rows) => self.packed_product(&PackedProduct { product, rows }),
            }
        }
    }

    fn packed_product(&mut self, product: &PackedProduct) {
        let precision = self.tuning.precision;
        if packed::is_streamed(product.product.rows) {
            let mut terms = room(product.stream_bytes(precision));
            let limits = StreamLimits { sms: self.tuning.sms, shared_bytes_max: self.tuning.shared_bytes_max };
            let Streamed { split, product } = product.stream(precision, limits, terms.as_mut_ptr() as u64);
            self.launch(&split);
            return self.launch(&product);
        }
        let mut elements = room(product.part_bytes(ROOM, precision));
        for part in product.parts(elements.as_mut_ptr() as u64, ROOM, precision) {
            self.launch(&part.unpack);
            for (product, precision) in part.products.iter().flatten() {
                self.product_with(product, *precision);
            }
        }
    }

    /// Runs a product with scratch of exactly the size that it asks for.
    pub(crate) fn product(&mut self, product: &Product) {
        self.product_with(product, self.tuning.precision);
    }

    fn product_with(&mut self, product: &Product, precision: Precision) {
        let sms = self.tuning.sms;
        let bytes = workspace_bytes(product.rows, product.n, product.k, product.dtype, sms);
        let mut workspace = vec![u128::MAX; usize::try_from(bytes.div_ceil(16)).expect("fits")];
        match product.launches(workspace.as_mut_ptr() as u64, precision, sms) {
            Launches::Stream(launch) => self.launch(&launch),
            Launches::Tiles { split, gemm, reduce } => {
                split.iter().for_each(|launch| self.launch(launch));
                self.launch(&gemm);
                reduce.iter().for_each(|launch| self.launch(launch));
            }
        }
    }
}
