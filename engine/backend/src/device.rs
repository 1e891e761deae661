//! The contract between the engine and a backend.
//!
//! A [`Device`] owns memory and executes operations in the order in which they are called. Calls may return before
//! the work is done (GPU backends record and submit); only [`Device::read`], [`Device::kv_read`] and
//! [`Device::sync`] wait. Activations are f32; weights and KV stay in their own element type
//! in memory and are widened as they are read, with f32 (or better) accumulation.
//!
//! Validation lives one level up: shapes, slots, token ids and runs given to an operation are right, and a backend may
//! `assert!` on them (a panic is our bug). Errors are only what a caller cannot foresee: memory that runs out, a lost
//! device. Nothing is allocated on the host or device per call where it can be kept.
//!
//! [`Device`] is what every backend does. What only some do (queues, virtual memory, memory of other processes) are
//! capabilities that a device hands out or refuses ([`crate::capabilities`]).

use crate::PciAddress;
use crate::capabilities::{PeerAccess, Queued, Sampling, SharedArenas, SharedRegions, VirtualMemory};
use bytes::Bytes;
use lagoon_types::{Alibi, AttentionGeometry, DType, KvRun, KvShape};
use std::fmt;
use std::ops::Range;

/// What a caller of a device cannot foresee.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error("out of device memory: {what} needs {bytes} bytes")]
    OutOfMemory { what: String, bytes: u64 },
    #[error("the device cannot do this: {0}")]
    Unsupported(String),
    #[error("the device was lost: {0}")]
    Lost(String),
}

/// The nonlinearity of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// SwiGLU (Shazeer 2020): `out[i] = silu(p[i]) * p[n + i]` of a product of `2 n` columns (gate, then up).
    SiluMul,
    /// The exact GELU (Hendrycks and Gimpel 2016), `out[i] = p[i] * Φ(p[i])` with the normal distribution function `Φ`: no
    /// approximation by tanh.
    Gelu,
}

impl Activation {
    /// Columns of the product for each column of the result.
    #[must_use]
    pub const fn inputs(self) -> usize {
        match self {
            Self::SiluMul => 2,
            Self::Gelu => 1,
        }
    }
}

/// What `lagoon doctor` and `status` say of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `cpu`, `wgpu` or `cuda`.
    pub backend: &'static str,
    /// For people, with the driver.
    pub name: String,
    /// A software implementation of a GPU (lavapipe, WARP): correct but slow.
    pub software: bool,
    /// Bytes that weights and KV may take; `None` where the device does not say.
    pub memory_bytes: Option<u64>,
    /// Where it sits on the PCI bus; `None` for the host itself, and where it is not told.
    pub pci: Option<PciAddress>,
}

/// A weight as it lies in its file: a matrix `[rows][cols]` in row-major order (`y = x · Wᵀ`), possibly given as
/// several matrices stacked by rows (q, k and v; gate and up). A vector has `rows == 1`.
#[derive(Clone, Debug)]
pub struct WeightSource {
    pub dtype: DType,
    pub cols: usize,
    /// Row counts and little-endian bytes of each part, typically slices of a memory map: the host backend keeps
    /// them as they are, copying nothing (parts that are misaligned for `dtype` are copied).
    pub parts: Vec<(usize, Bytes)>,
}

impl WeightSource {
    /// Rows of all parts together.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|(rows, _)| rows).sum()
    }
}

/// Whether a matrix product replaces its output or is added to it (residual connections).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Set,
    Add,
}

/// Attention partials of the first `rows` rows on a device: `out` is `[rows][heads * head_dim]`, `lse` is
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

/// Consecutive query rows of one sequence, at consecutive positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttnRows {
    /// First row in the query tensor (and in the output).
    pub row0: u32,
    pub rows: u32,
    /// Position of the first row.
    pub pos0: u32,
    /// Index of this sequence's first run in [`AttnBatch::runs`], and how many there are (may be 0).
    pub run0: u32,
    pub runs: u32,
}

/// The queries of one attention call and the runs that each sequence attends to.
#[derive(Clone, Copy, Debug)]
pub struct AttnBatch<'a> {
    pub geometry: AttentionGeometry,
    /// Factor on scores before the softmax, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    pub window: Option<u32>,
    /// Biases by distance, added to scaled scores in the form that [`lagoon_types::alibi`] fixes.
    pub alibi: Option<Alibi>,
    pub seqs: &'a [AttnRows],
    /// Runs of a sequence are disjoint and ascending in position.
    pub runs: &'a [KvRun],
}

impl AttnBatch<'_> {
    /// Rows that the output must hold.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.seqs.iter().map(|s| (s.row0 + s.rows) as usize).max().unwrap_or(0)
    }

    /// Fills `count[..rows]` with the keys that each row sees in its runs; rows of no sequence get 0.
    pub fn fill_counts(&self, count: &mut Vec<u32>) {
        count.clear();
        count.resize(self.rows(), 0);
        for seq in self.seqs {
            let runs = &self.runs[seq.run0 as usize..][..seq.runs as usize];
            for i in 0..seq.rows {
                count[(seq.row0 + i) as usize] =
                    runs.iter().map(|run| run.visible_count(seq.pos0 + i, self.window)).sum();
            }
        }
    }
}

/// Consecutive tokens of one layer of a store. Buffers and shared device regions have them in the canonical layout
/// `[token][k | v][kv_heads][head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPiece {
    pub layer: u32,
    /// First slot in the store.
    pub slot0: u32,
    pub tokens: u32,
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

    /// Makes a weight available to operations.
    fn weight(&mut self, source: WeightSource) -> Result<Self::Weight, DeviceError>;

    /// A KV store with `slots` token slots, zeroed.
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

    /// `x[r] += bias`. `bias` is a vector of the tensor's columns.
    fn add_bias(&mut self, x: &mut Self::Tensor, bias: &Self::Weight, rows: usize) -> Result<(), DeviceError>;

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

    /// Micro attention: every row of `batch` against its sequence's runs in `kv`'s `layer`, causal and windowed by
    /// position, biased by distance where the batch says so. The queries are the first `heads * head_dim` columns of `q` (which may have more). Sets `out.count`
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

    /// `out[i] = x[rows[i]]`.
    fn gather_rows(&mut self, x: &Self::Tensor, rows: &[u32], out: &mut Self::Tensor) -> Result<(), DeviceError>;
}
