//! A stream with the memory of its work: a ring of pinned memory for staging, device memory for small uploads,
//! scratch.
//!
//! Invariants:
//! * Pinned memory is written again only after the copies out of it have completed (an event for each chunk).
//! * Device memory of a stream is used by that stream only: its order keeps an upload behind kernels that still read
//!   the old data.
//! * Only a full ring, a read, and (rare) growth wait for the device.
//! * While a step is recorded ([`WorkStream::begin_step`]), nothing of it is launched, and its uploads lie in `stage`
//!   at offsets that depend on their sizes only, so that equal steps give equal lists. [`WorkStream::settle`]
//!   launches the list. Calls that cannot be recorded settle first, which keeps the order.

use super::graphs::{Graphs, List};
use crate::blas::Call;
use crate::driver::{
    Buffer, Context, CudaError, Event, Function, Launch as How, Module, Pinned, Priority, Stream, copy_to_device,
    copy_to_host,
};
use crate::kernels::pointwise::Activate;
use crate::kernels::{self, Launch};
use crate::virtual_kv::VirtualKv;
use bytemuck::Pod;
use lagoon_backend::LaunchCounters;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of one chunk of a stream's ring, and number of chunks.
const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS: usize = 8;
/// Initial bytes of a stream's buffer for small uploads.
const WORDS_BYTES: usize = 2 << 20;
/// Alignment of uploads in bytes, on which kernels' loads rely.
const ALIGNMENT: usize = 256;
/// Bytes that a recorded step may upload; a step with more is launched kernel by kernel.
const STAGE_BYTES: usize = 4 << 20;

/// Every kernel, by name.
#[derive(Clone, Debug)]
pub(super) struct Kernels(Arc<BTreeMap<&'static str, Function>>);

impl Kernels {
    pub(super) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, CudaError> {
        let attributes = context.attributes();
        let module = Module::load(context, image).map_err(|error| older(error, attributes.driver_version))?;
        // Shared memory is capped by the device: no plan asks for more.
        let shared = |name| kernels::dynamic_shared_bytes_max(name).min(attributes.shared_bytes_per_block);
        let function = |name: &&'static str| Ok((*name, module.function(name, shared(name))?));
        let mut all: BTreeMap<&'static str, Function> =
            kernels::ALL.iter().map(function).collect::<Result<_, CudaError>>()?;
        // Absent where the driver took other code of the image, such as PTX of 8.0: that costs these kernels only.
        let newer: &[&str] = if attributes.compute_capability.0 == 9 { kernels::SM90 } else { &[] };
        match newer.iter().map(function).collect::<Result<Vec<_>, CudaError>>() {
            Ok(newer) => all.extend(newer),
            Err(error) => tracing::warn!("no warpgroup kernels: {error}"),
        }
        Ok(Self(Arc::new(all)))
    }

    /// Whether the kernels on warpgroup products are there.
    pub(super) fn has_warpgroups(&self) -> bool {
        kernels::SM90.iter().all(|name| self.0.contains_key(name))
    }

    pub(super) fn get(&self, name: &str) -> &Function {
        self.0.get(name).expect("every kernel is in the image")
    }
}

/// Adds a note to a load error if the driver is too old.
fn older(error: CudaError, driver_version: u32) -> CudaError {
    match error {
        CudaError::Unsupported(why) if driver_version < kernels::CUDA_VERSION_MIN => {
            let version = |n: u32| format!("{}.{}", n / 1000, n % 1000 / 10);
            CudaError::Unsupported(format!(
                "{why}; the driver supports CUDA {}, the kernels need {}\nhint: install driver R535 or newer",
                version(driver_version),
                version(kernels::CUDA_VERSION_MIN),
            ))
        }
        other => other,
    }
}

#[derive(Debug)]
struct Chunk {
    pinned: Pinned,
    /// Event behind the last copy out of the chunk.
    copied: Event,
}

/// A step that is recorded instead of launched.
#[derive(Debug)]
struct Stage {
    list: List,
    /// Uploads: written to one of these, copied to `mirror` at once before the list is launched.
    pinned: [Chunk; 2],
    at: usize,
    filled: usize,
    mirror: Buffer,
    /// The last upload of [`WorkStream::upload_again`], and its address.
    again: (Vec<u8>, u64),
    /// Replaced buffers that the list may still use.
    retired: Vec<Buffer>,
    /// Stores that the list uses.
    used: Vec<Arc<VirtualKv>>,
    graphs: Graphs,
}

/// A stream and its memory. See the module for invariants.
#[derive(Debug)]
pub(super) struct WorkStream {
    pub(super) stream: Stream,
    context: Arc<Context>,
    kernels: Kernels,
    ring: Vec<Chunk>,
    /// The chunk that is being filled, and its fill level.
    chunk: usize,
    filled: usize,
    words: Buffer,
    words_filled: usize,
    scratch: Buffer,
    elements: Buffer,
    reading: Pinned,
    stage: Option<Box<Stage>>,
    /// Whether a step is being recorded, and the number of recorded steps.
    listing: bool,
    steps: u64,
}

impl WorkStream {
    /// A stream; `dependents` allows programmatic dependent launch ([`Stream::allow_dependents`]).
    pub(super) fn new(
        context: &Arc<Context>,
        kernels: Kernels,
        priority: Priority,
        dependents: bool,
    ) -> Result<Self, CudaError> {
        let stream = Stream::new(context, priority)?;
        if dependents {
            stream.allow_dependents();
        }
        let chunk = || {
            Ok(Chunk {
                pinned: Pinned::new(context, "pinned staging", CHUNK_BYTES)?,
                copied: Event::new(context, false)?,
            })
        };
        Ok(Self {
            stream,
            context: Arc::clone(context),
            kernels,
            ring: (0..CHUNKS).map(|_| chunk()).collect::<Result<_, CudaError>>()?,
            chunk: 0,
            filled: 0,
            words: Buffer::new(context, "uploads", WORDS_BYTES)?,
            words_filled: 0,
            scratch: Buffer::new(context, "scratch", 1 << 20)?,
            elements: Buffer::new(context, "elements of weights", 0)?,
            reading: Pinned::new(context, "pinned staging", CHUNK_BYTES)?,
            stage: None,
            listing: false,
            steps: 0,
        })
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Records calls until [`WorkStream::settle`] instead of launching them: begins a repeatable step.
    pub(super) fn begin_step(&mut self) -> Result<(), CudaError> {
        self.settle()?;
        if self.stage.is_none() {
            let chunk = || {
                Ok::<_, CudaError>(Chunk {
                    pinned: Pinned::new(&self.context, "pinned staging", STAGE_BYTES)?,
                    copied: Event::new(&self.context, false)?,
                })
            };
            self.stage = Some(Box::new(Stage {
                list: List::default(),
                pinned: [chunk()?, chunk()?],
                at: 0,
                filled: 0,
                mirror: Buffer::new(&self.context, "a step's uploads", STAGE_BYTES)?,
                again: (Vec::new(), 0),
                retired: Vec::new(),
                used: Vec::new(),
                graphs: Graphs::default(),
            }));
        }
        let stage = self.stage.as_mut().expect("made above");
        stage.at = 1 - stage.at;
        stage.filled = 0;
        stage.again.0.clear();
        // Left by a step that failed before its launch.
        stage.list.clear();
        stage.retired.clear();
        stage.used.clear();
        stage.pinned[stage.at].copied.synchronize()?;
        self.listing = true;
        self.steps += 1;
        Ok(())
    }

    /// The number of the step being recorded, if any.
    pub(super) fn listed_step(&self) -> Option<u64> {
        self.listing.then_some(self.steps)
    }

    /// Launches the recorded step; later calls launch at once. Call it before memory that a step may use is unmapped,
    /// because a recorded step has not announced its uses.
    pub(super) fn settle(&mut self) -> Result<(), CudaError> {
        if !std::mem::take(&mut self.listing) {
            return Ok(());
        }
        let stage = self.stage.as_mut().expect("a step was listed");
        let Chunk { pinned, copied } = &stage.pinned[stage.at];
        copy_to_device(&self.stream, stage.mirror.address(), pinned, 0, stage.filled)?;
        copied.record(&self.stream)?;
        // SAFETY: as for `launch`, `copy` and `blas`, which recorded the list; its memory was kept alive until here,
        // and later frees wait for the device.
        // frees wait for the device.
        let launched = unsafe { stage.graphs.launch(&stage.list, &self.stream) };
        stage.list.clear();
        stage.retired.clear();
        for memory in stage.used.drain(..) {
            memory.used_by(&self.stream)?;
        }
        launched
    }

    /// Announces that the calls so far use this memory.
    pub(super) fn uses(&mut self, memory: &Arc<VirtualKv>) -> Result<(), CudaError> {
        match &mut self.stage {
            Some(stage) if self.listing => {
                if !stage.used.iter().any(|used| Arc::ptr_eq(used, memory)) {
                    stage.used.push(Arc::clone(memory));
                }
                Ok(())
            }
            _ => memory.used_by(&self.stream),
        }
    }

    /// Launches of repeatable steps, the number of graphs, and why capturing has stopped, if it has.
    pub(super) fn graphs(&self) -> (LaunchCounters, usize, Option<&str>) {
        let graphs = self.stage.as_ref().map(|stage| &stage.graphs);
        graphs.map_or_else(Default::default, |g| (g.counters, g.len(), g.off.as_deref()))
    }

    /// Copies bytes to the recorded step's uploads and returns their address; `None` if no step is recorded, or its
    /// uploads are full, which ends the recording.
    fn stage(&mut self, bytes: &[u8]) -> Result<Option<u64>, CudaError> {
        let Some(stage) = self.stage.as_mut().filter(|_| self.listing) else { return Ok(None) };
        if stage.filled + bytes.len() > STAGE_BYTES {
            self.settle()?;
            return Ok(None);
        }
        stage.pinned[stage.at].pinned.as_mut_slice()[stage.filled..][..bytes.len()].copy_from_slice(bytes);
        let at = stage.mirror.range(stage.filled, bytes.len());
        stage.filled = (stage.filled + bytes.len()).next_multiple_of(ALIGNMENT).min(STAGE_BYTES);
        Ok(Some(at))
    }

    /// Runs a cuBLASLt call as this stream's next work. Its addresses are those of buffers that the device keeps, and
    /// no other stream uses the library.
    pub(super) fn blas(&mut self, call: Call) -> Result<(), CudaError> {
        match &mut self.stage {
            Some(stage) if self.listing => {
                stage.list.blas(call);
                Ok(())
            }
            // SAFETY: as this function's documentation says.
            _ => unsafe { call.run(&self.stream) },
        }
    }

    pub(super) fn launch<P: Pod>(&mut self, launch: &Launch<P>) -> Result<(), CudaError> {
        let function = self.kernels.get(launch.name);
        let how = How { grid: launch.grid, block: [launch.block, 1, 1], shared_bytes: launch.shared_bytes };
        if let Some(stage) = self.stage.as_mut().filter(|_| self.listing) {
            stage.list.kernel(function, how, bytemuck::bytes_of(&launch.params));
            return Ok(());
        }
        // SAFETY: `Launch` pairs the kernel's name with its parameter (their sizes are asserted in `kernels` and in
        // params.cuh); the addresses are those of buffers that the device keeps, whose sizes the operations assert.
        unsafe { function.launch(&self.stream, how, &launch.params) }
    }

    pub(super) fn activate(&mut self, launch: &Activate) -> Result<(), CudaError> {
        match launch {
            Activate::Gated(launch) => self.launch(launch),
            Activate::Plain(launch) => self.launch(launch),
        }
    }

    /// Copies bytes to the device, at `to`, as this stream's next work. Returns when they are staged.
    pub(super) fn copy(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        // A copy before a step's first kernel needs no recording: it overtakes nothing.
        if self.stage.as_ref().is_some_and(|stage| self.listing && !stage.list.is_empty())
            && let Some(from) = self.stage(bytes)?
            && let Some(stage) = &mut self.stage
        {
            stage.list.copy(to, from, bytes.len());
            return Ok(());
        }
        let mut done = 0;
        while done < bytes.len() {
            if self.filled == CHUNK_BYTES {
                self.chunk = (self.chunk + 1) % CHUNKS;
                self.filled = 0;
            }
            let Chunk { pinned, copied } = &mut self.ring[self.chunk];
            if self.filled == 0 {
                copied.synchronize()?;
            }
            let part = (bytes.len() - done).min(CHUNK_BYTES - self.filled);
            pinned.as_mut_slice()[self.filled..][..part].copy_from_slice(&bytes[done..done + part]);
            copy_to_device(&self.stream, to + done as u64, pinned, self.filled, part)?;
            copied.record(&self.stream)?;
            self.filled += part;
            done += part;
        }
        Ok(())
    }

    /// Copies bytes to device memory that stays until this stream has done the next operation; returns the address.
    pub(super) fn upload(&mut self, bytes: &[u8]) -> Result<u64, CudaError> {
        if let Some(at) = self.stage(bytes)? {
            return Ok(at);
        }
        let at = self.room(bytes.len())?;
        self.copy(at, bytes)?;
        Ok(at)
    }

    /// As [`WorkStream::upload`]; a recorded step uploads equal bytes once, since every layer has the same.
    pub(super) fn upload_again(&mut self, bytes: &[u8]) -> Result<u64, CudaError> {
        if let Some(stage) = self.stage.as_ref().filter(|stage| self.listing && stage.again.0 == bytes) {
            return Ok(stage.again.1);
        }
        let at = self.upload(bytes)?;
        if let Some(stage) = self.stage.as_mut().filter(|_| self.listing) {
            stage.again.0.clear();
            stage.again.0.extend_from_slice(bytes);
            stage.again.1 = at;
        }
        Ok(at)
    }

    /// Device memory for uploads of one operation. Settles.
    pub(super) fn room(&mut self, bytes: usize) -> Result<u64, CudaError> {
        self.settle()?;
        if bytes > self.words.bytes() {
            let grown = bytes.next_power_of_two();
            self.words = Buffer::new(&self.context, "uploads", grown)?;
            self.words_filled = 0;
        }
        if self.words_filled + bytes > self.words.bytes() {
            self.words_filled = 0;
        }
        let at = self.words.range(self.words_filled, bytes);
        self.words_filled = (self.words_filled + bytes).next_multiple_of(ALIGNMENT).min(self.words.bytes());
        Ok(at)
    }

    /// Scratch of at least `bytes` bytes with undefined contents, for this stream's next operation.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<u64, CudaError> {
        self.grow(|this| &mut this.scratch, "scratch", bytes.next_power_of_two())
    }

    /// As [`WorkStream::scratch`], beside it: for elements of packed weights.
    pub(super) fn elements(&mut self, bytes: usize) -> Result<u64, CudaError> {
        self.grow(|this| &mut this.elements, "elements of weights", bytes)
    }

    /// The address of a buffer that has `bytes` bytes at least.
    fn grow(
        &mut self,
        buffer: impl Fn(&mut Self) -> &mut Buffer,
        what: &'static str,
        bytes: usize,
    ) -> Result<u64, CudaError> {
        if bytes > buffer(self).bytes() {
            let grown = Buffer::new(&self.context, what, bytes)?;
            let old = std::mem::replace(buffer(self), grown);
            if let Some(stage) = self.stage.as_mut().filter(|_| self.listing) {
                stage.retired.push(old);
            }
        }
        Ok(buffer(self).address())
    }

    /// Waits for all calls so far.
    pub(super) fn synchronize(&mut self) -> Result<(), CudaError> {
        self.settle()?;
        self.stream.synchronize()
    }

    /// Calls `sink` with consecutive pieces of device memory, after everything in this stream has happened.
    pub(super) fn read(&mut self, from: u64, bytes: usize, mut sink: impl FnMut(&[u8])) -> Result<(), CudaError> {
        self.settle()?;
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(CHUNK_BYTES);
            copy_to_host(&self.stream, &mut self.reading, 0, from + done as u64, part)?;
            self.stream.synchronize()?;
            sink(&self.reading.as_slice()[..part]);
            done += part;
        }
        Ok(())
    }
}

impl Drop for WorkStream {
    fn drop(&mut self) {
        // A recorded step that was never settled is dropped. Queued work may use the memory that is freed next; a
        // lost context has nothing queued.
        let _lost = self.stream.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_named_where_kernels_do_not_load() {
        let refused = || CudaError::Unsupported("the kernels do not load".to_owned());
        let text = older(refused(), 12_010).to_string();
        assert!(text.contains("supports CUDA 12.1, the kernels need 12.2\nhint: install driver R535"), "{text}");
        assert_eq!(older(refused(), kernels::CUDA_VERSION_MIN), refused());
        let lost = || CudaError::Library { call: "cublasLtCreate", status: 1 };
        assert_eq!(older(lost(), 12_010), lost());
        // The compiler that `cargo xtask kernels` installs.
        let release = kernels::FATBIN_SOURCE.strip_prefix("NVRTC ").expect("NVRTC compiles the kernels");
        let version = format!("{}.{}.", kernels::CUDA_VERSION_MIN / 1000, kernels::CUDA_VERSION_MIN % 1000 / 10);
        assert!(release.starts_with(&version), "{release} makes code that drivers of {version} do not load");
        let pinned = include_str!("../../../xtask/src/kernels/toolkit.rs");
        assert!(pinned.contains(&format!("nvidia-cuda-nvrtc-cu12=={release}")), "another compiler");
    }
}
