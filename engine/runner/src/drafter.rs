//! The draft model of speculative decoding: a second, smaller model with a KV store of its own, on the executor's thread.
//!
//! [`crate::Command::Draft`] brings the newest tokens of sequences; the drafter computes their KV, and proposes the tokens that the
//! draft model finds most likely to follow. It keeps the KV of what it proposed: tokens that turn out so are not computed again.
//!
//! Invariants: one request is in progress, at most one a micro-batch waits; the KV of a sequence used within the last
//! [`KEPT_REQUESTS`] requests is kept; a failed pass loses all KV, and nothing else.

use crate::executor::{Executor, Turn};
use crate::work::{
    Command, DraftId, DraftSeq, DraftWork, Drafted, PassError, RemoteWork, Report, SampleOut, SampleSpec, SeqRows,
    StepWork,
};
use lagoon_backend::Device;
use lagoon_types::{KvRun, MicroBatch, SamplingParams, SeqId, StepId};
use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::Arc;

/// Requests for which the KV of a sequence that they do not name is kept, whoever needs its memory.
const KEPT_REQUESTS: u64 = 64;

/// A draft model with its device and KV. Give it to [`crate::Models::new`].
#[derive(Debug)]
pub struct Drafter<D: Device> {
    executor: Executor<D>,
    /// Longest sequence of the draft model, and its vocabulary.
    max_positions: u32,
    vocab: u32,
    held: BTreeMap<SeqId, Held>,
    free: Vec<u32>,
    requests: VecDeque<DraftWork>,
    request: Option<Request>,
    /// Requests begun, and passes.
    begun: u64,
    passes: u64,
    greedy: Arc<SamplingParams>,
}

/// KV of one sequence.
#[derive(Debug, Default)]
struct Held {
    /// Tokens with KV, proposed ones at the end.
    tokens: Vec<u32>,
    /// Its blocks in the store, in the order of their tokens.
    blocks: Vec<u32>,
    /// The last request that named it.
    used: u64,
}

/// The request in progress.
#[derive(Debug)]
struct Request {
    draft: DraftId,
    /// Sequences of the pass in progress.
    passing: Vec<Proposal>,
    done: Vec<Drafted>,
}

/// A sequence of the request in progress.
#[derive(Debug)]
struct Proposal {
    seq: SeqId,
    /// Its tokens, known ones.
    known: u32,
    /// Tokens that the pass computes.
    rows: Vec<u32>,
    proposed: Vec<u32>,
    wanted: u32,
}

impl<D: Device> Drafter<D> {
    /// A drafter with the executor of the draft model, whose KV store has flat addresses.
    ///
    /// # Panics
    /// If the store has address rows.
    #[must_use]
    pub fn new(executor: Executor<D>, max_positions: u32, vocab: u32) -> Self {
        let space = executor.kv_space();
        assert!(space.rows == 0, "the draft model's KV store has flat addresses");
        let greedy = Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
        Self {
            max_positions,
            vocab,
            held: BTreeMap::new(),
            free: (0..space.blocks).rev().collect(),
            requests: VecDeque::new(),
            request: None,
            begun: 0,
            passes: 0,
            greedy,
            executor,
        }
    }

    /// Queues a request.
    pub(crate) fn push(&mut self, work: DraftWork) {
        self.requests.push_back(work);
    }

    /// Does one bounded piece of work: at most a layer of a pass.
    pub(crate) fn try_turn(&mut self, reports: &mut dyn FnMut(Report)) -> Turn {
        if self.request.is_none() {
            let Some(work) = self.requests.pop_front() else { return Turn::Idle };
            self.begin(work);
            self.start_pass(reports);
            return Turn::Worked;
        }
        let mut result = None;
        let turn = self.executor.try_turn(&mut |report| match report {
            Report::Done { samples, .. } => result = Some(Ok(samples)),
            Report::Failed { error, .. } => result = Some(Err(error)),
            _ => {}
        });
        match result {
            None => {}
            Some(Ok(samples)) => {
                self.end_pass(samples);
                self.start_pass(reports);
            }
            Some(Err(error)) => self.fail(&error, reports),
        }
        turn
    }

    fn begin(&mut self, work: DraftWork) {
        self.begun += 1;
        work.ended.into_iter().for_each(|seq| self.free_blocks(seq));
        let (mut passing, mut done) = (Vec::new(), Vec::new());
        let mut rows_left = self.executor.step_rows();
        for of in work.seqs {
            let seq = of.seq;
            match self.take_in(of, &mut rows_left) {
                Ok(proposal) => passing.push(proposal),
                Err(known) => done.push(Drafted { seq, known, tokens: Vec::new() }),
            }
        }
        self.request = Some(Request { draft: work.draft, passing, done });
    }

    /// Adds a sequence to the request that begins. Refused with the tokens that the drafter knows; `None` if it cannot draft for
    /// the sequence now.
    fn take_in(&mut self, of: DraftSeq, rows_left: &mut usize) -> Result<Proposal, Option<u32>> {
        let DraftSeq { seq, from, tokens, len, drafts } = of;
        let held = self.held.entry(seq).or_default();
        held.used = self.begun;
        if (from as usize) > held.tokens.len() {
            self.free_blocks(seq);
            return Err(Some(0));
        }
        let fits = len.saturating_add(drafts) <= self.max_positions && tokens.iter().all(|token| *token < self.vocab);
        let behind = &held.tokens[from as usize..];
        let mut same = behind.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        // What follows the last token takes a pass with it.
        same = same.min(tokens.len().saturating_sub(1));
        let known = from as usize + tokens.len();
        held.tokens.truncate(from as usize + same);
        let rows = tokens[same..].to_vec();
        if !fits || rows.is_empty() || rows.len() > *rows_left || !self.make_room(seq, known + drafts as usize) {
            self.free_blocks(seq);
            return Err(None);
        }
        *rows_left -= rows.len();
        let known = u32::try_from(known).unwrap_or(u32::MAX);
        Ok(Proposal { seq, known, rows, proposed: Vec::new(), wanted: drafts })
    }

    /// Gives a sequence blocks for `tokens` tokens, those of sequences that were not used lately if need be.
    fn make_room(&mut self, seq: SeqId, tokens: usize) -> bool {
        let wanted = tokens.div_ceil(self.executor.kv_space().block_tokens as usize);
        let old = self.begun.saturating_sub(KEPT_REQUESTS);
        let lacks = |this: &Self| wanted.saturating_sub(this.held[&seq].blocks.len()) > this.free.len();
        while lacks(self) {
            let Some((oldest, _)) = self.held.iter().filter(|(_, of)| of.used < old).min_by_key(|(_, of)| of.used)
            else {
                return false;
            };
            self.free_blocks(*oldest);
        }
        let Some(held) = self.held.get_mut(&seq) else { return false };
        let missing = wanted.saturating_sub(held.blocks.len());
        held.blocks.extend(self.free.drain(self.free.len() - missing..));
        true
    }

    fn free_blocks(&mut self, seq: SeqId) {
        self.free.extend(self.held.remove(&seq).into_iter().flat_map(|held| held.blocks));
    }

    /// Starts the next pass of the request in progress, or reports that it has ended.
    fn start_pass(&mut self, reports: &mut dyn FnMut(Report)) {
        let Some(request) = &mut self.request else { return };
        if request.passing.is_empty() {
            let Request { draft, done, .. } = self.request.take().expect("a request is in progress");
            return reports(Report::Drafted { draft, seqs: done, error: None });
        }
        let block_tokens = self.executor.kv_space().block_tokens;
        self.passes += 1;
        let mut work = StepWork {
            step: StepId(self.passes),
            micro_batch: MicroBatch::Local,
            tokens: Vec::new(),
            slots: Vec::new(),
            seqs: Vec::with_capacity(request.passing.len()),
            runs: Vec::new(),
            remote: RemoteWork::default(),
            next_row: None,
            watched: false,
            announced: false,
            scores: Vec::new(),
            hidden: Vec::new(),
        };
        for proposal in &request.passing {
            let held = self.held.get_mut(&proposal.seq).expect("it holds KV");
            let sample = proposal.wanted > 0;
            add_rows(&mut work, proposal, held, block_tokens, sample.then(|| SampleSpec::new(self.greedy.clone(), 0)));
        }
        self.executor.push(Command::Step(Box::new(work)));
    }

    /// Notes what a pass computed and sampled; sequences that need another pass stay in the request.
    fn end_pass(&mut self, samples: Vec<SampleOut>) {
        let Some(request) = &mut self.request else { return };
        let mut samples = samples.into_iter().peekable();
        for mut proposal in mem::take(&mut request.passing) {
            let sampled = samples.next_if(|sample| sample.seq == proposal.seq).and_then(|sample| sample.token);
            proposal.rows.clear();
            if let Some(token) = sampled {
                proposal.proposed.push(token);
                if proposal.proposed.len() < proposal.wanted as usize {
                    proposal.rows.push(token);
                    request.passing.push(proposal);
                    continue;
                }
            }
            let Proposal { seq, known, proposed, .. } = proposal;
            request.done.push(Drafted { seq, known: Some(known), tokens: proposed });
        }
    }

    /// Ends the request in progress: the KV of a failed pass is unknown.
    fn fail(&mut self, error: &PassError, reports: &mut dyn FnMut(Report)) {
        let Some(Request { draft, passing, done }) = self.request.take() else { return };
        let lost = |seq| Drafted { seq, known: None, tokens: Vec::new() };
        let seqs = passing.iter().map(|of| of.seq).chain(done.iter().map(|of| of.seq)).map(lost).collect();
        for seq in self.held.keys().copied().collect::<Vec<_>>() {
            self.free_blocks(seq);
        }
        reports(Report::Drafted { draft, seqs, error: Some(error.clone()) });
    }
}

/// Adds a proposal's rows to a pass; their tokens get KV.
fn add_rows(work: &mut StepWork, proposal: &Proposal, held: &mut Held, block_tokens: u32, sample: Option<SampleSpec>) {
    let as_u32 = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let (pos0, rows) = (as_u32(held.tokens.len()), as_u32(proposal.rows.len()));
    let slot = |pos: u32| held.blocks[(pos / block_tokens) as usize] * block_tokens + pos % block_tokens;
    let (row0, run0) = (as_u32(work.tokens.len()), as_u32(work.runs.len()));
    work.tokens.extend_from_slice(&proposal.rows);
    work.slots.extend((pos0..pos0 + rows).map(slot));
    for start in (0..pos0 + rows).step_by(block_tokens as usize) {
        let (base, len) = (slot(start), block_tokens.min(pos0 + rows - start));
        match work.runs[run0 as usize..].last_mut() {
            Some(last) if last.base + last.len == base => last.len += len,
            _ => work.runs.push(KvRun { base, len, first_pos: start }),
        }
    }
    let runs = as_u32(work.runs.len()) - run0;
    work.seqs.push(SeqRows {
        seq: proposal.seq,
        row0,
        rows,
        drafts: 0,
        pos0,
        run0,
        runs,
        ring: None,
        window: None,
        sample,
    });
    held.tokens.extend_from_slice(&proposal.rows);
}
