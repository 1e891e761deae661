//! Merging reads keeps their bytes and each request's order, and never makes more transactions than there were reads;
//! layouts that differ are converted exactly, or refused with both values.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "sim/memory.rs"]
mod memory;

use lagoon_transfer::coalesce::{Bounds, Portion, Post, Queue, Read, ReadSizes, coalesce};
use lagoon_transfer::{
    Axis, Dim, HeapRegion, Lander, Layout, LayoutAttention, LayoutError, LayoutParts, Mismatch, Part, Plane, Pull,
    PullError, Pulls, Region, Transaction, Way, plan,
};
use lagoon_types::{KvDType, ModelHash};
use memory::{HEAD_DIM, HEADS, LAYERS, Memory};
use proptest::prelude::*;
use rand::{Rng, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::{collections::BTreeMap, sync::Arc};

const BLOCKS: u32 = 16;

/// Two requests from one writer to one reader, all of the queue's reads.
struct Case {
    reader: Memory,
    writer: Memory,
    pulls: Pulls,
    /// By request: the writer's tokens, the reader's blocks.
    local: BTreeMap<u64, (u32, Vec<u32>, u32)>,
    queue: Queue,
}

fn case(seed: u64, dtype: KvDType) -> Case {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Types with scales are copied and never converted.
    let theirs = if dtype.plain().is_some() { KvDType::BF16 } else { dtype };
    let writer = memory::draw(&mut rng, BLOCKS, theirs, 0..LAYERS, 0..HEADS);
    let reader = if rng.random_bool(0.4) && dtype == theirs {
        let regions = writer.layout.region_bytes().iter();
        let region = |bytes: &u64| Arc::new(HeapRegion::new(usize::try_from(*bytes).unwrap(), 64)) as Arc<dyn Region>;
        Memory { layout: writer.layout.clone(), regions: regions.map(region).collect() }
    } else {
        memory::draw(&mut rng, 8 * BLOCKS, dtype, 0..LAYERS, 0..HEADS)
    };
    let conversion = Arc::new(plan(&reader.layout, &writer.layout, true).unwrap());
    let layouts = (Arc::new(reader.layout.clone()), Arc::new(writer.layout.clone()));
    let mut case = Case { reader, writer, pulls: Pulls::new(), local: BTreeMap::new(), queue: Queue::default() };
    let (theirs, ours) = (case.writer.layout.block_tokens(), case.reader.layout.block_tokens());
    let mut remote: Vec<u32> = (0..BLOCKS).collect();
    let mut local: Vec<u32> = (0..case.reader.layout.blocks()).collect();
    if rng.random_bool(0.5) {
        remote.shuffle(&mut rng);
        local.shuffle(&mut rng);
    }
    let mut posts = Vec::new();
    for request in [1u64, 2] {
        let tokens = rng.random_range(1..=theirs * BLOCKS / 2);
        let first = rng.random_range(0..2);
        let blocks: Vec<u32> = remote.drain(..tokens.div_ceil(theirs) as usize).collect();
        let mine: Vec<u32> = local.drain(..((tokens + first).div_ceil(ours) as usize).min(local.len())).collect();
        if mine.len() < (tokens + first).div_ceil(ours) as usize {
            continue;
        }
        case.writer.store(request, &blocks, 0..tokens);
        let pull = Pull::new(layouts.clone(), Arc::clone(&conversion), tokens, blocks, mine.clone(), first).unwrap();
        let pull = Arc::new(pull);
        posts.push(Post { request, export: 10 + request, pull: Arc::clone(&pull), only: None });
        case.pulls.insert(request, pull);
        case.local.insert(request, (tokens, mine, first));
    }
    if rng.random_bool(0.5) {
        case.queue.post(posts);
    } else {
        posts.into_iter().for_each(|post| case.queue.post(vec![post]));
    }
    case
}

fn same(bytes: u64) -> ReadSizes {
    ReadSizes { bytes, plain: bytes, run: bytes }
}

/// The batches of a queue, and which requests' COMPLETEs ended them.
fn batches(queue: &mut Queue, sizes: ReadSizes) -> (Vec<Vec<Read>>, Vec<u64>) {
    let (mut out, mut completes) = (Vec::new(), Vec::new());
    while !queue.is_empty() {
        let batch = queue.pop(Portion::ALL, sizes);
        completes.extend(batch.complete);
        out.push(batch.reads);
    }
    (out, completes)
}

fn bytes_of(transaction: &Transaction, memory: &Memory) -> Vec<u8> {
    let mut bytes = Vec::new();
    for segment in &transaction.segments {
        let len = usize::try_from(segment.remote.bytes).unwrap();
        let region = &memory.regions[segment.remote.region as usize];
        bytes.extend_from_slice(&region.snapshot(segment.remote.offset, len).unwrap());
    }
    bytes
}

fn run(case: &Case, transactions: &[Transaction]) {
    for transaction in transactions {
        let mut lander = Lander::new(transaction, &case.pulls, &case.reader.regions, true);
        lander.push(&bytes_of(transaction, &case.writer)).unwrap();
        assert!(lander.finish().unwrap().overflows.is_empty());
    }
}

fn check(case: &Case) {
    for (request, (tokens, blocks, first)) in &case.local {
        let size = case.reader.layout.block_tokens();
        for token in 0..*tokens {
            let place = (blocks[((token + first) / size) as usize], (token + first) % size);
            assert_eq!(case.reader.wrong(&case.reader.all(), *request, place, token), None);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn merging_keeps_bytes_order_and_bounds(
        seed: u64,
        read_bytes in 8u64..600,
        plain in 8u64..1200,
        runs: bool,
        segments in 1usize..20,
    ) {
        let mut case = case(seed, KvDType::BF16);
        let (batches, completes) = batches(&mut case.queue, ReadSizes { bytes: read_bytes, plain, run: if runs { read_bytes } else { 0 } });
        prop_assert_eq!(completes.len(), case.pulls.len(), "one COMPLETE for each request");
        let mut all = Vec::new();
        for (n, reads) in batches.iter().enumerate() {
            for read in reads {
                let pull = &case.pulls[&read.request];
                for piece in read.piece..read.piece + read.pieces {
                    let whole = pull.is_plain(piece) && pull.piece_bytes(piece) <= plain.max(read_bytes);
                    prop_assert_eq!(read.plain, whole, "what comes at once is checked while it lands");
                }
                let bytes: u64 = read.remote.iter().map(|range| range.bytes).sum();
                prop_assert!(read.pieces == 1 || runs && bytes <= read_bytes && bytes == pull.piece_bytes(read.piece) * read.pieces as u64);
            }
            let last = completes.get(n);
            let merged = coalesce(reads, Bounds { bytes: read_bytes, segments });
            prop_assert!(merged.len() <= reads.len());
            let ranges: usize = merged.iter().map(Transaction::ranges).sum();
            prop_assert!(ranges <= reads.iter().map(|read| read.remote.len()).sum());
            // Order: a request's reads are in ascending transactions, and ascending within each.
            for request in case.pulls.keys() {
                let order = |parts: &mut dyn Iterator<Item = (u64, usize, usize)>| -> Vec<usize> {
                    parts.filter(|part| part.0 == *request).flat_map(|(_, piece, pieces)| piece..piece + pieces).collect()
                };
                let before = order(&mut reads.iter().map(|read| (read.request, read.piece, read.pieces)));
                let parts = merged.iter().flat_map(|t| &t.parts);
                let after = order(&mut parts.map(|part| (part.request, part.piece, part.pieces)));
                prop_assert_eq!(before, after);
                // After a request's COMPLETE none of its reads follows.
                let ended = completes[..n].contains(request) && Some(request) != last;
                prop_assert!(!ended || reads.iter().all(|read| read.request != *request));
            }
            for transaction in &merged {
                prop_assert!(transaction.bytes <= read_bytes || transaction.parts.len() == 1);
                prop_assert_eq!(bytes_of(transaction, &case.writer).len() as u64, transaction.bytes);
            }
            all.extend(merged);
        }
        run(&case, &all);
        check(&case);
    }

    #[test]
    fn every_layout_is_converted_exactly(seed: u64, dtype in prop_oneof![Just(KvDType::F16), Just(KvDType::F32), Just(KvDType::Fp8)]) {
        let mut case = case(seed, dtype);
        let (batches, _) = batches(&mut case.queue, same(256));
        for reads in &batches {
            run(&case, &coalesce(reads, Bounds { bytes: 256, segments: 64 }));
        }
        check(&case);
    }

    #[test]
    fn a_transaction_without_a_request_has_the_others(seed: u64) {
        let mut case = case(seed, KvDType::BF16);
        let (batches, _) = batches(&mut case.queue, same(64));
        let reads = batches.concat();
        let merged = coalesce(&reads, Bounds { bytes: 1 << 20, segments: 1 << 10 });
        let without: Vec<Transaction> = merged.iter().flat_map(|transaction| transaction.without(2)).collect();
        prop_assert!(without.iter().flat_map(|t| &t.parts).all(|part| part.request == 1));
        run(&case, &without);
        case.local.remove(&2);
        check(&case);
    }
}

/// The paper's Figure 8: R1 reads block 0 to 5, R2 block 1 to 6: one transaction.
#[test]
fn reads_of_two_requests_merge() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut memory = || lagoon_store(&mut rng);
    let (reader, writer) = (memory(), memory());
    let layouts = (Arc::new(reader), Arc::new(writer));
    let conversion = Arc::new(plan(&layouts.0, &layouts.1, false).unwrap());
    assert!(conversion.identical && conversion.way == Way::Direct && conversion.covers_reader);
    let pull = |remote, local| {
        Arc::new(Pull::new(layouts.clone(), Arc::clone(&conversion), 4, vec![remote], vec![local], 0).unwrap())
    };
    let mut queue = Queue::default();
    let post = |request, pull| Post { request, export: 10 + request, pull, only: None };
    queue.post(vec![post(1, pull(0, 5)), post(2, pull(1, 6))]);
    let batch = queue.pop(Portion::ALL, same(1 << 20));
    assert_eq!((batch.reads.len(), batch.complete), (2 * LAYERS as usize - 1, Some(1)));
    let merged = coalesce(&batch.reads, Bounds { bytes: 1 << 20, segments: 16 });
    assert_eq!(merged.len(), LAYERS as usize, "one for each layer");
    assert_eq!(merged[0].parts.iter().map(|part| part.request).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((merged[0].ranges(), merged[0].segments.len()), (1, 2), "one range of two exports");
}

/// Lagoon's own store: a region for each layer, `[slot][k | v][heads][dim]`.
fn lagoon_store(_rng: &mut ChaCha8Rng) -> Layout {
    Layout::new(parts()).unwrap()
}

fn parts() -> LayoutParts {
    let row = u64::from(HEADS * HEAD_DIM);
    let axes = vec![
        Axis { dim: Dim::Block, size: BLOCKS, stride: 4 * 2 * row },
        Axis { dim: Dim::Token, size: 4, stride: 2 * row },
        Axis { dim: Dim::Kv, size: 2, stride: row },
        Axis { dim: Dim::Head, size: HEADS, stride: HEAD_DIM.into() },
        Axis { dim: Dim::Elem, size: HEAD_DIM, stride: 1 },
    ];
    let bytes = u64::from(BLOCKS) * 4 * 2 * row * 2;
    let plane = |layer: u32| Plane {
        region: layer,
        base: 0,
        axes: axes.clone(),
        dtype: KvDType::BF16,
        first_layer: layer,
        part: Part::Both,
    };
    LayoutParts {
        model: ModelHash([1; 32]),
        block_tokens: 4,
        blocks: BLOCKS,
        layers: 0..LAYERS,
        heads: 0..HEADS,
        head_dim: HEAD_DIM,
        region_bytes: vec![bytes; LAYERS as usize],
        planes: (0..LAYERS).map(plane).collect(),
    }
}

#[test]
fn mismatches_name_both_values() {
    let ours = Layout::new(parts()).unwrap();
    let with = |change: &dyn Fn(&mut LayoutParts)| {
        let mut parts = parts();
        change(&mut parts);
        Layout::new(parts).unwrap()
    };
    let other = with(&|parts| parts.model = ModelHash([2; 32]));
    let error = plan(&ours, &other, true).unwrap_err();
    assert!(error.to_string().contains("0101010101010101") && error.to_string().contains("0202020202020202"));
    let other = with(&|parts| parts.planes.iter_mut().for_each(|plane| plane.dtype = KvDType::F16));
    let error = plan(&ours, &other, false).unwrap_err();
    assert!(matches!(error, Mismatch::DType { reader: KvDType::BF16, writer: KvDType::F16, .. }), "{error}");
    assert_eq!(plan(&ours, &other, true).unwrap().loss, Some((KvDType::F16, KvDType::BF16)));
    let scaled = with(&|parts| {
        for plane in &mut parts.planes {
            plane.dtype = KvDType::Fp8;
            let row = u32::try_from(KvDType::Fp8.row_elements(HEAD_DIM)).unwrap();
            for axis in &mut plane.axes {
                match axis.dim {
                    Dim::Elem => axis.size = row,
                    _ => axis.stride = axis.stride / u64::from(HEAD_DIM) * u64::from(row),
                }
            }
        }
        parts.region_bytes.iter_mut().for_each(|bytes| *bytes *= 8);
    });
    let error = plan(&ours, &scaled, true).unwrap_err();
    assert!(
        error.to_string().contains("in bf16, the writer in fp8; hint: run both with the same --kv-dtype"),
        "{error}"
    );
    assert!(plan(&scaled, &scaled, false).unwrap().identical);
    let other = with(&|parts| {
        parts.layers = 10..10 + LAYERS;
        parts.planes.iter_mut().for_each(|plane| plane.first_layer += 10);
    });
    let error = plan(&ours, &other, true).unwrap_err();
    assert_eq!(error, Mismatch::Layers { reader: 0..LAYERS, writer: 10..10 + LAYERS });
    for (attention, expected) in [
        (LayoutAttention { latent: true, ..Default::default() }, "the reader's latent is 0, the writer's 1"),
        (
            LayoutAttention { windowed_layers: 3, ..Default::default() },
            "the reader's windowed_layers is 0, the writer's 3",
        ),
        (LayoutAttention { window: 127, ..Default::default() }, "the reader's window is 0, the writer's 127"),
    ] {
        let theirs = Layout::from_wire(&ours.clone().with_attention(attention).to_wire()).unwrap();
        assert_eq!(theirs.attention(), attention);
        let error = plan(&ours, &theirs, true).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("hint:"), "{error}");
    }
    let part = with(&|parts| {
        parts.layers = 1..1 + LAYERS;
        parts.planes.iter_mut().for_each(|plane| plane.first_layer += 1);
    });
    let conversion = plan(&ours, &part, true).unwrap();
    assert_eq!((conversion.view.layers.clone(), conversion.covers_reader), (1..LAYERS, false));
}

#[test]
fn bad_layouts_are_refused_with_their_values() {
    let refused = |change: &dyn Fn(&mut LayoutParts)| {
        let mut parts = parts();
        change(&mut parts);
        Layout::new(parts).unwrap_err()
    };
    assert!(matches!(refused(&|p| p.region_bytes[1] -= 2), LayoutError::Outside { plane: 1, .. }));
    assert!(matches!(refused(&|p| p.planes[0].axes[0].stride -= 1), LayoutError::Overlap { plane: 0 }));
    assert!(matches!(refused(&|p| p.planes[0].axes[4].stride = u64::MAX), LayoutError::Outside { .. }));
    assert!(matches!(refused(&|p| p.planes[2].axes[0].stride = u64::MAX), LayoutError::Outside { plane: 2, .. }));
    assert!(matches!(refused(&|p| p.planes[2].first_layer = 0), LayoutError::Coverage { layer: 0, planes: 2, .. }));
    assert!(matches!(refused(&|p| drop(p.planes.pop())), LayoutError::Coverage { layer: 2, part: "K", planes: 0 }));
    assert!(matches!(refused(&|p| p.planes[0].region = 9), LayoutError::Value { value: 9, .. }));
    assert!(matches!(refused(&|p| p.planes[0].base = 1), LayoutError::Value { value: 1, .. }));
    let again = |p: &mut LayoutParts| {
        let axis = p.planes[0].axes[0];
        p.planes[0].axes.push(axis);
    };
    assert!(matches!(refused(&again), LayoutError::Twice { plane: 0, dim: Dim::Block }));
    let text = refused(&|p| p.planes[0].axes[1].size = 5).to_string();
    assert_eq!(text, "plane 0: token has size 5, the layout says 4");
}

#[test]
fn layouts_survive_the_wire() {
    for seed in 0..50 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let layout = memory::draw(&mut rng, BLOCKS, KvDType::F16, 0..LAYERS, 0..HEADS).layout;
        assert_eq!(Layout::from_wire(&layout.to_wire()).unwrap(), layout);
    }
    let mut message = Layout::new(parts()).unwrap().to_wire();
    message.planes[0].axes[0].dim = 0;
    assert!(Layout::from_wire(&message).is_err());
    message.model_hash.pop();
    assert!(Layout::from_wire(&message).unwrap_err().to_string().contains("31"));
}

#[test]
fn a_pull_allocates_all_or_nothing() {
    let layout = Arc::new(Layout::new(parts()).unwrap());
    let conversion = Arc::new(plan(&layout, &layout, false).unwrap());
    let pull = |tokens, remote: Vec<u32>, local: Vec<u32>| {
        let layouts = (Arc::clone(&layout), Arc::clone(&layout));
        Pull::new(layouts, Arc::clone(&conversion), tokens, remote, local, 1).unwrap_err()
    };
    assert_eq!(pull(8, vec![0, 1], vec![2, 3]), PullError::Allocation { tokens: 8, first: 1, needed: 3, given: 2 });
    assert_eq!(pull(9, vec![0, 1], vec![2, 3, 4]), PullError::Export { tokens: 9, needed: 3, given: 2 });
    let error = pull(8, vec![0, BLOCKS], vec![2, 3, 4]);
    assert_eq!(error, PullError::Block { whose: "the writer's", block: BLOCKS, blocks: BLOCKS });
}
