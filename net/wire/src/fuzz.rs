//! The entry of the fuzz targets (net/wire/fuzz) and of the bounded test that drives the same function in CI.

use crate::{Class, Frame, FrameReader, encode};
use bytes::Bytes;

/// Decodes `data` as a stream of one class, checks that every accepted frame survives a round trip, and returns the
/// number of accepted frames. The first byte selects the class, the second the chunk size of the rest.
///
/// # Panics
/// If an accepted frame cannot be encoded again or decodes to another one: a bug of the codec.
pub fn stream(data: &[u8]) -> usize {
    let [selector, chunk_bytes, rest @ ..] = data else { return 0 };
    let Some(class) = Class::from_code(selector & 3) else {
        let mut chunk = Bytes::copy_from_slice(rest);
        return usize::from(matches!(FrameReader::new().next_preface(&mut chunk), Ok(Some(_))));
    };
    let mut reader = FrameReader::new();
    let mut frames = 0usize;
    for part in rest.chunks(usize::from(*chunk_bytes).max(1)) {
        let mut chunk = Bytes::copy_from_slice(part);
        loop {
            match reader.next_frame(class, &mut chunk) {
                Ok(Some(frame)) => {
                    round_trip(&frame);
                    frames = frames.saturating_add(1);
                }
                Ok(None) => break,
                Err(_) => return frames,
            }
        }
    }
    frames
}

fn round_trip(frame: &Frame) {
    // Unknown fields of a control message are dropped, so it may shrink but never fail.
    let encoded = encode(frame).expect("an accepted frame can be encoded");
    let mut bytes = Bytes::from(encoded.to_vec());
    let again = FrameReader::new().next_frame(frame.class(), &mut bytes).expect("an encoded frame can be decoded");
    assert!(bytes.is_empty(), "an encoded frame has trailing bytes");
    // By bytes: a NaN, which damage may make of a number, is not equal to itself.
    let twice = again.as_ref().map(|frame| encode(frame).expect("a decoded frame can be encoded").to_vec());
    assert_eq!(twice, Some(encoded.to_vec()), "a frame changes in a round trip: {frame:?}");
}
