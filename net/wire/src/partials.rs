//! Codec of the partials class: step tickets, queries, partials.

use crate::layout::{
    RawPartial, RawQuery, RawRelayedPartial, RawRelayedQuery, RawRoute, RawRun, RawStepCancel, RawStepRefused,
    RawTicket, RawTicketSeq, check_even, check_layer, check_rows, check_tokens, cut_detail, detail, dtype, finish,
    refuse_code, reserved, take, take_bytes,
};
use crate::{Class, EncodedFrame, WireError};
use bytemuck::bytes_of;
use bytes::Bytes;
use lagoon_protocol::{LeaseRun, PartialsFrame, Route, StepTicket, TicketSeq};
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId, StepId, limits};

const KIND_TICKET: u8 = 1;
const KIND_QUERY: u8 = 2;
const KIND_PARTIAL: u8 = 3;
const KIND_REFUSED: u8 = 4;
const KIND_STEP_CANCEL: u8 = 5;
const KIND_ROUTED_TICKET: u8 = 6;
const KIND_RELAYED_QUERY: u8 = 7;
const KIND_RELAYED_PARTIAL: u8 = 8;

pub(crate) fn encode(frame: &PartialsFrame) -> Result<EncodedFrame, WireError> {
    check(frame)?;
    let class = Some(Class::Partials);
    match frame {
        PartialsFrame::Ticket(ticket) => encode_ticket(ticket),
        PartialsFrame::Query { step, layer, rows, queries } => {
            let raw = RawQuery { step: step.0, layer: *layer, rows: *rows };
            let payload = [queries.clone(), Bytes::new(), Bytes::new()];
            EncodedFrame::build(class, KIND_QUERY, &[bytes_of(&raw)], payload)
        }
        PartialsFrame::Partial { step, layer, rows, out, lse, count } => {
            let raw = RawPartial {
                step: step.0,
                layer: *layer,
                rows: *rows,
                out_bytes: length_u32(out.len())?,
                lse_bytes: length_u32(lse.len())?,
            };
            EncodedFrame::build(class, KIND_PARTIAL, &[bytes_of(&raw)], [out.clone(), lse.clone(), count.clone()])
        }
        PartialsFrame::Refused { step, code, detail } => {
            let raw = RawStepRefused { step: step.0, code: code.code(), reserved: [0; 7] };
            let text = cut_detail(detail).as_bytes();
            EncodedFrame::build(class, KIND_REFUSED, &[bytes_of(&raw), text], Default::default())
        }
        PartialsFrame::StepCancel { step } => {
            let raw = RawStepCancel { step: step.0 };
            EncodedFrame::build(class, KIND_STEP_CANCEL, &[bytes_of(&raw)], Default::default())
        }
        PartialsFrame::RelayedQuery { debtor, step, layer, rows, queries } => {
            let raw = RawRelayedQuery { step: step.0, layer: *layer, rows: *rows, debtor: debtor.0, reserved: 0 };
            let payload = [queries.clone(), Bytes::new(), Bytes::new()];
            EncodedFrame::build(class, KIND_RELAYED_QUERY, &[bytes_of(&raw)], payload)
        }
        PartialsFrame::RelayedPartial { debtor, step, layer, rows, out, lse, count } => {
            let raw = RawRelayedPartial {
                step: step.0,
                layer: *layer,
                rows: *rows,
                out_bytes: length_u32(out.len())?,
                lse_bytes: length_u32(lse.len())?,
                debtor: debtor.0,
                reserved: 0,
            };
            let payload = [out.clone(), lse.clone(), count.clone()];
            EncodedFrame::build(class, KIND_RELAYED_PARTIAL, &[bytes_of(&raw)], payload)
        }
    }
}

pub(crate) fn decode(kind: u8, mut body: Bytes) -> Result<PartialsFrame, WireError> {
    let frame = match kind {
        KIND_TICKET => PartialsFrame::Ticket(decode_ticket(body, Route::Direct)?),
        KIND_ROUTED_TICKET => {
            let route = decode_route(&mut body)?;
            PartialsFrame::Ticket(decode_ticket(body, route)?)
        }
        KIND_QUERY => {
            let raw: RawQuery = take(&mut body, "a query")?;
            PartialsFrame::Query { step: StepId(raw.step), layer: raw.layer, rows: raw.rows, queries: body }
        }
        KIND_PARTIAL => {
            let raw: RawPartial = take(&mut body, "a partial")?;
            let out = take_bytes(&mut body, length_usize(raw.out_bytes), "the outputs of a partial")?;
            let lse = take_bytes(&mut body, length_usize(raw.lse_bytes), "the log-sum-exps of a partial")?;
            let (step, layer, rows) = (StepId(raw.step), raw.layer, raw.rows);
            PartialsFrame::Partial { step, layer, rows, out, lse, count: body }
        }
        KIND_REFUSED => {
            let raw: RawStepRefused = take(&mut body, "a refusal")?;
            reserved(&raw.reserved)?;
            let (step, code) = (StepId(raw.step), refuse_code(raw.code)?);
            PartialsFrame::Refused { step, code, detail: detail(&body)? }
        }
        KIND_STEP_CANCEL => {
            let raw: RawStepCancel = take(&mut body, "a cancellation")?;
            finish(&body)?;
            PartialsFrame::StepCancel { step: StepId(raw.step) }
        }
        KIND_RELAYED_QUERY => {
            let raw: RawRelayedQuery = take(&mut body, "a relayed query")?;
            reserved(&raw.reserved.to_le_bytes())?;
            let (debtor, step) = (InstanceId(raw.debtor), StepId(raw.step));
            PartialsFrame::RelayedQuery { debtor, step, layer: raw.layer, rows: raw.rows, queries: body }
        }
        KIND_RELAYED_PARTIAL => {
            let raw: RawRelayedPartial = take(&mut body, "a relayed partial")?;
            reserved(&raw.reserved.to_le_bytes())?;
            let out = take_bytes(&mut body, length_usize(raw.out_bytes), "the outputs of a partial")?;
            let lse = take_bytes(&mut body, length_usize(raw.lse_bytes), "the log-sum-exps of a partial")?;
            let (debtor, step, layer, rows) = (InstanceId(raw.debtor), StepId(raw.step), raw.layer, raw.rows);
            PartialsFrame::RelayedPartial { debtor, step, layer, rows, out, lse, count: body }
        }
        _ => return Err(WireError::Kind { class: Class::Partials, kind }),
    };
    check(&frame)?;
    Ok(frame)
}

/// Checks of every frame, sent or received.
fn check(frame: &PartialsFrame) -> Result<(), WireError> {
    match frame {
        PartialsFrame::Ticket(ticket) => check_ticket(ticket),
        PartialsFrame::Query { layer, rows, queries, .. }
        | PartialsFrame::RelayedQuery { layer, rows, queries, .. } => {
            check_layer(*layer)?;
            check_rows(*rows)?;
            check_even(queries.len(), *rows, 2, "the queries are not rows of whole elements")
        }
        PartialsFrame::Partial { layer, rows, out, lse, count, .. }
        | PartialsFrame::RelayedPartial { layer, rows, out, lse, count, .. } => {
            check_layer(*layer)?;
            check_rows(*rows)?;
            check_even(out.len(), *rows, 2, "the outputs are not rows of whole elements")?;
            check_even(lse.len(), *rows, 4, "the log-sum-exps are not rows of f32")?;
            if Some(count.len()) != length_usize(*rows).checked_mul(4) {
                return Err(WireError::Length("the counts are not one u32 for each row"));
            }
            Ok(())
        }
        PartialsFrame::Refused { .. } | PartialsFrame::StepCancel { .. } => Ok(()),
    }
}

fn check_ticket(ticket: &StepTicket) -> Result<(), WireError> {
    match &ticket.route {
        Route::Direct => {}
        Route::Through(relay) => check_instance(*relay)?,
        Route::Relay(members) => {
            check_members(members.len())?;
            members.iter().try_for_each(|member| check_instance(*member))?;
        }
    }
    check_counts(ticket.seqs.len(), ticket.seqs.iter().map(|seq| seq.runs.len()).fold(0, usize::saturating_add))?;
    let mut rows = 0u32;
    for seq in &ticket.seqs {
        check_tokens(seq.pos0, seq.rows)?;
        rows = rows.saturating_add(seq.rows);
        let mut end = 0u64;
        for run in &seq.runs {
            check_tokens(run.offset, run.len)?;
            check_tokens(run.first_pos, run.len)?;
            if u64::from(run.first_pos) < end {
                return Err(WireError::Length("the runs of a ticket overlap or are not ascending in position"));
            }
            end = u64::from(run.first_pos).saturating_add(u64::from(run.len));
        }
    }
    check_rows(rows)
}

fn check_instance(instance: InstanceId) -> Result<(), WireError> {
    if instance.0 != 0 {
        return Ok(());
    }
    Err(WireError::Field { field: "an instance of a route", value: 0, allowed: "1 or more" })
}

fn check_members(members: usize) -> Result<(), WireError> {
    if (1..limits::RELAY_CREDITORS_MAX).contains(&members) {
        return Ok(());
    }
    let value = u64::try_from(members).unwrap_or(u64::MAX);
    Err(WireError::Field { field: "members of a relay", value, allowed: "1 to RELAY_CREDITORS_MAX - 1" })
}

fn check_counts(seqs: usize, runs: usize) -> Result<(), WireError> {
    if !(1..=limits::TICKET_SEQS_MAX).contains(&seqs) {
        let value = u64::try_from(seqs).unwrap_or(u64::MAX);
        return Err(WireError::Field { field: "sequences of a ticket", value, allowed: "1 to TICKET_SEQS_MAX" });
    }
    if runs > limits::TICKET_RUNS_MAX {
        let value = u64::try_from(runs).unwrap_or(u64::MAX);
        return Err(WireError::Field { field: "runs of a ticket", value, allowed: "up to TICKET_RUNS_MAX" });
    }
    Ok(())
}

fn encode_ticket(ticket: &StepTicket) -> Result<EncodedFrame, WireError> {
    let mut seqs = Vec::with_capacity(ticket.seqs.len());
    let mut runs = Vec::new();
    for seq in &ticket.seqs {
        let count = length_u32(seq.runs.len())?;
        seqs.push(RawTicketSeq { seq: seq.seq.0, rows: seq.rows, pos0: seq.pos0, runs: count, reserved: 0 });
        runs.extend(seq.runs.iter().map(|run| RawRun {
            lease: run.lease.0,
            epoch: run.epoch.0,
            offset: run.offset,
            len: run.len,
            first_pos: run.first_pos,
            reserved: 0,
        }));
    }
    let raw = RawTicket {
        step: ticket.step.0,
        deadline_ms: ticket.deadline_ms,
        seqs: length_u32(seqs.len())?,
        runs: length_u32(runs.len())?,
        dtype: ticket.dtype.code(),
        reserved: [0; 3],
    };
    let (relay, members) = match &ticket.route {
        Route::Direct => {
            let parts = [bytes_of(&raw), bytemuck::cast_slice(&seqs), bytemuck::cast_slice(&runs)];
            return EncodedFrame::build(Some(Class::Partials), KIND_TICKET, &parts, Default::default());
        }
        Route::Through(relay) => (relay.0, Vec::new()),
        Route::Relay(members) => (0, members.iter().map(|member| member.0).collect()),
    };
    let route = RawRoute { relay, members: length_u32(members.len())? };
    let (route, members) = (bytes_of(&route), bytemuck::cast_slice(&members));
    let parts = [route, members, bytes_of(&raw), bytemuck::cast_slice(&seqs), bytemuck::cast_slice(&runs)];
    EncodedFrame::build(Some(Class::Partials), KIND_ROUTED_TICKET, &parts, Default::default())
}

/// The route in front of a routed ticket.
fn decode_route(body: &mut Bytes) -> Result<Route, WireError> {
    let raw: RawRoute = take(body, "the route of a step ticket")?;
    if raw.relay != 0 {
        reserved(&raw.members.to_le_bytes())?;
        return Ok(Route::Through(InstanceId(raw.relay)));
    }
    let members = length_usize(raw.members);
    check_members(members)?;
    (0..members)
        .map(|_| take(body, "the members of a relay").map(InstanceId))
        .collect::<Result<_, _>>()
        .map(Route::Relay)
}

fn decode_ticket(mut body: Bytes, route: Route) -> Result<StepTicket, WireError> {
    let raw: RawTicket = take(&mut body, "a step ticket")?;
    reserved(&raw.reserved)?;
    let (seq_count, run_count) = (length_usize(raw.seqs), length_usize(raw.runs));
    check_counts(seq_count, run_count)?;
    let seq_bytes = seq_count.saturating_mul(size_of::<RawTicketSeq>());
    let mut seq_table = take_bytes(&mut body, seq_bytes, "the sequences of a step ticket")?;
    let run_bytes = run_count.saturating_mul(size_of::<RawRun>());
    let mut run_table = take_bytes(&mut body, run_bytes, "the runs of a step ticket")?;
    finish(&body)?;
    let mut seqs = Vec::with_capacity(seq_count);
    while !seq_table.is_empty() {
        let seq: RawTicketSeq = take(&mut seq_table, "a sequence of a step ticket")?;
        reserved(&seq.reserved.to_le_bytes())?;
        let mut runs = Vec::with_capacity(length_usize(seq.runs).min(run_count));
        for _ in 0..seq.runs {
            let run: RawRun = take(&mut run_table, "the runs of a sequence")?;
            reserved(&run.reserved.to_le_bytes())?;
            runs.push(LeaseRun {
                lease: LeaseId(run.lease),
                epoch: Epoch(run.epoch),
                offset: run.offset,
                len: run.len,
                first_pos: run.first_pos,
            });
        }
        seqs.push(TicketSeq { seq: SeqId(seq.seq), rows: seq.rows, pos0: seq.pos0, runs });
    }
    finish(&run_table)?;
    Ok(StepTicket { step: StepId(raw.step), deadline_ms: raw.deadline_ms, dtype: dtype(raw.dtype)?, route, seqs })
}

/// Frames are capped far below `u32::MAX`; a larger part is an error of the caller and reported as such.
fn length_u32(length: usize) -> Result<u32, WireError> {
    u32::try_from(length).ok().ok_or(WireError::Length("a part of the frame is over 4 GiB"))
}

fn length_usize(length: u32) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}
