//! Joint prefill: several instances compute one prompt, and the answer is that of one.

use lagoon_instance::{JointConfig, JointStatus};
use lagoon_protocol::{BatchPoint, Calibration};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};

pub(crate) const BLOCK: u32 = 4;

/// An instance that holds the whole prompt, whose steps compute stripes of two rBlocks.
pub(crate) fn spec() -> Spec {
    let joint = JointConfig { instances: 8, tokens_min: 40 };
    Spec { rows: false, joint, step_rows: 2 * BLOCK, ..Spec::cpu(60) }
}

pub(crate) fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", BLOCK)
}

pub(crate) fn joint(world: &World, node: usize) -> JointStatus {
    world.live(node).status().joint
}

/// Tokens that other instances computed for node 0.
fn computed_elsewhere(world: &World) -> u64 {
    world.nodes().skip(1).filter(|node| world.is_alive(*node)).map(|node| joint(world, node).computed_tokens).sum()
}

/// A world in which node 0 has been given `tokens` tokens and all instances compute.
fn begun(specs: &[Spec], tokens: usize, answer: u32) -> (World, usize) {
    let mut world = World::pool(pool(), None, specs);
    let id = world.submit(0, greedy(prompt(7, tokens, 128), answer));
    world.run_until(|w| joint(w, 0).begun == 1);
    (world, id)
}

#[test]
fn a_prompt_that_several_instances_compute_is_answered_as_by_one() {
    for members in 2..=5 {
        for tokens in [41, 96, 101, 150, 167] {
            let mut world = World::pool(pool(), None, &vec![spec(); members]);
            world.submit(0, greedy(prompt(7, tokens, 128), 6));
            world.run();
            assert_equals_single(&format!("{tokens} tokens, {members} members"), &world, &pool());
            let status = joint(&world, 0);
            assert_eq!((status.begun, status.completed, status.alone), (1, 1, 0), "{tokens} tokens, {members} members");
            // Each member computes a fair share.
            let shares: Vec<u64> = (1..members).map(|node| joint(&world, node).computed_tokens).collect();
            let joined = shares.iter().filter(|share| **share > 0).count() as u64;
            assert!(joined >= 1, "{shares:?}");
            let fair = tokens as u64 / (joined + 1);
            assert!(
                shares.iter().all(|share| *share == 0 || share.abs_diff(fair) <= u64::from(3 * BLOCK)),
                "{shares:?}"
            );
            let status = world.live(0).status();
            assert_eq!((status.recomputed_tokens, status.recoveries), (0, 0));
            world.check_empty();
        }
    }
}

#[test]
fn models_of_every_kind_of_attention_are_computed_together() {
    let of_three = ["gemma2", "gpt_oss", "deepseek_v2", "kimi_k2", "bloom", "mixtral", "qwen2"].map(|of| (of, 3, 90));
    // Windows in some of the layers, and latent KV: with more members, and a last stripe that is short.
    let of_more = [("gpt_oss", 4, 103), ("gemma3", 5, 103), ("deepseek_v2", 4, 107), ("kimi_k2", 5, 107)];
    for (model, members, tokens) in of_three.into_iter().chain(of_more) {
        let pool = PoolSpec::golden(model, BLOCK);
        let mut world = World::pool(pool.clone(), None, &vec![spec(); members]);
        world.submit(0, greedy(prompt(3, tokens, 100), 5));
        world.run();
        assert_equals_single(model, &world, &pool);
        assert_eq!(joint(&world, 0).completed, 1, "{model}");
        let computing = (1..members).filter(|node| joint(&world, *node).computed_tokens > 0).count();
        assert_eq!(computing, members - 1, "{model}");
        world.check_empty();
    }
}

/// With windowed KV kept apart (`--kv-groups=on`) each instance computes its prompts alone.
#[test]
fn windowed_kv_that_is_kept_apart_is_computed_alone() {
    let split = PoolSpec { split: true, ..PoolSpec::golden("gemma3", BLOCK) };
    let mut world = World::pool(split.clone(), None, &vec![spec(); 3]);
    world.submit(0, greedy(prompt(3, 103, 100), 5));
    world.run();
    assert_equals_single("apart", &world, &split);
    assert_eq!((joint(&world, 0).begun, joint(&world, 0).alone), (0, 0), "nobody is asked");
    world.check_empty();
}

/// Every backend as owner and as member. CUDA here without address rows.
#[test]
fn backends_are_mixed() {
    let name = "backends_are_mixed";
    if let Err(reason) = lagoon_tests::wgpu() {
        return lagoon_tests::skip(name, &reason);
    }
    let pool = PoolSpec::golden("head_dim_64", 16);
    let on = |backend| Spec { backend, step_rows: 16, ..spec() };
    let (cpu, wgpu, cuda) = (Backend::Cpu, Backend::Wgpu, Backend::Cuda);
    for (seed, backends) in (90..).zip([[wgpu, cpu, cuda], [cuda, cpu, wgpu]]) {
        let Some(fake) = crate::cuda::driver(name, seed) else { return };
        let mut world = World::pool(pool.clone(), None, &backends.map(on));
        world.submit(0, greedy(prompt(3, 100, 128), 2));
        world.run();
        assert_equals_single(&format!("{backends:?}"), &world, &pool);
        assert_eq!(joint(&world, 0).completed, 1, "{backends:?}");
        world.check_empty();
        drop(world);
        fake.finish();
    }
}

#[test]
fn kv_is_fetched_as_well_as_queries_are_shipped() {
    let fetches = Spec { remote: lagoon_instance::RemotePolicy::Fetch, ..spec() };
    let mut world = World::pool(pool(), None, &[fetches.clone(), spec(), fetches]);
    world.submit(0, greedy(prompt(7, 121, 128), 5));
    world.run();
    assert_equals_single("fetched", &world, &pool());
    assert_eq!(joint(&world, 0).completed, 1);
    world.check_empty();
}

#[test]
fn members_compute_what_lies_behind_a_prefix_cache_hit() {
    for (members, question) in [(2, 67), (3, 70), (4, 81), (5, 90)] {
        let mut world = World::pool(pool(), None, &vec![spec(); members]);
        let document = prompt(1, 50, 128);
        world.submit(0, greedy(document[..30].to_vec(), 2));
        world.run();
        world.run_for(1_000);
        world.submit(0, greedy([document, prompt(2, question, 128)].concat(), 5));
        world.run();
        let what = format!("{members} members behind a hit");
        assert_equals_single(&what, &world, &pool());
        assert_eq!(joint(&world, 0).completed, 1, "{what}");
        let shares = computed_elsewhere(&world);
        let fair = (50 - 28 + question as u64) * (members as u64 - 1) / members as u64;
        assert!(shares.abs_diff(fair) <= 16, "{what}: {shares} of about {fair} tokens");
        // The same prompt again: all of it is found, whoever computed it.
        let again = world.submit(0, greedy([prompt(1, 50, 128), prompt(2, question, 128)].concat(), 5));
        world.run();
        assert_equals_single("again", &world, &pool());
        assert_eq!(computed_elsewhere(&world), shares, "{}", world.requests[again].prompt.0);
        world.check_empty();
    }
}

#[test]
fn drafts_follow_a_prompt_that_was_computed_together() {
    for (members, tokens, hit) in [(2, 89, 0), (3, 90, 0), (4, 103, 30), (5, 111, 22)] {
        let drafts = Spec { drafts: 3, ..spec() };
        let mut world = World::pool(pool(), None, &vec![drafts; members]);
        let repeating: Vec<u32> = prompt(5, 10, 128).into_iter().cycle().take(tokens).collect();
        if hit > 0 {
            world.submit(0, greedy(repeating[..hit].to_vec(), 1));
            world.run();
        }
        let before = world.live(0).status().drafted_tokens;
        let id = world.submit(0, greedy(repeating, 20));
        world.run();
        let what = format!("{members} members, {tokens} tokens");
        assert_equals_single(&what, &world, &pool());
        assert_eq!(joint(&world, 0).completed, 1, "{what}");
        assert!(world.live(0).status().drafted_tokens > before, "{what}");
        assert_eq!(world.requests[id].prompt.0 > 0, hit > 0, "{what}: cached tokens");
        world.check_empty();
    }
}

#[test]
fn an_owner_that_dies_or_whose_client_leaves_frees_the_members() {
    for kill in [true, false] {
        for after_ms in [0, 15, 40] {
            let slow = Spec { step_ms: 3, ..spec() };
            let (mut world, id) = begun(&vec![slow; 3], 160, 5);
            world.run_for(after_ms);
            if kill {
                world.kill(0);
            } else {
                world.cancel(id);
            }
            world.run_for(20_000);
            for node in world.nodes().skip(usize::from(kill)) {
                let status = world.live(node).status();
                assert_eq!((status.running, status.blocks_lent, status.blocks_borrowed), (0, 0, 0), "node {node}");
            }
            world.check_empty();
        }
    }
}

#[test]
fn a_connection_that_is_cut_between_members_ends_it_and_the_answer_stays() {
    for (a, b) in [(1, 2), (0, 1)] {
        let slow = Spec { step_ms: 3, ..spec() };
        let (mut world, _) = begun(&vec![slow; 3], 160, 5);
        world.run_for(20);
        world.cut(a, b, 500);
        world.run();
        assert_equals_single("a cut", &world, &pool());
        assert_eq!(joint(&world, 0).completed, 0);
        world.run_for(20_000);
        world.check_empty();
    }
}

/// Instances that are busy, or too full, do not join; with none the prompt is computed alone.
#[test]
fn who_cannot_join_does_not() {
    let full = Spec { running: 1, ..spec() };
    let mut world = World::pool(pool(), None, &[spec(), full.clone(), full]);
    for node in [1, 2] {
        world.submit(node, greedy(prompt(node as u64, 9, 128), 60));
    }
    world.run_until(|w| (1..3).all(|id| w.live(id).status().running == 1));
    let id = world.submit(0, greedy(prompt(7, 120, 128), 5));
    world.run();
    let status = joint(&world, 0);
    assert_eq!((status.begun, status.alone), (0, 1));
    assert!(world.requests[id].is_over());
    assert_equals_single("alone", &world, &pool());
    let off = Spec { joint: JointConfig::OFF, ..spec() };
    let mut world = World::pool(pool(), None, &[spec(), off]);
    world.submit(0, greedy(prompt(7, 120, 128), 5));
    world.run();
    assert_eq!((joint(&world, 0).begun, joint(&world, 0).alone), (0, 1));
    world.check_empty();
}

/// A device that takes `prefill_us` for a token of a prompt.
fn calibration(prefill_us: f64) -> Option<Calibration> {
    Some(Calibration {
        batches: vec![BatchPoint { batch: 1, step_us: 100.0 }],
        attention_us_per_ktoken: 1.0,
        prefill_us_per_token: prefill_us,
        copy_bytes_per_s: 1e9,
        prompt_attention_us_per_ktoken: 0.0,
    })
}

/// Where a request decodes and less than half of a step's rows fits its target, no part of a prompt is computed.
#[test]
fn who_has_few_rows_left_does_not_join() {
    for (target_ms, begun) in [(10, 0), (60, 1)] {
        let spec = Spec { blocks: 80, step_rows: 66, calibration: calibration(1_000.0), ..spec() };
        let busy = Spec { target_step_ms: Some(target_ms), ..spec.clone() };
        let mut world = World::pool(pool(), None, &[spec, busy]);
        let other = world.submit(1, greedy(prompt(1, 9, 128), 60));
        world.run_until(|w| w.requests[other].tokens.len() >= 3);
        let id = world.submit(0, greedy(prompt(7, 230, 128), 5));
        world.run_until(|w| w.requests[id].is_over());
        assert!(!world.requests[other].is_over(), "it decoded meanwhile");
        world.run();
        let status = joint(&world, 0);
        assert_eq!((status.begun, status.alone), (begun, 1 - begun), "target of {target_ms} ms");
        assert_equals_single("few rows", &world, &pool());
        world.check_empty();
    }
}

/// By default a prompt is computed together if one instance would take two seconds for it; nobody is asked about others.
#[test]
fn prompts_of_less_than_two_seconds_are_computed_alone() {
    for (prefill_us, begun) in [(11_500.0, 0), (12_500.0, 1)] {
        let joint_config = JointConfig { instances: 0, tokens_min: 40 };
        let spec = Spec { joint: joint_config, calibration: calibration(prefill_us), ..spec() };
        let mut world = World::pool(pool(), None, &[spec.clone(), spec]);
        world.submit(0, greedy(prompt(7, 167, 128), 5));
        world.run();
        let status = joint(&world, 0);
        assert_eq!((status.begun, status.alone), (begun, 0), "{prefill_us} us a token");
        world.check_empty();
    }
}

/// Longest times between two tokens of requests that decode on the owner and on a member while three instances compute a prompt
/// in steps of up to 96 rows of half a millisecond each.
fn longest_waits_beside(target_ms: Option<u32>) -> [u64; 2] {
    let busy = Spec {
        blocks: 300,
        step_rows: 96,
        row_us: 500,
        calibration: calibration(500.0),
        target_step_ms: target_ms,
        ..spec()
    };
    let pool = PoolSpec::golden("mpt", BLOCK);
    let mut world = World::pool(pool.clone(), None, &vec![busy; 3]);
    let others = [0, 1].map(|node| world.submit(node, greedy(prompt(node as u64, 9, 140), 490)));
    world.run_until(|w| others.iter().all(|id| w.requests[*id].tokens.len() >= 3));
    let id = world.submit(0, greedy(prompt(7, 490, 140), 3));
    let mut seen = others.map(|id| (world.requests[id].tokens.len(), world.now_ms()));
    let mut longest_ms = [0; 2];
    while world.requests[id].tokens.is_empty() {
        world.step();
        for ((id, (tokens, last_ms)), longest_ms) in others.iter().zip(&mut seen).zip(&mut longest_ms) {
            let log = &world.requests[*id];
            assert!(!log.is_over(), "it decodes meanwhile");
            if log.tokens.len() > *tokens {
                *longest_ms = (*longest_ms).max(world.now_ms() - *last_ms);
                (*tokens, *last_ms) = (log.tokens.len(), world.now_ms());
            }
        }
    }
    println!("target {target_ms:?}: at most {longest_ms:?} ms between two tokens");
    assert_eq!(joint(&world, 0).completed, 1);
    assert!(joint(&world, 1).computed_tokens >= 128, "two or more steps of it");
    world.run();
    assert_equals_single("beside", &world, &pool);
    world.check_empty();
    longest_ms
}

/// Requests that decode on a member and on the owner go on meanwhile: with a target, steps have fewer rows of the stripes.
#[test]
fn requests_of_all_members_go_on_within_their_target() {
    // A step has 79 rows; between two of them there is one of decoding rows.
    let within = longest_waits_beside(Some(40));
    assert!(within.iter().all(|ms| (30..=42).contains(ms)), "{within:?} ms between two tokens");
    let full = longest_waits_beside(None);
    assert!(full.iter().all(|ms| *ms > 45), "without a target steps are full: {full:?} ms between two tokens");
}
