//! Keys and TLS of a process's HTTP port, from its flags.

use crate::args::TlsArgs;
use anyhow::Context;
use lagoon_http::tls::{ClientTls, HttpsFiles, PoolFiles, ServerTls};
use lagoon_http::{Front, Keys, Port};
use lagoon_transport::{NodeRole, SERVER_NAME, Subject};
use rustls_pki_types::CertificateDer;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;

/// Keys of administration, a file of keys, and HTTPS.
#[derive(Clone, Default, clap::Args)]
pub(crate) struct PortArgs {
    /// Administration (/lagoon/…, /metrics) takes this key; without one, and without --key-file, it is for this machine only.
    #[arg(long, value_name = "KEY", env = "LAGOON_ADMIN_KEY", hide_env_values = true)]
    pub(crate) admin_key: Option<String>,
    /// Keys with scopes and rate limits, in TOML; read again when it changes.
    #[arg(long, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// Serve HTTPS, with this certificate (and its chain); read again when it changes.
    #[arg(long, value_name = "PEM", requires = "https_key")]
    pub(crate) https_cert: Option<PathBuf>,
    /// The private key of --https-cert.
    #[arg(long, value_name = "PEM", requires = "https_cert")]
    pub(crate) https_key: Option<PathBuf>,
}

impl std::fmt::Debug for PortArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { key_file, https_cert, https_key, admin_key: _ } = self;
        let files = (key_file, https_cert, https_key);
        f.debug_tuple("PortArgs").field(&files).finish_non_exhaustive()
    }
}

impl PortArgs {
    /// A guarded port for `listener`. `pool`: certificates for gateways of the pool.
    pub(crate) fn port(
        &self,
        listener: TcpListener,
        api_key: Option<&str>,
        pool: Option<PoolFiles>,
        front: Front,
    ) -> anyhow::Result<Port> {
        let keys = Arc::new(Keys::new(api_key, self.admin_key.as_deref(), self.key_file.clone())?);
        keys.watch();
        Ok(Port { listener, keys: Some(keys), tls: self.tls(pool)?, front })
    }

    /// The HTTPS configuration of the flags. Call inside the runtime of the port.
    pub(crate) fn tls(&self, pool: Option<PoolFiles>) -> anyhow::Result<Option<Arc<ServerTls>>> {
        let https = self.https_cert.clone().zip(self.https_key.clone()).map(|(cert, key)| HttpsFiles { cert, key });
        ServerTls::start(https, pool).context("TLS of the HTTP port")
    }

    /// The scheme of the port's URLs.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.https_cert.is_some() { "https" } else { "http" }
    }
}

/// A node's certificate files for HTTP with nodes that `is_peer` accepts.
pub(crate) fn pool_files(args: &TlsArgs, is_peer: fn(&CertificateDer<'_>) -> bool) -> Option<PoolFiles> {
    let TlsArgs { tls_ca, tls_cert, tls_key, tls_crl } = args.clone();
    Some(PoolFiles { ca: tls_ca?, cert: tls_cert?, key: tls_key?, crl: tls_crl, name: SERVER_NAME, is_peer })
}

/// Whether a certificate is a gateway's.
pub(crate) fn is_gateway(certificate: &CertificateDer<'_>) -> bool {
    Subject::of(certificate).is_ok_and(|subject| subject.roles.has_any(&[NodeRole::Gateway]))
}

/// Whether a certificate is an instance's.
pub(crate) fn is_instance(certificate: &CertificateDer<'_>) -> bool {
    Subject::of(certificate).is_ok_and(|subject| subject.roles.has_any(&[NodeRole::Instance]))
}

/// TLS of a gateway to instances of the pool.
pub(crate) fn pool_client(files: Option<PoolFiles>) -> anyhow::Result<Option<Arc<ClientTls>>> {
    files.map(ClientTls::pool).transpose().context("TLS between gateway and instances")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::EphemeralCa;
    use crate::scripted::{self, ScriptedEngine};
    use axum::body::Body;
    use axum::http::Request;
    use lagoon_http::client::{Client, ClientConfig};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    const CONFIG: ClientConfig =
        ClientConfig { connect: Duration::from_secs(10), silence: Duration::from_secs(10), idle_max: 0 };

    /// The status of an answer; none without a connection.
    async fn ask(tls: Option<Arc<ClientTls>>, url: &str, key: Option<&str>) -> Option<u16> {
        ask_for("/v1/models", tls, url, key).await
    }

    async fn ask_for(path: &str, tls: Option<Arc<ClientTls>>, url: &str, key: Option<&str>) -> Option<u16> {
        let mut request = Request::builder().uri(format!("{url}{path}"));
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let sent = Client::new(CONFIG, tls).send(request.body(Body::empty()).unwrap()).await;
        sent.ok().map(|response| response.status().as_u16())
    }

    /// An instance's port whose key is "inner".
    async fn instance(args: PortArgs, pool: Option<PoolFiles>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let port = args.port(listener, Some("inner"), pool, Front::default()).unwrap();
        let router = lagoon_http::router(scripted::state(ScriptedEngine::saying("ok")));
        tokio::spawn(lagoon_http::serve(port, router, std::future::pending()));
        addr.to_string()
    }

    fn instance_files(ca: &EphemeralCa, name: &str) -> PoolFiles {
        ca.files(name, NodeRole::Instance, is_gateway).unwrap()
    }

    fn gateway_files(ca: &EphemeralCa, role: NodeRole) -> PoolFiles {
        static NODES: AtomicU32 = AtomicU32::new(0);
        let name = format!("node-{}", NODES.fetch_add(1, Ordering::Relaxed));
        ca.files(&name, role, is_instance).unwrap()
    }

    #[tokio::test]
    async fn only_a_certificate_of_the_pool_replaces_a_key() {
        let (ca, foreign) = (EphemeralCa::new().unwrap(), EphemeralCa::new().unwrap());
        let addr = instance(PortArgs::default(), Some(instance_files(&ca, "instance"))).await;
        let (plain, tls) = (format!("http://{addr}"), format!("https://{addr}"));
        let gateway = |ca: &EphemeralCa| pool_client(Some(gateway_files(ca, NodeRole::Gateway))).unwrap();
        assert_eq!(ask(gateway(&ca), &tls, None).await, Some(200));
        // The gateway's clients have other keys than the instance's.
        assert_eq!(ask(gateway(&ca), &tls, Some("outer")).await, Some(200));
        // The gateway reads metrics, and does not administer.
        for (path, status) in [("/metrics", 200), ("/lagoon/status", 401), ("/lagoon/admin", 401)] {
            assert_eq!(ask_for(path, gateway(&ca), &tls, None).await, Some(status), "{path}");
        }
        assert_eq!(ask_for("/metrics", None, &plain, None).await, Some(401));
        assert_eq!([ask(None, &plain, None).await, ask(None, &plain, Some("outer")).await], [Some(401); 2]);
        assert_eq!(ask(None, &plain, Some("inner")).await, Some(200));
        // A certificate of another CA, verifying servers by the pool's CA, then by its own.
        let mixed = PoolFiles { ca: instance_files(&ca, "other").ca, ..gateway_files(&foreign, NodeRole::Gateway) };
        assert_eq!(ask(pool_client(Some(mixed)).unwrap(), &tls, Some("inner")).await, None);
        assert_eq!(ask(gateway(&foreign), &tls, Some("inner")).await, None);
        // TLS without a certificate of the client: this port has none for it.
        let https = ClientTls::https(&instance_files(&ca, "reader").ca).unwrap();
        assert_eq!(ask(Some(https), &tls, Some("inner")).await, None);
        // Other nodes of the pool are no gateways.
        for role in [NodeRole::Instance, NodeRole::Kv, NodeRole::Operator, NodeRole::GManager] {
            let node = pool_client(Some(gateway_files(&ca, role))).unwrap();
            assert_eq!(ask(node, &tls, Some("inner")).await, None, "{role:?}");
        }
    }

    #[tokio::test]
    async fn a_port_with_a_certificate_of_its_own_serves_clients_and_the_pool() {
        let ca = EphemeralCa::new().unwrap();
        let own = instance_files(&ca, "own");
        let args = PortArgs { https_cert: Some(own.cert), https_key: Some(own.key), ..PortArgs::default() };
        let addr = instance(args, Some(instance_files(&ca, "instance"))).await;
        let tls = format!("https://{addr}");
        assert_eq!(ask(pool_client(Some(gateway_files(&ca, NodeRole::Gateway))).unwrap(), &tls, None).await, Some(200));
        assert_eq!(ask(None, &format!("http://{addr}"), Some("inner")).await, Some(400));
        // The certificate is for the pool's name, not for this address.
        assert_eq!(ask(Some(ClientTls::https(&own.ca).unwrap()), &tls, Some("inner")).await, None);
    }
}
