//! The 16 bytes before every frame.

use crate::WireError;
use crate::class::{Class, FRAME_VERSION};
use bytemuck::{Pod, Zeroable};
use lagoon_types::limits;

/// Bytes of [`RawHeader`].
pub const HEADER_BYTES: usize = 16;
/// The first four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"LGON";

/// The header as it lies on the wire, little-endian.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RawHeader {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u8,
    pub(crate) class: u8,
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) length: u32,
    pub(crate) reserved: u32,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);

/// Code of the class field of a preface.
pub(crate) const PREFACE_CODE: u8 = 0;
/// Class code of a direct connection's frames and of its preface: [`crate::direct`].
pub const DIRECT_CODE: u8 = 4;

/// A checked header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// `None` is the preface.
    pub class: Option<Class>,
    pub kind: u8,
    /// Bytes that follow the header; within the class's cap.
    pub length: usize,
}

impl Header {
    /// Checks a header on a stream that carries `expected` (`None`: a preface is due).
    pub fn decode(bytes: &[u8; HEADER_BYTES], expected: Option<Class>) -> Result<Self, WireError> {
        let wanted = expected.map_or(PREFACE_CODE, Class::code);
        let max = expected.map_or(limits::PREFACE_BYTES_MAX, Class::body_bytes_max);
        let (kind, length) = check(bytes, wanted, max, expected.unwrap_or(Class::Control))?;
        Ok(Self { class: expected, kind, length })
    }

    /// Checks the header of a frame of a direct connection; gives its kind and length.
    pub(crate) fn decode_direct(bytes: &[u8; HEADER_BYTES]) -> Result<(u8, usize), WireError> {
        check(bytes, DIRECT_CODE, limits::DATA_FRAME_BYTES_MAX, Class::Bulk)
    }

    /// Encodes the header of a frame of a direct connection.
    pub(crate) fn encode_direct(kind: u8, length: usize) -> Result<[u8; HEADER_BYTES], WireError> {
        raw(DIRECT_CODE, kind, length, limits::DATA_FRAME_BYTES_MAX, Class::Bulk)
    }
    /// Encodes a header; refuses a body over the class's cap.
    pub(crate) fn encode(class: Option<Class>, kind: u8, length: usize) -> Result<[u8; HEADER_BYTES], WireError> {
        let max = class.map_or(limits::PREFACE_BYTES_MAX, Class::body_bytes_max);
        raw(class.map_or(PREFACE_CODE, Class::code), kind, length, max, class.unwrap_or(Class::Control))
    }
}

/// Checks a header of the class with code `wanted`; `named` is the class that errors name.
fn check(bytes: &[u8; HEADER_BYTES], wanted: u8, max: usize, named: Class) -> Result<(u8, usize), WireError> {
    let raw: RawHeader = bytemuck::pod_read_unaligned(bytes);
    if raw.magic != MAGIC {
        return Err(WireError::Magic(raw.magic));
    }
    if raw.version != FRAME_VERSION {
        return Err(WireError::Version(raw.version));
    }
    if raw.class != wanted {
        return Err(WireError::Class { expected: named, got: raw.class });
    }
    if raw.flags != 0 || raw.reserved != 0 {
        let value = u64::from(raw.flags).max(u64::from(raw.reserved));
        return Err(WireError::Field { field: "the reserved part of the header", value, allowed: "0" });
    }
    let length = usize::try_from(raw.length).unwrap_or(usize::MAX);
    if length > max {
        return Err(WireError::TooLarge { class: named, bytes: length, max });
    }
    Ok((raw.kind, length))
}

fn raw(class: u8, kind: u8, length: usize, max: usize, named: Class) -> Result<[u8; HEADER_BYTES], WireError> {
    let too_large = WireError::TooLarge { class: named, bytes: length, max };
    if length > max {
        return Err(too_large);
    }
    let length = u32::try_from(length).ok().ok_or(too_large)?;
    let raw = RawHeader { magic: MAGIC, version: FRAME_VERSION, class, kind, flags: 0, length, reserved: 0 };
    Ok(bytemuck::cast(raw))
}
