//! KV stores with peer access: KV in one arena, which other processes on this host map and attend to directly.
//!
//! The arena has the layers one after the other, each in the canonical layout, slots in order; then a seal tag for
//! each rBlock ([`lagoon_backend::PeerAccess::kv_lent`]). Shape and number of rBlocks determine all offsets.
//!
//! Invariants: in the own arena, the tag of an rBlock is set to 0 before a write to the rBlock begins, in the order
//! of the writing stream; a tag other than 0 is written behind all of the rBlock's contents, and waited for. Another
//! process's arena is never written.

use super::CudaDevice;
use super::memory::{CudaKv, Memory};
use super::shared_region::OwnSharedRegion;
use super::work_stream::WorkStream;
use crate::arena::Arena;
use crate::driver::{CudaError, fill_zero};
use crate::kernels::attention::KvView;
use lagoon_backend::{DeviceError, LentKv, PeerMemory};
use lagoon_types::KvShape;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Bytes of a seal tag.
const TAG_BYTES: usize = size_of::<u64>();
/// Alignment of layers in bytes.
const ALIGNMENT: usize = 256;

/// The arena of a store with peer access; see the module's documentation.
#[derive(Debug)]
pub(super) struct Lent {
    arena: Arc<Arena>,
    shape: KvShape,
    blocks: u32,
    block_tokens: u32,
    /// rBlocks with a tag other than 0; `None` for another process's arena.
    sealed: Option<Vec<bool>>,
}

/// Bytes of a layer, and of the whole arena.
fn sizes(shape: KvShape, blocks: u32, block_tokens: u32) -> Option<(usize, usize)> {
    let slots = blocks.checked_mul(block_tokens).filter(|slots| (1..u32::MAX).contains(slots))?;
    let layer = (slots as usize).checked_mul(shape.layer_token_bytes())?.checked_next_multiple_of(ALIGNMENT)?;
    let tags = blocks as usize * TAG_BYTES;
    Some((layer, layer.checked_mul(shape.layers as usize)?.checked_add(tags)?))
}

fn senseless(blocks: u32, block_tokens: u32) -> DeviceError {
    DeviceError::Unsupported(format!("a store of {blocks} rBlocks of {block_tokens} tokens"))
}

impl Lent {
    fn layer_bytes(&self) -> usize {
        sizes(self.shape, self.blocks, self.block_tokens).expect("it was made with these sizes").0
    }

    pub(super) fn slots(&self) -> u32 {
        self.blocks * self.block_tokens
    }

    pub(super) fn is_own(&self) -> bool {
        self.sealed.is_some()
    }

    pub(super) fn view(&self, layer: usize) -> KvView {
        let KvShape { kv_heads, head_dim, dtype, .. } = self.shape;
        let (heads, row) = (u64::from(kv_heads), dtype.row_elements(head_dim) as u64);
        let k = self.arena.address() + (layer * self.layer_bytes()) as u64;
        let v = k + heads * row * dtype.element_bytes() as u64;
        KvView { k, v, token_stride: 2 * heads * row, head_stride: row }
    }

    fn tag_at(&self, block: u32) -> u64 {
        let tags = self.shape.layers as usize * self.layer_bytes();
        self.arena.address() + (tags + block as usize * TAG_BYTES) as u64
    }

    /// Clears the tags of these slots' rBlocks, before `work_stream` writes to them.
    pub(super) fn open(&mut self, work_stream: &WorkStream, slots: Range<u32>) -> Result<(), CudaError> {
        for block in slots.start / self.block_tokens..slots.end.div_ceil(self.block_tokens) {
            let at = self.tag_at(block);
            let sealed = self.sealed.as_mut().expect("another process's memory is not written");
            if std::mem::take(&mut sealed[block as usize]) {
                fill_zero(&work_stream.stream, at, TAG_BYTES)?;
            }
        }
        Ok(())
    }
}

impl CudaDevice {
    pub(super) fn make_lent(
        &mut self,
        shape: KvShape,
        blocks: u32,
        block_tokens: u32,
    ) -> Result<LentKv<CudaKv>, DeviceError> {
        let (_, bytes) = sizes(shape, blocks, block_tokens).ok_or_else(|| senseless(blocks, block_tokens))?;
        let arena = Arc::new(Arena::new(&self.context, bytes)?);
        fill_zero(&self.work_streams[0].stream, arena.address(), arena.bytes())?;
        self.work_streams[0].synchronize()?;
        let kernels = self.work_streams[0].kernels().clone();
        let region = OwnSharedRegion::new(&self.context, kernels, Arc::clone(&arena))?;
        let sealed = Some(vec![false; blocks as usize]);
        let kv = CudaKv::in_arena(shape, Lent { arena, shape, blocks, block_tokens, sealed });
        Ok((kv, Arc::new(region)))
    }

    pub(super) fn map_peer(
        &self,
        shape: KvShape,
        (blocks, block_tokens): (u32, u32),
        memory: &PeerMemory,
    ) -> Result<CudaKv, DeviceError> {
        let (_, needed) = sizes(shape, blocks, block_tokens).ok_or_else(|| senseless(blocks, block_tokens))?;
        let bytes = usize::try_from(memory.bytes).ok().filter(|bytes| *bytes >= needed);
        let why = |why: String| DeviceError::Unsupported(why);
        let bytes = bytes.ok_or_else(|| why(format!("{} bytes hold no {blocks} rBlocks", memory.bytes)))?;
        if !self.context.can_access(&memory.device)? {
            return Err(why("it is of another device, whose memory this one cannot access as a peer".to_owned()));
        }
        let arena = Arc::new(Arena::import(&self.context, memory.descriptor.as_fd(), bytes)?);
        Ok(CudaKv::in_arena(shape, Lent { arena, shape, blocks, block_tokens, sealed: None }))
    }

    /// See [`lagoon_backend::PeerAccess::kv_seal`].
    pub(super) fn seal(&mut self, kv: &mut CudaKv, block: u32, with: u64) -> Result<(), DeviceError> {
        let lent = kv.lent_mut().filter(|lent| lent.is_own() && block < lent.blocks);
        let lent = lent.ok_or_else(|| DeviceError::Unsupported("sealing a store that is not lent".to_owned()))?;
        let at = lent.tag_at(block);
        // Set first: a later write clears the tag, even if writing the tag fails.
        lent.sealed.as_mut().expect("it is one's own")[block as usize] = true;
        self.kv_used()?;
        self.work_stream().settle()?;
        self.work_stream().copy(at, &with.to_le_bytes())?;
        self.kv_written()?;
        Ok(self.work_stream().synchronize()?)
    }

    /// See [`lagoon_backend::PeerAccess::kv_seal_tags`].
    ///
    /// # Panics
    /// If an rBlock lies beyond the store.
    pub(super) fn seal_tags(&mut self, kv: &CudaKv, blocks: &[u32], out: &mut Vec<u64>) -> Result<(), DeviceError> {
        let lent =
            kv.lent().ok_or_else(|| DeviceError::Unsupported("seal tags of a store that is not lent".to_owned()))?;
        let (Some(first), Some(last)) = (blocks.iter().min(), blocks.iter().max()) else { return Ok(()) };
        assert!(*last < lent.blocks, "rBlocks beyond the store");
        let mut bytes = Vec::with_capacity((last - first + 1) as usize * TAG_BYTES);
        // Reads the tags in between as well: one copy is cheaper than many.
        let all = bytes.capacity();
        self.work_stream().read(lent.tag_at(*first), all, |piece| bytes.extend_from_slice(piece))?;
        let (tags, _) = bytes.as_chunks::<TAG_BYTES>();
        out.extend(blocks.iter().map(|block| u64::from_le_bytes(tags[(block - first) as usize])));
        Ok(())
    }
}

impl CudaKv {
    /// A store in an arena.
    fn in_arena(shape: KvShape, lent: Lent) -> Self {
        let slots = lent.slots();
        Self::over_memory(shape, Memory::Lent(lent), slots)
    }
}
