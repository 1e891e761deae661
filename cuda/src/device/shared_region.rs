//! [`OwnSharedRegion`]: a shared device region for transports: copies and hashes on a stream of its own, from any
//! thread, each waited for.

use super::work_stream::Kernels;
use crate::arena::Arena;
use crate::driver::{
    Buffer, Context, CudaError, Launch as How, Pinned, Priority, Stream, copy_to_device, copy_to_host,
    copy_within_device,
};
use crate::kernels::pointwise::{KvCheckParams, KvExtent, kv_check};
use bytemuck::bytes_of;
use lagoon_backend::{DeviceError, DeviceUuid, PeerRegion, RegionCopy, SharedRegion, Xxh3};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Bytes copied to or from the host at a time.
const PINNED_BYTES: usize = 1 << 20;
/// Extents hashed by one launch.
const EXTENTS_MAX: usize = 2048;
/// Layout of the scratch buffer: the hash's tables, extents, hashes.
const TABLES_BYTES: usize = 256;
const EXTENTS_BYTES: usize = EXTENTS_MAX * size_of::<KvExtent>();
const HASH_BYTES: usize = size_of::<u128>();
/// Bytes with which a copy rate is measured, at most.
const PROBE_BYTES: usize = 32 << 20;
const PROBE_ROUNDS: usize = 3;

/// A shared device region of this process; see the module's documentation.
#[derive(Debug)]
pub(super) struct OwnSharedRegion {
    context: Arc<Context>,
    arena: Arc<Arena>,
    kernels: Kernels,
    work: Mutex<Work>,
    mapped: AtomicUsize,
}

/// Stream and buffers, used by one call at a time.
#[derive(Debug)]
struct Work {
    stream: Stream,
    pinned: Pinned,
    room: Buffer,
}

impl Drop for Work {
    fn drop(&mut self) {
        // A failed call may have left work that uses these buffers; a lost context has none.
        let _lost = self.stream.synchronize();
    }
}

fn outside(at: u64, bytes: u64, of: u64) -> DeviceError {
    DeviceError::Unsupported(format!("{bytes} bytes from byte {at} of a shared region of {of} bytes"))
}

/// The device's address of a range of an arena.
fn address(arena: &Arena, at: u64, bytes: u64) -> Result<u64, DeviceError> {
    let all = arena.bytes() as u64;
    let inside = at.checked_add(bytes).is_some_and(|end| end <= all);
    if inside { Ok(arena.address() + at) } else { Err(outside(at, bytes, all)) }
}

impl Work {
    /// Copies `out.len()` bytes to the host.
    fn read(&mut self, from: u64, out: &mut [u8]) -> Result<(), CudaError> {
        for (at, part) in (from..).step_by(PINNED_BYTES).zip(out.chunks_mut(PINNED_BYTES)) {
            copy_to_host(&self.stream, &mut self.pinned, 0, at, part.len())?;
            self.stream.synchronize()?;
            part.copy_from_slice(&self.pinned.as_slice()[..part.len()]);
        }
        Ok(())
    }

    fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        for (at, part) in (to..).step_by(PINNED_BYTES).zip(bytes.chunks(PINNED_BYTES)) {
            self.pinned.as_mut_slice()[..part.len()].copy_from_slice(part);
            copy_to_device(&self.stream, at, &self.pinned, 0, part.len())?;
            self.stream.synchronize()?;
        }
        Ok(())
    }

    /// Hashes of at most [`EXTENTS_MAX`] extents by the kernel.
    fn hashes(&mut self, kernels: &Kernels, extents: &[KvExtent]) -> Result<Vec<u128>, CudaError> {
        let bytes = bytemuck::cast_slice::<KvExtent, u8>(extents);
        let out_bytes = extents.len() * HASH_BYTES;
        self.pinned.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let (at, out) = (self.room.range(TABLES_BYTES, bytes.len()), TABLES_BYTES + EXTENTS_BYTES);
        let out = self.room.range(out, out_bytes);
        copy_to_device(&self.stream, at, &self.pinned, 0, bytes.len())?;
        let count = u32::try_from(extents.len()).expect("few extents");
        let params = KvCheckParams { extents: at, out, secret: self.room.address(), count, pad: 0 };
        let launch = kv_check(params);
        let how = How { grid: launch.grid, block: [launch.block, 1, 1], shared_bytes: launch.shared_bytes };
        // SAFETY: the kernel of this name takes this parameter; the extents lie in a region that the caller keeps,
        // the rest in `room`, and all of it stays until the stream has been waited for, here or in the drop.
        unsafe { kernels.get(launch.name).launch(&self.stream, how, &launch.params)? };
        copy_to_host(&self.stream, &mut self.pinned, 0, out, out_bytes)?;
        self.stream.synchronize()?;
        let found = self.pinned.as_slice()[..out_bytes].chunks_exact(HASH_BYTES);
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0u128, |word, byte| word << 8 | u128::from(*byte));
        Ok(found.map(word).collect())
    }
}

impl OwnSharedRegion {
    pub(super) fn new(context: &Arc<Context>, kernels: Kernels, arena: Arc<Arena>) -> Result<Self, CudaError> {
        let mut work = Work {
            stream: Stream::new(context, Priority::Normal)?,
            pinned: Pinned::new(context, "pinned staging", PINNED_BYTES)?,
            room: Buffer::new(context, "checks", TABLES_BYTES + EXTENTS_BYTES + EXTENTS_MAX * HASH_BYTES)?,
        };
        let (secret, sums) = Xxh3::tables();
        work.write(work.room.address(), &[&secret[..], bytes_of(&sums)].concat())?;
        let (work, mapped) = (Mutex::new(work), AtomicUsize::new(0));
        // Exported once for all importers.
        arena.descriptor()?;
        Ok(Self { context: Arc::clone(context), arena, kernels, work, mapped })
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hashes an extent that the kernel does not take.
    fn hash_on_host(&self, extent: KvExtent) -> Result<u128, DeviceError> {
        let (mut hash, mut bytes) = (Xxh3::default(), vec![0; PINNED_BYTES]);
        let (mut at, mut left) = (extent.address, usize::try_from(extent.bytes).unwrap_or(usize::MAX));
        while left > 0 {
            let part = &mut bytes[..left.min(PINNED_BYTES)];
            self.work().read(at, part)?;
            hash.update(part);
            (at, left) = (at + part.len() as u64, left - part.len());
        }
        Ok(hash.finish())
    }
}

/// Whether the kernel takes the extent.
fn is_plain(extent: &KvExtent) -> bool {
    extent.bytes > Xxh3::SHORT as u64 && (extent.address | extent.bytes).is_multiple_of(16)
}

impl SharedRegion for OwnSharedRegion {
    fn bytes(&self) -> u64 {
        self.arena.bytes() as u64
    }

    fn device(&self) -> DeviceUuid {
        self.context.attributes().uuid
    }

    fn descriptor(&self) -> Result<OwnedFd, DeviceError> {
        let descriptor = self.arena.descriptor()?.try_clone_to_owned();
        descriptor.map_err(|error| DeviceError::Unsupported(format!("another descriptor of a shared region: {error}")))
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let from = address(&self.arena, at, out.len() as u64)?;
        Ok(self.work().read(from, out)?)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = address(&self.arena, at, bytes.len() as u64)?;
        Ok(self.work().write(to, bytes)?)
    }

    fn hashes(&self, ranges: &[(u64, u64)]) -> Result<Vec<u128>, DeviceError> {
        let extent = |&(at, bytes): &(u64, u64)| Ok(KvExtent { address: address(&self.arena, at, bytes)?, bytes });
        let extents = ranges.iter().map(extent).collect::<Result<Vec<_>, DeviceError>>()?;
        let plain: Vec<KvExtent> = extents.iter().copied().filter(is_plain).collect();
        let mut found = Vec::with_capacity(plain.len());
        for part in plain.chunks(EXTENTS_MAX) {
            found.extend(self.work().hashes(&self.kernels, part)?);
        }
        let mut found = found.into_iter();
        let hash = |extent: KvExtent| match is_plain(&extent) {
            true => Ok(found.next().expect("one for each extent")),
            false => self.hash_on_host(extent),
        };
        extents.into_iter().map(hash).collect()
    }

    fn import(
        self: Arc<Self>,
        of: &DeviceUuid,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Box<dyn PeerRegion>, DeviceError> {
        if !self.context.can_access(of)? {
            let why = "it is of another device, whose memory this one cannot access as a peer";
            return Err(DeviceError::Unsupported(why.to_owned()));
        }
        let bytes = usize::try_from(bytes).map_err(|_too_large| outside(0, bytes, 0))?;
        let arena = Arena::import(&self.context, descriptor, bytes)?;
        self.mapped.fetch_add(1, Relaxed);
        Ok(Box::new(Imported { arena, own: self }))
    }

    fn mapped(&self) -> usize {
        self.mapped.load(Relaxed)
    }
}

/// Another process's region. Its calls have ended when it is dropped, so its memory is unused when unmapped.
#[derive(Debug)]
struct Imported {
    arena: Arena,
    own: Arc<OwnSharedRegion>,
}

impl Drop for Imported {
    fn drop(&mut self) {
        // A failed copy may still be queued; a lost context has nothing queued.
        let _lost = self.own.work().stream.synchronize();
        self.own.mapped.fetch_sub(1, Relaxed);
    }
}

impl PeerRegion for Imported {
    fn bytes(&self) -> u64 {
        self.arena.bytes() as u64
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let from = address(&self.arena, at, out.len() as u64)?;
        Ok(self.own.work().read(from, out)?)
    }

    fn copy(&self, moves: &[RegionCopy]) -> Result<(), DeviceError> {
        let work = self.own.work();
        for &RegionCopy { from, to, bytes } in moves {
            let (from, to) = (address(&self.arena, from, bytes)?, address(&self.own.arena, to, bytes)?);
            let bytes = usize::try_from(bytes).map_err(|_too_large| outside(to, bytes, 0))?;
            copy_within_device(&work.stream, to, from, bytes)?;
        }
        Ok(work.stream.synchronize()?)
    }

    fn rates(&self) -> Result<(f64, f64), DeviceError> {
        let bytes = self.arena.bytes().min(PROBE_BYTES);
        let scratch = |_| Buffer::new(&self.own.context, "measuring a path", bytes);
        let [to, own] = [scratch(0)?, scratch(1)?];
        let rate = |from: u64| {
            let mut best = 0f64;
            for _ in 0..PROBE_ROUNDS {
                let work = self.own.work();
                let start = Instant::now();
                copy_within_device(&work.stream, to.address(), from, bytes)?;
                work.stream.synchronize()?;
                #[expect(clippy::cast_precision_loss, reason = "a byte count below 2^53")]
                let rate = bytes as f64 / start.elapsed().as_secs_f64().max(1e-9);
                best = best.max(rate);
            }
            Ok::<f64, CudaError>(best)
        };
        Ok((rate(self.arena.address())?, rate(own.address())?))
    }
}
