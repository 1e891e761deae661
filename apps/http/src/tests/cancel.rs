//! A client that goes away, however it does, leaves nothing running.

use super::Client;
use crate::scripted::{ScriptedEngine, Step};
use crate::stalls::Stalls;
use futures::StreamExt;
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
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
    let chat = json!([{"role": "user", "content": "a"}]);
    for (path, body, sequences) in [
        ("/v1/completions", json!({"prompt": "a"}), 1),
        ("/v1/chat/completions/batch", json!({"messages": [chat, chat, chat]}), 3),
    ] {
        let engine = ScriptedEngine::new(|_| Ok(vec![Step::Hang]));
        let client = Client::of(engine.clone()).await;
        let request = tokio::spawn(client.http.post(client.url(path)).json(&body).send());
        tokio::time::timeout(LONG, engine.wait_submitted(sequences)).await.unwrap();
        request.abort();
        tokio::time::timeout(LONG, engine.wait_cancelled(sequences)).await.expect("every sequence is cancelled");
    }
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
    // The sockets' buffers fill up, in seconds on a busy machine; a server that buffers goes on to the last token.
    let stopped = async {
        let mut before = 0;
        loop {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let tokens = engine.tokens();
            if tokens > 0 && tokens == before {
                return tokens;
            }
            before = tokens;
        }
    };
    let tokens = tokio::time::timeout(LONG, stopped).await.expect("the server stops taking tokens");
    assert!(tokens < 500_000, "{tokens} tokens were taken for a client that reads nothing");
    drop(response);
    tokio::time::timeout(LONG, engine.wait_cancelled(1)).await.expect("the request is cancelled");
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_cut_off_after_a_while() {
    let engine = ScriptedEngine::new(|request| Ok((0..request.max_tokens).map(|_| Step::Token(97)).collect()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/completions", listener.local_addr().unwrap());
    let router = crate::router(crate::scripted::state(engine.clone()));
    let server = tokio::spawn(async move {
        let stream = Stalls::new(listener.accept().await.unwrap().0, Duration::from_millis(50));
        http1::Builder::new().serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).await
    });
    let body = json!({"prompt": "a", "stream": true, "max_tokens": 10_000_000, "ignore_eos": true});
    let response = reqwest::Client::new().post(url).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let cut = tokio::time::timeout(LONG, server).await.expect("the connection is closed").unwrap();
    assert!(cut.is_err(), "it does not end well");
    tokio::time::timeout(LONG, engine.wait_cancelled(1)).await.expect("the request is cancelled");
    drop(response);
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
    let server = tokio::spawn(crate::serve(crate::Port::plain(listener, crate::Keys::none()), router, async {
        drop(stopped.await)
    }));
    let request = reqwest::Client::new().post(&url).json(&json!({"prompt": "a", "stream": true}));
    let response = request.send().await.unwrap();
    stop.send(()).unwrap();
    let text = response.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    tokio::time::timeout(LONG, server).await.unwrap().unwrap().unwrap();
    assert!(reqwest::Client::new().get(&url).send().await.is_err(), "nothing listens any more");
}
