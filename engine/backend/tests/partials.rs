//! Properties of scale-reduce: merging any split of the keys, in any order, with empty parts and extreme scores, is
//! attention over the whole. Held for the host's `Partial` and for a device's attention and merge.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tests")]

use lagoon_backend::{AttnBatch, AttnRows, CpuDevice, Device, Partials};
use lagoon_types::{Alibi, AttentionGeometry, DType, KvDType, KvRun, KvShape, Partial};
use proptest::prelude::*;

const GEOMETRY: AttentionGeometry = AttentionGeometry { heads: 2, kv_heads: 1, head_dim: 8, latent: false };
const U: f64 = 1.0 / (1 << 24) as f64;

/// One query row with given scores: keys carry their score, so extremes are reached exactly.
#[derive(Clone, Debug)]
struct Keys {
    /// `[keys][heads]`.
    scores: Vec<[f32; 2]>,
    /// `[keys][head_dim]`.
    values: Vec<[f32; 8]>,
    /// Which part each key goes to.
    part: Vec<usize>,
    /// Order in which parts are merged.
    order: Vec<usize>,
}

fn keys() -> impl Strategy<Value = Keys> {
    let score = prop_oneof![4 => -5.0f32..5.0, 1 => -1e4f32..1e4, 1 => Just(1e4), 1 => Just(-1e4)];
    (1usize..40, 1usize..8).prop_flat_map(move |(keys, parts)| {
        (
            prop::collection::vec([score.clone(), score.clone()], keys),
            prop::collection::vec(prop::array::uniform8(-3.0f32..3.0), keys),
            prop::collection::vec(0..parts, keys),
            Just((0..parts).collect::<Vec<_>>()).prop_shuffle(),
        )
            .prop_map(|(scores, values, part, order)| Keys { scores, values, part, order })
    })
}

/// Attention of the one row over the chosen keys, in f64: output and log-sum-exp of each head.
fn oracle(keys: &Keys, chosen: impl Fn(usize) -> bool) -> Option<([Vec<f64>; 2], [f64; 2])> {
    let chosen: Vec<usize> = (0..keys.scores.len()).filter(|i| chosen(*i)).collect();
    let head = |h: usize| {
        let max = chosen.iter().map(|i| f64::from(keys.scores[*i][h])).fold(f64::NEG_INFINITY, f64::max);
        let weight = |i: &usize| (f64::from(keys.scores[*i][h]) - max).exp();
        let sum: f64 = chosen.iter().map(weight).sum();
        let out =
            (0..8).map(|d| chosen.iter().map(|i| weight(i) / sum * f64::from(keys.values[*i][d])).sum()).collect();
        (out, max + sum.ln())
    };
    let ((out0, lse0), (out1, lse1)) = (head(0), head(1));
    (!chosen.is_empty()).then_some(([out0, out1], [lse0, lse1]))
}

/// The partial of one part, rounded to f32; where it saw nothing it holds garbage.
fn partial(keys: &Keys, part: usize) -> Partial {
    let count = keys.part.iter().filter(|p| **p == part).count();
    let Some((out, lse)) = oracle(keys, |i| keys.part[i] == part) else {
        return Partial { heads: 2, head_dim: 8, out: vec![f32::NAN; 16], lse: vec![f32::NAN; 2], count: vec![0] };
    };
    Partial {
        heads: 2,
        head_dim: 8,
        out: out.concat().into_iter().map(|v| v as f32).collect(),
        lse: lse.iter().map(|v| *v as f32).collect(),
        count: vec![u32::try_from(count).unwrap()],
    }
}

fn upload(device: &mut CpuDevice, partial: &Partial) -> Partials<<CpuDevice as Device>::Tensor> {
    let mut on_device = Partials::new(device, 1, GEOMETRY).unwrap();
    device.write(&mut on_device.out, 0, &partial.out).unwrap();
    device.write(&mut on_device.lse, 0, &partial.lse).unwrap();
    on_device.count.clone_from(&partial.count);
    on_device
}

/// The log-sum-exps are rounded to f32, so their error in absolute terms, and with it that of the weights, grows with
/// their magnitude; each merge adds some roundings of its own.
fn check(keys: &Keys, out: &[f32], lse: &[f32]) {
    let (want_out, want_lse) = oracle(keys, |_| true).unwrap();
    for head in 0..2 {
        let largest = keys.scores.iter().map(|s| f64::from(s[head].abs())).fold(0.0, f64::max);
        let bound = 4.0 * keys.order.len() as f64 * U * (8.0 + largest);
        assert!((f64::from(lse[head]) - want_lse[head]).abs() <= bound, "lse {} for {}", lse[head], want_lse[head]);
        for (got, want) in out[head * 8..].iter().zip(&want_out[head]) {
            assert!((f64::from(*got) - want).abs() <= 2.0 * bound * 3.0, "{got} for {want} (bound {bound})");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn merging_any_split_is_the_whole(keys in keys()) {
        let mut device = CpuDevice::with_threads(1);
        let mut acc = Partial::empty(1, 2, 8);
        let mut on_device = upload(&mut device, &acc);
        for part in &keys.order {
            let part = partial(&keys, *part);
            acc.merge(&part);
            let part = upload(&mut device, &part);
            device.merge(&mut on_device, &part, GEOMETRY).unwrap();
        }
        prop_assert_eq!(acc.count[0] as usize, keys.scores.len());
        prop_assert_eq!(&on_device.count, &acc.count);
        check(&keys, &acc.out, &acc.lse);
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        device.read(&on_device.out, 0..1, 0..16, &mut out).unwrap();
        device.read(&on_device.lse, 0..1, 0..2, &mut lse).unwrap();
        check(&keys, &out, &lse);
    }

    /// Attention over every piece of a random cut, merged in a random order, is attention over all of it, for several
    /// rows under the causal mask, a window and biases by distance.
    #[test]
    fn attention_over_any_cut_merges_to_the_whole(
        context in 1u32..300,
        rows in 1u32..20,
        window in prop::option::of(1u32..200),
        bias_max in prop::option::of(0.5f32..10.0),
        capped in any::<bool>(),
        steepness in prop_oneof![Just(1.0f32), Just(60.0)],
        cuts in prop::collection::vec(0.0f64..1.0, 0..6),
        seed in any::<u64>(),
    ) {
        let context = context.max(rows);
        let mut device = CpuDevice::with_threads(1);
        let mut data = lagoon_backend::conformance::Data::new(seed);
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 8, dtype: KvDType::F32 };
        let mut kv = device.kv(shape, context as usize).unwrap();
        let (bytes, _) = data.stored(DType::F32, context as usize * 16);
        device.kv_write(&mut kv, 0, 0, &bytes).unwrap();
        let queries: Vec<f32> = data.values(rows as usize * 16).into_iter().map(|v| v * steepness).collect();
        let mut q = device.tensor(rows as usize, 16).unwrap();
        device.write(&mut q, 0, &queries).unwrap();
        let mut edges: Vec<u32> = cuts.iter().map(|c| (c * f64::from(context)) as u32).collect();
        edges.extend([0, context]);
        edges.sort_unstable();
        let mut pieces: Vec<(u32, u32)> = edges.windows(2).map(|w| (w[0], w[1])).collect();
        let order = data.permutation(u32::try_from(pieces.len()).unwrap());
        pieces = order.iter().map(|i| pieces[*i as usize]).collect();

        let alibi = bias_max.map(|bias_max| Alibi { bias_max });
        let softcap = capped.then_some(2.0);
        let attend = |device: &mut CpuDevice, from: u32, to: u32| {
            let runs = [KvRun { base: from, len: to - from, first_pos: from }];
            let runs = if from == to { &runs[..0] } else { &runs[..] };
            let seqs =
                [AttnRows { row0: 0, rows, pos0: context - rows, run0: 0, runs: u32::try_from(runs.len()).unwrap() }];
            let batch = AttnBatch { geometry: GEOMETRY, scale: 0.35, window, alibi, softcap, seqs: &seqs, runs };
            let mut out = Partials::new(device, rows as usize, GEOMETRY).unwrap();
            device.attention(&q, &batch, &kv, 0, &mut out).unwrap();
            out
        };
        let whole = attend(&mut device, 0, context);
        let mut acc = Partials::new(&mut device, rows as usize, GEOMETRY).unwrap();
        acc.count.resize(rows as usize, 0);
        for (from, to) in pieces {
            let piece = attend(&mut device, from, to);
            device.merge(&mut acc, &piece, GEOMETRY).unwrap();
        }
        prop_assert_eq!(&acc.count, &whole.count);
        let (mut got, mut want) = (Vec::new(), Vec::new());
        device.read(&acc.out, 0..rows as usize, 0..16, &mut got).unwrap();
        device.read(&acc.lse, 0..rows as usize, 0..2, &mut got).unwrap();
        device.read(&whole.out, 0..rows as usize, 0..16, &mut want).unwrap();
        device.read(&whole.lse, 0..rows as usize, 0..2, &mut want).unwrap();
        for (got, want) in got.iter().zip(&want) {
            let bound = 1e-6 * f64::from(steepness) * (8.0 + f64::from(want.abs()));
            prop_assert!(f64::from((got - want).abs()) <= bound, "{} for {}", got, want);
        }
    }
}
