//! The queue before real servers with scripted engines, whose loads the test reports.

use super::*;
use crate::gateway::tests::{backend, complete, gateway_with, logged_gateway};
use crate::replay::ReplayLimits;
use crate::scripted::{self, ScriptedEngine, Step};
use lagoon_protocol::Load;
use serde_json::json;

const LONG: Duration = Duration::from_secs(10);

/// Instances whose loads a test sets.
#[derive(Clone, Default)]
struct Reported(Arc<Mutex<Vec<Backend>>>);

impl Reported {
    /// The instance runs so many requests of at most one, as reported at `at`.
    fn set(&self, name: &str, url: &str, running: u32, at: Instant) {
        let mut backend = backend(name, url, 1_000);
        backend.load.load = Some(Load { batch_max: 1, ..Load::default() });
        (backend.load.running, backend.reported) = (running, at);
        let mut all = self.0.lock().unwrap();
        all.retain(|other| other.name != name);
        all.push(backend);
    }
}

impl Backends for Reported {
    fn serving(&self) -> Vec<Backend> {
        self.0.lock().unwrap().clone()
    }

    fn is_dead(&self, _: SocketAddr) -> bool {
        false
    }

    fn knows(&self, _: &str) -> bool {
        true
    }

    fn silent_for(&self) -> Option<Duration> {
        None
    }
}

/// An engine that answers, but for requests of one token, which it holds.
fn engine() -> Arc<ScriptedEngine> {
    ScriptedEngine::new(|request| {
        Ok(if request.max_tokens == 1 { vec![Step::Hang] } else { scripted::say("ok", request) })
    })
}

async fn asks(url: &str, max_tokens: u32) -> (u16, String) {
    let (status, instance, _) = complete(url, &json!({"prompt": "a", "max_tokens": max_tokens})).await;
    (status, instance)
}

#[tokio::test]
async fn a_request_waits_for_a_place_and_goes_to_the_instance_that_has_one_first() {
    let engines = [engine(), engine()];
    let urls = [
        scripted::spawn(scripted::state(engines[0].clone())).await,
        scripted::spawn(scripted::state(engines[1].clone())).await,
    ];
    let pool = Reported::default();
    let now = Instant::now();
    pool.set("one", &urls[0], 1, now);
    pool.set("two", &urls[1], 1, now);
    let (url, lines) = logged_gateway(Arc::new(pool.clone())).await;
    let asking = tokio::spawn(async move { asks(&url, 8).await });
    // It is bound within a tick of the report that shows a place, and not before.
    tokio::time::sleep(Duration::from_millis(4 * DISPATCH_TICK_MS)).await;
    assert!(engines.iter().all(|engine| engine.requests().is_empty()) && !asking.is_finished());
    pool.set("two", &urls[1], 0, now);
    let answer = tokio::time::timeout(LONG, asking).await.expect("it is bound").unwrap();
    assert_eq!(answer, (200, "two".to_owned()));
    // The instance counts none of that wait.
    let line = async {
        while lines.lock().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, line).await.expect("a line in the access log");
    let queue_ms = lines.lock().unwrap()[0].report.queue_ms;
    assert!(queue_ms.is_some_and(|ms| ms >= DISPATCH_TICK_MS), "{queue_ms:?}");
}

#[tokio::test]
async fn the_end_of_a_request_makes_room_for_the_next_without_a_report() {
    let engine = engine();
    let server = scripted::spawn(scripted::state(engine.clone())).await;
    let pool = Reported::default();
    pool.set("one", &server, 0, Instant::now());
    let url = gateway_with(Arc::new(pool), ReplayLimits::default()).await;
    let (first, second, third) = (url.clone(), url.clone(), url);
    let held = tokio::spawn(async move { asks(&first, 1).await });
    engine.wait_submitted(1).await;
    let waiting = tokio::spawn(async move { asks(&second, 8).await });
    let leaving = tokio::spawn(async move { asks(&third, 9).await });
    tokio::time::sleep(Duration::from_millis(4 * DISPATCH_TICK_MS)).await;
    assert_eq!(engine.requests().len(), 1, "the only place is taken");
    leaving.abort();
    held.abort();
    let answer = tokio::time::timeout(LONG, waiting).await.expect("its place is free").unwrap();
    assert_eq!(answer.0, 200);
    assert!(engine.requests().iter().all(|request| request.max_tokens != 9), "its client left the queue");
}

#[test]
fn refusals_are_structured_and_say_when_to_come_back() {
    for (why, status, code, retry_after_s) in [
        (Refusal::Full, 429, "queue_full", Some(1)),
        (Refusal::TenantFull, 429, "queue_full", Some(1)),
        (Refusal::Expired, 503, "unavailable", Some(1)),
        (Refusal::NoInstance, 503, "unavailable", None),
    ] {
        let error = refused(why);
        assert_eq!((error.status.as_u16(), error.code, error.retry_after_s), (status, Some(code), retry_after_s));
        assert!(why == Refusal::NoInstance || error.message.contains("\nhint: "), "{}", error.message);
    }
}

#[tokio::test]
async fn bytes_per_token_are_learned_from_prompts_of_text() {
    let queue = Arc::new(Queue::new(
        Arc::new(Vec::<Backend>::new()),
        Arc::new(Mutex::new(RetryBudget::new(Instant::now()))),
        Mode::LeastWork,
    ));
    let mut state = queue.state();
    (0..200).for_each(|_| Queue::learn(&mut state, 2_000, 1_000));
    assert!((state.bytes_per_token - 2.0).abs() < 0.01);
    (0..200).for_each(|_| Queue::learn(&mut state, 0, 1_000));
    assert!((state.bytes_per_token - BYTES_PER_TOKEN_RANGE.0).abs() < 1e-9, "what cannot be is bounded");
}
