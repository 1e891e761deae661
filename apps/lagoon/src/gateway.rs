//! One OpenAI endpoint over several instances: a reverse proxy that picks an instance per request.
//!
//! It knows no model: a request's body is kept until it is answered, answers stream through, and when a client goes away
//! the connection to the instance closes with it, which cancels the request there. When an instance is lost, another one
//! goes on with its requests ([`crate::replay`]).

use crate::args::TlsArgs;
use crate::metrics_table;
use crate::pool_client::PoolClient;
use crate::pool_watch::PoolWatch;
use crate::replay::{self, Attempts, Repeatable, ReplayLimits};
use anyhow::Context;
use axum::{
    Json, Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use lagoon_http::{ApiError, server};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Time to connect to an instance.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// Longest silence of an instance. Its own deadlines are shorter.
const SILENCE_DEADLINE: Duration = Duration::from_secs(3700);
/// Instances that one request is tried on.
const ATTEMPTS_MAX: usize = 4;
/// How long a request counts against its instance here; after that the instance's own reports have it.
const CHARGE_LIFETIME: Duration = Duration::from_secs(1);
/// Names the instance that answered.
const INSTANCE_HEADER: HeaderName = HeaderName::from_static("x-lagoon-instance");
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
}

/// A list of servers of which nothing more is known.
impl Backends for Vec<Backend> {
    fn serving(&self) -> Vec<Backend> {
        self.clone()
    }

    fn is_dead(&self, _http_addr: SocketAddr) -> bool {
        false
    }
}

/// The proxy.
pub(crate) struct Gateway {
    pub(crate) backends: Arc<dyn Backends>,
    pub(crate) http: reqwest::Client,
    pub(crate) limits: ReplayLimits,
    bodies: Arc<Semaphore>,
    metrics: PrometheusHandle,
    /// Guards the gateway's own `/metrics`; requests for instances carry their key there.
    api_key: Option<String>,
    dispatch: Mutex<Dispatch>,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("dispatch", &self.dispatch).finish_non_exhaustive()
    }
}

impl Gateway {
    /// # Errors
    /// When the HTTP client cannot be set up.
    pub(crate) fn new(
        backends: Arc<dyn Backends>,
        metrics: PrometheusHandle,
        api_key: Option<String>,
    ) -> anyhow::Result<Self> {
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
        let (limits, bodies) = (ReplayLimits::default(), replay::bodies());
        Ok(Self { backends, http, limits, bodies, metrics, api_key, dispatch: Mutex::default() })
    }

    #[cfg(test)]
    fn with_limits(self, limits: ReplayLimits) -> Self {
        Self { limits, ..self }
    }

    /// `/health` and `/metrics` are the gateway's own; everything else goes to an instance.
    pub(crate) fn router(self) -> Router {
        Router::new()
            .route("/health", get(health))
            .route("/metrics", get(show_metrics))
            .fallback(proxy)
            .method_not_allowed_fallback(server::wrong_method)
            .with_state(Arc::new(self))
    }

    /// Instances to try, best first, those of `last` behind all others, and a charge on the first one.
    pub(crate) fn candidates(&self, tokens: u64, last: &[Backend]) -> Vec<Backend> {
        let backends = self.backends.serving();
        let mut dispatch = self.dispatch.lock().unwrap_or_else(PoisonError::into_inner);
        dispatch.candidates(backends, last, tokens, Instant::now())
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

async fn health(State(gateway): State<Arc<Gateway>>) -> Result<impl IntoResponse, ApiError> {
    match gateway.backends.serving().len() {
        0 => Err(none_alive()),
        instances => Ok(Json(json!({ "status": "ok", "instances": instances }))),
    }
}

async fn show_metrics(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Result<impl IntoResponse, ApiError> {
    if gateway.api_key.as_ref().is_some_and(|key| !server::bears_key(&headers, key)) {
        return Err(server::unauthorized());
    }
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], gateway.metrics.render()))
}

pub(crate) fn none_alive() -> ApiError {
    ApiError::unavailable("no instance is alive")
}

async fn proxy(State(gateway): State<Arc<Gateway>>, request: Request) -> Result<Response, ApiError> {
    let request = Repeatable::read(&gateway.bodies, request).await?;
    let mut attempts = Attempts::new(gateway, request);
    let (backend, response) = attempts.respond(None).await?;
    Ok(forward(attempts, backend, response))
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

/// The instance's response, streamed on.
fn forward(attempts: Attempts, backend: Backend, response: reqwest::Response) -> Response {
    count(&backend, response.status().as_str());
    let mut reply = Response::new(());
    *reply.status_mut() = response.status();
    *reply.headers_mut() = end_to_end(response.headers());
    let name = HeaderValue::from_str(&backend.name).unwrap_or(HeaderValue::from_static("unprintable"));
    reply.headers_mut().insert(INSTANCE_HEADER, name);
    let (head, ()) = reply.into_parts();
    let body = if replay::is_event_stream(&response) {
        Body::from_stream(attempts.events(backend, response))
    } else {
        Body::from_stream(response.bytes_stream())
    };
    Response::from_parts(head, body)
}

/// One OpenAI endpoint over several servers.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GatewayArgs {
    /// Where to listen.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// A server to dispatch to; repeat it. Their load is unknown here, so requests go round.
    #[arg(long = "backend", value_name = "ADDR", required_unless_present = "gmanager", conflicts_with = "gmanager")]
    backends: Vec<SocketAddr>,
    /// Dispatch to this pool's instances by their free memory (ip:port of the gManager's QUIC endpoint; of several,
    /// comma-separated, the one that leads).
    #[arg(long, value_name = "ADDR", value_delimiter = ',')]
    gmanager: Vec<SocketAddr>,
    /// Tokens in an rBlock of the pool.
    #[arg(long, value_name = "N", default_value_t = lagoon_types::limits::BLOCK_TOKENS_DEFAULT, requires = "gmanager")]
    block_tokens: u32,
    #[command(flatten)]
    tls: TlsArgs,
    /// The key that guards the gateway's own /metrics. Instances check the clients' keys.
    #[arg(long, env = "LAGOON_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Print one JSON object when ready.
    #[arg(long)]
    json: bool,
    /// Stop when standard input ends.
    #[arg(long, hide = true)]
    exit_with_stdin: bool,
}

/// Runs a gateway over a fixed list of servers, or the instances of a pool, until Ctrl-C.
///
/// # Errors
/// When the address cannot be listened on, or the pool's gManager does not answer.
pub(crate) async fn run(args: GatewayArgs) -> anyhow::Result<()> {
    let stop = crate::shutdown::token(args.exit_with_stdin);
    let metrics = lagoon_http::metrics::install(&[metrics_table::GATEWAY]).context("install the metrics recorder")?;
    let router = if args.gmanager.is_empty() {
        let backend = |addr: &SocketAddr| Backend {
            name: addr.to_string(),
            http_addr: *addr,
            free_tokens: 0,
            running: 0,
            waiting: 0,
        };
        let backends: Vec<_> = args.backends.iter().map(backend).collect();
        Gateway::new(Arc::new(backends), metrics, args.api_key)?.router()
    } else {
        let identity = args.tls.identity()?;
        let mut client = PoolClient::new(&args.gmanager, &identity)?;
        let state = client.state().await?;
        let watch = PoolWatch::start(client, state, args.block_tokens, stop.clone());
        let operator = watch.router(PoolClient::new(&args.gmanager, &identity)?, args.api_key.as_ref());
        let gateway = Gateway::new(Arc::new(watch), metrics, args.api_key)?;
        operator.fallback_service(gateway.router())
    };
    let listener = TcpListener::bind(args.listen).await.with_context(|| {
        format!("listen on {}\nhint: another program may use the port; `--listen` names another", args.listen)
    })?;
    announce(&listener, args.json)?;
    lagoon_http::serve(listener, router, stop.cancelled_owned()).await.context("serve the gateway")
}

#[allow(clippy::print_stdout, reason = "a command's answer goes to stdout")]
fn announce(listener: &TcpListener, as_json: bool) -> anyhow::Result<()> {
    let http = listener.local_addr()?.to_string();
    if as_json {
        println!("{}", json!({ "ready": true, "http": http }));
    } else {
        println!("OpenAI endpoint http://{http}/v1");
    }
    Ok(())
}

#[cfg(test)]
#[path = "gateway_tests.rs"]
pub(crate) mod tests;
