//! Speculative decoding changes no answer: drafts that were sampled count, the others leave nothing, wherever the KV is.

use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{PoolSpec, Spec, World, greedy};
use lagoon_types::{DType, GenerateRequest, SamplingParams};

/// A prompt that repeats itself: its newest tokens were there before.
fn repeated(seed: u64, n: usize, vocab: u32) -> Vec<u32> {
    let part = prompt(seed, 9, vocab);
    part.iter().cycle().take(n).copied().collect()
}

/// Drafted tokens of all nodes, and those that were sampled.
fn drafted(world: &World) -> (u64, u64) {
    let of = |node| {
        let status = world.live(node).status();
        (status.drafted_tokens, status.accepted_tokens)
    };
    world.nodes().map(of).fold((0, 0), |(d, a), (drafted, accepted)| (d + drafted, a + accepted))
}

/// Each model with its own attention: windows, soft caps, latents, ALiBi.
#[test]
fn one_instance_gives_the_same_answers() {
    let (mut all, mut counted) = (0, 0);
    for name in ["llama3_old", "mistral_window", "gemma2", "deepseek_v2", "mpt", "qwen3_moe"] {
        let pool = PoolSpec::golden(name, 4);
        for drafts in [1, 5, 16] {
            let mut world = World::single(pool.clone(), Spec { drafts, step_rows: 24, ..Spec::cpu(80) });
            for seed in 0..3 {
                world.submit(0, greedy(repeated(seed, 30 + seed as usize, 120), 40));
            }
            world.run();
            assert_equals_single(&format!("{name}, {drafts}"), &world, &pool);
            let (d, a) = drafted(&world);
            (all, counted) = (all + d, counted + a);
            world.check_empty();
        }
    }
    println!("{counted} of {all} drafts were sampled");
    assert!(counted > 100 && counted < all, "{counted} of {all}: both kinds must be there");
}

/// The newest tokens' KV is written to a creditor: only what counts is sent, and blocks are sealed with the right hashes.
#[test]
fn drafts_behind_a_remote_end_are_sent_when_they_count() {
    let (mut all, mut counted) = (0, 0);
    for name in ["llama3_old", "mistral_window", "yi"] {
        let pool = PoolSpec::golden(name, 8);
        for delay_ms in [0, 10] {
            let specs = [Spec { drafts: 8, ..Spec::cpu(3) }, Spec { drafts: 8, ..Spec::cpu(20) }];
            let mut world = World::delayed(pool.clone(), (Some(delay_ms), delay_ms), &specs);
            for seed in 0..2 {
                world.submit(0, greedy(repeated(seed, 40, 120), 40));
                world.run();
            }
            assert!(world.sent("write").0 > 0 && world.sent("seal").0 > 0, "{name}");
            assert_equals_single(&format!("{name}, {delay_ms} ms"), &world, &pool);
            let (d, a) = drafted(&world);
            (all, counted) = (all + d, counted + a);
            world.run_for(20_000);
            world.check_empty();
        }
    }
    println!("{counted} of {all} drafts were sampled");
    assert!(counted > 30 && counted < all, "{counted} of {all}");
}

/// A creditor dies and comes back while drafts are verified: what is lost is computed again, no token is wrong.
#[test]
fn a_creditor_dies_between_drafts() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let specs = [Spec { drafts: 8, ..Spec::cpu(8) }, Spec::cpu(20), Spec::cpu(20)];
    for tokens in [1, 5, 9, 14] {
        let mut world = World::pool(pool.clone(), Some(tokens), &specs);
        world.submit(0, greedy(repeated(tokens, 60, 128), 30));
        world.run_until(|w| w.requests[0].tokens.len() as u64 >= tokens);
        let creditor = world.nodes().skip(1).find(|node| world.live(*node).status().blocks_lent > 0);
        world.kill(creditor.unwrap_or(1));
        world.run();
        assert_equals_single(&format!("killed after {tokens}"), &world, &pool);
        assert!(drafted_by(&world, 0) > 0);
    }
}

fn drafted_by(world: &World, node: usize) -> u64 {
    world.live(node).status().drafted_tokens
}

/// Draws depend on seed and index alone: a sampled answer is that of single tokens, too; and lengths and stops are kept.
#[test]
fn sampled_answers_and_their_ends_stay() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let request = |seed: u64, temperature: f32, stop: &[u32], (min_tokens, max_tokens): (u32, u32)| GenerateRequest {
        sampling: SamplingParams { temperature, seed, ..SamplingParams::default() },
        stop_ids: stop.to_vec(),
        min_tokens,
        ..greedy(repeated(seed, 33, 120), max_tokens)
    };
    let mut requests = Vec::new();
    for seed in 0..6 {
        requests.push(request(seed, 0.3, &[], (0, 25)));
        requests.push(request(seed, 0.0, &[], (0, 1 + seed as u32)));
    }
    let answers = {
        let mut world = World::single(pool.clone(), Spec::cpu(60));
        requests.iter().for_each(|request| _ = world.submit(0, request.clone()));
        world.run();
        world.requests
    };
    // Ends in the middle of what would be drafted.
    for log in &answers {
        let last = log.tokens[log.tokens.len() / 2];
        requests.push(GenerateRequest { stop_ids: vec![last], ..log.request.clone() });
        requests.push(GenerateRequest {
            stop_ids: vec![last],
            min_tokens: log.request.max_tokens,
            ..log.request.clone()
        });
    }
    let mut world = World::single(pool.clone(), Spec { drafts: 16, running: 3, queue: 64, ..Spec::cpu(60) });
    requests.iter().for_each(|request| _ = world.submit(0, request.clone()));
    world.run();
    assert_equals_single("ends", &world, &pool);
    assert!(drafted(&world).1 > 0);
    world.check_empty();
}

/// Preempted sequences compute their tokens again, drafts or not; 16-bit KV in blocks that are found again.
#[test]
fn preempted_and_cached() {
    let pool = PoolSpec { kv_dtype: DType::F16.into(), ..PoolSpec::golden("llama3_old", 4) };
    let mut world = World::single(pool.clone(), Spec { rows: false, drafts: 8, ..Spec::cpu(24) });
    world.submit(0, greedy(repeated(1, 40, 128), 24));
    world.submit(0, greedy(repeated(2, 40, 128), 24));
    world.run();
    world.submit(0, greedy(repeated(1, 40, 128), 24));
    world.run();
    let status = world.live(0).status();
    assert!(status.preemptions > 0 && status.prefix.hit_tokens > 0 && status.accepted_tokens > 0, "{status:?}");
    let (first, again) = (&world.requests[0].tokens, &world.requests[2].tokens);
    assert_eq!(first, again);
    world.check_empty();
}
