//! A reader plans what it reads in portions: each call does a bounded part of the work, and what is read is what would have
//! been read if all had been planned at once.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use lagoon_transfer::coalesce::{Bounds, Portion, Post, Queue, ReadSizes, coalesce};
use lagoon_transfer::{
    Check, ConnId, EpochSecret, HeapRegion, Lander, Layout, Pull, PullId, Pulls, Reader, ReaderConfig, ReaderOutput,
    Region, Transaction, Writer, WriterConfig, WriterOutput, check_block, plan,
};
use lagoon_types::InstanceId;
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

const READER: InstanceId = InstanceId(1);
const WRITER: InstanceId = InstanceId(2);
const TOKENS: u32 = 4;
const BLOCK_BYTES: u64 = 64;
const BLOCKS: u32 = 1024;
/// Blocks of the requests.
const REQUEST: usize = 300;
/// Blocks of one read.
const READ_BLOCKS: u64 = 8;
/// Full reads that one call plans, and ranges: at most what is more.
const PORTION_READS: u64 = 4;
const PLANNED: usize = 16;

fn layout() -> Layout {
    support::layout(BLOCKS, TOKENS)
}

fn config() -> ReaderConfig {
    let conn_bytes = u64::from(BLOCKS) * BLOCK_BYTES;
    let read_bytes = READ_BLOCKS * BLOCK_BYTES;
    let (piece_bytes, planned) = (read_bytes, PLANNED);
    ReaderConfig { conn_bytes, bytes: conn_bytes, read_bytes, piece_bytes, planned, ..ReaderConfig::default() }
}

/// A writer, a reader that is connected to it, and what the reader read, in order.
struct World {
    writer: Writer,
    reader: Reader,
    conn: ConnId,
    memory: [Arc<dyn Region>; 1],
    own: [Arc<dyn Region>; 1],
    /// Where the blocks of each request go.
    targets: Vec<Vec<u32>>,
    reads: Vec<(u64, Arc<Transaction>)>,
    /// Most blocks that one call planned.
    planned_max: u64,
    done: usize,
}

fn region() -> Arc<dyn Region> {
    Arc::new(HeapRegion::new(usize::try_from(u64::from(BLOCKS) * BLOCK_BYTES).unwrap(), 256))
}

impl World {
    /// `requests`: the writer's blocks, and where they go.
    fn new(requests: &[(Vec<u32>, Vec<u32>)]) -> Self {
        let (memory, own) = ([region()], [region()]);
        let mut n = 0u8;
        let mut fill =
            |bytes: &mut [u8]| bytes.iter_mut().for_each(|b| (*b, n) = (n, n.wrapping_mul(5).wrapping_add(7)));
        memory[0].fill(0, usize::try_from(memory[0].bytes()).unwrap(), &mut fill).unwrap();
        let credit_bytes = memory[0].bytes();
        let writer = Writer::new(layout(), WriterConfig { credit_bytes, ..WriterConfig::default() });
        let mut reader = Reader::new(layout(), config());
        let conn = reader.connect(WRITER, 0).unwrap();
        let targets = requests.iter().map(|(_, to)| to.clone()).collect();
        let (reads, planned_max, done) = (Vec::new(), 0, 0);
        let mut world = Self { writer, reader, conn, memory, own, targets, reads, planned_max, done };
        world.settle();
        let view = lagoon_transfer::View { layers: 0..1, heads: 0..2 };
        for (request, (from, _)) in (0..).zip(requests) {
            let check = |block: &u32| check_block(&layout(), &view, *block, TOKENS, &world.memory).unwrap();
            let checks: Vec<Check> = from.iter().map(check).collect();
            let tokens = u32::try_from(from.len()).unwrap() * TOKENS;
            world.writer.export(READER, request, (0, tokens), from.clone(), checks, 0).unwrap();
        }
        world.settle();
        world
    }

    /// Carries messages, and starts pulls, without planning anything of what is read.
    fn settle(&mut self) {
        loop {
            let (theirs, ours) = (self.writer.poll(), self.reader.poll());
            match theirs {
                Some(WriterOutput::Send { body, .. }) => self.reader.on_control(WRITER, &body, 0),
                None if ours.is_none() => return,
                _ => {}
            }
            match ours {
                Some(ReaderOutput::Send { body, .. }) => self.writer.on_control(READER, &body, 0),
                Some(ReaderOutput::Offered(offer)) => {
                    let to = self.targets[usize::try_from(offer.request).unwrap()].clone();
                    self.reader.pull(self.conn, offer.export, to, 0, 0).unwrap();
                }
                Some(ReaderOutput::Read { read, transaction, .. }) => self.reads.push((read, transaction)),
                Some(ReaderOutput::Done { .. }) => self.done += 1,
                Some(ReaderOutput::Open { .. }) | None => {}
                Some(other) => panic!("{other:?}"),
            }
        }
    }

    /// A call that may plan; what it planned is bounded.
    fn call(&mut self, act: impl FnOnce(&mut Reader)) {
        let before = self.reader.stats().reads;
        act(&mut self.reader);
        let planned = self.reader.stats().reads - before;
        self.planned_max = self.planned_max.max(planned);
        self.settle();
    }

    /// Reads everything, one read at a time.
    fn run(&mut self) {
        self.call(Reader::pump);
        let first = self.reader.stats().reads;
        let most = (2 * self.targets.len() as u64).max(PLANNED as u64) * READ_BLOCKS;
        assert!(first > 0 && first <= most, "{first} blocks are planned before the first bytes move, {most} at most");
        let mut next = 0;
        while let Some((read, transaction)) = self.reads.get(next).cloned() {
            let mut pulls = Pulls::new();
            for part in &transaction.parts {
                pulls.insert(part.request, Arc::clone(self.reader.pull_of(PullId(part.request)).unwrap()));
            }
            let mut lander = Lander::new(&transaction, &pulls, &self.own, true);
            for segment in &transaction.segments {
                let bytes = usize::try_from(segment.remote.bytes).unwrap();
                lander.push(&self.memory[0].snapshot(segment.remote.offset, bytes).unwrap()).unwrap();
            }
            let landed = lander.finish().unwrap();
            let conn = self.conn;
            self.call(|reader| reader.on_read(conn, read, Ok(landed), 0));
            next += 1;
        }
        assert_eq!(self.done, self.targets.len());
        assert_eq!(self.reader.pulling(), 0);
    }

    /// The same, planned at once.
    fn at_once(requests: &[(Vec<u32>, Vec<u32>)]) -> Vec<Transaction> {
        let layouts = (Arc::new(layout()), Arc::new(layout()));
        let conversion = Arc::new(plan(&layouts.0, &layouts.1, false).unwrap());
        let mut queue = Queue::default();
        let post = |(request, (from, to)): (u64, &(Vec<u32>, Vec<u32>))| {
            let tokens = u32::try_from(from.len()).unwrap() * TOKENS;
            let pull = Pull::new(layouts.clone(), Arc::clone(&conversion), tokens, from.clone(), to.clone(), 0);
            Post { request, export: request, pull: Arc::new(pull.unwrap()), only: None }
        };
        queue.post((0..).zip(requests).map(post).collect());
        let (sizes, mut out) = (ReadSizes { bytes: READ_BLOCKS * BLOCK_BYTES, plain: BLOCK_BYTES, run: 0 }, Vec::new());
        while !queue.is_empty() {
            out.extend(coalesce(&queue.pop(Portion::ALL, sizes).reads, Bounds { bytes: sizes.bytes, segments: 1024 }));
        }
        out
    }
}

/// What is read, block by block: the request's number in the order of the requests, the piece, both places.
fn blocks<'a>(transactions: impl Iterator<Item = &'a Transaction>) -> Vec<(u64, usize, u64, u64)> {
    let mut out = Vec::new();
    for transaction in transactions {
        let mut remote = transaction.segments.iter().flat_map(|segment| {
            (0..segment.remote.bytes / BLOCK_BYTES).map(|n| segment.remote.offset + n * BLOCK_BYTES)
        });
        for part in &transaction.parts {
            assert_eq!(part.bytes, part.pieces as u64 * BLOCK_BYTES);
            let local = transaction.local.unwrap().offset + part.at;
            let local = (local..).step_by(usize::try_from(BLOCK_BYTES).unwrap());
            let pieces = (part.piece..part.piece + part.pieces).zip(local);
            out.extend(pieces.map(|(piece, local)| (part.request, piece, remote.next().unwrap(), local)));
        }
    }
    let first = out.iter().map(|(request, ..)| *request).min().unwrap();
    out.iter_mut().for_each(|(request, ..)| *request -= first);
    out
}

/// Blocks that lie together in runs of four, out of order.
fn scattered(seed: u64, from: u32) -> (Vec<u32>, Vec<u32>) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut runs = || {
        let mut starts: Vec<u32> = (0..u32::try_from(REQUEST).unwrap() / 4).map(|run| from + run * 4).collect();
        starts.shuffle(&mut rng);
        starts.into_iter().flat_map(|start| start..start + 4).collect::<Vec<u32>>()
    };
    (runs(), runs())
}

fn together(from: u32) -> (Vec<u32>, Vec<u32>) {
    let all: Vec<u32> = (from..from + u32::try_from(REQUEST).unwrap()).collect();
    (all.clone(), all)
}

fn compare(requests: &[(Vec<u32>, Vec<u32>)]) -> (usize, usize) {
    let mut world = World::new(requests);
    world.run();
    // Of requests that take turns a portion has two reads of each.
    let bound = PORTION_READS.max(2 * requests.len() as u64).max(PLANNED as u64) * READ_BLOCKS;
    assert!(world.planned_max <= bound, "{} blocks planned by one call, {bound} at most", world.planned_max);
    let total: usize = requests.iter().map(|(from, _)| from.len()).sum();
    let (transactions, at_once) = (world.reads.len(), World::at_once(requests));
    let (read, expected) = (blocks(world.reads.iter().map(|(_, transaction)| &**transaction)), blocks(at_once.iter()));
    let of = |blocks: &[(u64, usize, u64, u64)], request: u64| -> Vec<_> {
        blocks.iter().filter(|block| block.0 == request).copied().collect()
    };
    for (request, (from, to)) in (0..).zip(requests) {
        let (ours, theirs) = (of(&read, request), of(&expected, request));
        assert_eq!(ours, theirs, "the order of a request's blocks");
        let places = from.iter().zip(to).map(|(from, to)| (u64::from(*from), u64::from(*to)));
        assert!(ours.iter().map(|block| (block.2 / BLOCK_BYTES, block.3 / BLOCK_BYTES)).eq(places));
    }
    let stats = world.reader.stats();
    assert_eq!((stats.reads, stats.transactions), (total as u64, transactions as u64));
    assert!(transactions <= total && transactions >= at_once.len(), "{transactions} for {total} blocks");
    (transactions, at_once.len())
}

#[test]
fn blocks_that_lie_together_are_read_as_if_planned_at_once() {
    let (portions, at_once) = compare(&[together(0)]);
    assert_eq!((portions, at_once), (REQUEST.div_ceil(8), REQUEST.div_ceil(8)));
}

#[test]
fn scattered_blocks_are_read_in_their_order() {
    for seed in 0..20 {
        let (portions, at_once) = compare(&[scattered(seed, 0)]);
        assert!(at_once >= REQUEST / 8 && portions <= REQUEST / 4 + REQUEST / 16, "{portions}, {at_once}");
    }
}

#[test]
fn requests_that_take_turns_are_planned_in_portions() {
    let requests = [together(0), scattered(7, 320), together(640)];
    let (portions, at_once) = compare(&requests);
    assert!(portions < requests.len() * REQUEST / 3 && at_once <= portions, "{portions}, {at_once}");
}

/// Who learns its own epoch and the incarnation, which is sent to everybody, knows nothing of others' epochs.
#[test]
fn epochs_cannot_be_guessed() {
    const INCARNATION: u64 = 9;
    let epochs = |secret: u8| -> Vec<u64> {
        let secret = EpochSecret([secret; 32]);
        let config = WriterConfig { incarnation: INCARNATION, secret, ..WriterConfig::default() };
        let mut writer = Writer::new(layout(), config);
        let connect = |number: u32| {
            let mut reader = Reader::new(layout(), self::config());
            reader.connect(WRITER, 0).unwrap();
            while let Some(output) = reader.poll() {
                let ReaderOutput::Send { body, .. } = output else { continue };
                writer.on_control(InstanceId(number), &body, 0);
            }
            writer.epoch(InstanceId(number)).unwrap()
        };
        (1..4).map(connect).collect()
    };
    let (one, other) = (epochs(1), epochs(2));
    assert_eq!(one, epochs(1), "a simulation repeats itself");
    let mut all = [&one[..], &other[..], &[INCARNATION]].concat();
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[1] - pair[0] > 1 << 32), "{all:?}");
}
