//! What came of prefills elsewhere and for others, for metrics and operators.

use super::Prefills;
use lagoon_protocol::PrefillCounts;
use serde::Serialize;

/// Where the time of one request went until it decoded (KVDirect Fig. 14), in milliseconds; the time that it decoded for is
/// known later, and counted apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefillTimes {
    /// Until a worker was asked, and its queue there; pushed, its queue only.
    pub queue_ms: u64,
    pub prefill_ms: u64,
    /// Until there was memory and a place in the batch here: from the first token; pushed, until a worker was asked.
    pub decode_queue_ms: u64,
    /// Pushed, what of it was not hidden behind the prefill.
    pub transfer_ms: u64,
}

/// Counts since the start, and what is in progress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefillStatus {
    /// Workers that compute prompts for this instance, connected and readable.
    pub workers: usize,
    /// Requests whose prompts are computed elsewhere or wait to be read.
    pub away: usize,
    /// Requests whose KV is being read.
    pub pulling: usize,
    /// Requests whose prompts nobody computes (any more), and that wait for memory or a place in the batch here.
    pub waiting_here: usize,
    /// Own blocks of reads that were given up and have not ended.
    pub blocks_settling: usize,
    /// Blocks that this instance computed for others and that count as lent.
    pub blocks_handed_over: u32,
    /// Blocks that were given back and are still read.
    pub blocks_held_back: u32,
    /// Blocks of host memory beside the device's store through which others' KV and KV for others passes, in use, and times
    /// that a prompt computed for others waited for some.
    pub stage_blocks_used: u32,
    pub stage_waits: u64,
    /// Prompts that workers computed and that were read.
    pub pulled: u64,
    /// Blocks of them that stayed where they were computed.
    pub blocks_left: u64,
    /// Tokens of them whose KV was here already and was not read, and its bytes.
    pub found_tokens: u64,
    pub found_bytes: u64,
    /// Prompts that were given to another worker, because one refused, died or was not readable.
    pub retried: u64,
    /// Prompts that this instance computed, because no worker did.
    pub own: u64,
    /// Prompts that were given to a worker which had computed their beginning, and the tokens of these beginnings.
    pub affine: u64,
    pub affine_tokens: u64,
    /// Prompts for others: in flight, handed over, refused, and given up by whoever asked.
    pub jobs: usize,
    pub jobs_done: u64,
    pub jobs_refused: u64,
    pub jobs_dropped: u64,
    /// Tokens of prompts for others that are not computed yet.
    pub queued_tokens: u64,
    /// Reads before merging, transactions after, bytes, damaged blocks: of the reader.
    pub reads: u64,
    pub transactions: u64,
    pub bytes: u64,
    pub damaged_blocks: u64,
    pub pulls_failed: u64,
    /// Time in which anything was read, in microseconds, as the shell measures it.
    pub reading_us: u64,
    /// Sums over the requests that were pulled.
    pub times: PrefillTimes,
    /// Requests of these that ended well, and the time from when they had their KV here until then, in milliseconds.
    pub decoded: u64,
    pub decode_ms: u64,
    /// Those of the last ones, until they are taken.
    #[serde(skip)]
    pub last: LastTimes,
}

/// Times of single requests, for histograms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LastTimes {
    pub prefills: Vec<PrefillTimes>,
    pub decodes_ms: Vec<u64>,
}

/// Times that wait to be taken; those that come when so many wait are dropped.
const LAST_MAX: usize = 256;

impl PrefillStatus {
    pub(super) fn note(&mut self, times: PrefillTimes) {
        let sum = &mut self.times;
        sum.queue_ms += times.queue_ms;
        sum.prefill_ms += times.prefill_ms;
        sum.decode_queue_ms += times.decode_queue_ms;
        sum.transfer_ms += times.transfer_ms;
        if self.last.prefills.len() < LAST_MAX {
            self.last.prefills.push(times);
        }
    }

    /// A request that was pulled ended well.
    pub(super) fn note_decoded(&mut self, decode_ms: u64) {
        self.decoded += 1;
        self.decode_ms += decode_ms;
        if self.last.decodes_ms.len() < LAST_MAX {
            self.last.decodes_ms.push(decode_ms);
        }
    }

    /// For heartbeats.
    pub(crate) fn counts(&self) -> PrefillCounts {
        let as_u32 = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        PrefillCounts {
            workers: as_u32(self.workers),
            away: as_u32(self.away),
            jobs: as_u32(self.jobs),
            queued_tokens: self.queued_tokens,
            jobs_done: self.jobs_done,
            pulled: self.pulled,
            own: self.own,
            bytes: self.bytes,
            reading_us: self.reading_us,
            reads: self.reads,
            transactions: self.transactions,
            queue_ms: self.times.queue_ms,
            prefill_ms: self.times.prefill_ms,
            decode_queue_ms: self.times.decode_queue_ms,
            transfer_ms: self.times.transfer_ms,
            decode_ms: self.decode_ms,
            decoded: self.decoded,
            waiting: as_u32(self.waiting_here),
        }
    }
}

impl Prefills {
    /// What the machine itself knows of [`PrefillStatus`].
    pub(crate) fn look(&self) -> PrefillStatus {
        let stats = self.reader.as_ref().map(lagoon_transfer::Reader::stats).unwrap_or_default();
        PrefillStatus {
            away: self.away.len(),
            pulling: self.reader.as_ref().map_or(0, lagoon_transfer::Reader::pulling),
            blocks_settling: self.settling(),
            stage_blocks_used: self.staged(),
            reads: stats.reads,
            transactions: stats.transactions,
            bytes: stats.bytes,
            damaged_blocks: stats.damaged_blocks,
            pulls_failed: stats.pulls_failed,
            last: LastTimes::default(),
            ..self.status.clone()
        }
    }
}
