//! Windows: memory that two processes' devices on one host map ([`Arena`]), through which KV goes from one to the other
//! without passing the host. Page groups of stores are private, in rows of their own on either side; a window has them in the
//! canonical layout, packed and unpacked by kernels.
//!
//! Invariants: what was called before a packing is in the window when the packing returns; an unpacking has read the window
//! when it returns. Who may write which part of a window when is what the two processes tell each other.

use super::CudaDevice;
use super::memory::CudaKv;
use crate::arena::Arena;
use lagoon_backend::{DeviceError, KvPiece, WindowId};
use std::collections::BTreeMap;
#[cfg(target_os = "linux")]
use std::os::fd::OwnedFd;

/// The windows of one device, by number.
#[derive(Debug, Default)]
pub(super) struct Windows {
    arenas: BTreeMap<WindowId, Arena>,
    numbers: u32,
}

impl Windows {
    pub(super) fn add(&mut self, arena: Arena) -> WindowId {
        self.numbers += 1;
        let window = WindowId(self.numbers);
        self.arenas.insert(window, arena);
        window
    }

    /// Unmaps one. Nothing uses it: packing and unpacking wait for their end.
    pub(super) fn remove(&mut self, window: WindowId) {
        self.arenas.remove(&window);
    }
}

impl CudaDevice {
    #[cfg(target_os = "linux")]
    pub(super) fn make_window(&mut self, bytes: usize) -> Result<Option<(WindowId, usize, OwnedFd)>, DeviceError> {
        if !self.context.attributes().shareable {
            return Ok(None);
        }
        let arena = Arena::new(&self.context, bytes)?;
        let descriptor = arena.descriptor()?.try_clone_to_owned();
        let descriptor = descriptor.map_err(|error| DeviceError::Unsupported(format!("a window: {error}")))?;
        let bytes = arena.bytes();
        Ok(Some((self.windows.add(arena), bytes, descriptor)))
    }

    /// Moves KV between a store and a window, by the kernel of this name, and waits.
    ///
    /// # Panics
    /// If the pieces lie beyond the window or the store, or there is no such window.
    pub(super) fn kv_through(
        &mut self,
        kernel: &'static str,
        kv: &CudaKv,
        pieces: &[KvPiece],
        window: WindowId,
        at: usize,
    ) -> Result<(), DeviceError> {
        let token = kv.shape.layer_token_bytes();
        let bytes: usize = pieces.iter().map(|piece| piece.tokens as usize * token).sum();
        let arena = self.windows.arenas.get(&window).expect("a window that is open");
        let end = at.checked_add(bytes);
        assert!(at.is_multiple_of(16) && end.is_some_and(|end| end <= arena.bytes()), "pieces beyond the window");
        let mut address = arena.address() + at as u64;
        self.lane().settle()?;
        self.kv_used()?;
        for piece in pieces {
            assert!(kv.has(piece.slot0..piece.slot0 + piece.tokens), "slots that go through a window are held");
            self.kv_copy(kernel, kv, piece.layer as usize, piece.slot0, address, piece.tokens as usize)?;
            address += (piece.tokens as usize * token) as u64;
        }
        Ok(self.lane().synchronize()?)
    }

    pub(super) fn unpack_window(
        &mut self,
        kv: &mut CudaKv,
        pieces: &[KvPiece],
        window: WindowId,
        at: usize,
    ) -> Result<(), DeviceError> {
        self.lane().settle()?;
        let end = pieces.iter().map(|piece| piece.slot0 + piece.tokens).max().unwrap_or(0);
        self.kv_ensure(kv, end)?;
        let own = |piece: &KvPiece| kv.has_own(piece.slot0..piece.slot0 + piece.tokens);
        assert!(pieces.iter().all(own), "slots that are written are held, and not shared");
        self.kv_through("kv_unpack", kv, pieces, window, at)
    }
}
