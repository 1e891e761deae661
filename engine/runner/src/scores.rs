//! Log-probabilities of a prompt's tokens: logits of rows of a step, as many at a time as one step samples, each reduced to
//! its token's log-probability, its rank and the likeliest tokens before the next rows' logits are computed.

use crate::decoder::Decoder;
use crate::forward::{Forward, Shared};
use crate::queue;
use crate::work::{PassError, ScoreRows};
use lagoon_backend::Device;
use lagoon_types::{PromptLogprob, SeqId};

/// A step's rows of prompts to score, and how far that is.
#[derive(Debug)]
pub(crate) struct Scores {
    rows: Vec<ScoreRows>,
    /// Rows whose logits were reduced, and those whose logits are being computed behind them.
    done: usize,
    queued: usize,
    scores: Vec<(SeqId, u32, Vec<PromptLogprob>)>,
}

impl Scores {
    pub(crate) fn new(rows: Vec<ScoreRows>) -> Self {
        let scores = rows.iter().map(|of| (of.seq, of.first, Vec::with_capacity(of.targets.len()))).collect();
        Self { rows, done: 0, queued: 0, scores }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All scores, once.
    pub(crate) fn take(&mut self) -> Vec<(SeqId, u32, Vec<PromptLogprob>)> {
        self.rows.clear();
        std::mem::take(&mut self.scores)
    }

    /// Every row in order: its index among `rows`, its row in the step, and its token.
    fn all(&self) -> impl Iterator<Item = (usize, u32, u32)> {
        self.rows
            .iter()
            .enumerate()
            .flat_map(|(at, of)| (of.row0..).zip(&of.targets).map(move |(row, token)| (at, row, *token)))
    }

    /// Queues the next rows' logits. False if none are left.
    pub(crate) fn queue<D: Device>(
        &mut self,
        shared: &mut Shared<'_, D>,
        micro_batch: usize,
    ) -> Result<bool, PassError> {
        let rows: Vec<u32> =
            self.all().map(|(_, row, _)| row).skip(self.done).take(shared.config.sampled_rows).collect();
        self.queued = rows.len();
        if rows.is_empty() {
            return Ok(false);
        }
        let Forward { model, micro_batches, .. } = &mut *shared.forward;
        let activations = &mut micro_batches[micro_batch];
        Decoder::new(model).logits(shared.device, &rows, activations)?;
        queue::read_ahead(shared.device, micro_batch, &activations.logits, 0..rows.len(), 0..model.spec.vocab)?;
        Ok(true)
    }

    /// Reduces the logits that were queued, if any.
    pub(crate) fn reduce<D: Device>(
        &mut self,
        shared: &mut Shared<'_, D>,
        micro_batch: usize,
    ) -> Result<(), PassError> {
        let rows = std::mem::take(&mut self.queued);
        if rows == 0 {
            return Ok(());
        }
        let Forward { model, micro_batches, sampler, host, .. } = &mut *shared.forward;
        let vocab = model.spec.vocab;
        host.clear();
        queue::read_staged(shared.device, micro_batch, &micro_batches[micro_batch].logits, 0..rows, 0..vocab, host)?;
        let tokens: Vec<_> = self.all().map(|(at, _, token)| (at, token)).skip(self.done).take(rows).collect();
        for ((at, token), logits) in tokens.into_iter().zip(host.chunks_exact(vocab)) {
            let score = sampler.score(logits, token, self.rows[at].top as usize);
            self.scores[at].2.push(score.map_err(|error| PassError::Sampling(error.to_string()))?);
        }
        self.done += rows;
        Ok(())
    }
}
