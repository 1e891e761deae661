//! CUDA virtual memory management: address ranges and physical memory, separate from each other (vAttention §5.2,
//! Table 3).
//!
//! A [`Reservation`] is a range of addresses with its mappings; a [`Physical`] is memory. One physical allocation may
//! be mapped at several addresses, in one reservation or more; shared prefixes use that.
//!
//! Invariants: an offset holds at most one mapping; a mapping keeps its physical memory alive; the drop of a
//! reservation unmaps everything in it and then frees the addresses. A mapping whose access cannot be set is undone,
//! so every mapping is usable.
//!
//! The caller waits for kernels that use a range before unmapping it; the driver does not.

use super::{Context, CudaError, check, check_memory, released};
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// Whether physical memory can be exported to other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    Private,
    /// By file descriptor on this host, and registered for GPUDirect RDMA if the device supports it.
    FileDescriptor,
}

/// Allocation properties of physical memory.
pub(super) fn properties(context: &Context, sharing: Sharing) -> sys::CUmemAllocationProp {
    use sys::CUmemAllocationHandleType_enum as Handle;
    let shared = sharing == Sharing::FileDescriptor;
    let direct = shared && context.attributes().direct_rdma;
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if shared {
            Handle::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            Handle::CU_MEM_HANDLE_TYPE_NONE
        },
        location: location(context),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(direct),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(context: &Context) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: context.device() }
}

/// Physical memory of the device, not mapped.
#[derive(Debug)]
pub struct Physical {
    context: Arc<Context>,
    handle: sys::CUmemGenericAllocationHandle,
    bytes: usize,
}

impl Physical {
    /// `bytes` of physical memory, a multiple of the context's granularity.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; [`CudaError::Unsupported`] for sharing on a device that lacks it.
    pub fn new(context: &Arc<Context>, bytes: usize, sharing: Sharing) -> Result<Self, CudaError> {
        assert!(bytes > 0 && bytes.is_multiple_of(context.granularity()), "physical memory is whole pages");
        if sharing == Sharing::FileDescriptor && !context.attributes().shareable {
            return Err(CudaError::Unsupported("sharing of physical memory by file descriptor".to_owned()));
        }
        context.make_current()?;
        let prop = properties(context, sharing);
        let mut handle = 0;
        // SAFETY: the driver fills the live handle and reads the live properties.
        let code = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const prop, 0) };
        check_memory("cuMemCreate", code, "a page group", bytes)?;
        Ok(Self { context: Arc::clone(context), handle, bytes })
    }

    /// Imports `bytes` of memory that another process exported. The descriptor may be closed afterwards.
    ///
    /// # Errors
    /// Those of the driver for any other descriptor.
    pub fn import(context: &Arc<Context>, fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, CudaError> {
        context.make_current()?;
        let mut handle = 0;
        let kind = sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let raw = usize::try_from(fd.as_raw_fd()).expect("descriptors are not negative") as *mut c_void;
        // SAFETY: the driver fills the live handle; for this kind the pointer is the descriptor's number itself.
        let code = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, raw, kind) };
        check("cuMemImportFromShareableHandle", code)?;
        Ok(Self { context: Arc::clone(context), handle, bytes })
    }

    /// A descriptor that another process on this host can import. The memory was made with
    /// [`Sharing::FileDescriptor`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        self.context.make_current()?;
        let mut fd: i32 = -1;
        let kind = sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this kind the driver writes an int, the descriptor.
        let code = unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle, kind, 0) };
        check("cuMemExportToShareableHandle", code)?;
        assert!(fd >= 0, "the driver gave no descriptor");
        // SAFETY: the driver has just opened it for us; nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: made or imported once, released once; mappings keep a reference, so none is left.
            released(unsafe { sys::cuMemRelease(self.handle) });
        }
    }
}

/// A range of device addresses, and its mappings.
#[derive(Debug)]
pub struct Reservation {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// Mappings by offset.
    mapped: BTreeMap<usize, Arc<Physical>>,
}

impl Reservation {
    /// Reserves `bytes` of addresses, a multiple of the context's granularity, without memory.
    ///
    /// # Errors
    /// Those of the driver; [`CudaError::OutOfMemory`] if there are not so many addresses.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        assert!(bytes > 0 && bytes.is_multiple_of(context.granularity()), "addresses are reserved in whole pages");
        context.make_current()?;
        let mut address = 0;
        // SAFETY: the driver fills the live address.
        let code = unsafe { sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0) };
        check_memory("cuMemAddressReserve", code, "a range of addresses", bytes)?;
        Ok(Self { context: Arc::clone(context), address, bytes, mapped: BTreeMap::new() })
    }

    /// First address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of mappings in this range.
    #[must_use]
    pub fn mappings(&self) -> usize {
        self.mapped.len()
    }

    /// Maps `physical` at `offset`, readable and writable by the device. After an error nothing is mapped, unless
    /// undoing failed as well ([`Reservation::holds`]).
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Panics
    /// If something is mapped there, or the range is too short: bugs of ours.
    pub fn map(&mut self, offset: usize, physical: &Arc<Physical>) -> Result<(), CudaError> {
        let bytes = physical.bytes;
        assert!(offset.is_multiple_of(self.context.granularity()), "mappings begin at whole pages");
        assert!(offset + bytes <= self.bytes, "a mapping beyond the range");
        let before = self.mapped.range(..=offset).next_back().map(|(at, p)| at + p.bytes);
        let after = self.mapped.range(offset + 1..).next().map(|(at, _)| *at);
        assert!(before.is_none_or(|end| end <= offset), "something is mapped at {offset}");
        assert!(after.is_none_or(|at| at >= offset + bytes), "something is mapped behind {offset}");
        self.context.make_current()?;
        let at = self.address + offset as u64;
        // SAFETY: the addresses are ours and nothing is mapped there.
        check("cuMemMap", unsafe { sys::cuMemMap(at, bytes, 0, physical.handle, 0) })?;
        let access = sys::CUmemAccessDesc {
            location: location(&self.context),
            flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: just mapped; the driver reads one live description.
        let code = unsafe { sys::cuMemSetAccess(at, bytes, &raw const access, 1) };
        if let Err(error) = check("cuMemSetAccess", code) {
            // SAFETY: just mapped, and nothing has used it.
            let code = unsafe { sys::cuMemUnmap(at, bytes) };
            released(code);
            if code != sys::CUresult::CUDA_SUCCESS {
                // The mapping stays, unusable; the drop tries again to unmap it.
                self.mapped.insert(offset, Arc::clone(physical));
            }
            return Err(error);
        }
        self.mapped.insert(offset, Arc::clone(physical));
        Ok(())
    }

    /// Whether something is mapped at `offset`: after a failed [`Reservation::map`] only if it could not be undone.
    #[must_use]
    pub fn holds(&self, offset: usize) -> bool {
        self.mapped.contains_key(&offset)
    }

    /// Unmaps the mapping at `offset`; the caller has waited for kernels that use it.
    ///
    /// # Errors
    /// Those of the driver; the memory is then still mapped.
    ///
    /// # Panics
    /// If nothing is mapped there: a bug of ours.
    pub fn unmap(&mut self, offset: usize) -> Result<Arc<Physical>, CudaError> {
        let physical = self.mapped.get(&offset).expect("something is mapped where it is unmapped");
        self.context.make_current()?;
        // SAFETY: mapped by `map`, whole.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(self.address + offset as u64, physical.bytes) })?;
        Ok(self.mapped.remove(&offset).expect("looked up above"))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.context.make_current().is_err() {
            return;
        }
        for (offset, physical) in std::mem::take(&mut self.mapped) {
            // SAFETY: mapped by `map`; whoever drops a range has waited for its users.
            released(unsafe { sys::cuMemUnmap(self.address + offset as u64, physical.bytes) });
        }
        // SAFETY: reserved in `new`, freed once, with nothing mapped.
        released(unsafe { sys::cuMemAddressFree(self.address, self.bytes) });
    }
}
