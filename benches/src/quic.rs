//! Bare quinn, for comparison with the transport: one connection between two endpoints, with the same certificates
//! and the same kind of encryption, with quinn's defaults or the transport's configuration.

use anyhow::Result;
use lagoon_transport::{ClusterCa, NodeRole, SERVER_NAME, TransportConfig};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::{RootCertStore, crypto::ring, server::WebPkiClientVerifier, version::TLS13};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Any free port of the loopback interface.
#[must_use]
pub fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Configuration of quinn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tuning {
    /// Quinn's defaults, with keep-alives.
    Stock,
    /// The configuration of Lagoon's transport: datagrams, windows, acknowledgements, congestion control, socket
    /// buffers.
    Lagoon,
}

/// A node's certificate in PEM, passed to child processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pem {
    pub ca: String,
    pub cert: String,
    pub key: String,
}

type Parts = (Arc<RootCertStore>, Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Pem {
    /// An endpoint's identity, issued by a CA.
    pub fn issue(ca: &ClusterCa, name: &str) -> Result<Self> {
        let issued = ca.issue(name, NodeRole::Instance)?;
        Ok(Self { ca: ca.cert_pem().to_owned(), cert: issued.cert_pem, key: issued.key_pem })
    }

    fn parts(&self) -> Result<Parts> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.ca.as_bytes())?)?;
        let chain = vec![CertificateDer::from_pem_slice(self.cert.as_bytes())?];
        Ok((Arc::new(roots), chain, PrivateKeyDer::from_pem_slice(self.key.as_bytes())?))
    }

    /// An accepting endpoint on loopback. Must be called within a tokio runtime.
    pub fn listen(&self, tuning: Tuning) -> Result<quinn::Endpoint> {
        let (roots, chain, key) = self.parts()?;
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build()?;
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
        config.transport_config(tuning.quic()?);
        tuning.endpoint(Some(config))
    }

    /// A connection to an endpoint of [`Pem::listen`].
    pub async fn connect(&self, addr: SocketAddr, tuning: Tuning) -> Result<(quinn::Endpoint, quinn::Connection)> {
        let (roots, chain, key) = self.parts()?;
        let tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        let mut config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
        config.transport_config(tuning.quic()?);
        let endpoint = tuning.endpoint(None)?;
        let connection = endpoint.connect_with(config, addr, SERVER_NAME)?.await?;
        Ok((endpoint, connection))
    }
}

impl Tuning {
    fn quic(self) -> Result<Arc<quinn::TransportConfig>> {
        if self == Self::Lagoon {
            return Ok(TransportConfig::default().quic(loopback())?);
        }
        let mut stock = quinn::TransportConfig::default();
        stock.keep_alive_interval(Some(Duration::from_secs(2)));
        Ok(Arc::new(stock))
    }

    fn endpoint(self, server: Option<quinn::ServerConfig>) -> Result<quinn::Endpoint> {
        match (self, server) {
            (Self::Lagoon, server) => Ok(TransportConfig::default().endpoint(loopback(), server)?),
            (Self::Stock, Some(server)) => Ok(quinn::Endpoint::server(server, loopback())?),
            (Self::Stock, None) => Ok(quinn::Endpoint::client(loopback())?),
        }
    }
}
