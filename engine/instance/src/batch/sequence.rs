//! A sequence on its debtor: its tokens, its block table and leases, and its state in the batch.

use super::drafts::Drafts;
use super::embedding::Embedding;
use super::stripes::Stripes;
use crate::cx::tiers::LoadId;
use lagoon_cluster::BorrowId;
use lagoon_grammar::AnswerMatcher;
use lagoon_kv::hash::ContentHash;
use lagoon_kv::{BlockHash, LeaseHasher, RemoteEntries, SeqBlocks};
use lagoon_runner::{ShareId, TokenCounts};
use lagoon_transfer::Check;
use lagoon_types::limits::{
    ADMISSION_DEADLINE_MS, PRIORITY_MAX, PRIORITY_STEP_MS, RECOVERIES_MAX, RECOVERIES_WINDOW_MS,
};
use lagoon_types::{
    CachedTokens, FinishReason, GenerateRequest, InstanceId, LeaseId, PhysBlock, PromptLogprob, RequestOptions,
    SamplingParams, SeqId, TokenEvent,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// rBlocks borrowed for a sequence under one lease.
#[derive(Debug)]
pub(crate) struct HeldLease {
    /// Blocks of the table that lie under this lease.
    pub(crate) blocks: u32,
    /// Hash of the KV that steps write under the lease, for seals. `None` if a move wrote it.
    pub(crate) hasher: Option<LeaseHasher>,
    /// Content hashes of whole entries: KV that moves home is compared with them.
    pub(crate) hashes: BTreeMap<u32, ContentHash>,
    /// Checks of whole entries that the creditor computed and this instance did not: the creditor's report of their
    /// content, covering all layers.
    pub(crate) checks: BTreeMap<u32, LayerChecks>,
}

/// Checks of an entry's content, each over a range of layers.
pub(crate) type LayerChecks = Vec<(Range<u32>, Check)>;

impl HeldLease {
    /// A lease that steps will write.
    pub(crate) fn new(blocks: u32, hasher: LeaseHasher) -> Self {
        Self { blocks, hasher: Some(hasher), hashes: BTreeMap::new(), checks: BTreeMap::new() }
    }

    /// A lease of KV that its creditor computed.
    pub(crate) fn handed(blocks: u32, checks: BTreeMap<u32, LayerChecks>) -> Self {
        Self { blocks, checks, ..Self::for_move() }
    }

    /// Whether an entry is whole: its content hash or checks are recorded.
    pub(crate) fn is_whole(&self, entry: u32) -> bool {
        self.hashes.contains_key(&entry) || self.checks.contains_key(&entry)
    }

    /// A lease that a move wrote; no block of the table is switched to it yet.
    pub(crate) fn for_move() -> Self {
        Self { blocks: 0, hasher: None, hashes: BTreeMap::new(), checks: BTreeMap::new() }
    }
}

/// A sequence's last window in rBlocks beside its table (ADR 24).
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub(crate) positions: Range<u32>,
    pub(crate) blocks: Vec<PhysBlock>,
}

/// The search of a waiting sequence's cached blocks on other instances. Every other attempt to be admitted searches: memory
/// that the search takes could be what an admission without it needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PoolSearch {
    /// The next attempt searches.
    #[default]
    Due,
    /// This attempt has searched; blocks that the sequence holds were found.
    Done,
    /// The next attempt does not search.
    Skipped,
}

/// Memory that a sequence lacks to be admitted or to grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// It has all the blocks that it needs, or has not tried to get them.
    Met,
    /// It negotiates with creditors for blocks.
    Borrowing(BorrowId),
    /// It waits for instances that compute its prompt together with this one.
    Joining,
    /// There was no memory; try again at this time, in milliseconds.
    RetryAt(u64),
}

/// The state of a sequence. Only the batch changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// A prefill worker computes its prompt: it is in no queue and no batch. If it returns before it has memory,
    /// allocation is tried at `retry_at_ms`.
    Away { retry_at_ms: Option<u64> },
    /// In the queue.
    Waiting(Need),
    /// In the batch.
    Running(Need),
    /// In the batch, but in no further step: its blocks move to host memory.
    SwappingOut,
    /// In the batch, but in no step: its KV is in host memory until there is room.
    SwappedOut,
    /// In the batch, in its last step: the client has disconnected.
    Leaving,
    /// Ended, and in no batch: DGFM's freeze keeps its memory until the thaw.
    Frozen,
}

/// What a sequence's prompt gives beside its KV.
#[derive(Debug, Default)]
pub(crate) struct PromptReport {
    /// Tokens whose KV other sequences had computed.
    pub(crate) cached: CachedTokens,
    /// Log-probabilities of its second token and those behind, as far as computed.
    pub(crate) logprobs: Vec<PromptLogprob>,
}

impl PromptReport {
    /// Position of the first token whose logits are missing.
    pub(crate) fn next_row(&self) -> u32 {
        u32::try_from(self.logprobs.len()).unwrap_or(u32::MAX)
    }
}

/// A sequence of this instance, from its acceptance to its end.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SeqId,
    /// When it arrived, in milliseconds.
    pub(crate) since_ms: u64,
    /// Prompt, then generated tokens.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: u32,
    pub(crate) max_tokens: u32,
    /// Whether the pool's KV capacity, not the request, sets `max_tokens`.
    pub(crate) fills_pool: bool,
    pub(crate) sampling: Arc<SamplingParams>,
    /// Its tokens for penalties, if it has any.
    pub(crate) token_counts: Option<Arc<TokenCounts>>,
    /// Tells which tokens its grammar allows, if it has one.
    pub(crate) matcher: Option<Arc<AnswerMatcher>>,
    pub(crate) options: RequestOptions,
    /// Until it is reported.
    pub(crate) prompt: Option<PromptReport>,
    /// Its embedding, if that is wanted and no answer.
    pub(crate) embedding: Option<Embedding>,
    /// Tokens before which none of `stop_ids` is generated.
    pub(crate) min_tokens: u32,
    pub(crate) stop_ids: Arc<[u32]>,
    pub(crate) return_logits: bool,
    /// Set if it computes a prompt for another instance: the number of tokens generated there before.
    pub(crate) for_others: Option<u64>,
    /// With `for_others`: whether the decode worker takes the last window, too.
    pub(crate) saves_window: bool,
    pub(crate) drafts: Drafts,
    /// Its part in a joint prefill.
    pub(crate) joint: Option<Box<Stripes>>,
    /// Members for a joint prefill were asked for once.
    pub(crate) asked_members: bool,
    /// Positions that a joint prefill left: they are computed for the first time.
    pub(crate) first_due: Vec<Range<u32>>,
    pub(crate) blocks: SeqBlocks,
    pub(crate) leases: BTreeMap<(InstanceId, LeaseId), HeldLease>,
    /// The mapping of shared blocks at its addresses that is in progress; until it ends the sequence joins no step.
    pub(crate) sharing: Option<ShareId>,
    /// The copy of its prefix from a tier of the prefix cache that is in progress; until it ends the sequence joins no step.
    pub(crate) loading: Option<LoadId>,
    /// A mapping failed: it maps no shared blocks any more.
    pub(crate) maps_nothing: bool,
    /// Block hashes of its first blocks, as far as computed.
    pub(crate) block_hashes: Vec<BlockHash>,
    /// Blocks of the table whose hashes were registered with the pool, from the first on.
    pub(crate) hashed: u32,
    pub(crate) search: PoolSearch,
    /// Own blocks for the newest tokens (or lost blocks), until the older ones are borrowed and the table can be built
    /// in order; the first [`Sequence::aside_first`] of them come before the borrowed ones.
    pub(crate) aside: Vec<PhysBlock>,
    pub(crate) aside_first: usize,
    /// Its last window in rBlocks: saved for the decode worker of a prompt computed here, or read from a prefill worker and not yet
    /// copied into the ring.
    pub(crate) window: Option<Window>,
    pub(super) life: Life,
    /// Failed attempts to get memory since the last success.
    pub(crate) misses: u32,
    /// Growth failed: ask for the shortfall and no more.
    pub(crate) frugal: bool,
    /// Times of its KV losses within [`RECOVERIES_WINDOW_MS`], ascending.
    pub(crate) recoveries: Vec<u64>,
    /// Deadline for memory for its lost blocks; then it preempts.
    pub(crate) restore_by_ms: Option<u64>,
    /// It is not swapped out before this time.
    pub(crate) swap_after_ms: u64,
    /// Admission deadline.
    pub(crate) admit_by_ms: u64,
    /// When all KV of its prompt had been read from the prefill worker.
    pub(crate) pulled_ms: Option<u64>,
    /// It was preempted: what it finds cached may be its own blocks.
    pub(crate) preempted: bool,
    /// When it first had its memory and joined the batch.
    pub(crate) began_ms: Option<u64>,
}

impl Sequence {
    pub(crate) fn new(id: SeqId, request: GenerateRequest, block_tokens: u32, since_ms: u64) -> Self {
        let prompt_len = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX).saturating_sub(request.answered);
        let mut seq = Self {
            id,
            since_ms,
            prompt_len,
            tokens: request.prompt,
            max_tokens: request.max_tokens,
            fills_pool: false,
            sampling: Arc::new(request.sampling),
            token_counts: None,
            embedding: request.options.embedding.map(|pooling| Embedding::new(pooling, prompt_len)),
            matcher: None,
            options: request.options,
            prompt: Some(PromptReport::default()),
            min_tokens: request.min_tokens,
            stop_ids: request.stop_ids.into(),
            return_logits: request.return_logits,
            for_others: None,
            saves_window: false,
            drafts: Drafts::default(),
            joint: None,
            asked_members: false,
            first_due: Vec::new(),
            blocks: SeqBlocks::new(block_tokens),
            leases: BTreeMap::new(),
            sharing: None,
            loading: None,
            maps_nothing: false,
            block_hashes: Vec::new(),
            hashed: 0,
            search: PoolSearch::Due,
            aside: Vec::new(),
            aside_first: 0,
            window: None,
            life: Life::Waiting(Need::Met),
            misses: 0,
            frugal: false,
            recoveries: Vec::new(),
            restore_by_ms: None,
            swap_after_ms: 0,
            admit_by_ms: since_ms + ADMISSION_DEADLINE_MS,
            pulled_ms: None,
            preempted: false,
            began_ms: None,
        };
        seq.count_tokens(request.answered);
        seq
    }

    /// Counts its tokens for penalties, if it has any, and gives its grammar's matcher the answer: the last `generated` of them.
    pub(crate) fn count_tokens(&mut self, generated: u32) {
        let prompt = self.tokens.len().saturating_sub(generated as usize);
        let (prompt, generated) = self.tokens.split_at(prompt);
        self.token_counts = self.sampling.has_penalties().then(|| Arc::new(TokenCounts::new(prompt, generated)));
        let matcher = |constraint| Arc::new(AnswerMatcher::new(Arc::clone(constraint), generated));
        self.matcher = self.sampling.constraint.as_ref().map(matcher);
    }

    /// Its place in the queue, by its arrival and priority: the lower, the earlier.
    pub(crate) fn turn_ms(&self) -> i64 {
        let priority = i64::from(self.options.priority.clamp(-PRIORITY_MAX, PRIORITY_MAX));
        self.since_ms.cast_signed() + priority * PRIORITY_STEP_MS.cast_signed()
    }

    /// Tokens that this instance has to compute before the sequence decodes: its prompt, or what a preemption or a loss left of it.
    pub(crate) fn prefill_left(&self) -> u64 {
        let left = self.len().saturating_sub(self.blocks.written()) + self.blocks.lost_tokens();
        match self.life {
            Life::Waiting(_) => u64::from(left),
            // The next token's row is decoding.
            Life::Running(_) if left > 1 => u64::from(left),
            _ => 0,
        }
    }

    /// Tokens that it may still generate; none if it computes a prompt for another instance or has ended.
    pub(crate) fn answer_left(&self) -> u64 {
        let is_over = self.for_others.is_some() || matches!(self.life, Life::Leaving | Life::Frozen);
        if is_over { 0 } else { u64::from(self.max_tokens.saturating_sub(self.generated())) }
    }

    /// Alternatives to report per token of its prompt, while log-probabilities of some are missing.
    pub(crate) fn scores_prompt(&self) -> Option<u32> {
        let is_missing = |prompt: &PromptReport| prompt.next_row() + 1 < self.prompt_len;
        self.options.prompt_logprobs.filter(|_| self.prompt.as_ref().is_some_and(is_missing))
    }

    /// Positions of a chunk whose logits give log-probabilities of the prompt that are missing: those of the tokens behind.
    pub(crate) fn scored_rows(&self, chunk: Range<u32>) -> Range<u32> {
        let end = chunk.end.min(self.prompt_len.saturating_sub(1));
        let next = self.prompt.as_ref().map_or(end, PromptReport::next_row);
        chunk.start.max(next).min(end)..end
    }

    /// The event about its prompt, once; `None` without cached tokens, waiting time and log-probabilities.
    pub(crate) fn report_prompt(&mut self) -> Option<TokenEvent> {
        let PromptReport { cached, logprobs } = self.prompt.take()?;
        let cached = cached.at_most(self.prompt_len.into());
        let queue_ms = self.began_ms.map_or(0, |began_ms| began_ms.saturating_sub(self.since_ms));
        let is_news = cached != CachedTokens::default() || queue_ms > 0 || !logprobs.is_empty();
        is_news.then_some(TokenEvent::Prompt { cached, queue_ms, logprobs })
    }

    /// Own blocks beside its table.
    pub(crate) fn beside(&self) -> usize {
        self.aside.len() + self.window.as_ref().map_or(0, |window| window.blocks.len())
    }

    /// Tokens known so far.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn generated(&self) -> u32 {
        self.len() - self.prompt_len
    }

    /// Whether it is in the batch, in a step or not.
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.life, Life::Running(_) | Life::SwappingOut | Life::SwappedOut | Life::Leaving)
    }

    /// Whether it is removed when its step or the freeze of its memory ends.
    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.life, Life::Leaving | Life::Frozen)
    }

    /// Whether its KV is in host memory.
    pub(crate) fn is_swapped_out(&self) -> bool {
        self.life == Life::SwappedOut
    }

    /// Its need, if it is in the queue or the batch and not swapping or leaving.
    pub(super) fn need(&self) -> Option<Need> {
        match self.life {
            Life::Waiting(need) | Life::Running(need) => Some(need),
            Life::Away { .. } | Life::SwappingOut | Life::SwappedOut | Life::Leaving | Life::Frozen => None,
        }
    }

    /// Sets its need if it waits or runs; a swapped-out or swapping sequence runs again.
    pub(super) fn set_need(&mut self, need: Need) {
        self.life = match self.life {
            Life::Waiting(_) => Life::Waiting(need),
            Life::Running(_) | Life::SwappingOut | Life::SwappedOut => Life::Running(need),
            Life::Away { .. } => {
                Life::Away { retry_at_ms: if let Need::RetryAt(at_ms) = need { Some(at_ms) } else { None } }
            }
            life @ (Life::Leaving | Life::Frozen) => life,
        };
    }

    /// A prefill worker computes its prompt from now on.
    pub(super) fn go_away(&mut self) {
        let retry_at_ms = if let Some(Need::RetryAt(at_ms)) = self.need() { Some(at_ms) } else { None };
        self.life = Life::Away { retry_at_ms };
    }

    /// Whether a prefill worker computes its prompt.
    pub(super) fn is_away(&self) -> bool {
        matches!(self.life, Life::Away { .. })
    }

    /// Returns it to the queue: no prefill worker computes its prompt.
    pub(super) fn come_back(&mut self) {
        let retry_at_ms = if let Life::Away { retry_at_ms } = self.life { retry_at_ms } else { None };
        self.life = Life::Waiting(retry_at_ms.map_or(Need::Met, Need::RetryAt));
    }

    /// Whether it neither borrows nor swaps.
    pub(super) fn may_change_memory(&self) -> bool {
        matches!(self.need(), Some(Need::Met | Need::RetryAt(_)))
    }

    /// Whether it may join a step.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_placed() && self.may_start() && self.sharing.is_none() && self.loading.is_none()
    }

    /// Whether steps of a joint prefill before its next one have started, if it is in one.
    fn may_start(&self) -> bool {
        let block = self.blocks.next_position() / self.blocks.block_tokens();
        self.joint.as_ref().is_none_or(|joint| joint.may_start(block))
    }

    /// Whether it has places for every known token and no borrow in progress.
    pub(crate) fn is_placed(&self) -> bool {
        self.need() == Some(Need::Met) && self.blocks.lost_blocks() == 0 && self.blocks.capacity_tokens() >= self.len()
    }

    /// Records a loss of KV; losses at the same moment count once. True if there were too many.
    pub(crate) fn note_recovery(&mut self, now_ms: u64) -> bool {
        if self.recoveries.last() != Some(&now_ms) {
            self.recoveries.retain(|at| at + RECOVERIES_WINDOW_MS > now_ms);
            self.recoveries.push(now_ms);
        }
        self.recoveries.len() > RECOVERIES_MAX
    }

    /// Notes that entries left the table.
    pub(crate) fn forget_entries(&mut self, entries: &RemoteEntries) {
        let key = (entries.creditor, entries.lease);
        let Some(held) = self.leases.get_mut(&key) else { return };
        held.blocks -= entries.entries - entries.first;
        let range = entries.first..entries.entries;
        held.hashes.retain(|entry, _| !range.contains(entry));
        held.checks.retain(|entry, _| !range.contains(entry));
        if held.blocks == 0 {
            self.leases.remove(&key);
        }
    }

    /// Positions are computed; returns how many of them a joint prefill had left.
    pub(crate) fn note_first(&mut self, computed: Range<u32>) -> u32 {
        let tokens = |ranges: &[Range<u32>]| -> u32 { ranges.iter().map(|range| range.end - range.start).sum() };
        let before = tokens(&self.first_due);
        let without = |due: &Range<u32>| [due.start..due.end.min(computed.start), due.start.max(computed.end)..due.end];
        let left = self.first_due.iter().flat_map(without).filter(|range| range.start < range.end).collect();
        self.first_due = left;
        before - tokens(&self.first_due)
    }

    /// Tokens that must not be generated next.
    pub(crate) fn banned(&self) -> Arc<[u32]> {
        let early = self.generated() < self.min_tokens;
        if !self.sampling.bad_words.is_empty() {
            let stops = if early { &self.stop_ids[..] } else { &[] };
            return stops.iter().copied().chain(self.ends_of_bad_words()).collect();
        }
        if early { Arc::clone(&self.stop_ids) } else { Arc::default() }
    }

    /// Last tokens of bad words whose other tokens end the answer, as in vLLM.
    fn ends_of_bad_words(&self) -> impl Iterator<Item = u32> {
        let answer = &self.tokens[self.prompt_len as usize..];
        let words = self.sampling.bad_words.iter().filter_map(|word| word.split_last());
        words.filter(|(_, before)| answer.ends_with(before)).map(|(last, _)| *last)
    }

    /// Appends a generated token. Returns why the sequence ends, if that token is the last.
    pub(crate) fn push(&mut self, token: u32, max_positions: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        self.token_counts.iter_mut().for_each(|counts| Arc::make_mut(counts).push(token));
        self.matcher.iter().for_each(|matcher| matcher.push(&[token]));
        if self.stop_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else if self.len() >= max_positions {
            Some(FinishReason::Length)
        } else if self.generated() >= self.max_tokens {
            Some(if self.fills_pool { FinishReason::KvCapacity } else { FinishReason::Length })
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence() -> Sequence {
        let request = GenerateRequest {
            prompt: vec![1, 2, 3],
            answered: 0,
            max_tokens: 4,
            sampling: SamplingParams::default(),
            min_tokens: 0,
            stop_ids: Vec::new(),
            return_logits: false,
            options: RequestOptions::default(),
        };
        Sequence::new(SeqId(1), request, 4, 0)
    }

    #[test]
    fn bad_words_ban_their_last_token_behind_the_others() {
        let mut seq = sequence();
        let words = [Box::from([7]), Box::from([8, 9]), Box::from([3, 5])];
        seq.sampling = Arc::new(SamplingParams { bad_words: words.into(), ..SamplingParams::default() });
        // The prompt ends with 3: only the answer counts.
        assert_eq!(seq.banned()[..], [7]);
        seq.push(8, 100);
        assert_eq!(seq.banned()[..], [7, 9]);
        (seq.min_tokens, seq.stop_ids) = (4, [2].into());
        seq.push(3, 100);
        assert_eq!(seq.banned()[..], [2, 7, 5]);
    }

    #[test]
    fn tokens_for_penalties_are_counted_from_the_answer_on() {
        let sampling = SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() };
        let request = |prompt, answered| GenerateRequest {
            prompt,
            answered,
            max_tokens: 9,
            sampling: sampling.clone(),
            min_tokens: 0,
            stop_ids: Vec::new(),
            return_logits: false,
            options: RequestOptions::default(),
        };
        let mut whole = Sequence::new(SeqId(1), request(vec![1, 2, 3], 0), 4, 0);
        [8, 9, 8].iter().for_each(|token| _ = whole.push(*token, 100));
        // As a gateway replays it, and as a decode worker sends it to a prefill worker.
        let replayed = Sequence::new(SeqId(1), request(vec![1, 2, 3, 8, 9, 8], 3), 4, 0);
        let mut elsewhere = Sequence::new(SeqId(1), request(vec![1, 2, 3, 8, 9, 8], 0), 4, 0);
        elsewhere.count_tokens(3);
        assert_eq!((&whole.token_counts, &whole.token_counts), (&replayed.token_counts, &elsewhere.token_counts));
        assert_eq!(whole.token_counts, Some(Arc::new(TokenCounts::new(&[1, 2, 3], &[8, 9, 8]))));
    }

    #[test]
    fn losses_are_bounded_per_time_and_not_in_a_life() {
        let mut seq = sequence();
        let hour_ms = 3_600_000;
        assert!((1..100).all(|hour| !seq.note_recovery(hour * hour_ms)), "one in an hour, for ever");
        assert_eq!(seq.recoveries.len(), 1);
        // Leases of one creditor that are lost at the same moment are one loss.
        let now = 100 * hour_ms;
        assert!((0..50).all(|_| !seq.note_recovery(now)));
        let times: Vec<bool> = (1..=RECOVERIES_MAX as u64).map(|i| seq.note_recovery(now + i * 100)).collect();
        assert_eq!(times.iter().position(|over| *over), Some(RECOVERIES_MAX - 1));
        assert!(!seq.note_recovery(now + RECOVERIES_WINDOW_MS + 60 * 1000));
    }

    #[test]
    fn one_that_comes_back_from_a_worker_looks_for_memory_when_it_was_to() {
        let mut seq = sequence();
        seq.life = Life::Away { retry_at_ms: None };
        seq.set_need(Need::RetryAt(70));
        assert_eq!(seq.need(), None, "it waits for no memory here");
        seq.come_back();
        assert_eq!(seq.need(), Some(Need::RetryAt(70)));
        seq.life = Life::Away { retry_at_ms: Some(70) };
        seq.set_need(Need::Met);
        seq.come_back();
        assert_eq!(seq.need(), Some(Need::Met));
    }

    #[test]
    fn an_answer_that_was_begun_elsewhere_goes_on_at_its_place() {
        let request = GenerateRequest {
            prompt: vec![1, 2, 3, 8, 9],
            answered: 2,
            max_tokens: 4,
            sampling: SamplingParams::default(),
            min_tokens: 0,
            stop_ids: Vec::new(),
            return_logits: false,
            options: RequestOptions::default(),
        };
        let mut seq = Sequence::new(SeqId(1), request, 4, 0);
        assert_eq!((seq.prompt_len, seq.generated(), seq.len()), (3, 2, 5));
        assert_eq!(seq.push(7, 100), None);
        assert_eq!((seq.push(7, 100), seq.generated()), (Some(FinishReason::Length), 4));
        seq.fills_pool = true;
        assert_eq!([seq.push(7, 100), seq.push(7, 8)], [Some(FinishReason::KvCapacity), Some(FinishReason::Length)]);
    }
}
