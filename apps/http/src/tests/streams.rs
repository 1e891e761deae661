//! Server-sent events, frame by frame.

use super::{Client, Reply, stable};
use crate::scripted::{ScriptedEngine, Step, say};
use lagoon_types::{FinishReason, RequestError};
use serde_json::{Value, json};
use std::time::Duration;

fn ask(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn chat(text: &'static str, extra: Value) -> Reply {
    Client::saying(text).await.post("/v1/chat/completions", ask(extra)).await
}

async fn complete(text: &'static str, extra: Value) -> Reply {
    let mut body = json!({"prompt": "hi", "stream": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    Client::saying(text).await.post("/v1/completions", body).await
}

#[tokio::test]
async fn chat_streams_one_token_a_chunk() {
    let reply = chat("abc", json!({})).await;
    assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
    insta::assert_snapshot!(reply.stable());
}

#[tokio::test]
async fn chat_reports_usage_in_a_last_chunk_without_choices() {
    insta::assert_snapshot!(chat("ab", json!({"stream_options": {"include_usage": true}})).await.stable());
}

#[tokio::test]
async fn chat_logprobs_and_token_ids_ride_on_their_chunk() {
    let extra = json!({"logprobs": true, "top_logprobs": 2, "return_token_ids": true, "max_tokens": 2});
    insta::assert_snapshot!(chat("abc", extra).await.stable());
}

#[tokio::test]
async fn completions_stream_text() {
    insta::assert_snapshot!(complete("abc", json!({"max_tokens": 2})).await.stable());
}

#[tokio::test]
async fn completions_logprobs_offsets_and_ids() {
    let extra = json!({"logprobs": 1, "return_token_ids": true, "return_logits": true, "max_tokens": 2});
    insta::assert_snapshot!(complete("ab", extra).await.stable());
}

#[tokio::test]
async fn an_incomplete_character_waits_for_its_last_byte() {
    insta::assert_snapshot!(complete("é!", json!({})).await.stable());
}

#[tokio::test]
async fn with_token_ids_every_token_has_its_chunk_even_without_text() {
    insta::assert_snapshot!(complete("é!", json!({"return_token_ids": true})).await.stable());
}

#[tokio::test]
async fn a_stop_string_is_cut_and_cancels() {
    let engine = ScriptedEngine::new(|request| {
        let mut steps = say("one END two", request);
        steps.truncate(8);
        steps.push(Step::Hang);
        Ok(steps)
    });
    let client = Client::of(engine.clone()).await;
    let body = ask(json!({"stop": ["nope", "END"], "stream_options": {"include_usage": true}}));
    let reply = client.post("/v1/chat/completions", body).await;
    insta::assert_snapshot!(reply.stable());
    engine.wait_cancelled(1).await;
}

#[tokio::test]
async fn a_failure_in_the_middle_is_a_frame_and_the_end() {
    let engine = ScriptedEngine::new(|_| {
        let failed = RequestError::Unavailable("instance i3 was lost".to_owned());
        Ok(vec![Step::Token(97), Step::Wait(Duration::from_millis(20)), Step::Fail(failed)])
    });
    let client = Client::of(engine).await;
    insta::assert_snapshot!(client.post("/v1/chat/completions", ask(json!({}))).await.stable());
}

#[tokio::test]
async fn a_failure_before_the_first_token_has_its_own_status() {
    let engine = ScriptedEngine::new(|_| {
        let failed = RequestError::Unavailable("the step's deadline passed".to_owned());
        Ok(vec![Step::Wait(Duration::from_millis(20)), Step::Fail(failed)])
    });
    let client = Client::of(engine).await;
    insta::assert_snapshot!(client.post("/v1/chat/completions", ask(json!({}))).await.stable());
}

#[tokio::test]
async fn an_engine_that_drops_a_request_is_a_failure() {
    let client = Client::of(ScriptedEngine::new(|_| Ok(vec![Step::Token(97)]))).await;
    let reply = client.post("/v1/chat/completions", ask(json!({}))).await;
    assert_eq!(reply.status, 200);
    let last = reply.text.trim_end().rsplit("\n\n").next().unwrap();
    insta::assert_snapshot!(last);
}

#[tokio::test]
async fn the_deadline_between_tokens_ends_a_stream() {
    let mut state = crate::scripted::state(ScriptedEngine::new(|_| Ok(vec![Step::Token(97), Step::Hang])));
    state.limits.token_deadline = Duration::from_millis(50);
    let reply = Client::new(state).await.post("/v1/chat/completions", ask(json!({}))).await;
    let last = reply.text.trim_end().rsplit("\n\n").next().unwrap();
    assert!(last.contains("the next token took longer"), "{last}");
    assert!(!reply.text.contains("[DONE]"));
}

#[tokio::test]
async fn headers_do_not_wait_for_a_slow_first_token() {
    let mut state = crate::scripted::state(ScriptedEngine::new(|_| Ok(vec![Step::Hang])));
    state.limits.headers_hold = Duration::from_millis(20);
    let client = Client::new(state).await;
    let request = client.http.post(client.url("/v1/chat/completions")).json(&ask(json!({})));
    let response = tokio::time::timeout(Duration::from_secs(5), request.send()).await.unwrap().unwrap();
    assert_eq!(response.status(), 200);
}

/// A long prompt's stream is silent for minutes.
#[tokio::test]
async fn a_silent_stream_has_comments() {
    let engine = || {
        ScriptedEngine::new(|_| {
            let finish = Step::Finish(FinishReason::Stop);
            Ok(vec![
                Step::Wait(Duration::from_millis(400)),
                Step::Token(97),
                Step::Wait(Duration::from_millis(400)),
                finish,
            ])
        })
    };
    let chat = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": chat})),
        ("/v1/completions", json!({"prompt": "a"})),
        ("/completion", json!({"prompt": "a"})),
        ("/v1/messages", json!({"messages": chat, "max_tokens": 4})),
        ("/v1/responses", json!({"input": "hi"})),
    ] {
        let mut state = crate::scripted::state(engine());
        (state.limits.headers_hold, state.limits.keep_alive) = (Duration::from_millis(20), Duration::from_millis(20));
        let mut body = body.clone();
        body["stream"] = json!(true);
        let reply = Client::new(state).await.post(path, body).await;
        let events: Vec<&str> = reply.text.split_terminator("\n\n").collect();
        let data = events.iter().position(|event| event.contains("data: ")).unwrap();
        assert_eq!(events[0], ": keep-alive", "{path}: {}", reply.text);
        assert!(events[data..].contains(&": keep-alive"), "{path}: {}", reply.text);
        assert!(events.iter().all(|event| *event == ": keep-alive" || event.contains("data: ")), "{}", reply.text);
    }
}

#[tokio::test]
async fn several_sequences_are_distinguished_by_index() {
    let engine = ScriptedEngine::new(|request| {
        let steps = if request.prompt.ends_with(&[98]) { say("B", request) } else { say("A", request) };
        Ok(steps)
    });
    let client = Client::of(engine.clone()).await;
    let body = json!({"prompt": ["a", "b"], "n": 2, "stream": true, "seed": 7, "temperature": 1});
    let reply = client.post("/v1/completions", body).await;
    let mut texts = [const { String::new() }; 4];
    let mut finished = [None; 4];
    for data in reply.text.split("\n\n").filter_map(|frame| frame.strip_prefix("data: {")) {
        let chunk: Value = serde_json::from_str(&format!("{{{data}")).unwrap();
        let choice = &chunk["choices"][0];
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        texts[index].push_str(choice["text"].as_str().unwrap());
        finished[index] = choice["finish_reason"].as_str().map(|_| FinishReason::Stop).or(finished[index]);
    }
    assert_eq!(texts, ["A", "A", "B", "B"]);
    assert!(finished.iter().all(Option::is_some));
    let seeds: Vec<u64> = engine.requests().iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds, [7, 8, 7, 8]);
}

#[test]
fn stable_replaces_ids_and_times_only() {
    let text = r#"{"id":"cmpl-1","object":"x","created":12,"model":"m"}"#;
    assert_eq!(stable(text), r#"{"id":"ID","object":"x","created":0,"model":"m"}"#);
}

/// What the gateway asks for after a loss: the same answer, from where it was.
#[tokio::test]
async fn an_answer_that_was_begun_elsewhere_goes_on() {
    let began = json!({"id": "cmpl-1", "created": 3, "seed": 9});
    let resume = |sequences: Value| json!({"began": began, "sequences": sequences});
    let ask = |resume: Value, extra: Value| {
        let mut body = json!({"prompt": "hi", "stream": true, "max_tokens": 4, "lagoon_resume": resume});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let engine = ScriptedEngine::saying("abcdef");
    let client = Client::of(engine.clone()).await;
    let output = |text: &str| json!([{"tokens": text.bytes().collect::<Vec<u8>>(), "finished": false}]);
    let reply = client.post("/v1/completions", ask(resume(output("ab")), json!({}))).await;
    let texts: Vec<&str> =
        reply.text.split("\"text\":\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert_eq!(texts, ["c", "d", ""], "{}", reply.text);
    assert!(reply.text.contains("\"id\":\"cmpl-1\"") && reply.text.contains("\"created\":3"), "{}", reply.text);
    let request = &engine.requests()[0];
    assert_eq!((request.answered, request.sampling.seed, request.max_tokens), (2, 9, 4));
    assert_eq!(request.prompt, [256, u32::from(b'h'), u32::from(b'i'), u32::from(b'a'), u32::from(b'b')]);
    // All was sent but how it ended; and that, too: the engine is not asked.
    let reply = client.post("/v1/completions", ask(resume(output("abcd")), json!({}))).await;
    assert!(reply.text.contains("\"finish_reason\":\"length\"") && reply.text.ends_with("data: [DONE]\n\n"));
    let over = json!([{"tokens": [97], "finished": true}]);
    let usage = json!({"stream_options": {"include_usage": true}});
    let reply = client.post("/v1/completions", ask(resume(over), usage)).await;
    assert_eq!(reply.text.matches("data: ").count(), 2, "{}", reply.text);
    assert!(reply.text.contains("\"completion_tokens\":1"), "{}", reply.text);
    assert_eq!(engine.requests().len(), 1);
    // What makes no sense is refused by name.
    for (resume, extra) in [
        (resume(output("a")), json!({"stream": false})),
        (resume(json!([{"tokens": [258], "finished": false}])), json!({})),
        (resume(json!([{}, {}])), json!({})),
        (json!({"sequences": []}), json!({})),
        (json!("x"), json!({})),
    ] {
        let reply = client.post("/v1/completions", ask(resume, extra)).await;
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("lagoon_resume")), "{}", reply.text);
    }
}
