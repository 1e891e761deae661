//! A device's primary context.

use super::{CudaError, check, library, released};
use cudarc::driver::sys;
use lagoon_backend::PciAddress;
use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// The number of this thread's current context, to skip calls of the driver. A number of our own: the driver may
    /// reuse a handle for the next context.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Contexts opened so far.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// Attributes of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attributes {
    pub name: String,
    /// UUID of the device (or of a MIG part of one), equal in all processes.
    pub uuid: [u8; 16],
    /// Newest CUDA version that the driver supports: 1000 times the major and 10 times the minor version.
    pub driver_version: u32,
    /// Major and minor: `(9, 0)` for H100 and H200.
    pub compute_capability: (u32, u32),
    pub multiprocessors: u32,
    /// Bytes of the L2 cache.
    pub l2_bytes: u32,
    /// All memory of the device in bytes, used or not.
    pub memory_bytes: u64,
    /// Bytes of shared memory that one block may have when it asks for more than the default.
    pub shared_bytes_per_block: u32,
    /// Virtual memory management, which the backend requires.
    pub virtual_memory: bool,
    /// Physical memory can be exported to other processes by file descriptor.
    pub shareable: bool,
    /// Physical memory of the virtual memory interface can be registered for GPUDirect RDMA.
    pub direct_rdma: bool,
    pub pci: PciAddress,
}

/// A device's primary context, retained while the value lives. Calls make it current on the calling thread.
#[derive(Debug)]
pub struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
    number: u64,
    attributes: Attributes,
    /// Granularity in bytes of physical memory and mappings.
    granularity: usize,
}

// SAFETY: a driver context may be used from any thread; the driver serialises what must be.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the device with this index.
    ///
    /// # Errors
    /// [`CudaError::Absent`] without a driver that has all functions, or without that device;
    /// [`CudaError::Unsupported`] for a device without virtual memory management or below compute capability 8.0.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        if let Some(reason) = library::absent_because() {
            return Err(CudaError::Absent(reason));
        }
        // SAFETY: the library has this function; it takes no pointer.
        check("cuInit", unsafe { sys::cuInit(0) })
            .map_err(|error| CudaError::Absent(format!("the driver is installed, but fails: {error}")))?;
        let device = device(ordinal)?;
        let attributes = attributes(device)?;
        if !attributes.virtual_memory || attributes.compute_capability < (8, 0) {
            let (major, minor) = attributes.compute_capability;
            return Err(CudaError::Unsupported(format!(
                "{} has compute capability {major}.{minor}{}; 8.0 and virtual memory management are needed",
                attributes.name,
                if attributes.virtual_memory { "" } else { " and no virtual memory management" },
            )));
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the driver fills the live handle.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut handle, device) })?;
        // From here on the drop releases it.
        let number = OPENED.fetch_add(1, Ordering::Relaxed) + 1;
        let mut context = Self { device, handle, number, attributes, granularity: 0 };
        context.make_current()?;
        context.granularity = context.ask_granularity()?;
        Ok(Arc::new(context))
    }

    /// Attributes of the device.
    #[must_use]
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Granularity in bytes of physical memory and mappings: 2 MiB on today's devices.
    #[must_use]
    pub fn granularity(&self) -> usize {
        self.granularity
    }

    /// The driver's handle of the device.
    pub(crate) fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// Makes this context current on the calling thread.
    ///
    /// # Errors
    /// Those of the driver, after a lost context.
    pub fn make_current(&self) -> Result<(), CudaError> {
        if CURRENT.get() != self.number {
            // SAFETY: the context is retained while `self` lives.
            check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.handle) })?;
            CURRENT.set(self.number);
        }
        Ok(())
    }

    /// Free and total bytes of the device.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver fills both live numbers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Whether this device can map memory of the device `of`: itself, or another device that this process sees and
    /// can access as a peer.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn can_access(&self, of: &[u8; 16]) -> Result<bool, CudaError> {
        if self.attributes.uuid == *of {
            return Ok(true);
        }
        let mut count: c_int = 0;
        // SAFETY: the driver fills the live number.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        for ordinal in 0..u32::try_from(count).unwrap_or(0) {
            let peer = device(ordinal)?;
            if uuid(peer)? == *of {
                let mut can: c_int = 0;
                // SAFETY: the driver fills the live number; both are its devices.
                let code = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.device, peer) };
                return check("cuDeviceCanAccessPeer", code).map(|()| can != 0);
            }
        }
        Ok(false)
    }

    fn ask_granularity(&self) -> Result<usize, CudaError> {
        let prop = super::vmm::properties(self, super::Sharing::Private);
        let mut bytes = 0;
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are to live values of the driver's types.
        let code = unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const prop, option) };
        check("cuMemGetAllocationGranularity", code)?;
        Ok(bytes)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if CURRENT.get() == self.number {
            CURRENT.set(0);
        }
        // SAFETY: retained once in `open`; everything made in it kept it alive and is gone.
        released(unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) });
    }
}

fn device(ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let mut count: c_int = 0;
    // SAFETY: the driver fills the live number.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    let wanted = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    if wanted >= count {
        return Err(CudaError::Absent(format!("there is no device {ordinal}; the driver has {count}")));
    }
    let mut device = 0;
    // SAFETY: the driver fills the live number; the device exists.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, wanted) })?;
    Ok(device)
}

fn uuid(device: sys::CUdevice) -> Result<[u8; 16], CudaError> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the driver fills the live value; `device` is one of its devices.
    check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) })?;
    Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
}

fn attributes(device: sys::CUdevice) -> Result<Attributes, CudaError> {
    use sys::CUdevice_attribute_enum as A;
    let attribute = |which: A| {
        let mut value: c_int = 0;
        // SAFETY: the driver fills the live number; `device` is one of its devices.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
        Ok::<u32, CudaError>(u32::try_from(value).unwrap_or(0))
    };
    let mut name = [0; 256];
    // SAFETY: the driver writes at most 256 bytes and ends them with 0.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 256, device) })?;
    // SAFETY: the driver has ended the text with 0.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let byte = |which: A| Ok::<u8, CudaError>(u8::try_from(attribute(which)?).unwrap_or(0));
    // A GPU is function 0 of its device.
    let pci = PciAddress {
        domain: attribute(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        bus: byte(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        device: byte(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
        function: 0,
    };
    let (mut memory, mut version) = (0, 0);
    // SAFETY: the driver fills the live number.
    check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory, device) })?;
    // SAFETY: as above.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(Attributes {
        name,
        uuid: uuid(device)?,
        driver_version: u32::try_from(version).unwrap_or(0),
        compute_capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        memory_bytes: memory as u64,
        shared_bytes_per_block: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        virtual_memory: attribute(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0,
        shareable: attribute(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? != 0,
        direct_rdma: attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)? != 0,
        pci,
    })
}
