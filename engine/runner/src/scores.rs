//! Log-probabilities of a prompt's tokens: logits of rows of a step, as many at a time as one step samples, each reduced to
//! its token's log-probability, its rank and the likeliest tokens before the next rows' logits are computed.

use crate::decoder::Decoder;
use crate::forward::{Forward, Shared};
use crate::queue;
use crate::row_parts::RowParts;
use crate::work::{PassError, ScoreRows};
use lagoon_backend::Device;
use lagoon_types::{PromptLogprob, SeqId};

/// A step's rows of prompts to score, and how far that is.
#[derive(Debug)]
pub(crate) struct Scores {
    parts: RowParts,
    /// Of each row: its index among `scores`, and its token.
    tokens: Vec<(usize, u32)>,
    /// Likeliest tokens to report, by index.
    top: Vec<u32>,
    scores: Vec<(SeqId, u32, Vec<PromptLogprob>)>,
}

impl Scores {
    pub(crate) fn new(rows: Vec<ScoreRows>) -> Self {
        let scores = rows.iter().map(|of| (of.seq, of.first, Vec::with_capacity(of.targets.len()))).collect();
        let all = rows.iter().flat_map(|of| (of.row0..).take(of.targets.len())).collect();
        let tokens = rows.iter().enumerate().flat_map(|(at, of)| of.targets.iter().map(move |token| (at, *token)));
        let (tokens, top) = (tokens.collect(), rows.iter().map(|of| of.top).collect());
        Self { parts: RowParts::new(all), tokens, top, scores }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// All scores, once.
    pub(crate) fn take(&mut self) -> Vec<(SeqId, u32, Vec<PromptLogprob>)> {
        self.parts.clear();
        std::mem::take(&mut self.scores)
    }

    /// Queues the next rows' logits. False if none are left.
    pub(crate) fn queue<D: Device>(
        &mut self,
        shared: &mut Shared<'_, D>,
        micro_batch: usize,
    ) -> Result<bool, PassError> {
        let rows = self.parts.queue(shared.config.sampled_rows);
        if rows.is_empty() {
            return Ok(false);
        }
        let Forward { model, micro_batches, .. } = &mut *shared.forward;
        let activations = &mut micro_batches[micro_batch];
        Decoder::new(model).logits(shared.device, rows, activations)?;
        queue::read_ahead(shared.device, micro_batch, &activations.logits, 0..rows.len(), 0..model.spec.vocab)?;
        Ok(true)
    }

    /// Reduces the logits that were queued, if any.
    pub(crate) fn reduce<D: Device>(
        &mut self,
        shared: &mut Shared<'_, D>,
        micro_batch: usize,
    ) -> Result<(), PassError> {
        let part = self.parts.finish();
        if part.is_empty() {
            return Ok(());
        }
        let Forward { model, micro_batches, sampler, host, .. } = &mut *shared.forward;
        let vocab = model.spec.vocab;
        host.clear();
        let logits = &micro_batches[micro_batch].logits;
        queue::read_staged(shared.device, micro_batch, logits, 0..part.len(), 0..vocab, host)?;
        for ((at, token), logits) in self.tokens[part].iter().zip(host.chunks_exact(vocab)) {
            let score = sampler.score(logits, *token, self.top[*at] as usize);
            self.scores[*at].2.push(score.map_err(|error| PassError::Sampling(error.to_string()))?);
        }
        Ok(())
    }
}
