//! Sampling: logits to a token.
//!
//! The order is vLLM's: what may not be drawn, logit bias, penalties (repetition, frequency, presence), temperature, min-p,
//! top-k, top-p, then one draw from the rest, each step renormalised over the tokens that the step before kept. (Hugging Face has min-p last; the two differ only if min-p and top-p are
//! both used.) Two rules are stricter than vLLM's, for reproducible results: ties go to the lower token id, so that
//! top-k keeps exactly `k` tokens; and the draw walks the kept tokens in the order of their ids, so that rounding
//! errors in logits change the token only if the draw falls within the rounding error of a boundary.
//!
//! The draw is a pure function of the seed and the number of tokens that the sequence has generated: a preempted,
//! replayed or moved sequence draws the same numbers.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "token ids are below VOCAB_MAX; f64 intermediates are rounded once, by design"
)]

use crate::token_counts::TokenCounts;
use lagoon_backend::{SampleRow, SampledRow};
use lagoon_types::limits::{PENALTY_MAX, REPETITION_PENALTY_RANGE, VOCAB_MAX};
use lagoon_types::{PromptLogprob, SamplingParams, TokenLogprobs};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use std::cmp::Ordering;

/// Tokens that top-p ranks at first; four times as many in each further round, if they do not suffice.
const RANKED_FIRST: usize = 256;

/// Why no token was sampled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// A logit is NaN or positive infinity: the model computed nonsense.
    #[error("the logit of token {token} is {value}")]
    BadLogit { token: u32, value: String },
    /// All logits are negative infinity, or there are none.
    #[error("no token is possible")]
    Nothing,
    /// The request's own rules leave none of the tokens that the model can generate.
    #[error("allowed_token_ids, bad_words, min_tokens and the grammar leave no token that may come next")]
    Excluded,
    /// A parameter is outside its range. Callers check with [`check_params`] before they start a sequence.
    #[error("{name} is {value}: it must be {range}")]
    BadParameter { name: &'static str, value: String, range: &'static str },
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub id: u32,
    /// Present if requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// Checks that `params` are in range: temperature at least 0, `top_p` in (0, 1], `min_p` in [0, 1], biases finite, penalties
/// within [`PENALTY_MAX`] and [`REPETITION_PENALTY_RANGE`].
pub fn check_params(params: &SamplingParams) -> Result<(), SampleError> {
    let bad = |name, value: f32, range| Err(SampleError::BadParameter { name, value: value.to_string(), range });
    let SamplingParams { temperature, top_p, min_p, .. } = *params;
    if !(temperature >= 0.0 && temperature.is_finite()) {
        return bad("temperature", temperature, "a finite number, 0 or above");
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return bad("top_p", top_p, "above 0 and at most 1");
    }
    if !(0.0..=1.0).contains(&min_p) {
        return bad("min_p", min_p, "from 0 to 1");
    }
    if let Some((_, bias)) = params.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
        return bad("logit_bias", *bias, "a finite number");
    }
    let SamplingParams { presence_penalty, frequency_penalty, repetition_penalty, .. } = *params;
    for (name, penalty) in [("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)] {
        if !(-PENALTY_MAX..=PENALTY_MAX).contains(&penalty) {
            return bad(name, penalty, "from -2 to 2");
        }
    }
    let (least, largest) = REPETITION_PENALTY_RANGE;
    if !(least..=largest).contains(&repetition_penalty) {
        return bad("repetition_penalty", repetition_penalty, "from 0.01 to 100");
    }
    Ok(())
}

/// Samples tokens for any number of sequences: it keeps scratch memory, no state.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Tokens not yet excluded, with their logits at first and their weights later.
    kept: Vec<Candidate>,
    /// Logits with a request's biases and penalties, and negative infinity for what may not be drawn.
    adjusted: Vec<f32>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    logit: f32,
}

impl Candidate {
    /// Likelier first, then the lower id. There are no NaNs.
    fn rank(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// A sampler without scratch memory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Samples from `logits` (one per token id), none of `banned`. `index` is the number of tokens that the sequence generated
    /// before; `counts`, its tokens, for penalties. Log-probabilities are those of all tokens, banned ones too.
    ///
    /// # Panics
    /// If there are more than `VOCAB_MAX` logits, or penalties without `counts`.
    pub fn sample(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        index: u64,
        banned: &[u32],
        counts: Option<&TokenCounts>,
    ) -> Result<Sampled, SampleError> {
        self.sample_masked(logits, params, index, (banned, counts), None)
    }

    /// As [`Sampler::sample`]; with a `mask`, of the tokens whose bits are set, 32 a word.
    ///
    /// # Panics
    /// As there.
    pub fn sample_masked(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        index: u64,
        (banned, counts): (&[u32], Option<&TokenCounts>),
        mask: Option<&[u32]>,
    ) -> Result<Sampled, SampleError> {
        assert!(logits.len() <= VOCAB_MAX as usize, "{} logits", logits.len());
        check_params(params)?;
        let best = likeliest(logits)?;
        let SamplingParams { logit_bias, allowed_token_ids, .. } = params;
        let plain = logit_bias.is_empty() && allowed_token_ids.is_empty() && banned.is_empty() && mask.is_none();
        let id = if plain && !params.has_penalties() {
            self.choose(logits, best, params, index)
        } else {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjust(logits, params, (banned, mask), counts, &mut adjusted);
            let chosen = likeliest(&adjusted).map(|best| self.choose(&adjusted, best, params, index));
            self.adjusted = adjusted;
            // The model's own logits have a likeliest token.
            chosen.map_err(|error| if error == SampleError::Nothing { SampleError::Excluded } else { error })?
        };
        let logprobs = params.logprobs.map(|n| self.logprobs(logits, best, id, n as usize));
        Ok(Sampled { id, logprobs })
    }

    /// The token that is taken from `logits`, whose likeliest is `best`.
    fn choose(&mut self, logits: &[f32], best: Candidate, params: &SamplingParams, index: u64) -> u32 {
        if params.temperature == 0.0 { best.id } else { self.draw(logits, best, params, index) }
    }

    /// The parameters with which a device draws the token that [`Sampler::sample`] would, but for rounding.
    pub fn row(params: &SamplingParams, index: u64) -> Result<SampleRow, SampleError> {
        check_params(params)?;
        let SamplingParams { temperature, top_p, min_p, top_k, seed, .. } = *params;
        let uniform = if temperature == 0.0 { 0.0 } else { uniform(seed, index) };
        let (mask, reserved) = (SampleRow::UNMASKED, 0);
        Ok(SampleRow { uniform, temperature, top_p, min_p, top_k, mask, reserved })
    }

    /// The token that a device drew, from the tokens of a mask if the row `is_masked`.
    ///
    /// # Errors
    /// Those of [`Sampler::sample_masked`], from the row's status.
    pub fn drawn(row: SampledRow, is_masked: bool) -> Result<u32, SampleError> {
        match row {
            SampledRow { token, status: 0 } => Ok(token),
            SampledRow { status: 2, .. } if is_masked => Err(SampleError::Excluded),
            SampledRow { token, status: 1 } => Err(SampleError::BadLogit { token, value: "not finite".to_owned() }),
            _ => Err(SampleError::Nothing),
        }
    }

    /// `best`: the likeliest token.
    fn draw(&mut self, logits: &[f32], best: Candidate, params: &SamplingParams, index: u64) -> u32 {
        let temperature = f64::from(params.temperature);
        let max = f64::from(best.logit);
        let weight = |candidate: &Candidate| ((f64::from(candidate.logit) - max) / temperature).exp();
        let floor = f64::from(params.min_p);
        let all = logits.iter().zip(0..).map(|(&logit, id)| Candidate { id, logit });
        self.kept.clear();
        // The likeliest token has weight 1, so the weights are relative to it as min-p asks.
        let possible = |c: &Candidate| c.logit > f32::NEG_INFINITY;
        self.kept.extend(all.filter(|c| possible(c) && (floor == 0.0 || weight(c) >= floor)));
        let top_k = params.top_k as usize;
        if top_k > 0 && top_k < self.kept.len() {
            self.kept.select_nth_unstable_by(top_k - 1, Candidate::rank);
            self.kept.truncate(top_k);
        }
        if params.top_p < 1.0 {
            self.keep_top_p(f64::from(params.top_p), weight);
        }
        self.kept.sort_unstable_by_key(|candidate| candidate.id);
        let total: f64 = self.kept.iter().map(weight).sum();
        let mut left = uniform(params.seed, index) * total;
        for candidate in &self.kept {
            left -= weight(candidate);
            if left < 0.0 {
                return candidate.id;
            }
        }
        // Rounding left nothing of the last interval.
        self.kept.last().map_or(best.id, |candidate| candidate.id)
    }

    /// Keeps the fewest of the likeliest tokens whose probabilities reach `top_p` together: at least one.
    fn keep_top_p(&mut self, top_p: f64, weight: impl Fn(&Candidate) -> f64) {
        // Summed in the order of ids (or of the selection), not of rank; the difference is rounding.
        let enough = top_p * self.kept.iter().map(&weight).sum::<f64>();
        let (mut ranked, mut sum) = (0, 0.0);
        let mut until = RANKED_FIRST;
        while ranked < self.kept.len() {
            let rest = &mut self.kept[ranked..];
            let count = until.min(rest.len());
            if count < rest.len() {
                rest.select_nth_unstable_by(count - 1, Candidate::rank);
            }
            rest[..count].sort_unstable_by(Candidate::rank);
            for (taken, candidate) in rest[..count].iter().enumerate() {
                sum += weight(candidate);
                if sum >= enough {
                    self.kept.truncate(ranked + taken + 1);
                    return;
                }
            }
            ranked += count;
            until *= 4;
        }
    }

    /// The log-probability of `token`, which follows the row of `logits`, its rank (the number of tokens that are as likely or
    /// likelier), and the `top` likeliest tokens.
    pub(crate) fn score(&mut self, logits: &[f32], token: u32, top: usize) -> Result<PromptLogprob, SampleError> {
        let best = likeliest(logits)?;
        let TokenLogprobs { chosen, top } = self.logprobs(logits, best, token, top);
        let rank = logits.iter().filter(|logit| **logit >= logits[token as usize]).count();
        Ok(PromptLogprob { token, logprob: chosen, rank: rank as u32, top })
    }

    /// Natural logarithms of the softmax of the logits as they are.
    fn logprobs(&mut self, logits: &[f32], best: Candidate, id: u32, top: usize) -> TokenLogprobs {
        let max = f64::from(best.logit);
        let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
        let log_sum = max + sum.ln();
        let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
        self.kept.clear();
        if top > 0 {
            let all = logits.iter().zip(0..).map(|(&logit, id)| Candidate { id, logit });
            self.kept.extend(all.filter(|candidate| candidate.logit > f32::NEG_INFINITY));
        }
        if top < self.kept.len() {
            self.kept.select_nth_unstable_by(top - 1, Candidate::rank);
            self.kept.truncate(top);
        }
        self.kept.sort_unstable_by(Candidate::rank);
        let top = self.kept.iter().map(|candidate| (candidate.id, logprob(candidate.logit))).collect();
        TokenLogprobs { chosen: logprob(logits[id as usize]), top }
    }
}

/// Writes `logits` into `out`, those that may not be drawn as negative infinity, the others with biases and penalties. Ids
/// beyond the logits are ignored.
fn adjust(
    logits: &[f32],
    params: &SamplingParams,
    (banned, mask): (&[u32], Option<&[u32]>),
    counts: Option<&TokenCounts>,
    out: &mut Vec<f32>,
) {
    out.clear();
    let allowed = &params.allowed_token_ids;
    if allowed.is_empty() {
        out.extend_from_slice(logits);
    } else {
        out.resize(logits.len(), f32::NEG_INFINITY);
        for &id in allowed.iter().filter(|id| (**id as usize) < logits.len()) {
            out[id as usize] = logits[id as usize];
        }
    }
    change(out, banned, |_| f32::NEG_INFINITY);
    mask.iter().for_each(|mask| keep(out, mask));
    for &(id, bias) in params.logit_bias.iter() {
        change(out, &[id], |logit| finite(logit, logit + bias));
    }
    if params.has_penalties() {
        penalise(out, params, counts.expect("a sequence with penalties keeps its tokens"));
    }
}

/// Makes the logits of tokens whose bits are not set negative infinity.
fn keep(logits: &mut [f32], mask: &[u32]) {
    let words = mask.iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in logits.chunks_mut(32).zip(words).filter(|(_, word)| *word != u32::MAX) {
        for (bit, logit) in logits.iter_mut().enumerate() {
            if word >> bit & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// What became of a logit: no infinity of a number, as a peer's request may ask for any bias.
fn finite(logit: f32, changed: f32) -> f32 {
    if logit.is_finite() { changed.clamp(f32::MIN, f32::MAX) } else { changed }
}

fn change(logits: &mut [f32], ids: &[u32], to: impl Fn(f32) -> f32) {
    for id in ids {
        if let Some(logit) = logits.get_mut(*id as usize) {
            *logit = to(*logit);
        }
    }
}

/// Repetition over prompt and answer, then frequency and presence over the answer: vLLM's definitions, and for repetition
/// that of transformers' `RepetitionPenaltyLogitsProcessor`.
fn penalise(logits: &mut [f32], params: &SamplingParams, counts: &TokenCounts) {
    let &SamplingParams { presence_penalty, frequency_penalty, repetition_penalty, .. } = params;
    if repetition_penalty != 1.0 {
        let repeat = |logit: f32| {
            finite(logit, if logit < 0.0 { logit * repetition_penalty } else { logit / repetition_penalty })
        };
        counts.all().for_each(|id| change(logits, &[id], repeat));
    }
    for &(id, count) in counts.generated() {
        change(logits, &[id], |logit| finite(logit, logit - frequency_penalty * count as f32 - presence_penalty));
    }
}

/// The first of the largest logits, after checking all.
fn likeliest(logits: &[f32]) -> Result<Candidate, SampleError> {
    let mut best = Candidate { id: 0, logit: f32::NEG_INFINITY };
    let mut bad = false;
    for (&logit, id) in logits.iter().zip(0..) {
        // A NaN compares false with everything, so it needs its own test.
        bad |= logit.is_nan() || logit == f32::INFINITY;
        if logit > best.logit {
            best = Candidate { id, logit };
        }
    }
    if bad {
        let found = logits.iter().zip(0..).find(|(logit, _)| logit.is_nan() || **logit == f32::INFINITY);
        let (value, token) = found.map_or((0.0, 0), |(logit, id)| (*logit, id));
        return Err(SampleError::BadLogit { token, value: value.to_string() });
    }
    if best.logit == f32::NEG_INFINITY { Err(SampleError::Nothing) } else { Ok(best) }
}

/// A number in [0, 1) for the `index`-th token under `seed`: the first of ChaCha8's stream `index` under that seed.
fn uniform(seed: u64, index: u64) -> f64 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(index);
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
#[path = "sampling_tests.rs"]
mod tests;
