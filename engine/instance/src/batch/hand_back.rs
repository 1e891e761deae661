//! Hand-back: a request that waits too long here goes back to its gateway, which gives it to an instance that can start it.

use super::micro_batches::{attended_elsewhere, leases, remote_part};
use super::others::PrefillQueries;
use super::sequence::{Life, Need, Sequence};
use super::{Batch, policy};
use crate::cx::Cx;

use lagoon_cluster::perf::{Rates, StepTimes};
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

    /// The borrow guard ([`StepTimes`]): whether a waiting sequence that lacks `remote` rBlocks here waits, rather than borrow them. It
    /// does while its gateway takes it back and may find an instance that holds it whole, unless the local work of a step covers the
    /// remote part.
    pub(super) fn waits_for_whole(&self, cx: &Cx, id: SeqId, remote: u32) -> bool {
        let Some(seq) = self.seqs.get(&id).filter(|seq| seq.options.may_hand_back) else { return false };
        let needed = seq.blocks.shortfall(seq.len() + 1);
        let is_short = !Self::has_not_begun(seq) || policy::is_pool_sized(needed, cx.config.blocks_total);
        let times = self.times_with(cx, needed.saturating_sub(remote), remote);
        // What cannot be predicted is not covered.
        !times.map_or(is_short, |times| times.may_borrow(is_short))
    }

    /// Predicted times of a step with one more sequence, of `local` rBlocks here and `remote` at the slowest of the known peers, beside
    /// what is borrowed there; `None` without a calibration, or before any peer was measured. KV in mapped memory is local work.
    fn times_with(&self, cx: &Cx, local: u32, remote: u32) -> Option<StepTimes> {
        let rates = cx.config.calibration.as_ref().and_then(|c| Rates::new(c, true))?;
        let running = || self.seqs.values().filter(|seq| seq.is_running());
        let there = attended_elsewhere(running().flat_map(leases), |_| false);
        let (mut own, mut slowest_us) = (0, None::<f64>);
        for peer in cx.peers.iter() {
            let before = there.get(&peer.instance).copied().unwrap_or(0);
            let part = remote_part(cx, &rates, peer.instance, before.saturating_add(remote));
            if part.mapped {
                own = u32::saturating_add(own, before);
            } else if peer.rtt_us == 0 {
                continue;
            }
            slowest_us = Some(slowest_us.unwrap_or(0.0).max(part.us(&cx.model)));
        }
        let blocks =
            running().map(|seq| seq.blocks.local_blocks()).fold(local, u32::saturating_add).saturating_add(own);
        let tokens = f64::from(blocks) * f64::from(cx.config.block_tokens);
        let batch = u32::try_from(self.running_len() + 1).unwrap_or(u32::MAX);
        let local_us = rates.other_us(batch) + tokens * rates.attention_us;
        slowest_us.map(|remote_us| StepTimes { local_us, remote_us })
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
