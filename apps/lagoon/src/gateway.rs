//! One OpenAI endpoint over several instances: a reverse proxy that picks an instance per request.
//!
//! It holds no request: bodies stream through in both directions, and when a client goes away the connection to the
//! instance closes with it, which cancels the request there. A request is tried on another instance only while
//! nothing of it was sent; once an instance has begun to answer, its failure is the client's to see, as an error.

use crate::args::TlsArgs;
use crate::pool_client::PoolClient;
use crate::pool_watch::PoolWatch;
use anyhow::Context;
use axum::{
    Json, Router,
    body::{Body, BodyDataStream, Bytes, HttpBody},
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, response::Parts},
    response::{IntoResponse, Response},
    routing::get,
};
use futures::{Stream, StreamExt, stream};
use lagoon_http::{ApiError, server};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;
use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{self, Poll},
    time::{Duration, Instant},
};
use tokio::net::TcpListener;

/// Time to connect to an instance.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// Longest silence of an instance. Its own deadlines are shorter.
const SILENCE_DEADLINE: Duration = Duration::from_secs(3700);
/// Instances that one request is tried on.
const ATTEMPTS_MAX: usize = 4;
/// How long a request counts against its instance here; after that the instance's own reports have it.
const CHARGE_LIFETIME: Duration = Duration::from_secs(1);
/// What a request without a length is presumed to need, in tokens.
const CHARGE_TOKENS_DEFAULT: u64 = 1024;
/// Bytes of a request body that count as one token.
const BYTES_PER_TOKEN: u64 = 4;
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

/// The instances that are alive, as of now. It is called once per request and must not block.
pub(crate) type BackendSource = Arc<dyn Fn() -> Vec<Backend> + Send + Sync>;

/// The proxy.
pub(crate) struct Gateway {
    backends: BackendSource,
    http: reqwest::Client,
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
        backends: BackendSource,
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
        Ok(Self { backends, http, metrics, api_key, dispatch: Mutex::default() })
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

    /// Instances to try, best first, and a charge on the best one.
    fn candidates(&self, tokens: u64) -> Vec<Backend> {
        let backends = (self.backends)();
        let mut dispatch = self.dispatch.lock().unwrap_or_else(PoisonError::into_inner);
        dispatch.candidates(backends, tokens, Instant::now())
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
    fn candidates(&mut self, mut backends: Vec<Backend>, tokens: u64, now: Instant) -> Vec<Backend> {
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
            (std::cmp::Reverse(free), backend.running + backend.waiting + recent)
        });
        self.charges.entry(backends[0].http_addr).or_default().push((now, tokens));
        backends.truncate(ATTEMPTS_MAX);
        backends
    }
}

async fn health(State(gateway): State<Arc<Gateway>>) -> Result<impl IntoResponse, ApiError> {
    match (gateway.backends)().len() {
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

fn none_alive() -> ApiError {
    ApiError::unavailable("no instance is alive")
}

async fn proxy(State(gateway): State<Arc<Gateway>>, request: Request) -> Result<Response, ApiError> {
    let (head, body) = request.into_parts();
    let tokens = body.size_hint().exact().map_or(CHARGE_TOKENS_DEFAULT, |bytes| bytes / BYTES_PER_TOKEN);
    let target = head.uri.path_and_query().map_or("/", |target| target.as_str());
    let empty = body.is_end_stream();
    let body = OneBody::new(body);
    let mut last = None;
    for backend in gateway.candidates(tokens) {
        let mut request = gateway
            .http
            .request(head.method.clone(), format!("http://{}{target}", backend.http_addr))
            .headers(end_to_end(&head.headers));
        if !empty {
            request = request.body(reqwest::Body::wrap_stream(body.stream()));
        }
        match request.send().await {
            Ok(response) => return Ok(forward(&backend, response)),
            Err(error) if !body.begun() && (error.is_connect() || empty) => {
                tracing::warn!(instance = %backend.name, %error, "an instance could not be reached");
                metrics::counter!("lagoon_gateway_retries_total", "instance" => backend.name.clone()).increment(1);
                last = Some(backend.name);
            }
            Err(error) => {
                tracing::warn!(instance = %backend.name, ?error, "an instance failed before it answered");
                count(&backend, "lost");
                return Err(lost(&backend.name));
            }
        }
    }
    Err(match last {
        None => none_alive(),
        Some(name) => ApiError::unavailable(format!("no instance could be reached, lastly {name}")),
    })
}

fn lost(name: &str) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("instance_lost"), format!("the connection to {name} broke"))
}

fn count(backend: &Backend, status: &str) {
    let labels = [("instance", backend.name.clone()), ("status", status.to_owned())];
    metrics::counter!("lagoon_gateway_requests_total", &labels).increment(1);
}

/// Headers without those that concern one connection only.
fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    for name in HOP_HEADERS {
        kept.remove(name);
    }
    kept
}

/// The instance's response, streamed on.
fn forward(backend: &Backend, response: reqwest::Response) -> Response {
    count(backend, response.status().as_str());
    let mut reply = Response::new(());
    *reply.status_mut() = response.status();
    *reply.headers_mut() = end_to_end(response.headers());
    let name = HeaderValue::from_str(&backend.name).unwrap_or(HeaderValue::from_static("unprintable"));
    reply.headers_mut().insert(INSTANCE_HEADER, name);
    let (head, ()) = reply.into_parts();
    let body = if is_event_stream(&head) {
        Body::from_stream(with_last_words(backend.name.clone(), response.bytes_stream()))
    } else {
        Body::from_stream(response.bytes_stream())
    };
    Response::from_parts(head, body)
}

fn is_event_stream(head: &Parts) -> bool {
    let kind = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
}

/// When the instance is lost in the middle of an event stream, the client is told so by a last event.
fn with_last_words(
    name: String,
    chunks: impl Stream<Item = reqwest::Result<Bytes>> + Send + 'static,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    stream::unfold(Some((Box::pin(chunks), name)), |state| async move {
        let (mut chunks, name) = state?;
        match chunks.next().await? {
            Ok(chunk) => Some((Ok(chunk), Some((chunks, name)))),
            Err(error) => {
                tracing::warn!(instance = %name, ?error, "an instance was lost in the middle of an answer");
                // The cut may be inside an event: a line break first ends it.
                Some((Ok(Bytes::from(format!("\n\ndata: {}\n\n", lost(&name).body()))), None))
            }
        }
    })
}

/// A request's body that several attempts may be given, of which one reads it.
struct OneBody(Arc<Mutex<Option<BodyDataStream>>>);

impl OneBody {
    fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(Some(body.into_data_stream()))))
    }

    /// Whether an attempt has begun to read: then it cannot be repeated.
    fn begun(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn stream(&self) -> Taking {
        Taking { shared: Arc::clone(&self.0), own: None }
    }
}

/// One attempt's view of the body: it takes it when it is first read.
struct Taking {
    shared: Arc<Mutex<Option<BodyDataStream>>>,
    own: Option<BodyDataStream>,
}

impl Stream for Taking {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut task::Context<'_>) -> Poll<Option<Self::Item>> {
        if self.own.is_none() {
            let taken = self.shared.lock().unwrap_or_else(PoisonError::into_inner).take();
            self.own = taken;
        }
        match &mut self.own {
            Some(body) => body.poll_next_unpin(context),
            None => Poll::Ready(None),
        }
    }
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
    let metrics = lagoon_http::metrics::install().context("install the metrics recorder")?;
    let router = if args.gmanager.is_empty() {
        let backend = |addr: &SocketAddr| Backend {
            name: addr.to_string(),
            http_addr: *addr,
            free_tokens: 0,
            running: 0,
            waiting: 0,
        };
        let backends: Vec<_> = args.backends.iter().map(backend).collect();
        Gateway::new(Arc::new(move || backends.clone()), metrics, args.api_key)?.router()
    } else {
        let identity = args.tls.identity()?;
        let mut client = PoolClient::new(&args.gmanager, &identity)?;
        let state = client.state().await?;
        let watch = PoolWatch::start(client, state, args.block_tokens, stop.clone());
        let operator = watch.router(PoolClient::new(&args.gmanager, &identity)?, args.api_key.as_ref());
        let gateway = Gateway::new(Arc::new(move || watch.backends()), metrics, args.api_key)?;
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
mod tests;
