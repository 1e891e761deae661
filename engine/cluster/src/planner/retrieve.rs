//! Retrievals: a debtor with room again takes blocks home where the model predicts more throughput.
//!
//! Remote KV that the debtor's local work covers costs the debtor nothing and may stay. Over a slow link each token pays a
//! round trip and a row per layer; then the KV comes home, provided that the copy pays off before a request of usual
//! length ends ([`crossover`]).

use super::Why;
use super::offload::threshold;
use super::round::Round;
use crate::perf::crossover;
use lagoon_types::{InstanceId, SeqId};

pub(super) fn plan(round: &mut Round<'_>, held: &dyn Fn(usize, SeqId) -> bool) {
    for debtor in 0..round.nodes.len() {
        let node = &round.nodes[debtor];
        let runs = node.view.role.serves() && node.view.load.batch > 0;
        let left_alone = node.is_left_alone() || node.view.paused || node.view.draining;
        if runs && node.borrowed > 0 && !left_alone && node.surplus() > 0 {
            retrieve(round, debtor, held);
        }
    }
}

fn retrieve(round: &mut Round<'_>, debtor: usize, held: &dyn Fn(usize, SeqId) -> bool) {
    let mut orders = 0;
    for (seq, creditor, blocks, _) in remote_parts(round, debtor) {
        if orders == round.config.debtor_orders_max || round.is_full() {
            return;
        }
        let plans = |at: &usize| !round.nodes[*at].is_left_alone() && !round.nodes[*at].view.draining;
        let Some(from) = round.index(creditor).filter(plans) else { continue };
        // Twice the growth stays free, so that blocks do not have to leave again at once.
        let node = &round.nodes[debtor];
        let room = (node.surplus() - node.growth).min(round.movable_in_time(from, debtor));
        let most = blocks.min(room);
        if most <= 0 || held(debtor, seq) || round.is_ordered(debtor, seq) {
            continue;
        }
        let pair = round.pair(debtor, seq, from);
        let Some(best) = pair.best(-most, -1).any else { continue };
        let worth = best.gain >= threshold(round.config, &best.prediction, best.gain);
        if worth && copy_pays(round, debtor, from, -best.blocks) {
            round.order((debtor, seq), (from, debtor), -best.blocks, Why::Retrieve, best.gain);
            orders += 1;
        }
    }
}

/// Remote parts of a debtor's requests: request, creditor, movable blocks there, blocks on all creditors. Requests with the
/// fewest remote blocks first: they are wholly home soonest.
fn remote_parts(round: &Round<'_>, debtor: usize) -> Vec<(SeqId, InstanceId, i64, i64)> {
    let requests = round.nodes[debtor].view.requests.iter().filter(|(_, r)| !r.moving && !r.remote.is_empty());
    let parts = requests.flat_map(|(seq, r)| {
        let remote = i64::from(r.remote_blocks());
        r.remote.iter().map(move |p| (*seq, p.creditor, i64::from(p.sealed.min(p.blocks)), remote))
    });
    let mut parts: Vec<_> = parts.collect();
    parts.sort_by_key(|(seq, creditor, _, remote)| (*remote, *seq, *creditor));
    parts
}

/// Whether a copy home pays off before a request of usual length ends. Never for mapped creditor KV, to which the debtor
/// attends as to its own.
fn copy_pays(round: &Round<'_>, debtor: usize, creditor: usize, blocks: i64) -> bool {
    if round.maps(debtor, creditor) {
        return false;
    }
    let shape = &round.view.shape;
    let tokens = blocks.unsigned_abs() * u64::from(shape.block_tokens);
    let rates = [creditor, debtor].map(|at| round.nodes[at].rates.attention_us);
    let cross = crossover(shape, round.link(debtor, creditor), tokens, rates[0], rates[1]);
    cross.tokens.is_some_and(|t| t <= round.config.tokens_expected)
}
