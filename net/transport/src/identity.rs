//! A node's certificate, key and CA, and the TLS configurations made of them.

use crate::IdentityError;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::{RootCertStore, crypto::CryptoProvider, server::WebPkiClientVerifier, version::TLS13};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use std::{fmt, fs, path::Path, sync::Arc};

/// The name that every node's certificate carries, and that dialers verify: a node is authentic because the cluster's
/// CA says so, wherever it listens.
pub const SERVER_NAME: &str = "lagoon";
/// The application protocol of TLS.
pub(crate) const ALPN: &[u8] = b"lagoon/1";

/// Who a node is, and whom it trusts.
pub struct Identity {
    ca: Vec<CertificateDer<'static>>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("ca", &self.ca.len()).field("chain", &self.chain.len()).finish_non_exhaustive()
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self { ca: self.ca.clone(), chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

impl Identity {
    /// Reads PEM files: the cluster's CA certificate, the node's certificate (chain) and its key.
    pub fn load(ca: &Path, cert: &Path, key: &Path) -> Result<Self, IdentityError> {
        let read = |path: &Path| {
            fs::read_to_string(path).map_err(|source| IdentityError::Read { path: path.to_owned(), source })
        };
        let name = |path: &Path| path.display().to_string();
        Ok(Self {
            ca: certificates(&name(ca), &read(ca)?)?,
            chain: certificates(&name(cert), &read(cert)?)?,
            key: private_key(&name(key), &read(key)?)?,
        })
    }

    /// As [`Identity::load`], from PEM text.
    pub fn from_pem(ca: &str, cert: &str, key: &str) -> Result<Self, IdentityError> {
        Ok(Self {
            ca: certificates("the CA certificate", ca)?,
            chain: certificates("the node certificate", cert)?,
            key: private_key("the node key", key)?,
        })
    }

    fn roots(&self) -> Result<Arc<RootCertStore>, IdentityError> {
        let mut roots = RootCertStore::empty();
        for certificate in &self.ca {
            roots.add(certificate.clone())?;
        }
        Ok(Arc::new(roots))
    }

    /// TLS for accepting: a client without a certificate of the CA is refused.
    pub(crate) fn server_tls(&self) -> Result<Arc<QuicServerConfig>, IdentityError> {
        let provider = provider();
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots()?, Arc::clone(&provider))
            .build()
            .map_err(|error| IdentityError::Verifier(error.to_string()))?;
        let mut tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.chain.clone(), self.key.clone_key())?;
        tls.alpn_protocols = vec![ALPN.to_vec()];
        let quic = QuicServerConfig::try_from(tls).map_err(|error| IdentityError::Verifier(error.to_string()))?;
        Ok(Arc::new(quic))
    }

    /// TLS for dialing: the server must show a certificate of the CA, and gets ours.
    pub(crate) fn client_tls(&self) -> Result<Arc<QuicClientConfig>, IdentityError> {
        let mut tls = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())?;
        tls.alpn_protocols = vec![ALPN.to_vec()];
        let quic = QuicClientConfig::try_from(tls).map_err(|error| IdentityError::Verifier(error.to_string()))?;
        Ok(Arc::new(quic))
    }
}

/// ring, with AES-128-GCM first: it is the fastest on processors with AES instructions and strong enough for every
/// use. The others stay for those without.
fn provider() -> Arc<CryptoProvider> {
    use rustls::crypto::ring::{self, cipher_suite};
    let cipher_suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(CryptoProvider { cipher_suites, ..ring::default_provider() })
}

fn certificates(what: &str, pem: &str) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let certificates =
        certificates.map_err(|error| IdentityError::Pem { what: what.to_owned(), reason: error.to_string() })?;
    if certificates.is_empty() {
        return Err(IdentityError::Empty(what.to_owned()));
    }
    Ok(certificates)
}

fn private_key(what: &str, pem: &str) -> Result<PrivateKeyDer<'static>, IdentityError> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes())
        .map_err(|error| IdentityError::Pem { what: what.to_owned(), reason: error.to_string() })
}
