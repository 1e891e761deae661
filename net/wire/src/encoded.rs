//! A frame in its encoded form: pieces to write one after the other.

use crate::{Class, Header, WireError, header::HEADER_BYTES};
use bytes::Bytes;

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
