//! `/v1/responses`.

use super::{
    Client,
    tools::{CALL, client},
};
use crate::{
    Keys,
    bodies::Bodies,
    scripted::{self, ScriptedEngine, Step},
    translate::names,
};
use lagoon_types::RequestError;
use serde_json::{Value, json};
use std::sync::Arc;

const PATH: &str = "/v1/responses";

fn ask(extra: &Value) -> Value {
    let mut body = json!({"input": "hi", "max_output_tokens": 400});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn tool() -> Value {
    json!({"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}})
}

fn prompt(engine: &Arc<ScriptedEngine>, at: usize) -> String {
    let bytes = engine.requests()[at].prompt.iter().map(|id| u8::try_from(*id).unwrap()).collect();
    String::from_utf8(bytes).unwrap()
}

/// Items without their ids, which begin as their kinds do.
fn stable(output: &Value) -> Value {
    let mut output = output.clone();
    for item in output.as_array_mut().unwrap() {
        let prefix = match item["type"].as_str().unwrap() {
            "reasoning" => "rs_",
            "message" => "msg_",
            _ => "fc_",
        };
        assert!(item["id"].take().as_str().unwrap().starts_with(prefix));
        item.as_object_mut().unwrap().remove("id");
        if let Some(id) = item.as_object_mut().unwrap().remove("call_id") {
            assert!(id.as_str().unwrap().starts_with("call_"));
        }
    }
    output
}

#[tokio::test]
async fn a_response_and_its_events_have_the_same_items() {
    let text: &str = Box::leak(format!("a b\n</think>\n\nI look.{CALL}").into_boxed_str());
    let client = client(&ScriptedEngine::saying(text)).await;
    let body = ask(&json!({"tools": [tool()], "metadata": {"k": "v"}, "instructions": "be brief"}));
    let whole = client.post(PATH, body.clone()).await.json();
    let part = json!({"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []});
    let expected = json!([
        {"type": "reasoning", "status": "completed", "summary": [], "content": [{"type": "reasoning_text", "text": "a b"}]},
        {"type": "message", "status": "completed", "role": "assistant", "content": [part]},
        {"type": "function_call", "status": "completed", "name": "weather", "arguments": "{\"city\":\"Zürich\"}"},
    ]);
    assert_eq!(stable(&whole["output"]), expected);
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    for (field, value) in [
        ("metadata", json!({"k": "v"})),
        ("instructions", json!("be brief")),
        ("max_output_tokens", json!(400)),
        ("tools", json!([tool()])),
        ("model", json!("lagoon/scripted")),
        ("error", Value::Null),
    ] {
        assert_eq!(whole[field], value, "{field}");
    }
    let usage = &whole["usage"];
    assert_eq!(usage["output_tokens"], text.len() + 1);
    // The reasoning's end mark is part of it.
    let reasoning = usage["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((3..=15).contains(&reasoning), "{usage}");

    let mut streamed = body;
    streamed["stream"] = true.into();
    let events = client.events(PATH, streamed).await;
    for (at, (_, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], at);
    }
    let mut kinds: Vec<&str> = events.iter().map(|(name, _)| name.trim_start_matches("response.")).collect();
    kinds.dedup();
    let expected_kinds = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(kinds, expected_kinds);
    assert_eq!(stable(&events.last().unwrap().1["response"]["output"]), expected);
    let deltas = |kind: &str| -> String {
        events.iter().filter(|(name, _)| name == kind).map(|(_, data)| data["delta"].as_str().unwrap()).collect()
    };
    assert_eq!(deltas("response.output_text.delta"), "I look.");
    assert_eq!(deltas("response.reasoning_text.delta"), "a b");
    assert_eq!(deltas("response.function_call_arguments.delta"), "{\"city\":\"Zürich\"}");
}

#[tokio::test]
async fn a_response_at_its_length_is_incomplete_and_one_that_breaks_off_has_failed() {
    let client = Client::saying("abcdef").await;
    let short = json!({"max_output_tokens": 2});
    let whole = client.post(PATH, ask(&short)).await.json();
    assert_eq!(
        (&whole["status"], &whole["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    assert_eq!(whole["output"][0]["status"], "incomplete");
    let mut body = ask(&short);
    body["stream"] = true.into();
    assert_eq!(client.events(PATH, body).await.last().unwrap().0, "response.incomplete");
    let fails = ScriptedEngine::new(|_| {
        Ok(vec![Step::Token(97), Step::Fail(RequestError::Unavailable("the device is lost".to_owned()))])
    });
    let client = Client::of(fails).await;
    let events = client.events(PATH, ask(&json!({"stream": true}))).await;
    let (name, data) = events.last().unwrap();
    assert_eq!((name.as_str(), &data["response"]["status"]), ("response.failed", &json!("failed")));
    assert!(data["response"]["error"]["message"].as_str().unwrap().contains("the device is lost"), "{data}");
    let reply = client.post(PATH, ask(&json!({}))).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (503, &json!("unavailable")));
}

#[tokio::test]
async fn a_conversation_goes_on_from_the_stored_response() {
    let engine = ScriptedEngine::saying("ok");
    let client = Client::of(engine.clone()).await;
    let first = client.post(PATH, ask(&json!({"instructions": "once"}))).await.json();
    let extra = json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "more"}]}], "previous_response_id": first["id"], "stream": true});
    let events = client.events(PATH, ask(&extra)).await;
    let second = events.last().unwrap().1["response"].clone();
    assert_eq!(second["previous_response_id"], first["id"]);
    assert_eq!(prompt(&engine, 1), "user: hi\nassistant: ok\nuser: more\nassistant:");
    let third = json!({"input": "last", "previous_response_id": second["id"], "instructions": "new"});
    assert_eq!(client.post(PATH, ask(&third)).await.status, 200);
    let expected = "system: new\nuser: hi\nassistant: ok\nuser: more\nassistant: ok\nuser: last\nassistant:";
    assert_eq!(prompt(&engine, 2), expected);

    let path = format!("{PATH}/{}", first["id"].as_str().unwrap());
    assert_eq!(client.get(&path).await.json(), first);
    let reply = client.get(&format!("{path}?stream=true")).await;
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("stream")));
    let delete = || client.http.delete(client.url(&path)).send();
    assert_eq!(delete().await.unwrap().status(), 200);
    assert_eq!(delete().await.unwrap().status(), 404);
    assert_eq!(client.get(&path).await.status, 404);
    // Later responses have their turns.
    assert_eq!(client.post(PATH, ask(&third)).await.status, 200);
    let gone = client.post(PATH, ask(&json!({"previous_response_id": first["id"]}))).await;
    assert_eq!((gone.status, &gone.json()["error"]["code"]), (400, &json!("previous_response_not_found")));
    let unstored = client.post(PATH, ask(&json!({"store": false}))).await.json();
    assert_eq!(client.get(&format!("{PATH}/{}", unstored["id"].as_str().unwrap())).await.status, 404);
}

/// A short request may refer to a long conversation: its turns count as what it sends.
#[tokio::test]
async fn a_conversation_is_bounded_and_held_like_a_request() {
    let engine = ScriptedEngine::saying("sixty letters, so that a turn is longer than its own request");
    let long = json!({"input": "a".repeat(60)});
    for (body_bytes_max, bodies, status, code) in [
        (600, Bodies::default(), 200, None),
        (230, Bodies::default(), 400, Some("conversation_too_large")),
        // It is held until the chat's handler has read it.
        (600, Bodies::with_limits(400, 400), 503, Some("unavailable")),
    ] {
        let mut state = scripted::state(engine.clone());
        (state.limits.body_bytes_max, state.bodies) = (body_bytes_max, bodies);
        let client = Client::new(state).await;
        let mut previous = client.post(PATH, long.clone()).await.json();
        assert_eq!(previous["status"], "completed", "{previous}");
        let next = json!({"input": "b".repeat(10), "previous_response_id": previous["id"].take()});
        let reply = client.post(PATH, next).await;
        assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (status, code), "{}", reply.text);
        if status == 400 {
            assert_eq!(reply.json()["error"]["param"], "previous_response_id");
        }
    }
}

#[tokio::test]
async fn a_stored_response_is_its_keys_own() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[[key]]\nname = \"a\"\nkey = \"ka\"\n[[key]]\nname = \"b\"\nkey = \"kb\"\n").unwrap();
    let keys = Arc::new(Keys::new(None, None, Some(file.path().to_owned())).unwrap());
    let url = scripted::spawn_keyed(scripted::state(ScriptedEngine::saying("ok")), keys).await;
    let http = reqwest::Client::new();
    let response = http.post(format!("{url}{PATH}")).bearer_auth("ka").json(&ask(&json!({}))).send().await.unwrap();
    let response: Value = response.json().await.unwrap();
    let one = format!("{url}{PATH}/{}", response["id"].as_str().unwrap());
    for (key, status) in [("kb", 404), ("ka", 200)] {
        assert_eq!(http.get(&one).bearer_auth(key).send().await.unwrap().status(), status);
    }
    let next = ask(&json!({"previous_response_id": response["id"]}));
    let stolen = http.post(format!("{url}{PATH}")).bearer_auth("kb").json(&next).send().await.unwrap();
    assert_eq!(stolen.status(), 400);
}

#[tokio::test]
async fn items_become_the_messages_of_a_chat() {
    let engine = ScriptedEngine::saying("</think>ok");
    let client = client(&engine).await;
    let input = json!([
        {"type": "message", "role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{\"city\": \"Ulm\"}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]);
    let extra = json!({
        "input": input, "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}},
        "temperature": 0.5, "top_p": 0.5, "include": ["reasoning.encrypted_content"], "truncation": "disabled",
        "user": "u", "tool_choice": "auto",
    });
    let reply = client.post(PATH, ask(&extra)).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let called = r#"<think>r</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>"#;
    let expected = format!("<system>be brief<user>hi<assistant>{called}<tool>rainlow<think>");
    assert_eq!(prompt(&engine, 0).replace("\n<", "<").replace("\nlow", "low"), expected);
}

/// Each refusal names the field as the client wrote it.
#[tokio::test]
async fn what_is_not_supported_is_refused_by_name() {
    let client = Client::saying("ok").await;
    let item = |item: Value| json!({"input": [item]});
    for (extra, param) in [
        (json!({"n": 2}), "n"),
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"background": true}), "background"),
        (json!({"metadata": "a"}), "metadata"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"include": ["message.output_text.logprobs"]}), "include"),
        (json!({"reasoning": {"effort": "low"}}), "reasoning.effort"),
        (json!({"reasoning": {"summary": "detailed"}}), "reasoning.summary"),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
        (json!({"tool_choice": {"type": "function", "name": "f"}}), "tool_choice.name"),
        (json!({"tool_choice": {"type": "mcp"}}), "tool_choice.type"),
        (item(json!({"type": "item_reference", "id": "x"})), "input[0].type"),
        (item(json!({"role": "user", "content": [{"type": "input_image"}]})), "input[0].content[0].type"),
        (item(json!({"role": "tool", "content": "a"})), "input[0].role"),
    ] {
        let reply = client.post(PATH, ask(&extra)).await;
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["param"]), (400, &json!(param)), "{extra}: {}", reply.text);
        let named = param.split(['.', '[']).next().unwrap();
        assert!(error["message"].as_str().unwrap().contains(named), "{}", reply.text);
    }
}

#[tokio::test]
async fn the_table_of_fields_is_what_the_endpoint_does() {
    let client = Client::saying("ok").await;
    let [takes, ignores, refuses, required] = names(PATH);
    let unsupported = |text: &str, name: &str| text.contains(&format!("`{name}` is not supported"));
    for name in takes {
        let reply = client.post(PATH, ask(&json!({name: {"x": [1]}}))).await;
        assert!(reply.status == if name == "metadata" { 200 } else { 400 }, "{name}: {}", reply.text);
        assert!(!unsupported(&reply.text, name), "{}", reply.text);
    }
    for name in ignores {
        assert_eq!(client.post(PATH, ask(&json!({name: {"x": [1]}}))).await.status, 200, "{name}");
    }
    for name in refuses {
        let reply = client.post(PATH, ask(&json!({name: {"x": [1]}}))).await;
        assert!(reply.status == 400 && unsupported(&reply.text, name), "{}", reply.text);
    }
    assert_eq!(client.post(PATH, json!({"input": "hi"})).await.status, 200);
    assert_eq!(required, ["input"]);
    let error = client.post(PATH, json!({})).await.json();
    assert_eq!(error["error"]["code"], "missing_required_parameter", "{error}");
}
