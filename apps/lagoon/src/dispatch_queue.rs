//! The queue of a gateway's requests for one pool: drives [`Dispatcher`], which decides, and wakes the requests that it binds.

use crate::asked::{Asked, BYTES_PER_TOKEN};
use crate::backends::{Backend, Backends, none_alive};
use crate::retry_budget::RetryBudget;
use axum::http::StatusCode;
use lagoon_cluster::dispatch::{Arrival, Dispatcher, Effect, Event, Learned, Mode, Refusal, Report, RequestId};
use lagoon_http::access::Record;
use lagoon_http::{ApiError, Caller};
use lagoon_types::limits::{DISPATCH_TICK_MS, GATEWAY_QUEUE_MAX, GATEWAY_QUEUE_MS};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The dispatcher's time when a queue begins: reports may be older.
const BEGIN_MS: u64 = 3_600_000;
/// Seconds after which a client that was refused should come back.
const RETRY_AFTER_S: u32 = 1;
/// Weight of one prompt in the mean of bytes per token.
const LEARN: f64 = 0.05;
/// The smallest and largest mean that is believed.
const BYTES_PER_TOKEN_RANGE: (f64, f64) = (0.5, 32.0);

/// See the module's documentation.
pub(crate) struct Queue {
    backends: Arc<dyn Backends>,
    retries: Arc<Mutex<RetryBudget>>,
    began: Instant,
    state: Mutex<State>,
}

struct State {
    core: Dispatcher<SocketAddr>,
    /// Requests that wait, to be woken.
    waiters: BTreeMap<RequestId, oneshot::Sender<Result<SocketAddr, Refusal>>>,
    next: u64,
    /// Of the state that the dispatcher has: when it was asked for, if that is known and nothing rested.
    looked: Option<Instant>,
    /// Whether a task sends ticks.
    ticks: bool,
    bytes_per_token: f64,
    passes: u64,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("stats", &self.state().core.stats()).finish_non_exhaustive()
    }
}

impl Queue {
    pub(crate) fn new(backends: Arc<dyn Backends>, retries: Arc<Mutex<RetryBudget>>, mode: Mode) -> Self {
        let state = State {
            core: Dispatcher::new(mode),
            waiters: BTreeMap::new(),
            next: 0,
            looked: None,
            ticks: false,
            bytes_per_token: BYTES_PER_TOKEN,
            passes: 0,
        };
        Self { backends, retries, began: Instant::now(), state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ms(&self, at: Instant) -> u64 {
        let ms = |elapsed: Duration| u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        match at.checked_duration_since(self.began) {
            Some(since) => BEGIN_MS.saturating_add(ms(since)),
            None => BEGIN_MS.saturating_sub(ms(self.began.duration_since(at))),
        }
    }

    fn handle(&self, state: &mut State, event: Event<SocketAddr>) {
        for effect in state.core.handle(self.ms(Instant::now()), event) {
            let (id, outcome) = match effect {
                Effect::Bind { id, instance } => (id, Ok(instance)),
                Effect::Refuse { id, why } => (id, Err(why)),
            };
            // A client that has just left drops its ticket, which ends the request.
            if let Some(waiter) = state.waiters.remove(&id) {
                let _ = waiter.send(outcome);
            }
        }
        let placed = state.core.take_placed();
        if !placed.is_empty() {
            self.backends.share_prefixes(placed);
        }
        let passes = state.core.stats().passes;
        metrics::counter!("lagoon_gateway_passes_total").increment(passes - state.passes);
        state.passes = passes;
    }

    /// Hands the dispatcher what the instances report now, unless it has that. Those that asked for a rest are left out, unless all did.
    fn look(&self, state: &mut State) {
        let (retries, now) = (self.retries.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        let seen = self.backends.asked().filter(|_| !retries.has_resting(now));
        if seen.is_some() && seen == state.looked {
            return;
        }
        state.looked = seen;
        let mut backends = self.backends.serving();
        let works = |backend: &Backend| !retries.is_resting(backend.http_addr, now);
        if backends.iter().any(works) {
            backends.retain(works);
        }
        drop(retries);
        let report = |backend: Backend| Report {
            instance: backend.http_addr,
            at_ms: self.ms(backend.reported),
            load: backend.load,
        };
        let reports = backends.into_iter().map(report).collect();
        let elsewhere = self.backends.elsewhere();
        self.handle(state, Event::Reports { reports, elsewhere });
        let shared = self.backends.shared_prefixes();
        if !shared.is_empty() {
            self.handle(state, Event::Placed(shared));
        }
    }

    /// Instances for a request, the best first, whether they can start it now or not.
    pub(crate) fn ranked(&self, asked: &Asked, is_bound: bool) -> Vec<SocketAddr> {
        let mut state = self.state();
        self.look(&mut state);
        // A request that was bound has had its turn.
        if !is_bound {
            state.core.next_turn();
        }
        let bytes_per_token = state.bytes_per_token;
        state.core.ranked(&asked.ask(bytes_per_token), &asked.prefix(bytes_per_token))
    }

    /// Queues a request that holds so many bytes.
    pub(crate) fn enter(self: &Arc<Self>, asked: &Asked, caller: &Caller, bytes: usize) -> Ticket {
        let (waiter, bound) = oneshot::channel();
        let mut state = self.state();
        self.look(&mut state);
        let (id, bytes_per_token) = (RequestId(state.next), state.bytes_per_token);
        state.next += 1;
        let tenant = Some(caller.tenant()).filter(|name| !name.is_empty()).map(Arc::from);
        let arrival = Arrival {
            id,
            ask: asked.ask(bytes_per_token),
            tenant: tenant.unwrap_or_else(|| Arc::clone(&asked.cache_salt)),
            priority: asked.priority,
            bytes,
            prefix: asked.prefix(bytes_per_token),
        };
        state.waiters.insert(id, waiter);
        self.handle(&mut state, Event::Arrived(arrival));
        self.tick(&mut state);
        drop(state);
        let text_bytes = asked.text_alone();
        Ticket {
            queue: Arc::clone(self),
            id,
            bound: Some(bound),
            began: false,
            text_bytes,
            record: caller.record().clone(),
        }
    }

    /// Sends ticks for as long as requests wait.
    fn tick(self: &Arc<Self>, state: &mut State) {
        if state.ticks || !state.core.is_waiting() {
            return;
        }
        state.ticks = true;
        let queue = Arc::downgrade(self);
        tokio::spawn(async move {
            while Self::tick_once(&queue) {
                tokio::time::sleep(Duration::from_millis(DISPATCH_TICK_MS)).await;
            }
        });
    }

    /// One tick; false when none waits.
    fn tick_once(queue: &Weak<Self>) -> bool {
        let Some(queue) = queue.upgrade() else { return false };
        let mut state = queue.state();
        queue.look(&mut state);
        queue.handle(&mut state, Event::Tick);
        state.ticks = state.core.is_waiting();
        state.ticks
    }

    /// Takes a prompt of text into the mean of bytes per token.
    fn learn(state: &mut State, text_bytes: usize, tokens: usize) {
        let number = |n: usize| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
        let mean = state.bytes_per_token * (1.0 - LEARN) + number(text_bytes) / number(tokens.max(1)) * LEARN;
        state.bytes_per_token = mean.clamp(BYTES_PER_TOKEN_RANGE.0, BYTES_PER_TOKEN_RANGE.1);
    }
}

/// A request's place in the queue, and then at its instance, until it is dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    queue: Arc<Queue>,
    id: RequestId,
    bound: Option<oneshot::Receiver<Result<SocketAddr, Refusal>>>,
    began: bool,
    text_bytes: Option<usize>,
    record: Record,
}

impl Ticket {
    /// Waits until an instance can start the request, and returns its address; at once if it was bound before.
    pub(crate) async fn bound(&mut self) -> Result<Option<SocketAddr>, ApiError> {
        let Some(bound) = self.bound.take() else { return Ok(None) };
        let waits = Waits::new(&self.record);
        let outcome = bound.await;
        drop(waits);
        match outcome {
            Ok(Ok(instance)) => Ok(Some(instance)),
            Ok(Err(why)) => Err(refused(why)),
            Err(_dropped) => Err(ApiError::internal("the queue forgot a request")),
        }
    }

    /// Whether the queue takes the request back if the instance cannot start it soon.
    pub(crate) fn may_hand_back(&self) -> bool {
        self.queue.state().core.may_hand_back(self.id)
    }

    /// The instance gave the request back: it waits again.
    pub(crate) fn handed_back(&mut self) {
        metrics::counter!("lagoon_gateway_handed_back_total").increment(1);
        let (waiter, bound) = oneshot::channel();
        self.bound = Some(bound);
        let mut state = self.queue.state();
        state.waiters.insert(self.id, waiter);
        self.queue.look(&mut state);
        self.queue.handle(&mut state, Event::HandedBack { id: self.id });
        self.queue.tick(&mut state);
    }

    /// The request is sent to this instance.
    pub(crate) fn sent(&self, instance: SocketAddr) {
        let mut state = self.queue.state();
        self.queue.handle(&mut state, Event::Sent { id: self.id, instance });
    }

    /// Its answer has begun.
    pub(crate) fn began(&mut self) {
        if !std::mem::replace(&mut self.began, true) {
            let mut state = self.queue.state();
            self.queue.handle(&mut state, Event::Began { id: self.id });
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let report = self.record.report();
        let tokens = |n: Option<usize>| n.map(|n| n as u64);
        // An answer that a client left early tells nothing.
        let answer_tokens = tokens(report.output_tokens).filter(|_| report.finish.is_some());
        let learned = Learned { cached_tokens: tokens(report.cached_tokens), answer_tokens };
        let mut state = self.queue.state();
        state.waiters.remove(&self.id);
        if let (Some(bytes), Some(tokens @ 1..)) = (self.text_bytes, report.prompt_tokens) {
            Queue::learn(&mut state, bytes, tokens);
        }
        self.queue.handle(&mut state, Event::Ended { id: self.id, learned });
    }
}

/// Counts a request that waits, while it does, and logs for how long it did.
struct Waits<'a> {
    since: Instant,
    record: &'a Record,
}

impl<'a> Waits<'a> {
    fn new(record: &'a Record) -> Self {
        metrics::gauge!("lagoon_gateway_requests_waiting").increment(1.0);
        Self { since: Instant::now(), record }
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let waited = self.since.elapsed();
        metrics::gauge!("lagoon_gateway_requests_waiting").decrement(1.0);
        metrics::histogram!("lagoon_gateway_wait_seconds").record(waited.as_secs_f64());
        self.record.waited(waited);
    }
}

/// The error of a request that the queue refused.
fn refused(why: Refusal) -> ApiError {
    let reason = match why {
        Refusal::Full => "full",
        Refusal::TenantFull => "tenant_full",
        Refusal::Expired => "expired",
        Refusal::NoInstance => "no_instance",
    };
    metrics::counter!("lagoon_gateway_refused_total", "reason" => reason).increment(1);
    let full = |message: String| ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message);
    let error = match why {
        Refusal::Full => full(format!("the gateway's queue is full ({GATEWAY_QUEUE_MAX} requests, or their bytes)")),
        Refusal::TenantFull => {
            full("requests of this key or cache_salt fill its share of the gateway's queue".to_owned())
        }
        Refusal::Expired => {
            ApiError::unavailable(format!("no instance could start the request within {} s", GATEWAY_QUEUE_MS / 1000))
        }
        Refusal::NoInstance => return none_alive(),
    };
    let message = format!("{}\nhint: send it again later, or add instances", error.message);
    ApiError { message, retry_after_s: Some(RETRY_AFTER_S), ..error }
}

#[cfg(test)]
#[path = "dispatch_queue_tests.rs"]
mod tests;
