//! What can go wrong at the edges of the transport. Trouble with a connected peer is an [`crate::Event`].

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
