//! Tiers of the prefix cache beside the KV memory: prefixes that were evicted come back from host memory or disk, exactly.

use crate::cuda::driver;
use lagoon_kv::Tenant;
use lagoon_model::ModelSpec;
use lagoon_protocol::{AdminBody, AdminCacheDrop, CacheTenants};
use lagoon_tests::cluster::check::assert_same;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt, single};
use lagoon_tests::cluster::{Backend, Fault, PoolSpec, Spec, World, greedy};
use lagoon_tests::golden::{Golden, max_diff, models};
use std::collections::BTreeSet;

/// Bytes of so many rBlocks of four tokens of llama3_old, whose KV is f32.
pub(crate) fn bytes(world: &PoolSpec, blocks: u64) -> u64 {
    let probe = World::single(world.clone(), Spec::cpu(4));
    let shape = probe.live(0).rmanager().config().shape;
    blocks * u64::from(world.block_tokens) * shape.token_bytes() as u64
}

/// Time for copies of everything that is cached.
const COPIES_MS: u64 = 500;

/// One prompt, then others that evict it, then it again: its blocks come from the tier and are not computed.
fn evicted_and_asked_again(what: &str, pool: &PoolSpec, spec: &Spec) -> World {
    let mut world = World::single(pool.clone(), spec.clone());
    let asked = prompt(1, 50, 128);
    world.submit(0, greedy(asked.clone(), 3));
    world.run();
    world.run_for(COPIES_MS);
    for n in 2..5 {
        world.submit(0, greedy(prompt(n, 70, 128), 3));
        world.run();
        world.run_for(COPIES_MS);
    }
    let (before, evicted) = (world.live(0).status().prefix.hit_tokens, world.live(0).status().prefix.evicted_blocks);
    assert!(evicted >= 48 / u64::from(pool.block_tokens), "{what}: {evicted}");
    let again = world.submit(0, greedy(asked, 3));
    world.run();
    let status = world.live(0).status();
    // The whole blocks before the last token, of 4 tokens or 16.
    assert_eq!(status.prefix.hit_tokens - before, 48, "{what}: {status:?}");
    assert_eq!(world.requests[again].prompt.0, 48, "{what}: what its usage says");
    let found = world.requests[again].found;
    let on_disk = spec.host_cache_bytes == 0;
    assert_eq!((found.host, found.disk), if on_disk { (0, 48) } else { (48, 0) }, "{what}: {found:?}");
    assert_eq!((status.prefix.found.host, status.prefix.found.disk), (found.host, found.disk), "{what}");
    let diff = assert_equals_single(what, &world, pool);
    println!("{what}: largest difference {diff:e}, {:?}", world.tiers(0));
    world
}

fn with_host(pool: &PoolSpec, spec: Spec) -> Spec {
    Spec { host_cache_bytes: bytes(pool, 100), ..spec }
}

#[test]
fn an_evicted_prefix_comes_back_from_host_memory() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let flat = Spec { rows: false, ..Spec::cpu(24) };
    let shared = Spec { share: true, ..flat.clone() };
    for (what, spec) in [("rows", Spec { rows: true, ..flat.clone() }), ("flat", flat), ("shared", shared)] {
        let mut world = evicted_and_asked_again(what, &pool, &with_host(&pool, spec));
        let tiers = world.tiers(0);
        assert_eq!(tiers.broken_loads, 0, "{what}: {tiers:?}");
        world.check_empty();
    }
}

#[test]
fn an_evicted_prefix_comes_back_on_the_cuda_path() {
    let pool = PoolSpec::golden("head_dim_64", 16);
    let Some(fake) = driver("an_evicted_prefix_comes_back_on_the_cuda_path", 70) else { return };
    for (host_cache_bytes, disk_cache_bytes) in [(bytes(&pool, 100), 0), (0, bytes(&pool, 100))] {
        let spec = Spec { backend: Backend::Cuda, host_cache_bytes, disk_cache_bytes, ..Spec::cpu(6) };
        evicted_and_asked_again("cuda", &pool, &spec).check_empty();
    }
    fake.finish();
}

#[test]
fn an_evicted_prefix_comes_back_on_wgpu() {
    if let Err(why) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("an_evicted_prefix_comes_back_on_wgpu", &why);
    }
    let pool = PoolSpec::golden("llama3_old", 4);
    let spec = Spec { backend: Backend::Wgpu, rows: false, ..Spec::cpu(24) };
    evicted_and_asked_again("wgpu", &pool, &with_host(&pool, spec)).check_empty();
}

#[test]
fn an_evicted_prefix_comes_back_from_disk_also_after_a_restart() {
    let pool = PoolSpec::golden("llama3_old", 4);
    for rows in [true, false] {
        let spec = Spec { rows, disk_cache_bytes: bytes(&pool, 200), ..Spec::cpu(24) };
        let mut world = evicted_and_asked_again("disk", &pool, &spec);
        world.run_for(COPIES_MS);
        let kept = world.tiers(0).disk.blocks;
        world.kill(0);
        world.restart(0);
        assert_eq!(world.tiers(0).disk.blocks, kept);
        for n in [1, 3] {
            let again = world.submit(0, greedy(prompt(n, 50, 128), 3));
            world.run();
            assert_eq!(world.requests[again].prompt.0, 48, "prompt {n}");
        }
        world.check_empty();
    }
}

/// A damaged block ends the load there: what comes before it counts, the rest is computed, and the answer is the same.
#[test]
fn damage_costs_a_recomputation() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let spec = Spec { rows: false, disk_cache_bytes: bytes(&pool, 200), ..Spec::cpu(24) };
    let mut world = evicted_and_asked_again("damage", &pool, &spec);
    world.kill(0);
    world.restart(0);
    world.disk_mut(0).damaged_reads = 1;
    let first = world.submit(0, greedy(prompt(1, 50, 128), 3));
    world.run();
    let tiers = world.tiers(0);
    assert_eq!((tiers.disk.damaged_blocks, tiers.broken_loads), (1, 1), "{tiers:?}");
    assert_eq!(world.requests[first].prompt.0, 0, "its first block is computed");
    assert_equals_single("damaged", &world, &pool);
    // It is written again, and found by the next process.
    world.run_for(COPIES_MS);
    world.kill(0);
    world.restart(0);
    let again = world.submit(0, greedy(prompt(1, 50, 128), 3));
    world.run();
    assert_eq!(world.requests[again].prompt.0, 48);
    world.check_empty();
}

#[test]
fn a_full_disk_is_a_counted_loss() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let spec = Spec { rows: false, disk_cache_bytes: bytes(&pool, 200), ..Spec::cpu(24) };
    let mut world = World::single(pool.clone(), spec);
    world.disk_mut(0).is_full = true;
    for n in 1..5 {
        world.submit(0, greedy(prompt(n, 50, 128), 3));
        world.run();
        world.run_for(COPIES_MS);
    }
    let tiers = world.tiers(0);
    assert_eq!((tiers.disk.blocks, tiers.disk.saved_blocks), (0, 0), "{tiers:?}");
    // Each block is tried once.
    assert!((36..=60).contains(&tiers.disk.lost_blocks), "{tiers:?}");
    assert_equals_single("full", &world, &pool);
    world.check_empty();
}

/// A tier that holds less than is cached evicts, keeps what is evicted next, and stays within its bound.
#[test]
fn a_small_tier_stays_within_its_bound() {
    let pool = PoolSpec::golden("llama3_old", 4);
    for (host, disk) in [(8, 0), (0, 20), (8, 20)] {
        let (host_cache_bytes, disk_cache_bytes) = (bytes(&pool, host), bytes(&pool, disk));
        let spec = Spec { rows: false, running: 3, queue: 64, host_cache_bytes, disk_cache_bytes, ..Spec::cpu(30) };
        let mut world = World::single(pool.clone(), spec);
        for n in 0..24 {
            let beginning = &prompt(n % 3, 40, 128)[..10 + n as usize % 15];
            world.submit(0, greedy([beginning, &prompt(100 + n, 5 + n as usize * 7 % 40, 128)].concat(), 6));
            (0..60).for_each(|_| world.step());
            let tiers = world.tiers(0);
            assert!(tiers.host.bytes <= host_cache_bytes && tiers.disk.bytes <= disk_cache_bytes, "{tiers:?}");
        }
        world.run();
        let tiers = world.tiers(0);
        assert!(tiers.host.evicted_blocks + tiers.disk.evicted_blocks > 0, "{tiers:?}");
        assert_equals_single("a small tier", &world, &pool);
        world.check_empty();
    }
}

/// An operator empties all tiers of an instance while a request runs there: its blocks stay, others are computed again.
#[test]
fn an_order_empties_all_tiers_but_not_what_is_in_use() {
    let pool = PoolSpec::golden("llama3_old", 4);
    for (host, disk) in [(100, 0), (0, 200), (200, 200), (0, 0)] {
        let (host_cache_bytes, disk_cache_bytes) = (bytes(&pool, host), bytes(&pool, disk));
        let spec = Spec { rows: false, running: 3, host_cache_bytes, disk_cache_bytes, ..Spec::cpu(100) };
        let mut world = World::pool(pool.clone(), None, &[spec]);
        for n in 1..5 {
            world.submit(0, greedy(prompt(n, 50, 128), 3));
            world.run();
            world.run_for(COPIES_MS);
        }
        let running = world.submit(0, greedy(prompt(9, 30, 128), 60));
        while world.requests[running].tokens.len() < 3 {
            world.step();
        }
        let id = world.id(0).unwrap();
        let reply = world.admin(AdminBody::CacheDrop(AdminCacheDrop { instance: id.0, of: None }));
        assert_eq!(reply.error, "");
        let number = reply.dropped.unwrap().number;
        let is_empty = |world: &World| {
            let status = world.live(0).status();
            let tiers = status.cache_tiers.unwrap_or_default();
            (status.prefix.blocks, tiers.host.blocks, tiers.disk.blocks) == (0, 0, 0)
        };
        assert!(!is_empty(&world), "{host} and {disk} blocks");
        world.run_until(is_empty);
        assert!(!world.requests[running].is_over(), "it runs all the time");
        assert_eq!(world.live(0).status().prefix.evicted_blocks, 0, "an order is no eviction");
        let reported = |world: &World| {
            let row = world.gmanager().status(world.now_ms()).remove(0);
            row.heartbeat.unwrap().cache.unwrap().drop_done
        };
        world.run_until(|world| reported(world) == number);
        // What the running request uses is found; what was dropped is computed.
        for (n, length, cached) in [(9, 30, 28), (2, 50, 0)] {
            let id = world.submit(0, greedy(prompt(n, length, 128), 3));
            world.run();
            assert_eq!(world.requests[id].prompt.0, cached, "prompt {n}, {host} and {disk} blocks");
        }
        // What is cached from now on is copied again.
        world.run_for(COPIES_MS);
        if disk > 0 {
            assert!(world.tiers(0).disk.blocks >= 12, "{:?}", world.tiers(0));
        }
        assert_equals_single("an emptied cache", &world, &pool);
        world.check_empty();
    }
}

/// An order of one tenant's blocks leaves the others' in all tiers.
#[test]
fn an_order_empties_all_tiers_of_one_tenants_blocks() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let salted = |n: u64, salt: &str| {
        let mut request = greedy(prompt(n, 50, 128), 3);
        request.options.cache_salt = salt.into();
        request
    };
    for (host, disk) in [(200, 0), (0, 400), (200, 400)] {
        let (host_cache_bytes, disk_cache_bytes) = (bytes(&pool, host), bytes(&pool, disk));
        let spec = Spec { rows: false, host_cache_bytes, disk_cache_bytes, ..Spec::cpu(40) };
        let mut world = World::pool(pool.clone(), None, &[spec]);
        let ask = |world: &mut World, n: u64, salt: &str| {
            let id = world.submit(0, salted(n, salt));
            world.run();
            world.run_for(COPIES_MS);
            world.requests[id].prompt.0
        };
        let salts = ["alice\0", "alice\0mine", "bob\0mine", ""];
        for (n, salt) in (1..).zip(salts) {
            assert_eq!(ask(&mut world, n, salt), 0);
        }
        let id = world.id(0).unwrap();
        let counts = |world: &World| {
            let row = world.gmanager().status(world.now_ms()).remove(0);
            *row.heartbeat.unwrap().cache.unwrap()
        };
        let order = |world: &mut World, of: CacheTenants| {
            let reply = world.admin(AdminBody::CacheDrop(AdminCacheDrop { instance: id.0, of: Some(of) }));
            let number = reply.dropped.unwrap().number;
            world.run_until(|world| counts(world).drop_done == number);
        };
        let fingerprints = salts.map(Tenant::of);
        let known = |world: &World| -> BTreeSet<Tenant> {
            counts(world).tenants.iter().map(|of| Tenant { key: of.key, salt: of.salt }).collect()
        };
        world.run_for(1_000);
        assert_eq!(known(&world), fingerprints.into_iter().collect(), "{host} and {disk} blocks");
        // Both of alice's.
        order(&mut world, CacheTenants { key: Some(fingerprints[0].key), salt: None });
        world.run_for(1_000);
        assert_eq!(known(&world), fingerprints[2..].iter().copied().collect());
        let cached = [(1, 0), (2, 0), (3, 48), (4, 48)];
        for (n, tokens) in cached {
            assert_eq!(ask(&mut world, n, salts[n as usize - 1]), tokens, "{n} with {host} and {disk} blocks");
        }
        // Bob's, of all with this salt.
        order(&mut world, CacheTenants { key: Some(fingerprints[2].key), salt: Some(fingerprints[2].salt) });
        for (n, tokens) in [(3, 0), (2, 48), (4, 48)] {
            assert_eq!(ask(&mut world, n, salts[n as usize - 1]), tokens, "{n} with {host} and {disk} blocks");
        }
        world.check_empty();
    }
}

/// A client that goes away while its prefix is loaded, and a device that fails to store it.
#[test]
fn a_load_ends_with_its_request_and_with_the_device() {
    let pool = PoolSpec::golden("llama3_old", 4);
    for rows in [true, false] {
        for fails in [false, true] {
            let spec = with_host(&pool, Spec { rows, ..Spec::cpu(24) });
            let mut world = evicted_and_asked_again("before", &pool, &spec);
            for n in [2, 3, 4, 1, 2] {
                if fails {
                    world.break_device(0, Fault::RemoteRequest);
                }
                let id = world.submit(0, greedy(prompt(n, 50, 128), 3));
                (0..3).for_each(|_| world.step());
                if !fails {
                    world.cancel(id);
                }
                world.submit(0, greedy(prompt(10 + n, 60, 128), 3));
                world.run();
            }
            world.requests.retain(|log| !log.cancelled);
            assert_equals_single("a load that ends early", &world, &pool);
            world.check_empty();
        }
    }
}

/// A tenant's salt separates tiers as it separates the cache.
#[test]
fn another_salt_finds_nothing_in_a_tier() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let spec = with_host(&pool, Spec { rows: false, ..Spec::cpu(24) });
    let mut world = evicted_and_asked_again("salt", &pool, &spec);
    let mut other = greedy(prompt(1, 50, 128), 3);
    other.options.cache_salt = "another".into();
    let id = world.submit(0, other);
    world.run();
    assert_eq!(world.requests[id].prompt.0, 0);
}

/// Layers with a window kept apart: the pooled layers' KV comes from the tier, the windows are computed again.
#[test]
fn windows_kept_apart_are_warmed_up_behind_blocks_from_a_tier() {
    for name in ["gpt_oss", "gemma2", "gemma3"] {
        let pool = PoolSpec { split: true, ..PoolSpec::golden(name, 4) };
        let mut spec = ModelSpec::open(&pool.dir).unwrap();
        spec.split_kv().unwrap();
        let warm_up = u64::from(spec.split.unwrap().warm_up);
        let request = greedy(prompt(7, 90, 120), 6);
        let alone = single(&PoolSpec::golden(name, 4), std::slice::from_ref(&request));
        let spec = Spec { rows: false, host_cache_bytes: bytes(&pool, 200), ..Spec::cpu(40) };
        let mut world = World::single(pool, spec);
        world.submit(0, request.clone());
        world.run();
        world.run_for(COPIES_MS);
        (8..10).for_each(|n| {
            world.submit(0, greedy(prompt(n, 100, 120), 1));
            world.run();
        });
        let warmed_up = world.live(0).status().warm_up_tokens;
        let again = world.submit(0, request.clone());
        world.run();
        assert_same(name, &world.requests[again], &alone[0], 1e-4);
        let hit_tokens = world.live(0).status().prefix.found.host;
        if warm_up >= 88 {
            // All would be computed again.
            assert_eq!((hit_tokens, world.tiers(0).declined_loads), (0, 1), "{name}");
            continue;
        }
        assert!(hit_tokens > 0, "{name}: {:?}", world.tiers(0));
        // From the first position that the window at position 88 depends on.
        let warmed_up = world.live(0).status().warm_up_tokens - warmed_up;
        assert_eq!((world.requests[again].prompt.0, warmed_up), (88, warm_up), "{name}");
        world.check_empty();
    }
}

/// Every variant gives transformers' answers with its prefix from host memory.
#[test]
fn every_model_equals_transformers_with_blocks_from_a_tier() {
    for name in models() {
        let golden = Golden::load(name);
        let (tokens, output) = (&golden.description.tokens, &golden.description.greedy_continuation);
        let last = tokens.len() - 1;
        let pool = PoolSpec::golden(name, 4);
        let spec = Spec { rows: false, step_rows: 9, host_cache_bytes: bytes(&pool, 200), ..Spec::cpu(40) };
        let mut world = World::single(pool.clone(), spec);
        world.submit(0, greedy(tokens.clone(), output.len() as u32));
        world.run();
        world.run_for(COPIES_MS);
        // Others that take all the memory.
        for n in 0..6 {
            world.submit(0, greedy(prompt(n, tokens.len(), 64), 1));
            world.run();
        }
        let again = world.submit(0, greedy(tokens.clone(), output.len() as u32));
        world.run();
        assert_eq!(world.requests[again].prompt.0, last as u32 / 4 * 4, "{name}: {:?}", world.tiers(0));
        assert!(world.requests[again].found.host > 0, "{name}");
        let diff = max_diff(&world.requests[again].logits[0], golden.at(last).unwrap());
        assert!(diff <= golden.description.tolerance_f32, "{name}: {diff}");
        assert_eq!(&world.requests[again].tokens, output, "{name}");
        world.check_empty();
    }
}
