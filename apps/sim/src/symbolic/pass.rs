//! One forward pass on the symbolic device, in the pieces and the order of the shipped one.

use super::device::{Slot, Symbolic};
use super::model::{KEY_BYTES, Key, LAYERS, RING_LAYER, ROW_BYTES, embed, next_hidden, token_of};
use super::remote_request::{Attended, attend};
use bytes::Bytes;
use lagoon_runner::{PassError, RemotePart, Report, SampleOut, SavedWindow, SeqRows, ShipSegment, StepWork};
use lagoon_types::run::visible_len;
use lagoon_types::{KvRun, MicroBatch, RingRows, SeqId, StepId};

#[derive(Debug)]
pub(super) enum Progress {
    Advanced,
    /// Waits for a creditor's reply.
    Waiting,
    Done(Vec<SampleOut>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Project,
    Attend,
    Await,
}

/// A step in flight.
#[derive(Debug)]
pub(super) struct Pass {
    work: StepWork,
    layer: u32,
    phase: Phase,
    /// Position of each row.
    positions: Vec<u32>,
    /// Hidden value of each row.
    hidden: Vec<u64>,
    /// Keys of each row in this layer; rows whose KV is remote are attended to from here.
    keys: Vec<Key>,
    attended: Vec<Attended>,
    parts: Vec<Option<RemotePart>>,
    fetched: [Vec<Option<Bytes>>; 2],
    fetches_done: usize,
    /// Number of wrong keys attended to: not those of their positions.
    pub(super) wrong_keys: u64,
}

impl Pass {
    pub(super) fn new(work: StepWork) -> Self {
        let positions: Vec<u32> = work.seqs.iter().flat_map(|s| s.pos0..s.pos0 + s.rows).collect();
        assert_eq!(positions.len(), work.tokens.len(), "sequences cover the rows");
        let hidden = work.tokens.iter().zip(&positions).map(|(token, pos)| embed(*token, *pos)).collect();
        let fetches = work.remote.fetches.len();
        Self {
            keys: vec![Key::default(); positions.len()],
            attended: vec![Attended::default(); positions.len()],
            parts: vec![None; work.remote.ships.len()],
            fetched: [vec![None; fetches], vec![None; fetches]],
            fetches_done: 0,
            layer: 0,
            phase: Phase::Project,
            positions,
            hidden,
            wrong_keys: 0,
            work,
        }
    }

    pub(super) fn step(&self) -> StepId {
        self.work.step
    }

    pub(super) fn rows(&self) -> u64 {
        self.positions.len() as u64
    }

    pub(super) fn on_part(&mut self, layer: u32, part: RemotePart) {
        if layer == self.layer
            && let Some(at) = self.work.remote.ships.iter().position(|s| s.creditor == part.creditor)
        {
            self.parts[at] = Some(part);
        }
    }

    pub(super) fn on_fetched(&mut self, layer: u32, index: usize, kv: Bytes) {
        if let Some(ahead) = layer.checked_sub(self.layer)
            && let Some(slot) = self.fetched.get_mut(ahead as usize).and_then(|f| f.get_mut(index))
        {
            *slot = Some(kv);
        }
    }

    /// Does a piece of work; adds its number of keys to `keys`.
    pub(super) fn advance(
        &mut self,
        device: &mut Symbolic,
        keys: &mut u64,
        reports: &mut Vec<Report>,
    ) -> Result<Progress, PassError> {
        match self.phase {
            Phase::Project if self.layer == LAYERS => Ok(Progress::Done(self.samples())),
            Phase::Project => {
                self.ring_layer(device, keys);
                self.project(device);
                if self.work.watched && self.layer + 1 < LAYERS {
                    reports.push(Report::Layer { step: self.work.step, layer: self.layer });
                }
                if self.work.micro_batch == MicroBatch::Remote {
                    self.hand_out(reports);
                    if self.work.announced {
                        reports.push(Report::Appended { step: self.work.step, layer: self.layer });
                    }
                    self.phase = Phase::Attend;
                } else {
                    self.attend_local(device, keys);
                    self.finish_layer(device)?;
                }
                Ok(Progress::Advanced)
            }
            Phase::Attend => {
                self.attend_local(device, keys);
                self.phase = Phase::Await;
                Ok(Progress::Advanced)
            }
            Phase::Await => self.collect(device, keys),
        }
    }

    /// The layer with rings before this layer, if there are such: nothing of it leaves the device.
    fn ring_layer(&mut self, device: &mut Symbolic, keys: &mut u64) {
        let (layer, window) = (RING_LAYER + self.layer, device.windows.rings);
        if window.is_none() {
            return;
        }
        let (at, slots) = (self.layer as usize, device.ring_slots);
        for seq in &self.work.seqs {
            let RingRows { ring, from, .. } = seq.ring.expect("every sequence has a ring");
            let ring = ring as usize;
            if device.rings.len() <= ring {
                device.rings.resize(ring + 1, vec![Slot::default(); slots as usize]);
            }
            let saved = |window: &SavedWindow| {
                let stored = window.pieces.iter().flat_map(|(slot, n)| *slot..slot + n);
                window.positions.clone().zip(stored).collect::<Vec<_>>()
            };
            let saved = seq.window.as_ref().map(saved).unwrap_or_default();
            let loads = seq.ring.is_some_and(|ring| ring.load);
            for (pos, slot) in saved.iter().filter(|_| loads) {
                device.rings[ring][(pos % slots) as usize][at] = device.store[*slot as usize][at];
            }
            for row in rows_of(seq) {
                let pos = self.positions[row as usize];
                device.rings[ring][(pos % slots) as usize][at] = Key::of(self.hidden[row as usize], layer, pos);
            }
            for row in rows_of(seq) {
                let pos = self.positions[row as usize];
                let expected = visible_len(pos, window).min(pos + 1 - from);
                let mut attended = Attended::default();
                for seen in pos + 1 - expected..=pos {
                    attended.add(device.rings[ring][(seen % slots) as usize][at], layer, seen);
                }
                *keys += u64::from(expected);
                self.wrong_keys += attended.wrong;
                self.hidden[row as usize] = next_hidden(self.hidden[row as usize], attended.sum);
            }
            for (pos, slot) in saved.iter().filter(|_| !loads) {
                device.store[*slot as usize][at] = device.rings[ring][(pos % slots) as usize][at];
            }
        }
    }

    /// Computes and stores this layer's keys.
    fn project(&mut self, device: &mut Symbolic) {
        for (row, slot) in self.work.slots.iter().enumerate() {
            let key = Key::of(self.hidden[row], self.layer, self.positions[row]);
            self.keys[row] = key;
            if *slot != u32::MAX {
                device.store[*slot as usize][self.layer as usize] = key;
            }
        }
    }

    fn hand_out(&self, reports: &mut Vec<Report>) {
        let frames = self.work.remote.ships.iter().map(|ship| {
            let mut bytes = Vec::with_capacity(ship.rows() as usize * ROW_BYTES);
            for row in ship.segments.iter().flat_map(ShipSegment::range) {
                bytes.extend_from_slice(&self.hidden[row as usize].to_le_bytes());
                bytes.extend_from_slice(&u64::from(self.positions[row as usize]).to_le_bytes());
            }
            (ship.creditor, ship.rows(), Bytes::from(bytes))
        });
        reports.push(Report::Queries { step: self.work.step, layer: self.layer, frames: frames.collect() });
        if !self.work.remote.writes.is_empty() {
            let kv = self.work.remote.writes.iter().map(|write| {
                let mut bytes = Vec::with_capacity(write.rows as usize * KEY_BYTES);
                let rows = &self.keys[write.row0 as usize..(write.row0 + write.rows) as usize];
                rows.iter().for_each(|key| key.to_bytes(&mut bytes));
                Bytes::from(bytes)
            });
            reports.push(Report::Written { step: self.work.step, layer: self.layer, kv: kv.collect() });
        }
    }

    /// Attention over local keys: runs in the store, and rows of this step whose KV is remote.
    fn attend_local(&mut self, device: &Symbolic, keys: &mut u64) {
        for seq in &self.work.seqs {
            let runs = &self.work.runs[seq.run0 as usize..(seq.run0 + seq.runs) as usize];
            let elsewhere: Vec<KvRun> = rows_of(seq)
                .filter(|row| self.work.slots[*row as usize] == u32::MAX && !seq.ring.is_some_and(|ring| ring.warm_up))
                .map(|row| KvRun { base: row, len: 1, first_pos: self.positions[row as usize] })
                .collect();
            for row in rows_of(seq) {
                let pos = self.positions[row as usize];
                let stored = |slot: u32| device.store[slot as usize][self.layer as usize];
                let mut attended = attend(runs, pos, device.windows.pooled, self.layer, stored);
                let scratch = |row: u32| self.keys[row as usize];
                attended.merge(attend(&elsewhere, pos, device.windows.pooled, self.layer, scratch));
                *keys += u64::from(attended.count);
                self.attended[row as usize] = attended;
            }
        }
    }

    fn collect(&mut self, device: &Symbolic, keys: &mut u64) -> Result<Progress, PassError> {
        if let Some(kv) = self.fetched[0].get_mut(self.fetches_done).and_then(Option::take) {
            self.attend_fetched(device, &kv, keys)?;
            self.fetches_done += 1;
            return Ok(Progress::Advanced);
        }
        if self.fetches_done < self.work.remote.fetches.len() || self.parts.iter().any(Option::is_none) {
            return Ok(Progress::Waiting);
        }
        for at in 0..self.parts.len() {
            if let Some(part) = self.parts[at].take() {
                self.merge_part(at, &part)?;
            }
        }
        self.finish_layer(device)?;
        self.fetched.swap(0, 1);
        self.fetched[1].iter_mut().for_each(|f| *f = None);
        self.fetches_done = 0;
        self.phase = Phase::Project;
        Ok(Progress::Advanced)
    }

    fn attend_fetched(&mut self, device: &Symbolic, kv: &[u8], keys: &mut u64) -> Result<(), PassError> {
        let fetch = self.work.remote.fetches[self.fetches_done];
        if kv.len() != fetch.run.len as usize * KEY_BYTES {
            return Err(PassError::Part { creditor: fetch.creditor, layer: self.layer });
        }
        let fetched: Vec<Key> = kv.chunks_exact(KEY_BYTES).map(Key::from_bytes).collect();
        let run = KvRun { base: 0, len: fetch.run.len, first_pos: fetch.run.first_pos };
        for row in rows_of(&self.work.seqs[fetch.seq_index as usize]) {
            let pos = self.positions[row as usize];
            let attended = attend(&[run], pos, device.windows.pooled, self.layer, |slot| fetched[slot as usize]);
            *keys += u64::from(attended.count);
            self.attended[row as usize].merge(attended);
        }
        Ok(())
    }

    fn merge_part(&mut self, at: usize, part: &RemotePart) -> Result<(), PassError> {
        let ship = &self.work.remote.ships[at];
        let rows = ship.rows() as usize;
        if (part.out.len(), part.lse.len(), part.count.len()) != (rows * ROW_BYTES, rows * 4, rows * 4) {
            return Err(PassError::Part { creditor: ship.creditor, layer: self.layer });
        }
        let all = ship.segments.iter().flat_map(ShipSegment::range);
        for (at, row) in all.enumerate() {
            self.attended[row as usize].merge(Attended::of_part(part, at));
        }
        Ok(())
    }

    /// The next layer's values, after the proof that every row saw its visible range exactly once.
    fn finish_layer(&mut self, device: &Symbolic) -> Result<(), PassError> {
        for (row, attended) in self.attended.iter().enumerate() {
            let (pos, layer) = (self.positions[row], self.layer);
            let expected = visible_len(pos, device.windows.pooled);
            if attended.count != expected {
                return Err(PassError::Coverage { layer, row, pos, seen: attended.count.into(), expected });
            }
            self.wrong_keys += attended.wrong;
            self.hidden[row] = next_hidden(self.hidden[row], attended.sum);
        }
        self.layer += 1;
        Ok(())
    }

    fn samples(&self) -> Vec<SampleOut> {
        let wanted = self.work.seqs.iter().filter(|s| s.sample.is_some());
        let rows = wanted.flat_map(|s| rows_of(s).skip((s.rows - 1 - s.drafts) as usize).map(|row| (s.seq, row)));
        let sample = |(seq, row): (SeqId, u32)| SampleOut {
            seq,
            token: Some(token_of(self.hidden[row as usize])),
            ..SampleOut::default()
        };
        rows.map(sample).collect()
    }
}

fn rows_of(seq: &SeqRows) -> std::ops::Range<u32> {
    seq.row0..seq.row0 + seq.rows
}
