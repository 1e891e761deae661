//! Speculative decoding by prompt lookup: what followed the last occurrence of a sequence's newest tokens is expected to follow
//! again. A step computes these drafts behind the last known token; those that are sampled count, the others are forgotten.
//!
//! Sampling is a function of logits, seed and index ([`lagoon_runner`]), so the answer is that of one token a step, but for the
//! rounding of steps with more rows. A forgotten draft leaves nothing: its place is written again by the next step, and KV goes to
//! a creditor when its rows count. Prompt lookup: <https://github.com/apoorvumang/prompt-lookup-decoding>.

use super::Batch;
use super::sequence::Sequence;
use lagoon_runner::SampleOut;
use lagoon_types::limits::LOOKUP_TOKENS_MAX;
use lagoon_types::{Chunk, MicroBatch};

/// Newest tokens that are looked up: so many, else fewer.
const LOOKUP: [usize; 2] = [3, 2];
/// Drafts of a sequence's first step with drafts.
const FIRST: u32 = 2;
/// Steps without drafts after drafts that were all refused, at most.
const PAUSE_MAX: u32 = 32;

/// The drafts of one sequence.
#[derive(Debug)]
pub(crate) struct Drafts {
    /// Of the next step, or the step that the sequence is in.
    tokens: Vec<u32>,
    /// How many to draft: twice as many when all counted, one more than counted otherwise.
    wanted: u32,
    /// Steps until the next drafts, and the pause after the next refusal.
    pause: u32,
    next_pause: u32,
}

impl Default for Drafts {
    fn default() -> Self {
        Self { tokens: Vec::new(), wanted: FIRST, pause: 0, next_pause: 1 }
    }
}

impl Drafts {
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Drafts up to `limit` tokens behind `known`, none of them in `ends`.
    fn draft(&mut self, known: &[u32], limit: u32, ends: &[u32]) {
        self.tokens.clear();
        if self.pause > 0 {
            self.pause -= 1;
            return;
        }
        let limit = limit.min(self.wanted) as usize;
        let Some(from) = (limit > 0).then(|| look_up(known)).flatten() else { return };
        for at in from..from + limit {
            // A copy may reach into itself: what repeats goes on.
            let token = known.get(at).or_else(|| self.tokens.get(at - known.len())).copied();
            let Some(token) = token.filter(|token| !ends.contains(token)) else { return };
            self.tokens.push(token);
        }
    }

    /// Notes that `counted` of `drafted` tokens counted.
    fn learn(&mut self, drafted: u32, counted: u32, most: u32) {
        self.tokens.clear();
        self.wanted = if counted == drafted { drafted.saturating_mul(2) } else { counted + 1 }.clamp(1, most.max(1));
        if counted > 0 {
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
    LOOKUP.into_iter().filter(|n| known.len() > *n).find_map(|n| {
        let (before, newest) = (&known[from..known.len() - 1], &known[known.len() - n..]);
        let at = before.windows(n).rposition(|tokens| tokens == newest)?;
        Some(from + at + n)
    })
}

impl Sequence {
    /// The drafts of a planned chunk.
    pub(crate) fn drafted(&self, chunk: &Chunk) -> &[u32] {
        &self.drafts.tokens()[..chunk.drafts as usize]
    }

    /// Tokens that may be drafted: there is memory for them, and none of them is the last.
    fn draft_limit(&self, drafts: u32, max_positions: u32) -> u32 {
        let decodes = self.for_others.is_none() && self.blocks.written() + 1 == self.len();
        // What the next tokens may be, or weigh, depends on those before them.
        let depends = self.generated() < self.min_tokens || !self.sampling.bad_words.is_empty() || self.seen.is_some();
        if drafts == 0 || !decodes || !self.is_ready() || depends {
            return 0;
        }
        let room = self.blocks.capacity_tokens() - self.len();
        let left = (self.max_tokens - self.generated()).min(max_positions - self.len());
        drafts.min(room).min(left.saturating_sub(1))
    }
}

impl Batch {
    /// Drafts tokens of the sequences that the next step of `micro_batch` may compute.
    pub(super) fn draft(&mut self, micro_batch: MicroBatch, drafts: u32, max_positions: u32) {
        if drafts == 0 {
            return;
        }
        for (id, _) in self.sched.idle(micro_batch) {
            let Some(seq) = self.seqs.get_mut(&id) else { continue };
            let limit = seq.draft_limit(drafts, max_positions);
            seq.drafts.draft(&seq.tokens, limit, &seq.stop_ids);
        }
    }

    /// The rows of a chunk that count: those of known tokens, and of drafts up to the first that was not sampled. `samples`:
    /// the chunk's. The sequence has the drafts that count as tokens from now on.
    pub(crate) fn accept_drafts(&mut self, chunk: &Chunk, samples: &[SampleOut], most: u32) -> Chunk {
        let Some(seq) = self.seqs.get_mut(&chunk.seq).filter(|_| chunk.drafts > 0) else { return *chunk };
        let drafted = seq.drafted(chunk);
        let counted = drafted
            .iter()
            .zip(samples)
            .take_while(|(draft, sample)| !sample.excluded && **draft == sample.token)
            .count();
        let sampled = samples[..counted].iter().map(|sample| sample.token);
        seq.tokens.extend(sampled);
        let counted = u32::try_from(counted).unwrap_or(u32::MAX);
        seq.drafts.learn(chunk.drafts, counted, most);
        self.counts.drafted_tokens += u64::from(chunk.drafts);
        self.counts.accepted_tokens += u64::from(counted);
        Chunk { len: 1 + counted, drafts: counted, ..*chunk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [u32; 0] = [];

    fn drafted(known: &[u32], limit: u32, ends: &[u32]) -> Vec<u32> {
        let mut drafts = Drafts { wanted: 16, ..Drafts::default() };
        drafts.draft(known, limit, ends);
        drafts.tokens
    }

    #[test]
    fn what_followed_the_newest_tokens_is_drafted() {
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
    fn drafts_grow_while_they_count_and_pause_after_refusals() {
        let mut drafts = Drafts::default();
        let known = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3];
        drafts.draft(&known, 16, &[]);
        assert_eq!(drafts.tokens(), [4, 5]);
        drafts.learn(2, 2, 16);
        drafts.draft(&known, 16, &[]);
        assert_eq!(drafts.tokens().len(), 4);
        drafts.learn(4, 1, 16);
        assert_eq!((drafts.wanted, drafts.pause), (2, 0));
        for pause in [1, 2, 4, 8, 16, 32, 32] {
            drafts.draft(&known, 16, &[]);
            assert!(!drafts.tokens().is_empty());
            drafts.learn(1, 0, 16);
            assert_eq!(drafts.pause, pause);
            (0..pause).for_each(|_| {
                drafts.draft(&known, 16, &[]);
                assert_eq!(drafts.tokens(), NONE);
            });
        }
        drafts.learn(1, 1, 1);
        assert_eq!((drafts.wanted, drafts.next_pause), (1, 1), "never more than the most");
    }
}
