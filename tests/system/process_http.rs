//! The HTTP interface of a real server: answers, and refusals that name the problem.

use crate::process_moves::golden_with_tokenizer;
use crate::process_up::golden_prompt;
use lagoon_tests::golden::Golden;
use lagoon_tests::process::{Client, Server, completion, token_ids};
use serde_json::{Value, json};

fn server(extra: &[&str]) -> (Server, Vec<u32>) {
    let (model, prompt) = golden_prompt();
    let flags = ["--backend=cpu", "--threads=1", "--http=127.0.0.1:0", "--block-tokens=8", "--kv-tokens=64"];
    let server = Server::start(&[&["serve", &model, "--served-model-name=tiny"], &flags[..], extra].concat());
    (server, prompt)
}

/// Asserts that the request is refused with `status`, and the message contains all of `words`.
fn refused(client: &Client, body: &Value, status: u16, words: &[&str]) {
    let answer = client.post("/v1/completions", body);
    assert_eq!(answer.status, status, "{body}: {}", answer.text);
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    for word in words {
        assert!(message.contains(word), "{word:?} in {message:?}");
    }
}

#[test]
fn bad_requests_are_refused_and_the_server_goes_on() {
    let (server, prompt) = server(&[]);
    let client = server.client();
    let answer = client.post_text("/v1/completions", "{\"prompt\": [1, 2".to_owned());
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (400, &json!("invalid_request_error")));
    refused(&client, &completion(&[1], 2, &json!({"model": "gpt-5"})), 404, &["gpt-5", "tiny"]);
    refused(&client, &completion(&[1, 448], 2, &json!({})), 400, &["448", "prompt"]);
    refused(&client, &completion(&[], 2, &json!({})), 400, &["prompt"]);
    refused(&client, &completion(&prompt, 2, &json!({})), 400, &["100", "64"]);
    refused(&client, &completion(&[1], 2, &json!({"suffix": "x"})), 400, &["suffix"]);
    refused(&client, &completion(&[1], 2, &json!({"beam_width": 4})), 400, &["beam_width"]);
    refused(&client, &completion(&[1], 2, &json!({"temperature": "hot"})), 400, &["temperature"]);
    refused(&client, &completion(&[1], 2, &json!({"return_logits": true})), 400, &["--expose-logits"]);
    assert_eq!(client.get("/v1/nothing").status, 404);
    assert_eq!(client.get("/v1/completions").status, 405);
    assert_eq!(token_ids(&client.complete(&prompt[..20], 5, &json!({})).json()).len(), 5);
    client.wait_until("/lagoon/status", "empty", |s| s["blocks_free"] == s["blocks_total"]);
}

#[test]
fn the_key_guards_everything_but_health() {
    let (server, _) = server(&["--api-key=secret"]);
    let client = server.client();
    for path in ["/v1/models", "/metrics", "/lagoon/status"] {
        assert_eq!(client.get(path).status, 401, "{path}");
    }
    let body = completion(&[1, 2], 2, &json!({}));
    assert_eq!(client.post("/v1/completions", &body).status, 401);
    assert_eq!(client.get("/health").status, 200);
    assert_eq!(server.client().with_key("guess").post("/v1/completions", &body).status, 401);
    let client = client.with_key("secret");
    assert_eq!(client.post("/v1/completions", &body).status, 200);
    assert_eq!(client.get("/v1/models").json()["data"][0]["id"], "tiny");
    assert_eq!(client.get("/lagoon/status").status, 200);
}

#[test]
fn a_stream_has_the_text_of_the_whole_answer() {
    let (server, prompt) = server(&[]);
    let client = server.client();
    let whole = client.complete(&prompt[..20], 6, &json!({"logprobs": 2})).json();
    let extra = json!({"stream": true, "stream_options": {"include_usage": true}, "logprobs": 2});
    let (events, done) = client.stream("/v1/completions", &completion(&prompt[..20], 6, &extra)).rest();
    assert!(done);
    let (usage, chunks) = events.split_last().unwrap();
    // One token a chunk; the finish reason comes with the last chunk, which may have no token.
    assert!(chunks.iter().all(|chunk| token_ids(chunk).len() <= 1) && (6..=7).contains(&chunks.len()));
    assert_eq!(usage["choices"].as_array().unwrap().len(), 0);
    // The second prompt is the first one again, of which whole rBlocks are cached.
    for (usage, cached) in [(&whole["usage"], 0), (&usage["usage"], 16)] {
        let mut details = json!({"cached_tokens": cached});
        if cached > 0 {
            details["cached_tokens_details"] = json!({"device": cached, "pool": 0, "host": 0, "disk": 0});
        }
        let expected =
            json!({"prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 26, "prompt_tokens_details": details});
        assert_eq!(*usage, expected);
    }
    assert_eq!(chunks.iter().flat_map(token_ids).collect::<Vec<_>>(), token_ids(&whole));
    let text: String = chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, whole["choices"][0]["text"]);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    let logprobs = &whole["choices"][0]["logprobs"];
    assert_eq!(logprobs["token_logprobs"].as_array().unwrap().len(), 6);
    for (chosen, top) in
        logprobs["token_logprobs"].as_array().unwrap().iter().zip(logprobs["top_logprobs"].as_array().unwrap())
    {
        let best = top.as_object().unwrap().values().filter_map(Value::as_f64).fold(f64::NEG_INFINITY, f64::max);
        assert!(chosen.as_f64().unwrap() <= 0.0 && chosen.as_f64() == Some(best), "{chosen} {top}");
    }
}

#[test]
fn generation_ends_at_stop_tokens_stop_strings_and_the_limit() {
    let (server, prompt) = server(&[]);
    let client = server.client();
    let long = client.complete(&prompt[..20], 12, &json!({})).json();
    let ids = token_ids(&long);
    let text = long["choices"][0]["text"].as_str().unwrap().to_owned();
    // A token that has not occurred before, as a stop id, ends the answer there.
    let at = (1..12).rev().find(|at| !ids[..*at].contains(&ids[*at])).unwrap();
    let stopped = client.complete(&prompt[..20], 12, &json!({"stop_token_ids": [ids[at]]})).json();
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(token_ids(&stopped)[..at], ids[..at]);
    // Before as many tokens, another one takes its place.
    let extra = json!({"stop_token_ids": [ids[at]], "min_tokens": at + 1});
    let longer = token_ids(&client.complete(&prompt[..20], 12, &extra).json());
    assert!(longer.len() > at && !longer[..=at].contains(&ids[at]), "{ids:?}, {longer:?}");
    assert_eq!(longer[..at], ids[..at]);
    let stop: String = text.chars().skip(text.chars().count() / 2).take(2).collect();
    let cut = text.find(&stop).unwrap();
    let stopped = client.complete(&prompt[..20], 12, &json!({"stop": stop})).json();
    assert_eq!(
        (&stopped["choices"][0]["text"], &stopped["choices"][0]["finish_reason"]),
        (&json!(text[..cut]), &json!("stop"))
    );
    assert_eq!(long["choices"][0]["finish_reason"], "length");
}

/// Models such as gpt-oss and Llama 3 have several end-of-sequence ids: each of them ends an answer.
#[test]
fn each_end_of_sequence_id_ends_an_answer() {
    let golden = Golden::load("gpt_oss");
    let (prompt, next) = (&golden.description.tokens, &golden.description.greedy_continuation);
    // Two tokens of the answer, neither of which occurs before its place, nor the first one between them.
    let fresh = |at: &usize| !next[..*at].contains(&next[*at]);
    let pairs = (1..next.len()).filter(fresh).flat_map(|a| (a + 2..next.len()).filter(fresh).map(move |b| (a, b)));
    let (a, b) = pairs.into_iter().find(|(a, b)| !next[a + 1..=*b].contains(&next[*a])).unwrap();
    let model = golden_with_tokenizer(&golden);
    let ids = json!({"eos_token_id": [next[b], next[a]]}).to_string();
    std::fs::write(model.path().join("generation_config.json"), ids).unwrap();
    let flags = ["--backend=cpu", "--threads=1", "--http=127.0.0.1:0", "--block-tokens=8", "--kv-tokens=128"];
    let server = Server::start(&[&["serve", &model.path().to_string_lossy()], &flags[..]].concat());
    let client = server.client();
    let ends = |prompt: &[u32], expected: &[u32]| {
        let answer = client.complete(prompt, 16, &json!({"ignore_eos": false})).json();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        let found = token_ids(&answer);
        assert!(found.len() <= expected.len() && expected.len() <= found.len() + 1, "{found:?}, {expected:?}");
        assert_eq!(found, expected[..found.len()]);
    };
    ends(prompt, &next[..=a]);
    ends(&[prompt.as_slice(), &next[..=a]].concat(), &next[a + 1..=b]);
    let on = client.complete(prompt, 16, &json!({})).json();
    assert_eq!((token_ids(&on).as_slice(), &on["choices"][0]["finish_reason"]), (next.as_slice(), &json!("length")));
}

#[test]
fn text_goes_in_and_out() {
    let (server, _) = server(&[]);
    let client = server.client();
    let tokens = client.post("/tokenize", &json!({"prompt": "hello lagoon", "add_special_tokens": false})).json();
    let count = tokens["count"].as_u64().unwrap();
    assert_eq!(tokens["tokens"].as_array().unwrap().len() as u64, count);
    let text = client.post("/detokenize", &json!({"tokens": tokens["tokens"]})).json();
    assert_eq!(text["prompt"].as_str().unwrap().trim(), "hello lagoon");
    let messages = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": true});
    let chat = client.post("/v1/chat/completions", &messages);
    assert_eq!(chat.status, 200, "{}", chat.text);
    assert_eq!(chat.json()["choices"][0]["message"]["role"], "assistant");
    assert_eq!(chat.json()["usage"]["completion_tokens"], 4);
    assert!(client.get("/version").json()["version"].is_string());
}

/// The model drafts for itself, and is right; another tokenizer is refused.
#[test]
fn a_draft_model_is_checked_and_its_drafts_are_counted() {
    let (model, prompt) = golden_prompt();
    let own = format!("--draft={model}");
    let plain = server(&[]).0.client().complete(&prompt[..20], 20, &json!({"temperature": 0})).json();
    let (server, _) = server(&[&own, "--draft-tokens=3"]);
    let client = server.client();
    let drafted = client.complete(&prompt[..20], 20, &json!({"temperature": 0})).json();
    assert_eq!(token_ids(&drafted), token_ids(&plain));
    let status = client.get("/lagoon/status").json();
    let [drafted, accepted] = ["drafted_tokens", "accepted_tokens"].map(|field| status[field].as_u64().unwrap());
    // On a busy machine a draft may come late, and a lookup, which may be wrong, instead of it.
    assert!(drafted > 6 && accepted > drafted / 2, "{status}");
    let passkey = lagoon_tests::root().join("models/passkey");
    let other = format!("--draft={}", passkey.to_string_lossy());
    for (flags, words) in [
        (vec![other.as_str()], ["cannot draft: token", "hint: "]),
        (vec![&own, "--draft-tokens=0"], ["drafts nothing", "hint: "]),
        (vec![&own, "--kv-groups=on"], ["--kv-groups=on", "hint: "]),
        (vec!["--draft=/nowhere/at-all"], ["/nowhere/at-all", "hint: "]),
    ] {
        let arguments = [&["serve", model.as_str(), "--backend=cpu", "--http=127.0.0.1:0"], &flags[..]].concat();
        let ended = Server::try_start(&arguments).expect_err("it is refused");
        assert!(words.iter().all(|word| ended.stderr.contains(word)), "{flags:?}: {}", ended.stderr);
    }
}
