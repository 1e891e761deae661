//! The fixed sub-headers of the data classes, as they lie on the wire: little-endian, without implicit padding.
//! `reserved` fields are written as 0 and refused when they are not.

use crate::WireError;
use bytemuck::{Pod, Zeroable};
use bytes::Bytes;
use lagoon_protocol::RefuseCode;
use lagoon_types::{DType, limits};

macro_rules! layout {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, { $($field:ident: $ty:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $ty),* }
        const _: () = assert!(size_of::<$name>() == $bytes);
    };
}

layout!(
    /// Followed by `seqs` [`RawTicketSeq`], then `runs` [`RawRun`] in the order of the sequences.
    RawTicket, 24, { step: u64, deadline_ms: u32, seqs: u32, runs: u32, dtype: u8, reserved: [u8; 3] }
);
layout!(RawTicketSeq, 24, { seq: u64, rows: u32, pos0: u32, runs: u32, reserved: u32 });
layout!(RawRun, 32, { lease: u64, epoch: u64, offset: u32, len: u32, first_pos: u32, reserved: u32 });
layout!(
    /// Followed by the queries.
    RawQuery, 16, { step: u64, layer: u32, rows: u32 }
);
layout!(
    /// Followed by `out_bytes` of outputs, `lse_bytes` of log-sum-exps and `4 * rows` bytes of counts.
    RawPartial, 24, { step: u64, layer: u32, rows: u32, out_bytes: u32, lse_bytes: u32 }
);
layout!(
    /// Followed by text.
    RawStepRefused, 16, { step: u64, code: u8, reserved: [u8; 7] }
);
layout!(RawStepCancel, 8, { step: u64 });
layout!(
    /// Followed by `members` times `u32`, then [`RawTicket`] and what follows it. `relay` is 0 if the receiver is the relay.
    RawRoute, 8, { relay: u32, members: u32 }
);
layout!(
    /// Followed by the queries.
    RawRelayedQuery, 24, { step: u64, layer: u32, rows: u32, debtor: u32, reserved: u32 }
);
layout!(
    /// Followed by as much as [`RawPartial`].
    RawRelayedPartial, 32, {
        step: u64, layer: u32, rows: u32, out_bytes: u32, lse_bytes: u32, debtor: u32, reserved: u32
    }
);
layout!(
    /// Followed by the KV.
    RawWrite, 32, { lease: u64, epoch: u64, layer: u32, offset: u32, tokens: u32, reserved: u32 }
);
layout!(RawSeal, 56, { lease: u64, epoch: u64, entry: u32, reserved: u32, hash: [u8; 32] });
layout!(RawRead, 40, { id: u64, lease: u64, epoch: u64, layer: u32, offset: u32, tokens: u32, deadline_ms: u32 });
layout!(
    /// Followed by the KV.
    RawData, 16, { id: u64, layer: u32, tokens: u32 }
);
layout!(
    /// Followed by text.
    RawBulkRefused, 24, { id: u64, lease: u64, code: u8, reserved: [u8; 7] }
);

layout!(RawOpen, 16, { epoch: u64, reader: u32, reserved: u32 });
layout!(
    /// Followed by `segments` [`RawSegment`].
    RawDirectRead, 16, { id: u64, segments: u32, reserved: u32 }
);
layout!(RawSegment, 32, { export: u64, offset: u64, bytes: u64, region: u32, reserved: u32 });
layout!(
    /// A probe, or the announcement of data.
    RawDirectBytes, 16, { id: u64, bytes: u64 }
);
layout!(RawDirectRefused, 16, { id: u64, code: u8, reserved: [u8; 7] });

/// Takes a `T` from the front of `body`.
pub(crate) fn take<T: Pod>(body: &mut Bytes, what: &'static str) -> Result<T, WireError> {
    let bytes = take_bytes(body, size_of::<T>(), what)?;
    bytemuck::try_pod_read_unaligned(&bytes).ok().ok_or(WireError::Short(what))
}

/// Takes `count` bytes from the front of `body`, without copying them.
pub(crate) fn take_bytes(body: &mut Bytes, count: usize, what: &'static str) -> Result<Bytes, WireError> {
    if body.len() < count {
        return Err(WireError::Short(what));
    }
    Ok(body.split_to(count))
}

/// Checks that no bytes follow the decoded content.
pub(crate) fn finish(body: &Bytes) -> Result<(), WireError> {
    if body.is_empty() { Ok(()) } else { Err(WireError::Length("bytes follow the end of the frame's content")) }
}

/// Checks that a reserved field is 0: a newer version may give it a meaning.
pub(crate) fn reserved(bytes: &[u8]) -> Result<(), WireError> {
    match bytes.iter().find(|byte| **byte != 0) {
        None => Ok(()),
        Some(byte) => Err(WireError::Field { field: "a reserved field", value: u64::from(*byte), allowed: "0" }),
    }
}

pub(crate) fn check_layer(layer: u32) -> Result<(), WireError> {
    if layer < limits::LAYERS_MAX {
        return Ok(());
    }
    Err(WireError::Field { field: "layer", value: u64::from(layer), allowed: "those below LAYERS_MAX" })
}

pub(crate) fn check_rows(rows: u32) -> Result<(), WireError> {
    let count = usize::try_from(rows).unwrap_or(usize::MAX);
    if (1..=limits::STEP_ROWS_MAX).contains(&count) {
        return Ok(());
    }
    Err(WireError::Field { field: "rows", value: u64::from(rows), allowed: "1 to STEP_ROWS_MAX" })
}

/// Checks that tokens `[first, first + count)` are not empty and fit `SEQUENCE_TOKENS_MAX`.
pub(crate) fn check_tokens(first: u32, count: u32) -> Result<(), WireError> {
    let end = u64::from(first).saturating_add(u64::from(count));
    if count == 0 {
        return Err(WireError::Field { field: "tokens", value: 0, allowed: "1 or more" });
    }
    if end > u64::from(limits::SEQUENCE_TOKENS_MAX) {
        return Err(WireError::Field {
            field: "end of a token range",
            value: end,
            allowed: "up to SEQUENCE_TOKENS_MAX",
        });
    }
    Ok(())
}

/// Checks that `bytes` are `count` equal, non-empty parts of whole elements of `element` bytes.
pub(crate) fn check_even(bytes: usize, count: u32, element: usize, what: &'static str) -> Result<(), WireError> {
    let parts = usize::try_from(count).ok().and_then(|count| count.checked_mul(element));
    match parts.and_then(|parts| bytes.checked_rem(parts)) {
        Some(0) if bytes > 0 => Ok(()),
        _ => Err(WireError::Length(what)),
    }
}

pub(crate) fn dtype(code: u8) -> Result<DType, WireError> {
    let unknown = WireError::Field { field: "dtype", value: u64::from(code), allowed: "1 (f32), 2 (f16), 3 (bf16)" };
    DType::from_code(code).ok_or(unknown)
}

pub(crate) fn refuse_code(code: u8) -> Result<RefuseCode, WireError> {
    let unknown = WireError::Field { field: "refusal code", value: u64::from(code), allowed: "1 to 9" };
    RefuseCode::from_code(code).ok_or(unknown)
}

/// The text of a refusal.
pub(crate) fn detail(body: &Bytes) -> Result<String, WireError> {
    if body.len() > limits::DETAIL_BYTES_MAX {
        return Err(WireError::Length("the text of a refusal is over DETAIL_BYTES_MAX"));
    }
    std::str::from_utf8(body).map(str::to_owned).ok().ok_or(WireError::Utf8)
}

/// At most `DETAIL_BYTES_MAX` bytes of `text`, cut between characters, so that no refusal fails for its text.
pub(crate) fn cut_detail(text: &str) -> &str {
    let mut end = text.len().min(limits::DETAIL_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    text.get(..end).unwrap_or_default()
}
