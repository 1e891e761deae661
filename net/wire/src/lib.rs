//! Framing and codec of lagoon-protocol's messages. WIRE.md at the repository's root is the specification.
//!
//! A frame is a 16-byte header and a body. Control bodies are protobuf and evolve by tagged fields; partials and bulk
//! bodies are a fixed little-endian sub-header and raw payload bytes. Invariants:
//!
//! * decoding copies no payload: payloads are slices of the received buffer (of any alignment);
//! * encoding copies no payload: [`EncodedFrame`] is a list of pieces to write one after the other;
//! * every length, count and code of a peer is checked, with checked arithmetic, before it is used; a bad frame is a
//!   [`WireError`], never a panic;
//! * the decoder accepts every frame that [`encode`] accepts: both run the same checks;
//! * no I/O, no runtime: a transport feeds [`FrameReader`] with received bytes.
#![forbid(unsafe_code)]
#![warn(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "tests")
)]

#[cfg(target_endian = "big")]
compile_error!("the wire is little-endian and its headers are read in place: big-endian hosts are not supported");

mod bulk;
mod class;
mod control;
pub mod direct;
mod encoded;
mod error;
mod frame;
pub mod fuzz;
mod header;
mod layout;
mod partials;
mod reader;

pub use class::Class;
pub use control::Preface;
pub use encoded::EncodedFrame;
pub use error::WireError;
pub use frame::{Frame, decode_body, encode, encode_preface};
pub use header::{DIRECT_CODE, HEADER_BYTES, Header, MAGIC};
pub use lagoon_protocol::{VERSION_MAX, VERSION_MIN};
pub use reader::FrameReader;
