//! Policy: which sequences are admitted, preempted or swapped out, and when. Decisions without effects.
//!
//! Rules:
//! * admission is first come first served; the pool's oldest waiting pool-sized request goes before all younger ones;
//! * a pushed prompt overtakes a head that waits for other instances' memory; a sequence that has all its memory is admitted
//!   at any place of the queue, so that it does not hold memory for which the head waits;
//! * running sequences grow before anything is admitted: some blocks are kept free for growth;
//! * the oldest running sequence always advances: it is preempted only if no other one can be;
//! * the preemption victim is the one with the fewest tokens to recompute; the youngest is swapped out instead, if that
//!   is cheaper; if a step overfilled the device, the victim is the youngest of that step;
//! * a request that could start whole elsewhere goes back to its gateway, and does not borrow before;
//! * several instances compute a prompt that takes one long, where their steps have rows for it;
//! * prompts of both micro-batches share the rows of one step.
//!
//! Callers gather the candidates and carry out the decision.

use super::sequence::{Life, Need};
use crate::cx::standing::Lending;
use lagoon_cluster::perf::whole;
use lagoon_protocol::TierRequest;
use lagoon_types::limits::{
    ADMISSION_RETRY_MAX_MS, ADMISSION_RETRY_MS, GROWTH_BLOCKS, HAND_BACK_MS, JOINT_ALONE_MS, JOINT_BUSY_PERCENT,
    SWAP_OUT_BLOCKS_MIN,
};
use lagoon_types::{InstanceId, SeqId};
use std::iter;
use std::ops::Range;

/// Misses after which a sequence that the whole pool cannot hold fails (some ten seconds).
const OUTGROWN_MISSES: u32 = 10;
/// Growth reserve at most: one of so many of this instance's blocks.
const GROWTH_RESERVE_SHARE: u32 = 16;
/// Longest recompute, in microseconds, for which a sequence is preempted at once.
const LONG_RECOMPUTE_US: f64 = 500_000.0;
/// Fixed time of a swap, in microseconds: the negotiation, and the waits before and after.
const SWAP_OVERHEAD_US: f64 = 20_000.0;
/// Fixed time of a load from a tier of the prefix cache, in microseconds (docs/adr/0037).
const LOAD_OVERHEAD_US: f64 = 1_000.0;

/// Rows of prompts that a step has in any case under a latency target: a prompt always advances.
const CHUNK_ROWS_MIN: u32 = 32;

/// rBlocks kept free for the growth of running sequences: [`GROWTH_BLOCKS`] each, up to a share of all. Without them
/// admissions make running sequences borrow every block, wait or be preempted.
pub(super) fn growth_reserve(running: usize, blocks_total: u32) -> u32 {
    let running = u32::try_from(running).unwrap_or(u32::MAX);
    running.saturating_mul(GROWTH_BLOCKS).min(blocks_total / GROWTH_RESERVE_SHARE)
}

/// rBlocks that a sequence short of `short` ones for its drafts gets: of the `free` ones, none of the reserve for tokens.
pub(super) fn growth_ahead(short: u32, free: u32, reserve: u32) -> u32 {
    short.min(free.saturating_sub(reserve))
}

/// Whether a request from `since_ms` waits until an older oldest waiting pool-sized request, of another instance, has
/// its memory.
pub(super) fn gives_way(since_ms: u64, oldest: Option<(InstanceId, u64)>, me: Option<InstanceId>) -> bool {
    oldest.is_some_and(|(debtor, oldest_ms)| Some(debtor) != me && oldest_ms < since_ms)
}

/// Whether a request needs more memory than this instance has.
pub(super) fn is_pool_sized(needed: u32, blocks_total: u32) -> bool {
    needed > blocks_total
}

/// Whether pushed prompts that fit here overtake the head of the queue: it waits for other instances' memory (maybe for the
/// decode worker's that the prompt holds), being pool-sized or younger than the oldest waiting pool-sized request.
pub(super) fn may_overtake(head_needed: u32, blocks_total: u32, head_gives_way: bool) -> bool {
    is_pool_sized(head_needed, blocks_total) || head_gives_way
}

/// How many more sequences may run.
pub(super) fn free_places(running: usize, limit: usize) -> usize {
    limit.saturating_sub(running)
}

/// Whether a sequence tries to get memory now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    Now,
    /// At this time, in milliseconds.
    At(u64),
    /// No: it borrows already, or takes no memory in its state.
    No,
}

/// Whether a sequence with this need tries to get memory now.
pub(super) fn attempt(need: Option<Need>, now_ms: u64) -> Attempt {
    match need {
        Some(Need::RetryAt(at_ms)) if at_ms > now_ms => Attempt::At(at_ms),
        Some(Need::Met | Need::RetryAt(_)) => Attempt::Now,
        Some(Need::Borrowing(_) | Need::Joining) | None => Attempt::No,
    }
}

/// Sources of a waiting sequence's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sources {
    /// All of it from here.
    Here,
    /// The oldest `first` and the newest `last` rBlocks from this instance, those between from creditors.
    Split { first: u32, last: u32 },
    /// All of its KV must be local, and too few blocks are free.
    Retry,
}

/// Where the `needed` rBlocks of a waiting sequence come from, with `room` free ones here. Shared prefix blocks
/// (`shareable`) need no memory, unless blocks are borrowed. `whole`: a prompt for a decode worker, which
/// lies here as a whole.
///
/// The newest rBlocks are local, so that decoding grows in local memory. `local_first`: rows ask creditors only from the first borrowed
/// rBlock on, so most local ones come before it. Else creditors attend for all rows, beside this instance.
pub(super) fn sources(needed: u32, room: u32, shareable: u32, whole: bool, local_first: bool) -> Sources {
    if needed <= room + shareable {
        Sources::Here
    } else if whole {
        Sources::Retry
    } else {
        let last = if local_first { room.min(GROWTH_BLOCKS) } else { room };
        Sources::Split { first: room - last, last }
    }
}

/// Action for a sequence that is short of blocks, or whose borrow failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Short {
    Borrow,
    /// It tries again after a pause.
    Retry,
    /// A waiting sequence fails: waiting longer cannot get it memory.
    Fail,
    /// Another running sequence (or the same one) is preempted for it.
    Preempt,
}

/// Action for a waiting sequence that must borrow. Without a gManager it retries until its deadline; it fails if it is
/// pool-sized and lending is closed although this instance was in a pool (`registered_once`).
pub(super) fn admission_short(lending: Lending, registered_once: bool, pool_sized: bool) -> Short {
    match lending {
        Lending::Open => Short::Borrow,
        Lending::Closed if registered_once && pool_sized => Short::Fail,
        Lending::Away | Lending::Closed => Short::Retry,
    }
}

/// Action for a running sequence that is short of blocks: it borrows, waits for the gManager, or preempts.
pub(super) fn growth_short(lending: Lending) -> Short {
    match lending {
        Lending::Open => Short::Borrow,
        Lending::Away => Short::Retry,
        Lending::Closed => Short::Preempt,
    }
}

/// Action for a running sequence that must borrow for lost blocks. After its deadline (`late`) it waits no longer for the
/// gManager.
pub(super) fn restore_short(lending: Lending, late: bool) -> Short {
    match lending {
        Lending::Away if late => Short::Preempt,
        lending => growth_short(lending),
    }
}

/// Action for a running sequence after a failed borrow for its lost blocks.
pub(super) fn restore_failed(late: bool, pool_too_small: bool) -> Short {
    if late || pool_too_small { Short::Preempt } else { Short::Retry }
}

/// Whether lent blocks that debtors do not return are revoked for a running sequence that is short: only if it cannot
/// borrow.
pub(super) fn revokes(lending: Lending) -> bool {
    lending != Lending::Open
}

/// Action for a running sequence after a failed borrow for its growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrowthFailed {
    /// It asks for its shortfall only, from device or host memory.
    AskFrugally,
    /// Lent blocks are recalled, and revoked at the deadline.
    Recall,
    Preempt,
}

/// Decides after a failed borrow for growth. The last request was for more than the shortfall unless `frugal`; `recallable`
/// lent blocks may be recalled, because growth goes before lending.
pub(super) fn growth_failed(frugal: bool, recallable: u32) -> GrowthFailed {
    match (frugal, recallable) {
        (false, _) => GrowthFailed::AskFrugally,
        (true, 1..) => GrowthFailed::Recall,
        (true, 0) => GrowthFailed::Preempt,
    }
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
/// Before a sequence borrows host memory, a younger one is swapped out to it.
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

/// Time of a preemption for a sequence that can neither grow nor borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preemption {
    /// It waits until another sequence ends.
    Wait,
    /// The victim is preempted when its step ends.
    AfterStep,
    Now,
}

/// When the victim is preempted: never inside a step, and not while recomputing it takes long and another sequence advances.
pub(super) fn preemption(recompute_us: f64, another_advances: bool, victim_in_step: bool) -> Preemption {
    match (recompute_us > LONG_RECOMPUTE_US && another_advances, victim_in_step) {
        (true, _) => Preemption::Wait,
        (false, true) => Preemption::AfterStep,
        (false, false) => Preemption::Now,
    }
}

/// The sequence to preempt after its step overfilled the device although blocks were free: the youngest of the step's
/// that still runs. The step's sequences come in its plan's order, oldest first. The oldest may be the victim: if it is
/// alone in the step, nothing else makes the step smaller.
pub(super) fn device_full_victim(mut step: impl DoubleEndedIterator<Item = (SeqId, bool)>) -> Option<SeqId> {
    step.rfind(|(_, running)| *running).map(|(seq, _)| seq)
}

/// A running sequence as a candidate for swap out.
#[derive(Clone, Copy, Debug)]
pub(super) struct SwapCandidate {
    pub(super) seq: SeqId,
    /// Whole blocks that would move.
    pub(super) blocks: u32,
    /// Those among them that no other sequence shares.
    pub(super) alone: u32,
    /// Whether its blocks can move now: it neither borrows, swaps nor moves, has lost nothing, and has no windowed KV
    /// that would be left behind.
    pub(super) movable: bool,
    /// It is not swapped out before this time, in milliseconds.
    pub(super) after_ms: u64,
    /// Whether moving takes less time than recomputing: see [`swap_is_cheaper`].
    pub(super) cheaper: bool,
}

/// The sequence to swap out so that `id` can grow, and its blocks that move: the youngest that may be, admitted after
/// `id`, or `id` itself. `running` comes youngest first.
pub(super) fn swap_victim(
    running: impl Iterator<Item = SwapCandidate>,
    id: SeqId,
    now_ms: u64,
) -> Option<(SeqId, u32)> {
    let may = |c: &SwapCandidate| c.movable && c.alone >= SWAP_OUT_BLOCKS_MIN && c.after_ms <= now_ms && c.cheaper;
    for candidate in running {
        if may(&candidate) {
            return Some((candidate.seq, candidate.blocks));
        }
        if candidate.seq == id {
            return None;
        }
    }
    None
}

/// A running sequence as swap in looks at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SwapInCandidate {
    pub(super) seq: SeqId,
    pub(super) life: Life,
    /// rBlocks that it needs here to go on.
    pub(super) needed: u32,
    /// Its deadline, in milliseconds.
    pub(super) by_ms: u64,
}

/// Decision about a swapped-out sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SwapIn {
    /// It swaps in.
    Now,
    /// It waits for room until this time, in milliseconds.
    Until(u64),
    /// Its deadline has passed: it fails.
    Late,
}

/// Decides about every swapped-out sequence, oldest first, with `room` free rBlocks. A running sequence that waits for
/// memory goes before those after it: they get no room.
pub(super) fn swap_ins(
    running: impl Iterator<Item = SwapInCandidate>,
    mut room: u32,
    now_ms: u64,
) -> Vec<(SeqId, SwapIn)> {
    let mut decided = Vec::new();
    for SwapInCandidate { seq, life, needed, by_ms } in running {
        match life {
            Life::SwappedOut if needed <= room => {
                room -= needed;
                decided.push((seq, SwapIn::Now));
            }
            Life::SwappedOut if by_ms > now_ms => decided.push((seq, SwapIn::Until(by_ms))),
            Life::SwappedOut => decided.push((seq, SwapIn::Late)),
            Life::Running(Need::Met) | Life::Leaving => {}
            _ => room = 0,
        }
    }
    decided
}

/// Whether moving `bytes` out and back takes less time than recomputing. `row_us` 0 (not measured yet) counts as fast.
pub(super) fn swap_is_cheaper(bytes: f64, bytes_per_s: f64, recompute_tokens: u32, row_us: f64) -> bool {
    let swap_us = SWAP_OVERHEAD_US + 2.0 * bytes / bytes_per_s * 1e6;
    f64::from(recompute_tokens) * row_us > swap_us
}

/// Whether `tokens` come sooner from tiers of the prefix cache, in `load_us` beside the fixed time, than by recomputation.
/// `row_us` 0 (not measured yet) counts as slow.
pub(super) fn load_is_cheaper(load_us: f64, tokens: u32, row_us: f64) -> bool {
    row_us <= 0.0 || f64::from(tokens) * row_us > LOAD_OVERHEAD_US + load_us
}

/// A waiting request, as its hand-back looks at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct HandBack {
    /// Whether its gateway takes it back.
    pub(super) may_hand_back: bool,
    /// Whether it was computed, or holds or borrows memory.
    pub(super) has_begun: bool,
    /// rBlocks that it lacks; a pool-sized request stays, as the pool keeps memory for it where it waits.
    pub(super) needed: u32,
}

impl HandBack {
    fn is_possible(self, blocks_total: u32) -> bool {
        self.may_hand_back && !self.has_begun && !is_pool_sized(self.needed, blocks_total)
    }
}

/// Whether a request that has waited for `waited_ms` goes back to its gateway. A draining instance gives back at once.
pub(super) fn hands_back(request: HandBack, blocks_total: u32, waited_ms: u64, draining: bool) -> bool {
    (draining || waited_ms >= HAND_BACK_MS) && request.is_possible(blocks_total)
}

/// The borrow guard: whether a waiting request that lacks memory here waits, rather than borrow. It does while its gateway takes it
/// back and may find an instance that holds it whole: two micro-batches read the weights twice, and creditors' steps wait for each
/// other. To mapped KV (`maps_all`) this device attends itself, as to its own.
pub(super) fn waits_for_whole(request: HandBack, blocks_total: u32, maps_all: bool) -> bool {
    !maps_all && request.is_possible(blocks_total)
}

/// This instance, as joint prefill looks at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct JointHere {
    /// Whether `--prefill-instances` allows it.
    pub(super) is_on: bool,
    /// Whether other instances' steps can be followed in its KV: not in windowed KV, which one instance keeps in order, nor in address
    /// rows, whose blocks have one owner.
    pub(super) is_followed: bool,
    /// See [`free_places`].
    pub(super) free_places: usize,
}

/// A waiting request, as joint prefill looks at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LongPrompt {
    /// Whether it is a request for an answer, for this instance, without what needs all positions here.
    pub(super) is_plain: bool,
    /// Whether members were asked before.
    pub(super) asked: bool,
    /// Whether it has KV elsewhere, lost or beside its table.
    pub(super) is_elsewhere: bool,
    pub(super) tokens: u32,
}

/// Whether a prompt may be computed by several instances, before its cached prefix is known.
pub(super) fn may_ask_members(here: JointHere, prompt: LongPrompt, tokens_min: u32) -> bool {
    let takes = here.is_on && here.is_followed && here.free_places > 0;
    takes && prompt.is_plain && !prompt.asked && !prompt.is_elsewhere && prompt.tokens >= tokens_min
}

/// Whether a prompt of which `left` tokens are to be computed, in `alone_ms` here, is given to several instances. `forced`: it is not
/// asked whether that pays.
pub(super) fn suits_members(left: u32, tokens_min: u32, alone_ms: f64, forced: bool) -> bool {
    left >= tokens_min && (forced || alone_ms >= f64::from(JOINT_ALONE_MS))
}

/// Whether so few sequences decode here that most of a step's rows are left for prompts of several instances: narrow stripes cost more
/// than they save.
pub(super) fn has_rows_for_others(rows: u32, step_rows: u32) -> bool {
    rows >= step_rows / 2
}

/// Why an instance computes no part of another one's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotJoined {
    #[error("joint prefill is off here (--prefill-instances 1)")]
    Off,
    #[error("this instance takes no requests")]
    NoRequests,
    #[error("its KV lies where other instances' steps cannot be followed")]
    NotFollowed,
    #[error("its batch is full")]
    Full,
    #[error("the sequences that decode here leave its steps too few rows")]
    FewRows,
    #[error("{0} tokens of prompts wait here")]
    Busy(u64),
    #[error("it has room for {room} rBlocks, not for {needed}")]
    NoRoom { room: u32, needed: u32 },
}

/// What an instance that is asked to compute a part of another one's prompt has to do already.
#[derive(Clone, Copy, Debug)]
pub(super) struct JointLoad {
    pub(super) takes_requests: bool,
    /// See [`has_rows_for_others`].
    pub(super) has_rows: bool,
    /// Tokens of prompts that are not computed yet.
    pub(super) prompt_tokens: u64,
    /// Free rBlocks.
    pub(super) room: u32,
}

/// Why an instance computes no part of another one's prompt; `None` if it would, with `needed` rBlocks of its memory. All members wait for
/// the one that has more to compute than the others.
pub(super) fn refuses_to_join(here: JointHere, load: JointLoad, needed: u32, block_tokens: u32) -> Option<NotJoined> {
    let JointLoad { takes_requests, has_rows, prompt_tokens, room } = load;
    let busy_tokens = u64::from(needed) * u64::from(block_tokens) * JOINT_BUSY_PERCENT / 100;
    let reasons = [
        (!here.is_on, NotJoined::Off),
        (!takes_requests, NotJoined::NoRequests),
        (!here.is_followed, NotJoined::NotFollowed),
        (here.free_places == 0, NotJoined::Full),
        (!has_rows, NotJoined::FewRows),
        (prompt_tokens > busy_tokens, NotJoined::Busy(prompt_tokens)),
        (needed > room, NotJoined::NoRoom { room, needed }),
    ];
    reasons.into_iter().find(|(holds, _)| *holds).map(|(_, why)| why)
}

/// Time of a row of a prompt, in microseconds: its own, and that of its attention to one token before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RowTime {
    pub(super) row_us: f64,
    pub(super) key_us: f64,
}

impl RowTime {
    /// Rows from position `start` on within `us`: r with r·(row + key·(start + r/2)) = us.
    fn rows(self, us: f64, start: u32) -> f64 {
        let first_us = self.row_us + self.key_us * f64::from(start);
        2.0 * us / (first_us + (first_us * first_us + 2.0 * self.key_us * us).sqrt())
    }

    /// Time of the rows at these positions.
    pub(super) fn us(self, rows: Range<u32>) -> f64 {
        let len = f64::from(rows.end - rows.start);
        len * (self.row_us + self.key_us * (f64::from(rows.start) + len / 2.0))
    }
}

/// Rows of prompts within `us`, in the order in which steps take them: of the positions that each is to compute, then of a new prompt.
/// All if their time was not measured.
pub(super) fn rows_within(us: f64, time: RowTime, prompts: impl IntoIterator<Item = Range<u32>>) -> u32 {
    if !(time.row_us.is_finite() && time.row_us > 0.0 && time.key_us.is_finite()) {
        return u32::MAX;
    }
    let (mut left_us, mut rows) = (us.max(0.0), 0);
    for due in prompts.into_iter().chain(iter::once(0..u32::MAX)) {
        let wanted = due.end - due.start;
        let fit = u32::try_from(whole(time.rows(left_us, due.start))).unwrap_or(u32::MAX);
        rows = fit.min(wanted).saturating_add(rows);
        if fit <= wanted {
            break;
        }
        left_us = (left_us - time.us(due)).max(0.0);
    }
    rows.max(CHUNK_ROWS_MIN)
}

/// Rows of prompts in the next step of a micro-batch, of the `rows` of a step that decoding leaves: all if the other micro-batch wants
/// none, else half or what that leaves, and in any case none that are `in_flight` in its step. Of a single row each has one: a prompt
/// always advances.
pub(super) fn prompt_rows(rows: u32, other_wants: u32, in_flight: u32) -> u32 {
    if rows < 2 {
        return 1;
    }
    rows.saturating_sub(other_wants).max(rows / 2).min(rows.saturating_sub(in_flight))
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
    fn a_long_recompute_waits_while_another_sequence_advances() {
        let long = LONG_RECOMPUTE_US + 1.0;
        assert_eq!(preemption(long, true, false), Preemption::Wait);
        assert_eq!(preemption(long, true, true), Preemption::Wait);
        assert_eq!(preemption(long, false, false), Preemption::Now);
        assert_eq!(preemption(LONG_RECOMPUTE_US, true, false), Preemption::Now);
        assert_eq!(preemption(0.0, true, true), Preemption::AfterStep);
    }

    #[test]
    fn a_full_device_preempts_the_youngest_of_the_step_that_still_runs() {
        let of = |step: &[(u64, bool)]| device_full_victim(step.iter().map(|(seq, runs)| (SeqId(*seq), *runs)));
        assert_eq!(of(&[(1, true), (2, true), (3, false)]), Some(SeqId(2)));
        assert_eq!(of(&[(1, true)]), Some(SeqId(1)), "alone in the step");
        assert_eq!(of(&[(1, false)]), None);
    }

    #[test]
    fn the_youngest_is_swapped_out_and_none_older_than_the_one_that_grows() {
        let movable = |seq| SwapCandidate {
            seq: SeqId(seq),
            blocks: SWAP_OUT_BLOCKS_MIN + 3,
            alone: SWAP_OUT_BLOCKS_MIN,
            movable: true,
            after_ms: 10,
            cheaper: true,
        };
        let of = |candidates: &[SwapCandidate]| {
            swap_victim(candidates.iter().copied(), SeqId(2), 10).map(|(seq, blocks)| (seq.0, blocks))
        };
        let blocks = SWAP_OUT_BLOCKS_MIN + 3;
        assert_eq!(of(&[movable(3), movable(2), movable(1)]), Some((3, blocks)));
        for stays in [
            SwapCandidate { movable: false, ..movable(3) },
            SwapCandidate { alone: SWAP_OUT_BLOCKS_MIN - 1, ..movable(3) },
            SwapCandidate { after_ms: 11, ..movable(3) },
            SwapCandidate { cheaper: false, ..movable(3) },
        ] {
            assert_eq!(of(&[stays, movable(2), movable(1)]), Some((2, blocks)), "itself");
            assert_eq!(of(&[stays, SwapCandidate { cheaper: false, ..movable(2) }, movable(1)]), None);
        }
    }

    #[test]
    fn swapped_out_sequences_swap_in_oldest_first_and_behind_those_that_wait() {
        let of = |seq, life, needed| SwapInCandidate { seq: SeqId(seq), life, needed, by_ms: 100 };
        let (out, runs, waits) = (Life::SwappedOut, Life::Running(Need::Met), Life::Running(Need::RetryAt(5)));
        let decided = |candidates: &[SwapInCandidate], now_ms| swap_ins(candidates.iter().copied(), 10, now_ms);
        let three = [of(1, runs, 0), of(2, out, 6), of(3, out, 6), of(4, out, 4)];
        let in_turn = [(SeqId(2), SwapIn::Now), (SeqId(3), SwapIn::Until(100)), (SeqId(4), SwapIn::Now)];
        assert_eq!(decided(&three, 99), in_turn);
        assert_eq!(decided(&three, 100)[1], (SeqId(3), SwapIn::Late));
        assert_eq!(decided(&[of(1, waits, 0), of(2, out, 1)], 0), [(SeqId(2), SwapIn::Until(100))]);
        assert_eq!(decided(&[of(1, out, 1), of(2, waits, 0)], 0), [(SeqId(1), SwapIn::Now)]);
    }

    #[test]
    fn pushed_prompts_overtake_a_head_that_waits_for_memory_elsewhere() {
        assert!(may_overtake(11, 10, false) && may_overtake(1, 10, true));
        assert!(!may_overtake(10, 10, false));
        assert_eq!((free_places(3, 4), free_places(4, 4), free_places(5, 4)), (1, 0, 0));
    }

    #[test]
    fn a_sequence_tries_when_its_pause_is_over_and_not_while_it_borrows() {
        assert_eq!(attempt(Some(Need::Met), 5), Attempt::Now);
        assert_eq!(attempt(Some(Need::RetryAt(5)), 5), Attempt::Now);
        assert_eq!(attempt(Some(Need::RetryAt(6)), 5), Attempt::At(6));
        assert_eq!(attempt(None, 5), Attempt::No);
    }

    #[test]
    fn the_newest_blocks_come_from_here_and_the_oldest_where_shipping_is_slow() {
        for local_first in [false, true] {
            assert_eq!(sources(4, 4, 0, false, local_first), Sources::Here);
            assert_eq!(sources(6, 4, 2, true, local_first), Sources::Here);
            assert_eq!(sources(7, 4, 2, true, local_first), Sources::Retry);
            assert_eq!(sources(7, 1, 0, false, local_first), Sources::Split { first: 0, last: 1 });
        }
        assert_eq!(
            sources(7, 4, 2, false, false),
            Sources::Split { first: 0, last: 4 },
            "shared blocks are the oldest"
        );
        assert_eq!(sources(9, 4, 2, false, true), Sources::Split { first: 4 - GROWTH_BLOCKS, last: GROWTH_BLOCKS });
    }

    #[test]
    fn what_cannot_borrow_waits_fails_or_preempts() {
        use Lending::{Away, Closed, Open};
        let all = |of: &dyn Fn(Lending) -> Short| [of(Open), of(Away), of(Closed)];
        assert_eq!(all(&|l| admission_short(l, true, true)), [Short::Borrow, Short::Retry, Short::Fail]);
        assert_eq!(all(&|l| admission_short(l, true, false)), [Short::Borrow, Short::Retry, Short::Retry]);
        assert_eq!(all(&|l| admission_short(l, false, true)), [Short::Borrow, Short::Retry, Short::Retry]);
        assert_eq!(all(&growth_short), [Short::Borrow, Short::Retry, Short::Preempt]);
        assert_eq!(all(&|l| restore_short(l, false)), [Short::Borrow, Short::Retry, Short::Preempt]);
        assert_eq!(all(&|l| restore_short(l, true)), [Short::Borrow, Short::Preempt, Short::Preempt]);
        assert!(!revokes(Open) && revokes(Away) && revokes(Closed));
    }

    #[test]
    fn after_a_failed_borrow_a_smaller_one_a_recall_and_then_preemption() {
        assert_eq!(growth_failed(false, 3), GrowthFailed::AskFrugally);
        assert_eq!(growth_failed(true, 3), GrowthFailed::Recall);
        assert_eq!(growth_failed(true, 0), GrowthFailed::Preempt);
        assert_eq!(growth_request(false, 1), (GROWTH_BLOCKS, TierRequest::DeviceOnly));
        assert_eq!(growth_request(true, 1), (1, TierRequest::Any));
        assert_eq!(restore_failed(false, false), Short::Retry);
        assert_eq!(restore_failed(true, false), Short::Preempt);
        assert_eq!(restore_failed(false, true), Short::Preempt);
    }

    #[test]
    fn growth_is_kept_free_within_a_share() {
        assert_eq!(growth_reserve(0, 1_600), 0);
        assert_eq!(growth_reserve(1, 1_600), GROWTH_BLOCKS);
        assert_eq!(growth_reserve(1_000, 1_600), 100);
    }

    #[test]
    fn drafts_take_no_memory_that_tokens_may_need() {
        assert_eq!(growth_ahead(4, 100, 8), 4);
        assert_eq!((growth_ahead(4, 10, 8), growth_ahead(4, 8, 8), growth_ahead(4, 0, 8)), (2, 0, 0));
    }

    #[test]
    fn only_younger_requests_give_way_to_another_instances() {
        let oldest = Some((InstanceId(2), 100));
        assert!(gives_way(101, oldest, Some(InstanceId(1))));
        assert!(!gives_way(100, oldest, Some(InstanceId(1))) && !gives_way(101, oldest, Some(InstanceId(2))));
        assert!(!gives_way(101, None, Some(InstanceId(1))));
    }

    #[test]
    fn what_has_not_begun_goes_back_and_does_not_borrow_meanwhile() {
        let request = HandBack { may_hand_back: true, has_begun: false, needed: 10 };
        assert!(hands_back(request, 10, HAND_BACK_MS, false) && hands_back(request, 10, 0, true));
        assert!(!hands_back(request, 10, HAND_BACK_MS - 1, false) && waits_for_whole(request, 10, false));
        assert!(!waits_for_whole(request, 10, true), "mapped KV is attended to here");
        for stays in [
            HandBack { may_hand_back: false, ..request },
            HandBack { has_begun: true, ..request },
            HandBack { needed: 11, ..request },
        ] {
            assert!(!hands_back(stays, 10, HAND_BACK_MS, true) && !waits_for_whole(stays, 10, false), "{stays:?}");
        }
    }

    #[test]
    fn a_long_prompt_of_which_nothing_is_elsewhere_suits_members() {
        let here = JointHere { is_on: true, is_followed: true, free_places: 1 };
        let prompt = LongPrompt { is_plain: true, asked: false, is_elsewhere: false, tokens: 100 };
        assert!(may_ask_members(here, prompt, 100));
        for other in [
            JointHere { is_on: false, ..here },
            JointHere { is_followed: false, ..here },
            JointHere { free_places: 0, ..here },
        ] {
            assert!(!may_ask_members(other, prompt, 100), "{other:?}");
        }
        for other in [
            LongPrompt { is_plain: false, ..prompt },
            LongPrompt { asked: true, ..prompt },
            LongPrompt { is_elsewhere: true, ..prompt },
            LongPrompt { tokens: 99, ..prompt },
        ] {
            assert!(!may_ask_members(here, other, 100), "{other:?}");
        }
        let long = f64::from(JOINT_ALONE_MS);
        assert!(suits_members(100, 100, long, false) && suits_members(100, 100, 0.0, true));
        assert!(!suits_members(99, 100, long, true), "most of it is cached");
        assert!(!suits_members(100, 100, long - 1.0, false), "it is computed soon alone");
        assert!(has_rows_for_others(8, 16) && !has_rows_for_others(7, 16));
    }

    #[test]
    fn an_instance_with_other_work_joins_no_prompt() {
        let here = JointHere { is_on: true, is_followed: true, free_places: 1 };
        let load = JointLoad { takes_requests: true, has_rows: true, prompt_tokens: 40, room: 5 };
        assert_eq!(refuses_to_join(here, load, 5, 16), None);
        let of = |load| refuses_to_join(here, load, 5, 16);
        assert_eq!(of(JointLoad { takes_requests: false, ..load }), Some(NotJoined::NoRequests));
        assert_eq!(of(JointLoad { has_rows: false, ..load }), Some(NotJoined::FewRows));
        assert_eq!(of(JointLoad { prompt_tokens: 41, ..load }), Some(NotJoined::Busy(41)), "half of its part");
        assert_eq!(of(JointLoad { room: 4, ..load }), Some(NotJoined::NoRoom { room: 4, needed: 5 }));
        assert_eq!(refuses_to_join(JointHere { is_on: false, ..here }, load, 5, 16), Some(NotJoined::Off));
        assert_eq!(
            refuses_to_join(JointHere { is_followed: false, ..here }, load, 5, 16),
            Some(NotJoined::NotFollowed)
        );
        assert_eq!(refuses_to_join(JointHere { free_places: 0, ..here }, load, 5, 16), Some(NotJoined::Full));
    }

    #[test]
    fn chunks_fill_what_decoding_leaves_under_the_target() {
        let of = |us, row_us| rows_within(us, RowTime { row_us, key_us: 0.0 }, iter::once(0..1_000));
        assert_eq!(of(40_000.0, 100.0), 400);
        assert_eq!(of(1.0, 100.0), CHUNK_ROWS_MIN, "a prompt always advances");
        assert_eq!(of(-40_000.0, 100.0), CHUNK_ROWS_MIN);
        assert_eq!(of(40_000.0, 0.0), u32::MAX, "nothing was measured");
        assert_eq!(of(40_000.0, f64::NAN), u32::MAX);
    }

    #[test]
    fn rows_of_a_deep_context_take_their_attention() {
        let time = RowTime { row_us: 100.0, key_us: 0.01 };
        let of = |prompts: &[(u32, u32)]| rows_within(40_000.0, time, prompts.iter().map(|(start, end)| *start..*end));
        // 390·(100 + 0.01·195) = 39,760; 393·(100 + 0.01·196.5) = 40,072.
        assert_eq!((of(&[]), of(&[(0, 1_000)])), (392, 392));
        // 198·(200 + 0.01·99) = 39,796; 199·(200 + 0.01·99.5) = 39,998; 200 rows take more.
        assert_eq!(of(&[(10_000, 100_000)]), 199);
        assert_eq!(
            of(&[(10_000, 10_050), (0, 1_000)]),
            50 + 295,
            "in turn, the first one's 50 rows take as long as 99"
        );
        assert_eq!(of(&[(10_000, 10_050), (0, 20)]), 50 + 296, "a new prompt goes on");
        assert_eq!(of(&[(900_000, 1_000_000)]), CHUNK_ROWS_MIN);
    }

    #[test]
    fn prompts_of_two_micro_batches_share_the_rows_of_one_step() {
        assert_eq!(prompt_rows(64, 0, 0), 64, "alone");
        assert_eq!(prompt_rows(64, 10, 0), 54, "the other one needs little");
        assert_eq!((prompt_rows(64, 900, 0), prompt_rows(64, 900, 32)), (32, 32));
        assert_eq!(prompt_rows(64, 900, 64), 0, "its step took all before");
        assert_eq!((prompt_rows(1, 900, 1), prompt_rows(0, 0, 0)), (1, 1));
    }

    #[test]
    fn a_long_sequence_is_swapped_and_a_short_one_recomputed() {
        assert!(swap_is_cheaper(1e6, 1e9, 1_000, 50.0));
        assert!(!swap_is_cheaper(1e6, 1e9, 400, 50.0), "the overhead");
        assert!(!swap_is_cheaper(2e7, 1e9, 1_000, 50.0), "out and home again");
        assert!(!swap_is_cheaper(1e6, 1e9, 1_000_000, 0.0), "nothing was measured");
    }
}
