//! `/v1/embeddings`: shapes of inputs and answers, limits, failures.

use super::Client;
use crate::scripted::{self, BOS, ScriptedEngine, Step};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use lagoon_types::{FinishReason, GenerateRequest, Pooling, RequestError};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

const PATH: &str = "/v1/embeddings";

/// An engine whose hidden state of a prompt is (3, 4, its length, 12).
fn engine() -> Arc<ScriptedEngine> {
    ScriptedEngine::new(|request: &GenerateRequest| {
        let len = u16::try_from(request.prompt.len()).unwrap();
        Ok(vec![Step::Embedding(vec![3.0, 4.0, f32::from(len), 12.0]), Step::Finish(FinishReason::Stop)])
    })
}

fn numbers(reply: &Value, index: usize) -> Vec<f64> {
    assert_eq!(reply["data"][index]["index"], index);
    serde_json::from_value(reply["data"][index]["embedding"].clone()).unwrap()
}

fn near(numbers: &[f64], expected: &[f64]) -> bool {
    numbers.len() == expected.len() && numbers.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6)
}

#[tokio::test]
async fn every_shape_of_input_is_embedded_in_its_order() {
    let engine = engine();
    let client = Client::of(Arc::clone(&engine)).await;
    for (input, prompts) in [
        (json!("ab"), vec![vec![BOS, 97, 98]]),
        (json!(["a", "bcd"]), vec![vec![BOS, 97], vec![BOS, 98, 99, 100]]),
        (json!([5, 6]), vec![vec![5, 6]]),
        (json!([[5], [6, 7]]), vec![vec![5], vec![6, 7]]),
    ] {
        let before = engine.requests().len();
        let reply = client.post(PATH, json!({"input": input, "model": "lagoon/scripted", "user": "u"})).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        let answer = reply.json();
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("lagoon/scripted")));
        let tokens: usize = prompts.iter().map(Vec::len).sum();
        assert_eq!(
            (&answer["usage"]["prompt_tokens"], &answer["usage"]["total_tokens"]),
            (&json!(tokens), &json!(tokens))
        );
        for (index, prompt) in prompts.iter().enumerate() {
            let len = prompt.len() as f64;
            let length = (169.0 + len * len).sqrt();
            assert!(near(&numbers(&answer, index), &[3.0, 4.0, len, 12.0].map(|x| x / length)), "{answer}");
        }
        let requests = &engine.requests()[before..];
        assert_eq!(requests.iter().map(|request| request.prompt.clone()).collect::<Vec<_>>(), prompts);
        assert!(requests.iter().all(|r| r.max_tokens == 0 && r.options.embedding == Some(Pooling::Last)));
    }
}

#[tokio::test]
async fn dimensions_are_cut_before_the_length_is_1() {
    let client = Client::of(engine()).await;
    let embed = |fields: Value| {
        let mut body = json!({"input": [0, 0]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let client = &client;
        async move { client.post(PATH, body).await }
    };
    let answer = embed(json!({"dimensions": 2})).await.json();
    assert!(near(&numbers(&answer, 0), &[0.6, 0.8]), "{answer}");
    let answer = embed(json!({"dimensions": 2, "normalize": false})).await.json();
    assert_eq!(numbers(&answer, 0), [3.0, 4.0]);
    let answer = embed(json!({"encoding_format": "base64", "normalize": false})).await.json();
    let bytes = STANDARD.decode(answer["data"][0]["embedding"].as_str().unwrap()).unwrap();
    let floats: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(floats, [3.0, 4.0, 2.0, 12.0]);
    for (fields, param) in [
        (json!({"dimensions": 0}), "dimensions"),
        (json!({"dimensions": 5}), "dimensions"),
        (json!({"encoding_format": "int8"}), "encoding_format"),
        (json!({"endianness": "big"}), "endianness"),
        (json!({"embed_dtype": "float16"}), "embed_dtype"),
        (json!({"stream": true}), "stream"),
    ] {
        let reply = embed(fields).await;
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{}", reply.text);
    }
}

#[tokio::test]
async fn inputs_are_bounded_and_checked() {
    let client = Client::of(engine()).await;
    let refused = async |input: Value| {
        let reply = client.post(PATH, json!({"input": input})).await;
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("input")), "{}", reply.text);
        reply.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    assert!(refused(json!([])).await.contains("must not be empty"));
    assert!(refused(json!([[]])).await.contains("without tokens"));
    assert!(refused(json!([[1, 258]])).await.contains("the vocabulary has 258"));
    assert!(refused(json!({"a": 1})).await.contains("must be a string"));
    assert!(refused(json!(vec!["a"; 2049])).await.contains("at most 2048"));
    let reply = client.post(PATH, json!({"input": vec![7; 513]})).await;
    assert_eq!(reply.json()["error"]["code"], "context_length_exceeded", "{}", reply.text);
    // The whole context is room for a prompt: nothing is generated.
    assert_eq!(client.post(PATH, json!({"input": vec![7; 512]})).await.status, 200);
    let reply = client.post(PATH, json!({"input": vec![7; 600], "truncate_prompt_tokens": -1})).await;
    assert_eq!(reply.json()["usage"]["prompt_tokens"], 512, "{}", reply.text);

    let mut state = scripted::state(engine());
    state.embeddings.dimensions = 4096;
    let client = Client::new(state).await;
    let reply = client.post(PATH, json!({"input": vec!["a"; 1025]})).await;
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(reply.status == 400 && message.contains("at most 1024 of 4096 numbers"), "{message}");
}

#[tokio::test]
async fn a_request_holds_few_places_of_the_queue() {
    let engine = ScriptedEngine::new(|_| Ok(vec![Step::Hang]));
    let client = Client::of(Arc::clone(&engine)).await;
    let asked = tokio::spawn(async move { client.post(PATH, json!({"input": vec!["a"; 100]})).await });
    engine.wait_submitted(16).await;
    tokio::task::yield_now().await;
    assert_eq!(engine.requests().len(), 16);
    asked.abort();
    engine.wait_cancelled(16).await;
}

#[tokio::test]
async fn a_failure_has_its_status_and_ends_the_others() {
    let engine = ScriptedEngine::new(|request: &GenerateRequest| match request.prompt[0] {
        1 => Ok(vec![Step::Hang]),
        2 => Ok(vec![Step::Fail(RequestError::Unavailable("the device was lost".to_owned()))]),
        3 => Err(RequestError::QueueFull { queued: 4, limit: 4 }),
        4 => Ok(vec![Step::Embedding(vec![f32::NAN; 4]), Step::Finish(FinishReason::Stop)]),
        _ => Ok(vec![Step::Finish(FinishReason::Stop)]),
    });
    let client = Client::of(Arc::clone(&engine)).await;
    for (input, status, code) in [
        (json!([[2], [1]]), 503, "unavailable"),
        (json!([[3], [1]]), 429, "queue_full"),
        (json!([[4], [1]]), 500, "internal_error"),
        (json!([[5]]), 500, "internal_error"),
    ] {
        let reply = timeout(Duration::from_secs(30), client.post(PATH, json!({"input": input}))).await;
        let reply = reply.expect("a failure does not wait for the other inputs");
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (status, &json!(code)), "{}", reply.text);
        assert_eq!(reply.headers.contains_key("retry-after"), status == 429);
    }
    engine.wait_cancelled(2).await;
}

#[tokio::test]
async fn a_model_that_is_pooled_otherwise_has_no_embeddings() {
    let mut state = scripted::state(engine());
    state.embeddings.pooling = Err("`pooling_mode_max_tokens` is true".to_owned());
    let client = Client::new(state).await;
    let reply = client.post(PATH, json!({"input": "a"})).await;
    let error = &reply.json()["error"];
    assert_eq!((reply.status, &error["code"]), (400, &json!("unsupported_model")));
    assert!(error["message"].as_str().unwrap().contains("pooling_mode_max_tokens"), "{error}");
}
