//! A pool's state at an endpoint over it (`lagoon up`, `lagoon gateway --gmanager`): queried from the leading gManager
//! a few times a second. While none answers, the last state is used, with its age.

use crate::admin;
use crate::node_metrics::record_certificate;
use crate::pool_client::{PoolClient, PoolRow, PoolState};
use crate::upstreams::{Backend, Backends};
use axum::Json;
use axum::routing::{get, post};
use rand::Rng as _;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

/// Interval of queries for the instances' loads.
const WATCH_EVERY: Duration = Duration::from_millis(250);

/// The latest state of a pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolWatch {
    known: Arc<RwLock<Known>>,
    /// Tokens in an rBlock of the pool.
    block_tokens: u64,
}

#[derive(Clone, Debug)]
struct Known {
    state: PoolState,
    /// When the first unanswered query was sent, since the last answer.
    silent_since: Option<Instant>,
}

impl PoolWatch {
    /// Queries `client` until `stop`; `state` is the first state.
    pub(crate) fn start(mut client: PoolClient, state: PoolState, block_tokens: u32, stop: CancellationToken) -> Self {
        let known = Known { state, silent_since: None };
        let watch = Self { known: Arc::new(RwLock::new(known)), block_tokens: block_tokens.into() };
        let asking = watch.clone();
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                asking.learn(client.state().await);
                record_certificate(client.node());
                // Spread, so that gateways do not ask in step.
                let pause = WATCH_EVERY.mul_f64(rand::rng().random_range(0.75..1.25));
                tokio::time::sleep(pause).await;
            }
        });
        watch
    }

    fn learn(&self, answer: anyhow::Result<PoolState>) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        match (answer, known.silent_since) {
            (Ok(state), since) => {
                if let Some(since) = since {
                    tracing::warn!("a gManager answers again, after {} s", since.elapsed().as_secs());
                }
                *known = Known { state, silent_since: None };
            }
            (Err(error), None) => {
                tracing::warn!(%error, "no gManager answers: the pool's state is outdated");
                known.silent_since = Some(Instant::now());
            }
            (Err(_), Some(_)) => {}
        }
    }

    fn known(&self) -> Known {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn state(&self) -> PoolState {
        self.known().state
    }

    /// As [`admin::state_json`], with the time without an answer.
    fn status(&self) -> serde_json::Value {
        let Known { state, silent_since } = self.known();
        let mut status = admin::state_json(&state);
        if let Some(since) = silent_since {
            status["gmanager"]["silent_s"] = since.elapsed().as_secs().into();
        }
        status
    }

    /// Routes `/lagoon/status`, and `/lagoon/admin` with orders through `operator`.
    pub(crate) fn router(&self, operator: PoolClient) -> axum::Router {
        let watch = self.clone();
        let status = get(move || async move { Json(watch.status()) });
        let orders = post(admin::serve).with_state(Arc::new(Mutex::new(operator)));
        axum::Router::new().route("/lagoon/status", status).route("/lagoon/admin", orders)
    }
}

impl Backends for PoolWatch {
    fn silent_for(&self) -> Option<Duration> {
        self.known().silent_since.map(|since| since.elapsed())
    }

    fn serving(&self) -> Vec<Backend> {
        let backend = |row: &PoolRow| {
            Some(Backend {
                name: row.name.clone(),
                http_addr: row.http_addr.parse().ok()?,
                free_tokens: u64::from(row.blocks_free) * self.block_tokens,
                running: u64::from(row.requests_running),
                waiting: u64::from(row.requests_waiting),
            })
        };
        // During a role change, both roles must take requests.
        let takes = |role: &str| role == "instance" || role == "decode";
        let serves = |r: &&PoolRow| r.alive && !r.draining && takes(&r.role) && r.becoming.as_deref().is_none_or(takes);
        self.state().instances.iter().filter(serves).filter_map(backend).collect()
    }

    fn knows(&self, name: &str) -> bool {
        self.state().instances.iter().any(|row| row.name == name)
    }

    fn is_dead(&self, http_addr: SocketAddr) -> bool {
        let state = self.state();
        let mut rows = state.instances.iter().filter(|row| row.http_addr.parse() == Ok(http_addr)).peekable();
        rows.peek().is_some() && rows.all(|row| !row.alive)
    }
}
