//! Joint prefill: several instances compute one prompt, and the answer is that of one.

use lagoon_instance::{JointConfig, JointStatus};
use lagoon_protocol::{BatchPoint, Calibration};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};

const BLOCK: u32 = 4;

/// An instance that holds the whole prompt, whose steps compute stripes of two rBlocks.
fn spec() -> Spec {
    let joint = JointConfig { instances: 8, tokens_min: 40 };
    Spec { rows: false, joint, step_rows: 2 * BLOCK, ..Spec::cpu(60) }
}

fn pool() -> PoolSpec {
    PoolSpec::golden("llama3_old", BLOCK)
}

fn joint(world: &World, node: usize) -> JointStatus {
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
    for model in ["gemma2", "gpt_oss", "deepseek_v2", "kimi_k2", "bloom", "mixtral", "qwen2"] {
        let pool = PoolSpec::golden(model, BLOCK);
        let mut world = World::pool(pool.clone(), None, &vec![spec(); 3]);
        world.submit(0, greedy(prompt(3, 90, 100), 5));
        world.run();
        assert_equals_single(model, &world, &pool);
        assert_eq!(joint(&world, 0).completed, 1, "{model}");
        world.check_empty();
    }
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
    let mut world = World::pool(pool(), None, &vec![spec(); 3]);
    let document = prompt(1, 50, 128);
    world.submit(0, greedy(document[..30].to_vec(), 2));
    world.run();
    world.run_for(1_000);
    world.submit(0, greedy([document, prompt(2, 70, 128)].concat(), 5));
    world.run();
    assert_equals_single("behind a hit", &world, &pool());
    assert_eq!(joint(&world, 0).completed, 1);
    let shares = computed_elsewhere(&world);
    assert!((40..80).contains(&shares), "two of three parts of about 90 tokens: {shares}");
    // The same prompt again: all of it is found, whoever computed it.
    let again = world.submit(0, greedy([prompt(1, 50, 128), prompt(2, 70, 128)].concat(), 5));
    world.run();
    assert_equals_single("again", &world, &pool());
    assert_eq!(computed_elsewhere(&world), shares, "{}", world.requests[again].prompt.0);
    world.check_empty();
}

#[test]
fn drafts_follow_a_prompt_that_was_computed_together() {
    let drafts = Spec { drafts: 3, ..spec() };
    let mut world = World::pool(pool(), None, &vec![drafts; 3]);
    let repeating = prompt(5, 10, 128).into_iter().cycle().take(90).collect();
    world.submit(0, greedy(repeating, 20));
    world.run();
    assert_equals_single("drafts", &world, &pool());
    assert_eq!(joint(&world, 0).completed, 1);
    assert!(world.live(0).status().drafted_tokens > 0);
    world.check_empty();
}

/// Whenever a member dies, only what it had computed is computed again.
#[test]
fn a_member_that_dies_costs_its_stripes() {
    let slow = Spec { step_ms: 3, ..spec() };
    for (dead, after_ms) in [(1, 0), (1, 12), (2, 20), (2, 33), (1, 50), (3, 70)] {
        let (mut world, _) = begun(&vec![slow.clone(); 4], 160, 5);
        world.run_for(after_ms);
        let was_over = joint(&world, 0).completed == 1;
        world.kill(dead);
        world.run();
        assert_equals_single(&format!("node {dead} dies after {after_ms} ms"), &world, &pool());
        let again = world.live(0).status().recomputed_tokens;
        let share = 160 / 4 + u64::from(3 * BLOCK);
        println!("node {dead} after {after_ms} ms, over {was_over}: {again} tokens again");
        assert!(again <= share, "{again} tokens were computed again, a member has at most {share}");
        assert_eq!(joint(&world, 0).completed, u64::from(was_over));
        world.run_for(20_000);
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

/// A request that decodes on a member goes on meanwhile: with a target, its steps have few rows of the stripes.
#[test]
fn requests_of_members_go_on() {
    let busy = Spec { step_ms: 5, target_step_ms: Some(20), ..spec() };
    let mut world = World::pool(pool(), None, &[busy.clone(), busy.clone(), busy]);
    let other = world.submit(1, greedy(prompt(1, 9, 128), 40));
    world.run_until(|w| w.requests[other].tokens.len() >= 3);
    let id = world.submit(0, greedy(prompt(7, 160, 128), 5));
    let (mut longest_ms, mut last_ms, mut seen) = (0, world.now_ms(), 3);
    while !world.requests[other].is_over() {
        world.step();
        if world.requests[other].tokens.len() > seen {
            longest_ms = longest_ms.max(world.now_ms() - last_ms);
            (last_ms, seen) = (world.now_ms(), world.requests[other].tokens.len());
        }
    }
    world.run();
    assert!(longest_ms <= 20, "{longest_ms} ms between two tokens");
    assert!(world.requests[id].is_over());
    assert_eq!(joint(&world, 0).completed, 1);
    assert_equals_single("beside", &world, &pool());
    world.check_empty();
}
