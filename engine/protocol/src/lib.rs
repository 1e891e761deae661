//! The messages that instances and the gManager exchange: plain data with field tags, no I/O.
//!
//! Three classes, each on its own connection: [`Control`] evolves by tagged fields that an older peer skips;
//! [`PartialsFrame`] (queries and partials) and [`BulkFrame`] (KV) are fixed headers and raw bytes, encoded by
//! lagoon-wire. WIRE.md is the specification. Semantics that the types do not show:
//!
//! * A **lease** is an ordered list of physical rBlocks (entries) that a creditor lends to one sequence. Token offsets
//!   in a lease count from its first entry: entry `k` holds offsets `[k * block_tokens, (k + 1) * block_tokens)`.
//! * KV is written to a lease in ascending offset per layer; a creditor therefore keeps one written length per layer,
//!   and a query beyond it waits (within the step's deadline).
//! * Frames of one class from one peer arrive in order.
#![forbid(unsafe_code)]

pub mod control;
pub mod data;
pub mod direct;
pub mod placement;
pub mod prefill;
pub mod transfer;

pub use control::*;
pub use data::*;
pub use direct::*;
pub use placement::*;
pub use prefill::*;
pub use transfer::*;

/// Versions of this protocol that this build speaks. Peers agree on the highest common one in their handshake.
pub const VERSION_MIN: u32 = 1;
/// See [`VERSION_MIN`].
pub const VERSION_MAX: u32 = 1;
