//! Staging: copies KV between a store that only the device can access and a staging buffer that transports read and
//! fill, in host arenas or a shared device region.

use crate::memory::{KvArena, hold};
use crate::work::{Report, StageWork};
use lagoon_backend::{Device, DeviceError, KvPiece, RegionId, SharedRegions};
use std::collections::VecDeque;

/// Bytes that one turn copies at most (at least one token's): the delay that peers and passes may see.
const TURN_BYTES: usize = 1 << 20;

/// A staging buffer beside the store.
#[derive(Debug)]
pub(crate) enum Beside {
    /// Of the host, one arena a layer.
    Arenas(Vec<KvArena>),
    /// A shared device region, layers of `layer_bytes` bytes one after the other.
    Region { id: RegionId, layer_bytes: usize },
}

/// The staging buffer, and queued copies.
#[derive(Debug)]
pub(crate) struct Stages {
    beside: Beside,
    token_bytes: usize,
    queue: VecDeque<Under>,
    /// Copies of one turn: pieces in the store, their places in the staging buffer, and their bytes.
    pieces: Vec<KvPiece>,
    places: Vec<usize>,
    bytes: Vec<u8>,
}

/// A copy in progress: its layer, piece, and tokens of the piece done.
#[derive(Debug)]
struct Under {
    work: StageWork,
    layer: u32,
    piece: usize,
    done: u32,
}

impl Under {
    /// The next copy: layer, first slot in the store, first one in the staging buffer, tokens.
    fn next(&mut self, tokens_max: u32) -> Option<(u32, u32, u32, u32)> {
        if self.piece == self.work.pieces.len() {
            (self.layer, self.piece) = (self.layer + 1, 0);
        }
        let &(slot, beside, tokens) = self.work.pieces.get(self.piece).filter(|_| self.layer < self.work.layers.end)?;
        let (at, n) = (self.done, (tokens - self.done).min(tokens_max));
        self.done += n;
        if self.done == tokens {
            (self.piece, self.done) = (self.piece + 1, 0);
        }
        Some((self.layer, slot + at, beside + at, n))
    }
}

impl Stages {
    pub(crate) fn new(beside: Beside, token_bytes: usize) -> Self {
        Self { beside, token_bytes, queue: VecDeque::new(), pieces: Vec::new(), places: Vec::new(), bytes: Vec::new() }
    }

    pub(crate) fn push(&mut self, work: StageWork) {
        let layer = work.layers.start;
        self.queue.push_back(Under { work, layer, piece: 0, done: 0 });
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Copies the next piece. False if there is none.
    pub(crate) fn turn<D: Device>(&mut self, device: &mut D, kv: &mut D::Kv, reports: &mut dyn FnMut(Report)) -> bool {
        let Some(mut under) = self.queue.pop_front() else { return false };
        match self.copy(device, kv, &mut under) {
            Ok(true) => self.queue.push_front(under),
            Ok(false) => reports(Report::Staged { stage: under.work.stage, error: None }),
            Err(error) => reports(Report::Staged { stage: under.work.stage, error: Some(error) }),
        }
        true
    }

    /// Copies one turn's bytes. False if nothing was left.
    fn copy<D: Device>(&mut self, device: &mut D, kv: &mut D::Kv, under: &mut Under) -> Result<bool, DeviceError> {
        let tokens_max = u32::try_from((TURN_BYTES / self.token_bytes).max(1)).unwrap_or(u32::MAX);
        let begins = (under.layer, under.piece, under.done) == (under.work.layers.start, 0, 0);
        if under.work.inward && begins {
            let slots: Vec<_> = under.work.pieces.iter().map(|(slot, _, tokens)| *slot..slot + tokens).collect();
            hold(device, kv, &slots)?;
        }
        match &self.beside {
            Beside::Region { id, layer_bytes } => {
                let Some((layer, slot, beside, tokens)) = under.next(tokens_max) else { return Ok(false) };
                let at = beside as usize * self.token_bytes;
                let (piece, at) = ([KvPiece { layer, slot0: slot, tokens }], layer as usize * layer_bytes + at);
                let regions = device.shared_regions().ok_or_else(no_regions)?;
                match under.work.inward {
                    true => regions.kv_from_region(kv, &piece, *id, at)?,
                    false => regions.kv_to_region(kv, &piece, *id, at)?,
                }
            }
            Beside::Arenas(arenas) => {
                // Gathers many small pieces into one copy, because the device may have to be waited for.
                self.pieces.clear();
                self.places.clear();
                let mut left = tokens_max;
                while let Some((layer, slot0, beside, tokens)) = (left > 0).then(|| under.next(left)).flatten() {
                    self.pieces.push(KvPiece { layer, slot0, tokens });
                    self.places.push(beside as usize * self.token_bytes);
                    left -= tokens;
                }
                if self.pieces.is_empty() {
                    return Ok(false);
                }
                self.bytes.clear();
                if !under.work.inward {
                    device.kv_read_pieces(kv, &self.pieces, &mut self.bytes)?;
                }
                let mut at = 0;
                for (piece, place) in self.pieces.iter().zip(&self.places) {
                    let (arena, n) = (&arenas[piece.layer as usize], piece.tokens as usize * self.token_bytes);
                    if under.work.inward {
                        self.bytes.clear();
                        load(arena, *place, n, &mut self.bytes)?;
                        device.kv_write(kv, piece.layer as usize, piece.slot0, &self.bytes)?;
                    } else {
                        store(arena, *place, &self.bytes[at..at + n])?;
                        at += n;
                    }
                }
            }
        }
        Ok(true)
    }
}

fn no_regions() -> DeviceError {
    DeviceError::Unsupported("it has no shared regions".to_owned())
}

#[cfg(target_os = "linux")]
fn in_use(error: lagoon_backend::ArenaError) -> DeviceError {
    DeviceError::Unsupported(format!("staging KV: {error}"))
}

#[cfg(target_os = "linux")]
fn load(arena: &KvArena, at: usize, bytes: usize, out: &mut Vec<u8>) -> Result<(), DeviceError> {
    arena.view(at as u64, bytes, &mut |part| out.extend_from_slice(part)).map_err(in_use)
}

#[cfg(target_os = "linux")]
fn store(arena: &KvArena, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
    arena.fill(at as u64, bytes.len(), &mut |target| target.copy_from_slice(bytes)).map_err(in_use)
}

#[cfg(not(target_os = "linux"))]
fn load(arena: &KvArena, _at: usize, _bytes: usize, _out: &mut Vec<u8>) -> Result<(), DeviceError> {
    match *arena {}
}

#[cfg(not(target_os = "linux"))]
fn store(arena: &KvArena, _at: usize, _bytes: &[u8]) -> Result<(), DeviceError> {
    match *arena {}
}
