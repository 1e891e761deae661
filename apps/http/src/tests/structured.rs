//! Structured output: fields become constraints, conflicts and unsupported schemas are refused by name, calls are enforced.

use super::Client;
use crate::scripted::{self, ScriptedEngine};
use lagoon_text::{
    ChatTemplate, TokenizerConfig,
    parse::{Formats, ToolFormat},
};
use lagoon_types::{Constraint, Grammar};
use serde_json::{Value, json};
use std::{path::Path, sync::Arc};

const TEMPLATE: &str =
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}";

async fn constraint_of(path: &str, extra: Value) -> Option<Arc<Constraint>> {
    let engine = ScriptedEngine::saying("{}");
    let mut body = json!({"max_tokens": 9});
    let chat = json!([{"role": "user", "content": "a"}]);
    let prompt = match path {
        "/v1/chat/completions" => ("messages", chat),
        "/v1/chat/completions/batch" => ("messages", json!([chat])),
        _ => ("prompt", json!("a")),
    };
    body[prompt.0] = prompt.1;
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let template = ChatTemplate::new(Path::new("scripted"), TEMPLATE, &TokenizerConfig::default()).unwrap();
    let formats = Formats { tools: Some(ToolFormat::Hermes), reasoning: None };
    let state = crate::ServerState { template: Some(Arc::new(template)), formats, ..scripted::state(engine.clone()) };
    let reply = Client::new(state).await.post(path, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    engine.requests().remove(0).sampling.constraint
}

fn schema(text: &str) -> Option<Grammar> {
    Some(Grammar::JsonSchema(text.to_owned()))
}

#[tokio::test]
async fn every_field_becomes_a_constraint() {
    for path in ["/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/completion"] {
        for (extra, grammar) in [
            (json!({"response_format": {"type": "text"}}), None),
            (json!({"response_format": {"type": "json_object"}}), schema(r#"{"type":"object"}"#)),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": {"type": "integer"}}}}),
                schema(r#"{"type":"integer"}"#),
            ),
            (json!({"structured_outputs": {"json": {"type": "null"}}}), schema(r#"{"type":"null"}"#)),
            (json!({"structured_outputs": {"json_object": true}}), schema(r#"{"type":"object"}"#)),
            (json!({"structured_outputs": {"regex": "a+"}}), Some(Grammar::Regex("a+".to_owned()))),
            (json!({"guided_json": "{\"type\":\"string\"}"}), schema(r#"{"type":"string"}"#)),
            (json!({"json_schema": {"type": "integer"}}), schema(r#"{"type":"integer"}"#)),
            (json!({"guided_regex": "b"}), Some(Grammar::Regex("b".to_owned()))),
            (json!({"guided_choice": ["x", "y"]}), Some(Grammar::Choice(vec!["x".to_owned(), "y".to_owned()]))),
            (json!({"guided_grammar": "start: \"a\""}), Some(Grammar::Lark("start: \"a\"".to_owned()))),
            (json!({"grammar": "root ::= \"a\""}), Some(Grammar::Lark("root ::= \"a\"".to_owned()))),
            (json!({"grammar": ""}), None),
            (
                json!({"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": true}}),
                schema(r#"{"type":"object","x-guidance":{"whitespace_flexible":false}}"#),
            ),
            (
                json!({"structured_outputs": {"regex": "a", "disable_any_whitespace": true}}),
                Some(Grammar::Regex("a".to_owned())),
            ),
        ] {
            let constraint = constraint_of(path, extra.clone()).await;
            assert_eq!(constraint.map(|of| of.grammar.clone()), grammar, "{extra}");
        }
    }
}

#[tokio::test]
async fn what_cannot_be_enforced_is_refused_by_name() {
    let client = Client::saying("ok").await;
    let of = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}});
    for (extra, param, code) in [
        (
            of(json!({"properties": {"a": {"not": {}}}})),
            "response_format.json_schema.schema.properties.a",
            "unsupported_parameter",
        ),
        (of(json!({"type": 3})), "response_format.json_schema.schema", "invalid_value"),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        (json!({"response_format": {"type": "xml"}}), "response_format.type", "unsupported_parameter"),
        (json!({"response_format": {"type": "json_object", "x": 1}}), "response_format.x", "unsupported_parameter"),
        (json!({"structured_outputs": {}}), "structured_outputs", "invalid_value"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs.choice", "invalid_value"),
        (
            json!({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}),
            "structured_outputs.whitespace_pattern",
            "unsupported_parameter",
        ),
        (json!({"guided_regex": "a", "response_format": {"type": "json_object"}}), "guided_regex", "invalid_value"),
        (json!({"guided_regex": "("}), "guided_regex", "invalid_value"),
        (json!({"guided_regex": "a".repeat(200_000)}), "guided_regex", "invalid_value"),
        (json!({"guided_choice": []}), "guided_choice", "invalid_value"),
        (json!({"guided_choice": "a"}), "guided_choice", "invalid_type"),
        (json!({"guided_choice": vec!["a"; 5000]}), "guided_choice", "invalid_value"),
        (json!({"guided_grammar": "root ::= a"}), "guided_grammar", "invalid_value"),
        (json!({"guided_json": 3}), "guided_json", "invalid_type"),
    ] {
        let mut body = json!({"prompt": "a"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let reply = client.post("/v1/completions", body).await;
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, error["param"].as_str(), error["code"].as_str()),
            (400, Some(param), Some(code)),
            "{}",
            reply.text
        );
    }
}

fn tools(strict: bool) -> Value {
    let of = |name: &str| {
        json!({"type": "function", "function": {"name": name, "strict": strict,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}})
    };
    json!([of("weather"), of("time")])
}

fn lark(constraint: Option<Arc<Constraint>>) -> String {
    match &constraint.expect("a constraint").grammar {
        Grammar::Lark(text) => text.clone(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn calls_that_must_be_made_are_a_grammar() {
    const CHAT: &str = "/v1/chat/completions";
    let all = lark(constraint_of(CHAT, json!({"tools": tools(true), "tool_choice": "required"})).await);
    assert!(all.starts_with("start: calls\n") && all.contains("weather") && all.contains("time"), "{all}");
    let named = json!({"tools": tools(false), "tool_choice": {"type": "function", "function": {"name": "time"}}});
    let named = lark(constraint_of(CHAT, named).await);
    assert!(!named.contains("weather") && !named.contains('*'), "{named}");
    let either = json!({"tools": tools(false), "response_format": {"type": "json_object"}});
    let either = lark(constraint_of(CHAT, either).await);
    assert!(either.starts_with("start: form | calls\n"), "{either}");
    let none = json!({"tools": tools(false), "tool_choice": "none", "guided_regex": "a"});
    assert_eq!(constraint_of(CHAT, none).await.unwrap().grammar, Grammar::Regex("a".to_owned()));
    assert_eq!(constraint_of(CHAT, json!({"tools": tools(false)})).await, None, "calls are the model's choice");
}

#[tokio::test]
async fn what_of_a_tool_no_grammar_stands_for_is_refused_with_its_path() {
    let of = |name: &str, schema: Value| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": schema}}}});
    let tools = json!([of("first", json!({"type": "string"})), of("second", json!({"not": {}}))]);
    let template = ChatTemplate::new(Path::new("scripted"), TEMPLATE, &TokenizerConfig::default()).unwrap();
    let formats = Formats { tools: Some(ToolFormat::Hermes), reasoning: None };
    let engine = ScriptedEngine::saying("{}");
    let state = crate::ServerState { template: Some(Arc::new(template)), formats, ..scripted::state(engine) };
    let client = Client::new(state).await;
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "second"}})] {
        let body = json!({"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice});
        let reply = client.post("/v1/chat/completions", body).await;
        let param = "tools[1].function.parameters.properties.a";
        assert_eq!((reply.status, reply.json()["error"]["param"].as_str()), (400, Some(param)), "{}", reply.text);
    }
}
