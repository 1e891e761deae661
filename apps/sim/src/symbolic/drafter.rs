//! The symbolic draft model: it knows what the symbolic model will sample, and is wrong, forgets or stays silent now and then.

use super::model::{Oracle, VOCAB, Windows};
use crate::rng::mix;
use lagoon_runner::{DraftSeq, DraftWork, Drafted, Report};
use lagoon_types::SeqId;
use std::collections::{BTreeMap, VecDeque};

/// Sequences and tokens of requests, not yet answered.
#[derive(Debug, Default)]
pub(super) struct Drafter {
    requests: VecDeque<DraftWork>,
    tokens: BTreeMap<SeqId, Vec<u32>>,
}

impl Drafter {
    pub(super) fn push(&mut self, work: DraftWork) {
        self.requests.push_back(work);
    }

    /// Answers the next request, or loses it. Returns the rows that it computed.
    pub(super) fn turn(&mut self, windows: Windows, reports: &mut Vec<Report>) -> Option<u64> {
        let work = self.requests.pop_front()?;
        let rows = work.seqs.iter().map(|of| of.tokens.len() + of.drafts as usize).sum::<usize>() as u64;
        let chance = mix(work.draft.0 ^ 0x6472_6166);
        let seqs = work.seqs.into_iter().map(|of| self.draft(of, windows, chance)).collect();
        if !chance.is_multiple_of(16) {
            reports.push(Report::Drafted { draft: work.draft, seqs, error: None });
        }
        Some(rows)
    }

    fn draft(&mut self, of: DraftSeq, windows: Windows, chance: u64) -> Drafted {
        let DraftSeq { seq, from, tokens, drafts, .. } = of;
        let chance = mix(chance ^ seq.0);
        let known = self.tokens.entry(seq).or_default();
        if from as usize > known.len() || chance.is_multiple_of(13) {
            known.clear();
            return Drafted { seq, known: Some(0), tokens: Vec::new() };
        }
        if chance.is_multiple_of(17) {
            return Drafted { seq, known: None, tokens: Vec::new() };
        }
        known.truncate(from as usize);
        known.extend(tokens);
        let mut oracle = Oracle::new(known, windows);
        let wrong = |n: u64| u32::from(mix(chance ^ n).is_multiple_of(5));
        // A wrong token may be none of the vocabulary.
        let next = |n| oracle.next_token() + wrong(n) * (1 + VOCAB * wrong(n + 100));
        let tokens = (0..u64::from(drafts)).map(next).collect();
        Drafted { seq, known: u32::try_from(known.len()).ok(), tokens }
    }
}
