//! The instances behind a gateway: which of them a request is given to, and whether one that is silent is dead.

use anyhow::Context;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use lagoon_http::ApiError;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time to connect to an instance.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// Longest silence of an instance. Its own deadlines are shorter.
const SILENCE_DEADLINE: Duration = Duration::from_secs(3700);
/// Instances that one request is tried on.
const ATTEMPTS_MAX: usize = 4;
/// How long a request counts against its instance here; after that the instance's own reports have it.
const CHARGE_LIFETIME: Duration = Duration::from_secs(1);
/// Headers that concern one connection only (RFC 9110, section 7.6.1), and the ones that are set anew.
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

/// An instance's HTTP server, and its load as last reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Backend {
    /// What `x-lagoon-instance` says: letters, digits and signs.
    pub(crate) name: String,
    pub(crate) http_addr: SocketAddr,
    /// Tokens that its KV memory has room for.
    pub(crate) free_tokens: u64,
    pub(crate) running: u64,
    pub(crate) waiting: u64,
}

/// Which instances there are, as of now. It is asked for every request and must not block.
pub(crate) trait Backends: Send + Sync {
    /// Those that take requests.
    fn serving(&self) -> Vec<Backend>;

    /// Whether the one that serves here is known to be dead. One of which nothing is known is not.
    fn is_dead(&self, http_addr: SocketAddr) -> bool;

    /// For how long nobody has said how the instances are, if that is so; the last that was known stands.
    fn silent_for(&self) -> Option<Duration>;
}

/// A list of servers of which nothing more is known.
impl Backends for Vec<Backend> {
    fn serving(&self) -> Vec<Backend> {
        self.clone()
    }

    fn is_dead(&self, _http_addr: SocketAddr) -> bool {
        false
    }

    fn silent_for(&self) -> Option<Duration> {
        None
    }
}

/// Instances, the client that reaches them, and what was dispatched to them lately.
pub(crate) struct Upstreams {
    backends: Arc<dyn Backends>,
    pub(crate) http: reqwest::Client,
    dispatch: Mutex<Dispatch>,
}

impl std::fmt::Debug for Upstreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstreams").field("dispatch", &self.dispatch).finish_non_exhaustive()
    }
}

impl Upstreams {
    /// # Errors
    /// When the HTTP client cannot be set up.
    pub(crate) fn new(backends: Arc<dyn Backends>) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_DEADLINE)
            .read_timeout(SILENCE_DEADLINE)
            // A kept connection may turn out dead after part of a request was sent; a new one costs microseconds.
            .pool_max_idle_per_host(0)
            .tcp_nodelay(true)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .context("set up the gateway's HTTP client")?;
        Ok(Self { backends, http, dispatch: Mutex::default() })
    }

    /// Those that take requests.
    pub(crate) fn serving(&self) -> Vec<Backend> {
        self.backends.serving()
    }

    /// See [`Backends::silent_for`].
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        self.backends.silent_for()
    }

    /// Instances to try, best first, those of `last` behind all others, and a charge on the first one.
    pub(crate) fn candidates(&self, tokens: u64, last: &[Backend]) -> Vec<Backend> {
        let backends = self.backends.serving();
        let mut dispatch = self.dispatch.lock().unwrap_or_else(PoisonError::into_inner);
        dispatch.candidates(backends, last, tokens, Instant::now())
    }

    /// Waits for `answer` of an instance; `None` when it was silent for `silence`, and is dead to the pool.
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

/// What was dispatched lately, which the instances' reports may not show yet: without it, a burst between two reports
/// would go to one instance.
#[derive(Debug, Default)]
struct Dispatch {
    /// Per instance: when, and how many tokens.
    charges: BTreeMap<SocketAddr, Vec<(Instant, u64)>>,
    round: usize,
}

impl Dispatch {
    /// Most free memory first, then the fewest requests, then in turn.
    fn candidates(&mut self, mut backends: Vec<Backend>, last: &[Backend], tokens: u64, now: Instant) -> Vec<Backend> {
        let alive = |at: &Instant| now.saturating_duration_since(*at) < CHARGE_LIFETIME;
        self.charges.retain(|_, charges| {
            charges.retain(|(at, _)| alive(at));
            !charges.is_empty()
        });
        if backends.is_empty() {
            return backends;
        }
        self.round = self.round.wrapping_add(1);
        let turn = self.round % backends.len();
        backends.rotate_left(turn);
        backends.sort_by_cached_key(|backend| {
            let charges = self.charges.get(&backend.http_addr).map_or(&[][..], Vec::as_slice);
            let charged: u64 = charges.iter().map(|(_, tokens)| tokens).sum();
            let recent = u64::try_from(charges.len()).unwrap_or(u64::MAX);
            let free = backend.free_tokens.saturating_sub(charged);
            let last = last.iter().any(|other| other.http_addr == backend.http_addr);
            (last, std::cmp::Reverse(free), backend.running + backend.waiting + recent)
        });
        self.charges.entry(backends[0].http_addr).or_default().push((now, tokens));
        backends.truncate(ATTEMPTS_MAX);
        backends
    }
}

pub(crate) fn none_alive() -> ApiError {
    ApiError::unavailable("no instance is alive")
}

/// The answer to a request that was lost with an instance.
pub(crate) fn lost(name: &str, why: &str) -> ApiError {
    let message = format!("the connection to {name} broke: {why}\nhint: send the request again");
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("instance_lost"), message)
}

pub(crate) fn count(backend: &Backend, status: &str) {
    let labels = [("instance", backend.name.clone()), ("status", status.to_owned())];
    metrics::counter!("lagoon_gateway_requests_total", &labels).increment(1);
}

/// Headers without those that concern one connection only.
pub(crate) fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    for name in HOP_HEADERS {
        kept.remove(name);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_freest_instance_is_first_and_bursts_spread() {
        let at = |port: u16, free_tokens, running| Backend {
            name: port.to_string(),
            http_addr: SocketAddr::from(([127, 0, 0, 1], port)),
            free_tokens,
            running,
            waiting: 0,
        };
        let mut dispatch = Dispatch::default();
        let mut now = Instant::now();
        let mut first = |backends: &[Backend], tokens, wait| {
            now += wait;
            dispatch.candidates(backends.to_vec(), &[], tokens, now)[0].http_addr.port()
        };
        let long = CHARGE_LIFETIME * 2;
        // Memory decides, whatever runs.
        let unequal = [at(1, 500, 0), at(2, 1000, 9)];
        assert_eq!(first(&unequal, 100, Duration::ZERO), 2);
        // Until the next report, what was sent there counts.
        assert_eq!([first(&unequal, 600, Duration::ZERO), first(&unequal, 100, Duration::ZERO)], [2, 1]);
        assert_eq!(first(&unequal, 100, long), 2);
        // One under which a request was lost is tried last.
        now += long;
        let last = dispatch.candidates(unequal.to_vec(), &unequal[1..], 100, now);
        assert_eq!(last.iter().map(|b| b.http_addr.port()).collect::<Vec<_>>(), [1, 2]);
        let mut first = |backends: &[Backend], tokens, wait| {
            now += wait;
            dispatch.candidates(backends.to_vec(), &[], tokens, now)[0].http_addr.port()
        };
        // At equal memory the fewest requests, then in turn.
        let busy = [at(1, 500, 2), at(2, 500, 1), at(3, 500, 2)];
        assert_eq!(first(&busy, 0, long), 2);
        let equal = [at(1, 500, 0), at(2, 500, 0), at(3, 500, 0)];
        let mut turns: Vec<_> = (0..6).map(|_| first(&equal, 100, long)).collect();
        turns.sort_unstable();
        assert_eq!(turns, [1, 1, 2, 2, 3, 3]);
        assert!(Dispatch::default().candidates(Vec::new(), &[], 1, now).is_empty());
    }
}
