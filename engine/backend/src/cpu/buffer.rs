//! Zeroed memory aligned to cache lines, for tensors, KV stores and scratch.
//!
//! Invariants: `ptr` is 64-byte aligned and points to `len` initialised elements inside the allocation at `base`. The
//! memory comes from the zeroing allocator with its natural alignment, so that the operating system provides pages
//! only when they are touched; an allocation with a larger alignment would be zeroed by hand.

use crate::DeviceError;
use bytemuck::Pod;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of every buffer: a cache line, and the widest vector.
pub(crate) const ALIGN_BYTES: usize = 64;
/// Alignment that the system allocator gives to zeroed memory without touching it.
const NATURAL_ALIGN_BYTES: usize = 16;

/// A fixed number of elements, zeroed, aligned to 64 bytes.
pub(crate) struct Buffer<T: Pod> {
    ptr: NonNull<T>,
    len: usize,
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a buffer owns its memory exclusively and `T: Pod` has no thread affinity.
unsafe impl<T: Pod + Send> Send for Buffer<T> {}
// SAFETY: shared access is only by `&[T]`.
unsafe impl<T: Pod + Sync> Sync for Buffer<T> {}

impl<T: Pod> Buffer<T> {
    /// `len` zeroed elements; `what` names them should memory run out.
    pub(crate) fn zeroed(len: usize, what: &str) -> Result<Self, DeviceError> {
        const { assert!(align_of::<T>() <= NATURAL_ALIGN_BYTES) };
        let out_of_memory = || DeviceError::OutOfMemory {
            what: what.to_owned(),
            bytes: u64::try_from(len).unwrap_or(u64::MAX).saturating_mul(size_of::<T>() as u64),
        };
        let bytes =
            len.checked_mul(size_of::<T>()).and_then(|b| b.checked_add(ALIGN_BYTES)).ok_or_else(out_of_memory)?;
        let Ok(layout) = Layout::from_size_align(bytes, NATURAL_ALIGN_BYTES) else { return Err(out_of_memory()) };
        // SAFETY: the layout has at least ALIGN_BYTES bytes.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(out_of_memory)?;
        let skip = base.as_ptr().align_offset(ALIGN_BYTES);
        assert!(skip <= ALIGN_BYTES, "the allocator's memory can be aligned");
        // SAFETY: skip <= ALIGN_BYTES, and the allocation is that much larger than its elements.
        let ptr = unsafe { base.add(skip) }.cast();
        Ok(Self { ptr, len, base, layout })
    }
}

impl<T: Pod> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: `base` was allocated with this layout and is freed once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: ptr is aligned, in bounds for len elements, and zeroed memory is a valid T: Pod.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in deref, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Pod> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_refuse_the_impossible() {
        let buffer = Buffer::<f32>::zeroed(1000, "test").unwrap();
        assert_eq!(buffer.as_ptr().align_offset(ALIGN_BYTES), 0);
        assert!(buffer.iter().all(|v| *v == 0.0));
        let error = Buffer::<f32>::zeroed(usize::MAX / 2, "a lot").unwrap_err();
        assert!(matches!(error, DeviceError::OutOfMemory { what, .. } if what == "a lot"));
    }
}
