//! Products beyond the conformance suite: large tiles, parts of k, biases, one term, activations that f16 cannot hold.

use crate::support::device::{ShimDevice, Tensor, number};
use lagoon_backend::conformance::Data;
use lagoon_backend::{Activation, Device, Mode};
use lagoon_cuda::kernels::attention::Precision;
use lagoon_cuda::kernels::linear::{Launches, Product};
use lagoon_cuda::kernels::packed::{FORMATS, Packed};
use lagoon_cuda::kernels::weight_ld;
use lagoon_types::DType;

struct Case {
    rows: usize,
    n: usize,
    k: usize,
    dtype: DType,
    precision: Precision,
    /// Multiprocessors that the plan is for: few make large tiles, many make parts of k.
    sms: u32,
    /// Largest activation, about.
    magnitude: f32,
    add: bool,
    bias: bool,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            rows: 20,
            n: 70,
            k: 72,
            dtype: DType::BF16,
            precision: Precision::Exact,
            sms: 8,
            magnitude: 1.0,
            add: false,
            bias: true,
        }
    }
}

/// Runs a case and compares it with f64; the names of the kernels that it took.
fn check(case: &Case) -> Vec<&'static str> {
    let mut device = ShimDevice::open().expect("the shim");
    device.tuning.precision = case.precision;
    device.tuning.sms = case.sms;
    let mut data = Data::new(7);
    let (rows, n, k, size) = (case.rows, case.n, case.k, case.dtype.size());
    let x: Vec<f32> = data.values(rows * k).iter().map(|v| v * case.magnitude).collect();
    let ld = weight_ld(k, size);
    let (mut bytes, mut weight) = (vec![0u128; n * ld * size / 16], vec![0.0f32; n * k]);
    for row in 0..n {
        let (stored, exact) = data.stored(case.dtype, k);
        bytemuck::cast_slice_mut::<u128, u8>(&mut bytes)[row * ld * size..][..k * size].copy_from_slice(&stored);
        weight[row * k..][..k].copy_from_slice(&exact);
    }
    let (bias_bytes, bias) = data.stored(case.dtype, n);
    let before = data.values(rows * n);
    let mut out = before.clone();
    let product = Product {
        x: x.as_ptr() as u64,
        x_stride: number(k),
        w: bytes.as_ptr() as u64,
        dtype: case.dtype,
        factor: 1.0,
        bias: if case.bias { bias_bytes.as_ptr() as u64 } else { 0 },
        out: out.as_mut_ptr() as u64,
        out_stride: number(n),
        rows: number(rows),
        n: number(n),
        k: number(k),
        add: case.add,
        activation: None,
    };
    device.product(&product);
    // What a term loses of each activation: half a unit of the last of its bits.
    let loss = match (case.precision, case.dtype) {
        (Precision::Fast, DType::BF16) if rows > 2 => 2f64.powi(-9),
        (Precision::Fast, DType::F16) if rows > 16 => 2f64.powi(-12),
        (_, DType::BF16) => 2f64.powi(-17),
        _ => 2f64.powi(-21),
    };
    for row in 0..rows {
        for col in 0..n {
            let mut want = if case.add { f64::from(before[row * n + col]) } else { 0.0 };
            want += if case.bias { f64::from(bias[col]) } else { 0.0 };
            let mut sum = want.abs();
            for i in 0..k {
                let product = f64::from(x[row * k + i]) * f64::from(weight[col * k + i]);
                want += product;
                sum += product.abs();
            }
            let got = f64::from(out[row * n + col]);
            assert!((got - want).abs() <= loss * sum, "row {row} column {col} is {got}, not {want} ({rows} {n} {k})");
        }
    }
    match product.launches(0, case.precision, case.sms) {
        Launches::Stream(launch) => vec![launch.name],
        Launches::Tiles { split, gemm, reduce } => {
            split.map(|l| l.name).into_iter().chain([gemm.name]).chain(reduce.map(|l| l.name)).collect()
        }
    }
}

#[test]
fn large_tiles_and_parts() {
    for dtype in [DType::F16, DType::BF16] {
        for precision in [Precision::Exact, Precision::Fast] {
            let large = check(&Case { rows: 140, n: 300, k: 104, dtype, precision, sms: 4, ..Case::default() });
            assert!(large[1].ends_with("_128"), "{large:?}");
            let parts = check(&Case { rows: 33, n: 65, k: 1100, dtype, precision, add: true, ..Case::default() });
            assert!(parts[1].ends_with("_64") && parts[2] == "gemm_reduce", "{parts:?}");
        }
    }
}

#[test]
fn few_rows_with_fewer_terms() {
    for dtype in [DType::F16, DType::BF16] {
        for (rows, name) in [(2, "_2"), (3, "_8_fast"), (8, "_8_fast"), (9, "_16_fast"), (16, "_16_fast")] {
            for magnitude in [1.0, 1e6, 1e-3] {
                let (precision, bias) = (Precision::Fast, magnitude == 1.0);
                let names = check(&Case { rows, n: 37, k: 600, dtype, precision, magnitude, bias, ..Case::default() });
                assert!(names[0].ends_with(name), "{names:?}");
            }
        }
    }
}

#[test]
fn few_rows_stream_the_weight() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for rows in [1, 2, 7, 8, 9, 16] {
            let names = check(&Case { rows, n: 37, k: 600, dtype, add: rows % 2 == 0, ..Case::default() });
            let plain = dtype == DType::F32 && rows > 4;
            assert!(names[0].starts_with(if plain { "gemm_f32" } else { "gemv_" }), "{names:?}");
        }
        check(&Case { rows: 3, n: 16, k: 13, dtype, bias: false, ..Case::default() });
    }
    check(&Case { rows: 70, n: 65, k: 30, dtype: DType::F32, ..Case::default() });
}

#[test]
fn activations_beyond_f16_do_not_overflow() {
    for magnitude in [1e6, 1e-3] {
        for rows in [1, 12, 40] {
            check(&Case { rows, dtype: DType::F16, magnitude, bias: false, ..Case::default() });
        }
    }
}

/// Rows of packed weights for few rows of activations, of which each, and each chunk of 128 columns, has its own magnitude, some beyond
/// f16: `chunks` chunks, and a part of one where the format's blocks are shorter. Products of more than eight rows are added to what is
/// there.
fn packed_few_rows(packed: &Packed, precision: Precision, rows: usize, (chunks, n): (usize, usize)) {
    let mut device = ShimDevice::open().expect("the shim");
    device.tuning.precision = precision;
    // Groups of warps with weight rows of their own; with few rows a block has one.
    device.tuning.sms = if n > 64 { 1 } else { 8 };
    let block = packed.format.block().elements;
    let k = (128 * chunks).next_multiple_of(block) + if block < 128 { block } else { 0 };
    let mut data = Data::new(rows as u64);
    let (weight, exact) = data.packed_weight(&mut device, packed.format, (n, k));
    let mut values = data.values(rows * k);
    for (i, x) in values.iter_mut().enumerate() {
        *x *= [1.0, 1e20, 1e-25, 3e4][i / k % 4] * [1.0, 0.03, 130.0, 5e-4][i % k / 128 % 4];
    }
    let x = Tensor { data: values.clone(), cols: k };
    let mut out = device.tensor(rows, n).expect("tensor");
    let (mode, before) = if rows > 8 { (Mode::Add, 0.5f32) } else { (Mode::Set, f32::NAN) };
    out.data.fill(before);
    device.matmul(&x, &weight, rows, mode, &mut out).expect("matmul");
    let before = if rows > 8 { f64::from(before) } else { 0.0 };
    let name = packed.kernel(number(rows), precision);
    for (i, got) in out.data.iter().enumerate() {
        let (x, weights) = (&values[i / n * k..][..k], &exact[i % n * k..][..k]);
        let products = || x.iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w));
        let (want, sum) = (before + products().sum::<f64>(), before + products().map(f64::abs).sum::<f64>());
        let error = (f64::from(*got) - want).abs();
        // Two terms have 22 bits, one has 11.
        let bits = if precision == Precision::Exact || rows <= 4 { 22 } else { 11 };
        assert!(error <= sum * 2f64.powi(1 - bits), "{name}, row {}: {got}, not {want} ({error:e} of {sum:e})", i / n);
    }
}

#[test]
fn packed_weights_with_few_rows_have_22_bits_of_activations_or_11() {
    for packed in &FORMATS {
        for rows in [1, 2, 4, 5, 8, 9, 16] {
            packed_few_rows(packed, Precision::Fast, rows, (2, 35));
            packed_few_rows(packed, Precision::Exact, rows, (2, 35));
        }
    }
}

/// More chunks than the warps' rings have stages.
#[test]
fn packed_weights_of_many_columns() {
    for packed in &FORMATS {
        packed_few_rows(packed, Precision::Exact, 1, (37, 450));
        packed_few_rows(packed, Precision::Exact, 3, (30, 17));
        packed_few_rows(packed, Precision::Fast, 6, (30, 67));
        packed_few_rows(packed, Precision::Exact, 10, (18, 35));
        packed_few_rows(packed, Precision::Fast, 16, (5, 130));
    }
}

/// Up projections of blocks whose groups of warps have gates, ups, and both, against products of blocks with one group.
#[test]
fn packed_up_projections_of_several_groups() {
    for packed in &FORMATS {
        for rows in [1, 5, 9] {
            let mut device = ShimDevice::open().expect("the shim");
            device.tuning.precision = Precision::Fast;
            let (n, k) = (40, 512);
            let mut data = Data::new(rows as u64);
            let (weight, _) = data.packed_weight(&mut device, packed.format, (2 * n, k));
            let x = Tensor { data: data.values(rows * k), cols: k };
            let [mut product, mut scratch] = [0; 2].map(|_| device.tensor(rows, 2 * n).expect("tensor"));
            let mut out = device.tensor(rows, n).expect("tensor");
            device.matmul(&x, &weight, rows, Mode::Set, &mut product).expect("matmul");
            device.tuning.sms = 1;
            device.matmul_activated(&x, &weight, rows, Activation::SiluMul, &mut scratch, &mut out).expect("activated");
            for (i, got) in out.data.iter().enumerate() {
                let (gate, up) = (product.data[i / n * 2 * n + i % n], product.data[i / n * 2 * n + n + i % n]);
                let want = gate / (1.0 + (-gate).exp()) * up;
                let bound = 1e-4 * (1.0 + want.abs() + up.abs());
                assert!((got - want).abs() <= bound, "{}, {rows} rows, {i}: {got}, not {want}", packed.format);
            }
        }
    }
}
