//! The modelled device, in place of the runner: takes an instance's commands and reports after modelled time.
//!
//! The instance runs a model of one layer (small and few frames); the time is that of all layers of the real model.
//! Peers' micro attention goes before passes at the end of a layer: on average half a layer's time in every layer, so
//! half a step's time over all layers. A remote pass has one more border in a layer, behind its local attention. (The study
//! `overtaking`: at once, as on streams of a higher priority.) Passes
//! of the two micro-batches alternate and so share the device evenly. Copies of KV for moves and for peers take the
//! device's time.
//!
//! A remote pass computes the projections first (their share of a layer); then queries leave and local attention
//! runs; the pass waits for partials, then computes the rest: v2 Figure 6 (a).
//!
//! In joint prefill a step attends to KV that another one appends meanwhile, a layer ahead of it. All layers are one here: such a query
//! is computed once the projections of that step are done, and its partials leave when that step has its own and goes on to its rest.
//! So no step ends before those that it depends on, and steps of all members overlap as they do layer by layer.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are rounded up and not negative")]

use super::hardware::{StepShape, Timing};
use super::run::{HEAD_DIM, Setting, Study};
use crate::runner::SimRunner;
use bytes::Bytes;
use lagoon_runner::{Command, PeerMemory, RemoteQuery, RemoteTag, Report, SampleOut, StepWork};
use lagoon_transfer::Region;
use lagoon_types::{InstanceId, KvRun, MicroBatch, SeqId, StepId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The query, key and value projections' share of a layer's linear work (12 h² of it with the feed-forward: about 3/12).
const PROJECTION_SHARE: f64 = 0.25;
/// Zeros in place of queries and KV, enough for the largest step.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// `bytes` bytes without meaning.
fn zeros(bytes: usize) -> Bytes {
    if bytes <= ZEROS.len() { Bytes::from_static(&ZEROS[..bytes]) } else { Bytes::from(vec![0; bytes]) }
}

/// How prompts' KV comes into the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// Computed, in chunks.
    Computed,
    /// Present when a request is first admitted: only decoding, and recomputing a preempted request, take time.
    Resident,
}

/// Network traffic that a report causes.
#[derive(Debug, Default)]
pub(super) struct Bill {
    /// Rows that count, by creditor, or under 0 for the requester of a partial. Those of resident prompts do not.
    pub(super) rows: Vec<(InstanceId, u32)>,
    /// It is a step's KV.
    pub(super) written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Project,
    Local,
    Await,
    Rest,
}

#[derive(Debug)]
struct Pass {
    work: StepWork,
    phase: Phase,
    left_us: f64,
    local_us: f64,
    rest_us: f64,
    whole_us: f64,
    shape: StepShape,
    missing: usize,
}

impl Pass {
    /// Time of what it computes now without a border, over all layers: whole layers, or, in a remote pass, local attention and all
    /// else apart.
    fn piece_us(&self) -> f64 {
        match (self.work.micro_batch, self.phase) {
            (MicroBatch::Local, _) => self.whole_us,
            (MicroBatch::Remote, Phase::Local) => self.local_us,
            (MicroBatch::Remote, _) => self.whole_us - self.local_us,
        }
    }

    /// Whether it appends KV of these runs, for others to attend to.
    fn appends(&self, runs: &[KvRun]) -> bool {
        let holds = |run: &KvRun| self.work.slots.iter().any(|slot| (run.base..run.base + run.len).contains(slot));
        self.work.announced && runs.iter().any(holds)
    }
}

#[derive(Debug)]
struct RemoteRequest {
    query: RemoteQuery,
    /// The step here whose KV it attends to, while that has not all of its partials.
    behind: Option<StepId>,
    ready_us: f64,
    left_us: f64,
    billed: u32,
}

/// A modelled device; see the module's documentation.
#[derive(Debug)]
pub(super) struct Device {
    timing: Timing,
    prefill: Prefill,
    study: Study,
    q_bytes: usize,
    kv_bytes: usize,
    passes: [Option<Pass>; 2],
    remote_requests: VecDeque<RemoteRequest>,
    /// Due copies for peers and moves, in microseconds: they take the device's time, but no command here waits for
    /// them.
    copies_us: f64,
    immediate: Vec<Report>,
    /// Positions computed so far, by sequence.
    reached: BTreeMap<SeqId, u32>,
    updated_us: f64,
    /// Bills of the reports that were handed out last.
    bills: VecDeque<Bill>,
    pub(super) busy_us: f64,
    pub(super) remote_request_us: f64,
    pub(super) copy_us: f64,
    /// Idle time while a pass waited for partials.
    pub(super) await_us: f64,
    /// Steps and rows, by micro-batch.
    pub(super) steps: [u64; 2],
    pub(super) rows: [u64; 2],
}

impl Device {
    /// `q_bytes` and `kv_bytes`: bytes of one row and one token in the one-layer shape.
    pub(super) fn new(setting: &Setting, q_bytes: usize, kv_bytes: usize) -> Self {
        Self {
            timing: setting.timing,
            prefill: setting.prefill,
            study: setting.study,
            q_bytes,
            kv_bytes,
            passes: [None, None],
            remote_requests: VecDeque::new(),
            copies_us: 0.0,
            immediate: Vec::new(),
            reached: BTreeMap::new(),
            updated_us: 0.0,
            bills: VecDeque::new(),
            busy_us: 0.0,
            remote_request_us: 0.0,
            copy_us: 0.0,
            await_us: 0.0,
            steps: [0; 2],
            rows: [0; 2],
        }
    }

    /// Whether rows take time: see [`Prefill`].
    fn counts(&self, rows: u32, again: bool) -> bool {
        rows == 1 || again || self.prefill == Prefill::Computed
    }

    /// Notes that a sequence computes rows up to `end`. True if they are recomputed after a preemption.
    fn note_rows(&mut self, seq: SeqId, end: u32) -> bool {
        let reached = self.reached.entry(seq).or_default();
        let again = end <= *reached;
        *reached = end.max(*reached);
        again
    }

    /// Keys read by decode rows, and pairs computed by prefill rows, of `rows` rows over `keys` keys, the last ones their own.
    fn attention(&self, rows: u32, again: bool, keys: f64) -> (f64, f64) {
        // A row sees half of its chunk's own keys on average.
        self.attention_over(rows, again, if rows > 1 { (keys - f64::from(rows) / 2.0).max(keys / 2.0) } else { keys })
    }

    /// The same of rows that see so many keys each.
    fn attention_over(&self, rows: u32, again: bool, keys: f64) -> (f64, f64) {
        match rows {
            1 => (keys, 0.0),
            _ if !self.counts(rows, again) => (0.0, 0.0),
            _ => (0.0, f64::from(rows) * keys),
        }
    }

    /// Queues a copy for a move or a peer. That of a resident prompt's KV into a creditor's store looks like a move's and
    /// takes as long.
    fn copy(&mut self, tokens: u32) {
        self.copies_us += self.timing.copy_us(f64::from(tokens));
    }

    fn start(&mut self, work: StepWork) {
        let mut shape = StepShape::default();
        for seq in &work.seqs {
            let runs = &work.runs[seq.run0 as usize..(seq.run0 + seq.runs) as usize];
            let keys: u64 = runs.iter().map(|r| u64::from(r.len)).sum();
            let again = self.note_rows(seq.seq, seq.pos0 + seq.rows);
            let (decode, prefill) = self.attention(seq.rows, again, keys as f64);
            shape.decode_keys += decode;
            shape.prefill_pairs += prefill;
            shape.longest_us = shape.longest_us.max(self.timing.attention_us(decode, prefill));
            if self.counts(seq.rows, again) {
                shape.rows += f64::from(seq.rows);
                shape.prompt_rows += if seq.rows > 1 { f64::from(seq.rows) } else { 0.0 };
                shape.seqs += 1.0;
                shape.sampled += f64::from(u32::from(seq.sample.is_some()));
            }
        }
        let mut time = self.timing.step(&shape);
        if self.study.one_batch {
            time.linear_us = self.joined_us(&shape);
        }
        let missing = work.remote.ships.len() + work.remote.fetches.len();
        let micro_batch = work.micro_batch;
        let project_us = if micro_batch == MicroBatch::Remote { time.linear_us * PROJECTION_SHARE } else { 0.0 };
        let (phase, left_us) = match micro_batch {
            MicroBatch::Local => (Phase::Rest, time.total_us()),
            MicroBatch::Remote => (Phase::Project, project_us),
        };
        let whole_us = time.total_us();
        let rest_us = time.linear_us - project_us;
        assert!(self.passes[micro_batch.index()].is_none(), "one step at a time in a micro_batch");
        let local_us = time.attention_us;
        self.steps[micro_batch.index()] += 1;
        self.rows[micro_batch.index()] += work.seqs.len() as u64;
        self.passes[micro_batch.index()] =
            Some(Pass { work, phase, left_us, local_us, rest_us, whole_us, shape, missing });
    }

    /// Linear work that a pass adds to the other micro-batch's.
    fn joined_us(&self, shape: &StepShape) -> f64 {
        let beside = self.passes.iter().flatten().next().map(|p| p.shape).unwrap_or_default();
        let linear = |shape: StepShape| self.timing.step(&shape).linear_us;
        let only = |of: &StepShape| StepShape { decode_keys: 0.0, prefill_pairs: 0.0, longest_us: 0.0, ..*of };
        let both = StepShape {
            rows: shape.rows + beside.rows,
            prompt_rows: shape.prompt_rows + beside.prompt_rows,
            sampled: shape.sampled + beside.sampled,
            seqs: shape.seqs + beside.seqs,
            ..StepShape::default()
        };
        (linear(both) - linear(only(&beside))).max(0.0)
    }

    fn on_answer(&mut self, step: StepId) {
        for pass in self.passes.iter_mut().flatten().filter(|p| p.work.step == step) {
            pass.missing = pass.missing.saturating_sub(1);
            if pass.missing == 0 && pass.phase == Phase::Await {
                (pass.phase, pass.left_us) = (Phase::Rest, pass.rest_us);
            }
        }
    }

    fn queue(&mut self, query: RemoteQuery, now_us: f64) {
        let (mut keys, mut pairs, mut billed) = (0.0, 0.0, 0);
        for seq in &query.seqs {
            let runs = &query.runs[seq.run0 as usize..(seq.run0 + seq.runs) as usize];
            let held: u64 = runs.iter().map(|r| u64::from(r.len)).sum();
            let (decode, prefill) = self.attention_over(seq.rows, false, held as f64);
            keys += decode;
            pairs += prefill;
            billed += if self.counts(seq.rows, false) { seq.rows } else { 0 };
        }
        let left_us = if billed == 0 { 0.0 } else { self.timing.remote_request_us(keys, pairs) };
        let computing = |p: &&Pass| p.phase != Phase::Await;
        let layer_wait = self.passes.iter().flatten().filter(computing).map(|p| p.piece_us() / 2.0).fold(0.0, f64::max);
        let wait = if billed > 0 && !self.study.overtaking { layer_wait } else { 0.0 };
        let behind = self.passes.iter().flatten().find(|pass| pass.appends(&query.runs)).map(|pass| pass.work.step);
        self.remote_requests.push_back(RemoteRequest { query, behind, ready_us: now_us + wait, left_us, billed });
    }

    /// Whether a request's partials are computed, and the KV that it attends to is complete.
    fn is_answered(&self, request: &RemoteRequest, now_us: f64) -> bool {
        let before_rest = |pass: &Pass| Some(pass.work.step) == request.behind && pass.phase != Phase::Rest;
        request.left_us <= 0.0 && request.ready_us <= now_us && !self.passes.iter().flatten().any(before_rest)
    }

    /// Advances to `now_us`: peers' work first, then both micro-batches share the device.
    fn advance(&mut self, now_us: u64) {
        let now = now_us as f64;
        while self.updated_us < now {
            let ready = self.remote_requests.iter_mut().find(|g| g.ready_us <= self.updated_us && g.left_us > 0.0);
            if let Some(remote_request) = ready {
                let dt = remote_request.left_us.min(now - self.updated_us);
                remote_request.left_us -= dt;
                if remote_request.left_us < 1e-6 {
                    remote_request.left_us = 0.0;
                }
                self.remote_request_us += dt;
                self.busy_us += dt;
                self.updated_us += dt;
                continue;
            }
            if self.copies_us > 0.0 {
                let dt = self.copies_us.min(now - self.updated_us);
                self.copies_us -= dt;
                self.copy_us += dt;
                self.busy_us += dt;
                self.updated_us += dt;
                continue;
            }
            let next_ready = self.remote_requests.iter().map(|g| g.ready_us).filter(|r| *r > self.updated_us);
            let until = next_ready.fold(now, f64::min);
            let active = self.passes.iter().flatten().filter(|p| p.left_us > 0.0).count() as f64;
            let span = until - self.updated_us;
            if active > 0.0 {
                let shortest = self.passes.iter().flatten().map(|p| p.left_us).filter(|l| *l > 0.0);
                let span = span.min(shortest.fold(f64::INFINITY, f64::min) * active);
                for pass in self.passes.iter_mut().flatten().filter(|p| p.left_us > 0.0) {
                    pass.left_us -= span / active;
                    if pass.left_us < 1e-6 {
                        pass.left_us = 0.0;
                    }
                }
                self.busy_us += span;
                self.updated_us += span;
            } else {
                let waits = self.passes.iter().flatten().any(|p| p.phase == Phase::Await);
                self.await_us += if waits { span } else { 0.0 };
                self.updated_us = until;
            }
        }
    }

    /// Time of the next completion, without further commands.
    fn next_us(&self, now_us: u64) -> Option<u64> {
        let now = now_us as f64;
        if !self.immediate.is_empty() {
            return Some(now_us);
        }
        let due = |p: &&Pass| p.phase != Phase::Await;
        let ended = self.remote_requests.iter().any(|g| self.is_answered(g, now));
        if ended || self.passes.iter().flatten().filter(due).any(|p| p.left_us <= 0.0) {
            return Some(now_us);
        }
        let ready = self.remote_requests.iter().filter(|g| g.ready_us > now).map(|g| g.ready_us);
        let ready = ready.fold(f64::INFINITY, f64::min);
        let now = now + self.copies_us;
        let running = self.remote_requests.iter().find(|g| g.ready_us <= now && g.left_us > 0.0);
        let running = running.map(|g| now + g.left_us);
        let active = self.passes.iter().flatten().filter(due);
        let micro_batches = active.clone().count() as f64;
        let pass = active.map(|p| now + p.left_us * micro_batches).fold(f64::INFINITY, f64::min);
        let next = running.unwrap_or(pass).min(ready);
        next.is_finite().then(|| next.ceil() as u64)
    }

    fn collect_pass(&mut self, micro_batch: MicroBatch, reports: &mut Vec<Report>) {
        loop {
            let Some(pass) = &mut self.passes[micro_batch.index()] else { return };
            if pass.left_us > 0.0 {
                return;
            }
            match pass.phase {
                Phase::Project => {
                    (pass.phase, pass.left_us) = (Phase::Local, pass.local_us);
                    self.hand_out(micro_batch, reports);
                }
                Phase::Local if pass.missing == 0 => (pass.phase, pass.left_us) = (Phase::Rest, pass.rest_us),
                Phase::Local => {
                    pass.phase = Phase::Await;
                    return;
                }
                Phase::Await => return,
                Phase::Rest => {
                    let samples = pass.work.seqs.iter().filter(|s| s.sample.is_some());
                    let sample = |seq| SampleOut { seq, token: Some(0), ..SampleOut::default() };
                    let samples = samples.map(|s| sample(s.seq)).collect();
                    let step = pass.work.step;
                    self.passes[micro_batch.index()] = None;
                    self.report(Report::Done { step, micro_batch, samples }, Bill::default(), reports);
                    return;
                }
            }
        }
    }

    /// Reports queries for every creditor, and KV to be written there.
    fn hand_out(&mut self, micro_batch: MicroBatch, reports: &mut Vec<Report>) {
        let Some(pass) = &self.passes[micro_batch.index()] else { return };
        let remote = &pass.work.remote;
        let (step, announced) = (pass.work.step, pass.work.announced);
        let frame = |s: &lagoon_runner::Ship| (s.creditor, s.rows(), zeros(s.rows() as usize * self.q_bytes));
        let billed = |s: &lagoon_runner::Ship| {
            let rows = s.segments.iter().map(|s| s.rows).filter(|rows| self.counts(*rows, false)).sum();
            (s.creditor, rows)
        };
        let queries = Report::Queries { step, layer: 0, frames: remote.ships.iter().map(frame).collect() };
        let rows = remote.ships.iter().map(billed).collect();
        let kv: Vec<Bytes> = remote.writes.iter().map(|w| zeros(w.rows as usize * self.kv_bytes)).collect();
        self.report(queries, Bill { rows, written: false }, reports);
        if !kv.is_empty() {
            self.report(Report::Written { step, layer: 0, kv }, Bill { written: true, ..Bill::default() }, reports);
        }
        if announced {
            self.report(Report::Appended { step, layer: 0 }, Bill::default(), reports);
        }
    }

    /// A partial without meaning of so many rows.
    fn partial(&self, tag: RemoteTag, rows: u32) -> Report {
        let (rows, heads) = (rows as usize, self.q_bytes / (HEAD_DIM as usize * size_of::<u16>()));
        let (out, lse, count) = (zeros(rows * self.q_bytes), zeros(rows * heads * 4), zeros(rows * 4));
        Report::RemotePartial { tag, out, lse, count }
    }

    fn report(&mut self, report: Report, bill: Bill, reports: &mut Vec<Report>) {
        reports.push(report);
        self.bills.push_back(bill);
    }
}

impl SimRunner for Device {
    type Bill = Bill;
    const PREEMPTIVE: bool = true;

    fn push(&mut self, command: Command, now_us: u64) {
        self.advance(now_us);
        match command {
            Command::Step(work) => self.start(*work),
            Command::Part { step, .. } | Command::Fetched { step, .. } => self.on_answer(step),
            Command::Abort { step } => {
                for pass in &mut self.passes {
                    pass.take_if(|p| p.work.step == step);
                }
            }
            Command::RemoteQuery(query) => self.queue(query, now_us as f64),
            // On the host, beside the device's work.
            Command::RemoteMerge(merge) => self.immediate.push(self.partial(merge.tag, merge.rows)),
            Command::RemoteWrite(write) => {
                self.copy(write.pieces.iter().map(|(_, n)| n).sum());
                self.immediate.push(Report::RemoteWritten { bytes: write.kv.len(), tag: write.tag, failed: false });
            }
            Command::RemoteRead(read) => {
                let tokens: u32 = read.pieces.iter().map(|(_, n)| n).sum();
                self.copy(tokens);
                let kv = zeros(tokens as usize * self.kv_bytes);
                self.immediate.push(Report::RemoteKv { tag: read.tag, kv });
            }
            Command::Share { .. } => unreachable!("the papers' systems keep no prefixes"),
            Command::RemoteSeal { .. } | Command::Map { .. } | Command::Unmap { .. } => {
                unreachable!("the papers' systems map nobody's memory")
            }
            // Slots are host memory here.
            Command::Stage(_) => unreachable!("the papers' systems stage nothing"),
            Command::Release { .. } => {}
            Command::Draft(_) => unreachable!("the papers' systems draft nothing"),
        }
    }

    fn turn(&mut self, now_us: u64, _: &mut Vec<Report>) -> Option<u64> {
        Some(self.next_us(now_us)?.saturating_sub(now_us))
    }

    fn end(&mut self, now_us: u64, reports: &mut Vec<Report>) {
        self.advance(now_us);
        for report in std::mem::take(&mut self.immediate) {
            self.report(report, Bill::default(), reports);
        }
        let now = now_us as f64;
        while let Some(at) = self.remote_requests.iter().position(|g| self.is_answered(g, now)) {
            let Some(remote_request) = self.remote_requests.remove(at) else { break };
            let rows = remote_request.query.seqs.iter().map(|seq| seq.rows).sum();
            let report = self.partial(remote_request.query.tag, rows);
            // The requester is not known here: the caller sends one frame for this report.
            let rows = vec![(InstanceId(0), remote_request.billed)];
            self.report(report, Bill { rows, written: false }, reports);
        }
        for micro_batch in MicroBatch::ALL {
            self.collect_pass(micro_batch, reports);
        }
    }

    fn bill(&mut self) -> Bill {
        self.bills.pop_front().unwrap_or_default()
    }

    fn is_staged(&self) -> bool {
        false
    }

    /// None: the papers' systems have no transports.
    fn regions(&self) -> Vec<Arc<dyn Region>> {
        Vec::new()
    }

    fn take_regions(&mut self, _: &[Arc<dyn Region>]) {}

    fn peer_memory(&self, _: &str) -> Option<PeerMemory> {
        None
    }
}
