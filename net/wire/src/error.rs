//! Errors of encoding and decoding. A peer's bytes are never trusted: each error closes the stream that carried them.

use crate::Class;

/// Error of a frame that cannot be encoded or decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("not a Lagoon frame: it starts with {0:02x?}")]
    Magic([u8; 4]),
    #[error("frame version {0} is not spoken here (this build speaks {own})", own = crate::class::FRAME_VERSION)]
    Version(u8),
    #[error("a frame of class {got} arrived on a {expected} stream")]
    Class { expected: Class, got: u8 },
    #[error("unknown {class} frame kind {kind}")]
    Kind { class: Class, kind: u8 },
    #[error("a {class} frame of {bytes} bytes is over the limit of {max}")]
    TooLarge { class: Class, bytes: usize, max: usize },
    #[error("the frame is too short for {0}")]
    Short(&'static str),
    #[error("the lengths in the frame disagree: {0}")]
    Length(&'static str),
    #[error("{field} is {value}, allowed are {allowed}")]
    Field { field: &'static str, value: u64, allowed: &'static str },
    #[error("the text in the frame is not UTF-8")]
    Utf8,
    #[error("the protobuf body is malformed: {0}")]
    Protobuf(#[from] prost::DecodeError),
}
