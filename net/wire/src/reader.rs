//! Frame reader: splits a stream of chunks into frames.

use crate::{Class, Frame, HEADER_BYTES, Header, Preface, WireError, control, decode_body};
use bytes::{Buf, Bytes, BytesMut};

/// Reader that collects the bytes of one stream and returns its frames, in order. Sans-I/O: the caller feeds it.
///
/// A body that lies whole in one chunk is a slice of that chunk; others are gathered with one copy into a buffer of
/// their own. The buffer's size is the announced length, which is capped by class; memory is touched only as bytes
/// arrive. After an error the reader must be dropped with its stream.
#[derive(Debug, Default)]
pub struct FrameReader {
    head: [u8; HEADER_BYTES],
    head_len: usize,
    body: Option<(Header, BytesMut)>,
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
                (header, BytesMut::with_capacity(header.length))
            }
        };
        let count = header.length.saturating_sub(body.len()).min(chunk.len());
        body.extend_from_slice(&chunk.split_to(count));
        if body.len() == header.length {
            return Ok(Some((header, body.freeze())));
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
