//! The contract between the engine and a backend.
//!
//! A [`Device`] owns memory and executes operations in the order of the calls. Calls may return before the work is
//! done (GPU backends record and submit); only [`Device::read`], [`Device::kv_read`] and [`Device::sync`] wait.
//! Activations are f32. Weights and KV stay in their own element type in memory; loads widen them, and accumulation
//! is in f32 or better.
//!
//! The caller validates: shapes, slots, token ids and runs passed to an operation are right, and a backend may
//! `assert!` on them (a panic is our bug). Errors are those that a caller cannot foresee: out of memory, a lost
//! device. A backend keeps buffers between calls in place of allocating per call.
//!
//! Every backend implements all of [`Device`]. Queues, virtual memory and memory of other processes are capabilities
//! that a device hands out or refuses ([`crate::capabilities`]). The plain data of calls is in [`crate::operands`].

use crate::capabilities::{PeerAccess, Queued, Sampling, SharedArenas, SharedRegions, VirtualMemory};
use crate::error::DeviceError;
use crate::formats::WeightFormat;
use crate::operands::{Activation, AttnBatch, Experts, HeadStrides, KvPiece, LatentRow, Mode, WeightSource};
use crate::pci::PciAddress;
use lagoon_types::{AttentionGeometry, KvShape};
use std::fmt;
use std::ops::Range;

/// Working memory of [`Device::experts`] for up to `rows` rows. Its contents are undefined between calls.
#[derive(Debug)]
pub struct ExpertBuffers<T> {
    /// `[rows * top_k][hidden]`: a token's row for each of its experts, sorted by expert; later their results.
    pub hidden: T,
    /// `[rows * top_k][n * inputs]`: the products of the up projections.
    pub product: T,
    /// `[rows * top_k][n]`: their activations.
    pub act: T,
}

impl<T> ExpertBuffers<T> {
    /// Room for `rows` rows of `hidden` columns, each with `top_k` experts of `n` columns.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new<D: Device<Tensor = T>>(
        device: &mut D,
        rows: usize,
        top_k: usize,
        (hidden, n): (usize, usize),
        activation: Activation,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            hidden: device.tensor(rows * top_k, hidden)?,
            product: device.tensor(rows * top_k, activation.inputs() * n)?,
            act: device.tensor(rows * top_k, n)?,
        })
    }
}

/// Description of a device for `lagoon doctor` and `status`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `cpu`, `wgpu` or `cuda`.
    pub backend: &'static str,
    /// Name for people, with the driver.
    pub name: String,
    /// A software implementation of a GPU (lavapipe, WARP): correct but slow.
    pub software: bool,
    /// Bytes available to weights and KV; `None` if the device does not report them.
    pub memory_bytes: Option<u64>,
    /// PCI address; `None` for the host itself, and if the driver does not report it.
    pub pci: Option<PciAddress>,
}

/// Attention partials of the first `rows` rows on a device: `out` is `[rows][q_dim]`, `lse` is
/// `[rows][heads]` (natural log). Counts are known from the runs and live on the host. See `lagoon_types::partial`.
#[derive(Debug)]
pub struct Partials<T> {
    pub out: T,
    pub lse: T,
    /// Keys seen by each row. Rows with 0 hold nothing meaningful.
    pub count: Vec<u32>,
}

impl<T> Partials<T> {
    /// Room for `rows` rows on this device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new<D: Device<Tensor = T>>(
        device: &mut D,
        rows: usize,
        geometry: AttentionGeometry,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            out: device.tensor(rows, geometry.q_dim())?,
            lse: device.tensor(rows, geometry.heads as usize)?,
            count: Vec::with_capacity(rows),
        })
    }
}

/// A backend: memory, operations, and the capabilities that it hands out. One thread owns it. No method has a default.
///
/// In the signatures `rows` is the number of leading rows that an operation works on; tensors may have more.
pub trait Device: Send + 'static {
    /// f32 activations `[rows][cols]`.
    type Tensor: Send + fmt::Debug;
    /// A weight in its own element type.
    type Weight: Send + fmt::Debug;
    /// A KV store: `slots` tokens in every layer of a [`KvShape`].
    type Kv: Send + fmt::Debug;

    fn info(&self) -> DeviceInfo;

    /// Queued execution: calls return before their work is done, and the caller can ask whether it is.
    fn queued(&mut self) -> Option<&mut (impl Queued<Tensor = Self::Tensor> + ?Sized)>;

    /// Sampling on the device.
    fn sampling(&mut self) -> Option<&mut (impl Sampling<Tensor = Self::Tensor> + ?Sized)>;

    /// KV stores in address rows, with physical memory mapped behind them on demand.
    fn virtual_memory(&mut self) -> Option<&mut (impl VirtualMemory<Kv = Self::Kv> + ?Sized)>;

    /// KV stores in host memory that transports and other processes read and fill.
    fn shared_arenas(&mut self) -> Option<&mut (impl SharedArenas<Kv = Self::Kv> + ?Sized)>;

    /// Device memory that other processes on this host map, beside a KV store.
    fn shared_regions(&mut self) -> Option<&mut (impl SharedRegions<Kv = Self::Kv> + ?Sized)>;

    /// Peer access: KV stores that other processes on this host map and attend to.
    fn peer_access(&mut self) -> Option<&mut (impl PeerAccess<Kv = Self::Kv> + ?Sized)>;

    /// A tensor of `rows * cols` elements, zeroed.
    fn tensor(&mut self, rows: usize, cols: usize) -> Result<Self::Tensor, DeviceError>;

    /// Whether matrices in `format` are computed with as they are. Plain elements always are; parts of different formats may be
    /// stacked in one weight only if every packed one is.
    fn takes(&self, format: WeightFormat) -> bool;

    /// Makes a weight available to operations.
    ///
    /// # Errors
    /// Out of memory; a format that the device does not take ([`Device::takes`]).
    fn weight(&mut self, source: WeightSource) -> Result<Self::Weight, DeviceError>;

    /// A KV store with `slots` token slots, zeroed.
    ///
    /// # Errors
    /// Out of memory.
    fn kv(&mut self, shape: KvShape, slots: usize) -> Result<Self::Kv, DeviceError>;

    /// Shape of a store.
    fn kv_shape(&self, kv: &Self::Kv) -> KvShape;

    /// Writes whole rows, starting at row `row0`. `data.len()` is a multiple of the tensor's columns.
    fn write(&mut self, tensor: &mut Self::Tensor, row0: usize, data: &[f32]) -> Result<(), DeviceError>;

    /// Appends columns `cols` of rows `rows` to `out`, after everything called before has happened.
    fn read(
        &mut self,
        tensor: &Self::Tensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError>;

    /// Writes `tokens` tokens of `layer` in the canonical layout (see [`KvShape`]) to consecutive slots.
    fn kv_write(&mut self, kv: &mut Self::Kv, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Appends `tokens` tokens of `layer` in the canonical layout, after everything called before has happened.
    fn kv_read(
        &mut self,
        kv: &Self::Kv,
        layer: usize,
        slot0: u32,
        tokens: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError>;

    /// [`Device::kv_read`] of several pieces, one behind the other: where the backend can, with one wait for all of them.
    fn kv_read_pieces(&mut self, kv: &Self::Kv, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError>;

    /// Waits for all work called so far.
    fn sync(&mut self) -> Result<(), DeviceError>;

    /// `out[i] = table[ids[i]]`, widened. `table` is `[vocab][hidden]`.
    fn embed(&mut self, table: &Self::Weight, ids: &[u32], out: &mut Self::Tensor) -> Result<(), DeviceError>;

    /// `out[i] += table[ids[i]]`, widened (learned positions).
    fn embed_add(&mut self, table: &Self::Weight, ids: &[u32], out: &mut Self::Tensor) -> Result<(), DeviceError>;

    /// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`. `weight` is a vector of the tensor's columns.
    fn rms_norm(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        eps: f32,
        rows: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;

    /// `out[r] = (x[r] - mean(x[r])) / sqrt(var(x[r]) + eps) * weight` with the population's variance (Ba, Kiros and
    /// Hinton 2016, without the bias). `weight` is a vector of the tensor's columns.
    fn layer_norm(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        eps: f32,
        rows: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;

    /// `out[r] (=|+=) x[r] · weightᵀ`: `x` is `[rows][weight.cols]`, `out` `[rows][weight.rows]`.
    fn matmul(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        rows: usize,
        mode: Mode,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;

    /// Up projection of a feed-forward layer with its activation: `out[r] = activation(x[r] · weightᵀ)`. `x` is
    /// `[rows][weight.cols]`, `out` `[rows][n]` and `weight.rows` is `n` times [`Activation::inputs`]. `product` is
    /// `[rows][weight.rows]` and scratch: a backend that has no fused kernel for so many rows writes the product there.
    /// Its contents are undefined afterwards.
    fn matmul_activated(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        rows: usize,
        activation: Activation,
        product: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;

    /// `out[r] = activation(product[r])`: [`Device::matmul_activated`] where something comes between the two.
    fn activate(
        &mut self,
        product: &Self::Tensor,
        rows: usize,
        activation: Activation,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;

    /// `x[r] += y[r]`.
    fn add(&mut self, x: &mut Self::Tensor, y: &Self::Tensor, rows: usize) -> Result<(), DeviceError>;

    /// `x[r] *= factor`.
    fn scale(&mut self, x: &mut Self::Tensor, factor: f32, rows: usize) -> Result<(), DeviceError>;

    /// `x[r] = cap * tanh(x[r] / cap)`, a soft cap (Gemma 2); `cap` is above 0, and NaN stays NaN.
    fn softcap(&mut self, x: &mut Self::Tensor, cap: f32, rows: usize) -> Result<(), DeviceError>;

    /// `x[r] += bias`. `bias` is a vector of the tensor's columns.
    fn add_bias(&mut self, x: &mut Self::Tensor, bias: &Self::Weight, rows: usize) -> Result<(), DeviceError>;

    /// Root-mean-square norm of each query head and each key head of the fused projection, in place (Qwen3): the first
    /// `heads` stretches of `head_dim` columns with the first weight, the next `kv_heads` ones with the second. Values stay.
    /// `qkv` is `[rows][qkv_dim]`; the weights are vectors of `head_dim`.
    fn head_norm(
        &mut self,
        qkv: &mut Self::Tensor,
        weights: (&Self::Weight, &Self::Weight),
        eps: f32,
        geometry: AttentionGeometry,
        rows: usize,
    ) -> Result<(), DeviceError>;

    /// A mixture of experts: `out[r] += Σ w · (down_e · activation(up_e · x[r] + up_bias_e) + down_bias_e)` over the
    /// `top_k` experts `e` of row `r`, by [`Routing`]. Experts are chosen by score plus the bias of the choice, or by
    /// logit where nothing is added to scores; among equal experts, and among equal groups, the lower index is chosen.
    /// `w` is the expert's score without that bias, normalised and scaled. A row's terms are added in the order of
    /// their rank. `logits` is `[rows][count]`, `x` and `out` are `[rows][hidden]`. Only the weights of chosen experts
    /// are read.
    fn experts(
        &mut self,
        x: &Self::Tensor,
        logits: &Self::Tensor,
        experts: &Experts<'_, Self::Weight>,
        rows: usize,
        buffers: &mut ExpertBuffers<Self::Tensor>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;

    /// Rotates queries and keys of the fused projection in place and stores K and V. `qkv` is
    /// `[rows][qkv_dim]`, q then k then v; `rope` is `[rows][head_dim]`, the cosines of the `head_dim / 2` angles
    /// and then their sines. Element `j < head_dim / 2` of a head is paired with `j + head_dim / 2` (the Hugging
    /// Face convention): `(a, b) -> (a cos - b sin, b cos + a sin)`. Row `r`'s K and V, rounded to the
    /// store's type, go to slot `slots[r]` of `layer`; slot `u32::MAX` stores nothing. `slots.len()` is the number of
    /// rows. Models without rotary positions pass angles of zero, which change nothing.
    fn rope_append(
        &mut self,
        qkv: &mut Self::Tensor,
        rope: &Self::Tensor,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut Self::Kv,
        layer: usize,
    ) -> Result<(), DeviceError>;

    /// A product a head: `out[r][h * out_stride + i] = Σ weight[h * n + i][j] * x[r][h * x_stride + j]`, where `weight` is
    /// `[heads * n][k]`, `n <= out_stride`, `k <= x_stride`. Other elements of `out` stay. Rows of `x` and `out` hold `heads` strides, and may
    /// hold more.
    fn head_matmul(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        heads: HeadStrides,
        rows: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;

    /// Latent attention's [`Device::rope_append`] ([`AttentionGeometry::latent`]; DeepSeek-V2 §2.1.2 and §2.1.3): completes the
    /// row `qkv` (`[rows][qkv_dim]`), whose heads hold their absorbed queries, and stores its last `query_dim` elements.
    /// With `n` rotated elements (the columns of `row.rope`) and `c` columns of `row.latent`, `c + n = query_dim`:
    /// * the last `n` elements of each head of `qkv` become the rotated last `n` of that head in `row.queries`;
    /// * behind the heads come the `c` elements of `row.latent`, then the rotated `n` of `row.key`.
    fn latent_append(
        &mut self,
        qkv: &mut Self::Tensor,
        row: LatentRow<'_, Self::Tensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut Self::Kv,
        layer: usize,
    ) -> Result<(), DeviceError>;

    /// Micro attention: every row of `batch` against its sequence's runs in `kv`'s `layer`, causal and windowed by
    /// position, with soft caps and biases by distance where the batch says so. The queries are the first `q_dim` columns of `q` (which may have more). Sets `out.count`
    /// by [`AttnBatch::fill_counts`].
    fn attention(
        &mut self,
        q: &Self::Tensor,
        batch: &AttnBatch<'_>,
        kv: &Self::Kv,
        layer: usize,
        out: &mut Partials<Self::Tensor>,
    ) -> Result<(), DeviceError>;

    /// Scale-reduce: merges `other` into `acc` (Infinite-LLM v1 §4.2; formulas in `lagoon_types::partial`), for the
    /// rows of `other.count`; `acc.count` has as many. Updates `acc.count`.
    fn merge(
        &mut self,
        acc: &mut Partials<Self::Tensor>,
        other: &Partials<Self::Tensor>,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError>;

    /// Attention sinks (Xiao et al. 2023; gpt-oss): a logit of each head that joins the softmax's sum and has no value.
    /// `out[r][h] *= 1 / (1 + exp(sinks[h] - lse[r][h]))`, for rows that have seen keys; `lse` and counts stay. `sinks`
    /// is a vector of `heads`. Applied once, after the last merge.
    fn sink(
        &mut self,
        partials: &mut Partials<Self::Tensor>,
        sinks: &Self::Weight,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError>;

    /// `out[i] = x[rows[i]]`.
    fn gather_rows(&mut self, x: &Self::Tensor, rows: &[u32], out: &mut Self::Tensor) -> Result<(), DeviceError>;
}
