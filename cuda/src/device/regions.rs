//! Shared device regions: memory that several processes' devices on one host map ([`Arena`]), through which KV moves
//! between devices without passing the host. Page groups of stores are private to a process; a region holds KV in the
//! canonical layout, packed and unpacked by kernels.
//!
//! Invariants: a packing returns when all calls before it and the copy itself are complete; an unpacking returns when
//! it has read the region. The two processes agree by messages which one may write which part.

use super::CudaDevice;
use super::memory::CudaKv;
use super::shared_region::OwnSharedRegion;
use crate::arena::Arena;
use lagoon_backend::{DeviceError, KvPiece, RegionId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The shared regions of one device.
#[derive(Debug, Default)]
pub(super) struct Regions {
    arenas: BTreeMap<RegionId, Arc<Arena>>,
}

impl CudaDevice {
    pub(super) fn make_region(&mut self, bytes: usize) -> Result<lagoon_backend::OwnRegion, DeviceError> {
        let arena = Arc::new(Arena::new(&self.context, bytes)?);
        let kernels = self.work_streams[0].kernels().clone();
        let shared = OwnSharedRegion::new(&self.context, kernels, Arc::clone(&arena))?;
        let region = RegionId(u32::try_from(self.regions.arenas.len() + 1).expect("few regions"));
        self.regions.arenas.insert(region, arena);
        Ok((region, Arc::new(shared)))
    }

    /// Copies KV between a store and a shared region by the kernel of this name, and waits.
    ///
    /// # Panics
    /// If the pieces lie beyond the region or the store, or the device has no such region.
    pub(super) fn kv_through(
        &mut self,
        kernel: &'static str,
        kv: &CudaKv,
        pieces: &[KvPiece],
        region: RegionId,
        at: usize,
    ) -> Result<(), DeviceError> {
        let token = kv.shape.layer_token_bytes();
        let bytes: usize = pieces.iter().map(|piece| piece.tokens as usize * token).sum();
        let arena = self.regions.arenas.get(&region).expect("a region of this device");
        let end = at.checked_add(bytes);
        assert!(at.is_multiple_of(16) && end.is_some_and(|end| end <= arena.bytes()), "pieces beyond the region");
        let mut address = arena.address() + at as u64;
        self.work_stream().settle()?;
        self.kv_used()?;
        for piece in pieces {
            assert!(kv.has(piece.slot0..piece.slot0 + piece.tokens), "slots that go through a region are held");
            self.kv_copy(kernel, kv, piece.layer as usize, piece.slot0, address, piece.tokens as usize)?;
            address += (piece.tokens as usize * token) as u64;
        }
        Ok(self.work_stream().synchronize()?)
    }

    pub(super) fn unpack_region(
        &mut self,
        kv: &mut CudaKv,
        pieces: &[KvPiece],
        region: RegionId,
        at: usize,
    ) -> Result<(), DeviceError> {
        self.work_stream().settle()?;
        let end = pieces.iter().map(|piece| piece.slot0 + piece.tokens).max().unwrap_or(0);
        self.kv_ensure(kv, end)?;
        let own = |piece: &KvPiece| kv.has_own(piece.slot0..piece.slot0 + piece.tokens);
        assert!(pieces.iter().all(own), "slots that are written are held, and not shared");
        self.kv_through("kv_unpack", kv, pieces, region, at)
    }
}
