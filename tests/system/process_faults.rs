//! Processes are killed, paused and cut off while streams depend on them. Every stream continues with an undisturbed
//! instance's tokens; recomputed tokens are counted; no memory leaks.

use lagoon_tests::faults::{FaultPool, STEP, Watched, number, passkey, prompt};
use lagoon_tests::partition::{Net, Place};
use lagoon_types::limits::{FENCE_MS, LEASE_TTL_MS};
use serde_json::Value;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Vocabulary of the bundled model.
const VOCAB: u32 = 1024;
/// Tokens in an rBlock.
const BLOCK: u32 = 16;
/// Slack for a busy machine.
const SLACK: Duration = Duration::from_secs(5);
/// rBlocks that a sequence may have borrowed since the last look.
const GROWTH: u64 = 4;

fn recoveries(pool: &FaultPool, name: &str) -> u64 {
    number(&pool.status(name), "recoveries")
}

fn recomputed(pool: &FaultPool, name: &str) -> u64 {
    number(&pool.status(name), "recomputed_tokens")
}

/// Waits until an instance has lost KV more often than `before`, and has recomputed all of it.
fn wait_recovered(pool: &FaultPool, name: &str, before: u64) {
    pool.wait(name, "recovered", |s| number(s, "recoveries") > before && is_whole(s));
}

fn is_whole(status: &Value) -> bool {
    let sequences = status["sequences"].as_array().unwrap();
    sequences.iter().all(|s| number(s, "lost_blocks") == 0 && number(s, "lost_tokens") == 0)
}

/// Waits for a random time within a step.
fn some_instant(stream: &Watched) {
    stream.wait_for(stream.tokens() + 5);
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos();
    std::thread::sleep(Duration::from_nanos(u64::from(nanos) % STEP.as_nanos() as u64));
}

/// One stream outlives four of its creditors: one dies during a decode step, one while the debtor waits for its
/// partials in the middle of a layer, and two while they receive the recomputed lost range of the one before.
#[test]
fn a_stream_outlives_creditors_that_are_killed() {
    let mut pool = FaultPool::without_members(&passkey(), BLOCK, "127.0.0.1", Some(STEP));
    // The lost range is recomputed in many steps, so that a creditor can die in the middle.
    let mut members = vec![("debtor", 8, Place::default().with("--step-tokens=16"))];
    members.extend(["c1", "c2", "c3", "c4", "c5"].map(|name| (name, 48, Place::default())));
    pool.start(&members);
    let prompt = prompt(1, 320, VOCAB);
    let stream = pool.watch("debtor", &prompt, 300);
    let undisturbed = pool.undisturbed(48);
    stream.wait_for(20);

    // During decoding, anywhere in a step.
    some_instant(&stream);
    let dead = pool.creditor("debtor");
    let (output, lent) = (stream.tokens(), pool.creditors("debtor")[&dead] + GROWTH);
    pool.kill(&dead);
    wait_recovered(&pool, "debtor", 0);
    let first = recomputed(&pool, "debtor");
    println!("killed in mid-decode after {output} tokens: at most {lent} rBlocks lost, {first} tokens computed again");
    assert!(first > 0 && first <= lent * u64::from(BLOCK), "{first} of {lent} rBlocks");
    stream.wait_for(output + 20);

    // In the middle of a layer: queries are sent, and the reply never comes.
    let dead = pool.creditor("debtor");
    let lent = pool.creditors("debtor")[&dead] + GROWTH;
    pool.pause(&dead);
    stream.wait_for_silence(20 * STEP);
    let (output, before) = (stream.tokens(), recoveries(&pool, "debtor"));
    pool.kill(&dead);
    wait_recovered(&pool, "debtor", before);
    let second = recomputed(&pool, "debtor") - first;
    println!("killed in mid-layer after {output} tokens: at most {lent} rBlocks lost, {second} tokens computed again");
    assert!(second > 0 && second <= lent * u64::from(BLOCK), "{second} of {lent} rBlocks");
    stream.wait_for(output + 20);

    // While its successor is filled.
    let before = recoveries(&pool, "debtor");
    let dead = pool.creditor("debtor");
    let names = pool.instances();
    let client = pool.client("debtor");
    pool.kill(&dead);
    let (dead, missing) = loop {
        let status = client.get("/lagoon/status").json();
        let seq = &status["sequences"][0];
        assert!(!stream.is_over(), "the stream is over: {status}");
        if number(&status, "recoveries") > before && number(seq, "lost_blocks") == 0 {
            // The blocks it borrows now are being filled.
            let lent = seq["remote_blocks"].as_object().unwrap();
            break (names[lent.keys().next().unwrap()].clone(), number(seq, "lost_tokens"));
        }
    };
    let before = recoveries(&pool, "debtor");
    pool.kill(&dead);
    wait_recovered(&pool, "debtor", before);
    println!("killed with {missing} tokens still to be computed again: {} in all", recomputed(&pool, "debtor"));
    assert!(missing > 0, "it was too late");
    assert!(!stream.is_over(), "all of it happened while it ran");

    stream.finish("four creditors killed", &undisturbed);
    assert_eq!(number(&pool.status("debtor"), "preemptions"), 0, "only what was lost is computed again");
    pool.wait_whole();
    pool.wait_empty();
}

/// Without a gManager running requests go on and borrowing waits; a new gManager recovers all state.
#[test]
fn streams_outlive_the_gmanager() {
    let mut pool = FaultPool::new(&passkey(), BLOCK, &[("a", 32), ("b", 48)]);
    let undisturbed = pool.undisturbed(64);
    let (first, long, other) = (prompt(7, 300, VOCAB), prompt(2, 320, VOCAB), prompt(3, 576, VOCAB));
    // The first request takes memory that the second then borrows; when it ends, the second has room to grow.
    let room = pool.watch("a", &first, 20);
    room.wait_for(1);
    let stream = pool.watch("a", &long, 250);
    stream.wait_for(5);
    room.finish("makes room", &undisturbed);
    pool.kill_gmanager();
    let output = stream.tokens();
    assert!(!pool.creditors("a").is_empty(), "it borrows nothing");
    pool.wait("a", "without a gManager", |s| s["registered"] == false);
    let waiting = pool.watch("a", &other, 20);
    stream.wait_for(output + 60);
    let meanwhile = stream.tokens() - output;
    println!("{meanwhile} tokens came without a gManager");
    assert!(meanwhile >= 60 && waiting.tokens() == 0, "{meanwhile}, {}", waiting.tokens());
    pool.start_gmanager();
    pool.wait_whole();
    waiting.finish("borrowed of the new gManager", &undisturbed);
    stream.finish("the gManager killed", &undisturbed);
    for name in ["a", "b"] {
        let status = pool.status(name);
        assert_eq!((number(&status, "recomputed_tokens"), number(&status, "fences")), (0, 0), "{status}");
    }
    pool.wait_empty();
}

/// A creditor paused until it is declared dead comes back with stale KV, and learns so from its fence.
#[test]
fn a_creditor_that_was_paused_comes_back_empty() {
    let mut pool = FaultPool::new(&passkey(), BLOCK, &[("debtor", 8), ("c1", 48), ("c2", 48)]);
    let prompt = prompt(4, 320, VOCAB);
    let stream = pool.watch("debtor", &prompt, 300);
    let undisturbed = pool.undisturbed(48);
    stream.wait_for(10);
    let paused = pool.creditor("debtor");
    let output = stream.tokens();
    pool.pause(&paused);
    let since = Instant::now();
    wait_recovered(&pool, "debtor", 0);
    println!(
        "paused after {output} tokens: recovered after {:.2?}, {} tokens computed again",
        since.elapsed(),
        recomputed(&pool, "debtor")
    );
    stream.wait_for(output + 20);
    // After the fence, with slack for heartbeats and the clock.
    std::thread::sleep(Duration::from_millis(FENCE_MS + 1_500).saturating_sub(since.elapsed()));
    pool.resume(&paused);
    let back = pool.wait(&paused, "fenced, back and empty", |s| {
        s["registered"] == true && number(s, "fences") > 0 && s["blocks_free"] == s["blocks_total"]
    });
    println!("{paused} is back after {:.2?}: {} fences", since.elapsed(), number(&back, "fences"));
    stream.finish("a creditor paused", &undisturbed);
    pool.wait_whole();
    pool.wait_empty();

    // It lends again, and no attention uses its former KV.
    let other = if paused == "c1" { "c2" } else { "c1" };
    pool.kill(other);
    pool.wait_whole();
    let again = pool.watch("debtor", &prompt, 60);
    again.wait_for(5);
    assert_eq!(pool.creditor("debtor"), paused);
    again.finish("the revived one lends", &undisturbed);
    pool.wait_empty();
}

/// Two instances that cannot reach each other while the gManager reaches both.
#[test]
fn a_partition_between_two_instances() {
    let names = ["debtor", "c1", "c2"];
    let net = Net::new(&names);
    println!("partitions by {}", net.describe());
    let mut pool = FaultPool::without_members(&passkey(), BLOCK, &net.gmanager_ip(), Some(STEP));
    let blocks = [8, 48, 48];
    let places: Vec<_> = names.iter().zip(blocks).map(|(name, blocks)| (*name, blocks, net.place(name))).collect();
    pool.start(&places);
    let long = prompt(5, 320, VOCAB);
    let stream = pool.watch("debtor", &long, 300);
    let undisturbed = pool.undisturbed(128);
    stream.wait_for(10);
    let creditor = pool.creditor("debtor");

    // Shorter than any timeout: the stream waits, and nothing is lost.
    net.cut("debtor", &creditor);
    std::thread::sleep(Duration::from_millis(1_000));
    assert!(!stream.is_over());
    let output = stream.tokens();
    net.heal("debtor", &creditor);
    stream.wait_for(output + 30);
    println!("cut for 1 s after {output} tokens: {} tokens computed again", recomputed(&pool, "debtor"));
    assert_eq!(recomputed(&pool, "debtor"), 0);

    // Longer than a lease's life: the stream goes on elsewhere, and the creditor frees the blocks that are not
    // renewed.
    let cut = Instant::now();
    net.cut("debtor", &creditor);
    wait_recovered(&pool, "debtor", 0);
    println!(
        "cut for long: recovered after {:.2?}, {} tokens computed again",
        cut.elapsed(),
        recomputed(&pool, "debtor")
    );
    assert!(pool.creditors("debtor").keys().all(|name| *name != creditor), "{:?}", pool.creditors("debtor"));
    pool.wait(&creditor, "its leases over", |s| s["blocks_free"] == s["blocks_total"]);
    let freed = cut.elapsed();
    println!("the creditor's rBlocks were free {freed:.2?} after the cut (a lease lasts {LEASE_TTL_MS} ms)");
    // Its last renewal came before the cut.
    assert!(freed < Duration::from_millis(LEASE_TTL_MS) + SLACK, "{freed:?}");
    stream.finish("cut off from a creditor", &undisturbed);
    assert_eq!(number(&pool.status(&creditor), "fences"), 0, "the gManager reached it all the time");

    // Connected again: a request that needs both creditors.
    std::thread::sleep(Duration::from_millis(LEASE_TTL_MS).saturating_sub(cut.elapsed()));
    net.heal("debtor", &creditor);
    let large = prompt(6, 60 * BLOCK as usize, VOCAB);
    let stream = pool.watch("debtor", &large, 30);
    stream.wait_for(5);
    let lent = pool.creditors("debtor");
    assert!(lent.len() == 2, "{lent:?}");
    stream.finish("healed", &undisturbed);
    pool.wait_empty();
}
