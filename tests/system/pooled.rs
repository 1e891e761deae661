//! A pool gives a single instance's answers: on every backend, in prefill and decode, wherever the KV is.

use lagoon_instance::RemotePolicy;
use lagoon_protocol::Role;
use lagoon_tests::cluster::check::assert_same;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt, single};
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};
use lagoon_tests::golden::Golden;
use lagoon_types::{DType, InstanceId, KvDType};
use std::collections::BTreeMap;

/// Blocks of the first request on its own instance and on creditors.
fn placement(world: &World, node: usize) -> (u32, BTreeMap<InstanceId, u32>) {
    let status = world.live(node).status();
    let seq = &status.sequences[0];
    (seq.local_blocks, seq.remote_blocks.clone())
}

/// Runs until a request has `tokens` tokens.
fn run_to_token(world: &mut World, request: usize, tokens: usize) {
    world.run_until(|w| w.requests[request].tokens.len() >= tokens || w.requests[request].is_over());
    assert!(!world.requests[request].is_over(), "{:?}", world.requests[request].end);
}

#[test]
fn two_instances_equal_one() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let mut world = World::pool(pool.clone(), None, &[Spec::cpu(10), Spec::cpu(30)]);
    world.submit(0, greedy(prompt(1, 100, 128), 12));
    run_to_token(&mut world, 0, 1);
    let (local, remote) = placement(&world, 0);
    assert_eq!((local, remote.values().sum::<u32>()), (10, 16));
    world.run();
    assert!(world.sent("partial").0 > 0 && world.sent("write").0 > 0 && world.sent("seal").0 > 0);
    let diff = assert_equals_single("two instances", &world, &pool);
    println!("largest difference {diff:e}");
    world.check_empty();
}

#[test]
fn most_of_a_context_on_two_creditors() {
    let pool = PoolSpec::golden("yi", 4);
    let creditor = Spec { lend_blocks_max: 10, ..Spec::cpu(12) };
    let mut world = World::pool(pool.clone(), None, &[Spec::cpu(4), creditor.clone(), creditor]);
    world.submit(0, greedy(prompt(2, 90, 150), 4));
    run_to_token(&mut world, 0, 1);
    let (local, remote) = placement(&world, 0);
    let borrowed: u32 = remote.values().sum();
    assert!(remote.len() == 2 && borrowed * 100 >= 80 * (local + borrowed), "{local} {remote:?}");
    world.run();
    assert_equals_single("two creditors", &world, &pool);
    world.check_empty();
}

#[test]
fn four_instances_equal_one() {
    for name in ["llama2_mha", "head_dim_64", "tied_sentencepiece"] {
        let pool = PoolSpec::golden(name, 4);
        let debtor = Spec { step_rows: 10, ..Spec::cpu(3) };
        let mut world = World::pool(pool.clone(), None, &[debtor, Spec::cpu(8), Spec::cpu(8), Spec::cpu(8)]);
        world.submit(0, greedy(prompt(3, 95, 128), 8));
        run_to_token(&mut world, 0, 1);
        assert_eq!(placement(&world, 0).1.len(), 3);
        world.run();
        assert_equals_single(name, &world, &pool);
        world.check_empty();
    }
}

#[test]
fn shipping_and_fetching_give_the_same_tokens() {
    let pool = PoolSpec::golden("llama3_new", 8);
    for remote in [RemotePolicy::Ship, RemotePolicy::Fetch, RemotePolicy::Auto] {
        let mut world = World::pool(pool.clone(), None, &[Spec { remote, ..Spec::cpu(4) }, Spec::cpu(8), Spec::cpu(8)]);
        world.submit(0, greedy(prompt(4, 110, 128), 10));
        world.run();
        let (partials, data) = (world.sent("partial").0 > 0, world.sent("data").0 > 0);
        match remote {
            RemotePolicy::Ship => assert_eq!((partials, data), (true, false)),
            RemotePolicy::Fetch => assert_eq!((partials, data), (false, true)),
            RemotePolicy::Auto => assert_eq!((partials, data), (true, true), "decoding ships, a long chunk fetches"),
        }
        assert_equals_single(&format!("{remote:?}"), &world, &pool);
        world.check_empty();
    }
}

/// Layers with a window see keys on their own instance only, while the last blocks are there: the others alone ask the
/// creditor, which is informed of the end of a step whose last layer does not ask it.
#[test]
fn a_layer_asks_only_those_whose_keys_it_sees() {
    for (name, full_layers, cancels) in [("gpt_oss", 1, 0), ("gemma3", 1, 2), ("gemma2", 1, 2), ("llama3_old", 2, 0)] {
        let pool = PoolSpec::golden(name, 4);
        let mut world = World::pool(pool.clone(), None, &[Spec::cpu(10), Spec::cpu(30)]);
        // Its last block has room for the next tokens, so no step borrows.
        world.submit(0, greedy(prompt(6, 73, 120), 8));
        run_to_token(&mut world, 0, 1);
        let (_, remote) = placement(&world, 0);
        assert!(remote.values().sum::<u32>() >= 9, "{name}: {remote:?}");
        let before = (world.sent("query").0, world.sent("step cancel").0);
        run_to_token(&mut world, 0, 3);
        let sent = (world.sent("query").0 - before.0, world.sent("step cancel").0 - before.1);
        assert_eq!(sent, (2 * full_layers, cancels), "{name}: queries and ends of two steps");
        world.run();
        // Long before a ticket that stays would expire.
        world.run_for(50);
        assert_eq!(world.live(1).status().remote_steps, 0, "{name}");
        assert_equals_single(name, &world, &pool);
        world.check_empty();
    }
}

/// Of 31 rBlocks, 20 are local. Where a chunk is sooner attended to here than shipped, the borrowed ones come behind 18 of them.
#[test]
fn the_oldest_blocks_stay_local_where_shipping_is_slow() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let queries = |attention_flops| {
        let debtor = Spec { attention_flops, remote: RemotePolicy::Ship, step_rows: 10, ..Spec::cpu(20) };
        let mut world = World::pool(pool.clone(), None, &[debtor, Spec::cpu(30)]);
        world.submit(0, greedy(prompt(7, 120, 120), 3));
        run_to_token(&mut world, 0, 1);
        let (local, remote) = placement(&world, 0);
        assert_eq!((local, remote.values().sum::<u32>()), (20, 11));
        let queries = world.sent("query").0;
        world.run();
        assert_equals_single(&format!("{attention_flops:e} operations a second"), &world, &pool);
        world.check_empty();
        queries
    };
    let (slow_links, slow_device) = (queries(1e12), queries(1.0));
    // Two layers of twelve steps, of which the first asks nobody, or the first eight.
    assert_eq!((slow_links, slow_device), (2 * 4, 2 * 11));
}

#[test]
fn a_window_is_cut_across_creditors_and_frees_what_is_behind_it() {
    let pool = PoolSpec::golden("mistral_window", 4);
    for remote in [RemotePolicy::Ship, RemotePolicy::Fetch] {
        let debtor = Spec { remote, step_rows: 10, ..Spec::cpu(2) };
        let mut world = World::pool(pool.clone(), None, &[debtor, Spec::cpu(13), Spec::cpu(13)]);
        world.submit(0, greedy(prompt(5, 100, 144), 30));
        // Two blocks are local, the oldest 24 are lent. From the first token on, lent and local blocks are the window
        // (4 or 5 blocks), the growing block, and one more that was borrowed with it; a release may be in flight for
        // a step of the network.
        let lent = |w: &World| w.nodes().skip(1).map(|n| w.live(n).status().blocks_lent).sum::<u32>();
        let (mut cut, mut late) = (0, 0);
        world.run_until(|w| lent(w) == 24);
        while !world.requests[0].is_over() {
            world.step();
            let Some(status) = world.live(0).status().sequences.first().cloned() else { continue };
            if !world.requests[0].tokens.is_empty() {
                let held = world.live(0).status().blocks_borrowed + status.local_blocks;
                assert!(held <= 7, "{held} blocks are held under a window of 4");
                cut += u32::from(status.local_blocks > 0 && lent(&world) > 0);
                late += u32::from(lent(&world) + status.local_blocks > 7);
            }
        }
        assert!(cut > 20, "the window did not span two instances");
        assert!(late < 10, "creditors keep what is behind the window: {late} steps");
        assert_equals_single(&format!("window, {remote:?}"), &world, &pool);
        world.check_empty();
    }
}

#[test]
fn borrowing_while_other_batches_run_on_both_sides() {
    let pool = PoolSpec::golden("sharded", 4);
    let mut world = World::pool(pool.clone(), None, &[Spec::cpu(20), Spec::cpu(40)]);
    for node in [0, 1] {
        for seed in 0..2 {
            world.submit(node, greedy(prompt(10 + seed, 10 + seed as usize, 136), 30));
        }
    }
    run_to_token(&mut world, 0, 2);
    run_to_token(&mut world, 2, 2);
    let big = world.submit(0, greedy(prompt(13, 100, 136), 10));
    run_to_token(&mut world, big, 1);
    assert!((0..4).any(|r| !world.requests[r].is_over()), "nothing else runs any more");
    world.run();
    assert!(world.sent("partial").0 > 0);
    assert_equals_single("beside other batches", &world, &pool);
    world.check_empty();
}

#[test]
fn two_debtors_lend_to_each_other() {
    let pool = PoolSpec::golden("llama3_old", 4);
    for remote in [RemotePolicy::Ship, RemotePolicy::Fetch] {
        let spec = Spec { remote, ..Spec::cpu(20) };
        let mut world = World::pool(pool.clone(), None, &[spec.clone(), spec]);
        // A short request fills half of the first instance, so that a long one must borrow; then it ends.
        let short = world.submit(0, greedy(prompt(20, 38, 128), 2));
        run_to_token(&mut world, short, 1);
        let a = world.submit(0, greedy(prompt(21, 70, 128), 40));
        run_to_token(&mut world, a, 1);
        let b = world.submit(1, greedy(prompt(22, 75, 128), 30));
        run_to_token(&mut world, b, 2);
        for node in world.nodes() {
            let status = world.live(node).status();
            assert!(status.blocks_lent > 0 && status.blocks_borrowed > 0, "{}", world.describe());
        }
        world.run();
        assert_equals_single("mutual", &world, &pool);
        world.check_empty();
    }
}

#[test]
fn two_that_want_everything_take_turns() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let mut world = World::pool(pool.clone(), None, &[Spec::cpu(16), Spec::cpu(16)]);
    for node in [0, 1] {
        world.submit(node, greedy(prompt(23 + node as u64, 90, 128), 8));
    }
    world.run();
    assert_equals_single("turns", &world, &pool);
    world.check_empty();
}

#[test]
fn decoding_outgrows_its_instance() {
    let pool = PoolSpec::golden("f16", 4);
    let mut world = World::pool(pool.clone(), None, &[Spec::cpu(6), Spec::cpu(6), Spec::cpu(6)]);
    let request = world.submit(0, greedy(prompt(30, 20, 128), 44));
    run_to_token(&mut world, request, 1);
    assert!(placement(&world, 0).1.is_empty(), "the prompt fits");
    run_to_token(&mut world, request, 36);
    assert_eq!(placement(&world, 0).1.len(), 2);
    world.run();
    assert_equals_single("growth", &world, &pool);
    world.check_empty();
}

/// ALiBi biases depend on the positions of runs and queries: for lent prompts, growth, and a kv node without weights,
/// with shipped queries and with fetched KV.
#[test]
fn biases_by_distance_are_the_same_wherever_the_kv_lies() {
    let pool = PoolSpec::golden("mpt", 4);
    for remote in [RemotePolicy::Ship, RemotePolicy::Fetch, RemotePolicy::Auto] {
        let spec = |blocks| Spec { remote, step_rows: 10, ..Spec::cpu(blocks) };
        let kv = Spec { role: Role::Kv, ..spec(14) };
        let mut world = World::pool(pool.clone(), None, &[spec(6), spec(12), kv]);
        let lent = world.submit(0, greedy(prompt(60, 90, 140), 6));
        run_to_token(&mut world, lent, 1);
        assert_eq!(placement(&world, 0).1.len(), 2, "both lend");
        world.run();
        let grown = world.submit(0, greedy(prompt(61, 18, 140), 60));
        run_to_token(&mut world, grown, 1);
        assert!(placement(&world, 0).1.is_empty(), "the prompt fits");
        run_to_token(&mut world, grown, 50);
        assert!(!placement(&world, 0).1.is_empty(), "it grew into others' memory");
        world.run();
        let travelled = if matches!(remote, RemotePolicy::Fetch) { "data" } else { "partial" };
        assert!(world.sent(travelled).0 > 0);
        let diff = assert_equals_single(&format!("biases, {remote:?}"), &world, &pool);
        println!("{remote:?}: largest difference {diff:e}");
        world.check_empty();
    }
}

#[test]
fn a_kv_node_lends_memory_and_attention() {
    let pool = PoolSpec::golden("llama3_old", 8);
    let kv = Spec { role: Role::Kv, ..Spec::cpu(16) };
    let mut world = World::pool(pool.clone(), None, &[Spec::cpu(4), kv]);
    world.submit(0, greedy(prompt(40, 120, 128), 10));
    world.run();
    assert!(world.sent("partial").0 > 0);
    assert_equals_single("kv node", &world, &pool);
    let refused = world.submit(1, greedy(vec![1, 2, 3], 1));
    let error = lagoon_tests::cluster::check::error_of(&world.requests[refused]);
    assert!(error.to_string().contains("--role kv"), "{error}");
    world.check_empty();
}

#[test]
fn preempted_requests_give_the_same_tokens() {
    let pool = PoolSpec::golden("head_dim_64", 4);
    let mut world = World::single(pool.clone(), Spec::cpu(12));
    for seed in 0..4 {
        world.submit(0, greedy(prompt(50 + seed, 10, 128), 20));
    }
    world.run();
    assert!(world.live(0).status().preemptions > 0, "nothing was preempted");
    assert_equals_single("preempted", &world, &pool);
    world.check_empty();

    // The same in a pool too small for all of them at once.
    let mut world = World::pool(pool.clone(), None, &[Spec::cpu(7), Spec::cpu(6)]);
    for seed in 0..4 {
        world.submit(seed as usize % 2, greedy(prompt(54 + seed, 10, 128), 20));
    }
    world.run();
    assert_equals_single("preempted in a pool", &world, &pool);
    world.check_empty();
}

/// Runs one long request on a debtor and two creditors of these backends, beside a short one on the first creditor.
fn on_backends(name: &str, debtor: Backend, creditors: [Backend; 2], remote: RemotePolicy) {
    let pool = PoolSpec::golden(name, 4);
    let spec = |backend, blocks| Spec { backend, remote, step_rows: 24, ..Spec::cpu(blocks) };
    let specs = [spec(debtor, 4), spec(creditors[0], 12), spec(creditors[1], 12)];
    let mut world = World::pool(pool.clone(), None, &specs);
    world.submit(1, greedy(prompt(80, 6, 128), 6));
    world.submit(0, greedy(prompt(81, 80, 128), 6));
    world.run();
    let remote = match remote {
        RemotePolicy::Fetch => world.sent("data").0,
        _ => world.sent("partial").0,
    };
    assert!(remote > 0);
    let diff = assert_equals_single(&format!("{name}, {debtor:?} and {creditors:?}"), &world, &pool);
    println!("{name}, {debtor:?} and {creditors:?}: largest difference {diff:e}");
    world.check_empty();
}

#[test]
fn wgpu_instances_equal_one() {
    if let Err(reason) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("wgpu_instances_equal_one", &reason);
    }
    let wgpu = Backend::Wgpu;
    on_backends("llama3_old", wgpu, [wgpu, wgpu], RemotePolicy::Ship);
    on_backends("mistral_window", wgpu, [wgpu, wgpu], RemotePolicy::Fetch);
    on_backends("mpt", wgpu, [wgpu, wgpu], RemotePolicy::Ship);
}

#[test]
fn a_cpu_and_a_wgpu_instance_serve_together() {
    if let Err(reason) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("a_cpu_and_a_wgpu_instance_serve_together", &reason);
    }
    on_backends("llama3_old", Backend::Cpu, [Backend::Wgpu, Backend::Cpu], RemotePolicy::Ship);
    on_backends("mistral_window", Backend::Wgpu, [Backend::Cpu, Backend::Wgpu], RemotePolicy::Ship);
    on_backends("yi", Backend::Wgpu, [Backend::Cpu, Backend::Cpu], RemotePolicy::Auto);
    on_backends("mpt", Backend::Wgpu, [Backend::Cpu, Backend::Wgpu], RemotePolicy::Ship);
    on_backends("mpt", Backend::Cpu, [Backend::Wgpu, Backend::Wgpu], RemotePolicy::Fetch);
}

/// With KV, queries and partials in the model's own 16 bits, rounding depends on the order of sums: the tolerance is
/// the golden's, the reference's own noise in that type.
#[test]
fn sixteen_bits_on_the_wire() {
    for (name, kv_dtype) in [("bf16", DType::BF16), ("f16", DType::F16)] {
        let tolerance = Golden::load(name).description.tolerance;
        let pool = PoolSpec { kv_dtype: kv_dtype.into(), ..PoolSpec::golden(name, 8) };
        let request = greedy(prompt(90, 100, 128), 8);
        let alone = single(&pool, std::slice::from_ref(&request));
        for (wire, remote) in
            [(DType::F32, RemotePolicy::Ship), (kv_dtype, RemotePolicy::Ship), (kv_dtype, RemotePolicy::Fetch)]
        {
            let spec = |blocks| Spec { wire, remote, ..Spec::cpu(blocks) };
            let mut world = World::pool(pool.clone(), None, &[spec(3), spec(8), spec(8)]);
            world.submit(0, request.clone());
            world.run();
            let diff = assert_same(&format!("{name} over {wire}"), &world.requests[0], &alone[0], tolerance);
            println!("{name} over {wire}, {remote:?}: {diff:e} of {tolerance:e}");
            world.check_empty();
        }
    }
}

/// The bundled model on the first tokens of its document: five instances of 640 tokens each.
#[test]
fn a_long_document_on_the_bundled_model() {
    let dir = lagoon_tests::root().join("models/passkey");
    let tokenizer = lagoon_text::Tokenizer::open(&dir).unwrap();
    let document = std::fs::read_to_string(dir.join("document.txt")).unwrap();
    let mut tokens = tokenizer.encode(&document, true).unwrap();
    tokens.truncate(2_900);
    let pool = PoolSpec { dir, kv_dtype: KvDType::F32, block_tokens: 32, split: false };
    let spec = Spec { remote: RemotePolicy::Auto, step_rows: 256, fetch_tokens: 512, ..Spec::cpu(20) };
    let mut world = World::pool(pool.clone(), None, &vec![spec; 5]);
    world.submit(0, greedy(tokens, 6));
    run_to_token(&mut world, 0, 1);
    let (local, remote) = placement(&world, 0);
    assert!(remote.values().sum::<u32>() >= 3 * local, "{local} {remote:?}");
    world.run();
    let diff = assert_equals_single("document", &world, &pool);
    println!("largest difference {diff:e}");
    world.check_empty();
}
