//! The protocol cores of the pool, sans-IO: no sockets, no threads, no clock (`now_ms` is a parameter and never goes
//! back), no randomness but the incarnation that the caller draws. The same calls in the same order give the same
//! outputs, so that a seed replays a failure.
//!
//! * [`RManager`], one per instance, owns the rBlocks: it gives them to own sequences, lends them, and borrows others'
//!   (Infinite-LLM v1 §4.3).
//! * [`GManager`], one per pool, registers instances, keeps the global debt ledger from their heartbeats, and
//!   recommends creditors (v1 §4.4). It holds soft state only.
//!
//! Methods are of four kinds: getters; `on_*` take what happened; plain verbs are commands; `poll` hands out what is
//! to be done. What peers send is checked and refused, never trusted; panics are bugs of ours.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

pub mod gmanager;
pub mod rmanager;
#[cfg(test)]
mod tests;

pub use gmanager::{GManager, LedgerRow};
pub use rmanager::{BorrowFailure, BorrowId, BorrowedLease, ConfigError, LeaseEnded, Output, RManager, RManagerConfig};
