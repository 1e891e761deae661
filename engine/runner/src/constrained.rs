//! A step's constrained sequences: what may come next in each row that is sampled, and what was drawn.

use crate::work::{SampleSpec, SeqRows, StepWork};
use lagoon_backend::SampleRow;
use lagoon_grammar::{Grammars, Next};
use lagoon_types::SeqId;

/// The rules of a step's sampled rows; empty if no sequence is constrained.
#[derive(Debug, Default)]
pub(crate) struct Constrained {
    /// By sampled row, in the order of sampling.
    rows: Vec<Next>,
    /// Whether `rows` is complete.
    is_asked: bool,
    /// The sequence sampled last, and its token, if all of its drafts before were sampled.
    last: Option<(SeqId, u32)>,
}

impl Constrained {
    /// Has the grammars of `work` compiled, meanwhile.
    pub(crate) fn prepare(work: &StepWork, grammars: Option<&Grammars>) {
        for (_, spec) in sampled(work) {
            spec.matcher.iter().for_each(|matcher| matcher.prepare(grammars));
        }
    }

    /// Asks the matchers of `work`, once. False while a grammar is being compiled.
    pub(crate) fn ask(&mut self, work: &StepWork, grammars: Option<&Grammars>) -> bool {
        if self.is_asked {
            return true;
        }
        let matchers = || sampled(work).filter_map(|(_, spec)| spec.matcher.as_ref());
        // All of them: each may begin to compile.
        let waiting = matchers().filter(|matcher| !matcher.poll(grammars)).count();
        if waiting > 0 {
            return false;
        }
        if matchers().next().is_some() {
            for (seq, spec) in sampled(work) {
                let end = (seq.row0 + seq.rows) as usize;
                let drafts = &work.tokens[end - seq.drafts as usize..end];
                match &spec.matcher {
                    Some(matcher) => matcher.next(drafts, &mut self.rows),
                    None => self.rows.extend((0..=drafts.len()).map(|_| Next::Any)),
                }
            }
        }
        self.is_asked = true;
        true
    }

    /// What may come in the `at`-th sampled row.
    pub(crate) fn row(&self, at: usize) -> &Next {
        self.rows.get(at).unwrap_or(&Next::Any)
    }

    /// Adds the mask of the `at`-th sampled row of `vocab` logits to `masks`, if it has one. Returns the mask's first word.
    pub(crate) fn mask(&self, at: usize, vocab: usize, masks: &mut Vec<u32>) -> u32 {
        let Some(mask) = self.row(at).mask() else { return SampleRow::UNMASKED };
        let (first, words) = (masks.len(), vocab.div_ceil(32));
        masks.extend(mask.iter().copied().chain(std::iter::repeat(0)).take(words));
        u32::try_from(first).expect("masks of one step are short")
    }

    /// Notes the token drawn behind a row, whose own token is `known`, unless that is a draft that was not drawn. True if the
    /// grammar has ended with it.
    pub(crate) fn drew(&mut self, seq: SeqId, spec: &SampleSpec, (known, is_draft): (u32, bool), token: u32) -> bool {
        let Some(matcher) = &spec.matcher else { return false };
        if is_draft && self.last != Some((seq, known)) {
            self.last = None;
            return false;
        }
        self.last = Some((seq, token));
        matcher.take(token)
    }
}

fn sampled(work: &StepWork) -> impl Iterator<Item = (&SeqRows, &SampleSpec)> {
    work.seqs.iter().filter_map(|seq| Some((seq, seq.sample.as_ref()?)))
}
