//! Embeddings: the mean of a prompt's hidden states after the final norm, added up as steps compute its positions.
//!
//! Invariant: every position of the pooling is added once, in order, however often its KV is computed.

use super::Batch;
use super::others::PrefillQueries;
use super::sequence::Sequence;
use crate::cx::Cx;
use crate::event::Effect;
use lagoon_runner::HiddenSum;
use lagoon_types::{FinishReason, Pooling, SeqId, TokenEvent};
use std::ops::Range;

/// What of a sequence's embedding is known.
#[derive(Debug)]
pub(crate) struct Embedding {
    /// Positions whose hidden states are missing.
    missing: Range<u32>,
    /// Positions in all.
    positions: u32,
    sum: Vec<f64>,
}

impl Embedding {
    pub(crate) fn new(pooling: Pooling, prompt_len: u32) -> Self {
        let missing = pooling.positions(prompt_len);
        Self { positions: missing.end - missing.start, missing, sum: Vec::new() }
    }

    /// Positions of a chunk whose hidden states are missing.
    pub(crate) fn rows(&self, chunk: Range<u32>) -> Range<u32> {
        let start = chunk.start.max(self.missing.start);
        start..chunk.end.min(self.missing.end).max(start)
    }

    fn add(&mut self, of: HiddenSum) {
        assert_eq!(self.missing.start, of.positions.start, "{}: every position once, in order", of.seq);
        self.missing.start = of.positions.end;
        self.sum.resize(of.sum.len(), 0.0);
        self.sum.iter_mut().zip(of.sum).for_each(|(sum, x)| *sum += x);
    }

    /// The mean.
    ///
    /// # Panics
    /// If a position is missing.
    fn mean(self) -> Vec<f32> {
        assert!(self.missing.is_empty(), "positions {:?} are missing", self.missing);
        #[allow(clippy::cast_possible_truncation, reason = "rounding to f32 is intended")]
        let mean = |sum: f64| (sum / f64::from(self.positions)) as f32;
        self.sum.into_iter().map(mean).collect()
    }
}

impl Sequence {
    /// Whether positions of its prompt are computed though their KV is cached: their logits or hidden states are missing. The
    /// last position is always computed.
    pub(crate) fn needs_positions(&self) -> bool {
        let before = |missing: &Range<u32>| !missing.is_empty() && missing.start + 1 < self.prompt_len;
        self.scores_prompt().is_some() || self.embedding.as_ref().is_some_and(|embedding| before(&embedding.missing))
    }
}

impl Batch {
    /// Adds hidden states of a prompt's positions.
    pub(crate) fn add_hidden(&mut self, of: HiddenSum) {
        if let Some(embedding) = self.seqs.get_mut(&of.seq).and_then(|seq| seq.embedding.as_mut()) {
            embedding.add(of);
        }
    }

    /// Emits the embedding of a sequence whose prompt is computed, and ends the sequence.
    pub(crate) fn finish_embedding(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, seq: SeqId) {
        let prompt = self.report_prompt(seq);
        let embedding = self.seqs.get_mut(&seq).and_then(|of| of.embedding.take());
        let embedding = embedding.map(|embedding| TokenEvent::Embedding { hidden: embedding.mean() });
        cx.effects.extend(prompt.into_iter().chain(embedding).map(|event| Effect::Emit { seq, event }));
        self.finish(cx, prefills, seq, FinishReason::Stop);
    }
}
