//! The contract between the engine and a backend.
//!
//! A [`Device`] owns memory and executes operations in the order in which they are called. Calls may return before
//! the work is done (GPU backends record and submit); only [`Device::read`], [`Device::read_partials`],
//! [`Device::kv_read`] and [`Device::sync`] wait. Activations are f32; weights and KV stay in their own element type
//! in memory and are widened as they are read, with f32 (or better) accumulation.
//!
//! Validation lives one level up: shapes, slots, token ids and runs given to an operation are right, and a backend may
//! `assert!` on them (a panic is our bug). Errors are only what a caller cannot foresee: memory that runs out, a lost
//! device. Nothing is allocated on the host or device per call where it can be kept.

use crate::PciAddress;
use bytemuck::{Pod, Zeroable};
use bytes::Bytes;
use lagoon_types::{Alibi, AttentionGeometry, DType, KvRun, KvShape, KvSpace};
use std::fmt;
use std::ops::Range;
#[cfg(target_os = "linux")]
use std::sync::Arc;
use std::time::Duration;

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

/// What mapping memory behind a KV store has come to (vAttention, §6), in page groups of all layers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct KvCounters {
    /// Page groups of an rBlock; of a flat store, of a stripe.
    pub groups_per_block: u64,
    /// Free: mapped nowhere. Kept: mapped, and nobody's.
    pub free: u64,
    pub kept: u64,
    /// Mapped while a step waited; one iteration ahead; for the next sequence before it came.
    pub in_step: u64,
    pub ahead: u64,
    pub eager: u64,
    /// Found mapped where they were wanted.
    pub reused: u64,
    /// Kept, and unmapped for want of free ones.
    pub reclaimed: u64,
    /// Mapped once more for a shared prefix.
    pub shared: u64,
    /// Times that there was no memory.
    pub refused: u64,
}

/// How steps that come again and again ([`Device::begin_repeatable`]) were launched since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LaunchCounters {
    /// Launched kernel by kernel.
    pub eager: u64,
    /// Captured, and then launched as a graph.
    pub captured: u64,
    /// Launched as a graph that was there.
    pub replayed: u64,
    /// Graphs that had to go for others.
    pub evicted: u64,
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

/// How a row of logits becomes a token. Laid out as the devices' kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SampleRow {
    /// Uniform in `[0, 1)`.
    pub uniform: f64,
    /// 0 takes the likeliest.
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    /// 0 for all.
    pub top_k: u32,
}

/// What came of a row of logits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SampledRow {
    /// The token; where `status` is not 0, the offending one.
    pub token: u32,
    /// 0: sampled; 1: a logit is NaN or infinitely likely; 2: no token is possible.
    pub status: u32,
}

/// Memory of a device that other processes on its host map, too; see [`Device::window`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WindowId(pub u32);

/// Consecutive tokens of one layer of a store, of which a window or a buffer has the canonical layout
/// `[token][k | v][kv_heads][head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPiece {
    pub layer: u32,
    /// Where they are in the store.
    pub slot0: u32,
    pub tokens: u32,
}

/// A KV store, and the memory that each of its layers is in.
#[cfg(target_os = "linux")]
pub type SharedKv<K> = (K, Vec<crate::SharedArena>);

/// A window of a device: its number for the device, and as transports use it.
#[cfg(target_os = "linux")]
pub type OwnWindow = (WindowId, Arc<dyn crate::Window>);

/// A KV store that is lent, and the memory that it is in, as other processes map it.
#[cfg(target_os = "linux")]
pub type LentKv<K> = (K, Arc<dyn crate::Window>);

/// A backend: memory and operations. One thread owns it.
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

    /// Whether the calls from now on are work for which another instance waits: a device that can does it before and
    /// beside its own. Tensors are used either by urgent calls or by others; a store is used by both, and what
    /// [`Device::kv_write`] wrote is seen by both.
    fn urgent(&mut self, _urgent: bool) {}

    /// The calls from now to the next that waits are a step of a kind that comes again and again, with other data in tensors of
    /// the same sizes: a device that can keeps how it was launched, and launches the like of it as one. Nothing of the step
    /// need have begun before the call that waits. A step that is given up half-way may never happen.
    fn begin_repeatable(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// How such steps were launched; `None` where they are not kept.
    fn launches(&self) -> Option<LaunchCounters> {
        None
    }

    /// A tensor of `rows * cols` elements, zeroed.
    fn tensor(&mut self, rows: usize, cols: usize) -> Result<Self::Tensor, DeviceError>;

    /// Makes a weight available to operations.
    fn weight(&mut self, source: WeightSource) -> Result<Self::Weight, DeviceError>;

    /// A KV store with `slots` token slots, zeroed.
    fn kv(&mut self, shape: KvShape, slots: usize) -> Result<Self::Kv, DeviceError>;

    /// How a store for `wish.blocks` rBlocks is to be addressed on this device: with the wished rows where it maps memory
    /// behind addresses, else one slot for each piece of memory, as by default.
    fn kv_space(&self, _shape: KvShape, wish: KvSpace) -> KvSpace {
        KvSpace::flat(wish.blocks, wish.block_tokens)
    }

    /// A KV store with these rBlocks. What was never written holds nothing meaningful.
    fn kv_in(&mut self, shape: KvShape, space: &KvSpace) -> Result<Self::Kv, DeviceError> {
        self.kv(shape, space.slots())
    }

    /// Makes memory lie behind the rBlocks of these slots, all or nothing; before they are written. Those that have some
    /// keep it. A store of [`Device::kv`] needs no such call.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], with nothing changed.
    fn kv_hold(&mut self, _kv: &mut Self::Kv, _slots: &[Range<u32>]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// A step was given up in the middle: memory that it was to write may be somebody else's from now on, and is written by
    /// them after what it had queued.
    ///
    /// # Errors
    /// If the device failed.
    fn gave_up(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Nobody uses the rBlocks of these slots any more (whole ones): their memory may lie behind others.
    fn kv_release(&mut self, _kv: &mut Self::Kv, _slots: Range<u32>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Has `tokens` slots from `to` on hold what those from `from` on hold: the same memory at both places. Both are whole
    /// rBlocks of a store with rows ([`Device::kv_space`]), the former held, the latter not. Nobody writes to either before the
    /// other one is released.
    ///
    /// # Errors
    /// If the device does not map memory behind addresses, or cannot now; nothing has changed then.
    fn kv_share(&mut self, _kv: &mut Self::Kv, _from: u32, _to: u32, _tokens: u32) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("memory at several addresses".to_owned()))
    }

    /// The slots that the next step may write first, and where the sequence that begins next lies: a device may map memory
    /// there meanwhile.
    fn kv_expect(&mut self, _kv: &mut Self::Kv, _next: &[u32], _row: Option<u32>) {}

    /// What mapping has come to, on a device that maps.
    fn kv_counters(&self, _kv: &Self::Kv) -> Option<KvCounters> {
        None
    }

    /// As [`Device::kv`], in memory that transports and other processes read, and that transports fill, while the device
    /// works on other slots: an arena for each layer, slots in order, in the canonical layout. Accesses exclude each other
    /// in granules of `granule_slots` slots (not 0). `None` where the backend has no such memory.
    #[cfg(target_os = "linux")]
    fn kv_shared(
        &mut self,
        _shape: KvShape,
        _slots: usize,
        _granule_slots: usize,
    ) -> Result<Option<SharedKv<Self::Kv>>, DeviceError> {
        Ok(None)
    }

    /// Memory of this device that other processes on this host can map: `bytes` of it, or a little more. What lies in it goes
    /// from one device's KV to another's without passing the host. `None` where the backend has no such memory.
    #[cfg(target_os = "linux")]
    fn window(&mut self, _bytes: usize) -> Result<Option<OwnWindow>, DeviceError> {
        Ok(None)
    }

    /// A KV store of `blocks` rBlocks in memory that other processes on this host map, to attend to it where it lies. Beside
    /// each rBlock is a word: 0 while the rBlock is open, and what it was last sealed with ([`Device::kv_seal`]) from then on.
    /// A write to an rBlock opens it first: its word is 0 before anything else of it changes, for whoever reads the memory.
    /// `None` where the backend has no such memory.
    #[cfg(target_os = "linux")]
    fn kv_lent(
        &mut self,
        _shape: KvShape,
        _blocks: u32,
        _block_tokens: u32,
    ) -> Result<Option<LentKv<Self::Kv>>, DeviceError> {
        Ok(None)
    }

    /// Seals an rBlock of a store of [`Device::kv_lent`] with a word other than 0, behind everything that was called before.
    /// Whoever maps the memory sees both when this returns.
    fn kv_seal(&mut self, _kv: &mut Self::Kv, _block: u32, _word: u64) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("memory that is lent".to_owned()))
    }

    /// The store of so many rBlocks that another process has made by [`Device::kv_lent`], mapped; it is only read. What it
    /// holds changes at any time: [`Device::kv_words`] says whether it has.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if the memory is of a device that this one cannot access, or is none of that shape; what
    /// the driver says of it.
    #[cfg(target_os = "linux")]
    fn kv_reach(
        &mut self,
        _shape: KvShape,
        _blocks: u32,
        _block_tokens: u32,
        _memory: crate::PeerMemory,
    ) -> Result<Self::Kv, DeviceError> {
        Err(DeviceError::Unsupported("memory of another process".to_owned()))
    }

    /// Whether [`Device::kv_reach`] may work here.
    fn reaches(&self) -> bool {
        false
    }

    /// Appends the words of these rBlocks, read after everything called before has happened. An rBlock whose word is what it
    /// was sealed with has not changed since, so that everything that was read of it until now is right.
    fn kv_words(&mut self, _kv: &Self::Kv, _blocks: &[u32], _out: &mut Vec<u64>) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("memory of another process".to_owned()))
    }

    /// Packs KV into a window, a piece behind the other from byte `at` (a multiple of 16). It is there when this returns.
    fn kv_to_window(
        &mut self,
        _kv: &Self::Kv,
        _pieces: &[KvPiece],
        _window: WindowId,
        _at: usize,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("windows".to_owned()))
    }

    /// Writes KV from a window, as [`Device::kv_to_window`] packed it; the slots are held. The window may be written when this
    /// returns.
    fn kv_from_window(
        &mut self,
        _kv: &mut Self::Kv,
        _pieces: &[KvPiece],
        _window: WindowId,
        _at: usize,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("windows".to_owned()))
    }

    /// Partials for up to `rows` rows.
    fn partials(&mut self, rows: usize, geometry: AttentionGeometry) -> Result<Partials<Self::Tensor>, DeviceError> {
        Ok(Partials {
            out: self.tensor(rows, geometry.q_dim())?,
            lse: self.tensor(rows, geometry.heads as usize)?,
            count: Vec::with_capacity(rows),
        })
    }

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

    /// Marks the calls so far that are not urgent, for [`Device::reached`]. Each of the two `lane`s has one mark.
    fn mark(&mut self, _lane: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    /// `None` once everything before the lane's mark has happened; until then, when to ask again. A device on which
    /// nothing is queued, or that cannot tell, says `None`, and its reads wait.
    fn reached(&mut self, _lane: usize) -> Result<Option<Duration>, DeviceError> {
        Ok(None)
    }

    /// Marks, and begins to bring here what [`Device::read_staged`] of the same lane and range will be asked for, so that
    /// calls made meanwhile do not delay it.
    fn read_ahead(
        &mut self,
        lane: usize,
        _tensor: &Self::Tensor,
        _rows: Range<usize>,
        _cols: Range<usize>,
    ) -> Result<(), DeviceError> {
        self.mark(lane)
    }

    /// As [`Device::read`], after [`Device::read_ahead`] of the same and once its mark is reached.
    fn read_staged(
        &mut self,
        _lane: usize,
        tensor: &Self::Tensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        self.read(tensor, rows, cols, out)
    }

    /// Whether [`Device::sample_ahead`] works here; where it does not, logits are read and sampled on the host.
    fn samples(&self) -> bool {
        false
    }

    /// Draws a token from each leading row of `logits` (one for each of `rows`) by the rules of `lagoon_runner::sampling`,
    /// and marks: eight bytes of a row come to the host instead of its logits.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] where [`Device::samples`] says no.
    fn sample_ahead(&mut self, _lane: usize, _logits: &Self::Tensor, _rows: &[SampleRow]) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("sampling".to_owned()))
    }

    /// Appends what [`Device::sample_ahead`] of the same lane drew, in the order of its rows. Waits.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] where [`Device::samples`] says no.
    fn sampled(&mut self, _lane: usize, _out: &mut Vec<SampledRow>) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("sampling".to_owned()))
    }

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
    fn kv_read_pieces(&mut self, kv: &Self::Kv, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        pieces.iter().try_for_each(|p| self.kv_read(kv, p.layer as usize, p.slot0, p.tokens, out))
    }

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
