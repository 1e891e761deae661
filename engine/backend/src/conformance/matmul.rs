//! Matrix products against f64.

use super::data::{DTYPES, Data, read};
use super::pointwise::{ACTIVATIONS, gate, up};
use super::{Tolerance, assert_close};
use crate::{Activation, Device, Mode, WeightSource};
use bytes::Bytes;
use lagoon_types::DType;

/// Rows, inner dimension and columns: odd on purpose.
const SHAPES: [(usize, usize, usize); 9] = [
    (1, 40, 33),
    (1, 768, 200),
    (2, 72, 96),
    (3, 172, 80),
    (4, 96, 17),
    (5, 80, 129),
    (17, 172, 72),
    (65, 128, 40),
    (65, 96, 172),
];

/// Products with f32 weights.
pub fn matmul_f32<D: Device>(device: &mut D, tolerance: Tolerance) {
    SHAPES.iter().for_each(|s| product(device, DType::F32, *s, Mode::Set, 1, tolerance));
}

/// Products with f16 weights.
pub fn matmul_f16<D: Device>(device: &mut D, tolerance: Tolerance) {
    SHAPES.iter().for_each(|s| product(device, DType::F16, *s, Mode::Set, 1, tolerance));
}

/// Products with bf16 weights.
pub fn matmul_bf16<D: Device>(device: &mut D, tolerance: Tolerance) {
    SHAPES.iter().for_each(|s| product(device, DType::BF16, *s, Mode::Set, 1, tolerance));
}

/// Products added to the output's contents.
pub fn matmul_add<D: Device>(device: &mut D, tolerance: Tolerance) {
    for dtype in DTYPES {
        [(1, 72, 65), (2, 96, 40), (5, 40, 70), (65, 172, 96)]
            .iter()
            .for_each(|s| product(device, dtype, *s, Mode::Add, 1, tolerance));
    }
}

/// Weights stacked from several parts by rows, as q, k and v are.
pub fn matmul_parts<D: Device>(device: &mut D, tolerance: Tolerance) {
    for dtype in DTYPES {
        [(1, 80, 100), (3, 40, 129), (17, 96, 160), (65, 72, 129)]
            .iter()
            .for_each(|s| product(device, dtype, *s, Mode::Set, 3, tolerance));
    }
}

/// A product large enough for every level of blocking, with ragged edges.
pub fn matmul_blocked<D: Device>(device: &mut D, tolerance: Tolerance) {
    for dtype in DTYPES {
        product(device, dtype, (131, 1036, 331), Mode::Set, 2, tolerance);
    }
}

/// Up projections with their activation, in few rows and many, with odd widths.
pub fn matmul_activated<D: Device>(device: &mut D, tolerance: Tolerance) {
    for activation in ACTIVATIONS {
        for dtype in DTYPES {
            [
                (1, 40, 33),
                (1, 768, 200),
                (2, 72, 96),
                (3, 172, 77),
                (5, 80, 129),
                (9, 96, 17),
                (17, 172, 72),
                (65, 96, 131),
            ]
            .iter()
            .for_each(|s| activated_product(device, dtype, *s, activation, tolerance));
        }
    }
}

fn activated_product<D: Device>(
    device: &mut D,
    dtype: DType,
    (rows, k, n): (usize, usize, usize),
    activation: Activation,
    tolerance: Tolerance,
) {
    let mut data = Data::new((rows * 1_000_000 + k * 1000 + n) as u64);
    let columns = activation.inputs() * n;
    let (weight, exact) = data.weight(device, dtype, columns, k);
    // Tensors have more rows than the product works on.
    let (x, values) = data.tensor(device, rows + 2, k);
    let (mut scratch, _) = data.tensor(device, rows + 1, columns);
    let (mut out, before) = data.tensor(device, rows + 1, n);
    device.matmul_activated(&x, &weight, rows, activation, &mut scratch, &mut out).expect("matmul_activated");
    let (product, sums) = oracle(&values, rows, k, columns, |row, i| exact[row * k + i]);
    let bound = bound(k, dtype, tolerance);
    let wanted = |i: usize| {
        let row = i / n * columns..(i / n + 1) * columns;
        activated(activation, &product[row.clone()], &sums[row], i % n, bound, tolerance)
    };
    let got = read(device, &out, rows + 1, n);
    let want: Vec<f64> = (0..rows * n).map(|i| wanted(i).0).collect();
    let what = format!("matmul_activated {activation:?} {dtype} {rows}x{k}x{n}");
    assert_close(&what, &got[..rows * n], &want, |i| wanted(i).1);
    assert_eq!(got[rows * n..], before[rows * n..], "{what}: rows beyond are untouched");
}

/// A weight of more than 128 MiB, as a product and as an embedding table.
pub fn matmul_large_weight<D: Device>(device: &mut D, tolerance: Tolerance) {
    let (rows, k, n) = (2, 1000, 70_123);
    let mut data = Data::new(20);
    // Random enough: a period coprime to the row length; drawing every element would take seconds.
    let (period, exact) = data.stored(DType::F16, 65_521);
    let bytes: Vec<u8> = period.iter().copied().cycle().take(n * k * 2).collect();
    assert!(bytes.len() > 128 << 20, "larger than the limit in question");
    let source = WeightSource::plain(DType::F16, k, vec![(n, Bytes::from(bytes))]);
    let weight = device.weight(source).expect("weight");
    let (x, values) = data.tensor(device, rows, k);
    let mut out = device.tensor(rows, n).expect("tensor");
    device.matmul(&x, &weight, rows, Mode::Set, &mut out).expect("matmul");
    let element = |row: usize, i: usize| exact[(row * k + i) % exact.len()];
    let got = read(device, &out, rows, n);
    let (want, sums) = oracle(&values, rows, k, n, element);
    assert_close("large weight", &got, &want, |i| bound(k, DType::F16, tolerance) * sums[i]);
    let ids: Vec<u32> = [0, 1, n / 2, n - 2, n - 1].iter().map(|i| u32::try_from(*i).expect("fits")).collect();
    let mut out = device.tensor(ids.len(), k).expect("tensor");
    device.embed(&weight, &ids, &mut out).expect("embed");
    let want: Vec<f32> = ids.iter().flat_map(|id| (0..k).map(|i| element(*id as usize, i))).collect();
    assert_eq!(read(device, &out, ids.len(), k), want);
}

/// Element `i` of a row's activation, and its error from the product's errors (`bound` of the sums of absolute products)
/// and the activation's own. The slopes of all functions of the gate are at most 1.13.
pub(super) fn activated(
    activation: Activation,
    product: &[f64],
    sums: &[f64],
    i: usize,
    bound: f64,
    tolerance: Tolerance,
) -> (f64, f64) {
    let (p, error) = (product[i], bound * sums[i]);
    let (gated, relative) = gate(activation, p);
    let own = relative * tolerance.factor;
    if activation.inputs() == 1 {
        return (gated, 1.13 * error + own * gated.abs() + 1e-20);
    }
    let n = product.len() / 2;
    let (up, up_error) = (up(activation, product[i + n]), bound * sums[i + n]);
    let want = gated * up;
    (want, 1.13 * error * (up.abs() + up_error) + gated.abs() * up_error + own * want.abs() + 1e-20)
}

/// Relative to the sum of absolute products; see [`Tolerance`].
pub(super) fn bound(k: usize, dtype: DType, tolerance: Tolerance) -> f64 {
    (8.0 + 2.0 * (k as f64).sqrt()) * 2f64.powi(-24) * tolerance.factor + tolerance.rounded_products(k, dtype)
}

/// `x · Wᵀ` and the sums of absolute products.
pub(super) fn oracle(
    x: &[f32],
    rows: usize,
    k: usize,
    n: usize,
    weight: impl Fn(usize, usize) -> f32,
) -> (Vec<f64>, Vec<f64>) {
    let (mut want, mut sums) = (vec![0.0; rows * n], vec![0.0; rows * n]);
    for col in 0..n {
        for row in 0..rows {
            for i in 0..k {
                let product = f64::from(x[row * k + i]) * f64::from(weight(col, i));
                want[row * n + col] += product;
                sums[row * n + col] += product.abs();
            }
        }
    }
    (want, sums)
}

fn product<D: Device>(
    device: &mut D,
    dtype: DType,
    (rows, k, n): (usize, usize, usize),
    mode: Mode,
    parts: usize,
    tolerance: Tolerance,
) {
    let mut data = Data::new((rows * 1_000_000 + k * 1000 + n) as u64);
    let (bytes, exact) = data.stored(dtype, n * k);
    let bytes = Bytes::from(bytes);
    let cuts: Vec<usize> = (0..=parts).map(|i| n * i * i / (parts * parts)).collect();
    let part = |w: &[usize]| (w[1] - w[0], bytes.slice(w[0] * k * dtype.size()..w[1] * k * dtype.size()));
    let source = WeightSource::plain(dtype, k, cuts.windows(2).map(part).collect());
    let weight = device.weight(source).expect("weight");
    let what = format!("matmul {dtype} {rows}x{k}x{n} {mode:?} in {parts} parts");
    let bound = bound(k, dtype, tolerance);
    check_product(device, &what, &mut data, (&weight, &exact), (rows, k, n), mode, |_, _, sum| bound * sum);
}

/// Compares a product of random activations with f64. `error` is the bound of an element, from the row of activations, the weight
/// row and the sum of absolute products.
pub(super) fn check_product<D: Device>(
    device: &mut D,
    what: &str,
    data: &mut Data,
    (weight, exact): (&D::Weight, &[f32]),
    (rows, k, n): (usize, usize, usize),
    mode: Mode,
    error: impl Fn(&[f32], &[f32], f64) -> f64,
) {
    // Tensors have more rows than the product works on.
    let (x, values) = data.tensor(device, rows + 2, k);
    let (mut out, before) = data.tensor(device, rows + 1, n);
    device.matmul(&x, weight, rows, mode, &mut out).expect("matmul");
    let (mut want, mut sums) = oracle(&values, rows, k, n, |row, i| exact[row * k + i]);
    if mode == Mode::Add {
        for ((want, sum), before) in want.iter_mut().zip(&mut sums).zip(&before) {
            *want += f64::from(*before);
            *sum += f64::from(before.abs());
        }
    }
    let got = read(device, &out, rows + 1, n);
    let error = |i: usize| error(&values[i / n * k..][..k], &exact[i % n * k..][..k], sums[i]);
    assert_close(what, &got[..rows * n], &want, error);
    assert_eq!(got[rows * n..], before[rows * n..], "{what}: rows beyond are untouched");
}
