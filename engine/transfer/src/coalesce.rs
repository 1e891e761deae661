//! Transaction queue: reads in order, coalesced where they are contiguous in both memories (KVDirect §4.2).
//!
//! Requests that are posted together take turns piece by piece; each request's COMPLETE follows its last read.
//! [`Queue::pop`] takes reads in order up to the next COMPLETE (contiguous pieces of one request as one read), and
//! [`coalesce`] merges reads whose remote and local ranges are both contiguous, also of different requests. Invariants:
//!
//! * no read of a request is in an earlier transaction than a preceding read of that request;
//! * there are at most as many transactions as reads, and none is longer than the limit, unless a single piece is;
//! * a COMPLETE is a marker that ends a batch; the reader sends it when all reads of its request are verified.

use crate::pull::{Local, Pull, Remote};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// Ranges of the writer's memory: one (without allocation) or many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ranges {
    One(Remote),
    Many(Vec<Remote>),
}

impl std::ops::Deref for Ranges {
    type Target = [Remote];

    fn deref(&self) -> &[Remote] {
        match self {
            Self::One(range) => std::slice::from_ref(range),
            Self::Many(ranges) => ranges,
        }
    }
}

/// Size limits of reads, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct ReadSizes {
    /// Limit of one piece; a longer one is split.
    pub bytes: u64,
    /// Limit of a plain piece ([`Read::plain`]).
    pub plain: u64,
    /// Limit of several plain pieces that are contiguous on both sides and planned as one read.
    pub run: u64,
}

/// Size of one [`Queue::pop`]: until it has both `bytes` and `reads`, but at most about `bytes_max` bytes.
#[derive(Clone, Copy, Debug)]
pub struct Portion {
    pub bytes: u64,
    pub reads: usize,
    pub bytes_max: u64,
}

impl Portion {
    /// All reads up to the next COMPLETE.
    pub const ALL: Self = Self { bytes: u64::MAX, reads: usize::MAX, bytes_max: u64::MAX };
}

/// Read of one piece, of a part of it, or of several plain pieces that are contiguous on both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    pub request: u64,
    pub export: u64,
    pub piece: usize,
    /// Number of consecutive pieces from `piece` on, all of the same size; 1 unless they are plain.
    pub pieces: usize,
    /// One range, or (staged) all ranges of a piece.
    pub remote: Ranges,
    /// Destination; `None`: a buffer.
    pub local: Option<Local>,
    /// Whether the read is whole pieces in canonical order, which are checked while they are copied.
    pub plain: bool,
}

impl Read {
    fn bytes(&self) -> u64 {
        self.remote.iter().map(|range| range.bytes).sum()
    }
}

/// Segment of a transaction: a byte range of one export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub export: u64,
    pub remote: Remote,
}

/// Part of a transaction: bytes of consecutive pieces of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub request: u64,
    pub piece: usize,
    /// As in [`Read`].
    pub pieces: usize,
    /// First byte in the transaction.
    pub at: u64,
    pub bytes: u64,
    /// As in [`Read`].
    pub plain: bool,
}

/// Read transaction: segments of the writer's memory, concatenated, to one place or into a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    pub segments: Vec<Segment>,
    pub bytes: u64,
    /// Destination; `None`: a buffer.
    pub local: Option<Local>,
    /// In ascending order, covering all bytes.
    pub parts: Vec<Part>,
}

impl Transaction {
    fn new(read: &Read) -> Self {
        let mut transaction = Self { segments: Vec::new(), bytes: 0, local: read.local, parts: Vec::new() };
        transaction.push(read);
        transaction
    }

    fn push(&mut self, read: &Read) {
        let bytes = read.bytes();
        let Read { request, piece, pieces, plain, .. } = *read;
        self.parts.push(Part { request, piece, pieces, at: self.bytes, bytes, plain });
        for range in &*read.remote {
            match self.segments.last_mut() {
                Some(last) if last.export == read.export && follows(&last.remote, range) => {
                    last.remote.bytes += range.bytes;
                }
                _ => self.segments.push(Segment { export: read.export, remote: *range }),
            }
        }
        self.bytes += bytes;
    }

    /// Number of contiguous ranges of the writer's memory, each one RDMA read.
    #[must_use]
    pub fn ranges(&self) -> usize {
        let joints = self.segments.windows(2).filter(|pair| follows(&pair[0].remote, &pair[1].remote)).count();
        self.segments.len() - joints
    }

    /// The transaction without a request's bytes: one transaction per stretch of other requests' parts.
    #[must_use]
    pub fn without(&self, request: u64) -> Vec<Self> {
        let mut out: Vec<Self> = Vec::new();
        let mut open = false;
        for part in &self.parts {
            if part.request == request {
                open = false;
                continue;
            }
            let local = self.local.map(|local| Local { region: local.region, offset: local.offset + part.at });
            let (export, remote) = self.cut(part.at, part.bytes);
            let Part { request, piece, pieces, plain, .. } = *part;
            let read = Read { request, export, piece, pieces, remote: Ranges::Many(remote), local, plain };
            match out.last_mut() {
                Some(last) if open => last.push(&read),
                _ => out.push(Self::new(&read)),
            }
            open = true;
        }
        out
    }

    /// The export and ranges of bytes that belong to one part.
    fn cut(&self, at: u64, bytes: u64) -> (u64, Vec<Remote>) {
        let (mut start, mut export, mut out) = (0, 0, Vec::new());
        for segment in &self.segments {
            let from = at.max(start);
            let to = (at + bytes).min(start + segment.remote.bytes);
            if from < to {
                export = segment.export;
                let Remote { region, offset, .. } = segment.remote;
                out.push(Remote { region, offset: offset + (from - start), bytes: to - from });
            }
            start += segment.remote.bytes;
        }
        (export, out)
    }
}

fn follows(before: &Remote, after: &Remote) -> bool {
    before.region == after.region && before.offset + before.bytes == after.offset
}

/// Limits of one transaction.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub bytes: u64,
    pub segments: usize,
}

/// Start or end of a read: region and offset of the writer, region and offset of the reader.
type Place = (u32, u64, u32, u64);

impl Read {
    /// Start and end in both memories; `None` for a read into a buffer.
    fn places(&self) -> Option<(Place, Place)> {
        let (local, first, last) = (self.local?, self.remote.first()?, self.remote.last()?);
        let begin = (first.region, first.offset, local.region, local.offset);
        Some((begin, (last.region, last.offset + last.bytes, local.region, local.offset + self.bytes())))
    }
}

/// The transaction of the last read: most reads continue it without a map lookup.
struct Open {
    at: usize,
    end: Place,
    request: u64,
}

/// Coalesces reads, which are in order, into transactions. See the module's invariants.
#[must_use]
pub fn coalesce(reads: &[Read], bounds: Bounds) -> Vec<Transaction> {
    let mut out: Vec<Transaction> = Vec::new();
    // Ends in both memories of transactions that may continue, and the last transaction of each request.
    let mut ends: BTreeMap<Place, usize> = BTreeMap::new();
    let mut last: BTreeMap<u64, usize> = BTreeMap::new();
    let mut buffer: Option<usize> = None;
    let mut open: Option<Open> = None;
    for read in reads.iter().filter(|read| !read.remote.is_empty()) {
        let places = read.places();
        if let (Some(open), Some((begin, end))) = (&mut open, places) {
            let transaction = &mut out[open.at];
            let goes_on = open.end == begin && open.request == read.request;
            if goes_on
                && transaction.bytes + read.bytes() <= bounds.bytes
                && transaction.segments.len() + read.remote.len() <= bounds.segments
            {
                transaction.push(read);
                open.end = end;
                continue;
            }
        }
        if let Some(closed) = open.take() {
            ends.insert(closed.end, closed.at);
            last.insert(closed.request, closed.at);
        }
        let candidate = match &places {
            // The transaction has another end afterwards, or is closed.
            Some((begin, _)) => ends.remove(begin),
            None => buffer,
        };
        let fits = |at: &usize| {
            let transaction = &out[*at];
            transaction.bytes + read.bytes() <= bounds.bytes
                && transaction.segments.len() + read.remote.len() <= bounds.segments
                && last.get(&read.request).is_none_or(|last| last <= at)
        };
        let at = candidate.filter(fits);
        let at = match at {
            Some(at) => {
                out[at].push(read);
                at
            }
            None => {
                out.push(Transaction::new(read));
                out.len() - 1
            }
        };
        last.insert(read.request, at);
        match places {
            Some((_, end)) => open = Some(Open { at, end, request: read.request }),
            None => buffer = Some(at),
        }
    }
    out
}

/// Position of a request in the queue: its pieces still to read.
#[derive(Debug)]
struct Cursor {
    request: u64,
    export: u64,
    pull: Arc<Pull>,
    /// Pieces to read, if not all.
    only: Option<VecDeque<usize>>,
    next: usize,
}

impl Cursor {
    fn next_piece(&mut self) -> Option<usize> {
        if let Some(only) = &mut self.only {
            return only.pop_front();
        }
        (self.next < self.pull.pieces()).then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// A read of contiguous pieces from the next one on, of up to `bytes` bytes, if there are several.
    fn next_run(&mut self, bytes: u64) -> Option<Read> {
        if self.only.is_some() || self.next >= self.pull.pieces() {
            return None;
        }
        let (remote, local, pieces) = self.pull.plain_run(self.next, bytes)?;
        let (piece, request, export) = (self.next, self.request, self.export);
        self.next += pieces;
        Some(Read { request, export, piece, pieces, remote: Ranges::One(remote), local: Some(local), plain: true })
    }

    fn is_empty(&self) -> bool {
        self.only.as_ref().map_or(self.next >= self.pull.pieces(), VecDeque::is_empty)
    }
}

/// Request to post to the queue.
#[derive(Clone, Debug)]
pub struct Post {
    pub request: u64,
    pub export: u64,
    pub pull: Arc<Pull>,
    /// The pieces to read; all if `None`.
    pub only: Option<Vec<usize>>,
}

/// Result of [`Queue::pop`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub reads: Vec<Read>,
    /// The request whose COMPLETE ended the batch.
    pub complete: Option<u64>,
}

/// Transaction queue of one connection.
#[derive(Debug, Default)]
pub struct Queue {
    /// Groups of requests that were posted together and take turns.
    groups: VecDeque<VecDeque<Cursor>>,
}

impl Queue {
    /// Posts a group of requests that take turns.
    pub fn post(&mut self, requests: Vec<Post>) {
        let cursor = |Post { request, export, pull, only }| Cursor {
            request,
            export,
            pull,
            only: only.map(VecDeque::from),
            next: 0,
        };
        let group: VecDeque<Cursor> = requests.into_iter().map(cursor).collect();
        if !group.is_empty() {
            self.groups.push_back(group);
        }
    }

    /// Whether it reads nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Number of requests in the first group.
    #[must_use]
    pub fn turns(&self) -> usize {
        self.groups.front().map_or(0, VecDeque::len)
    }

    /// Removes a request's remaining reads.
    pub fn remove(&mut self, request: u64) {
        self.groups.iter_mut().for_each(|group| group.retain(|cursor| cursor.request != request));
        self.groups.retain(|group| !group.is_empty());
    }

    /// Takes all reads out, and keeps the memory.
    pub fn clear(&mut self) {
        self.groups.clear();
    }

    /// Takes reads in order up to the next COMPLETE, limited by `portion`.
    pub fn pop(&mut self, portion: Portion, sizes: ReadSizes) -> Batch {
        let mut batch = Batch::default();
        let mut taken = 0;
        while taken < portion.bytes_max && (taken < portion.bytes || batch.reads.len() < portion.reads) {
            let Some(group) = self.groups.front_mut() else { break };
            let Some(mut cursor) = group.pop_front() else {
                self.groups.pop_front();
                continue;
            };
            // Requests that take turns do so piece by piece.
            let run = if group.is_empty() { sizes.run.min(portion.bytes_max - taken) } else { 0 };
            if let Some(read) = cursor.next_run(run) {
                taken += read.bytes();
                batch.reads.push(read);
            } else if let Some(piece) = cursor.next_piece() {
                taken += read_piece(&cursor, piece, sizes, &mut batch.reads);
            }
            if cursor.is_empty() {
                batch.complete = Some(cursor.request);
                if group.is_empty() {
                    self.groups.pop_front();
                }
                break;
            }
            group.push_back(cursor);
        }
        batch
    }
}

/// Appends the reads of a piece and returns their bytes.
fn read_piece(cursor: &Cursor, piece: usize, sizes: ReadSizes, reads: &mut Vec<Read>) -> u64 {
    let Cursor { request, export, .. } = *cursor;
    if let Some((remote, local)) = cursor.pull.plain_read(piece).filter(|(remote, _)| remote.bytes <= sizes.plain) {
        let (bytes, remote) = (remote.bytes, Ranges::One(remote));
        reads.push(Read { request, export, piece, pieces: 1, remote, local: Some(local), plain: true });
        return bytes;
    }
    let plain = cursor.pull.is_plain(piece);
    let mut bytes = 0;
    let mut staged: Vec<Remote> = Vec::new();
    cursor.pull.reads(piece, &mut |remote, local| {
        bytes += remote.bytes;
        let Some(place) = local else { return staged.push(remote) };
        let most = if plain && remote.bytes <= sizes.plain { remote.bytes } else { sizes.bytes };
        let mut at = 0;
        while at < remote.bytes {
            let len = most.min(remote.bytes - at);
            reads.push(Read {
                request,
                export,
                piece,
                pieces: 1,
                remote: Ranges::One(Remote { offset: remote.offset + at, bytes: len, ..remote }),
                local: Some(Local { offset: place.offset + at, ..place }),
                plain: plain && len == remote.bytes,
            });
            at += len;
        }
    });
    if !staged.is_empty() {
        let remote = Ranges::Many(staged);
        reads.push(Read { request, export, piece, pieces: 1, remote, local: None, plain: false });
    }
    bytes
}
