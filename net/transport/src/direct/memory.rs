//! The reader's side within one process, on one host and on one device: copies, by threads of the path's own.

use super::{Landing, LastBreath, Path, ReadJob, jobs::Jobs, memory_failure};
use crate::exports::ExportServer;
use lagoon_transfer::{Landed, ReadFailure};
use lagoon_types::InstanceId;
use std::{fmt, io, sync::Arc, thread};

/// Bytes of reads that a thread has copied before it reports them, while more wait: to wake the receiver takes some ten
/// microseconds, as copying 128 KiB does.
const REPORT_BYTES: u64 = 2 << 20;

/// Where the bytes are.
enum Source {
    Process {
        server: Arc<ExportServer>,
        reader: InstanceId,
        epoch: u64,
    },
    #[cfg(target_os = "linux")]
    Host(Vec<lagoon_backend::ArenaView>),
    #[cfg(target_os = "linux")]
    Device(lagoon_transfer::PeerRegions),
}

/// A path within this process, or over shared memory. Dropping it closes it.
pub struct MemoryPath {
    /// Bounded by the reader's credits.
    jobs: Arc<Jobs<ReadJob>>,
    name: &'static str,
}

impl fmt::Debug for MemoryPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryPath").field("name", &self.name).finish_non_exhaustive()
    }
}

impl MemoryPath {
    /// A path to a writer in this process: reads are admitted as over QUIC, and copied by `threads` threads.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn within(
        server: Arc<ExportServer>,
        (reader, epoch): (InstanceId, u64),
        threads: usize,
        landing: &Landing,
    ) -> io::Result<Self> {
        Self::start(Source::Process { server, reader, epoch }, "same process", threads, landing)
    }

    /// A path to a writer on this host, by its arenas in the order of its regions. Reads are one-sided: leases and
    /// checks protect them.
    ///
    /// # Errors
    /// When the system refuses a thread.
    #[cfg(target_os = "linux")]
    pub fn shared(arenas: Vec<lagoon_backend::ArenaView>, threads: usize, landing: &Landing) -> io::Result<Self> {
        Self::start(Source::Host(arenas), "same host", threads, landing)
    }

    /// A path to a writer whose regions lie in memory of a device that this process has mapped, into regions of its own device's:
    /// the same one, or a peer of it. Reads are one-sided, as over shared memory.
    ///
    /// # Errors
    /// When the system refuses a thread.
    #[cfg(target_os = "linux")]
    pub fn on_device(
        regions: lagoon_transfer::PeerRegions,
        is_peer: bool,
        threads: usize,
        landing: &Landing,
    ) -> io::Result<Self> {
        let name = if is_peer { "peer device" } else { "same device" };
        Self::start(Source::Device(regions), name, threads, landing)
    }

    fn start(source: Source, name: &'static str, threads: usize, landing: &Landing) -> io::Result<Self> {
        let jobs = Arc::new(Jobs::new(threads.max(1)));
        let path = Self { jobs: Arc::clone(&jobs), name };
        let (source, breath) = (Arc::new(source), LastBreath::new(landing));
        for number in 0..threads.max(1) {
            let worker = Worker {
                source: Arc::clone(&source),
                landing: landing.clone(),
                jobs: Arc::clone(&jobs),
                _breath: Arc::clone(&breath),
            };
            thread::Builder::new().name(format!("transfer-{number}")).spawn(move || worker.run())?;
        }
        Ok(path)
    }
}

impl Drop for MemoryPath {
    fn drop(&mut self) {
        self.jobs.close();
    }
}

impl Path for MemoryPath {
    fn name(&self) -> &'static str {
        self.name
    }

    fn read(&self, job: ReadJob) {
        // A path that was closed ends its reads by its `Down`.
        self.jobs.push(job);
    }

    fn close(&self) {
        self.jobs.close();
    }
}

struct Worker {
    source: Arc<Source>,
    landing: Landing,
    jobs: Arc<Jobs<ReadJob>>,
    /// Notified when the last worker has ended.
    _breath: Arc<LastBreath>,
}

impl Worker {
    /// Until the path is closed and its queue is empty.
    fn run(self) {
        let (mut done, mut bytes, mut worked) = (Vec::new(), 0u64, false);
        let deliver = |done: &mut Vec<_>| done.drain(..).for_each(|(job, result)| self.landing.deliver(&job, result));
        while let Some(job) = self.jobs.take(worked, || deliver(&mut done)) {
            let result = self.copy(&job);
            let before = if done.is_empty() { 0 } else { bytes };
            bytes = before.saturating_add(job.transaction.bytes);
            done.push((job, result));
            worked = true;
            if bytes >= REPORT_BYTES {
                deliver(&mut done);
            }
        }
    }

    fn copy(&self, job: &ReadJob) -> Result<Landed, ReadFailure> {
        let mut lander = self.landing.lander(job);
        let landed = match &*self.source {
            Source::Process { server, reader, epoch } => {
                let snapshots = server.read(*reader, *epoch, &job.transaction.segments);
                let snapshots = snapshots.map_err(ReadFailure::Refused)?;
                snapshots.iter().try_for_each(|snapshot| lander.push(snapshot))
            }
            #[cfg(target_os = "linux")]
            Source::Host(arenas) => job.transaction.segments.iter().try_for_each(|segment| {
                let region = usize::try_from(segment.remote.region).ok();
                let arena = region.and_then(|region| arenas.get(region));
                let outside = lagoon_transfer::RegionError::Failed("a region that is no arena".to_owned());
                let arena = arena.ok_or(outside)?;
                let mut at = segment.remote.offset;
                lander.push_with(segment.remote.bytes, &mut |target, hash| {
                    arena.copy(at, target, hash)?;
                    at = at.saturating_add(u64::try_from(target.len()).unwrap_or(u64::MAX));
                    Ok(())
                })
            }),
            #[cfg(target_os = "linux")]
            Source::Device(from) => {
                let Landing { regions, verify, .. } = &self.landing;
                let landed = lagoon_transfer::land_on_device(&job.transaction, &job.pulls, regions, *verify, from);
                return landed.map_err(|error| memory_failure(&error));
            }
        };
        landed.and_then(|()| lander.finish()).map_err(|error| memory_failure(&error))
    }
}
