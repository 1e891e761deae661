//! The description has every route of the router and every field that its handlers ask for, and no other.

use super::{OPERATIONS, TRANSLATED, document, tables};
use crate::{
    Caller, chats, embeddings,
    fields::{Neutral, asked},
    generations, llama_cpp,
    scripted::{self, ScriptedEngine},
    server,
    state::ServerState,
    text_jobs::Asker,
    tokens,
    translate::names,
};
use axum::body::Bytes;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

#[tokio::test]
async fn every_route_is_described_with_its_method() {
    let described: BTreeSet<String> = OPERATIONS.iter().map(|of| of.path.replace("{id}", "{*id}")).collect();
    let routed: BTreeSet<String> = server::routes().into_iter().map(|(path, _)| path.to_owned()).collect();
    assert_eq!(described, routed);
    let base = scripted::spawn(scripted::state(ScriptedEngine::saying("ok"))).await;
    let http = reqwest::Client::new();
    for of in OPERATIONS {
        let url = format!("{base}{}", of.path.replace("{id}", "lagoon/scripted"));
        let (get, post) = (http.get(&url).send().await.unwrap(), http.post(&url).body("{}").send().await.unwrap());
        let (own, other) = if of.method == "get" { (get, post) } else { (post, get) };
        assert_eq!(other.status(), 405, "{}", of.path);
        assert!(own.status() == 200 || of.method == "post" && own.status() == 400, "{}: {}", of.path, own.status());
    }
    for of in TRANSLATED {
        let url = format!("{base}{}", of.path.replace("{id}", "resp_1"));
        let method = of.method.to_uppercase().parse().unwrap();
        let reply = http.request(method, &url).body("{}").send().await.unwrap();
        let known = reply.status() == 200 || reply.status() == 400 || of.path.contains("{id}") && reply.status() == 404;
        assert!(known && !reply.text().await.unwrap().contains("there is no route"), "{} {}", of.method, of.path);
    }
    let served: Value = http.get(format!("{base}/openapi.json")).send().await.unwrap().json().await.unwrap();
    assert_eq!(served, document());
}

/// Requests that reach every field of their route, which need not be right.
fn requests(path: &str) -> Vec<Value> {
    let chat = json!([{"role": "user", "content": "a"}]);
    match path {
        "/v1/chat/completions" | "/apply-template" => vec![json!({"messages": chat})],
        "/v1/chat/completions/batch" => vec![json!({"messages": [chat]})],
        "/v1/completions" | "/completion" | "/completions" => vec![json!({"prompt": "a"})],
        "/v1/embeddings" => vec![json!({"input": "a"})],
        "/tokenize" => vec![json!({"prompt": "a"}), json!({"messages": chat}), json!({"content": "a"})],
        "/detokenize" => vec![json!({"tokens": [97]})],
        _ => panic!("{path}"),
    }
}

/// Runs the part of a handler that takes the fields.
fn take(state: &ServerState, path: &str, body: Bytes) {
    let (asker, caller) = (Asker::staying(), Caller::default());
    let error = match path {
        "/v1/chat/completions" => chats::chat_prompt(state, body, false, caller, &asker).err(),
        "/v1/chat/completions/batch" => chats::batch_prompts(state, body, false, caller, &asker).err(),
        "/v1/completions" => generations::prompts(state, body, false, caller, &asker).err(),
        "/v1/embeddings" => embeddings::ask_of(state, body, "", &asker).err(),
        "/completion" | "/completions" => llama_cpp::ask(state, body, false, caller, &asker).err(),
        "/tokenize" => tokens::any_tokens_of(state, body, &asker).err(),
        "/detokenize" => tokens::text_of(state, &body, &asker).err(),
        "/apply-template" => llama_cpp::applied(state, body, &asker).err(),
        _ => panic!("{path}"),
    };
    assert_eq!(error, None, "{path}");
}

#[tokio::test]
async fn every_field_that_a_handler_asks_for_is_described() {
    let state = scripted::state(ScriptedEngine::saying("ok"));
    for body in tables::BODIES {
        asked::forget();
        for request in requests(body.path) {
            take(&state, body.path, request.to_string().into());
        }
        let asked = asked::names();
        let fields = body.supported().map(|field| field.name).chain(body.neutral().map(|(name, _)| name));
        let described: BTreeSet<String> = fields.map(str::to_owned).collect();
        let missing: Vec<_> = asked.difference(&described).collect();
        let unknown: Vec<_> = described.difference(&asked).collect();
        assert!(missing.is_empty() && unknown.is_empty(), "{}: missing {missing:?}, unknown {unknown:?}", body.path);
        let mut all: BTreeMap<&str, usize> = BTreeMap::new();
        body.supported().for_each(|field| *all.entry(field.name).or_default() += 1);
        assert!(all.values().all(|n| *n == 1), "{}: {all:?}", body.path);
        assert!(body.required.iter().all(|name| described.contains(*name)), "{}", body.path);
    }
}

#[tokio::test]
async fn fields_listed_as_refused_are_but_for_null() {
    let base = scripted::spawn(scripted::state(ScriptedEngine::saying("ok"))).await;
    let http = reqwest::Client::new();
    for body in tables::BODIES {
        for (name, neutral) in body.neutral() {
            let mut taken = 0;
            for mut request in requests(body.path) {
                let mut post = async |value: Value| {
                    request[name] = value;
                    let reply = http.post(format!("{base}{}", body.path)).json(&request).send().await.unwrap();
                    reply.json::<Value>().await.unwrap()["error"].take()
                };
                if !matches!(neutral, Neutral::Any) {
                    let error = post(json!({"a": 1})).await;
                    let found = (&error["code"], &error["param"]);
                    assert_eq!(found, (&json!("unsupported_parameter"), &json!(name)), "{}: {error}", body.path);
                }
                taken += usize::from(post(Value::Null).await["code"] != "unsupported_parameter");
            }
            assert!(taken > 0, "{} {name}", body.path);
        }
    }
}

#[test]
fn translated_requests_are_described_by_their_tables() {
    let document = document();
    for (route, required) in [
        ("/v1/messages", json!(["messages", "max_tokens"])),
        ("/v1/messages/count_tokens", json!(["messages"])),
        ("/v1/responses", json!(["input"])),
    ] {
        let body = &document["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"];
        let schema = document.pointer(body.as_str().unwrap().trim_start_matches('#')).unwrap();
        assert_eq!(schema["required"], required, "{route}");
        let properties = schema["properties"].as_object().unwrap();
        let described: BTreeSet<&str> = properties.keys().map(String::as_str).collect();
        let [takes, ignores, refuses, _] = names(route);
        assert_eq!(described, [takes, ignores, refuses].concat().into_iter().collect(), "{route}");
        for (name, property) in properties {
            let note = property["description"].as_str().unwrap_or_default();
            assert!(!note.is_empty() && !name.contains('.'), "{route}: {name}: {property}");
        }
    }
}

fn references(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
            if let Some(types) = map.get("type").and_then(Value::as_array) {
                let once: BTreeSet<_> = types.iter().filter_map(Value::as_str).collect();
                assert_eq!(once.len(), types.len(), "{types:?}");
            }
            map.values().for_each(|value| references(value, found));
        }
        Value::Array(list) => list.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

#[test]
fn references_lead_somewhere_and_operations_have_names_of_their_own() {
    let document = document();
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    assert!(found.len() > 10);
    for reference in found {
        let path = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(path).is_some(), "{reference}");
    }
    let ids: BTreeSet<String> = document["paths"]
        .as_object()
        .unwrap()
        .values()
        .flat_map(|path| path.as_object().unwrap().values())
        .map(|of| of["operationId"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(ids.len(), OPERATIONS.len() + TRANSLATED.len());
}
