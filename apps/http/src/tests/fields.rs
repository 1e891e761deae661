//! A field is honoured, neutral, or refused by name.

use super::{Client, Reply};
use serde_json::{Value, json};

/// Each unsupported field with a value that is refused.
fn refused() -> Vec<(&'static str, Value)> {
    vec![
        ("length_penalty", json!(2)),
        ("best_of", json!(2)),
        ("use_beam_search", json!(true)),
        ("early_stopping", json!(true)),
        ("spaces_between_special_tokens", json!(false)),
        ("not_a_field", json!(null)),
        ("Stream", json!(true)),
    ]
}

fn refused_in_chat() -> Vec<(&'static str, Value)> {
    vec![
        ("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        ("functions", json!([{}])),
        ("function_call", json!({"name": "f"})),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "x"})),
        ("store", json!(true)),
        ("service_tier", json!("flex")),
        ("reasoning_effort", json!("low")),
        ("verbosity", json!("low")),
        ("prediction", json!({})),
        ("web_search_options", json!({})),
        ("chat_template", json!("{{ x }}")),
        ("chat_template_kwargs", json!({"enable_thinking": false})),
        ("continue_final_message", json!(true)),
        ("add_special_tokens", json!(true)),
        ("echo", json!(true)),
        ("prompt", json!("a")),
        ("suffix", json!("a")),
    ]
}

async fn assert_refused(client: &Client, path: &str, mut body: Value, field: &str, value: &Value) {
    body[field] = value.clone();
    let reply = client.post(path, body).await;
    let error = &reply.json()["error"];
    assert_eq!(reply.status, 400, "{field}: {}", reply.text);
    assert_eq!(error["param"], field, "{}", reply.text);
    assert_eq!(error["code"], "unsupported_parameter", "{}", reply.text);
    assert!(error["message"].as_str().unwrap().contains(&format!("`{field}`")), "{}", reply.text);
}

#[tokio::test]
async fn unsupported_values_are_refused_by_name() {
    let client = Client::saying("ok").await;
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    let completion = json!({"prompt": "a"});
    for (field, value) in refused() {
        assert_refused(&client, "/v1/chat/completions", chat.clone(), field, &value).await;
        assert_refused(&client, "/v1/completions", completion.clone(), field, &value).await;
    }
    for (field, value) in refused_in_chat() {
        assert_refused(&client, "/v1/chat/completions", chat.clone(), field, &value).await;
    }
    for (field, value) in [("suffix", json!("b")), ("messages", json!([])), ("top_logprobs", json!(1))] {
        assert_refused(&client, "/v1/completions", completion.clone(), field, &value).await;
    }
}

#[tokio::test]
async fn nested_fields_are_refused_with_their_path() {
    let client = Client::saying("ok").await;
    for (body, param) in [
        (json!({"messages": [{"role": "user", "content": "a", "weight": 1}]}), "messages[0].weight"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}),
            "messages[0].content[0].x",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}], "stream": true, "stream_options": {"x": 1}}),
            "stream_options.x",
        ),
    ] {
        let reply = client.post("/v1/chat/completions", body).await;
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &Value::from(param)), "{}", reply.text);
    }
}

/// A compressed body was "not valid JSON" before.
#[tokio::test]
async fn a_compressed_body_is_refused_as_such() {
    let client = Client::saying("ok").await;
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"] {
        for (encoding, expected) in [("gzip", 415), ("identity", 400)] {
            let request = client.http.post(client.url(path)).header("content-encoding", encoding).body("{");
            let reply = Reply::of(request.send().await.unwrap()).await;
            assert_eq!(
                (reply.status, reply.text.contains("gzip")),
                (expected, encoding == "gzip"),
                "{path}: {}",
                reply.text
            );
        }
    }
}

#[tokio::test]
async fn neutral_values_are_accepted() {
    let client = Client::saying("ok").await;
    let neutral = json!({
        "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "best_of": 1, "user": "u",
        "metadata": {"a": "b"}, "repetition_penalty": 1, "min_tokens": 0, "prompt_logprobs": null,
        "response_format": {"type": "text"}, "guided_json": null, "stop": null, "seed": null, "temperature": null,
        "max_tokens": null, "stream": false, "stream_options": null, "ignore_eos": false, "echo": false,
        "logprobs": null, "return_logits": false, "model": "lagoon/scripted", "cache_prompt": true, "id_slot": -1,
        "slot_id": 3, "keep_alive": "5m", "prompt_cache_retention": "24h", "session_id": "s", "rid": "r", "priority": 0,
        "bad_words": [], "allowed_token_ids": null, "truncate_prompt_tokens": null, "include_stop_str_in_output": false,
        "cache_salt": null,
    });
    let in_chat = json!({
        "tools": [], "tool_choice": "none", "parallel_tool_calls": true, "functions": null, "modalities": ["text"],
        "store": false, "service_tier": "auto", "reasoning_effort": null, "chat_template_kwargs": {},
        "verbosity": "medium", "include_reasoning": true, "documents": null, "top_logprobs": 0,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "b", "cache_control": null, "provider_specific_fields": {"a": 1}, "images": []},
            {"role": "user", "content": "c"},
        ],
    });
    let mut completion = neutral.clone();
    completion["prompt"] = json!("a");
    completion["suffix"] = json!(null);
    let reply = client.post("/v1/completions", completion).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let mut chat = neutral;
    chat.as_object_mut().unwrap().extend(in_chat.as_object().unwrap().clone());
    let reply = client.post("/v1/chat/completions", chat).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
}
