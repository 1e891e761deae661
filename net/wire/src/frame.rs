//! A frame of any class, and its codec.

use crate::{Class, EncodedFrame, Preface, WireError, bulk, control, partials};
use bytes::Bytes;
use lagoon_protocol::{BulkFrame, Control, ControlBody, PartialsFrame};
use prost::Message;

/// A message of any class.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// Control message; an unknown body is `Control { body: None }`.
    Control(Control),
    Partials(PartialsFrame),
    Bulk(BulkFrame),
}

impl Frame {
    /// The class whose connection carries this frame.
    #[must_use]
    pub const fn class(&self) -> Class {
        match self {
            Self::Control(_) => Class::Control,
            Self::Partials(_) => Class::Partials,
            Self::Bulk(_) => Class::Bulk,
        }
    }
}

impl From<Control> for Frame {
    fn from(message: Control) -> Self {
        Self::Control(message)
    }
}

impl From<ControlBody> for Frame {
    fn from(body: ControlBody) -> Self {
        Self::Control(body.into())
    }
}

impl From<PartialsFrame> for Frame {
    fn from(frame: PartialsFrame) -> Self {
        Self::Partials(frame)
    }
}

impl From<BulkFrame> for Frame {
    fn from(frame: BulkFrame) -> Self {
        Self::Bulk(frame)
    }
}

/// Encodes a frame. Fails if the decoder would refuse it (a payload length that does not fit its counts, a frame over
/// its class's cap).
pub fn encode(frame: &Frame) -> Result<EncodedFrame, WireError> {
    match frame {
        Frame::Control(message) => control::encode(message),
        Frame::Partials(frame) => partials::encode(frame),
        Frame::Bulk(frame) => bulk::encode(frame),
    }
}

/// Encodes the preface of a connection.
pub fn encode_preface(preface: &Preface) -> Result<EncodedFrame, WireError> {
    EncodedFrame::build(None, control::KIND_MESSAGE, &[&preface.encode_to_vec()], Default::default())
}

/// Decodes the body of a frame of class `class`; payloads are slices of `body`.
pub fn decode_body(class: Class, kind: u8, body: Bytes) -> Result<Frame, WireError> {
    match class {
        Class::Control => control::decode(kind, body).map(Frame::Control),
        Class::Partials => partials::decode(kind, body).map(Frame::Partials),
        Class::Bulk => bulk::decode(kind, body).map(Frame::Bulk),
    }
}
