//! KV of layers with a window in rings of the debtor's own: a pool gives transformers' answers, whatever of the pooled KV
//! is remote, lost, moved, swapped out, found in the prefix cache or computed elsewhere.

use lagoon_instance::{InstanceStatus, RemotePolicy};
use lagoon_model::ModelSpec;
use lagoon_tests::cluster::check::assert_same;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt, single};
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};
use lagoon_tests::golden::{Golden, max_diff};

/// Golden models that have both kinds of layers.
const MODELS: [&str; 3] = ["gpt_oss", "gemma2", "gemma3"];

fn pool(name: &str) -> PoolSpec {
    PoolSpec { split: true, ..PoolSpec::golden(name, 4) }
}

fn warm_up(name: &str) -> u64 {
    let mut spec = ModelSpec::open(&pool(name).dir).unwrap();
    spec.split_kv().unwrap();
    u64::from(spec.split.unwrap().warm_up)
}

fn status(world: &World, node: usize) -> InstanceStatus {
    world.live(node).status()
}

fn run_to_token(world: &mut World, request: usize, tokens: usize) {
    world.run_until(|w| w.requests[request].tokens.len() >= tokens || w.requests[request].is_over());
    assert!(!world.requests[request].is_over(), "{:?}", world.requests[request].end);
}

pub(crate) fn equals_transformers(
    pool: PoolSpec,
    name: &str,
    [debtor, first, second]: [Backend; 3],
    remote: RemotePolicy,
) {
    let golden = Golden::load(name);
    let tokens = golden.description.tokens.clone();
    let last = tokens.len() - 1;
    let blocks = 32 / pool.block_tokens;
    let spec = |backend| Spec { step_rows: 9, remote, backend, ..Spec::cpu(blocks) };
    let mut world = World::pool(pool, None, &[spec(debtor), spec(first), spec(second)]);
    world.submit(0, greedy(tokens, golden.description.greedy_continuation.len() as u32));
    world.run();
    let log = &world.requests[0];
    let diff = max_diff(&log.logits[0], golden.at(last).unwrap());
    assert!(diff <= golden.description.tolerance_f32, "{name}: {diff}");
    assert_eq!(log.tokens, golden.description.greedy_continuation, "{name}");
    assert!(world.sent("partial").0 + world.sent("read").0 > 0, "{name}");
    assert_eq!(status(&world, 0).warm_up_tokens, 0, "{name}");
    world.check_empty();
}

#[test]
fn split_pools_equal_transformers() {
    for name in MODELS {
        for remote in [RemotePolicy::Ship, RemotePolicy::Fetch] {
            equals_transformers(pool(name), name, [Backend::Cpu; 3], remote);
        }
    }
}

#[test]
fn split_pools_of_wgpu_equal_transformers() {
    if let Err(reason) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("split_pools_of_wgpu_equal_transformers", &reason);
    }
    let (cpu, wgpu) = (Backend::Cpu, Backend::Wgpu);
    equals_transformers(pool("gpt_oss"), "gpt_oss", [wgpu, cpu, wgpu], RemotePolicy::Ship);
    equals_transformers(pool("gemma3"), "gemma3", [cpu, wgpu, cpu], RemotePolicy::Ship);
}

#[test]
fn rblocks_hold_layers_without_a_window_only() {
    let world = World::pool(pool("gpt_oss"), None, &[Spec::cpu(8)]);
    let mut of_all = ModelSpec::open(&pool("gpt_oss").dir).unwrap();
    let layers = of_all.kv_shape(lagoon_types::KvDType::F32).layers;
    of_all.split_kv().unwrap();
    assert!(world.shape(0).layers < layers);
    assert_eq!(world.shape(0).layers, of_all.kv_shape(lagoon_types::KvDType::F32).layers);
}

/// The ring stays where it was; a lost range is computed after its windows, and then the ring of the next token is filled
/// again.
#[test]
fn what_a_dead_creditor_had_is_computed_after_its_windows() {
    for name in MODELS {
        let creditor = Spec { lend_blocks_max: 9, ..Spec::cpu(12) };
        let mut world = World::pool(pool(name), None, &[Spec::cpu(8), creditor.clone(), creditor]);
        world.submit(0, greedy(prompt(200, 80, 120), 10));
        run_to_token(&mut world, 0, 3);
        world.add(Spec::cpu(16));
        let (dead, blocks) = status(&world, 0).sequences[0].remote_blocks.iter().next().map(|(c, b)| (*c, *b)).unwrap();
        let dead = world.nodes().find(|n| world.id(*n) == Some(dead)).unwrap();
        world.kill(dead);
        world.run();
        let status = status(&world, 0);
        assert_eq!((status.recomputed_tokens, status.preemptions), (u64::from(blocks) * 4, 0), "{name}: {status:?}");
        let most = 2 * warm_up(name);
        assert!(
            status.warm_up_tokens > 0 && status.warm_up_tokens <= most,
            "{name}: {} of {most}",
            status.warm_up_tokens
        );
        assert_equals_single(name, &world, &PoolSpec::golden(name, 4));
        world.run_for(16_000);
        world.check_empty();
    }
}

/// A split pool of one instance says what one that is not split says, also where the second request finds the first one's
/// blocks.
#[test]
fn a_prefix_that_is_found_is_warmed_up_from() {
    for name in MODELS {
        let request = greedy(prompt(7, 90, 120), 6);
        let alone = single(&PoolSpec::golden(name, 4), std::slice::from_ref(&request));
        let spec = Spec { prefix_cache: true, ..Spec::cpu(40) };
        let mut world = World::pool(pool(name), None, &[spec]);
        for again in 0..2 {
            world.submit(0, request.clone());
            world.run();
            assert_same(&format!("{name}, {again}"), &world.requests[again], &alone[0], 1e-4);
        }
        let found = status(&world, 0);
        // All 88 positions but those that warm up were not computed again, and none of their KV was.
        let again = (found.prefix.hit_tokens, found.warm_up_tokens, found.recomputed_tokens);
        assert_eq!(again, (88, warm_up(name).min(88), 0), "{name}");
        world.check_empty();
    }
}
