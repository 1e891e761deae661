//! Host memory shared between processes ([`SharedArena`]): a memfd that its owner maps for writing and others map
//! read-only.
//!
//! Invariants:
//!
//! * within the owner's process a byte is never written while a reference to it exists: transports and the device
//!   lock granules for each access; an access to a granule in use retries for a moment, then fails;
//! * the file can neither shrink nor grow nor be mapped for writing again: it is sealed, and others get a descriptor
//!   that was opened for reading;
//! * another process never gets a reference into the memory: it copies bytes out. A copy is valid only if the owner
//!   did not write meanwhile (KV of sealed rBlocks under a live export); the content hash proves it.

use crate::Xxh3;
use bytes::Bytes;
use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use std::{
    fmt,
    fs::File,
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// Errors of an arena access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    #[error("bytes {offset} to {end} of an arena of {bytes} bytes")]
    Outside { offset: u64, end: u64, bytes: u64 },
    #[error("bytes {offset} to {end} stayed in use")]
    Busy { offset: u64, end: u64 },
}

/// A granule that is being written.
const WRITING: u32 = u32::MAX;
/// Attempts of an access before it fails; most of them yield the processor.
const ATTEMPTS_MAX: u32 = 20_000;

#[derive(Debug)]
struct Inner {
    file: File,
    map: MmapRaw,
    bytes: usize,
    granule_bytes: usize,
    /// Readers of each granule, or [`WRITING`].
    granules: Vec<AtomicU32>,
}

/// The owner's handle; clones share the memory.
#[derive(Clone)]
pub struct SharedArena(Arc<Inner>);

impl fmt::Debug for SharedArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedArena").field("bytes", &self.0.bytes).finish_non_exhaustive()
    }
}

/// Seals on the file: other processes can only read it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

impl SharedArena {
    /// An arena of `bytes` zeroes (not 0). `granule_bytes` is the unit of locking: a divisor of the size of one
    /// write, so that writes to neighbours do not wait for each other.
    ///
    /// # Errors
    /// When the system refuses the memory or a seal.
    pub fn new(bytes: usize, granule_bytes: usize) -> io::Result<Self> {
        if bytes == 0 || granule_bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "an arena and its granules hold something"));
        }
        let file = memfd_create("lagoon-kv", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        let file = File::from(file);
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        // After our own map, so that it stays the only writable one.
        fcntl_add_seals(&file, SEALS)?;
        let granules = (0..bytes.div_ceil(granule_bytes)).map(|_| AtomicU32::new(0)).collect();
        Ok(Self(Arc::new(Inner { file, map, bytes, granule_bytes, granules })))
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// A read-only descriptor of the arena for another process.
    ///
    /// # Errors
    /// When the system refuses to open it.
    pub fn read_only_file(&self) -> io::Result<File> {
        use std::os::fd::AsRawFd;
        File::open(format!("/proc/self/fd/{}", self.0.file.as_raw_fd()))
    }

    /// A range of bytes without a copy, read-locked while the returned value lives.
    ///
    /// # Errors
    /// When the range is outside, or stays in use by a writer.
    pub fn read_lock(&self, offset: u64, bytes: usize) -> Result<Bytes, ArenaError> {
        let range = self.0.bounded(offset, bytes)?;
        self.0.lock(&range, false)?;
        Ok(Bytes::from_owner(ReadLock { arena: Arc::clone(&self.0), range }))
    }

    /// Calls `visit` with a range of bytes, read-locked meanwhile.
    ///
    /// # Errors
    /// As [`SharedArena::read_lock`].
    pub fn view(&self, offset: u64, bytes: usize, visit: &mut dyn FnMut(&[u8])) -> Result<(), ArenaError> {
        visit(&self.read_lock(offset, bytes)?);
        Ok(())
    }

    /// Calls `fill` to write a range of bytes, write-locked meanwhile.
    ///
    /// # Errors
    /// When the range is outside, or stays in use.
    pub fn fill(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), ArenaError> {
        let range = self.0.bounded(offset, bytes)?;
        self.0.lock(&range, true)?;
        let guard = Writing { arena: &self.0, range: range.clone() };
        // SAFETY: the range lies in the map (`bounded`), which is writable and lives as long as `self`. Its granules
        // are marked as being written until `guard` goes, so that no other reference into them exists in this
        // process, nor is made; other processes have no references, only read-only maps that they copy out of.
        let target = unsafe { std::slice::from_raw_parts_mut(self.0.map.as_mut_ptr().add(range.start), range.len()) };
        fill(target);
        drop(guard);
        Ok(())
    }
}

/// Granules of an arena that are locked for a device's operation, until this is dropped.
#[derive(Debug)]
pub(crate) struct Locked {
    arena: Arc<Inner>,
    /// Ascending, and disjoint if locked for writing.
    granules: Vec<Range<usize>>,
    write: bool,
}

impl Locked {
    /// The arena's first byte. Only locked bytes may be read or written.
    pub(crate) fn base(&self) -> *mut u8 {
        self.arena.map.as_mut_ptr()
    }

    /// Size of the arena.
    pub(crate) fn bytes(&self) -> usize {
        self.arena.bytes
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let write = self.write;
        self.granules.iter().cloned().flatten().for_each(|g| unlock_one(&self.arena.granules[g], write));
    }
}

impl SharedArena {
    /// Locks all granules of some byte ranges: shared for reading, exclusive for writing.
    ///
    /// # Errors
    /// As [`SharedArena::read_lock`].
    pub(crate) fn lock(&self, ranges: impl Iterator<Item = Range<usize>>, write: bool) -> Result<Locked, ArenaError> {
        let mut wanted: Vec<Range<usize>> = Vec::new();
        for range in ranges {
            self.0.bounded(range.start as u64, range.len())?;
            let granules = self.0.granules_of(&range);
            match wanted.last_mut() {
                Some(last) if write && (last.start..=last.end).contains(&granules.start) => {
                    last.end = last.end.max(granules.end);
                }
                _ => wanted.push(granules),
            }
        }
        if write {
            wanted = merged(wanted);
        }
        // Dropped on failure: unlocks the granules that are locked so far.
        let mut locked = Locked { arena: Arc::clone(&self.0), granules: Vec::with_capacity(wanted.len()), write };
        for granules in wanted {
            locked.granules.push(granules.start..granules.start);
            for granule in granules {
                if !lock_one(&self.0.granules[granule], write) {
                    let offset = (granule * self.0.granule_bytes) as u64;
                    return Err(ArenaError::Busy { offset, end: offset + self.0.granule_bytes as u64 });
                }
                if let Some(last) = locked.granules.last_mut() {
                    last.end += 1;
                }
            }
        }
        Ok(locked)
    }
}

/// The same granules, each once, ascending.
fn merged(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut out: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

/// A read-locked range.
struct ReadLock {
    arena: Arc<Inner>,
    range: Range<usize>,
}

impl AsRef<[u8]> for ReadLock {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range lies in the map, which lives as long as `self.arena`. Its granules count this reader until
        // the lock is dropped, so that nobody in this process writes them; no other process can, the file is sealed.
        unsafe { std::slice::from_raw_parts(self.arena.map.as_ptr().add(self.range.start), self.range.len()) }
    }
}

impl Drop for ReadLock {
    fn drop(&mut self) {
        self.arena.unlock(&self.range, false);
    }
}

/// Ends a write, also when its closure panics.
struct Writing<'a> {
    arena: &'a Inner,
    range: Range<usize>,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.arena.unlock(&self.range, true);
    }
}

impl Inner {
    fn bounded(&self, offset: u64, bytes: usize) -> Result<Range<usize>, ArenaError> {
        let end = offset.saturating_add(bytes as u64);
        let outside = ArenaError::Outside { offset, end, bytes: self.bytes as u64 };
        let range = usize::try_from(offset).ok().zip(usize::try_from(end).ok()).map(|(start, end)| start..end);
        range.filter(|range| range.end <= self.bytes).ok_or(outside)
    }

    fn granules_of(&self, range: &Range<usize>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        range.start / self.granule_bytes..range.end.div_ceil(self.granule_bytes)
    }

    /// Locks all granules of a range, in ascending order, or none.
    fn lock(&self, range: &Range<usize>, write: bool) -> Result<(), ArenaError> {
        let granules = self.granules_of(range);
        for granule in granules.clone() {
            if !lock_one(&self.granules[granule], write) {
                (granules.start..granule).for_each(|before| unlock_one(&self.granules[before], write));
                return Err(ArenaError::Busy { offset: range.start as u64, end: range.end as u64 });
            }
        }
        Ok(())
    }

    fn unlock(&self, range: &Range<usize>, write: bool) {
        self.granules_of(range).for_each(|granule| unlock_one(&self.granules[granule], write));
    }
}

fn lock_one(granule: &AtomicU32, write: bool) -> bool {
    for attempt in 0..ATTEMPTS_MAX {
        let now = granule.load(Ordering::Relaxed);
        let next = match now {
            0 if write => Some(WRITING),
            WRITING => None,
            // Two below the mark: it can never be reached by counting.
            readers if !write && readers < WRITING - 2 => Some(readers + 1),
            _ => None,
        };
        let locked = next.map(|next| granule.compare_exchange_weak(now, next, Ordering::Acquire, Ordering::Relaxed));
        match locked {
            Some(Ok(_)) => return true,
            // Write locks are short. A read lock may be long; a writer that meets one has made a mistake.
            _ if attempt < 64 => std::hint::spin_loop(),
            _ => std::thread::yield_now(),
        }
    }
    false
}

fn unlock_one(granule: &AtomicU32, write: bool) {
    if write {
        granule.store(0, Ordering::Release);
    } else {
        granule.fetch_sub(1, Ordering::Release);
    }
}

/// Bytes of a view whose pages are populated together, at the first read of them.
const FIND_BYTES: usize = 2 << 20;

/// Another process's arena, for reading.
pub struct ArenaView {
    map: MmapRaw,
    bytes: usize,
    /// A bit per [`FIND_BYTES`] bytes: their pages are populated.
    found: Box<[AtomicU64]>,
}

impl fmt::Debug for ArenaView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaView").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl ArenaView {
    /// Maps a descriptor from the arena's owner; `bytes` is the size that the owner reported. Pages that the owner
    /// never wrote stay absent unless a neighbouring read populates them.
    ///
    /// # Errors
    /// If the file is no sealed memfd of that size: reading a file that shrinks would kill this process.
    pub fn map(file: &File, bytes: u64) -> io::Result<Self> {
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let seals = fcntl_get_seals(file).map_err(|_not_a_memfd| bad("the descriptor is no memfd"))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::FUTURE_WRITE) {
            return Err(bad("the memory is not sealed"));
        }
        let found = file.metadata()?.len();
        if found != bytes {
            return Err(bad(&format!("the memory has {found} bytes, its owner announced {bytes}")));
        }
        let len = usize::try_from(bytes).map_err(|_too_large| bad("the memory does not fit the address space"))?;
        let map = MmapOptions::new().len(len).map_raw_read_only(file)?;
        let found = (0..len.div_ceil(FIND_BYTES).div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { map, bytes: len, found })
    }

    /// Populates the pages of `len` bytes at `start` in chunks: a page fault during a copy costs more than copying
    /// the page.
    fn find(&self, start: usize, len: usize) {
        for chunk in start / FIND_BYTES..(start + len).div_ceil(FIND_BYTES) {
            let (word, bit) = (&self.found[chunk / 64], 1 << (chunk % 64));
            if word.load(Ordering::Relaxed) & bit == 0 {
                let at = chunk * FIND_BYTES;
                // Linux before 5.14 lacks it; the copy then faults page by page.
                let _ = self.map.advise_range(Advice::PopulateRead, at, FIND_BYTES.min(self.bytes - at));
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies bytes out of the arena. `hash` takes them as copied; other threads may read `target` after
    /// [`Xxh3::settle`].
    ///
    /// # Errors
    /// When the range is outside.
    pub fn copy(&self, offset: u64, target: &mut [u8], hash: Option<&mut Xxh3>) -> Result<(), ArenaError> {
        let end = offset.saturating_add(target.len() as u64);
        if end > self.bytes as u64 {
            return Err(ArenaError::Outside { offset, end, bytes: self.bytes as u64 });
        }
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        self.find(start, target.len());
        // SAFETY: source: the range lies in the map, which lives as long as `self`; its file cannot shrink, so that
        // every page exists. Target: a slice of our own, which overlaps no map. The owner's process may write the
        // source meanwhile, if it broke its promise that an exported block is sealed; then some bytes are old and some
        // new. No reference into the map is made, any bit pattern is a byte, every byte is read once, so that what is
        // hashed is what was copied, and the content's check refuses it.
        unsafe {
            let source = self.map.as_ptr().add(start);
            match hash {
                Some(hash) => hash.advance(source, target.as_mut_ptr(), target.len()),
                None => std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn another_process_sees_what_is_written_and_cannot_write() {
        let arena = SharedArena::new(10_000, 4096).unwrap();
        arena.fill(5_000, 100, &mut |target| target.fill(7)).unwrap();
        let file = arena.read_only_file().unwrap();
        let view = ArenaView::map(&file, 10_000).unwrap();
        let mut out = [0; 102];
        view.copy(4_999, &mut out, None).unwrap();
        assert_eq!((out[0], out[1], out[100], out[101]), (0, 7, 7, 0));
        assert!(MmapOptions::new().map_raw(&file).is_err(), "the descriptor is for reading");
        assert!(ftruncate(arena.0.file.as_fd(), 1).is_err(), "the file cannot shrink");
        assert!(MmapOptions::new().map_raw(&arena.0.file).is_err(), "no second writable map");
        assert!(view.copy(9_999, &mut out, None).is_err());
    }

    #[test]
    fn reading_a_little_of_a_large_memory_leaves_the_rest_unmade() {
        let bytes = 1 << 30;
        let arena = SharedArena::new(bytes, 4096).unwrap();
        let resident = || rustix::fs::fstat(&arena.0.file).unwrap().st_blocks * 512;
        let before = resident();
        let view = ArenaView::map(&arena.read_only_file().unwrap(), bytes as u64).unwrap();
        let mut out = [1; 4096];
        // Over the edge of two parts, and the last bytes.
        for offset in [3 * FIND_BYTES as u64 - 100, (bytes - out.len()) as u64] {
            view.copy(offset, &mut out, None).unwrap();
            assert!(out.iter().all(|byte| *byte == 0));
        }
        let made = resident() - before;
        assert!(made <= 3 * FIND_BYTES as i64, "{made} bytes");
    }

    #[test]
    fn only_sealed_memory_is_mapped() {
        let arena = SharedArena::new(100, 64).unwrap();
        assert!(ArenaView::map(&arena.read_only_file().unwrap(), 101).is_err());
        let file = File::open("/proc/self/exe").unwrap();
        assert!(ArenaView::map(&file, file.metadata().unwrap().len()).is_err());
        let open = File::from(memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap());
        ftruncate(&open, 100).unwrap();
        assert!(ArenaView::map(&open, 100).is_err());
    }

    #[test]
    fn a_read_lock_keeps_writers_out() {
        let arena = SharedArena::new(4 * 64, 64).unwrap();
        let reader = arena.read_lock(70, 10).unwrap();
        let again = arena.read_lock(0, 128).unwrap();
        assert_eq!(arena.fill(127, 2, &mut |_| ()), Err(ArenaError::Busy { offset: 127, end: 129 }));
        arena.fill(128, 128, &mut |target| target.fill(1)).unwrap();
        drop((reader, again));
        arena.fill(0, 256, &mut |target| target.fill(2)).unwrap();
        assert_eq!(arena.read_lock(255, 1).unwrap(), [2].as_slice());
        assert!(arena.read_lock(200, 57).is_err());
        assert_eq!(arena.read_lock(256, 0).unwrap().len(), 0);
        // A panic in a writer leaves nothing locked.
        let panic = std::panic::AssertUnwindSafe(|| arena.fill(0, 9, &mut |_| panic!("on purpose")));
        assert!(std::panic::catch_unwind(panic).is_err());
        arena.fill(0, 9, &mut |target| target.fill(3)).unwrap();
    }

    #[test]
    fn a_device_and_a_transport_exclude_each_other() {
        let arena = SharedArena::new(8 * 64, 64).unwrap();
        let ranges = [300..310, 10..20, 15..70, 64..65];
        let writing = arena.lock(ranges.iter().cloned(), true).unwrap();
        assert_eq!(writing.granules, [0..2, 4..5], "each granule once");
        assert!(arena.read_lock(120, 1).is_err() && arena.read_lock(256, 1).is_err());
        assert!(arena.lock(std::iter::once(128..257), false).is_err(), "one of its granules is written");
        arena.fill(128, 128, &mut |target| target.fill(1)).unwrap();
        drop(writing);
        let reading = arena.lock([0..100, 64..128].into_iter(), false).unwrap();
        let reader = arena.read_lock(0, 128).unwrap();
        assert!(arena.fill(0, 1, &mut |_| ()).is_err() && arena.lock(std::iter::once(127..129), true).is_err());
        arena.fill(128, 1, &mut |_| ()).unwrap();
        drop((reading, reader));
        arena.fill(0, 512, &mut |target| target.fill(2)).unwrap();
        assert!(arena.lock(std::iter::once(500..513), false).is_err(), "outside");
    }

    #[test]
    fn threads_that_write_neighbours_wait_for_each_other() {
        let arena = SharedArena::new(64 * 100, 64).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let arena = arena.clone();
                scope.spawn(move || {
                    for n in 0..400u64 {
                        let at = (n * 4 + u64::from(thread)) * 4;
                        arena.fill(at, 4, &mut |target| target.fill(thread + 1)).unwrap();
                    }
                });
            }
        });
        let all = arena.read_lock(0, 6400).unwrap();
        assert!(all.chunks(4).enumerate().all(|(n, part)| part.iter().all(|b| usize::from(*b) == n % 4 + 1)));
    }
}
