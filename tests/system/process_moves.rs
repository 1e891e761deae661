//! KV moves between real processes while their sequences decode: growth over capacity, mutual borrowing, recall by a
//! creditor and by an operator, also from the middle of a run, with a window and with ALiBi, and creditors killed in
//! the middle of a move.

use lagoon_tests::faults::{FaultPool, STEP, Watched, number, passkey, prompt};
use lagoon_tests::golden::Golden;
use lagoon_tests::partition::Place;
use serde_json::{Value, json};
use std::time::Duration;
use tempfile::TempDir;

/// Vocabulary of the bundled model.
const VOCAB: u32 = 1024;

/// Tokens of an rBlock where an instance grows.
const BLOCK: u32 = 32;

fn remote_blocks(status: &Value) -> u64 {
    let sequences = status["sequences"].as_array().into_iter().flatten();
    sequences
        .flat_map(|s| s["remote_blocks"].as_object())
        .flat_map(|lent| lent.values())
        .filter_map(Value::as_u64)
        .sum()
}

/// Id of an instance's only request in the placement map.
pub(crate) fn request(pool: &FaultPool, debtor: &str) -> String {
    let status = pool.status(debtor);
    assert_eq!(status["sequences"].as_array().unwrap().len(), 1, "{status}");
    format!("{}/{}", status["instance"], status["sequences"][0]["seq"])
}

/// Two instances lend to each other while both decode; then one grows and recalls its blocks. Results are read off
/// counters and streams are compared at the end, because a busy machine may poll too late. On such a machine the long
/// stream may also end first: then all of it is done again.
#[test]
fn growth_mutual_borrowing_and_recall() {
    let pool = FaultPool::new(&passkey(), BLOCK, &[("a", 48), ("b", 32)]);
    let undisturbed = pool.undisturbed(64);
    let mut over = Vec::new();
    for attempt in 1.. {
        assert!(attempt <= 8, "no recall was met while the long stream decoded");
        if grow_and_recall(&pool, 1_000 * attempt, &mut over) {
            break;
        }
    }
    pool.wait_empty();
    over.into_iter().for_each(|(what, stream)| _ = stream.finish(what, &undisturbed));
}

/// Whether blocks were recalled while the long stream decoded. The streams, which all have ended, go to `over`.
fn grow_and_recall(pool: &FaultPool, seed: u64, over: &mut Vec<(&'static str, Watched)>) -> bool {
    // New prompts each time: leased cached blocks would not come home.
    let mut seeds = seed..;
    let mut fresh = |tokens| prompt(seeds.next().expect("they do not end"), tokens, VOCAB);
    let tokens = |blocks: u32| (blocks * BLOCK) as usize;
    let mut end = |what: &'static str, stream: Watched| {
        stream.wait_for(usize::MAX);
        over.push((what, stream));
    };
    // 28 rBlocks, so that the next one, of 30, must borrow; both outgrow `a`.
    let room = pool.watch("a", &fresh(tokens(26)), 60);
    room.wait_for(1);
    let stream = pool.watch("a", &fresh(tokens(30)), 480);
    stream.wait_for(1);
    end("makes room", room);
    let lent = number(&pool.status("b"), "blocks_lent");
    if lent < 4 || stream.is_over() {
        println!("b lends {lent} rBlocks at the end of the first stream");
        end("brought home", stream);
        return false;
    }

    // More than `b` has left: it borrows where room was made.
    let before = [pool.status("a"), pool.status("b")];
    end("mutual borrowing", pool.watch("b", &fresh(tokens(26) - 10), 8));
    let after = [pool.status("a"), pool.status("b")];
    let grown = |which: usize, field: &str| number(&after[which], field) - number(&before[which], field);
    let borrowed =
        (remote_blocks(&before[0]).saturating_sub(grown(0, "moves/blocks_home")), grown(1, "blocks_borrowed_total"));
    assert_eq!(grown(1, "moves/blocks_revoked"), 0, "{before:?} {after:?}");
    if borrowed.0 == 0 || borrowed.1 == 0 {
        println!("not mutual: {before:?} {after:?}");
        end("not mutual", stream);
        return false;
    }
    println!("a borrowed {} rBlocks of b all the time while b borrowed {} of a", borrowed.0, borrowed.1);

    // They fit at first, but not after a token or two: their instance recalls its blocks. If the planner brought
    // those home just before, the requests are repeated.
    let met_before = number(&pool.status("b"), "moves/recalls_met");
    let mut received = 0;
    while received == 0 && !stream.is_over() {
        let recalls = number(&pool.status("a"), "moves/recalls_received");
        let free = number(&pool.status("b"), "blocks_free") as u32;
        if free < 4 {
            // It lends all just now.
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        let sizes = [free - 3 * (free / 4), free / 4, free / 4, free / 4];
        let growing = sizes.map(|blocks| pool.watch("b", &fresh(tokens(blocks) - 2), 20));
        growing.into_iter().for_each(|stream| end("grew into what was lent", stream));
        received = number(&pool.status("a"), "moves/recalls_received") - recalls;
    }
    let (a, b) = (pool.status("a"), pool.status("b"));
    println!(
        "{received} recalls: {} rBlocks came home, {} were taken",
        number(&a, "moves/blocks_home"),
        number(&b, "moves/blocks_revoked")
    );
    assert_eq!((number(&a, "recomputed_tokens"), number(&b, "moves/blocks_revoked")), (0, 0), "{a} {b}");
    // A recall is withdrawn where the requests that need the memory end first.
    let met = number(&b, "moves/recalls_met") > met_before && number(&a, "moves/blocks_home") > 0;
    let moved = received > 0 && met && !stream.is_over();
    end("recalled", stream);
    moved
}

/// A golden model with a tokenizer: most have none, and only token ids matter here.
pub(crate) fn golden_with_tokenizer(golden: &Golden) -> TempDir {
    let model = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.dir.join(file), model.path().join(file)).unwrap();
    }
    let tokenizer = lagoon_tests::root().join("tests/goldens/tied_sentencepiece/tokenizer.json");
    std::fs::copy(tokenizer, model.path().join("tokenizer.json")).unwrap();
    model
}

/// The bundled model with a sliding window: a Mistral of the same weights.
fn passkey_with_window(window: u32) -> TempDir {
    let model = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(passkey().join(file), model.path().join(file)).unwrap();
    }
    let mut config: Value =
        serde_json::from_str(&std::fs::read_to_string(passkey().join("config.json")).unwrap()).unwrap();
    config["model_type"] = json!("mistral");
    config["architectures"] = json!(["MistralForCausalLM"]);
    config["sliding_window"] = json!(window);
    std::fs::write(model.path().join("config.json"), config.to_string()).unwrap();
    model
}

/// Repeats an operator's order until it is accepted and its blocks have moved: a request rests for a second after a
/// move, and the planner may be moving it. Returns the debtor's status.
fn by_hand(pool: &FaultPool, stream: &Watched, order: &[&str], counter: &str) -> Value {
    let counter = format!("moves/{counter}");
    let before = number(&pool.status("a"), &counter);
    loop {
        assert!(!stream.is_over(), "{order:?} came too late");
        if pool.try_ask(order).is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    pool.wait("a", &format!("{order:?}"), |s| number(s, &counter) > before && number(s, "moves/in_progress") == 0)
}

/// An operator moves rBlocks out of the middle of a run at a creditor: home, and to another creditor. The sequence
/// continues over the pieces, whose positions matter for a window and for ALiBi.
#[test]
fn rblocks_are_recalled_from_the_middle_of_a_run() {
    const WINDOW: u32 = 512;
    // Enough for an operator's orders, at least a second apart, while the window passes over 33 tokens in each.
    const TOKENS: u32 = 280;
    let mpt = golden_with_tokenizer(&Golden::load("mpt"));
    let windowed = passkey_with_window(WINDOW);
    // Models, their vocabularies, tokens of an rBlock and of the prompt, and the run's first rBlock: with the window,
    // the oldest visible ones pass out of it before the test ends.
    let cases = [("ALiBi", &mpt, 140, 8, 120, 2), ("a window", &windowed, VOCAB, 16, 800, (800 - WINDOW) / 16 + 18)];
    for (what, model, vocab, block, prompt_tokens, run) in cases {
        let mut pool = FaultPool::without_members(model.path(), block, "127.0.0.1", Some(3 * STEP));
        pool.start(&[("a", 100), ("b", 40), ("c", 40)].map(|(name, blocks)| (name, blocks, Place::default())));
        let undisturbed = pool.undisturbed(128);
        let stream = pool.watch("a", &prompt(30, prompt_tokens, vocab), TOKENS);
        stream.wait_for(2);
        let request = request(&pool, "a");
        let at = |block: u32| format!("--first={block}");
        let output = stream.tokens();
        let out = ["kv", "move", &request, "--from=a", "--to=b", "--blocks=8", &at(run)];
        by_hand(&pool, &stream, &out, "blocks_out");
        assert_eq!(pool.creditors("a").get("b"), Some(&8), "{what}");
        let home = ["kv", "recall", &request, "--from=b", "--blocks=2", &at(run + 3)];
        by_hand(&pool, &stream, &home, "blocks_home");
        let on = ["kv", "move", &request, "--from=b", "--to=c", "--blocks=1", &at(run + 6)];
        let status = by_hand(&pool, &stream, &on, "blocks_between");
        // Of eight rBlocks, pieces of three, one and one are left.
        let lent = pool.creditors("a");
        assert_eq!((lent.get("b"), lent.get("c")), (Some(&5), Some(&1)), "{what}");
        println!("{what}: three orders over {} tokens: {}", stream.tokens() - output, status["moves"]);
        stream.wait_for(stream.tokens() + 20);
        by_hand(&pool, &stream, &["kv", "recall", &request, "--from=c"], "blocks_home");
        let status = by_hand(&pool, &stream, &["kv", "recall", &request, "--from=b", &at(run + 7)], "blocks_home");
        assert!(!stream.is_over(), "{what}: it was over before its blocks had come home");
        assert_eq!((number(&status, "moves/damaged"), number(&status, "recomputed_tokens")), (0, 0), "{what}");
        stream.finish(what, &undisturbed);
        pool.wait_empty();
    }
}

/// An operator moves rBlocks from one end of a sequence to the other and back while it decodes.
#[test]
fn rblocks_move_by_hand() {
    let (name, sizes, prompt_tokens, max_tokens) = ("tied_sentencepiece", [("a", 20), ("b", 20), ("c", 40)], 100, 140);
    {
        let golden = Golden::load(name);
        let model = golden_with_tokenizer(&golden);
        // Slow enough for an operator: a request rests for a second after a move.
        let mut pool = FaultPool::without_members(model.path(), 4, "127.0.0.1", Some(3 * STEP));
        pool.start(&sizes.map(|(name, blocks)| (name, blocks, Place::default())));
        let undisturbed = pool.undisturbed(64);
        let prompt: Vec<u32> = golden.description.tokens.iter().cycle().take(prompt_tokens).copied().collect();
        let stream = pool.watch("a", &prompt, max_tokens);
        stream.wait_for(2);
        let request = request(&pool, "a");
        let (mut asked, mut accepted) = (0, 0);
        let ways: [&[&str]; 4] = [
            &["move", &request, "--from=b", "--to=c", "--blocks=2"],
            &["recall", &request, "--from=c", "--blocks=1"],
            &["move", &request, "--from=a", "--to=b", "--blocks=1"],
            &["move", &request, "--from=c", "--to=b", "--blocks=1"],
        ];
        while stream.tokens() + 40 < max_tokens as usize {
            // Refused if there is nothing to move.
            accepted += u32::from(pool.try_ask(&[&["kv"], ways[asked % 4]].concat()).is_ok());
            asked += 1;
            std::thread::sleep(Duration::from_millis(50));
        }
        let moves = pool.status("a")["moves"].clone();
        println!("{name}: {accepted} of {asked} orders accepted: {moves}");
        let moved: u64 = ["blocks_out", "blocks_home", "blocks_between"].into_iter().map(|f| number(&moves, f)).sum();
        assert!(moved >= 1 && accepted > 0, "{accepted}: {moves}");
        assert_eq!((number(&moves, "damaged"), number(&pool.status("a"), "recomputed_tokens")), (0, 0));
        stream.finish(name, &undisturbed);
        pool.wait_empty();
    }
}

/// Orders a move of all of a request's rBlocks from its largest creditor to another one; returns both during the
/// move.
fn begin_move(pool: &FaultPool, stream: &Watched) -> (String, String) {
    let request = request(pool, "debtor");
    let client = pool.client("debtor");
    loop {
        let source = pool.creditor("debtor");
        let target = pool.names().into_iter().find(|name| *name != source && name != "debtor").unwrap();
        let before = number(&pool.status("debtor"), "moves/blocks_between");
        let order = ["kv", "move", &request, &format!("--from={source}"), &format!("--to={target}")];
        // The planner may be moving it already.
        if pool.try_ask(&order).is_err() {
            std::thread::sleep(Duration::from_millis(100));
            assert!(!stream.is_over(), "no move is accepted");
            continue;
        }
        loop {
            let status = client.get("/lagoon/status").json();
            let moved = number(&status, "moves/blocks_between") - before;
            match number(&status, "moves/in_progress") {
                0 if moved > 0 => break,
                in_progress if in_progress > 0 && moved > 0 => return (source, target),
                _ => assert!(!stream.is_over(), "the move does not begin: {status}"),
            }
        }
    }
}

/// Both ends of a move die in its middle, one after the other: switched-over blocks are lost with the target, the
/// others with the source, and nothing else.
#[test]
fn creditors_killed_in_the_middle_of_a_move() {
    const BLOCK: u32 = 16;
    let mut pool = FaultPool::new(&passkey(), BLOCK, &[("debtor", 8), ("source", 128)]);
    let undisturbed = pool.undisturbed(128);
    let prompt = prompt(20, 70 * BLOCK as usize, VOCAB);
    let stream = pool.watch("debtor", &prompt, 700);
    stream.wait_for(5);
    assert_eq!(pool.creditor("debtor"), "source");
    // They start later, so that all rBlocks are at one creditor.
    pool.start(&[("target", 128, Place::default()), ("spare", 128, Place::default())]);

    let (_, target) = begin_move(&pool, &stream);
    let (moved, output) = (pool.creditors("debtor"), stream.tokens());
    pool.kill(&target);
    pool.wait("debtor", "recovered", |s| {
        number(s, "recoveries") > 0 && number(s, "moves/in_progress") == 0 && number(s, "sequences/0/lost_tokens") == 0
    });
    let first = number(&pool.status("debtor"), "recomputed_tokens");
    println!("target killed in mid-move after {output} tokens, {moved:?}: {first} tokens computed again");
    assert!(first < u64::from(70 * BLOCK), "what the source had is not lost");
    stream.wait_for(output + 20);

    let (source, _) = begin_move(&pool, &stream);
    let (moved, output, before) = (pool.creditors("debtor"), stream.tokens(), pool.status("debtor"));
    pool.kill(&source);
    pool.wait("debtor", "recovered", |s| {
        number(s, "recoveries") > number(&before, "recoveries")
            && number(s, "moves/in_progress") == 0
            && number(s, "sequences/0/lost_tokens") == 0
    });
    let second = number(&pool.status("debtor"), "recomputed_tokens") - first;
    println!("source killed in mid-move after {output} tokens, {moved:?}: {second} tokens computed again");
    assert!(second > 0 && !stream.is_over());
    stream.finish("both ends of a move killed", &undisturbed);
    assert_eq!(number(&pool.status("debtor"), "preemptions"), 0, "only what was lost is computed again");
    pool.wait_whole();
    pool.wait_empty();
}
