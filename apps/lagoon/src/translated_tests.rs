//! `/v1/messages` and `/v1/responses` at the gateway: instances get chat requests, and are lost in the middle of answers.

use crate::gateway::tests::{backend, gateway_with};
use crate::replay::ReplayLimits;
use crate::replay::tests::{TEXT, cut_after, limits};
use crate::scripted::{self, ScriptedEngine};
use serde_json::{Value, json};
use std::sync::Arc;

/// The text without what differs between two runs: ids and times.
fn stable(text: &str) -> String {
    let mut out = String::new();
    let is_id = |run: &str| run.len() >= 24 && run.chars().all(|c| c.is_ascii_hexdigit());
    for piece in text.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
        let end = piece.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).len();
        let (run, rest) = piece.split_at(end);
        out.push_str(if is_id(run) { "ID" } else { run });
        out.push_str(rest);
    }
    match out.split_once("\"created_at\":") {
        None => out,
        Some(_) => {
            out.split("\"created_at\":").map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit())).collect()
        }
    }
}

async fn ask(url: &str, route: &str, body: &Value) -> (u16, String) {
    let response = reqwest::Client::new().post(format!("{url}{route}")).json(body).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

#[tokio::test]
async fn a_translated_answer_that_is_cut_at_any_event_is_the_same() {
    let message = json!({"model": "lagoon/scripted", "max_tokens": 40, "messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["§"]});
    for (route, mut body) in
        [("/v1/messages", message), ("/v1/responses", json!({"input": "hi", "max_output_tokens": 40}))]
    {
        let servers =
            [ScriptedEngine::saying(TEXT), ScriptedEngine::saying(TEXT)].map(|engine| scripted::state(engine));
        let [first, second] = servers.map(scripted::spawn);
        let (first, second) = (first.await, second.await);
        for stream in [true, false] {
            body["stream"] = stream.into();
            let (status, undisturbed) = ask(&first, route, &body).await;
            assert_eq!(status, 200, "{undisturbed}");
            assert!(undisturbed.contains("漢") && !undisturbed.contains(": lagoon"), "{undisturbed}");
            for cut in 0..TEXT.chars().count() {
                let cutting = cut_after(&first, cut).await;
                let backends = vec![backend("cut", &cutting, 1_000_000), backend("whole", &second, 1)];
                let url = gateway_with(Arc::new(backends), limits()).await;
                let (status, text) = ask(&url, route, &body).await;
                assert_eq!(status, 200, "{text}");
                assert_eq!(stable(&text), stable(&undisturbed), "cut after {cut} events");
            }
        }
    }
}

#[tokio::test]
async fn responses_are_stored_at_the_gateway() {
    let engines = [ScriptedEngine::saying("one"), ScriptedEngine::saying("one")];
    let mut backends = Vec::new();
    for (at, engine) in engines.iter().enumerate() {
        backends.push(backend(&format!("i{at}"), &scripted::spawn(scripted::state(engine.clone())).await, 100));
    }
    let url = gateway_with(Arc::new(backends), ReplayLimits::default()).await;
    let mut previous = Value::Null;
    for _ in 0..4 {
        let (status, text) =
            ask(&url, "/v1/responses", &json!({"input": "hi", "previous_response_id": previous})).await;
        assert_eq!(status, 200, "{text}");
        previous = serde_json::from_str::<Value>(&text).unwrap()["id"].take();
    }
    let requests: Vec<_> = engines.iter().flat_map(|engine| engine.requests()).collect();
    assert!(engines.iter().all(|engine| engine.requests().len() == 2), "all instances served");
    let turn = "user: hi\nassistant: one\n".len();
    let mut lengths: Vec<usize> = requests.iter().map(|request| request.prompt.len()).collect();
    lengths.sort_unstable();
    let first = "user: hi\nassistant:".len();
    assert_eq!(lengths, [first, first + turn, first + 2 * turn, first + 3 * turn]);
    let one = format!("{url}/v1/responses/{}", previous.as_str().unwrap());
    assert_eq!(reqwest::get(&one).await.unwrap().status(), 200);
    let (status, text) = ask(&url, "/v1/messages", &json!({"max_tokens": 4, "messages": []})).await;
    assert!(status == 400 && text.starts_with("{\"type\":\"error\""), "{text}");
    let count = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(ask(&url, "/v1/messages/count_tokens", &count).await, (200, format!("{{\"input_tokens\":{first}}}")));
}
