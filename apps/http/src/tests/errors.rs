//! Every failure is an OpenAI error body with its own status.

use super::Client;
use crate::scripted::{self, ScriptedEngine, state};
use lagoon_types::RequestError;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

#[tokio::test]
async fn requests_that_are_wrong() {
    let client = Client::saying("ok").await;
    let mut out = String::new();
    for body in ["", "{", "[1]", "{\"prompt\": }", "\u{0}"] {
        writeln!(out, "{body:?}\n{}", client.raw("/v1/completions", body).await.stable()).unwrap();
    }
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a", "model": "gpt-4"})),
        ("/v1/completions", json!({})),
        ("/v1/completions", json!({"prompt": []})),
        ("/v1/completions", json!({"prompt": [[]]})),
        ("/v1/completions", json!({"prompt": ["a", [1]], "best_of": 2})),
        ("/v1/completions", json!({"prompt": ["a", 1]})),
        ("/v1/completions", json!({"prompt": [1, -1]})),
        ("/v1/completions", json!({"prompt": [1, 258]})),
        ("/v1/completions", json!({"prompt": "a", "stop_token_ids": [258]})),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": 0})),
        ("/v1/completions", json!({"prompt": "a", "max_tokens": "5"})),
        ("/v1/completions", json!({"prompt": "a", "temperature": -1})),
        ("/v1/completions", json!({"prompt": "a", "top_p": 0})),
        ("/v1/completions", json!({"prompt": "a", "top_k": -2})),
        ("/v1/completions", json!({"prompt": "a", "seed": 1.5})),
        ("/v1/completions", json!({"prompt": "a", "logprobs": 21})),
        ("/v1/completions", json!({"prompt": "a", "logit_bias": [1]})),
        ("/v1/completions", json!({"prompt": "a", "logit_bias": {"a": 1}})),
        ("/v1/completions", json!({"prompt": "a", "logit_bias": {"1": 101}})),
        ("/v1/completions", json!({"prompt": "a", "logit_bias": {"258": 1}})),
        ("/v1/completions", json!({"prompt": "a", "stop": ["a", ""]})),
        ("/v1/completions", json!({"prompt": "a", "stop": vec!["a"; 17]})),
        ("/v1/completions", json!({"prompt": "a", "stop": 5})),
        ("/v1/completions", json!({"prompt": vec!["a"; 129]})),
        ("/v1/completions", json!({"prompt": ["a", "b"], "n": 65})),
        ("/v1/completions", json!({"prompt": "a", "stream_options": {"include_usage": true}})),
        ("/v1/chat/completions", json!({})),
        ("/v1/chat/completions", json!({"messages": []})),
        ("/v1/chat/completions", json!({"messages": "hi"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user"}]})),
        ("/v1/chat/completions", json!({"messages": [{"role": "robot", "content": "a"}]})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "refuse me"}]})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2})),
    ] {
        writeln!(out, "{path} {body}\n{}", client.post(path, body.clone()).await.stable()).unwrap();
    }
    insta::assert_snapshot!(out);
}

#[tokio::test]
async fn what_the_engine_refuses() {
    let mut out = String::new();
    for error in [
        RequestError::Invalid("the prompt is empty".to_owned()),
        RequestError::TooLong {
            prompt_tokens: 9000,
            needed_tokens: 9100,
            limit_tokens: 8192,
            limit_name: "the pool's capacity",
        },
        RequestError::QueueFull { queued: 256, limit: 256 },
        RequestError::Unavailable("the gManager is gone".to_owned()),
        RequestError::Internal("counts do not tile".to_owned()),
    ] {
        let client = Client::of(ScriptedEngine::new(move |_| Err(error.clone()))).await;
        let reply = client.post("/v1/completions", json!({"prompt": "a"})).await;
        let retry = reply.headers.get("retry-after").map(|value| value.to_str().unwrap());
        writeln!(out, "{} retry-after {retry:?}", reply.stable()).unwrap();
    }
    insta::assert_snapshot!(out);
}

#[tokio::test]
async fn routes_and_methods_that_do_not_exist() {
    let client = Client::saying("ok").await;
    let mut out = String::new();
    for path in ["/", "/v1/edits", "/v1/completions", "/tokenize"] {
        writeln!(out, "GET {path}\n{}", client.get(path).await.stable()).unwrap();
    }
    writeln!(out, "POST /v1/models\n{}", client.post("/v1/models", json!({})).await.stable()).unwrap();
    insta::assert_snapshot!(out);
}

#[tokio::test]
async fn a_body_over_the_limit() {
    let mut server = state(ScriptedEngine::saying("ok"));
    server.limits.body_bytes_max = 1000;
    let client = Client::new(server).await;
    let body = json!({"prompt": "a".repeat(1000)});
    insta::assert_snapshot!(client.post("/v1/completions", body).await.stable());
    assert_eq!(client.post("/v1/completions", json!({"prompt": "a"})).await.status, 200);
}

#[tokio::test]
async fn what_no_context_holds_is_refused_by_its_length() {
    let client = Client::saying("ok").await;
    // The context is 512 tokens, and the longest token has 5 bytes.
    let mut out = String::new();
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a".repeat(2561)})),
        ("/v1/completions", json!({"prompt": ["a", "a".repeat(2561)]})),
        ("/v1/completions", json!({"prompt": vec![1; 513]})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a".repeat(2561)}]})),
        ("/tokenize", json!({"prompt": "a".repeat(2561)})),
        ("/v1/chat/completions", json!({"messages": vec![json!({}); 16_385]})),
    ] {
        writeln!(out, "{path}\n{}", client.post(path, body).await.stable()).unwrap();
    }
    insta::assert_snapshot!(out);
    let counted = client.post("/tokenize", json!({"prompt": "a".repeat(2560), "add_special_tokens": false})).await;
    assert_eq!(counted.json()["count"], 2560);
}

/// A whole body of text was tokenised where the normaliser might drop nearly all of it.
#[tokio::test]
async fn texts_have_a_bound_where_their_tokens_have_none() {
    let tokenizer = scripted::normalizing_tokenizer(&json!({"type": "Strip", "strip_left": true, "strip_right": true}));
    assert_eq!(tokenizer.tokens_min(1 << 20), 0);
    // 1 KiB a token: more than 16 times the longest one.
    let most = tokenizer.text_bytes_max(512);
    assert_eq!(most, 512 << 10);
    let state = state(ScriptedEngine::saying("ok"));
    let client = Client::new(crate::ServerState { tokenizer: Arc::new(tokenizer), ..state }).await;
    let spaces = |count: usize| json!({"prompt": " ".repeat(count) + "a", "add_special_tokens": false});
    assert_eq!(client.post("/tokenize", spaces(most - 1)).await.json()["count"], 1);
    let refused = client.post("/tokenize", spaces(most)).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &Value::from("context_length_exceeded")));
    assert!(refused.text.contains("has 524289 bytes, but at most 524288"), "{}", refused.text);
}

/// A token's text takes many times the bytes of its id.
#[tokio::test]
async fn texts_of_tokens_are_made_up_to_the_models_context() {
    let client = Client::saying("ok").await;
    let spelled =
        |count: usize| json!({"prompt": "a".repeat(count), "add_special_tokens": false, "return_token_strs": true});
    for (path, within, beyond) in [
        ("/tokenize", spelled(512), spelled(513)),
        ("/detokenize", json!({"tokens": vec![97; 512]}), json!({"tokens": vec![97; 513]})),
    ] {
        let reply = client.post(path, within).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text);
        let reply = client.post(path, beyond).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &Value::from("context_length_exceeded")));
        assert!(reply.text.contains("513 tokens") && reply.text.contains("hint:"), "{path}: {}", reply.text);
    }
}

#[tokio::test]
async fn an_object_of_very_many_fields_is_refused_without_them() {
    let client = Client::saying("ok").await;
    let fields: Vec<String> = (0..200_000).map(|n| format!("\"f{n}\":1")).collect();
    let reply = client.raw("/v1/completions", format!("{{{}}}", fields.join(","))).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text.contains("more than 128 fields"), "{}", reply.text);
    let reply = client.raw("/v1/completions", r#"{"prompt": "\ud800"}"#).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &Value::from("invalid_json")), "{}", reply.text);
}

#[tokio::test]
async fn a_body_that_never_ends() {
    let mut server = state(ScriptedEngine::saying("ok"));
    server.limits.body_deadline = std::time::Duration::from_millis(50);
    let client = Client::new(server).await;
    let endless = futures::stream::once(async { Ok::<_, std::io::Error>("{") }).chain(futures::stream::pending());
    let reply = client.raw("/v1/completions", reqwest::Body::wrap_stream(endless)).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (408, &Value::from("request_timeout")));
}

use futures::StreamExt;

#[tokio::test]
async fn an_api_key_guards_all_but_health() {
    let server = state(ScriptedEngine::saying("ok"));
    let base = scripted::spawn_keyed(server, crate::Keys::single("sesame")).await;
    let client = Client { base, http: reqwest::Client::new() };
    assert_eq!(client.get("/health").await.status, 200);
    let refused = client.get("/v1/models").await;
    assert_eq!(refused.headers["www-authenticate"], "Bearer");
    insta::assert_snapshot!(refused.stable());
    for path in ["/metrics", "/version", "/nowhere"] {
        assert_eq!(client.get(path).await.status, 401, "{path}");
    }
    for (authorization, status) in [
        ("Bearer sesame", 200),
        ("bearer sesame", 200),
        ("Bearer sesam", 401),
        ("Bearer sesame2", 401),
        ("Bearer ", 401),
        ("Basic sesame", 401),
        ("sesame", 401),
    ] {
        let request = client.http.get(client.url("/v1/models")).header("authorization", authorization);
        assert_eq!(request.send().await.unwrap().status().as_u16(), status, "{authorization}");
    }
}

#[tokio::test]
async fn logits_only_where_they_are_exposed() {
    let mut server = state(ScriptedEngine::saying("ok"));
    server.expose_logits = false;
    let client = Client::new(server).await;
    let body = json!({"prompt": "a", "return_logits": true});
    insta::assert_snapshot!(client.post("/v1/completions", body).await.stable());
}
