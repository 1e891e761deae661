//! Device memory, pinned host memory, and asynchronous copies between them.

use super::{Context, CudaError, Stream, check, check_memory, released};
use cudarc::driver::sys;
use std::sync::Arc;

/// Device memory allocated as a whole (`cuMemAlloc`): weights, activations, tables.
///
/// The drop frees it, which waits for the whole device: buffers are made once and kept.
#[derive(Debug)]
pub struct Buffer {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl Buffer {
    /// `bytes` of device memory with undefined contents, at least 256; the address is a multiple of 256.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], which names `what`.
    pub fn new(context: &Arc<Context>, what: &'static str, bytes: usize) -> Result<Self, CudaError> {
        context.make_current()?;
        let mut address = 0;
        // SAFETY: the driver fills the live address.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(256)) };
        check_memory("cuMemAlloc", code, what, bytes)?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }

    /// Device address of the first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device address of byte `at`.
    ///
    /// # Panics
    /// If fewer than `len` bytes follow.
    #[must_use]
    pub fn range(&self, at: usize, len: usize) -> u64 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes), "a range beyond the buffer");
        self.address + at as u64
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: allocated in `new`, freed once; the driver waits for work in flight.
            released(unsafe { sys::cuMemFree_v2(self.address) });
        }
    }
}

/// Pinned (page-locked) host memory, which the device copies from and to by DMA.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    at: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory that this value owns.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `bytes` zeroed bytes.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], which names `what`.
    pub fn new(context: &Arc<Context>, what: &'static str, bytes: usize) -> Result<Self, CudaError> {
        context.make_current()?;
        let mut at = std::ptr::null_mut();
        let bytes = bytes.max(1);
        // SAFETY: the driver fills the live pointer.
        check_memory("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut at, bytes, 0) }, what, bytes)?;
        let at = at.cast::<u8>();
        // SAFETY: the driver has given `bytes` bytes.
        unsafe { at.write_bytes(0, bytes) };
        Ok(Self { context: Arc::clone(context), at, bytes })
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memory. The caller has waited for copies in flight over the bytes that it reads.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.at, self.bytes) }
    }

    /// The memory, to write. The caller has waited for copies in flight over the bytes that it writes.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }

    fn range(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes), "a range beyond the pinned memory");
        // SAFETY: within the allocation, as just asserted.
        unsafe { self.at.add(at) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: allocated in `new`, freed once; the driver waits for copies in flight.
            released(unsafe { sys::cuMemFreeHost(self.at.cast()) });
        }
    }
}

/// Copies `len` bytes of pinned memory to the device, in `stream`. The source must not change until then.
///
/// # Errors
/// Those of the driver.
pub fn copy_to_device(stream: &Stream, to: u64, from: &Pinned, at: usize, len: usize) -> Result<(), CudaError> {
    if len == 0 {
        return Ok(());
    }
    stream.context().make_current()?;
    let source = from.range(at, len);
    // SAFETY: the source has `len` bytes and lives until it is dropped, which waits; `to` is the caller's device range.
    let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, source.cast(), len, stream.handle()) };
    check("cuMemcpyHtoDAsync", code)
}

/// Copies `len` bytes of the device to pinned memory, in `stream`.
///
/// # Errors
/// Those of the driver.
pub fn copy_to_host(stream: &Stream, to: &mut Pinned, at: usize, from: u64, len: usize) -> Result<(), CudaError> {
    if len == 0 {
        return Ok(());
    }
    stream.context().make_current()?;
    let target = to.range(at, len);
    // SAFETY: the target has `len` bytes and lives until it is dropped, which waits; `from` is the caller's device range.
    let code = unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), from, len, stream.handle()) };
    check("cuMemcpyDtoHAsync", code)
}

/// Copies `len` bytes within the device, in `stream`.
///
/// # Errors
/// Those of the driver.
pub fn copy_within_device(stream: &Stream, to: u64, from: u64, len: usize) -> Result<(), CudaError> {
    if len == 0 {
        return Ok(());
    }
    stream.context().make_current()?;
    // SAFETY: both are the caller's device ranges.
    check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len, stream.handle()) })
}

/// Sets `len` bytes of the device to zero, in `stream`.
///
/// # Errors
/// Those of the driver.
pub fn fill_zero(stream: &Stream, to: u64, len: usize) -> Result<(), CudaError> {
    if len == 0 {
        return Ok(());
    }
    stream.context().make_current()?;
    // SAFETY: the caller's device range.
    check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(to, 0, len, stream.handle()) })
}
