//! Reads of registered memory over four kinds of paths, behind one trait: the same process, the same host (shared
//! memory), the same device or a peer device (shared device regions), QUIC. lagoon-transfer decides which ranges are read; this
//! module moves their bytes.
//!
//! The writer's side is an [`ExportServer`]: transport tasks admit reads against the writer's exports and send snapshots
//! of its regions without a copy; the owner's loop takes no part and may block. The reader's side is a [`Path`]:
//! it takes reads, copies their bytes to their destinations, verifies their hashes, and reports. Invariants:
//!
//! * a snapshot lives until its bytes are acknowledged in QUIC, and the export is freed only then;
//! * every read that a path took ends in one [`PathEvent::Read`], or in the path's [`PathEvent::Down`];
//! * after `Down` the path writes no destination any more;
//! * a server reads the next request of a connection only when its last answer was sent.

#[cfg(target_os = "linux")]
mod host;
mod jobs;
mod memory;
mod probe;
mod serve;
mod streams;

pub use crate::exports::ExportServer;
#[cfg(target_os = "linux")]
pub use host::{ArenaServer, HostError, boot_id, fetch_arena, fetch_memory, fetch_region, host_identity};
pub use memory::MemoryPath;
pub use probe::Probe;
pub use streams::{QuicPath, StreamsConfig};

use lagoon_transfer::{Landed, Lander, Pulls, ReadFailure, Region, RegionError, Transaction};
use std::{fmt, sync::Arc};

/// How folders are named in which sockets of [`TransferArena`](lagoon_protocol::TransferArena)s are: those of another name are
/// not connected to.
pub const PRIVATE_FOLDER_PREFIX: &str = "lagoon-";

/// A read for a path.
#[derive(Clone, Debug)]
pub struct ReadJob {
    /// The reader's number for it.
    pub read: u64,
    pub transaction: Arc<Transaction>,
    /// The pulls that the transaction's parts belong to.
    pub pulls: Pulls,
}

/// Reports of a path to its reader.
#[derive(Clone, Debug, PartialEq)]
pub enum PathEvent {
    Read {
        read: u64,
        result: Result<Landed, ReadFailure>,
    },
    /// The last event of a path.
    Down {
        reason: String,
    },
}

/// Takes the events of a path, on the path's own threads or tasks. It must not block.
pub type OnEvent = Arc<dyn Fn(PathEvent) + Send + Sync>;

/// Where a reader's bytes land.
#[derive(Clone)]
pub struct Landing {
    /// By the number of the region in the reader's layout.
    pub regions: Arc<[Arc<dyn Region>]>,
    /// Compute checks on the way.
    pub verify: bool,
    pub on_event: OnEvent,
}

impl fmt::Debug for Landing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Landing").field("verify", &self.verify).finish_non_exhaustive()
    }
}

impl Landing {
    fn lander<'a>(&'a self, job: &'a ReadJob) -> Lander<'a> {
        Lander::new(&job.transaction, &job.pulls, &self.regions, self.verify)
    }

    fn deliver(&self, job: &ReadJob, result: Result<Landed, ReadFailure>) {
        (self.on_event)(PathEvent::Read { read: job.read, result });
    }
}

fn memory_failure(error: &RegionError) -> ReadFailure {
    ReadFailure::Memory(error.to_string())
}

/// A way to a writer's memory.
pub trait Path: Send + Sync + fmt::Debug {
    /// For people: `same process`, `same device`, `peer device`, `same host`, `quic`.
    fn name(&self) -> &'static str;

    /// Takes a read. On a path that is down it ends with the path.
    fn read(&self, job: ReadJob);

    /// Gives the path up; `Down` follows.
    fn close(&self);
}

/// Tells the end of a path when the last task that may write goes.
struct LastBreath {
    on_event: OnEvent,
    reason: std::sync::Mutex<Option<String>>,
}

impl LastBreath {
    fn new(landing: &Landing) -> Arc<Self> {
        Arc::new(Self { on_event: Arc::clone(&landing.on_event), reason: std::sync::Mutex::default() })
    }

    /// Why the path ends; the first reason counts.
    fn because(&self, reason: String) {
        self.reason.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(reason);
    }
}

impl Drop for LastBreath {
    fn drop(&mut self) {
        let reason = self.reason.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let reason = reason.unwrap_or_else(|| "closed".to_owned());
        (self.on_event)(PathEvent::Down { reason });
    }
}
