//! The instance that runs a request is killed: another one replays it, and the client's stream continues as if
//! nothing had happened.

use lagoon_tests::faults::{FaultPool, STEP, Watched, number, passkey, prompt};
use lagoon_tests::partition::Place;
use lagoon_tests::process::{Server, completion, token_ids};
use serde_json::{Value, json};

const VOCAB: u32 = 1024;

fn role(name: &str) -> Place {
    Place::default().with(&format!("--role={name}"))
}

fn watch(gateway: &Server, prompt: &[u32], max_tokens: u32, extra: &Value) -> Watched {
    Watched::start(gateway.announced("http").parse().unwrap(), prompt, max_tokens, extra)
}

/// The instance of `names` that runs the request, once one does.
fn runs(pool: &FaultPool, names: &[&'static str], stream: &Watched) -> &'static str {
    loop {
        let busy = |name: &&&str| pool.status(name)["sequences"].as_array().is_some_and(|all| !all.is_empty());
        if let Some(name) = names.iter().find(busy) {
            return name;
        }
        assert!(!stream.is_over(), "nobody ran it");
    }
}

/// Seeded sampling continues: the token after the loss is drawn by its index in the answer.
fn sampled() -> Value {
    json!({"temperature": 0.9, "top_p": 0.95, "seed": 77, "logprobs": 3})
}

/// A decode worker with most of a prompt's KV left at the prefill worker is killed: first during prefill, then in the
/// middle of the answer. The prefill worker gets all its memory back.
#[test]
fn a_killed_decode_worker_costs_the_client_time_only() {
    let mut pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", Some(STEP));
    let decoders = ["d0", "d1", "d2"];
    let mut members = vec![("p0", 160, role("prefill"))];
    members.extend(decoders.map(|name| (name, 24, role("decode"))));
    pool.start(&members);
    decoders.iter().for_each(|name| drop(pool.wait(name, "connected", |s| number(s, "prefill/workers") == 1)));
    let undisturbed = pool.undisturbed(160);
    let gateway = pool.gateway();

    let stream = watch(&gateway, &prompt(60, 900, VOCAB), 80, &sampled());
    let first = runs(&pool, &decoders, &stream);
    pool.kill(first);
    let left: Vec<&str> = decoders.into_iter().filter(|name| *name != first).collect();
    let second = runs(&pool, &left, &stream);
    stream.wait_for(20);
    assert!(number(&pool.status("p0"), "blocks_lent") > 0, "it holds nothing of the prefill worker");
    assert!(stream.tokens() < 80, "it was over before it was disturbed");
    pool.kill(second);
    stream.finish("two killed decode workers", &undisturbed);
    let status = pool.status(left.iter().find(|name| **name != second).unwrap());
    assert_eq!(number(&status, "prefill/own"), 0, "{status}");
    pool.wait_empty();
    let metrics = gateway.client().get("/metrics").text;
    assert!(metrics.contains("lagoon_gateway_replays_total{state=\"done\"} "), "{metrics}");
}

/// The same with instances that prefill locally; and with an answer that is not streamed.
#[test]
fn a_killed_instance_costs_the_client_time_only() {
    let mut pool = FaultPool::new(&passkey(), 16, &[("i0", 80), ("i1", 80), ("i2", 80)]);
    let names = ["i0", "i1", "i2"];
    let undisturbed = pool.undisturbed(160);
    let gateway = pool.gateway();
    for extra in [json!({}), sampled()] {
        let stream = watch(&gateway, &prompt(61, 300, VOCAB), 60, &extra);
        let left: Vec<&'static str> =
            names.into_iter().filter(|name| pool.names().contains(&(*name).to_owned())).collect();
        let runs = runs(&pool, &left, &stream);
        if extra == json!({}) {
            stream.wait_for(15);
            assert!(stream.tokens() < 60, "it was over before it was disturbed");
            pool.kill(runs);
        }
        stream.finish("a killed instance", &undisturbed);
    }
    let whole = completion(&prompt(62, 200, VOCAB), 100, &json!({}));
    let asking = {
        let (client, whole) = (gateway.client(), whole.clone());
        std::thread::spawn(move || client.post("/v1/completions", &whole).json())
    };
    let names = pool.names();
    let busy = |pool: &FaultPool| names.iter().find(|name| number(&pool.status(name), "running") > 0).cloned();
    let busy = loop {
        if let Some(name) = busy(&pool) {
            break name;
        }
        assert!(!asking.is_finished(), "nobody ran it");
    };
    pool.kill(&busy);
    let answer = asking.join().unwrap();
    assert_eq!(token_ids(&answer).len(), 100, "{answer}");
    assert_eq!(token_ids(&answer), undisturbed.tokens(&prompt(62, 200, VOCAB), 100));
    pool.wait_empty();
}

/// More requests than the pool has places, when an instance is killed: those that ran there continue elsewhere, those that wait at the
/// gateway stay, and each is answered once.
#[test]
fn requests_that_wait_at_the_gateway_outlive_a_killed_instance() {
    const REQUESTS: u64 = 9;
    let mut pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", Some(STEP));
    let names = ["i0", "i1", "i2"];
    let places = names.map(|name| (name, 80, Place::default().with("--max-running=1")));
    pool.start(&places);
    let undisturbed = pool.undisturbed(160);
    let gateway = pool.gateway();
    let streams: Vec<Watched> =
        (0..REQUESTS).map(|n| watch(&gateway, &prompt(70 + n, 100, VOCAB), 40, &json!({}))).collect();
    let runs = runs(&pool, &names, &streams[0]);
    let waiting = || {
        let metrics = gateway.client().get("/metrics").text;
        let line = metrics.lines().find(|line| line.starts_with("lagoon_gateway_requests_waiting "));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    let all_over = || streams.iter().all(Watched::is_over);
    while waiting() < 2.0 {
        assert!(!all_over(), "nothing waited at the gateway");
    }
    pool.kill(runs);
    for (n, stream) in streams.into_iter().enumerate() {
        stream.finish(&format!("request {n} of a pool with a killed instance"), &undisturbed);
    }
    assert_eq!(waiting(), 0.0);
    pool.wait_empty();
}
