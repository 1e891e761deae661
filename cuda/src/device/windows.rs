//! Windows: memory that several processes' devices on one host map ([`Arena`]), through which KV goes from one to another
//! without passing the host. Page groups of stores are private, in rows of their own on either side; a window has them in the
//! canonical layout, packed and unpacked by kernels.
//!
//! Invariants: what was called before a packing is in the window when the packing returns; an unpacking has read the window
//! when it returns. Who may write which part of a window when is what the two processes tell each other.

use super::CudaDevice;
use super::memory::CudaKv;
#[cfg(target_os = "linux")]
use super::shared_window::SharedWindow;
use crate::arena::Arena;
use lagoon_backend::{DeviceError, KvPiece, WindowId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The windows of one device, by number.
#[derive(Debug, Default)]
pub(super) struct Windows {
    arenas: BTreeMap<WindowId, Arc<Arena>>,
}

impl CudaDevice {
    #[cfg(target_os = "linux")]
    pub(super) fn make_window(&mut self, bytes: usize) -> Result<Option<lagoon_backend::OwnWindow>, DeviceError> {
        if !self.context.attributes().shareable {
            return Ok(None);
        }
        let arena = Arc::new(Arena::new(&self.context, bytes)?);
        let kernels = self.lanes[0].kernels().clone();
        let shared = SharedWindow::new(&self.context, kernels, Arc::clone(&arena))?;
        let window = WindowId(u32::try_from(self.windows.arenas.len() + 1).expect("few windows"));
        self.windows.arenas.insert(window, arena);
        Ok(Some((window, Arc::new(shared))))
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
