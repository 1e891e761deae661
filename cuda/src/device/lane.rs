//! A stream with what its work needs: staging through pinned memory, room on the device for small uploads, scratch.
//!
//! Invariants:
//! * Pinned memory is written again only after the copies out of it have happened (an event for each chunk).
//! * Device memory of a lane is used by its own stream only, so that the stream's order is what keeps an upload from
//!   overtaking the kernels that still read what lay there before.
//! * Nothing here waits for the device but a full ring, a read, and growth, which is rare.

use crate::driver::{
    Buffer, Context, CudaError, Event, Function, Launch as How, Module, Pinned, Priority, Stream, copy_to_device,
    copy_to_host,
};
use crate::kernels::{self, Launch};
use bytemuck::Pod;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of one chunk of a lane's ring, and how many there are.
const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS: usize = 8;
/// Bytes of a lane's room for small uploads at first.
const WORDS_BYTES: usize = 2 << 20;
/// Uploads begin at multiples of this, which every kernel's loads may rely on.
const ALIGNMENT: usize = 256;

/// Every kernel, by name.
#[derive(Clone, Debug)]
pub(super) struct Kernels(Arc<BTreeMap<&'static str, Function>>);

impl Kernels {
    pub(super) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, CudaError> {
        let module = Module::load(context, image)?;
        let function =
            |name: &&'static str| Ok((*name, module.function(name, kernels::dynamic_shared_bytes_max(name))?));
        Ok(Self(Arc::new(kernels::ALL.iter().map(function).collect::<Result<_, CudaError>>()?)))
    }
}

#[derive(Debug)]
struct Chunk {
    pinned: Pinned,
    /// Behind the last copy out of it.
    copied: Event,
}

/// A stream and its memory. See the module for invariants.
#[derive(Debug)]
pub(super) struct Lane {
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
}

impl Lane {
    pub(super) fn new(context: &Arc<Context>, kernels: Kernels, priority: Priority) -> Result<Self, CudaError> {
        let chunk = || {
            Ok(Chunk {
                pinned: Pinned::new(context, "pinned staging", CHUNK_BYTES)?,
                copied: Event::new(context, false)?,
            })
        };
        Ok(Self {
            stream: Stream::new(context, priority)?,
            context: Arc::clone(context),
            kernels,
            ring: (0..CHUNKS).map(|_| chunk()).collect::<Result<_, CudaError>>()?,
            chunk: 0,
            filled: 0,
            words: Buffer::new(context, "uploads", WORDS_BYTES)?,
            words_filled: 0,
            scratch: Buffer::new(context, "scratch", 1 << 20)?,
            reading: Pinned::new(context, "pinned staging", CHUNK_BYTES)?,
        })
    }

    pub(super) fn launch<P: Pod>(&self, launch: &Launch<P>) -> Result<(), CudaError> {
        let function = self.kernels.0.get(launch.name).expect("every kernel is in the image");
        let how = How { grid: launch.grid, block: [launch.block, 1, 1], shared_bytes: launch.shared_bytes };
        // SAFETY: `Launch` pairs the kernel's name with its parameter (their sizes are asserted in `kernels` and in
        // params.cuh); the addresses are those of buffers that the device keeps, whose sizes the operations assert.
        unsafe { function.launch(&self.stream, how, &launch.params) }
    }

    /// Copies bytes to the device, at `to`, as this lane's next work. Returns when they are staged.
    pub(super) fn copy(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
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

    /// Copies bytes to somewhere on the device where they stay until this lane has done the next operation.
    pub(super) fn upload(&mut self, bytes: &[u8]) -> Result<u64, CudaError> {
        let at = self.room(bytes.len())?;
        self.copy(at, bytes)?;
        Ok(at)
    }

    /// Room on the device that stays this operation's.
    pub(super) fn room(&mut self, bytes: usize) -> Result<u64, CudaError> {
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

    /// At least `bytes` of scratch, with undefined contents, this lane's next operation's alone.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<u64, CudaError> {
        if bytes > self.scratch.bytes() {
            self.scratch = Buffer::new(&self.context, "scratch", bytes.next_power_of_two())?;
        }
        Ok(self.scratch.address())
    }

    /// Calls `sink` with consecutive pieces of device memory, after everything in this lane has happened.
    pub(super) fn read(&mut self, from: u64, bytes: usize, mut sink: impl FnMut(&[u8])) -> Result<(), CudaError> {
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

impl Drop for Lane {
    fn drop(&mut self) {
        // What is queued may use everything that is freed next; a lost context has nothing queued.
        let _lost = self.stream.synchronize();
    }
}
