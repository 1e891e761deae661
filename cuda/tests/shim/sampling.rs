//! Sampling against a plain oracle that sorts, in f64.

use crate::support::device::{ShimDevice, number};
use lagoon_backend::conformance::Data;
use lagoon_cuda::kernels::sample::{SampleParams, SampleRow, SampledRow, sample};

/// The token that `row` draws from `logits`, and how far the draw was from giving another, as a part of all weights.
fn oracle(logits: &[f32], row: &SampleRow) -> (u32, f64) {
    let mut ranked: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|l| f64::from(*l))).collect();
    // Stable: ties stay in the order of ids.
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    let max = ranked[0].1;
    if row.temperature == 0.0 {
        return (ranked[0].0, 1.0);
    }
    let weight = |logit: f64| ((logit - max) / f64::from(row.temperature)).exp();
    ranked.retain(|(_, logit)| *logit > f64::NEG_INFINITY && weight(*logit) >= f64::from(row.min_p));
    if row.top_k > 0 {
        ranked.truncate(row.top_k as usize);
    }
    if row.top_p < 1.0 {
        let enough = f64::from(row.top_p) * ranked.iter().map(|(_, l)| weight(*l)).sum::<f64>();
        let mut sum = 0.0;
        let kept = ranked.iter().position(|(_, logit)| {
            sum += weight(*logit);
            sum >= enough
        });
        ranked.truncate(kept.map_or(ranked.len(), |last| last + 1));
    }
    ranked.sort_by_key(|(id, _)| *id);
    let total: f64 = ranked.iter().map(|(_, l)| weight(*l)).sum();
    let target = row.uniform * total;
    let (mut sum, mut found, mut margin) = (0.0, None, f64::INFINITY);
    for (id, logit) in &ranked {
        sum += weight(*logit);
        margin = margin.min((sum - target).abs() / total);
        if sum > target && found.is_none() {
            found = Some(*id);
        }
    }
    (found.expect("a token"), margin)
}

fn run(device: &mut ShimDevice, logits: &[Vec<f32>], rows: &[SampleRow], masks: &[u32]) -> Vec<SampledRow> {
    let vocab = logits[0].len();
    // Rows lie further apart than they are long.
    let stride = vocab + 3;
    let mut all = vec![f32::NAN; rows.len() * stride];
    all.chunks_exact_mut(stride).zip(logits).for_each(|(to, from)| to[..vocab].copy_from_slice(from));
    let mut out = vec![SampledRow { token: 77, status: 77 }; rows.len()];
    let params = SampleParams {
        logits: all.as_ptr() as u64,
        rows: rows.as_ptr() as u64,
        out: out.as_mut_ptr() as u64,
        masks: masks.as_ptr() as u64,
        vocab: number(vocab),
        stride: number(stride),
    };
    device.launch(&sample(number(rows.len()), params));
    out
}

#[test]
fn draws_are_those_of_the_oracle() {
    let mut device = ShimDevice::open().expect("the shim");
    let mut data = Data::new(5);
    let mut compared = 0;
    for (round, vocab) in [1usize, 2, 33, 511, 512, 700, 2050].into_iter().cycle().take(28).enumerate() {
        let ties = round % 3 == 0;
        let mut logits = Vec::new();
        let (mut rows, mut masks) = (Vec::new(), Vec::new());
        for i in 0..4u32 {
            let mut row = data.values(vocab);
            if ties {
                row.iter_mut().for_each(|l| *l = (*l * 2.0).round());
            }
            if vocab > 2 && data.one_in(2) {
                row[vocab / 2] = f32::NEG_INFINITY;
            }
            logits.push(row);
            rows.push(SampleRow {
                uniform: f64::from(data.number(0..1 << 20)) / f64::from(1 << 20),
                temperature: [0.7, 1.0, 0.0, 2.5][i as usize],
                top_p: [1.0, 0.9, 0.5, 0.05][data.number(0..4) as usize],
                min_p: [0.0, 0.0, 0.1, 1.0][data.number(0..4) as usize],
                top_k: [0, 1, 5, 40][data.number(0..4) as usize],
                mask: number(masks.len()),
                reserved: 0,
            });
            if data.one_in(2) {
                rows[i as usize].mask = SampleRow::UNMASKED;
            } else {
                masks.extend((0..vocab.div_ceil(32)).map(|_| data.number(0..u32::MAX)));
                // One at least.
                let first = rows[i as usize].mask as usize;
                masks[first] |= 1;
            }
        }
        let got = run(&mut device, &logits, &rows, &masks);
        for ((got, logits), row) in got.iter().zip(&logits).zip(&rows) {
            let mut logits = logits.clone();
            if row.mask != SampleRow::UNMASKED {
                let allows = |i: usize| masks[row.mask as usize + i / 32] >> (i % 32) & 1 == 1;
                logits.iter_mut().enumerate().filter(|(i, _)| !allows(*i)).for_each(|(_, l)| *l = f32::NEG_INFINITY);
            }
            let (want, margin) = oracle(&logits, row);
            // Sums that decide by rounding alone may decide otherwise: a draw on the edge, or a share reached exactly.
            if margin < 1e-9 || (ties && row.top_p < 1.0) {
                assert_eq!(got.status, 0);
                continue;
            }
            compared += 1;
            assert_eq!((got.token, got.status), (want, 0), "{vocab} logits, {row:?}");
        }
    }
    assert!(compared > 60, "{compared} draws were compared");
}

#[test]
fn ties_go_to_the_lower_id() {
    let mut device = ShimDevice::open().expect("the shim");
    let logits = vec![[1.0f32, 3.0, 3.0, -1.0, 3.0].to_vec(); 4];
    let row = |top_k, top_p, temperature, uniform| SampleRow {
        uniform,
        temperature,
        top_p,
        min_p: 0.0,
        top_k,
        mask: SampleRow::UNMASKED,
        reserved: 0,
    };
    // Greedy; two of three equals by count; the first two of three equals by share; the last of all.
    let rows = [row(0, 1.0, 0.0, 0.9), row(2, 1.0, 1.0, 0.9), row(3, 0.6, 1.0, 0.99), row(3, 1.0, 1.0, 0.99)];
    let tokens: Vec<u32> = run(&mut device, &logits, &rows, &[]).iter().map(|r| r.token).collect();
    assert_eq!(tokens, [1, 2, 2, 4]);
}

#[test]
fn invalid_parameters_are_reported() {
    let mut device = ShimDevice::open().expect("the shim");
    let row = SampleRow {
        uniform: 0.5,
        temperature: 1.0,
        top_p: 0.9,
        min_p: 0.0,
        top_k: 3,
        mask: SampleRow::UNMASKED,
        reserved: 0,
    };
    let logits = [vec![0.0, f32::NAN, 1.0], vec![0.0, 1.0, f32::INFINITY], vec![f32::NEG_INFINITY; 3]];
    let got = run(&mut device, &logits, &[row; 3], &[]);
    let status: Vec<_> = got.iter().map(|r| (r.token, r.status)).collect();
    assert_eq!(status, [(1, 1), (2, 1), (0, 2)]);
    // A mask that allows nothing, and one that allows the token that is no number.
    let masked = [SampleRow { mask: 0, ..row }, SampleRow { mask: 1, ..row }];
    let got = run(&mut device, &[vec![0.0, 1.0, 2.0], vec![0.0, f32::NAN, 1.0]], &masked, &[0, 2]);
    assert_eq!(got.iter().map(|r| r.status).collect::<Vec<_>>(), [2, 1]);
}
