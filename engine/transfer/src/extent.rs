//! Extents: contiguous byte ranges of boxes of elements, by strides (KVDirect §4.1: "index · stride").
//!
//! A box is walked from the inside out: dimensions whose stride equals the extent of the inner ones join one contiguous
//! extent, the others are iterated. The paper's worked example (cache[B][KV][L][H][D] = [10][2][16]
//! [2][128], strides 4096, 40960, 256, 128, 1, bf16) is a test here, with its two slips corrected: block 8 is read as
//! two extents at 65536 and 147456 of 16 · 256 · 2 = 8192 bytes each.

use crate::layout::{DIMS, Dim, Grid, Index};

/// A dimension of a box: number of indices, and the strides in two places, in elements.
#[derive(Clone, Copy, Debug)]
struct Step {
    len: u64,
    a: u64,
    b: u64,
}

/// Extent that is contiguous in two places: elements at two byte offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    pub a: u64,
    pub b: u64,
    pub elements: u64,
}

/// Canonical order of dimensions for hashing and sending, from the inside out: element, head, kv, token. Hashed boxes
/// have one block and one layer.
const CANONICAL: [Dim; DIMS] = [Dim::Elem, Dim::Head, Dim::Kv, Dim::Token, Dim::Layer, Dim::Block];

/// Calls `visit` for every extent that is contiguous in both places of a box of `len` indices with first elements
/// `a_first` and `b_first`. In the order of `a`'s addresses; extents are maximal within the box.
pub fn pairs(len: &Index, (a, a_first): (&Grid, &Index), (b, b_first): (&Grid, &Index), visit: &mut dyn FnMut(Pair)) {
    let mut steps = [Step { len: 1, a: 0, b: 0 }; DIMS];
    for (step, at) in steps.iter_mut().zip(0..) {
        *step = Step { len: len[at].into(), a: a.strides[at], b: b.strides[at] };
    }
    steps.sort_by_key(|step| (step.len > 1, step.a, step.b));
    let first = Pair { a: a.offset(a_first), b: b.offset(b_first), elements: 1 };
    walk(&steps, first, (a.elem_bytes, b.elem_bytes), visit);
}

/// Calls `visit` with (byte offset, bytes) of every contiguous extent of a box, in canonical order: tokens, then K
/// and V, then heads, then elements.
pub fn canonical(len: &Index, grid: &Grid, first: &Index, visit: &mut dyn FnMut(u64, u64)) {
    let mut steps = [Step { len: 1, a: 0, b: 0 }; DIMS];
    for (step, dim) in steps.iter_mut().zip(CANONICAL) {
        let at = dim as usize;
        *step = Step { len: len[at].into(), a: grid.strides[at], b: grid.strides[at] };
    }
    let offset = grid.offset(first);
    let bytes = grid.elem_bytes;
    walk(&steps, Pair { a: offset, b: offset, elements: 1 }, (bytes, bytes), &mut |pair| {
        visit(pair.a, pair.elements * bytes);
    });
}

/// `steps` from the inside out.
fn walk(steps: &[Step; DIMS], first: Pair, (a_bytes, b_bytes): (u64, u64), visit: &mut dyn FnMut(Pair)) {
    if steps.iter().any(|step| step.len == 0) {
        return;
    }
    let mut run = first.elements;
    let mut outer = [Step { len: 1, a: 0, b: 0 }; DIMS];
    let mut outers = 0;
    for step in steps.iter().filter(|step| step.len > 1) {
        if outers == 0 && step.a == run && step.b == run {
            run *= step.len;
        } else {
            outer[outers] = *step;
            outers += 1;
        }
    }
    let outer = &outer[..outers];
    let mut at = [0u64; DIMS];
    let (mut a, mut b) = (first.a, first.b);
    loop {
        visit(Pair { a, b, elements: run });
        // An odometer over the outer dimensions.
        let mut turn = 0;
        loop {
            let Some(step) = outer.get(turn) else { return };
            at[turn] += 1;
            if at[turn] < step.len {
                a += step.a * a_bytes;
                b += step.b * b_bytes;
                break;
            }
            a -= (step.len - 1) * step.a * a_bytes;
            b -= (step.len - 1) * step.b * b_bytes;
            at[turn] = 0;
            turn += 1;
        }
    }
}

/// A grid without gaps for a box, in the order of `grid`'s addresses: the layout of the box's concatenated extents. The
/// first element is at byte 0; indices count from the box's first.
#[must_use]
pub fn packed(len: &Index, grid: &Grid) -> Grid {
    let mut order: [usize; DIMS] = [0, 1, 2, 3, 4, 5];
    order.sort_by_key(|at| grid.strides[*at]);
    let mut strides = [0; DIMS];
    let mut span = 1;
    for at in order.into_iter().filter(|at| len[*at] > 1) {
        strides[at] = span;
        span *= u64::from(len[at]);
    }
    Grid { region: 0, base: 0, strides, elem_bytes: grid.elem_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Axis, Part, Plane};
    use lagoon_types::KvDType;
    use proptest::prelude::*;

    fn plane(dims: [(Dim, u32, u64); 5]) -> Plane {
        let axes = dims.map(|(dim, size, stride)| Axis { dim, size, stride }).to_vec();
        Plane { region: 0, base: 0, axes, dtype: KvDType::BF16, first_layer: 0, part: Part::Both }
    }

    fn extents(len: &Index, grid: &Grid, first: &Index) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        pairs(len, (grid, first), (grid, first), &mut |p| out.push((p.a, p.elements * grid.elem_bytes)));
        out
    }

    #[test]
    fn the_papers_example() {
        let cache = plane([
            (Dim::Block, 10, 4096),
            (Dim::Kv, 2, 40960),
            (Dim::Token, 16, 256),
            (Dim::Head, 2, 128),
            (Dim::Elem, 128, 1),
        ]);
        let grid = cache.grid();
        assert_eq!(grid.offset(&[8, 0, 0, 0, 0, 0]), 65_536);
        assert_eq!(grid.offset(&[8, 0, 1, 0, 0, 0]), 147_456, "the paper prints 147453");
        // One block is two reads of 16 · 256 · 2 bytes (the paper prints 16 · 128 · 2).
        let block = extents(&[1, 1, 2, 16, 2, 128], &grid, &[8, 0, 0, 0, 0, 0]);
        assert_eq!(block, [(65_536, 8_192), (147_456, 8_192)]);
        // Blocks 0 and 1 are adjacent: their K is one extent of 16384 bytes.
        let two = extents(&[2, 1, 1, 16, 2, 128], &grid, &[0; DIMS]);
        assert_eq!(two, [(0, 16_384)]);
    }

    /// A random grid: any order of the dimensions, any padding between them.
    fn grids() -> impl Strategy<Value = (Grid, Index)> {
        let sizes = [1u32..4, 1..4, 1..3, 1..5, 1..4, 1..5];
        let order = Just([0usize, 1, 2, 3, 4, 5]).prop_shuffle();
        (
            sizes,
            order,
            prop::array::uniform6(prop_oneof![3 => Just(0u64), 1 => 0u64..5]),
            0u64..9,
            prop_oneof![Just(2u64), Just(4)],
        )
            .prop_map(|(size, order, pads, base, elem_bytes)| {
                let mut strides = [0; DIMS];
                let mut span = 1u64;
                for at in order {
                    strides[at] = span + pads[at];
                    span = strides[at] * u64::from(size[at]);
                }
                (Grid { region: 0, base: base * elem_bytes, strides, elem_bytes }, size)
            })
    }

    /// A grid and a box in it.
    fn boxes() -> impl Strategy<Value = (Grid, Index, Index)> {
        (grids(), prop::array::uniform6(any::<(u8, u8)>())).prop_map(|((grid, size), cut)| {
            let mut first = [0; DIMS];
            let mut len = [0; DIMS];
            for at in 0..DIMS {
                first[at] = u32::from(cut[at].0) % size[at];
                len[at] = 1 + u32::from(cut[at].1) % (size[at] - first[at]);
            }
            (grid, first, len)
        })
    }

    /// Every index of a box, walked naively, the last dimension of `order` fastest.
    fn naive(len: &Index, first: &Index, order: [usize; DIMS], visit: &mut dyn FnMut(&Index)) {
        fn deeper(len: &Index, at: &mut Index, first: &Index, order: &[usize], visit: &mut dyn FnMut(&Index)) {
            let Some((dim, rest)) = order.split_first() else { return visit(at) };
            for i in 0..len[*dim] {
                at[*dim] = first[*dim] + i;
                deeper(len, at, first, rest, visit);
            }
        }
        deeper(len, &mut first.clone(), first, &order, visit);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn extents_are_the_elements_of_a_naive_walk((grid, first, len) in boxes()) {
            let mut elements = Vec::new();
            naive(&len, &first, [0, 1, 2, 3, 4, 5], &mut |at| elements.push(grid.offset(at)));
            elements.sort_unstable();
            let found = extents(&len, &grid, &first);
            let mut walked: Vec<u64> = Vec::new();
            for (offset, bytes) in &found {
                walked.extend((0..bytes / grid.elem_bytes).map(|i| offset + i * grid.elem_bytes));
            }
            walked.sort_unstable();
            prop_assert_eq!(&walked, &elements);
            // As few as there can be: no extent begins where another ends.
            for (offset, bytes) in &found {
                prop_assert!(!found.iter().any(|(other, _)| *other == offset + bytes), "{:?}", found);
            }
        }

        #[test]
        fn pairs_move_every_element_to_its_own_index((a, first, len) in boxes(), (b, size) in grids(),
                                                     shift in prop::array::uniform6(0u32..3)) {
            // The other place holds the same box from another index on.
            prop_assume!((0..DIMS).all(|d| len[d] <= size[d]));
            let mut expected = std::collections::BTreeMap::new();
            naive(&len, &[0; DIMS], [0, 1, 2, 3, 4, 5], &mut |at| {
                let index = |start: &Index| std::array::from_fn(|d| start[d] + at[d]);
                expected.insert(a.offset(&index(&first)), b.offset(&index(&shift)));
            });
            let mut moved = std::collections::BTreeMap::new();
            pairs(&len, (&a, &first), (&b, &shift), &mut |p| {
                for i in 0..p.elements {
                    moved.insert(p.a + i * a.elem_bytes, p.b + i * b.elem_bytes);
                }
            });
            prop_assert_eq!(moved, expected);
        }

        #[test]
        fn canonical_order_is_token_kv_head_element((grid, first, mut len) in boxes()) {
            len[Dim::Block as usize] = 1;
            len[Dim::Layer as usize] = 1;
            let order = [Dim::Block, Dim::Layer, Dim::Token, Dim::Kv, Dim::Head, Dim::Elem].map(|d| d as usize);
            let mut expected = Vec::new();
            naive(&len, &first, order, &mut |at| expected.push(grid.offset(at)));
            let mut walked = Vec::new();
            canonical(&len, &grid, &first, &mut |offset, bytes| {
                walked.extend((0..bytes / grid.elem_bytes).map(|i| offset + i * grid.elem_bytes));
            });
            prop_assert_eq!(walked, expected);
        }

        #[test]
        fn packed_extents_follow_each_other((grid, first, len) in boxes()) {
            let staging = packed(&len, &grid);
            let mut end = 0;
            let mut good = true;
            pairs(&len, (&grid, &first), (&staging, &[0; DIMS]), &mut |p| {
                good &= p.b == end;
                end += p.elements * grid.elem_bytes;
            });
            prop_assert!(good);
            prop_assert_eq!(end, len.iter().map(|n| u64::from(*n)).product::<u64>() * grid.elem_bytes);
        }
    }
}
