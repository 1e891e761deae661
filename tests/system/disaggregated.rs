//! Prompts prefilled by one instance and decoded by another give a single instance's answers, and leave nothing
//! behind: KV read after prefill (pull), and during it (push).

use lagoon_tests::cluster::compare::{assert_equals_single, prompt, single};
use lagoon_tests::cluster::{Fault, PoolSpec, Spec, World, greedy};
use lagoon_tests::golden::{Golden, max_diff, models};
use lagoon_types::GenerateRequest;
use lagoon_types::limits::{LEASE_TTL_MS, TRANSFER_READ_MS, TRANSFER_REQUEST_MS};

/// Pull or push, and whether transports read the stores or staging buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mode {
    push: bool,
    staged: bool,
}

impl Mode {
    const PULL: Self = Self { push: false, staged: false };
    const PUSH: Self = Self { push: true, staged: false };

    fn prefill(self, blocks: u32) -> Spec {
        self.of(Spec::prefill(blocks))
    }

    fn decode(self, blocks: u32) -> Spec {
        self.of(Spec { push: self.push, ..Spec::decode(blocks) })
    }

    fn of(self, spec: Spec) -> Spec {
        Spec { stage_blocks: self.staged.then_some(spec.blocks), ..spec }
    }
}

macro_rules! in_all_modes {
    ($($name:ident)*) => {
        mod pull {
            $(#[test] fn $name() { super::$name(super::Mode::PULL); })*
        }
        mod push {
            $(#[test] fn $name() { super::$name(super::Mode::PUSH); })*
        }
        mod staged_pull {
            $(#[test] fn $name() { super::$name(super::Mode { push: false, staged: true }); })*
        }
        mod staged_push {
            $(#[test] fn $name() { super::$name(super::Mode { push: true, staged: true }); })*
        }
    };
}

in_all_modes! {
    a_prompt_is_computed_elsewhere_and_read
    every_model_equals_transformers
    the_last_window_comes_with_its_prompt
    reads_proceed_while_the_prefill_workers_loop_stands_still
    what_does_not_fit_the_decode_worker_stays_where_it_was_computed
    damage_and_broken_paths_cost_a_second_read
    prefill_workers_die_at_every_stage
    a_decode_worker_without_workers_computes_prompts_itself
    decode_workers_die_at_every_stage
    cancelled_requests_leave_nothing_at_any_stage
    workers_serve_on_without_a_gmanager
    broken_sessions_repeat_what_was_not_answered
    shuffled_pools_give_the_same_tokens_and_leave_nothing
}

/// A pool whose decode workers have connected to the prefill workers.
pub(crate) fn pool(spec: &PoolSpec, seed: Option<u64>, specs: &[Spec], workers: usize) -> World {
    let mut world = World::pool(spec.clone(), seed, specs);
    let decodes = |w: &World, n: usize| w.spec(n).role == lagoon_protocol::Role::Decode;
    let ready = |w: &World| w.nodes().filter(|n| decodes(w, *n)).all(|n| w.live(n).status().prefill.workers == workers);
    world.run_until(ready);
    world
}

fn a_prompt_is_computed_elsewhere_and_read(mode: Mode) {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[mode.prefill(40), mode.decode(40)], 1);
    world.submit(1, greedy(prompt(1, 50, 128), 12));
    world.submit(1, greedy(prompt(2, 17, 128), 9));
    world.submit(1, greedy(prompt(3, 4, 128), 1));
    world.run();
    let diff = assert_equals_single("disaggregated", &world, &spec);
    println!("largest difference {diff:e}");
    let (worker, decoder) = (world.live(0).status(), world.live(1).status());
    assert_eq!((worker.prefill.jobs_done, decoder.prefill.pulled, decoder.prefill.own), (3, 2, 0));
    assert!(decoder.prefill.bytes > 0 && decoder.prefill.transactions < decoder.prefill.reads, "{decoder:?}");
    assert_eq!((world.sent("partial").0, world.sent("write").0), (0, 0), "nothing was lent but what was handed over");
    world.check_empty();
    assert_eq!(world.exports(0), 0);
}

/// Every variant gives transformers' answers: windows, ALiBi, 16 bits.
fn every_model_equals_transformers(mode: Mode) {
    for name in models() {
        let golden = Golden::load(name);
        let spec = PoolSpec::golden(name, 4);
        let mut world = pool(&spec, None, &[Spec { step_rows: 9, ..mode.prefill(60) }, mode.decode(60)], 1);
        let tokens = golden.description.tokens.clone();
        let last = tokens.len() - 1;
        world.submit(1, greedy(tokens, golden.description.greedy_continuation.len() as u32));
        world.run();
        let log = &world.requests[0];
        let diff = max_diff(&log.logits[0], golden.at(last).unwrap());
        assert!(diff <= golden.description.tolerance_f32, "{name}: {diff}");
        assert_eq!(log.tokens, golden.description.greedy_continuation, "{name}");
        assert_eq!(world.live(1).status().prefill.pulled, 1, "{name}");
        world.check_empty();
    }
}

/// Nothing is computed again to fill a ring, unless the worker has no memory beside the prompt's: then it is, and the answer is
/// the same.
fn the_last_window_comes_with_its_prompt(mode: Mode) {
    for name in ["gpt_oss", "gemma2", "gemma3"] {
        let golden = Golden::load(name);
        let spec = PoolSpec { split: true, ..PoolSpec::golden(name, 4) };
        let tokens = golden.description.tokens.clone();
        let (last, blocks) = (tokens.len() - 1, u32::try_from(tokens.len()).unwrap().div_ceil(4));
        for room in [60, blocks] {
            let mut world = pool(&spec, None, &[Spec { step_rows: 9, ..mode.prefill(room) }, mode.decode(60)], 1);
            world.submit(1, greedy(tokens.clone(), golden.description.greedy_continuation.len() as u32));
            if room == 60 {
                world.submit(1, greedy(tokens[..2].to_vec(), 5));
            }
            world.run();
            let log = &world.requests[0];
            let diff = max_diff(&log.logits[0], golden.at(last).unwrap());
            assert!(diff <= golden.description.tolerance_f32, "{name}: {diff}");
            assert_eq!(log.tokens, golden.description.greedy_continuation, "{name}");
            assert_equals_single(name, &world, &PoolSpec::golden(name, 4));
            let status = world.live(1).status();
            assert_eq!(status.prefill.pulled, if room == 60 { 2 } else { 1 }, "{name}");
            assert_eq!(status.warm_up_tokens == 0, room == 60, "{name}, {room} rBlocks: {status:?}");
            world.check_empty();
        }
    }
}

/// Runs until part of a request's KV has arrived, the rest of which takes time.
fn run_into_transfer(world: &mut World, node: usize) {
    world.slow_reads(node, Some(1));
    run_into_reads(world, node);
}

/// Runs until KV of a request has arrived.
fn run_into_reads(world: &mut World, node: usize) {
    world.run_until(|w| w.live(node).status().prefill.pulling > 0);
    let before = world.reads();
    world.run_until(|w| w.reads() > before);
    assert_eq!(world.live(node).status().prefill.away, 1, "all of it came at once");
}

/// A decode worker reads slowly, one read after the other and each almost up to its path's timeout, for longer than a
/// lease lives. The prefill worker keeps the KV, with renewed leases, and serves another decode worker meanwhile.
#[test]
fn a_slow_reader_keeps_its_leases_and_delays_nobody_else() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[Spec::prefill(150), Spec::decode(80), Spec::decode(60)], 1);
    world.slow_reads(1, Some(TRANSFER_READ_MS - 500));
    for n in 0..4 {
        world.submit(1, greedy(prompt(n, 60, 128), 8));
    }
    world.run_until(|w| w.live(1).status().prefill.pulling == 4);
    let (begun_ms, mut served) = (world.now_ms(), 0);
    loop {
        let other = world.submit(2, greedy(prompt(10 + served, 80, 128), 4));
        world.run_until(|w| w.requests[other].is_over());
        let pulling = world.live(1).status().prefill.pulling;
        if pulling == 0 {
            break;
        }
        served += 1;
        let lent = world.live(0).status().blocks_lent as usize;
        assert!(lent >= 15 * pulling, "{lent} blocks are lent and {pulling} prompts are read");
        world.run_for(1_000);
    }
    let took_ms = world.now_ms() - begun_ms;
    assert!(took_ms > LEASE_TTL_MS && served > 10, "{took_ms} ms, {served} requests meanwhile");
    world.run();
    let status = world.live(1).status().prefill;
    assert_eq!((status.pulled, status.retried, status.own), (4, 0, 0), "{status:?}");
    assert_equals_single("a slow reader", &world, &spec);
    world.check_empty();
    assert_eq!(world.exports(0), 0);
}

/// Reads that exceed their timeout cost their path, repeatedly, until the pull ends at its deadline. Then the lease
/// ends, the prefill worker has its memory back, and the prompt is prefilled again.
#[test]
fn a_read_that_never_ends_is_aborted_at_its_deadline() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[Spec::prefill(60), Spec::decode(60), Spec::decode(60)], 1);
    world.slow_reads(1, Some(TRANSFER_READ_MS + 200));
    world.submit(1, greedy(prompt(1, 120, 128), 8));
    world.run_until(|w| w.live(1).status().prefill.pulling > 0);
    let begun_ms = world.now_ms();
    let other = world.submit(2, greedy(prompt(2, 80, 128), 4));
    world.run_until(|w| w.requests[other].is_over());
    assert_eq!(world.live(1).status().prefill.pulling, 1, "the other one waited for it");
    world.run_until(|w| w.live(1).status().prefill.pulls_failed > 0);
    assert_eq!((world.now_ms() - begun_ms) / 1_000, TRANSFER_REQUEST_MS / 1_000);
    world.slow_reads(1, None);
    world.run_until(|w| w.live(0).status().blocks_lent == 0);
    world.run();
    let status = world.live(1).status().prefill;
    assert_eq!((status.pulled, status.retried, status.own), (1, 1, 0), "{status:?}");
    assert_equals_single("a reader that never ends", &world, &spec);
    world.check_empty();
    assert_eq!(world.exports(0), 0);
}

/// The prefill worker's loop is paused for a second; its memory is read meanwhile.
fn reads_proceed_while_the_prefill_workers_loop_stands_still(mode: Mode) {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[mode.prefill(40), mode.decode(40)], 1);
    world.submit(1, greedy(prompt(1, 60, 128), 8));
    run_into_transfer(&mut world, 1);
    // The loop announces pushed KV while it is prefilled.
    world.run_until(|w| w.requests[0].tokens.len() == 1 && w.live(1).status().prefill.pulling > 0);
    let (begun_ms, reads) = (world.now_ms(), world.reads());
    world.pause(0, 1_000);
    world.run();
    assert!(world.reads() > reads, "nothing was read");
    assert!(world.now_ms() < begun_ms + 900, "it waited for the loop until {} ms", world.now_ms() - begun_ms);
    assert_equals_single("while the loop stands still", &world, &spec);
    // COMPLETE and the lease's release wait for the loop.
    assert!(world.live(0).status().blocks_lent > 0);
    world.run_for(1_000);
    world.check_empty();
}

fn what_does_not_fit_the_decode_worker_stays_where_it_was_computed(mode: Mode) {
    let models = ["llama3_old", "mpt", "mistral_window", "gpt_oss"].map(|name| (name, false));
    for (name, split) in models.into_iter().chain([("gpt_oss", true), ("gemma3", true)]) {
        let spec = PoolSpec { split, ..PoolSpec::golden(name, 4) };
        let mut world = pool(&spec, None, &[mode.prefill(40), mode.decode(16)], 1);
        world.submit(1, greedy(prompt(1, 110, 128), 10));
        world.run_until(|w| w.requests[0].tokens.len() >= 2);
        let status = world.live(1).status();
        if name != "mistral_window" {
            let remote: u32 = status.sequences[0].remote_blocks.values().sum();
            assert!(remote >= 12 && status.prefill.blocks_left == u64::from(remote), "{status:?}");
        }
        world.run();
        assert!(world.sent("partial").0 > 0 || name == "mistral_window");
        assert_equals_single(name, &world, &spec);
        world.check_empty();
    }
}

/// Damaged blocks are detected and read again, and so are blocks of a broken path.
fn damage_and_broken_paths_cost_a_second_read(mode: Mode) {
    let spec = PoolSpec::golden("yi", 4);
    let mut world = pool(&spec, None, &[mode.prefill(40), mode.decode(40)], 1);
    world.damage_next_read(1);
    world.submit(1, greedy(prompt(1, 60, 150), 4));
    world.run();
    world.submit(1, greedy(prompt(2, 60, 150), 4));
    run_into_transfer(&mut world, 1);
    world.break_paths_of(0);
    world.run();
    let status = world.live(1).status().prefill;
    assert_eq!((status.damaged_blocks, status.retried, status.pulled), (1, 0, 2), "{status:?}");
    assert_equals_single("damaged and broken", &world, &spec);
    world.check_empty();
}

/// The prefill worker dies during prefill, while its KV waits or is read, and afterwards.
fn prefill_workers_die_at_every_stage(mode: Mode) {
    let spec = PoolSpec::golden("llama3_old", 4);
    for stage in ["asked", "ready", "pulling", "decoding"] {
        // A full decode worker makes ready KV wait. With push, its last part waits.
        let mut world = pool(&spec, None, &[mode.prefill(60), mode.prefill(60), mode.decode(30)], 2);
        let first = (stage == "ready" && !mode.push).then(|| world.submit(2, greedy(prompt(9, 90, 128), 20)));
        if let Some(first) = first {
            world.run_until(|w| w.requests[first].tokens.len() > 2);
        }
        let request = world.submit(2, greedy(prompt(1, 60, 128), 8));
        let worker = |w: &World| (0..2).find(|n| w.live(*n).status().prefill.jobs > 0);
        world.run_until(|w| worker(w).is_some());
        let worker = worker(&world).unwrap();
        match stage {
            "ready" => world.run_until(|w| w.requests[request].tokens.len() == 1),
            "pulling" => run_into_transfer(&mut world, 2),
            "decoding" => world.run_until(|w| w.requests[request].tokens.len() > 2),
            _ => {}
        }
        world.kill(worker);
        world.run();
        let status = world.live(2).status();
        let retried = status.prefill.retried;
        assert_eq!(retried > 0, stage != "decoding", "{stage}: {status:?}");
        assert_eq!((status.prefill.own, status.recoveries), (0, 0), "{stage}");
        assert_equals_single(stage, &world, &spec);
        world.run_for(20_000);
        world.check_empty();
    }
}

/// A decode worker without prefill workers prefills locally after a while.
fn a_decode_worker_without_workers_computes_prompts_itself(mode: Mode) {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[mode.prefill(20), mode.decode(40)], 1);
    // Too long for the worker.
    world.submit(1, greedy(prompt(1, 100, 128), 4));
    world.run();
    world.kill(0);
    world.submit(1, greedy(prompt(2, 10, 128), 4));
    world.run();
    assert_eq!(world.live(1).status().prefill.own, 2);
    assert_equals_single("alone", &world, &spec);
    world.check_empty();
}

/// Memory requested or held by a dead decode worker is freed.
fn decode_workers_die_at_every_stage(mode: Mode) {
    let spec = PoolSpec::golden("llama3_old", 4);
    for stage in ["asked", "pulling", "left behind"] {
        let blocks = if stage == "left behind" { 16 } else { 40 };
        let mut world = pool(&spec, None, &[mode.prefill(60), mode.decode(blocks)], 1);
        world.submit(1, greedy(prompt(1, 90, 128), 30));
        match stage {
            "asked" => world.run_until(|w| w.live(0).status().prefill.jobs > 0),
            "pulling" => run_into_transfer(&mut world, 1),
            _ => world.run_until(|w| w.requests[0].tokens.len() > 3),
        }
        world.kill(1);
        world.run_for(20_000);
        world.check_empty();
        assert_eq!(world.exports(0), 0, "{stage}");
    }
}

fn cancelled_requests_leave_nothing_at_any_stage(mode: Mode) {
    let spec = PoolSpec::golden("llama3_old", 4);
    for stage in ["waiting", "asked", "ready", "pulling", "decoding"] {
        let mut world = pool(&spec, None, &[mode.prefill(60), mode.decode(40)], 1);
        let request = world.submit(1, greedy(prompt(1, 90, 128), 30));
        match stage {
            "asked" => world.run_until(|w| w.live(0).status().prefill.jobs > 0),
            "ready" => world.run_until(|w| w.requests[request].tokens.len() == 1),
            "pulling" => run_into_transfer(&mut world, 1),
            "decoding" => world.run_until(|w| w.requests[request].tokens.len() > 3),
            _ => {}
        }
        world.cancel(request);
        world.run();
        world.check_empty();
        assert_eq!(world.exports(0), 0, "{stage}");
    }
}

/// The gManager dies: old and new requests go on, and the next gManager introduces a worker that comes later.
fn workers_serve_on_without_a_gmanager(mode: Mode) {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[mode.prefill(40), mode.decode(60)], 1);
    world.submit(1, greedy(prompt(1, 60, 128), 8));
    run_into_transfer(&mut world, 1);
    world.kill_gmanager();
    world.submit(1, greedy(prompt(2, 40, 128), 8));
    world.run();
    assert_eq!(world.live(1).status().prefill.pulled, 2);
    world.start_gmanager();
    world.add(mode.prefill(60));
    world.run_until(|w| w.live(1).status().prefill.workers == 2);
    world.submit(1, greedy(prompt(3, 200, 128), 2));
    world.run();
    assert_eq!(world.live(2).status().prefill.jobs_done, 1, "only the new one has room for it");
    assert_equals_single("without a gManager", &world, &spec);
    world.check_empty();
}

/// Connections break at any time.
fn broken_sessions_repeat_what_was_not_answered(mode: Mode) {
    let spec = PoolSpec::golden("llama3_old", 4);
    for stage in ["asked", "ready", "pulling"] {
        let mut world = pool(&spec, None, &[mode.prefill(60), mode.decode(40)], 1);
        let request = world.submit(1, greedy(prompt(1, 90, 128), 6));
        match stage {
            "asked" => world.run_until(|w| w.live(0).status().prefill.jobs > 0),
            "ready" => world.run_until(|w| w.requests[request].tokens.len() == 1),
            _ if mode.push => run_into_reads(&mut world, 1),
            _ => run_into_transfer(&mut world, 1),
        }
        world.cut(0, 1, 500);
        world.run();
        let status = world.live(1).status().prefill;
        // Pushed KV is read before the worker has reported the end of prefill.
        let unreported = stage == "asked" || (stage == "pulling" && mode.push);
        assert_eq!((status.retried > 0, status.own), (unreported, 0), "{stage}: {status:?}");
        assert_equals_single(stage, &world, &spec);
        world.run_for(20_000);
        world.check_empty();
    }
}

/// Many requests in a shuffled, delayed pool, some cancelled, with workers that die and restart.
fn shuffled_pools_give_the_same_tokens_and_leave_nothing(mode: Mode) {
    let spec = PoolSpec::golden("llama3_old", 4);
    for seed in 0..12 {
        let specs = [mode.prefill(30), mode.prefill(24), mode.decode(26), mode.decode(40)];
        let mut world = pool(&spec, Some(seed), &specs, 2);
        let mut rng = lagoon_tests::cluster::Rng::new(seed);
        for n in 0..10 {
            let length = 3 + rng.below(80) as usize;
            let node = 2 + rng.below(2) as usize;
            let request = world.submit(node, greedy(prompt(100 + n, length, 128), 1 + rng.below(10) as u32));
            world.run_for(rng.below(12));
            match rng.below(8) {
                0 => world.cancel(request),
                1 => world.cut(rng.below(2) as usize, node, rng.below(300)),
                2 if world.is_alive(0) => world.kill(0),
                3 if !world.is_alive(0) => world.restart(0),
                4 => world.break_paths_of(1),
                _ => {}
            }
        }
        world.run();
        let done: Vec<usize> = (0..world.requests.len()).filter(|n| !world.requests[*n].cancelled).collect();
        let requests: Vec<_> = done.iter().map(|n| world.requests[*n].request.clone()).collect();
        let single = single(&spec, &requests);
        let tolerance = lagoon_tests::cluster::compare::f32_tolerance(&single);
        for (n, single) in done.iter().zip(&single) {
            let log = &world.requests[*n];
            lagoon_tests::cluster::check::assert_same(&format!("seed {seed}, request {n}"), log, single, tolerance);
        }
        world.run_for(20_000);
        world.check_empty();
    }
}

/// KV of one layer of the model under test, in bytes a token.
const LAYER_TOKEN_BYTES: u64 = 2 * 16 * 4;

/// Pushed KV arrives during prefill, also for a prompt of one step, into memory reserved before; pulled KV arrives
/// afterwards.
#[test]
fn pushed_kv_arrives_while_the_prompt_is_computed() {
    for (mode, step_rows) in [(Mode::PULL, 64), (Mode::PUSH, 64), (Mode::PUSH, 16)] {
        let spec = PoolSpec::golden("llama3_old", 4);
        let worker = Spec { step_rows, step_ms: 40, ..Spec::prefill(40) };
        let mut world = pool(&spec, None, &[worker, mode.decode(40)], 1);
        world.submit(1, greedy(prompt(1, 60, 128), 8));
        world.run_until(|w| w.live(0).status().prefill.queued_tokens > 0);
        let reserved = |w: &World| w.live(1).status().sequences[0].reserved_blocks;
        // 60 tokens, and one for the next token.
        assert_eq!(reserved(&world), if mode.push { 16 } else { 0 });
        world.run_until(|w| !w.requests[0].tokens.is_empty());
        let early = world.live(1).status().prefill.bytes;
        world.run();
        let all = world.live(1).status().prefill.bytes;
        let layers = all / (60 * LAYER_TOKEN_BYTES);
        assert_eq!(all, layers * 60 * LAYER_TOKEN_BYTES);
        // All layers of the last step but the last one are reported before it ends.
        let last_step = if step_rows == 16 { 12 } else { 60 };
        let expected = if mode.push { all - last_step * LAYER_TOKEN_BYTES } else { 0 };
        assert_eq!(early, expected, "{mode:?} in steps of {step_rows}, {layers} layers");
        assert_equals_single("overlapped", &world, &spec);
        world.check_empty();
    }
}

/// The paper's drawback of push: a full decode worker keeps prefill workers idle.
#[test]
fn a_full_decode_worker_keeps_pushed_prompts_back() {
    for mode in [Mode::PULL, Mode::PUSH] {
        let spec = PoolSpec::golden("llama3_old", 4);
        let mut world = pool(&spec, None, &[Spec::prefill(60), mode.decode(30)], 1);
        world.submit(1, greedy(prompt(9, 90, 128), 20));
        world.run_until(|w| w.requests[0].tokens.len() > 2);
        let second = world.submit(1, greedy(prompt(1, 60, 128), 8));
        world.run_until(|w| w.requests[0].tokens.len() > 15);
        let pulled = !mode.push;
        assert_eq!(world.requests[second].tokens.len(), usize::from(pulled), "{mode:?}");
        assert_eq!(world.live(0).status().prefill.jobs_done, 1 + u64::from(pulled), "{mode:?}");
        world.run();
        assert_equals_single("after a full worker", &world, &spec);
        world.check_empty();
    }
}

/// A step fails after some of its layers were read: these are not prefilled again under the same export.
#[test]
fn a_failed_step_ends_what_was_pushed_of_it() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let worker = Spec { step_ms: 40, ..Spec::prefill(40) };
    let mut world = pool(&spec, None, &[worker, Mode::PUSH.decode(40)], 1);
    world.submit(1, greedy(prompt(1, 60, 128), 8));
    run_into_transfer(&mut world, 1);
    world.break_device(0, Fault::Step);
    world.run();
    let (worker, decoder) = (world.live(0).status().prefill, world.live(1).status().prefill);
    assert_eq!((worker.jobs_refused, worker.jobs_done, decoder.pulled, decoder.own), (1, 1, 1, 0), "{worker:?}");
    assert_equals_single("after a failed step", &world, &spec);
    world.check_empty();
    assert_eq!(world.exports(0), 0);
}

/// The worker draws the first token: what may not come so early is not drawn there either.
#[test]
fn a_worker_draws_nothing_that_may_not_come_yet() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[Mode::PULL.prefill(40), Mode::PULL.decode(40)], 1);
    let request = greedy(prompt(1, 50, 128), 4);
    let free = world.submit(1, request.clone());
    world.run();
    let first = world.requests[free].tokens[0];
    let held = world.submit(1, GenerateRequest { min_tokens: 2, stop_ids: vec![first], ..request });
    world.run();
    let output = &world.requests[held].tokens;
    assert!(output.len() >= 2 && !output[..2].contains(&first), "{first}: {output:?}");
    let status = world.live(1).status().prefill;
    assert_eq!((status.pulled, status.own, status.retried), (2, 0, 0), "the worker computed both prompts");
    world.check_empty();
}

/// The worker draws the first token with the request's biases.
#[test]
fn a_worker_adds_the_biases_of_a_request() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[Mode::PULL.prefill(40), Mode::PULL.decode(40)], 1);
    let mut request = greedy(prompt(1, 50, 128), 4);
    request.sampling.logit_bias = [(7, 1000.0)].into();
    let biased = world.submit(1, request);
    world.run();
    assert_eq!(world.requests[biased].tokens, [7; 4]);
    assert_eq!(world.live(1).status().prefill.pulled, 1, "the worker drew the first");
    world.check_empty();
}

/// The worker draws the first token with the request's penalties, over the prompt and what was generated before, and of the
/// allowed tokens only; bad words come as tokens that it may not draw.
#[test]
fn a_worker_draws_by_all_rules_of_a_request() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = pool(&spec, None, &[Mode::PULL.prefill(60), Mode::PULL.decode(60)], 1);
    let mut requests = vec![greedy(prompt(1, 50, 128), 6); 4];
    requests[0].sampling.repetition_penalty = 50.0;
    requests[1].sampling.allowed_token_ids = [3, 9, 70].into();
    let first = single(&spec, &requests[..1])[0].tokens[0];
    requests[2].sampling.repetition_penalty = 50.0;
    requests[2].sampling.bad_words = [Box::from([first])].into();
    // Part of the answer comes with the prompt.
    requests[3].sampling.frequency_penalty = 2.0;
    requests[3].prompt.extend([first; 5]);
    requests[3].answered = 5;
    requests[3].max_tokens = 8;
    requests.into_iter().for_each(|request| _ = world.submit(1, request));
    world.run();
    assert_equals_single("drawn elsewhere", &world, &spec);
    assert_eq!(world.live(1).status().prefill.pulled, 4);
    assert_ne!(world.requests[0].tokens[0], world.requests[2].tokens[0]);
    world.check_empty();
}
