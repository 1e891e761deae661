//! The subject of a certificate: a node's name and its roles, as URIs among the certificate's alternative names.
//!
//! A certificate of the cluster's CA says `lagoon://node/<name>` once and `lagoon://role/<role>` for each role. What a peer
//! may do follows from these, never from its messages.

use crate::IdentityError;
use quinn::Connection;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, pem::PemObject};
use std::{fmt, str::FromStr, sync::Arc};
use x509_parser::{
    prelude::{FromDer, GeneralName, X509Certificate},
    revocation_list::CertificateRevocationList,
};

const NODE: &str = "lagoon://node/";
const ROLE: &str = "lagoon://role/";
/// Longest name of a node, in bytes.
pub const NODE_NAME_BYTES_MAX: usize = 64;

/// Role that a certificate allows its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeRole {
    /// Coordinates the pool, and orders.
    GManager,
    /// Runs requests, lends and borrows.
    Instance,
    /// Lends memory and remote attention, and nothing else.
    Kv,
    /// Asks the gManager who serves.
    Gateway,
    /// Asks the gManager for status, drains, moves and roles.
    Operator,
}

impl NodeRole {
    /// All roles.
    pub const ALL: [Self; 5] = [Self::GManager, Self::Instance, Self::Kv, Self::Gateway, Self::Operator];

    /// As in certificates and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::GManager => "gmanager",
            Self::Instance => "instance",
            Self::Kv => "kv",
            Self::Gateway => "gateway",
            Self::Operator => "operator",
        }
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl fmt::Display for NodeRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for NodeRole {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || Self::ALL.map(Self::name).join(", ");
        let role = Self::ALL.into_iter().find(|role| role.name() == text);
        role.ok_or_else(|| format!("{text:?} is no role of a node; the roles are {}", known()))
    }
}

/// A set of roles.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Roles(u8);

impl Roles {
    /// Every role, for pools with one trusted node (tests, benchmarks).
    #[must_use]
    pub fn all() -> Self {
        NodeRole::ALL.into_iter().collect()
    }

    /// Whether the role is among them.
    #[must_use]
    pub const fn has(self, role: NodeRole) -> bool {
        self.0 & role.bit() != 0
    }

    /// Whether it has one of these.
    #[must_use]
    pub fn has_any(self, roles: &[NodeRole]) -> bool {
        roles.iter().any(|role| self.has(*role))
    }

    /// The roles, in their order.
    pub fn iter(self) -> impl Iterator<Item = NodeRole> {
        NodeRole::ALL.into_iter().filter(move |role| self.has(*role))
    }
}

impl FromIterator<NodeRole> for Roles {
    fn from_iter<I: IntoIterator<Item = NodeRole>>(roles: I) -> Self {
        Self(roles.into_iter().fold(0, |bits, role| bits | role.bit()))
    }
}

impl From<NodeRole> for Roles {
    fn from(role: NodeRole) -> Self {
        Self(role.bit())
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.iter().map(NodeRole::name).collect::<Vec<_>>().join(", "))
    }
}

impl fmt::Debug for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A certificate's subject; see the module's documentation. Equal if node and key are: a renewed certificate may change roles and
/// validity, and a connected node is identified by its key.
#[derive(Clone, Debug)]
pub struct Subject {
    pub node: Arc<str>,
    pub roles: Roles,
    /// The public key, as in the certificate (DER).
    key: Arc<[u8]>,
    /// The certificate's serial number, as revocation lists name it.
    pub(crate) serial: Arc<[u8]>,
    /// When the certificate ends, in seconds since 1970.
    pub not_after_s: i64,
}

impl PartialEq for Subject {
    fn eq(&self, other: &Self) -> bool {
        self.node == other.node && self.key == other.key
    }
}

impl Eq for Subject {}

impl Subject {
    /// Reads a node's certificate.
    ///
    /// # Errors
    /// [`IdentityError::Nameless`] for a certificate without node or role; [`IdentityError::Pem`] for one that is damaged.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let bad = |reason: String| IdentityError::Pem { what: "the node certificate".to_owned(), reason };
        let (_, cert) = X509Certificate::from_der(certificate).map_err(|error| bad(error.to_string()))?;
        let alt = cert.subject_alternative_name().map_err(|error| bad(error.to_string()))?;
        let names = alt.iter().flat_map(|alt| &alt.value.general_names);
        let uris = names.filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        });
        let (mut node, mut roles) = (None, Roles::default());
        for uri in uris {
            if let Some(name) = uri.strip_prefix(NODE) {
                if node.replace(name).is_some() || !is_node_name(name) {
                    return Err(bad(format!("it names {name:?} as its node, which is no name, or a second one")));
                }
            } else if let Some(role) = uri.strip_prefix(ROLE) {
                // A role of a later version is none of ours.
                roles = role.parse().map_or(roles, |role: NodeRole| roles.iter().chain([role]).collect());
            }
        }
        let node = node.filter(|_| roles != Roles::default()).ok_or(IdentityError::Nameless)?;
        Ok(Self {
            node: Arc::from(node),
            roles,
            key: Arc::from(cert.public_key().raw),
            serial: Arc::from(cert.raw_serial()),
            not_after_s: cert.validity().not_after.timestamp(),
        })
    }

    /// As [`Subject::of`], from PEM text.
    ///
    /// # Errors
    /// As [`Subject::of`].
    pub fn from_pem(pem: &str) -> Result<Self, IdentityError> {
        let leaf = CertificateDer::from_pem_slice(pem.as_bytes());
        let bad = |reason: String| IdentityError::Pem { what: "the node certificate".to_owned(), reason };
        Self::of(&leaf.map_err(|error| bad(error.to_string()))?)
    }

    /// Whether a revocation list (PEM) names its certificate.
    ///
    /// # Errors
    /// [`IdentityError::Pem`] for a list that is damaged.
    pub fn is_on(&self, list: &str) -> Result<bool, IdentityError> {
        Ok(revoked_serials(list)?.iter().any(|serial| serial[..] == self.serial[..]))
    }

    /// Whom the other end of a connection showed a certificate for. The handshake has verified it.
    pub(crate) fn of_peer(connection: &Connection) -> Result<Self, String> {
        let shown = connection.peer_identity().and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
        let leaf = shown.as_ref().and_then(|chain| chain.first()).ok_or("the peer showed no certificate")?;
        Self::of(leaf).map_err(|error| error.to_string())
    }

    /// The names that a certificate for `node` carries.
    pub(crate) fn uris(node: &str, roles: Roles) -> Result<Vec<String>, IdentityError> {
        if !is_node_name(node) {
            return Err(IdentityError::Name(node.to_owned()));
        }
        Ok([format!("{NODE}{node}")].into_iter().chain(roles.iter().map(|role| format!("{ROLE}{role}"))).collect())
    }
}

fn is_node_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=NODE_NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(plain)
}

/// The serial numbers on a revocation list (PEM).
pub(crate) fn revoked_serials(list: &str) -> Result<Vec<Vec<u8>>, IdentityError> {
    let bad = |reason: String| IdentityError::Pem { what: "the revocation list".to_owned(), reason };
    let der = CertificateRevocationListDer::from_pem_slice(list.as_bytes()).map_err(|error| bad(error.to_string()))?;
    let (_, list) = CertificateRevocationList::from_der(&der).map_err(|error| bad(error.to_string()))?;
    Ok(list.iter_revoked_certificates().map(|revoked| revoked.raw_serial().to_vec()).collect())
}
