//! `/v1/messages` and `/v1/messages/count_tokens`.

use super::{
    Client,
    tools::{CALL, client},
};
use crate::{
    Keys,
    scripted::{self, ScriptedEngine, Step, say},
    translate::names,
};
use lagoon_types::{CachedTokens, FinishReason, RequestError};
use serde_json::{Value, json};
use std::sync::Arc;

const PATH: &str = "/v1/messages";

fn ask(extra: &Value) -> Value {
    let mut body =
        json!({"model": "lagoon/scripted", "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn tool() -> Value {
    json!({"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}})
}

fn prompt(engine: &Arc<ScriptedEngine>) -> String {
    let bytes = engine.requests()[0].prompt.iter().map(|id| u8::try_from(*id).unwrap()).collect();
    String::from_utf8(bytes).unwrap()
}

/// The message that a client has after a stream, by Anthropic's rules.
fn collected(events: &[(String, Value)]) -> Value {
    let mut message = Value::Null;
    for (name, data) in events {
        let index = data["index"].as_u64().map_or(0, |index| usize::try_from(index).unwrap());
        match name.as_str() {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                let blocks = message["content"].as_array_mut().unwrap();
                assert_eq!(blocks.len(), index);
                blocks.push(data["content_block"].clone());
            }
            "content_block_delta" => {
                let (block, delta) = (&mut message["content"][index], &data["delta"]);
                let (to, from) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", "text"),
                    "thinking_delta" => ("thinking", "thinking"),
                    "input_json_delta" => ("json", "partial_json"),
                    other => panic!("{other}"),
                };
                let text = block[to].as_str().unwrap_or_default().to_owned() + delta[from].as_str().unwrap();
                block[to] = text.into();
            }
            "content_block_stop" => {
                let block = &mut message["content"][index];
                if let Some(text) = block.as_object_mut().unwrap().remove("json") {
                    block["input"] = serde_json::from_str(text.as_str().unwrap()).unwrap();
                }
            }
            "message_delta" => {
                for field in ["stop_reason", "stop_sequence"] {
                    message[field] = data["delta"][field].clone();
                }
                message["usage"] = data["usage"].clone();
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    message
}

fn stable(mut message: Value) -> Value {
    assert!(message["id"].take().as_str().unwrap().starts_with("msg_"));
    for block in message["content"].as_array_mut().unwrap() {
        if block["type"] == "tool_use" {
            assert!(block["id"].take().as_str().unwrap().starts_with("call_"));
        }
    }
    message
}

#[tokio::test]
async fn a_message_and_its_stream_have_the_same_content() {
    let text: &str = Box::leak(format!("a b\n</think>\n\nI look.{CALL}").into_boxed_str());
    let client = client(&ScriptedEngine::saying(text)).await;
    let body = ask(&json!({"tools": [tool()]}));
    let whole = client.post(PATH, body.clone()).await;
    assert_eq!(whole.headers["content-type"], "application/json");
    let expected = json!({
        "id": null, "type": "message", "role": "assistant", "model": "lagoon/scripted",
        "content": [
            {"type": "thinking", "thinking": "a b", "signature": ""}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": null, "name": "weather", "input": {"city": "Zürich"}},
        ],
        "stop_reason": "tool_use", "stop_sequence": null,
        "usage": {"input_tokens": 188, "cache_read_input_tokens": 0, "output_tokens": text.len() + 1},
    });
    let mut got = stable(whole.json());
    assert!(got["usage"]["input_tokens"].as_u64().unwrap() > 100);
    got["usage"]["input_tokens"] = 188.into();
    assert_eq!(got, expected);
    let mut streamed = body;
    streamed["stream"] = true.into();
    let events = client.events(PATH, streamed).await;
    let kinds: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((kinds[0], kinds[1]), ("message_start", "content_block_start"));
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let start = &events[0].1["message"];
    assert!(start["usage"]["input_tokens"].as_u64().unwrap() > 100 && start["stop_reason"].is_null(), "{start}");
    let mut got = stable(collected(&events));
    got["usage"]["input_tokens"] = 188.into();
    assert_eq!(got, expected);
}

#[tokio::test]
async fn the_reasons_of_an_end() {
    for (extra, reason, stop, content) in [
        (json!({}), "end_turn", Value::Null, "one, two"),
        (json!({"max_tokens": 3}), "max_tokens", Value::Null, "one"),
        (json!({"stop_sequences": ["x", ", "]}), "stop_sequence", json!(", "), "one"),
    ] {
        let client = Client::saying("one, two").await;
        for stream in [false, true] {
            let mut body = ask(&extra);
            body["stream"] = stream.into();
            let message =
                if stream { collected(&client.events(PATH, body).await) } else { client.post(PATH, body).await.json() };
            assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&reason.into(), &stop), "{message}");
            assert_eq!(message["content"], json!([{"type": "text", "text": content}]));
        }
    }
    let cached = ScriptedEngine::new(|request| {
        Ok([vec![Step::Cached(CachedTokens::on_device(5_u32))], say("a", request)].concat())
    });
    let usage = Client::of(cached).await.post(PATH, ask(&json!({}))).await.json()["usage"].clone();
    assert_eq!(usage, json!({"input_tokens": 14, "cache_read_input_tokens": 5, "output_tokens": 2}));
    let nothing = Client::saying("").await.post(PATH, ask(&json!({}))).await.json();
    assert_eq!((&nothing["content"], &nothing["stop_reason"]), (&json!([]), &json!("end_turn")));
}

#[tokio::test]
async fn blocks_become_the_messages_of_a_chat() {
    let engine = ScriptedEngine::saying("</think>ok");
    let client = client(&engine).await;
    let cached = json!({"type": "ephemeral"});
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": cached}, {"type": "text", "text": "you"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "r", "signature": "s"}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Ulm"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}], "is_error": true},
            {"type": "text", "text": "and?"},
        ]},
        {"role": "user", "content": "now"},
    ]);
    let extra = json!({
        "messages": messages, "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
        "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "metadata": {"user_id": "u"},
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "cache_control": cached, "service_tier": "auto",
    });
    let reply = client.post(PATH, ask(&extra)).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let called = r#"<think>r</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>"#;
    let expected = format!(
        "<system>be\nbrief\n<user>hi\nyou\n<assistant>{called}\n<tool>Error:\nrain\n<user>and?\nnow\nlow<think></think>"
    );
    assert_eq!(prompt(&engine).replace("\n<", "<"), expected.replace("\n<", "<").replace("\nlow", "low"));
    let sampling = &engine.requests()[0].sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.5, 0.5, 3));
    // The same prompt is counted.
    let mut counted = ask(&extra);
    let fields = counted.as_object_mut().unwrap();
    for name in ["max_tokens", "metadata", "temperature", "top_p", "top_k", "service_tier"] {
        fields.remove(name);
    }
    let count = client.post("/v1/messages/count_tokens", counted).await.json();
    assert_eq!(count, json!({"input_tokens": engine.requests()[0].prompt.len()}));
}

#[tokio::test]
async fn thinking_is_the_templates_variable_or_refused() {
    let enabled = json!({"thinking": {"type": "enabled", "budget_tokens": 2000}});
    let engine = ScriptedEngine::saying("ok");
    let reply = client(&engine).await.post(PATH, ask(&enabled)).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert!(prompt(&engine).ends_with("<think>"));
    // The plain template has no reasoning: it cannot be turned on, and is off.
    let client = Client::saying("ok").await;
    let reply = client.post(PATH, ask(&enabled)).await;
    assert_eq!(reply.status, 400);
    assert!(reply.json()["error"]["message"].as_str().unwrap().contains("`thinking.type`"), "{}", reply.text);
    for kind in ["disabled", "adaptive"] {
        assert_eq!(client.post(PATH, ask(&json!({"thinking": {"type": kind}}))).await.status, 200);
    }
}

/// Each refusal names the field as the client wrote it.
#[tokio::test]
async fn what_is_not_supported_is_refused_by_name_in_anthropics_shape() {
    let client = Client::saying("ok").await;
    let user = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    for (extra, name) in [
        (json!({"n": 2}), "n"),
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"stop_sequences": [""]}), "stop"),
        (json!({"service_tier": "priority"}), "service_tier"),
        (json!({"mcp_servers": [{}]}), "mcp_servers"),
        (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "tools[0].type"),
        (json!({"tools": [{"name": "f", "input_schema": {}, "x": 1}]}), "tools[0].x"),
        (json!({"tools": [{"name": "a b", "input_schema": {}}]}), "tools[0].name"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
        (json!({"tools": [{"name": "f", "input_schema": {}}]}), "tools"),
        (json!({"tool_choice": {"type": "some"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "tool", "name": "f"}}), "tool_choice.name"),
        (json!({"thinking": {"type": "enabled", "display": "omitted"}}), "thinking.display"),
        (json!({"output_config": {"effort": "low"}}), "output_config.effort"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "system", "content": "a"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "assistant", "content": "a"}]}), "messages"),
        (user(json!({"type": "image", "source": {}})), "messages[0].content[0].type"),
        (user(json!({"type": "tool_use", "id": "a", "name": "f", "input": {}})), "messages[0].content[0].type"),
        (user(json!({"type": "text", "text": "a", "citations": [{}]})), "messages[0].content[0].citations"),
        (json!({"messages": [{"role": "user", "content": "refuse me"}]}), "not this"),
    ] {
        let reply = client.post(PATH, ask(&extra)).await;
        assert_eq!(reply.status, 400, "{extra}: {}", reply.text);
        let error = reply.json();
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(name) && !message.contains("function"), "{name}: {message}");
    }
}

#[tokio::test]
async fn the_table_of_fields_is_what_the_endpoint_does() {
    let client = Client::saying("ok").await;
    for path in [PATH, "/v1/messages/count_tokens"] {
        let [takes, ignores, refuses, required] = names(path);
        let base = |name: &str, value: Value| {
            let mut body = ask(&json!({}));
            if path != PATH {
                body.as_object_mut().unwrap().remove("max_tokens");
            }
            body[name] = value;
            body
        };
        for name in takes {
            // No field has this value: it is read.
            let reply = client.post(path, base(name, json!({"x": [1]}))).await;
            assert_eq!(reply.status, 400, "{name}: {}", reply.text);
            let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(!message.contains(&format!("`{name}` is not supported")), "{message}");
        }
        for name in ignores {
            assert_eq!(client.post(path, base(name, json!({"x": [1]}))).await.status, 200, "{name}");
        }
        for name in refuses {
            let reply = client.post(path, base(name, json!({"x": [1]}))).await;
            assert!(
                reply.status == 400 && reply.text.contains(&format!("`{name}` is not supported")),
                "{}",
                reply.text
            );
        }
        let whole = json!({"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
        let mut least = json!({});
        required.iter().for_each(|name| least[name] = whole[name].clone());
        assert_eq!(client.post(path, least.clone()).await.status, 200, "{least}");
        for name in required {
            let mut body = least.clone();
            body.as_object_mut().unwrap().remove(name);
            let reply = client.post(path, body).await;
            assert!(reply.status == 400 && reply.text.contains(&format!("`{name}` is required")), "{}", reply.text);
        }
    }
}

#[tokio::test]
async fn errors_have_anthropics_types_and_a_stream_that_fails_says_so() {
    let client = Client::saying("ok").await;
    let reply = client.post(PATH, ask(&json!({"model": "other"}))).await;
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (404, &json!("not_found_error")));
    let reply = client.get(PATH).await;
    assert_eq!((reply.status, &reply.json()["type"]), (405, &json!("error")));
    let full = ScriptedEngine::new(|_| Err(RequestError::QueueFull { queued: 1, limit: 1 }));
    let reply = Client::of(full).await.post(PATH, ask(&json!({"stream": true}))).await;
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (429, &json!("rate_limit_error")));
    assert_eq!(reply.headers["retry-after"], "1");
    let fails = || {
        ScriptedEngine::new(|_| {
            Ok(vec![Step::Token(97), Step::Fail(RequestError::Unavailable("the device is lost".to_owned()))])
        })
    };
    let events = Client::of(fails()).await.events(PATH, ask(&json!({"stream": true}))).await;
    let (name, data) = events.last().unwrap();
    assert_eq!((name.as_str(), &data["error"]["type"]), ("error", &json!("overloaded_error")));
    assert!(events.iter().any(|(name, _)| name == "content_block_delta"));
    let reply = Client::of(fails()).await.post(PATH, ask(&json!({}))).await;
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (503, &json!("overloaded_error")), "{}", reply.text);
}

#[tokio::test]
async fn a_key_may_be_in_x_api_key() {
    let url = scripted::spawn_keyed(scripted::state(ScriptedEngine::saying("ok")), Keys::single("secret")).await;
    for (key, status) in [(None, 401), (Some("wrong"), 401), (Some("secret"), 200)] {
        let mut request = reqwest::Client::new().post(format!("{url}{PATH}")).header("anthropic-version", "2023-06-01");
        if let Some(key) = key {
            request = request.header("x-api-key", key);
        }
        let reply = super::Reply::of(request.json(&ask(&json!({}))).send().await.unwrap()).await;
        assert_eq!(reply.status, status);
        if status == 401 {
            assert_eq!(reply.json()["error"]["type"], "authentication_error", "{}", reply.text);
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_message() {
    let engine = ScriptedEngine::new(|_| Ok(vec![Step::Token(97), Step::Hang, Step::Finish(FinishReason::Stop)]));
    let client = Client::of(engine.clone()).await;
    let request = client.http.post(client.url(PATH)).json(&ask(&json!({"stream": true})));
    let mut response = request.send().await.unwrap();
    assert!(response.chunk().await.unwrap().unwrap().starts_with(b"event: message_start\n"));
    drop(response);
    engine.wait_cancelled(1).await;
}
