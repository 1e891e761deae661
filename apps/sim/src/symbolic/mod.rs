//! A device without arithmetic: KV is symbols, and each next token is a pure function of the tokens before.
//!
//! [`model`] defines that function twice: over KV in a store, and as an [`Oracle`] without memory. [`device`]
//! computes the former as the shipped executor would, layer by layer, over slots, leases and partials. Wrong, stale,
//! missing or doubly counted KV gives another token than the oracle's.

pub mod device;
mod drafter;
pub mod model;
mod pass;
mod remote_request;

pub use device::{Speed, Symbolic};
pub use model::{Oracle, Windows};
