//! Builds the work of one step: from planned chunks to rows, attention over remote KV, tickets and writes.

use super::as_u32;
use super::mapped::MappedRuns;
use crate::batch::sequence::Sequence;
use lagoon_backend::AttnRows;
use lagoon_kv::Segment;
use lagoon_protocol::TicketSeq;
use lagoon_runner::{
    Fetch, HiddenRows, MapId, MappedKv, RemoteWork, SampleSpec, SavedWindow, ScoreRows, SeqRows, Ship, ShipSegment,
    StepWork, WriteSegment,
};
use lagoon_types::{Chunk, DType, InstanceId, LeaseRun, MicroBatch, SeqId, StepId, StepPlan};
use std::collections::BTreeMap;

/// Work for the runner, step tickets by creditor, and writes with their sequences.
pub(super) type Built = (StepWork, BTreeMap<InstanceId, Vec<TicketSeq>>, Vec<(SeqId, WriteSegment)>);

/// Collects the work of one step, chunk by chunk.
pub(super) struct Builder {
    pub(super) work: StepWork,
    tickets: BTreeMap<InstanceId, Vec<TicketSeq>>,
    ships: BTreeMap<InstanceId, Vec<ShipSegment>>,
    writes: Vec<(SeqId, WriteSegment)>,
    row0: u32,
}

impl Builder {
    /// For the chunks of `plan`.
    pub(super) fn new(step: StepId, micro_batch: MicroBatch, dtype: DType, plan: &StepPlan) -> Self {
        let (chunks, rows) = (plan.chunks.len(), plan.chunks.iter().map(|chunk| chunk.len as usize).sum());
        let remote = RemoteWork { dtype, ..RemoteWork::default() };
        let work = StepWork {
            step,
            micro_batch,
            tokens: Vec::with_capacity(rows),
            slots: Vec::with_capacity(rows),
            seqs: Vec::with_capacity(chunks),
            // Mostly a sequence's own rBlocks lie behind each other.
            runs: Vec::with_capacity(chunks),
            remote,
            next_row: None,
            watched: false,
            announced: false,
            scores: Vec::new(),
            hidden: Vec::new(),
        };
        Self { work, tickets: BTreeMap::new(), ships: BTreeMap::new(), writes: Vec::new(), row0: 0 }
    }

    /// Adds a chunk's rows, of known tokens and of drafts, and where their KV goes.
    pub(super) fn rows(&mut self, chunk: &Chunk, known: &[u32], drafts: &[u32], segments: &[Segment]) {
        self.row0 = as_u32(self.work.tokens.len());
        self.work.tokens.extend_from_slice(known);
        self.work.tokens.extend_from_slice(drafts);
        for segment in segments {
            match segment {
                Segment::Local(run) => self.work.slots.extend(run.base..run.base + run.len),
                Segment::Remote { creditor, run } => {
                    let row0 = as_u32(self.work.slots.len());
                    let &LeaseRun { lease, epoch, offset, len, .. } = run;
                    let write = WriteSegment { creditor: *creditor, lease, epoch, offset, row0, rows: len };
                    self.work.slots.extend((0..len).map(|_| u32::MAX));
                    self.writes.push((chunk.seq, write));
                }
            }
        }
        if chunk.warms_up() {
            self.work.slots.resize(self.work.tokens.len(), u32::MAX);
        }
        assert_eq!(self.work.slots.len(), self.work.tokens.len(), "a chunk's rows all have a place");
    }

    /// Adds the rows of the chunk just added whose logits give log-probabilities of the prompt.
    pub(super) fn score(&mut self, chunk: &Chunk, seq: &Sequence) {
        let Some(top) = seq.scores_prompt().filter(|_| !chunk.warms_up()) else { return };
        let rows = seq.scored_rows(chunk.start..chunk.start + chunk.len);
        if rows.is_empty() {
            return;
        }
        let (first, row0) = (rows.start + 1, self.row0 + rows.start - chunk.start);
        let targets = seq.tokens[first as usize..rows.end as usize + 1].to_vec();
        self.work.scores.push(ScoreRows { seq: chunk.seq, row0, first, targets, top });
    }

    /// Adds the rows of the chunk just added whose hidden states are part of an embedding.
    pub(super) fn embed(&mut self, chunk: &Chunk, seq: &Sequence) {
        let Some(embedding) = seq.embedding.as_ref().filter(|_| !chunk.warms_up()) else { return };
        let positions = embedding.rows(chunk.start..chunk.start + chunk.len);
        if !positions.is_empty() {
            let row0 = self.row0 + positions.start - chunk.start;
            self.work.hidden.push(HiddenRows { seq: chunk.seq, row0, positions });
        }
    }

    pub(super) fn seq(&mut self, chunk: &Chunk, run0: usize, window: Option<SavedWindow>, sample: Option<SampleSpec>) {
        self.work.seqs.push(SeqRows {
            seq: chunk.seq,
            row0: self.row0,
            rows: chunk.len,
            drafts: chunk.drafts,
            pos0: chunk.start,
            run0: as_u32(run0),
            runs: as_u32(self.work.runs.len() - run0),
            ring: chunk.ring,
            window,
            sample,
        });
    }

    /// Adds attention of the chunk's rows to mapped KV of `creditor`. Returns the runs that are not mapped.
    pub(super) fn attend_mapped(
        &mut self,
        creditor: InstanceId,
        map: MapId,
        chunk: &Chunk,
        found: MappedRuns,
    ) -> Vec<LeaseRun> {
        let peer_access = &mut self.work.remote.peer_access;
        let at = peer_access.iter().position(|mapped| mapped.creditor == creditor).unwrap_or_else(|| {
            let (seqs, runs, sealed) = (Vec::new(), Vec::new(), Vec::new());
            peer_access.push(MappedKv { creditor, map, seqs, runs, sealed });
            peer_access.len() - 1
        });
        let mapped = &mut peer_access[at];
        let (run0, runs) = (as_u32(mapped.runs.len()), as_u32(found.runs.len()));
        mapped.seqs.push(AttnRows { row0: self.row0, rows: chunk.len, pos0: chunk.start, run0, runs });
        mapped.runs.extend(found.runs);
        mapped.sealed.extend(found.sealed);
        found.rest
    }

    /// Ships the chunk's queries to `creditor`.
    pub(super) fn ship(&mut self, creditor: InstanceId, chunk: &Chunk, runs: Vec<LeaseRun>) {
        let end = runs.last().map_or(0, |run| run.first_pos + run.len);
        let segment = ShipSegment { row0: self.row0, rows: chunk.len, pos0: chunk.start, end };
        self.ships.entry(creditor).or_default().push(segment);
        let seq = TicketSeq { seq: chunk.seq, rows: chunk.len, pos0: chunk.start, runs };
        self.tickets.entry(creditor).or_default().push(seq);
    }

    /// Fetches the last chunk's remote KV, in pieces of at most `limit` tokens.
    pub(super) fn fetch(&mut self, creditor: InstanceId, runs: &[LeaseRun], limit: u32) {
        let seq_index = as_u32(self.work.seqs.len() - 1);
        for run in runs {
            let mut done = 0;
            while done < run.len {
                let len = limit.min(run.len - done);
                let piece = LeaseRun { offset: run.offset + done, first_pos: run.first_pos + done, len, ..*run };
                self.work.remote.fetches.push(Fetch { creditor, seq_index, run: piece });
                done += len;
            }
        }
    }

    pub(super) fn finish(mut self) -> Built {
        // Partials are merged in the order of creditors, not of sequences.
        self.work.remote.peer_access.sort_by_key(|mapped| mapped.creditor);
        self.work.remote.ships =
            self.ships.into_iter().map(|(creditor, segments)| Ship { creditor, segments }).collect();
        self.work.remote.writes = self.writes.iter().map(|(_, write)| *write).collect();
        (self.work, self.tickets, self.writes)
    }
}
