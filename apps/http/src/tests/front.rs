//! Request ids, the access log, and browsers of other origins.

use crate::access::Line;
use crate::front::{CorsOrigins, REQUEST_ID};
use crate::scripted::{self, ScriptedEngine, Step};
use crate::{Front, Keys, Port};
use lagoon_types::{CachedTokens, FinishReason, RequestError};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const WAIT_MAX: Duration = Duration::from_secs(30);

/// A served engine, and the lines of its access log.
struct Logged {
    url: String,
    http: reqwest::Client,
    lines: Arc<Mutex<Vec<Line>>>,
}

impl Logged {
    async fn new(engine: Arc<ScriptedEngine>, keys: Arc<Keys>, cors: &[&str]) -> Self {
        let lines: Arc<Mutex<Vec<Line>>> = Arc::default();
        let into = Arc::clone(&lines);
        let cors: Vec<String> = cors.iter().map(|&origin| origin.to_owned()).collect();
        let front = Front {
            access_log: Some(Arc::new(move |line| into.lock().unwrap().push(line.clone()))),
            cors: CorsOrigins::parse(&cors).unwrap(),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = crate::router(scripted::state(engine));
        tokio::spawn(crate::serve(Port { front, ..Port::plain(listener, keys) }, router, std::future::pending()));
        Self { url, http: reqwest::Client::new(), lines }
    }

    async fn saying(text: &'static str) -> Self {
        Self::new(ScriptedEngine::saying(text), Keys::none(), &[]).await
    }

    fn post(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        self.http.post(format!("{}{path}", self.url)).json(body)
    }

    /// The only line so far, once it is there.
    async fn line(&self) -> Line {
        let wait = async {
            loop {
                if let [line] = &self.lines.lock().unwrap()[..] {
                    return line.clone();
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let line = tokio::time::timeout(WAIT_MAX, wait).await.expect("one line");
        self.lines.lock().unwrap().clear();
        line
    }
}

#[tokio::test]
async fn every_response_has_the_requests_id_or_a_new_one() {
    let server = Logged::new(ScriptedEngine::saying("ok"), Keys::single("sesame"), &[]).await;
    let long = "a".repeat(129);
    let paths = [
        ("/v1/models", Some("sesame"), 200),
        ("/v1/models", None, 401),
        ("/nowhere", Some("sesame"), 404),
        ("/health", None, 200),
    ];
    let insane = ["two words", "x\"y", &long, ""].map(|id| (Some(id), false));
    for (path, key, status) in paths {
        for (given, kept) in [(Some("trace-1_2.3:4/5"), true), (None, false)].into_iter().chain(insane) {
            let mut request = server.http.get(format!("{}{path}", server.url));
            request = if let Some(key) = key { request.bearer_auth(key) } else { request };
            request = if let Some(given) = given { request.header(REQUEST_ID, given) } else { request };
            let response = request.send().await.unwrap();
            assert_eq!(response.status(), status, "{path}");
            let ids: Vec<&str> = response.headers().get_all(REQUEST_ID).iter().map(|id| id.to_str().unwrap()).collect();
            let [id] = ids[..] else { panic!("{ids:?}") };
            assert_eq!(Some(id) == given, kept, "{id} for {given:?}");
            assert!(kept || (id.len() == 36 && id.starts_with("req_")), "{id}");
        }
    }
}

#[tokio::test]
async fn a_request_has_one_line_when_its_response_has_ended() {
    let engine = ScriptedEngine::new(|request| {
        let mut steps = scripted::say("abc", request);
        steps.insert(0, Step::Cached(CachedTokens::on_device(2_u32)));
        Ok(steps)
    });
    let server = Logged::new(engine, Keys::none(), &[]).await;
    let paths = ["/v1/completions", "/completion"];
    for (path, stream) in paths.into_iter().flat_map(|path| [(path, false), (path, true)]) {
        let body = json!({"prompt": "xyz", "stream": stream, "n": 2, "model": "lagoon/scripted"});
        let request = server.post(&format!("{path}?a=b"), &body).header(REQUEST_ID, "mine");
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        response.bytes().await.unwrap();
        let line = server.line().await;
        assert_eq!((line.id.as_str(), line.method.as_str(), line.path.as_str()), ("mine", "POST", path));
        assert_eq!((line.status, line.outcome.as_str(), line.instance), (Some(200), "stop", None));
        let report = line.report;
        assert_eq!(report.model.as_deref(), Some("lagoon/scripted"));
        assert_eq!([report.prompt_tokens, report.cached_tokens, report.output_tokens], [Some(4), Some(2), Some(8)]);
        assert!(report.ttft_ms.is_some_and(|ttft| ttft <= line.total_ms) && report.queue_ms == Some(0));
    }
    for path in ["/health", "/metrics"] {
        server.http.get(format!("{}{path}", server.url)).send().await.unwrap().bytes().await.unwrap();
    }
    let models = server.http.get(format!("{}/v1/models", server.url)).send().await.unwrap();
    models.bytes().await.unwrap();
    let line = server.line().await;
    assert_eq!((line.path.as_str(), line.outcome.as_str()), ("/v1/models", "ok"));
}

#[tokio::test]
async fn a_line_names_the_error_that_ended_a_response() {
    let server = Logged::saying("ok").await;
    for (body, status) in [(json!({"prompt": "a", "model": "gpt-5"}), 404), (json!({"prompt": 5}), 400)] {
        let response = server.post("/v1/completions", &body).send().await.unwrap();
        let code = response.headers()["x-lagoon-error"].to_str().unwrap().to_owned();
        let line = server.line().await;
        assert_eq!((line.status, line.outcome), (Some(status), code));
    }
    let fails = || RequestError::Unavailable("the device is gone".to_owned());
    let engine = ScriptedEngine::new(move |_| Ok(vec![Step::Token(97), Step::Fail(fails())]));
    let server = Logged::new(engine, Keys::none(), &[]).await;
    for path in ["/v1/completions", "/completion"] {
        let response = server.post(path, &json!({"prompt": "a", "stream": true})).send().await.unwrap();
        response.bytes().await.unwrap();
        let line = server.line().await;
        assert_eq!(
            (line.status, line.outcome.as_str(), line.report.output_tokens),
            (Some(200), "unavailable", Some(1)),
            "{path}"
        );
    }
}

#[tokio::test]
async fn a_client_that_leaves_has_a_line() {
    let engine = ScriptedEngine::new(|_| Ok(vec![Step::Token(97), Step::Hang]));
    let server = Logged::new(engine.clone(), Keys::none(), &[]).await;
    let mut stream = server.post("/v1/completions", &json!({"prompt": "a", "stream": true})).send().await.unwrap();
    stream.chunk().await.unwrap().unwrap();
    drop(stream);
    let line = server.line().await;
    assert_eq!((line.status, line.outcome.as_str(), line.report.output_tokens), (Some(200), "client_left", Some(1)));
    let asking = tokio::spawn(server.post("/v1/completions", &json!({"prompt": "a"})).send());
    engine.wait_submitted(2).await;
    asking.abort();
    let line = server.line().await;
    assert_eq!((line.status, line.outcome.as_str()), (None, "client_left"));
}

/// Clients of OpenAI's API know `length` only.
#[tokio::test]
async fn an_answer_that_the_pools_memory_ended_says_so() {
    let engine = ScriptedEngine::new(|_| Ok(vec![Step::Token(97), Step::Finish(FinishReason::KvCapacity)]));
    let server = Logged::new(engine, Keys::none(), &[]).await;
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    for (path, mut body) in [("/v1/completions", json!({"prompt": "a"})), ("/v1/chat/completions", chat)] {
        let whole: Value = server.post(path, &body).send().await.unwrap().json().await.unwrap();
        let choice = &whole["choices"][0];
        assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("length"), &json!("kv_capacity")));
        assert_eq!(server.line().await.outcome, "kv_capacity");
        body["stream"] = json!(true);
        let text = server.post(path, &body).send().await.unwrap().text().await.unwrap();
        assert_eq!(text.matches("\"finish_reason\":\"length\",\"stop_reason\":\"kv_capacity\"").count(), 1, "{text}");
        assert_eq!(server.line().await.outcome, "kv_capacity");
    }
    let server = Logged::saying("ok").await;
    let whole: Value =
        server.post("/v1/completions", &json!({"prompt": "a"})).send().await.unwrap().json().await.unwrap();
    assert!(whole["choices"][0].get("stop_reason").is_none(), "{whole}");
}

#[tokio::test]
async fn a_model_answers_to_each_of_its_names() {
    let server = Logged::new(ScriptedEngine::named("ok", &["scripted"]), Keys::none(), &[]).await;
    let get = |path: &str| server.http.get(format!("{}{path}", server.url)).send();
    let models: Value = get("/v1/models").await.unwrap().json().await.unwrap();
    let ids: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["lagoon/scripted", "scripted"]);
    // Of 512 tokens that the model takes, the pool holds 256.
    assert!(models["data"].as_array().unwrap().iter().all(|model| model["max_model_len"] == 256), "{models}");
    let alias: Value = get("/v1/models/scripted").await.unwrap().json().await.unwrap();
    assert_eq!((&alias["id"], &alias["root"]), (&json!("scripted"), &json!("lagoon/scripted")));
    let names = [
        (json!("scripted"), "scripted"),
        (json!("lagoon/scripted"), "lagoon/scripted"),
        (Value::Null, "lagoon/scripted"),
    ];
    for (asked, echoed) in names {
        let body = json!({"prompt": "a", "model": asked});
        let answer: Value = server.post("/v1/completions", &body).send().await.unwrap().json().await.unwrap();
        assert_eq!(answer["model"], echoed, "{answer}");
    }
}

async fn preflight(server: &Logged, origin: &str) -> reqwest::Response {
    let request = server.http.request(Method::OPTIONS, format!("{}/v1/chat/completions", server.url));
    let request = request.header("origin", origin).header("access-control-request-method", "POST");
    request.header("access-control-request-headers", "authorization,content-type").send().await.unwrap()
}

#[tokio::test]
async fn pages_of_allowed_origins_may_ask_and_preflights_need_no_key() {
    let allowed = "https://chat.example.org";
    for (origins, others) in [(&[allowed, "http://localhost:3000"][..], false), (&["*"][..], true)] {
        let server = Logged::new(ScriptedEngine::saying("ok"), Keys::single("sesame"), origins).await;
        for (origin, may) in [(allowed, true), ("https://evil.example.org", others)] {
            let response = preflight(&server, origin).await;
            assert!(response.status().is_success(), "{}", response.status());
            let headers = response.headers();
            assert_eq!(headers.contains_key("access-control-allow-origin"), may, "{origin} {origins:?}");
            assert_eq!(headers["access-control-allow-headers"], "authorization,content-type");
            let models = server.http.get(format!("{}/v1/models", server.url)).header("origin", origin);
            let response = models.try_clone().unwrap().send().await.unwrap();
            assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "the request itself needs one");
            let response = models.bearer_auth("sesame").send().await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(response.headers().contains_key("access-control-allow-origin"), may, "{origin} {origins:?}");
            assert!(response.headers()["access-control-expose-headers"].to_str().unwrap().contains("x-request-id"));
        }
    }
    let none = Logged::new(ScriptedEngine::saying("ok"), Keys::none(), &[]).await;
    let response = preflight(&none, allowed).await;
    assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert!(!response.headers().contains_key("access-control-allow-origin"));
}

#[test]
fn an_origin_is_a_scheme_and_a_host() {
    for text in [
        "chat.example.org",
        "https://",
        "https://a/",
        "https://a/b",
        "https://a b",
        "https://A",
        "https://a,https://b",
        "",
    ] {
        assert!(CorsOrigins::parse(&[text.to_owned()]).is_err(), "{text:?}");
    }
    for text in ["https://a", "http://localhost:3000", "http://[::1]:8000", "chrome-extension://abc"] {
        assert!(CorsOrigins::parse(&[text.to_owned()]).unwrap().is_some(), "{text:?}");
    }
    assert_eq!(CorsOrigins::parse(&["https://a".to_owned(), "*".to_owned()]), Ok(Some(CorsOrigins::Any)));
    assert_eq!(CorsOrigins::parse(&[]), Ok(None));
}
