//! One OpenAI endpoint over several instances: a reverse proxy that picks an instance per request.
//!
//! It knows no model: a request's body is kept until it is answered, responses stream through, and when a client
//! disconnects, the connection to the instance closes with it, which cancels the request there. When an instance is
//! lost, another one goes on with its requests ([`crate::replay`]).

use crate::args::TlsArgs;
use crate::health_port::{HealthArgs, Metrics};
use crate::hosts::{self, HostPortArgs};
use crate::log;
use crate::metrics_table;
use crate::pool_client::PoolClient;
use crate::pool_watch::PoolWatch;
use crate::port::{self, PortArgs};
use crate::replay::{self, Attempts, Repeatable, ReplayLimits};
use crate::upstreams::{Backend, Backends, Upstreams, end_to_end, none_alive};
use anyhow::Context;
use axum::{
    Json, Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
    routing::get,
};
use lagoon_http::client::Response as Answer;
use lagoon_http::tls::ClientTls;
use lagoon_http::{ApiError, Bodies, Caller, journal, server};
use lagoon_transport::NodeRole;
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;
use std::{net::SocketAddr, sync::Arc};
use tokio::net::TcpListener;

/// Response header with the name of the instance that answered.
const INSTANCE_HEADER: HeaderName = HeaderName::from_static("x-lagoon-instance");
/// The proxy.
pub(crate) struct Gateway {
    upstreams: Arc<Upstreams>,
    limits: ReplayLimits,
    bodies: Bodies,
    metrics: PrometheusHandle,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("upstreams", &self.upstreams).finish_non_exhaustive()
    }
}

impl Gateway {
    /// A gateway over `backends`, by TLS with `tls`, else plain HTTP.
    pub(crate) fn new(backends: Arc<dyn Backends>, metrics: PrometheusHandle, tls: Option<Arc<ClientTls>>) -> Self {
        let upstreams = Arc::new(Upstreams::new(backends, tls));
        Self { upstreams, limits: ReplayLimits::default(), bodies: Bodies::default(), metrics }
    }

    #[cfg(test)]
    fn with_limits(self, limits: ReplayLimits) -> Self {
        Self { limits, ..self }
    }

    /// Returns the text of `/metrics`: the recorder's, and the counters by instance.
    fn shown(&self) -> Metrics {
        let (metrics, upstreams) = (self.metrics.clone(), Arc::clone(&self.upstreams));
        Arc::new(move || metrics.render() + &upstreams.render_counts())
    }

    /// The gateway's routes: `/health` and `/metrics` are its own; all others go to an instance. Keys are checked
    /// before.
    pub(crate) fn router(self) -> Router {
        Router::new()
            .route("/health", get(health))
            .route("/metrics", get(show_metrics))
            .fallback(proxy)
            .method_not_allowed_fallback(server::wrong_method)
            .with_state(Arc::new(self))
    }
}

async fn health(State(gateway): State<Arc<Gateway>>) -> Result<impl IntoResponse, ApiError> {
    match gateway.upstreams.serving().len() {
        0 => Err(none_alive()),
        instances => Ok(Json(match gateway.upstreams.silent_for() {
            None => json!({ "status": "ok", "instances": instances }),
            Some(silent) => json!({
                "status": "degraded", "instances": instances,
                "reason": format!("no gManager has answered for {} s", silent.as_secs()),
            }),
        })),
    }
}

async fn show_metrics(State(gateway): State<Arc<Gateway>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], gateway.shown()())
}

async fn proxy(State(gateway): State<Arc<Gateway>>, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let request = Repeatable::read(&gateway.bodies, request).await?;
    let mut attempts = Attempts::new(Arc::clone(&gateway.upstreams), gateway.limits, request, caller);
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
    /// A server to dispatch to (repeatable). Their load is unknown, so dispatch is round-robin.
    #[arg(long = "backend", value_name = "ADDR", required_unless_present = "gmanager", conflicts_with = "gmanager",
          value_parser = hosts::address)]
    backends: Vec<SocketAddr>,
    /// Dispatch to this pool's instances by their free memory (host:port of the gManager's QUIC endpoint; of several,
    /// comma-separated, the one that leads).
    #[arg(long, value_name = "ADDR", value_delimiter = ',', value_parser = hosts::address)]
    gmanager: Vec<SocketAddr>,
    /// Tokens in an rBlock of the pool.
    #[arg(long, value_name = "N", default_value_t = lagoon_types::limits::BLOCK_TOKENS_DEFAULT, requires = "gmanager")]
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
    let stop = crate::shutdown::token(args.exit_with_stdin)?;
    let metrics = lagoon_http::metrics::install(metrics_table::OF_GATEWAY).context("install the metrics recorder")?;
    let health;
    let router = if args.gmanager.is_empty() {
        let backend = |addr: &SocketAddr| Backend {
            name: addr.to_string(),
            http_addr: *addr,
            free_tokens: 0,
            running: 0,
            waiting: 0,
        };
        let backends: Vec<_> = args.backends.iter().map(backend).collect();
        let gateway = Gateway::new(Arc::new(backends), metrics, None);
        health = args.health.start(&args.port, || Ok(()), Some(gateway.shown()), &stop)?;
        gateway.router()
    } else {
        let identity = args.tls.identity(&[NodeRole::Gateway])?;
        let mut client = PoolClient::new(&args.gmanager, &identity)?;
        let state = tokio::select! {
            state = client.state() => state?,
            () = stop.cancelled() => return Ok(()),
        };
        let watch = PoolWatch::start(client, state, args.block_tokens, stop.clone());
        let probed = watch.clone();
        let ready = move || if probed.serving().is_empty() { Err("no instance is alive".to_owned()) } else { Ok(()) };
        let operator = watch.router(PoolClient::new(&args.gmanager, &identity)?);
        let gateway =
            Gateway::new(Arc::new(watch), metrics, port::pool_client(port::pool_files(&args.tls, port::is_instance))?);
        health = args.health.start(&args.port, ready, Some(gateway.shown()), &stop)?;
        operator.fallback_service(gateway.router())
    };
    let listen = args.host_port.at(args.listen);
    let listener = TcpListener::bind(listen).await.with_context(|| {
        format!("listen on {listen}\nhint: another program may use the port; `--port` names another")
    })?;
    announce(&listener, args.port.scheme(), health, args.json)?;
    let port = args.port.port(listener, args.api_key.as_deref(), None)?;
    lagoon_http::serve(port, router, stop.cancelled_owned()).await.context("serve the gateway")
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
