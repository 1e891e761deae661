//! Hand-back: a request that waits too long here goes back to its gateway, which gives it to an instance that can start it.

use super::Batch;
use super::others::PrefillQueries;
use super::policy::{self, HandBack};
use super::sequence::{Life, Need, Sequence};
use crate::cx::Cx;

use lagoon_types::limits::QUEUE_DEFAULT;
use lagoon_types::{RequestError, SeqId};

impl Batch {
    /// Gives waiting requests back ([`policy::hands_back`]).
    pub(super) fn hand_back(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries) {
        let late: Vec<SeqId> =
            self.sched.waiting().map(|waiting| waiting.seq).filter(|seq| self.is_late(cx, *seq)).collect();
        for seq in late.into_iter().take(QUEUE_DEFAULT) {
            self.counts.handed_back += 1;
            self.fail(cx, prefills, seq, RequestError::HandedBack);
        }
    }

    /// See [`policy::waits_for_whole`].
    pub(super) fn waits_for_whole(&self, cx: &Cx, id: SeqId) -> bool {
        let near = |creditor| cx.memory.rm.debtor.is_near(creditor);
        let maps_all = cx.peers.iter().count() > 0 && cx.peers.iter().all(|peer| near(peer.instance));
        let waits = |seq: &Sequence| policy::waits_for_whole(Self::hand_back_of(seq), cx.config.blocks_total, maps_all);
        self.seqs.get(&id).is_some_and(waits)
    }

    fn is_late(&self, cx: &Cx, id: SeqId) -> bool {
        self.seqs.get(&id).is_some_and(|seq| {
            let waited_ms = cx.now_ms.saturating_sub(seq.since_ms);
            policy::hands_back(Self::hand_back_of(seq), cx.config.blocks_total, waited_ms, cx.standing.draining)
        })
    }

    fn hand_back_of(seq: &Sequence) -> HandBack {
        let waits = matches!(seq.life, Life::Waiting(Need::Met | Need::RetryAt(_)));
        let is_new = seq.began_ms.is_none() && seq.generated() == 0 && seq.blocks.blocks() == 0 && seq.beside() == 0;
        let needed = seq.blocks.shortfall(seq.len() + 1);
        HandBack { may_hand_back: seq.options.may_hand_back, has_begun: !(waits && is_new), needed }
    }
}
