//! Prefill on warpgroup products, fed by the copy engine. The host's model of both is our understanding of them; a GPU proves
//! it.

use crate::attention::{Case, check, compare, geometry};
use crate::support::device::ShimDevice;
use crate::support::shim::{ORDERS, SANITIZE, SKIPPED_TILE, STALE_STAGE, Shim, library, mutant};
use lagoon_cuda::kernels::attention::{KvView, Precision};
use lagoon_cuda::kernels::boxes::{KvMaps, MapShape, TensorMap};
use lagoon_types::KvDType;

/// In each order of turns.
fn check_orders(case: Case) {
    for turn in 0..u64::try_from(ORDERS).expect("few") {
        check(&Case { precision: Precision::Fast, wgmma: true, turn, ..case.clone() });
    }
}

#[test]
fn types_head_sizes_windows_and_biases() {
    for dtype in [KvDType::F16, KvDType::BF16] {
        for head_dim in [64, 128] {
            for (window, alibi, seqs) in
                [(None, false, vec![(70, 0), (33, 401)]), (Some(90), true, vec![(140, 60), (20, 0)])]
            {
                let geometry = geometry(3, 1, head_dim);
                check_orders(Case { geometry, dtype, window, alibi, seqs, ..Case::default() });
            }
        }
    }
}

#[test]
fn groups_of_every_size() {
    for group in 1..=8 {
        let seqs = vec![(130 / group + 1, 37), (17, 3)];
        check_orders(Case { geometry: geometry(2 * group, 2, 64), seqs, ..Case::default() });
    }
    // One token of many heads; one warpgroup without rows, and one with a single row.
    for (heads, rows, pos0) in [(20, 1, 150), (64, 1, 400), (65, 1, 127), (127, 1, 128), (128, 1, 129)] {
        check_orders(Case { geometry: geometry(heads, 1, 128), seqs: vec![(rows, pos0)], ..Case::default() });
    }
}

/// Tiles and windows that end where boxes, stages and tiles do, and beside.
#[test]
fn edges_of_windows_and_tiles() {
    for window in [1, 2, 63, 64, 65, 127, 128, 129] {
        let seqs = vec![(40, 250), (18, 128 - 18), (19, 128 - 18)];
        let (window, alibi) = (Some(window), window % 2 == 1);
        check_orders(Case { geometry: geometry(2, 1, 64), window, alibi, seqs, ..Case::default() });
    }
}

/// Boxes of each height, in runs that end anywhere in a tile; what lies between runs is not read.
#[test]
fn runs_of_any_length() {
    for run_max in [1, 3, 5, 16, 17, 64, 100, 1000] {
        let (dtype, seqs) = (KvDType::F16, vec![(65, 300), (20, 0)]);
        check_orders(Case { geometry: geometry(1, 1, 128), dtype, run_max, seqs, ..Case::default() });
    }
}

#[test]
fn pieces_of_long_contexts() {
    check_orders(Case { geometry: geometry(2, 1, 64), seqs: vec![(33, 2300)], run_max: 700, ..Case::default() });
}

/// Mutants are wrong where an item has three tiles of keys and right where it has fewer, in each order of turns: what a gate has
/// to reject is the mistake and not a broken library.
#[test]
fn mutants_are_wrong_in_their_third_tile() {
    if std::env::var_os(SANITIZE).is_some() {
        return;
    }
    for (path, is_right) in [(library(), true), (mutant(&STALE_STAGE), false), (mutant(&SKIPPED_TILE), false)] {
        let path = path.expect("compiled");
        let shim: &Shim = Box::leak(Box::new(Shim::open(&path).expect("loaded")));
        for (pos0, three) in [(210, false), (300, true)] {
            for turn in 0..u64::try_from(ORDERS).expect("few") {
                let (geometry, seqs) = (geometry(2, 1, 64), vec![(40, pos0)]);
                let case = Case { geometry, seqs, precision: Precision::Fast, wgmma: true, turn, ..Case::default() };
                let found = compare(ShimDevice::over(shim), &case);
                assert_eq!(found.is_ok(), is_right || !three, "{}, turn {turn}: {found:?}", path.display());
            }
        }
    }
}

#[test]
fn planes_that_take_boxes() {
    let view = KvView { k: 0x1000, v: 0x2000, token_stride: 256, head_stride: 64 };
    assert!(view.takes_boxes(64));
    for other in [
        KvView { k: 0x1040, ..view },
        KvView { v: 0x2010, ..view },
        KvView { token_stride: 96, ..view },
        KvView { head_stride: 128, ..view },
    ] {
        assert!(!other.takes_boxes(64), "{other:?}");
    }
    assert!(!KvView { head_stride: 96, ..view }.takes_boxes(96));
    let mut shapes: Vec<MapShape> = Vec::new();
    let maps = KvMaps::new(view, KvDType::BF16, 4, 100, |shape| {
        shapes.push(*shape);
        Ok::<_, ()>(TensorMap([shapes.len() as u64; 16]))
    });
    let maps = maps.expect("encoded");
    assert_eq!((maps.k[0].0[0], maps.k[3].0[0], maps.v[0].0[0]), (1, 4, 5));
    let want = MapShape { dtype: KvDType::BF16, address: 0x2000, dims: [256, 100], stride: 512, boxed: [64, 16] };
    assert_eq!((shapes.len(), shapes[5]), (8, want));
}
