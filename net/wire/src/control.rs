//! Control frames and the preface: protobuf bodies.

use crate::{Class, EncodedFrame, WireError};
use bytes::Bytes;
use lagoon_protocol::Control;
use prost::Message;

/// The only kind of the control class and of the preface: a protobuf message.
pub(crate) const KIND_MESSAGE: u8 = 1;

/// The first frame in each direction of every connection, before any other. It evolves like control messages.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Preface {
    /// Oldest protocol version that the sender speaks.
    #[prost(uint32, tag = "1")]
    pub version_min: u32,
    /// Newest protocol version that the sender speaks.
    #[prost(uint32, tag = "2")]
    pub version_max: u32,
    /// Random per process: distinguishes a restarted process from a lost connection.
    #[prost(fixed64, tag = "3")]
    pub incarnation: u64,
    /// The sender's count of sessions with this receiver; grows when the sender closes its connections to it.
    #[prost(uint64, tag = "4")]
    pub generation: u64,
    /// `ip:port` on which the sender accepts connections. An unspecified ip means the source address of the connection.
    #[prost(string, tag = "5")]
    pub listen_addr: String,
    /// [`Class::code`] of the connection.
    #[prost(uint32, tag = "6")]
    pub class: u32,
}

pub(crate) fn encode(message: &Control) -> Result<EncodedFrame, WireError> {
    EncodedFrame::build(Some(Class::Control), KIND_MESSAGE, &[&message.encode_to_vec()], Default::default())
}

pub(crate) fn decode(kind: u8, body: Bytes) -> Result<Control, WireError> {
    if kind != KIND_MESSAGE {
        return Err(WireError::Kind { class: Class::Control, kind });
    }
    Ok(Control::decode(body)?)
}

pub(crate) fn decode_preface(kind: u8, body: Bytes) -> Result<Preface, WireError> {
    if kind != KIND_MESSAGE {
        return Err(WireError::Kind { class: Class::Control, kind });
    }
    Ok(Preface::decode(body)?)
}
