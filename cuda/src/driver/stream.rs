//! Streams and events.

use super::{Context, CudaError, check, released};
use cudarc::driver::sys::{self, CUresult};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Priority of a stream's work on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    Normal,
    /// The device's highest priority: peers' queries, for which another instance waits.
    High,
}

/// CUDA version of the driver from which dependent launches can be captured.
const CAPTURES_DEPENDENTS: u32 = 12_030;

/// State of programmatic dependent launch: a stream's next kernel may begin before its predecessor has completed.
/// `kernels/shared/ptx.cuh` says why results do not change.
#[derive(Debug, Default)]
struct Dependents {
    allowed: AtomicBool,
    allowed_in_captures: AtomicBool,
    /// The stream's last work is a kernel that may have a dependent.
    after_kernel: AtomicBool,
    capturing: AtomicBool,
    /// A dependent was launched, or refused, in the capture.
    captured: AtomicBool,
}

/// A stream: work in it happens in order. Streams of this crate never wait for the legacy default stream.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: sys::CUstream,
    dependents: Dependents,
}

// SAFETY: streams may be used from any thread; the driver locks them.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of this priority.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Arc<Context>, priority: Priority) -> Result<Self, CudaError> {
        context.make_current()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the driver fills both live numbers.
        let code = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", code)?;
        let priority = if priority == Priority::High { greatest } else { least };
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver fills the live handle.
        let code = unsafe { sys::cuStreamCreateWithPriority(&raw mut handle, flags, priority) };
        check("cuStreamCreateWithPriority", code)?;
        Ok(Self { context: Arc::clone(context), handle, dependents: Dependents::default() })
    }

    /// The context of the stream.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The handle, to queue any work but a kernel: the next kernel waits until that work has completed.
    pub(crate) fn handle(&self) -> sys::CUstream {
        self.dependents.after_kernel.store(false, Relaxed);
        self.handle
    }

    /// The handle, to launch a kernel; see [`Stream::launched`].
    pub(crate) fn handle_for_kernel(&self) -> sys::CUstream {
        self.handle
    }

    /// Launches later kernels that wait for their predecessors themselves ([`super::Function::waits`]) as dependents
    /// of a kernel directly ahead (programmatic dependent launch); in captures, too, if the driver supports it.
    pub fn allow_dependents(&self) {
        self.dependents.allowed.store(true, Relaxed);
        let version = self.context.attributes().driver_version;
        self.dependents.allowed_in_captures.store(version >= CAPTURES_DEPENDENTS, Relaxed);
    }

    /// Whether a kernel that waits itself would be launched as a dependent now.
    pub(crate) fn takes_dependent(&self) -> bool {
        let d = &self.dependents;
        let captures = !d.capturing.load(Relaxed) || d.allowed_in_captures.load(Relaxed);
        d.allowed.load(Relaxed) && captures && d.after_kernel.load(Relaxed)
    }

    /// Notes a dependent that is about to be launched.
    pub(crate) fn launches_dependent(&self) {
        self.dependents.captured.fetch_or(self.dependents.capturing.load(Relaxed), Relaxed);
    }

    /// Notes a launched kernel, and whether it waits for its predecessors itself.
    pub(crate) fn launched(&self, waits: bool) {
        self.dependents.after_kernel.store(waits, Relaxed);
    }

    /// Notes the begin or end of a capture.
    pub(crate) fn captures(&self, begins: bool) {
        self.dependents.capturing.store(begins, Relaxed);
        if begins {
            self.dependents.captured.store(false, Relaxed);
        }
    }

    /// Stops dependent launches in captures if the last capture had any; returns whether it had.
    pub(crate) fn forbid_captured_dependents(&self) -> bool {
        let had = self.dependents.captured.swap(false, Relaxed);
        if had {
            self.dependents.allowed_in_captures.store(false, Relaxed);
        }
        had
    }

    /// Identity among the streams that live at the same time.
    #[must_use]
    pub fn id(&self) -> usize {
        self.handle as usize
    }

    /// Waits for all work in the stream.
    ///
    /// # Errors
    /// Those of the driver; failed work is reported here.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.make_current()?;
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }

    /// Makes later work wait for `event`, as recorded last.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.context.make_current()?;
        // SAFETY: stream and event live; the driver keeps what it needs of the event.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.handle(), event.handle, 0) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: made in `new`, released once; the driver finishes what is in it.
            released(unsafe { sys::cuStreamDestroy_v2(self.handle) });
        }
    }
}

/// An event: a point in a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: events may be used from any thread; the driver locks them.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event; with `timing` two of them measure time.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Arc<Context>, timing: bool) -> Result<Self, CudaError> {
        context.make_current()?;
        let mut handle = std::ptr::null_mut();
        let flags = if timing { 0 } else { sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32 };
        // SAFETY: the driver fills the live handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut handle, flags) })?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// Records the event behind all work that is in `stream` now.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.make_current()?;
        // SAFETY: stream and event live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle, stream.handle()) })
    }

    /// Waits for the event, as recorded last; an event never recorded counts as complete.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.make_current()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// Whether the event has completed.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn happened(&self) -> Result<bool, CudaError> {
        self.context.make_current()?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.handle) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Milliseconds of the device between `from` and `self`; both have timing and are complete.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn since_ms(&self, from: &Self) -> Result<f32, CudaError> {
        self.context.make_current()?;
        let mut ms = 0.0;
        // SAFETY: the driver fills the live number; both events live.
        let code = unsafe { sys::cuEventElapsedTime(&raw mut ms, from.handle, self.handle) };
        check("cuEventElapsedTime", code)?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: made in `new`, released once.
            released(unsafe { sys::cuEventDestroy_v2(self.handle) });
        }
    }
}
