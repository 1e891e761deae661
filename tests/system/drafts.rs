//! Speculative decoding changes no answer: drafts that were sampled are accepted, the others leave nothing, wherever the KV is.

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
    let (mut all, mut accepted) = (0, 0);
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
            (all, accepted) = (all + d, accepted + a);
            world.check_empty();
        }
    }
    println!("{accepted} of {all} drafts were accepted");
    assert!(accepted > 100 && accepted < all, "{accepted} of {all}: both kinds must be there");
}

/// The newest tokens' KV is written to a creditor: only accepted rows are sent, and blocks are sealed with the right hashes.
#[test]
fn drafts_behind_a_remote_end_are_sent_when_they_are_accepted() {
    let (mut all, mut accepted) = (0, 0);
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
            (all, accepted) = (all + d, accepted + a);
            world.run_for(20_000);
            world.check_empty();
        }
    }
    println!("{accepted} of {all} drafts were accepted");
    assert!(accepted > 30 && accepted < all, "{accepted} of {all}");
}

/// A creditor dies while drafts are verified, and comes back: what is lost is computed again, no token is wrong.
#[test]
fn a_creditor_dies_between_drafts() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let specs = [Spec { drafts: 8, ..Spec::cpu(8) }, Spec::cpu(20), Spec::cpu(20)];
    let (mut recoveries, mut accepted) = (0, 0);
    for tokens in [1, 5, 9, 14] {
        let mut world = World::pool(pool.clone(), Some(tokens), &specs);
        world.submit(0, greedy(repeated(tokens, 60, 128), 30));
        world.run_until(|w| w.requests[0].tokens.len() as u64 >= tokens);
        let creditor = world.nodes().skip(1).find(|node| world.live(*node).status().blocks_lent > 0);
        let creditor = creditor.expect("a creditor lends");
        world.kill(creditor);
        world.run_for(4_000);
        world.restart(creditor);
        world.run();
        assert_equals_single(&format!("killed after {tokens}"), &world, &pool);
        let status = world.live(0).status();
        (recoveries, accepted) = (recoveries + status.recoveries, accepted + status.accepted_tokens);
    }
    assert!(recoveries > 0 && accepted > 0, "{recoveries} recoveries, {accepted} drafts accepted");
}

/// A prompt that a worker computed goes on with drafts here.
#[test]
fn a_prompt_from_a_worker_goes_on_with_drafts() {
    let pool = PoolSpec::golden("llama3_old", 4);
    for push in [false, true] {
        let decode = Spec { push, drafts: 8, ..Spec::decode(40) };
        let mut world = World::pool(pool.clone(), None, &[Spec { push, drafts: 8, ..Spec::prefill(40) }, decode]);
        world.run_for(2_000);
        for seed in 0..3 {
            world.submit(1, greedy(repeated(seed, 40, 120), 30));
        }
        world.run();
        assert_equals_single(&format!("push {push}"), &world, &pool);
        let of = |node| world.live(node).status();
        assert!(of(1).accepted_tokens > 0 && of(0).drafted_tokens == 0, "push {push}");
        assert!(world.exports(0) == 0 || world.reads() > 0, "push {push}: nothing was computed by the worker");
    }
}

/// A ring does not go back, and what may come next depends on the tokens before: no drafts; others have theirs beside.
#[test]
fn no_drafts_where_they_cannot_be_taken_back() {
    let split = PoolSpec { split: true, ..PoolSpec::golden("gemma3", 4) };
    let mut world = World::single(split.clone(), Spec { drafts: 8, ..Spec::cpu(60) });
    world.submit(0, greedy(repeated(1, 40, 120), 20));
    world.run();
    assert_equals_single("rings", &world, &split);
    assert_eq!(drafted(&world).0, 0);

    let pool = PoolSpec::golden("llama3_old", 4);
    let penalised = |seed, drafts: bool| {
        let mut request = greedy(repeated(seed, 40, 120), 20);
        request.sampling.repetition_penalty = if drafts { 1.0 } else { 1.3 };
        request.options.prompt_logprobs = Some(2);
        request
    };
    let mut world = World::single(pool.clone(), Spec { drafts: 8, step_rows: 24, ..Spec::cpu(60) });
    world.submit(0, penalised(1, false));
    world.run();
    assert_eq!(drafted(&world).0, 0);
    world.submit(0, penalised(2, true));
    world.submit(0, penalised(3, false));
    world.run();
    assert_equals_single("beside penalties", &world, &pool);
    assert!(drafted(&world).1 > 0);
    assert!(world.requests.iter().all(|log| log.prompt.1.len() == 39));
    world.check_empty();
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
    let answers = [0, 8].map(|drafts| {
        let mut world = World::single(pool.clone(), Spec { rows: false, drafts, ..Spec::cpu(24) });
        world.submit(0, greedy(repeated(1, 40, 128), 24));
        world.submit(0, greedy(repeated(2, 40, 128), 24));
        world.run();
        world.submit(0, greedy(repeated(1, 40, 128), 24));
        world.run();
        let status = world.live(0).status();
        assert!(status.preemptions > 0 && status.prefix.hit_tokens > 0, "{status:?}");
        assert_eq!(status.accepted_tokens > 0, drafts > 0, "{status:?}");
        world.check_empty();
        world.requests.iter().map(|log| log.tokens.clone()).collect::<Vec<_>>()
    });
    assert_eq!(answers[0], answers[1]);
}

/// The draft model is the model itself, which is always right, or another one, which hardly ever is; on prompts without repetition.
#[test]
fn a_draft_model_changes_no_answer() {
    // Under a window sequences hold less, and waiting ones have it before they have asked the pool for what it caches.
    for (name, model, delay_ms, blocks) in
        [("llama3_old", "llama3_old", 0, 24), ("llama3_old", "yi", 0, 24), ("mistral_window", "llama3_old", 3, 20)]
    {
        let pool = PoolSpec::golden(name, 4);
        // Three sequences grow beyond the first instance's memory, and more wait.
        let of = Spec { drafts: 6, draft_model: Some((model, 1000)), step_rows: 24, running: 3, ..Spec::cpu(blocks) };
        let mut world = World::delayed(pool.clone(), (Some(7), delay_ms), &[of, Spec::cpu(40)]);
        for seed in 0..5 {
            world.submit(0, greedy(prompt(seed, 20 + 9 * seed as usize, 120), 30));
        }
        world.run();
        assert_equals_single(&format!("{name} with {model}"), &world, &pool);
        assert!(world.sent("write").0 > 0, "{name}: nothing was borrowed");
        let (drafted, accepted) = drafted(&world);
        println!("{name} with {model}: {accepted} of {drafted} drafts were accepted");
        assert!(drafted > 15, "{name} with {model}: {drafted}");
        assert!(model != name || accepted * 10 > drafted * 9, "{name} with {model}: {accepted} of {drafted}");
        world.run_for(20_000);
        world.check_empty();
    }
}

/// Drafts go beyond the last rBlock where own memory is free; where it is not, they end with it, and nothing is borrowed for them.
#[test]
fn growth_looks_ahead_for_drafts_in_free_memory() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let longest_step = |blocks: u32, drafts: u32| {
        let draft_model = (drafts > 0).then_some(("llama3_old", 400));
        let of = Spec { drafts, draft_model, step_rows: 24, ..Spec::cpu(blocks) };
        let mut world = World::pool(pool.clone(), Some(3), &[of, Spec::cpu(40)]);
        world.run_for(2_000);
        world.submit(0, greedy(prompt(5, 30, 120), 60));
        let (mut longest, mut before) = (0, 0);
        while !world.requests[0].is_over() {
            world.step();
            let now = world.requests[0].tokens.len();
            longest = longest.max(now - before);
            before = now;
        }
        assert_equals_single(&format!("{blocks} blocks"), &world, &pool);
        let borrowed = world.live(0).status().blocks_borrowed_total;
        world.run_for(20_000);
        world.check_empty();
        (longest, borrowed)
    };
    assert_eq!(longest_step(60, 16), (17, 0), "a token and 16 drafts");
    let (single, borrowed) = longest_step(9, 0);
    assert!(single == 1 && borrowed > 0, "{single} {borrowed}");
    assert_eq!(longest_step(9, 16).1, borrowed, "nothing is borrowed for a draft");
}

/// Its memory holds one sequence in three: the others get no drafts from it, and their answers stay. What it forgot it computes again.
#[test]
fn a_draft_model_with_little_memory_drafts_for_some() {
    let pool = PoolSpec::golden("llama3_old", 4);
    for (kv_tokens, all) in [(72, false), (4, false), (400, true)] {
        let of = Spec { drafts: 4, draft_model: Some(("llama3_old", kv_tokens)), step_rows: 24, ..Spec::cpu(120) };
        let mut world = World::single(pool.clone(), of);
        for round in 0..2 {
            for seed in 0..3 {
                world.submit(0, greedy(prompt(3 * round + seed, 30, 120), 24));
            }
            world.run();
        }
        assert_equals_single(&format!("{kv_tokens} tokens"), &world, &pool);
        let (drafted, accepted) = drafted(&world);
        println!("{kv_tokens} tokens: {accepted} of {drafted} drafts were accepted");
        assert_eq!(accepted > 6 * 10, all, "{accepted} of {drafted}");
        assert!(kv_tokens < 70 || accepted > 10, "{accepted} of {drafted}");
        world.check_empty();
    }
}

/// A sequence that the draft model refuses has the lookups that it would have without one.
#[test]
fn text_is_looked_up_where_the_draft_model_has_no_room() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let [with, without] = [Some(("llama3_old", 4)), None].map(|draft_model| {
        let of = Spec { drafts: 4, draft_model, step_rows: 24, ..Spec::cpu(80) };
        let mut world = World::single(pool.clone(), of);
        for seed in 0..3 {
            world.submit(0, greedy(repeated(seed, 30, 120), 40));
        }
        world.run();
        assert_equals_single("no room", &world, &pool);
        drafted(&world)
    });
    assert!(with == without && with.0 > 0, "{with:?} with a model, {without:?} without one");
}

/// The draft model's memory holds one sequence: that of one that has ended is free for the next.
#[test]
fn an_ended_sequence_leaves_its_place_in_the_draft_model() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let of = Spec { drafts: 4, draft_model: Some(("llama3_old", 72)), step_rows: 24, ..Spec::cpu(80) };
    let mut world = World::single(pool.clone(), of);
    let mut accepted = vec![0];
    for seed in 0..4 {
        world.submit(0, greedy(prompt(seed, 30, 120), 24));
        world.run();
        accepted.push(drafted(&world).1);
    }
    assert_equals_single("one after the other", &world, &pool);
    assert!(accepted.windows(2).all(|pair| pair[1] > pair[0] + 8), "{accepted:?}");
}
