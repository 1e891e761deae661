//! Embedding, gather, norm and activation.

use super::data::{DTYPES, Data, read};
use super::{Tolerance, assert_close};
use crate::{Activation, Device, WeightSource};
use bytes::Bytes;
use lagoon_types::DType;

/// Rows of the table come out exactly, also when the table has several parts.
pub fn embed_widens_rows<D: Device>(device: &mut D, _: Tolerance) {
    let mut data = Data::new(3);
    for dtype in DTYPES {
        for cols in [40, 172, 768] {
            let (bytes, exact) = data.stored(dtype, 53 * cols);
            let bytes = Bytes::from(bytes);
            let cut = 20 * cols * dtype.size();
            let parts = vec![(20, bytes.slice(..cut)), (33, bytes.slice(cut..))];
            let table = device.weight(WeightSource { dtype, cols, parts }).expect("weight");
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
            let x = super::data::tensor(device, cols, &values);
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
            let x = super::data::tensor(device, cols, &values);
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
            let mut x = super::data::tensor(device, cols, &values);
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

/// The exact GELU, from where its tail vanishes to where it is the identity.
pub fn gelu_matches<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(8);
    for (rows, n) in [(1, 40), (3, 171), (17, 96), (2, 2048)] {
        let mut values: Vec<f32> = data.values(rows * SELECTED).into_iter().map(|v| v * 3.0).collect();
        values[..12].copy_from_slice(&[0.0, -0.0, 1e-6, -1e-6, 0.5, -0.5, 5.0, -5.0, 13.0, -13.0, 300.0, -300.0]);
        let (product, got) = activated(device, &values, rows, n, Activation::Gelu);
        let want: Vec<f64> = product.iter().map(|v| gelu(f64::from(*v))).collect();
        let u = 2f64.powi(-24);
        assert_close(&format!("gelu {rows}x{n}"), &got, &want, |i| {
            (1e-6 + u * f64::from(product[i]).powi(2)) * tolerance.factor * want[i].abs() + 1e-20
        });
    }
}

/// The gated activation, also where the gate's exponential over- or underflows.
pub fn silu_mul_matches<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(6);
    for (rows, n) in [(1, 40), (3, 172), (17, 96), (2, 2048)] {
        let mut values: Vec<f32> = data.values(rows * SELECTED).into_iter().map(|v| v * 4.0).collect();
        values[..6].copy_from_slice(&[0.0, -0.0, 60.0, -60.0, 300.0, -300.0]);
        let (product, got) = activated(device, &values, rows, n, Activation::SiluMul);
        let gated = |row: &[f32]| {
            let (gate, up) = row.split_at(n);
            gate.iter().zip(up).map(|(g, u)| silu(f64::from(*g)) * f64::from(*u)).collect::<Vec<f64>>()
        };
        let want: Vec<f64> = product.chunks_exact(2 * n).flat_map(gated).collect();
        assert_close(&format!("silu_mul {rows}x{n}"), &got, &want, |i| {
            1.5e-6 * tolerance.factor * want[i].abs() + 1e-20
        });
    }
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
    let source = WeightSource { dtype: DType::F32, cols: SELECTED, parts: vec![(columns, Bytes::from(bytes))] };
    let weight = device.weight(source).expect("weight");
    let x = super::data::tensor(device, SELECTED, values);
    let mut product = device.tensor(rows, columns).expect("tensor");
    let mut out = device.tensor(rows, n).expect("tensor");
    device.matmul_activated(&x, &weight, rows, activation, &mut product, &mut out).expect("matmul_activated");
    let exact = values.chunks_exact(SELECTED).flat_map(|row| (0..columns).map(move |i| row[selected(i)])).collect();
    (exact, read(device, &out, rows, n))
}

/// The sigmoid linear unit.
pub(super) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The exact GELU.
pub(super) fn gelu(x: f64) -> f64 {
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
