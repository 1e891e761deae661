//! Batches of chats: each conversation is answered as it is alone.

use super::{Client, tools};
use crate::scripted::{ScriptedEngine, Step, say};
use lagoon_types::CachedTokens;
use serde_json::{Value, json};
use std::sync::Arc;

const PATH: &str = "/v1/chat/completions/batch";

/// An engine that repeats what the prompt's last user says, as reasoning and as the answer.
fn echo() -> Arc<ScriptedEngine> {
    ScriptedEngine::new(|request| {
        let bytes: Vec<u8> = request.prompt.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
        let prompt = String::from_utf8(bytes).unwrap();
        let (_, asked) = prompt.rsplit_once("user").unwrap();
        let asked = asked.trim_start_matches([':', '>', ' ']).split(['<', '\n']).next().unwrap();
        let mut steps = say(&format!("{asked}</think>{asked}."), request);
        steps.insert(0, Step::Cached(CachedTokens::on_device(2_u32)));
        Ok(steps)
    })
}

fn chat(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

#[tokio::test]
async fn every_conversation_is_answered_as_it_is_alone() {
    let client = tools::client(&echo()).await;
    let options = json!({
        "logprobs": true, "top_logprobs": 1, "return_token_ids": true, "prompt_logprobs": 1, "seed": 3, "max_tokens": 40,
    });
    let body = |messages: Value, extra: &Value| {
        let mut body = json!({"messages": messages});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let chats = ["a", "longer", "é"].map(chat);
    let reply = client.post(PATH, body(json!(chats), &options)).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let batch = reply.json();
    assert_eq!((&batch["object"], batch["choices"].as_array().unwrap().len()), (&json!("chat.completion"), 3));
    let mut usage = [0; 4];
    for (index, chat) in chats.iter().enumerate() {
        let mut one = client.post("/v1/chat/completions", body(chat.clone(), &options)).await.json();
        let counts = &one["usage"];
        let counts = ["prompt_tokens", "completion_tokens", "total_tokens"].map(|name| counts[name].as_u64().unwrap());
        counts.iter().zip(&mut usage).for_each(|(count, sum)| *sum += count);
        usage[3] += one["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let mut choice = one["choices"][0].take();
        assert_eq!(choice["message"]["content"], format!("{}.", chat[0]["content"].as_str().unwrap()));
        choice["index"] = index.into();
        // What a single chat reports of its prompt stands beside the choices.
        for name in ["prompt_token_ids", "prompt_logprobs"] {
            choice[name] = one[name].take();
            assert!(choice[name].is_array(), "{name}: {choice}");
        }
        assert_eq!(batch["choices"][index], choice);
    }
    let of = |name: &str| batch["usage"].pointer(name).and_then(Value::as_u64).unwrap();
    let found =
        ["/prompt_tokens", "/completion_tokens", "/total_tokens", "/prompt_tokens_details/cached_tokens"].map(of);
    assert_eq!(found, usage);
}

#[tokio::test]
async fn limits_constraints_and_seeds_are_those_of_each_conversation() {
    let engine = echo();
    let client = Client::of(engine.clone()).await;
    let chats = json!([chat("a"), chat("bcd"), chat("a")]);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}});
    let body = json!({"messages": chats, "response_format": schema});
    assert_eq!(client.post(PATH, body).await.status, 200);
    let requests = engine.requests();
    let lengths: Vec<usize> = requests.iter().map(|request| request.prompt.len()).collect();
    assert_eq!(lengths[1], lengths[0] + 2);
    for request in &requests {
        assert_eq!(request.max_tokens as usize, 512 - request.prompt.len(), "as many as the context leaves");
        let constraint = request.sampling.constraint.as_ref().unwrap();
        assert!(Arc::ptr_eq(constraint, requests[0].sampling.constraint.as_ref().unwrap()), "in memory once");
    }
    let seeds = |from: usize| engine.requests()[from..].iter().map(|r| r.sampling.seed).collect::<Vec<_>>();
    let drawn = seeds(0);
    assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2] && drawn[0] != drawn[2], "{drawn:?}");
    assert_eq!(client.post(PATH, json!({"messages": chats, "seed": 7})).await.status, 200);
    assert_eq!(seeds(3), [7; 3]);
    // Prompts of completions, too.
    let body = json!({"prompt": ["user: a\n", "user: a\n"], "n": 2, "seed": 7});
    assert_eq!(client.post("/v1/completions", body).await.status, 200);
    assert_eq!(seeds(6), [7, 8, 7, 8]);
    let body = json!({"prompt": ["user: a\n", "user: a\n"], "n": 2});
    assert_eq!(client.post("/v1/completions", body).await.status, 200);
    let drawn: std::collections::BTreeSet<u64> = seeds(10).into_iter().collect();
    assert_eq!(drawn.len(), 4);
}

#[tokio::test]
async fn what_a_batch_has_not_is_refused_by_name() {
    let client = Client::of(echo()).await;
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for (field, value) in [
        ("stream", json!(true)),
        ("stream_options", json!({"include_usage": true})),
        ("n", json!(2)),
        ("tools", json!([tool])),
        ("tool_choice", json!("required")),
        ("use_beam_search", json!(true)),
        ("best_of", json!(2)),
        ("lagoon_resume", json!({})),
        ("echo", json!(true)),
        ("prompt", json!("a")),
    ] {
        let reply = client.post(PATH, json!({"messages": [chat("a")], field: value})).await;
        let error = &reply.json()["error"];
        let found = (reply.status, error["param"].as_str(), error["code"].as_str());
        assert_eq!(found, (400, Some(field), Some("unsupported_parameter")), "{}", reply.text);
    }
    let neutral = json!({
        "messages": [chat("a")], "stream": false, "n": 1, "tools": [], "tool_choice": "none", "parallel_tool_calls": true,
        "use_beam_search": false, "max_completion_tokens": 2,
    });
    assert_eq!(client.post(PATH, neutral).await.status, 200);
}

#[tokio::test]
async fn a_wrong_conversation_is_named_and_nothing_is_computed() {
    let engine = echo();
    let client = Client::of(engine.clone()).await;
    let long = chat(&"a".repeat(100_000));
    for (messages, param, words) in [
        (json!([]), "messages", "must not be empty"),
        (json!("a"), "messages", "a list of conversations"),
        (chat("a"), "messages[0]", "a list of messages"),
        (json!([chat("a"), []]), "messages[1]", "must not be empty"),
        (json!(vec![chat("a"); 129]), "messages", "129 entries, but at most 128"),
        (json!([chat("a"), [{"role": "x", "content": "a"}]]), "messages[1][0].role", "`x`"),
        (json!([chat("a"), chat("refuse me")]), "messages[1]", "not this"),
        (json!([chat("a"), long]), "messages[1]", "bytes"),
    ] {
        let reply = client.post(PATH, json!({"messages": messages})).await;
        let error = &reply.json()["error"];
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(param)), "{}", reply.text);
        assert!(error["message"].as_str().unwrap().contains(words), "{words}: {}", reply.text);
    }
    assert!(engine.requests().is_empty());
    let most = client.post(PATH, json!({"messages": vec![chat("a"); 128], "max_tokens": 1})).await.json();
    assert_eq!(most["choices"].as_array().unwrap().len(), 128);
    assert_eq!(most["choices"][127]["index"], 127);
}
