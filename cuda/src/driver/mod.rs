//! The CUDA driver: typed errors and owned handles over `cudarc::driver::sys`.
//!
//! Invariants:
//! * Nothing here panics for what a machine lacks: [`Context::open`] looks for the library and for every function
//!   that this crate calls ([`library`]) before it calls one. Everything else needs a [`Context`], so it comes later.
//! * Every handle is released by the drop of the value that owns it, in an order in which the driver accepts it: a
//!   value keeps alive what it depends on. Errors of a release cannot be returned; they are counted ([`release_errors`]).
//! * Copies and launches are asynchronous. Whoever frees or unmaps memory waits first for the streams that use it.

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

/// What a driver's call can fail with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no driver, no device, or the driver is too old; the text is for people.
    #[error("no CUDA: {0}")]
    Absent(String),
    /// Memory of the device (or pinned host memory) ran out.
    #[error("out of device memory: {what} needs {bytes} bytes")]
    OutOfMemory { what: &'static str, bytes: u64 },
    /// The device or driver cannot do what was asked.
    #[error("the device cannot do this: {0}")]
    Unsupported(String),
    /// A library beside the driver refused; the number is its own status.
    #[error("{call} failed with status {status}")]
    Library { call: &'static str, status: i32 },
    /// Anything else; after most of these the context is lost.
    #[error("{call} failed: {code:?}")]
    Driver { call: &'static str, code: CUresult },
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::OutOfMemory { what, bytes } => Self::OutOfMemory { what: what.to_owned(), bytes },
            CudaError::Absent(text) | CudaError::Unsupported(text) => Self::Unsupported(text),
            CudaError::Library { .. } | CudaError::Driver { .. } => Self::Lost(error.to_string()),
        }
    }
}

/// Turns a driver's answer into a result.
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(CudaError::OutOfMemory { what: call, bytes: 0 }),
        code => Err(CudaError::Driver { call, code }),
    }
}

/// As [`check`], where an exhausted memory says what wanted how much.
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

/// Releases that the driver refused since the process began. 0 unless a context was lost or there is a bug of ours.
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

/// Notes a refused release; drops cannot return it.
pub(crate) fn released(code: CUresult) {
    if code != CUresult::CUDA_SUCCESS {
        RELEASE_ERRORS.fetch_add(1, Ordering::Relaxed);
    }
}
