//! Memories of every shape, and what belongs in them.

use lagoon_transfer::{Axis, Dim, HeapRegion, Layout, LayoutParts, Part, Plane, Region, View};
use lagoon_types::{KvDType, ModelHash};
use rand::{Rng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::{ops::Range, sync::Arc};

pub(crate) const LAYERS: u32 = 3;
pub(crate) const HEADS: u32 = 2;
pub(crate) const HEAD_DIM: u32 = 2;

/// A worker's memory.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    pub(crate) layout: Layout,
    pub(crate) regions: Vec<Arc<dyn Region>>,
}

/// A plane with its dimensions in a random order, and gaps.
fn plane(rng: &mut ChaCha8Rng, sizes: [u32; 6], part: Part, first_layer: u32, dtype: KvDType) -> (Plane, u64) {
    let mut order = Dim::ALL;
    if rng.random_bool(0.5) {
        order.shuffle(rng);
    } else {
        // As memories really are: elements innermost.
        order.reverse();
        order[3..].shuffle(rng);
    }
    let mut span = 1u64;
    let mut axes = Vec::new();
    for dim in order {
        let size = sizes[dim as usize];
        let stride = span + if rng.random_bool(0.15) { rng.random_range(1..4) } else { 0 };
        if size > 1 || rng.random_bool(0.5) {
            axes.push(Axis { dim, size, stride });
            span = stride * u64::from(size);
        }
    }
    let base = dtype.element_bytes() as u64 * rng.random_range(0..3u64);
    let plane = Plane { region: 0, base, axes, dtype, first_layer, part };
    (plane, base + span * dtype.element_bytes() as u64)
}

/// A random memory of `blocks` blocks.
pub(crate) fn draw(rng: &mut ChaCha8Rng, blocks: u32, dtype: KvDType, layers: Range<u32>, heads: Range<u32>) -> Memory {
    let block_tokens = [2, 3, 4, 8][rng.random_range(0..4)];
    let parts = if rng.random_bool(0.5) { vec![Part::Both] } else { vec![Part::Keys, Part::Values] };
    let sliced = rng.random_bool(0.5);
    let (mut planes, mut region_bytes) = (Vec::new(), Vec::new());
    for part in parts {
        let kv = part.range();
        let head_count = heads.end - heads.start;
        let cuts: Vec<Range<u32>> =
            if sliced { vec![layers.clone()] } else { layers.clone().map(|layer| layer..layer + 1).collect() };
        for cut in cuts {
            let sizes = [blocks, cut.end - cut.start, kv.end - kv.start, block_tokens, head_count, row_elements(dtype)];
            let (mut plane, bytes) = plane(rng, sizes, part, cut.start, dtype);
            plane.region = u32::try_from(region_bytes.len()).unwrap();
            planes.push(plane);
            region_bytes.push(bytes);
        }
    }
    let regions = region_bytes.iter().map(|bytes| {
        let page = usize::try_from(*bytes).unwrap().min(1 << 12);
        Arc::new(HeapRegion::new(usize::try_from(*bytes).unwrap(), page)) as Arc<dyn Region>
    });
    let regions = regions.collect();
    let model = ModelHash([7; 32]);
    let parts = LayoutParts { model, block_tokens, blocks, layers, heads, head_dim: HEAD_DIM, region_bytes, planes };
    Memory { layout: Layout::new(parts).unwrap(), regions }
}

/// What a request has at a place: a small whole number, which every element type holds.
pub(crate) fn value(request: u64, [layer, kv, token, head, elem]: [u32; 5]) -> f32 {
    let mut x = request.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for part in [layer, kv, token, head, elem] {
        x = (x ^ u64::from(part)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x ^= x >> 32;
    }
    f32::from(i16::try_from(x % 255).unwrap() - 127)
}

fn row_elements(dtype: KvDType) -> u32 {
    u32::try_from(dtype.row_elements(HEAD_DIM)).unwrap()
}

/// Appends one element; the bytes of rows with scales, which transfers only copy, are numbers here.
fn encode(plane: &Plane, value: f32, out: &mut Vec<u8>) {
    match plane.dtype.plain() {
        Some(dtype) => dtype.encode(&[value], out),
        #[allow(clippy::cast_possible_truncation, reason = "values are whole numbers of eight bits")]
        None => out.push((value as i8).cast_unsigned()),
    }
}

fn decode(plane: &Plane, bytes: &[u8], out: &mut Vec<f32>) {
    match plane.dtype.plain() {
        Some(dtype) => dtype.decode(bytes, out),
        None => out.extend(bytes.iter().map(|byte| f32::from(byte.cast_signed()))),
    }
}

impl Memory {
    /// Every element of tokens, each in the block and slot that `find` says, walked naively: (plane, byte offset,
    /// place).
    fn walk(
        &self,
        view: &View,
        find: impl Fn(u32) -> (u32, u32),
        tokens: Range<u32>,
        visit: &mut dyn FnMut(&Plane, u64, [u32; 5]),
    ) {
        for token in tokens {
            let (block, slot) = find(token);
            for layer in view.layers.clone() {
                for plane in self.layout.planes_of(layer) {
                    for kv in plane.part.range() {
                        for head in view.heads.clone() {
                            for elem in 0..row_elements(plane.dtype) {
                                let index = [
                                    block,
                                    layer - plane.first_layer,
                                    kv - plane.part.range().start,
                                    slot,
                                    head - self.layout.heads().start,
                                    elem,
                                ];
                                visit(plane, plane.grid().offset(&index), [layer, kv, token, head, elem]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// What this worker itself has.
    pub(crate) fn all(&self) -> View {
        View { layers: self.layout.layers(), heads: self.layout.heads() }
    }

    /// A request's tokens, into blocks.
    pub(crate) fn store(&self, request: u64, blocks: &[u32], tokens: Range<u32>) {
        let size = self.layout.block_tokens();
        let (start, mut bytes) = (tokens.start, Vec::new());
        let find = |token| (blocks[((token - start) / size) as usize], (token - start) % size);
        self.walk(&self.all(), find, tokens, &mut |plane, offset, place| {
            bytes.clear();
            encode(plane, value(request, place), &mut bytes);
            lagoon_transfer::region::write(self.regions[plane.region as usize].as_ref(), offset, &bytes).unwrap();
        });
    }

    /// What is wrong with a request's token in a slot of a block, if anything.
    pub(crate) fn wrong(&self, view: &View, request: u64, place: (u32, u32), token: u32) -> Option<String> {
        let (mut wrong, mut values) = (None, Vec::new());
        self.walk(view, |_| place, token..token + 1, &mut |plane, offset, place| {
            values.clear();
            let region = &self.regions[plane.region as usize];
            region.view(offset, plane.dtype.element_bytes(), &mut |bytes| decode(plane, bytes, &mut values)).unwrap();
            let expected = value(request, place);
            if wrong.is_none() && values != [expected] {
                wrong = Some(format!("request {request}, place {place:?}: {values:?} instead of {expected}"));
            }
        });
        wrong
    }
}
