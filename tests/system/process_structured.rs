//! Structured output of real processes: a stream through a pool with a prefill worker and killed instances, as if nothing had
//! happened, and inside of its schema.

use lagoon_tests::faults::{FaultPool, STEP, Watched, number, passkey, prompt};
use lagoon_tests::partition::Place;
use lagoon_types::FinishReason;
use serde_json::{Value, json};

const VOCAB: u32 = 1022;

fn schema(words: u32) -> Value {
    json!({"type": "array", "items": {"type": "string", "minLength": 6, "maxLength": 9}, "minItems": words, "maxItems": words})
}

#[test]
fn a_schema_holds_over_a_pool_a_prefill_worker_and_a_killed_instance() {
    let role = |name: &str| Place::default().with(&format!("--role={name}"));
    let mut pool = FaultPool::without_members(&passkey(), 16, "127.0.0.1", Some(STEP));
    pool.start(&[("p0", 160, role("prefill")), ("d0", 24, role("decode")), ("d1", 24, role("decode"))]);
    ["d0", "d1"].iter().for_each(|name| drop(pool.wait(name, "connected", |s| number(s, "prefill/workers") == 1)));
    let undisturbed = pool.undisturbed(160);
    let gateway = pool.gateway();
    let format = json!({"type": "json_schema", "json_schema": {"name": "words", "schema": schema(40), "strict": true}});
    let extra = json!({"response_format": format, "temperature": 0.8, "seed": 5});

    // As many tokens as the answer surely has.
    let stream = Watched::start(gateway.announced("http").parse().unwrap(), &prompt(70, 600, VOCAB), 70, &extra);
    let busy = loop {
        let runs = |name: &&&str| pool.status(name)["sequences"].as_array().is_some_and(|all| !all.is_empty());
        if let Some(name) = ["d0", "d1"].iter().find(runs) {
            break *name;
        }
        assert!(!stream.is_over(), "nobody ran it");
    };
    stream.wait_for(20);
    assert!(stream.tokens() < 70, "it was over before it was disturbed");
    pool.kill(busy);
    stream.finish("a killed instance", &undisturbed);

    // With as much white space as the grammar allows, too, twelve words fit.
    let client = gateway.client();
    let ask = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "words"}], "max_tokens": 1500, "temperature": 0.8, "seed": 6});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        client.post("/v1/chat/completions", &body)
    };
    let answer = ask(
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "words", "schema": schema(12)}}}),
    )
    .json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], json!(FinishReason::Stop), "{answer}");
    let words: Vec<String> = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
    assert!(words.len() == 12 && words.iter().all(|word| (6..=9).contains(&word.chars().count())), "{words:?}");

    let refused = ask(json!({"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": {"items": {"not": {}}}}}})).json();
    assert_eq!(refused["error"]["param"], "response_format.json_schema.schema.items", "{refused}");
    let chosen = ask(json!({"structured_outputs": {"choice": ["left", "right"]}})).json();
    assert!(["left", "right"].contains(&chosen["choices"][0]["message"]["content"].as_str().unwrap()), "{chosen}");
    pool.wait_empty();
}
