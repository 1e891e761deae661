//! Tool calls and reasoning in chats.

use super::{Client, Reply};
use crate::scripted::{self, ScriptedEngine};
use lagoon_text::{ChatTemplate, TokenizerConfig};
use serde_json::{Value, json};
use std::{path::Path, sync::Arc};

/// In the manner of Qwen3's template.
const TEMPLATE: &str = r#"{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% if m.content is not none %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}
{% endfor %}{{ reasoning_effort }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% elif add_generation_prompt %}<think>{% endif %}"#;
pub(super) const CALL: &str = r#"<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>"#;

pub(super) async fn client(engine: &Arc<ScriptedEngine>) -> Client {
    let template = ChatTemplate::new(Path::new("scripted"), TEMPLATE, &TokenizerConfig::default()).unwrap();
    let state = scripted::state(engine.clone());
    Client::new(crate::ServerState { formats: template.formats(), template: Some(Arc::new(template)), ..state }).await
}

fn ask(extra: &Value) -> Value {
    let function = json!({"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}});
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000, "tools": [{"type": "function", "function": function}],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn chat(text: &'static str, extra: Value) -> Reply {
    client(&ScriptedEngine::saying(text)).await.post("/v1/chat/completions", ask(&extra)).await
}

/// What a client that collects a stream has at its end, in the shape of a whole choice.
fn collected(reply: &Reply) -> Value {
    let (mut content, mut reasoning, mut calls, mut finish) = (String::new(), String::new(), Vec::new(), Value::Null);
    for line in reply.text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|line| *line != "[DONE]") {
        let chunk: Value = serde_json::from_str(line).unwrap();
        // The last chunk may have the usage alone.
        let Some(choice) = chunk["choices"].get(0) else { continue };
        content.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        reasoning.push_str(choice["delta"]["reasoning_content"].as_str().unwrap_or_default());
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            assert_eq!(call["index"], calls.len());
            calls.push(call["function"].clone());
            // OpenAI's client ends a call at a later chunk.
            assert!(choice["finish_reason"].is_null(), "{chunk}");
        }
        finish = choice["finish_reason"].clone();
    }
    json!({"content": content, "reasoning": reasoning, "calls": calls, "finish": finish})
}

fn whole(reply: &Reply) -> Value {
    let choice = &reply.json()["choices"][0];
    let message = &choice["message"];
    let calls: Vec<Value> =
        message["tool_calls"].as_array().into_iter().flatten().map(|call| call["function"].clone()).collect();
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    let (content, reasoning) = (text("content"), text("reasoning_content"));
    json!({"content": content, "reasoning": reasoning, "calls": calls, "finish": choice["finish_reason"]})
}

#[tokio::test]
async fn reasoning_and_calls_are_taken_out_of_the_text_in_answers_and_streams() {
    let text: &str = Box::leak(format!("a b\n</think>\n\nI look.{CALL}\n{CALL}").into_boxed_str());
    let call = json!({"name": "weather", "arguments": "{\"city\":\"Zürich\"}"});
    let expected = json!({"content": "I look.", "reasoning": "a b", "calls": [call, call], "finish": "tool_calls"});
    let reply = chat(text, json!({})).await;
    assert_eq!(whole(&reply), expected, "{}", reply.text);
    let calls = reply.json()["choices"][0]["message"]["tool_calls"].clone();
    assert!(calls[0]["id"] != calls[1]["id"] && calls[0]["type"] == "function", "{calls}");
    assert_eq!(collected(&chat(text, json!({"stream": true})).await), expected);
    let one = json!({"content": "I look.", "reasoning": "a b", "calls": [call], "finish": "tool_calls"});
    for stream in [false, true] {
        let reply = chat(text, json!({"parallel_tool_calls": false, "stream": stream})).await;
        assert_eq!(if stream { collected(&reply) } else { whole(&reply) }, one);
    }
}

/// A call that only the end of the answer completes, at a stop string, too.
#[tokio::test]
async fn the_end_stands_in_a_chunk_behind_the_calls() {
    let unclosed = &CALL[..CALL.len() - "</tool_call>".len()];
    let open: &str = Box::leak(format!("</think>{unclosed}").into_boxed_str());
    let stopped: &str = Box::leak(format!("</think>{CALL}#{CALL}").into_boxed_str());
    for (text, extra, stop) in [(open, json!({}), Value::Null), (stopped, json!({"stop": "#"}), json!("#"))] {
        let mut extra = extra.clone();
        extra["stream"] = json!(true);
        extra["stream_options"] = json!({"include_usage": true});
        let reply = chat(text, extra).await;
        let call = json!({"name": "weather", "arguments": "{\"city\":\"Zürich\"}"});
        let expected = json!({"content": "", "reasoning": "", "calls": [call], "finish": "tool_calls"});
        assert_eq!(collected(&reply), expected, "{}", reply.text);
        let chunks: Vec<Value> =
            reply.text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
        let end = &chunks[chunks.len() - 2]["choices"][0];
        assert_eq!((&end["delta"], &end["finish_reason"]), (&json!({}), &json!("tool_calls")));
        assert_eq!(end["stop_reason"], stop);
        assert_eq!(
            chunks.last().unwrap()["usage"]["completion_tokens"],
            text.find('#').map_or(text.len() + 1, |at| at + 1)
        );
    }
}

#[tokio::test]
async fn content_is_null_beside_calls_only() {
    let text: &str = Box::leak(format!("</think>{CALL}").into_boxed_str());
    let message = chat(text, json!({})).await.json()["choices"][0]["message"].clone();
    assert!(
        message.as_object().unwrap()["content"].is_null() && message.get("reasoning_content").is_none(),
        "{message}"
    );
}

#[tokio::test]
async fn without_tools_or_with_the_choice_none_text_stays_content() {
    let text: &str = Box::leak(format!("</think>{CALL}").into_boxed_str());
    for extra in [json!({"tool_choice": "none"}), json!({"tools": []})] {
        let expected = json!({"content": CALL, "reasoning": "", "calls": [], "finish": "stop"});
        assert_eq!(whole(&chat(text, extra).await), expected);
    }
    let broken = "</think><tool_call>{\"name\": \"weather\", </tool_call>";
    let expected = json!({"content": &broken[8..], "reasoning": "", "calls": [], "finish": "stop"});
    assert_eq!(whole(&chat(broken, json!({})).await), expected);
    assert_eq!(collected(&chat(broken, json!({"stream": true})).await), expected);
}

#[tokio::test]
async fn the_template_gets_tools_calls_reasoning_and_variables() {
    let engine = ScriptedEngine::saying("</think>ok");
    let client = client(&engine).await;
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Ulm\"}"}});
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]);
    let extra = json!({
        "messages": messages, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false},
    });
    let reply = client.post("/v1/chat/completions", ask(&extra)).await;
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "</think>ok", "the prompt has closed the reasoning");
    let bytes = engine.requests()[0].prompt.iter().map(|id| u8::try_from(*id).unwrap()).collect();
    let prompt = String::from_utf8(bytes).unwrap();
    let tool = r#"{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}"#;
    let called =
        r#"<assistant><think>r</think><tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>"#;
    assert_eq!(prompt, format!("{tool}\n<user>hi{called}<tool>rainlow<think></think>"));
}

#[tokio::test]
async fn a_resumed_stream_goes_on_inside_of_a_call() {
    let text: &str = Box::leak(format!("</think>x{CALL}").into_boxed_str());
    let sent: Vec<u32> = text.bytes().take(40).map(u32::from).collect();
    let resume = json!({"began": {"id": "chatcmpl-1", "created": 1, "seed": 1}, "sequences": [{"tokens": sent, "finished": false}]});
    let reply = chat(text, json!({"stream": true, "lagoon_resume": resume})).await;
    let call = json!({"name": "weather", "arguments": "{\"city\":\"Zürich\"}"});
    let expected = json!({"content": "", "reasoning": "", "calls": [call], "finish": "tool_calls"});
    assert_eq!(collected(&reply), expected, "{}", reply.text);
}

#[tokio::test]
async fn wrong_tool_fields_are_refused_by_name() {
    let client = client(&ScriptedEngine::saying("x")).await;
    let function = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let message = |message: Value| json!({"messages": [message]});
    let call = |function: Value| {
        message(json!({"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}))
    };
    for (extra, param) in [
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "weather"}}}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "other"}}}), "tool_choice.function.name"),
        (json!({"tool_choice": "often"}), "tool_choice"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (function(json!({"name": "a b"})), "tools[0].function.name"),
        (function(json!({"name": "a", "strict": true})), "tools"),
        (function(json!({"name": "a", "parameters": []})), "tools[0].function.parameters"),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
        (json!({"chat_template_kwargs": {"unknown": 1}}), "chat_template_kwargs"),
        (json!({"reasoning_effort": "much"}), "reasoning_effort"),
        (message(json!({"role": "assistant"})), "messages[0].content"),
        (message(json!({"role": "tool", "content": "a"})), "messages[0].tool_call_id"),
        (message(json!({"role": "user", "content": "a", "tool_call_id": "b"})), "messages[0].tool_call_id"),
        (call(json!({"name": "f", "arguments": "[]"})), "messages[0].tool_calls[0].function.arguments"),
        (call(json!({"name": "f", "arguments": {}})), "messages[0].tool_calls[0].function.arguments"),
    ] {
        let reply = client.post("/v1/chat/completions", ask(&extra)).await;
        assert_eq!(
            (reply.status, reply.json()["error"]["param"].as_str()),
            (400, Some(param)),
            "{extra} {}",
            reply.text
        );
    }
}
