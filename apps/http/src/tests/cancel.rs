//! A client that goes away, however it does, leaves nothing running.

use super::Client;
use crate::scripted::{ScriptedEngine, Step};
use futures::StreamExt;
use serde_json::json;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(10);

#[tokio::test]
async fn dropping_a_stream_cancels_every_sequence_of_it() {
    let engine = ScriptedEngine::new(|_| Ok(vec![Step::Token(97), Step::Hang]));
    let client = Client::of(engine.clone()).await;
    let body = json!({"prompt": ["a", "b"], "stream": true});
    let response = client.http.post(client.url("/v1/completions")).json(&body).send().await.unwrap();
    let mut bytes = response.bytes_stream();
    bytes.next().await.unwrap().unwrap();
    assert_eq!(engine.cancelled(), 0);
    drop(bytes);
    tokio::time::timeout(LONG, engine.wait_cancelled(2)).await.expect("both sequences are cancelled");
}

#[tokio::test]
async fn dropping_a_request_that_waits_cancels_it() {
    let engine = ScriptedEngine::new(|_| Ok(vec![Step::Hang]));
    let client = Client::of(engine.clone()).await;
    let request = client.http.post(client.url("/v1/completions")).json(&json!({"prompt": "a"})).send();
    let request = tokio::spawn(request);
    tokio::time::timeout(LONG, engine.wait_submitted(1)).await.unwrap();
    request.abort();
    tokio::time::timeout(LONG, engine.wait_cancelled(1)).await.expect("the request is cancelled");
}

#[tokio::test]
async fn a_client_that_reads_nothing_does_not_grow_the_server() {
    // The engine's channel holds 4 events: the player's progress shows how much the server took from it.
    let engine = ScriptedEngine::new(|request| {
        Ok((0..request.max_tokens).map(|_| Step::Token(97)).chain([Step::Hang]).collect())
    });
    let client = Client::of(engine.clone()).await;
    let body = json!({"prompt": "a", "stream": true, "max_tokens": 1_000_000, "ignore_eos": true});
    let response = client.http.post(client.url("/v1/completions")).json(&body).send().await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let tokens = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("lagoon_generation_tokens_total"));
        line.and_then(|line| line.rsplit(' ').next()).and_then(|value| value.parse::<u64>().ok()).unwrap()
    };
    let before = tokens(&client.get("/metrics").await.text);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let after = tokens(&client.get("/metrics").await.text);
    assert!(after < 500_000, "{after} tokens were taken for a client that reads nothing");
    // Other tests generate a few tokens meanwhile; a server that buffers takes tens of thousands.
    assert!(after - before < 5_000, "{before} then {after}");
    drop(response);
    tokio::time::timeout(LONG, engine.wait_cancelled(1)).await.expect("the request is cancelled");
}

#[tokio::test]
async fn a_refused_sequence_cancels_those_before_it() {
    let engine = ScriptedEngine::new(|request| {
        if request.prompt.ends_with(b"c".map(u32::from).as_slice()) {
            return Err(lagoon_types::RequestError::QueueFull { queued: 2, limit: 2 });
        }
        Ok(vec![Step::Hang])
    });
    let client = Client::of(engine.clone()).await;
    let reply = client.post("/v1/completions", json!({"prompt": ["a", "b", "c"]})).await;
    assert_eq!(reply.status, 429);
    assert_eq!(engine.cancelled(), 2);
}

#[tokio::test]
async fn an_ended_request_is_not_cancelled() {
    let engine = ScriptedEngine::saying("ok");
    let client = Client::of(engine.clone()).await;
    assert_eq!(client.post("/v1/completions", json!({"prompt": "a"})).await.status, 200);
    assert_eq!(client.post("/v1/completions", json!({"prompt": "a", "stream": true})).await.status, 200);
    assert_eq!(engine.cancelled(), 0);
}

#[tokio::test]
async fn shutdown_lets_open_answers_finish() {
    let engine = ScriptedEngine::new(|_| {
        let finish = Step::Finish(lagoon_types::FinishReason::Stop);
        Ok(vec![Step::Token(97), Step::Wait(Duration::from_millis(200)), Step::Token(98), finish])
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/completions", listener.local_addr().unwrap());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let router = crate::router(crate::scripted::state(engine.clone()));
    let server = tokio::spawn(crate::serve(listener, router, async { drop(stopped.await) }));
    let request = reqwest::Client::new().post(&url).json(&json!({"prompt": "a", "stream": true}));
    let response = request.send().await.unwrap();
    stop.send(()).unwrap();
    let text = response.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    tokio::time::timeout(LONG, server).await.unwrap().unwrap().unwrap();
    assert!(reqwest::Client::new().get(&url).send().await.is_err(), "nothing listens any more");
}
