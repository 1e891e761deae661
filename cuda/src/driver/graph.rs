//! CUDA graphs: work of a stream that is captured once and launched as one.

use super::{Context, CudaError, Stream, check, released};
use cudarc::driver::sys;
use std::sync::Arc;

/// A captured graph, with the parameters of its capture.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
}

// SAFETY: graphs may be launched from any thread, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the calls of `work` in `stream`, which are not executed. The capture is local to this thread: others
    /// may allocate and map meanwhile; `work` must not wait.
    ///
    /// # Errors
    /// Those of `work` or the driver; the stream is as before.
    pub fn capture(stream: &Stream, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Self, CudaError> {
        let context = stream.context();
        context.make_current()?;
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.handle(), mode) })?;
        stream.captures(true);
        let worked = work();
        stream.captures(false);
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives and captures, on this thread; the driver fills the live handle. It ends the
        // capture even if that has become invalid.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream.handle(), &raw mut graph) });
        let made = worked.and(ended).and_then(|()| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the graph was just made; the driver fills the live handle.
            let code = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut handle, graph, 0) };
            check("cuGraphInstantiate", code).map(|()| Self { context: Arc::clone(context), handle })
        });
        if !graph.is_null() {
            // SAFETY: made above, destroyed once; what was instantiated does not need it.
            released(unsafe { sys::cuGraphDestroy(graph) });
        }
        made
    }

    /// Launches the graph in `stream`.
    ///
    /// # Errors
    /// Those of the driver for the launch.
    ///
    /// # Safety
    /// All memory of the captured work is as promised for the capture.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.make_current()?;
        // SAFETY: both live; the rest is the caller's promise.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.handle, stream.handle()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: instantiated once, destroyed once; the owner has waited for its launches.
            released(unsafe { sys::cuGraphExecDestroy(self.handle) });
        }
    }
}
