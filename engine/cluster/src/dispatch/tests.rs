//! The dispatcher against a scripted pool: what starts where, who passes whom, and what is refused.

use super::*;
use lagoon_protocol::{BatchPoint, Calibration, Load};
use lagoon_types::limits::{DISPATCH_POOL_MS, DISPATCH_PREFIX_MS, FENCE_MS, GATEWAY_QUEUE_MS};

const BLOCK_TOKENS: u32 = 16;

/// An instance with these free blocks of 1,000, and so many running requests of at most 64.
fn report(instance: u32, at_ms: u64, free: u32, running: u32) -> Report<u32> {
    let calibration = Calibration {
        batches: vec![BatchPoint { batch: 1, step_us: 10_000.0 }],
        attention_us_per_ktoken: 1.0,
        prefill_us_per_token: 10.0,
        copy_bytes_per_s: 0.0,
        prompt_attention_us_per_ktoken: 0.0,
    };
    let load = InstanceLoad {
        calibration: Some(calibration),
        load: Some(Load { batch_max: 64, ..Load::default() }),
        prefills: true,
        block_tokens: BLOCK_TOKENS,
        blocks_total: 1_000,
        blocks_lend_max: 1_000,
        blocks_free: free,
        running,
        ..InstanceLoad::default()
    };
    Report { instance, load, at_ms }
}

/// A dispatcher, and what it did.
struct Gateway {
    core: Dispatcher<u32>,
    at_ms: u64,
    next: u64,
}

impl Gateway {
    fn new(mode: Mode) -> Self {
        Self { core: Dispatcher::new(mode), at_ms: 10_000, next: 0 }
    }

    /// Instances by number, free blocks and running requests, reported now.
    fn report(&mut self, of: &[(u32, u32, u32)]) -> Vec<(u64, u32)> {
        let reports = of.iter().map(|(n, free, running)| report(*n, self.at_ms, *free, *running)).collect();
        self.handle(Event::Reports { reports, elsewhere: Elsewhere::default() })
    }

    fn arrival(&mut self, blocks: u64) -> Arrival {
        self.next += 1;
        let prompt_tokens = blocks * u64::from(BLOCK_TOKENS) - 1;
        let ask = Ask { prompt_tokens, answer_tokens: 32, sequences: 1 };
        let prefix = PrefixHashes::default();
        Arrival { id: RequestId(self.next), ask, tenant: "".into(), priority: 0, bytes: 100, prefix }
    }

    /// Has a request of so many blocks arrive; returns its number and what starts.
    fn arrive(&mut self, blocks: u64) -> (u64, Vec<(u64, u32)>) {
        let arrival = self.arrival(blocks);
        (arrival.id.0, self.handle(Event::Arrived(arrival)))
    }

    fn handle(&mut self, event: Event<u32>) -> Vec<(u64, u32)> {
        self.core.handle(self.at_ms, event).into_iter().map(bound).collect()
    }

    fn pass(&mut self, ms: u64) -> Vec<(u64, u32)> {
        self.at_ms += ms;
        self.handle(Event::Tick)
    }
}

fn bound(effect: Effect<u32>) -> (u64, u32) {
    match effect {
        Effect::Bind { id, instance } => (id.0, instance),
        Effect::Refuse { id, why } => panic!("{id:?} was refused: {why:?}"),
    }
}

fn ended(id: u64) -> Event<u32> {
    Event::Ended { id: RequestId(id), learned: Learned::default() }
}

#[test]
fn a_request_goes_to_the_least_work_and_waits_where_none_can_start_it() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 900, 9), (2, 500, 1)]);
    let (first, started) = gateway.arrive(10);
    assert_eq!(started, [(first, 2)], "most free memory, and a longer queue");
    gateway.report(&[(1, 900, 64), (2, 500, 64)]);
    let (second, started) = gateway.arrive(10);
    assert_eq!(started, [], "both batches are full");
    let (third, started) = gateway.arrive(10);
    assert_eq!((started, gateway.core.stats().waiting), (vec![], 2));
    assert_eq!(gateway.handle(ended(first)), []);
    gateway.at_ms += 1_000;
    assert_eq!(gateway.report(&[(1, 900, 63), (2, 500, 64)]), [(second, 1)], "bound when there is a place, and once");
    assert_eq!(gateway.report(&[(1, 900, 63), (2, 500, 64)]), [], "which the report does not know of yet");
    assert_eq!(gateway.handle(ended(second)), [(third, 1)], "its own end is known at once");
    assert_eq!(gateway.core.stats(), DispatchStats { bound: 1, ..DispatchStats::default() });
}

#[test]
fn the_old_policy_binds_at_once_by_memory_alone() {
    let mut gateway = Gateway::new(Mode::FreeMemory);
    gateway.report(&[(1, 900, 64), (2, 500, 0)]);
    let (first, started) = gateway.arrive(10);
    assert_eq!(started, [(first, 1)]);
    let (second, started) = gateway.arrive(2_000);
    assert_eq!(started, [(second, 1)]);
}

#[test]
fn a_bounded_number_passes_a_head_that_waits_for_memory() {
    const MAX: usize = DISPATCH_PASSES_MAX as usize;
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 400, 4), (2, 100, 4)]);
    let (head, started) = gateway.arrive(600);
    assert_eq!(started, []);
    let mut there = 0;
    for _ in 0..3 * DISPATCH_PASSES_MAX {
        let (_, started) = gateway.arrive(1);
        there += started.iter().filter(|(_, instance)| *instance == 1).count();
        // The head waits, and so does nothing else at the instance that it has reserved.
        assert!(started.iter().all(|(id, _)| *id != head));
    }
    assert_eq!((there, gateway.core.stats().passes), (MAX, MAX as u64), "at the reserved instance");
    assert!(gateway.core.stats().bound > MAX, "and others elsewhere");
    gateway.at_ms += 200;
    let started = gateway.report(&[(1, 700, 4), (2, 60, 30)]);
    assert_eq!(started.first(), Some(&(head, 1)), "it is first when its memory is there");
}

#[test]
fn the_most_useful_passes_first() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 100, 64)]);
    let (head, _) = gateway.arrive(600);
    let [long, short] = [gateway.arrive(62).0, gateway.arrive(1).0];
    let started = gateway.report(&[(1, 70, 4)]);
    assert_eq!(started, [(short, 1)], "{long} and {head} wait");
}

#[test]
fn a_head_borrows_when_no_instance_holds_it_soon() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    let pool = [(1, 400, 4), (2, 350, 4)];
    gateway.report(&pool);
    let (head, started) = gateway.arrive(600);
    assert_eq!(started, [], "one of them may hold it whole soon");
    gateway.at_ms += DISPATCH_WHOLE_MS - 1;
    assert_eq!(gateway.report(&pool), []);
    assert_eq!(gateway.pass(1), [(head, 1)], "where it borrows the least");
    // Long answers free no memory for a long time.
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.core.policy.answer_tokens = 1e6;
    gateway.report(&pool);
    let (head, started) = gateway.arrive(600);
    assert_eq!(started, [(head, 1)]);
}

/// Another gateway's requests take what becomes free: here it has no place that holds against them.
#[test]
fn a_head_that_nothing_has_memory_for_waits_on_at_an_instance() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    let pool = [(1, 200, 4), (2, 250, 4)];
    gateway.report(&pool);
    let (head, started) = gateway.arrive(600);
    assert_eq!(started, []);
    gateway.at_ms += DISPATCH_WHOLE_MS - 1;
    assert_eq!(gateway.report(&pool), []);
    assert_eq!(gateway.pass(1), [(head, 2)]);
    assert!(!gateway.core.may_hand_back(RequestId(head)));
}

#[test]
fn nothing_is_borrowed_where_nothing_is_lent() {
    // Two instances with 400 and 350 free of 1,000, whose long answers free no memory for a long time.
    let starts = |blocks, lend_max, lent| {
        let mut gateway = Gateway::new(Mode::LeastWork);
        gateway.core.policy.answer_tokens = 1e6;
        let reports = [report(1, gateway.at_ms, 400, 4), report(2, gateway.at_ms, 350, 4)].map(|mut of| {
            (of.load.blocks_lend_max, of.load.blocks_lent) = (lend_max, lent);
            of
        });
        gateway.handle(Event::Reports { reports: reports.to_vec(), elsewhere: Elsewhere::default() });
        gateway.arrive(blocks).1.len() == 1
    };
    assert!(starts(600, 300, 0) && !starts(600, 300, 200) && !starts(600, 0, 0));
    // What an instance and its lenders cannot hold is the instance's to refuse.
    assert!(starts(1_301, 300, 0) && !starts(1_300, 300, 0) && starts(1_001, 0, 0));
}

/// The small one would borrow, or refuse it.
#[test]
fn a_request_that_the_only_large_instance_gives_back_waits_for_it() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    let small = |at_ms| {
        let mut of = report(2, at_ms, 100, 0);
        of.load.blocks_total = 100;
        of
    };
    let reports = vec![report(1, gateway.at_ms, 900, 0), small(gateway.at_ms)];
    gateway.handle(Event::Reports { reports, elsewhere: Elsewhere::default() });
    let (id, started) = gateway.arrive(600);
    assert_eq!(started, [(id, 1)]);
    assert_eq!(gateway.handle(Event::HandedBack { id: RequestId(id) }), []);
    assert_eq!(gateway.core.head(), Some((RequestId(id), Some(1))), "it waits for that one's memory");
    gateway.at_ms += HAND_BACK_REST_MS - 1;
    let reports = vec![report(1, gateway.at_ms, 900, 0), small(gateway.at_ms)];
    assert_eq!(gateway.handle(Event::Reports { reports, elsewhere: Elsewhere::default() }), []);
    assert_eq!(gateway.pass(1), [(id, 1)]);
}

#[test]
fn a_pool_sized_head_starts_where_the_pool_has_memory_and_is_kept_memory_for_otherwise() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 800, 4), (2, 700, 4)]);
    let (head, started) = gateway.arrive(1_400);
    assert_eq!(started, [(head, 1)]);
    gateway.at_ms += 200;
    gateway.report(&[(1, 300, 4), (2, 200, 4)]);
    let (head, started) = gateway.arrive(1_400);
    assert_eq!(started, []);
    gateway.at_ms += DISPATCH_POOL_MS - 1;
    assert_eq!(gateway.report(&[(1, 300, 4), (2, 200, 4)]), []);
    assert_eq!(gateway.pass(1), [(head, 1)], "there it becomes the oldest waiting request");
    // A lender's memory counts, too.
    let reports = vec![report(1, gateway.at_ms, 900, 0), report(2, gateway.at_ms, 0, 4)];
    gateway.handle(Event::Reports { reports, elsewhere: Elsewhere { blocks_total: 900, blocks_lendable: 900 } });
    gateway.at_ms += 200;
    let reports = vec![report(1, gateway.at_ms, 900, 0), report(2, gateway.at_ms, 0, 4)];
    gateway.handle(Event::Reports { reports, elsewhere: Elsewhere { blocks_total: 900, blocks_lendable: 900 } });
    let (lent, started) = gateway.arrive(1_500);
    assert_eq!(started, [(lent, 1)]);
}

#[test]
fn a_pool_sized_head_borrows_where_its_prefix_is() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 1_000, 0), (2, 900, 1)]);
    let ask = |gateway: &mut Gateway, cached: u64| {
        let hashes = (0..cached).chain(100 * gateway.next..100 * gateway.next + 9 - cached).collect();
        let prefix = PrefixHashes { hashes, tokens_per_hash: 1_600.0 };
        let arrival = Arrival { prefix, ..gateway.arrival(1_400) };
        let id = arrival.id;
        (id, gateway.handle(Event::Arrived(arrival)))
    };
    let (first, started) = ask(&mut gateway, 5);
    assert_eq!(started, [(first.0, 1)]);
    gateway.at_ms += 1_000;
    gateway.handle(Event::Ended { id: first, learned: Learned::default() });
    gateway.at_ms += 1_000;
    // 500 rBlocks of it are cached where 300 fewer are free; 100 are not worth them.
    gateway.report(&[(1, 700, 1), (2, 1_000, 1)]);
    let (second, started) = ask(&mut gateway, 5);
    assert_eq!(started, [(second.0, 1)]);
    gateway.handle(Event::Ended { id: second, learned: Learned::default() });
    let (third, started) = ask(&mut gateway, 1);
    assert_eq!(started, [(third.0, 2)]);
}

/// Only an instance can tell why it cannot be served.
#[test]
fn a_request_that_nothing_can_ever_hold_does_not_wait() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 100, 4), (2, 100, 4)]);
    let (id, started) = gateway.arrive(2_001);
    assert_eq!(started, [(id, 1)]);
    // An estimate may be wrong: an idle pool tries.
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 100, 0), (2, 90, 0)]);
    let (id, started) = gateway.arrive(900);
    assert_eq!(started, [(id, 1)]);
}

#[test]
fn a_prefix_draws_a_request_to_where_it_is_cached() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 1_000, 0), (2, 1_000, 0)]);
    let with_prefix = |gateway: &mut Gateway, hashes: &[u64]| {
        let prefix = PrefixHashes { hashes: hashes.to_vec(), tokens_per_hash: 256.0 };
        let arrival = Arrival { prefix, ..gateway.arrival(64) };
        gateway.handle(Event::Arrived(arrival))[0].1
    };
    let first = with_prefix(&mut gateway, &[1, 2, 3, 4]);
    let other = with_prefix(&mut gateway, &[9]);
    assert_ne!(first, other);
    gateway.at_ms += 200;
    gateway.report(&[(1, 1_000, 1), (2, 1_000, 1)]);
    assert_eq!(with_prefix(&mut gateway, &[9, 8]), other);
    assert_eq!(with_prefix(&mut gateway, &[1, 2, 3, 5]), first);
}

#[test]
fn a_request_that_is_given_back_is_bound_elsewhere_once() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 900, 0), (2, 900, 1)]);
    let (first, started) = gateway.arrive(10);
    assert_eq!(started, [(first, 1)]);
    gateway.at_ms += 200;
    gateway.report(&[(1, 900, 64), (2, 900, 64)]);
    let (second, _) = gateway.arrive(10);
    let back = |id| Event::HandedBack { id: RequestId(id) };
    assert!(gateway.core.may_hand_back(RequestId(first)) && !gateway.core.may_hand_back(RequestId(second)));
    assert_eq!(gateway.handle(back(first)), []);
    assert_eq!(gateway.handle(back(first)), [], "once");
    assert_eq!(gateway.core.stats().waiting, 2);
    gateway.at_ms += 200;
    assert_eq!(gateway.report(&[(1, 900, 0), (2, 900, 62)]), [(second, 1), (first, 2)], "not where it was");
    // Alone in the pool, that instance gets it all the same.
    assert_eq!(gateway.handle(back(second)), [(second, 2)]);
    gateway.report(&[(1, 900, 64)]);
    assert_eq!(gateway.handle(back(first)), []);
    gateway.at_ms += 200;
    assert_eq!(gateway.report(&[(1, 900, 0)]), [(first, 1)]);
}

#[test]
fn a_request_that_moved_counts_where_it_is() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 900, 0), (2, 900, 63)]);
    let (first, started) = gateway.arrive(10);
    assert_eq!(started, [(first, 1)]);
    gateway.handle(Event::Sent { id: RequestId(first), instance: 2 });
    gateway.report(&[(1, 900, 64), (2, 900, 63)]);
    let (second, started) = gateway.arrive(10);
    assert_eq!(started, [], "the last place at 2 is taken");
    assert_eq!(gateway.handle(ended(first)), [(second, 2)]);
}

#[test]
fn the_queue_is_bounded_in_requests_by_tenant_in_bytes_and_in_age() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    let refusal = |gateway: &mut Gateway, arrival: Arrival| {
        let effects = gateway.core.handle(gateway.at_ms, Event::Arrived(arrival));
        effects.first().map(|effect| match effect {
            Effect::Refuse { why, .. } => *why,
            Effect::Bind { .. } => panic!("{effect:?}"),
        })
    };
    let arrival = gateway.arrival(1);
    assert_eq!(refusal(&mut gateway, arrival), Some(Refusal::NoInstance));
    gateway.report(&[(1, 900, 64)]);
    let mut arrival = gateway.arrival(1);
    arrival.bytes = GATEWAY_QUEUE_BYTES_MAX + 1;
    assert_eq!(refusal(&mut gateway, arrival), Some(Refusal::Full));
    // A tenant holds three quarters of the bytes at most, and another one the rest.
    for (tenant, expected) in [("large", Some(Refusal::TenantFull)), ("other", None)] {
        let mut gateway = Gateway::new(Mode::LeastWork);
        gateway.report(&[(1, 900, 64)]);
        let bytes = GATEWAY_QUEUE_BYTES_MAX / 4 * GATEWAY_TENANT_QUARTERS;
        let first = Arrival { tenant: "large".into(), bytes, ..gateway.arrival(1) };
        assert_eq!(refusal(&mut gateway, first), None);
        let second = Arrival { tenant: tenant.into(), ..gateway.arrival(1) };
        assert_eq!(refusal(&mut gateway, second), expected);
    }
    let mut count = |tenant: &str, why| {
        let mut waiting = 0;
        loop {
            let arrival = Arrival { tenant: tenant.into(), ..gateway.arrival(1) };
            match refusal(&mut gateway, arrival) {
                None => waiting += 1,
                refused => return assert_eq!((waiting, refused), why),
            }
        }
    };
    let share = GATEWAY_QUEUE_MAX / 4 * GATEWAY_TENANT_QUARTERS;
    count("one", (share, Some(Refusal::TenantFull)));
    count("two", (GATEWAY_QUEUE_MAX - share, Some(Refusal::Full)));
    let waiting = gateway.core.stats().waiting;
    gateway.at_ms += GATEWAY_QUEUE_MS - 1;
    assert_eq!(gateway.report(&[(1, 900, 64)]), []);
    let expired = gateway.core.handle(gateway.at_ms + 1, Event::Tick);
    assert_eq!(expired.len(), waiting);
    assert!(expired.iter().all(|effect| matches!(effect, Effect::Refuse { why: Refusal::Expired, .. })));
    assert_eq!(gateway.core.stats(), DispatchStats::default());
}

/// Two tenants and a full queue, in front of one instance that runs one request at a time.
#[test]
fn tenants_share_a_full_queue_and_neither_starves() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 900, 64)]);
    let (few, many): (Arc<str>, Arc<str>) = ("few".into(), "many".into());
    let mut tenants = BTreeMap::new();
    // Arrivals of a tenant until one is refused: how many were taken, and why no more.
    let fill = |gateway: &mut Gateway, tenants: &mut BTreeMap<u64, Arc<str>>, tenant: &Arc<str>, count: usize| {
        for taken in 0..count {
            let arrival = Arrival { tenant: Arc::clone(tenant), ..gateway.arrival(1) };
            let id = arrival.id.0;
            match gateway.core.handle(gateway.at_ms, Event::Arrived(arrival)).as_slice() {
                [] => _ = tenants.insert(id, Arc::clone(tenant)),
                [Effect::Refuse { why, .. }] => return (taken, Some(*why)),
                effects => panic!("{effects:?}"),
            }
        }
        (count, None)
    };
    let share = GATEWAY_QUEUE_MAX / 4 * GATEWAY_TENANT_QUARTERS;
    assert_eq!(fill(&mut gateway, &mut tenants, &many, usize::MAX), (share, Some(Refusal::TenantFull)));
    assert_eq!(fill(&mut gateway, &mut tenants, &few, usize::MAX), (GATEWAY_QUEUE_MAX - share, Some(Refusal::Full)));
    // With one place at the instance, each end starts one request.
    gateway.at_ms += 200;
    let mut started = gateway.report(&[(1, 900, 63)]);
    let mut order = Vec::new();
    while order.len() < 200 {
        let [(id, 1)] = started[..] else { panic!("{started:?} after {}", order.len()) };
        order.push(Arc::clone(&tenants[&id]));
        started = gateway.handle(ended(id));
    }
    let of = |tenant: &Arc<str>| order.iter().filter(|of| *of == tenant).count();
    assert_eq!((of(&few), of(&many)), (100, 100), "each has half of the work");
    assert!(order.windows(3).all(|of| of.contains(&few) && of.contains(&many)), "neither waits long");
    // The places that became free are each tenant's own, and one beyond its share is refused although the queue has room.
    assert_eq!(fill(&mut gateway, &mut tenants, &many, usize::MAX).1, Some(Refusal::TenantFull));
    assert!(gateway.core.stats().waiting < GATEWAY_QUEUE_MAX);
    assert_eq!(fill(&mut gateway, &mut tenants, &few, 90), (90, None));
}

#[test]
fn queued_requests_outlive_a_pool_that_is_gone_for_a_while() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 900, 64)]);
    let (first, _) = gateway.arrive(1);
    gateway.report(&[]);
    assert_eq!(gateway.pass(DISPATCH_NONE_MS - 1), []);
    assert_eq!(gateway.report(&[(3, 900, 0)]), [(first, 3)]);
    gateway.report(&[(3, 900, 64)]);
    let (second, _) = gateway.arrive(1);
    gateway.report(&[]);
    let gone = gateway.core.handle(gateway.at_ms + DISPATCH_NONE_MS, Event::Tick);
    assert_eq!(gone, [Effect::Refuse { id: RequestId(second), why: Refusal::NoInstance }]);
}

#[test]
fn a_client_that_leaves_the_queue_is_forgotten_and_a_head_with_it() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 400, 4)]);
    let (head, _) = gateway.arrive(600);
    for _ in 0..DISPATCH_PASSES_MAX + 8 {
        gateway.arrive(1);
    }
    assert_eq!(gateway.core.stats().waiting, 1 + 8);
    assert_eq!(gateway.handle(ended(head)).len(), 8, "nothing stands in their way any more");
    assert_eq!(gateway.core.stats().waiting_bytes, 0);
}

/// What others had bound is over at some time; nobody would report it.
#[test]
fn a_gateway_without_a_gmanager_has_its_own_view() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report(&[(1, 900, 64), (2, 900, 63)]);
    let (first, started) = gateway.arrive(10);
    assert_eq!(started, [(first, 2)]);
    let (second, started) = gateway.arrive(10);
    assert_eq!(started, []);
    assert_eq!(gateway.pass(FENCE_MS - 1), []);
    assert_eq!(gateway.pass(1), [(second, 1)], "the one where it has no request");
    // It still counts its own.
    let started: Vec<(u64, u32)> = (0..200).flat_map(|_| gateway.arrive(1).1).collect();
    assert_eq!((started.len(), gateway.core.stats().waiting), (126, 74));
    // What is handed back was bound to places of others: nothing follows it there for a while.
    let (back, _) = *started.iter().find(|(_, at)| *at == 1).unwrap();
    assert_eq!(gateway.handle(Event::HandedBack { id: RequestId(back) }), []);
    let next = gateway.handle(ended(first));
    assert!(matches!(next[..], [(next, 2)] if next != back), "{next:?}: there is a place at the other one");
    assert_eq!(gateway.pass(HAND_BACK_REST_MS - 1), []);
    assert_eq!(gateway.pass(1), [(back, 1)]);
}

/// An idle instance with so many tokens of prompts to compute, 100 us each.
fn busy(instance: u32, at_ms: u64, prefill_tokens: u64) -> Report<u32> {
    let mut of = report(instance, at_ms, 4_000, 0);
    of.load.blocks_total = 4_000;
    of.load.calibration.iter_mut().for_each(|calibration| calibration.prefill_us_per_token = 100.0);
    of.load.load = Some(Load { batch_max: 64, prefill_tokens: Some(prefill_tokens), ..Load::default() });
    of
}

impl Gateway {
    /// Instances 1, 2, ... by the tokens of their prompts.
    fn report_busy(&mut self, of: &[u64]) -> Vec<(u64, u32)> {
        let reports = (1..).zip(of).map(|(n, tokens)| busy(n, self.at_ms, *tokens)).collect();
        self.handle(Event::Reports { reports, elsewhere: Elsewhere::default() })
    }

    /// Has a request of 600 rBlocks arrive whose first `cached` thousand tokens are those of conversation `of`.
    fn arrive_with(&mut self, of: u64, cached: u64) -> (u64, Vec<(u64, u32)>) {
        let hash = |n: u64| if n < cached { (of << 8) | n } else { (self.next << 32) | n };
        let prefix = PrefixHashes { hashes: (0..9).map(hash).collect(), tokens_per_hash: 1_000.0 };
        let arrival = Arrival { prefix, ..self.arrival(600) };
        (arrival.id.0, self.handle(Event::Arrived(arrival)))
    }

    /// Two instances, of which the first one caches conversation 1 and has so many tokens to compute.
    fn where_one_is_cached(prefill_tokens: u64) -> Self {
        let mut gateway = Self::new(Mode::LeastWork);
        gateway.report_busy(&[0]);
        let (first, started) = gateway.arrive_with(1, 9);
        assert_eq!(started, [(first, 1)]);
        gateway.handle(ended(first));
        gateway.at_ms += 1_000;
        gateway.report_busy(&[prefill_tokens, 0]);
        gateway
    }
}

/// What one dispatcher placed draws requests of another one there, and ages with what others send.
#[test]
fn another_dispatchers_prefixes_are_known() {
    let prefix = |end: u64| PrefixHashes { hashes: vec![1, 2, 3, end], tokens_per_hash: 256.0 };
    let idle = [(1, 1_000, 0), (2, 1_000, 0), (3, 1_000, 0)];
    let (mut one, mut two) = (Gateway::new(Mode::LeastWork), Gateway::new(Mode::LeastWork));
    [&mut one, &mut two].into_iter().for_each(|gateway| drop(gateway.report(&idle)));
    let arrival = Arrival { prefix: prefix(4), ..one.arrival(64) };
    let at = one.handle(Event::Arrived(arrival))[0].1;
    let placed = one.core.take_placed();
    assert_eq!((placed.len(), placed[0].instance, &placed[0].hashes[..]), (1, at, &[1, 2, 3, 4][..]));
    assert_eq!(placed[0].tokens, 64 * u64::from(BLOCK_TOKENS) - 1 + 32, "prompt and answer");
    assert_eq!(one.core.take_placed(), [], "reported once");
    let other = 1 + at % 3;
    let known = |gateway: &Gateway| [at, other].map(|at| gateway.core.cached(&prefix(5)).at(at));
    two.handle(Event::Placed(vec![Placed { instance: 9, ..placed[0].clone() }]));
    assert_eq!(known(&two), [0, 0], "of an instance that no report names");
    two.handle(Event::Placed(placed.clone()));
    assert_eq!(known(&two), [768, 0]);
    let arrival = Arrival { prefix: prefix(5), ..two.arrival(64) };
    assert_eq!(two.handle(Event::Arrived(arrival))[0].1, at);
    // The instance has memory for 16,000 tokens.
    let newer = Placed { hashes: vec![7], tokens: 16_000, ..placed[0].clone() };
    two.handle(Event::Placed(vec![newer]));
    assert_eq!(known(&two), [1_024, 0], "all of the later prompt, as long as there is memory for it");
    let newer = Placed { hashes: vec![8], tokens: 1_000, ..placed[0].clone() };
    two.handle(Event::Placed(vec![newer]));
    assert_eq!(known(&two), [0, 0]);
}

/// 20,000 tokens are 1.5 s more than an instance may have ahead; the prefix of 9,000 saves 0.9 s.
#[test]
fn a_request_waits_for_its_prefix_as_long_as_that_is_worth_it() {
    let mut gateway = Gateway::where_one_is_cached(20_000);
    let (next, started) = gateway.arrive_with(1, 9);
    assert_eq!((started, gateway.core.head()), (vec![], Some((RequestId(next), Some(1)))));
    let (short, started) = gateway.arrive_with(1, 3);
    assert_eq!(started, [(short, 2)], "0.3 s are not worth the wait");
    gateway.at_ms += 1_499;
    assert_eq!(gateway.report_busy(&[5_010, 0]), []);
    assert_eq!(gateway.pass(1), [(next, 1)]);
    // Longer than four times what it saves nobody waits.
    let mut gateway = Gateway::where_one_is_cached(42_000);
    let (next, started) = gateway.arrive_with(1, 9);
    assert_eq!(started, [(next, 2)]);
}

#[test]
fn others_start_elsewhere_while_requests_wait_for_a_prefix() {
    let mut gateway = Gateway::where_one_is_cached(20_000);
    let held = [0; 3].map(|_| gateway.arrive_with(1, 9).0);
    for _ in 0..2 * DISPATCH_PASSES_MAX {
        let (other, started) = gateway.arrive(1);
        assert_eq!(started, [(other, 2)]);
    }
    assert_eq!((gateway.core.stats().waiting, gateway.core.stats().passes), (3, 0), "nothing is taken from them");
    gateway.at_ms += 1_600;
    let started = gateway.report_busy(&[0, 0]);
    assert_eq!(started, held.map(|id| (id, 1)), "each has little to compute there");
}

#[test]
fn a_wait_for_a_prefix_ends_with_its_instance_and_at_its_deadline() {
    let mut gateway = Gateway::where_one_is_cached(20_000);
    let (next, _) = gateway.arrive_with(1, 9);
    let reports = vec![busy(2, gateway.at_ms, 0)];
    let started = gateway.handle(Event::Reports { reports, elsewhere: Elsewhere::default() });
    assert_eq!(started, [(next, 2)], "where it waited for is gone");

    let mut gateway = Gateway::where_one_is_cached(20_000);
    let (next, _) = gateway.arrive_with(1, 9);
    let since_ms = gateway.at_ms;
    while gateway.at_ms < since_ms + DISPATCH_PREFIX_MS - 500 {
        gateway.at_ms += 500;
        assert_eq!(gateway.report_busy(&[20_000, 0]), [], "others keep it busy");
    }
    assert_eq!(gateway.pass(499), []);
    assert_eq!(gateway.pass(1), [(next, 2)]);
}

/// It asked for a rest: no report names it for a while. A new process at its address has nothing.
#[test]
fn a_prefix_outlives_a_rest_and_no_restart() {
    let mut gateway = Gateway::where_one_is_cached(0);
    let rest = |gateway: &mut Gateway, incarnation| {
        let (reports, elsewhere) = (vec![busy(2, gateway.at_ms, 0)], Elsewhere::default());
        gateway.handle(Event::Reports { reports, elsewhere });
        let mut reports = vec![busy(1, gateway.at_ms, 0), busy(2, gateway.at_ms, 0)];
        reports[0].load.incarnation = Some(incarnation);
        gateway.handle(Event::Reports { reports, elsewhere });
        let hashes = (0..9).map(|n| (1 << 8) | n).collect();
        gateway.core.cached(&PrefixHashes { hashes, tokens_per_hash: 1_000.0 }).at(1)
    };
    assert_eq!([rest(&mut gateway, 6), rest(&mut gateway, 6)], [9_000; 2]);
    assert_eq!(rest(&mut gateway, 7), 0);
}

/// A request that was sent elsewhere than it was bound to leaves its prefix there.
#[test]
fn a_prefix_is_where_its_request_went() {
    let mut gateway = Gateway::new(Mode::LeastWork);
    gateway.report_busy(&[0, 0]);
    let (first, started) = gateway.arrive_with(1, 9);
    let (bound, other) = (started[0].1, 3 - started[0].1);
    gateway.handle(Event::Sent { id: RequestId(first), instance: other });
    gateway.handle(ended(first));
    // Where it was bound to it may have begun.
    let prefix = PrefixHashes { hashes: (0..9).map(|n| (1 << 8) | n).collect(), tokens_per_hash: 1_000.0 };
    let cached = gateway.core.cached(&prefix);
    assert_eq!([bound, other].map(|instance| cached.at(instance)), [9_000, 9_000]);
}
