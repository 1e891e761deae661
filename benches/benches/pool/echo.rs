//! The yardstick: a bare quinn echo between the same two processes, on their own runtimes, over one bidirectional
//! stream, with quinn's default tunables, the same certificates and the same kind of encryption.

use anyhow::{Context, Result};
use lagoon_transport::{ClusterCa, SERVER_NAME};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::{RootCertStore, crypto::ring, server::WebPkiClientVerifier, version::TLS13};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A node's certificate, as a child process gets it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Pem {
    pub(crate) ca: String,
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl Pem {
    pub(crate) fn issue(ca: &ClusterCa, name: &str) -> Result<Self> {
        let issued = ca.issue(name)?;
        Ok(Self { ca: ca.cert_pem().to_owned(), cert: issued.cert_pem, key: issued.key_pem })
    }

    fn parts(&self) -> Result<(Arc<RootCertStore>, Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.ca.as_bytes())?)?;
        let chain = vec![CertificateDer::from_pem_slice(self.cert.as_bytes())?];
        Ok((Arc::new(roots), chain, PrivateKeyDer::from_pem_slice(self.key.as_bytes())?))
    }
}

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Answers `out` bytes, of which the first eight name `out` and `back`, with `back` bytes, for ever.
pub(crate) fn serve(pem: &Pem) -> Result<SocketAddr> {
    let (roots, chain, key) = pem.parts()?;
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build()?;
    let tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    let config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
    let endpoint = quinn::Endpoint::server(config, loopback())?;
    let addr = endpoint.local_addr()?;
    tokio::spawn(async move {
        let connection = endpoint.accept().await.context("a connection")?.await?;
        let (mut send, mut recv) = connection.accept_bi().await?;
        let mut buffer = Vec::new();
        loop {
            let mut head = [0; 8];
            recv.read_exact(&mut head).await?;
            let [out, back] = [&head[..4], &head[4..]].map(|b| <[u8; 4]>::try_from(b).map(u32::from_le_bytes));
            let (out, back) = (usize::try_from(out?)?, usize::try_from(back?)?);
            buffer.resize(out.max(back), 0);
            recv.read_exact(&mut buffer[..out - head.len()]).await?;
            send.write_all(&buffer[..back]).await?;
        }
        #[allow(unreachable_code, reason = "gives the task its type")]
        anyhow::Ok(())
    });
    Ok(addr)
}

/// The asking side.
pub(crate) struct Echo {
    _endpoint: quinn::Endpoint,
    send: quinn::SendStream,
    recv: quinn::RecvStream,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl Echo {
    /// Trips of `out` bytes there and `back` bytes back.
    pub(crate) async fn connect(pem: &Pem, addr: SocketAddr, out: usize, back: usize) -> Result<Self> {
        let (roots, chain, key) = pem.parts()?;
        let tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        let endpoint = quinn::Endpoint::client(loopback())?;
        let mut config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
        let mut transport = quinn::TransportConfig::default();
        transport.keep_alive_interval(Some(Duration::from_secs(2)));
        config.transport_config(Arc::new(transport));
        let connection = endpoint.connect_with(config, addr, SERVER_NAME)?.await?;
        let (send, recv) = connection.open_bi().await?;
        let mut request = vec![7; out];
        request[..4].copy_from_slice(&u32::try_from(out)?.to_le_bytes());
        request[4..8].copy_from_slice(&u32::try_from(back)?.to_le_bytes());
        Ok(Self { _endpoint: endpoint, send, recv, request, reply: vec![0; back] })
    }

    pub(crate) async fn trip(&mut self) -> Result<Duration> {
        let start = Instant::now();
        self.send.write_all(&self.request).await?;
        self.recv.read_exact(&mut self.reply).await?;
        Ok(start.elapsed())
    }
}
