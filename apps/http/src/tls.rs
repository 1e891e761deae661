//! TLS of HTTP: for clients by a server certificate, and between gateways and instances by the pool's certificates.
//!
//! One port serves both: a connection with ALPN [`POOL_PROTOCOL`] is shown the pool's certificate and must show one;
//! any other is shown the server's own. All files are read again when they change.

use crate::{
    limits::WRITE_DEADLINE,
    metrics::HTTPS_EXPIRES,
    reload::{Reload, read_text},
    stalls::Stalls,
};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::WebPkiServerVerifier,
    crypto::{CryptoProvider, ring},
    pki_types::{
        CertificateDer, CertificateRevocationListDer, InvalidDnsNameError, PrivateKeyDer, ServerName,
        pem::PemObject as _,
    },
    server::{Acceptor, WebPkiClientVerifier},
};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
};
use tokio_rustls::{LazyConfigAcceptor, TlsConnector};
use x509_parser::{certificate::X509Certificate, prelude::FromDer as _};

/// ALPN protocol id of a gateway's connection to an instance.
const POOL_PROTOCOL: &[u8] = b"lagoon-http/1";
/// ALPN protocol id of other clients.
const HTTP: &[u8] = b"http/1.1";
/// Time for reading the rest of a request that is not answered.
const LINGER: Duration = Duration::from_secs(1);
/// First byte of a TLS handshake record.
const HANDSHAKE_RECORD: u8 = 0x16;
/// Response to plain HTTP on a port without it.
const SPEAK_HTTPS: &[u8] = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n\
    content-length: 135\r\n\r\n{\"error\":{\"message\":\"this port speaks HTTPS; use an https:// URL\",\
    \"type\":\"invalid_request_error\",\"param\":null,\"code\":\"https_required\"}}";

/// Marks requests whose connection has a certificate of the pool; an extension of requests.
#[derive(Clone, Copy, Debug)]
pub struct PoolPeer;

/// A byte stream, plain or TLS.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} holds no {what} in PEM: {reason}")]
    Pem { path: PathBuf, what: &'static str, reason: String },
    #[error("the certificates cannot be used: {0}")]
    Unusable(String),
}

/// A server's certificate (chain) and key.
#[derive(Clone, Debug)]
pub struct HttpsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// A node's files of the pool: CA, certificate, key.
#[derive(Clone, Debug)]
pub struct PoolFiles {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
    /// The CA's revocation list.
    pub crl: Option<PathBuf>,
    /// The name in every certificate of the pool.
    pub name: &'static str,
    /// Whether a certificate has the role of the other side: a gateway's for an instance, an instance's for a gateway.
    pub is_peer: fn(&CertificateDer<'_>) -> bool,
}

impl PoolFiles {
    fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.ca, &self.cert, &self.key].into_iter().chain(&self.crl)
    }

    /// Refuses a node of another role; the handshake has verified its certificate.
    fn check_peer(&self, certificates: Option<&[CertificateDer<'_>]>) -> io::Result<()> {
        match certificates.and_then(<[_]>::first) {
            Some(certificate) if (self.is_peer)(certificate) => Ok(()),
            _ => Err(io::Error::other("the node's certificate is for another role")),
        }
    }
}

/// A connection of the pool, as of the files that were read when it began.
#[derive(Debug)]
pub(crate) struct PoolConnection(watch::Receiver<Arc<ServerConfig>>);

impl PoolConnection {
    /// Waits until the pool's files have been read again: its certificate may be revoked by now.
    pub(crate) async fn superseded(mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// Files of a configuration, and the configuration loaded last.
struct Live<F, C> {
    files: F,
    config: watch::Sender<Arc<C>>,
}

impl<F, C> Live<F, C> {
    fn new(files: F, make: impl Fn(&F) -> Result<C, TlsError>) -> Result<Self, TlsError> {
        let config = watch::Sender::new(Arc::new(make(&files)?));
        Ok(Self { files, config })
    }

    fn get(&self) -> Arc<C> {
        Arc::clone(&self.config.borrow())
    }

    fn renew(&self, make: impl Fn(&F) -> Result<C, TlsError>) {
        match make(&self.files) {
            Ok(config) => {
                tracing::info!("certificates were read again");
                self.config.send_replace(Arc::new(config));
            }
            Err(error) => tracing::error!(%error, "the certificates stay as they were"),
        }
    }
}

/// TLS of one listener.
pub struct ServerTls {
    https: Option<Live<HttpsFiles, ServerConfig>>,
    pool: Option<Live<PoolFiles, ServerConfig>>,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = (self.https.as_ref().map(|live| &live.files), self.pool.as_ref().map(|live| &live.files));
        f.debug_tuple("ServerTls").field(&files).finish()
    }
}

impl ServerTls {
    /// TLS for a listener. `https`: for clients, which then may not use plain HTTP. `pool`: for gateways of the pool.
    /// Reads the files again when they change, for as long as the result lives. `None` with neither. Call inside a
    /// tokio runtime.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub fn start(https: Option<HttpsFiles>, pool: Option<PoolFiles>) -> Result<Option<Arc<Self>>, TlsError> {
        if https.is_none() && pool.is_none() {
            return Ok(None);
        }
        let paths = https.iter().flat_map(|files| [&files.cert, &files.key]);
        let paths = paths.chain(pool.iter().flat_map(PoolFiles::paths)).cloned();
        let reload = Reload::new(paths.collect::<Vec<_>>());
        let https = https.map(|files| Live::new(files, https_server)).transpose()?;
        let pool = pool.map(|files| Live::new(files, pool_server)).transpose()?;
        let tls = Arc::new(Self { https, pool });
        reload.spawn(Arc::downgrade(&tls), |tls: &Self| {
            tls.https.iter().for_each(|live| live.renew(https_server));
            tls.pool.iter().for_each(|live| live.renew(pool_server));
        });
        Ok(Some(tls))
    }

    /// Accepts TLS on a connection. Returns its stream, and a [`PoolConnection`] if the client has a certificate of the pool.
    pub(crate) async fn accept(&self, mut stream: TcpStream) -> io::Result<(Box<dyn Io>, Option<PoolConnection>)> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if first[0] != HANDSHAKE_RECORD {
            if self.https.is_none() {
                return Ok((Box::new(Stalls::new(stream, WRITE_DEADLINE)), None));
            }
            stream.write_all(SPEAK_HTTPS).await?;
            stream.shutdown().await?;
            // A request that is not read would reset the connection, and with it the answer.
            let mut rest = [0; 1024];
            let read = async { while stream.read(&mut rest).await.is_ok_and(|bytes| bytes > 0) {} };
            let _elapsed = tokio::time::timeout(LINGER, read).await;
            return Err(io::Error::other("plain HTTP on an HTTPS port"));
        }
        let begun = LazyConfigAcceptor::new(Acceptor::default(), Stalls::new(stream, WRITE_DEADLINE)).await?;
        let of_pool = begun.client_hello().alpn().is_some_and(|mut names| names.any(|name| name == POOL_PROTOCOL));
        let pool = self.pool.as_ref().filter(|_| of_pool);
        // Before the configuration is taken, so that no change is missed.
        let connection = pool.map(|pool| PoolConnection(pool.config.subscribe()));
        let live = pool.map(Live::get).or_else(|| self.https.as_ref().filter(|_| !of_pool).map(Live::get));
        let config = live.ok_or_else(|| io::Error::other("TLS that this port has no certificate for"))?;
        let stream = begun.into_stream(config).await?;
        let Some(pool) = pool else { return Ok((Box::new(stream), None)) };
        // The configuration of the pool has verified the client's certificate.
        pool.files.check_peer(stream.get_ref().1.peer_certificates())?;
        Ok((Box::new(stream), connection))
    }
}

/// TLS of a client: to public HTTPS servers or to instances of the pool.
pub struct ClientTls {
    kind: ClientKind,
}

enum ClientKind {
    /// Servers with a certificate issued by a trusted CA.
    Https(Arc<ClientConfig>),
    /// Instances of the pool.
    Pool(Live<PoolFiles, ClientConfig>),
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientTls").field("pool", &matches!(self.kind, ClientKind::Pool(_))).finish()
    }
}

impl ClientTls {
    /// Trusts servers whose certificate a CA in `ca` issued.
    ///
    /// # Errors
    /// If the file cannot be used.
    pub fn https(ca: &Path) -> Result<Arc<Self>, TlsError> {
        let config = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let config = config.map_err(unusable)?.with_root_certificates(roots(ca)?).with_no_client_auth();
        Ok(Arc::new(Self { kind: ClientKind::Https(Arc::new(config)) }))
    }

    /// Connects to instances of the pool, as one of its nodes. Reads the files again when they change. Call inside a
    /// tokio runtime.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub fn pool(files: PoolFiles) -> Result<Arc<Self>, TlsError> {
        let reload = Reload::new(files.paths().cloned().collect::<Vec<_>>());
        let tls = Arc::new(Self { kind: ClientKind::Pool(Live::new(files, pool_client)?) });
        reload.spawn(Arc::downgrade(&tls), |tls: &Self| match &tls.kind {
            ClientKind::Pool(live) => live.renew(pool_client),
            ClientKind::Https(_) => {}
        });
        Ok(tls)
    }

    /// The encrypted stream to the server at `host`.
    pub(crate) async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<Box<dyn Io>> {
        let name = |name: &str| {
            let name = ServerName::try_from(name.to_owned());
            name.map_err(|error: InvalidDnsNameError| io::Error::other(error))
        };
        let (config, name) = match &self.kind {
            ClientKind::Https(config) => (Arc::clone(config), name(host)?),
            // The CA's signature authenticates a node; its address does not matter.
            ClientKind::Pool(live) => (live.get(), name(live.files.name)?),
        };
        let stream = TlsConnector::from(config).connect(name, stream).await?;
        if let ClientKind::Pool(live) = &self.kind {
            live.files.check_peer(stream.get_ref().1.peer_certificates())?;
        }
        Ok(Box::new(stream))
    }
}

/// Sets the metric of a certificate's end.
fn record_expiry(certificate: &CertificateDer<'_>) {
    if let Ok((_, parsed)) = X509Certificate::from_der(certificate) {
        #[allow(clippy::cast_precision_loss, reason = "seconds, under 2^53")]
        ::metrics::gauge!(HTTPS_EXPIRES).set(parsed.validity().not_after.timestamp() as f64);
    }
}

/// A configuration that is used if it can be made: then its certificate's end is a metric.
fn https_server(files: &HttpsFiles) -> Result<ServerConfig, TlsError> {
    let config = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let config = config.map_err(unusable)?.with_no_client_auth();
    let chain = certificates(&files.cert)?;
    let own = chain.first().cloned();
    let mut config = config.with_single_cert(chain, private_key(&files.key)?).map_err(unusable)?;
    config.alpn_protocols = vec![HTTP.to_vec()];
    own.iter().for_each(record_expiry);
    Ok(config)
}

fn pool_server(files: &PoolFiles) -> Result<ServerConfig, TlsError> {
    let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(&files.ca)?), provider());
    if let Some(list) = revocations(files)? {
        verifier = verifier.with_crls([list]).only_check_end_entity_revocation();
    }
    let verifier = verifier.build().map_err(|error| TlsError::Unusable(error.to_string()))?;
    let config = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&rustls::version::TLS13]);
    let config = config.map_err(unusable)?.with_client_cert_verifier(verifier);
    let mut config = config.with_single_cert(certificates(&files.cert)?, private_key(&files.key)?).map_err(unusable)?;
    config.alpn_protocols = vec![POOL_PROTOCOL.to_vec()];
    Ok(config)
}

fn pool_client(files: &PoolFiles) -> Result<ClientConfig, TlsError> {
    let config = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&rustls::version::TLS13]);
    let mut verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots(&files.ca)?), provider());
    if let Some(list) = revocations(files)? {
        verifier = verifier.with_crls([list]).only_check_end_entity_revocation();
    }
    let verifier = verifier.build().map_err(|error| TlsError::Unusable(error.to_string()))?;
    let config = config.map_err(unusable)?.with_webpki_verifier(verifier);
    let config = config.with_client_auth_cert(certificates(&files.cert)?, private_key(&files.key)?);
    let mut config = config.map_err(unusable)?;
    config.alpn_protocols = vec![POOL_PROTOCOL.to_vec()];
    Ok(config)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn unusable(error: rustls::Error) -> TlsError {
    TlsError::Unusable(error.to_string())
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(unusable)?;
    }
    Ok(roots)
}

fn read(path: &Path) -> Result<String, TlsError> {
    read_text(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad = |reason: String| TlsError::Pem { path: path.to_owned(), what: "certificate", reason };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(read(path)?.as_bytes()).collect();
    let found = found.map_err(|error| bad(error.to_string()))?;
    if found.is_empty() { Err(bad("there is none".to_owned())) } else { Ok(found) }
}

fn revocations(files: &PoolFiles) -> Result<Option<CertificateRevocationListDer<'static>>, TlsError> {
    let Some(path) = &files.crl else { return Ok(None) };
    let list = CertificateRevocationListDer::from_pem_slice(read(path)?.as_bytes());
    list.map(Some).map_err(|error| TlsError::Pem {
        path: path.clone(),
        what: "revocation list",
        reason: error.to_string(),
    })
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(read(path)?.as_bytes()).map_err(|error| TlsError::Pem {
        path: path.to_owned(),
        what: "private key",
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_plain_http_is_as_long_as_it_says() {
        let text = std::str::from_utf8(SPEAK_HTTPS).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{}", body.len());
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }

    /// Only certificates between nodes had a metric of their end.
    #[tokio::test]
    async fn the_end_of_the_certificate_is_a_metric() {
        let dir = tempfile::tempdir().unwrap();
        let [cert, key] = ["cert", "key"].map(|name| dir.path().join(name));
        let pair = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(2035, 5, 6);
        std::fs::write(&cert, params.self_signed(&pair).unwrap().pem()).unwrap();
        std::fs::write(&key, pair.serialize_pem()).unwrap();
        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
        let files = HttpsFiles { cert: cert.clone(), key };
        let tls = ::metrics::with_local_recorder(&recorder, || ServerTls::start(Some(files), None)).unwrap().unwrap();
        let is_reported = || recorder.handle().render().contains(&format!("{HTTPS_EXPIRES} {}\n", 2_062_022_400));
        assert!(is_reported(), "{}", recorder.handle().render());
        // Another certificate, whose key is not there yet, is not used.
        params.not_after = rcgen::date_time_ymd(2040, 5, 6);
        let other = rcgen::KeyPair::generate().unwrap();
        std::fs::write(&cert, params.self_signed(&other).unwrap().pem()).unwrap();
        let renew = || tls.https.iter().for_each(|live| live.renew(https_server));
        ::metrics::with_local_recorder(&recorder, renew);
        assert!(is_reported(), "{}", recorder.handle().render());
    }

    #[test]
    fn a_configuration_that_is_made_again_supersedes_the_last_one() {
        let live = Live::new((), |()| Ok(1)).unwrap();
        let seen = live.config.subscribe();
        live.renew(|()| Err(TlsError::Unusable("it is half written".to_owned())));
        assert_eq!((seen.has_changed().unwrap(), *live.get()), (false, 1));
        live.renew(|()| Ok(2));
        assert_eq!((seen.has_changed().unwrap(), *live.get()), (true, 2));
    }
}
