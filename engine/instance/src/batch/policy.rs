//! Policy: which sequences are admitted, preempted or swapped out, and when. Decisions without effects.
//!
//! Rules:
//! * admission is first come first served; the pool's oldest waiting pool-sized request goes before all younger ones;
//! * running sequences grow before anything is admitted: some blocks are kept free for growth;
//! * the oldest running sequence always advances: it is preempted only if no other one can be;
//! * the preemption victim is the one with the fewest tokens to recompute; the youngest is swapped out instead, if that
//!   is cheaper.

use lagoon_protocol::TierRequest;
use lagoon_types::limits::{ADMISSION_RETRY_MAX_MS, ADMISSION_RETRY_MS, GROWTH_BLOCKS};
use lagoon_types::{InstanceId, SeqId};

/// Misses after which a sequence that the whole pool cannot hold fails (some ten seconds).
const OUTGROWN_MISSES: u32 = 10;
/// Growth reserve at most: one of so many of this instance's blocks.
const GROWTH_RESERVE_SHARE: u32 = 16;
/// Longest recompute, in microseconds, for which a sequence is preempted at once.
const LONG_RECOMPUTE_US: f64 = 500_000.0;
/// Fixed time of a swap, in microseconds: the negotiation, and the waits before and after.
const SWAP_OVERHEAD_US: f64 = 20_000.0;

/// rBlocks kept free for the growth of running sequences: [`GROWTH_BLOCKS`] each, up to a share of all. Without them
/// admissions make running sequences borrow every block, wait or be preempted.
pub(super) fn growth_reserve(running: usize, blocks_total: u32) -> u32 {
    let running = u32::try_from(running).unwrap_or(u32::MAX);
    running.saturating_mul(GROWTH_BLOCKS).min(blocks_total / GROWTH_RESERVE_SHARE)
}

/// Whether a request from `since_ms` waits until an older oldest waiting pool-sized request, of another instance, has
/// its memory.
pub(super) fn gives_way(since_ms: u64, oldest: Option<(InstanceId, u64)>, me: Option<InstanceId>) -> bool {
    oldest.is_some_and(|(debtor, oldest_ms)| Some(debtor) != me && oldest_ms < since_ms)
}

/// Whether a waiting sequence that needs `needed` rBlocks of a pool of `capacity` fails.
pub(super) fn is_outgrown(needed: u32, capacity: u64, misses: u32) -> bool {
    u64::from(needed) > capacity && has_waited_enough(misses)
}

/// Whether there were so many misses that a pool which is too small is not waited for.
pub(super) fn has_waited_enough(misses: u32) -> bool {
    misses >= OUTGROWN_MISSES
}

/// Milliseconds until the next attempt to get memory. They grow with every miss and differ between instances and
/// sequences, so that two which hold memory that the other needs do not retry in step for ever.
pub(super) fn retry_pause_ms(incarnation: u64, seq: SeqId, misses: u32) -> u64 {
    let longest = (ADMISSION_RETRY_MS << misses.min(10)).min(ADMISSION_RETRY_MAX_MS);
    let salt = incarnation ^ seq.0.rotate_left(32) ^ u64::from(misses + 1).rotate_left(48);
    let spread = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    longest / 2 + spread % (longest / 2 + 1)
}

/// rBlocks and tier that a running sequence short of `shortfall` rBlocks asks creditors for. Host memory is the last
/// resort: asked for only after a request for more than the shortfall, in device memory, failed (`frugal`).
pub(super) fn growth_request(frugal: bool, shortfall: u32) -> (u32, TierRequest) {
    if frugal { (shortfall, TierRequest::Any) } else { (shortfall.max(GROWTH_BLOCKS), TierRequest::DeviceOnly) }
}

/// A running sequence as a candidate for preemption.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) seq: SeqId,
    /// Tokens to recompute if it is preempted.
    pub(super) recompute_tokens: u32,
    /// Whether it has rBlocks here, is not ending and is not frozen by DGFM.
    pub(super) preemptible: bool,
}

/// The sequence to preempt, of those running in order of admission: the one with the fewest tokens to recompute, the
/// youngest of equals; never the oldest. So the oldest always advances, and a long sequence is not recomputed for a
/// short one.
pub(super) fn victim(running: impl Iterator<Item = Candidate>) -> Option<SeqId> {
    let mut found: Option<Candidate> = None;
    for next in running.skip(1).filter(|candidate| candidate.preemptible) {
        if found.is_none_or(|best| next.recompute_tokens <= best.recompute_tokens) {
            found = Some(next);
        }
    }
    found.map(|candidate| candidate.seq)
}

/// Whether recomputing takes so long that a sequence which cannot grow waits instead while others advance.
pub(super) fn is_long_recompute(recompute_us: f64) -> bool {
    recompute_us > LONG_RECOMPUTE_US
}

/// Whether moving `bytes` out and back takes less time than recomputing. `row_us` 0 (not measured yet) counts as fast.
pub(super) fn swap_is_cheaper(bytes: f64, bytes_per_s: f64, recompute_tokens: u32, row_us: f64) -> bool {
    let swap_us = SWAP_OVERHEAD_US + 2.0 * bytes / bytes_per_s * 1e6;
    f64::from(recompute_tokens) * row_us > swap_us
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(seq: u64, recompute_tokens: u32, preemptible: bool) -> Candidate {
        Candidate { seq: SeqId(seq), recompute_tokens, preemptible }
    }

    #[test]
    fn the_victim_is_recomputed_soonest_and_never_the_oldest() {
        let of = |candidates: &[Candidate]| victim(candidates.iter().copied()).map(|seq| seq.0);
        assert_eq!(of(&[candidate(1, 1, true)]), None);
        assert_eq!(of(&[candidate(1, 1, true), candidate(2, 9, true), candidate(3, 5, true)]), Some(3));
        assert_eq!(of(&[candidate(1, 1, true), candidate(2, 5, true), candidate(3, 5, true)]), Some(3), "the youngest");
        assert_eq!(of(&[candidate(1, 1, true), candidate(2, 9, true), candidate(3, 5, false)]), Some(2));
    }

    #[test]
    fn pauses_grow_and_differ() {
        let pause = |seq, misses| retry_pause_ms(7, SeqId(seq), misses);
        assert!((0..40).all(|misses| pause(1, misses) <= ADMISSION_RETRY_MAX_MS));
        assert!(pause(1, 30) >= ADMISSION_RETRY_MAX_MS / 2 && pause(1, 0) <= ADMISSION_RETRY_MS);
        assert!((0..20).any(|seq| pause(seq, 30) != pause(seq + 1, 30)));
    }

    #[test]
    fn growth_is_kept_free_within_a_share() {
        assert_eq!(growth_reserve(0, 1_600), 0);
        assert_eq!(growth_reserve(1, 1_600), GROWTH_BLOCKS);
        assert_eq!(growth_reserve(1_000, 1_600), 100);
    }

    #[test]
    fn only_younger_requests_give_way_to_another_instances() {
        let oldest = Some((InstanceId(2), 100));
        assert!(gives_way(101, oldest, Some(InstanceId(1))));
        assert!(!gives_way(100, oldest, Some(InstanceId(1))) && !gives_way(101, oldest, Some(InstanceId(2))));
        assert!(!gives_way(101, None, Some(InstanceId(1))));
    }

    #[test]
    fn a_long_sequence_is_swapped_and_a_short_one_recomputed() {
        assert!(swap_is_cheaper(1e6, 1e9, 1_000, 50.0));
        assert!(!swap_is_cheaper(1e6, 1e9, 400, 50.0), "the overhead");
        assert!(!swap_is_cheaper(2e7, 1e9, 1_000, 50.0), "out and home again");
        assert!(!swap_is_cheaper(1e6, 1e9, 1_000_000, 0.0), "nothing was measured");
    }
}
