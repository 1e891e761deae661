//! Requests to the draft model. When a step of a micro-batch ends, the model gets its sequences' newest tokens; the next step starts
//! when its proposals have come, or without them after [`DRAFT_DEADLINE_MS`].
//!
//! The model has KV of its own and catches up with a prompt as the prompt is computed, and with other tokens (of the prefix cache, of
//! a prefill worker, after its memory was needed for others) in rows that those with proposals leave. Only a proposal for exactly the
//! sequence's present tokens is used. Sequences that the model refuses, or proposes for too late, pause; a model that fails pauses.

use super::Batch;
use super::drafts::PAUSE_MAX;
use super::sequence::Sequence;
use crate::cx::Cx;
use crate::event::Effect;
use lagoon_runner::{Command, DraftId, DraftSeq, DraftWork, Drafted};
use lagoon_types::limits::DRAFT_DEADLINE_MS;
use lagoon_types::{Chunk, MicroBatch, SeqId};

/// Rows of catching up in a request that a micro-batch waits for.
const CATCH_UP_ROWS: u32 = 128;
/// Ended sequences that the next request names, so that the model frees their KV; it frees others when it needs their memory.
const ENDED_MAX: usize = 256;
/// Pause of the model after an error; it doubles up to `FAILED_PAUSE_MAX_MS` while errors follow each other.
const FAILED_PAUSE_MS: u64 = 1000;
const FAILED_PAUSE_MAX_MS: u64 = 60_000;

/// What the draft model has of one sequence.
#[derive(Debug)]
pub(super) struct ModelDrafts {
    /// Tokens of which it has KV.
    known: u32,
    /// Proposed to follow them.
    proposed: Vec<u32>,
    /// Whether the model was asked for the sequence.
    asked: bool,
    /// Steps until the next request, and the pause after the next refusal.
    pause: u32,
    next_pause: u32,
}

impl Default for ModelDrafts {
    fn default() -> Self {
        Self { known: 0, proposed: Vec::new(), asked: false, pause: 0, next_pause: 1 }
    }
}

impl ModelDrafts {
    /// The proposal for a sequence of `len` tokens; empty if there is none for exactly these.
    pub(super) fn take(&mut self, len: usize) -> Vec<u32> {
        let proposed = std::mem::take(&mut self.proposed);
        if self.known as usize == len { proposed } else { Vec::new() }
    }

    /// Counts a step of the pause down. False if there was none.
    fn count_down(&mut self) -> bool {
        let paused = self.pause > 0;
        self.pause = self.pause.saturating_sub(1);
        paused
    }

    fn refused(&mut self) {
        self.pause = self.next_pause;
        self.next_pause = (self.next_pause * 2).min(PAUSE_MAX);
    }
}

/// Requests to the draft model: at most one a micro-batch.
#[derive(Debug, Default)]
pub(super) struct DraftRequests {
    last: u64,
    open: [Option<Open>; 2],
    ended: Vec<SeqId>,
    /// The model is not asked before; the pause after its next error.
    paused_until_ms: u64,
    next_pause_ms: u64,
}

/// A request without its answer.
#[derive(Clone, Copy, Debug)]
struct Open {
    draft: DraftId,
    /// Until when the micro-batch waits, if drafts are wanted.
    until_ms: Option<u64>,
}

impl Open {
    fn is_awaited(&self, now_ms: u64) -> bool {
        self.until_ms.is_some_and(|until_ms| now_ms < until_ms)
    }
}

/// The next tokens of a sequence for the model, at most `rows`, and the drafts that are wanted behind them.
fn request(seq: &mut Sequence, rows: u32, drafts: u32) -> DraftSeq {
    let from = seq.drafts.model.known;
    let to = seq.len().min(from + rows);
    seq.drafts.model.asked = true;
    DraftSeq { seq: seq.id, from, tokens: seq.tokens[from as usize..to as usize].to_vec(), len: seq.len(), drafts }
}

impl Batch {
    /// Asks the draft model for the sequences of a step that has ended.
    pub(crate) fn ask_draft_model(&mut self, cx: &mut Cx, micro_batch: MicroBatch, chunks: &[Chunk]) {
        let (sched, requests) = (&cx.config.sched, &self.draft_requests);
        let is_open = requests.open[micro_batch.index()].is_some();
        if !sched.draft_model || is_open || cx.now_ms < requests.paused_until_ms {
            return;
        }
        let (mut rows, mut seqs, mut behind) = (sched.step_rows, Vec::new(), Vec::new());
        // A ring does not go back: no drafts there.
        for chunk in chunks.iter().filter(|chunk| chunk.ring.is_none()) {
            let Some(seq) = self.seqs.get_mut(&chunk.seq).filter(|seq| seq.may_draft()) else { continue };
            if seq.drafts.pause > 0 || seq.drafts.model.count_down() {
                continue;
            }
            let missing = seq.len() - seq.drafts.model.known;
            if !chunk.last || missing > sched.drafts + 1 {
                behind.push(chunk.seq);
                continue;
            }
            let drafts = seq.drafts_left(cx.config.max_positions).min(sched.drafts).min(seq.drafts.wanted);
            if drafts > 0 && missing > 0 && missing <= rows {
                rows -= missing;
                seqs.push(request(seq, missing, drafts));
            }
        }
        let is_awaited = !seqs.is_empty();
        let mut rows = if is_awaited { rows.min(CATCH_UP_ROWS) } else { rows };
        for id in behind {
            let Some(seq) = self.seqs.get_mut(&id) else { continue };
            let missing = (seq.len() - seq.drafts.model.known).min(rows);
            if missing > 0 {
                rows -= missing;
                seqs.push(request(seq, missing, 0));
            }
        }
        if seqs.is_empty() {
            return;
        }
        let requests = &mut self.draft_requests;
        requests.last += 1;
        let draft = DraftId(requests.last);
        let until_ms = is_awaited.then_some(cx.now_ms + DRAFT_DEADLINE_MS);
        requests.open[micro_batch.index()] = Some(Open { draft, until_ms });
        let ended = std::mem::take(&mut requests.ended);
        cx.effects.push(Effect::Runner(Command::Draft(DraftWork { draft, seqs, ended })));
    }

    /// Whether a micro-batch waits for the draft model.
    pub(crate) fn awaits_drafts(&self, micro_batch: MicroBatch, now_ms: u64) -> bool {
        self.draft_requests.open[micro_batch.index()].is_some_and(|open| open.is_awaited(now_ms))
    }

    /// Makes the batch due when its waits for the draft model end.
    pub(super) fn wake_for_drafts(&mut self, now_ms: u64) {
        let open = self.draft_requests.open.iter().flatten().filter(|open| open.is_awaited(now_ms));
        open.filter_map(|open| open.until_ms).min().into_iter().for_each(|until_ms| self.due.wake_at(until_ms));
    }

    /// Notes that a sequence has ended: the draft model frees its KV.
    pub(super) fn end_drafts(&mut self, seq: &Sequence) {
        let ended = &mut self.draft_requests.ended;
        if seq.drafts.model.asked && ended.len() < ENDED_MAX {
            ended.push(seq.id);
        }
    }

    /// Notes the draft model's answer; of one that comes too late, what the model has. `failed`: it ends in an error.
    pub(crate) fn on_drafted(&mut self, cx: &Cx, draft: DraftId, drafted: Vec<Drafted>, failed: bool) {
        self.due.touch();
        let requests = &mut self.draft_requests;
        let open = requests.open.iter_mut().find(|open| open.is_some_and(|open| open.draft == draft));
        let until_ms = open.and_then(Option::take).and_then(|open| open.until_ms);
        let is_late = until_ms.is_some_and(|until_ms| cx.now_ms >= until_ms);
        let next_pause_ms = requests.next_pause_ms.max(FAILED_PAUSE_MS);
        requests.next_pause_ms = if failed { (next_pause_ms * 2).min(FAILED_PAUSE_MAX_MS) } else { 0 };
        if failed {
            requests.paused_until_ms = cx.now_ms + next_pause_ms;
        }
        for Drafted { seq, known, mut tokens } in drafted {
            let Some(seq) = self.seqs.get_mut(&seq) else { continue };
            let in_vocabulary = tokens.iter().take_while(|token| **token < cx.config.vocab).count();
            tokens.truncate(in_vocabulary);
            let model = &mut seq.drafts.model;
            if known.is_none() || is_late && !tokens.is_empty() {
                model.refused();
            } else if !tokens.is_empty() {
                model.next_pause = 1;
            }
            (model.known, model.proposed) = (known.unwrap_or(0), tokens);
        }
    }
}
