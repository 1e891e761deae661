//! The gateway before real servers with scripted engines.

use super::*;
use crate::scripted::{self, ScriptedEngine, Step};
use lagoon_http::access::Line;
use lagoon_http::{Front, Keys, Port};
use lagoon_types::CachedTokens;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const LONG: Duration = Duration::from_secs(10);

pub(crate) fn backend(name: &str, url: &str, free_tokens: u64) -> Backend {
    let http_addr = url.trim_start_matches("http://").parse().unwrap();
    // Of unknown load: requests do not wait, and of equals the one with most free memory is next.
    let blocks_free = u32::try_from(free_tokens).unwrap();
    let load = InstanceLoad { blocks_total: blocks_free, blocks_free, block_tokens: 1, ..InstanceLoad::default() };
    Backend { name: name.to_owned(), http_addr, load, reported: Instant::now() }
}

async fn gateway(backends: Vec<Backend>) -> String {
    let limits = ReplayLimits { core: replay::tests::within(200), ..ReplayLimits::default() };
    gateway_with(Arc::new(backends), limits).await
}

pub(crate) async fn gateway_with(source: Arc<dyn Backends>, limits: ReplayLimits) -> String {
    keyed_gateway(source, limits, None).await
}

async fn keyed_gateway(source: Arc<dyn Backends>, limits: ReplayLimits, key: Option<&str>) -> String {
    guarded_gateway(source, limits, key.map_or_else(Keys::none, Keys::single)).await
}

async fn guarded_gateway(source: Arc<dyn Backends>, limits: ReplayLimits, keys: Arc<Keys>) -> String {
    let gateway = Gateway::new(source, scripted::recorder(), None, DispatchArgs::default()).with_limits(limits);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(lagoon_http::serve(Port::plain(listener, keys), gateway.router(), std::future::pending()));
    url
}

/// An address where nothing listens.
pub(crate) fn dead() -> String {
    format!("http://{}", reserve_address("127.0.0.1:0".parse().unwrap()))
}

/// An address that refuses connections, and that no other test gets: bound for as long as the process lives, without listening.
pub(crate) fn reserve_address(addr: SocketAddr) -> SocketAddr {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(addr).unwrap();
    Box::leak(Box::new(socket)).local_addr().unwrap()
}

pub(crate) async fn complete(url: &str, body: &Value) -> (u16, String, String) {
    let response = reqwest::Client::new().post(format!("{url}/v1/completions")).json(body).send().await.unwrap();
    let instance = response.headers().get("x-lagoon-instance").map(|value| value.to_str().unwrap().to_owned());
    (response.status().as_u16(), instance.unwrap_or_default(), response.text().await.unwrap())
}

#[tokio::test]
async fn every_instance_serves_and_answers_pass_unchanged() {
    let (one, two) = (ScriptedEngine::saying("one"), ScriptedEngine::saying("two"));
    let urls = [scripted::spawn(scripted::state(one)).await, scripted::spawn(scripted::state(two)).await];
    let url = gateway(vec![backend("i1", &urls[0], 100), backend("i2", &urls[1], 100)]).await;
    let mut seen = BTreeMap::<_, usize>::new();
    for _ in 0..6 {
        let (status, instance, text) = complete(&url, &json!({"prompt": "a"})).await;
        assert_eq!(status, 200);
        let text: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(text["choices"][0]["text"], if instance == "i1" { "one" } else { "two" });
        *seen.entry(instance).or_default() += 1;
    }
    assert_eq!(seen, BTreeMap::from([("i1".to_owned(), 3), ("i2".to_owned(), 3)]));
}

#[tokio::test]
async fn streams_and_errors_pass_unchanged() {
    let server = scripted::spawn(scripted::state(ScriptedEngine::saying("abc"))).await;
    let url = gateway(vec![backend("i1", &server, 1)]).await;
    for body in [
        json!({"prompt": "a", "stream": true, "stream_options": {"include_usage": true}}),
        json!({"prompt": "a", "best_of": 3}),
        json!({"prompt": "a", "model": "other"}),
    ] {
        let (direct_status, _, direct) = complete(&server, &body).await;
        let (status, instance, text) = complete(&url, &body).await;
        assert_eq!((status, instance.as_str()), (direct_status, "i1"));
        let shape = |text: &str| text.lines().map(|line| line.split("\"model\"").last().unwrap().to_owned()).collect();
        let (direct, text): (Vec<String>, Vec<String>) = (shape(&direct), shape(&text));
        assert_eq!(text, direct);
    }
    for path in ["/v1/models", "/version", "/nowhere"] {
        let direct = reqwest::get(format!("{server}{path}")).await.unwrap();
        let through = reqwest::get(format!("{url}{path}")).await.unwrap();
        assert_eq!(through.status(), direct.status());
        assert_eq!(through.text().await.unwrap(), direct.text().await.unwrap());
    }
}

#[tokio::test]
async fn tokens_pass_as_they_come() {
    let engine = ScriptedEngine::new(|_| Ok(vec![Step::Token(97), Step::Hang]));
    let server = scripted::spawn(scripted::state(engine.clone())).await;
    let url = gateway(vec![backend("i1", &server, 1)]).await;
    let request = reqwest::Client::new().post(format!("{url}/v1/completions"));
    let mut response = request.json(&json!({"prompt": "a", "stream": true})).send().await.unwrap();
    let first = tokio::time::timeout(LONG, response.chunk()).await.expect("the first token does not wait for the rest");
    assert!(first.unwrap().unwrap().starts_with(b"data: "));
    // The client goes away, and so does the request behind the gateway.
    drop(response);
    engine.wait_cancelled(1).await;
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_cancels_it() {
    let engine = ScriptedEngine::new(|_| Ok(vec![Step::Hang]));
    let server = scripted::spawn(scripted::state(engine.clone())).await;
    let url = gateway(vec![backend("i1", &server, 1)]).await;
    let asking = tokio::spawn(async move { complete(&url, &json!({"prompt": "a"})).await });
    engine.wait_submitted(1).await;
    asking.abort();
    engine.wait_cancelled(1).await;
}

#[tokio::test]
async fn an_instance_that_cannot_be_reached_is_passed_over() {
    let engine = ScriptedEngine::saying("ok");
    let server = scripted::spawn(scripted::state(engine.clone())).await;
    let url = gateway(vec![backend("gone", &dead(), 1_000_000), backend("i2", &server, 1)]).await;
    // Larger than what a connection buffers, so that the body is still whole after the first attempt.
    let body = json!({"prompt": "abc", "metadata": "a".repeat(1 << 20)});
    let (status, instance, _) = complete(&url, &body).await;
    assert_eq!((status, instance.as_str()), (200, "i2"));
    assert_eq!(engine.requests()[0].prompt.len(), 4);
    assert_eq!(reqwest::get(format!("{url}/v1/models")).await.unwrap().status(), 200);
}

#[tokio::test]
async fn no_instance_is_a_structured_503() {
    for backends in [vec![], vec![backend("gone", &dead(), 1)]] {
        let count = backends.len();
        let url = gateway(backends).await;
        let (status, _, text) = complete(&url, &json!({"prompt": "a"})).await;
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &error["error"]["code"]), (503, &json!("unavailable")), "{text}");
        let health = reqwest::get(format!("{url}/health")).await.unwrap();
        assert_eq!(health.status(), if count == 0 { 503 } else { 200 });
    }
}

/// A server that reads a request, answers with `reply` and closes the connection.
pub(crate) async fn broken_server(reply: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            let read = stream.read(&mut request).await.unwrap();
            assert!(read > 0);
            stream.write_all(reply.as_bytes()).await.unwrap();
        }
    });
    url
}

/// A server that keeps no journal does not report its tokens.
#[tokio::test]
async fn a_stream_without_a_journal_that_is_lost_midway_ends_with_an_error() {
    let reply = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
                 e\r\ndata: {}\n\ndata\r\n";
    let url = gateway(vec![backend("i1", &broken_server(reply).await, 1)]).await;
    let (status, instance, text) = complete(&url, &json!({"prompt": "a"})).await;
    assert_eq!((status, instance.as_str()), (200, "i1"));
    let (before, error) = text.split_once("\n\ndata: ").unwrap();
    assert_eq!(before, "data: {}");
    let error: Value = serde_json::from_str(error.trim()).unwrap();
    assert_eq!(error["error"]["code"], "instance_lost");
}

#[tokio::test]
async fn keys_are_forwarded_to_instances_and_guard_metrics() {
    let state = scripted::state(ScriptedEngine::saying("ok"));
    let server = scripted::spawn_keyed(state, Keys::single("sesame")).await;
    let backends = Arc::new(vec![backend("i1", &server, 1)]);
    let url = keyed_gateway(backends, ReplayLimits::default(), Some("sesame")).await;
    let http = reqwest::Client::new();
    for (path, key, status) in [
        ("/v1/models", None, 401),
        ("/v1/models", Some("sesame"), 200),
        ("/health", None, 200),
        ("/metrics", None, 401),
        ("/metrics", Some("sesame"), 200),
    ] {
        let mut request = http.get(format!("{url}{path}"));
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        assert_eq!(request.send().await.unwrap().status().as_u16(), status, "{path} {key:?}");
    }
    let metrics = http.get(format!("{url}/metrics")).bearer_auth("sesame").send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("lagoon_gateway_requests_total{instance=\"i1\",status=\"200\"}"), "{metrics}");
}

/// Once, a client that disconnected before the first event was not charged for its prompt.
#[tokio::test]
async fn a_client_that_leaves_before_the_answer_has_paid_for_its_prompt() {
    let engine = ScriptedEngine::new(|_| Ok(vec![Step::Hang]));
    let server = scripted::spawn(scripted::state(engine.clone())).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[[key]]\nname = 'a'\nkey = 'a'\ntokens_per_minute = 60\n").unwrap();
    let keys = Arc::new(Keys::new(None, None, Some(file.path().to_owned())).unwrap());
    let url = guarded_gateway(Arc::new(vec![backend("i1", &server, 1)]), ReplayLimits::default(), keys).await;
    let ask = |more: Value| {
        let mut body = json!({"prompt": "a".repeat(400)});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let request = reqwest::Client::new().post(format!("{url}/v1/completions")).bearer_auth("a").json(&body);
        async move { request.send().await.unwrap().status().as_u16() }
    };
    // What is refused costs nothing.
    assert_eq!([ask(json!({"best_of": 3})).await, ask(json!({"best_of": 3})).await], [400; 2]);
    let leaving = tokio::spawn(ask(json!({"stream": true})));
    engine.wait_submitted(1).await;
    leaving.abort();
    engine.wait_cancelled(1).await;
    let next = tokio::time::timeout(LONG, ask(json!({"stream": true}))).await;
    assert_eq!(next.expect("it is refused, not computed"), 429);
}

/// Thirty-two clients that sent headers and no body shut everybody else out before.
#[tokio::test]
async fn a_body_that_does_not_come_holds_nobody_up_and_none_is_awaited_without_a_key() {
    let server = scripted::spawn(scripted::state(ScriptedEngine::saying("ok"))).await;
    let backends = || Arc::new(vec![backend("i1", &server, 1)]);
    let url = gateway_with(backends(), ReplayLimits::default()).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut silent = Vec::new();
    for _ in 0..40 {
        let mut client = tokio::net::TcpStream::connect(url.trim_start_matches("http://")).await.unwrap();
        client.write_all(head.as_bytes()).await.unwrap();
        silent.push(client);
    }
    let (status, _, text) = complete(&url, &json!({"prompt": "a"})).await;
    assert_eq!(status, 200, "{text}");
    let url = keyed_gateway(backends(), ReplayLimits::default(), Some("sesame")).await;
    let mut client = tokio::net::TcpStream::connect(url.trim_start_matches("http://")).await.unwrap();
    client.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    let read = tokio::time::timeout(LONG, client.read_exact(&mut answer)).await;
    read.expect("the body is not awaited").unwrap();
    assert_eq!(&answer, b"HTTP/1.1 401");
}

/// What a gateway knows of a pool whose gManager is gone.
struct Old(Vec<Backend>);

impl Backends for Old {
    fn serving(&self) -> Vec<Backend> {
        self.0.clone()
    }

    fn is_dead(&self, _: SocketAddr) -> bool {
        false
    }

    fn knows(&self, _: &str) -> bool {
        true
    }

    fn silent_for(&self) -> Option<Duration> {
        Some(Duration::from_secs(12))
    }
}

/// A gateway whose access log is the second value.
pub(crate) async fn logged_gateway(backends: Arc<dyn Backends>) -> (String, Arc<Mutex<Vec<Line>>>) {
    let lines: Arc<Mutex<Vec<Line>>> = Arc::default();
    let into = Arc::clone(&lines);
    let front =
        Front { access_log: Some(Arc::new(move |line| into.lock().unwrap().push(line.clone()))), ..Front::default() };
    let gateway = Gateway::new(backends, scripted::recorder(), None, DispatchArgs::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let port = Port { front, ..Port::plain(listener, Keys::none()) };
    tokio::spawn(lagoon_http::serve(port, gateway.router(), std::future::pending()));
    (url, lines)
}

#[tokio::test]
async fn an_instance_gets_the_id_that_the_client_gets() {
    let echo = Router::new().fallback(|headers: HeaderMap| async move {
        headers.get_all("x-request-id").iter().map(|id| id.to_str().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(lagoon_http::serve(Port::plain(listener, Keys::none()), echo, std::future::pending()));
    let url = gateway(vec![backend("i1", &server, 1)]).await;
    for given in [Some("mine"), Some("no id"), None] {
        let request = reqwest::Client::new().get(format!("{url}/version"));
        let request = if let Some(given) = given { request.header("x-request-id", given) } else { request };
        let response = request.send().await.unwrap();
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert_eq!(id == "mine", given == Some("mine"));
        assert_eq!(response.text().await.unwrap(), id);
    }
}

#[tokio::test]
async fn the_log_has_what_the_instance_reports_and_the_instance_gets_the_id() {
    let engine = ScriptedEngine::new(|request| {
        let mut steps = scripted::say("abc", request);
        steps.insert(0, Step::Cached(CachedTokens::on_device(2_u32)));
        Ok(steps)
    });
    let server = scripted::spawn(scripted::state(engine)).await;
    let (url, lines) = logged_gateway(Arc::new(vec![backend("gone", &dead(), 9), backend("i2", &server, 1)])).await;
    let paths = ["/v1/completions", "/completion"];
    for (path, stream) in paths.into_iter().flat_map(|path| [(path, false), (path, true)]) {
        let request = reqwest::Client::new().post(format!("{url}{path}")).header("x-request-id", "mine");
        let response = request.json(&json!({"prompt": "xyz", "stream": stream})).send().await.unwrap();
        assert_eq!(response.headers().get_all("x-request-id").iter().collect::<Vec<_>>(), ["mine"]);
        assert!(!response.headers().contains_key("x-lagoon-report"));
        let text = response.text().await.unwrap();
        assert!(!text.contains(": lagoon"), "{text}");
        let wait = async {
            while lines.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(LONG, wait).await.expect("a line");
        let found = std::mem::take(&mut *lines.lock().unwrap());
        let [Line { id, status, report, outcome, instance, .. }] = &found[..] else { panic!("{found:?}") };
        assert_eq!((id.as_str(), *status, outcome.as_str()), ("mine", Some(200), "stop"), "{path}");
        assert_eq!((instance.as_deref(), report.model.as_deref()), (Some("i2"), Some("lagoon/scripted")));
        assert_eq!([report.prompt_tokens, report.cached_tokens, report.output_tokens], [Some(4), Some(2), Some(4)]);
        assert!(report.ttft_ms.is_some() && report.queue_ms.is_some(), "{report:?}");
    }
}

#[tokio::test]
async fn health_says_that_no_gmanager_answers() {
    let backends = vec![backend("i1", &dead(), 1)];
    let url = gateway_with(Arc::new(Old(backends.clone())), ReplayLimits::default()).await;
    let health: Value = reqwest::get(format!("{url}/health")).await.unwrap().json().await.unwrap();
    assert_eq!((&health["status"], &health["instances"]), (&json!("degraded"), &json!(1)));
    assert!(health["reason"].as_str().unwrap().contains("12 s"), "{health}");
    let url = gateway(backends).await;
    let health: Value = reqwest::get(format!("{url}/health")).await.unwrap().json().await.unwrap();
    assert_eq!(health, json!({"status": "ok", "instances": 1}));
}
