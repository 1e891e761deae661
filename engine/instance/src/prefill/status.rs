//! Counters of prefill elsewhere, both sides, for metrics and operators.

use super::Prefills;
use crate::batch::Batch;
use crate::cx::Cx;
use lagoon_protocol::PrefillCounts;
use serde::Serialize;

/// Times of one request until it decodes (KVDirect Fig. 14), in milliseconds. The decode time is known later and
/// counted apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefillTimes {
    /// Until the request to a worker, and in its queue; push: in its queue only.
    pub queue_ms: u64,
    pub prefill_ms: u64,
    /// Until memory and a place in the batch here, from the first token; push: until the request to a worker.
    pub decode_queue_ms: u64,
    /// Read time; push: the part not hidden behind the prefill.
    pub transfer_ms: u64,
}

/// Counters since the start, and current numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefillStatus {
    /// Workers that are connected and whose KV is readable.
    pub workers: usize,
    /// Own requests whose prompts prefill workers compute, or whose KV waits to be read.
    pub away: usize,
    /// Requests whose KV is being read.
    pub pulling: usize,
    /// Requests whose prompts no worker computes (any more), and that wait for memory or a place in the batch here.
    pub waiting_here: usize,
    /// Own blocks of dropped landings whose reads have not ended.
    pub blocks_settling: usize,
    /// Blocks computed for other instances that count as lent.
    pub blocks_handed_over: u32,
    /// Blocks freed by their owners and still read by transports.
    pub blocks_held_back: u32,
    /// Staging blocks in use, and times that a prefill for another instance waited for some.
    pub stage_blocks_used: u32,
    pub stage_waits: u64,
    /// Prompts that workers computed and whose KV was read.
    pub pulled: u64,
    /// Blocks of them that stayed with the worker.
    pub blocks_left: u64,
    /// Tokens of them that were cached here and not read, and their bytes of KV.
    pub found_tokens: u64,
    pub found_bytes: u64,
    /// Prompts sent to another worker, because one refused, died or was not readable.
    pub retried: u64,
    /// Prompts computed here, because no worker did.
    pub own: u64,
    /// Prompts sent to a worker that had computed their prefix, and the tokens of these prefixes.
    pub affine: u64,
    pub affine_tokens: u64,
    /// Prefills for other instances: in flight, handed over, refused, and dropped by their decode worker.
    pub jobs: usize,
    pub jobs_done: u64,
    pub jobs_refused: u64,
    pub jobs_dropped: u64,
    /// Tokens of prompts for other instances that are not computed yet.
    pub queued_tokens: u64,
    /// The reader's counters: reads before merging, transactions after, bytes, damaged blocks.
    pub reads: u64,
    pub transactions: u64,
    pub bytes: u64,
    pub damaged_blocks: u64,
    pub pulls_failed: u64,
    /// Total time with reads in progress, in microseconds, as the shell measures it.
    pub reading_us: u64,
    /// Sums over requests whose KV was read.
    pub times: PrefillTimes,
    /// Requests of these that ended well, and the sum of their decode times, from their KV here, in milliseconds.
    pub decoded: u64,
    pub decode_ms: u64,
    /// Times of the latest requests, until taken.
    #[serde(skip)]
    pub last: LastTimes,
}

/// Times of single requests, for histograms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LastTimes {
    pub prefills: Vec<PrefillTimes>,
    pub decodes_ms: Vec<u64>,
}

/// Maximum of times that wait to be taken; later ones are dropped.
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

    /// Counts a request whose KV was read and that ended well.
    pub(super) fn note_decoded(&mut self, decode_ms: u64) {
        self.decoded += 1;
        self.decode_ms += decode_ms;
        if self.last.decodes_ms.len() < LAST_MAX {
            self.last.decodes_ms.push(decode_ms);
        }
    }

    /// The counters as heartbeats carry them.
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
    /// See [`PrefillStatus`].
    pub(crate) fn look(&self, cx: &Cx, batch: &Batch) -> PrefillStatus {
        let stats = self.reader.as_ref().map(lagoon_transfer::Reader::stats).unwrap_or_default();
        PrefillStatus {
            workers: self.readable_workers(),
            waiting_here: self.waiting_here(cx, batch),
            blocks_handed_over: cx.memory.rm.creditor.handed_over(),
            blocks_held_back: cx.memory.rm.creditor.held_back(),
            jobs: self.unfinished_jobs(),
            queued_tokens: self.queued_tokens(batch),
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
