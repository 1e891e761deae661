//! The instances behind a gateway: dispatch of requests, and whether a silent instance is dead.

use crate::asked::Asked;
pub(crate) use crate::backends::{Backend, Backends, none_alive};
use crate::dispatch_queue::Queue;
use crate::gateway_counts::GatewayCounts;
use crate::retry_budget::RetryBudget;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use lagoon_cluster::dispatch::Mode;
use lagoon_http::ApiError;
use lagoon_http::client::{Client, ClientConfig};
use lagoon_http::tls::ClientTls;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time to connect to an instance.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// Longest silence of an instance. Its own deadlines are shorter.
const SILENCE_DEADLINE: Duration = Duration::from_secs(3700);
/// Headers of one connection only (RFC 9110, section 7.6.1), and those set anew.
const HOP_HEADERS: [HeaderName; 9] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::HOST,
    header::CONTENT_LENGTH,
];

/// Instances, their HTTP client, and the queue of requests for them.
pub(crate) struct Upstreams {
    backends: Arc<dyn Backends>,
    pub(crate) http: Client,
    scheme: &'static str,
    pub(crate) queue: Arc<Queue>,
    retries: Arc<Mutex<RetryBudget>>,
    pub(crate) counts: Arc<GatewayCounts>,
}

impl std::fmt::Debug for Upstreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstreams").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl Upstreams {
    /// Reaches instances over TLS with `tls`, else plain HTTP.
    pub(crate) fn new(backends: Arc<dyn Backends>, tls: Option<Arc<ClientTls>>, mode: Mode) -> Self {
        // No kept connections: one may turn out dead after part of a request was sent; a new one costs microseconds,
        // with TLS a round trip and a signature.
        let config = ClientConfig { connect: CONNECT_DEADLINE, silence: SILENCE_DEADLINE, idle_max: 0 };
        let scheme = if tls.is_some() { "https" } else { "http" };
        Self::of(backends, Client::new(config, tls), scheme, Arc::default(), mode)
    }

    /// Another pool's instances, with the same client and counters.
    pub(crate) fn beside(&self, backends: Arc<dyn Backends>, mode: Mode) -> Self {
        Self::of(backends, self.http.clone(), self.scheme, Arc::clone(&self.counts), mode)
    }

    fn of(
        backends: Arc<dyn Backends>,
        http: Client,
        scheme: &'static str,
        counts: Arc<GatewayCounts>,
        mode: Mode,
    ) -> Self {
        let retries = Arc::new(Mutex::new(RetryBudget::new(Instant::now())));
        let queue = Arc::new(Queue::new(Arc::clone(&backends), Arc::clone(&retries), mode));
        Self { backends, http, scheme, queue, retries, counts }
    }

    /// Whether instances know this gateway by its certificate.
    pub(crate) fn is_pool(&self) -> bool {
        self.scheme == "https"
    }

    /// The URL of `target` at an instance.
    pub(crate) fn url(&self, backend: &Backend, target: &str) -> String {
        format!("{}://{}{target}", self.scheme, backend.http_addr)
    }

    pub(crate) fn retries(&self) -> MutexGuard<'_, RetryBudget> {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Instances that take requests.
    pub(crate) fn serving(&self) -> Vec<Backend> {
        self.backends.serving()
    }

    /// See [`Backends::scraped`].
    pub(crate) fn scraped(&self) -> Vec<Backend> {
        self.backends.scraped()
    }

    /// See [`Backends::silent_for`].
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        self.backends.silent_for()
    }

    /// Instances to try by rank, those that requested a pause at the end. `is_bound`: the request has had its turn.
    pub(crate) fn candidates(&self, asked: &Asked, is_bound: bool) -> Vec<Backend> {
        let ranked = self.queue.ranked(asked, is_bound);
        let mut backends = self.backends.serving();
        // The ranking leaves out those that rest.
        let place = |backend: &Backend| ranked.iter().position(|addr| *addr == backend.http_addr).unwrap_or(usize::MAX);
        backends.sort_by_cached_key(place);
        backends
    }

    /// Waits for `answer` of an instance; `None` if it was silent for `silence` and the pool counts it as dead.
    pub(crate) async fn unless_dead<T>(
        &self,
        addr: SocketAddr,
        silence: Duration,
        answer: impl Future<Output = T>,
    ) -> Option<T> {
        let mut answer = pin!(answer);
        loop {
            match tokio::time::timeout(silence, answer.as_mut()).await {
                Ok(answer) => return Some(answer),
                Err(_elapsed) if self.backends.is_dead(addr) => return None,
                Err(_elapsed) => {}
            }
        }
    }
}

/// Counters by instance of pools that share them, in Prometheus' text format.
pub(crate) fn render_counts(pools: &[Arc<Upstreams>]) -> String {
    let is_known = |name: &str| pools.iter().any(|pool| pool.backends.knows(name));
    // Of several instances with one name, `name@address`.
    let unlabelled = |label: &str| match label.rsplit_once('@') {
        Some((name, addr)) if addr.parse::<SocketAddr>().is_ok() => name.to_owned(),
        _ => label.to_owned(),
    };
    let knows = |label: &str| is_known(label) || is_known(&unlabelled(label));
    pools.first().map(|pool| pool.counts.render(knows)).unwrap_or_default()
}

/// The error of a request that was lost with an instance.
pub(crate) fn lost(name: &str, why: &str) -> ApiError {
    let message = format!("the connection to {name} broke: {why}\nhint: send the request again");
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("instance_lost"), message)
}

/// The headers without those of one connection only.
pub(crate) fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    for name in HOP_HEADERS {
        kept.remove(name);
    }
    kept
}
