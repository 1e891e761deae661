//! What a gateway's dispatcher costs while its queue waits: a look allocates nothing. `--ignored --nocapture cost` measures a request.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "tests print what they measured")]

use lagoon_cluster::dispatch::{
    Arrival, Ask, Dispatcher, Effect, Elsewhere, Event, InstanceLoad, Learned, Mode, PrefixHashes, Report, RequestId,
};
use lagoon_protocol::{BatchPoint, Calibration, Load};
use lagoon_types::limits::GATEWAY_QUEUE_MAX;
use std::time::Instant;

const INSTANCES: u32 = 64;
const BLOCK_TOKENS: u32 = 16;

/// An instance of 1,000 rBlocks and 64 places.
fn report(instance: u32, blocks_free: u32, running: u32) -> Report<u32> {
    let calibration = Calibration {
        batches: vec![BatchPoint { batch: 1, step_us: 10_000.0 }, BatchPoint { batch: 64, step_us: 30_000.0 }],
        attention_us_per_ktoken: 1.0,
        prefill_us_per_token: 10.0,
        copy_bytes_per_s: 0.0,
        prompt_attention_us_per_ktoken: 0.0,
    };
    let load = InstanceLoad {
        calibration: Some(calibration),
        load: Some(Load { batch_max: 64, queue_blocks: vec![1; 4], ..Load::default() }),
        prefills: true,
        block_tokens: BLOCK_TOKENS,
        blocks_total: 1_000,
        blocks_lend_max: 1_000,
        blocks_free,
        running,
        ..InstanceLoad::default()
    };
    Report { instance, load, at_ms: 1_000 }
}

/// A dispatcher over instances with so many free rBlocks and running requests.
fn pool(blocks_free: u32, running: u32) -> Dispatcher<u32> {
    let mut core = Dispatcher::new(Mode::LeastWork);
    let reports = (0..INSTANCES).map(|n| report(n, blocks_free, running)).collect();
    core.handle(1_000, Event::Reports { reports, elsewhere: Elsewhere::default() });
    core
}

/// A request of so many rBlocks, of one of seven tenants.
fn arrival(id: u64, blocks: u64) -> Event<u32> {
    let ask = Ask { prompt_tokens: blocks * u64::from(BLOCK_TOKENS) - 1, answer_tokens: 64, sequences: 1 };
    let tenant = (id % 7).to_string().into();
    let prefix = PrefixHashes { hashes: vec![id % 50, id], tokens_per_hash: 256.0 };
    Event::Arrived(Arrival { id: RequestId(id), ask, tenant, priority: 0, bytes: 100, prefix })
}

/// Instances' loads were copied for every request and instance at every look.
#[test]
fn looks_at_a_queue_that_waits_allocate_nothing() {
    // No places; and places, but not the memory: then up to 64 requests are compared with all instances.
    for (free, running, looks) in [(900, 64, 100_000), (100, 4, 500)] {
        let mut core = pool(free, running);
        let waiting = (0..1_000).map(|id| core.handle(1_000, arrival(id, 200)).len()).sum::<usize>();
        assert_eq!((waiting, core.stats().waiting), (0, 1_000));
        let counted = allocation_counter::measure(|| {
            (0..looks).for_each(|_| assert!(core.handle(1_001, Event::Tick).is_empty()));
        });
        assert_eq!(counted.count_total, 0, "{free} free rBlocks, {running} running: {counted:?}");
    }
}

/// The figure in docs/dispatch.md: `cargo test --release -p lagoon-cluster --test looks -- --ignored --nocapture cost`.
#[test]
#[ignore = "measures times; for a quiet machine"]
fn cost_of_a_request() {
    for queued in [0, GATEWAY_QUEUE_MAX - 1] {
        let mut core = pool(900, 63);
        // Every place is taken by own requests, and so many wait.
        let mut bound = std::collections::VecDeque::new();
        let mut next = 0;
        let mut arrive = |core: &mut Dispatcher<u32>| {
            next += 1;
            core.handle(1_000, arrival(next, 4))
        };
        let at = |effects: Vec<Effect<u32>>| {
            effects.into_iter().filter_map(|effect| match effect {
                Effect::Bind { id, .. } => Some(id),
                Effect::Refuse { .. } => None,
            })
        };
        for _ in 0..64 + queued {
            bound.extend(at(arrive(&mut core)));
        }
        assert_eq!((core.stats().bound, core.stats().waiting), (64, queued));
        let requests = 20_000;
        let begun = Instant::now();
        for _ in 0..requests {
            // One ends, another one begins, and one comes.
            let ended = bound.pop_front().unwrap();
            let learned = Learned { cached_tokens: Some(0), answer_tokens: Some(64) };
            bound.extend(at(core.handle(1_000, Event::Ended { id: ended, learned })));
            bound.extend(at(arrive(&mut core)));
            core.handle(1_000, Event::Began { id: *bound.back().unwrap() });
        }
        let us = begun.elapsed().as_secs_f64() * 1e6 / f64::from(requests);
        println!("{queued} queued, {INSTANCES} instances: {us:.1} us a request (arrival, binding, beginning and end)");
        assert_eq!(core.stats().waiting, queued);
    }
}
