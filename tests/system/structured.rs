//! Structured output: answers stay inside of their grammar wherever and however often they are computed, and are those of one
//! undisturbed instance.

use lagoon_tests::ascii::{END, TOKENIZER};
use lagoon_tests::cluster::check::error_of;
use lagoon_tests::cluster::compare::{assert_equals_single, prompt, single};
use lagoon_tests::cluster::{Log, PoolSpec, Spec, World, greedy};
use lagoon_types::{Constraint, FinishReason, GenerateRequest, Grammar, Reasoning, RequestError};
use serde_json::Value;
use std::sync::Arc;

const SCHEMA: &str = r#"{"type": "object", "properties": {
    "name": {"type": "string", "minLength": 3, "maxLength": 9}, "sizes": {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 999}, "minItems": 3, "maxItems": 5},
    "kind": {"enum": ["north", "south"]}}, "required": ["name", "sizes", "kind"], "additionalProperties": false}"#;
/// Tokens of the longest answer, without white space between its parts.
const LONGEST: u32 = 90;

fn constrained(request: GenerateRequest, grammar: Grammar) -> GenerateRequest {
    let mut request = GenerateRequest { stop_ids: vec![END], ..request };
    request.sampling.constraint = Some(Arc::new(Constraint { grammar, reasoning: None }));
    // No endless white space between the parts.
    request.sampling.logit_bias = [(0, -1000.0)].into();
    request
}

fn asks(seed: u64, tokens: usize) -> GenerateRequest {
    constrained(greedy(prompt(seed, tokens, 127), LONGEST), Grammar::JsonSchema(SCHEMA.to_owned()))
}

fn text(tokens: &[u32]) -> String {
    TOKENIZER.decode(tokens, true)
}

fn assert_valid(log: &Log) {
    let text = text(&log.tokens);
    let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let length = value["name"].as_str().unwrap().chars().count();
    let sizes = value["sizes"].as_array().unwrap();
    assert!((3..=9).contains(&length) && (3..=5).contains(&sizes.len()), "{text}");
    assert!(sizes.iter().all(|size| (10..=999).contains(&size.as_i64().unwrap())), "{text}");
    assert!(["north", "south"].contains(&value["kind"].as_str().unwrap()), "{text}");
    assert_eq!(log.end, Some(Ok(FinishReason::Stop)), "{text}");
}

#[test]
fn batched_and_preempted_answers_stay_inside_of_their_grammar() {
    let pool = PoolSpec::golden("head_dim_64", 4);
    let mut world = World::single(pool.clone(), Spec::cpu(40));
    (0..4).for_each(|seed| _ = world.submit(0, asks(seed, 12)));
    let free = world.submit(0, greedy(prompt(9, 12, 128), 20));
    world.run();
    assert!(world.live(0).status().preemptions > 0, "nothing was preempted");
    assert_equals_single("preempted in a grammar", &world, &pool);
    world.requests[..free].iter().for_each(assert_valid);
    assert_eq!(world.requests[free].tokens.len(), 20, "those beside are free");
    world.check_empty();
}

#[test]
fn answers_over_a_creditor_stay_inside_of_their_grammar() {
    let pool = PoolSpec::golden("llama3_old", 4);
    for drafts in [0, 6] {
        let spec = |blocks| Spec { drafts, ..Spec::cpu(blocks) };
        let mut world = World::pool(pool.clone(), Some(7), &[spec(8), spec(60)]);
        (0..2).for_each(|seed| _ = world.submit(0, asks(seed, 20)));
        world.run();
        assert!(world.sent("partial").0 > 0, "it borrows");
        assert_equals_single(&format!("pooled, {drafts} drafts"), &world, &pool);
        world.requests.iter().for_each(assert_valid);
        world.check_empty();
    }
}

/// Drafts are proposed where an answer repeats itself: rejected ones leave the matcher where it was.
#[test]
fn drafts_stay_inside_of_the_grammar() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let list = r#"{"type": "array", "items": {"enum": ["north", "south-west"]}, "minItems": 9, "maxItems": 9}"#;
    let mut world = World::single(pool.clone(), Spec { drafts: 8, ..Spec::cpu(80) });
    for seed in 0..3 {
        let request = greedy(prompt(seed, 20, 127), 200);
        world.submit(0, constrained(request, Grammar::JsonSchema(list.to_owned())));
    }
    world.run();
    let status = world.live(0).status();
    assert!(status.accepted_tokens > 0 && status.accepted_tokens < status.drafted_tokens, "both kinds must be there");
    assert_equals_single("drafts", &world, &pool);
    for log in &world.requests {
        let value: Value = serde_json::from_str(&text(&log.tokens)).unwrap();
        assert_eq!(value.as_array().unwrap().len(), 9, "{value}");
        assert_eq!(log.end, Some(Ok(FinishReason::Stop)));
    }
    world.check_empty();
}

/// The prefill worker draws the first token, and knows whether the grammar has ended with it.
#[test]
fn a_prefill_worker_draws_the_first_token_inside_of_the_grammar() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let mut world = World::pool(pool.clone(), None, &[Spec::prefill(80), Spec::decode(80)]);
    world.run_until(|w| w.live(1).status().prefill.workers == 1);
    world.submit(1, asks(1, 50));
    world.run();
    let one = constrained(greedy(prompt(2, 50, 127), 5), Grammar::Choice(vec!["x".to_owned(), "q".to_owned()]));
    let short = world.submit(1, GenerateRequest { stop_ids: Vec::new(), ..one });
    let mut part = asks(1, 50);
    part.prompt.extend(&world.requests[0].tokens[..20]);
    part.answered = 20;
    let replayed = world.submit(1, part);
    world.run();
    assert_equals_single("prefilled elsewhere", &world, &pool);
    let (worker, decoder) = (world.live(0).status().prefill, world.live(1).status().prefill);
    // The KV of an answer of one token is not read.
    assert_eq!((worker.jobs_done, decoder.pulled, decoder.own), (3, 2, 0), "the worker computed the prompts");
    assert_valid(&world.requests[0]);
    let (short, replayed) = (&world.requests[short], &world.requests[replayed]);
    assert!(["x", "q"].contains(&text(&short.tokens).as_str()) && short.end == Some(Ok(FinishReason::Stop)));
    assert_eq!(replayed.tokens, world.requests[0].tokens[20..]);
    world.check_empty();
}

/// As the gateway replays it: part of the answer comes with the prompt, all of it even.
#[test]
fn a_replayed_answer_goes_on_in_its_grammar() {
    let pool = PoolSpec::golden("head_dim_64", 4);
    let whole = single(&pool, &[GenerateRequest { stop_ids: Vec::new(), ..asks(3, 12) }]).remove(0);
    for answered in [1, whole.tokens.len() / 2, whole.tokens.len()] {
        let mut request = whole.request.clone();
        request.prompt.extend(&whole.tokens[..answered]);
        request.answered = answered as u32;
        let mut world = World::single(pool.clone(), Spec::cpu(60));
        let id = world.submit(0, request);
        world.run();
        assert_eq!(world.requests[id].tokens, whole.tokens[answered..], "{answered}");
        assert_eq!(world.requests[id].end, Some(Ok(FinishReason::Stop)), "{answered}");
    }
}

#[test]
fn reasoning_is_free_before_the_grammar() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let mut world = World::single(pool.clone(), Spec::cpu(60));
    let free = single(&pool, &[greedy(prompt(4, 20, 127), 12)]).remove(0).tokens;
    let close = free[5];
    let behind = free.iter().position(|token| *token == close).unwrap() + 1;
    let mut request =
        constrained(greedy(prompt(4, 20, 127), 40), Grammar::Choice(vec!["[yes]".to_owned(), "[no]".to_owned()]));
    request.sampling.logit_bias = Arc::default();
    let reasoning = Reasoning { is_open: true, ends: vec![close], ..Reasoning::default() };
    let constraint = request.sampling.constraint.take().unwrap();
    request.sampling.constraint = Some(Arc::new(Constraint { reasoning: Some(reasoning), ..(*constraint).clone() }));
    let id = world.submit(0, request);
    world.run();
    let (thought, answer) = world.requests[id].tokens.split_at(behind);
    assert_eq!(thought, &free[..behind]);
    assert!(["[yes]", "[no]"].contains(&text(answer).as_str()), "{answer:?}");
}

/// What cannot go on fails alone, with the reason.
#[test]
fn answers_that_cannot_go_on_fail_alone() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let mut world = World::single(pool.clone(), Spec::cpu(60));
    let beside = world.submit(0, greedy(prompt(1, 20, 128), 12));
    let mut outside = asks(2, 20);
    outside.prompt.extend([3, 4]);
    outside.answered = 2;
    let outside = world.submit(0, outside);
    let broken = constrained(greedy(prompt(3, 20, 127), 9), Grammar::JsonSchema(r#"{"not": {}}"#.to_owned()));
    let broken = world.submit(0, broken);
    let mut banned = constrained(greedy(prompt(3, 20, 127), 9), Grammar::Choice(vec!["a".to_owned()]));
    banned.sampling.bad_words = [Box::from([65])].into();
    let banned = world.submit(0, banned);
    world.run();
    assert_eq!(world.requests[beside].tokens.len(), 12);
    for (id, why) in [(outside, "does not go on"), (broken, "`not`"), (banned, "leave no token")] {
        let RequestError::Invalid(message) = error_of(&world.requests[id]) else { panic!("{id}") };
        assert!(message.contains(why), "{message}");
    }
    world.check_empty();
}
