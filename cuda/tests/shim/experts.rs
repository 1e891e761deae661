//! Mixtures beyond the conformance suite: every kernel of the grouped products, large tiles, one term, weights of two types, all
//! the experts that there may be.

use crate::support::device::ShimDevice;
use lagoon_backend::conformance::Data;
use lagoon_backend::{
    Activation, CpuDevice, Device, ExpertBuffers, Experts, GroupScore, Routing, Scoring, WeightFormat, WeightPart,
    WeightSource,
};
use lagoon_cuda::kernels::attention::Precision;
use lagoon_types::DType;

const ROUTING: Routing = Routing {
    top_k: 1,
    scoring: Scoring::Softmax,
    normalised: true,
    scale: 1.0,
    groups: 1,
    top_groups: 1,
    group_score: GroupScore::TwoBest,
};

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    hidden: usize,
    n: usize,
    count: usize,
    up: DType,
    down: DType,
    activation: Activation,
    routing: Routing,
}

/// The mixture of a case on a device. Inputs are the same on every device.
fn run<D: Device>(device: &mut D, case: &Case) -> Vec<f32> {
    let Case { rows, hidden, n, count, activation, routing, .. } = *case;
    let mut data = Data::new(71);
    let columns = activation.inputs() * n;
    let up = data.weight(device, case.up, count * columns, hidden).0;
    let down = data.weight(device, case.down, count * hidden, n).0;
    let up_bias = data.weight(device, case.down, count, columns).0;
    let choice_bias = data.weight(device, case.up, 1, count).0;
    let x = data.tensor(device, rows, hidden).0;
    let logits = data.tensor(device, rows, count).0;
    let mut out = data.tensor(device, rows, hidden).0;
    let mut buffers = ExpertBuffers::new(device, rows, routing.top_k, (hidden, n), activation).expect("buffers");
    let experts = Experts {
        count,
        up: &up,
        up_bias: Some(&up_bias),
        down: &down,
        down_bias: None,
        choice_bias: Some(&choice_bias),
        activation,
        routing,
    };
    device.experts(&x, &logits, &experts, rows, &mut buffers, &mut out).expect("experts");
    let mut got = Vec::new();
    device.read(&out, 0..rows, 0..hidden, &mut got).expect("read");
    got
}

/// Compares a case with the host's backend, whose sums are exact to f32, and asserts which kernels the products took.
fn check(case: &Case, precision: Precision, names: [&str; 2]) {
    let mut device = ShimDevice::open().expect("the shim");
    device.tuning.precision = precision;
    let (got, want) = (run(&mut device, case), run(&mut CpuDevice::new(), case));
    assert_eq!(device.grouped, names, "{case:?}");
    let most = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    // One term of bf16 loses 2^-9 of an activation, two of them 2^-17.
    let bound = most * if precision == Precision::Fast { 1e-2 } else { 5e-5 };
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert!((got - want).abs() <= bound, "element {i} is {got}, not {want} ({case:?} {precision:?})");
    }
}

#[test]
fn large_and_small_tiles() {
    let (silu, clamped) = (Activation::SiluMul, Activation::ClampedSwiglu);
    for (dtype, name) in [(DType::F16, "f16"), (DType::BF16, "bf16")] {
        let routing = Routing { top_k: 1, ..ROUTING };
        // Rows of 13 are padded more than a row of f32 has room for: such terms are in scratch.
        let large = Case { rows: 150, hidden: 13, n: 72, count: 1, up: dtype, down: dtype, activation: silu, routing };
        let routing = Routing { top_k: 2, ..ROUTING };
        let small = Case { rows: 40, hidden: 72, n: 40, count: 3, activation: clamped, routing, ..large };
        for (precision, kind) in [(Precision::Exact, "exact"), (Precision::Fast, "fast")] {
            check(&large, precision, [&format!("grouped_gemm_{name}_{kind}_128"); 2].map(String::as_str));
            check(&small, precision, [&format!("grouped_gemm_{name}_{kind}_64"); 2].map(String::as_str));
        }
    }
}

#[test]
fn weights_of_two_types() {
    let (up, down) = (DType::F32, DType::BF16);
    let (activation, routing) = (Activation::Gelu, Routing { top_k: 2, ..ROUTING });
    let case = Case { rows: 110, hidden: 24, n: 10, count: 2, up, down, activation, routing };
    check(&case, Precision::Exact, ["grouped_gemm_f32", "grouped_gemm_bf16_exact_64"]);
    let few = Case { rows: 3, up: DType::F16, ..case };
    check(&few, Precision::Exact, ["grouped_gemv_f16", "grouped_gemv_bf16"]);
}

#[test]
fn every_activation() {
    use Activation::{ClampedSwiglu, Gelu, GeluTanh, GeluTanhMul, SiluMul};
    let routing = Routing { top_k: 2, ..ROUTING };
    for activation in [SiluMul, Gelu, GeluTanh, GeluTanhMul, ClampedSwiglu] {
        // Odd columns: the last gates' warp has half of its own.
        let few = Case { rows: 5, hidden: 40, n: 9, count: 4, up: DType::F32, down: DType::F32, activation, routing };
        check(&few, Precision::Exact, ["grouped_gemv_f32"; 2]);
        check(&Case { rows: 20, ..few }, Precision::Exact, ["grouped_gemm_f32"; 2]);
    }
}

#[test]
fn as_many_experts_as_there_may_be() {
    let (dtype, activation) = (DType::BF16, Activation::GeluTanhMul);
    for (groups, top_groups) in [(1, 1), (64, 5)] {
        let routing = Routing { top_k: 32, scoring: Scoring::Sigmoid, groups, top_groups, ..ROUTING };
        let case = Case { rows: 2, hidden: 8, n: 8, count: 1024, up: dtype, down: dtype, activation, routing };
        check(&case, Precision::Exact, ["grouped_gemv_bf16"; 2]);
        let routing = Routing { group_score: GroupScore::Best, ..routing };
        check(&Case { routing, ..case }, Precision::Exact, ["grouped_gemv_bf16"; 2]);
    }
}

/// A mixture whose gates, ups and down projections are packed in formats of their own gives what the host's backend gives, whose
/// sums are as exact; one, few and many rows.
#[test]
fn gates_and_ups_of_two_formats() {
    let (count, wide, activation) = (3, 256, Activation::SiluMul);
    let routing = Routing { top_k: 2, ..ROUTING };
    for (rows, precision) in
        [(1, Precision::Exact), (9, Precision::Exact), (40, Precision::Exact), (40, Precision::Fast)]
    {
        let mixture = |device: &mut dyn FnMut(WeightSource, WeightSource, Vec<f32>, Vec<f32>) -> Vec<f32>| {
            let mut data = Data::new(72);
            let mut parts = Vec::new();
            for _ in 0..count {
                for (format, rows) in [(WeightFormat::Q4K, wide), (WeightFormat::Q6K, wide)] {
                    parts.push(WeightPart { rows, format, bytes: data.packed(format, rows * wide).0.into() });
                }
            }
            let bytes = data.packed(WeightFormat::Q8_0, count * wide * wide).0.into();
            let down = vec![WeightPart { rows: count * wide, format: WeightFormat::Q8_0, bytes }];
            let (x, logits) = (data.values(rows * wide), data.values(rows * count));
            device(WeightSource { cols: wide, parts }, WeightSource { cols: wide, parts: down }, x, logits)
        };
        let mut shim = ShimDevice::open().expect("the shim");
        shim.tuning.precision = precision;
        let got =
            mixture(&mut |up, down, x, logits| mixed(&mut shim, (up, down), &x, &logits, (count, activation, routing)));
        let mut host = CpuDevice::new();
        let want =
            mixture(&mut |up, down, x, logits| mixed(&mut host, (up, down), &x, &logits, (count, activation, routing)));
        let most = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        // The host rounds activations to 16 bits; one term of f16 loses 2^-12 of an activation and of an element.
        let bound = most * if precision == Precision::Fast { 2e-3 } else { 2e-4 };
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() <= bound, "element {i} of {rows} rows is {got}, not {want} ({precision:?})");
        }
    }
}

fn mixed<D: Device>(
    device: &mut D,
    (up, down): (WeightSource, WeightSource),
    x: &[f32],
    logits: &[f32],
    (count, activation, routing): (usize, Activation, Routing),
) -> Vec<f32> {
    let (hidden, rows) = (up.cols, logits.len() / count);
    let (up, down) = (device.weight(up).expect("weight"), device.weight(down).expect("weight"));
    let mut tensor = |values: &[f32]| {
        let mut tensor = device.tensor(rows, values.len() / rows).expect("tensor");
        device.write(&mut tensor, 0, values).expect("write");
        tensor
    };
    let (x, logits) = (tensor(x), tensor(logits));
    let mut out = device.tensor(rows, hidden).expect("tensor");
    let mut buffers = ExpertBuffers::new(device, rows, routing.top_k, (hidden, hidden), activation).expect("buffers");
    let experts =
        Experts { count, up: &up, up_bias: None, down: &down, down_bias: None, choice_bias: None, activation, routing };
    device.experts(&x, &logits, &experts, rows, &mut buffers, &mut out).expect("experts");
    let mut got = Vec::new();
    device.read(&out, 0..rows, 0..hidden, &mut got).expect("read");
    got
}
