//! Tensors and KV stores on the device.
//!
//! Invariants: a KV store's slots are addresses in a [`VirtualKv`], contiguous in every plane. A flat store is one row: memory is
//! mapped at the first use of a slot, and unwritten slots are zero. A store with address rows ([`KvSpace`]) has
//! memory behind held rBlocks only.

#[cfg(target_os = "linux")]
use super::lent::Lent;
use super::work_stream::WorkStream;
use crate::driver::{Buffer, Context, CudaError, encode_boxes, fill_zero};
use crate::kernels::attention::{KvView, Store};
use crate::kernels::boxes::KvMaps;
use crate::virtual_kv::{VirtualKv, VirtualKvError};
use lagoon_backend::{DeviceError, KvCounters};
use lagoon_kv::vmm::{VmmConfig, VmmCounters, VmmError, VmmLayout, VmmShape};
use lagoon_types::{KvShape, KvSpace};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// A size or count as kernels see it.
///
/// # Panics
/// If it does not fit u32, which shapes are far below.
pub(super) fn word(n: usize) -> u32 {
    u32::try_from(n).expect("shapes fit u32")
}

/// f32 activations `[rows][cols]`.
#[derive(Debug)]
pub struct CudaTensor {
    pub(super) buffer: Buffer,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl CudaTensor {
    pub(super) fn new(
        context: &Arc<Context>,
        work_stream: &WorkStream,
        rows: usize,
        cols: usize,
    ) -> Result<Self, CudaError> {
        let buffer = Buffer::new(context, "a tensor", rows * cols * 4)?;
        fill_zero(&work_stream.stream, buffer.address(), rows * cols * 4)?;
        // Another stream may use it first.
        work_stream.stream.synchronize()?;
        Ok(Self { buffer, rows, cols })
    }

    /// The address of a row's first element.
    pub(super) fn row(&self, row: usize) -> u64 {
        self.buffer.range(row * self.cols * 4, 0)
    }

    pub(super) fn address(&self) -> u64 {
        self.buffer.address()
    }
}

impl From<VirtualKvError> for DeviceError {
    fn from(error: VirtualKvError) -> Self {
        match error {
            VirtualKvError::Driver(error) => error.into(),
            VirtualKvError::Lost(..) => Self::Lost(error.to_string()),
            VirtualKvError::Accounting(VmmError::OutOfMemory { needed, .. }) => {
                Self::OutOfMemory { what: "page groups of KV".to_owned(), bytes: needed }
            }
            VirtualKvError::Accounting(error) => Self::Unsupported(error.to_string()),
        }
    }
}

/// A KV store on the device. See the module for invariants.
#[derive(Debug)]
pub struct CudaKv {
    pub(super) shape: KvShape,
    pub(super) slots: usize,
    memory: Memory,
    /// The only row; `None` if rows are mapped by the caller.
    row: Option<usize>,
    /// Held rBlocks, if the store has address rows.
    rows: Option<Held>,
    /// Slots that have memory, and stripes zeroed for them.
    mapped: u32,
    zeroed: u32,
    maps: OnceLock<Vec<KvMaps>>,
}

/// Memory of a store.
#[derive(Debug)]
pub(super) enum Memory {
    Virtual(Arc<VirtualKv>),
    /// One arena, mapped for good (peer access).
    #[cfg(target_os = "linux")]
    Lent(Lent),
}

impl Memory {
    /// The virtual memory of a store that is mapped piece by piece.
    fn of(&self) -> &Arc<VirtualKv> {
        match self {
            Self::Virtual(memory) => memory,
            #[cfg(target_os = "linux")]
            Self::Lent(_) => unreachable!("what is lent has all its memory, and no rows"),
        }
    }
}

/// rBlocks of a store with address rows that have memory, and which of them share it.
#[derive(Debug)]
struct Held {
    block_tokens: u32,
    /// rBlocks of the layout in one rBlock of the store.
    ratio: u32,
    /// By rBlock of the store: the number of its memory, or [`NONE`].
    blocks: Vec<u64>,
    /// Memory numbers given so far.
    numbers: u64,
    /// Memory mapped at several rBlocks, and their number.
    sharers: BTreeMap<u64, u32>,
    /// Released rBlocks that the driver could not unmap yet; retried at the next call.
    leaving: BTreeSet<u32>,
    /// Arguments of the last [`CudaKv::expect`], to skip repeats.
    expected: (Vec<u32>, Option<u32>),
}

/// Number of an rBlock without memory.
const NONE: u64 = 0;

impl Held {
    /// The rBlocks of these slots.
    fn blocks_of(&self, slots: &Range<u32>) -> Range<u32> {
        slots.start / self.block_tokens..slots.end.div_ceil(self.block_tokens)
    }

    fn holds(&self, block: u32) -> bool {
        self.blocks[block as usize] != NONE
    }

    fn is_shared(&self, block: u32) -> bool {
        !self.sharers.is_empty() && self.sharers.contains_key(&self.blocks[block as usize])
    }

    /// Notes new memory behind a block.
    fn give(&mut self, block: u32) {
        self.numbers += 1;
        self.blocks[block as usize] = self.numbers;
    }

    /// Notes that `to` shares the memory of `from`.
    fn share(&mut self, from: u32, to: u32) {
        let memory = self.blocks[from as usize];
        self.blocks[to as usize] = memory;
        *self.sharers.entry(memory).or_insert(1) += 1;
    }

    /// Notes that a block has no memory any more.
    fn take(&mut self, block: u32) {
        let memory = std::mem::replace(&mut self.blocks[block as usize], NONE);
        if let Some(places) = self.sharers.get_mut(&memory) {
            *places -= 1;
            if *places == 1 {
                self.sharers.remove(&memory);
            }
        }
    }

    /// rBlocks of the layout.
    fn parts(&self, block: u32) -> Range<u32> {
        block * self.ratio..(block + 1) * self.ratio
    }
}

/// The layout of a store whose rBlocks are whole page groups. The fewest layers share one, because a kernel that
/// reads a layer then touches the fewest pages. `None` if rBlocks of `block_tokens` tokens are not whole page groups
/// for any number of layers.
pub(super) fn layout_for(
    context: &Context,
    shape: KvShape,
    block_tokens: u32,
    layers_per_group: Option<u32>,
) -> Option<VmmLayout> {
    let layout = |layers_per_group| VmmLayout::new(vmm_shape(context, shape, layers_per_group)).ok();
    let groups = (1..=shape.layers).filter(|group| shape.layers.is_multiple_of(*group));
    let wanted = groups.filter(|group| layers_per_group.is_none_or(|wanted| wanted == *group));
    wanted.filter_map(layout).find(|layout| block_tokens.is_multiple_of(layout.block_tokens()))
}

/// Tokens of the smallest rBlock that is whole page groups: of `layers_per_group` layers, or of all.
pub(super) fn least_block_tokens(context: &Context, shape: KvShape, layers_per_group: Option<u32>) -> Option<u32> {
    let layers = layers_per_group.unwrap_or(shape.layers);
    VmmLayout::new(vmm_shape(context, shape, layers)).ok().map(|layout| layout.block_tokens())
}

fn vmm_shape(context: &Context, shape: KvShape, layers_per_group: u32) -> VmmShape {
    VmmShape {
        layers: shape.layers,
        kv_heads: shape.kv_heads,
        head_dim: word(shape.dtype.row_elements(shape.head_dim)),
        element_bytes: word(shape.dtype.element_bytes()),
        page_group_bytes: context.granularity() as u64,
        layers_per_group,
    }
}

/// Device addresses of one store in bytes, at most: half of a process's 47 bits.
pub(super) const ADDRESS_BYTES_MAX: u64 = 1 << 46;
/// One in so many page groups of a store is kept free: below that, kept page groups are reclaimed.
const FREE_SHARE: u32 = 64;

impl CudaKv {
    /// A store with address rows.
    pub(super) fn with_rows(
        context: &Arc<Context>,
        shape: KvShape,
        space: &KvSpace,
        layout: VmmLayout,
    ) -> Result<Self, DeviceError> {
        let addresses = space.addresses().expect("slots are numbered by u32");
        let ratio = space.block_tokens / layout.block_tokens();
        let stripes = space.blocks * ratio * layout.block_stripes();
        let config = VmmConfig {
            direct_blocks: addresses * ratio,
            batch_max: 0,
            context_max: 0,
            lent_rows_max: 0,
            lent_row_blocks_max: 0,
            stripes,
            address_bytes_max: ADDRESS_BYTES_MAX,
            grow: false,
            eager_stripes: 0,
            reclaim_below: stripes / FREE_SHARE,
        };
        let memory = Arc::new(VirtualKv::new(context, layout, config)?);
        let mut kv = Self::over(shape, memory)?;
        kv.rows = Some(Held {
            block_tokens: space.block_tokens,
            ratio,
            blocks: vec![NONE; addresses as usize],
            numbers: NONE,
            sharers: BTreeMap::new(),
            leaving: BTreeSet::new(),
            expected: (Vec::new(), None),
        });
        Ok(kv)
    }

    /// See [`lagoon_backend::VirtualMemory::kv_hold`]. Returns whether some of the memory was already mapped.
    pub(super) fn hold(&mut self, slots: &[Range<u32>]) -> Result<bool, DeviceError> {
        let left = self.let_go();
        // A flat store has its memory all along.
        let Some(held) = &mut self.rows else { return Ok(true) };
        if slots.iter().any(|slots| held.leaving.range(held.blocks_of(slots)).next().is_some()) {
            left?;
        }
        let missing: Vec<u32> =
            slots.iter().flat_map(|slots| held.blocks_of(slots)).filter(|block| !held.holds(*block)).collect();
        if missing.is_empty() {
            return Ok(false);
        }
        let reused = self.memory.of().hold(missing.iter().flat_map(|block| held.parts(*block)))?;
        missing.into_iter().for_each(|block| held.give(block));
        Ok(reused)
    }

    /// See [`lagoon_backend::VirtualMemory::kv_share`].
    pub(super) fn share(&mut self, from: Range<u32>, to: u32) -> Result<(), DeviceError> {
        self.let_go()?;
        let unsupported = |what: &str| Err(DeviceError::Unsupported(format!("KV at several addresses: {what}")));
        let Some(held) = &mut self.rows else { return unsupported("this store is flat") };
        let whole = [from.start, from.end, to].iter().all(|slot| slot.is_multiple_of(held.block_tokens));
        let (blocks, to) = (held.blocks_of(&from), to / held.block_tokens);
        if !whole || (to..).zip(blocks.clone()).any(|(to, from)| held.holds(to) || !held.holds(from)) {
            return unsupported("only whole rBlocks that are held, behind others that are not");
        }
        self.memory.of().share_direct(blocks.start * held.ratio..blocks.end * held.ratio, to * held.ratio)?;
        blocks.zip(to..).for_each(|(from, to)| held.share(from, to));
        Ok(())
    }

    /// See [`lagoon_backend::VirtualMemory::kv_release`]. A failure is retried by the next hold or release.
    pub(super) fn release(&mut self, slots: Range<u32>) -> Result<(), DeviceError> {
        if let Some(held) = &mut self.rows {
            held.leaving.extend(held.blocks_of(&slots));
        }
        self.let_go()
    }

    /// Unmaps released rBlocks, consecutive ones in one call.
    fn let_go(&mut self) -> Result<(), DeviceError> {
        let Some(held) = &mut self.rows else { return Ok(()) };
        while let Some(&last) = held.leaving.last() {
            let first = (0..=last).rev().take_while(|block| held.leaving.contains(block)).last().unwrap_or(last);
            self.memory.of().release(first * held.ratio..(last + 1) * held.ratio)?;
            for block in first..=last {
                held.take(block);
                held.leaving.remove(&block);
            }
        }
        Ok(())
    }

    /// See [`lagoon_backend::VirtualMemory::kv_expect`].
    pub(super) fn expect(&mut self, next: &[u32], row: Option<u32>) {
        let Some(held) = &mut self.rows else { return };
        let end = word(held.blocks.len());
        let wanted = |slot: &u32| Some(slot / held.block_tokens).filter(|block| *block < end && !held.holds(*block));
        let expected = (next.iter().filter_map(wanted).collect::<Vec<_>>(), row.as_ref().and_then(wanted));
        if expected == held.expected || (expected.0.is_empty() && expected.1.is_none()) {
            return;
        }
        let ahead = expected.0.iter().flat_map(|block| held.parts(*block));
        self.memory.of().expect(ahead, expected.1.iter().flat_map(|block| held.parts(*block)));
        held.expected = expected;
    }

    /// Whether these slots have memory.
    pub(super) fn has(&self, slots: Range<u32>) -> bool {
        let ends = [slots.start, slots.end.max(slots.start + 1) - 1];
        match &self.rows {
            None => slots.end <= self.mapped,
            Some(held) => slots.end as usize <= self.slots && ends.iter().all(|at| held.holds(at / held.block_tokens)),
        }
    }

    /// Whether these slots have memory of their own: shared memory is never written.
    pub(super) fn has_own(&self, slots: Range<u32>) -> bool {
        let shared = |held: &Held| held.blocks_of(&slots).any(|block| held.is_shared(block));
        #[cfg(target_os = "linux")]
        if self.lent().is_some_and(|lent| !lent.is_own()) {
            return false;
        }
        self.has(slots.clone()) && !self.rows.as_ref().is_some_and(shared)
    }

    /// A store of `slots` tokens; `layers_per_group` layers share page groups.
    pub(super) fn new(
        context: &Arc<Context>,
        shape: KvShape,
        slots: usize,
        layers_per_group: u32,
    ) -> Result<Self, DeviceError> {
        let layout = VmmLayout::new(vmm_shape(context, shape, layers_per_group)).map_err(VirtualKvError::from)?;
        let tokens = word(slots.max(1));
        let config = VmmConfig {
            direct_blocks: 0,
            batch_max: 1,
            context_max: tokens,
            lent_rows_max: 0,
            lent_row_blocks_max: 0,
            stripes: layout.stripes_for(tokens),
            address_bytes_max: ADDRESS_BYTES_MAX,
            grow: false,
            eager_stripes: 0,
            reclaim_below: 0,
        };
        let memory = Arc::new(VirtualKv::new(context, layout, config)?);
        let row = Some(memory.alloc_reqid()?);
        Ok(Self {
            shape,
            slots,
            memory: Memory::Virtual(memory),
            row,
            rows: None,
            mapped: 0,
            zeroed: 0,
            maps: OnceLock::new(),
        })
    }

    /// A store over all slots of `memory`, whose rows the caller maps and unmaps: a slot is used only while it has
    /// memory, and is not zeroed.
    pub(super) fn over(shape: KvShape, memory: Arc<VirtualKv>) -> Result<Self, DeviceError> {
        let of = memory.layout().shape();
        let dtype = shape.dtype;
        let wanted =
            (shape.layers, shape.kv_heads, word(dtype.row_elements(shape.head_dim)), word(dtype.element_bytes()));
        if (of.layers, of.kv_heads, of.head_dim, of.element_bytes) != wanted {
            return Err(DeviceError::Unsupported(format!("a store of {shape:?} over memory laid out for {of:?}")));
        }
        let slots = memory.slots();
        Ok(Self::over_memory(shape, Memory::Virtual(memory), slots))
    }

    /// A store over memory that is completely mapped.
    pub(super) fn over_memory(shape: KvShape, memory: Memory, slots: u32) -> Self {
        let maps = OnceLock::new();
        Self { shape, slots: slots as usize, memory, row: None, rows: None, mapped: slots, zeroed: 0, maps }
    }

    /// The store's arena, if it has peer access.
    #[cfg(target_os = "linux")]
    pub(super) fn lent(&self) -> Option<&Lent> {
        match &self.memory {
            Memory::Lent(lent) => Some(lent),
            Memory::Virtual(_) => None,
        }
    }

    #[cfg(target_os = "linux")]
    pub(super) fn lent_mut(&mut self) -> Option<&mut Lent> {
        match &mut self.memory {
            Memory::Lent(lent) => Some(lent),
            Memory::Virtual(_) => None,
        }
    }

    /// Prepares a write of these held slots by `work_stream` (clears seal tags).
    pub(super) fn open(&mut self, work_stream: &WorkStream, slots: Range<u32>) -> Result<(), DeviceError> {
        match &mut self.memory {
            #[cfg(target_os = "linux")]
            Memory::Lent(lent) => Ok(lent.open(work_stream, slots)?),
            Memory::Virtual(_) => {
                let _nothing_to_say = (work_stream, slots);
                Ok(())
            }
        }
    }

    /// Number of leading slots that have memory.
    pub(super) fn mapped(&self) -> u32 {
        self.mapped
    }

    /// A layer's planes.
    pub(super) fn view(&self, layer: usize) -> KvView {
        let memory = match &self.memory {
            #[cfg(target_os = "linux")]
            Memory::Lent(lent) => return lent.view(layer),
            Memory::Virtual(memory) => memory,
        };
        let plane = memory.layer(word(layer));
        let head_stride = self.shape.dtype.row_elements(self.shape.head_dim) as u64;
        KvView { k: plane.k, v: plane.v, token_stride: plane.token_stride, head_stride }
    }

    /// Properties that all layers share, for the attention plan.
    pub(super) fn store(&self) -> Store {
        let of = |layer| Store::of(&self.view(layer), self.shape.dtype, self.shape.head_dim);
        (1..self.shape.layers as usize).map(of).fold(of(0), |all, one| Store {
            aligned: all.aligned && one.aligned,
            boxed: all.boxed && one.boxed,
            ..all
        })
    }

    /// The tensor maps of each layer, made at the first call.
    pub(super) fn maps(&self) -> Result<&[KvMaps], CudaError> {
        if let Some(maps) = self.maps.get() {
            return Ok(maps);
        }
        let KvShape { layers, kv_heads, dtype, .. } = self.shape;
        let maps: Result<Vec<KvMaps>, CudaError> = (0..layers as usize)
            .map(|layer| KvMaps::new(self.view(layer), dtype, kv_heads, self.slots as u64, encode_boxes))
            .collect();
        let maps = maps?;
        Ok(self.maps.get_or_init(|| maps))
    }

    /// Maps memory behind the slots before `end`. Returns whether `work_stream` zeroes some, which the other stream
    /// must then wait for.
    pub(super) fn ensure(&mut self, work_stream: &WorkStream, end: u32) -> Result<bool, DeviceError> {
        if end <= self.mapped {
            return Ok(false);
        }
        assert!(end as usize <= self.slots, "slots beyond the store");
        let memory = self.memory.of();
        memory.step(&[end])?;
        debug_assert_eq!(self.row.map(|row| memory.slot0(row)), Some(0), "the only row begins the tensors");
        let layout = memory.layout();
        let (from, to) = (self.zeroed, layout.stripes_for(end));
        if to > from {
            let page = layout.shape().page_group_bytes;
            let bytes = usize::try_from(u64::from(to - from) * page).expect("addresses are 64 bits");
            for base in memory.tensors() {
                fill_zero(&work_stream.stream, base + u64::from(from) * page, bytes)?;
            }
            memory.used_by(&work_stream.stream)?;
            self.zeroed = to;
        }
        self.mapped = end;
        Ok(to > from)
    }

    /// Announces that the stream's work so far uses this memory.
    pub(super) fn used_by(&self, work_stream: &mut WorkStream) -> Result<(), DeviceError> {
        match &self.memory {
            Memory::Virtual(memory) => Ok(work_stream.uses(memory)?),
            // An arena is unmapped when its store is dropped, after all work.
            #[cfg(target_os = "linux")]
            Memory::Lent(_) => Ok(()),
        }
    }

    /// Counters of mapping; `None` for an arena.
    pub(super) fn counters(&self) -> Option<KvCounters> {
        let Memory::Virtual(memory) = &self.memory else { return None };
        let (free, kept) = memory.free_and_kept_groups();
        let groups = u64::from(memory.layout().tensors());
        let VmmCounters { in_step, ahead, eager, reused, reclaimed, shared, refused, .. } = memory.counters();
        let [in_step, ahead, eager, reused, reclaimed, shared] =
            [in_step, ahead, eager, reused, reclaimed, shared].map(|stripes| stripes * groups);
        let stripes = self.rows.as_ref().map_or(1, |held| held.ratio * memory.layout().block_stripes());
        let groups_per_block = u64::from(stripes) * groups;
        Some(KvCounters { groups_per_block, free, kept, in_step, ahead, eager, reused, reclaimed, shared, refused })
    }
}
