//! Capabilities that only some backends have: six traits that a [`Device`] hands out or refuses.
//!
//! No method here or in [`Device`] has a default. A device hands a capability out (`Some(self)`) or refuses it by
//! name ([`crate::without`]), and a wrapper forwards or refuses it: a forgotten capability does not compile. A caller
//! that asks for a capability handles its absence. Dispatch is static: the type behind each `impl` is known where the
//! caller is compiled for a device. See docs/adr/0020-device-capabilities.md.

#[cfg(doc)]
use crate::Device;
use crate::error::DeviceError;
use crate::operands::KvPiece;
use bytemuck::{Pod, Zeroable};
use lagoon_types::{KvShape, KvSpace};
use std::ops::Range;
#[cfg(target_os = "linux")]
use std::sync::Arc;
use std::time::Duration;

/// Page-group counters of a KV store with virtual memory, all layers together (vAttention, §6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct KvCounters {
    /// Page groups of an rBlock; of a stripe if the store is flat.
    pub groups_per_block: u64,
    /// Free: unmapped page groups. Kept: mapped page groups without an owner.
    pub free: u64,
    pub kept: u64,
    /// Page groups mapped while a step waited (`in_step`), one iteration ahead (`ahead`), and for the next sequence
    /// before it arrived (`eager`).
    pub in_step: u64,
    pub ahead: u64,
    pub eager: u64,
    /// Page groups that were still mapped where they were needed.
    pub reused: u64,
    /// Kept page groups that were unmapped because none were free.
    pub reclaimed: u64,
    /// Page groups mapped a second time, for a shared prefix.
    pub shared: u64,
    /// Requests refused for want of memory.
    pub refused: u64,
}

/// Launches of repeatable steps ([`Queued::begin_repeatable`]) since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LaunchCounters {
    /// Launched kernel by kernel.
    pub eager: u64,
    /// Captured as a graph, then launched.
    pub captured: u64,
    /// Launched as a graph that was captured before.
    pub replayed: u64,
    /// Graphs evicted to make room for others.
    pub evicted: u64,
}

/// Sampling parameters of one row of logits, in the layout that the kernels read.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SampleRow {
    /// Uniform in `[0, 1)`.
    pub uniform: f64,
    /// 0 takes the likeliest token.
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    /// 0 keeps all tokens.
    pub top_k: u32,
    /// First word of the row's mask among all masks; [`SampleRow::UNMASKED`]: every token may be drawn.
    pub mask: u32,
    /// 0.
    pub reserved: u32,
}

impl SampleRow {
    /// As [`SampleRow::mask`], where the row has none.
    pub const UNMASKED: u32 = u32::MAX;
}

/// Result of sampling one row of logits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SampledRow {
    /// The sampled token; if `status` is not 0, the token at fault.
    pub token: u32,
    /// 0: sampled; 1: a logit is NaN or infinitely likely; 2: no token is possible.
    pub status: u32,
}

/// Number of a shared device region ([`SharedRegions::region`]) of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RegionId(pub u32);

/// A KV store and its arenas, one a layer.
#[cfg(target_os = "linux")]
pub type SharedKv<K> = (K, Vec<crate::SharedArena>);

/// A shared device region: its number on the device, and its handle for transports.
#[cfg(target_os = "linux")]
pub type OwnRegion = (RegionId, Arc<dyn crate::SharedRegion>);

/// A KV store with peer access, and the handle of its region.
#[cfg(target_os = "linux")]
pub type LentKv<K> = (K, Arc<dyn crate::SharedRegion>);

/// Queued execution: streams, graphs and marks.
///
/// `micro_batch` is 0 for the local micro-batch and 1 for the remote one; each has one mark and one staging buffer.
/// Device calls return before their work is done. On a device without this capability the work of a call is done when
/// the call returns, or a read waits for it.
pub trait Queued {
    /// As [`Device::Tensor`].
    type Tensor;

    /// Sets whether the next calls are work that another instance waits for. Urgent work runs on a stream of higher priority.
    ///
    /// A tensor is used by urgent calls only or by others only. A KV store is used by both, and both see what
    /// [`Device::kv_write`] wrote.
    fn urgent(&mut self, urgent: bool);

    /// Starts a step that may be captured as a CUDA graph and replayed for equal shapes. The step ends at the next call that
    /// waits; its work need not begin before.
    ///
    /// # Errors
    /// If the device failed.
    fn begin_repeatable(&mut self) -> Result<(), DeviceError>;

    /// How repeatable steps were launched; `None` if the device captures no graphs.
    fn launches(&mut self) -> Option<LaunchCounters>;

    /// Ends a step whose result is discarded. Its recorded calls are submitted; later writes of other work to their
    /// outputs are ordered behind them.
    ///
    /// # Errors
    /// If the device failed.
    fn abort_step(&mut self) -> Result<(), DeviceError>;

    /// Sets the mark of a micro-batch behind all calls so far that are not urgent.
    ///
    /// # Errors
    /// If the device failed.
    fn mark(&mut self, micro_batch: usize) -> Result<(), DeviceError>;

    /// `None` once everything before the mark has happened; until then, the time after which to ask again.
    ///
    /// # Errors
    /// If the device failed.
    fn reached(&mut self, micro_batch: usize) -> Result<Option<Duration>, DeviceError>;

    /// Starts a copy of this range to pinned host memory for [`Queued::read_staged`], and sets the mark behind it. Later calls
    /// do not delay the copy.
    ///
    /// # Errors
    /// If the device failed.
    fn read_ahead(
        &mut self,
        micro_batch: usize,
        tensor: &Self::Tensor,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<(), DeviceError>;

    /// Appends the range that [`Queued::read_ahead`] copied, once its mark is reached.
    ///
    /// # Errors
    /// If the device failed.
    fn read_staged(
        &mut self,
        micro_batch: usize,
        tensor: &Self::Tensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError>;
}

/// Sampling on the device: eight bytes of a row come to the host instead of its logits. Without it, logits are read and
/// sampled on the host.
pub trait Sampling {
    /// As [`Device::Tensor`].
    type Tensor;

    /// Draws a token from each leading row of `logits` (one for each of `rows`) by the rules of `lagoon_runner::sampling`,
    /// and sets the mark of the micro-batch ([`Queued::mark`]) behind the draws.
    ///
    /// `masks`: of each row that names one ([`SampleRow::mask`]), one bit for each token of the vocabulary, 32 a word, the lowest
    /// first. Logits of tokens whose bits are not set become negative infinity; status 2 where none is left.
    ///
    /// # Errors
    /// If the device failed.
    fn sample_ahead(
        &mut self,
        micro_batch: usize,
        logits: &mut Self::Tensor,
        rows: &[SampleRow],
        masks: &[u32],
    ) -> Result<(), DeviceError>;

    /// Appends the draws of the last [`Sampling::sample_ahead`] of this micro-batch, in the order of its rows. Waits.
    ///
    /// # Errors
    /// If the device failed.
    fn sampled(&mut self, micro_batch: usize, out: &mut Vec<SampledRow>) -> Result<(), DeviceError>;
}

/// Virtual memory behind KV stores (vAttention, §4). Without it every slot of a store has memory from the start, and stores
/// have no address rows.
pub trait VirtualMemory {
    /// As [`Device::Kv`].
    type Kv;

    /// Address space of a store for `requested.blocks` rBlocks: `requested` with its address rows if its rBlocks are whole page groups and
    /// the rows fit the address space, else flat.
    fn kv_space(&self, shape: KvShape, requested: KvSpace) -> KvSpace;

    /// A KV store with this address space. Slots that were never written hold no meaningful bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], or [`DeviceError::Unsupported`] for address rows that
    /// [`kv_space`](VirtualMemory::kv_space) makes flat.
    fn kv_in(&mut self, shape: KvShape, space: &KvSpace) -> Result<Self::Kv, DeviceError>;

    /// Maps physical memory behind the rBlocks of these slots, all or none, before they are written. rBlocks with memory keep
    /// it. A store of [`Device::kv`] needs no such call.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], with nothing changed.
    fn kv_hold(&mut self, kv: &mut Self::Kv, slots: &[Range<u32>]) -> Result<(), DeviceError>;

    /// Releases the physical memory of these slots (whole rBlocks): it may be mapped at other slots from now on.
    ///
    /// # Errors
    /// If the device failed.
    fn kv_release(&mut self, kv: &mut Self::Kv, slots: Range<u32>) -> Result<(), DeviceError>;

    /// Maps the physical memory of slots `from..` at `to..` as well, for `tokens` slots: both ranges alias. Both are whole
    /// rBlocks of a store with address rows; `from` is held, `to` is not. Neither is written before the other is released.
    ///
    /// # Errors
    /// If the driver refuses; nothing has changed then.
    fn kv_share(&mut self, kv: &mut Self::Kv, from: u32, to: u32, tokens: u32) -> Result<(), DeviceError>;

    /// Names the slots that the next step may write first, and the address row of the sequence that begins next: the device may
    /// map memory there meanwhile.
    fn kv_expect(&mut self, kv: &mut Self::Kv, next: &[u32], row: Option<u32>);

    /// Page groups of this store; `None` if it is flat and has none.
    fn kv_counters(&self, kv: &Self::Kv) -> Option<KvCounters>;
}

/// KV stores in host memory that transports and other processes read, and that transports fill, while the device works on other
/// slots.
pub trait SharedArenas {
    /// As [`Device::Kv`].
    type Kv;

    /// A store as of [`Device::kv`], with an arena for each layer: slots in order, in the canonical layout. Accesses exclude
    /// each other in granules of `granule_slots` slots (not 0).
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    #[cfg(target_os = "linux")]
    fn kv_shared(
        &mut self,
        shape: KvShape,
        slots: usize,
        granule_slots: usize,
    ) -> Result<SharedKv<Self::Kv>, DeviceError>;
}

/// Shared device regions: device memory that other processes on this host map, through which KV goes from one device's store to
/// another's without passing the host.
pub trait SharedRegions {
    /// As [`Device::Kv`].
    type Kv;

    /// A region of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], or that of the driver.
    #[cfg(target_os = "linux")]
    fn region(&mut self, bytes: usize) -> Result<OwnRegion, DeviceError>;

    /// Packs KV into a region from byte `at` (a multiple of 16), one piece behind the other. The copy is complete on return.
    ///
    /// # Errors
    /// If the device failed.
    fn kv_to_region(
        &mut self,
        kv: &Self::Kv,
        pieces: &[KvPiece],
        region: RegionId,
        at: usize,
    ) -> Result<(), DeviceError>;

    /// Writes KV that [`SharedRegions::kv_to_region`] packed to held slots. The region may be overwritten on return.
    ///
    /// # Errors
    /// If the device failed.
    fn kv_from_region(
        &mut self,
        kv: &mut Self::Kv,
        pieces: &[KvPiece],
        region: RegionId,
        at: usize,
    ) -> Result<(), DeviceError>;
}

/// Peer access (P2P): a creditor's KV store that debtors on this host map and attend to in place.
///
/// Each rBlock of such a store has a seal tag: 0 while the rBlock is open, and the tag of the last [`PeerAccess::kv_seal`]
/// afterwards. A write to an rBlock sets its tag to 0 before anything else of it changes, for every reader of the memory.
pub trait PeerAccess {
    /// As [`Device::Kv`].
    type Kv;

    /// The creditor's side: a store of `blocks` rBlocks that other processes can map.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], or that of the driver.
    #[cfg(target_os = "linux")]
    fn kv_lent(&mut self, shape: KvShape, blocks: u32, block_tokens: u32) -> Result<LentKv<Self::Kv>, DeviceError>;

    /// Seals an rBlock of a store of [`PeerAccess::kv_lent`] with a tag other than 0, behind all calls so far. Every process
    /// that maps the memory sees the rBlock and its tag on return.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a store that is not lent.
    fn kv_seal(&mut self, kv: &mut Self::Kv, block: u32, tag: u64) -> Result<(), DeviceError>;

    /// The debtor's side: maps the store that another process has made by [`PeerAccess::kv_lent`], for reading. Its content may
    /// change at any time: [`PeerAccess::kv_seal_tags`] detects that.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if this device cannot access the memory's device or the memory is too small for the shape;
    /// that of the driver.
    #[cfg(target_os = "linux")]
    fn kv_map(
        &mut self,
        shape: KvShape,
        blocks: u32,
        block_tokens: u32,
        memory: crate::PeerMemory,
    ) -> Result<Self::Kv, DeviceError>;

    /// Appends the seal tags of these rBlocks, read behind all calls so far. An rBlock with the tag of its seal has not
    /// changed since, so that all attention to it until now is right.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a store that is neither lent nor mapped.
    fn kv_seal_tags(&mut self, kv: &Self::Kv, blocks: &[u32], out: &mut Vec<u64>) -> Result<(), DeviceError>;
}

/// Refuses capabilities by name, in an `impl` of [`Device`]: `without!(queued, peer_access);`.
#[macro_export]
macro_rules! without {
    (@ queued) => {
        fn queued(&mut self) -> Option<&mut (impl $crate::Queued<Tensor = Self::Tensor> + ?Sized)> {
            None::<&mut dyn $crate::Queued<Tensor = Self::Tensor>>
        }
    };
    (@ sampling) => {
        fn sampling(&mut self) -> Option<&mut (impl $crate::Sampling<Tensor = Self::Tensor> + ?Sized)> {
            None::<&mut dyn $crate::Sampling<Tensor = Self::Tensor>>
        }
    };
    (@ virtual_memory) => {
        $crate::without!(@ virtual_memory VirtualMemory);
    };
    (@ shared_arenas) => {
        $crate::without!(@ shared_arenas SharedArenas);
    };
    (@ shared_regions) => {
        $crate::without!(@ shared_regions SharedRegions);
    };
    (@ peer_access) => {
        $crate::without!(@ peer_access PeerAccess);
    };
    (@ $capability:ident $of:ident) => {
        fn $capability(&mut self) -> Option<&mut (impl $crate::$of<Kv = Self::Kv> + ?Sized)> {
            None::<&mut dyn $crate::$of<Kv = Self::Kv>>
        }
    };
    ($($capability:ident),+ $(,)?) => {
        $($crate::without!(@ $capability);)+
    };
}
