//! Properties of plans on random pools.

use super::synthetic::Synthetic;
use crate::perf::{ModelConfig, as_f64};
use crate::planner::round::Round;
use crate::planner::{Order, Planner, PlannerConfig, PoolView, RemoteBlocks, Why};
use lagoon_types::InstanceId;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn pools() -> impl Strategy<Value = Synthetic> {
    let every = || 0u32..5;
    (2u32..12, 1u32..12, 16u32..600, (every(), every(), every()), any::<u64>()).prop_map(
        |(instances, requests, blocks, (long_every, kv_every, remote_every), seed)| Synthetic {
            instances,
            requests,
            blocks,
            long_every,
            kv_every,
            remote_every,
            seed,
        },
    )
}

/// Orders of any size, and growth that does not depend on what the orders change.
fn uncut() -> PlannerConfig {
    PlannerConfig {
        order_blocks_max: u32::MAX,
        order_ms_max: u64::MAX,
        horizon_ms: 0,
        model: ModelConfig { micro_batches: true, pace: false },
        ..PlannerConfig::default()
    }
}

/// The pool after an order was carried out.
fn apply(view: &mut PoolView, order: &Order) {
    let tokens = u64::from(order.blocks) * u64::from(view.shape.block_tokens);
    let Order { debtor, seq, blocks, source, target, .. } = *order;
    for (at, comes) in [(source, false), (target, true)] {
        let change = |n: u32| if comes { n + blocks } else { n.checked_sub(blocks).unwrap() };
        let change64 = |n: u64| if comes { n + tokens } else { n.checked_sub(tokens).unwrap() };
        let instance = view.instances.get_mut(&at).unwrap();
        instance.blocks_free =
            if comes { instance.blocks_free.checked_sub(blocks).unwrap() } else { instance.blocks_free + blocks };
        instance.blocks_lendable = instance.blocks_free.saturating_sub(2);
        if at == debtor {
            instance.load.remote_tokens =
                if comes { instance.load.remote_tokens - tokens } else { instance.load.remote_tokens + tokens };
            instance.borrowed = if comes { instance.borrowed - blocks } else { instance.borrowed + blocks };
            let request = instance.requests.get_mut(&seq).unwrap();
            (request.local, request.local_sealed) = (change(request.local), change(request.local_sealed));
        } else {
            instance.load.remote_request_tokens = change64(instance.load.remote_request_tokens);
            match instance.lent.iter_mut().find(|l| l.0 == debtor) {
                Some(lent) => lent.1 = change(lent.1),
                None => instance.lent.push((debtor, change(0))),
            }
            instance.lent.retain(|l| l.1 > 0);
            let request = view.instances.get_mut(&debtor).unwrap().requests.get_mut(&seq).unwrap();
            let at = request.remote.iter().position(|r| r.creditor == at).unwrap_or_else(|| {
                request.remote.push(RemoteBlocks { creditor: at, blocks: 0, sealed: 0 });
                request.remote.len() - 1
            });
            let there = &mut request.remote[at];
            (there.blocks, there.sealed) = (change(there.blocks), change(there.sealed));
            request.remote.retain(|r| r.blocks > 0);
            request.remote.sort_by_key(|r| r.creditor);
        }
    }
}

/// Eq. 7 over the whole pool, with queues and remote parts, written down once more: no pairs, no search.
fn throughput(view: &PoolView, config: &PlannerConfig, creditors: &BTreeSet<InstanceId>) -> f64 {
    let round = Round::new(view, config);
    let block = f64::from(view.shape.block_tokens);
    let mut total = 0.0;
    for (at, node) in round.nodes.iter().enumerate() {
        let load = &node.view.load;
        let (mut batch, mut spare) = (load.batch, node.free - node.growth);
        let mut local = node.local_tokens;
        let alone: u32 = node.view.requests.values().map(|r| (r.local_sealed + 1).min(r.local)).sum();
        let mean = i64::from(alone / batch.max(1)).max(1);
        // Pairs value a creditor's running batch only: what it can spare leaves room for its growth and queue.
        if !creditors.contains(&node.id) {
            if spare < 0 {
                let preempted = u32::try_from((-spare + mean - 1) / mean).unwrap().min(batch);
                batch -= preempted;
                local *= f64::from(batch) / f64::from(load.batch.max(1));
            }
            for need in &load.queue_blocks {
                if batch >= load.batch_max || i64::from(*need) > spare {
                    break;
                }
                spare -= i64::from(*need);
                batch += 1;
                local += f64::from(*need) * block;
            }
        }
        let rows_of = |r: &&crate::planner::RequestView| !r.remote.is_empty();
        let rows = u32::try_from(node.view.requests.values().filter(rows_of).count()).unwrap().min(batch);
        let mut by_creditor: BTreeMap<InstanceId, (u32, u32)> = BTreeMap::new();
        for part in node.view.requests.values().flat_map(|r| &r.remote) {
            let entry = by_creditor.entry(part.creditor).or_default();
            *entry = (entry.0 + part.blocks, entry.1 + 1);
        }
        let micro_batch = if config.model.micro_batches { rows } else { 0 };
        let mut remote = 0.0f64;
        for (creditor, (blocks, rows)) in by_creditor {
            let c = round.index(creditor).unwrap();
            let link = round.link(at, c);
            let wire = link.rtt_us + link.transfer_us(f64::from(rows) * as_f64(view.shape.row_bytes));
            remote = remote.max(
                f64::from(blocks) * block * round.nodes[c].rates.attention_us + f64::from(view.shape.layers) * wire,
            );
        }
        let attention = (local + node.remote_request_tokens) * node.rates.attention_us;
        let local_us = node.rates.other_us(batch - micro_batch) + node.rates.other_us(micro_batch) + attention;
        let remote_us = if rows == 0 { 0.0 } else { remote + node.rates.other_us(micro_batch) };
        if batch > 0 {
            total += f64::from(batch) * 1e6 / local_us.max(remote_us);
        }
    }
    total
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn orders_are_possible_and_respect_roles(pool in pools(), frozen in any::<u16>(), draining in any::<u16>(), paused in any::<u16>(), moving in any::<u16>()) {
        let mut view = pool.view();
        let bit = |mask: u16, i: u32| mask & (1 << (i % 16)) != 0 && mask & (1 << ((i + 7) % 16)) != 0;
        for (id, instance) in &mut view.instances {
            (instance.frozen, instance.draining, instance.paused) = (bit(frozen, id.0), bit(draining, id.0), bit(paused, id.0));
            for (seq, request) in &mut instance.requests {
                request.moving = bit(moving, u32::try_from(seq.0).unwrap());
            }
        }
        let plan = Planner::new(PlannerConfig::default()).plan(&view);
        let mut left = view.clone();
        let mut taken: BTreeMap<InstanceId, u32> = BTreeMap::new();
        for order in &plan.orders {
            let (debtor, source, target) = (&view.instances[&order.debtor], &view.instances[&order.source], &view.instances[&order.target]);
            prop_assert!(order.blocks > 0 && order.source != order.target);
            prop_assert!(order.gain_tokens_per_s.is_finite());
            prop_assert!(![debtor, source, target].iter().any(|i| i.frozen), "{order:?}: frozen");
            prop_assert!(!target.draining || order.target == order.debtor, "{order:?}: onto one that is drained");
            prop_assert!(!target.paused, "{order:?}: onto one that refused");
            prop_assert!(!debtor.requests[&order.seq].moving, "{order:?}: moving already");
            // Blocks that are there, sealed; room that is there (`apply` checks again by subtracting).
            apply(&mut left, order);
            if order.target != order.debtor {
                let sum = taken.entry(order.target).or_default();
                *sum += order.blocks;
                prop_assert!(*sum <= target.blocks_lendable, "{order:?}: more than it lends");
                // Debtors and creditors are exclusive, also within the round.
                prop_assert_eq!(target.borrowed, 0);
                prop_assert!(order.why != Why::Offload || debtor.lent.is_empty(), "{order:?}: a creditor offloads");
            }
        }
        for (id, instance) in &left.instances {
            let before = &view.instances[id];
            if before.lent.is_empty() || before.borrowed == 0 {
                prop_assert!(instance.lent.is_empty() || instance.borrowed == 0, "{id} became debtor and creditor");
            }
        }
    }

    #[test]
    fn a_plan_never_lowers_what_the_model_predicts(pool in pools()) {
        let config = uncut();
        let view = pool.view();
        let plan = Planner::new(config.clone()).plan(&view);
        // What a creditor wants back it gets back, whatever it costs the debtor.
        prop_assume!(plan.orders.iter().all(|o| matches!(o.why, Why::Retrieve | Why::Offload)));
        let mut after = view.clone();
        plan.orders.iter().for_each(|o| apply(&mut after, o));
        let ends = plan.orders.iter().flat_map(|o| [(o.debtor, o.source), (o.debtor, o.target)]);
        let creditors = ends.filter(|(debtor, end)| debtor != end).map(|(_, end)| end).collect();
        let (x, y) = (throughput(&view, &config, &creditors), throughput(&after, &config, &creditors));
        prop_assert!(y >= x * (1.0 - 1e-9), "{x} falls to {y} by {:?}", plan.orders);
    }

    #[test]
    fn what_local_work_covers_goes_first(pool in pools()) {
        let config = uncut();
        let view = pool.view();
        let plan = Planner::new(config.clone()).plan(&view);
        // The first order is the one that was decided on the pool as it is.
        let Some(order) = plan.orders.first().filter(|o| o.why == Why::Offload) else { return Ok(()) };
        let mut round = Round::new(&view, &config);
        let [debtor, creditor] = [order.debtor, order.target].map(|id| round.index(id).unwrap());
        let pair = round.pair(debtor, order.seq, creditor);
        let (now, chosen) = (pair.predict(0).tokens_per_s(), pair.predict(i64::from(order.blocks)));
        prop_assert!((chosen.tokens_per_s() - now - order.gain_tokens_per_s).abs() < 1e-6);
        if !chosen.covered() {
            prop_assert!(round.nodes[debtor].deficit() > 0, "{chosen:?} is not covered, and the debtor has memory");
            let covered = (1..=i64::from(order.blocks)).map(|k| pair.predict(k)).filter(|p| p.covered());
            let best = covered.map(|p| p.tokens_per_s()).fold(0.0, f64::max);
            prop_assert!(best <= now * (1.0 + config.gain_min), "{best} of {now} is covered and worth it, but {chosen:?}");
        }
    }

    #[test]
    fn no_plan_undoes_another_within_the_hold_and_planning_settles(pool in pools()) {
        settles(&pool)?;
    }
}

/// A creditor gives blocks of one request to their debtor and to another creditor in one round.
#[test]
fn a_split_reclaim_is_not_undone() {
    let (instances, requests, blocks, long_every, kv_every, remote_every) = (8, 4, 454, 2, 2, 4);
    let seed = 10521418437638180825;
    settles(&Synthetic { instances, requests, blocks, long_every, kv_every, remote_every, seed }).unwrap();
}

fn settles(pool: &Synthetic) -> Result<(), TestCaseError> {
    let config = PlannerConfig { order_blocks_max: u32::MAX, order_ms_max: u64::MAX, ..PlannerConfig::default() };
    let mut view = pool.view();
    let mut planner = Planner::new(config);
    let mut given: Vec<(u64, Order)> = Vec::new();
    let mut last = Vec::new();
    // Rounds of a second for a minute, in which nothing changes but by orders.
    for _ in 0..60 {
        view.now_ms += 1_000;
        last = planner.plan(&view).orders;
        planner.commit(&last, view.now_ms);
        for order in &last {
            let undone = given.iter().find(|(at, o)| {
                view.now_ms < at + planner.config().hold_ms
                    && (o.debtor, o.seq) == (order.debtor, order.seq)
                    && (o.source == order.debtor, o.target == order.debtor)
                        == (order.target == order.debtor, order.source == order.debtor)
            });
            prop_assert!(undone.is_none() || order.why == Why::Reclaim, "{order:?} undoes {undone:?}");
            apply(&mut view, order);
        }
        given.extend(last.iter().map(|o| (view.now_ms, *o)));
    }
    prop_assert!(last.is_empty(), "after a minute it still orders {last:?}");
    Ok(())
}
