//! The instances behind a gateway: dispatch of requests, and whether a silent instance is dead.

use crate::gateway_counts::GatewayCounts;
use crate::retry_budget::RetryBudget;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use lagoon_http::ApiError;
use lagoon_http::client::{Client, ClientConfig};
use lagoon_http::tls::ClientTls;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time to connect to an instance.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// Longest silence of an instance. Its own deadlines are shorter.
const SILENCE_DEADLINE: Duration = Duration::from_secs(3700);
/// Maximum of instances tried for one request.
const ATTEMPTS_MAX: usize = 4;
/// How long a request counts against its instance here; then the instance's own reports include it.
const CHARGE_LIFETIME: Duration = Duration::from_secs(1);
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

/// An instance's HTTP server, and its last reported load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Backend {
    /// Its name in `x-lagoon-instance`: letters, digits and signs.
    pub(crate) name: String,
    pub(crate) http_addr: SocketAddr,
    /// Free tokens of its KV memory.
    pub(crate) free_tokens: u64,
    pub(crate) running: u64,
    pub(crate) waiting: u64,
}

/// The present instances. Called for every request; must not block.
pub(crate) trait Backends: Send + Sync {
    /// Instances that take requests.
    fn serving(&self) -> Vec<Backend>;

    /// Instances whose metrics are read: also those that take no requests.
    fn scraped(&self) -> Vec<Backend> {
        self.serving()
    }

    /// Whether the instance at this address is known to be dead; false if unknown.
    fn is_dead(&self, http_addr: SocketAddr) -> bool;

    /// Whether an instance of this name is in the pool; it may have been lost lately.
    fn knows(&self, name: &str) -> bool;

    /// For how long no state has arrived, if so; the last state is used.
    fn silent_for(&self) -> Option<Duration>;
}

/// A fixed list of servers, without further state.
impl Backends for Vec<Backend> {
    fn serving(&self) -> Vec<Backend> {
        self.clone()
    }

    fn is_dead(&self, _http_addr: SocketAddr) -> bool {
        false
    }

    fn knows(&self, name: &str) -> bool {
        self.iter().any(|backend| backend.name == name)
    }

    fn silent_for(&self) -> Option<Duration> {
        None
    }
}

/// Instances, their HTTP client, and recent dispatches.
pub(crate) struct Upstreams {
    backends: Arc<dyn Backends>,
    pub(crate) http: Client,
    scheme: &'static str,
    dispatch: Mutex<Dispatch>,
    retries: Mutex<RetryBudget>,
    pub(crate) counts: Arc<GatewayCounts>,
}

impl std::fmt::Debug for Upstreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstreams").field("dispatch", &self.dispatch).finish_non_exhaustive()
    }
}

impl Upstreams {
    /// Reaches instances over TLS with `tls`, else plain HTTP.
    pub(crate) fn new(backends: Arc<dyn Backends>, tls: Option<Arc<ClientTls>>) -> Self {
        // No kept connections: one may turn out dead after part of a request was sent; a new one costs microseconds,
        // with TLS a round trip and a signature.
        let config = ClientConfig { connect: CONNECT_DEADLINE, silence: SILENCE_DEADLINE, idle_max: 0 };
        let scheme = if tls.is_some() { "https" } else { "http" };
        let retries = Mutex::new(RetryBudget::new(Instant::now()));
        Self {
            backends,
            http: Client::new(config, tls),
            scheme,
            dispatch: Mutex::default(),
            retries,
            counts: Arc::default(),
        }
    }

    /// Another pool's instances, with the same client and counters.
    pub(crate) fn beside(&self, backends: Arc<dyn Backends>) -> Self {
        Self {
            backends,
            http: self.http.clone(),
            scheme: self.scheme,
            dispatch: Mutex::default(),
            retries: Mutex::new(RetryBudget::new(Instant::now())),
            counts: Arc::clone(&self.counts),
        }
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

    /// Instances to try, best first; those in `last` and those that requested a pause at the end. Charges the first
    /// one.
    pub(crate) fn candidates(&self, tokens: u64, last: &[Backend]) -> Vec<Backend> {
        let backends = self.backends.serving();
        let now = Instant::now();
        let retries = self.retries();
        let rests = backends.iter().filter(|backend| retries.is_resting(backend.http_addr, now)).cloned();
        let last: Vec<Backend> = rests.chain(last.iter().cloned()).collect();
        drop(retries);
        let mut dispatch = self.dispatch.lock().unwrap_or_else(PoisonError::into_inner);
        dispatch.candidates(backends, &last, tokens, now)
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

/// Recent dispatches, which the instances' reports may not include yet: without them, a burst between two reports would
/// go to one instance.
#[derive(Debug, Default)]
struct Dispatch {
    /// By instance: time and tokens of each.
    charges: BTreeMap<SocketAddr, Vec<(Instant, u64)>>,
    round: usize,
}

impl Dispatch {
    /// Sorts by most free memory, then fewest requests, then round-robin.
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

pub(crate) fn none_alive() -> ApiError {
    ApiError::unavailable("no instance is alive")
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
