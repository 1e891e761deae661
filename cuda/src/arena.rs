//! An arena ([`Arena`]): one piece of physical device memory, mapped once, that other processes on this host can map.
//!
//! It is exported by file descriptor once, when peers connect, never by page group: a peer maps the whole arena and
//! receives offsets from then on. The memory can be registered for GPUDirect RDMA if the device supports it.

use crate::driver::{Context, CudaError, Physical, Reservation, Sharing};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

/// Device memory at one address, shared with other processes or imported from one.
#[derive(Debug)]
pub struct Arena {
    range: Reservation,
    physical: Arc<Physical>,
    descriptor: OnceLock<OwnedFd>,
}

impl Arena {
    /// An arena of at least `bytes` bytes, rounded up to whole pages, that can be exported. Its contents are
    /// undefined.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Unsupported`] on a device that cannot share.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.max(1).next_multiple_of(context.granularity());
        Self::mapped(context, Physical::new(context, bytes, Sharing::FileDescriptor)?)
    }

    /// Imports the arena that another process on this host exported; `bytes` is the size that it reported.
    ///
    /// # Errors
    /// Those of the driver for any other descriptor or size.
    pub fn import(context: &Arc<Context>, descriptor: BorrowedFd<'_>, bytes: usize) -> Result<Self, CudaError> {
        if bytes == 0 || !bytes.is_multiple_of(context.granularity()) {
            return Err(CudaError::Unsupported(format!("an arena of {bytes} bytes, which are not whole pages")));
        }
        Self::mapped(context, Physical::import(context, descriptor, bytes)?)
    }

    fn mapped(context: &Arc<Context>, physical: Physical) -> Result<Self, CudaError> {
        let physical = Arc::new(physical);
        let mut range = Reservation::new(context, physical.bytes())?;
        range.map(0, &physical)?;
        Ok(Self { range, physical, descriptor: OnceLock::new() })
    }

    /// Device address of the first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.range.address()
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.physical.bytes()
    }

    /// The descriptor that other processes import; made at the first call.
    ///
    /// # Errors
    /// Those of the driver, also for an imported arena.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>, CudaError> {
        use std::os::fd::AsFd;
        if let Some(descriptor) = self.descriptor.get() {
            return Ok(descriptor.as_fd());
        }
        let descriptor = self.physical.export()?;
        Ok(self.descriptor.get_or_init(|| descriptor).as_fd())
    }
}
