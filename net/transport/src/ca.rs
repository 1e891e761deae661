//! The cluster's certificate authority: made once, signs one certificate per node.

use crate::{Identity, IdentityError, Roles, SERVER_NAME, Subject, subject::revoked_serials};
use rand::Rng as _;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use std::fmt;
use time::{Duration, OffsetDateTime};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// Validity of a CA made here, in days.
const CA_DAYS: i64 = 3650;
/// Validity of a node's certificate, in days.
const NODE_DAYS: i64 = 730;
/// Days by which the ends of nodes' certificates differ at most.
const STAGGER_DAYS: i64 = 60;

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

    /// Signs a certificate for a node and its roles, valid for [`SERVER_NAME`] as server and as client, with a new key.
    pub fn issue(&self, node: &str, roles: impl Into<Roles>) -> Result<Issued, IdentityError> {
        self.renew(node, roles, &KeyPair::generate()?)
    }

    /// As [`ClusterCa::issue`], for the key that the node has (PEM): a node that is connected is known by its key.
    pub fn issue_for_key(&self, node: &str, roles: impl Into<Roles>, key: &str) -> Result<Issued, IdentityError> {
        self.renew(node, roles, &KeyPair::from_pem(key)?)
    }

    fn renew(&self, node: &str, roles: impl Into<Roles>, key: &KeyPair) -> Result<Issued, IdentityError> {
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
        for uri in Subject::uris(node, roles.into())? {
            params.subject_alt_names.push(SanType::URI(uri.try_into()?));
        }
        params.distinguished_name.push(DnType::CommonName, node);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        set_validity(&mut params, NODE_DAYS);
        // Positive, and without a leading zero, so that it is the same bytes in every list.
        let serial = rand::random::<u128>() >> 2 | 1 << 125;
        params.serial_number = Some(SerialNumber::from_slice(&serial.to_be_bytes()));
        stagger(&mut params);
        let cert_pem = params.signed_by(key, &self.issuer)?.pem();
        Ok(Issued { cert_pem, key_pem: key.serialize_pem() })
    }

    /// Issues a certificate and makes an identity of it, in memory (`up`, `demo`, tests).
    pub fn identity(&self, node: &str, roles: impl Into<Roles>) -> Result<Identity, IdentityError> {
        let issued = self.issue(node, roles)?;
        Identity::from_pem(&self.cert_pem, &issued.cert_pem, &issued.key_pem)
    }

    /// The cluster's revocation list with one more certificate on it, as PEM; `list` is the one before, if there is one.
    pub fn revoke(&self, list: Option<&str>, cert_pem: &str) -> Result<String, IdentityError> {
        let leaf = CertificateDer::from_pem_slice(cert_pem.as_bytes());
        let bad = |what: &str, reason: String| IdentityError::Pem { what: what.to_owned(), reason };
        let leaf = leaf.map_err(|error| bad("the certificate", error.to_string()))?;
        let mut serials = list.map_or_else(|| Ok(Vec::new()), revoked_serials)?;
        let serial = Subject::of(&leaf)?.serial.to_vec();
        if !serials.contains(&serial) {
            serials.push(serial);
        }
        let now = OffsetDateTime::now_utc();
        let revoked = |serial: &Vec<u8>| RevokedCertParams {
            serial_number: SerialNumber::from_slice(serial),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: now,
            next_update: now.saturating_add(Duration::days(CA_DAYS)),
            crl_number: SerialNumber::from(u64::try_from(now.unix_timestamp()).unwrap_or(0)),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        Ok(params.signed_by(&self.issuer)?.pem()?)
    }
}

/// From a day ago (clocks differ) for `days`.
fn set_validity(params: &mut CertificateParams, days: i64) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now.saturating_sub(Duration::days(1));
    params.not_after = now.saturating_add(Duration::days(days));
}

/// Takes up to [`STAGGER_DAYS`] off a certificate's end at random: those that were issued at one moment do not all end at one.
fn stagger(params: &mut CertificateParams) {
    let off = rand::rng().random_range(0..=STAGGER_DAYS.saturating_mul(24));
    params.not_after = params.not_after.saturating_sub(Duration::hours(off));
}

/// A certificate's contents, for printing.
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
        GeneralName::DNSName(name) | GeneralName::URI(name) => (*name).to_owned(),
        other => other.to_string(),
    }
}
