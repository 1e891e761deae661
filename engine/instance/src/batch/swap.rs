//! Swap out and swap in: preemption that keeps KV. A long sequence's blocks move to a host tier of the pool, and it
//! resumes later; a short sequence is recomputed.
//!
//! When a running sequence cannot grow, here or in other devices' memory, the youngest sequence for which moving is
//! cheaper than recomputing stops, and its whole blocks move to a host tier. The rest, as a rule less than a block, is
//! dropped: a lost range that is recomputed after swap in. So a swapped-out sequence holds no block here. It resumes, its
//! KV staying at the host tier, when there is room for its lost blocks and its growth and no other sequence is short. If
//! no host tier has room, the short sequence borrows from any tier, and a sequence is preempted only if that fails.

use super::others::PrefillQueries;
use super::policy::{SwapCandidate, SwapIn, SwapInCandidate};
use super::sequence::{Life, Need, Sequence};
use super::{Batch, Others, policy};
use crate::cx::Cx;
use crate::cx::standing::Lending;
use crate::outcome::Outcome;
use lagoon_kv::Owner;
use lagoon_types::limits::{ADMISSION_DEADLINE_MS, GROWTH_BLOCKS, RESTORE_DEADLINE_MS, SWAP_OUT_RETRY_MS};
use lagoon_types::{RequestError, SeqId};

impl Batch {
    /// Whether moving `blocks` out and back takes less time than recomputing the sequence. A link without a measurement
    /// counts as fast.
    fn moving_is_cheaper(&self, cx: &Cx, seq: &Sequence, blocks: u32) -> bool {
        let row_us = self.row_us(cx);
        let tokens = f64::from(blocks) * f64::from(cx.config.block_tokens);
        let token_bytes = f64::from(u32::try_from(cx.config.kv.token_bytes()).unwrap_or(u32::MAX));
        let bytes_per_s = cx.config.link_bytes_per_s;
        // After swap in the windowed layers' KV is recomputed.
        let saved = seq.blocks.written().saturating_sub(cx.config.windowed.map_or(0, |of| of.warm_up));
        policy::swap_is_cheaper(tokens * token_bytes, bytes_per_s, saved, row_us)
    }

    /// A running sequence as a candidate for swap out.
    fn swap_candidate(&self, cx: &Cx, others: Others<'_>, id: SeqId) -> Option<SwapCandidate> {
        let seq = self.seqs.get(&id)?;
        let (blocks, alone) = others.moves.whole_blocks_here(cx, self, id);
        let movable = seq.may_change_memory()
            && cx.config.window.is_none()
            && seq.window.is_none()
            && seq.loading.is_none()
            && seq.blocks.lost_blocks() == 0
            && seq.blocks.lost().is_empty()
            && !others.moves.is_moving(id);
        let cheaper = self.moving_is_cheaper(cx, seq, blocks);
        Some(SwapCandidate { seq: id, blocks, alone, movable, after_ms: seq.swap_after_ms, cheaper })
    }

    /// Swaps out `id`, which cannot grow in device memory, or the youngest sequence admitted after it, if one can be.
    /// True if one moves already.
    pub(crate) fn swap_out_for(&mut self, cx: &mut Cx, others: Others<'_>, id: SeqId) -> bool {
        cx.standing.note_lending_needed(cx.now_ms);
        if cx.standing.lending(cx.now_ms) != Lending::Open || others.moves.is_full() {
            return false;
        }
        let stops = |s: &Sequence| s.life == Life::SwappingOut;
        if others.moves.is_swapping_out() || self.seqs.values().any(stops) {
            self.retry_later(cx, id);
            return true;
        }
        let order: Vec<SeqId> = self.sched.running().collect();
        let candidates = order.iter().rev().filter_map(|s| self.swap_candidate(cx, others, *s));
        let Some((victim, blocks)) = policy::swap_victim(candidates, id, cx.now_ms) else { return false };
        cx.emit(Outcome::SwapOut { seq: victim, blocks });
        if victim != id {
            self.retry_later(cx, id);
        }
        if let Some(seq) = self.seqs.get_mut(&victim) {
            seq.life = Life::SwappingOut;
        }
        true
    }

    /// Ends the move to host memory: the sequence is swapped out if all blocks have moved, else it goes on.
    pub(crate) fn end_swap_out(&mut self, cx: &mut Cx, id: SeqId, all: bool) {
        let Some(seq) = self.seqs.get_mut(&id).filter(|s| s.life == Life::SwappingOut) else { return };
        self.due.touch();
        if !all {
            seq.set_need(Need::Met);
            seq.swap_after_ms = cx.now_ms + SWAP_OUT_RETRY_MS;
            return;
        }
        // Another move of the sequence may have been ordered meanwhile: its copy is dropped here.
        cx.emit(Outcome::Released { seq: id });
        let own = seq.blocks.drop_local();
        seq.life = Life::SwappedOut;
        seq.admit_by_ms = cx.now_ms + ADMISSION_DEADLINE_MS;
        cx.memory.rm.pool.free(Owner::Own(id), &own);
        self.sched.set_lost(id, seq.blocks.lost());
        self.counts.offloads += 1;
        // The freed memory is for sequences that are short of it.
        for seq in self.seqs.values_mut().filter(|s| matches!(s.need(), Some(Need::RetryAt(_)))) {
            seq.set_need(Need::Met);
        }
    }

    /// Swaps in sequences, oldest first, when there is room and no other is short; fails those past their deadline.
    pub(crate) fn swap_in(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries) {
        if !self.seqs.values().any(Sequence::is_swapped_out) {
            return;
        }
        let candidates = self.sched.running().filter_map(|id| {
            let seq = self.seqs.get(&id)?;
            let needed = seq.blocks.lost_blocks() + seq.blocks.shortfall(seq.len()) + GROWTH_BLOCKS;
            Some(SwapInCandidate { seq: id, life: seq.life, needed, by_ms: seq.admit_by_ms })
        });
        for (id, decision) in policy::swap_ins(candidates, cx.memory.rm.available(), cx.now_ms) {
            match decision {
                SwapIn::Now => {
                    self.set_need(id, Need::Met);
                    let restore_by_ms = Some(cx.now_ms + RESTORE_DEADLINE_MS);
                    self.seqs.entry(id).and_modify(|seq| seq.restore_by_ms = restore_by_ms);
                }
                SwapIn::Until(at_ms) => self.due.wake_at(at_ms),
                SwapIn::Late => {
                    let message = format!(
                        "its KV was moved to host memory and there was no room for {} s",
                        ADMISSION_DEADLINE_MS / 1000
                    );
                    self.fail(cx, prefills, id, RequestError::Unavailable(message));
                }
            }
        }
    }
}
