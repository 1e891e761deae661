//! The symbolic draft model: it knows what the symbolic model will sample, and is wrong, forgets, fails or answers too late now and
//! then.

use super::model::{Oracle, VOCAB, Windows};
use crate::rng::mix;
use lagoon_runner::{DraftSeq, DraftWork, Drafted, PassError, Report};
use lagoon_types::SeqId;
use lagoon_types::limits::DRAFT_DEADLINE_MS;
use std::collections::{BTreeMap, VecDeque};

/// Sequences and tokens of requests, not yet answered.
#[derive(Debug, Default)]
pub(super) struct Drafter {
    requests: VecDeque<DraftWork>,
    tokens: BTreeMap<SeqId, Vec<u32>>,
    /// An answer that comes at its time, in microseconds, behind which others wait.
    late: Option<(u64, Report)>,
}

impl Drafter {
    pub(super) fn push(&mut self, work: DraftWork) {
        self.requests.push_back(work);
    }

    /// Answers the next request. Returns the rows that it computed; `None` if there was nothing to do.
    pub(super) fn turn(&mut self, windows: Windows, now_us: u64, reports: &mut Vec<Report>) -> Option<u64> {
        if let Some((_, report)) = self.late.take_if(|(due_us, _)| *due_us <= now_us) {
            reports.push(report);
            return Some(0);
        }
        if self.late.is_some() {
            return None;
        }
        let DraftWork { draft, seqs, ended } = self.requests.pop_front()?;
        ended.iter().for_each(|seq| _ = self.tokens.remove(seq));
        let rows = seqs.iter().map(|of| of.tokens.len() + of.drafts as usize).sum::<usize>() as u64;
        let chance = mix(draft.0 ^ 0x6472_6166);
        let failed = chance.is_multiple_of(29);
        let seqs = seqs.into_iter().map(|of| if failed { self.lose(of.seq) } else { self.draft(of, windows, chance) });
        let seqs = seqs.collect();
        let error = failed.then(|| PassError::Sampling("the symbolic draft model fails".to_owned()));
        let report = Report::Drafted { draft, seqs, error };
        if chance.is_multiple_of(16) {
            self.late = Some((now_us + 1500 * DRAFT_DEADLINE_MS, report));
        } else {
            reports.push(report);
        }
        Some(rows)
    }

    fn lose(&mut self, seq: SeqId) -> Drafted {
        self.tokens.clear();
        Drafted { seq, known: None, tokens: Vec::new() }
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
