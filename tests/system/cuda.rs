//! The CUDA backend in a pool without a GPU: the fake driver (cuda/fake) runs the kernels through the host shim.
//! Sequences have address rows, remote requests have none, and memory is mapped on demand.

#[path = "../../cuda/tests/support/fake.rs"]
#[allow(dead_code, unused_macros, reason = "each test binary uses some of it")]
pub(crate) mod fake;
#[path = "../../cuda/tests/support/shim.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test binary uses some of it")]
pub(crate) mod shim;

use crate::process_up::{golden_prompt, single};
use crate::split::equals_transformers;
use fake::{Fake, OUT_OF_MEMORY};
use lagoon_backend::conformance::Data;
use lagoon_backend::{Device, SampleRow, Sampling};
use lagoon_cuda::{CudaDevice, CudaOptions, LinearLayers};
use lagoon_instance::RemotePolicy;
use lagoon_kv::Placement;
use lagoon_protocol::Role;
use lagoon_runner::sampling::{SampleError, Sampler};
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Backend, PoolSpec, Spec, World, greedy};
use lagoon_tests::process::{Server, token_ids};
use lagoon_types::SamplingParams;
use serde_json::json;
use std::ffi::OsStr;
use std::time::{Duration, Instant};

/// A page of the fake driver: 16 tokens of a layer's K in f32 with one KV head of 64.
const PAGE: u64 = 1 << 12;
const BLOCK: u32 = 16;

/// The fake driver with the kernels, or a note that the test is skipped.
pub(crate) fn driver(name: &str, seed: u64) -> Option<Fake> {
    let fake = shim::library().and_then(|library| {
        let fake = Fake::new(1 << 30, PAGE, seed)?;
        fake.kernels(&library);
        Ok(fake)
    });
    fake.map_err(|reason| lagoon_tests::skip(name, &reason)).ok()
}

fn spec(backend: Backend, blocks: u32, remote: RemotePolicy) -> Spec {
    Spec { backend, remote, step_rows: 24, ..Spec::cpu(blocks) }
}

/// Asserts that every local block of a sequence with an address row is at its place there, so that local KV is one
/// run except where a middle block is remote.
fn assert_rows(world: &World, node: usize) {
    for (seq, blocks) in world.live(node).tables() {
        let local = (0u32..).zip(blocks).filter_map(|(i, place)| match place {
            Placement::Local(block) => Some(block.0.checked_sub(i)),
            _ => None,
        });
        let starts: Vec<Option<u32>> = local.collect();
        assert!(starts.windows(2).all(|pair| pair[0] == pair[1]), "{seq} is not in one row: {blocks:?}");
    }
}

/// One long request whose KV is on both instances, and a short one on the other: every logit equals that of a single
/// host instance, and no memory leaks on the device.
#[test]
fn a_cuda_and_a_cpu_instance_serve_together() {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    let cases = [
        (Backend::Cuda, Backend::Cpu, RemotePolicy::Ship),
        (Backend::Cpu, Backend::Cuda, RemotePolicy::Ship),
        (Backend::Cuda, Backend::Cuda, RemotePolicy::Fetch),
    ];
    for (seed, (debtor, creditor, remote)) in (2..).zip(cases) {
        let Some(fake) = driver("a_cuda_and_a_cpu_instance_serve_together", seed) else { return };
        let mut world = World::pool(pool.clone(), None, &[spec(debtor, 3, remote), spec(creditor, 8, remote)]);
        world.submit(1, greedy(prompt(80, 6, 128), 4));
        world.submit(0, greedy(prompt(81, 70, 128), 5));
        while world.requests.iter().any(|request| !request.is_over()) {
            world.step();
            (0..2).for_each(|node| assert_rows(&world, node));
        }
        world.run();
        let crossed = if remote == RemotePolicy::Fetch { world.sent("data").0 } else { world.sent("partial").0 };
        assert!(crossed > 0);
        let diff = assert_equals_single(&format!("{debtor:?} and {creditor:?}"), &world, &pool);
        println!("{debtor:?} and {creditor:?}: largest difference {diff:e}");
        world.check_empty();
        for node in world.nodes().filter(|node| [debtor, creditor][*node] == Backend::Cuda) {
            let counters = world.kv_counters(node).unwrap();
            assert!(counters.in_step + counters.ahead + counters.eager > 0, "{counters:?}");
            println!("{counters:?}");
        }
        drop(world);
        fake.finish();
    }
}

/// Rings beside address rows.
#[test]
fn split_pools_of_cuda_equal_transformers() {
    for (seed, name) in (60..).zip(["gpt_oss", "gemma3"]) {
        let Some(fake) = driver("split_pools_of_cuda_equal_transformers", seed) else { return };
        // An rBlock is a page of a layer's K.
        let pool = PoolSpec { split: true, ..PoolSpec::golden(name, 32) };
        equals_transformers(pool, name, [Backend::Cuda, Backend::Cpu, Backend::Cuda], RemotePolicy::Ship);
        fake.finish();
    }
}

/// Prompts prefilled on one backend and decoded on the other, or both on CUDA: KV passes through staging buffers of
/// the host or the device, between address rows.
#[test]
fn prompts_pass_between_cuda_and_the_host() {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    // An rBlock is a page of a layer's K.
    let split = PoolSpec { split: true, ..PoolSpec::golden("gpt_oss", 32) };
    let cases = [(Backend::Cuda, Backend::Cpu), (Backend::Cpu, Backend::Cuda), (Backend::Cuda, Backend::Cuda)];
    for (seed, (from, to)) in (30..).zip(cases) {
        for push in [false, true] {
            let Some(fake) = driver("prompts_pass_between_cuda_and_the_host", seed) else { return };
            let worker = |backend, role| Spec {
                role,
                stage_on_device: role == Role::Prefill || !push,
                ..spec(backend, 12, RemotePolicy::Ship)
            };
            let decode = Spec { push, ..worker(to, Role::Decode) };
            let pool = if push == (from == to) { &split } else { &pool };
            crate::staged::assert_serves(pool, worker(from, Role::Prefill), decode);
            fake.finish();
        }
    }
}

/// A CUDA decode worker holds and reads a shared prefix of two requests once.
#[test]
fn a_cuda_decode_worker_holds_a_prefix_once() {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    for (seed, (from, push)) in (40..).zip([(Backend::Cpu, true), (Backend::Cuda, false)]) {
        let Some(fake) = driver("a_cuda_decode_worker_holds_a_prefix_once", seed) else { return };
        let worker = |backend, role| Spec { role, ..spec(backend, 14, RemotePolicy::Ship) };
        let decode = Spec { push, ..worker(Backend::Cuda, Role::Decode) };
        crate::prefix::assert_reads_the_rest("CUDA decodes", &pool, worker(from, Role::Prefill), decode);
        fake.finish();
    }
}

/// Requests come and go in little memory, preempted and resumed: memory that one leaves mapped serves the next.
#[test]
fn sequences_come_and_go_on_mapped_memory() {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    let Some(fake) = driver("sequences_come_and_go_on_mapped_memory", 11) else { return };
    let mut world = World::single(pool.clone(), spec(Backend::Cuda, 6, RemotePolicy::Ship));
    for (i, tokens) in [20, 40, 9, 33].into_iter().enumerate() {
        world.submit(0, greedy(prompt(90 + i as u64, tokens, 128), 6));
    }
    while world.requests.iter().any(|request| !request.is_over()) {
        world.step();
        assert_rows(&world, 0);
    }
    let diff = assert_equals_single("requests in turn", &world, &pool);
    let counters = world.kv_counters(0).unwrap();
    println!("largest difference {diff:e}; {counters:?}");
    assert!(counters.reused > 0, "{counters:?}");
    world.check_empty();
    drop(world);
    fake.finish();
}

/// A device without memory despite free rBlocks costs a preemption, and no token.
#[test]
fn a_device_that_is_full_preempts() {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    let mut preempted = 0;
    for nth in [1, 3, 6, 10] {
        let Some(fake) = driver("a_device_that_is_full_preempts", 20 + nth) else { return };
        let mut world = World::single(pool.clone(), spec(Backend::Cuda, 12, RemotePolicy::Ship));
        // Mapping fails in a step, which fails the step, or ahead of one, which fails nothing.
        fake.fail("cuMemMap", nth, OUT_OF_MEMORY);
        for (i, tokens) in [20, 33, 9].into_iter().enumerate() {
            world.submit(0, greedy(prompt(100 + i as u64, tokens, 128), 20));
        }
        world.run();
        assert_equals_single(&format!("no memory for map {nth}"), &world, &pool);
        preempted += world.live(0).status().preemptions;
        world.check_empty();
        drop(world);
        fake.finish();
    }
    assert!(preempted > 0, "no step found the device full");
}

/// Waits until the background thread has mapped the rBlocks of a sequence's next iteration: it may be late on a busy
/// machine, and the iteration would then map them itself.
fn wait_for_mapping(world: &mut World, tokens: usize) {
    let deadline = Instant::now() + Duration::from_secs(30);
    if tokens == 13 {
        return;
    }
    loop {
        let counters = world.kv_counters(0).unwrap();
        let mapped = (counters.in_step + counters.ahead) / counters.groups_per_block;
        if mapped >= tokens.min(34).div_ceil(BLOCK as usize) as u64 && counters.eager > 0 {
            return;
        }
        assert!(Instant::now() < deadline, "{tokens} tokens: {counters:?}");
        std::thread::yield_now();
    }
}

/// With spare memory, the next token's page groups and the next sequence's row are mapped while a step runs.
#[test]
fn memory_is_mapped_one_iteration_ahead() {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    let Some(fake) = driver("memory_is_mapped_one_iteration_ahead", 13) else { return };
    let mut world = World::single(pool.clone(), spec(Backend::Cuda, 40, RemotePolicy::Ship));
    world.submit(0, greedy(prompt(95, 13, 128), 22));
    while !world.requests[0].is_over() {
        world.step();
        let tokens = 13 + world.requests[0].tokens.len();
        wait_for_mapping(&mut world, tokens);
    }
    world.run();
    world.submit(0, greedy(prompt(96, 5, 128), 2));
    world.run();
    assert_equals_single("one after the other", &world, &pool);
    let counters = world.kv_counters(0).unwrap();
    let of = counters.groups_per_block;
    // The first sequence's three blocks: one in its first step, two ahead. The second reuses the first one's memory.
    assert_eq!((counters.in_step, counters.ahead, counters.refused), (of, 2 * of, 0), "{counters:?}");
    assert!(counters.eager >= of && counters.reused >= 3 * of, "{counters:?}");
    world.check_empty();
    drop(world);
    fake.finish();
}

/// Cached blocks stay mapped in their row, and a sequence with that prefix takes the row. A prefix in use is mapped
/// in a second row, without further memory.
#[test]
fn a_prefix_is_found_in_its_row() {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    let Some(fake) = driver("a_prefix_is_found_in_its_row", 17) else { return };
    let mut world = World::single(pool.clone(), spec(Backend::Cuda, 12, RemotePolicy::Ship));
    let beginning = prompt(97, 40, 128);
    for (n, turn) in [(1, 3), (2, 9), (3, 14)] {
        world.submit(0, greedy([beginning.clone(), prompt(n, turn, 128)].concat(), 6));
        if n == 2 {
            // The third comes while the second runs.
            world.run_until(|w| w.requests[1].tokens.len() == 2);
        } else {
            world.run();
        }
        assert_rows(&world, 0);
    }
    let prefix = world.live(0).status().prefix;
    assert_eq!((prefix.hit_tokens, prefix.shared_blocks), (64, 2), "{prefix:?}");
    let diff = assert_equals_single("a prefix in its row", &world, &pool);
    let counters = world.kv_counters(0).unwrap();
    println!("largest difference {diff:e}; {counters:?}");
    assert_eq!(counters.shared, 2 * counters.groups_per_block, "{counters:?}");
    world.check_empty();
    drop(world);
    fake.finish();
}

/// Requests with common prefixes come while others run, end, are preempted, move and borrow, and driver calls fail:
/// every logit equals that of a single undisturbed host instance.
#[test]
fn shared_prefixes_come_and_go() {
    let pool = PoolSpec::golden("head_dim_64", BLOCK);
    let (mut shared, mut crossed) = (0, 0);
    for (seed, fail) in [(31, None), (32, Some("cuMemMap")), (33, Some("cuMemUnmap")), (34, Some("cuMemSetAccess"))] {
        let Some(fake) = driver("shared_prefixes_come_and_go", seed) else { return };
        let of = |blocks| spec(Backend::Cuda, blocks, RemotePolicy::Ship);
        let mut world = World::pool(pool.clone(), None, &[of(9), of(7)]);
        let beginnings = [prompt(120, 36, 128), prompt(121, 20, 128)];
        for i in 0..9u64 {
            let own = prompt(130 + i, 3 + (seed + 7 * i) as usize % 30, 128);
            let tokens = [beginnings[i as usize % 3 / 2].clone(), own].concat();
            let id = world.submit(usize::from(i % 4 == 3), greedy(tokens, 8 + 3 * (i as u32 % 5)));
            if let Some(function) = fail.filter(|_| i % 3 == 1) {
                fake.fail(function, 2 + i, OUT_OF_MEMORY);
            }
            // The next request comes while this one runs, or while it waits for memory.
            if i % 3 != 2 {
                world.run_until(|w| w.requests[id].tokens.len() > 1 || w.requests[id].is_over());
            }
        }
        world.run();
        fake.fail("", 0, 0);
        assert_equals_single(&format!("shared prefixes, {fail:?}"), &world, &pool);
        for node in world.nodes() {
            let counters = world.kv_counters(node).unwrap();
            assert_eq!(counters.shared % counters.groups_per_block, 0, "{counters:?}");
            shared += counters.shared;
        }
        crossed += world.sent("partial").0;
        world.check_empty();
        drop(world);
        fake.finish();
    }
    assert!(shared > 0 && crossed > 0, "{shared} page groups were shared, {crossed} partials sent");
}

/// The device samples the same tokens as the host, also with draws of both micro-batches in flight.
#[test]
fn the_device_draws_what_the_host_draws() {
    let Some(fake) = driver("the_device_draws_what_the_host_draws", 17) else { return };
    let mut device = CudaDevice::open(
        lagoon_cuda::kernels::FATBIN,
        CudaOptions { linear: LinearLayers::Own, ..CudaOptions::default() },
    )
    .unwrap();
    let (rows, vocab) = (5, 301);
    let (mut data, mut sampler) = (Data::new(18), Sampler::new());
    let mut micro_batches = [device.tensor(rows, vocab).unwrap(), device.tensor(rows, vocab).unwrap()];
    let some = |i: u64| SamplingParams {
        temperature: [0.0, 1.0, 0.7, 1.5, 2.0][i as usize % 5],
        top_k: [0, 40, 3][i as usize % 3],
        top_p: [1.0, 0.9][i as usize % 2],
        min_p: [0.0, 0.0, 0.0, 0.02][i as usize % 4],
        seed: i,
        ..SamplingParams::default()
    };
    for round in 0..12u64 {
        let count = 1 + round as usize % rows;
        let mut expected = [Vec::new(), Vec::new()];
        for (micro_batch, tensor) in micro_batches.iter_mut().enumerate() {
            let logits: Vec<f32> = data.values(rows * vocab).iter().map(|x| x * 3.0).collect();
            device.write(tensor, 0, &logits).unwrap();
            let params = (0..count as u64).map(|row| some(round * 8 + row * 2 + micro_batch as u64));
            // Every second row has a mask, and the last of them allows nothing.
            let words = vocab.div_ceil(32);
            let mut masks: Vec<u32> = (0..count / 2 * words).map(|_| data.number(0..1 << 31)).collect();
            let is_none = |row: usize| round == 11 && row == 3;
            masks.iter_mut().skip(words).filter(|_| is_none(3)).for_each(|word| *word = 0);
            let mask_of = |row: usize| (row % 2 == 1).then_some(row / 2 * words);
            let rows = params.clone().map(|p| Sampler::row(&p, round).unwrap()).enumerate();
            let draws: Vec<_> = rows
                .map(|(row, of)| SampleRow { mask: mask_of(row).map_or(SampleRow::UNMASKED, |at| at as u32), ..of })
                .collect();
            device.sample_ahead(micro_batch, tensor, &draws, &masks).unwrap();
            let drawn = params.zip(logits.chunks(vocab)).enumerate().map(|(row, (p, logits))| {
                let mask = mask_of(row).map(|at| &masks[at..at + words]);
                sampler.sample_masked(logits, &p, round, (&[], None), mask).map(|sampled| sampled.id)
            });
            expected[micro_batch].extend(drawn);
            assert!((0..count).all(|row| is_none(row) == (expected[micro_batch][row] == Err(SampleError::Excluded))));
        }
        for (micro_batch, expected) in expected.iter().enumerate() {
            let mut drawn = Vec::new();
            device.sampled(micro_batch, &mut drawn).unwrap();
            let drawn: Vec<_> =
                drawn.into_iter().enumerate().map(|(at, row)| Sampler::drawn(row, at % 2 == 1)).collect();
            assert_eq!(&drawn, expected, "round {round}, micro_batch {micro_batch}");
        }
    }
    let mut logits = vec![0.0; vocab];
    logits[7] = f32::NAN;
    device.write(&mut micro_batches[0], 0, &logits).unwrap();
    device.sample_ahead(0, &mut micro_batches[0], &[Sampler::row(&some(0), 0).unwrap()], &[]).unwrap();
    let mut drawn = Vec::new();
    device.sampled(0, &mut drawn).unwrap();
    let bad = SampleError::BadLogit { token: 7, value: "not finite".to_owned() };
    assert_eq!(Sampler::drawn(drawn[0], false), Err(bad));
    drop((micro_batches, device));
    fake.finish();
}

/// The real binary on the fake driver serves the host backend's answers, and reports its memory.
#[test]
fn a_server_on_the_cuda_backend_answers() {
    let libraries = shim::library().and_then(|kernels| Ok((kernels, fake::build()?)));
    let (kernels, driver) = match libraries {
        Ok(libraries) => libraries,
        Err(reason) => return lagoon_tests::skip("a_server_on_the_cuda_backend_answers", &reason),
    };
    let (model, prompt) = golden_prompt();
    // A page is 128 tokens in seven of K's page groups: 7 KV heads of 8, in f32.
    let flags = ["--http=127.0.0.1:0", "--block-tokens=128", "--kv-tokens=512", "--step-tokens=32", "--max-running=4"];
    let flags = [&["serve", &model, "--backend=cuda", "--calibrate=off"], &flags[..]].concat();
    let folder = driver.parent().unwrap().as_os_str();
    let variables: [(&str, &OsStr); 3] = [
        ("LD_LIBRARY_PATH", folder),
        ("LAGOON_FAKE_KERNELS", kernels.as_os_str()),
        ("LAGOON_FAKE_PAGE", OsStr::new("4096")),
    ];
    let server = Server::start_with(&flags, &variables);
    assert_eq!(server.ready["backend"], "cuda");
    let client = server.client();
    let host = single(&model, "256");
    for tokens in [9, 30] {
        let output = token_ids(&client.complete(&prompt[..tokens], 4, &json!({})).json());
        assert_eq!(output, token_ids(&host.client().complete(&prompt[..tokens], 4, &json!({})).json()));
    }
    // Sampled on the device, and on the host if log-probabilities are requested.
    let drawn = json!({ "temperature": 1.0, "top_p": 0.95, "seed": 5 });
    let reported = json!({ "temperature": 1.0, "top_p": 0.95, "seed": 5, "logprobs": 1 });
    let on_host = token_ids(&host.client().complete(&prompt[..20], 6, &drawn).json());
    for how in [drawn, reported] {
        assert_eq!(token_ids(&client.complete(&prompt[..20], 6, &how).json()), on_host, "{how}");
    }
    client.wait_until("/lagoon/status", "its memory mapped, and found again", |s| {
        let of = |field: &str| s["memory"][field].as_u64();
        s["blocks_free"] == s["blocks_total"] && of("in_step") > Some(0) && of("reused") > Some(0)
    });
    // Metrics are recorded a moment after the status.
    let mapped = "lagoon_kv_page_groups_mapped_total{when=\"in_step\"}";
    for text in [mapped, "lagoon_steps_launched_total{how=\"eager\"}", "lagoon_graphs_evicted_total"] {
        client.wait_for_text("/metrics", text);
    }
}

/// Instances take the host's devices in turn and divide the memory of each; a device given by flag is used.
#[test]
fn a_pool_takes_all_cuda_devices() {
    let libraries = shim::library().and_then(|kernels| Ok((kernels, fake::build()?)));
    let (kernels, driver) = match libraries {
        Ok(libraries) => libraries,
        Err(reason) => return lagoon_tests::skip("a_pool_takes_all_cuda_devices", &reason),
    };
    let (model, prompt) = golden_prompt();
    let variables: [(&str, &OsStr); 4] = [
        ("LD_LIBRARY_PATH", driver.parent().unwrap().as_os_str()),
        ("LAGOON_FAKE_KERNELS", kernels.as_os_str()),
        ("LAGOON_FAKE_PAGE", OsStr::new("4096")),
        ("LAGOON_FAKE_DEVICES", OsStr::new("2")),
    ];
    let common = ["--backend=cuda", "--calibrate=off", "--block-tokens=128", "--step-tokens=32", "--max-running=4096"];
    let up = [&["up", &model, "--port=0", "--instances=3"], &common[..]].concat();
    let pool = Server::start_with(&up, &variables);
    assert_eq!(pool.ready["devices"].as_array().map(Vec::len), Some(2), "{}", pool.ready);
    let host = single(&model, "256");
    let expected = token_ids(&host.client().complete(&prompt[..30], 4, &json!({})).json());
    assert_eq!(token_ids(&pool.client().complete(&prompt[..30], 4, &json!({})).json()), expected);
    let status = pool.client().get("/lagoon/status").json();
    let row = |name: &str| status["instances"].as_array().unwrap().iter().find(|row| row["name"] == name).unwrap();
    let blocks = ["instance-0", "instance-1", "instance-2"].map(|name| row(name)["blocks_total"].as_u64().unwrap());
    // The first and the last share a device: each has half of nine tenths, minus weights and buffers.
    assert_eq!(blocks[0], blocks[2], "{status}");
    assert!(blocks[0] > 0 && blocks[1] > 2 * blocks[0], "{blocks:?}");

    let serve = [&["serve", &model, "--http=127.0.0.1:0", "--device=fake"], &common[..]].concat();
    assert_eq!(Server::start_with(&serve, &variables).ready["backend"], "cuda");
}
