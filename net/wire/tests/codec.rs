//! Properties of the codec: round trips, damage, caps.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use bytes::Bytes;
use lagoon_protocol::*;
use lagoon_types::{DType, Epoch, InstanceId, LeaseId, SeqId, StepId, limits};
use lagoon_wire::{Class, Frame, FrameReader, HEADER_BYTES, WireError, encode};
use proptest::prelude::*;

fn decode(class: Class, bytes: Vec<u8>) -> Result<Option<Frame>, WireError> {
    FrameReader::new().next_frame(class, &mut Bytes::from(bytes))
}

fn payload(units: u32, unit: usize) -> impl Strategy<Value = Bytes> {
    (1usize..40, any::<u8>()).prop_map(move |(per_unit, seed)| {
        let count = usize::try_from(units).unwrap() * unit * per_unit;
        (0..count).map(|i| u8::try_from(i % 255).unwrap() ^ seed).collect()
    })
}

fn dtype() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)]
}

fn code() -> impl Strategy<Value = RefuseCode> {
    (1u8..=9).prop_map(|code| RefuseCode::from_code(code).unwrap())
}

fn seq() -> impl Strategy<Value = TicketSeq> {
    let run = (any::<u64>(), any::<u64>(), 0u32..1000, 1u32..500, 0u32..100);
    (any::<u64>(), 1u32..8, 0u32..1_000_000, prop::collection::vec(run, 0..6)).prop_map(|(seq, rows, pos0, runs)| {
        let mut end = 0;
        let runs = runs.into_iter().map(|(lease, epoch, offset, len, gap)| {
            let first_pos = end + gap;
            end = first_pos + len;
            LeaseRun { lease: LeaseId(lease), epoch: Epoch(epoch), offset, len, first_pos }
        });
        TicketSeq { seq: SeqId(seq), rows, pos0, runs: runs.collect() }
    })
}

fn route() -> impl Strategy<Value = Route> {
    let instance = || (1u32..).prop_map(InstanceId);
    let members = prop::collection::vec(instance(), 1..limits::RELAY_CREDITORS_MAX);
    prop_oneof![Just(Route::Direct), instance().prop_map(Route::Through), members.prop_map(Route::Relay)]
}

fn partials() -> impl Strategy<Value = PartialsFrame> {
    let ticket = (any::<u64>(), any::<u32>(), dtype(), route(), prop::collection::vec(seq(), 1..8)).prop_map(
        |(step, deadline_ms, dtype, route, seqs)| {
            PartialsFrame::Ticket(StepTicket { step: StepId(step), deadline_ms, dtype, route, seqs })
        },
    );
    let relayed_query = (any::<u64>(), 0u32..limits::LAYERS_MAX, 1u32..20, any::<u32>());
    let relayed_query = relayed_query.prop_flat_map(|(step, layer, rows, debtor)| {
        payload(rows, 2).prop_map(move |queries| {
            let (debtor, step) = (InstanceId(debtor), StepId(step));
            PartialsFrame::RelayedQuery { debtor, step, layer, rows, queries }
        })
    });
    let relayed_partial = (any::<u64>(), 0u32..limits::LAYERS_MAX, 1u32..20, any::<u32>());
    let relayed_partial = relayed_partial.prop_flat_map(|(step, layer, rows, debtor)| {
        (payload(rows, 2), payload(rows, 4)).prop_map(move |(out, lse)| {
            let (debtor, step) = (InstanceId(debtor), StepId(step));
            let count = vec![7; usize::try_from(rows).unwrap() * 4].into();
            PartialsFrame::RelayedPartial { debtor, step, layer, rows, out, lse, count }
        })
    });
    let query = (any::<u64>(), 0u32..limits::LAYERS_MAX, 1u32..20).prop_flat_map(|(step, layer, rows)| {
        payload(rows, 2).prop_map(move |queries| PartialsFrame::Query { step: StepId(step), layer, rows, queries })
    });
    let partial = (any::<u64>(), 0u32..limits::LAYERS_MAX, 1u32..20).prop_flat_map(|(step, layer, rows)| {
        (payload(rows, 2), payload(rows, 4)).prop_map(move |(out, lse)| PartialsFrame::Partial {
            step: StepId(step),
            layer,
            rows,
            out,
            lse,
            count: vec![7; usize::try_from(rows).unwrap() * 4].into(),
        })
    });
    let refused = (any::<u64>(), code(), ".{0,200}").prop_map(|(step, code, detail)| PartialsFrame::Refused {
        step: StepId(step),
        code,
        detail,
    });
    let cancel = any::<u64>().prop_map(|step| PartialsFrame::StepCancel { step: StepId(step) });
    prop_oneof![ticket, query, partial, refused, cancel, relayed_query, relayed_partial]
}

fn bulk() -> impl Strategy<Value = BulkFrame> {
    let ids = || (any::<u64>(), any::<u64>(), 0u32..limits::LAYERS_MAX, 0u32..100_000, 1u32..64);
    let write = ids().prop_flat_map(|(lease, epoch, layer, offset, tokens)| {
        let (lease, epoch) = (LeaseId(lease), Epoch(epoch));
        payload(tokens, 2).prop_map(move |kv| BulkFrame::Write { lease, epoch, layer, offset, tokens, kv })
    });
    let read = (any::<u64>(), any::<u32>(), ids()).prop_map(|(id, deadline_ms, ids)| {
        let (lease, epoch, layer, offset, tokens) = ids;
        BulkFrame::Read { id, lease: LeaseId(lease), epoch: Epoch(epoch), layer, offset, tokens, deadline_ms }
    });
    let data = ids().prop_flat_map(|(id, _, layer, _, tokens)| {
        payload(tokens, 2).prop_map(move |kv| BulkFrame::Data { id, layer, tokens, kv })
    });
    let seal = (any::<u64>(), any::<u64>(), 0u32..1000, any::<[u8; 32]>()).prop_map(|(lease, epoch, entry, hash)| {
        BulkFrame::Seal { lease: LeaseId(lease), epoch: Epoch(epoch), entry, hash }
    });
    let refused = (any::<u64>(), any::<u64>(), code(), ".{0,200}")
        .prop_map(|(id, lease, code, detail)| BulkFrame::Refused { id, lease: LeaseId(lease), code, detail });
    prop_oneof![write, read, data, seal, refused]
}

fn control() -> impl Strategy<Value = ControlBody> {
    let renew = (prop::collection::vec(any::<u64>(), 0..50), any::<u64>())
        .prop_map(|(leases, seq)| ControlBody::LeaseRenew(LeaseRenew { leases, seq }));
    let rejected = ".{0,300}".prop_map(|reason| ControlBody::Rejected(Rejected { reason }));
    let query = (any::<u64>(), any::<u32>(), any::<u32>(), prop::collection::vec(any::<u32>(), 0..20)).prop_map(
        |(query, debtor, blocks, exclude)| {
            ControlBody::BorrowQuery(BorrowQuery { query, debtor, blocks, exclude, ..Default::default() })
        },
    );
    let grant = any::<(u64, u64, u64, u32, u64)>().prop_map(|(request, lease, epoch, blocks, ttl_ms)| {
        ControlBody::LeaseGrant(LeaseGrant { request, lease, epoch, blocks, ttl_ms, ..Default::default() })
    });
    prop_oneof![renew, rejected, query, grant]
}

fn frame() -> impl Strategy<Value = Frame> {
    prop_oneof![
        partials().prop_map(Frame::from),
        bulk().prop_map(Frame::from),
        control().prop_map(Frame::from),
        (0..support::samples().len()).prop_map(|i| support::samples().swap_remove(i).1),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn frames_survive_a_round_trip_in_chunks_of_any_size(
        frames in prop::collection::vec(partials().prop_map(Frame::from), 1..5), chunk in 1usize..200
    ) {
        let stream: Vec<u8> = frames.iter().flat_map(|frame| encode(frame).unwrap().to_vec()).collect();
        let mut reader = FrameReader::new();
        let mut got = Vec::new();
        for part in stream.chunks(chunk) {
            let mut part = Bytes::copy_from_slice(part);
            while let Some(frame) = reader.next_frame(Class::Partials, &mut part).unwrap() {
                got.push(frame);
            }
            prop_assert!(part.is_empty());
        }
        prop_assert!(reader.at_boundary());
        prop_assert_eq!(got, frames);
    }

    #[test]
    fn any_frame_survives_a_round_trip(frame in frame()) {
        let encoded = encode(&frame).unwrap();
        prop_assert_eq!(encoded.len(), encoded.to_vec().len());
        prop_assert_eq!(decode(frame.class(), encoded.to_vec()).unwrap().unwrap(), frame);
    }

    #[test]
    fn a_cut_frame_is_never_accepted(frame in frame(), cut in any::<prop::sample::Index>()) {
        let mut bytes = encode(&frame).unwrap().to_vec();
        bytes.truncate(cut.index(bytes.len()));
        // As it comes from the stream: more is awaited.
        prop_assert_eq!(decode(frame.class(), bytes.clone()).unwrap(), None);
        // With a header that agrees with the cut: an error, or for protobuf and refusals' text a shorter message.
        if bytes.len() >= HEADER_BYTES {
            let length = u32::try_from(bytes.len() - HEADER_BYTES).unwrap();
            bytes[8..12].copy_from_slice(&length.to_le_bytes());
            if let Ok(Some(other)) = decode(frame.class(), bytes) {
                prop_assert_ne!(other, frame);
            }
        }
    }

    #[test]
    fn a_flipped_byte_is_an_error_or_another_valid_frame(
        frame in frame(), at in any::<prop::sample::Index>(), flip in 1u8..=255
    ) {
        let mut bytes = encode(&frame).unwrap().to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        if let Ok(Some(other)) = decode(frame.class(), bytes) {
            prop_assert!(encode(&other).is_ok());
        }
    }

    #[test]
    fn noise_behind_the_fuzz_entry_never_panics(data in prop::collection::vec(any::<u8>(), 0..300)) {
        lagoon_wire::fuzz::stream(&data);
    }
}

/// A bounded share of what the fuzz target does: damaged recordings through the same entry.
#[test]
fn damaged_samples_through_the_fuzz_entry() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 16).unwrap()
    };
    let samples: Vec<_> = support::samples();
    let mut accepted = 0;
    for _ in 0..20_000 {
        let (_, frame) = &samples[random() % samples.len()];
        let mut data = vec![frame.class().code(), u8::try_from(random() % 256).unwrap()];
        data.extend_from_slice(&encode(frame).unwrap().to_vec());
        for _ in 0..random() % 4 {
            let at = 2 + random() % (data.len() - 2);
            data[at] ^= u8::try_from(1 << (random() % 8)).unwrap();
        }
        accepted += lagoon_wire::fuzz::stream(&data);
    }
    assert!((5_000..20_000).contains(&accepted), "{accepted} frames were accepted");
}

#[test]
fn decoding_a_frame_that_arrives_whole_copies_no_payload() {
    let kv = Bytes::from(vec![1u8; 4096]);
    let write = BulkFrame::Write { lease: LeaseId(1), epoch: Epoch(1), layer: 0, offset: 0, tokens: 4, kv: kv.clone() };
    let encoded = encode(&write.into()).unwrap();
    assert_eq!(encoded.payload[0].as_ptr(), kv.as_ptr());
    let stream = Bytes::from(encoded.to_vec());
    let decoded = FrameReader::new().next_frame(Class::Bulk, &mut stream.clone()).unwrap().unwrap();
    let Frame::Bulk(BulkFrame::Write { kv, .. }) = decoded else { panic!("{decoded:?}") };
    assert!(stream.as_ptr_range().contains(&kv.as_ptr()));
}

#[test]
fn headers_are_refused_by_class_version_and_size() {
    let good = encode(&PartialsFrame::StepCancel { step: StepId(1) }.into()).unwrap().to_vec();
    let with = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        decode(Class::Partials, bytes)
    };
    assert!(matches!(with(0, b'X'), Err(WireError::Magic(_))));
    assert_eq!(with(4, 2), Err(WireError::Version(2)));
    assert_eq!(with(5, 1), Err(WireError::Class { expected: Class::Partials, got: 1 }));
    assert_eq!(with(6, 99), Err(WireError::Kind { class: Class::Partials, kind: 99 }));
    assert!(matches!(with(7, 1), Err(WireError::Field { .. })));
    assert!(matches!(with(11, 0x7f), Err(WireError::TooLarge { .. })));
    assert!(matches!(with(15, 1), Err(WireError::Field { .. })));
}

#[test]
fn frames_over_their_limits_are_refused_on_both_sides() {
    let kv = Bytes::from(vec![0u8; limits::DATA_FRAME_BYTES_MAX]);
    let write = BulkFrame::Write { lease: LeaseId(1), epoch: Epoch(1), layer: 0, offset: 0, tokens: 4, kv };
    assert!(matches!(encode(&write.into()), Err(WireError::TooLarge { class: Class::Bulk, .. })));
    let rejected = Rejected { reason: "x".repeat(limits::CONTROL_FRAME_BYTES_MAX) };
    let control = ControlBody::Rejected(rejected);
    assert!(matches!(encode(&control.into()), Err(WireError::TooLarge { class: Class::Control, .. })));
    let uneven = PartialsFrame::Query { step: StepId(1), layer: 0, rows: 3, queries: vec![0; 8].into() };
    assert!(matches!(encode(&uneven.into()), Err(WireError::Length(_))));
    let rows = u32::try_from(limits::STEP_ROWS_MAX + 1).unwrap();
    let many = PartialsFrame::Query { step: StepId(1), layer: 0, rows, queries: vec![0; 2 * 8193].into() };
    assert!(matches!(encode(&many.into()), Err(WireError::Field { field: "rows", .. })));
    let layer =
        PartialsFrame::Query { step: StepId(1), layer: limits::LAYERS_MAX, rows: 1, queries: vec![0; 8].into() };
    assert!(matches!(encode(&layer.into()), Err(WireError::Field { field: "layer", .. })));
}

#[test]
fn a_ticket_with_overlapping_runs_is_refused() {
    let run = |first_pos| LeaseRun { lease: LeaseId(1), epoch: Epoch(1), offset: 0, len: 10, first_pos };
    let seqs = vec![TicketSeq { seq: SeqId(1), rows: 1, pos0: 30, runs: vec![run(0), run(9)] }];
    let ticket = StepTicket { step: StepId(1), deadline_ms: 1, dtype: DType::F32, route: Route::Direct, seqs };
    assert!(matches!(encode(&PartialsFrame::Ticket(ticket).into()), Err(WireError::Length(_))));
}

#[test]
fn a_refusals_text_is_cut_between_characters() {
    let detail = "ä".repeat(limits::DETAIL_BYTES_MAX);
    let refused = PartialsFrame::Refused { step: StepId(1), code: RefuseCode::Device, detail };
    let bytes = encode(&refused.into()).unwrap().to_vec();
    let Some(Frame::Partials(PartialsFrame::Refused { detail, .. })) = decode(Class::Partials, bytes).unwrap() else {
        panic!("not a refusal")
    };
    assert_eq!(detail, "ä".repeat(limits::DETAIL_BYTES_MAX / 2));
}

#[test]
fn a_preface_survives_a_round_trip_and_is_capped() {
    let encoded = lagoon_wire::encode_preface(&support::preface()).unwrap().to_vec();
    for cut in 0..encoded.len() {
        let mut part = Bytes::copy_from_slice(&encoded[..cut]);
        assert_eq!(FrameReader::new().next_preface(&mut part), Ok(None));
    }
    assert_eq!(FrameReader::new().next_preface(&mut encoded.into()), Ok(Some(support::preface())));
    let long = lagoon_wire::Preface { listen_addr: "x".repeat(limits::PREFACE_BYTES_MAX), ..support::preface() };
    assert!(matches!(lagoon_wire::encode_preface(&long), Err(WireError::TooLarge { .. })));
    // A frame is no preface.
    let frame = encode(&PartialsFrame::StepCancel { step: StepId(1) }.into()).unwrap().to_vec();
    assert!(matches!(FrameReader::new().next_preface(&mut frame.into()), Err(WireError::Class { got: 2, .. })));
}
