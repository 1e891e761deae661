//! Errors of configuration, binding and sending. Failures of a connected peer are [`crate::Event`]s.

use lagoon_wire::WireError;
use std::{io, path::PathBuf};

/// The endpoint could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("opening a UDP socket on {addr}: {source}")]
    Socket { addr: std::net::SocketAddr, source: io::Error },
    #[error("the node's identity cannot be used for TLS: {0}")]
    Identity(#[from] IdentityError),
    #[error("the transport configuration is invalid: {0}")]
    Config(&'static str),
}

/// A certificate or key that cannot be read, made or used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("reading {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{what} is not usable PEM: {reason}")]
    Pem { what: String, reason: String },
    #[error("{0} holds no certificate")]
    Empty(String),
    #[error(
        "the certificate names no node and no role\n\
         hint: this version needs both: issue it anew with `lagoon certs issue DIR NAME --role ROLE --force`"
    )]
    Nameless,
    /// On loading anew.
    #[error(
        "the files are of node {has:?} with a CA and a key or name of its own; the process runs as node {had:?}\n\
         hint: restart the process to use them"
    )]
    OtherCa { had: String, has: String },
    #[error("{0:?} is no node's name\nhint: up to 64 letters, digits, '-', '_' and '.'")]
    Name(String),
    #[error("making a certificate: {0}")]
    Issue(#[from] rcgen::Error),
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("certificate of the cluster's CA: {0}")]
    Verifier(String),
}

/// A frame was not queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Back-pressure: the peer's queue of this class is full. Try again later, or use `send`.
    #[error("the send queue of this peer and class is full")]
    Full,
    #[error("no such peer")]
    UnknownPeer,
    /// The node is closed.
    #[error("the node is closed")]
    Closed,
    /// `send` waited for room in the queue until its deadline.
    #[error("the send queue of this peer and class stayed full until the deadline")]
    Deadline,
    /// The frame is one that the peer would refuse.
    #[error("the frame cannot be sent: {0}")]
    Frame(#[from] WireError),
}
