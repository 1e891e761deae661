//! Workers whose KV store only the device can access: KV passes through staging buffers, on every backend; KV that
//! does not fit those waits, is refused, or stays at its prefill worker.

use lagoon_protocol::Role;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Backend, Fault, PoolSpec, Spec, World, greedy};

fn worker(backend: Backend, role: Role, push: bool) -> Spec {
    Spec { backend, role, push, ..Spec::cpu(40) }
}

fn pool(spec: &PoolSpec, specs: &[Spec]) -> World {
    let mut world = World::pool(spec.clone(), None, specs);
    let decoder = specs.len() - 1;
    world.run_until(|w| w.live(decoder).status().prefill.workers == specs.len() - 1);
    world
}

/// Asserts that a prefill and a decode worker on these backends give a single instance's answers.
pub(crate) fn assert_serves(pool_of: &PoolSpec, prefill: Spec, decode: Spec) {
    let what = format!("{:?} to {:?}, push: {}", prefill.backend, decode.backend, decode.push);
    let mut world = pool(pool_of, &[prefill, decode]);
    world.submit(1, greedy(prompt(1, 50, 128), 6));
    world.submit(1, greedy(prompt(2, 17, 128), 5));
    let cancelled = world.submit(1, greedy(prompt(3, 40, 128), 9));
    world.run_until(|w| w.requests[cancelled].tokens.len() > 2);
    world.cancel(cancelled);
    world.run();
    world.requests.pop();
    let diff = assert_equals_single(&what, &world, pool_of);
    println!("{what}: largest difference {diff:e}");
    let status = world.live(1).status().prefill;
    assert_eq!((status.pulled, status.own, status.retried), (3, 0, 0), "{what}: {status:?}");
    world.check_empty();
    assert_eq!(world.exports(0), 0, "{what}");
}

#[test]
fn prompts_pass_between_wgpu_and_the_host() {
    if let Err(why) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("prompts_pass_between_wgpu_and_the_host", &why);
    }
    for (from, to) in [(Backend::Wgpu, Backend::Cpu), (Backend::Cpu, Backend::Wgpu), (Backend::Wgpu, Backend::Wgpu)] {
        for push in [false, true] {
            let split = PoolSpec { split: true, ..PoolSpec::golden("gemma3", 4) };
            for spec in [PoolSpec::golden("llama3_old", 4), split] {
                assert_serves(&spec, worker(from, Role::Prefill, false), worker(to, Role::Decode, push));
            }
        }
    }
}

fn staged(role: Role, blocks: u32, stage_blocks: u32) -> Spec {
    Spec { role, stage_blocks: Some(stage_blocks), ..Spec::cpu(blocks) }
}

/// Prompts without room in the prefill worker's staging buffer wait for it in turn; one that can never fit is
/// refused.
#[test]
fn prompts_wait_for_memory_beside_the_store() {
    for push in [false, true] {
        let spec = PoolSpec::golden("llama3_old", 4);
        let decode = Spec { push, ..staged(Role::Decode, 80, 80) };
        let mut world = pool(&spec, &[staged(Role::Prefill, 80, 16), decode]);
        // Prompts are prefilled faster than their KV is read.
        world.slow_reads(1, Some(1));
        for n in 0..4 {
            world.submit(1, greedy(prompt(n, 40, 128), 6));
        }
        world.run();
        let worker = world.live(0).status().prefill;
        assert!(worker.stage_waits > 0 && worker.jobs_done == 4, "{worker:?}");
        world.submit(1, greedy(prompt(9, 65, 128), 2));
        world.run();
        let (worker, decoder) = (world.live(0).status().prefill, world.live(1).status().prefill);
        assert!(worker.jobs_refused > 0 && decoder.own == 1, "{worker:?} {decoder:?}");
        assert_equals_single("with little room", &world, &spec);
        world.check_empty();
    }
}

/// KV that cannot arrive at once stays at its prefill worker, like KV that does not fit the decode worker.
#[test]
fn what_cannot_arrive_at_once_stays_behind() {
    for push in [false, true] {
        let spec = PoolSpec::golden("llama3_old", 4);
        let decode = Spec { push, ..staged(Role::Decode, 60, 12) };
        let mut world = pool(&spec, &[staged(Role::Prefill, 60, 60), decode]);
        world.submit(1, greedy(prompt(1, 110, 128), 8));
        world.submit(1, greedy(prompt(2, 40, 128), 8));
        world.run();
        let status = world.live(1).status().prefill;
        // 28 blocks, or with the next token's place the first 17 of them.
        assert!(status.blocks_left >= 16 && status.pulled == 2, "{status:?}");
        assert!(world.sent("partial").0 > 0);
        assert_equals_single("left behind", &world, &spec);
        world.check_empty();
    }
}

/// A request that is cancelled, or whose KV is lost or not copied, during the device's copy leaves nothing behind.
#[test]
fn aborted_copies_leave_nothing() {
    for (what, push) in [("cancelled", false), ("cancelled", true), ("killed", false), ("failed", false)] {
        let spec = PoolSpec::golden("llama3_old", 4);
        let decode = Spec { push, ..staged(Role::Decode, 40, 40) };
        let mut world = pool(&spec, &[staged(Role::Prefill, 60, 60), staged(Role::Prefill, 60, 60), decode]);
        let request = world.submit(2, greedy(prompt(1, 60, 128), 8));
        world.run_until(|w| {
            let status = w.live(2).status().prefill;
            status.away == 1 && status.pulling == 0 && status.transactions > 0 && w.requests[0].tokens.len() == 1
        });
        assert!(world.live(2).status().prefill.stage_blocks_used > 0, "{what}");
        match what {
            "cancelled" => world.cancel(request),
            "killed" => world.kill((0..2).find(|n| world.live(*n).status().prefill.jobs_done > 0).unwrap()),
            _ => world.break_device(2, Fault::RemoteRequest),
        }
        world.run();
        if what == "failed" {
            assert_eq!(world.live(2).status().prefill.retried, 1);
        }
        if what != "cancelled" {
            assert_equals_single(what, &world, &spec);
        }
        world.run_for(20_000);
        world.check_empty();
    }
}

/// If a prefill worker's device fails to copy KV out, another worker prefills the prompt.
#[test]
fn a_copy_out_of_the_store_that_fails_costs_another_prefill() {
    for push in [false, true] {
        let spec = PoolSpec::golden("llama3_old", 4);
        let decode = Spec { push, ..Spec::decode(40) };
        let mut world = pool(&spec, &[staged(Role::Prefill, 60, 60), decode]);
        world.break_device(0, Fault::RemoteRequest);
        world.submit(1, greedy(prompt(1, 60, 128), 8));
        world.run();
        let status = world.live(1).status().prefill;
        assert_eq!((status.pulled, status.own), (1, 0), "{status:?}");
        assert_equals_single("not copied", &world, &spec);
        world.run_for(20_000);
        world.check_empty();
        assert_eq!(world.exports(0), 0);
    }
}
