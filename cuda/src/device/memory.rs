//! Tensors, weights and KV stores on the device.
//!
//! Invariants: a weight's rows begin at multiples of 16 bytes, with zeros between (`kernels::weight_ld`). A KV store
//! is one row of a [`VirtualKv`]: its slots are contiguous in every plane, memory is mapped when a slot is first used,
//! and what was never written is zero.

use super::lane::Lane;
use crate::driver::{Buffer, Context, CudaError, fill_zero};
use crate::kernels::attention::KvView;
use crate::kernels::weight_ld;
use crate::virtual_kv::{VirtualKv, VirtualKvError};
use lagoon_backend::{DeviceError, WeightSource};
use lagoon_kv::vmm::{VmmConfig, VmmError, VmmLayout, VmmShape};
use lagoon_types::{DType, KvShape};
use std::sync::Arc;

/// Bytes of a weight that are padded and staged at once.
const WEIGHT_PIECE_BYTES: usize = 1 << 20;

/// A size or count that kernels see.
///
/// # Panics
/// If it does not fit: shapes are far below that.
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
    pub(super) fn new(context: &Arc<Context>, lane: &Lane, rows: usize, cols: usize) -> Result<Self, CudaError> {
        let buffer = Buffer::new(context, "a tensor", rows * cols * 4)?;
        fill_zero(&lane.stream, buffer.address(), rows * cols * 4)?;
        // Another lane may be the first to use it.
        lane.stream.synchronize()?;
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

/// A weight `[rows][cols]` in its own element type.
#[derive(Debug)]
pub struct CudaWeight {
    pub(super) buffer: Buffer,
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl CudaWeight {
    pub(super) fn new(context: &Arc<Context>, lane: &mut Lane, source: &WeightSource) -> Result<Self, CudaError> {
        let (rows, cols, dtype) = (source.rows(), source.cols, source.dtype);
        let (given, stored) = (cols * dtype.size(), weight_ld(cols, dtype.size()) * dtype.size());
        let buffer = Buffer::new(context, "a weight", rows * stored)?;
        let mut at = 0;
        let mut padded = Vec::new();
        for (part_rows, bytes) in &source.parts {
            assert_eq!(bytes.len(), part_rows * given, "a part's bytes match its shape");
            if given == stored {
                lane.copy(buffer.range(at, bytes.len()), bytes)?;
                at += bytes.len();
                continue;
            }
            for piece in bytes.chunks((WEIGHT_PIECE_BYTES / stored).max(1) * given) {
                padded.clear();
                for row in piece.chunks_exact(given) {
                    padded.extend_from_slice(row);
                    padded.resize(padded.len() + stored - given, 0);
                }
                lane.copy(buffer.range(at, padded.len()), &padded)?;
                at += padded.len();
            }
        }
        // Another lane may be the first to use it.
        lane.stream.synchronize()?;
        Ok(Self { buffer, dtype, rows, cols })
    }

    /// Elements from one row to the next.
    pub(super) fn ld(&self) -> u32 {
        word(weight_ld(self.cols, self.dtype.size()))
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

/// A KV store. See the module for invariants.
#[derive(Debug)]
pub struct CudaKv {
    pub(super) shape: KvShape,
    pub(super) slots: usize,
    memory: Arc<VirtualKv>,
    /// The only row; `None` where somebody else maps and unmaps.
    row: Option<usize>,
    /// Slots that have memory, and stripes that were zeroed for them.
    mapped: u32,
    zeroed: u32,
}

impl CudaKv {
    /// A store of `slots` tokens; `layers_per_group` layers share page groups.
    pub(super) fn new(
        context: &Arc<Context>,
        shape: KvShape,
        slots: usize,
        layers_per_group: u32,
    ) -> Result<Self, DeviceError> {
        let layout = VmmLayout::new(VmmShape {
            layers: shape.layers,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            element_bytes: word(shape.dtype.size()),
            page_group_bytes: context.granularity() as u64,
            layers_per_group,
        })
        .map_err(VirtualKvError::from)?;
        let tokens = word(slots.max(1));
        let config = VmmConfig {
            batch_max: 1,
            context_max: tokens,
            guests_max: 0,
            guest_blocks_max: 0,
            stripes: layout.stripes_for(tokens),
            address_bytes_max: 1 << 46,
            grow: false,
            eager_stripes: 0,
            reclaim_below: 0,
        };
        let memory = Arc::new(VirtualKv::new(context, layout, config)?);
        let row = Some(memory.alloc_reqid()?);
        Ok(Self { shape, slots, memory, row, mapped: 0, zeroed: 0 })
    }

    /// All slots of `memory`, whose rows somebody else maps and unmaps: a slot is used only while it has memory, and is
    /// not zeroed.
    pub(super) fn over(shape: KvShape, memory: Arc<VirtualKv>) -> Result<Self, DeviceError> {
        let of = memory.layout().shape();
        let wanted = (shape.layers, shape.kv_heads, shape.head_dim, word(shape.dtype.size()));
        if (of.layers, of.kv_heads, of.head_dim, of.element_bytes) != wanted {
            return Err(DeviceError::Unsupported(format!("a store of {shape:?} over memory laid out for {of:?}")));
        }
        let slots = memory.slots();
        Ok(Self { shape, slots: slots as usize, memory, row: None, mapped: slots, zeroed: 0 })
    }

    /// Slots that have memory: those before this one.
    pub(super) fn mapped(&self) -> u32 {
        self.mapped
    }

    /// A layer's planes.
    pub(super) fn view(&self, layer: usize) -> KvView {
        let plane = self.memory.layer(word(layer));
        KvView { k: plane.k, v: plane.v, token_stride: plane.token_stride, head_stride: u64::from(self.shape.head_dim) }
    }

    /// Whether heads are aligned for tensor cores, in every layer.
    pub(super) fn is_aligned(&self) -> bool {
        (0..self.shape.layers as usize).all(|layer| self.view(layer).is_aligned(self.shape.dtype.size() as u64))
    }

    /// Makes memory lie behind the slots before `end`. Returns whether `lane` zeroes some, which the other lane then
    /// has to wait for.
    pub(super) fn ensure(&mut self, lane: &Lane, end: u32) -> Result<bool, DeviceError> {
        if end <= self.mapped {
            return Ok(false);
        }
        assert!(end as usize <= self.slots, "slots beyond the store");
        self.memory.step(&[end])?;
        debug_assert_eq!(self.row.map(|row| self.memory.slot0(row)), Some(0), "the only row begins the tensors");
        let layout = self.memory.layout();
        let (from, to) = (self.zeroed, layout.stripes_for(end));
        if to > from {
            let page = layout.shape().page_group_bytes;
            let bytes = usize::try_from(u64::from(to - from) * page).expect("addresses are 64 bits");
            for base in self.memory.tensors() {
                fill_zero(&lane.stream, base + u64::from(from) * page, bytes)?;
            }
            self.memory.used_by(&lane.stream)?;
            self.zeroed = to;
        }
        self.mapped = end;
        Ok(to > from)
    }

    /// Says that the lane's work so far uses this memory.
    pub(super) fn used_by(&self, lane: &Lane) -> Result<(), DeviceError> {
        Ok(self.memory.used_by(&lane.stream)?)
    }

    /// What mapping has cost.
    #[must_use]
    pub fn counters(&self) -> lagoon_kv::vmm::VmmCounters {
        self.memory.counters()
    }
}
