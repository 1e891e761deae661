//! The pool's prefix caches from outside: `lagoon kv cache ls` and `drop`, and a gateway that sends a prompt where its beginning is.

use lagoon_tests::faults::{FaultPool, STEP, number, passkey, prompt};
use lagoon_tests::partition::Place;
use lagoon_tests::process::{Client, TIMEOUT};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const BLOCK: u32 = 16;
const VOCAB: u32 = 1024;
/// Tokens of a prompt: six whole rBlocks, and four tokens.
const PROMPT: usize = 100;
const WHOLE: u64 = 96;
/// A heartbeat and a gateway's question for it take 250 ms each.
const REPORTED: Duration = Duration::from_millis(700);

/// Asks for four tokens; returns how many of the prompt were cached.
fn ask(client: &Client, prompt: &[u32]) -> u64 {
    ask_with(client, prompt, &json!({}))
}

fn ask_with(client: &Client, prompt: &[u32], fields: &Value) -> u64 {
    let answer = client.complete(prompt, 4, fields).json();
    number(&answer, "usage/prompt_tokens_details/cached_tokens")
}

/// The row of an instance in `kv cache ls`, once it is as wanted: heartbeats report it.
fn row(pool: &FaultPool, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let rows = pool.ask(&["kv", "cache", "ls", name])["instances"].clone();
        assert!(rows.as_array().is_some_and(|rows| rows.iter().all(|row| row["name"] == name)), "{rows}");
        if let Some(row) = rows.get(0).filter(|row| wanted(row)) {
            return row.clone();
        }
        assert!(Instant::now() < deadline, "{name} is not as wanted: {rows}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn blocks(row: &Value) -> u64 {
    number(row, "device_blocks")
}

#[test]
fn operators_see_prefix_caches_and_empty_them() {
    let pool = FaultPool::new(&passkey(), BLOCK, &[("a", 40), ("b", 40)]);
    let undisturbed = pool.undisturbed(40);
    let asked = prompt(1, PROMPT, VOCAB);
    for name in ["a", "b"] {
        assert_eq!(ask(&pool.client(name), &asked), 0);
        assert_eq!(ask(&pool.client(name), &asked), WHOLE);
        let row = row(&pool, name, |row| blocks(row) >= 6 && number(row, "hit_tokens") == WHOLE);
        assert_eq!(number(&row, "device_hit_tokens"), WHOLE, "{row}");
        assert_eq!(number(&row, "device_tokens"), blocks(&row) * u64::from(BLOCK), "{row}");
    }
    let all = pool.ask(&["kv", "cache", "ls"])["instances"].clone();
    assert_eq!(all.as_array().map(Vec::len), Some(2), "{all}");

    // One of them: the other one's stays.
    let dropped = pool.ask(&["kv", "cache", "drop", "a"]);
    assert_eq!((dropped["dropped"].as_bool(), dropped["instances"].as_array().map(Vec::len)), (Some(true), Some(1)));
    row(&pool, "a", |row| blocks(row) == 0);
    assert!(blocks(&row(&pool, "b", |_| true)) >= 6);
    assert_eq!(ask(&pool.client("b"), &asked), WHOLE);
    assert_eq!(ask(&pool.client("a"), &asked), 0);

    // All of them, but for what a request uses: its answer is the same, and it is cached when it ends.
    let running = pool.watch("a", &asked, 400);
    running.wait_for(2);
    let dropped = pool.ask(&["kv", "cache", "drop", "--all"]);
    assert_eq!(dropped["instances"].as_array().map(Vec::len), Some(2), "{dropped}");
    row(&pool, "b", |row| blocks(row) == 0);
    assert!(!running.is_over(), "the order came after the request's end");
    running.finish("a request during the order", &undisturbed);
    row(&pool, "a", |row| blocks(row) >= 6);
    assert_eq!(["a", "b"].map(|name| ask(&pool.client(name), &asked)), [WHOLE, 0]);

    let refused = pool.try_ask(&["kv", "cache", "drop", "c"]).unwrap_err();
    assert!(refused.code != Some(0) && refused.stderr.contains('c'), "{refused:?}");
    pool.try_ask(&["kv", "cache", "drop"]).unwrap_err();
}

/// What one tenant left is shown without its secret, and dropped alone.
#[test]
fn operators_drop_what_one_tenant_left() {
    const SECRET: &str = "a salt that nobody else knows";
    let pool = FaultPool::new(&passkey(), BLOCK, &[("a", 60), ("b", 60)]);
    let asked = prompt(1, PROMPT, VOCAB);
    let (mine, open) = (json!({"cache_salt": SECRET}), json!({}));
    for name in ["a", "b"] {
        let client = pool.client(name);
        for fields in [&mine, &open] {
            assert_eq!(ask_with(&client, &asked, fields), 0, "a tenant finds nothing of another's");
            assert_eq!(ask_with(&client, &asked, fields), WHOLE);
        }
    }
    let tenants = |row: &Value| row["tenants"].as_array().cloned().unwrap_or_default();
    let rows = ["a", "b"].map(|name| row(&pool, name, |row| tenants(row).len() == 2 && blocks(row) >= 12));
    let none = "00000000-00000000";
    let salted = |row: &Value| {
        let names = tenants(row).into_iter().map(|tenant| tenant["tenant"].as_str().unwrap().to_owned());
        names.filter(|name| name != none).collect::<Vec<_>>()
    };
    assert_eq!(salted(&rows[0]), salted(&rows[1]), "a tenant has one name at all instances");
    let [tenant] = &salted(&rows[0])[..] else { panic!("{rows:?}") };
    assert!(tenant.starts_with("00000000-"), "it has no key: {tenant}");
    assert!(!rows.iter().any(|row| row.to_string().contains("nobody")));

    let order = |flags: &[&str]| {
        let dropped = pool.ask(&[&["kv", "cache", "drop"], flags].concat());
        assert_eq!(dropped["dropped"].as_bool(), Some(true), "{dropped}");
    };
    order(&["a", "--tenant", tenant]);
    let left = row(&pool, "a", |row| tenants(row).len() == 1);
    assert_eq!((tenants(&left)[0]["tenant"].as_str(), blocks(&left) >= 6), (Some(none), true), "{left}");
    let cached = |name: &str| [&mine, &open].map(|fields| ask_with(&pool.client(name), &asked, fields));
    assert_eq!(cached("a"), [0, WHOLE]);
    assert_eq!(cached("b"), [WHOLE, WHOLE]);
    // Nobody has this key's name.
    order(&["--all", "--key-name", "alice"]);
    assert_eq!(cached("b"), [WHOLE, WHOLE]);
    order(&["--all", "--tenant", none]);
    assert_eq!(cached("b"), [WHOLE, 0]);
    pool.try_ask(&["kv", "cache", "drop", "--all", "--tenant", SECRET]).unwrap_err();
}

/// A gateway sends the next turn of a conversation where another gateway sent its beginning.
#[test]
fn gateways_know_each_others_prefixes() {
    const TALKS: u64 = 9;
    let mut pool = FaultPool::without_members(&passkey(), BLOCK, "127.0.0.1", Some(STEP));
    pool.start(&["a", "b", "c"].map(|name| (name, 200, Place::default())));
    let (first, second) = (pool.gateway(), pool.gateway());
    let clients = [first.client(), second.client()];
    let ready = |status: &Value| status["instances"].as_array().is_some_and(|rows| rows.len() == 3);
    clients.iter().for_each(|client| _ = client.wait_until("/lagoon/status", "three instances", ready));
    let turn = |talk: u64, turn: usize| prompt(talk, 250 + 60 * turn, VOCAB);
    let begun: Vec<u64> = (0..TALKS).map(|talk| ask(&clients[0], &turn(talk, 0))).collect();
    assert_eq!(begun, vec![0; TALKS as usize]);
    let used = pool.names().iter().filter(|name| number(&pool.status(name), "prefix/looked_up_tokens") > 0).count();
    assert_eq!(used, 3, "they were begun at all instances");
    let next = |talk: u64| {
        // Until both gateways have asked the gManager again, and reports say that all are idle.
        std::thread::sleep(REPORTED);
        ask(&clients[1], &turn(talk, 1))
    };
    let cached: Vec<u64> = (0..TALKS).map(next).collect();
    // An instance that a busy machine keeps from reporting is waited for only so long. A gateway that knows its own prompts alone finds three.
    let found = cached.iter().filter(|of| **of >= u64::from(250 / BLOCK * BLOCK)).count();
    assert!(found >= 5, "{found} of {TALKS}: {cached:?}");
}

/// Conversations take turns at a gateway of three instances. Each could cache all of them: what is missed was sent elsewhere.
#[test]
fn a_gateway_sends_the_next_turn_of_a_conversation_where_its_beginning_is() {
    const TALKS: u64 = 6;
    let mut pool = FaultPool::without_members(&passkey(), BLOCK, "127.0.0.1", Some(STEP));
    pool.start(&["a", "b", "c"].map(|name| (name, 200, Place::default())));
    let gateway = pool.gateway();
    let client = gateway.client();
    let ready = |status: &Value| status["instances"].as_array().is_some_and(|rows| rows.len() == 3);
    client.wait_until("/lagoon/status", "three instances", ready);
    let turn = |talk: u64, turn: usize| prompt(talk, 250 + 60 * turn, VOCAB);
    let begun: Vec<u64> = (0..TALKS).map(|talk| ask(&client, &turn(talk, 0))).collect();
    assert_eq!(begun, vec![0; TALKS as usize]);
    let used = pool.names().iter().filter(|name| number(&pool.status(name), "prefix/looked_up_tokens") > 0).count();
    assert_eq!(used, 3, "they were begun at all instances");
    let mut seen = Vec::new();
    for n in 1..3_u32 {
        // The turn before, to its last whole rBlock.
        let before = u64::from((250 + 60 * (n - 1)) / BLOCK * BLOCK);
        let mut cached = Vec::new();
        for talk in 0..TALKS {
            // Until reports say again that all are idle: such short prefixes are not worth waiting for an instance that seems busy.
            std::thread::sleep(REPORTED);
            cached.push(ask(&client, &turn(talk, n as usize)));
        }
        seen.push((before, cached));
    }
    // An instance that a busy machine keeps from reporting is waited for only so long. Without the gateway's memory a third is found.
    let found: usize = seen.iter().map(|(before, cached)| cached.iter().filter(|of| *of >= before).count()).sum();
    assert!(found >= 10, "{found} of 12 turns: {seen:?}");
}
