//! One OpenAI endpoint over several instances: a reverse proxy that picks an instance per request.
//!
//! It knows no model, but for the name in a request where it has several pools ([`crate::pools`]): a request's body is kept until
//! it is answered, responses stream through, and when a client disconnects, the connection to the instance closes with it, which
//! cancels the request there. When an instance is lost, another one goes on with its requests ([`crate::replay`]).

use crate::args::TlsArgs;
use crate::front_args::FrontArgs;
use crate::health_port::{HealthArgs, Metrics};
use crate::hosts::{self, HostPortArgs};
use crate::log;
use crate::metrics_table;
use crate::pool_client::PoolClient;
use crate::pool_metrics::PoolMetrics;
use crate::pool_watch::PoolWatch;
use crate::pools::Pools;
use crate::port::{self, PortArgs};
use crate::replay::{self, Attempts, Repeatable, ReplayLimits};
use crate::upstreams::{Backend, Backends, Upstreams, end_to_end, none_alive, render_counts};
use anyhow::Context;
use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get},
};
use lagoon_cluster::dispatch::{InstanceLoad, Mode};
use lagoon_http::access::REPORT_HEADER;
use lagoon_http::client::Response as Answer;
use lagoon_http::keys::METRICS_PATH;
use lagoon_http::metrics::Compat;
use lagoon_http::tls::ClientTls;
use lagoon_http::{ApiError, Bodies, Caller, Limits, TextJobs, journal, server};
use lagoon_transport::NodeRole;
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;
use std::{net::SocketAddr, sync::Arc, time::Instant};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Response header with the name of the instance that answered.
const INSTANCE_HEADER: HeaderName = HeaderName::from_static("x-lagoon-instance");
/// The proxy.
pub(crate) struct Gateway {
    pools: Arc<Pools>,
    limits: ReplayLimits,
    bodies: Bodies,
    metrics: PoolMetrics,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("pools", &self.pools).finish_non_exhaustive()
    }
}

impl Gateway {
    /// A gateway over `backends`, by TLS with `tls`, else plain HTTP.
    pub(crate) fn new(
        backends: Arc<dyn Backends>,
        metrics: PrometheusHandle,
        tls: Option<Arc<ClientTls>>,
        dispatch: DispatchArgs,
    ) -> Self {
        Self::over(vec![backends], metrics, tls, dispatch)
    }

    /// A gateway over several pools, at least one.
    pub(crate) fn over(
        pools: Vec<Arc<dyn Backends>>,
        metrics: PrometheusHandle,
        tls: Option<Arc<ClientTls>>,
        dispatch: DispatchArgs,
    ) -> Self {
        let mode = dispatch.mode();
        let mut upstreams: Vec<Arc<Upstreams>> = Vec::new();
        for backends in pools {
            upstreams.push(Arc::new(match upstreams.first() {
                Some(first) => first.beside(backends, mode),
                None => Upstreams::new(backends, tls.clone(), mode),
            }));
        }
        let metrics = PoolMetrics::new(metrics, None);
        let pools = Arc::new(Pools::new(upstreams));
        Self { pools, limits: ReplayLimits::default(), bodies: Bodies::default(), metrics }
    }

    /// Exports the metrics of instances under another server's names, too.
    pub(crate) fn with_compat(self, compat: Option<Compat>) -> Self {
        Self { metrics: PoolMetrics::new(self.metrics.own(), compat), ..self }
    }

    #[cfg(test)]
    fn with_limits(self, limits: ReplayLimits) -> Self {
        Self { limits, ..self }
    }

    /// The metrics of this process, for the health port: the recorder's, and the counters by instance.
    fn shown(&self) -> Metrics {
        let (metrics, pools) = (self.metrics.own(), Arc::clone(&self.pools));
        Arc::new(move || lagoon_http::metrics::render(&metrics, None) + &render_counts(pools.all()))
    }

    /// The gateway's routes: `/health` and `/metrics` are its own; all others go to an instance. Keys are checked
    /// before.
    pub(crate) fn router(self) -> Router {
        let (bodies, gateway) = (self.bodies.clone(), Arc::new(self));
        // Replay sees chat requests only.
        let chat = Router::new().fallback(proxy).with_state(Arc::clone(&gateway));
        let translated = lagoon_http::translated(chat, bodies, TextJobs::default(), Limits::default());
        let several = Router::new()
            .route("/v1/models", get(models))
            .route("/models", get(models))
            .route("/v1/models/{*id}", get(model));
        let router = Router::new().route("/health", get(health)).route(METRICS_PATH, get(show_metrics));
        let router = if gateway.pools.are_several() { router.merge(several) } else { router };
        router.fallback(proxy).with_state(gateway).merge(translated).method_not_allowed_fallback(server::wrong_method)
    }
}

async fn health(State(gateway): State<Arc<Gateway>>) -> Result<impl IntoResponse, ApiError> {
    let pools = gateway.pools.all();
    match pools.iter().map(|pool| pool.serving().len()).sum::<usize>() {
        0 => Err(none_alive()),
        instances => Ok(Json(match pools.iter().find_map(|pool| pool.silent_for()) {
            None => json!({ "status": "ok", "instances": instances }),
            Some(silent) => json!({
                "status": "degraded", "instances": instances,
                "reason": format!("no gManager has answered for {} s", silent.as_secs()),
            }),
        })),
    }
}

async fn show_metrics(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Result<Response, ApiError> {
    let text = gateway.metrics.text(gateway.pools.all(), headers.get(header::AUTHORIZATION)).await?;
    Ok(lagoon_http::metrics::response(text))
}

async fn models(State(gateway): State<Arc<Gateway>>) -> impl IntoResponse {
    Json(gateway.pools.list().await)
}

async fn model(State(gateway): State<Arc<Gateway>>, Path(id): Path<String>) -> Result<impl IntoResponse, ApiError> {
    gateway.pools.describe(&id).await.map(Json)
}

/// Administration is one pool's.
async fn no_administration() -> ApiError {
    let message = "this gateway has several pools, and administers none\n\
                   hint: name a pool's gManager, as in `lagoon status --gmanager ADDR`, with certificates";
    ApiError::new(StatusCode::NOT_FOUND, Some("several_pools"), message)
}

async fn proxy(State(gateway): State<Arc<Gateway>>, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let request = Repeatable::read(&gateway.bodies, request).await?;
    let upstreams = gateway.pools.of(&request).await?;
    let mut attempts = Attempts::new(upstreams, gateway.limits, request, caller);
    let (backend, response) = attempts.respond(None).await?;
    Ok(forward(attempts, backend, response))
}

/// The instance's response, streamed on.
fn forward(mut attempts: Attempts, backend: Backend, response: Answer) -> Response {
    attempts.count(&backend, &response);
    let mut reply = Response::new(());
    *reply.status_mut() = response.status();
    *reply.headers_mut() = end_to_end(response.headers());
    let name = HeaderValue::from_str(&backend.name).unwrap_or(HeaderValue::from_static("unprintable"));
    reply.headers_mut().insert(INSTANCE_HEADER, name);
    reply.headers_mut().remove(journal::TOKENS_HEADER);
    reply.headers_mut().remove(REPORT_HEADER);
    let (head, ()) = reply.into_parts();
    let body = if replay::is_event_stream(&response) {
        Body::from_stream(attempts.events(backend, response))
    } else {
        Body::from_stream(response.chunks())
    };
    Response::from_parts(head, body)
}

/// One OpenAI endpoint over several servers.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GatewayArgs {
    /// Where to listen.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", value_parser = hosts::address)]
    listen: SocketAddr,
    #[command(flatten)]
    host_port: HostPortArgs,
    /// A server to dispatch to (repeatable). Their load is unknown: the one with the fewest requests of this gateway is next.
    #[arg(long = "backend", value_name = "ADDR", required_unless_present_any = ["gmanager", "pools"],
          conflicts_with_all = ["gmanager", "pools"], value_parser = hosts::address)]
    backends: Vec<SocketAddr>,
    /// Dispatch to this pool's instances by their load (host:port of the gManager's QUIC endpoint; of several,
    /// comma-separated, the one that leads).
    #[arg(long, value_name = "ADDR", value_delimiter = ',', value_parser = hosts::address)]
    gmanager: Vec<SocketAddr>,
    /// One more pool (its gManagers, as with --gmanager; repeatable): requests go to the pool that serves their `model`, those
    /// that name none to the first. All pools' certificates are of one CA.
    #[arg(long = "pool", value_name = "ADDR,…", value_parser = gmanagers)]
    pools: Vec<GManagers>,
    /// Tokens in an rBlock of the pool.
    #[arg(long, value_name = "N", default_value_t = lagoon_types::limits::BLOCK_TOKENS_DEFAULT, conflicts_with = "backends")]
    block_tokens: u32,
    #[command(flatten)]
    health: HealthArgs,
    #[command(flatten)]
    tls: TlsArgs,
    /// Clients must show this key (`Authorization: Bearer KEY`); /health stays open.
    #[arg(long, value_name = "KEY", env = "LAGOON_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[command(flatten)]
    port: PortArgs,
    #[command(flatten)]
    front: FrontArgs,
    #[command(flatten)]
    dispatch: DispatchArgs,
    /// Print one JSON object when ready.
    #[arg(long)]
    json: bool,
    /// Stop when standard input ends.
    #[arg(long, hide = true)]
    exit_with_stdin: bool,
}

/// How requests are dispatched, in `lagoon gateway` and `lagoon up`.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct DispatchArgs {
    /// Where requests go, and when.
    #[arg(long, value_enum, default_value_t)]
    dispatch: DispatchArg,
}

/// A dispatch policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum DispatchArg {
    /// To the instance with the least predicted work, when one can start them; until then they wait at the endpoint.
    #[default]
    LeastWork,
    /// To the instance with the most free memory, at once.
    FreeMemory,
}

impl DispatchArgs {
    fn mode(self) -> Mode {
        match self.dispatch {
            DispatchArg::LeastWork => Mode::LeastWork,
            DispatchArg::FreeMemory => Mode::FreeMemory,
        }
    }
}

/// The gManagers of a pool.
type GManagers = Arc<[SocketAddr]>;

fn gmanagers(text: &str) -> Result<GManagers, String> {
    text.split(',').map(|addr| hosts::address(addr.trim())).collect()
}

/// Runs a gateway over a fixed list of servers, or the instances of a pool, until Ctrl-C.
///
/// # Errors
/// When the address cannot be listened on, or the pool's gManager does not answer.
pub(crate) async fn run(args: GatewayArgs) -> anyhow::Result<()> {
    let front = args.front.front()?;
    let stop = crate::shutdown::token(args.exit_with_stdin)?;
    let metrics = lagoon_http::metrics::install(metrics_table::OF_GATEWAY).context("install the metrics recorder")?;
    let (router, health) = if args.backends.is_empty() {
        tokio::select! {
            pooled = over_pools(&args, metrics, &stop) => pooled?,
            () = stop.cancelled() => return Ok(()),
        }
    } else {
        over_servers(&args, metrics, &stop)?
    };
    let listen = args.host_port.at(args.listen);
    let listener = TcpListener::bind(listen).await.with_context(|| {
        format!("listen on {listen}\nhint: another program may use the port; `--port` names another")
    })?;
    announce(&listener, args.port.scheme(), health, args.json)?;
    let port = args.port.port(listener, args.api_key.as_deref(), None, front)?;
    lagoon_http::serve(port, router, stop.cancelled_owned()).await.context("serve the gateway")
}

/// The router over a fixed list of servers, and the address of the health port.
fn over_servers(
    args: &GatewayArgs,
    metrics: PrometheusHandle,
    stop: &CancellationToken,
) -> anyhow::Result<(Router, Option<SocketAddr>)> {
    let backend = |addr: &SocketAddr| Backend {
        name: addr.to_string(),
        http_addr: *addr,
        load: InstanceLoad::default(),
        reported: Instant::now(),
    };
    let backends: Vec<_> = args.backends.iter().map(backend).collect();
    let gateway = Gateway::new(Arc::new(backends), metrics, None, args.dispatch).with_compat(args.front.compat());
    let health = args.health.start(&args.port, || Ok(()), Some(gateway.shown()), stop)?;
    Ok((gateway.router(), health))
}

/// The router over the instances of one pool or several, and the address of the health port.
async fn over_pools(
    args: &GatewayArgs,
    metrics: PrometheusHandle,
    stop: &CancellationToken,
) -> anyhow::Result<(Router, Option<SocketAddr>)> {
    let identity = args.tls.identity(&[NodeRole::Gateway])?;
    let first = Some(Arc::from(&args.gmanager[..])).filter(|gmanagers: &GManagers| !gmanagers.is_empty());
    let pools: Vec<GManagers> = first.into_iter().chain(args.pools.iter().cloned()).collect();
    let mut watches = Vec::new();
    for gmanagers in &pools {
        let mut client = PoolClient::new(gmanagers, &identity)?;
        let state = client.state().await?;
        watches.push(PoolWatch::start(client, state, args.block_tokens, stop.clone()));
    }
    let probed = watches.clone();
    let ready = move || {
        let is_alive = probed.iter().any(|watch| !watch.serving().is_empty());
        if is_alive { Ok(()) } else { Err("no instance is alive".to_owned()) }
    };
    let operator = match (&watches[..], &pools[..]) {
        ([watch], [gmanagers]) => watch.router(PoolClient::new(gmanagers, &identity)?),
        _ => Router::new().route("/lagoon/{*rest}", any(no_administration)),
    };
    let tls = port::pool_client(port::pool_files(&args.tls, port::is_instance))?;
    let backends = watches.into_iter().map(|watch| Arc::new(watch) as Arc<dyn Backends>).collect();
    let gateway = Gateway::over(backends, metrics, tls, args.dispatch).with_compat(args.front.compat());
    if gateway.pools.are_several() {
        gateway.pools.watch(stop.clone());
    }
    let health = args.health.start(&args.port, ready, Some(gateway.shown()), stop)?;
    Ok((operator.fallback_service(gateway.router()), health))
}

fn announce(listener: &TcpListener, scheme: &str, health: Option<SocketAddr>, as_json: bool) -> anyhow::Result<()> {
    let http = listener.local_addr()?.to_string();
    if as_json {
        let mut ready = json!({ "ready": true, "http": http });
        if let Some(health) = health {
            ready["health"] = health.to_string().into();
        }
        log::announce(ready);
    } else {
        log::announce(format_args!("OpenAI endpoint {scheme}://{http}/v1"));
        health.iter().for_each(|addr| log::announce(format_args!("probes on {scheme}://{addr}/ready")));
    }
    Ok(())
}

#[cfg(test)]
#[path = "gateway_tests.rs"]
pub(crate) mod tests;
