//! Rotation and append.
#![allow(clippy::cast_possible_truncation, reason = "angles become f32; exponents of f64 fit i32")]

use super::data::{Data, read, tensor};
use super::oracle::{self, Attention};
use super::{Tolerance, assert_close};
use crate::{AttnBatch, AttnRows, Device, Partials};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvRun, KvShape};

/// `[rows][head_dim]`: cosines then sines, for positions from `pos0`.
pub(super) fn angles(rows: usize, dim: usize, pos0: usize) -> Vec<f32> {
    let half = dim / 2;
    let angle = |row: usize, j: usize| (pos0 + row) as f64 * 10_000f64.powf(-(j as f64) / half as f64);
    (0..rows)
        .flat_map(|row| {
            (0..2 * half).map(move |j| if j < half { angle(row, j).cos() } else { angle(row, j - half).sin() })
        })
        .map(|v| v as f32)
        .collect()
}

/// The rotation of as many elements as there are angles in f64.
pub(super) fn rotate_head(head: &mut [f64], angles: &[f32]) {
    let half = head.len() / 2;
    for j in 0..half {
        let (a, b) = (head[j], head[j + half]);
        let (cos, sin) = (f64::from(angles[j]), f64::from(angles[j + half]));
        head[j] = a * cos - b * sin;
        head[j + half] = b * cos + a * sin;
    }
}

/// The rotation of `[rows][qkv_dim]` in f64.
fn rotate(qkv: &[f32], rope: &[f32], geometry: AttentionGeometry) -> Vec<f64> {
    let (cols, dim) = (geometry.qkv_dim(), geometry.head_dim as usize);
    let rotated = geometry.q_dim() + geometry.kv_dim();
    let mut want: Vec<f64> = qkv.iter().map(|v| f64::from(*v)).collect();
    for (x, angles) in want.chunks_exact_mut(cols).zip(rope.chunks_exact(dim)) {
        for head in x[..rotated].chunks_exact_mut(dim) {
            rotate_head(head, angles);
        }
    }
    want
}

/// Half a unit in the last place of `value` in `dtype` (f16 has subnormals from 2^-14 down).
fn half_ulp(dtype: DType, value: f64) -> f64 {
    let (digits, min_exponent) = match dtype {
        DType::F32 => (24, -126),
        DType::F16 => (11, -14),
        DType::BF16 => (8, -126),
    };
    let exponent = if value == 0.0 { min_exponent } else { (value.abs().log2().floor() as i32).max(min_exponent) };
    2f64.powi(exponent - digits)
}

/// Checks one token's stored bytes against its K and V in f64, of which the device's own are `bound` off.
pub(super) fn check_stored(
    (what, shape): (&str, KvShape),
    bytes: &[u8],
    (want, got): (&[f64], &[f32]),
    bound: f64,
    tolerance: Tolerance,
) {
    let mut stored = Vec::new();
    let Some(dtype) = shape.dtype.plain() else {
        // A row's codes and scale follow from its elements, on every device alike.
        let mut exact = Vec::new();
        shape.encode(got, &mut exact);
        assert_eq!(bytes, exact, "{what}: bytes of the stored token");
        return;
    };
    dtype.decode(bytes, &mut stored);
    let units = if tolerance.factor > 1.0 { 2.0 } else { 1.0 };
    assert_close(what, &stored, want, |i| units * half_ulp(dtype, want[i]) + bound);
}

/// Queries and keys are rotated in place, values left; K and V are stored rounded in their slots and nowhere else.
pub fn rope_append_rotates_and_stores<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(30);
    for dtype in KvDType::ALL {
        for (rows, heads, kv_heads, head_dim) in
            [(1, 4, 2, 64), (3, 1, 1, 40), (17, 6, 2, 80), (65, 12, 4, 16), (5, 8, 1, 172)]
        {
            let geometry = AttentionGeometry { heads, kv_heads, head_dim, latent: false };
            let (cols, dim) = (geometry.qkv_dim(), head_dim as usize);
            let what = format!("rope_append {dtype} {rows} rows {geometry:?}");
            let (mut qkv, values) = data.tensor(device, rows + 1, cols);
            let rope_values = angles(rows + 2, dim, 1000);
            let rope = tensor(device, dim, &rope_values);
            let shape = KvShape { layers: 2, kv_heads, head_dim, dtype };
            let total = 80u32;
            let mut kv = device.kv(shape, total as usize).expect("kv");
            let mut slots = data.permutation(total);
            slots.truncate(rows);
            if rows > 2 {
                slots[1] = u32::MAX;
            }
            device.rope_append(&mut qkv, &rope, geometry, &slots, &mut kv, 1).expect("rope_append");
            let want = rotate(&values[..rows * cols], &rope_values, geometry);
            let got = read(device, &qkv, rows + 1, cols);
            let f32_bound = 4.0 * 2f64.powi(-24) * tolerance.factor * 3.0 * 2f64.sqrt();
            assert_close(&what, &got[..rows * cols], &want, |_| f32_bound);
            assert_eq!(got[rows * cols..], values[rows * cols..], "{what}: rows beyond are untouched");
            let (q_dim, token) = (geometry.q_dim(), 2 * geometry.kv_dim());
            for slot in 0..total {
                let mut bytes = Vec::new();
                device.kv_read(&kv, 1, slot, 1, &mut bytes).expect("kv_read");
                let Some(row) = slots.iter().position(|s| *s == slot) else {
                    assert!(bytes.iter().all(|byte| *byte == 0), "{what}: slot {slot} is untouched");
                    continue;
                };
                let part = row * cols + q_dim..row * cols + q_dim + token;
                check_stored((&what, shape), &bytes, (&want[part.clone()], &got[part]), f32_bound, tolerance);
            }
        }
    }
}

/// Stored bytes do not depend on the rows of a call: a prompt in chunks of any size is stored as the whole one is.
pub fn rope_append_in_chunks_stores_the_same_bytes<D: Device>(device: &mut D, _: Tolerance) {
    let geometry = AttentionGeometry { heads: 3, kv_heads: 2, head_dim: 40, latent: false };
    let (rows, cols) = (23u32, geometry.qkv_dim());
    let mut data = Data::new(33);
    let (values, rope) = (data.values(rows as usize * cols), angles(rows as usize, 40, 9));
    for dtype in KvDType::ALL {
        let [single, chunked, whole] = [1, 7, rows].map(|chunk| {
            let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 40, dtype };
            let mut kv = device.kv(shape, rows as usize).expect("kv");
            for from in (0..rows).step_by(chunk as usize) {
                let to = rows.min(from + chunk);
                let part = |values: &[f32], cols: usize| values[from as usize * cols..to as usize * cols].to_vec();
                let mut qkv = tensor(device, cols, &part(&values, cols));
                let rope = tensor(device, 40, &part(&rope, 40));
                let slots: Vec<u32> = (from..to).collect();
                device.rope_append(&mut qkv, &rope, geometry, &slots, &mut kv, 0).expect("rope_append");
            }
            let mut bytes = Vec::new();
            device.kv_read(&kv, 0, 0, rows, &mut bytes).expect("kv_read");
            bytes
        });
        assert!(single == whole && chunked == whole, "chunks in {dtype}");
    }
}

/// Rows of 8 bits whose values are all zero, tiny, at the border of a scale, or not finite: the same bytes on every device, and NaN
/// where a value is not finite.
pub fn rope_append_of_extremes_in_8_bits<D: Device>(device: &mut D, _: Tolerance) {
    const DIM: usize = 40;
    let geometry = AttentionGeometry { heads: 1, kv_heads: 1, head_dim: 40, latent: false };
    let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 40, dtype: KvDType::Fp8 };
    let finite = [0.0, -0.0, 1e-44, -1e-38, 3e-36, 464.0, -464.000_03, 465.0, 1.062_5, 3.4e38, f32::MAX];
    let rows: Vec<f32> = finite.into_iter().chain([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]).collect();
    let mut data = Data::new(34);
    let mut values = data.values(rows.len() * geometry.qkv_dim());
    for (row, extreme) in values.chunks_exact_mut(geometry.qkv_dim()).zip(&rows) {
        let v = &mut row[2 * DIM..];
        // The extreme is the largest of its row.
        let limit = if extreme.is_finite() { extreme.abs() / 4.0 } else { 1.0 };
        v.iter_mut().for_each(|value| *value *= limit);
        v[17] = *extreme;
    }
    let mut qkv = tensor(device, geometry.qkv_dim(), &values);
    let rope = tensor(device, DIM, &angles(rows.len(), DIM, 0));
    let slots: Vec<u32> = (0..rows.len() as u32).collect();
    let mut kv = device.kv(shape, rows.len()).expect("kv");
    device.rope_append(&mut qkv, &rope, geometry, &slots, &mut kv, 0).expect("rope_append");
    let mut bytes = Vec::new();
    device.kv_read(&kv, 0, 0, rows.len() as u32, &mut bytes).expect("kv_read");
    let stored = bytes.chunks_exact(shape.layer_token_bytes());
    for ((stored, row), extreme) in stored.zip(values.chunks_exact(geometry.qkv_dim())).zip(rows) {
        let mut want = Vec::new();
        shape.encode(&row[DIM..], &mut want);
        let (got, want) = (&stored[stored.len() / 2..], &want[want.len() / 2..]);
        if extreme.is_finite() {
            assert_eq!(got, want, "a row whose largest is {extreme:e}");
        } else {
            let mut decoded = Vec::new();
            shape.decode(stored, &mut decoded);
            assert!(decoded[DIM..].iter().all(|value| value.is_nan()), "a row with {extreme}: {decoded:?}");
        }
    }
}

/// A few chunks of one sequence, appended and attended to as a model does.
pub fn rope_append_then_attention<D: Device>(device: &mut D, tolerance: Tolerance) {
    let geometry = AttentionGeometry { heads: 6, kv_heads: 2, head_dim: 40, latent: false };
    let mut data = Data::new(31);
    for dtype in KvDType::ALL {
        let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 40, dtype };
        let mut kv = device.kv(shape, 64).expect("kv");
        let mut out = Partials::new(device, 40, geometry).expect("partials");
        let mut pos = 0u32;
        for rows in [30u32, 1, 9, 1] {
            let (mut qkv, _) = data.tensor(device, rows as usize, geometry.qkv_dim());
            let rope = tensor(device, 40, &angles(rows as usize, 40, pos as usize));
            let slots: Vec<u32> = (pos + 5..pos + 5 + rows).collect();
            device.rope_append(&mut qkv, &rope, geometry, &slots, &mut kv, 0).expect("rope_append");
            let seqs = [AttnRows { row0: 0, rows, pos0: pos, run0: 0, runs: 1 }];
            pos += rows;
            let runs = [KvRun { base: 5, len: pos, first_pos: 0 }];
            let batch =
                AttnBatch { geometry, scale: 0.2, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
            device.attention(&qkv, &batch, &kv, 0, &mut out).expect("attention");
            // The oracle starts from what the device rotated and stored, which the case above checks.
            let queries = read(device, &qkv, rows as usize, geometry.qkv_dim());
            let mut bytes = Vec::new();
            device.kv_read(&kv, 0, 0, 64, &mut bytes).expect("kv_read");
            let mut stored = Vec::new();
            shape.decode(&bytes, &mut stored);
            let want = Attention::of(&batch, &queries, geometry.qkv_dim(), &stored);
            let what = format!("attention after {pos} tokens of {dtype}");
            oracle::check(device, &what, &want, &out, (&batch, dtype), tolerance);
        }
    }
}
