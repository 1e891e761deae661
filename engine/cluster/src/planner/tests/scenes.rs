//! Pools drawn by hand, each with the order that anybody would give.

use crate::perf::{LinkView, ModelConfig, ModelShape};
use crate::planner::round::Round;
use crate::planner::{InstanceView, Order, Planner, PlannerConfig, PoolView, RemoteBlocks, RequestView, Why, dispatch};
use lagoon_protocol::{BatchPoint, Calibration, Load, Role};
use lagoon_types::{InstanceId, SeqId};

const TOKENS: u32 = 32;

/// About a 7B model on a large GPU: 8 ms to read the weights, little more for a batch, 20 µs per 1,024 tokens.
fn calibration() -> Calibration {
    let point = |batch: u32| BatchPoint { batch, step_us: 8_000.0 + 30.0 * f64::from(batch) };
    Calibration {
        batches: [1, 16, 64, 256].map(point).to_vec(),
        attention_us_per_ktoken: 20.0,
        prefill_us_per_token: 20.0,
        copy_bytes_per_s: 1e10,
        prompt_attention_us_per_ktoken: 0.0,
    }
}

/// An instance of 1,000 blocks with requests of so many blocks and a queue.
fn instance(requests: &[u32], queue: &[u32]) -> InstanceView {
    let used: u32 = requests.iter().sum();
    let request = |blocks: u32| RequestView { local: blocks, local_sealed: blocks - 1, ..RequestView::default() };
    InstanceView {
        calibration: Some(calibration()),
        blocks_total: 1_000,
        blocks_free: 1_000 - used,
        blocks_lendable: 1_000 - used,
        requests: (0..).map(SeqId).zip(requests.iter().map(|b| request(*b))).collect(),
        load: Load {
            batch: u32::try_from(requests.len()).unwrap(),
            context_tokens: u64::from(used) * u64::from(TOKENS),
            queue_blocks: queue.to_vec(),
            batch_max: 256,
            ..Load::default()
        },
        ..InstanceView::default()
    }
}

fn pool(instances: Vec<InstanceView>) -> PoolView {
    let shape = ModelShape { layers: 32, block_tokens: TOKENS, token_bytes: 524_288, row_bytes: 16_516 };
    let ids = (1..).map(InstanceId);
    let mut view = PoolView { now_ms: 1_000_000, shape, instances: ids.zip(instances).collect() };
    let all: Vec<InstanceId> = view.instances.keys().copied().collect();
    let near = LinkView { rtt_us: 15.0, bytes_per_s: 2e10 };
    for (id, instance) in &mut view.instances {
        instance.links = all.iter().filter(|p| *p != id).map(|p| (*p, near)).collect();
    }
    view
}

fn plan(view: &PoolView) -> Vec<Order> {
    Planner::new(PlannerConfig::default()).plan(view).orders
}

/// Lends blocks of a request, which were local, to a creditor.
fn lend(view: &mut PoolView, (debtor, seq): (u32, u64), creditor: u32, blocks: u32) {
    let tokens = u64::from(blocks * TOKENS);
    let d = view.instances.get_mut(&InstanceId(debtor)).unwrap();
    let request = d.requests.get_mut(&SeqId(seq)).unwrap();
    request.local -= blocks;
    request.local_sealed -= blocks;
    request.remote.push(RemoteBlocks { creditor: InstanceId(creditor), blocks, sealed: blocks });
    d.load.remote_tokens += tokens;
    d.borrowed += blocks;
    d.blocks_free += blocks;
    d.blocks_lendable += blocks;
    let c = view.instances.get_mut(&InstanceId(creditor)).unwrap();
    c.lent.push((InstanceId(debtor), blocks));
    c.load.remote_request_tokens += tokens;
    c.blocks_free -= blocks;
    c.blocks_lendable -= blocks;
}

/// Four requests of 20 blocks where others have 80 in leases that share all but ten of them.
#[test]
fn what_a_preemption_frees_is_what_a_request_has_alone() {
    let of = |scene: &InstanceView| {
        let view = pool(vec![scene.clone(), instance(&[10], &[])]);
        Round::new(&view, &PlannerConfig::default()).nodes[0].sequence_blocks()
    };
    let lent = vec![(InstanceId(2), 80)];
    let mut lends = InstanceView { blocks_free: 1_000 - 80 - 10, lent, ..instance(&[20; 4], &[]) };
    assert_eq!(of(&lends), 20, "no less for what is lent");
    // They begin with 15 blocks that all of them have.
    lends.requests.values_mut().for_each(|request| request.local_sealed = 4);
    assert_eq!(of(&lends), 5);
    assert_eq!(of(&instance(&[], &[])), 1);
}

#[test]
fn a_long_request_makes_room_for_the_queue_behind_it() {
    // v2 Figure 5: A is full of one request, B and C have room.
    let view = pool(vec![instance(&[950], &[20; 30]), instance(&[10; 20], &[]), instance(&[10; 30], &[])]);
    let orders = plan(&view);
    assert!(!orders.is_empty() && orders.iter().all(|o| o.debtor == InstanceId(1) && o.source == InstanceId(1)));
    assert_eq!(orders[0].target, InstanceId(2), "the one with most room first");
    let moved: u32 = orders.iter().map(|o| o.blocks).sum();
    // All thirty of the queue fit (600 blocks), and what is free already is not moved for.
    assert!((500..=700).contains(&moved), "{moved}");
    assert!(orders[0].gain_tokens_per_s > 1_000.0);
}

/// Queries wait for what a creditor's device computes: of two creditors, the one that computes prompts in long steps is the worse.
#[test]
fn a_creditor_in_long_steps_is_left_alone() {
    let of = |step_us| {
        let mut view = pool(vec![instance(&[950], &[20; 30]), instance(&[10; 20], &[]), instance(&[10; 30], &[])]);
        view.instances.get_mut(&InstanceId(2)).unwrap().load.step_us = step_us;
        plan(&view)[0].target
    };
    assert_eq!([of(9_000), of(150_000)], [InstanceId(2), InstanceId(3)]);
}

#[test]
fn blocks_are_placed_before_an_instance_is_full() {
    let mut view = pool(vec![instance(&[998], &[]), instance(&[10; 20], &[])]);
    let orders = plan(&view);
    assert!(orders.iter().any(|o| o.debtor == InstanceId(1) && o.why == Why::Offload), "{orders:?}");
    // Also one whose batch is not small.
    let mut full = vec![100; 10];
    full[9] = 98;
    let crowded = pool(vec![instance(&full, &[]), instance(&[10; 20], &[])]);
    let one_batch = PlannerConfig { model: ModelConfig::paper(), ..PlannerConfig::default() };
    assert!(Planner::new(one_batch).plan(&crowded).orders.iter().any(|o| o.why == Why::Offload));
    // A batch that grows a block per sequence within the horizon and has forty free has room enough.
    view.instances.insert(InstanceId(1), instance(&[96; 10], &[]));
    let links = view.instances[&InstanceId(2)].links.clone();
    view.instances.get_mut(&InstanceId(1)).unwrap().links = vec![(InstanceId(2), links[0].1)];
    assert!(plan(&view).is_empty());
}

#[test]
fn an_idle_instance_is_paired_with_nobody_and_least_of_all_with_itself() {
    assert!(plan(&pool(vec![instance(&[], &[])])).is_empty());
    assert!(plan(&pool(vec![instance(&[], &[]), instance(&[], &[])])).is_empty());
    // One that is its own only creditor has none.
    assert!(plan(&pool(vec![instance(&[900], &[200])])).is_empty());
}

#[test]
fn the_next_longest_request_gives_when_the_longest_cannot() {
    let mut view = pool(vec![instance(&[500, 480], &[100; 5]), instance(&[10; 20], &[])]);
    view.instances.get_mut(&InstanceId(1)).unwrap().requests.get_mut(&SeqId(0)).unwrap().moving = true;
    let orders = plan(&view);
    assert!(!orders.is_empty() && orders.iter().all(|o| o.seq == SeqId(1)), "{orders:?}");
}

#[test]
fn one_that_refused_one_that_is_drained_and_one_that_borrows_get_nothing() {
    let full = || instance(&[950], &[20; 30]);
    for change in [
        |i: &mut InstanceView| i.paused = true,
        |i: &mut InstanceView| i.draining = true,
        |i: &mut InstanceView| i.frozen = true,
        |i: &mut InstanceView| i.borrowed = 5,
        |i: &mut InstanceView| i.blocks_lendable = 0,
        |i: &mut InstanceView| i.blocks_incoming = 1_000,
    ] {
        let mut other = instance(&[10; 20], &[]);
        change(&mut other);
        assert!(plan(&pool(vec![full(), other])).is_empty());
    }
    assert!(!plan(&pool(vec![full(), instance(&[10; 20], &[])])).is_empty());
}

/// It would still have to borrow, and what left would only have moved.
#[test]
fn nothing_leaves_a_creditor_for_a_request_that_it_could_not_hold_alone() {
    let mut view = pool(vec![instance(&[1_000], &[]), instance(&[60; 13], &[1_001]), instance(&[10; 30], &[])]);
    lend(&mut view, (1, 0), 2, 150);
    let reclaims = |view: &PoolView| plan(view).iter().filter(|o| o.why == Why::Reclaim).count();
    assert_eq!(reclaims(&view), 0);
    view.instances.get_mut(&InstanceId(2)).unwrap().load.queue_blocks = vec![100];
    assert!(reclaims(&view) > 0);
}

#[test]
fn a_creditor_in_need_gets_its_blocks_back() {
    // Room at home: home. None: to the third.
    let mut view = pool(vec![instance(&[600], &[]), instance(&[60; 14], &[100, 50]), instance(&[10; 30], &[])]);
    lend(&mut view, (1, 0), 2, 150);
    let order = plan(&view)[0];
    assert_eq!((order.source, order.target, order.why), (InstanceId(2), InstanceId(1), Why::Reclaim));
    // Enough for the first that waits and for growth, not everything.
    assert!((90..150).contains(&order.blocks), "{order:?}");
    let mut view = pool(vec![instance(&[990], &[]), instance(&[60; 14], &[100, 50]), instance(&[10; 30], &[])]);
    lend(&mut view, (1, 0), 2, 150);
    let debtor = view.instances.get_mut(&InstanceId(1)).unwrap();
    (debtor.blocks_free, debtor.blocks_lendable) = (0, 0);
    let order = plan(&view)[0];
    assert_eq!((order.source, order.target, order.why), (InstanceId(2), InstanceId(3), Why::Reclaim));
}

#[test]
fn a_drained_instance_is_not_planned_with() {
    let mut view = pool(vec![instance(&[600], &[]), instance(&[10], &[990; 9]), instance(&[10; 30], &[])]);
    lend(&mut view, (1, 0), 2, 150);
    assert!(plan(&view).iter().any(|o| o.source == InstanceId(2)), "it needs its memory back");
    view.instances.get_mut(&InstanceId(2)).unwrap().draining = true;
    // The gManager empties it by itself.
    assert!(!plan(&view).iter().any(|o| [o.debtor, o.source, o.target].contains(&InstanceId(2))));
}

#[test]
fn over_a_slow_link_kv_comes_home_when_there_is_room() {
    let scene = |rtt_us: f64| {
        let mut view = pool(vec![instance(&[300, 20, 20, 20], &[]), instance(&[10; 40], &[])]);
        lend(&mut view, (1, 0), 2, 100);
        for instance in view.instances.values_mut() {
            instance.links.iter_mut().for_each(|l| l.1.rtt_us = rtt_us);
        }
        plan(&view)
    };
    let order = scene(5_000.0)[0];
    assert_eq!((order.why, order.target, order.blocks), (Why::Retrieve, InstanceId(1), 100));
    assert!(order.gain_tokens_per_s > 0.0);
}

#[test]
fn a_slow_link_carries_no_queries_that_local_work_cannot_cover_if_a_near_creditor_is_there() {
    let mut view = pool(vec![instance(&[950], &[20; 30]), instance(&[], &[]), instance(&[10; 30], &[])]);
    let far = LinkView { rtt_us: 20_000.0, bytes_per_s: 1e8 };
    view.instances.get_mut(&InstanceId(1)).unwrap().links[0].1 = far;
    view.instances.get_mut(&InstanceId(2)).unwrap().links[0].1 = far;
    let orders = plan(&view);
    assert!(!orders.is_empty() && orders.iter().all(|o| o.target == InstanceId(3)), "{orders:?}");
}

#[test]
fn what_is_not_known_is_assumed_and_counted() {
    let mut view = pool(vec![instance(&[950], &[20; 30]), instance(&[10; 20], &[])]);
    view.instances.get_mut(&InstanceId(2)).unwrap().calibration = None;
    view.instances.get_mut(&InstanceId(1)).unwrap().calibration.as_mut().unwrap().attention_us_per_ktoken = f64::NAN;
    let planner = Planner::new(PlannerConfig::default());
    assert_eq!(planner.plan(&view).assumed, 2);
    view.instances.values_mut().for_each(|i| i.calibration = Some(calibration()));
    assert_eq!(planner.plan(&view).assumed, 0);
}

#[test]
fn a_move_is_not_taken_back_within_the_hold() {
    let mut view = pool(vec![instance(&[300, 20, 20, 20], &[]), instance(&[10; 40], &[])]);
    lend(&mut view, (1, 0), 2, 100);
    view.instances.values_mut().for_each(|i| i.links.iter_mut().for_each(|l| l.1.rtt_us = 5_000.0));
    let mut planner = Planner::new(PlannerConfig::default());
    let orders = planner.plan(&view).orders;
    assert_eq!(orders[0].why, Why::Retrieve);
    let away = Order { source: InstanceId(1), target: InstanceId(2), why: Why::Offload, ..orders[0] };
    planner.commit(&[away], view.now_ms - 1);
    assert!(planner.plan(&view).orders.is_empty());
    view.now_ms += planner.config().hold_ms;
    assert_eq!(planner.plan(&view).orders, orders);
}

#[test]
fn kv_nodes_lend_and_never_borrow() {
    let node = InstanceView { role: Role::Kv, ..instance(&[], &[]) };
    let orders = plan(&pool(vec![instance(&[950], &[20; 30]), node]));
    assert!(!orders.is_empty() && orders.iter().all(|o| o.target == InstanceId(2)), "{orders:?}");
}

#[test]
fn new_requests_go_where_most_is_free() {
    let mut view = pool(vec![instance(&[100], &[]), instance(&[10], &[]), instance(&[], &[40; 10])]);
    assert_eq!(dispatch(&view), Some(InstanceId(2)));
    view.instances.get_mut(&InstanceId(2)).unwrap().draining = true;
    assert_eq!(dispatch(&view), Some(InstanceId(1)));
    assert_eq!(dispatch(&PoolView::default()), None);
}

#[test]
fn a_gain_that_is_lost_in_the_noise_moves_nothing() {
    // A fortieth of its step is attention, and the creditor's batch is nearly as large.
    let view = pool(vec![instance(&[400, 1, 1, 1], &[]), instance(&[10; 3], &[])]);
    assert!(plan(&view).is_empty());
    let config = PlannerConfig { gain_min: 0.0, model: ModelConfig::paper(), ..PlannerConfig::default() };
    let orders = Planner::new(config.clone()).plan(&view).orders;
    assert!(!orders.is_empty());
    let total: f64 = Planner::new(config.clone()).plan(&view).tokens_per_s;
    assert!(orders[0].gain_tokens_per_s < 0.02 * total);
    assert!(Planner::new(PlannerConfig { gain_min: 0.02, ..config }).plan(&view).orders.is_empty());
}

#[test]
fn blocks_that_are_about_to_leave_are_no_room_yet() {
    // An emergency made the first both creditor and debtor; it needs memory, and its own KV is behind a slow link.
    let mut view = pool(vec![instance(&[850, 20, 20, 20], &[]), instance(&[10; 40], &[]), instance(&[200, 50], &[])]);
    lend(&mut view, (1, 0), 2, 100);
    lend(&mut view, (3, 0), 1, 160);
    view.instances.values_mut().for_each(|i| i.links.iter_mut().for_each(|l| l.1.rtt_us = 5_000.0));
    let first = view.instances.get_mut(&InstanceId(1)).unwrap();
    first.load.queue_blocks = vec![first.blocks_free + 100];
    let free = first.blocks_free;
    let orders = plan(&view);
    assert!(orders.iter().any(|o| o.why == Why::Reclaim && o.source == InstanceId(1) && o.blocks >= 100), "{orders:?}");
    let home: u32 = orders.iter().filter(|o| o.target == InstanceId(1)).map(|o| o.blocks).sum();
    assert!(home <= free, "{home} blocks into {free}");
}

#[test]
fn a_creditors_own_step_is_stretched_so_far_and_no_further() {
    let view = pool(vec![instance(&[950], &[20; 30]), instance(&[10; 20], &[])]);
    let moved = |creditor_stretch_max| -> u32 {
        let config = PlannerConfig { creditor_stretch_max, model: ModelConfig::paper(), ..PlannerConfig::default() };
        Planner::new(config).plan(&view).orders.iter().map(|o| o.blocks).sum()
    };
    // Its step takes 8.6 ms and 0.125 ms of attention; 1 % of it are 139 blocks of 0.625 µs.
    assert!(moved(2.0) >= 500 && (100..=140).contains(&moved(1.01)), "{} {}", moved(2.0), moved(1.01));
    assert_eq!(moved(1.0), 0);
}

/// Creditor KV that the debtor has mapped and reads directly costs the creditor no compute, and no query a round trip.
#[test]
fn mapped_kv_is_attended_to_by_its_debtor() {
    let config = |creditor_stretch_max| PlannerConfig {
        creditor_stretch_max,
        model: ModelConfig::paper(),
        ..PlannerConfig::default()
    };
    let mut view = pool(vec![instance(&[950], &[20; 30]), instance(&[10; 20], &[])]);
    let moved = |view: &PoolView| -> u32 {
        Planner::new(config(1.01))
            .plan(view)
            .orders
            .iter()
            .filter(|o| o.debtor == InstanceId(1))
            .map(|o| o.blocks)
            .sum()
    };
    let map = |view: &mut PoolView| {
        view.instances.get_mut(&InstanceId(1)).unwrap().mapped.insert(InstanceId(2));
    };
    assert!(moved(&view) <= 140, "as far as it stretches the creditor's step");
    map(&mut view);
    assert!(moved(&view) >= 500, "{}", moved(&view));

    // What is lent already: the debtor's device has all of it to attend to, the creditor's nothing.
    let mut view = pool(vec![instance(&[500, 20], &[]), instance(&[10; 20], &[])]);
    lend(&mut view, (1, 0), 2, 300);
    view.instances.values_mut().for_each(|i| i.links.iter_mut().for_each(|l| l.1.rtt_us = 5_000.0));
    let tokens = |view: &PoolView, at: usize| {
        let config = config(2.0);
        let round = Round::new(view, &config);
        (round.nodes[at].local_tokens, round.nodes[at].remote_request_tokens)
    };
    let of = |blocks: u32| f64::from(blocks * TOKENS);
    assert_eq!((tokens(&view, 0), tokens(&view, 1)), ((of(220), 0.0), (of(200), of(300))));
    let home = |view: &PoolView| {
        Planner::new(config(2.0)).plan(view).orders.iter().any(|o| o.why == Why::Retrieve && o.source == InstanceId(2))
    };
    assert!(home(&view), "five milliseconds a layer and token");
    map(&mut view);
    assert_eq!((tokens(&view, 0), tokens(&view, 1)), ((of(520), 0.0), (of(200), 0.0)));
    assert!(!home(&view), "nothing crosses the link");
}

#[test]
fn no_more_is_ordered_than_the_link_carries_in_time() {
    let mut view = pool(vec![instance(&[950], &[20; 30]), instance(&[10; 20], &[])]);
    view.instances.values_mut().for_each(|i| i.links.iter_mut().for_each(|l| l.1.bytes_per_s = 1e8));
    // A minute of the link for the move, ten seconds for one order; blocks have 16 MiB.
    let expecting = |tokens_expected| {
        Planner::new(PlannerConfig { tokens_expected, ..PlannerConfig::default() }).plan(&view).orders
    };
    let orders = expecting(1e6);
    assert!(!orders.is_empty() && orders.iter().all(|o| o.blocks <= 59), "{orders:?}");
    // A request of a few hundred tokens is over before its blocks have arrived.
    assert!(expecting(256.0).is_empty());
}
