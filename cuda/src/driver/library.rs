//! The driver's library: whether it is installed and has every function that this crate calls.
//!
//! cudarc panics at the first call without the library, and at a function that an old driver lacks; both are checked
//! first. A test that reads this crate's sources keeps [`FUNCTIONS`] complete.

use cudarc::driver::sys;

/// Every function of the driver that this crate calls, as its library exports it.
const FUNCTIONS: [&str; 55] = [
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
];

/// CUDA's version (1000 x major + 10 x minor) that brought [`ParamInfo`].
const PARAM_INFO_SINCE: u32 = 12_040;

/// `cuFuncGetParamInfo`: offset and bytes of a kernel's parameter, by its index.
pub(super) type ParamInfo = unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> sys::CUresult;

/// The function, where the driver is new enough to have it.
pub(super) fn param_info(driver_version: u32) -> Option<ParamInfo> {
    if driver_version < PARAM_INFO_SINCE {
        return None;
    }
    // SAFETY: a context is there, so the library is, and stays loaded for the life of the process; the type is that of cuda.h.
    unsafe { sys::culib().get::<ParamInfo>(b"cuFuncGetParamInfo").ok().map(|symbol| *symbol) }
}

/// Functions that the driver's library lacks.
///
/// # Errors
/// Why there is no library, for people.
pub fn missing_functions() -> Result<Vec<&'static str>, String> {
    // SAFETY: loads the driver's library by its usual names; its initialisers are those of NVIDIA's driver.
    if !unsafe { sys::is_culib_present() } {
        return Err("the driver's library (libcuda.so, nvcuda.dll) is not installed".to_owned());
    }
    // SAFETY: the library is there; it stays loaded for the life of the process.
    let library = unsafe { sys::culib() };
    let lacks = |name: &&&'static str| {
        // SAFETY: the symbol is only looked up; as a function pointer of any type it is never called here.
        unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err()
    };
    Ok(FUNCTIONS.iter().filter(lacks).copied().collect())
}

/// Why the driver cannot be called, for people; `None` if it can.
#[must_use]
pub fn absent_because() -> Option<String> {
    match missing_functions() {
        Err(reason) => Some(reason),
        Ok(missing) if missing.is_empty() => None,
        Ok(missing) => Some(format!("the driver is too old: its library lacks {}", missing.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::FUNCTIONS;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// Names behind `sys::` that begin with `cu` and are followed by `(`, in all sources below `dir`.
    fn called(dir: &Path, names: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                called(&path, names);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for piece in text.split("sys::cu").skip(1) {
                let end = piece.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap();
                if piece[end..].starts_with('(') && piece != "lib()" && !piece.starts_with("lib(") {
                    names.insert(format!("cu{}", &piece[..end]));
                }
            }
        }
    }

    #[test]
    fn every_function_that_is_called_is_looked_for_first() {
        let mut names = BTreeSet::new();
        called(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut names);
        let known: BTreeSet<String> = FUNCTIONS.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(known.len(), FUNCTIONS.len(), "a function is listed twice");
        assert_eq!(names.difference(&known).collect::<Vec<_>>(), Vec::<&String>::new(), "called, but not listed");
        // Functions that cudarc's helpers call for the probe appear in no source.
        let by_helpers = ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetCount"];
        assert!(by_helpers.iter().all(|name| known.contains(*name)));
    }
}
