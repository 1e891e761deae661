//! Swap out and swap in: preemption that keeps KV. A long sequence that is preempted moves its blocks to host memory of
//! the pool and goes on later; a short one is recomputed.
//!
//! When a running sequence cannot grow, here or in other devices' memory, the youngest sequence for which moving is
//! cheaper than computing again stops, and its whole blocks move to a host tier. The rest of them, less than a block as a
//! rule, is dropped: it is a lost range that is recomputed when the sequence goes on. So a swapped-out sequence holds nothing
//! here. It goes on, with its KV where it is, when there is room for its lost blocks and its growth and nobody else is short.
//! Where no host tier has room, nothing has changed: the short sequence borrows from whoever lends, and the youngest is
//! preempted only if nobody does.

use super::policy;
use super::sequence::{Life, Need, Sequence};
use crate::instance::Instance;
use crate::membership::Lending;
use lagoon_types::limits::{
    ADMISSION_DEADLINE_MS, GROWTH_BLOCKS, RESTORE_DEADLINE_MS, SWAP_OUT_BLOCKS_MIN, SWAP_OUT_RETRY_MS,
};
use lagoon_types::{RequestError, SeqId};

/// Weight of the newest step in the measured time of a prompt's row.
const NEWEST: f64 = 1.0 / 8.0;
/// Rows of a prompt that make a step say something about their time.
const ROWS_MIN: u32 = 8;

impl Instance {
    /// A step of `rows` rows of prompts and nothing else took `ms`.
    pub(crate) fn prompt_step_took(&mut self, ms: u64, rows: u32) {
        if rows < ROWS_MIN {
            return;
        }
        let us = f64::from(u32::try_from(ms).unwrap_or(u32::MAX)) * 1000.0 / f64::from(rows);
        self.batch.prefill_us = if self.batch.prefill_us > 0.0 {
            self.batch.prefill_us + (us - self.batch.prefill_us) * NEWEST
        } else {
            us
        };
    }

    /// Whether moving so many blocks out and home again takes less time than computing the sequence again. What was not
    /// measured yet counts as fast.
    fn moving_is_cheaper(&self, seq: &Sequence, blocks: u32) -> bool {
        let calibrated = self.cx.config.calibration.as_ref().map_or(0.0, |c| c.prefill_us_per_token);
        let row_us = if calibrated > 0.0 { calibrated } else { self.batch.prefill_us };
        let tokens = f64::from(blocks) * f64::from(self.cx.config.block_tokens);
        let token_bytes = f64::from(u32::try_from(self.cx.config.kv.token_bytes()).unwrap_or(u32::MAX));
        let bytes_per_s = self.cx.config.link_bytes_per_s;
        policy::swap_is_cheaper(tokens * token_bytes, bytes_per_s, seq.blocks.written(), row_us)
    }

    /// Blocks of a sequence that would move, if it may be swapped out.
    fn can_swap_out(&self, id: SeqId) -> Option<u32> {
        let seq = self.batch.seqs.get(&id)?;
        let (whole, alone) = self.whole_blocks_here(id);
        let free = seq.may_change_memory();
        let may = free
            && alone >= SWAP_OUT_BLOCKS_MIN
            && seq.swap_after_ms <= self.cx.now_ms
            && self.cx.config.window.is_none()
            && seq.blocks.lost_blocks() == 0
            && seq.blocks.lost().is_empty()
            && !self.moves.is_moving(id);
        (may && self.moving_is_cheaper(seq, whole)).then_some(whole)
    }

    /// A running sequence cannot grow in devices' memory: it or the youngest that came after it is swapped out, if one can be.
    /// True if one moves already.
    pub(crate) fn swap_out_for(&mut self, id: SeqId) -> bool {
        self.membership.need_gmanager(self.cx.now_ms);
        if self.membership.lending(self.cx.now_ms) != Lending::Open {
            return false;
        }
        if self.moves.is_swapping_out() {
            self.retry_later(id);
            return true;
        }
        let order: Vec<SeqId> = self.batch.sched.running().collect();
        let younger = order.iter().rev().take_while(|s| **s != id).chain([&id]);
        let Some((victim, blocks)) = younger.copied().find_map(|s| self.can_swap_out(s).map(|blocks| (s, blocks)))
        else {
            return false;
        };
        if !self.start_swap_out(victim, blocks) {
            return false;
        }
        if victim != id {
            self.retry_later(id);
        }
        if let Some(seq) = self.batch.seqs.get_mut(&victim) {
            seq.life = Life::SwappingOut;
        }
        true
    }

    /// Sequences whose blocks have moved are swapped out; those whose blocks have not go on.
    pub(crate) fn end_swap_out(&mut self) {
        for (id, all) in std::mem::take(&mut self.moves.swapped_out) {
            let Some(seq) = self.batch.seqs.get_mut(&id).filter(|s| s.life == Life::SwappingOut) else { continue };
            self.batch.due.touch();
            if !all {
                seq.set_need(Need::Met);
                seq.swap_after_ms = self.cx.now_ms + SWAP_OUT_RETRY_MS;
                continue;
            }
            // Somebody may have ordered another move of it meanwhile: what that copies is dropped here.
            self.end_moves_of(id, "the sequence was swapped out");
            let Some(seq) = self.batch.seqs.get_mut(&id) else { continue };
            let own = seq.blocks.drop_local();
            seq.life = Life::SwappedOut;
            seq.admit_by_ms = self.cx.now_ms + ADMISSION_DEADLINE_MS;
            self.cx.memory.rm.free(id, &own);
            self.batch.sched.set_lost(id, seq.blocks.lost());
            self.batch.counts.offloads += 1;
            // The memory is for those that are short of it.
            for seq in self.batch.seqs.values_mut().filter(|s| matches!(s.need(), Some(Need::RetryAt(_)))) {
                seq.set_need(Need::Met);
            }
        }
    }

    /// Swapped-out sequences go on, the oldest first, when there is room and nobody is short; they fail when there was none
    /// for too long.
    pub(crate) fn swap_in(&mut self) {
        if !self.batch.seqs.values().any(Sequence::is_swapped_out) {
            return;
        }
        let order: Vec<SeqId> = self.batch.sched.running().collect();
        let mut room = self.cx.memory.rm.available();
        for id in order {
            let Some(seq) = self.batch.seqs.get_mut(&id) else { continue };
            match seq.life {
                Life::SwappedOut => {}
                Life::Running(Need::Met) | Life::Leaving => continue,
                // One that waits for memory goes before those that are swapped out.
                _ => {
                    room = 0;
                    continue;
                }
            }
            let needed = seq.blocks.lost_blocks() + seq.blocks.shortfall(seq.len()) + GROWTH_BLOCKS;
            if needed <= room {
                self.batch.due.touch();
                seq.set_need(Need::Met);
                room -= needed;
                seq.restore_by_ms = Some(self.cx.now_ms + RESTORE_DEADLINE_MS);
            } else if seq.admit_by_ms > self.cx.now_ms {
                self.batch.due.wake_at(seq.admit_by_ms);
            } else {
                let message = format!(
                    "its KV was moved to host memory and there was no room for {} s",
                    ADMISSION_DEADLINE_MS / 1000
                );
                self.fail(id, RequestError::Unavailable(message));
            }
        }
    }
}
