//! A pool's state at an endpoint over it (`lagoon up`, `lagoon gateway --gmanager`): queried from the leading gManager
//! a few times a second. While none answers, the last state is used, with its age. A new gManager starts with an empty
//! table: rows of the previous one are used until the instances have registered again, for at most [`POOL_HOLD_MS`].

use crate::admin::{self, Answer, Order};
use crate::jitter::jittered;
use crate::node_metrics::record_certificate;
use crate::pool_client::{PoolClient, PoolRow, PoolState, role_name};
use crate::shared_prefixes::SharedPrefixes;
use crate::upstreams::{Backend, Backends};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use lagoon_cluster::dispatch::{Elsewhere, InstanceLoad, Placed, Unreported};
use lagoon_protocol::{Calibration, PrefixesKnown, PrefixesPlaced, Role};
use lagoon_types::limits::POOL_HOLD_MS;
use serde_json::json;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

/// Interval of queries for the instances' loads.
const WATCH_EVERY: Duration = Duration::from_millis(250);
/// Deadline for a query that was sent after an order to be answered.
const LEARN_DEADLINE: Duration = Duration::from_secs(5);
/// Interval of checks for that answer.
const LEARN_LOOK: Duration = Duration::from_millis(10);

/// The latest state of a pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolWatch {
    known: Arc<RwLock<Known>>,
    prefixes: Arc<std::sync::Mutex<SharedPrefixes>>,
    /// Tokens in an rBlock of the pool.
    block_tokens: u32,
}

#[derive(Clone, Debug)]
struct Known {
    state: PoolState,
    /// When the query was sent that `state` answers.
    asked: Instant,
    /// When the first unanswered query was sent, since the last answer.
    silent_since: Option<Instant>,
    /// Rows of earlier terms in `state`, whose instances have not registered in the present term.
    held: Held,
}

/// Rows that the present gManager does not have yet.
#[derive(Clone, Debug, Default)]
struct Held {
    rows: Vec<PoolRow>,
    /// When the query was sent that they answered.
    asked: Option<Instant>,
    /// When they are dropped.
    until: Option<Instant>,
}

impl Held {
    /// Adds the held rows, as old as they are, to an answer of the gManager to a query of `now`. If its term is not that of `before`, all
    /// rows of `before`, which was asked for at `asked`, are held.
    fn complete(&mut self, mut answer: PoolState, (before, asked): (&PoolState, Instant), now: Instant) -> PoolState {
        if answer.gmanager.term != before.gmanager.term {
            self.rows.clone_from(&before.instances);
            self.asked = Some(asked);
            self.until = Some(now + Duration::from_millis(POOL_HOLD_MS));
        }
        if self.until.is_none_or(|until| now >= until) {
            self.rows.clear();
        }
        self.rows.retain(|held| answer.instances.iter().all(|row| row.http_addr != held.http_addr));
        let older = self.asked.map_or(Duration::ZERO, |asked| now.saturating_duration_since(asked));
        let older_ms = u64::try_from(older.as_millis()).unwrap_or(u64::MAX);
        let aged =
            |row: &PoolRow| PoolRow { heartbeat_age_ms: row.heartbeat_age_ms.saturating_add(older_ms), ..row.clone() };
        answer.instances.extend(self.rows.iter().map(aged));
        answer
    }
}

impl PoolWatch {
    /// Queries `client` until `stop`; `state` is the first state.
    pub(crate) fn start(mut client: PoolClient, state: PoolState, block_tokens: u32, stop: CancellationToken) -> Self {
        let known = Known { state, asked: Instant::now(), silent_since: None, held: Held::default() };
        let watch = Self::new(known, block_tokens);
        let asking = watch.clone();
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                let asked = Instant::now();
                match client.exchange(Some(asking.prefixes_to_share())).await {
                    Ok((state, prefixes)) => {
                        let term = state.gmanager.term;
                        asking.learn(Ok(state), asked);
                        prefixes.into_iter().for_each(|prefixes| asking.learn_prefixes(*prefixes, term));
                    }
                    Err(error) => asking.learn(Err(error), asked),
                }
                record_certificate(client.node());
                tokio::time::sleep(jittered(WATCH_EVERY)).await;
            }
        });
        watch
    }

    fn new(known: Known, block_tokens: u32) -> Self {
        let prefixes = Arc::new(std::sync::Mutex::new(SharedPrefixes::new(rand::random())));
        Self { known: Arc::new(RwLock::new(known)), prefixes, block_tokens }
    }

    fn prefixes_to_share(&self) -> Box<PrefixesPlaced> {
        self.prefixes_now().query(&self.known().state.instances)
    }

    fn learn_prefixes(&self, prefixes: PrefixesKnown, term: u64) {
        self.prefixes_now().learn(prefixes, &self.known().state.instances, term);
    }

    fn prefixes_now(&self) -> std::sync::MutexGuard<'_, SharedPrefixes> {
        self.prefixes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the answer to a query that was sent at `now`.
    fn learn(&self, answer: anyhow::Result<PoolState>, now: Instant) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        match (answer, known.silent_since) {
            (Ok(state), since) => {
                if let Some(since) = since {
                    tracing::warn!("a gManager answers again, after {} s", since.elapsed().as_secs());
                }
                let Known { state: before, held, asked, .. } = &mut *known;
                *before = held.complete(state, (&*before, *asked), now);
                *asked = now;
                known.silent_since = None;
            }
            (Err(error), None) => {
                tracing::warn!(%error, "no gManager answers: the pool's state is outdated");
                known.silent_since = Some(now);
            }
            (Err(_), Some(_)) => {}
        }
    }

    /// Waits until the state answers a query that was sent after `since`; false if none is answered within [`LEARN_DEADLINE`].
    ///
    /// An order that the gManager has accepted is in its answers from then on, and not in a state that was queried before.
    pub(crate) async fn has_learned_since(&self, since: Instant) -> bool {
        let learned = || self.known().asked > since;
        while !learned() && since.elapsed() < LEARN_DEADLINE {
            tokio::time::sleep(LEARN_LOOK).await;
        }
        learned()
    }

    fn known(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    fn state(&self) -> PoolState {
        self.known().state.clone()
    }

    /// An instance; none for a kv node, which has no HTTP server for clients.
    /// `asked`: when the query was sent that the row answers.
    fn backend(&self, row: &PoolRow, asked: Instant) -> Option<Backend> {
        let age = Duration::from_millis(row.heartbeat_age_ms);
        Some(Backend {
            name: row.name.clone(),
            http_addr: row.http_addr.parse().ok()?,
            load: InstanceLoad {
                calibration: row.calibration.as_ref().map(Calibration::from),
                load: row.load.clone(),
                prefills: row.role == role_name(Role::Instance),
                block_tokens: self.block_tokens,
                blocks_total: row.blocks_total,
                blocks_free: row.blocks_free,
                tier_blocks: row.cache.as_ref().map_or(0, |cache| cache.host_blocks.max(cache.disk_blocks)),
                blocks_lend_max: row.blocks_lend_max,
                blocks_lent: row.blocks_lent,
                incarnation: row.incarnation,
                running: row.requests_running,
                waiting: row.requests_waiting,
                unreported: Unreported::default(),
            },
            reported: asked.checked_sub(age).unwrap_or(asked),
        })
    }

    /// Whether an instance takes clients' requests. During a role change, both roles must.
    fn serves(row: &PoolRow) -> bool {
        let takes = |role: &str| role == "instance" || role == "decode";
        row.alive && !row.draining && takes(&row.role) && row.becoming.as_deref().is_none_or(takes)
    }

    /// As [`admin::state_json`], with the time without an answer.
    fn status(&self) -> serde_json::Value {
        let Known { state, silent_since, .. } = &*self.known();
        let mut status = admin::state_json(state);
        if let Some(since) = silent_since {
            status["gmanager"]["silent_s"] = since.elapsed().as_secs().into();
        }
        status
    }

    /// Routes `/lagoon/status`, and `/lagoon/admin` with orders through `operator`.
    pub(crate) fn router(&self, operator: PoolClient) -> axum::Router {
        let watch = self.clone();
        let status = get(move || async move { Json(watch.status()) });
        let orders = post(order).with_state((Arc::new(Mutex::new(operator)), self.clone()));
        axum::Router::new().route("/lagoon/status", status).route("/lagoon/admin", orders)
    }
}

impl Backends for PoolWatch {
    fn silent_for(&self) -> Option<Duration> {
        self.known().silent_since.map(|since| since.elapsed())
    }

    fn serving(&self) -> Vec<Backend> {
        let Known { state, asked, .. } = &*self.known();
        state.instances.iter().filter(|row| Self::serves(row)).filter_map(|row| self.backend(row, *asked)).collect()
    }

    fn asked(&self) -> Option<Instant> {
        Some(self.known().asked)
    }

    fn elsewhere(&self) -> Elsewhere {
        let Known { state, .. } = &*self.known();
        let lenders = || state.instances.iter().filter(|row| row.alive && !row.draining && !Self::serves(row));
        let lendable = |row: &PoolRow| row.blocks_lend_max.saturating_sub(row.blocks_lent).min(row.blocks_free);
        Elsewhere {
            blocks_total: lenders().map(|row| u64::from(row.blocks_lend_max)).sum(),
            blocks_lendable: lenders().map(|row| u64::from(lendable(row))).sum(),
        }
    }

    fn share_prefixes(&self, placed: Vec<Placed<SocketAddr>>) {
        self.prefixes_now().add_own(placed);
    }

    fn shared_prefixes(&self) -> Vec<Placed<SocketAddr>> {
        self.prefixes_now().take()
    }

    fn scraped(&self) -> Vec<Backend> {
        let Known { state, asked, .. } = &*self.known();
        state.instances.iter().filter(|row| row.alive).filter_map(|row| self.backend(row, *asked)).collect()
    }

    fn knows(&self, name: &str) -> bool {
        self.known().state.instances.iter().any(|row| row.name == name)
    }

    fn is_dead(&self, http_addr: SocketAddr) -> bool {
        let Known { state, .. } = &*self.known();
        let mut rows = state.instances.iter().filter(|row| row.http_addr.parse() == Ok(http_addr)).peekable();
        rows.peek().is_some() && rows.all(|row| !row.alive)
    }
}

/// Serves `POST /lagoon/admin` ([`admin::Operator::Http`]). After the reply, `/lagoon/status` shows the order.
async fn order(
    State((client, watch)): State<(Arc<Mutex<PoolClient>>, PoolWatch)>,
    Json(order): Json<Order>,
) -> Response {
    let reply = client.lock().await.admin(order.into()).await;
    if reply.is_ok() && order.changes_status() && !watch.has_learned_since(Instant::now()).await {
        tracing::warn!(
            "an order was accepted, and the gManager has not answered since: the status does not show it yet"
        );
    }
    match reply {
        Ok(reply) => Json(Answer::from(reply)).into_response(),
        Err(error) => {
            let body = json!({ "error": { "message": format!("{error:#}"), "code": "order_refused" } });
            (StatusCode::CONFLICT, Json(body)).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool_client::GManagerRow;
    use lagoon_protocol::InstanceStatus;

    fn row(port: u16, alive: bool) -> PoolRow {
        let status = InstanceStatus {
            instance: port.into(),
            name: format!("instance-{port}"),
            http_addr: format!("127.0.0.1:{port}"),
            alive,
            ..InstanceStatus::default()
        };
        status.into()
    }

    fn state(term: u64, instances: Vec<PoolRow>) -> PoolState {
        PoolState { gmanager: GManagerRow { term, ..GManagerRow::default() }, instances }
    }

    fn addr(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn serving(watch: &PoolWatch) -> Vec<u16> {
        let mut ports: Vec<u16> = watch.serving().iter().map(|backend| backend.http_addr.port()).collect();
        ports.sort_unstable();
        ports
    }

    #[test]
    fn instances_serve_on_while_they_register_with_a_new_gmanager() {
        let first = state(1, vec![row(1, true), row(2, true), row(3, false)]);
        let known = Known { state: first, asked: Instant::now(), silent_since: None, held: Held::default() };
        let watch = PoolWatch::new(known, 16);
        let (start, hold) = (Instant::now(), Duration::from_millis(POOL_HOLD_MS));
        watch.learn(Err(anyhow::anyhow!("no answer")), start);
        watch.learn(Ok(state(2, vec![])), start);
        assert_eq!(serving(&watch), [1, 2]);
        assert!(!watch.is_dead(addr(1)) && watch.is_dead(addr(3)) && watch.knows("instance-1"));
        // The new gManager's row replaces the held one, also if the instance dies or deregisters afterwards.
        watch.learn(Ok(state(2, vec![row(1, true)])), start + hold / 2);
        assert_eq!(serving(&watch), [1, 2]);
        assert_eq!(watch.state().instances.len(), 3);
        // It is as old as it is: what it says of its load is not new.
        let ages: Vec<u64> = watch.state().instances.iter().map(|row| row.heartbeat_age_ms).collect();
        assert!(ages[0] == 0 && ages[1..].iter().all(|age_ms| *age_ms >= POOL_HOLD_MS / 2), "{ages:?}");
        watch.learn(Ok(state(2, vec![row(1, false)])), start + hold / 2);
        assert_eq!(serving(&watch), [2]);
        assert!(watch.is_dead(addr(1)));
        watch.learn(Ok(state(2, vec![])), start + hold / 2);
        assert_eq!(serving(&watch), [2]);
        // A gManager that is replaced meanwhile extends the time.
        watch.learn(Ok(state(3, vec![])), start + hold / 2);
        watch.learn(Ok(state(3, vec![])), start + hold);
        assert_eq!(serving(&watch), [2]);
        watch.learn(Ok(state(3, vec![])), start + hold / 2 + hold);
        assert!(serving(&watch).is_empty(), "who has not registered by now is gone");
        assert!(!watch.knows("instance-2"));
    }

    /// `lagoon role --wait --url` once read a state from before its order, and reported that the order was lost.
    #[tokio::test]
    async fn a_state_from_before_an_order_is_not_taken_for_one_after() {
        let known = Known { state: state(1, vec![]), asked: Instant::now(), silent_since: None, held: Held::default() };
        let watch = PoolWatch::new(known, 16);
        let ordered = Instant::now();
        // This query was in flight when the order was accepted.
        watch.learn(Ok(state(1, vec![row(1, true)])), ordered);
        let (looking, learning) = (watch.clone(), watch.clone());
        let looked = tokio::spawn(async move { (looking.has_learned_since(ordered).await, looking.state()) });
        tokio::task::yield_now().await;
        assert!(!looked.is_finished());
        learning.learn(Ok(state(1, vec![row(1, true), row(2, true)])), ordered + Duration::from_millis(1));
        let (learned, state) = looked.await.unwrap();
        assert!(learned && state.instances.len() == 2, "{state:?}");
    }
}
