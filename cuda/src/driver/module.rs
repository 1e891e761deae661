//! Modules of kernels, and kernel launches.

use super::{Context, CudaError, Stream, check, library, released};
use bytemuck::NoUninit;
use cudarc::driver::sys;
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// Shared memory of a kernel without opting in, in bytes.
const SHARED_BYTES_DEFAULT: u32 = 48 << 10;

/// PTX version from which this project's kernels wait for their predecessors (griddepcontrol): `wait_for_grids` of
/// `kernels/shared/ptx.cuh` is an instruction in code compiled for capability 9.0, on any device.
const PTX_WAITS: i32 = 90;

/// A loaded image (fatbin, cubin or PTX).
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    handle: sys::CUmodule,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads an image; the driver picks the code for the device, and compiles PTX if there is none.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for an image that this device or driver cannot use.
    pub fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>, CudaError> {
        context.make_current()?;
        let mut handle = std::ptr::null_mut();
        // PTX text must end with 0; binary images have their lengths in headers and ignore it.
        let mut terminated = image.to_vec();
        terminated.push(0);
        // SAFETY: the image lives during the call and has its length in its header or ends with 0.
        let code = unsafe { sys::cuModuleLoadData(&raw mut handle, terminated.as_ptr().cast()) };
        check("cuModuleLoadData", code)
            .map_err(|error| CudaError::Unsupported(format!("the kernels do not load: {error}")))?;
        Ok(Arc::new(Self { context: Arc::clone(context), handle }))
    }

    /// The kernel of this name, prepared for up to `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a kernel that the image lacks or that needs more than the device has.
    pub fn function(self: &Arc<Self>, name: &str, shared_bytes: u32) -> Result<Function, CudaError> {
        use sys::CUfunction_attribute_enum as Attribute;
        self.context.make_current()?;
        let text = CString::new(name).expect("kernel names have no 0");
        let mut handle = std::ptr::null_mut();
        // SAFETY: the module lives; the name ends with 0; the driver fills the live handle.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut handle, self.handle, text.as_ptr()) };
        check("cuModuleGetFunction", code)
            .map_err(|error| CudaError::Unsupported(format!("kernel {name}: {error}")))?;
        if shared_bytes > SHARED_BYTES_DEFAULT {
            let bytes = i32::try_from(shared_bytes).expect("shared memory is far below 2 GiB");
            let which = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of a live module.
            check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(handle, which, bytes) })
                .map_err(|error| CudaError::Unsupported(format!("{shared_bytes} bytes shared in {name}: {error}")))?;
        }
        let (mut version, which) = (0, Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION);
        // SAFETY: the driver fills the live number; the function is of a live module.
        check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&raw mut version, which, handle) })?;
        let shared_bytes_max = shared_bytes.max(SHARED_BYTES_DEFAULT);
        let params_bytes = self.params_bytes(handle)?;
        Ok(Function { module: Arc::clone(self), handle, shared_bytes_max, params_bytes, waits: version >= PTX_WAITS })
    }

    /// Bytes of a kernel's only parameter; `None` where the driver is older than the call that says so.
    fn params_bytes(&self, function: sys::CUfunction) -> Result<Option<usize>, CudaError> {
        let Some(param_info) = library::param_info(self.context.attributes().driver_version) else { return Ok(None) };
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the driver fills the live numbers; the function is of a live module.
        let code = unsafe { param_info(function, 0, &raw mut offset, &raw mut bytes) };
        check("cuFuncGetParamInfo", code)?;
        Ok(Some(bytes))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: loaded once, unloaded once; its functions keep it alive.
            released(unsafe { sys::cuModuleUnload(self.handle) });
        }
    }
}

/// A kernel of a module.
#[derive(Clone, Debug)]
pub struct Function {
    module: Arc<Module>,
    handle: sys::CUfunction,
    shared_bytes_max: u32,
    /// Bytes of the parameter, if the driver knows.
    params_bytes: Option<usize>,
    waits: bool,
}

// SAFETY: functions may be launched from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Geometry of a launch: grid, block, and dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
}

impl Function {
    /// Identity of the kernel.
    #[must_use]
    pub fn id(&self) -> usize {
        self.handle as usize
    }

    /// Whether the kernel waits for its predecessors itself, so that it may begin before they have completed
    /// (programmatic dependent launch).
    #[must_use]
    pub const fn waits(&self) -> bool {
        self.waits
    }

    /// Launches the kernel in `stream` with one parameter, copied now. An empty grid launches nothing.
    ///
    /// # Errors
    /// Those of the driver for the launch; a fault while the kernel runs is reported by a later wait.
    ///
    /// # Safety
    /// `P` is the type of the kernel's only parameter, and every address in `params` is valid for the kernel's
    /// accesses until it has run.
    pub unsafe fn launch<P: NoUninit>(&self, stream: &Stream, how: Launch, params: &P) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_bytes(stream, how, bytemuck::bytes_of(params)) }
    }

    /// As [`Function::launch`], with the parameter's bytes.
    ///
    /// # Errors
    /// As [`Function::launch`].
    ///
    /// # Safety
    /// As [`Function::launch`], for the value of these bytes.
    pub unsafe fn launch_bytes(&self, stream: &Stream, how: Launch, params: &[u8]) -> Result<(), CudaError> {
        assert!(how.shared_bytes <= self.shared_bytes_max, "more shared memory than the kernel was prepared for");
        if how.grid.contains(&0) {
            return Ok(());
        }
        self.module.context.make_current()?;
        if self.params_bytes.is_some_and(|bytes| bytes != params.len()) {
            let code = sys::CUresult::CUDA_ERROR_INVALID_VALUE;
            return Err(CudaError::Driver { call: "cuLaunchKernelEx", code });
        }
        // By address, not as a buffer (`extra`): where in the kernel's parameter area it begins is the image's matter, and
        // not 0 for a parameter that is aligned to 128 bytes.
        let mut params: [*mut c_void; 1] = [params.as_ptr().cast_mut().cast()];
        let dependent = self.waits && stream.takes_dependent();
        if dependent {
            stream.launches_dependent();
        }
        let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
        value.programmaticStreamSerializationAllowed = 1;
        let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let mut attribute = sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let ([gx, gy, gz], [bx, by, bz]) = (how.grid, how.block);
        let config = sys::CUlaunchConfig {
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: bx,
            blockDimY: by,
            blockDimZ: bz,
            sharedMemBytes: how.shared_bytes,
            hStream: stream.handle_for_kernel(),
            attrs: if dependent { &raw mut attribute } else { std::ptr::null_mut() },
            numAttrs: u32::from(dependent),
        };
        // SAFETY: configuration, attribute and parameter live during the call, which copies them; a dependent kernel
        // waits for its predecessor, as that one does for its own; the rest is the caller's promise.
        let code =
            unsafe { sys::cuLaunchKernelEx(&raw const config, self.handle, params.as_mut_ptr(), std::ptr::null_mut()) };
        check("cuLaunchKernelEx", code)?;
        stream.launched(self.waits);
        Ok(())
    }
}
