//! Requests to the draft model. When a step of a micro-batch ends, the model gets its sequences' newest tokens; the next step starts
//! when its proposals have come, or without them after [`DRAFT_DEADLINE_MS`].
//!
//! The model has KV of its own and catches up with a prompt as the prompt is computed, and with other tokens (of the prefix cache, of
//! a prefill worker, after its memory was needed for others) within the rows of a step a request. Only a proposal for exactly the
//! sequence's present tokens is used.

use super::Batch;
use super::drafts::PAUSE_MAX;
use crate::cx::Cx;
use crate::event::Effect;
use lagoon_runner::{Command, DraftId, DraftSeq, DraftWork, Drafted};
use lagoon_types::limits::DRAFT_DEADLINE_MS;
use lagoon_types::{Chunk, MicroBatch};

/// What the draft model has of one sequence.
#[derive(Debug, Default)]
pub(super) struct ModelDrafts {
    /// Tokens of which it has KV.
    known: u32,
    /// Proposed to follow them.
    proposed: Vec<u32>,
}

impl ModelDrafts {
    /// The proposal for a sequence of `len` tokens; empty if there is none for exactly these.
    pub(super) fn take(&mut self, len: usize) -> Vec<u32> {
        let proposed = std::mem::take(&mut self.proposed);
        if self.known as usize == len { proposed } else { Vec::new() }
    }
}

/// Requests to the draft model: at most one a micro-batch.
#[derive(Debug, Default)]
pub(super) struct DraftRequests {
    last: u64,
    open: [Option<Open>; 2],
}

/// A request without its answer.
#[derive(Clone, Copy, Debug)]
struct Open {
    draft: DraftId,
    /// The micro-batch waits until then.
    until_ms: u64,
}

impl Batch {
    /// Asks the draft model for the sequences of a step that has ended.
    pub(crate) fn ask_draft_model(&mut self, cx: &mut Cx, micro_batch: MicroBatch, chunks: &[Chunk]) {
        let sched = &cx.config.sched;
        if !sched.draft_model || self.draft_requests.open[micro_batch.index()].is_some() {
            return;
        }
        let mut rows = sched.step_rows;
        let of = |chunk: &Chunk| {
            let seq = self.seqs.get(&chunk.seq).filter(|seq| !seq.is_ending() && seq.for_others.is_none())?;
            let from = seq.drafts.model.known;
            let to = seq.len().min(from + rows);
            if seq.drafts.pause > 0 || from >= to {
                return None;
            }
            rows -= to - from;
            let decodes = chunk.last && to == seq.len();
            let drafts = seq.drafts_left(cx.config.max_positions).min(sched.drafts).min(seq.drafts.wanted);
            let tokens = seq.tokens[from as usize..to as usize].to_vec();
            (drafts > 0 || !decodes).then_some(DraftSeq {
                seq: chunk.seq,
                from,
                tokens,
                len: seq.len(),
                drafts: if decodes { drafts } else { 0 },
            })
        };
        // A ring does not go back: no drafts there.
        let seqs: Vec<DraftSeq> = chunks.iter().filter(|chunk| chunk.ring.is_none()).filter_map(of).collect();
        if seqs.is_empty() {
            return;
        }
        self.draft_requests.last += 1;
        let draft = DraftId(self.draft_requests.last);
        let waits_ms = if seqs.iter().any(|of| of.drafts > 0) { DRAFT_DEADLINE_MS } else { 0 };
        let until_ms = cx.now_ms + waits_ms;
        self.draft_requests.open[micro_batch.index()] = Some(Open { draft, until_ms });
        cx.effects.push(Effect::Runner(Command::Draft(DraftWork { draft, seqs })));
    }

    /// Whether a micro-batch waits for the draft model.
    pub(crate) fn awaits_drafts(&self, micro_batch: MicroBatch, now_ms: u64) -> bool {
        self.draft_requests.open[micro_batch.index()].is_some_and(|open| now_ms < open.until_ms)
    }

    /// The batch is due when its waits for the draft model end.
    pub(super) fn wake_for_drafts(&mut self, now_ms: u64) {
        let ends = self.draft_requests.open.iter().flatten().map(|open| open.until_ms).filter(|until| now_ms < *until);
        ends.min().into_iter().for_each(|until_ms| self.due.wake_at(until_ms));
    }

    /// Notes the draft model's answer; of a request that is not awaited any more, what it has.
    pub(crate) fn on_drafted(&mut self, cx: &Cx, draft: DraftId, drafted: Vec<Drafted>) {
        self.due.touch();
        let open = self.draft_requests.open.iter_mut().find(|open| open.is_some_and(|open| open.draft == draft));
        open.into_iter().for_each(|open| *open = None);
        for Drafted { seq, known, mut tokens } in drafted {
            let Some(seq) = self.seqs.get_mut(&seq) else { continue };
            let in_vocabulary = tokens.iter().take_while(|token| **token < cx.config.vocab).count();
            tokens.truncate(in_vocabulary);
            seq.drafts.model = ModelDrafts { known: known.unwrap_or(0), proposed: tokens };
            if known.is_none() {
                seq.drafts.pause = PAUSE_MAX;
            }
        }
    }
}
