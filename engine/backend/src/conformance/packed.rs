//! Packed weights against f64 on their elements. A device that takes none of a format refuses it.

use super::data::{Data, read, tensor};
use super::matmul::{activated, bound, check_product, oracle};
use super::{Tolerance, assert_close};
use crate::formats::{BLOCK_ELEMENTS_MAX, WeightFormat};
use crate::{
    Activation, Device, DeviceError, ExpertBuffers, Experts, GroupScore, Mode, Routing, Scoring, WeightPart,
    WeightSource,
};
use bytes::Bytes;
use lagoon_types::DType;

fn taken<D: Device>(device: &D) -> Vec<WeightFormat> {
    let packed = WeightFormat::ALL.into_iter().filter(|format| format.plain().is_none());
    packed.filter(|format| device.takes(*format)).collect()
}

/// Elements of whole blocks, at least 96.
fn deep(format: WeightFormat) -> usize {
    96usize.next_multiple_of(format.block().elements)
}

/// Elements of a part, in which activations may be rounded together.
const PART: usize = 32;

/// The bound of the product of a row `x` and a weight row, activations rounded to 16 bits of the largest of a part, or they and the
/// elements to f16: see [`Tolerance`]. `sum` is that of absolute products, and of what was in the output.
fn rounded(x: &[f32], weights: &[f32], sum: f64, tolerance: Tolerance) -> f64 {
    let parts = x.chunks(PART).zip(weights.chunks(PART)).map(|(x, weights)| {
        let largest = x.iter().fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
        largest * weights.iter().map(|w| f64::from(w.abs())).sum::<f64>()
    });
    let halves = 2.0 * tolerance.rounded_products(x.len(), DType::F16);
    (bound(x.len(), DType::F32, tolerance) + halves) * sum + 1.01 * 2f64.powi(-16) * parts.sum::<f64>()
}

/// Plain formats are taken, and a format that is not taken is refused by its name.
pub fn packed_is_taken_or_refused<D: Device>(device: &mut D, _: Tolerance) {
    for format in WeightFormat::ALL {
        let elements = 2 * format.block().elements;
        let bytes = Bytes::from(vec![0; format.bytes(elements).expect("whole blocks")]);
        let source = WeightSource { cols: elements, parts: vec![WeightPart { rows: 1, format, bytes }] };
        let takes = device.takes(format);
        assert!(takes || format.plain().is_none(), "{format} is plain");
        match device.weight(source) {
            Ok(_) => assert!(takes, "{format} is not taken, and not refused"),
            Err(DeviceError::Unsupported(what)) => assert!(!takes && what.contains(format.name()), "{format}: {what}"),
            Err(error) => panic!("{format}: {error}"),
        }
    }
}

/// Products with packed weights, in few rows and many, in two parts.
pub fn matmul_packed<D: Device>(device: &mut D, tolerance: Tolerance) {
    for format in taken(device) {
        for (rows, blocks, n) in [
            (1, 1, 5),
            (1, 3, 33),
            (2, 2, 17),
            (3, 3, 40),
            (4, 2, 66),
            (5, 3, 129),
            (17, 2, 31),
            (65, 3, 40),
            (130, 2, 100),
        ] {
            for mode in [Mode::Set, Mode::Add] {
                // More than a panel's depth, also of short blocks.
                let k = blocks * deep(format);
                product(device, format, (rows, k, n), mode, tolerance);
            }
        }
    }
}

fn product<D: Device>(
    device: &mut D,
    format: WeightFormat,
    (rows, k, n): (usize, usize, usize),
    mode: Mode,
    tolerance: Tolerance,
) {
    let mut data = Data::new((rows * 1_000_000 + k * 1000 + n) as u64);
    let (weight, exact) = data.packed_weight(device, format, (n, k));
    let what = format!("matmul {format} {rows}x{k}x{n} {mode:?}");
    let error = |x: &[f32], weights: &[f32], sum| rounded(x, weights, sum, tolerance);
    check_product(device, &what, &mut data, (&weight, &exact), (rows, k, n), mode, error);
}

/// Products, and up projections with their activation, with a weight in parts of several formats: packed, f16, packed otherwise.
pub fn matmul_packed_parts<D: Device>(device: &mut D, tolerance: Tolerance) {
    let k = 2 * BLOCK_ELEMENTS_MAX;
    for formats in taken(device).windows(2) {
        for rows in [1, 5, 33] {
            let (mut data, n) = (Data::new(rows as u64), 9);
            let (first, mut exact) = data.packed(formats[0], n * k);
            let (middle, halves) = data.stored(DType::F16, 4 * k);
            let (last, others) = data.packed(formats[1], (n - 4) * k);
            exact.extend(halves.into_iter().chain(others));
            let part = |rows, format, bytes: Vec<u8>| WeightPart { rows, format, bytes: bytes.into() };
            let parts =
                vec![part(n, formats[0], first), part(4, WeightFormat::F16, middle), part(n - 4, formats[1], last)];
            let weight = device.weight(WeightSource { cols: k, parts }).expect("weight");
            let what = format!("{} rows by {} and {}", rows, formats[0], formats[1]);
            let error = |x: &[f32], weights: &[f32], sum| rounded(x, weights, sum, tolerance);
            check_product(device, &what, &mut data, (&weight, &exact), (rows, k, 2 * n), Mode::Add, error);
            let (x, values) = data.tensor(device, rows, k);
            let (mut scratch, mut out) =
                (device.tensor(rows, 2 * n).expect("tensor"), device.tensor(rows, n).expect("tensor"));
            let silu = Activation::SiluMul;
            device.matmul_activated(&x, &weight, rows, silu, &mut scratch, &mut out).expect("matmul_activated");
            let (product, mut errors) = oracle(&values, rows, k, 2 * n, |row, i| exact[row * k + i]);
            for (i, sum) in errors.iter_mut().enumerate() {
                *sum = rounded(&values[i / (2 * n) * k..][..k], &exact[i % (2 * n) * k..][..k], *sum, tolerance);
            }
            let wanted = |i: usize| {
                let row = i / n * 2 * n..(i / n + 1) * 2 * n;
                activated(silu, &product[row.clone()], &errors[row], i % n, 1.0, tolerance)
            };
            let want: Vec<f64> = (0..rows * n).map(|i| wanted(i).0).collect();
            assert_close(&what, &read(device, &out, rows, n), &want, |i| wanted(i).1);
        }
    }
}

/// Activations with an outlier, and with parts that are all but zero, in few rows and many.
pub fn matmul_packed_extremes<D: Device>(device: &mut D, tolerance: Tolerance) {
    for format in taken(device) {
        for rows in [1, 4, 7] {
            let (mut data, k, n) = (Data::new(41), 3 * deep(format), 9);
            let (weight, exact) = data.packed_weight(device, format, (n, k));
            let mut values = data.values(rows * k);
            values[5] = 1000.0;
            for x in &mut values[PART..2 * PART] {
                *x = if *x > 0.0 { 1e-36 } else { -1e-36 };
            }
            values[2 * PART..3 * PART].fill(0.0);
            let x = tensor(device, k, &values);
            let mut out = device.tensor(rows, n).expect("tensor");
            device.matmul(&x, &weight, rows, Mode::Set, &mut out).expect("matmul");
            let (want, sums) = oracle(&values, rows, k, n, |row, i| exact[row * k + i]);
            let error = |i: usize| rounded(&values[i / n * k..][..k], &exact[i % n * k..][..k], sums[i], tolerance);
            assert_close(&format!("extremes {format} {rows}"), &read(device, &out, rows, n), &want, error);
        }
    }
}

/// Rows of a packed table are its elements, within a rounding.
pub fn embed_packed<D: Device>(device: &mut D, _: Tolerance) {
    for format in taken(device) {
        let (mut data, cols) = (Data::new(31), 2 * format.block().elements);
        let (table, exact) = data.packed_weight(device, format, (10, cols));
        let ids = [9, 0, 3, 2, 3];
        let mut out = device.tensor(6, cols).expect("tensor");
        device.embed(&table, &ids, &mut out).expect("embed");
        let want: Vec<f64> =
            ids.iter().flat_map(|id| &exact[*id as usize * cols..][..cols]).map(|x| f64::from(*x)).collect();
        let got = read(device, &out, 6, cols);
        assert_close(&format!("embed {format}"), &got[..5 * cols], &want, |i| want[i].abs() * 1e-6);
        assert!(got[5 * cols..].iter().all(|v| *v == 0.0), "{format}: other rows are untouched");
    }
}

/// A mixture whose experts are packed gives what the same experts in f32 give.
pub fn experts_packed<D: Device>(device: &mut D, tolerance: Tolerance) {
    for format in taken(device) {
        let wide = format.block().elements.max(64);
        let (count, hidden, n, activation) = (5, wide, wide, Activation::SiluMul);
        let mut data = Data::new(37);
        let (up, up_exact) = data.packed_weight(device, format, (count * 2 * n, hidden));
        let (down, down_exact) = data.packed_weight(device, format, (count * hidden, n));
        let mut plain = |rows: usize, cols: usize, values: &[f32]| {
            let mut bytes = Vec::new();
            DType::F32.encode(values, &mut bytes);
            device.weight(WeightSource::plain(DType::F32, cols, vec![(rows, bytes.into())])).expect("weight")
        };
        let plain = (plain(count * 2 * n, hidden, &up_exact), plain(count * hidden, n, &down_exact));
        let routing = Routing {
            top_k: 2,
            scoring: Scoring::Softmax,
            normalised: true,
            scale: 1.0,
            groups: 1,
            top_groups: 1,
            group_score: GroupScore::TwoBest,
        };
        for rows in [1, 7, 70] {
            let ((x, _), (logits, _)) = (data.tensor(device, rows, hidden), data.tensor(device, rows, count));
            let mut buffers =
                ExpertBuffers::new(device, rows, routing.top_k, (hidden, n), activation).expect("buffers");
            let mut mixed = |up, down| {
                let experts =
                    Experts { count, up, up_bias: None, down, down_bias: None, choice_bias: None, activation, routing };
                let mut out = device.tensor(rows, hidden).expect("tensor");
                device.experts(&x, &logits, &experts, rows, &mut buffers, &mut out).expect("experts");
                read(device, &out, rows, hidden)
            };
            let (got, want) = (mixed(&up, &down), mixed(&plain.0, &plain.1));
            let largest = want.iter().fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
            let want: Vec<f64> = want.into_iter().map(f64::from).collect();
            // Two products and their activations' rounding, with sums that are some times the result.
            let relative = bound(hidden, DType::F32, tolerance) + 2f64.powi(-14) * 4.0 / (hidden as f64).sqrt();
            let bound = 4.0 * relative * (hidden as f64).sqrt() * largest;
            assert_close(&format!("experts {format} {rows}"), &got, &want, |_| bound);
        }
    }
}
