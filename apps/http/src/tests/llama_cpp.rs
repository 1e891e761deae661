//! llama.cpp's endpoints.

use super::Client;
use crate::scripted::{BOS, EOS, ScriptedEngine, Step, say};
use lagoon_types::{FinishReason, GenerateRequest};
use serde_json::{Value, json};

async fn complete(text: &'static str, body: Value) -> Value {
    let reply = Client::saying(text).await.post("/completion", body).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    reply.json()
}

#[tokio::test]
async fn a_completion_has_its_text_counts_and_times() {
    let answer = complete("two\nlines", json!({"prompt": "ab", "cache_prompt": true, "n_predict": -1})).await;
    assert_eq!(
        (&answer["content"], &answer["stop"], &answer["index"]),
        (&json!("two\nlines"), &json!(true), &json!(0))
    );
    assert_eq!((&answer["tokens_predicted"], &answer["tokens_evaluated"]), (&json!(10), &json!(3)));
    assert_eq!((&answer["stop_type"], &answer["stopping_word"]), (&json!("eos"), &json!("")));
    assert_eq!((&answer["has_new_line"], &answer["truncated"]), (&json!(true), &json!(false)));
    assert_eq!((&answer["model"], &answer["tokens_cached"]), (&json!("lagoon/scripted"), &json!(13)));
    assert_eq!(answer["tokens"], json!([]), "only when they are wanted");
    let timings = &answer["timings"];
    assert_eq!(
        (&timings["prompt_n"], &timings["predicted_n"], &timings["cache_n"]),
        (&json!(3), &json!(10), &json!(0))
    );
    assert!(timings["prompt_ms"].is_number() && timings["predicted_per_second"].is_number());
    assert!(answer.get("completion_probabilities").is_none());

    let answer = complete("abcd", json!({"prompt": "x", "n_predict": 2, "return_tokens": true, "n_probs": 1})).await;
    assert_eq!((&answer["content"], &answer["stop_type"]), (&json!("ab"), &json!("limit")));
    assert_eq!(answer["tokens"], json!([97, 98]));
    let first = &answer["completion_probabilities"][0];
    assert_eq!((&first["id"], &first["token"], &first["bytes"]), (&json!(97), &json!("a"), &json!([97])));
    assert_eq!(first["top_logprobs"][0]["id"], 97);
    assert_eq!(answer["generation_settings"]["n_predict"], 2);
}

#[tokio::test]
async fn a_stop_string_is_named_and_not_part_of_the_text() {
    let answer = complete("say END and more", json!({"prompt": "x", "stop": ["ND", "END"]})).await;
    assert_eq!((&answer["content"], &answer["stop_type"]), (&json!("say "), &json!("word")));
    assert_eq!(answer["stopping_word"], "END");
    assert_eq!(answer["generation_settings"]["stop"], json!(["ND", "END"]));
}

#[tokio::test]
async fn fields_have_llama_cpps_names() {
    let engine = ScriptedEngine::saying("ok");
    let client = Client::of(engine.clone()).await;
    let body = json!({
        "prompt": ["ab", 5, "c"], "n_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.125,
        "repeat_penalty": 1.5, "repeat_last_n": -1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 11,
        "logit_bias": [[65, 2.5], [66, false]], "bad_words": ["q"], "mirostat": 0, "mirostat_tau": 5, "dry_multiplier": 0.0, "typical_p": 1,
        "n_keep": 0, "id_slot": -1, "samplers": [], "grammar": "", "ignore_eos": true,
    });
    let reply = client.post("/completion", body).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let GenerateRequest { prompt, max_tokens, sampling, stop_ids, .. } = engine.requests().remove(0);
    assert_eq!((prompt, max_tokens, stop_ids), (vec![BOS, 97, 98, 5, 99], 7, vec![]));
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p), (0.5, 3, 0.75, 0.125));
    let penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty);
    assert_eq!((penalties, sampling.seed), ((1.5, 0.5, 0.25), 11));
    assert_eq!(
        (&sampling.logit_bias[..], &sampling.bad_words[..]),
        (&[(65, 2.5)][..], &[Box::from([113]), Box::from([66])][..])
    );

    // A seed of -1 is none.
    let seed = async || {
        client.post("/completion", json!({"prompt": "a", "seed": -1})).await;
        engine.requests().last().unwrap().sampling.seed
    };
    assert_ne!(seed().await, seed().await);
    for (field, value) in [
        ("repeat_last_n", json!(64)),
        ("mirostat", json!(2)),
        ("samplers", json!(["top_k"])),
        ("n_probs", json!(21)),
        ("n_predict", json!(-3)),
        ("repeat_penalty", json!(0)),
        ("json_schema", json!({"not": {}})),
        ("grammar", json!("root ::= a")),
        ("prompt_logprobs", json!(1)),
        ("include_stop_str_in_output", json!(true)),
        ("return_logits", json!(true)),
        ("not_a_field", json!(1)),
    ] {
        let mut body = json!({"prompt": "a", "repeat_penalty": 1.1});
        body[field] = value;
        let reply = client.post("/completion", body).await;
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(field)), "{}", reply.text);
    }
    // Without a penalty nothing depends on it.
    let reply = client.post("/completion", json!({"prompt": "a", "repeat_last_n": 64})).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
}

#[tokio::test]
async fn several_prompts_have_a_list_of_answers() {
    let answer = complete("ok", json!({"prompt": ["a", "bcd"], "n_predict": 2})).await;
    let counts: Vec<_> =
        answer.as_array().unwrap().iter().map(|one| (&one["index"], &one["tokens_evaluated"])).collect();
    assert_eq!(counts, [(&json!(0), &json!(2)), (&json!(1), &json!(4))]);
}

#[tokio::test]
async fn n_predict_0_computes_the_prompt_only() {
    let answer = complete("ok", json!({"prompt": "abc", "n_predict": 0, "cache_prompt": true})).await;
    assert_eq!((&answer["content"], &answer["tokens_predicted"]), (&json!(""), &json!(0)));
    assert_eq!((&answer["tokens_evaluated"], &answer["stop_type"]), (&json!(4), &json!("limit")));
}

/// The JSON of every event.
fn events(text: &str) -> Vec<Value> {
    text.split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

#[tokio::test]
async fn a_stream_ends_with_its_stop_and_no_mark() {
    let client = Client::saying("abEND").await;
    let body = json!({"prompt": "x", "stream": true, "stop": ["END"], "timings_per_token": true});
    let reply = client.post("/completion", body).await;
    assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
    assert!(!reply.text.contains("[DONE]"), "{}", reply.text);
    let events = events(&reply.text);
    let texts: Vec<&str> = events.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!(texts.concat(), "ab");
    let (last, before) = events.split_last().unwrap();
    assert!(before.iter().all(|event| event["stop"] == false && event["timings"].is_object()));
    assert_eq!(
        (&last["stop"], &last["stop_type"], &last["stopping_word"]),
        (&json!(true), &json!("word"), &json!("END"))
    );
    assert!(last["timings"]["predicted_n"] == 5 && last["tokens_evaluated"] == 2, "{last}");
    assert!(before[0].get("model").is_none() && last["model"] == "lagoon/scripted");
}

/// As a gateway sends it, and again with what the client has got.
#[tokio::test]
async fn a_stream_is_resumed_where_it_ended() {
    let client = Client::saying("abcd").await;
    let ask = async |body: Value| {
        let request = client.http.post(client.url("/completion")).header("x-lagoon-journal", "1").json(&body);
        request.send().await.unwrap().text().await.unwrap()
    };
    let whole = ask(json!({"prompt": "x", "stream": true})).await;
    assert!(whole.contains(": lagoon \"over\"\n"), "{whole}");
    let mut journal = crate::journal::Journal::default();
    whole.split_inclusive("\n\n").take(2).for_each(|event| _ = journal.read(event.as_bytes()));
    let resume = journal.resume().unwrap();
    let rest = ask(serde_json::from_slice(&resume.request(br#"{"prompt": "x", "stream": true}"#)).unwrap()).await;
    let lines: Vec<&str> = rest.lines().filter(|line| line.starts_with("data: ")).collect();
    let rest: Vec<Value> = lines.iter().map(|line| serde_json::from_str(&line[6..]).unwrap()).collect();
    assert_eq!(rest.iter().map(|event| event["content"].as_str().unwrap()).collect::<String>(), "cd");
    assert_eq!(rest.last().unwrap()["tokens_predicted"], 5);
    let mut journal = crate::journal::Journal::default();
    whole.split_inclusive("\n\n").for_each(|event| _ = journal.read(event.as_bytes()));
    assert!(journal.is_whole() && journal.is_done() && journal.has_ended());
}

#[tokio::test]
async fn a_failed_stream_has_an_error() {
    let engine = ScriptedEngine::new(|request| {
        let mut steps = say("a", request);
        steps.pop();
        steps.push(Step::Finish(FinishReason::Length));
        Ok(if request.prompt[0] == 1 {
            vec![Step::Fail(lagoon_types::RequestError::Internal("x".to_owned()))]
        } else {
            steps
        })
    });
    let client = Client::of(engine).await;
    let reply = client.post("/completion", json!({"prompt": [1], "stream": true})).await;
    assert_eq!(reply.status, 500, "before the first event it is a status: {}", reply.text);
    assert_eq!(client.post("/completion", json!({"prompt": [], "stream": true})).await.status, 400);
}

#[tokio::test]
async fn properties_and_slots_are_shown() {
    let client = Client::saying("ok").await;
    let props = client.get("/props").await.json();
    assert_eq!(props["default_generation_settings"]["n_ctx"], 256);
    assert_eq!(props["default_generation_settings"]["params"]["temperature"], 1.0);
    assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(3), &json!("lagoon/scripted")));
    assert_eq!((&props["bos_token"], &props["eos_token"]), (&json!("<bos>"), &json!("<eos>")));
    assert!(props["chat_template"].as_str().unwrap().contains("add_generation_prompt"));
    let slots = client.get("/slots").await.json();
    assert_eq!(slots.as_array().unwrap().len(), 3);
    assert_eq!((&slots[2]["id"], &slots[2]["n_ctx"]), (&json!(2), &json!(256)));
    assert_eq!(client.get("/models").await.json()["data"][0]["id"], "lagoon/scripted");
}

#[tokio::test]
async fn a_template_is_applied_and_texts_are_tokenised() {
    let client = Client::saying("ok").await;
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let reply = client.post("/apply-template", chat).await;
    assert_eq!(reply.json()["prompt"], "user: hi\nassistant:");
    let tokens = async |body: Value| client.post("/tokenize", body).await.json();
    assert_eq!(tokens(json!({"content": "hi"})).await, json!({"tokens": [104, 105]}));
    assert_eq!(tokens(json!({"content": "h", "add_special": true})).await, json!({"tokens": [BOS, 104]}));
    assert_eq!(tokens(json!({"content": "h", "model": "lagoon/scripted"})).await, json!({"tokens": [104]}));
    let other = client.post("/tokenize", json!({"content": "h", "model": "gpt-5"})).await;
    assert_eq!((other.status, &other.json()["error"]["code"]), (404, &json!("model_not_found")));
    let pieces = tokens(json!({"content": "hé", "with_pieces": true})).await;
    assert_eq!(pieces["tokens"][0], json!({"id": 104, "piece": "h"}));
    assert_eq!(pieces["tokens"][1], json!({"id": 195, "piece": [195]}));
    let reply = client.post("/detokenize", json!({"tokens": [104, 105]})).await.json();
    assert_eq!((&reply["content"], &reply["prompt"]), (&json!("hi"), &json!("hi")));
    assert_eq!(client.post("/tokenize", json!({"content": "a", "parse_special": false})).await.status, 400);
    assert_eq!(u64::from(EOS), 257);
}

/// What its web page sends with a chat.
#[tokio::test]
async fn a_chat_takes_what_the_web_page_sends() {
    let client = Client::saying("ok").await;
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}], "stream": true, "max_tokens": -1, "reasoning_format": "auto",
        "return_progress": true, "timings_per_token": true, "cache_prompt": true, "dynatemp_range": 0,
        "dynatemp_exponent": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "typ_p": 1, "repeat_last_n": 64,
        "repeat_penalty": 1, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    });
    let reply = client.post("/v1/chat/completions", body).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
}
