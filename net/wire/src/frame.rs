//! A frame of any class, and its encoded form.

use crate::{Class, Header, Preface, WireError, bulk, control, header::HEADER_BYTES, partials};
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

/// A frame as bytes: `head`, then the pieces of `payload` in order. Unused pieces are empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedFrame {
    /// The header, the sub-header and small arrays.
    pub head: Bytes,
    /// The caller's payloads, shared and not copied.
    pub payload: [Bytes; 3],
}

impl EncodedFrame {
    /// Joins a head and payloads behind a header that counts both.
    pub(crate) fn build(
        class: Option<Class>,
        kind: u8,
        sub_header: &[&[u8]],
        payload: [Bytes; 3],
    ) -> Result<Self, WireError> {
        let sizes = sub_header.iter().map(|part| part.len()).chain(payload.iter().map(Bytes::len));
        let length = sizes.fold(0usize, usize::saturating_add);
        let header = Header::encode(class, kind, length)?;
        let mut head = Vec::with_capacity(HEADER_BYTES.saturating_add(length.min(4096)));
        head.extend_from_slice(&header);
        sub_header.iter().for_each(|part| head.extend_from_slice(part));
        Ok(Self { head: head.into(), payload })
    }

    /// Bytes of the whole frame, header included.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a frame has a header and is never empty")]
    pub fn len(&self) -> usize {
        self.payload.iter().fold(self.head.len(), |sum, piece| sum.saturating_add(piece.len()))
    }

    /// The frame in one buffer: a copy, for tests and recordings.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut all = self.head.to_vec();
        self.payload.iter().for_each(|piece| all.extend_from_slice(piece));
        all
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
