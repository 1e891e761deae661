//! Prefix cache: common prefixes are prefilled once, and answers do not change.

use lagoon_instance::PrefixStatus;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt};
use lagoon_tests::cluster::{Backend, Fault, PoolSpec, Rng, Spec, World, greedy};
use lagoon_tests::golden::{Golden, max_diff, models};

fn prefix(world: &World, node: usize) -> PrefixStatus {
    world.live(node).status().prefix
}

fn joined(parts: &[&[u32]]) -> Vec<u32> {
    parts.concat()
}

/// Every variant gives transformers' answers with prefix-cache hits, with and without address rows, in shared arenas.
#[test]
fn every_model_equals_transformers_with_cached_blocks() {
    for name in models() {
        let golden = Golden::load(name);
        let (tokens, output) = (&golden.description.tokens, &golden.description.greedy_continuation);
        let last = tokens.len() - 1;
        let flat = Spec { rows: false, step_rows: 9, ..Spec::cpu(40) };
        let shared = Spec { share: true, ..flat.clone() };
        for (kind, spec) in [("rows", Spec { rows: true, ..flat.clone() }), ("flat", flat), ("shared", shared)] {
            let what = format!("{name}, {kind}");
            let mut world = World::single(PoolSpec::golden(name, 4), spec);
            // Also the prompt's beginning alone, so that its own blocks end where it ends.
            for n in [33, tokens.len(), tokens.len()] {
                world.submit(0, greedy(tokens[..n].to_vec(), if n > 33 { output.len() as u32 } else { 1 }));
                world.run();
            }
            let mut found = 32 + last as u64 / 4 * 4;
            if (name, kind) == ("mistral_window", "rows") {
                // A row in use caches nothing, so blocks behind the window are gone.
                found = 0;
            }
            let of = world.live(0).status();
            assert_eq!((of.prefix.hit_tokens, of.recomputed_tokens, of.warm_up_tokens), (found, 0, 0), "{what}");
            for log in &world.requests[1..] {
                let diff = max_diff(&log.logits[0], golden.at(last).unwrap());
                assert!(diff <= golden.description.tolerance_f32, "{what}: {diff}");
                assert_eq!(&log.tokens, output, "{what}");
            }
            let diff = assert_equals_single(&what, &world, &PoolSpec::golden(name, 4));
            println!("{what}: {diff:e}");
            world.check_empty();
        }
    }
}

/// Each turn's prompt contains all earlier turns: the answers' KV is found as well.
#[test]
fn a_conversation_is_computed_turn_by_turn() {
    let spec = PoolSpec::golden("llama3_old", 4);
    for rows in [true, false] {
        let mut world = World::single(spec.clone(), Spec { rows, ..Spec::cpu(60) });
        let mut output = prompt(1, 21, 128);
        for turn in 0..4 {
            let before = prefix(&world, 0).hit_tokens;
            let id = world.submit(0, greedy(output.clone(), 11));
            world.run();
            if turn > 0 {
                // The last token of an answer has no KV, as nothing followed it.
                let known = output.len() as u64 - 9 - 1;
                assert_eq!(prefix(&world, 0).hit_tokens - before, known / 4 * 4, "turn {turn}");
            }
            output = joined(&[&output, &world.requests[id].tokens, &prompt(50 + turn, 9, 128)]);
        }
        assert_equals_single("a conversation", &world, &spec);
        world.check_empty();
    }
}

/// Memory is always short: cached blocks are evicted, and no hit is wrong.
#[test]
fn cached_blocks_are_evicted_for_any_allocation() {
    let spec = PoolSpec::golden("llama3_old", 4);
    for rows in [true, false] {
        let mut world = World::single(spec.clone(), Spec { rows, running: 3, queue: 64, ..Spec::cpu(30) });
        let beginnings = [prompt(1, 40, 128), prompt(2, 25, 128)];
        for n in 0..24 {
            let beginning = &beginnings[n as usize % 2][..10 + n as usize % 15];
            world.submit(0, greedy(joined(&[beginning, &prompt(100 + n, 5 + n as usize * 7 % 40, 128)]), 6));
            (0..40).for_each(|_| world.step());
        }
        world.run();
        let of = prefix(&world, 0);
        assert!(of.hit_tokens > 0 && of.evicted_blocks > 0, "{of:?}");
        assert_equals_single("short of memory", &world, &spec);
        world.check_empty();
    }
}

/// A preempted sequence resumes with its cached blocks that were not evicted meanwhile.
#[test]
fn what_a_preempted_sequence_had_is_found_again() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = World::single(spec.clone(), Spec { rows: false, ..Spec::cpu(24) });
    world.submit(0, greedy(prompt(1, 40, 128), 24));
    world.submit(0, greedy(prompt(2, 40, 128), 24));
    world.run();
    let status = world.live(0).status();
    assert!(status.preemptions > 0 && status.prefix.hit_tokens > 0, "{status:?}");
    assert_equals_single("preempted", &world, &spec);
    world.check_empty();
}

/// A prefix in use is shared, also if its first owner ends before; if it must be mapped and cannot be, it is
/// recomputed.
#[test]
fn what_others_are_using_is_shared() {
    let spec = PoolSpec::golden("mistral_window", 4);
    let flat = Spec { rows: false, ..Spec::cpu(80) };
    let shared = Spec { share: true, ..flat.clone() };
    for (kind, of) in [("rows", Spec { rows: true, ..flat.clone() }), ("flat", flat), ("shared", shared)] {
        for fails in [false, kind == "rows"] {
            let what = format!("{kind}, {fails}");
            let mut world = World::single(spec.clone(), of.clone());
            // Shorter than the window, answer included.
            let beginning = prompt(1, 12, 128);
            world.submit(0, greedy(beginning.clone(), 4));
            world.run_until(|w| w.requests[0].tokens.len() == 2);
            if fails {
                world.break_device(0, Fault::RemoteRequest);
            }
            world.submit(0, greedy(joined(&[&beginning, &prompt(2, 30, 128)]), 9));
            world.submit(0, greedy(joined(&[&beginning, &prompt(3, 3, 128)]), 9));
            world.run();
            let status = world.live(0).status();
            assert_eq!((status.prefix.shared_blocks, status.prefix.saved_blocks), (6, 0), "{what}");
            assert_eq!(status.preempted_tokens, if fails { 12 } else { 0 }, "{what}");
            assert_equals_single(&what, &world, &spec);
            world.check_empty();
        }
    }
}

/// Asserts that requests which differ only in their last tokens run together in memory that holds fewer without
/// sharing.
fn assert_shares(kind: &str, of: &Spec) {
    let spec = PoolSpec::golden("llama3_old", 4);
    for prefix_cache in [true, false] {
        let what = format!("{kind}, {prefix_cache}");
        let mut world = World::single(spec.clone(), Spec { prefix_cache, running: 8, ..of.clone() });
        // Ten of thirteen blocks are common: there is room for one request and three times three blocks, or for one
        // request.
        let beginning = prompt(1, 40, 128);
        world.submit(0, greedy(joined(&[&beginning, &prompt(2, 2, 128)]), 10));
        world.run_until(|w| !w.requests[0].tokens.is_empty());
        (3..6).for_each(|n| _ = world.submit(0, greedy(joined(&[&beginning, &prompt(n, 3, 128)]), 8)));
        let (mut most, mut saved) = (0, 0);
        while !world.requests.iter().all(|r| r.is_over()) {
            world.step();
            let status = world.live(0).status();
            most = most.max(status.running);
            saved = saved.max(status.prefix.saved_blocks);
        }
        assert_eq!((most, saved), if prefix_cache { (4, 30) } else { (1, 0) }, "{what}");
        assert_eq!(world.live(0).status().preemptions, 0, "{what}");
        let diff = assert_equals_single(&what, &world, &spec);
        println!("{what}: largest difference {diff:e}");
        world.check_empty();
    }
}

#[test]
fn what_several_begin_with_is_in_memory_once() {
    let flat = Spec { rows: false, ..Spec::cpu(22) };
    assert_shares("rows", &Spec { rows: true, ..flat.clone() });
    assert_shares("memory that others read", &Spec { share: true, ..flat.clone() });
    assert_shares("flat", &flat);
}

/// Requests with a common prefix arrive together: one prefills it and the others continue from there, or share blocks
/// that both prefilled.
#[test]
fn what_comes_at_once_is_in_memory_once() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let flat = Spec { rows: false, running: 8, ..Spec::cpu(80) };
    let shared = Spec { share: true, ..flat.clone() };
    for (kind, of) in [("rows", Spec { rows: true, ..flat.clone() }), ("flat", flat), ("shared", shared)] {
        for step_rows in [16, 64] {
            let what = format!("{kind}, {step_rows} rows a step");
            let mut world = World::single(spec.clone(), Spec { step_rows, ..of.clone() });
            // They come while a step runs, so that the next one is as full as possible.
            world.submit(0, greedy(prompt(7, 9, 128), 12));
            world.run_until(|w| !w.requests[0].tokens.is_empty());
            let beginning = prompt(1, 40, 128);
            (2..6).for_each(|n| _ = world.submit(0, greedy(joined(&[&beginning, &prompt(n, 2, 128)]), 10)));
            let mut saved = 0;
            while !world.requests.iter().all(|r| r.is_over()) {
                world.step();
                saved = saved.max(world.live(0).status().prefix.saved_blocks);
            }
            // Blocks that were mapped and prefilled in the same step stay.
            let expected = if kind == "rows" { 24..=30 } else { 30..=30 };
            assert!(expected.contains(&saved), "{what}: {saved} blocks were saved");
            assert_equals_single(&what, &world, &spec);
            world.check_empty();
        }
    }
}

#[test]
fn what_several_begin_with_is_in_memory_once_on_wgpu() {
    if let Err(why) = lagoon_tests::wgpu() {
        return lagoon_tests::skip("what_several_begin_with_is_in_memory_once_on_wgpu", &why);
    }
    assert_shares("wgpu", &Spec { backend: Backend::Wgpu, rows: false, ..Spec::cpu(22) });
}

/// While blocks are shared, their owners' other blocks move, are lent and are recalled as usual, and shared blocks
/// stay until their last owner ends: a request that outgrows this instance beside two with a common prefix.
#[test]
fn what_is_shared_stays_while_its_owners_move() {
    let spec = PoolSpec::golden("llama3_old", 4);
    for rows in [true, false] {
        let mut world = World::pool(spec.clone(), None, &[Spec { rows, ..Spec::cpu(24) }, Spec::cpu(40)]);
        let beginning = prompt(1, 40, 128);
        world.submit(0, greedy(joined(&[&beginning, &prompt(2, 2, 128)]), 60));
        world.run_until(|w| !w.requests[0].tokens.is_empty());
        world.submit(0, greedy(joined(&[&beginning, &prompt(3, 3, 128)]), 30));
        world.submit(0, greedy(joined(&[&beginning, &prompt(4, 3, 128)]), 8));
        let mut moved = 0;
        while !world.requests.iter().all(|r| r.is_over()) {
            world.step();
            let status = world.live(0).status();
            moved = moved.max(status.moves.blocks_out + u64::from(status.blocks_borrowed));
        }
        let status = world.live(0).status();
        assert!(moved > 0 && status.prefix.shared_blocks == 20, "{status:?}");
        assert_equals_single(&format!("shared and elsewhere, rows {rows}"), &world, &spec);
        world.check_empty();
    }
}

/// Cached blocks are lent like free ones.
#[test]
fn what_is_kept_is_lent() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = World::pool(spec.clone(), None, &[Spec::cpu(20), Spec::cpu(20)]);
    world.submit(1, greedy(prompt(1, 60, 128), 8));
    world.run();
    let kept = prefix(&world, 1).blocks;
    assert!(kept >= 15, "{kept}");
    world.submit(0, greedy(prompt(2, 120, 128), 8));
    world.run();
    assert!(prefix(&world, 1).evicted_blocks > 0 && world.sent("partial").0 > 0);
    // The prefix's beginning was lent away and the rest is useless without it; or it is found, and right.
    world.submit(1, greedy(prompt(1, 60, 128), 8));
    world.run();
    assert_equals_single("lent", &world, &spec);
    world.check_empty();
}

#[test]
fn nothing_is_kept_where_that_is_off() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = World::single(spec, Spec { prefix_cache: false, ..Spec::cpu(40) });
    for _ in 0..2 {
        world.submit(0, greedy(prompt(1, 30, 128), 4));
        world.run();
    }
    assert_eq!(prefix(&world, 0), PrefixStatus::default());
}

/// A prefill worker prefills each turn's prompt except its cached part of the earlier turn; blocks that a decode
/// worker reads are neither cached nor freed before they have been read.
#[test]
fn a_prefill_worker_keeps_what_it_handed_over() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = World::pool(spec.clone(), None, &[Spec::prefill(40), Spec::decode(60)]);
    world.run_until(|w| w.live(1).status().prefill.workers == 1);
    let first = prompt(1, 50, 128);
    world.submit(1, greedy(first.clone(), 6));
    world.run_until(|w| w.live(1).status().prefill.pulling > 0);
    assert_eq!(prefix(&world, 0).blocks, 0, "what is read is not free");
    world.run();
    world.run_for(2_500);
    assert_eq!(prefix(&world, 0).blocks, 12, "every full block of it");
    let second = joined(&[&first, &world.requests[0].tokens, &prompt(2, 30, 128)]);
    world.submit(1, greedy(second.clone(), 6));
    world.run();
    assert_eq!(prefix(&world, 0).hit_tokens, 48);
    // Another one with that prefix, while memory is short: 40 blocks are more than the cached ones and its own.
    world.submit(1, greedy(joined(&[&first[..20], &prompt(3, 130, 128)]), 6));
    world.submit(1, greedy(second, 6));
    world.run();
    let of = prefix(&world, 0);
    assert!(of.hit_tokens > 48 && of.evicted_blocks > 0, "{of:?}");
    let diff = assert_equals_single("disaggregated", &world, &spec);
    println!("largest difference {diff:e}");
    assert_eq!(world.live(1).status().prefill.own, 0);
    world.check_empty();
    assert_eq!(world.exports(0), 0);
}

/// A pool of prefill workers and, last, a decode worker that reads them.
fn disaggregated(spec: &PoolSpec, workers: &[Spec]) -> World {
    let specs = [workers, &[Spec::decode(120)]].concat();
    let mut world = World::pool(spec.clone(), None, &specs);
    world.run_until(|w| w.live(workers.len()).status().prefill.workers == workers.len());
    world
}

/// Each turn of a conversation is routed to the prefill worker with its prefix, and that prefix is not prefilled
/// again; prompts without a known prefix are routed by load.
#[test]
fn a_conversation_stays_with_its_prefill_worker() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let mut world = disaggregated(&spec, &[Spec::prefill(120), Spec::prefill(120)]);
    let mut output: Vec<Vec<u32>> = (0..2).map(|n| prompt(n, 33, 128)).collect();
    let done = |w: &World, n: usize| w.live(n).status().prefill.jobs_done;
    for turn in 0..4 {
        // Both at once, so that the first turns are divided.
        let ids: Vec<usize> = output.iter().map(|output| world.submit(2, greedy(output.clone(), 8))).collect();
        world.run();
        assert_eq!((done(&world, 0), done(&world, 1)), (turn + 1, turn + 1));
        for (n, id) in ids.into_iter().enumerate() {
            output[n] = joined(&[&output[n], &world.requests[id].tokens, &prompt(50 + 2 * turn + n as u64, 9, 128)]);
        }
        // From now on the other one comes first.
        output.reverse();
    }
    let status = world.live(2).status().prefill;
    assert_eq!(status.affine, 6, "{status:?}");
    // Hits equal the expected ones, except for blocks beyond the last remembered one.
    let found = prefix(&world, 0).hit_tokens + prefix(&world, 1).hit_tokens;
    assert!(
        status.affine_tokens > 0 && (0..6 * 4 * 4).contains(&(found - status.affine_tokens)),
        "{found}, {status:?}"
    );
    assert_equals_single("a conversation elsewhere", &world, &spec);
    world.check_empty();
}

/// A busy worker does not get a prompt for its prefix; nor does a restarted one.
#[test]
fn a_busy_or_dead_worker_is_not_preferred() {
    let spec = PoolSpec::golden("llama3_old", 4);
    for dead in [false, true] {
        let worker = Spec { step_ms: 50, ..Spec::prefill(120) };
        let mut world = disaggregated(&spec, std::slice::from_ref(&worker));
        let beginning = prompt(1, 40, 128);
        world.submit(1, greedy(beginning.clone(), 2));
        world.run();
        if !dead {
            (0..4).for_each(|n| _ = world.submit(1, greedy(prompt(10 + n, 100, 128), 2)));
            world.run_until(|w| w.live(0).status().prefill.queued_tokens > 0);
        }
        world.add(worker);
        world.run_until(|w| w.live(1).status().prefill.workers == 2);
        if dead {
            world.kill(0);
            world.run_for(1_000);
        } else {
            assert!(world.live(0).status().prefill.queued_tokens > 100, "it is busy");
        }
        world.submit(1, greedy(joined(&[&beginning, &prompt(2, 20, 128)]), 2));
        world.run();
        assert_eq!(world.live(2).status().prefill.jobs_done, 1, "dead: {dead}");
        let status = world.live(1).status().prefill;
        assert_eq!((status.affine, status.own), (0, 0), "dead: {dead}, {status:?}");
        assert_equals_single("elsewhere", &world, &spec);
        world.run_for(20_000);
        world.check_empty();
    }
}

/// A decode worker reads only the blocks of a prompt that it lacks: it shares those in use here, also if the device
/// maps them at a second address, and takes cached ones.
pub(crate) fn assert_reads_the_rest(what: &str, spec: &PoolSpec, prefill: Spec, decode: Spec) {
    let (block, push) = (spec.block_tokens, decode.push);
    let mut world = World::pool(spec.clone(), None, &[prefill, decode]);
    world.run_until(|w| w.live(1).status().prefill.workers == 1);
    let beginning = prompt(40, (2 * block + block / 2) as usize, 128);
    let mut before = world.live(1).status().prefill;
    for (n, (own, answer)) in [(3, 40), (7, 24), (5, 6)].into_iter().enumerate() {
        if n == 2 {
            // No sequence uses it any more.
            world.run();
        }
        let tokens = joined(&[&beginning, &prompt(41 + n as u64, own, 128)]);
        let len = tokens.len() as u64;
        let request = world.submit(1, greedy(tokens, answer));
        world.run_until(|w| w.requests[request].tokens.len() > 2);
        let now = world.live(1).status().prefill;
        let (found, bytes) = (now.found_tokens - before.found_tokens, now.bytes - before.bytes);
        assert_eq!(found, if n == 0 { 0 } else { u64::from(2 * block) }, "{what}, push: {push}: {now:?}");
        let token = if n == 0 { bytes / len } else { (now.found_bytes - before.found_bytes) / found };
        assert_eq!(bytes, (len - found) * token, "{what}, push: {push}: {now:?}");
        assert_eq!(prefix(&world, 1).saved_blocks, if n == 1 { 2 } else { 0 }, "{what}, push: {push}");
        before = now;
    }
    assert!(!world.requests[2].is_over());
    world.run();
    assert_eq!((before.pulled, before.own, before.retried), (3, 0, 0), "{what}, push: {push}: {before:?}");
    let diff = assert_equals_single(what, &world, spec);
    println!("{what}, push: {push}: largest difference {diff:e}");
    world.check_empty();
    assert_eq!(world.exports(0), 0, "{what}, push: {push}");
}

#[test]
fn a_decode_worker_reads_what_it_does_not_have() {
    let spec = PoolSpec::golden("llama3_old", 4);
    for push in [false, true] {
        let decode = Spec { push, ..Spec::decode(40) };
        assert_reads_the_rest("in place", &spec, Spec::prefill(40), decode.clone());
        // In address rows, through staging buffers.
        let staged = Spec { stage_blocks: Some(16), ..decode };
        assert_reads_the_rest("in rows", &spec, Spec::prefill(40), staged);
    }
}

/// Prompts with common prefixes come while others are read, preempted, cancelled and read again, in too little
/// memory.
#[test]
fn decode_workers_share_what_they_read_at_any_time() {
    let spec = PoolSpec::golden("llama3_old", 4);
    let (mut found, mut preempted) = (0, 0);
    for seed in 0..24 {
        let stage_blocks = [None, Some(12), Some(30)][seed as usize % 3];
        let decode = Spec { push: seed % 2 == 1, stage_blocks, step_ms: seed % 4, ..Spec::decode(18) };
        let mut world = World::pool(spec.clone(), Some(seed), &[Spec::prefill(40), decode]);
        world.run_until(|w| w.live(1).status().prefill.workers == 1);
        let mut rng = Rng::new(seed);
        let beginnings = [prompt(50, 22, 128), prompt(51, 9, 128)];
        for n in 0..14 {
            let beginning = &beginnings[usize::from(rng.below(3) == 0)];
            let tokens = joined(&[beginning, &prompt(60 + n, 2 + rng.below(12) as usize, 128)]);
            let request = world.submit(1, greedy(tokens, 1 + rng.below(24) as u32));
            world.run_for(rng.below(30));
            match rng.below(9) {
                0 => world.cancel(request),
                1 => world.cut(0, 1, rng.below(200)),
                _ => {}
            }
        }
        world.run();
        let status = world.live(1).status();
        (found, preempted) = (found + status.prefill.found_tokens, preempted + status.preemptions);
        world.requests.retain(|request| !request.cancelled);
        assert_equals_single(&format!("seed {seed}"), &world, &spec);
        world.run_for(20_000);
        world.check_empty();
    }
    assert!(found > 0 && preempted > 0, "{found} tokens were found, {preempted} were preempted");
}
