//! One resumable forward pass: `advance` does at most a layer and reports a wait for creditors or for the device.
//!
//! In the local micro-batch a layer is one piece of work. In the remote micro-batch (DistAttention, Infinite-LLM v1
//! §4.2 and §4.6) it is three: project, and hand out queries and new KV; attend to local runs meanwhile; when every
//! creditor has replied, scale-reduce the partials and finish the layer. Partials are merged in the order of the
//! step's plan, never of arrival, so a pass is a function of its inputs.
//!
//! A pass never blocks on a device that queues work: it returns [`Progress::Queued`]. If the other micro-batch has a
//! pass, it queues one layer at a time, so that the other's next layer is at most one layer away.

use crate::constrained::Constrained;
use crate::decoder::Decoder;
use crate::forward::{Draws, Forward, Shared};
use crate::hidden::HiddenSums;
use crate::memory::{hold, no_peer_access};
use crate::queue;
use crate::ring::RingWork;
use crate::sampling::{SampleError, Sampled, Sampler};
use crate::scores::Scores;
use crate::work::{
    Fetch, MappedKv, PassError, RemotePart, RemoteWork, Report, SampleOut, SampleSpec, SealedBlock, Ship, ShipSegment,
    StepWork,
};
use bytes::Bytes;
use lagoon_backend::{AttnRows, Device, PeerAccess, SampleRow, Sampling, VirtualMemory};
use lagoon_grammar::Next;
use lagoon_model::KvPlace;
use lagoon_types::limits::SEQUENCE_TOKENS_MAX;
use lagoon_types::run::visible_len;
use lagoon_types::{DType, KvRun, MicroBatch, SeqId, StepId};
use std::ops::Range;
use std::time::Duration;

/// Time between two looks for a grammar that is being compiled.
const COMPILE_POLL: Duration = Duration::from_millis(1);

/// Result of one call of [`Pass::advance`].
#[derive(Debug)]
pub(crate) enum Progress {
    Advanced,
    /// Waits for a creditor's reply.
    Waiting,
    /// Waits for the device; ask again after this time.
    Queued(Duration),
    Done(Vec<SampleOut>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Start,
    Project,
    /// The projection is queued.
    HandOut,
    Attend,
    Await,
    /// Logits or hidden states of prompts' rows are queued.
    Reduce,
    /// The head is queued.
    Sample,
}

/// A row that is sampled.
struct Wanted<'a> {
    seq: SeqId,
    row: u32,
    spec: &'a SampleSpec,
    index: u64,
}

/// A step in flight. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Pass {
    work: StepWork,
    layer: u32,
    /// Index of this layer, or of the next one whose KV is pooled, among those.
    pooled: u32,
    phase: Phase,
    /// Sequences over `work.runs`.
    local: Vec<AttnRows>,
    /// Sequences over `scratch_runs`: rows of this step whose KV is stored on creditors.
    scratch: Vec<AttnRows>,
    scratch_runs: Vec<KvRun>,
    ring: RingWork,
    /// Replies for the current layer, by index of ship.
    parts: Vec<Option<RemotePart>>,
    /// KV for the current and the next layer, by index of fetch.
    fetched: [Vec<Option<Bytes>>; 2],
    fetches_done: usize,
    scores: Scores,
    hidden: HiddenSums,
    constrained: Constrained,
}

impl Pass {
    pub(crate) fn new(mut work: StepWork) -> Self {
        let scores = Scores::new(std::mem::take(&mut work.scores));
        let hidden = HiddenSums::new(std::mem::take(&mut work.hidden));
        let local = work
            .seqs
            .iter()
            .map(|s| AttnRows { row0: s.row0, rows: s.rows, pos0: s.pos0, run0: s.run0, runs: s.runs })
            .collect();
        let (scratch, scratch_runs) = scratch_runs(&work);
        let fetches = work.remote.fetches.len();
        Self {
            parts: vec![None; work.remote.ships.len()],
            fetched: [vec![None; fetches], vec![None; fetches]],
            fetches_done: 0,
            scores,
            hidden,
            constrained: Constrained::default(),
            layer: 0,
            pooled: 0,
            ring: RingWork::default(),
            phase: Phase::Start,
            local,
            scratch,
            scratch_runs,
            work,
        }
    }

    pub(crate) fn step(&self) -> StepId {
        self.work.step
    }

    /// Takes a creditor's reply; one for another layer is dropped.
    pub(crate) fn on_part(&mut self, layer: u32, part: RemotePart) {
        if layer == self.pooled
            && let Some(at) = self.work.remote.ships.iter().position(|s| s.creditor == part.creditor)
        {
            self.parts[at] = Some(part);
        }
    }

    /// Takes fetched KV of this pooled layer or the next.
    pub(crate) fn on_fetched(&mut self, layer: u32, index: usize, kv: Bytes) {
        if let Some(ahead) = layer.checked_sub(self.pooled)
            && let Some(slot) = self.fetched.get_mut(ahead as usize).and_then(|f| f.get_mut(index))
        {
            *slot = Some(kv);
        }
    }

    fn is_remote(&self) -> bool {
        self.work.micro_batch == MicroBatch::Remote
    }

    /// Whether the next step may have the same shapes: it computes one token of each sequence and no more.
    fn is_repeatable(&self) -> bool {
        self.scores.is_empty()
            && self.hidden.is_empty()
            && self.work.seqs.iter().all(|s| s.rows == 1 && s.window.is_none())
    }

    fn rows(&self) -> usize {
        self.work.tokens.len()
    }

    pub(crate) fn advance<D: Device>(
        &mut self,
        shared: &mut Shared<'_, D>,
        reports: &mut dyn FnMut(Report),
    ) -> Result<Progress, PassError> {
        match self.phase {
            Phase::Start => {
                self.start(shared)?;
                self.phase = Phase::Project;
                self.project(shared)
            }
            Phase::Project => {
                // Work that the other micro-batch queues next must wait for at most a layer of this one. A watched
                // layer is done when the device has done it.
                let runs_ahead = shared.alone && !self.work.watched;
                let ahead = if runs_ahead { None } else { queue::reached(shared.device, self.micro_batch())? };
                if let Some(left) = ahead {
                    return Ok(Progress::Queued(left));
                }
                if self.work.watched {
                    self.check_mapped(shared)?;
                }
                let before =
                    self.layer.checked_sub(1).filter(|_| self.work.watched && self.pooled < shared.kv_shape.layers);
                if before.is_some_and(|layer| matches!(self.place(shared, layer), KvPlace::Pooled(_))) {
                    reports(Report::Layer { step: self.work.step, layer: self.pooled - 1 });
                }
                self.project(shared)
            }
            Phase::HandOut => {
                if let Some(left) = queue::reached(shared.device, self.micro_batch())? {
                    return Ok(Progress::Queued(left));
                }
                self.hand_out(shared, reports)?;
                if self.work.announced {
                    reports(Report::Appended { step: self.work.step, layer: self.pooled });
                }
                self.phase = Phase::Attend;
                Ok(Progress::Advanced)
            }
            Phase::Attend => {
                self.attend_local(shared)?;
                self.phase = Phase::Await;
                Ok(Progress::Advanced)
            }
            Phase::Await => self.collect(shared),
            Phase::Reduce => {
                if let Some(left) = queue::reached(shared.device, self.micro_batch())? {
                    return Ok(Progress::Queued(left));
                }
                self.scores.reduce(shared, self.work.micro_batch.index())?;
                self.hidden.reduce(shared, self.work.micro_batch.index())?;
                self.head(shared)
            }
            Phase::Sample => match queue::reached(shared.device, self.micro_batch())? {
                Some(left) => Ok(Progress::Queued(left)),
                None => {
                    self.check_mapped(shared)?;
                    self.report_prompts(reports);
                    self.sample(shared)
                }
            },
        }
    }

    fn micro_batch(&self) -> usize {
        self.work.micro_batch.index()
    }

    fn layers<D: Device>(&self, shared: &Shared<'_, D>) -> u32 {
        u32::try_from(shared.forward.model.spec.layers.len()).unwrap_or(u32::MAX)
    }

    /// Where a layer's KV is.
    fn place<D: Device>(&self, shared: &Shared<'_, D>, layer: u32) -> KvPlace {
        shared.forward.model.spec.kv_place(layer as usize)
    }

    /// Embeds the tokens and computes the rotation table.
    fn start<D: Device>(&mut self, shared: &mut Shared<'_, D>) -> Result<(), PassError> {
        let held = local_slots(&self.work.slots);
        // Without virtual memory every slot has memory.
        if let Some(memory) = shared.device.virtual_memory() {
            memory.kv_hold(shared.kv, &held)?;
            let next: Vec<u32> = held.iter().map(|slots| slots.end).collect();
            memory.kv_expect(shared.kv, &next, self.work.next_row);
        }
        if let Some(rings) = &shared.rings {
            self.ring = rings.rows(&self.work.seqs);
        }
        for window in self.work.seqs.iter().filter_map(|seq| seq.window.as_ref()) {
            let slots: Vec<_> = window.pieces.iter().map(|(slot, n)| *slot..slot + n).collect();
            hold(shared.device, shared.kv, &slots)?;
        }
        let Forward { model, micro_batches, grammars, .. } = &mut *shared.forward;
        Constrained::prepare(&self.work, grammars.as_ref());
        let activations = &mut micro_batches[self.work.micro_batch.index()];
        let positions: Vec<u32> = self.work.seqs.iter().flat_map(|s| s.pos0..s.pos0 + s.rows).collect();
        assert_eq!(positions.len(), self.rows(), "sequences cover the rows");
        // In the remote micro-batch every layer waits.
        if !self.is_remote() && self.is_repeatable() {
            queue::begin_repeatable(shared.device)?;
        }
        Ok(Decoder::new(model).embed(shared.device, &self.work.tokens, &positions, activations)?)
    }

    /// Norm, projection, rotation, append; then the whole layer in the local micro-batch, or the hand-out in the remote one.
    fn project<D: Device>(&mut self, shared: &mut Shared<'_, D>) -> Result<Progress, PassError> {
        let (layer, rows) = (self.layer as usize, self.rows());
        if self.layer == self.layers(shared) {
            return self.head(shared);
        }
        let Forward { model, micro_batches, .. } = &mut *shared.forward;
        let activations = &mut micro_batches[self.work.micro_batch.index()];
        if let (KvPlace::Windowed(index), Some(rings)) = (model.spec.kv_place(layer), &mut shared.rings) {
            rings.copy_windows(shared.device, shared.kv, (index, true), &self.work.seqs)?;
        }
        let append = match (model.spec.kv_place(layer), &mut shared.rings) {
            (KvPlace::Windowed(index), Some(rings)) => (self.ring.slots.as_slice(), &mut rings.kv, index as usize),
            _ => (self.work.slots.as_slice(), &mut *shared.kv, self.pooled as usize),
        };
        Decoder::new(model).project(shared.device, layer, rows, activations, append)?;
        if self.hands_out(shared) {
            let (micro_batch, cols) = (self.micro_batch(), 0..shared.attention.geometry.qkv_dim());
            queue::read_ahead(
                shared.device,
                micro_batch,
                &shared.forward.micro_batches[micro_batch].qkv,
                0..rows,
                cols,
            )?;
            self.phase = Phase::HandOut;
        } else if self.is_remote() {
            self.phase = Phase::Attend;
        } else {
            self.attend_local(shared)?;
            self.finish_layer(shared)?;
            queue::mark(shared.device, self.micro_batch())?;
        }
        Ok(Progress::Advanced)
    }

    /// Whether this layer sends queries or KV to creditors, fetches KV for the next layer, or is announced.
    fn hands_out<D: Device>(&self, shared: &Shared<'_, D>) -> bool {
        let RemoteWork { ships, fetches, writes, .. } = &self.work.remote;
        self.is_remote()
            && self.is_pooled(shared)
            && (self.work.announced
                || !fetches.is_empty()
                || !writes.is_empty()
                || ships.iter().any(|ship| self.asks(shared, ship)))
    }

    fn is_pooled<D: Device>(&self, shared: &Shared<'_, D>) -> bool {
        matches!(self.place(shared, self.layer), KvPlace::Pooled(_))
    }

    /// Whether this layer sends queries to a creditor: in a layer with a window, it may hold none of the keys that rows see.
    fn asks<D: Device>(&self, shared: &Shared<'_, D>, ship: &Ship) -> bool {
        self.is_pooled(shared) && ship.asks(shared.attention.windows[self.layer as usize])
    }

    /// Proves by seal tags that mapped creditor KV has not been overwritten since its seal. Called before any result
    /// of attention to it leaves the step.
    fn check_mapped<D: Device>(&self, shared: &mut Shared<'_, D>) -> Result<(), PassError> {
        let mut tags = Vec::new();
        for mapped in &self.work.remote.peer_access {
            let blocks: Vec<u32> = mapped.sealed.iter().map(|sealed| sealed.block).collect();
            let &MappedKv { creditor, map, .. } = mapped;
            tags.clear();
            match shared.mapped.get(&map) {
                Some(kv) => {
                    let peers = shared.device.peer_access().ok_or_else(no_peer_access)?;
                    peers.kv_seal_tags(kv, &blocks, &mut tags)?;
                }
                None => tags.resize(blocks.len(), 0),
            }
            let reused = mapped.sealed.iter().zip(&tags).find(|(sealed, tag)| sealed.epoch.0 != **tag);
            if let Some((SealedBlock { lease, .. }, _)) = reused {
                return Err(PassError::Reused { creditor, lease: *lease });
            }
        }
        Ok(())
    }

    /// Hands out queries and new KV for every creditor, read once from the device.
    fn hand_out<D: Device>(
        &self,
        shared: &mut Shared<'_, D>,
        reports: &mut dyn FnMut(Report),
    ) -> Result<(), PassError> {
        let Forward { micro_batches, host, .. } = &mut *shared.forward;
        let micro_batch = &micro_batches[self.work.micro_batch.index()];
        let geometry = shared.attention.geometry;
        let (q_dim, qkv_dim) = (geometry.q_dim(), geometry.qkv_dim());
        host.clear();
        queue::read_staged(shared.device, self.micro_batch(), &micro_batch.qkv, 0..self.rows(), 0..qkv_dim, host)?;
        // Results of attention to mapped creditor KV are about to leave this instance.
        self.check_mapped(shared)?;
        let Forward { remote, host, .. } = &mut *shared.forward;
        let row = |r: usize| &host[r * qkv_dim..][..qkv_dim];

        let dtype = self.work.remote.dtype;
        let window = shared.attention.windows[self.layer as usize];
        let frames = self.work.remote.ships.iter().filter(|ship| ship.asks(window)).map(|ship| {
            let mut bytes = Vec::with_capacity(ship.rows() as usize * q_dim * dtype.size());
            for r in ship.segments.iter().flat_map(ShipSegment::range) {
                dtype.encode(&row(r as usize)[..q_dim], &mut bytes);
            }
            (ship.creditor, ship.rows(), Bytes::from(bytes))
        });
        let frames = frames.collect();
        reports(Report::Queries { step: self.work.step, layer: self.pooled, frames });

        if !self.work.remote.writes.is_empty() {
            let mut kv = Vec::with_capacity(self.work.remote.writes.len());
            for write in &self.work.remote.writes {
                let mut bytes = Vec::with_capacity(write.rows as usize * shared.kv_shape.layer_token_bytes());
                for r in write.row0..write.row0 + write.rows {
                    shared.kv_shape.encode(&row(r as usize)[q_dim..], &mut bytes);
                }
                shared.device.kv_write(&mut remote.scratch, 0, write.row0, &bytes)?;
                kv.push(Bytes::from(bytes));
            }
            reports(Report::Written { step: self.work.step, layer: self.pooled, kv });
        }
        Ok(())
    }

    /// Micro attention over runs in the store, scratch rows whose KV is remote, and mapped creditor KV.
    fn attend_local<D: Device>(&self, shared: &mut Shared<'_, D>) -> Result<(), PassError> {
        let Forward { model, micro_batches, remote, .. } = &mut *shared.forward;
        let micro_batch = &mut micro_batches[self.work.micro_batch.index()];
        let attention = shared.attention;
        if let (KvPlace::Windowed(index), Some(rings)) = (model.spec.kv_place(self.layer as usize), &shared.rings) {
            let batch = attention.batch(self.layer, &self.ring.seqs, &self.ring.runs);
            let out = &mut micro_batch.attention;
            return Ok(shared.device.attention(&micro_batch.qkv, &batch, &rings.kv, index as usize, out)?);
        }
        let batch = attention.batch(self.layer, &self.local, &self.work.runs);
        shared.device.attention(
            &micro_batch.qkv,
            &batch,
            shared.kv,
            self.pooled as usize,
            &mut micro_batch.attention,
        )?;
        if !self.scratch.is_empty() {
            let batch = attention.batch(self.layer, &self.scratch, &self.scratch_runs);
            shared.device.attention(&micro_batch.qkv, &batch, &remote.scratch, 0, &mut remote.part)?;
            remote.part.count.resize(micro_batch.attention.count.len(), 0);
            shared.device.merge(&mut micro_batch.attention, &remote.part, attention.geometry)?;
        }
        for mapped in &self.work.remote.peer_access {
            let &MappedKv { creditor, map, .. } = mapped;
            let gone = || PassError::Part { creditor, layer: self.layer };
            let kv = shared.mapped.get(&map).ok_or_else(gone)?;
            let batch = attention.batch(self.layer, &mapped.seqs, &mapped.runs);
            shared.device.attention(&micro_batch.qkv, &batch, kv, self.pooled as usize, &mut remote.part)?;
            remote.part.count.resize(micro_batch.attention.count.len(), 0);
            shared.device.merge(&mut micro_batch.attention, &remote.part, attention.geometry)?;
        }
        Ok(())
    }

    /// Merges replies in order; finishes the layer when all have come.
    fn collect<D: Device>(&mut self, shared: &mut Shared<'_, D>) -> Result<Progress, PassError> {
        if !self.is_pooled(shared) {
            self.finish_layer(shared)?;
            queue::mark(shared.device, self.micro_batch())?;
            self.phase = Phase::Project;
            return Ok(Progress::Advanced);
        }
        if let Some(kv) = self.fetched[0].get_mut(self.fetches_done).and_then(Option::take) {
            let fetch = self.work.remote.fetches[self.fetches_done];
            self.attend_fetched(shared, &fetch, &kv)?;
            self.fetches_done += 1;
            return Ok(Progress::Advanced);
        }
        let answered = |(part, ship): (&Option<RemotePart>, &Ship)| part.is_some() || !self.asks(shared, ship);
        if self.fetches_done < self.work.remote.fetches.len()
            || !self.parts.iter().zip(&self.work.remote.ships).all(answered)
        {
            return Ok(Progress::Waiting);
        }
        for at in 0..self.parts.len() {
            if let Some(part) = self.parts[at].take() {
                self.merge_part(shared, &self.work.remote.ships[at], &part)?;
            }
        }
        self.finish_layer(shared)?;
        queue::mark(shared.device, self.micro_batch())?;
        self.fetched.swap(0, 1);
        self.fetched[1].iter_mut().for_each(|f| *f = None);
        self.fetches_done = 0;
        self.phase = Phase::Project;
        Ok(Progress::Advanced)
    }

    fn attend_fetched<D: Device>(&self, shared: &mut Shared<'_, D>, fetch: &Fetch, kv: &[u8]) -> Result<(), PassError> {
        let Forward { micro_batches, remote, .. } = &mut *shared.forward;
        let micro_batch = &mut micro_batches[self.work.micro_batch.index()];
        if kv.len() != fetch.run.len as usize * shared.kv_shape.layer_token_bytes() {
            return Err(PassError::Part { creditor: fetch.creditor, layer: self.layer });
        }
        let base = u32::try_from(shared.config.step_rows).unwrap_or(u32::MAX);
        shared.device.kv_write(&mut remote.scratch, 0, base, kv)?;
        let seq = AttnRows { run0: 0, runs: 1, ..self.local[fetch.seq_index as usize] };
        let run = KvRun { base, len: fetch.run.len, first_pos: fetch.run.first_pos };
        let (seqs, runs) = ([seq], [run]);
        let batch = shared.attention.batch(self.layer, &seqs, &runs);
        shared.device.attention(&micro_batch.qkv, &batch, &remote.scratch, 0, &mut remote.part)?;
        remote.part.count.resize(micro_batch.attention.count.len(), 0);
        shared.device.merge(&mut micro_batch.attention, &remote.part, shared.attention.geometry)?;
        Ok(())
    }

    /// Scale-reduces one creditor's partials into the layer's attention.
    fn merge_part<D: Device>(
        &self,
        shared: &mut Shared<'_, D>,
        ship: &Ship,
        part: &RemotePart,
    ) -> Result<(), PassError> {
        let Forward { micro_batches, remote, host, .. } = &mut *shared.forward;
        let micro_batch = &mut micro_batches[self.work.micro_batch.index()];
        let geometry = shared.attention.geometry;
        let (q_dim, heads, rows) = (geometry.q_dim(), geometry.heads as usize, ship.rows() as usize);
        let dtype = self.work.remote.dtype;
        let sizes = (part.out.len(), part.lse.len(), part.count.len());
        if sizes != (rows * q_dim * dtype.size(), rows * heads * 4, rows * 4) {
            return Err(PassError::Part { creditor: ship.creditor, layer: self.layer });
        }
        remote.part.count.clear();
        remote.part.count.resize(micro_batch.attention.count.len(), 0);
        let mut at = 0;
        for segment in &ship.segments {
            let (row0, n) = (segment.row0 as usize, segment.rows as usize);
            host.clear();
            dtype.decode(&part.out[at * q_dim * dtype.size()..][..n * q_dim * dtype.size()], host);
            shared.device.write(&mut remote.part.out, row0, host)?;
            host.clear();
            DType::F32.decode(&part.lse[at * heads * 4..][..n * heads * 4], host);
            shared.device.write(&mut remote.part.lse, row0, host)?;
            for (i, count) in part.count[at * 4..][..n * 4].chunks_exact(4).enumerate() {
                let count = u32::from_le_bytes([count[0], count[1], count[2], count[3]]);
                if count > SEQUENCE_TOKENS_MAX {
                    return Err(PassError::Part { creditor: ship.creditor, layer: self.layer });
                }
                remote.part.count[row0 + i] = count;
            }
            at += n;
        }
        shared.device.merge(&mut micro_batch.attention, &remote.part, geometry)?;
        Ok(())
    }

    /// Output projection and feed-forward, after the proof that every row saw its visible range exactly once.
    fn finish_layer<D: Device>(&mut self, shared: &mut Shared<'_, D>) -> Result<(), PassError> {
        let (layer, rows) = (self.layer as usize, self.rows());
        let (window, is_pooled) = (shared.attention.windows[layer], self.is_pooled(shared));
        let Forward { model, micro_batches, .. } = &mut *shared.forward;
        let activations = &mut micro_batches[self.work.micro_batch.index()];
        for seq in &self.work.seqs {
            for (pos, row) in (seq.pos0..).zip(seq.row0..seq.row0 + seq.rows) {
                let from = if is_pooled { 0 } else { seq.ring.map_or(0, |ring| ring.from) };
                let (row, expected) = (row as usize, visible_len(pos, window).min(pos + 1 - from));
                let seen = activations.attention.count[row];
                if seen != expected {
                    return Err(PassError::Coverage { layer: self.layer, row, pos, seen: seen.into(), expected });
                }
            }
        }
        Decoder::new(model).finish(shared.device, layer, rows, activations)?;
        if let (KvPlace::Windowed(index), Some(rings)) = (model.spec.kv_place(layer), &mut shared.rings) {
            rings.copy_windows(shared.device, shared.kv, (index, false), &self.work.seqs)?;
        }
        self.layer += 1;
        self.pooled += u32::from(is_pooled);
        Ok(())
    }

    /// The rows that are sampled in this step: of each sequence the last one before its drafts, and these. Each with the number
    /// of tokens that the sequence has generated before it.
    fn wanted(&self) -> impl Iterator<Item = Wanted<'_>> {
        self.work.seqs.iter().filter_map(|seq| Some((seq, seq.sample.as_ref()?))).flat_map(|(seq, spec)| {
            let rows = seq.row0 + seq.rows - 1 - seq.drafts..seq.row0 + seq.rows;
            rows.zip(spec.index..).map(move |(row, index)| Wanted { seq: seq.seq, row, spec, index })
        })
    }

    /// The device's sampling, if it has it and no sequence needs logits on the host.
    fn drawer<'a, D: Device>(
        &self,
        device: &'a mut D,
    ) -> Option<&'a mut (impl Sampling<Tensor = D::Tensor> + ?Sized + use<'a, D>)> {
        let is_plain =
            |spec: &SampleSpec| spec.params.fits_device_sampling() && !spec.return_logits && spec.banned.is_empty();
        if self.wanted().all(|wanted| is_plain(wanted.spec)) { device.sampling() } else { None }
    }

    /// Reports what was computed of prompts' rows.
    fn report_prompts(&mut self, reports: &mut dyn FnMut(Report)) {
        let (step, scores, sums) = (self.work.step, self.scores.take(), self.hidden.take());
        if !(scores.is_empty() && sums.is_empty()) {
            reports(Report::Prompts { step, scores, sums });
        }
    }

    /// Queues the logits of prompts' rows that are scored, in parts, then the hidden states that are added up, then the logits of
    /// the sampled rows, and the device's draws if it samples.
    fn head<D: Device>(&mut self, shared: &mut Shared<'_, D>) -> Result<Progress, PassError> {
        let micro_batch = self.work.micro_batch.index();
        if self.scores.queue(shared, micro_batch)? || self.hidden.queue(shared, micro_batch)? {
            self.phase = Phase::Reduce;
            return Ok(Progress::Advanced);
        }
        let Forward { model, micro_batches, draws, grammars, .. } = &mut *shared.forward;
        // While the device computes the layers.
        if !self.constrained.ask(&self.work, grammars.as_ref()) {
            return Ok(Progress::Queued(COMPILE_POLL));
        }
        let micro_batch = &mut micro_batches[self.work.micro_batch.index()];
        let last: Vec<u32> = self.wanted().map(|wanted| wanted.row).collect();
        let device = &mut *shared.device;
        if last.is_empty() {
            queue::mark(device, self.micro_batch())?;
        } else {
            Decoder::new(model).logits(device, &last, micro_batch)?;
            if let Some(sampler) = self.drawer(device) {
                let Draws { rows, masks, .. } = draws;
                rows.clear();
                masks.clear();
                for (at, Wanted { spec, index, .. }) in self.wanted().enumerate() {
                    let row = Sampler::row(&spec.params, index).map_err(sampling)?;
                    rows.push(SampleRow { mask: self.constrained.mask(at, model.spec.vocab, masks), ..row });
                }
                sampler.sample_ahead(self.micro_batch(), &mut micro_batch.logits, rows, masks)?;
            } else {
                queue::read_ahead(device, self.micro_batch(), &micro_batch.logits, 0..last.len(), 0..model.spec.vocab)?;
            }
        }
        self.phase = Phase::Sample;
        Ok(Progress::Advanced)
    }

    /// Samples the tokens.
    fn sample<D: Device>(&mut self, shared: &mut Shared<'_, D>) -> Result<Progress, PassError> {
        let Forward { model, micro_batches, sampler, host, draws, .. } = &mut *shared.forward;
        let vocab = model.spec.vocab;
        let rows = self.wanted().count();
        if rows == 0 {
            shared.device.sync()?;
            return Ok(Progress::Done(Vec::new()));
        }
        let mut constrained = std::mem::take(&mut self.constrained);
        let mut samples = Vec::with_capacity(rows);
        if let Some(device) = self.drawer(shared.device) {
            draws.drawn.clear();
            device.sampled(self.micro_batch(), &mut draws.drawn)?;
            for (at, (wanted, drawn)) in self.wanted().zip(&draws.drawn).enumerate() {
                samples.push(self.outcome((&mut constrained, at), &wanted, None, |mask| {
                    Ok(Sampled { id: Sampler::drawn(*drawn, mask.is_some())?, logprobs: None })
                })?);
            }
            return Ok(Progress::Done(samples));
        }
        host.clear();
        queue::read_staged(
            shared.device,
            self.micro_batch(),
            &micro_batches[self.micro_batch()].logits,
            0..rows,
            0..vocab,
            host,
        )?;
        for (at, (wanted, logits)) in self.wanted().zip(host.chunks_exact(vocab)).enumerate() {
            let SampleSpec { params, banned, token_counts, .. } = wanted.spec;
            let rules = (&banned[..], token_counts.as_deref());
            samples.push(self.outcome((&mut constrained, at), &wanted, Some(logits), |mask| {
                sampler.sample_masked(logits, params, wanted.index, rules, mask)
            })?);
        }
        Ok(Progress::Done(samples))
    }

    /// What comes of the `at`-th sampled row, of whose tokens `draw` draws one.
    fn outcome(
        &self,
        (constrained, at): (&mut Constrained, usize),
        &Wanted { seq, row, spec, index }: &Wanted<'_>,
        logits: Option<&[f32]>,
        draw: impl FnOnce(Option<&[u32]>) -> Result<Sampled, SampleError>,
    ) -> Result<SampleOut, PassError> {
        let logits = logits.filter(|_| spec.return_logits).map(<[f32]>::to_vec);
        let mut out = SampleOut { seq, logits, ..SampleOut::default() };
        let next = constrained.row(at);
        match next {
            Next::Nothing => return Ok(SampleOut { has_ended: true, ..out }),
            Next::Failed(why) => return Ok(SampleOut { failure: Some(why.clone()), ..out }),
            Next::Any | Next::Of(_) => {}
        }
        match draw(next.mask()) {
            Err(SampleError::Excluded) => {}
            drawn => {
                let Sampled { id, logprobs } = drawn.map_err(sampling)?;
                let own = (self.work.tokens[row as usize], index > spec.index);
                out.has_ended = constrained.drew(seq, spec, own, id);
                (out.token, out.logprobs) = (Some(id), logprobs);
            }
        }
        Ok(out)
    }
}

fn sampling(error: SampleError) -> PassError {
    PassError::Sampling(error.to_string())
}

/// The slots that a step writes, as ranges.
fn local_slots(slots: &[u32]) -> Vec<Range<u32>> {
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for slot in slots.iter().copied().filter(|slot| *slot != u32::MAX) {
        match ranges.last_mut() {
            Some(last) if last.end == slot => last.end += 1,
            _ => ranges.push(slot..slot + 1),
        }
    }
    ranges
}

/// The rows whose KV goes to a creditor, as runs in the scratch store (row `r` is slot `r`). All sequences are listed, so
/// the attention over them writes a count for every row.
fn scratch_runs(work: &StepWork) -> (Vec<AttnRows>, Vec<KvRun>) {
    if work.remote.writes.is_empty() {
        return (Vec::new(), Vec::new());
    }
    let (mut seqs, mut runs) = (Vec::with_capacity(work.seqs.len()), Vec::<KvRun>::new());
    for seq in &work.seqs {
        let run0 = runs.len();
        for (row, pos) in (seq.row0..seq.row0 + seq.rows).zip(seq.pos0..) {
            if work.slots[row as usize] != u32::MAX || seq.ring.is_some_and(|ring| ring.warm_up) {
                continue;
            }
            match runs[run0..].last_mut() {
                Some(run) if run.base + run.len == row => run.len += 1,
                _ => runs.push(KvRun { base: row, len: 1, first_pos: pos }),
            }
        }
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        seqs.push(AttnRows {
            row0: seq.row0,
            rows: seq.rows,
            pos0: seq.pos0,
            run0: count(run0),
            runs: count(runs.len() - run0),
        });
    }
    (seqs, runs)
}
