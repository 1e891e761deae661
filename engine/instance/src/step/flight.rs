//! [`InFlight`]: a step on the runner.

use super::relays::Group;
use crate::batch::Batch;
use bytes::Bytes;
use lagoon_runner::{Fetch, SampleOut, WriteSegment};
use lagoon_types::{Chunk, InstanceId, SeqId, StepId};
use std::collections::BTreeSet;

/// A step on the runner.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) step: StepId,
    pub(super) chunks: Vec<Chunk>,
    /// Samples of each chunk.
    pub(super) samples: Vec<usize>,
    /// Creditors with a ticket.
    pub(super) creditors: Vec<InstanceId>,
    /// Those of them that have no queries of the last layer, with which a ticket ends.
    pub(super) open: BTreeSet<InstanceId>,
    /// Those of them that are asked through a relay.
    pub(super) groups: Vec<Group>,
    pub(super) fetches: Vec<Fetch>,
    /// Creditors with a layer's queries that have not answered yet.
    pub(crate) unanswered: BTreeSet<InstanceId>,
    /// The layer of those queries.
    pub(super) asked_layer: u32,
    /// Writes, each with its sequence.
    pub(super) writes: Vec<(SeqId, WriteSegment)>,
    /// Layers' KV of writes with drafts, by index of the write: it is sent when the drafts are accepted.
    pub(super) held: Vec<(u32, usize, Bytes)>,
    /// The step fails at this time without progress. Only steps with creditors have a deadline.
    pub(super) deadline_ms: Option<u64>,
    /// When the last queries left, and the sum of earlier answers' times, in milliseconds.
    pub(super) asked_ms: u64,
    pub(super) remote_ms: u64,
    pub(super) started_ms: u64,
    /// Estimated time of remote requests before the step, in microseconds.
    pub(super) remote_requests_us: f64,
}

impl InFlight {
    /// Whether a creditor computes or sends something for this step.
    pub(super) fn asks(&self, creditor: InstanceId) -> bool {
        self.creditors.contains(&creditor) || self.fetches.iter().any(|fetch| fetch.creditor == creditor)
    }

    /// A creditor gets the last layer's queries, and with it those behind it if it is a relay: their tickets end.
    pub(super) fn close(&mut self, creditor: InstanceId) {
        self.open.remove(&creditor);
        let members = self.groups.iter().filter(|group| group.relay == creditor).flat_map(|group| &group.members);
        members.for_each(|member| _ = self.open.remove(member));
    }

    /// Drafts of the step that were sampled.
    pub(super) fn accepted(&self, batch: &Batch, mut samples: &[SampleOut]) -> u32 {
        let mut accepted = 0;
        for (chunk, n) in self.chunks.iter().zip(&self.samples) {
            let (own, others) = samples.split_at(*n);
            accepted += batch.accepted(chunk, own);
            samples = others;
        }
        accepted
    }

    /// Whether a sequence has drafts in the step.
    pub(super) fn has_drafts(&self, seq: SeqId) -> bool {
        self.chunks.iter().any(|chunk| chunk.seq == seq && chunk.drafts > 0)
    }

    /// Whether every sequence of the step generates a token.
    pub(crate) fn decodes(&self) -> bool {
        self.chunks.iter().all(Chunk::decodes)
    }

    /// Since when creditors have a layer's queries and have not all answered.
    pub(crate) fn waits_since(&self) -> Option<u64> {
        (!self.unanswered.is_empty()).then_some(self.asked_ms)
    }
}
