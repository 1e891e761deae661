//! A stream with what its work needs: staging through pinned memory, room on the device for small uploads, scratch.
//!
//! Invariants:
//! * Pinned memory is written again only after the copies out of it have happened (an event for each chunk).
//! * Device memory of a stream is used by its own stream only, so that the stream's order is what keeps an upload from
//!   overtaking the kernels that still read what lay there before.
//! * Nothing here waits for the device but a full ring, a read, and growth, which is rare.
//! * While a step is listed ([`WorkStream::begin_step`]), nothing of it is launched, and what it uploads lies in `stage` at places
//!   that depend on the uploads' sizes only, so that a like step has a like list. [`WorkStream::settle`] launches the list. What
//!   cannot be listed settles first: order is kept in any case.

use super::graphs::{Graphs, List};
use crate::blas::Call;
use crate::driver::{
    Buffer, Context, CudaError, Event, Function, Launch as How, Module, Pinned, Priority, Stream, copy_to_device,
    copy_to_host,
};
use crate::kernels::{self, Launch};
use crate::virtual_kv::VirtualKv;
use bytemuck::Pod;
use lagoon_backend::LaunchCounters;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of one chunk of a stream's ring, and how many there are.
const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS: usize = 8;
/// Bytes of a stream's room for small uploads at first.
const WORDS_BYTES: usize = 2 << 20;
/// Uploads begin at multiples of this, which every kernel's loads may rely on.
const ALIGNMENT: usize = 256;
/// Bytes that a listed step may upload; one that has more is launched as it is.
const STAGE_BYTES: usize = 4 << 20;

/// Every kernel, by name.
#[derive(Clone, Debug)]
pub(super) struct Kernels(Arc<BTreeMap<&'static str, Function>>);

impl Kernels {
    pub(super) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, CudaError> {
        let attributes = context.attributes();
        let module = Module::load(context, image).map_err(|error| older(error, attributes.driver_version))?;
        // Which shapes fit is the plan's matter: no launch asks for more than the device has.
        let shared = |name| kernels::dynamic_shared_bytes_max(name).min(attributes.shared_bytes_per_block);
        let function = |name: &&'static str| Ok((*name, module.function(name, shared(name))?));
        let newer = if attributes.compute_capability.0 == 9 { kernels::SM90 } else { &[] };
        let all = kernels::ALL.iter().chain(newer);
        Ok(Self(Arc::new(all.map(function).collect::<Result<_, CudaError>>()?)))
    }

    pub(super) fn get(&self, name: &str) -> &Function {
        self.0.get(name).expect("every kernel is in the image")
    }
}

/// Adds that the driver is too old to an error of loading the kernels, where it is.
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
    /// Behind the last copy out of it.
    copied: Event,
}

/// A step that is listed instead of launched.
#[derive(Debug)]
struct Stage {
    list: List,
    /// What it uploads: written to one of these, copied to `mirror` at once before the list is launched.
    pinned: [Chunk; 2],
    at: usize,
    filled: usize,
    mirror: Buffer,
    /// The last thing that was uploaded by [`WorkStream::upload_again`], and where.
    again: (Vec<u8>, u64),
    /// Memory that the list may name and that nobody else has any more.
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
    /// The chunk that is being filled, and how far.
    chunk: usize,
    filled: usize,
    words: Buffer,
    words_filled: usize,
    scratch: Buffer,
    reading: Pinned,
    stage: Option<Box<Stage>>,
    /// Whether a step is listed now, and how many were so far.
    listing: bool,
    steps: u64,
}

impl WorkStream {
    /// A stream; `dependents` allows its kernels to begin before the one ahead has completed ([`Stream::allow_dependents`]).
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
            reading: Pinned::new(context, "pinned staging", CHUNK_BYTES)?,
            stage: None,
            listing: false,
            steps: 0,
        })
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Lists what is called from now on, until it is settled, instead of launching it: a step that comes again and again.
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
        // Of a step that failed before it was launched.
        stage.list.clear();
        stage.retired.clear();
        stage.used.clear();
        stage.pinned[stage.at].copied.synchronize()?;
        self.listing = true;
        self.steps += 1;
        Ok(())
    }

    /// The number of the step that is listed, if one is.
    pub(super) fn listed_step(&self) -> Option<u64> {
        self.listing.then_some(self.steps)
    }

    /// Launches what was listed; from now on everything is launched when it is called. To be called before memory that a step
    /// may use is unmapped, because a listed step has not announced its uses yet.
    pub(super) fn settle(&mut self) -> Result<(), CudaError> {
        if !std::mem::take(&mut self.listing) {
            return Ok(());
        }
        let stage = self.stage.as_mut().expect("a step was listed");
        let Chunk { pinned, copied } = &stage.pinned[stage.at];
        copy_to_device(&self.stream, stage.mirror.address(), pinned, 0, stage.filled)?;
        copied.record(&self.stream)?;
        // SAFETY: as for `launch`, `copy` and `blas`, which listed it; what they name was kept alive until here, and later
        // frees wait for the device.
        let launched = unsafe { stage.graphs.launch(&stage.list, &self.stream) };
        stage.list.clear();
        stage.retired.clear();
        for memory in stage.used.drain(..) {
            memory.used_by(&self.stream)?;
        }
        launched
    }

    /// Says that what was called so far uses this memory.
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

    /// How listed steps were launched, how many graphs there are, and why none is made any more.
    pub(super) fn graphs(&self) -> (LaunchCounters, usize, Option<&str>) {
        let graphs = self.stage.as_ref().map(|stage| &stage.graphs);
        graphs.map_or_else(Default::default, |g| (g.counters, g.len(), g.off.as_deref()))
    }

    /// Room for bytes of a listed step, written; `None` where no step is listed, which is also so after one had too much.
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

    /// A call of cuBLASLt, as this stream's next work. Its addresses are those of buffers that the device keeps, and this is
    /// the only stream that uses the library.
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

    /// Copies bytes to the device, at `to`, as this stream's next work. Returns when they are staged.
    pub(super) fn copy(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        // Before a step's first kernel a copy overtakes nothing.
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

    /// Copies bytes to somewhere on the device where they stay until this stream has done the next operation.
    pub(super) fn upload(&mut self, bytes: &[u8]) -> Result<u64, CudaError> {
        if let Some(at) = self.stage(bytes)? {
            return Ok(at);
        }
        let at = self.room(bytes.len())?;
        self.copy(at, bytes)?;
        Ok(at)
    }

    /// As [`WorkStream::upload`]; in a listed step the same bytes are uploaded once, as every layer has the same.
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

    /// Room on the device that stays this operation's. Settles.
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

    /// At least `bytes` of scratch, with undefined contents, this stream's next operation's alone.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<u64, CudaError> {
        if bytes > self.scratch.bytes() {
            let grown = Buffer::new(&self.context, "scratch", bytes.next_power_of_two())?;
            let old = std::mem::replace(&mut self.scratch, grown);
            if let Some(stage) = self.stage.as_mut().filter(|_| self.listing) {
                stage.retired.push(old);
            }
        }
        Ok(self.scratch.address())
    }

    /// Waits for everything that was called.
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
        // What was listed and never settled is forgotten. What is queued may use everything that is freed next; a lost
        // context has nothing queued.
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
