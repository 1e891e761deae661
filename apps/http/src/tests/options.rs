//! Penalties, excluded tokens, echoed and scored prompts, priorities and tenants.

use super::Client;
use crate::{
    keys::{Keys, TENANT_HEADER},
    scripted::{BOS, EOS, ScriptedEngine, Step, say, spawn_keyed, state},
};
use lagoon_types::CachedTokens;
use serde_json::{Value, json};

async fn complete(text: &'static str, extra: Value) -> Value {
    let client = Client::saying(text).await;
    let mut body = json!({"prompt": "xy"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let reply = client.post("/v1/completions", body).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    reply.json()
}

#[tokio::test]
async fn sampling_fields_arrive_at_the_engine() {
    let engine = ScriptedEngine::saying("ok");
    let client = Client::of(engine.clone()).await;
    let body = json!({
        "prompt": "a", "presence_penalty": -0.5, "frequency_penalty": 1.5, "repetition_penalty": 1.25,
        "allowed_token_ids": [107, 3, 107], "bad_words": [" no", "q"], "priority": -7, "cache_salt": "mine",
    });
    let reply = client.post("/v1/completions", body).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let request = engine.requests().remove(0);
    let sampling = request.sampling;
    let penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty);
    assert_eq!(penalties, (-0.5, 1.5, 1.25));
    assert_eq!(sampling.allowed_token_ids[..], [3, 107]);
    // A byte is a token: a word behind a space has one token more, so that vLLM bans the word alone.
    let words: Vec<&[u32]> = sampling.bad_words.iter().map(|word| &word[..]).collect();
    assert_eq!(words, [&[110, 111][..], &[113]]);
    assert_eq!((request.options.priority, &*request.options.cache_salt), (-7, "\0mine"));
    assert_eq!(request.options.prompt_logprobs, None);
}

#[tokio::test]
async fn values_out_of_range_are_refused_by_name() {
    let client = Client::saying("ok").await;
    for (field, value) in [
        ("presence_penalty", json!(2.1)),
        ("frequency_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("allowed_token_ids", json!([])),
        ("allowed_token_ids", json!([258])),
        ("allowed_token_ids", json!(vec![1; 4097])),
        ("bad_words", json!("no")),
        ("bad_words", json!([" "])),
        ("bad_words", json!(["a".repeat(65)])),
        ("bad_words", json!(vec!["a"; 129])),
        ("truncate_prompt_tokens", json!(0)),
        ("prompt_logprobs", json!(21)),
        ("priority", json!(1.5)),
        ("cache_salt", json!("a".repeat(257))),
        ("include_stop_str_in_output", json!(1)),
        ("echo", json!("yes")),
    ] {
        let reply = client.post("/v1/completions", json!({"prompt": "a", field: value})).await;
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(field)), "{}", reply.text);
    }
    let streamed = json!({"prompt": "a", "stream": true, "prompt_logprobs": 1});
    assert_eq!(client.post("/v1/completions", streamed).await.json()["error"]["param"], "prompt_logprobs");
}

#[tokio::test]
async fn what_ends_an_answer_is_in_it_on_request() {
    let text = |answer: &Value| answer["choices"][0]["text"].as_str().unwrap().to_owned();
    let stop = json!({"stop": ["cd"], "include_stop_str_in_output": true});
    assert_eq!(text(&complete("abcde", stop).await), "abcd");
    let id = json!({"stop_token_ids": [99], "include_stop_str_in_output": true});
    assert_eq!(text(&complete("abc", id).await), "abc");
    let eos = json!({"include_stop_str_in_output": true, "skip_special_tokens": false});
    assert_eq!(text(&complete("ab", eos).await), "ab<eos>");
}

#[tokio::test]
async fn a_prompt_is_cut_to_its_last_tokens() {
    let engine = ScriptedEngine::saying("ok");
    let client = Client::of(engine.clone()).await;
    let long = "z".repeat(600);
    for (prompt, tokens) in [(json!("abcd"), 2), (json!([1, 2, 3]), 2), (json!("ab"), 9), (json!(long), -1)] {
        let body = json!({"prompt": prompt, "truncate_prompt_tokens": tokens});
        let reply = client.post("/v1/completions", body).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
    }
    let prompts: Vec<_> = engine.requests().into_iter().map(|request| request.prompt).collect();
    assert_eq!(prompts[..3], [vec![99, 100], vec![2, 3], vec![BOS, 97, 98]]);
    // 512 tokens of context less 16 of the answer.
    assert_eq!(prompts[3], vec![122; 496]);
}

#[tokio::test]
async fn an_echoed_prompt_begins_the_answer() {
    let text = |answer: &Value| answer["choices"][0]["text"].as_str().unwrap().to_owned();
    assert_eq!(text(&complete("ab", json!({"echo": true})).await), "xyab");
    assert_eq!(text(&complete("ab", json!({"prompt": [104, 105], "echo": true})).await), "hiab");
    let only = complete("ab", json!({"echo": true, "max_tokens": 0, "logprobs": 0})).await;
    assert_eq!((text(&only), &only["usage"]["completion_tokens"]), ("xy".to_owned(), &json!(0)));
    assert_eq!(only["choices"][0]["finish_reason"], "length");
    assert_eq!(only["choices"][0]["logprobs"]["tokens"], json!(["<bos>", "x", "y"]));
    let both = complete("ab", json!({"echo": true, "logprobs": 1, "max_tokens": 2})).await;
    assert_eq!(
        both["choices"][0]["logprobs"],
        json!({
            "tokens": ["<bos>", "x", "y", "a", "b"],
            "token_logprobs": [null, -2.5, -2.5, -0.25, -0.25],
            "top_logprobs": [null, {"?": -0.125, "x": -2.5}, {"?": -0.125, "y": -2.5}, {"a": -0.25}, {"b": -0.25}],
            "text_offset": [0, 5, 6, 7, 8],
        })
    );
    let client = Client::saying("ab").await;
    let body = json!({"prompt": "xy", "echo": true, "logprobs": 1, "max_tokens": 2, "stream": true});
    let stream = client.post("/v1/completions", body).await.text;
    let frames: Vec<Value> =
        stream.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
    assert_eq!((text(&frames[0]), text(&frames[1])), ("xya".to_owned(), "b".to_owned()));
    assert_eq!(frames[0]["choices"][0]["logprobs"]["text_offset"], json!([0, 5, 6, 7]));
    assert_eq!(frames[1]["choices"][0]["logprobs"]["text_offset"], json!([8]));
}

#[tokio::test]
async fn log_probabilities_of_a_prompt_have_vllms_shape() {
    let scored = |id: &str, token: &str| {
        json!({id: {"logprob": -2.5, "rank": 2, "decoded_token": token},
            "63": {"logprob": -0.125, "rank": 1, "decoded_token": "?"}})
    };
    let expected = json!([null, scored("120", "x"), scored("121", "y")]);
    let answer = complete("ab", json!({"prompt_logprobs": 1, "n": 2})).await;
    assert_eq!(answer["choices"][0]["prompt_logprobs"], expected);
    assert_eq!(answer["choices"][1]["prompt_logprobs"], expected);
    let engine = ScriptedEngine::saying("ab");
    let client = Client::of(engine.clone()).await;
    let body = json!({"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0, "n": 2});
    let answer = client.post("/v1/chat/completions", body).await.json();
    let prompt = engine.requests()[0].prompt.len();
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), prompt);
    assert_eq!(answer["prompt_logprobs"][1].as_object().unwrap().len(), 1);
    // Computed once, for all sequences of the prompt.
    let asked: Vec<_> = engine.requests().iter().map(|request| request.options.prompt_logprobs).collect();
    assert_eq!(asked, [Some(0), None]);
}

#[tokio::test]
async fn usage_names_cached_tokens_and_comes_with_every_chunk_on_request() {
    let found = CachedTokens { device: 1, pool: 2, host: 3, disk: 4 };
    let engine = ScriptedEngine::new(move |request| Ok([vec![Step::Cached(found)], say("ab", request)].concat()));
    let client = Client::of(engine).await;
    let whole = client.post("/v1/completions", json!({"prompt": "xy", "n": 2})).await.json();
    let places = json!({"device": 1, "pool": 2, "host": 3, "disk": 4});
    let details = json!({"cached_tokens": 10, "cached_tokens_details": places});
    assert_eq!(whole["usage"]["prompt_tokens_details"], details, "of one of the answers: it is the same prompt");
    let two = client.post("/v1/completions", json!({"prompt": ["xy", "xz"]})).await.json();
    let twice = json!({"device": 2, "pool": 4, "host": 6, "disk": 8});
    assert_eq!(two["usage"]["prompt_tokens_details"], json!({"cached_tokens": 20, "cached_tokens_details": twice}));
    let response = client.post("/v1/responses", json!({"input": "xy"})).await.json();
    assert_eq!(response["usage"]["input_tokens_details"], details);
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = json!({"prompt": "xy", "stream": true, "stream_options": options});
    let stream = client.post("/v1/completions", body).await.text;
    let frames = stream.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    let counts: Vec<_> = frames.map(|frame| frame["usage"]["completion_tokens"].as_u64()).collect();
    // Two tokens of text, the end, and the last chunk.
    assert_eq!(counts, [Some(1), Some(2), Some(3), Some(3)]);
}

#[tokio::test]
async fn a_key_is_a_tenant_that_no_other_can_name() {
    let engine = ScriptedEngine::saying("ok");
    let base = spawn_keyed(state(engine.clone()), Keys::single("secret")).await;
    let http = reqwest::Client::new();
    let send = |salt: &str| {
        let body = json!({"prompt": "a", "cache_salt": salt});
        http.post(format!("{base}/v1/completions"))
            .bearer_auth("secret")
            .header(TENANT_HEADER, "other")
            .json(&body)
            .send()
    };
    for salt in ["", "mine"] {
        assert_eq!(send(salt).await.unwrap().status(), 200);
    }
    // Where no key is checked, a gateway has done it.
    let open = Client::of(engine.clone()).await;
    let ask = open.http.post(open.url("/v1/completions")).header(TENANT_HEADER, "alice").json(&json!({"prompt": "a"}));
    assert_eq!(ask.send().await.unwrap().status(), 200);
    assert_eq!(open.post("/v1/completions", json!({"prompt": "a"})).await.status, 200);
    let salts: Vec<_> = engine.requests().iter().map(|request| request.options.cache_salt.to_string()).collect();
    assert_eq!(salts, ["--api-key\0", "--api-key\0mine", "alice\0", ""]);
    assert_eq!(engine.requests()[0].stop_ids, [EOS]);
}
