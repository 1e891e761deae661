//! The load generator against a real server with a scripted engine.

use super::*;
use crate::scripted::{self, ScriptedEngine, Step, say};
use clap::Parser;
use lagoon_types::{FinishReason, RequestError};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

#[derive(clap::Parser)]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

async fn bench(engine: Arc<ScriptedEngine>, flags: &str) -> Report {
    let url = scripted::spawn(scripted::state(engine)).await;
    let args = format!("bench --url {url} {flags}");
    measure(&Cli::parse_from(args.split_whitespace()).args).await.unwrap().0
}

#[tokio::test]
async fn lengths_are_exact_and_times_are_plausible() {
    let engine = ScriptedEngine::new(|request| {
        let pause = Step::Wait(Duration::from_millis(5));
        let tokens = (0..request.max_tokens).flat_map(|_| [pause.clone(), Step::Token(97)]);
        Ok(tokens.chain([Step::Finish(FinishReason::Length)]).collect())
    });
    let report = bench(engine.clone(), "--requests 6 --concurrency 3 --prompt-tokens 40 --max-tokens 10").await;
    assert_eq!((report.ok, report.prompt_tokens, report.completion_tokens), (6, 240, 60), "{report:?}");
    assert!(report.errors.is_empty());
    assert_eq!((report.ttft_ms.count, report.tbt_ms.count, report.e2e_ms.count), (6, 6 * 9, 6));
    assert!(report.ttft_ms.p50 >= 5.0 && report.tbt_ms.p50 >= 4.0, "{report:?}");
    assert!(report.e2e_ms.p50 >= 50.0 && report.e2e_ms.max >= report.e2e_ms.p99 * 0.99, "{report:?}");
    let expected = 60.0 / report.duration_s;
    assert!((report.output_tokens_per_s - expected).abs() < 1e-6);
    for request in engine.requests() {
        assert_eq!((request.prompt.len(), request.max_tokens), (40, 10));
        assert!(request.stop_ids.is_empty(), "eos is ignored");
        assert_eq!(request.sampling.temperature, 0.0);
    }
    let distinct: std::collections::BTreeSet<_> = engine.requests().into_iter().map(|r| r.prompt).collect();
    assert_eq!(distinct.len(), 6, "every request has its own prompt");
    assert!(report.table().contains("6 of 6 requests succeeded"), "{}", report.table());
}

#[tokio::test]
async fn a_seed_repeats_the_prompts() {
    let (one, two) = (ScriptedEngine::saying("ok"), ScriptedEngine::saying("ok"));
    let other = ScriptedEngine::saying("ok");
    let flags = "--requests 3 --concurrency 1 --prompt-tokens 20 --max-tokens 2";
    bench(one.clone(), flags).await;
    bench(two.clone(), flags).await;
    bench(other.clone(), &format!("{flags} --seed 1")).await;
    let prompts = |engine: &ScriptedEngine| engine.requests().into_iter().map(|r| r.prompt).collect::<Vec<_>>();
    assert_eq!(prompts(&one), prompts(&two));
    assert_ne!(prompts(&one), prompts(&other));
}

#[tokio::test]
async fn errors_are_counted_by_kind() {
    let count = AtomicUsize::new(0);
    let engine = ScriptedEngine::new(move |request| match count.fetch_add(1, Ordering::SeqCst) {
        0 => Err(RequestError::QueueFull { queued: 1, limit: 1 }),
        1 => Ok(vec![
            Step::Token(97),
            Step::Wait(Duration::from_millis(20)),
            Step::Fail(RequestError::Unavailable("gone".to_owned())),
        ]),
        2 => Ok(vec![Step::Token(97), Step::Finish(FinishReason::Stop)]),
        3 => Ok(vec![Step::Token(97), Step::Hang]),
        _ => Ok(say("ok", request)),
    });
    let report = bench(engine, "--requests 5 --concurrency 1 --max-tokens 4 --timeout-s 1").await;
    assert_eq!(report.ok, 1);
    let kinds: Vec<_> = report.errors.iter().map(|(kind, count)| (kind.as_str(), *count)).collect();
    assert_eq!(kinds, [("http_429", 1), ("length", 1), ("midway", 1), ("timeout", 1)]);
    assert!(report.table().contains("error http_429: 1"));
}

#[tokio::test]
async fn an_open_loop_does_not_wait_for_answers() {
    let engine = ScriptedEngine::new(|request| {
        let mut steps = vec![Step::Wait(Duration::from_millis(400))];
        steps.extend(say("ok", request));
        Ok(steps)
    });
    // 20 requests of 0.4 s one after the other would take 8 s.
    let report = bench(engine, "--requests 20 --rate 100 --max-tokens 2 --prompt-tokens 4").await;
    assert_eq!((report.ok, report.concurrency, report.rate), (20, None, Some(100.0)));
    assert!(report.duration_s < 4.0, "{report:?}");
}

#[tokio::test]
async fn nothing_that_succeeds_is_an_error_and_json_has_its_fields() {
    let engine = ScriptedEngine::new(|_| Err(RequestError::Unavailable("no device".to_owned())));
    let url = scripted::spawn(scripted::state(engine)).await;
    let args = Cli::parse_from(["bench", "--url", &url, "--requests", "1", "--json"]).args;
    let error = run(args.clone()).await.unwrap_err().to_string();
    assert!(error.contains("no request succeeded") && error.contains("no device"), "{error}");
    let report = serde_json::to_value(measure(&args).await.unwrap().0).unwrap();
    let fields: Vec<_> = report.as_object().unwrap().keys().map(String::as_str).collect();
    for field in ["ok", "errors", "output_tokens_per_s", "requests_per_s", "ttft_ms", "tbt_ms", "e2e_ms"] {
        assert!(fields.contains(&field), "{field} in {fields:?}");
    }
    for flags in [&["--rate", "0"][..], &["--rate", "2", "--concurrency", "3"], &["--requests", "0"]] {
        assert!(Cli::try_parse_from([&["bench"], flags].concat()).is_err(), "{flags:?}");
    }
}

#[tokio::test]
async fn goodput_counts_requests_within_the_objectives() {
    // Every other request is late with its first token.
    let count = AtomicUsize::new(0);
    let engine = ScriptedEngine::new(move |request| {
        let late = count.fetch_add(1, Ordering::SeqCst) % 2 == 1;
        let mut steps = vec![Step::Wait(Duration::from_millis(if late { 1500 } else { 0 }))];
        steps.extend((0..request.max_tokens).map(|_| Step::Token(97)));
        steps.push(Step::Finish(FinishReason::Length));
        Ok(steps)
    });
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("report.html");
    let flags = format!("--requests 8 --concurrency 1 --max-tokens 4 --slo-ttft 1000 --html {}", page.display());
    let url = scripted::spawn(scripted::state(engine)).await;
    let args = format!("bench --url {url} {flags}");
    run(Cli::parse_from(args.split_whitespace()).args).await.unwrap();
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("50.0% of all (first token within 1000 ms)") && page.contains("<svg"), "{page}");
}

#[tokio::test]
async fn a_dataset_gives_prompts_and_lengths() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chats.json");
    let chat =
        |q: &str, a: &str| json!({"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]});
    // One token a character; the last has too few.
    let chats = json!([chat("what is it?", "a pool"), chat("and where?", "in the sea, I think"), chat("x", "y")]);
    std::fs::write(&file, chats.to_string()).unwrap();
    let engine = ScriptedEngine::new(|request| {
        let tokens = (0..request.max_tokens).map(|_| Step::Token(97));
        Ok(tokens.chain([Step::Finish(FinishReason::Length)]).collect())
    });
    let flags = format!("--requests 4 --concurrency 1 --max-tokens 9 --dataset {}", file.display());
    let report = bench(engine.clone(), &flags).await;
    assert_eq!(report.ok, 4, "{report:?}");
    let asked: std::collections::BTreeSet<(String, u32)> = engine
        .requests()
        .into_iter()
        .map(|r| (r.prompt.iter().filter_map(|id| u8::try_from(*id).ok()).map(char::from).collect(), r.max_tokens))
        .collect();
    // The scripted tokenizer adds a token to the answer's length, too.
    let asked: Vec<_> = asked.into_iter().collect();
    assert_eq!(asked, [("and where?".to_owned(), 9), ("what is it?".to_owned(), 7)]);
}

#[tokio::test]
async fn a_long_tail_stays_within_the_context() {
    let engine = ScriptedEngine::new(|request| {
        let tokens = (0..request.max_tokens).map(|_| Step::Token(97));
        Ok(tokens.chain([Step::Finish(FinishReason::Length)]).collect())
    });
    let report = bench(engine.clone(), "--requests 64 --prompt-tokens 100 --max-tokens 8 --lengths long-tail").await;
    assert_eq!(report.ok, 64, "{report:?}");
    let lengths: std::collections::BTreeSet<usize> = engine.requests().iter().map(|r| r.prompt.len()).collect();
    assert!(lengths.len() > 30 && lengths.iter().all(|length| *length <= 512), "{lengths:?}");
}
