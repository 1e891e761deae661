//! Prompts that are computed by one instance and decoded by another (KVDirect §4): a decode worker asks a prefill worker
//! (`ask.rs`), which computes the prompt like any other and hands the KV over as a lease (`serve.rs`); the decode worker
//! reads it, all or nothing, into blocks of its own and goes on (`pull.rs`, `landing.rs`). It reads what the worker exports
//! (`publish.rs`): all of it when it is computed (pull), or, into blocks that it has before it asks, parts of it while it is
//! being computed (push). Where the KV store is the device's alone, both pass through memory beside it (`staging.rs`). See
//! docs/adr/0012.
//!
//! Invariants:
//! * a sequence whose prompt is away is in no queue and no batch of the scheduler, and holds no own blocks but those that
//!   are being read into;
//! * the table of a sequence is switched to what was read only when all of it has arrived and is verified;
//! * blocks that are being read into are given back only when no read into them is in progress, whatever else happens;
//! * blocks that a worker handed over are free only when their lease has ended and nobody reads them.

mod affinity;
mod ask;
mod landing;
mod publish;
mod pull;
mod serve;
mod staging;
mod status;
#[cfg(test)]
mod tests;

pub use staging::StageUser;
pub use status::{LastTimes, PrefillStatus, PrefillTimes};

use crate::config::InstanceConfig;
use affinity::Affinity;
use ask::{Away, WorkerState};
use lagoon_transfer::{ConnId, Reader, ReaderConfig};
use lagoon_types::{InstanceId, SeqId};
use landing::Settling;
use publish::Publication;
use serve::Job;
use staging::Staging;
use std::collections::BTreeMap;

/// A prefill: who asked, and its number for it.
pub(crate) type Key = (InstanceId, u64);

/// State of disaggregated serving, both sides.
#[derive(Debug)]
pub(crate) struct Prefills {
    /// Name of the workers' list that is known; 0 before the first.
    version: u64,
    workers: BTreeMap<InstanceId, WorkerState>,
    /// Which of them computed what lately.
    affinity: Affinity,
    /// Own sequences whose prompts are computed elsewhere, the oldest first.
    away: BTreeMap<SeqId, Away>,
    /// Requests that workers may still work on, and until when they do without being told.
    dropped: Vec<(Key, u64)>,
    reader: Option<Reader>,
    conns: BTreeMap<InstanceId, ConnId>,
    /// Own blocks whose reads were given up and have not ended.
    settling: Vec<Settling>,
    renewals: u64,
    /// Prefills for others.
    jobs: BTreeMap<Key, Job>,
    by_seq: BTreeMap<SeqId, Key>,
    next_job: u64,
    /// What of prefills is or will be exported, and whose exports transports serve.
    published: BTreeMap<SeqId, Publication>,
    exports: BTreeMap<u64, SeqId>,
    staging: Staging,
    status: PrefillStatus,
}

/// Sequences that compute for others are numbered from here on: those of own requests are far below.
const JOB_SEQ_BASE: u64 = 1 << 62;

impl Prefills {
    pub(crate) fn new(config: &InstanceConfig) -> Self {
        // Whatever its role is now: that may change.
        let reader = config.transfer.as_ref().filter(|_| config.role.runs()).map(|transfer| {
            let (incarnation, host) = (config.incarnation, transfer.host.clone());
            let reader = ReaderConfig { incarnation, host, ..ReaderConfig::default() };
            Reader::new(transfer.layout.clone(), reader)
        });
        Self {
            version: 0,
            workers: BTreeMap::new(),
            affinity: Affinity::default(),
            away: BTreeMap::new(),
            dropped: Vec::new(),
            reader,
            conns: BTreeMap::new(),
            settling: Vec::new(),
            renewals: 0,
            jobs: BTreeMap::new(),
            by_seq: BTreeMap::new(),
            next_job: JOB_SEQ_BASE,
            published: BTreeMap::new(),
            exports: BTreeMap::new(),
            staging: Staging::new(config.transfer.as_ref().map_or(0, |transfer| transfer.stage_blocks)),
            status: PrefillStatus::default(),
        }
    }

    /// Name of the workers' list that is known; 0 before the first.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The next registration's list of workers may be another one of the same name.
    pub(crate) fn forget_list(&mut self) {
        self.version = 0;
    }

    /// Own sequences whose prompts are computed elsewhere.
    pub(crate) fn away(&self) -> usize {
        self.away.len()
    }

    /// Whether the prompt of a sequence is computed elsewhere.
    pub(crate) fn is_away(&self, seq: SeqId) -> bool {
        self.away.contains_key(&seq)
    }

    /// Whether nothing of workers is read or wanted of them, and they know that.
    pub(crate) fn reads_nothing(&self) -> bool {
        let completing = self.reader.as_ref().map_or(0, Reader::completing);
        self.away.is_empty() && self.settling() == 0 && completing == 0
    }

    /// Sets the time in which anything was read so far, in microseconds.
    pub(crate) fn set_reading_us(&mut self, reading_us: u64) {
        self.status.reading_us = reading_us;
    }

    /// Takes the times of requests since this was last called.
    pub(crate) fn take_times(&mut self) -> LastTimes {
        std::mem::take(&mut self.status.last)
    }

    /// Whether a sequence computes a prompt for another instance.
    pub(crate) fn is_job(&self, seq: SeqId) -> bool {
        self.by_seq.contains_key(&seq)
    }

    /// Whether that is read while it is computed, into memory that its asker has.
    pub(crate) fn is_pushed(&self, seq: SeqId) -> bool {
        self.published.get(&seq).is_some_and(Publication::is_pushed)
    }

    /// Own blocks that a sequence's prompt is being read into.
    pub(crate) fn landing(&self, seq: SeqId) -> usize {
        self.away.get(&seq).map_or(0, Away::landing)
    }

    /// Blocks beside the store that something uses.
    pub(crate) fn staged(&self) -> u32 {
        self.staging.used()
    }

    /// Own blocks of pulls that were given up and have not ended.
    pub(crate) fn settling(&self) -> usize {
        self.settling.iter().map(Settling::blocks).sum()
    }
}
