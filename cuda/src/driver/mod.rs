//! The CUDA driver: typed errors and owned handles over `cudarc::driver::sys`.
//!
//! Invariants:
//! * No panic for missing hardware or software: [`Context::open`] checks the library and every function that this
//!   crate calls ([`library`]) before it calls one. All other types need a [`Context`].
//! * Every handle is released by the drop of its owner, in an order that the driver accepts: a value keeps its
//!   dependencies alive. Errors of a release cannot be returned; they are counted ([`release_errors`]).
//! * Copies and launches are asynchronous. The caller that frees or unmaps memory waits first for the streams that
//!   use it.

mod context;
mod graph;
mod library;
mod memory;
mod module;
mod stream;
mod tensor_map;
mod vmm;

pub use context::{Attributes, Context};
pub use graph::Graph;
pub use library::{absent_because, missing_functions};
pub use memory::{Buffer, Pinned, copy_to_device, copy_to_host, copy_within_device, fill_zero};
pub use module::{Function, Launch, Module};
pub use stream::{Event, Priority, Stream};
pub use tensor_map::encode_boxes;
pub use vmm::{Physical, Reservation, Sharing};

use cudarc::driver::sys::CUresult;
use lagoon_backend::DeviceError;
use std::sync::atomic::{AtomicU64, Ordering};

/// Errors of the driver, and of libraries beside it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// No driver, no device, or too old a driver; the text is for people.
    #[error("no CUDA: {0}")]
    Absent(String),
    /// Device memory (or pinned host memory) ran out.
    #[error("out of device memory: {what} needs {bytes} bytes")]
    OutOfMemory { what: &'static str, bytes: u64 },
    /// The device or driver lacks a feature.
    #[error("the device cannot do this: {0}")]
    Unsupported(String),
    /// A library beside the driver failed, with its own status.
    #[error("{call} failed with status {status}")]
    Library { call: &'static str, status: i32 },
    /// Any other error.
    #[error("{call} failed: {code:?}")]
    Driver { call: &'static str, code: CUresult },
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::OutOfMemory { what, bytes } => Self::OutOfMemory { what: what.to_owned(), bytes },
            CudaError::Absent(text) | CudaError::Unsupported(text) => Self::Unsupported(text),
            CudaError::Driver { code, .. } if ends_context(code) => Self::Lost(error.to_string()),
            CudaError::Library { .. } | CudaError::Driver { .. } => Self::Failed(error.to_string()),
        }
    }
}

/// Whether the process can do nothing on the device after this code (CUDA driver API, "Data types used by CUDA driver").
const fn ends_context(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
    )
}

/// Converts a driver's status to a result.
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(CudaError::OutOfMemory { what: call, bytes: 0 }),
        code => Err(CudaError::Driver { call, code }),
    }
}

/// As [`check`]; if memory is exhausted, the error names `what` and its bytes.
pub(crate) fn check_memory(
    call: &'static str,
    code: CUresult,
    what: &'static str,
    bytes: usize,
) -> Result<(), CudaError> {
    match check(call, code) {
        Err(CudaError::OutOfMemory { .. }) => Err(CudaError::OutOfMemory { what, bytes: bytes as u64 }),
        other => other,
    }
}

static RELEASE_ERRORS: AtomicU64 = AtomicU64::new(0);

/// Releases that the driver refused in this process. 0 unless a context was lost or we have a bug.
#[must_use]
pub fn release_errors() -> u64 {
    RELEASE_ERRORS.load(Ordering::Relaxed)
}

/// As [`released`], for a library beside the driver.
pub(crate) fn released_by(status: i32) {
    if status != 0 {
        RELEASE_ERRORS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts a refused release; drops cannot return it.
pub(crate) fn released(code: CUresult) {
    if code != CUresult::CUDA_SUCCESS {
        RELEASE_ERRORS.fetch_add(1, Ordering::Relaxed);
    }
}
