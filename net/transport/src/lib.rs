//! Carries lagoon-wire's frames between processes over QUIC, under mutual TLS.
//!
//! A [`Node`] is one UDP endpoint that accepts and connects. Another process is a **peer**, known by the address on
//! which it accepts. Each class of frames (control, partials, bulk) has its own QUIC connection to a peer, opened when
//! it is first needed by whichever side needs it first, and used in both directions. Invariants:
//!
//! * Both sides show a certificate of the cluster's CA, always; there is no plain mode.
//! * Frames of one class between two peers arrive in order and without gaps within a **session**, the time between
//!   [`Event::Up`] and [`Event::Down`]. When any connection of a peer is lost, the session ends as a whole: the other
//!   connections are closed, frames that wait are dropped, and a new session begins with the next connection. So a
//!   frame is never delivered after one that was lost before it.
//! * Every queue is bounded in frames and bytes. A full send queue is [`SendError::Full`]; a full receive queue stops
//!   the reading of that class, and QUIC's flow control pushes the sender back.
//! * A bad frame closes the connection that carried it and names the reason; never the process.
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "tests")
)]

mod accept;
mod answer;
mod ca;
mod close;
mod config;
mod dial;
pub mod direct;
mod error;
mod event;
mod exports;
mod identity;
mod incoming;
mod link;
mod node;
mod open_direct;
mod peer;
mod pins;
mod session;
mod socket;
mod stats;
mod subject;

pub use answer::AnswerControl;
pub use ca::{CertInfo, ClusterCa, Issued, describe};
pub use config::{FIRST_WINDOW_BYTES, TransportConfig};
pub use error::{BindError, IdentityError, SendError};
pub use event::{Event, Inbound, Inbox, PeerId};
pub use identity::{Identity, SERVER_NAME};
pub use incoming::IncomingStats;
pub use lagoon_wire::{Class, Frame};
pub use node::{Bound, Node};
pub use stats::ClassStats;
pub use subject::{NODE_NAME_BYTES_MAX, NodeRole, Roles, Subject};
