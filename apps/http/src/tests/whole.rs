//! Answers in one piece, and what the engine is asked for.

use super::Client;
use crate::scripted::{BOS, EOS, ScriptedEngine, say, state};
use serde_json::{Value, json};

fn chat(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_chat_completion() {
    let client = Client::saying("hello").await;
    insta::assert_snapshot!(client.post("/v1/chat/completions", chat(json!({}))).await.stable());
}

#[tokio::test]
async fn a_chat_completion_with_everything_reported() {
    let client = Client::saying("h").await;
    let extra = json!({"logprobs": true, "top_logprobs": 2, "return_token_ids": true, "return_logits": true});
    insta::assert_snapshot!(client.post("/v1/chat/completions", chat(extra)).await.stable());
}

#[tokio::test]
async fn completions_of_every_prompt_shape() {
    let engine = ScriptedEngine::saying("ok");
    let client = Client::of(engine.clone()).await;
    for (prompt, expected) in [
        (json!("ab"), vec![vec![BOS, 97, 98]]),
        (json!(["ab", "c"]), vec![vec![BOS, 97, 98], vec![BOS, 99]]),
        (json!([1, 2]), vec![vec![1, 2]]),
        (json!([[1], [2, 3]]), vec![vec![1], vec![2, 3]]),
    ] {
        let before = engine.requests().len();
        let reply = client.post("/v1/completions", json!({"prompt": prompt})).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let answer = reply.json();
        assert_eq!(answer["choices"].as_array().unwrap().len(), expected.len());
        let tokens: usize = expected.iter().map(Vec::len).sum();
        assert_eq!(answer["usage"]["prompt_tokens"], tokens);
        assert_eq!(answer["usage"]["completion_tokens"], 3 * expected.len());
        let prompts: Vec<_> = engine.requests().drain(before..).map(|request| request.prompt).collect();
        assert_eq!(prompts, expected);
    }
}

#[tokio::test]
async fn a_completion_with_logprobs_and_ids() {
    let client = Client::saying("abc").await;
    let body = json!({"prompt": "x", "logprobs": 1, "return_token_ids": true, "max_tokens": 2, "n": 2});
    insta::assert_snapshot!(client.post("/v1/completions", body).await.stable());
}

#[tokio::test]
async fn lengths_default_to_16_and_to_what_fits() {
    let engine = ScriptedEngine::saying("ok");
    let client = Client::of(engine.clone()).await;
    client.post("/v1/completions", json!({"prompt": "a"})).await;
    client.post("/v1/chat/completions", chat(json!({}))).await;
    client.post("/v1/chat/completions", chat(json!({"max_tokens": 5, "max_completion_tokens": 6}))).await;
    let lengths: Vec<_> = engine.requests().iter().map(|request| request.max_tokens).collect();
    // "user: hi\nassistant:" has 19 bytes; the model takes 512 tokens. The engine ends it where memory does.
    assert_eq!(lengths, [16, 512 - 19, 6]);
}

#[tokio::test]
async fn sampling_follows_the_request_then_the_model_then_the_protocol() {
    let engine = ScriptedEngine::saying("ok");
    let mut server = state(engine.clone());
    server.defaults.temperature = Some(0.5);
    server.defaults.top_k = Some(40);
    server.defaults.top_p = Some(0.75);
    let client = Client::new(server.clone()).await;
    client.post("/v1/completions", json!({"prompt": "a"})).await;
    let given = json!({"prompt": "a", "temperature": 0.25, "top_k": -1, "top_p": 0.5, "min_p": 0.125, "seed": -1});
    client.post("/v1/completions", given).await;
    server.defaults.do_sample = Some(false);
    Client::new(server).await.post("/v1/completions", json!({"prompt": "a"})).await;
    let seen: Vec<_> = engine.requests().into_iter().map(|request| request.sampling).collect();
    assert_eq!((seen[0].temperature, seen[0].top_k, seen[0].top_p, seen[0].min_p), (0.5, 40, 0.75, 0.0));
    assert_eq!((seen[1].temperature, seen[1].top_k, seen[1].top_p, seen[1].min_p), (0.25, 0, 0.5, 0.125));
    assert_eq!(seen[1].seed, u64::MAX);
    assert_eq!(seen[2].temperature, 0.0, "do_sample false makes greedy the default");
}

#[tokio::test]
async fn stops_join_the_models_own_unless_they_are_ignored() {
    let engine = ScriptedEngine::new(|request| Ok(say("ok", request)));
    let client = Client::of(engine.clone()).await;
    for body in [
        json!({"prompt": "a"}),
        json!({"prompt": "a", "stop_token_ids": [107, 3]}),
        json!({"prompt": "a", "stop_token_ids": [107], "ignore_eos": true, "max_tokens": 4}),
    ] {
        assert_eq!(client.post("/v1/completions", body).await.status, 200);
    }
    let stops: Vec<_> = engine.requests().into_iter().map(|request| request.stop_ids).collect();
    assert_eq!(stops, [vec![EOS], vec![3, 107, EOS], vec![107]]);
}

#[tokio::test]
async fn nothing_stops_before_min_tokens() {
    let engine = ScriptedEngine::new(|request| Ok(say("abcabc", request)));
    let client = Client::of(engine.clone()).await;
    for (min_tokens, text) in [(0, "a"), (1, "a"), (2, "abca"), (3, "abca"), (5, "abcabc")] {
        let body = json!({"prompt": "a", "stop": "b", "min_tokens": min_tokens});
        assert_eq!(client.post("/v1/completions", body).await.json()["choices"][0]["text"], text, "{min_tokens}");
    }
    assert_eq!(engine.requests()[4].min_tokens, 5);
    let body = json!({"prompt": "a", "max_tokens": 4, "min_tokens": 5});
    assert_eq!(client.post("/v1/completions", body).await.status, 400);
}

#[tokio::test]
async fn a_stop_token_has_no_text_and_special_tokens_show_on_request() {
    let client = Client::saying("ok").await;
    let stopped = client.post("/v1/completions", json!({"prompt": "a", "stop_token_ids": [107]})).await;
    assert_eq!(stopped.json()["choices"][0]["text"], "o");
    let engine = ScriptedEngine::new(|_| {
        use crate::scripted::Step::{Finish, Token};
        Ok(vec![Token(97), Token(BOS), Token(98), Finish(lagoon_types::FinishReason::Length)])
    });
    let client = Client::of(engine).await;
    let hidden = client.post("/v1/completions", json!({"prompt": "a"})).await;
    assert_eq!(hidden.json()["choices"][0]["text"], "ab");
    let shown = client.post("/v1/completions", json!({"prompt": "a", "skip_special_tokens": false})).await;
    assert_eq!(shown.json()["choices"][0]["text"], "a<bos>b");
}

#[tokio::test]
async fn content_parts_and_the_developer_role_become_text() {
    let engine = ScriptedEngine::saying("ok");
    let client = Client::of(engine.clone()).await;
    let messages = json!([
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": "x", "refusal": null, "tool_calls": [], "name": "lagoon"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]);
    assert_eq!(client.post("/v1/chat/completions", json!({"messages": messages})).await.status, 200);
    let prompt: Vec<u8> = engine.requests()[0].prompt.iter().map(|id| u8::try_from(*id).unwrap()).collect();
    assert_eq!(prompt, b"system: be brief\nassistant: x\nuser: a\nb\nassistant:");
}

#[tokio::test]
async fn tokenize_and_detokenize() {
    let client = Client::saying("ok").await;
    let mut out = String::new();
    for (path, body) in [
        ("/tokenize", json!({"prompt": "hi"})),
        ("/tokenize", json!({"prompt": "hi", "add_special_tokens": false, "return_token_strs": true})),
        ("/tokenize", json!({"messages": [{"role": "user", "content": "a"}], "model": "lagoon/scripted"})),
        ("/detokenize", json!({"tokens": [256, 104, 105]})),
        ("/detokenize", json!({"tokens": [258]})),
        ("/detokenize", json!({"tokens": "hi"})),
        ("/tokenize", json!({"prompt": 5})),
        ("/tokenize", json!({})),
    ] {
        out += &format!("{path} {body}\n{}\n", client.post(path, body.clone()).await.stable());
    }
    insta::assert_snapshot!(out);
}

#[tokio::test]
async fn what_is_served() {
    let client = Client::saying("ok").await;
    let mut out = String::new();
    for path in ["/v1/models", "/v1/models/lagoon/scripted", "/v1/models/other", "/health", "/version"] {
        out += &format!("{path}\n{}\n", client.get(path).await.stable());
    }
    insta::assert_snapshot!(out);
}

#[tokio::test]
async fn metrics_have_these_names() {
    let client = Client::saying("ok").await;
    client.post("/v1/completions", json!({"prompt": "a"})).await;
    client.get("/nowhere").await;
    let reply = client.get("/metrics").await;
    assert_eq!(reply.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let types: Vec<_> = reply.text.lines().filter(|line| line.starts_with("# TYPE lagoon_")).collect();
    let mut types: Vec<_> = types.into_iter().map(str::to_owned).collect();
    types.sort_unstable();
    insta::assert_snapshot!(types.join("\n"));
    assert!(reply.text.contains("lagoon_http_requests_total{route=\"/v1/completions\",status=\"200\"}"));
    assert!(reply.text.contains("lagoon_http_requests_total{route=\"other\",status=\"404\"}"));
    assert!(reply.text.contains("lagoon_sequences_total{outcome=\"stop\"}"));
}

#[tokio::test]
async fn a_model_without_a_template_refuses_chat_only() {
    let mut server = state(ScriptedEngine::saying("ok"));
    server.template = None;
    let client = Client::new(server).await;
    insta::assert_snapshot!(client.post("/v1/chat/completions", chat(json!({}))).await.stable());
    assert_eq!(client.post("/v1/completions", json!({"prompt": "a"})).await.status, 200);
}
