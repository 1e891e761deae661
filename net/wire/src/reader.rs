//! Frame reader: splits a stream of chunks into frames.

use crate::{Class, Frame, HEADER_BYTES, Header, Preface, WireError, control, decode_body};
use bytes::{Buf, Bytes};

/// Memory that a body takes ahead of its bytes, beside as much as has arrived.
const BODY_AHEAD_BYTES: usize = 1 << 20;

/// Reader that collects the bytes of one stream and returns its frames, in order. Sans-I/O: the caller feeds it.
///
/// A body that lies whole in one chunk is a slice of that chunk; others are gathered with one copy into a buffer of
/// their own. The buffer grows with what arrives, at most 1 MiB or to twice of it ahead, up to the announced length,
/// which is capped by class: announcing a frame takes no memory. After an error the reader must be dropped with its stream.
#[derive(Debug, Default)]
pub struct FrameReader {
    head: [u8; HEADER_BYTES],
    head_len: usize,
    body: Option<(Header, Vec<u8>)>,
}

impl FrameReader {
    /// A reader at the start of a frame.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the reader is between frames: a stream that ends elsewhere was cut.
    #[must_use]
    pub fn at_boundary(&self) -> bool {
        self.head_len == 0 && self.body.is_none()
    }

    /// Bytes of the frame, header included, of which the reader keeps a part. `None`: it keeps a header's bytes at most.
    #[must_use]
    pub fn announced(&self) -> Option<usize> {
        self.body.as_ref().map(|(header, _)| header.length.saturating_add(HEADER_BYTES))
    }

    /// Takes bytes from the front of `chunk` up to the end of the next frame. `None`: the chunk is used up.
    pub fn next_frame(&mut self, class: Class, chunk: &mut Bytes) -> Result<Option<Frame>, WireError> {
        match self.next_body(Some(class), chunk)? {
            Some((header, body)) => decode_body(class, header.kind, body).map(Some),
            None => Ok(None),
        }
    }

    /// As [`FrameReader::next_frame`], for the preface at the start of each direction.
    pub fn next_preface(&mut self, chunk: &mut Bytes) -> Result<Option<Preface>, WireError> {
        match self.next_body(None, chunk)? {
            Some((header, body)) => control::decode_preface(header.kind, body).map(Some),
            None => Ok(None),
        }
    }

    fn next_body(&mut self, class: Option<Class>, chunk: &mut Bytes) -> Result<Option<(Header, Bytes)>, WireError> {
        let (header, mut body) = match self.body.take() {
            Some(partial) => partial,
            None => {
                let Some(header) = self.next_header(class, chunk)? else { return Ok(None) };
                if chunk.len() >= header.length {
                    return Ok(Some((header, chunk.split_to(header.length))));
                }
                (header, Vec::new())
            }
        };
        let missing = header.length.saturating_sub(body.len());
        let count = missing.min(chunk.len());
        if body.capacity().saturating_sub(body.len()) < count {
            body.reserve_exact(missing.min(count.max(body.len()).max(BODY_AHEAD_BYTES)));
        }
        body.extend_from_slice(&chunk.split_to(count));
        if body.len() == header.length {
            return Ok(Some((header, body.into())));
        }
        self.body = Some((header, body));
        Ok(None)
    }

    fn next_header(&mut self, class: Option<Class>, chunk: &mut Bytes) -> Result<Option<Header>, WireError> {
        let count = HEADER_BYTES.saturating_sub(self.head_len).min(chunk.len());
        let end = self.head_len.saturating_add(count);
        if let Some(target) = self.head.get_mut(self.head_len..end) {
            chunk.copy_to_slice(target);
        }
        self.head_len = end;
        if end < HEADER_BYTES {
            return Ok(None);
        }
        self.head_len = 0;
        Header::decode(&self.head, class).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::BulkFrame;
    use lagoon_types::{Epoch, LeaseId};

    /// A header took the memory of the largest frame.
    #[test]
    fn a_body_takes_memory_as_it_arrives() {
        let kv = Bytes::from(vec![7; 10 << 20]);
        let frame = BulkFrame::Write { lease: LeaseId(1), epoch: Epoch(1), layer: 0, offset: 0, tokens: 1, kv };
        let encoded = crate::encode(&frame.clone().into()).unwrap();
        let stream: Vec<u8> = std::iter::once(encoded.head).chain(encoded.payload).flatten().collect();
        for size in [HEADER_BYTES + 1, 1000, 64 << 10, 3 << 20] {
            let mut reader = FrameReader::new();
            let (mut found, mut arrived) = (Vec::new(), 0);
            for part in stream.chunks(size) {
                let mut chunk = Bytes::copy_from_slice(part);
                found.extend(reader.next_frame(Class::Bulk, &mut chunk).unwrap());
                arrived += part.len();
                let kept = reader.body.as_ref().map_or(0, |(_, body)| body.capacity());
                assert!(
                    kept <= arrived + arrived.max(BODY_AHEAD_BYTES),
                    "{kept} bytes for {arrived} in pieces of {size}"
                );
            }
            assert_eq!(found, [Frame::Bulk(frame.clone())], "pieces of {size}");
            assert!(reader.at_boundary());
        }
    }
}
