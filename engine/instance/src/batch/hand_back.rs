//! Hand-back: a request that waits too long here goes back to its gateway, which gives it to an instance that can start it.

use super::others::PrefillQueries;
use super::sequence::{Life, Need, Sequence};
use super::{Batch, policy};
use crate::cx::Cx;

use lagoon_cluster::perf::{LinkView, Rates, covers};
use lagoon_types::limits::{HAND_BACK_MS, QUEUE_DEFAULT};
use lagoon_types::{RequestError, SeqId};

impl Batch {
    /// Gives waiting requests back that have not begun, hold no memory, and fit an instance; a pool-sized one stays, as the pool keeps
    /// memory for it where it waits. A draining instance gives back at once.
    pub(super) fn hand_back(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries) {
        let late: Vec<SeqId> =
            self.sched.waiting().map(|waiting| waiting.seq).filter(|seq| self.is_late(cx, *seq)).collect();
        for seq in late.into_iter().take(QUEUE_DEFAULT) {
            self.counts.handed_back += 1;
            self.fail(cx, prefills, seq, RequestError::HandedBack);
        }
    }

    /// The borrow guard: whether a waiting sequence that lacks `remote` rBlocks here waits, rather than borrow them. It does while its
    /// gateway takes it back and may find an instance that holds it whole, unless the local work of a step covers the remote part.
    pub(super) fn waits_for_whole(&self, cx: &Cx, id: SeqId, remote: u32) -> bool {
        let Some(seq) = self.seqs.get(&id).filter(|seq| seq.options.may_hand_back) else { return false };
        let needed = seq.blocks.shortfall(seq.len() + 1);
        let may_go = Self::has_not_begun(seq) && !policy::is_pool_sized(needed, cx.config.blocks_total);
        may_go && !self.covers_borrowed(cx, needed.saturating_sub(remote), remote)
    }

    /// Whether a step with one more sequence, of `local` rBlocks here and `remote` borrowed ones, has local work for as long as
    /// creditors take; false if that is not known.
    fn covers_borrowed(&self, cx: &Cx, local: u32, remote: u32) -> bool {
        let Some(rates) = cx.config.calibration.as_ref().and_then(|c| Rates::new(c, true)) else { return false };
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(cx.config.block_tokens);
        let running = self.seqs.values().filter(|seq| seq.is_running()).map(|seq| seq.blocks.local_blocks());
        let local = running.fold(local, u32::saturating_add);
        let rtt_us = cx.peers.iter().map(|peer| peer.rtt_us).filter(|rtt_us| *rtt_us > 0).max();
        let link = rtt_us.map(|rtt_us| LinkView { rtt_us: f64::from(rtt_us), bytes_per_s: 0.0 });
        let batch = u32::try_from(self.running_len() + 1).unwrap_or(u32::MAX);
        link.is_some() && covers(&rates, batch, tokens(local), tokens(remote), cx.config.kv.layers, link)
    }

    fn is_late(&self, cx: &Cx, seq: SeqId) -> bool {
        let Some(seq) = self.seqs.get(&seq).filter(|seq| seq.options.may_hand_back) else { return false };
        let has_waited = cx.standing.draining || cx.now_ms >= seq.since_ms + HAND_BACK_MS;
        let needed = seq.blocks.shortfall(seq.len() + 1);
        has_waited && Self::has_not_begun(seq) && !policy::is_pool_sized(needed, cx.config.blocks_total)
    }

    fn has_not_begun(seq: &Sequence) -> bool {
        let waits = matches!(seq.life, Life::Waiting(Need::Met | Need::RetryAt(_)));
        waits && seq.began_ms.is_none() && seq.generated() == 0 && seq.blocks.blocks() == 0 && seq.beside() == 0
    }
}
