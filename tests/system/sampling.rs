//! Sampling and reports that depend on more than the last logits: penalties, excluded tokens, log-probabilities of prompts.
//! They are the same wherever the KV is, and however often it was computed.

use lagoon_tests::cluster::check::error_of;
use lagoon_tests::cluster::compare::{assert_equals_single, f32_tolerance, prompt, single};
use lagoon_tests::cluster::{Log, PoolSpec, Spec, World, greedy};
use lagoon_types::{GenerateRequest, PromptLogprob, RequestError};
use serde_json::Value;

fn penalised(seed: u64) -> GenerateRequest {
    let mut request = greedy(prompt(50 + seed, 10, 128), 20);
    request.sampling.presence_penalty = 0.75;
    request.sampling.frequency_penalty = 0.5;
    request.sampling.repetition_penalty = 1.5;
    request
}

/// The token that vLLM's formulas choose from the model's own logits at each place.
fn assert_penalised(log: &Log) {
    let sampling = &log.request.sampling;
    for (at, logits) in log.logits.iter().enumerate() {
        let answer = &log.tokens[..at];
        let adjusted = logits.iter().zip(0u32..).map(|(&logit, id)| {
            let count = answer.iter().filter(|token| **token == id).count() as f32;
            let repeated = count > 0.0 || log.request.prompt.contains(&id);
            let by = if repeated { sampling.repetition_penalty } else { 1.0 };
            let logit = if logit < 0.0 { logit * by } else { logit / by };
            logit - sampling.frequency_penalty * count - if count > 0.0 { sampling.presence_penalty } else { 0.0 }
        });
        let adjusted: Vec<f32> = adjusted.collect();
        let best = adjusted.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert!(best - adjusted[log.tokens[at] as usize] < 1e-5, "token {at}: {} is not {best}", log.tokens[at]);
    }
}

#[test]
fn preempted_requests_keep_their_penalties() {
    let pool = PoolSpec::golden("head_dim_64", 4);
    let mut world = World::single(pool.clone(), Spec::cpu(12));
    (0..4).for_each(|seed| _ = world.submit(0, penalised(seed)));
    world.run();
    assert!(world.live(0).status().preemptions > 0, "nothing was preempted");
    assert_equals_single("preempted with penalties", &world, &pool);
    world.requests.iter().for_each(assert_penalised);
    let plain = single(&pool, &[greedy(prompt(50, 10, 128), 20)]);
    assert_ne!(plain[0].tokens, world.requests[0].tokens, "penalties change an answer");
    world.check_empty();
}

/// As the gateway replays it: part of the answer comes with the prompt, and counts as generated.
#[test]
fn a_replayed_answer_goes_on_with_its_penalties() {
    let pool = PoolSpec::golden("head_dim_64", 4);
    let whole = single(&pool, &[penalised(0)]).remove(0);
    for answered in [1, 7, 19] {
        let mut request = penalised(0);
        request.prompt.extend(&whole.tokens[..answered]);
        request.answered = answered as u32;
        let mut world = World::single(pool.clone(), Spec::cpu(30));
        let id = world.submit(0, request);
        world.run();
        assert_eq!(world.requests[id].tokens, whole.tokens[answered..], "{answered}");
    }
}

/// A request whose own rules leave no token fails alone: those beside it go on.
#[test]
fn a_request_that_excludes_every_token_fails_alone() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let mut world = World::single(pool.clone(), Spec::cpu(60));
    let beside = world.submit(0, greedy(prompt(1, 20, 128), 12));
    let mut request = greedy(prompt(2, 20, 128), 12);
    request.sampling.allowed_token_ids = [5, 9].into();
    let allowed = world.submit(0, request.clone());
    request.sampling.bad_words = [Box::from([5]), Box::from([9, 9, 9])].into();
    let thrice = world.submit(0, request.clone());
    request.sampling.bad_words = [Box::from([5]), Box::from([9])].into();
    let none = world.submit(0, request);
    world.run();
    assert!(world.requests[allowed].tokens.iter().all(|token| [5, 9].contains(token)));
    assert_eq!(world.requests[beside].tokens.len(), 12);
    assert_eq!(world.requests[thrice].tokens, [9, 9]);
    for failed in [thrice, none] {
        assert!(matches!(error_of(&world.requests[failed]), RequestError::Invalid(_)), "{failed}");
    }
    assert!(world.requests[none].tokens.is_empty());
    world.check_empty();
}

fn scored(seed: u64, tokens: usize) -> GenerateRequest {
    let mut request = greedy(prompt(seed, tokens, 128), 6);
    request.options.prompt_logprobs = Some(3);
    request
}

/// Each position of the prompt as an answer of one token to the prompt before it: its logits are those of the prompt's pass.
fn expected(pool: &PoolSpec, request: &GenerateRequest) -> Vec<PromptLogprob> {
    let prefixes: Vec<_> = (1..request.prompt.len()).map(|end| greedy(request.prompt[..end].to_vec(), 1)).collect();
    let logs = single(pool, &prefixes);
    logs.iter().zip(&request.prompt[1..]).map(|(log, token)| score(&log.logits[0], *token)).collect()
}

fn score(logits: &[f32], token: u32) -> PromptLogprob {
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    let logprob = |id: usize| (f64::from(logits[id]) - sum.ln()) as f32;
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let rank = order.iter().position(|id| *id == token as usize).unwrap() as u32 + 1;
    let top = order[..3].iter().map(|id| (*id as u32, logprob(*id))).collect();
    PromptLogprob { token, logprob: logprob(token as usize), rank, top }
}

fn assert_scores(what: &str, log: &Log, expected: &[PromptLogprob], tolerance: f32) {
    let (_, scores) = &log.prompt;
    assert_eq!(scores.len(), expected.len(), "{what}");
    for (at, (score, expected)) in scores.iter().zip(expected).enumerate() {
        assert_eq!((score.token, score.rank), (expected.token, expected.rank), "{what}, position {}", at + 1);
        assert!((score.logprob - expected.logprob).abs() < tolerance, "{what}, {at}: {score:?} {expected:?}");
        assert_eq!(score.top.len(), 3);
        for (known, expected) in score.top.iter().zip(&expected.top) {
            assert!(known.0 == expected.0 && (known.1 - expected.1).abs() < tolerance, "{what}, {at}: {score:?}");
        }
    }
}

#[test]
fn a_prompt_has_the_same_log_probabilities_wherever_its_kv_is() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let request = scored(1, 70);
    let expected = expected(&pool, &request);
    // A step of 10 rows, fewer than the prompt has, and sampling of few sequences at a time.
    let spec = |blocks| Spec { step_rows: 10, ..Spec::cpu(blocks) };
    let mut pooled = World::pool(pool.clone(), None, &[spec(6), spec(30)]);
    pooled.submit(0, request.clone());
    pooled.run();
    assert!(pooled.sent("partial").0 > 0, "it borrows");
    let tolerance = f32_tolerance(&pooled.requests);
    assert_scores("pooled", &pooled.requests[0], &expected, tolerance);
    assert_equals_single("scored in a pool", &pooled, &pool);

    // A prefix-cache hit hides no position, and what it computes again is a hit for others.
    let mut cached = World::single(pool.clone(), spec(60));
    let mut plain = request.clone();
    plain.options.prompt_logprobs = None;
    for (request, hits) in [(plain.clone(), 0), (request.clone(), 0), (plain, 68)] {
        let id = cached.submit(0, request.clone());
        cached.run();
        assert_eq!(cached.requests[id].prompt.0, hits);
        if request.options.prompt_logprobs.is_some() {
            assert_scores("cached", &cached.requests[id], &expected, tolerance);
        }
    }

    // Preempted between two chunks, as an older request grows: every position once.
    let mut short = World::single(pool.clone(), spec(27));
    let older = short.submit(0, GenerateRequest { max_tokens: 30, ..scored(2, 30) });
    let id = short.submit(0, request);
    short.run_until(|world| world.live(0).status().preemptions > 0);
    assert!(short.requests[id].tokens.is_empty(), "its prompt is not computed yet");
    short.run();
    assert_scores("short of memory", &short.requests[id], &expected, tolerance);
    assert_eq!(short.requests[older].prompt.1.len(), 29);
    short.check_empty();
}

/// A tenant finds its own KV, and nobody else's.
#[test]
fn a_salt_separates_tenants_in_the_prefix_cache() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let mut world = World::single(pool.clone(), Spec { rows: false, ..Spec::cpu(60) });
    let mut ask = |salt: &str| {
        let mut request = greedy(prompt(1, 41, 128), 4);
        request.options.cache_salt = salt.into();
        let id = world.submit(0, request);
        world.run();
        world.requests[id].prompt.0
    };
    let cached: Vec<u32> = ["", "a", "b", "", "a", "b"].into_iter().map(&mut ask).collect();
    assert_eq!(cached, [0, 0, 0, 40, 40, 40]);
    assert_equals_single("salted", &world, &pool);
    world.check_empty();
}

/// Of waiting requests the one with the lowest priority number begins first.
#[test]
fn a_lower_priority_number_is_admitted_first() {
    let pool = PoolSpec::golden("llama3_old", 4);
    let mut world = World::single(pool.clone(), Spec { running: 1, queue: 8, ..Spec::cpu(60) });
    let ids: Vec<usize> = [0, 3, 0, -2]
        .into_iter()
        .zip(1..)
        .map(|(priority, seed)| {
            let mut request = greedy(prompt(seed, 12, 128), 4);
            request.options.priority = priority;
            world.submit(0, request)
        })
        .collect();
    let mut ends = Vec::new();
    while ends.len() < ids.len() {
        world.run_until(|w| ids.iter().filter(|id| w.requests[**id].is_over()).count() > ends.len());
        ends.extend(
            ids.iter().filter(|id| world.requests[**id].is_over() && !ends.contains(*id)).copied().collect::<Vec<_>>(),
        );
    }
    assert_eq!(ends, [ids[0], ids[3], ids[2], ids[1]]);
    assert_equals_single("by priority", &world, &pool);
}

/// With `--batch-invariant` the logits of a request are the same bits alone and beside others, however its prompt is cut into
/// chunks and wherever its rBlocks lie.
#[test]
fn logits_do_not_depend_on_what_else_runs() {
    for name in ["llama3_old", "mistral_window", "head_dim_64"] {
        let pool = PoolSpec::golden(name, 16);
        let spec = |step_rows| Spec { step_rows, batch_invariant: true, rows: false, ..Spec::cpu(40) };
        let request = greedy(prompt(1, 75, 128), 24);
        let mut alone = World::single(pool.clone(), spec(128));
        alone.submit(0, request.clone());
        alone.run();
        let mut beside = World::single(pool.clone(), spec(29));
        let early: Vec<_> =
            (2..5).map(|seed| beside.submit(0, greedy(prompt(seed, 20 * seed as usize, 128), 9))).collect();
        beside.run_until(|w| w.requests[early[0]].tokens.len() == 3);
        let id = beside.submit(0, request);
        beside.run_until(|w| w.requests[id].tokens.len() == 5);
        (5..8).for_each(|seed| _ = beside.submit(0, greedy(prompt(seed, 31, 128), 12)));
        beside.run();
        let (alone, beside) = (&alone.requests[0], &beside.requests[id]);
        assert_eq!(alone.tokens, beside.tokens, "{name}");
        for (at, (a, b)) in alone.logits.iter().zip(&beside.logits).enumerate() {
            let differs = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(differs, None, "{name}, token {at}");
        }
    }
}

/// Largest difference of a log-probability from transformers': f32 in another order.
const TOLERANCE: f32 = 1e-3;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Compares a token's log-probability and the likeliest tokens with transformers'.
fn assert_golden(what: &str, (logprob, top): (f32, &[(u32, f32)]), golden: &Value) {
    let close = |a: f32, b: &Value| (f64::from(a) - b.as_f64().unwrap()).abs() < f64::from(TOLERANCE);
    assert!(close(logprob, &golden["logprob"]), "{what}: {logprob}, not {golden}");
    let likeliest = golden["likeliest"].as_array().unwrap();
    assert_eq!(top.len(), likeliest.len(), "{what}");
    for ((_, logprob), golden) in top.iter().zip(likeliest) {
        assert!(close(*logprob, &golden[1]), "{what}: {top:?}, not {likeliest:?}");
    }
    let (mut known, mut expected): (Vec<u32>, Vec<u32>) =
        top.iter().zip(likeliest).map(|(known, golden)| (known.0, golden[0].as_u64().unwrap() as u32)).unzip();
    known.sort_unstable();
    expected.sort_unstable();
    assert_eq!(known, expected, "{what}");
}

/// Answers under penalties, excluded words and biases, and log-probabilities of prompts and answers, alone and over a pool
/// (tools/goldens/sampling.py).
#[test]
fn rules_and_log_probabilities_are_those_of_transformers() {
    let text = std::fs::read_to_string(lagoon_tests::root().join("tests/goldens/sampling.json")).unwrap();
    let goldens: Vec<Value> = serde_json::from_str(&text).unwrap();
    let (mut answers, mut borrowed) = (0, 0);
    for golden in &goldens {
        let name = golden["model"].as_str().unwrap();
        let pool = PoolSpec::golden(name, 4);
        for answer in golden["answers"].as_array().unwrap() {
            let (rule, options, tokens) =
                (answer["rule"].as_str().unwrap(), &answer["options"], ids(&answer["tokens"]));
            let mut request = greedy(ids(&golden["prompt"]), tokens.len() as u32);
            request.sampling.logprobs = Some(3);
            request.options.prompt_logprobs = Some(3);
            request.sampling.repetition_penalty = options["repetition_penalty"].as_f64().map_or(1.0, |by| by as f32);
            let words = options["bad_words_ids"].as_array().into_iter().flatten();
            request.sampling.bad_words = words.map(|word| ids(word).into()).collect();
            let biases = options["sequence_bias"].as_array().into_iter().flatten();
            request.sampling.logit_bias = biases.map(|of| (ids(&of[0])[0], of[1].as_f64().unwrap() as f32)).collect();
            for small in [60, 2] {
                let mut world = World::pool(pool.clone(), None, &[Spec::cpu(small), Spec::cpu(60)]);
                world.run_for(2_000);
                world.submit(0, request.clone());
                world.run();
                let (log, what) = (&world.requests[0], format!("{name}, {rule}, {small} blocks"));
                assert_eq!(log.tokens, tokens, "{what}");
                let prompt = golden["prompt_scores"].as_array().unwrap();
                assert_eq!((log.prompt.1.len(), log.scores.len()), (prompt.len(), tokens.len()), "{what}");
                for (score, golden) in log.prompt.1.iter().zip(prompt) {
                    assert_golden(&what, (score.logprob, &score.top), golden);
                }
                for (score, golden) in log.scores.iter().zip(answer["scores"].as_array().unwrap()) {
                    assert_golden(&what, (score.chosen, &score.top), golden);
                }
                borrowed += world.live(0).status().blocks_borrowed_total;
            }
            answers += 1;
        }
    }
    assert!(answers >= 15 && borrowed > 0, "{answers} answers, {borrowed} borrowed");
}
