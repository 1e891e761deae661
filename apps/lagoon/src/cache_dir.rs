//! The disk tier of the prefix cache (`--cache-dir`, docs/adr/0037): a directory that one process holds, with a file for each
//! rBlock (`cache_file.rs`), bounded by bytes.
//!
//! Owns the directory, its lock, and two threads: one writes and evicts, one reads. The loop hands them work over bounded
//! queues and never waits: a full queue is a loss that is reported. Files of other names are left alone.
//!
//! Invariants: a file has its name only once it is complete; the index has every named file and no more bytes than the bound.

use crate::cache_file::{self, BlockShape};
use anyhow::Context as _;
use lagoon_instance::{BlockKv, DiskEffect, DiskEvent, DiskLoss};
use lagoon_kv::{BlockHash, Tenants, Tier};
use lagoon_types::limits::{TIER_DISK_BLOCKS_MAX, TIER_DISK_WRITES_MAX};
use std::fs::{self, DirEntry, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::mpsc;

/// File systems store whole pages: what a file counts for is rounded up.
const PAGE_BYTES: u64 = 4096;
/// Events that wait for the loop.
const EVENTS_MAX: usize = 256;
/// Pause between two log lines about failing writes.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Time that the end of the process waits for writes that are queued.
const LAST_WRITES: Duration = Duration::from_secs(5);

/// The disk tier, as the loop uses it. See the module's documentation.
#[derive(Debug)]
pub(crate) struct CacheDir {
    reads: SyncSender<(u64, BlockHash)>,
    /// `None` once it ends.
    writes: Option<SyncSender<Work>>,
    /// An order to remove these tenants' blocks waits for a place in the queue of the writing thread.
    drops: Option<Tenants>,
    /// Closed when all that was queued is written.
    written: Receiver<()>,
    events: mpsc::Receiver<DiskEvent>,
}

/// Work of the writing thread.
#[derive(Debug)]
enum Work {
    Write(BlockHash, BlockKv),
    /// Remove these tenants' blocks.
    Drop(Tenants),
}

/// The directory, which both threads work on.
#[derive(Debug)]
struct Files {
    dir: PathBuf,
    shape: BlockShape,
    /// Named files, with the bytes that they count for.
    index: Mutex<Tier<()>>,
    /// Held as long as this process has the directory.
    _lock: DirLock,
}

/// The lock of a cache directory.
#[derive(Debug)]
struct DirLock(File);

impl Drop for DirLock {
    /// Closing the file is not enough: a forked child inherits the descriptor, and with it the lock, until it calls exec.
    fn drop(&mut self) {
        if let Err(error) = self.0.unlock() {
            tracing::debug!(%error, "the lock of the cache directory ends with the process");
        }
    }
}

impl CacheDir {
    /// Takes the directory, makes it if need be, and finds the blocks of earlier processes, of at most `limit_bytes`. The event
    /// says which: the instance's first one, so that no request comes before it.
    ///
    /// # Errors
    /// If another process has it, or it cannot be read or written.
    pub(crate) fn open(dir: &Path, limit_bytes: u64, shape: BlockShape) -> anyhow::Result<(Self, DiskEvent)> {
        let files = Files::open(dir, limit_bytes, shape)?;
        let found = {
            let index = files.index();
            DiskEvent::Found { hashes: index.hashes().copied().collect(), bytes: index.bytes() }
        };
        let files = Arc::new(files);
        let (events, of_loop) = mpsc::channel(EVENTS_MAX);
        let (writes, to_write) = sync_channel(TIER_DISK_WRITES_MAX);
        let (reads, to_read) = sync_channel(EVENTS_MAX);
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(work)
                .context("start a thread of the cache directory")
        };
        let (writer, reports) = (Arc::clone(&files), events.clone());
        let (ends, written) = sync_channel(0);
        let write = move || {
            writer.write_all(&to_write, &reports);
            drop(ends);
        };
        spawn("cache-write", Box::new(write))?;
        spawn("cache-read", Box::new(move || files.read_all(&to_read, &events)))?;
        Ok((Self { reads, writes: Some(writes), drops: None, written, events: of_loop }, found))
    }

    /// Hands work to the threads; a failure is the returned event.
    pub(crate) fn carry_out(&mut self, effect: DiskEffect) -> Option<DiskEvent> {
        match effect {
            DiskEffect::Read { read, hash } => {
                let refused = self.reads.try_send((read, hash)).is_err();
                refused.then_some(DiskEvent::Read { read, result: Err(DiskLoss::Failed) })
            }
            DiskEffect::Write { hash, kv } => {
                let refused = self.writes.as_ref().is_none_or(|of| of.try_send(Work::Write(hash, kv)).is_err());
                let result = Err(DiskLoss::Failed);
                refused.then_some(DiskEvent::Written { hash, result, evicted: Vec::new(), bytes: None })
            }
            DiskEffect::Drop { tenants } => {
                self.drops = Some(tenants);
                self.send_drop();
                None
            }
        }
    }

    /// Sends an order to remove blocks, if one waits. A full queue has a place after its next event.
    fn send_drop(&mut self) {
        let writes = self.writes.as_ref();
        let waits = |of: &Tenants| writes.is_some_and(|writes| writes.try_send(Work::Drop(*of)).is_err());
        self.drops = self.drops.filter(waits);
    }
}

impl Drop for CacheDir {
    /// Waits until all that was queued is written, for a bounded time: a restart finds it.
    fn drop(&mut self) {
        self.writes = None;
        self.events.close();
        if self.written.recv_timeout(LAST_WRITES) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the cache directory is too slow: the last KV is not written");
        }
    }
}

/// The next event of the disk tier; never without one.
pub(crate) async fn next(dir: Option<&mut CacheDir>) -> Option<DiskEvent> {
    let Some(dir) = dir else { return std::future::pending().await };
    dir.send_drop();
    dir.events.recv().await
}

impl Files {
    fn open(dir: &Path, limit_bytes: u64, shape: BlockShape) -> anyhow::Result<Self> {
        let shown = dir.display();
        let hint = "hint: --cache-dir names a directory on a local disk that this user may write to";
        make_dir(dir).with_context(|| format!("make the cache directory {shown}\n{hint}"))?;
        let lock = writable().truncate(false).open(dir.join("lock"));
        let lock = lock.with_context(|| format!("write to the cache directory {shown}\n{hint}"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => anyhow::bail!(
                "the cache directory {shown} is in use by another process\n\
                 hint: give each instance a directory of its own with --cache-dir"
            ),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("lock the cache directory {shown}\n{hint}"));
            }
        }
        let lock = DirLock(lock);
        let mut index = Tier::new(limit_bytes);
        let found = scan(dir).with_context(|| format!("read the cache directory {shown}"))?;
        let surplus = found.len().saturating_sub(TIER_DISK_BLOCKS_MAX);
        let (before, kept) = found.split_at(surplus);
        let mut evicted: Vec<BlockHash> = before.iter().map(|(_, hash, _)| *hash).collect();
        for (_, hash, bytes) in kept {
            evicted.extend(index.insert(*hash, *bytes, ()).into_iter().map(|(hash, ())| hash));
        }
        let files = Self { dir: dir.to_owned(), shape, index: Mutex::new(index), _lock: lock };
        evicted.iter().for_each(|hash| files.remove(hash));
        Ok(files)
    }

    fn index(&self) -> MutexGuard<'_, Tier<()>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, hash: &BlockHash) -> PathBuf {
        let name: String = hash.0.iter().map(|byte| format!("{byte:02x}")).collect();
        self.dir.join(&name[..2]).join(name)
    }

    fn remove(&self, hash: &BlockHash) {
        if let Err(error) = fs::remove_file(self.path(hash)) {
            tracing::debug!(%error, "an evicted file of the cache directory could not be removed");
        }
    }

    /// The writing thread, until the loop has ended and all is written.
    fn write_all(&self, works: &Receiver<Work>, events: &mpsc::Sender<DiskEvent>) {
        let mut warned: Option<Instant> = None;
        for work in works {
            let (hash, kv) = match work {
                Work::Write(hash, kv) => (hash, kv),
                Work::Drop(tenants) => {
                    let (left, bytes) = self.remove_of(&tenants);
                    drop(events.blocking_send(DiskEvent::Dropped { left, bytes }));
                    continue;
                }
            };
            let evicted = self.make_room(&hash);
            let written = self.write(&hash, &kv);
            if let Err(error) = &written {
                self.index().remove(&hash);
                // An earlier copy may be there, which the bound no longer counts.
                self.remove(&hash);
                if warned.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
                    warned = Some(Instant::now());
                    let dir = self.dir.display();
                    tracing::warn!(%dir, %error, "the cache directory takes no KV; the cache goes on without it");
                }
            }
            let (result, bytes) = (written.map_err(|_logged| DiskLoss::Failed), Some(self.index().bytes()));
            // The loop may have ended: what it had queued is written all the same.
            drop(events.blocking_send(DiskEvent::Written { hash, result, evicted, bytes }));
        }
    }

    /// Removes these tenants' blocks. Returns those that are left, and their bytes.
    fn remove_of(&self, tenants: &Tenants) -> (Vec<BlockHash>, u64) {
        let gone: Vec<BlockHash> = self.index().hashes().filter(|hash| tenants.have(hash)).copied().collect();
        for hash in gone {
            // A file leaves the index first: it counts as missing while it is removed.
            self.index().remove(&hash);
            self.remove(&hash);
        }
        let index = self.index();
        (index.hashes().copied().collect(), index.bytes())
    }

    /// Enters a block in the index, and removes the files of others for it. Returns those.
    fn make_room(&self, hash: &BlockHash) -> Vec<BlockHash> {
        let bytes = self.shape.file_bytes().next_multiple_of(PAGE_BYTES);
        let mut index = self.index();
        let surplus = (index.len() + 1).saturating_sub(TIER_DISK_BLOCKS_MAX);
        let mut evicted: Vec<BlockHash> = index.hashes().copied().take(surplus).collect();
        evicted.iter().for_each(|of| _ = index.remove(of));
        evicted.extend(index.insert(*hash, bytes, ()).into_iter().map(|(of, ())| of));
        drop(index);
        evicted.retain(|of| of != hash);
        evicted.iter().for_each(|of| self.remove(of));
        evicted
    }

    fn write(&self, hash: &BlockHash, kv: &BlockKv) -> io::Result<()> {
        if !self.index().contains(hash) {
            return Err(io::Error::other("the bound of the cache directory is less than one rBlock"));
        }
        let path = self.path(hash);
        if let Some(dir) = path.parent() {
            make_dir(dir)?;
        }
        let new = path.with_extension(NEW);
        let file = writable().truncate(true).open(&new)?;
        let written = cache_file::write(&file, self.shape, hash, kv).and_then(|()| fs::rename(&new, &path));
        if written.is_err() {
            let _gone_or_found_by_the_next_process = fs::remove_file(&new);
        }
        written
    }

    /// The reading thread, until the loop ends.
    fn read_all(&self, blocks: &Receiver<(u64, BlockHash)>, events: &mpsc::Sender<DiskEvent>) {
        for (read, hash) in blocks {
            if events.blocking_send(DiskEvent::Read { read, result: self.read(&hash) }).is_err() {
                return;
            }
        }
    }

    /// Reads a block, which is then the last to be evicted. One that is damaged is removed.
    fn read(&self, hash: &BlockHash) -> Result<BlockKv, DiskLoss> {
        let file = match File::open(self.path(hash)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.index().remove(hash);
                return Err(DiskLoss::Missing);
            }
            Err(error) => return Err(failed(&error)),
        };
        match cache_file::read(&file, self.shape, hash) {
            Ok(Some(kv)) => {
                self.index().touch(hash);
                // The next process evicts in this order. Without the time, an older file may go later.
                let _kept_without = file.set_modified(SystemTime::now());
                Ok(kv)
            }
            Ok(None) => {
                tracing::warn!(file = %self.path(hash).display(), "a file of the cache directory is damaged; it is removed");
                self.index().remove(hash);
                self.remove(hash);
                Err(DiskLoss::Damaged)
            }
            Err(error) => Err(failed(&error)),
        }
    }
}

fn failed(error: &io::Error) -> DiskLoss {
    tracing::warn!(%error, "a file of the cache directory could not be read");
    DiskLoss::Failed
}

/// Extension of a file that is not complete.
const NEW: &str = "new";

/// Files by age, the oldest first, with the bytes that they count for. Removes incomplete ones.
fn scan(dir: &Path) -> io::Result<Vec<(SystemTime, BlockHash, u64)>> {
    let mut found = Vec::new();
    for folder in fs::read_dir(dir)? {
        let folder = folder?;
        if !is_hex(&folder, 2) || !folder.file_type()?.is_dir() {
            continue;
        }
        for file in fs::read_dir(folder.path())? {
            let file = file?;
            let name = file.file_name();
            let name = name.to_string_lossy();
            if let Some(hash) = name.strip_suffix(NEW).and_then(|name| parse(name.strip_suffix('.')?)) {
                tracing::debug!(?hash, "an incomplete file of the cache directory is removed");
                fs::remove_file(file.path())?;
            } else if let Some(hash) = parse(&name) {
                let about = file.metadata()?;
                let bytes = about.len().next_multiple_of(PAGE_BYTES);
                found.push((about.modified().unwrap_or(SystemTime::UNIX_EPOCH), hash, bytes));
            }
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn is_hex(entry: &DirEntry, digits: usize) -> bool {
    let name = entry.file_name();
    let name = name.as_encoded_bytes();
    name.len() == digits && name.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

fn parse(name: &str) -> Option<BlockHash> {
    if name.len() != 64 || !name.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let byte = |at: usize| u8::from_str_radix(&name[2 * at..2 * at + 2], 16).ok();
    let bytes: Option<Vec<u8>> = (0..32).map(byte).collect();
    bytes?.try_into().ok().map(BlockHash)
}

/// Makes a directory that only this user may enter, with its parents.
fn make_dir(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}

/// Options of a file that only this user may read: KV tells prompts.
fn writable() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// A number of bytes, maybe with a unit: `500G` is 500 GiB.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].trim_end_matches("iB").trim_end_matches('B') {
        "" => 0,
        "K" | "k" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        unit => return Err(format!("{unit:?} is no unit: K, M, G or T (powers of 1024)")),
    };
    let number = digits.parse::<u64>().map_err(|error| format!("{text:?} is no number of bytes: {error}"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is too large"))
}

#[cfg(test)]
#[path = "cache_dir_tests.rs"]
mod tests;
