//! Frames of a direct connection: reads of registered memory and their bytes.
//!
//! The bytes of a [`DirectFrame::Data`] are not gathered: [`DirectReader`] announces them and then hands them out in
//! the chunks in which they arrive, so that the receiver copies each once, to where it belongs.

use crate::{
    WireError,
    header::{HEADER_BYTES, Header},
    layout::{
        RawDirectBytes, RawDirectRead, RawDirectRefused, RawOpen, RawSegment, finish, refuse_code, reserved, take,
    },
};
use bytemuck::bytes_of;
use bytes::{Buf, Bytes, BytesMut};
use lagoon_protocol::{DirectFrame, DirectSegment};
use lagoon_types::limits;

const KIND_OPEN: u8 = 1;
const KIND_READ: u8 = 2;
const KIND_PROBE: u8 = 3;
const KIND_DATA: u8 = 4;
const KIND_REFUSED: u8 = 5;

/// Largest body of a frame without data.
const BODY_BYTES_MAX: usize = size_of::<RawDirectRead>() + limits::TRANSFER_SEGMENTS_MAX * size_of::<RawSegment>();

/// Encodes a frame; the caller writes the bytes of a `Data` after it.
///
/// # Errors
/// If the decoder would refuse the frame.
pub fn encode(frame: &DirectFrame) -> Result<Bytes, WireError> {
    check(frame)?;
    let mut body = BytesMut::new();
    let mut data = 0;
    let kind = match frame {
        DirectFrame::Open { reader, epoch } => {
            body.extend_from_slice(bytes_of(&RawOpen { epoch: *epoch, reader: *reader, reserved: 0 }));
            KIND_OPEN
        }
        DirectFrame::Read { id, segments } => {
            let count = u32::try_from(segments.len()).unwrap_or(u32::MAX);
            body.extend_from_slice(bytes_of(&RawDirectRead { id: *id, segments: count, reserved: 0 }));
            for DirectSegment { export, region, offset, bytes } in segments {
                let (export, offset, bytes, region) = (*export, *offset, *bytes, *region);
                body.extend_from_slice(bytes_of(&RawSegment { export, offset, bytes, region, reserved: 0 }));
            }
            KIND_READ
        }
        DirectFrame::Probe { id, bytes } => {
            body.extend_from_slice(bytes_of(&RawDirectBytes { id: *id, bytes: *bytes }));
            KIND_PROBE
        }
        DirectFrame::Data { id, bytes } => {
            body.extend_from_slice(bytes_of(&RawDirectBytes { id: *id, bytes: *bytes }));
            data = usize::try_from(*bytes).unwrap_or(usize::MAX);
            KIND_DATA
        }
        DirectFrame::Refused { id, code } => {
            body.extend_from_slice(bytes_of(&RawDirectRefused { id: *id, code: code.code(), reserved: [0; 7] }));
            KIND_REFUSED
        }
    };
    let header = Header::encode_direct(kind, body.len().saturating_add(data))?;
    let mut out = BytesMut::with_capacity(HEADER_BYTES.saturating_add(body.len()));
    out.extend_from_slice(&header);
    out.extend_from_slice(&body);
    Ok(out.freeze())
}

fn decode(kind: u8, length: usize, mut body: Bytes) -> Result<DirectFrame, WireError> {
    let frame = match kind {
        KIND_OPEN => {
            let raw: RawOpen = take(&mut body, "an open")?;
            reserved(&raw.reserved.to_le_bytes())?;
            DirectFrame::Open { reader: raw.reader, epoch: raw.epoch }
        }
        KIND_READ => {
            let raw: RawDirectRead = take(&mut body, "a read")?;
            reserved(&raw.reserved.to_le_bytes())?;
            let mut segments = Vec::new();
            for _ in 0..raw.segments {
                let RawSegment { export, offset, bytes, region, reserved: zero } = take(&mut body, "a segment")?;
                reserved(&zero.to_le_bytes())?;
                segments.push(DirectSegment { export, region, offset, bytes });
            }
            DirectFrame::Read { id: raw.id, segments }
        }
        KIND_PROBE => {
            let raw: RawDirectBytes = take(&mut body, "a probe")?;
            DirectFrame::Probe { id: raw.id, bytes: raw.bytes }
        }
        KIND_DATA => {
            let raw: RawDirectBytes = take(&mut body, "data")?;
            let follow = length.saturating_sub(size_of::<RawDirectBytes>());
            if u64::try_from(follow).ok() != Some(raw.bytes) {
                return Err(WireError::Length("data has another length than it announces"));
            }
            DirectFrame::Data { id: raw.id, bytes: raw.bytes }
        }
        KIND_REFUSED => {
            let raw: RawDirectRefused = take(&mut body, "a refusal")?;
            reserved(&raw.reserved)?;
            DirectFrame::Refused { id: raw.id, code: refuse_code(raw.code)? }
        }
        _ => return Err(WireError::Kind { class: crate::Class::Bulk, kind }),
    };
    finish(&body)?;
    check(&frame)?;
    Ok(frame)
}

fn check(frame: &DirectFrame) -> Result<(), WireError> {
    let bounded = |field, value: u64, max: u64, allowed| {
        if (1..=max).contains(&value) { Ok(()) } else { Err(WireError::Field { field, value, allowed }) }
    };
    match frame {
        DirectFrame::Read { segments, .. } => {
            let count = u64::try_from(segments.len()).unwrap_or(u64::MAX);
            let max = u64::try_from(limits::TRANSFER_SEGMENTS_MAX).unwrap_or(u64::MAX);
            bounded("the number of segments", count, max, "1 to TRANSFER_SEGMENTS_MAX")?;
            let bytes = segments.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.bytes));
            if let Some(empty) = segments.iter().find(|segment| segment.bytes == 0) {
                let (value, allowed) = (empty.bytes, "1 or more");
                return Err(WireError::Field { field: "bytes of a segment", value, allowed });
            }
            bounded("bytes of a read", bytes, limits::TRANSFER_READ_BYTES_MAX, "1 to TRANSFER_READ_BYTES_MAX")
        }
        DirectFrame::Probe { bytes, .. } | DirectFrame::Data { bytes, .. } => {
            bounded("bytes", *bytes, limits::TRANSFER_READ_BYTES_MAX, "1 to TRANSFER_READ_BYTES_MAX")
        }
        DirectFrame::Open { .. } | DirectFrame::Refused { .. } => Ok(()),
    }
}

/// Item of a direct connection's stream, from [`DirectReader::next_item`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectItem {
    Frame(DirectFrame),
    /// Next bytes of the last announced data.
    Bytes(Bytes),
}

/// Reader that splits the stream of a direct connection into frames and data. Sans-I/O: the caller feeds it. After an
/// error the reader must be dropped with its stream.
#[derive(Debug, Default)]
pub struct DirectReader {
    head: BytesMut,
    /// Bytes of announced data still to come.
    data: u64,
}

impl DirectReader {
    /// A reader at the start of a frame.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the reader is between frames: a stream that ends elsewhere was cut.
    #[must_use]
    pub fn at_boundary(&self) -> bool {
        self.head.is_empty() && self.data == 0
    }

    /// Takes the next item from the front of `chunk`; `None`: the chunk is used up.
    ///
    /// # Errors
    /// If the peer's bytes are malformed.
    pub fn next_item(&mut self, chunk: &mut Bytes) -> Result<Option<DirectItem>, WireError> {
        if self.data > 0 {
            let len = usize::try_from(self.data).unwrap_or(usize::MAX).min(chunk.len());
            if len == 0 {
                return Ok(None);
            }
            self.data = self.data.saturating_sub(u64::try_from(len).unwrap_or(u64::MAX));
            return Ok(Some(DirectItem::Bytes(chunk.split_to(len))));
        }
        if !self.gather(chunk, HEADER_BYTES) {
            return Ok(None);
        }
        let header = self.head.first_chunk::<HEADER_BYTES>().ok_or(WireError::Short("a header"))?;
        let (kind, length) = Header::decode_direct(header)?;
        let body = if kind == KIND_DATA { size_of::<RawDirectBytes>() } else { length };
        if body > BODY_BYTES_MAX || body > length {
            return Err(WireError::Length("a frame without data is too long, or data too short"));
        }
        if !self.gather(chunk, HEADER_BYTES.saturating_add(body)) {
            return Ok(None);
        }
        let mut whole = std::mem::take(&mut self.head).freeze();
        whole.advance(HEADER_BYTES);
        let frame = decode(kind, length, whole)?;
        if let DirectFrame::Data { bytes, .. } = frame {
            self.data = bytes;
        }
        Ok(Some(DirectItem::Frame(frame)))
    }

    /// Moves bytes to the head until it has `count`; whether it has.
    fn gather(&mut self, chunk: &mut Bytes, count: usize) -> bool {
        let missing = count.saturating_sub(self.head.len()).min(chunk.len());
        self.head.extend_from_slice(&chunk.split_to(missing));
        self.head.len() >= count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_protocol::RefuseCode;

    fn frames() -> Vec<DirectFrame> {
        let segment = |export| DirectSegment { export, region: 3, offset: 1 << 40, bytes: 4096 };
        vec![
            DirectFrame::Open { reader: 7, epoch: 9 },
            DirectFrame::Read { id: 1, segments: vec![segment(1), segment(2)] },
            DirectFrame::Probe { id: 2, bytes: 100 },
            DirectFrame::Data { id: 1, bytes: 5 },
            DirectFrame::Refused { id: 3, code: RefuseCode::StaleEpoch },
        ]
    }

    #[test]
    fn frames_survive_any_cut() {
        let mut stream = Vec::new();
        for frame in frames() {
            stream.extend_from_slice(&encode(&frame).unwrap());
            if let DirectFrame::Data { bytes, .. } = frame {
                stream.extend(std::iter::repeat_n(0xab, usize::try_from(bytes).unwrap()));
            }
        }
        for size in 1..=stream.len() {
            let (mut reader, mut found, mut data) = (DirectReader::new(), Vec::new(), Vec::new());
            for part in stream.chunks(size) {
                let mut chunk = Bytes::copy_from_slice(part);
                while let Some(item) = reader.next_item(&mut chunk).unwrap() {
                    match item {
                        DirectItem::Frame(frame) => found.push(frame),
                        DirectItem::Bytes(bytes) => data.extend_from_slice(&bytes),
                    }
                }
            }
            assert!(reader.at_boundary());
            assert_eq!((found, data), (frames(), vec![0xab; 5]), "chunks of {size}");
        }
    }

    #[test]
    fn bad_frames_are_refused() {
        let good = encode(&DirectFrame::Open { reader: 7, epoch: 9 }).unwrap();
        for at in [0, 4, 5, 6, 7, 12, 28] {
            let mut bad = good.to_vec();
            bad[at] ^= 0x40;
            assert!(DirectReader::new().next_item(&mut bad.into()).is_err(), "byte {at}");
        }
        assert!(encode(&DirectFrame::Probe { id: 1, bytes: u64::MAX }).is_err());
        assert!(encode(&DirectFrame::Read { id: 1, segments: Vec::new() }).is_err());
        let zero = DirectSegment { export: 1, region: 0, offset: 0, bytes: 0 };
        assert!(encode(&DirectFrame::Read { id: 1, segments: vec![zero] }).is_err());
        // A length that is not what data announces.
        let mut data = encode(&DirectFrame::Data { id: 1, bytes: 5 }).unwrap().to_vec();
        data[8] += 1;
        assert!(DirectReader::new().next_item(&mut data.into()).is_err());
        // Every cut-off prefix waits, and noise never panics.
        for len in 0..good.len() {
            assert_eq!(DirectReader::new().next_item(&mut good.slice(..len)).unwrap(), None);
        }
        for seed in 0..2000u32 {
            let mut noise = good.to_vec();
            for (at, byte) in noise.iter_mut().enumerate().skip(6) {
                let mixed = seed.wrapping_mul(2_654_435_761).rotate_left(u32::try_from(at).unwrap());
                *byte = u8::try_from(mixed & 0xff).unwrap();
            }
            let mut chunk = Bytes::from(noise);
            let mut reader = DirectReader::new();
            while let Ok(Some(_)) = reader.next_item(&mut chunk) {}
        }
    }
}
