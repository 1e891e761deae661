//! The cluster's certificate authority: made once, signs one certificate per node.

use crate::{Identity, IdentityError, SERVER_NAME};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use std::fmt;
use time::{Duration, OffsetDateTime};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// Validity of a CA made here, in days.
const CA_DAYS: i64 = 3650;
/// Validity of a node's certificate, in days.
const NODE_DAYS: i64 = 730;

/// A certificate authority with its key.
pub struct ClusterCa {
    cert_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for ClusterCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterCa").finish_non_exhaustive()
    }
}

/// A certificate and its key, as PEM.
#[derive(Clone)]
pub struct Issued {
    pub cert_pem: String,
    pub key_pem: String,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issued").field("cert_pem", &self.cert_pem).finish_non_exhaustive()
    }
}

impl ClusterCa {
    /// Makes a new CA; `name` is for people.
    pub fn generate(name: &str) -> Result<Self, IdentityError> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.distinguished_name.push(DnType::CommonName, format!("{name} cluster CA"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        set_validity(&mut params, CA_DAYS);
        let key = KeyPair::generate()?;
        let cert_pem = params.self_signed(&key)?.pem();
        Ok(Self { cert_pem, issuer: Issuer::new(params, key) })
    }

    /// A CA from its PEM files.
    pub fn from_pem(cert_pem: &str, key_pem: &str) -> Result<Self, IdentityError> {
        let issuer = Issuer::from_ca_cert_pem(cert_pem, KeyPair::from_pem(key_pem)?)?;
        Ok(Self { cert_pem: cert_pem.to_owned(), issuer })
    }

    /// The CA's certificate, which every node gets.
    #[must_use]
    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    /// The CA's key, which no node gets.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Signs a certificate for a node, valid for [`SERVER_NAME`] as server and as client; `name` is for people.
    pub fn issue(&self, name: &str) -> Result<Issued, IdentityError> {
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        set_validity(&mut params, NODE_DAYS);
        let key = KeyPair::generate()?;
        let cert_pem = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Issued { cert_pem, key_pem: key.serialize_pem() })
    }

    /// Issues a certificate and makes an identity of it, in memory (`up`, `demo`, tests).
    pub fn identity(&self, name: &str) -> Result<Identity, IdentityError> {
        let issued = self.issue(name)?;
        Identity::from_pem(&self.cert_pem, &issued.cert_pem, &issued.key_pem)
    }
}

/// From a day ago (clocks differ) for `days`.
fn set_validity(params: &mut CertificateParams, days: i64) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now.saturating_sub(Duration::days(1));
    params.not_after = now.saturating_add(Duration::days(days));
}

/// What a certificate says, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertInfo {
    pub subject: String,
    pub issuer: String,
    /// DNS names and addresses.
    pub names: Vec<String>,
    pub not_before: OffsetDateTime,
    pub not_after: OffsetDateTime,
    pub is_ca: bool,
}

/// Describes every certificate in `pem`.
pub fn describe(pem: &str) -> Result<Vec<CertInfo>, IdentityError> {
    let bad = |reason: String| IdentityError::Pem { what: "the certificate".to_owned(), reason };
    let mut infos = Vec::new();
    for block in x509_parser::pem::Pem::iter_from_buffer(pem.as_bytes()) {
        let block = block.map_err(|error| bad(error.to_string()))?;
        if block.label != "CERTIFICATE" {
            continue;
        }
        let (_, cert) = X509Certificate::from_der(&block.contents).map_err(|error| bad(error.to_string()))?;
        let alt = cert.subject_alternative_name().map_err(|error| bad(error.to_string()))?;
        let names = alt.map(|alt| alt.value.general_names.iter().map(name_text).collect()).unwrap_or_default();
        infos.push(CertInfo {
            subject: cert.subject().to_string(),
            issuer: cert.issuer().to_string(),
            names,
            not_before: cert.validity().not_before.to_datetime(),
            not_after: cert.validity().not_after.to_datetime(),
            is_ca: cert.is_ca(),
        });
    }
    if infos.is_empty() {
        return Err(IdentityError::Empty("the file".to_owned()));
    }
    Ok(infos)
}

fn name_text(name: &GeneralName<'_>) -> String {
    match name {
        GeneralName::DNSName(name) => (*name).to_owned(),
        other => other.to_string(),
    }
}
