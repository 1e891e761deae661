//! cuBLASLt's library: found and loaded at run time, with the functions that this crate calls.
//!
//! A loaded library is never unloaded: cuBLASLt registers modules with the driver and thread-local destructors with
//! the process; both are called after the last handle is destroyed and would crash.
//!
//! Types and numbers are those of cublasLt.h, equal in versions 12 and 13 for the functions used here. Other versions
//! are refused.

use super::wheels;
use libloading::Library;
use std::ffi::{OsString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Environment variable with the library's file, or `none`.
pub const ENVIRONMENT: &str = "LAGOON_CUBLASLT";

/// File names tried without [`ENVIRONMENT`], in this order.
const NAMES: [&str; 5] =
    ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so", "cublasLt64_13.dll", "cublasLt64_12.dll"];

/// Supported major versions.
const MAJORS: std::ops::RangeInclusive<usize> = 12..=13;

pub(super) type Handle = *mut c_void;
pub(super) type Descriptor = *mut c_void;
pub(super) type Status = c_int;

pub(super) const SUCCESS: Status = 0;
pub(super) const NOT_SUPPORTED: Status = 15;

/// `cudaDataType_t`.
pub(super) const R_32F: c_int = 0;
pub(super) const R_16F: c_int = 2;
pub(super) const R_16BF: c_int = 14;
/// `cublasComputeType_t`: f32 sums of f16, bf16 or f32 products; and of products of f32 rounded to TF32.
pub(super) const COMPUTE_32F: c_int = 68;
pub(super) const COMPUTE_32F_FAST_TF32: c_int = 77;
/// `cublasLtMatmulDescAttributes_t`, and the transposed operation.
pub(super) const DESC_TRANSA: c_int = 3;
pub(super) const OPERATION_T: c_int = 1;
/// `cublasLtMatmulPreferenceAttributes_t`.
pub(super) const PREF_WORKSPACE_BYTES: c_int = 1;
pub(super) const PREF_ALIGNMENT: [c_int; 4] = [5, 6, 7, 8];

/// `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Algorithm {
    data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heuristic {
    pub(super) algorithm: Algorithm,
    pub(super) workspace_bytes: usize,
    pub(super) state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<Algorithm>() == 64 && size_of::<Heuristic>() == 96);

type Release = unsafe extern "C" fn(*mut c_void) -> Status;
type SetAttribute = unsafe extern "C" fn(Descriptor, c_int, *const c_void, usize) -> Status;
type Matmul = unsafe extern "C" fn(
    Handle,
    Descriptor,
    *const c_void,
    *const c_void,
    Descriptor,
    *const c_void,
    Descriptor,
    *const c_void,
    *const c_void,
    Descriptor,
    *mut c_void,
    Descriptor,
    *const Algorithm,
    *mut c_void,
    usize,
    *mut c_void,
) -> Status;
type GetHeuristic = unsafe extern "C" fn(
    Handle,
    Descriptor,
    Descriptor,
    Descriptor,
    Descriptor,
    Descriptor,
    Descriptor,
    c_int,
    *mut Heuristic,
    *mut c_int,
) -> Status;

/// The loaded cuBLASLt library.
#[derive(Debug)]
pub struct CublasLt {
    version: usize,
    file: PathBuf,
    pub(super) create: unsafe extern "C" fn(*mut Handle) -> Status,
    pub(super) destroy: Release,
    pub(super) desc_create: unsafe extern "C" fn(*mut Descriptor, c_int, c_int) -> Status,
    pub(super) desc_destroy: Release,
    pub(super) desc_set: SetAttribute,
    pub(super) layout_create: unsafe extern "C" fn(*mut Descriptor, c_int, u64, u64, i64) -> Status,
    pub(super) layout_destroy: Release,
    pub(super) pref_create: unsafe extern "C" fn(*mut Descriptor) -> Status,
    pub(super) pref_destroy: Release,
    pub(super) pref_set: SetAttribute,
    pub(super) heuristic: GetHeuristic,
    pub(super) matmul: Matmul,
}

impl CublasLt {
    /// Finds the library: the file in [`ENVIRONMENT`], else its usual names, else Python's packages. `driver_major`
    /// is the driver's CUDA version, which the library's must not exceed.
    ///
    /// # Errors
    /// Why there is no usable library, for people.
    pub fn find(driver_major: usize) -> Result<Arc<Self>, String> {
        Self::at(std::env::var_os(ENVIRONMENT), driver_major)
    }

    /// The library in this file; none for `none`; [`CublasLt::find`]'s search without a file.
    ///
    /// # Errors
    /// As [`CublasLt::find`].
    pub fn at(file: Option<OsString>, driver_major: usize) -> Result<Arc<Self>, String> {
        match file {
            Some(file) if file == "none" => Err(format!("{ENVIRONMENT}=none")),
            Some(file) => Self::open(file.as_ref()),
            None => Self::search(driver_major),
        }
    }

    fn search(driver_major: usize) -> Result<Arc<Self>, String> {
        let mut reason = "libcublasLt.so (13 or 12) is not installed".to_owned();
        for name in NAMES {
            // SAFETY: NVIDIA's library by its usual names.
            let Ok(library) = (unsafe { Library::new(name) }) else { continue };
            match Self::load(library, loaded_from(name)) {
                Ok(found) if found.version / 10_000 <= driver_major => return Ok(found),
                Ok(found) => reason = format!("cuBLASLt {} is newer than the driver", number(found.version)),
                Err(error) => reason = error,
            }
        }
        for file in wheels::files(driver_major) {
            match Self::open(&file) {
                Ok(found) => return Ok(found),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    /// Loads the library in this file.
    ///
    /// # Errors
    /// As [`CublasLt::find`].
    pub fn open(file: &Path) -> Result<Arc<Self>, String> {
        // SAFETY: the user, or Python's packages, give this file as NVIDIA's library, whose initialisers are
        // harmless.
        let library = unsafe { Library::new(file) }.map_err(|error| format!("{}: {error}", file.display()))?;
        Self::load(library, file.to_owned())
    }

    fn load(library: Library, file: PathBuf) -> Result<Arc<Self>, String> {
        // Never unloaded; see the module.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: all types here are those of cublasLt.h; the library is never unloaded.
        unsafe {
            let version: unsafe extern "C" fn() -> usize = symbol(library, "cublasLtGetVersion")?;
            let version = version();
            if !MAJORS.contains(&(version / 10_000)) {
                return Err(format!(
                    "cuBLASLt {} is not of version {} to {}",
                    number(version),
                    MAJORS.start(),
                    MAJORS.end()
                ));
            }
            Ok(Arc::new(Self {
                version,
                file,
                create: symbol(library, "cublasLtCreate")?,
                destroy: symbol(library, "cublasLtDestroy")?,
                desc_create: symbol(library, "cublasLtMatmulDescCreate")?,
                desc_destroy: symbol(library, "cublasLtMatmulDescDestroy")?,
                desc_set: symbol(library, "cublasLtMatmulDescSetAttribute")?,
                layout_create: symbol(library, "cublasLtMatrixLayoutCreate")?,
                layout_destroy: symbol(library, "cublasLtMatrixLayoutDestroy")?,
                pref_create: symbol(library, "cublasLtMatmulPreferenceCreate")?,
                pref_destroy: symbol(library, "cublasLtMatmulPreferenceDestroy")?,
                pref_set: symbol(library, "cublasLtMatmulPreferenceSetAttribute")?,
                heuristic: symbol(library, "cublasLtMatmulAlgoGetHeuristic")?,
                matmul: symbol(library, "cublasLtMatmul")?,
            }))
        }
    }

    /// The library's version, for people.
    #[must_use]
    pub fn version(&self) -> String {
        number(self.version)
    }

    /// The file of the library.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The CUDA version of the library, major only.
    pub(super) fn major(&self) -> usize {
        self.version / 10_000
    }
}

/// The file that the loader chose for a name, from this process's memory map; the name if there is no such map.
fn loaded_from(name: &str) -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut files = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let is_it = |file: &&Path| file.file_name().is_some_and(|found| found.to_string_lossy().starts_with("libcublasLt"));
    files.find(is_it).map_or_else(|| PathBuf::from(name), Path::to_owned)
}

fn number(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// # Safety
/// `F` is the function's type, and the value is not used after the library.
unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<F>(name) }.map(|symbol| *symbol).map_err(|_| format!("the library lacks {name}"))
}

#[cfg(test)]
mod tests {
    use super::CublasLt;

    #[test]
    fn what_is_not_there_is_a_reason() {
        let reason = |file: &str| CublasLt::at(Some(file.into()), 13).unwrap_err();
        assert_eq!(reason("none"), "LAGOON_CUBLASLT=none");
        assert!(reason("/there/is/no/such.so").contains("/there/is/no/such.so"));
        // Any other library.
        let other = std::env::current_exe().unwrap();
        assert!(CublasLt::at(Some(other.into()), 13).is_err());
    }
}
