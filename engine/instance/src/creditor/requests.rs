//! Remote attention requests, creditor side: step tickets, queries that wait for their KV, and KV that peers write and
//! read.
//!
//! Every frame of a peer is validated here, above the backend: shape, lease, epoch, range, limits. A query whose KV has
//! not arrived waits until it has or until its deadline; waiting frames are bounded in number and time.

mod relay;

use super::Creditor;
use crate::cx::Cx;
use crate::cx::tags::TagOwner;
use crate::event::{Effect, PeerKey};
use bytes::Bytes;
use lagoon_backend::{AttnRows, DeviceError};
use lagoon_protocol::{BulkFrame, ControlBody, LeaseSealed, PartialsFrame, RefuseCode, Route, StepTicket};
use lagoon_runner::{Command, RemotePart, RemoteQuery, RemoteRead, RemoteTag, RemoteWrite};
use lagoon_types::limits::{
    DATA_FRAME_BYTES_MAX, REMOTE_REQUEST_PEER_BYTES_MAX, REMOTE_REQUEST_PEER_TICKETS_MAX,
    REMOTE_REQUEST_PEER_WAITING_MAX, REMOTE_REQUEST_TICKETS_MAX, REMOTE_REQUEST_WAITING_MAX, STEP_ROWS_MAX,
    TICKET_RUNS_MAX,
};
use lagoon_types::{DType, Epoch, InstanceId, KvRun, LeaseId, LeaseRun, StepId};
use relay::{Merging, OwnPart, RelayedQuery, check_route};
use std::collections::BTreeMap;
use std::ops::Range;

/// A peer's step: its layer frames refer to this ticket.
#[derive(Debug)]
struct Ticket {
    dtype: DType,
    route: Route,
    rows: u32,
    seqs: Vec<AttnRows>,
    /// Runs in this instance's slots.
    runs: Vec<KvRun>,
    needs: Vec<Need>,
    /// Pairs of a query row and a key.
    row_keys: u64,
    deadline_ms: u32,
    /// When the ticket is dropped, unless a frame of the step arrives.
    expires_ms: u64,
    /// Number of the ticket here: a peer may open a step of the same name again.
    opened: u64,
}

impl Ticket {
    /// Bytes of its lists: the ticket's memory here, and on the device per query, beside the rows.
    fn bytes(&self) -> usize {
        size_of_val(&self.seqs[..]) + size_of_val(&self.runs[..]) + size_of_val(&self.needs[..])
    }
}

/// Offsets `[first, end)` of a lease that a step attends to: they must be written in every queried layer.
#[derive(Clone, Copy, Debug)]
struct Need {
    lease: LeaseId,
    epoch: Epoch,
    first: u32,
    end: u32,
}

/// A frame that waits for KV, or for its ticket.
#[derive(Debug)]
enum Waiting {
    /// From the debtor or its relay.
    Query {
        debtor: InstanceId,
        step: StepId,
        opened: u64,
        layer: u32,
        queries: Bytes,
    },
    /// A relay's query that has overtaken the debtor's ticket.
    Early {
        debtor: InstanceId,
        step: StepId,
        layer: u32,
        rows: u32,
        queries: Bytes,
    },
    Read {
        id: u64,
        lease: LeaseId,
        epoch: Epoch,
        first: u32,
        end: u32,
        layer: u32,
        pieces: Vec<(u32, u32)>,
    },
}

/// Receiver of a query's partial.
#[derive(Clone, Copy, Debug)]
enum Receiver {
    Debtor,
    Relay,
    /// This relay's merge of a layer, under this ticket.
    Merge {
        opened: u64,
    },
}

/// A query, merge or read on the device, by its tag.
#[derive(Debug)]
enum Outstanding {
    /// `peer` is to get the partial.
    Query {
        peer: PeerKey,
        debtor: InstanceId,
        receiver: Receiver,
        bytes: usize,
        step: StepId,
        layer: u32,
        rows: u32,
    },
    Merge {
        peer: PeerKey,
        from: InstanceId,
        bytes: usize,
        step: StepId,
        layer: u32,
        rows: u32,
    },
    Read {
        peer: PeerKey,
        from: InstanceId,
        id: u64,
        lease: LeaseId,
        layer: u32,
        tokens: u32,
    },
}

impl Waiting {
    /// The step of a query, with its debtor.
    fn step(&self) -> Option<(InstanceId, StepId)> {
        match self {
            Self::Query { debtor, step, .. } | Self::Early { debtor, step, .. } => Some((*debtor, *step)),
            Self::Read { .. } => None,
        }
    }

    /// The instance whose share it takes: the debtor, also of a relay's query; `from` sent it.
    fn owner(&self, from: InstanceId) -> InstanceId {
        self.step().map_or(from, |(debtor, _)| debtor)
    }
}

impl Outstanding {
    /// The instance whose share it takes: the debtor, also of a relay's query.
    fn owner(&self) -> InstanceId {
        match self {
            Self::Query { debtor: of, .. } | Self::Merge { from: of, .. } | Self::Read { from: of, .. } => *of,
        }
    }
}

/// Tickets, waiting frames and frames on the device.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    tickets: BTreeMap<(InstanceId, StepId), Ticket>,
    /// In order of arrival; retried as KV arrives.
    waiting: Vec<(PeerKey, InstanceId, u64, Waiting)>,
    outstanding: BTreeMap<RemoteTag, Outstanding>,
    /// Layers whose partials this instance merges as a relay, by debtor and step.
    merging: BTreeMap<(InstanceId, StepId), Merging>,
    /// Layers that were merged.
    merged: u64,
    /// Tickets that were opened.
    opened: u64,
    /// Step of the last ticket of each debtor. Its steps' numbers ascend, so earlier steps without a ticket are over.
    last: BTreeMap<InstanceId, StepId>,
}

/// KV of one read: its answer is one frame, whose header is far below this reserve.
const READ_BYTES_MAX: usize = DATA_FRAME_BYTES_MAX - 4096;

type Refusal = (RefuseCode, String);

fn refuse<T>(code: RefuseCode, detail: impl Into<String>) -> Result<T, Refusal> {
    Err((code, detail.into()))
}

impl Requests {
    /// Drops a peer's tickets and waiting frames.
    pub(crate) fn forget(&mut self, instance: InstanceId) {
        self.tickets.retain(|(from, _), _| *from != instance);
        self.merging.retain(|(from, _), _| *from != instance);
        self.waiting.retain(|(_, from, _, w)| *from != instance && w.step().is_none_or(|(of, _)| of != instance));
        self.last.remove(&instance);
    }

    /// Drops a step of a debtor, and its waiting queries.
    fn forget_step(&mut self, debtor: InstanceId, step: StepId) {
        self.tickets.remove(&(debtor, step));
        self.merging.remove(&(debtor, step));
        self.waiting.retain(|(_, _, _, w)| w.step() != Some((debtor, step)));
    }

    /// Drops the steps that attend to these offsets of a lease, whose blocks are about to be freed, and returns them.
    /// Later steps of the same lease stay: their tickets may have overtaken the release.
    pub(crate) fn forget_lease(&mut self, instance: InstanceId, lease: LeaseId, freed: &Range<u32>) -> Vec<StepId> {
        let meets = |first: u32, end: u32| first < freed.end && freed.start < end;
        let hit = |t: &Ticket| t.needs.iter().any(|n| n.lease == lease && meets(n.first, n.end));
        let steps: Vec<StepId> =
            self.tickets.iter().filter(|((from, _), t)| *from == instance && hit(t)).map(|(key, _)| key.1).collect();
        self.tickets.retain(|(from, step), _| *from != instance || !steps.contains(step));
        self.merging.retain(|(from, step), _| *from != instance || !steps.contains(step));
        self.waiting.retain(|(_, from, _, w)| {
            let Waiting::Read { lease: of, first, end, .. } = w else { return true };
            !(*of == lease && *from == instance && meets(*first, *end))
        });
        steps
    }

    /// Whether more queries of a peer's step are due.
    pub(crate) fn expects_queries(&self) -> bool {
        !self.merging.is_empty() || (!self.tickets.is_empty() && self.load() == 0)
    }

    /// Number of peers' frames that wait or are on the device, and of layers that are merged for them.
    pub(crate) fn load(&self) -> usize {
        self.waiting.len() + self.outstanding.len() + self.merging.len()
    }

    pub(crate) fn open_steps(&self) -> usize {
        self.tickets.len()
    }

    fn tickets_of(&self, peer: InstanceId) -> impl Iterator<Item = &Ticket> {
        self.tickets.range((peer, StepId(0))..=(peer, StepId(u64::MAX))).map(|(_, ticket)| ticket)
    }

    /// Whether a peer may open one more step here.
    fn admit_ticket(&self, peer: InstanceId) -> Result<(), Refusal> {
        if self.tickets.len() >= REMOTE_REQUEST_TICKETS_MAX {
            return refuse(RefuseCode::Overloaded, format!("{REMOTE_REQUEST_TICKETS_MAX} steps of peers are open"));
        }
        if self.tickets_of(peer).count() >= REMOTE_REQUEST_PEER_TICKETS_MAX {
            let detail = format!("{REMOTE_REQUEST_PEER_TICKETS_MAX} steps of this peer are open");
            return refuse(RefuseCode::Overloaded, detail);
        }
        Ok(())
    }

    /// Whether one more frame of a peer may wait here.
    fn admit_frame(&self, peer: InstanceId) -> Result<(), Refusal> {
        if self.load() >= REMOTE_REQUEST_WAITING_MAX {
            return refuse(RefuseCode::Overloaded, format!("{REMOTE_REQUEST_WAITING_MAX} frames of peers wait"));
        }
        let waiting = self.waiting.iter().filter(|(_, from, _, w)| w.owner(*from) == peer).count();
        let outstanding = self.outstanding.values().filter(|o| o.owner() == peer).count();
        let merging = self.merging.keys().filter(|(debtor, _)| *debtor == peer).count();
        if waiting + outstanding + merging >= REMOTE_REQUEST_PEER_WAITING_MAX {
            let detail = format!("{REMOTE_REQUEST_PEER_WAITING_MAX} frames of this peer wait");
            return refuse(RefuseCode::Overloaded, detail);
        }
        Ok(())
    }

    /// Decoded bytes of a peer's tickets and of its queries that wait or are on the device.
    fn bytes_of(&self, peer: InstanceId) -> usize {
        let tickets = self.tickets_of(peer).map(Ticket::bytes);
        let waiting =
            self.waiting.iter().filter(|(_, from, _, w)| w.owner(*from) == peer).map(|(_, _, _, w)| match w {
                Waiting::Query { queries, .. } | Waiting::Early { queries, .. } => queries.len(),
                Waiting::Read { pieces, .. } => size_of_val(&pieces[..]),
            });
        let outstanding = self.outstanding.values().map(|o| match o {
            Outstanding::Query { debtor: of, bytes, .. } | Outstanding::Merge { from: of, bytes, .. }
                if *of == peer =>
            {
                *bytes
            }
            Outstanding::Query { .. } | Outstanding::Merge { .. } | Outstanding::Read { .. } => 0,
        });
        let merging = self.merging.iter().filter(|((debtor, _), _)| *debtor == peer).map(|(_, merging)| merging.bytes);
        tickets.chain(waiting).chain(outstanding).chain(merging).sum()
    }

    /// Whether a peer's queries and tickets may take so many bytes more here.
    fn admit(&self, peer: InstanceId, bytes: usize) -> Result<(), Refusal> {
        let taken = self.bytes_of(peer);
        if taken.saturating_add(bytes) <= REMOTE_REQUEST_PEER_BYTES_MAX {
            return Ok(());
        }
        refuse(RefuseCode::Overloaded, format!("{taken} bytes of this peer's steps wait, and {bytes} are too many"))
    }
}

impl Creditor {
    /// Ends a peer's steps and waiting reads with refusals.
    pub(super) fn refuse_remote_request(&mut self, cx: &mut Cx, peer: PeerKey, instance: InstanceId, detail: &str) {
        let code = RefuseCode::Overloaded;
        let of = |key: &&(InstanceId, StepId)| key.0 == instance;
        let steps = self.requests.tickets.keys().filter(of);
        cx.effects.extend(steps.map(|(_, step)| Effect::Partials {
            peer,
            frame: PartialsFrame::Refused { step: *step, code, detail: detail.to_owned() },
        }));
        // Of a step's last layer, which has no ticket any more.
        let merging = self.requests.merging.keys().filter(of).filter(|key| !self.requests.tickets.contains_key(key));
        cx.effects.extend(merging.map(|(_, step)| Effect::Partials {
            peer,
            frame: PartialsFrame::Refused { step: *step, code: RefuseCode::NotRelayed, detail: detail.to_owned() },
        }));
        let reads = self.requests.waiting.iter().filter(|(_, from, _, _)| *from == instance);
        cx.effects.extend(reads.filter_map(|(_, _, _, waiting)| match waiting {
            Waiting::Read { id, lease, .. } => Some(Effect::Bulk {
                peer,
                frame: BulkFrame::Refused { id: *id, lease: *lease, code, detail: detail.to_owned() },
            }),
            Waiting::Query { .. } | Waiting::Early { .. } => None,
        }));
        self.requests.forget(instance);
    }

    /// A frame of the partials class that concerns this instance as creditor.
    pub(super) fn on_remote_partials(&mut self, cx: &mut Cx, peer: PeerKey, from: InstanceId, frame: PartialsFrame) {
        let (step, result) = match frame {
            PartialsFrame::Ticket(ticket) => {
                let early = self.requests.take_early(from, ticket.step);
                let result = self.on_ticket(cx, from, &ticket);
                if result.is_ok() {
                    early.into_iter().for_each(|(sender, query)| self.on_relayed_query(cx, sender, query));
                }
                (ticket.step, result)
            }
            PartialsFrame::RelayedQuery { debtor, step, layer, rows, queries } => {
                return self.on_relayed_query(cx, (peer, from), RelayedQuery { debtor, step, layer, rows, queries });
            }
            PartialsFrame::RelayedPartial { debtor, step, layer, rows: _, out, lse, count } => {
                let part = RemotePart { creditor: from, out, lse, count };
                return self.on_relayed_partial(cx, (debtor, step), layer, part);
            }
            PartialsFrame::Query { step, layer, rows, queries } => {
                (step, self.on_query(cx, (peer, from), step, layer, rows, queries))
            }
            PartialsFrame::StepCancel { step } => {
                self.requests.take_early(from, step);
                self.requests.forget_step(from, step);
                return;
            }
            // Partials and refusals of creditors go to the step that waits for them.
            PartialsFrame::Partial { .. } | PartialsFrame::Refused { .. } => return,
        };
        if let Err((code, detail)) = result {
            self.requests.forget_step(from, step);
            cx.effects.push(Effect::Partials { peer, frame: PartialsFrame::Refused { step, code, detail } });
        }
    }

    fn on_ticket(&mut self, cx: &mut Cx, from: InstanceId, ticket: &StepTicket) -> Result<(), Refusal> {
        self.requests.admit_ticket(from)?;
        let rows: u64 = ticket.seqs.iter().map(|s| u64::from(s.rows)).sum();
        if rows == 0 || rows > STEP_ROWS_MAX as u64 {
            return refuse(RefuseCode::Malformed, format!("a step has {rows} rows, not 1 to {STEP_ROWS_MAX}"));
        }
        // A lease's run is one piece of memory as a rule.
        let count: usize = ticket.seqs.iter().map(|seq| seq.runs.len()).sum();
        let mut seqs = Vec::with_capacity(ticket.seqs.len());
        let (mut runs, mut needs) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let (mut row0, mut row_keys) = (0, 0);
        for seq in &ticket.seqs {
            if seq.runs.is_empty() {
                return refuse(RefuseCode::Malformed, format!("{} attends to nothing here", seq.seq));
            }
            let run0 = runs.len();
            let mut end_pos = 0;
            for run in &seq.runs {
                if run.len == 0 || run.first_pos < end_pos || run.first_pos.checked_add(run.len).is_none() {
                    return refuse(RefuseCode::Malformed, "a sequence's runs are not ascending");
                }
                end_pos = run.first_pos + run.len;
                cx.memory
                    .rm
                    .creditor
                    .resolve(from, run, &mut runs)
                    .map_err(|code| (code, format!("{} offsets {}+{}", run.lease, run.offset, run.len)))?;
                // Each lent block is one piece, or one more where a run ends within it.
                if runs.len() > cx.config.blocks_total as usize + TICKET_RUNS_MAX {
                    return refuse(RefuseCode::Malformed, "a step attends to blocks more than once");
                }
                let &LeaseRun { lease, epoch, offset: first, len, .. } = run;
                needs.push(Need { lease, epoch, first, end: first + len });
            }
            let as_u32 = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            seqs.push(AttnRows {
                row0,
                rows: seq.rows,
                pos0: seq.pos0,
                run0: as_u32(run0),
                runs: as_u32(runs.len() - run0),
            });
            row_keys += u64::from(seq.rows) * seq.runs.iter().map(|run| u64::from(run.len)).sum::<u64>();
            row0 += seq.rows;
        }
        check_route(cx, from, &ticket.route)?;
        if let Some(why) = self.shed(cx, from) {
            return refuse(RefuseCode::Overloaded, why);
        }
        self.requests.opened += 1;
        let entry = Ticket {
            opened: self.requests.opened,
            dtype: ticket.dtype,
            route: ticket.route.clone(),
            rows: row0,
            seqs,
            runs,
            row_keys,
            needs,
            deadline_ms: ticket.deadline_ms.min(u32::try_from(cx.step_deadline_ms).unwrap_or(u32::MAX)),
            expires_ms: cx.now_ms + 2 * cx.step_deadline_ms,
        };
        self.requests.admit(from, entry.bytes())?;
        self.requests.tickets.insert((from, ticket.step), entry);
        Ok(())
    }

    fn on_query(
        &mut self,
        cx: &mut Cx,
        (peer, from): (PeerKey, InstanceId),
        step: StepId,
        layer: u32,
        rows: u32,
        queries: Bytes,
    ) -> Result<(), Refusal> {
        let Some(ticket) = self.requests.tickets.get(&(from, step)) else {
            // The step was refused or cancelled: its frames in flight are already answered.
            return Ok(());
        };
        let bytes = rows as usize * cx.config.geometry.q_dim() * ticket.dtype.size();
        let is_relayed = matches!(ticket.route, Route::Through(_));
        if rows != ticket.rows || queries.len() != bytes || layer >= cx.config.kv.layers || is_relayed {
            return refuse(RefuseCode::Malformed, format!("{rows} rows, layer {layer} do not fit the ticket"));
        }
        self.requests.admit_frame(from)?;
        self.requests.admit(from, queries.len() + ticket.bytes())?;
        let (opened, deadline) = (ticket.opened, cx.now_ms + u64::from(ticket.deadline_ms));
        if let Route::Relay(members) = &ticket.route {
            let members = members.clone();
            self.pass_on(cx, (from, step), (layer, deadline), members, &queries)?;
        }
        let query = Waiting::Query { debtor: from, step, opened, layer, queries };
        self.requests.waiting.push((peer, from, deadline, query));
        self.serve_waiting(cx);
        Ok(())
    }

    /// Starts waiting frames whose KV has arrived, in order of arrival.
    pub(super) fn serve_waiting(&mut self, cx: &mut Cx) {
        let mut waiting = std::mem::take(&mut self.requests.waiting);
        waiting.retain_mut(|(peer, from, _, frame)| !self.try_serve(cx, *peer, *from, frame));
        self.requests.waiting = waiting;
    }

    /// Starts a waiting frame if its KV is written. Returns whether it can be dropped: it started, or its step has ended.
    fn try_serve(&mut self, cx: &mut Cx, peer: PeerKey, from: InstanceId, frame: &mut Waiting) -> bool {
        match frame {
            Waiting::Early { .. } => false,
            Waiting::Query { debtor, step, opened, layer, queries } => {
                // The query belongs to the ticket under which it arrived, even if the peer opened the step again since.
                let (debtor, key) = (*debtor, (*debtor, *step));
                let ticket = self.requests.tickets.get_mut(&key).filter(|t| t.opened == *opened);
                let Some(ticket) = ticket else { return true };
                let has = |need: &Need| {
                    cx.memory
                        .rm
                        .creditor
                        .written(debtor, (need.lease, need.epoch), *layer)
                        .is_ok_and(|written| written >= need.end)
                };
                if !ticket.needs.iter().all(has) {
                    return false;
                }
                ticket.expires_ms = cx.now_ms + 2 * cx.step_deadline_ms;
                let (dtype, rows) = (ticket.dtype, ticket.rows);
                if let Some(threshold) = &mut self.threshold {
                    threshold.on_remote_request(debtor, ticket.row_keys);
                }
                let last = *layer + 1 == cx.config.kv.layers;
                let bytes = queries.len() + ticket.bytes();
                let receiver = match ticket.route {
                    Route::Direct => Receiver::Debtor,
                    Route::Through(_) => Receiver::Relay,
                    Route::Relay(_) => Receiver::Merge { opened: *opened },
                };
                let (seqs, runs) = if last {
                    (std::mem::take(&mut ticket.seqs), std::mem::take(&mut ticket.runs))
                } else {
                    (ticket.seqs.clone(), ticket.runs.clone())
                };
                if last {
                    self.requests.tickets.remove(&key);
                }
                let tag = cx.tags.take(TagOwner::Request);
                let (step, layer) = (*step, *layer);
                let what = Outstanding::Query { peer, debtor, receiver, bytes, step, layer, rows };
                self.requests.outstanding.insert(tag, what);
                let queries = std::mem::take(queries);
                let query = RemoteQuery { tag, layer, dtype, queries, seqs, runs };
                cx.effects.push(Effect::Runner(Command::RemoteQuery(query)));
                true
            }
            Waiting::Read { id, lease, epoch, end, layer, pieces, .. } => {
                if !cx.memory.rm.creditor.written(from, (*lease, *epoch), *layer).is_ok_and(|written| written >= *end) {
                    return false;
                }
                let tokens = pieces.iter().map(|(_, n)| n).sum();
                let what = Outstanding::Read { peer, from, id: *id, lease: *lease, layer: *layer, tokens };
                let tag = cx.tags.take(TagOwner::Request);
                self.requests.outstanding.insert(tag, what);
                let read = RemoteRead { tag, layer: *layer, pieces: std::mem::take(pieces) };
                cx.effects.push(Effect::Runner(Command::RemoteRead(read)));
                true
            }
        }
    }

    /// A frame of the bulk class that concerns this instance as creditor.
    pub(super) fn on_remote_bulk(&mut self, cx: &mut Cx, peer: PeerKey, from: InstanceId, frame: BulkFrame) {
        let (id, lease, result) = match frame {
            BulkFrame::Write { lease, epoch, layer, offset, tokens, kv } => {
                (0, lease, self.on_write(cx, from, lease, epoch, layer, offset, tokens, kv))
            }
            BulkFrame::Seal { lease, epoch, entry, hash } => {
                let sealed = cx.memory.rm.creditor.seal(from, (lease, epoch), entry, &hash, &mut cx.memory.rm.pool);
                if sealed.is_ok() && cx.config.lent.is_some() && self.seals.waiting() >= cx.config.blocks_total as usize
                {
                    let (code, detail) = (RefuseCode::Overloaded, format!("{} seals wait", self.seals.waiting()));
                    cx.effects.push(Effect::Bulk { peer, frame: BulkFrame::Refused { id: 0, lease, code, detail } });
                    return;
                }
                if sealed.is_ok() && cx.config.lent.is_some() {
                    self.seal_lent(cx, peer, lease, epoch, entry);
                } else if sealed == Ok(true) {
                    let sealed = LeaseSealed { lease: lease.0, epoch: epoch.0, entries: vec![entry], blocks: vec![] };
                    cx.send(peer, ControlBody::LeaseSealed(sealed));
                }
                (0, lease, sealed.map(drop).map_err(|code| (code, format!("entry {entry} of {lease}"))))
            }
            BulkFrame::Read { id, lease, epoch, layer, offset, tokens, deadline_ms } => {
                let run = LeaseRun { lease, epoch, offset, len: tokens, first_pos: 0 };
                (id, lease, self.on_read(cx, (peer, from), id, layer, &run, deadline_ms))
            }
            // Replies of creditors go to the step or move that waits for them.
            BulkFrame::Data { .. } | BulkFrame::Refused { .. } => return,
        };
        if let Err((code, detail)) = result {
            cx.effects.push(Effect::Bulk { peer, frame: BulkFrame::Refused { id, lease, code, detail } });
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one frame")]
    fn on_write(
        &mut self,
        cx: &mut Cx,
        from: InstanceId,
        lease: LeaseId,
        epoch: Epoch,
        layer: u32,
        offset: u32,
        tokens: u32,
        kv: Bytes,
    ) -> Result<(), Refusal> {
        if kv.len() as u64 != u64::from(tokens) * cx.config.kv.layer_token_bytes() as u64 {
            return refuse(RefuseCode::Malformed, format!("{} bytes are not {tokens} tokens", kv.len()));
        }
        let pieces = cx
            .memory
            .rm
            .creditor
            .begin_write(from, (lease, epoch), layer, offset, tokens)
            .map_err(|code| (code, format!("{lease} layer {layer} offsets {offset}+{tokens}")))?;
        cx.memory.rm.commit_write(lease, layer, &kv, cx.now_ms);
        // Entries freed meanwhile are left out.
        let token_bytes = cx.config.kv.layer_token_bytes();
        for group in pieces.chunk_by(|a, b| a.token0 + a.tokens == b.token0) {
            let tokens: u32 = group.iter().map(|p| p.tokens).sum();
            let from = group[0].token0 as usize * token_bytes;
            let kv = kv.slice(from..from + tokens as usize * token_bytes);
            let pieces = group.iter().map(|p| (p.slot0, p.tokens)).collect();
            cx.writes.queue(kv.len());
            let write = RemoteWrite { tag: None, layer, pieces, kv };
            cx.release_freed();
            cx.effects.push(Effect::Runner(Command::RemoteWrite(write)));
        }
        self.serve_waiting(cx);
        Ok(())
    }

    fn on_read(
        &mut self,
        cx: &mut Cx,
        (peer, from): (PeerKey, InstanceId),
        id: u64,
        layer: u32,
        run: &LeaseRun,
        deadline_ms: u32,
    ) -> Result<(), Refusal> {
        if layer >= cx.config.kv.layers || run.len == 0 {
            return refuse(RefuseCode::Malformed, format!("layer {layer}, {} tokens", run.len));
        }
        let bytes = (run.len as usize).saturating_mul(cx.config.kv.layer_token_bytes());
        if bytes > READ_BYTES_MAX {
            return refuse(RefuseCode::OutOfRange, format!("{bytes} bytes are more than a frame of {READ_BYTES_MAX}"));
        }
        self.requests.admit_frame(from)?;
        let mut runs = Vec::new();
        cx.memory
            .rm
            .creditor
            .resolve(from, run, &mut runs)
            .map_err(|code| (code, format!("{} offsets {}+{}", run.lease, run.offset, run.len)))?;
        let pieces = runs.iter().map(|r| (r.base, r.len)).collect();
        let deadline = cx.now_ms + u64::from(deadline_ms).min(cx.step_deadline_ms);
        let (lease, epoch, first) = (run.lease, run.epoch, run.offset);
        let frame = Waiting::Read { id, lease, epoch, first, end: first + run.len, layer, pieces };
        self.requests.waiting.push((peer, from, deadline, frame));
        self.serve_waiting(cx);
        Ok(())
    }

    /// Sends the device's partial of a remote query, or of a merge, to its receiver.
    pub(super) fn on_remote_partial(&mut self, cx: &mut Cx, tag: RemoteTag, out: Bytes, lse: Bytes, count: Bytes) {
        let (peer, frame) = match self.requests.outstanding.remove(&tag) {
            Some(Outstanding::Query { debtor, step, layer, receiver: Receiver::Merge { opened }, .. }) => {
                let part = OwnPart { opened, out, lse, count };
                return self.on_own_part(cx, (debtor, step), layer, part);
            }
            Some(Outstanding::Query { peer, debtor, step, layer, rows, receiver: Receiver::Relay, .. }) => {
                (peer, PartialsFrame::RelayedPartial { debtor, step, layer, rows, out, lse, count })
            }
            Some(
                Outstanding::Query { peer, step, layer, rows, receiver: Receiver::Debtor, .. }
                | Outstanding::Merge { peer, step, layer, rows, .. },
            ) => (peer, PartialsFrame::Partial { step, layer, rows, out, lse, count }),
            Some(Outstanding::Read { .. }) | None => return,
        };
        cx.effects.push(Effect::Partials { peer, frame });
    }

    /// Sends KV that the device read to the peer that asked for it.
    pub(super) fn on_remote_kv(&mut self, cx: &mut Cx, tag: RemoteTag, kv: Bytes) {
        if let Some(Outstanding::Read { peer, id, layer, tokens, .. }) = self.requests.outstanding.remove(&tag) {
            cx.effects.push(Effect::Bulk { peer, frame: BulkFrame::Data { id, layer, tokens, kv } });
        }
    }

    /// Refuses a remote request that the device failed.
    pub(super) fn on_remote_failed(&mut self, cx: &mut Cx, tag: RemoteTag, error: &DeviceError) {
        let (code, detail) = (RefuseCode::Device, error.to_string());
        match self.requests.outstanding.remove(&tag) {
            Some(Outstanding::Query { debtor, step, .. } | Outstanding::Merge { from: debtor, step, .. }) => {
                self.requests.merging.remove(&(debtor, step));
                refuse_step(cx, debtor, step, code, detail);
            }
            Some(Outstanding::Read { peer, id, lease, .. }) => {
                cx.effects.push(Effect::Bulk { peer, frame: BulkFrame::Refused { id, lease, code, detail } });
            }
            None => {}
        }
    }

    /// Refuses frames past their deadline and drops tickets without further frames.
    pub(super) fn expire_remote_requests(&mut self, cx: &mut Cx) {
        let now = cx.now_ms;
        self.requests.tickets.retain(|_, t| t.expires_ms > now);
        let mut waiting = std::mem::take(&mut self.requests.waiting);
        waiting.retain(|(peer, _, deadline, frame)| {
            if *deadline > now {
                return true;
            }
            let (code, peer) = (RefuseCode::Deadline, *peer);
            match frame {
                Waiting::Query { debtor, step, layer, .. } => {
                    self.requests.tickets.remove(&(*debtor, *step));
                    self.requests.merging.remove(&(*debtor, *step));
                    let detail = format!("the KV of layer {layer} did not arrive in time");
                    refuse_step(cx, *debtor, *step, code, detail);
                }
                // Its debtor's ticket did not come: the debtor has no step here.
                Waiting::Early { .. } => {}
                Waiting::Read { id, lease, layer, .. } => {
                    let detail = format!("the KV of layer {layer} did not arrive in time");
                    let frame = BulkFrame::Refused { id: *id, lease: *lease, code, detail };
                    cx.effects.push(Effect::Bulk { peer, frame });
                }
            }
            false
        });
        self.requests.waiting = waiting;
        self.expire_merging(cx);
    }
}

/// Refuses a step to its debtor, if that is connected.
fn refuse_step(cx: &mut Cx, debtor: InstanceId, step: StepId, code: RefuseCode, detail: String) {
    if let Some(peer) = cx.peers.key(debtor) {
        cx.effects.push(Effect::Partials { peer, frame: PartialsFrame::Refused { step, code, detail } });
    }
}
