//! What an endpoint over a pool (`lagoon up`, `lagoon gateway --gmanager`) knows of it: asked of the gManager that leads, a
//! few times a second; when none answers the last state stands.

use crate::admin;
use crate::pool_client::{PoolClient, PoolRow, PoolState};
use crate::serve::guarded;
use crate::upstreams::{Backend, Backends};
use axum::Json;
use axum::routing::{get, post};
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

/// How often the instances' loads are asked for.
const WATCH_EVERY: Duration = Duration::from_millis(250);

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct PoolWatch {
    state: Arc<RwLock<PoolState>>,
    /// Tokens in an rBlock of the pool.
    block_tokens: u64,
}

impl PoolWatch {
    /// Asks `client` until `stop`; `state` is what is known now.
    pub(crate) fn start(mut client: PoolClient, state: PoolState, block_tokens: u32, stop: CancellationToken) -> Self {
        let watch = Self { state: Arc::new(RwLock::new(state)), block_tokens: block_tokens.into() };
        let state = watch.state.clone();
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                match client.state().await {
                    Ok(now) => *state.write().unwrap_or_else(PoisonError::into_inner) = now,
                    Err(error) => tracing::warn!(%error, "the pool's state is unknown"),
                }
                tokio::time::sleep(WATCH_EVERY).await;
            }
        });
        watch
    }

    fn state(&self) -> PoolState {
        self.state.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// `/lagoon/status`, and `/lagoon/admin` whose orders go through `operator`.
    pub(crate) fn router(&self, operator: PoolClient, api_key: Option<&String>) -> axum::Router {
        let watch = self.clone();
        let status = get(move || async move { Json(admin::state_json(&watch.state())) });
        let orders = post(admin::serve).with_state(Arc::new(Mutex::new(operator)));
        axum::Router::new()
            .route("/lagoon/status", guarded(status, api_key.cloned()))
            .route("/lagoon/admin", guarded(orders, api_key.cloned()))
    }
}

impl Backends for PoolWatch {
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
        // One whose role changes must do so before and afterwards.
        let takes = |role: &str| role == "instance" || role == "decode";
        let serves = |r: &&PoolRow| r.alive && !r.draining && takes(&r.role) && r.becoming.as_deref().is_none_or(takes);
        self.state().instances.iter().filter(serves).filter_map(backend).collect()
    }

    fn is_dead(&self, http_addr: SocketAddr) -> bool {
        let state = self.state();
        let mut rows = state.instances.iter().filter(|row| row.http_addr.parse() == Ok(http_addr)).peekable();
        rows.peek().is_some() && rows.all(|row| !row.alive)
    }
}
