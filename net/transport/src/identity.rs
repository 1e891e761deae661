//! A node's certificate, key and CA, and the TLS configurations made of them.

use crate::{IdentityError, Subject, subject::revoked_serials};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::{
    RootCertStore, client::WebPkiServerVerifier, crypto::CryptoProvider, server::WebPkiClientVerifier, version::TLS13,
};
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, pem::PemObject};
use std::{
    collections::BTreeSet,
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

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
    subject: Subject,
    /// The revocation list, and the serial numbers on it.
    revocations: Option<(CertificateRevocationListDer<'static>, BTreeSet<Vec<u8>>)>,
    files: Option<Files>,
}

/// Where an identity was loaded from.
#[derive(Clone, Debug)]
struct Files {
    ca: PathBuf,
    cert: PathBuf,
    key: PathBuf,
    revocations: Option<PathBuf>,
}

/// Modification times and lengths of files, by which a rewrite is detected.
pub(crate) type Stamps = Vec<Option<(SystemTime, u64)>>;

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("ca", &self.ca.len()).field("chain", &self.chain.len()).finish_non_exhaustive()
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self {
            ca: self.ca.clone(),
            chain: self.chain.clone(),
            key: self.key.clone_key(),
            subject: self.subject.clone(),
            revocations: self.revocations.clone(),
            files: self.files.clone(),
        }
    }
}

impl Identity {
    /// Reads PEM files: the cluster's CA certificate, the node's certificate (chain), its key, and the CA's revocation list if
    /// there is one. A [`crate::Node`] reads them again when they change.
    pub fn load(ca: &Path, cert: &Path, key: &Path, revocations: Option<&Path>) -> Result<Self, IdentityError> {
        let files = Files {
            ca: ca.to_owned(),
            cert: cert.to_owned(),
            key: key.to_owned(),
            revocations: revocations.map(Path::to_owned),
        };
        files.load()
    }

    /// As [`Identity::load`], from PEM text.
    pub fn from_pem(ca: &str, cert: &str, key: &str) -> Result<Self, IdentityError> {
        let ca = certificates("the CA certificate", ca)?;
        Self::of(ca, certificates("the node certificate", cert)?, private_key("the node key", key)?)
    }

    /// With the CA's revocation list (PEM): whose certificate is on it is refused.
    pub fn with_revocations(self, list: &str) -> Result<Self, IdentityError> {
        let serials = revoked_serials(list)?.into_iter().collect();
        let der = CertificateRevocationListDer::from_pem_slice(list.as_bytes());
        let bad = |reason: String| IdentityError::Pem { what: "the revocation list".to_owned(), reason };
        let der = der.map_err(|error| bad(error.to_string()))?;
        Ok(Self { revocations: Some((der, serials)), ..self })
    }

    pub(crate) fn is_revoked(&self, subject: &Subject) -> bool {
        self.revocations.as_ref().is_some_and(|(_, serials)| serials.contains(&subject.serial[..]))
    }

    /// Loads the identity from its files again; `None` if it has no files, or their stamps equal `seen`, which is updated.
    pub(crate) fn reload(&self, seen: &mut Stamps) -> Option<Result<Self, IdentityError>> {
        let files = self.files.as_ref()?;
        let stamps = files.stamps();
        (std::mem::replace(seen, stamps.clone()) != stamps).then(|| files.load())
    }

    /// This node's identity after its files changed to `now`. Peers know a connected node by its name and key: if the new
    /// certificate has another name or key, the old certificate and key stay in use, with the new revocation list.
    ///
    /// # Errors
    /// [`IdentityError::OtherCa`] if another node's or key's certificate is also of another CA: nothing of it is used.
    pub(crate) fn renewed(&self, now: Self) -> Result<Self, IdentityError> {
        if now.subject == self.subject {
            return Ok(now);
        }
        let [had, has] = [self, &now].map(|of| of.subject.node.to_string());
        if now.ca != self.ca {
            return Err(IdentityError::OtherCa { had, has });
        }
        tracing::warn!(
            "the certificate's files are of node {has:?} with another key or name than node {had:?} runs with; \
             those before stay in use\n\
             hint: restart the process to use the new ones; `lagoon certs renew` keeps the key and needs no restart"
        );
        Ok(Self { chain: self.chain.clone(), key: self.key.clone_key(), subject: self.subject.clone(), ..now })
    }

    /// Stamps of its files now.
    pub(crate) fn stamps(&self) -> Stamps {
        self.files.as_ref().map(Files::stamps).unwrap_or_default()
    }

    fn of(
        ca: Vec<CertificateDer<'static>>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, IdentityError> {
        let leaf = chain.first().ok_or_else(|| IdentityError::Empty("the node certificate".to_owned()))?;
        let subject = Subject::of(leaf)?;
        Ok(Self { ca, chain, key, subject, revocations: None, files: None })
    }

    /// Whom its certificate is for.
    #[must_use]
    pub fn subject(&self) -> &Subject {
        &self.subject
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
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots()?, Arc::clone(&provider));
        let verifier = match &self.revocations {
            Some((list, _)) => verifier.with_crls([list.clone()]).only_check_end_entity_revocation(),
            None => verifier,
        };
        let verifier = verifier.build().map_err(|error| IdentityError::Verifier(error.to_string()))?;
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
        let provider = provider();
        let verifier = WebPkiServerVerifier::builder_with_provider(self.roots()?, Arc::clone(&provider));
        let verifier = match &self.revocations {
            Some((list, _)) => verifier.with_crls([list.clone()]).only_check_end_entity_revocation(),
            None => verifier,
        };
        let verifier = verifier.build().map_err(|error| IdentityError::Verifier(error.to_string()))?;
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_webpki_verifier(verifier)
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())?;
        tls.alpn_protocols = vec![ALPN.to_vec()];
        let quic = QuicClientConfig::try_from(tls).map_err(|error| IdentityError::Verifier(error.to_string()))?;
        Ok(Arc::new(quic))
    }
}

impl Files {
    fn load(&self) -> Result<Identity, IdentityError> {
        let read = |path: &Path| {
            fs::read_to_string(path).map_err(|source| IdentityError::Read { path: path.to_owned(), source })
        };
        let name = |path: &Path| path.display().to_string();
        let ca = certificates(&name(&self.ca), &read(&self.ca)?)?;
        let chain = certificates(&name(&self.cert), &read(&self.cert)?)?;
        let identity = Identity::of(ca, chain, private_key(&name(&self.key), &read(&self.key)?)?)?;
        let identity = match &self.revocations {
            Some(path) => identity.with_revocations(&read(path)?)?,
            None => identity,
        };
        Ok(Identity { files: Some(self.clone()), ..identity })
    }

    fn stamps(&self) -> Stamps {
        let paths = [Some(&self.ca), Some(&self.cert), Some(&self.key), self.revocations.as_ref()];
        let stamp = |path: &PathBuf| fs::metadata(path).and_then(|meta| Ok((meta.modified()?, meta.len()))).ok();
        paths.into_iter().flatten().map(stamp).collect()
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
