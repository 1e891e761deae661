//! Codec of the bulk class: KV.

use crate::layout::{
    RawBulkRefused, RawData, RawRead, RawSeal, RawWrite, check_even, check_layer, check_tokens, cut_detail, detail,
    finish, refuse_code, reserved, take,
};
use crate::{Class, EncodedFrame, WireError};
use bytemuck::bytes_of;
use bytes::Bytes;
use lagoon_protocol::BulkFrame;
use lagoon_types::{Epoch, LeaseId, limits};

const KIND_WRITE: u8 = 1;
const KIND_SEAL: u8 = 2;
const KIND_READ: u8 = 3;
const KIND_DATA: u8 = 4;
const KIND_REFUSED: u8 = 5;

pub(crate) fn encode(frame: &BulkFrame) -> Result<EncodedFrame, WireError> {
    check(frame)?;
    let class = Some(Class::Bulk);
    match frame {
        BulkFrame::Write { lease, epoch, layer, offset, tokens, kv } => {
            let (lease, epoch) = (lease.0, epoch.0);
            let raw = RawWrite { lease, epoch, layer: *layer, offset: *offset, tokens: *tokens, reserved: 0 };
            EncodedFrame::build(class, KIND_WRITE, &[bytes_of(&raw)], [kv.clone(), Bytes::new(), Bytes::new()])
        }
        BulkFrame::Seal { lease, epoch, entry, hash } => {
            let raw = RawSeal { lease: lease.0, epoch: epoch.0, entry: *entry, reserved: 0, hash: *hash };
            EncodedFrame::build(class, KIND_SEAL, &[bytes_of(&raw)], Default::default())
        }
        BulkFrame::Read { id, lease, epoch, layer, offset, tokens, deadline_ms } => {
            let raw = RawRead {
                id: *id,
                lease: lease.0,
                epoch: epoch.0,
                layer: *layer,
                offset: *offset,
                tokens: *tokens,
                deadline_ms: *deadline_ms,
            };
            EncodedFrame::build(class, KIND_READ, &[bytes_of(&raw)], Default::default())
        }
        BulkFrame::Data { id, layer, tokens, kv } => {
            let raw = RawData { id: *id, layer: *layer, tokens: *tokens };
            EncodedFrame::build(class, KIND_DATA, &[bytes_of(&raw)], [kv.clone(), Bytes::new(), Bytes::new()])
        }
        BulkFrame::Refused { id, lease, code, detail } => {
            let raw = RawBulkRefused { id: *id, lease: lease.0, code: code.code(), reserved: [0; 7] };
            let text = cut_detail(detail).as_bytes();
            EncodedFrame::build(class, KIND_REFUSED, &[bytes_of(&raw), text], Default::default())
        }
    }
}

pub(crate) fn decode(kind: u8, mut body: Bytes) -> Result<BulkFrame, WireError> {
    let frame = match kind {
        KIND_WRITE => {
            let raw: RawWrite = take(&mut body, "a write")?;
            reserved(&raw.reserved.to_le_bytes())?;
            BulkFrame::Write {
                lease: LeaseId(raw.lease),
                epoch: Epoch(raw.epoch),
                layer: raw.layer,
                offset: raw.offset,
                tokens: raw.tokens,
                kv: body,
            }
        }
        KIND_SEAL => {
            let raw: RawSeal = take(&mut body, "a seal")?;
            reserved(&raw.reserved.to_le_bytes())?;
            finish(&body)?;
            BulkFrame::Seal { lease: LeaseId(raw.lease), epoch: Epoch(raw.epoch), entry: raw.entry, hash: raw.hash }
        }
        KIND_READ => {
            let raw: RawRead = take(&mut body, "a read")?;
            finish(&body)?;
            BulkFrame::Read {
                id: raw.id,
                lease: LeaseId(raw.lease),
                epoch: Epoch(raw.epoch),
                layer: raw.layer,
                offset: raw.offset,
                tokens: raw.tokens,
                deadline_ms: raw.deadline_ms,
            }
        }
        KIND_DATA => {
            let raw: RawData = take(&mut body, "data")?;
            BulkFrame::Data { id: raw.id, layer: raw.layer, tokens: raw.tokens, kv: body }
        }
        KIND_REFUSED => {
            let raw: RawBulkRefused = take(&mut body, "a refusal")?;
            reserved(&raw.reserved)?;
            let code = refuse_code(raw.code)?;
            BulkFrame::Refused { id: raw.id, lease: LeaseId(raw.lease), code, detail: detail(&body)? }
        }
        _ => return Err(WireError::Kind { class: Class::Bulk, kind }),
    };
    check(&frame)?;
    Ok(frame)
}

/// Checks of every frame, sent or received.
fn check(frame: &BulkFrame) -> Result<(), WireError> {
    const UNEVEN: &str = "the KV is not tokens of whole elements";
    match frame {
        BulkFrame::Write { layer, offset, tokens, kv, .. } => {
            check_layer(*layer)?;
            check_tokens(*offset, *tokens)?;
            check_even(kv.len(), *tokens, 2, UNEVEN)
        }
        BulkFrame::Data { layer, tokens, kv, .. } => {
            check_layer(*layer)?;
            check_tokens(0, *tokens)?;
            check_even(kv.len(), *tokens, 2, UNEVEN)
        }
        BulkFrame::Read { layer, offset, tokens, .. } => {
            check_layer(*layer)?;
            check_tokens(*offset, *tokens)
        }
        BulkFrame::Seal { entry, .. } if *entry >= limits::SEQUENCE_TOKENS_MAX => Err(WireError::Field {
            field: "entry",
            value: u64::from(*entry),
            allowed: "those below SEQUENCE_TOKENS_MAX",
        }),
        BulkFrame::Seal { .. } | BulkFrame::Refused { .. } => Ok(()),
    }
}
