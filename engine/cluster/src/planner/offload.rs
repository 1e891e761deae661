//! Offloads (v2 Algorithm 1): debtors move blocks to creditors where the model predicts more throughput.

use super::round::{Round, movable};
use super::{PlannerConfig, Why};
use crate::perf::BestMove;
use lagoon_types::SeqId;
use std::cmp::Reverse;

/// A candidate request of a debtor in this round.
#[derive(Clone, Copy, Debug)]
struct Choice {
    seq: SeqId,
    /// Blocks that may still be ordered away.
    movable: i64,
}

/// Plans offloads: debtors short of memory first, then by ascending batch. Equals rotate between rounds, so that bounded
/// rounds reach all.
pub(super) fn plan(round: &mut Round<'_>, held: &dyn Fn(usize, SeqId) -> bool) {
    let count = round.nodes.len();
    let turn = usize::try_from(round.view.now_ms % count.max(1) as u64).unwrap_or(0);
    let rank =
        |at: usize| (round.nodes[at].deficit() <= 0, round.nodes[at].view.load.batch, (at + count - turn) % count);
    let mut debtors: Vec<_> = (0..count).filter(|at| is_debtor(round, *at)).map(|at| (rank(at), at)).collect();
    debtors.sort_unstable();
    for (_, debtor) in debtors {
        if round.is_full() || round.pairs_left == 0 {
            return;
        }
        offload(round, debtor, held);
    }
}

/// Whether Algorithm 1 considers an instance as debtor: its batch is small, or its memory is short. An instance that lends
/// is no debtor: it reclaims first.
fn is_debtor(round: &Round<'_>, at: usize) -> bool {
    let node = &round.nodes[at];
    let runs = node.view.role.serves() && node.view.load.batch > 0;
    if !runs || node.view.draining || node.is_left_alone() || node.lends() {
        return false;
    }
    node.deficit() > 0 || (node.view.load.batch <= round.config.batch_small && node.attends(round.config.gain_min))
}

fn offload(round: &mut Round<'_>, debtor: usize, held: &dyn Fn(usize, SeqId) -> bool) {
    // An earlier debtor of this round may have made it a creditor.
    if round.nodes[debtor].lends() {
        return;
    }
    let mut choices = longest(round, debtor, held);
    for _ in 0..round.config.debtor_orders_max {
        if round.is_full() {
            return;
        }
        // The longest first (fewest sequences depend on others), then the next one.
        let creditors = round.creditors_for(debtor);
        let best = |round: &mut Round<'_>, at: usize| best_creditor(round, debtor, choices[at], &creditors);
        let found = (0..choices.len()).find_map(|at| best(round, at).map(|b| (at, b)));
        let Some((at, (creditor, best))) = found else { return };
        let choice = choices[at];
        let ordered = round.order((debtor, choice.seq), (debtor, creditor), best.blocks, Why::Offload, best.gain);
        choices[at].movable -= ordered;
        if ordered < best.blocks || choices[at].movable == 0 {
            choices.remove(at);
        }
    }
}

/// The `requests_max` requests with most movable blocks, longest first, in one pass.
fn longest(round: &Round<'_>, debtor: usize, held: &dyn Fn(usize, SeqId) -> bool) -> Vec<Choice> {
    let mut top: Vec<(Reverse<i64>, SeqId)> = Vec::new();
    let limit = round.config.requests_max;
    let requests = &round.nodes[debtor].view.requests;
    for (seq, request) in requests.iter().filter(|(_, r)| !r.moving && movable(r) > 0) {
        let entry = (Reverse(movable(request)), *seq);
        if (top.len() < limit || top.last().is_some_and(|last| entry < *last))
            && !held(debtor, *seq)
            && !round.is_ordered(debtor, *seq)
        {
            top.insert(top.partition_point(|t| *t < entry), entry);
            top.truncate(limit);
        }
    }
    top.into_iter().map(|(Reverse(movable), seq)| Choice { seq, movable }).collect()
}

/// The creditor, of those worth comparing, at which the best number of blocks gains most.
fn best_creditor(
    round: &mut Round<'_>,
    debtor: usize,
    choice: Choice,
    creditors: &[usize],
) -> Option<(usize, BestMove)> {
    let mut best: Option<(usize, BestMove)> = None;
    for creditor in creditors.iter().copied() {
        let Some(found) = best_blocks(round, debtor, creditor, choice) else { continue };
        if best.as_ref().is_none_or(|(_, b)| found.gain > b.gain) {
            best = Some((creditor, found));
        }
    }
    best
}

/// The best number of blocks between two instances, within the creditor's spare blocks, the stretch of its step and the
/// link's rate. The debtor's local work covers the remote part, unless its memory is short and no covered move gains.
fn best_blocks(round: &mut Round<'_>, debtor: usize, creditor: usize, choice: Choice) -> Option<BestMove> {
    round.pairs_left = round.pairs_left.checked_sub(1)?;
    let pair = round.pair(debtor, choice.seq, creditor);
    let own_tokens = round.nodes[creditor].local_tokens;
    let in_time = round.movable_in_time(debtor, creditor).min(round.movable_in_life(debtor, creditor));
    let limits = [
        choice.movable,
        round.spare_to_lend(creditor),
        pair.stretch_limit(round.config.creditor_stretch_max, own_tokens),
        in_time,
    ];
    let most = limits.into_iter().min().unwrap_or(0);
    let worth = |b: &BestMove| b.gain >= threshold(round.config, &b.prediction, b.gain);
    // If no covered move gains, an uncovered remote part may still be worth the memory, where that is short.
    let is_short = round.nodes[debtor].deficit() > 0;
    let best = pair.best(1, most);
    let may = |b: &BestMove| b.prediction.step.may_borrow(is_short);
    best.covered.filter(worth).or(best.any.filter(worth).filter(may))
}

/// Smallest gain of a move: a share of the two instances' throughput without it.
pub(super) fn threshold(config: &PlannerConfig, after: &crate::perf::Prediction, gain: f64) -> f64 {
    (after.tokens_per_s() - gain) * config.gain_min
}
