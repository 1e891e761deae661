//! `lagoon up`: a pool of processes behind one endpoint, also when one is killed.

use lagoon_tests::golden::{Golden, max_diff};
use lagoon_tests::process::{Client, Server, completion, kill, logits, token_ids};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// 100 tokens of a golden model with a tokenizer.
pub(crate) fn golden_prompt() -> (String, Vec<u32>) {
    let golden = Golden::load("tied_sentencepiece");
    let prompt = golden.description.tokens.iter().cycle().take(100).copied().collect();
    (golden.dir.to_string_lossy().into_owned(), prompt)
}

/// A single instance with room for everything, outside any pool.
pub(crate) fn single(model: &str, kv_tokens: &str) -> Server {
    let flags = ["--backend=cpu", "--threads=1", "--http=127.0.0.1:0", "--block-tokens=8", "--expose-logits"];
    Server::start(&[&["serve", model, "--kv-tokens", kv_tokens], &flags[..]].concat())
}

fn up(model: &str, instances: &str, kv_tokens: &str, extra: &[&str]) -> Server {
    let flags = ["--backend=cpu", "--threads=1", "--port=0", "--block-tokens=8", "--expose-logits"];
    Server::start(&[&["up", model, "--instances", instances, "--kv-tokens", kv_tokens], &flags[..], extra].concat())
}

fn passkey() -> String {
    lagoon_tests::root().join("models/passkey").to_string_lossy().into_owned()
}

/// Whether every live instance's blocks are free, and none borrows.
fn is_empty(status: &Value) -> bool {
    status["instances"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| row["alive"] == true)
        .all(|row| row["blocks_free"] == row["blocks_total"] && row["blocks_lent"] == 0 && row["blocks_borrowed"] == 0)
}

#[test]
fn every_instance_serves_what_none_can_hold_alone() {
    let (model, prompt) = golden_prompt();
    let pool = up(&model, "2", "64", &[]);
    let client = pool.client();
    let extra = json!({"return_logits": true});
    let reference = single(&model, "256");
    let expected = reference.client().complete(&prompt, 12, &extra).json();
    let mut served = BTreeSet::new();
    for _ in 0..6 {
        let answer = client.complete(&prompt, 12, &extra);
        served.insert(answer.instance().unwrap().to_owned());
        let answer = answer.json();
        assert_eq!(token_ids(&answer), token_ids(&expected));
        for (ours, theirs) in logits(&answer).iter().zip(&logits(&expected)) {
            assert!(max_diff(ours, theirs) < 1e-3);
        }
        client.wait_until("/lagoon/status", "empty", is_empty);
    }
    assert_eq!(served, BTreeSet::from(["instance-0".to_owned(), "instance-1".to_owned()]));
    look_at(&pool, &client);
}

fn look_at(pool: &Server, client: &Client) {
    let url = format!("http://{}", pool.announced("http"));
    let status = lagoon_tests::process::run(&["status", "--json", "--url", &url]);
    assert_eq!(status.code, Some(0), "{status:?}");
    let status: Value = serde_json::from_str(&status.stdout).unwrap();
    let rows = status["instances"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (index, row) in rows.iter().enumerate() {
        assert_eq!(row["instance"], index + 1);
        assert_eq!(row["name"], format!("instance-{index}"));
        assert_eq!((&row["blocks_total"], &row["alive"], &row["role"]), (&json!(8), &json!(true), &json!("instance")));
    }
    let table = lagoon_tests::process::run(&["status", "--url", &url]);
    for word in ["ID", "instance-1", "MOVES", "OUT/HOME/BETWEEN", "0/0/0"] {
        assert!(table.stdout.contains(word), "{word}: {table:?}");
    }

    // Its own 8 rBlocks and 7 that the other lends, not one instance's.
    assert_eq!(client.get("/v1/models").json()["data"][0]["max_model_len"], 15 * 8);
    let metrics = client.get("/metrics").text;
    assert!(metrics.contains("lagoon_gateway_requests_total{instance=\"instance-0\",status=\"200\"}"), "{metrics}");
    for instance in ["instance-0", "instance-1"] {
        client.wait_for_text("/metrics", &format!("\nlagoon_kv_blocks{{instance=\"{instance}\"}} 8\n"));
    }
    let instance = Client::new(rows[0]["http_addr"].as_str().unwrap().parse().unwrap());
    for name in ["lagoon_kv_blocks 8", "lagoon_wire_bytes_sent_total{class=\"partials\"}"] {
        instance.wait_for_text("/metrics", name);
    }
}

#[test]
fn a_client_that_goes_away_frees_blocks_everywhere() {
    let pool = up(&passkey(), "2", "1024", &[]);
    let client = pool.client();
    let mut events = client.stream("/v1/completions", &completion(&[7; 1500], 400, &json!({"stream": true})));
    assert!(events.next_data().is_some());
    client.wait_until("/lagoon/status", "lent", |s| {
        s["instances"].as_array().unwrap().iter().any(|row| row["blocks_lent"].as_u64() > Some(0))
    });
    drop(events);
    client.wait_until("/lagoon/status", "empty", is_empty);
}

/// A conversation that asks for one pass key of prose of so many bytes, and the answer.
fn conversation(place: &str, key: &str, bytes: usize) -> (Value, String) {
    let prose = std::fs::read_to_string(lagoon_tests::root().join("models/passkey/document.txt")).unwrap();
    let sentences: Vec<&str> = prose.split(". ").filter(|sentence| !sentence.contains("pass key")).collect();
    let prose = sentences.join(". ");
    let (before, after) = prose[..bytes].split_at(prose[..bytes / 2].rfind(". ").unwrap() + 2);
    let text = format!(
        "{before}The pass key for the {place} is {key}. {after}\nQuestion: what is the pass key for the {place}?"
    );
    (json!([{"role": "user", "content": text}]), format!(" {key}\n"))
}

/// One of the conversations borrows; all are answered as they are alone.
#[test]
fn a_batch_of_chats_is_answered_as_its_chats_are() {
    let pool = up(&passkey(), "2", "1024", &["--access-log=json"]);
    let client = pool.client();
    let asked = [("harbour gate", "41523", 4600), ("lamp room", "30716", 300), ("stone pantry", "53374", 800)];
    let (chats, answers): (Vec<Value>, Vec<String>) =
        asked.into_iter().map(|(place, key, bytes)| conversation(place, key, bytes)).unzip();
    let ask = |path: &str, messages: &Value| {
        let answer = client.post(path, &json!({"messages": messages, "temperature": 0, "return_token_ids": true}));
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()
    };
    let batch = ask("/v1/chat/completions/batch", &json!(chats));
    let mut tokens = [0; 2];
    for (index, (chat, text)) in chats.iter().zip(&answers).enumerate() {
        let one = ask("/v1/chat/completions", chat);
        let (ours, alone) = (&batch["choices"][index], &one["choices"][0]);
        assert_eq!((&ours["index"], &ours["message"]["content"]), (&json!(index), &json!(text)), "{batch}");
        for field in ["message", "token_ids", "finish_reason"] {
            assert_eq!(ours[field], alone[field], "{field} of {index}");
        }
        assert_eq!(ours["prompt_token_ids"], one["prompt_token_ids"]);
        let usage = ["prompt_tokens", "completion_tokens"].map(|name| one["usage"][name].as_u64().unwrap());
        tokens = [tokens[0] + usage[0], tokens[1] + usage[1]];
    }
    assert!(batch["choices"][0]["prompt_token_ids"].as_array().unwrap().len() > 1024, "no instance holds it alone");
    let usage = ["prompt_tokens", "completion_tokens"].map(|name| batch["usage"][name].as_u64().unwrap());
    assert_eq!(usage, tokens);
    let refused = client.post("/v1/chat/completions/batch", &json!({"messages": chats, "stream": true}));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("stream")), "{}", refused.text);
    client.wait_until("/lagoon/status", "empty", is_empty);

    let log = pool.stop().stderr;
    let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let line = lines.find(|line| line["path"] == "/v1/chat/completions/batch").unwrap();
    let found = (&line["outcome"], &line["prompt_tokens"], &line["output_tokens"]);
    assert_eq!(found, (&json!("stop"), &json!(tokens[0]), &json!(tokens[1])), "{line}");
}

/// The instances that serve the stream and lend to it, as indices in the ready line's `pids`.
fn debtor_and_creditor(client: &Client, debtor: &str) -> (usize, usize) {
    let place = |name: &str| name.strip_prefix("instance-").unwrap().parse::<usize>().unwrap();
    let status = client.get("/lagoon/status").json();
    let rows = status["instances"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == debtor).unwrap();
    let instance = Client::new(row["http_addr"].as_str().unwrap().parse().unwrap());
    let own = instance.wait_until("/lagoon/status", "borrowing", |s| {
        s["sequences"][0]["remote_blocks"].as_object().is_some_and(|o| !o.is_empty())
    });
    let creditor = own["sequences"][0]["remote_blocks"].as_object().unwrap().keys().next().unwrap().clone();
    let row = rows.iter().find(|row| row["instance"].as_u64() == creditor.parse().ok()).unwrap();
    (place(debtor), place(row["name"].as_str().unwrap()))
}

fn pid(pool: &Server, place: usize) -> u64 {
    pool.ready["pids"][place].as_u64().unwrap()
}

/// Asserts that the remaining pool serves.
fn goes_on(client: &Client, model: &str) {
    client.wait_until("/lagoon/status", "empty", is_empty);
    for _ in 0..3 {
        let answer = client.post("/v1/completions", &completion(&[7; 60], 5, &json!({})));
        assert_eq!(answer.status, 200, "{model}: {}", answer.text);
    }
    assert_eq!(client.get("/health").status, 200);
}

#[test]
fn a_killed_creditor_harms_one_request_at_most() {
    let model = passkey();
    let pool = up(&model, "3", "1024", &[]);
    let client = pool.client();
    let body = completion(&[7; 1200], 300, &json!({"stream": true}));
    let mut events = client.stream("/v1/completions", &body);
    let mut tokens = Vec::new();
    tokens.extend(token_ids(&serde_json::from_str(&events.next_data().unwrap()).unwrap()));
    let (debtor, creditor) = debtor_and_creditor(&client, &events.instance().unwrap());
    assert_ne!(debtor, creditor);
    kill(pid(&pool, creditor));
    let (rest, done) = events.rest();
    match rest.iter().find(|event| event["error"].is_object()) {
        Some(error) => assert!(error["error"]["message"].is_string(), "{error}"),
        None => {
            assert!(done);
            tokens.extend(rest.iter().flat_map(token_ids));
            let reference = single(&model, "2048");
            let expected = reference.client().complete(&[7; 1200], 300, &json!({})).json();
            assert_eq!(tokens, token_ids(&expected), "it went on, but not with the same tokens");
        }
    }
    goes_on(&client, &model);
    assert!(Path::new(&model).exists());
}

fn alive(status: &Value) -> usize {
    status["instances"].as_array().unwrap().iter().filter(|row| row["alive"] == true).count()
}

#[test]
fn a_killed_debtor_gives_back_what_it_borrowed_and_is_replaced() {
    let model = passkey();
    let pool = up(&model, "3", "1024", &[]);
    let client = pool.client();
    let mut events = client.stream("/v1/completions", &completion(&[7; 1200], 300, &json!({"stream": true})));
    let first: Value = serde_json::from_str(&events.next_data().unwrap()).unwrap();
    let (debtor, _) = debtor_and_creditor(&client, &events.instance().unwrap());
    kill(pid(&pool, debtor));
    let (rest, done) = events.rest();
    let tokens: Vec<u32> = token_ids(&first).into_iter().chain(rest.iter().flat_map(token_ids)).collect();
    let reference = single(&model, "2048");
    let expected = reference.client().complete(&[7; 1200], 300, &json!({})).json();
    assert!(done && tokens == token_ids(&expected), "{:?}", rest.last());
    client.wait_until("/lagoon/status", "replaced", |s| alive(s) == 3);
    goes_on(&client, &model);
}

/// Instances that have not registered with the new gManager yet take requests.
#[test]
fn a_killed_gmanager_costs_no_request() {
    let pool = up(&passkey(), "2", "1024", &[]);
    let client = pool.client();
    let term = |s: &Value| s["gmanager"]["term"].clone();
    let before = term(&client.get("/lagoon/status").json());
    kill(pool.ready["gmanager_pid"].as_u64().unwrap());
    let started = std::time::Instant::now();
    let mut replaced = None;
    while replaced.is_none_or(|at: std::time::Instant| at.elapsed().as_secs() < 4) {
        assert!(started.elapsed() < lagoon_tests::process::TIMEOUT, "no other gManager");
        let health = client.get("/health");
        assert_eq!(health.status, 200, "{}", health.text);
        let answer = client.post("/v1/completions", &completion(&[7; 60], 2, &json!({})));
        assert_eq!(answer.status, 200, "{}", answer.text);
        let status = client.get("/lagoon/status").json();
        if term(&status) != before {
            replaced.get_or_insert_with(std::time::Instant::now);
        }
    }
}

/// The gManager and an instance are killed at once.
#[test]
fn a_pool_starts_again_what_dies_and_says_so() {
    let pool = up(&passkey(), "2", "1024", &[]);
    let client = pool.client();
    let names = |s: &Value| s["instances"].as_array().unwrap().iter().map(|row| row["http_addr"].to_string()).collect();
    let before: BTreeSet<String> = names(&client.get("/lagoon/status").json());
    kill(pool.ready["gmanager_pid"].as_u64().unwrap());
    kill(pid(&pool, 1));
    client.wait_until("/lagoon/status", "one that is new", |s| {
        let now: BTreeSet<String> = names(s);
        alive(s) == 2 && s["gmanager"]["silent_s"].is_null() && now.difference(&before).count() == 1
    });
    // Neither instance holds it alone.
    let long = completion(&[7; 1200], 5, &json!({}));
    let deadline = std::time::Instant::now() + lagoon_tests::process::TIMEOUT;
    while client.post("/v1/completions", &long).status != 200 {
        assert!(std::time::Instant::now() < deadline, "the two do not lend each other");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let ended = pool.stop();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for name in ["the gManager", "instance-1"] {
        let (died, again) = (format!("{name} has died"), format!("{name} runs again"));
        assert!(ended.stderr.find(&died) < ended.stderr.find(&again), "{ended:?}");
        assert!(ended.stderr.contains(&died), "{ended:?}");
    }
}
