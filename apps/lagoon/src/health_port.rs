//! `--health-listen`: `/health`, `/ready` and `/metrics` on a port of their own.
//!
//! The listener has its own thread, runtime and connection limits, so that probes work while the API port is full or
//! busy.

use crate::hosts;
use crate::port::PortArgs;
use anyhow::Context;
use axum::{
    Json, Router,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use lagoon_http::Port;
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Flag of the health port.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct HealthArgs {
    /// Also answer /health, /ready and /metrics here, without a key, on a thread of their own: probes are answered when the API's
    /// port is full or busy. HTTPS with --https-cert.
    #[arg(long, value_name = "ADDR", value_parser = hosts::address)]
    health_listen: Option<SocketAddr>,
}

/// Returns the text of `/metrics`.
pub(crate) type Metrics = Arc<dyn Fn() -> String + Send + Sync>;

/// The metrics of the process's recorder.
pub(crate) fn recorded(metrics: &PrometheusHandle) -> Metrics {
    let metrics = metrics.clone();
    Arc::new(move || metrics.render())
}

/// Whether the process is ready; why not, if it is not.
type Ready = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

impl HealthArgs {
    /// Whether the health port is configured.
    pub(crate) fn is_wanted(&self) -> bool {
        self.health_listen.is_some()
    }

    /// Answers until `stop`, if asked to, over HTTPS if `port` does; gives the address.
    ///
    /// # Errors
    /// When the address cannot be listened on, or the certificate cannot be used.
    pub(crate) fn start(
        &self,
        port: &PortArgs,
        ready: impl Fn() -> Result<(), String> + Send + Sync + 'static,
        metrics: Option<Metrics>,
        stop: &CancellationToken,
    ) -> anyhow::Result<Option<SocketAddr>> {
        let Some(addr) = self.health_listen else { return Ok(None) };
        let listener = TcpListener::bind(addr).with_context(|| {
            format!("listen on {addr}\nhint: another program may use the port; `--health-listen` names another")
        })?;
        listener.set_nonblocking(true)?;
        let served = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (router, stop) = (router(Arc::new(ready), metrics), stop.clone());
        let tls = {
            // The certificate is read again on the thread of this port.
            let _entered = runtime.enter();
            port.tls(None)
        };
        let tls = match tls {
            Ok(tls) => tls,
            Err(error) => {
                // It must not be waited for on a thread of another runtime.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let serve = async move {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            lagoon_http::serve(Port { listener, keys: None, tls }, router, stop.cancelled_owned()).await
        };
        std::thread::Builder::new().name("health".to_owned()).spawn(move || {
            if let Err(error) = runtime.block_on(serve) {
                tracing::error!(%error, "the health port is not served any more");
            }
        })?;
        Ok(Some(served))
    }
}

/// `/health`: the process runs. `/ready`: it can serve.
fn router(ready: Ready, metrics: Option<Metrics>) -> Router {
    let readiness = move || {
        let ready = ready.clone();
        async move {
            match ready() {
                Ok(()) => Json(json!({ "status": "ok" })).into_response(),
                Err(reason) => {
                    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": "not ready", "reason": reason })))
                        .into_response()
                }
            }
        }
    };
    let router = Router::new()
        .route("/health", get(|| async { Json(json!({ "status": "ok" })) }))
        .route("/ready", get(readiness))
        .fallback(lagoon_http::server::no_route);
    let Some(metrics) = metrics else { return router };
    let text = move || {
        let text = metrics();
        async move { ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text) }
    };
    router.route("/metrics", get(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::EphemeralCa;
    use crate::port;
    use lagoon_transport::NodeRole;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    /// It was plain whatever the flags were.
    #[tokio::test]
    async fn probes_are_answered_over_https_where_the_port_speaks_it() {
        let ca = EphemeralCa::new().unwrap();
        let own = ca.files("own", NodeRole::Instance, port::is_gateway).unwrap();
        let https = PortArgs { https_cert: Some(own.cert), https_key: Some(own.key), ..PortArgs::default() };
        let stop = CancellationToken::new();
        let args = HealthArgs { health_listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))) };
        for (port, status) in [(PortArgs::default(), "200"), (https, "400")] {
            let addr = args.start(&port, || Ok(()), None, &stop).unwrap().unwrap();
            let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
            stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
            let mut output = String::new();
            stream.read_to_string(&mut output).await.unwrap();
            assert!(output.starts_with(&format!("HTTP/1.1 {status} ")), "{output}");
            assert_eq!(output.contains("https_required"), status == "400", "{output}");
        }
        stop.cancel();
        let none =
            PortArgs { https_cert: Some("none.pem".into()), https_key: Some("none.key".into()), ..PortArgs::default() };
        assert!(format!("{:#}", args.start(&none, || Ok(()), None, &stop).unwrap_err()).contains("none.pem"));
    }
}
