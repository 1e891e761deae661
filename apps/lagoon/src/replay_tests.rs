//! Instances that are lost in the middle of answers: real servers with scripted engines, cut at every event.

use super::*;
use crate::gateway::tests::{backend, broken_server, complete, dead, gateway_with, reserve_address};
use crate::scripted::{self, ScriptedEngine, Step};
use crate::upstreams::Backends;
use lagoon_cluster::dispatch::{self, Mode};
use lagoon_types::{FinishReason, GenerateRequest, RequestError};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Characters of one to four bytes, each byte a token.
pub(crate) const TEXT: &str = "aé漢🌊b — ünd §";

pub(crate) fn limits() -> ReplayLimits {
    let (pause, silence) = (Duration::from_millis(5), Duration::from_millis(50));
    ReplayLimits { core: dispatch::ReplayLimits { fruitless_max: usize::MAX, ..within(300) }, pause, silence }
}

/// The usual limits, and a deadline.
pub(crate) fn within(deadline_ms: u64) -> dispatch::ReplayLimits {
    dispatch::ReplayLimits { deadline_ms, ..dispatch::ReplayLimits::default() }
}

/// Passes requests on to `server` and its answers back, and breaks the connection after so many of an answer's events,
/// in the middle of the next.
pub(crate) async fn cut_after(server: &str, events: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server: SocketAddr = server.trim_start_matches("http://").parse().unwrap();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let (mut from, mut to) = client.into_split();
            let (mut answer, mut request) = TcpStream::connect(server).await.unwrap().into_split();
            let asking = tokio::spawn(async move { tokio::io::copy(&mut from, &mut request).await });
            tokio::spawn(async move {
                let (mut ends, mut last, mut line, mut in_head) = (0, 0, 0, true);
                while in_head || ends < events || last != b'{' {
                    // The end of the answer, or the gateway's.
                    let Ok(byte) = answer.read_u8().await else { break };
                    ends += usize::from(byte == b'\n' && last == b'\n');
                    last = byte;
                    in_head &= byte != b'\n' || line > 0;
                    line = if byte == b'\n' { 0 } else { line + usize::from(byte != b'\r') };
                    if to.write_u8(byte).await.is_err() {
                        break;
                    }
                }
                asking.abort();
            });
        }
    });
    url
}

/// What a client receives of each sequence, in order, and what concerns all, without what differs between two runs.
async fn receive(url: &str, route: &str, body: &Value) -> BTreeMap<String, Vec<Value>> {
    let response = reqwest::Client::new().post(format!("{url}{route}")).json(body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    assert!(!text.contains(": lagoon"), "{text}");
    let mut received = BTreeMap::<String, Vec<Value>>::new();
    let mut names = std::collections::BTreeSet::new();
    for event in text.split_terminator("\n\n") {
        let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?} in {text}"));
        if data == "[DONE]" {
            received.entry("all".to_owned()).or_default().push(json!("done"));
            continue;
        }
        let mut event: Value = serde_json::from_str(data).unwrap();
        // Times differ between two runs.
        event.as_object_mut().and_then(|event| event.remove("timings"));
        names.insert((event["id"].take().to_string(), event["created"].take().to_string()));
        let index = event["choices"][0]["index"].as_u64();
        received.entry(index.map_or("all".to_owned(), |index| index.to_string())).or_default().push(event);
    }
    assert_eq!(names.len(), 1, "an answer has one id: {names:?}");
    received
}

#[tokio::test]
async fn a_stream_that_is_cut_at_any_event_has_the_same_text() {
    let asks = [
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 40, "stream": true, "logprobs": 1})),
        (
            "/v1/completions",
            json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "stream": true, "ignore_eos": true,
            "return_token_ids": true, "return_logits": true, "stream_options": {"include_usage": true}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "hi"}], "stream": true, "logprobs": true,
            "top_logprobs": 2, "stop": ["b — x", "§"]}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "hi"}], "stream": true, "n": 2,
            "max_tokens": 3, "return_token_ids": true, "stream_options": {"include_usage": true}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "ab", "echo": true, "logprobs": 1, "max_tokens": 40, "stream": true, "presence_penalty": 0.5,
            "bad_words": ["x"], "stop": "nd", "include_stop_str_in_output": true,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true}}),
        ),
        (
            "/completion",
            json!({"prompt": "ab", "n_predict": 40, "seed": 7, "stream": true, "n_probs": 1, "stop": ["b — x", "§"]}),
        ),
    ];
    for (route, ask) in asks {
        let (first, second) = (ScriptedEngine::saying(TEXT), ScriptedEngine::saying(TEXT));
        let server = scripted::spawn(scripted::state(first.clone())).await;
        let other = scripted::spawn(scripted::state(second.clone())).await;
        let undisturbed = receive(&server, route, &ask).await;
        let events: usize = undisturbed.values().map(Vec::len).sum();
        assert!(events > 4, "{undisturbed:?}");
        for cut in 0..events {
            let (firsts, seconds) = (first.requests().len(), second.requests().len());
            let cutting = cut_after(&server, cut).await;
            let backends = vec![backend("cut", &cutting, 1_000_000), backend("whole", &other, 1)];
            let url = gateway_with(Arc::new(backends), limits()).await;
            assert_eq!(receive(&url, route, &ask).await, undisturbed, "{ask} cut after {cut} events");
            // What goes on is the same request, of the same seed, after what was sent.
            let begun = &first.requests()[firsts..];
            for request in &second.requests()[seconds..] {
                let answered = request.answered as usize;
                let prompt = &request.prompt[..request.prompt.len() - answered];
                let same = |b: &&GenerateRequest| b.prompt == prompt && b.sampling == request.sampling;
                assert!(begun.iter().any(|b| same(&b)) || cut == 0, "{request:?} is none of {begun:?}");
            }
        }
    }
}

/// Every instance loses it after some events; the last one says the rest.
#[tokio::test]
async fn a_stream_survives_as_many_losses_as_are_allowed_and_no_more() {
    let ask = json!({"prompt": "a", "max_tokens": 40, "stream": true});
    for (losses, survives) in [(4, true), (5, false)] {
        let mut backends = Vec::new();
        for n in 0..losses {
            let server = scripted::spawn(scripted::state(ScriptedEngine::saying(TEXT))).await;
            backends.push(backend(&format!("cut{n}"), &cut_after(&server, 2).await, 1000 - n));
        }
        let whole = scripted::spawn(scripted::state(ScriptedEngine::saying(TEXT))).await;
        backends.push(backend("whole", &whole, 1));
        // More than one list of candidates is long.
        let url = gateway_with(Arc::new(backends), limits()).await;
        let (status, _, text) = complete(&url, &ask).await;
        assert_eq!(status, 200);
        assert_eq!(text.ends_with("data: [DONE]\n\n"), survives, "{text}");
        if !survives {
            let error: Value = serde_json::from_str(text.rsplit("data: ").next().unwrap()).unwrap();
            assert_eq!(error["error"]["code"], "instance_lost");
            assert!(error["error"]["message"].as_str().unwrap().contains("hint: "), "{error}");
        }
    }
}

#[tokio::test]
async fn when_no_other_instance_is_left_the_client_gets_an_error_in_time() {
    let server = scripted::spawn(scripted::state(ScriptedEngine::saying(TEXT))).await;
    let full = ScriptedEngine::new(|_| Err(RequestError::QueueFull { queued: 1, limit: 1 }));
    let full = scripted::spawn(scripted::state(full)).await;
    for other in [dead(), full] {
        // The instance that was lost does not come back: a server that answers once.
        let once = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", once.local_addr().unwrap());
        let cutting: SocketAddr = cut_after(&server, 3).await.trim_start_matches("http://").parse().unwrap();
        tokio::spawn(async move {
            let (mut client, _) = once.accept().await.unwrap();
            let addr = once.local_addr().unwrap();
            drop(once);
            reserve_address(addr);
            let mut server = TcpStream::connect(cutting).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        });
        let backends = vec![backend("cut", &url, 1000), backend("other", &other, 1)];
        let url = gateway_with(Arc::new(backends), limits()).await;
        let (status, _, text) = complete(&url, &json!({"prompt": "a", "max_tokens": 40, "stream": true})).await;
        let error: Value = serde_json::from_str(text.rsplit("data: ").next().unwrap()).unwrap();
        assert_eq!((status, &error["error"]["code"]), (200, &json!("instance_lost")), "{text}");
        assert_eq!(text.matches("data: ").count(), 4, "three events, and the error: {text}");
    }
}

#[tokio::test]
async fn a_request_that_is_lost_before_its_answer_is_given_to_another_instance() {
    for stream in [false, true] {
        let other = ScriptedEngine::saying("ok");
        let server = scripted::spawn(scripted::state(other.clone())).await;
        let backends = vec![backend("lost", &broken_server("").await, 1_000_000), backend("i2", &server, 1)];
        let url = gateway_with(Arc::new(backends), limits()).await;
        let (status, instance, text) = complete(&url, &json!({"prompt": "a", "stream": stream})).await;
        assert_eq!((status, instance.as_str()), (200, "i2"), "{text}");
        assert_eq!(other.requests().len(), 1);
        // What only computes is repeated; what may have done something is not done twice.
        let tokenized = reqwest::Client::new().post(format!("{url}/tokenize")).json(&json!({"prompt": "a"}));
        assert_eq!(tokenized.send().await.unwrap().status(), 200);
        let response = reqwest::Client::new().post(format!("{url}/else")).json(&json!({"prompt": "a"}));
        let response = response.send().await.unwrap();
        assert_eq!(response.status(), 503);
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "instance_lost");
    }
}

/// Embeddings are computed anew: what was computed of them is lost with the instance.
#[tokio::test]
async fn embeddings_of_a_lost_instance_come_from_another() {
    let hidden = || vec![Step::Embedding(vec![3.0, 4.0, 0.0, 0.0]), Step::Finish(FinishReason::Stop)];
    let other = ScriptedEngine::new(move |_| Ok(hidden()));
    let server = scripted::spawn(scripted::state(other.clone())).await;
    let backends = vec![backend("lost", &broken_server("").await, 1_000_000), backend("i2", &server, 1)];
    let url = gateway_with(Arc::new(backends), limits()).await;
    let request = reqwest::Client::new().post(format!("{url}/v1/embeddings")).json(&json!({"input": ["a", "b"]}));
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(!response.headers().contains_key("x-lagoon-tokens"), "the gateway keeps it");
    let answer: Value = response.json().await.unwrap();
    let first: Vec<f64> = serde_json::from_value(answer["data"][1]["embedding"].clone()).unwrap();
    assert!((first[0] - 0.6).abs() < 1e-6 && (first[1] - 0.8).abs() < 1e-6, "{answer}");
    assert_eq!(other.requests().len(), 2);
}

/// Instances that end under a request before they say anything may end by it.
#[tokio::test]
async fn a_request_that_brings_instances_down_is_not_given_to_all_of_them() {
    let well = ScriptedEngine::saying("ok");
    let server = scripted::spawn(scripted::state(well.clone())).await;
    let mut backends = Vec::new();
    for n in 0..4 {
        backends.push(backend(&format!("ends{n}"), &broken_server("").await, 1_000_000 - n));
    }
    backends.push(backend("well", &server, 1));
    let limits = ReplayLimits { core: within(300), ..limits() };
    let url = gateway_with(Arc::new(backends), limits).await;
    let (status, _, text) = complete(&url, &json!({"prompt": "a"})).await;
    assert_eq!(status, 503);
    assert!(text.contains("lost with 2 instances"), "{text}");
    assert_eq!(well.requests().len(), 0);
}

/// An engine at fault is like one that is lost; a request at fault is not.
#[tokio::test]
async fn an_engine_that_fails_is_replaced_and_a_bad_request_is_not() {
    let failures = [
        (RequestError::Unavailable("the device failed".to_owned()), true),
        (RequestError::Internal("a bug".to_owned()), false),
        (RequestError::Invalid("no".to_owned()), false),
    ];
    for (error, again) in failures {
        let failing = ScriptedEngine::new(move |_| Ok(vec![Step::Token(b'o'.into()), Step::Fail(error.clone())]));
        let other = ScriptedEngine::saying("ok");
        let one = scripted::spawn(scripted::state(failing)).await;
        let two = scripted::spawn(scripted::state(other.clone())).await;
        let backends = vec![backend("failing", &one, 1000), backend("other", &two, 1)];
        let url = gateway_with(Arc::new(backends), limits()).await;
        let (_, _, text) = complete(&url, &json!({"prompt": "a", "stream": true})).await;
        assert_eq!(text.ends_with("data: [DONE]\n\n"), again, "{text}");
        assert_eq!(text.contains("\"error\""), !again, "{text}");
        assert_eq!(
            other.requests().iter().map(|r| r.answered).collect::<Vec<_>>(),
            if again { vec![1] } else { vec![] }
        );
    }
}

/// Instances of which the first is dead to the pool, and its connection stands all the same.
struct FirstIsDead(Vec<Backend>);

impl Backends for FirstIsDead {
    fn serving(&self) -> Vec<Backend> {
        self.0.clone()
    }

    fn is_dead(&self, http_addr: SocketAddr) -> bool {
        self.0[0].http_addr == http_addr
    }

    fn knows(&self, _: &str) -> bool {
        true
    }

    fn silent_for(&self) -> Option<Duration> {
        None
    }
}

#[tokio::test]
async fn an_instance_that_is_silent_and_dead_to_the_pool_is_lost_and_the_living_may_be_silent() {
    let silent = || ScriptedEngine::new(|_| Ok(vec![Step::Token(b'o'.into()), Step::Hang]));
    let (dead, slow) = (silent(), silent());
    let one = scripted::spawn(scripted::state(dead.clone())).await;
    let two = scripted::spawn(scripted::state(slow.clone())).await;
    let backends = FirstIsDead(vec![backend("dead", &one, 1000), backend("slow", &two, 1)]);
    let url = gateway_with(Arc::new(backends), limits()).await;
    let request = reqwest::Client::new().post(format!("{url}/v1/completions"));
    let mut response = request.json(&json!({"prompt": "a", "stream": true})).send().await.unwrap();
    assert!(response.chunk().await.unwrap().unwrap().starts_with(b"data: "));
    // The request is cancelled at the first instance; it continues at the other one until the client disconnects.
    dead.wait_cancelled(1).await;
    assert!(response.chunk().await.unwrap().unwrap().starts_with(b"data: "));
    tokio::time::sleep(4 * limits().silence).await;
    assert_eq!((slow.requests().len(), slow.cancelled(), dead.requests().len()), (1, 0, 1));
    drop(response);
    slow.wait_cancelled(1).await;
}

/// While no instance takes it, a client may leave, too.
#[tokio::test]
async fn a_client_that_leaves_while_another_instance_is_looked_for_is_forgotten() {
    let engine = ScriptedEngine::saying(TEXT);
    let server = scripted::spawn(scripted::state(engine.clone())).await;
    let full = ScriptedEngine::new(|_| Err(RequestError::QueueFull { queued: 1, limit: 1 }));
    let other = scripted::spawn(scripted::state(full.clone())).await;
    let backends = vec![backend("cut", &cut_after(&server, 2).await, 1000), backend("full", &other, 1)];
    let core = dispatch::ReplayLimits { replays_max: usize::MAX, deadline_ms: 3_600_000, ..limits().core };
    let limits = ReplayLimits { core, ..limits() };
    let url = gateway_with(Arc::new(backends), limits).await;
    let request = reqwest::Client::new().post(format!("{url}/v1/completions"));
    let mut response = request.json(&json!({"prompt": "a", "stream": true})).send().await.unwrap();
    let _ = response.chunk().await.unwrap().unwrap();
    let asked = || engine.requests().len() + full.requests().len();
    while asked() < 5 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(response);
    // When the requests in progress have ended, no instance gets another one.
    let mut seen = asked();
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        if asked() == seen {
            break;
        }
        seen = asked();
    }
}

#[test]
fn events_are_found_however_they_are_cut() {
    let text = b"data: a\n\ndata: b\r\n\r\n: c\n\nrest";
    for first in 0..text.len() {
        for second in first..text.len() {
            let mut pending = Pending::default();
            let mut events = Vec::new();
            for piece in [&text[..first], &text[first..second], &text[second..]] {
                pending.push(piece).unwrap();
                while let Some(event) = pending.next() {
                    events.push(String::from_utf8(event).unwrap());
                }
            }
            assert_eq!(events, ["data: a\n\n", "data: b\r\n\r\n", ": c\n\n"], "cut at {first} and {second}");
            assert_eq!(pending.rest().unwrap(), "rest");
        }
    }
}

/// A server that refuses everything, with a header, and counts.
async fn refusing(header: &str) -> (String, Arc<std::sync::atomic::AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::<std::sync::atomic::AtomicUsize>::default();
    let (count, header) = (Arc::clone(&asked), header.to_owned());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let _ = stream
                .write_all(format!("HTTP/1.1 503 Full\r\n{header}content-length: 2\r\n\r\n{{}}").as_bytes())
                .await;
        }
    });
    (url, asked)
}

/// It was asked in every round before.
#[tokio::test]
async fn an_instance_that_refuses_is_left_alone_for_as_long_as_it_says() {
    let cut = cut_after(&scripted::spawn(scripted::state(ScriptedEngine::saying(TEXT))).await, 0).await;
    for (header, least, most) in [("retry-after: 60\r\n", 1, 1), ("", 2, 5)] {
        let (full, asked) = refusing(header).await;
        let url = gateway_with(Arc::new(vec![backend("i1", &cut, 1000), backend("i2", &full, 1)]), limits()).await;
        let (status, _, text) = complete(&url, &json!({"prompt": "a", "stream": true})).await;
        assert!(status == 200 && text.contains("instance_lost"), "{text}");
        let asked = asked.load(std::sync::atomic::Ordering::Relaxed);
        assert!((least..=most).contains(&asked), "{asked} times with {header:?}");
    }
}

/// A request for a stream of which `losses` instances were lost.
async fn lost_with(upstreams: &Arc<Upstreams>, losses: usize) -> Attempts {
    let body = json!({"prompt": "a", "max_tokens": 40, "stream": true}).to_string();
    let request = http::Request::post("/v1/completions").header("content-type", "application/json").body(body.into());
    let request = Repeatable::read(&Bodies::default(), request.unwrap()).await.unwrap();
    let mut attempts = Attempts::new(Arc::clone(upstreams), limits(), request, Caller::default());
    for n in 0..losses {
        attempts.lose(&backend(&format!("lost{n}"), &dead(), 0), "it was killed").unwrap();
    }
    attempts.streaming = losses > 0;
    attempts
}

fn upstreams(backends: Vec<Backend>) -> Arc<Upstreams> {
    Arc::new(Upstreams::new(Arc::new(backends), None, Mode::default()))
}

/// Spends all retries but `left`.
fn leave(upstreams: &Upstreams, left: usize) {
    let mut retries = upstreams.retries();
    let now = Instant::now();
    while retries.withdraw(now) {}
    (0..left).for_each(|_| retries.give_back());
}

/// Fresh requests, which ask it all the same, kept it at rest for as long as they came.
#[tokio::test]
async fn an_instance_that_refused_others_is_asked_for_a_lost_request() {
    let well = scripted::spawn(scripted::state(ScriptedEngine::saying("ok"))).await;
    let well = backend("well", &well, 1);
    let upstreams = upstreams(vec![well.clone()]);
    upstreams.retries().rest(well.http_addr, Duration::from_secs(60), Instant::now());
    let (found, answer) = lost_with(&upstreams, 1).await.respond(None).await.unwrap();
    assert_eq!((found, answer.status()), (well, StatusCode::OK));
}

/// The second loss was on the budget, which a few streams used up.
#[tokio::test]
async fn the_first_send_after_each_loss_is_free() {
    let well = scripted::spawn(scripted::state(ScriptedEngine::saying("ok"))).await;
    for losses in 1..=limits().core.replays_max {
        let upstreams = upstreams(vec![backend("well", &well, 1)]);
        let mut attempts = lost_with(&upstreams, losses).await;
        leave(&upstreams, 0);
        assert_eq!(attempts.respond(None).await.unwrap().0.name, "well", "{losses} losses");
    }
}

#[tokio::test]
async fn an_instance_that_cannot_be_reached_costs_no_retry() {
    let well = scripted::spawn(scripted::state(ScriptedEngine::saying("ok"))).await;
    let (full, _) = refusing("retry-after: 60\r\n").await;
    let backends = vec![backend("full", &full, 3000), backend("gone", &dead(), 2000), backend("well", &well, 1)];
    let upstreams = upstreams(backends);
    let mut attempts = lost_with(&upstreams, 1).await;
    leave(&upstreams, 1);
    assert_eq!(attempts.respond(None).await.unwrap().0.name, "well");
}

/// It changes its role, or its queue has filled: its neighbours are asked, on the budget; else the client gets the refusal as it is.
#[tokio::test]
async fn a_fresh_request_that_an_instance_refuses_goes_to_another() {
    let well = scripted::spawn(scripted::state(ScriptedEngine::saying("ok"))).await;
    let answered = async |header: &str, left: usize| {
        let (full, asked) = refusing(header).await;
        let upstreams = upstreams(vec![backend("full", &full, 3000), backend("well", &well, 1)]);
        leave(&upstreams, left);
        let mut attempts = lost_with(&upstreams, 0).await;
        let (found, answer) = attempts.respond(None).await.unwrap();
        attempts.count(&found, &answer);
        assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 1);
        let counts = upstreams.counts.render(|_| true);
        let refusals = counts.lines().find(|line| line.contains("\"503\"")).and_then(|line| line.rsplit(' ').next());
        assert_eq!(refusals, Some("1"), "counted once, whoever answers: {counts}");
        (found.name, answer.status().as_u16(), answer.headers().contains_key("retry-after"))
    };
    assert_eq!(answered("retry-after: 60\r\n", 1).await, ("well".into(), 200, false));
    assert_eq!(answered("retry-after: 60\r\n", 0).await, ("full".into(), 503, true));
    for (code, name, status) in [
        ("not_serving", "well", 200),
        ("queue_full", "well", 200),
        // It may have waited there for minutes, or broken the device.
        ("unavailable", "full", 503),
        ("rate_limit_exceeded", "full", 503),
    ] {
        let (found, answer, _) = answered(&format!("x-lagoon-error: {code}\r\n"), 9).await;
        assert_eq!((found.as_str(), answer), (name, status), "{code}");
    }
}

/// A request without streaming that lost its instance waits for another one as a stream does, and then says who refused.
#[tokio::test]
async fn a_lost_request_that_all_refuse_says_so_at_its_deadline() {
    let (full, _) = refusing("").await;
    let upstreams = upstreams(vec![backend("full", &full, 1)]);
    let mut attempts = lost_with(&upstreams, 1).await;
    attempts.streaming = false;
    let error = attempts.respond(None).await.unwrap_err();
    assert!(error.code == Some("instance_lost") && error.message.contains("full refused"), "{error:?}");
}

/// One tenant's rate put the instance behind all others, for everybody.
#[tokio::test]
async fn the_rate_of_a_key_is_no_rest_of_the_instance() {
    for (header, rests) in [("", true), ("x-lagoon-error: rate_limit_exceeded\r\n", false)] {
        let (full, _) = refusing(&format!("retry-after: 60\r\n{header}")).await;
        let full = backend("full", &full, 1);
        let upstreams = upstreams(vec![full.clone()]);
        let (_, answer) = lost_with(&upstreams, 0).await.respond(None).await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(upstreams.retries().is_resting(full.http_addr, Instant::now()), rests, "{header:?}");
    }
}

/// The key that the gateway has checked is the tenant, whatever the client's header says.
#[tokio::test]
async fn an_instance_has_its_tenant_from_the_gateway_alone() {
    use lagoon_http::keys::TENANT_HEADER;
    let engine = ScriptedEngine::saying("ok");
    let server = scripted::spawn(scripted::state(engine.clone())).await;
    let backends = upstreams(vec![backend("i1", &server, 1)]);
    for (key, tenant) in [(None, ""), (Some("alice"), "alice\0")] {
        let body = json!({"prompt": "a"}).to_string();
        let mut request =
            http::Request::post("/v1/completions").header(TENANT_HEADER, "mallory").body(body.into()).unwrap();
        if let Some(key) = key {
            request.extensions_mut().insert(Caller::of_tenant(key));
        }
        let request = Repeatable::read(&Bodies::default(), request).await.unwrap();
        let mut attempts = Attempts::new(Arc::clone(&backends), limits(), request, Caller::default());
        assert_eq!(attempts.respond(None).await.unwrap().1.status(), StatusCode::OK);
        assert_eq!(*engine.requests().pop().unwrap().options.cache_salt, *tenant);
    }
}

/// A request that an instance gives back waits again, and goes to another; its client sees one answer, whole or streamed.
#[tokio::test]
async fn a_request_that_is_handed_back_goes_elsewhere_and_is_answered_once() {
    for stream in [false, true] {
        let (behind, well) =
            (ScriptedEngine::new(|_| Ok(vec![Step::Fail(RequestError::HandedBack)])), ScriptedEngine::saying("ok"));
        let one = scripted::spawn(scripted::state(behind.clone())).await;
        let two = scripted::spawn(scripted::state(well.clone())).await;
        let url = gateway_with(Arc::new(vec![backend("behind", &one, 1000), backend("well", &two, 1)]), limits()).await;
        let (status, instance, text) = complete(&url, &json!({"prompt": "a", "stream": stream})).await;
        assert_eq!((status, instance.as_str()), (200, "well"), "{text}");
        let ends = text.matches("\"finish_reason\":\"stop\"").count();
        assert!(!text.contains("handed_back") && ends == 1, "{text}");
        let offered =
            |engine: &ScriptedEngine| engine.requests().iter().map(|r| r.options.may_hand_back).collect::<Vec<_>>();
        assert_eq!((offered(&behind), offered(&well)), (vec![true], vec![true]));
    }
}

/// The last of the times, it is not offered any more; and an instance that gives back all the same has refused.
#[tokio::test]
async fn a_request_is_handed_back_a_bounded_number_of_times() {
    let behind = ScriptedEngine::new(|_| Ok(vec![Step::Fail(RequestError::HandedBack)]));
    let server = scripted::spawn(scripted::state(behind.clone())).await;
    let url = gateway_with(Arc::new(vec![backend("behind", &server, 1)]), limits()).await;
    let (status, _, text) = complete(&url, &json!({"prompt": "a"})).await;
    assert_eq!(status, 503, "{text}");
    let offered: Vec<bool> = behind.requests().iter().map(|r| r.options.may_hand_back).collect();
    assert_eq!(offered, [true, true, true, false]);
    // A client cannot offer it.
    let request = reqwest::Client::new().post(format!("{url}/v1/completions")).header("x-lagoon-hand-back", "1");
    let several = request.json(&json!({"prompt": ["a", "b"]})).send().await.unwrap();
    assert_eq!(several.status(), 503);
    assert!(behind.requests()[4..].iter().all(|request| !request.options.may_hand_back));
}

/// Its headers are sent by then.
#[tokio::test]
async fn a_stream_that_is_handed_back_before_its_first_token_begins_elsewhere() {
    let reply = concat!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n",
        ": lagoon {\"began\":{\"id\":\"cmpl-7\",\"created\":7,\"seed\":7}}\n: lagoon {\"failed\":{\"again\":true}}\n",
        "data: {\"error\":{\"message\":\"back\",\"code\":\"handed_back\"}}\n\n"
    );
    let well = ScriptedEngine::saying("ok");
    let two = scripted::spawn(scripted::state(well.clone())).await;
    let backends = vec![backend("behind", &broken_server(reply).await, 1000), backend("well", &two, 1)];
    let url = gateway_with(Arc::new(backends), limits()).await;
    let (status, _, text) = complete(&url, &json!({"prompt": "a", "stream": true})).await;
    assert!(status == 200 && text.ends_with("data: [DONE]\n\n") && !text.contains("error"), "{text}");
    assert!(text.contains("\"id\":\"cmpl-7\""), "it is the response that began: {text}");
    assert_eq!(well.requests().len(), 1);
}
