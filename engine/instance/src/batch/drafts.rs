//! Speculative decoding: tokens are proposed to follow a sequence's last one, by the draft model (`draft_model.rs`) or, without its
//! proposal, by n-gram lookup: what followed the last occurrence of the newest tokens. A step computes these drafts as rows behind
//! the last known token, and accepts those that are sampled.
//!
//! Sampling is a function of logits, seed and index ([`lagoon_runner`]), so the answer is that of one token a step, but for the
//! rounding of steps with more rows. A rejected draft leaves nothing: the next step writes its place again, and KV goes to a
//! creditor only when its rows are accepted. Source: <https://github.com/apoorvumang/prompt-lookup-decoding>.

use super::Batch;
use super::draft_model::ModelDrafts;
use super::growth::make_room_for_drafts;
use super::sequence::Sequence;
use crate::cx::Cx;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_runner::SampleOut;
use lagoon_types::limits::LOOKUP_TOKENS_MAX;
use lagoon_types::{Chunk, MicroBatch, StepPlan};

/// Sizes of the n-grams that are looked up, in this order.
const NGRAM_SIZES: [usize; 2] = [3, 2];
/// Drafts of a sequence's first step with drafts.
const FIRST_DRAFTS: u32 = 2;
/// Steps without drafts after drafts that were all rejected, at most.
pub(super) const PAUSE_MAX: u32 = 32;

/// The drafts of one sequence.
#[derive(Debug)]
pub(crate) struct Drafts {
    /// Of the step that the sequence is in.
    tokens: Vec<u32>,
    /// How many to propose: twice as many when all were accepted, one more than accepted otherwise.
    pub(super) wanted: u32,
    /// Steps until the next proposal, and the pause after the next rejection.
    pub(super) pause: u32,
    next_pause: u32,
    pub(super) model: ModelDrafts,
}

impl Default for Drafts {
    fn default() -> Self {
        Self { tokens: Vec::new(), wanted: FIRST_DRAFTS, pause: 0, next_pause: 1, model: ModelDrafts::default() }
    }
}

impl Drafts {
    /// Proposes up to `limit` tokens to follow `known`, none of them in `stop_ids`.
    fn propose(&mut self, known: &[u32], limit: u32, stop_ids: &[u32]) {
        self.tokens.clear();
        if self.pause > 0 {
            self.pause -= 1;
            return;
        }
        let limit = limit.min(self.wanted) as usize;
        let of_model = self.model.take(known.len());
        self.tokens.extend(of_model.into_iter().take(limit).take_while(|token| !stop_ids.contains(token)));
        if !self.tokens.is_empty() {
            return;
        }
        let Some(from) = (limit > 0).then(|| look_up(known)).flatten() else { return };
        for at in from..from + limit {
            // A copy may reach into itself: what repeats goes on.
            let token = known.get(at).or_else(|| self.tokens.get(at - known.len())).copied();
            let Some(token) = token.filter(|token| !stop_ids.contains(token)) else { return };
            self.tokens.push(token);
        }
    }

    /// Notes that `accepted` of `drafted` tokens were sampled.
    fn note_accepted(&mut self, drafted: u32, accepted: u32, drafts_max: u32) {
        self.tokens.clear();
        let wanted = if accepted == drafted { drafted.saturating_mul(2) } else { accepted + 1 };
        self.wanted = wanted.clamp(1, drafts_max.max(1));
        if accepted > 0 {
            self.next_pause = 1;
        } else {
            self.pause = self.next_pause;
            self.next_pause = (self.next_pause * 2).min(PAUSE_MAX);
        }
    }
}

/// Where the text goes on behind the last occurrence of its newest tokens.
fn look_up(known: &[u32]) -> Option<usize> {
    let from = known.len().saturating_sub(LOOKUP_TOKENS_MAX);
    NGRAM_SIZES.into_iter().filter(|n| known.len() > *n).find_map(|n| {
        let (before, newest) = (&known[from..known.len() - 1], &known[known.len() - n..]);
        let at = before.windows(n).rposition(|tokens| tokens == newest)?;
        Some(from + at + n)
    })
}

impl Sequence {
    /// The drafts of its planned chunk.
    pub(crate) fn drafted(&self, chunk: &Chunk) -> &[u32] {
        &self.drafts.tokens[..chunk.drafts as usize]
    }

    /// Whether drafts may be of use to the sequence, now or later.
    pub(super) fn may_draft(&self) -> bool {
        // What the next tokens may be, or weigh, depends on those before them.
        let depends = !self.sampling.bad_words.is_empty() || self.token_counts.is_some();
        let generates = self.for_others.is_none() && self.embedding.is_none() && !self.is_ending();
        generates && !depends && self.max_tokens > self.generated() + 1
    }

    /// Most drafts that a decoding sequence may have, whatever memory there is: none of them is the last token.
    pub(super) fn drafts_left(&self, max_positions: u32) -> u32 {
        if !self.may_draft() || self.generated() < self.min_tokens {
            return 0;
        }
        let left = (self.max_tokens - self.generated()).min(max_positions - self.len());
        left.saturating_sub(1)
    }
}

impl Batch {
    /// Adds drafts to the decoding chunks of a plan, in rows that no sequence needs. None where windowed KV is kept apart: a ring
    /// does not go back.
    pub(super) fn add_drafts(&mut self, cx: &mut Cx, plan: &mut StepPlan, micro_batch: MicroBatch) {
        let (drafts_max, reserve) = (cx.config.sched.drafts, self.growth_reserve(cx));
        let mut rows = if drafts_max > 0 { self.sched.draft_rows(micro_batch, plan) } else { 0 };
        for chunk in plan.chunks.iter_mut().filter(|chunk| chunk.decodes() && chunk.ring.is_none()) {
            let Some(seq) = self.seqs.get_mut(&chunk.seq).filter(|_| rows > 0) else { return };
            let limit = seq.drafts_left(cx.config.max_positions).min(drafts_max).min(rows);
            seq.drafts.propose(&seq.tokens, limit, &seq.stop_ids);
            let proposed = u32::try_from(seq.drafts.tokens.len()).unwrap_or(u32::MAX);
            chunk.drafts = make_room_for_drafts(cx, seq, reserve, proposed);
            seq.drafts.tokens.truncate(chunk.drafts as usize);
            chunk.len += chunk.drafts;
            rows -= chunk.drafts;
        }
    }

    /// How many drafts of a chunk were sampled, up to the first that was not. `samples`: the chunk's.
    pub(crate) fn accepted(&self, chunk: &Chunk, samples: &[SampleOut]) -> u32 {
        let Some(seq) = self.seqs.get(&chunk.seq).filter(|_| chunk.drafts > 0) else { return 0 };
        let pairs = seq.drafted(chunk).iter().zip(samples);
        let accepted = pairs.take_while(|(draft, sample)| sample.token == Some(**draft)).count();
        let unchecked = u32::from(mutants::is(Mutant::DraftUnchecked));
        u32::try_from(accepted).unwrap_or(u32::MAX).saturating_add(unchecked).min(chunk.drafts)
    }

    /// Makes the accepted drafts of a chunk tokens of its sequence. Returns the chunk without the rejected ones.
    pub(crate) fn accept_drafts(&mut self, chunk: &Chunk, samples: &[SampleOut], drafts_max: u32) -> Chunk {
        let accepted = self.accepted(chunk, samples);
        if chunk.drafts == 0 {
            return *chunk;
        }
        let Some(seq) = self.seqs.get_mut(&chunk.seq) else { return *chunk };
        let tokens = &seq.drafts.tokens[..accepted as usize];
        seq.tokens.extend_from_slice(tokens);
        seq.matcher.iter().for_each(|matcher| matcher.push(tokens));
        seq.drafts.note_accepted(chunk.drafts, accepted, drafts_max);
        self.counts.drafted_tokens += u64::from(chunk.drafts);
        self.counts.accepted_tokens += u64::from(accepted);
        Chunk { len: 1 + accepted, drafts: accepted, ..*chunk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [u32; 0] = [];

    fn drafted(known: &[u32], limit: u32, ends: &[u32]) -> Vec<u32> {
        let mut drafts = Drafts { wanted: 16, ..Drafts::default() };
        drafts.propose(known, limit, ends);
        drafts.tokens
    }

    #[test]
    fn what_followed_the_newest_tokens_is_proposed() {
        assert_eq!(drafted(&[1, 2, 3, 4, 5, 6, 1, 2, 3], 2, &[]), [4, 5]);
        assert_eq!(drafted(&[7, 2, 3, 4, 1, 2, 3, 9, 8, 2, 3], 2, &[]), [9, 8], "the last occurrence of two");
        assert_eq!(drafted(&[5, 6, 5, 6, 5, 6], 5, &[]), [5, 6, 5, 6, 5], "what repeats goes on");
        assert_eq!(drafted(&[1, 2, 3, 4, 5, 1, 2, 3], 4, &[5]), [4], "nothing that ends the answer");
        assert_eq!(drafted(&[1, 2, 3], 4, &[]), NONE);
        assert_eq!(drafted(&[1, 1], 4, &[]), NONE);
        assert_eq!(drafted(&[], 4, &[]), NONE);
        assert_eq!(drafted(&[1, 2, 3, 1, 2, 3], 0, &[]), NONE);
    }

    #[test]
    fn far_occurrences_are_not_looked_for() {
        let mut known: Vec<u32> = (0..).take(LOOKUP_TOKENS_MAX + 10).collect();
        known.extend([0, 1, 2]);
        assert_eq!(drafted(&known, 2, &[]), NONE);
        known.extend([50, 51, 52]);
        assert_eq!(drafted(&known, 2, &[]), [53, 54]);
    }

    #[test]
    fn drafts_grow_while_they_are_accepted_and_pause_after_rejections() {
        let mut drafts = Drafts::default();
        let known = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3];
        drafts.propose(&known, 16, &[]);
        assert_eq!(drafts.tokens, [4, 5]);
        drafts.note_accepted(2, 2, 16);
        drafts.propose(&known, 16, &[]);
        assert_eq!(drafts.tokens.len(), 4);
        drafts.note_accepted(4, 1, 16);
        assert_eq!((drafts.wanted, drafts.pause), (2, 0));
        for pause in [1, 2, 4, 8, 16, 32, 32] {
            drafts.propose(&known, 16, &[]);
            assert!(!drafts.tokens.is_empty());
            drafts.note_accepted(1, 0, 16);
            assert_eq!(drafts.pause, pause);
            (0..pause).for_each(|_| {
                drafts.propose(&known, 16, &[]);
                assert_eq!(drafts.tokens, NONE);
            });
        }
        drafts.note_accepted(1, 1, 1);
        assert_eq!((drafts.wanted, drafts.next_pause), (1, 1), "never more than the most");
    }
}
