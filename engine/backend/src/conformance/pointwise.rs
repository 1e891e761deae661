//! Embedding, gather, norm and activation.

use super::data::{DTYPES, Data, read, tensor};
use super::{Tolerance, assert_close};
use crate::{Activation, Device, SWIGLU_ALPHA, SWIGLU_LIMIT, WeightSource};
use bytes::Bytes;
use lagoon_types::{AttentionGeometry, DType};

/// Rows of the table come out exactly, also when the table has several parts.
pub fn embed_widens_rows<D: Device>(device: &mut D, _: Tolerance) {
    let mut data = Data::new(3);
    for dtype in DTYPES {
        for cols in [40, 172, 768] {
            let (bytes, exact) = data.stored(dtype, 53 * cols);
            let bytes = Bytes::from(bytes);
            let cut = 20 * cols * dtype.size();
            let parts = vec![(20, bytes.slice(..cut)), (33, bytes.slice(cut..))];
            let table = device.weight(WeightSource::plain(dtype, cols, parts)).expect("weight");
            let ids = [0, 52, 19, 20, 19, 7];
            let mut out = device.tensor(9, cols).expect("tensor");
            device.embed(&table, &ids, &mut out).expect("embed");
            let want: Vec<f32> = ids.iter().flat_map(|id| &exact[*id as usize * cols..][..cols]).copied().collect();
            assert_eq!(read(device, &out, ids.len(), cols), want, "{dtype} {cols}");
            assert!(read(device, &out, 9, cols)[6 * cols..].iter().all(|v| *v == 0.0), "other rows are untouched");
        }
    }
}

/// Rows are copied exactly, in any order and repeatedly.
pub fn gather_copies_rows<D: Device>(device: &mut D, _: Tolerance) {
    let mut data = Data::new(4);
    for cols in [1, 40, 768] {
        let (x, values) = data.tensor(device, 17, cols);
        let mut out = device.tensor(5, cols).expect("tensor");
        let rows = [16, 0, 3, 3];
        device.gather_rows(&x, &rows, &mut out).expect("gather_rows");
        let want: Vec<f32> = rows.iter().flat_map(|r| &values[*r as usize * cols..][..cols]).copied().collect();
        assert_eq!(read(device, &out, rows.len(), cols), want);
    }
}

/// Norms of rows of ordinary, tiny and zero magnitude.
pub fn rms_norm_matches<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(5);
    for dtype in DTYPES {
        for (rows, cols) in [(1, 40), (2, 172), (5, 768), (17, 96), (65, 72)] {
            let mut values = data.values(rows * cols);
            values[..cols].iter_mut().for_each(|v| *v *= 1e-3);
            if rows > 2 {
                values[cols..2 * cols].fill(0.0);
            }
            let x = tensor(device, cols, &values);
            let (weight, scale) = data.weight(device, dtype, 1, cols);
            let mut out = device.tensor(rows, cols).expect("tensor");
            let eps = 1e-5f32;
            device.rms_norm(&x, &weight, eps, rows, &mut out).expect("rms_norm");
            let want: Vec<f64> = values
                .chunks_exact(cols)
                .flat_map(|row| {
                    let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
                    let factor = 1.0 / (squares / cols as f64 + f64::from(eps)).sqrt();
                    row.iter().zip(&scale).map(move |(v, s)| f64::from(*v) * factor * f64::from(*s))
                })
                .collect();
            let got = read(device, &out, rows, cols);
            assert_close(&format!("rms_norm {dtype} {rows}x{cols}"), &got, &want, |i| {
                1e-6 * tolerance.factor * want[i].abs() + 1e-12
            });
        }
    }
}

/// Norms of query and key heads; values, and rows beyond, stay as they are.
pub fn head_norm_matches<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(10);
    for dtype in DTYPES {
        for (rows, heads, kv_heads, head_dim) in
            [(1, 1, 1, 2), (3, 6, 2, 40), (2, 4, 4, 128), (17, 8, 1, 96), (65, 3, 3, 66), (2, 3, 1, 520)]
        {
            let geometry = AttentionGeometry { heads, kv_heads, head_dim, latent: false };
            let (dim, cols) = (head_dim as usize, geometry.qkv_dim());
            let mut values = data.values((rows + 1) * cols);
            values[..dim].iter_mut().for_each(|v| *v *= 1e-3);
            let mut qkv = tensor(device, cols, &values);
            let [(q, q_scale), (k, k_scale)] = [(); 2].map(|()| data.weight(device, dtype, 1, dim));
            let eps = 1e-6f32;
            device.head_norm(&mut qkv, (&q, &k), eps, geometry, rows).expect("head_norm");
            let mut want: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
            for row in want[..rows * cols].chunks_exact_mut(cols) {
                for (head, x) in row[..geometry.q_dim() + geometry.kv_dim()].chunks_exact_mut(dim).enumerate() {
                    let scale = if head < heads as usize { &q_scale } else { &k_scale };
                    let squares: f64 = x.iter().map(|v| v * v).sum();
                    let factor = 1.0 / (squares / dim as f64 + f64::from(eps)).sqrt();
                    x.iter_mut().zip(scale).for_each(|(v, s)| *v *= factor * f64::from(*s));
                }
            }
            let got = read(device, &qkv, rows + 1, cols);
            let normed = |i: usize| i < rows * cols && i % cols < geometry.q_dim() + geometry.kv_dim();
            assert_close(&format!("head_norm {dtype} {rows} rows of {geometry:?}"), &got, &want, |i| {
                if normed(i) { 1e-6 * tolerance.factor * want[i].abs() + 1e-12 } else { 0.0 }
            });
        }
    }
}

/// Norms of rows of ordinary and tiny magnitude, of rows far from zero, and of a constant row, which is all mean.
pub fn layer_norm_matches<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(7);
    for dtype in DTYPES {
        for (rows, cols) in [(1, 40), (2, 172), (5, 768), (17, 97), (65, 71), (3, 2)] {
            let mut values = data.values(rows * cols);
            values[..cols].iter_mut().for_each(|v| *v *= 1e-3);
            if rows > 2 {
                values[cols..2 * cols].fill(0.75);
                values[2 * cols..3 * cols].iter_mut().for_each(|v| *v += 50.0);
            }
            let x = tensor(device, cols, &values);
            let (weight, scale) = data.weight(device, dtype, 1, cols);
            let mut out = device.tensor(rows, cols).expect("tensor");
            let eps = 1e-5f32;
            device.layer_norm(&x, &weight, eps, rows, &mut out).expect("layer_norm");
            let (mut want, mut mean_error) = (Vec::new(), Vec::new());
            for row in values.chunks_exact(cols) {
                let (n, row) = (cols as f64, row.iter().map(|v| f64::from(*v)));
                let mean = row.clone().sum::<f64>() / n;
                let variance = row.clone().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
                let factor = 1.0 / (variance + f64::from(eps)).sqrt();
                let magnitude = row.clone().map(f64::abs).sum::<f64>() / n;
                want.extend(row.zip(&scale).map(|(v, s)| (v - mean) * factor * f64::from(*s)));
                let u = 2f64.powi(-24);
                let error = (4.0 + 2.0 * n.sqrt()) * u * magnitude * factor;
                mean_error.extend(scale.iter().map(|s| error * f64::from(s.abs())));
            }
            let got = read(device, &out, rows, cols);
            assert_close(&format!("layer_norm {dtype} {rows}x{cols}"), &got, &want, |i| {
                tolerance.factor * (1e-6 * want[i].abs() + mean_error[i]) + 1e-12
            });
        }
    }
}

/// A vector is added to the rows that are asked for and to no other.
pub fn add_bias_adds<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(9);
    for dtype in DTYPES {
        for (rows, all, cols) in [(1, 1, 40), (2, 3, 171), (17, 17, 96), (33, 40, 1026), (0, 2, 5)] {
            let values = data.values(all * cols);
            let mut x = tensor(device, cols, &values);
            let (bias, vector) = data.weight(device, dtype, 1, cols);
            device.add_bias(&mut x, &bias, rows).expect("add_bias");
            let bias = |i: usize| if i < rows * cols { f64::from(vector[i % cols]) } else { 0.0 };
            let want: Vec<f64> = values.iter().enumerate().map(|(i, v)| f64::from(*v) + bias(i)).collect();
            let got = read(device, &x, all, cols);
            assert_close(&format!("add_bias {dtype} {rows} of {all}x{cols}"), &got, &want, |i| {
                2f64.powi(-24) * tolerance.factor * want[i].abs()
            });
        }
    }
}

/// Plain activations, from where their tails vanish to where they are the identity.
pub fn gelu_matches<D: Device>(device: &mut D, tolerance: Tolerance) {
    activations_match(device, tolerance, &[Activation::Gelu, Activation::GeluTanh]);
}

/// The gated activation of Llama, also where the gate's exponential over- or underflows.
pub fn silu_mul_matches<D: Device>(device: &mut D, tolerance: Tolerance) {
    activations_match(device, tolerance, &[Activation::SiluMul]);
}

/// The gated activations of Gemma and gpt-oss, also where they clamp.
pub fn other_gates_match<D: Device>(device: &mut D, tolerance: Tolerance) {
    activations_match(device, tolerance, &[Activation::GeluTanhMul, Activation::ClampedSwiglu]);
    // Of four columns, the first has NaN as its gate, the second as its up element.
    let x = tensor(device, 8, &[f32::NAN, 1.0, 2.0, 9.0, 1.0, f32::NAN, 2.0, -9.0]);
    let (mut out, _) = Data::new(9).tensor(device, 1, 4);
    device.activate(&x, 1, Activation::ClampedSwiglu, &mut out).expect("activate");
    let got = read(device, &out, 1, 4);
    let nan: Vec<bool> = got.iter().map(|x| x.is_nan()).collect();
    assert_eq!(nan, [true, true, false, false], "NaN stays NaN: {got:?}");
}

/// Activations of exact products, as part of a product and alone.
fn activations_match<D: Device>(device: &mut D, tolerance: Tolerance, activations: &[Activation]) {
    let mut data = Data::new(8);
    for &activation in activations {
        for (rows, n) in [(1, 40), (3, 171), (17, 96), (2, 2048)] {
            let mut values: Vec<f32> = data.values(rows * SELECTED).into_iter().map(|v| v * 4.0).collect();
            let edges = [0.0, -0.0, 1e-6, -1e-6, 0.5, -0.5, 5.0, -5.0, 13.0, -13.0, 60.0, -60.0, 300.0, -300.0];
            values[..edges.len()].copy_from_slice(&edges);
            let (product, got) = activated(device, &values, rows, n, activation);
            let columns = activation.inputs() * n;
            let wanted = |i: usize| {
                let at = i / n * columns + i % n;
                let (gated, relative) = gate(activation, f64::from(product[at]));
                let factor = if columns > n { up(activation, f64::from(product[at + n])) } else { 1.0 };
                (gated * factor, relative * (gated * factor).abs())
            };
            let want: Vec<f64> = (0..rows * n).map(|i| wanted(i).0).collect();
            let what = format!("{activation:?} {rows}x{n}");
            let bound = |i: usize| tolerance.factor * wanted(i).1 + 1e-20;
            assert_close(&what, &got, &want, bound);
            let x = tensor(device, columns, &product);
            let (mut out, before) = data.tensor(device, rows + 1, n);
            device.activate(&x, rows, activation, &mut out).expect("activate");
            let got = read(device, &out, rows + 1, n);
            assert_close(&format!("{what} alone"), &got[..rows * n], &want, bound);
            assert_eq!(got[rows * n..], before[rows * n..], "{what}: rows beyond are untouched");
        }
    }
}

/// Sums and multiples of rows, and rows of a table added to rows.
pub fn rows_add_and_scale<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(11);
    let u = 2f64.powi(-24) * tolerance.factor;
    for (rows, all, cols) in [(1, 1, 40), (2, 3, 171), (17, 17, 96), (33, 40, 1026), (0, 2, 5)] {
        let ((mut x, before), (y, other)) = (data.tensor(device, all, cols), data.tensor(device, all + 1, cols));
        let within = |i: usize| i < rows * cols;
        device.add(&mut x, &y, rows).expect("add");
        let want = |i: usize| f64::from(before[i]) + if within(i) { f64::from(other[i]) } else { 0.0 };
        let want: Vec<f64> = (0..all * cols).map(want).collect();
        let sums = read(device, &x, all, cols);
        assert_close(&format!("add {rows} of {all}x{cols}"), &sums, &want, |i| u * want[i].abs());
        device.scale(&mut x, 5.656_854, rows).expect("scale");
        let factor = |i: usize| if within(i) { f64::from(5.656_854f32) } else { 1.0 };
        let want: Vec<f64> = (0..all * cols).map(|i| f64::from(sums[i]) * factor(i)).collect();
        let got = read(device, &x, all, cols);
        assert_close(&format!("scale {rows} of {all}x{cols}"), &got, &want, |i| u * want[i].abs());
    }
    for dtype in DTYPES {
        for cols in [40, 172, 768] {
            let (table, exact) = data.weight(device, dtype, 53, cols);
            let ids = [0, 52, 19, 20, 19, 7];
            let (mut out, before) = data.tensor(device, 9, cols);
            device.embed_add(&table, &ids, &mut out).expect("embed_add");
            let added = |i: usize| ids.get(i / cols).map_or(0.0, |id| f64::from(exact[*id as usize * cols + i % cols]));
            let want: Vec<f64> = before.iter().enumerate().map(|(i, v)| f64::from(*v) + added(i)).collect();
            let got = read(device, &out, 9, cols);
            assert_close(&format!("embed_add {dtype} {cols}"), &got, &want, |i| u * want[i].abs());
        }
    }
}

/// Soft caps of rows, from elements far beyond the cap to tiny ones; rows beyond stay, and so does NaN.
pub fn rows_are_capped<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(12);
    let u = 2f64.powi(-24) * tolerance.factor;
    for (rows, all, cols) in [(1, 1, 40), (2, 3, 171), (17, 17, 96), (3, 4, 20_001), (0, 2, 5)] {
        for (cap, size) in [(30.0, 100.0), (30.0, 1e-3), (0.5, 1e6), (1e4, 1.0)] {
            let before: Vec<f32> = data.values(all * cols).into_iter().map(|x| x * size).collect();
            let mut x = tensor(device, cols, &before);
            device.softcap(&mut x, cap, rows).expect("softcap");
            let cap = f64::from(cap);
            let want = |(i, x): (usize, &f32)| {
                if i < rows * cols { cap * (f64::from(*x) / cap).tanh() } else { f64::from(*x) }
            };
            let want: Vec<f64> = before.iter().enumerate().map(want).collect();
            let bound = |i: usize| if i < rows * cols { 8.0 * u * cap } else { 0.0 };
            assert_close(
                &format!("soft cap {cap} of {rows} of {all}x{cols}"),
                &read(device, &x, all, cols),
                &want,
                bound,
            );
        }
    }
    let mut x = tensor(device, 3, &[f32::NAN, 0.0, -1e9]);
    device.softcap(&mut x, 30.0, 1).expect("softcap");
    let got = read(device, &x, 1, 3);
    assert!(got[0].is_nan(), "NaN stays NaN, not {}", got[0]);
    assert_eq!(got[1], 0.0);
}

/// Columns that [`activated`] selects from: coprime to the widths that are asked, so that gates and ups are other values.
const SELECTED: usize = 47;

/// The activation of a product that is exact: every weight row is 1 at one column and 0 elsewhere. The product, and the result.
fn activated<D: Device>(
    device: &mut D,
    values: &[f32],
    rows: usize,
    n: usize,
    activation: Activation,
) -> (Vec<f32>, Vec<f32>) {
    let columns = activation.inputs() * n;
    let selected = |column: usize| column % SELECTED;
    let ones = |column| (0..SELECTED).map(move |i| if i == selected(column) { 1.0f32 } else { 0.0 });
    let bytes: Vec<u8> = (0..columns).flat_map(ones).flat_map(f32::to_le_bytes).collect();
    let source = WeightSource::plain(DType::F32, SELECTED, vec![(columns, Bytes::from(bytes))]);
    let weight = device.weight(source).expect("weight");
    let x = tensor(device, SELECTED, values);
    let mut product = device.tensor(rows, columns).expect("tensor");
    let mut out = device.tensor(rows, n).expect("tensor");
    device.matmul_activated(&x, &weight, rows, activation, &mut product, &mut out).expect("matmul_activated");
    let exact = values.chunks_exact(SELECTED).flat_map(|row| (0..columns).map(move |i| row[selected(i)])).collect();
    (exact, read(device, &out, rows, n))
}

/// All activations.
pub(super) const ACTIVATIONS: [Activation; 5] =
    [Activation::SiluMul, Activation::Gelu, Activation::GeluTanh, Activation::GeluTanhMul, Activation::ClampedSwiglu];

/// The activation's function of the gate (of the element, if it has none), and the relative error allowed to the whole.
pub(super) fn gate(activation: Activation, x: f64) -> (f64, f64) {
    let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
    let tanh = |x: f64| x * sigmoid((8.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3)));
    // The exponent's rounding is relative to itself.
    let steep = |z: f64| 1.5e-6 + 2f64.powi(-22) * z.abs();
    match activation {
        Activation::SiluMul => (x * sigmoid(x), 1.5e-6),
        Activation::Gelu => (gelu(x), 1e-6 + 2f64.powi(-24) * x * x),
        Activation::GeluTanh | Activation::GeluTanhMul => (tanh(x), steep(1.6 * x + 0.072 * x.powi(3))),
        Activation::ClampedSwiglu => {
            let (x, alpha) = (x.min(f64::from(SWIGLU_LIMIT)), f64::from(SWIGLU_ALPHA));
            (x * sigmoid(alpha * x), steep(alpha * x))
        }
    }
}

/// The factor of a gated activation.
pub(super) fn up(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::ClampedSwiglu => x.clamp(-f64::from(SWIGLU_LIMIT), f64::from(SWIGLU_LIMIT)) + 1.0,
        _ => x,
    }
}

/// The exact GELU.
fn gelu(x: f64) -> f64 {
    x * normal_below(x)
}

/// The normal distribution function. From the middle by the series of the density's integral, in the tails by the
/// continued fraction of the Mills ratio (Abramowitz and Stegun 26.2.10 and 26.2.14).
fn normal_below(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    if x.abs() < 3.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..80 {
            term *= -x * x / 2.0 / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return 0.5 + sum / std::f64::consts::TAU.sqrt();
    }
    let fraction = (1..400).rev().fold(0.0, |below, n| f64::from(n) / (x.abs() + below));
    let tail = density / (x.abs() + fraction);
    if x < 0.0 { tail } else { 1.0 - tail }
}
