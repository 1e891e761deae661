//! Mixtures of experts against f64.

use super::data::{DTYPES, Data, read};
use super::matmul::{activated, bound, oracle};
use super::{Tolerance, assert_close};
use crate::{Activation, Device, ExpertBuffers, Experts, GroupScore, Routing, Scoring};
use lagoon_types::DType;

/// A mixture's shape.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    hidden: usize,
    /// Columns of an expert.
    n: usize,
    count: usize,
    routing: Routing,
    activation: Activation,
    /// With biases of the products and of the choice.
    biased: bool,
}

/// Mixtures in few rows and many, with one expert and with all, with odd widths, with equal logits, with biases, groups
/// and every scoring.
pub fn experts_match<D: Device>(device: &mut D, tolerance: Tolerance) {
    let (scoring, group_score) = (Scoring::Softmax, GroupScore::TwoBest);
    let plain = Routing { top_k: 1, scoring, normalised: false, scale: 1.0, groups: 1, top_groups: 1, group_score };
    let normal = Routing { normalised: true, ..plain };
    let sigmoid = Routing { scoring: Scoring::Sigmoid, scale: 2.5, ..normal };
    let grouped = Routing { top_k: 4, groups: 8, top_groups: 3, ..sigmoid };
    let limited = Routing { top_k: 6, groups: 8, top_groups: 3, scale: 16.0, group_score: GroupScore::Best, ..plain };
    let (silu, gelu, clamped) = (Activation::SiluMul, Activation::Gelu, Activation::ClampedSwiglu);
    let cases = [
        (1, 40, 33, 1, normal, silu, false),
        (1, 64, 96, 8, Routing { top_k: 2, ..normal }, silu, false),
        (2, 72, 40, 5, Routing { top_k: 5, ..plain }, silu, true),
        (3, 96, 17, 7, Routing { top_k: 3, ..plain }, gelu, false),
        (17, 40, 64, 60, Routing { top_k: 4, ..normal }, clamped, true),
        (65, 72, 48, 6, Routing { top_k: 2, ..sigmoid }, silu, true),
        (130, 96, 72, 3, plain, silu, false),
        (19, 40, 24, 32, grouped, silu, true),
        (21, 40, 24, 32, Routing { scoring: Scoring::Softmax, ..grouped }, silu, false),
        // Groups of five, three, seven and one, as many experts as the groups that are kept have, and a bias of the choice.
        (37, 40, 24, 40, limited, silu, false),
        (23, 40, 24, 21, Routing { groups: 7, top_groups: 2, ..limited }, silu, false),
        (18, 40, 24, 21, Routing { groups: 3, top_groups: 1, ..limited }, gelu, true),
        (9, 40, 24, 11, Routing { groups: 11, top_groups: 6, normalised: true, ..limited }, silu, false),
        (12, 40, 24, 160, Routing { scoring: Scoring::Sigmoid, ..limited }, silu, true),
        (33, 64, 130, 128, Routing { top_k: 8, ..normal }, silu, false),
        // Experts of more rows than any tile, and widths that no vector divides.
        (200, 71, 45, 2, plain, gelu, true),
        (0, 40, 24, 4, Routing { top_k: 2, ..normal }, silu, false),
    ];
    for dtype in DTYPES {
        for (rows, hidden, n, count, routing, activation, biased) in cases {
            mixture(device, dtype, Shape { rows, hidden, n, count, routing, activation, biased }, tolerance);
        }
    }
}

fn mixture<D: Device>(device: &mut D, dtype: DType, shape: Shape, tolerance: Tolerance) {
    let Shape { rows, hidden, n, count, routing, activation, biased } = shape;
    let mut data = Data::new((rows * 1_000_000 + count * 1000 + n) as u64);
    let columns = activation.inputs() * n;
    let (up, up_exact) = data.weight(device, dtype, count * columns, hidden);
    let (down, down_exact) = data.weight(device, dtype, count * hidden, n);
    let (up_bias, up_bias_exact) = data.weight(device, dtype, count, columns);
    let (down_bias, down_bias_exact) = data.weight(device, dtype, count, hidden);
    let (choice_bias, choice_exact) = data.weight(device, dtype, 1, count);
    let given = |exact: f32| if biased { f64::from(exact) } else { 0.0 };
    // Tensors have more rows than the operation works on.
    let (x, values) = data.tensor(device, rows + 2, hidden);
    let mut chances: Vec<f32> = data.values((rows + 1) * count).into_iter().map(|v| v * 2.0).collect();
    // Equal logits: the lower index wins, of experts and of groups. In every other row some are equal.
    chances[..count].fill(0.25);
    chances.chunks_exact_mut(count).skip(2).step_by(2).flatten().for_each(|logit| *logit = logit.round());
    let logits = super::data::tensor(device, count, &chances);
    let (mut out, before) = data.tensor(device, rows + 1, hidden);
    let mut buffers = ExpertBuffers::new(device, rows + 1, routing.top_k, (hidden, n), activation).expect("buffers");
    let [up_bias, down_bias, choice_bias] = [&up_bias, &down_bias, &choice_bias].map(|w| biased.then_some(w));
    let experts = Experts { count, up: &up, up_bias, down: &down, down_bias, choice_bias, activation, routing };
    device.experts(&x, &logits, &experts, rows, &mut buffers, &mut out).expect("experts");

    let mut want: Vec<f64> = before.iter().map(|v| f64::from(*v)).collect();
    let mut errors: Vec<f64> = want.iter().map(|v| 1e-6 * v.abs()).collect();
    for row in 0..rows {
        for (expert, share) in choose(&chances[row * count..][..count], biased.then_some(&choice_exact), routing) {
            let x = &values[row * hidden..][..hidden];
            let (mut product, mut sums) =
                oracle(x, 1, hidden, columns, |r, i| up_exact[(expert * columns + r) * hidden + i]);
            for (i, (product, sum)) in product.iter_mut().zip(&mut sums).enumerate() {
                let bias = given(up_bias_exact[expert * columns + i]);
                (*product, *sum) = (*product + bias, *sum + bias.abs());
            }
            let act: Vec<(f64, f64)> = (0..n)
                .map(|i| activated(activation, &product, &sums, i, bound(hidden, dtype, tolerance), tolerance))
                .collect();
            for col in 0..hidden {
                let weights = &down_exact[(expert * hidden + col) * n..][..n];
                let terms =
                    || act.iter().zip(weights).map(|((a, e), w)| (a * f64::from(*w), a.abs(), *e, f64::from(w.abs())));
                let bias = given(down_bias_exact[expert * hidden + col]);
                let value = bias + terms().map(|(term, ..)| term).sum::<f64>();
                let sum = bias.abs() + terms().map(|(_, a, e, w)| (a + e) * w).sum::<f64>();
                let carried: f64 = terms().map(|(_, _, e, w)| e * w).sum();
                want[row * hidden + col] += share * value;
                let error = bound(n, dtype, tolerance) * sum + carried;
                // The share's own error: exponentials of logits up to 12 apart, and their sum.
                errors[row * hidden + col] += share * (error + 1e-5 * tolerance.factor * sum);
            }
        }
    }
    let got = read(device, &out, rows + 1, hidden);
    assert_close(
        &format!("experts {dtype} {shape:?}"),
        &got,
        &want,
        |i| if i < rows * hidden { errors[i] } else { 0.0 },
    );
}

/// The experts of a row, by rank, and their shares.
fn choose(logits: &[f32], bias: Option<&Vec<f32>>, routing: Routing) -> Vec<(usize, f64)> {
    let Routing { top_k, scoring, normalised, scale, groups, top_groups, group_score } = routing;
    let exp = |logit: &f32| f64::from(*logit).exp();
    let all: f64 = logits.iter().map(exp).sum();
    let score = |logit: &f32| match scoring {
        Scoring::Softmax => exp(logit) / all,
        Scoring::Sigmoid => 1.0 / (1.0 + 1.0 / exp(logit)),
    };
    let scores: Vec<f64> = logits.iter().map(score).collect();
    let key = |expert: usize| scores[expert] + bias.map_or(0.0, |bias| f64::from(bias[expert]));
    let descending = |order: &mut Vec<usize>, key: &dyn Fn(usize) -> f64| {
        order.sort_by(|a, b| key(*b).total_cmp(&key(*a)).then(a.cmp(b)));
    };
    let size = logits.len() / groups;
    let terms = if group_score == GroupScore::Best { 1 } else { 2 };
    let compared = |group: usize| {
        let mut keys: Vec<f64> = (group * size..(group + 1) * size).map(key).collect();
        keys.sort_by(|a, b| b.total_cmp(a));
        keys.iter().take(terms).sum()
    };
    let mut kept: Vec<usize> = (0..groups).collect();
    descending(&mut kept, &compared);
    kept.truncate(top_groups);
    let mut order: Vec<usize> = (0..logits.len()).filter(|expert| kept.contains(&(expert / size))).collect();
    descending(&mut order, &key);
    order.truncate(top_k);
    let sum: f64 = if normalised { order.iter().map(|expert| scores[*expert]).sum() } else { 1.0 };
    order.into_iter().map(|expert| (expert, scores[expert] * f64::from(scale) / sum)).collect()
}
