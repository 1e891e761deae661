//! Latent attention: products by head, rows that are keys and values at once, and micro attention over them.

use super::attention::Case;
use super::data::{DTYPES, Data, read, tensor};
use super::rope::{angles, check_stored, rotate_head};
use super::{Tolerance, assert_close, matmul};
use crate::{Device, HeadStrides, LatentRow};
use lagoon_types::{AttentionGeometry, KvDType, KvShape};

/// Geometries of latents of `head_dim` stored elements twice: small and odd numbers of heads, many heads.
const fn geometry(heads: u32, head_dim: u32) -> AttentionGeometry {
    AttentionGeometry { heads, kv_heads: 1, head_dim, latent: true }
}

/// Products by head with gaps between the heads of either side, for few rows and many; elements in the gaps, behind the heads and in
/// rows beyond are not written.
pub fn head_matmul_matches<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(110);
    for dtype in DTYPES {
        for (rows, heads, n, k, gaps, extra) in [
            (1, 1, 40, 33, (0, 0), (0, 0)),
            (1, 16, 130, 64, (16, 24), (0, 40)),
            (3, 5, 17, 96, (3, 0), (0, 0)),
            (5, 3, 80, 24, (0, 16), (9, 7)),
            (24, 2, 64, 128, (64, 0), (0, 0)),
            (33, 4, 72, 40, (8, 0), (5, 0)),
            (130, 3, 129, 76, (20, 31), (0, 160)),
        ] {
            let (x_stride, out_stride) = (k + gaps.0, n + gaps.1);
            let (x_cols, cols) = (heads * x_stride + extra.0, heads * out_stride + extra.1);
            let (weight, exact) = data.weight(device, dtype, heads * n, k);
            let (x, values) = data.tensor(device, rows + 1, x_cols);
            let (mut out, before) = data.tensor(device, rows + 2, cols);
            let strides = HeadStrides { heads, x_stride, out_stride };
            device.head_matmul(&x, &weight, strides, rows, &mut out).expect("head_matmul");
            let got = read(device, &out, rows + 2, cols);
            let mut want: Vec<f64> = before.iter().map(|v| f64::from(*v)).collect();
            let mut bounds = vec![0.0; want.len()];
            for row in 0..rows {
                for (head, i) in (0..heads).flat_map(|head| (0..n).map(move |i| (head, i))) {
                    let x = &values[row * x_cols + head * x_stride..][..k];
                    let weight = &exact[(head * n + i) * k..][..k];
                    let products = || x.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w));
                    let at = row * cols + head * out_stride + i;
                    want[at] = products().sum();
                    bounds[at] = matmul::bound(k, dtype, tolerance) * products().map(f64::abs).sum::<f64>();
                }
            }
            let what = format!("head_matmul {dtype} {rows} rows {strides:?} {n}x{k}");
            assert_close(&what, &got, &want, |i| bounds[i]);
        }
    }
}

/// The rotated part of queries and keys comes last, latents are copied; rows are stored rounded in their slots and nowhere else.
pub fn latent_append_rotates_and_stores<D: Device>(device: &mut D, tolerance: Tolerance) {
    let mut data = Data::new(111);
    for dtype in KvDType::ALL {
        for (rows, heads, latent, rotated, other) in
            [(1, 4, 32, 8, 16), (3, 1, 64, 16, 24), (17, 5, 24, 8, 4), (65, 16, 96, 32, 40), (5, 3, 8, 64, 0)]
        {
            let dim = latent + rotated;
            let geometry = geometry(heads, u32::try_from(dim / 2).expect("fits"));
            let (cols, q_dim, heads) = (geometry.qkv_dim(), geometry.q_dim(), heads as usize);
            let what = format!("latent_append {dtype} {rows} rows {geometry:?} {latent}+{rotated}");
            let (mut qkv, before) = data.tensor(device, rows + 1, cols);
            let (queries, query_values) = data.tensor(device, rows + 1, heads * (other + rotated));
            let (latents, latent_values) = data.tensor(device, rows, latent);
            let (keys, key_values) = data.tensor(device, rows + 2, rotated);
            let rope_values = angles(rows + 2, rotated, 1000);
            let rope = tensor(device, rotated, &rope_values);
            let shape = KvShape { layers: 2, kv_heads: 1, head_dim: geometry.head_dim, dtype };
            let total = 80u32;
            let mut kv = device.kv(shape, total as usize).expect("kv");
            let mut slots = data.permutation(total);
            slots.truncate(rows);
            if rows > 2 {
                slots[1] = u32::MAX;
            }
            let row = LatentRow { queries: &queries, latent: &latents, key: &keys, rope: &rope };
            device.latent_append(&mut qkv, row, geometry, &slots, &mut kv, 1).expect("latent_append");
            let mut want: Vec<f64> = before.iter().map(|v| f64::from(*v)).collect();
            for (row, want) in want[..rows * cols].chunks_exact_mut(cols).enumerate() {
                let angles = &rope_values[row * rotated..][..rotated];
                let query = &query_values[row * heads * (other + rotated)..];
                for head in 0..heads {
                    let from = &query[head * (other + rotated) + other..][..rotated];
                    let to = &mut want[head * dim + latent..][..rotated];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = f64::from(*from));
                    rotate_head(to, angles);
                }
                let from =
                    latent_values[row * latent..][..latent].iter().chain(&key_values[row * rotated..][..rotated]);
                want[q_dim..].iter_mut().zip(from).for_each(|(to, from)| *to = f64::from(*from));
                rotate_head(&mut want[q_dim + latent..], angles);
            }
            let got = read(device, &qkv, rows + 1, cols);
            let f32_bound = 4.0 * 2f64.powi(-24) * tolerance.factor * 3.0 * 2f64.sqrt();
            // Latents, and queries that were absorbed before, are not touched.
            let moved = |i: usize| i < rows * cols && i % cols % dim >= latent;
            assert_close(&what, &got, &want, |i| if moved(i) { f32_bound } else { 0.0 });
            for slot in 0..total {
                let mut bytes = Vec::new();
                device.kv_read(&kv, 1, slot, 1, &mut bytes).expect("kv_read");
                let Some(row) = slots.iter().position(|s| *s == slot) else {
                    assert!(bytes.iter().all(|byte| *byte == 0), "{what}: slot {slot} is untouched");
                    continue;
                };
                let part = row * cols + q_dim..row * cols + q_dim + dim;
                check_stored((&what, shape), &bytes, (&want[part.clone()], &got[part]), f32_bound, tolerance);
            }
        }
    }
}

/// Decode, chunks and mixed batches over latents of any size up to 256 elements, with windows, soft caps and missing runs.
pub fn attention_latent<D: Device>(device: &mut D, tolerance: Tolerance) {
    let dtypes = KvDType::ALL;
    for (i, (heads, head_dim)) in [(1, 20), (3, 12), (16, 36), (5, 64), (24, 48), (9, 128)].into_iter().enumerate() {
        for seqs in [vec![(1, 50)], vec![(2, 3), (3, 40)], vec![(33, 21), (1, 300)], vec![(1, 0), (65, 10)]] {
            let (dtype, seed) = (dtypes[i % dtypes.len()], 120 + i as u64);
            let base = Case { geometry: geometry(heads, head_dim), dtype, seqs, seed, run_max: 40, ..Case::default() };
            base.check(device, tolerance);
            Case { window: Some(17), missing: 3, ..base }.check(device, tolerance);
        }
    }
}

/// The sizes of DeepSeek-V3 and Kimi-K2: 576 elements, 512 of which are the latent.
pub fn attention_latent_wide<D: Device>(device: &mut D, tolerance: Tolerance) {
    for (dtype, heads) in KvDType::ALL.into_iter().zip([16, 64, 128, 16]) {
        for seqs in [vec![(1, 700), (1, 40)], vec![(19, 90)]] {
            Case { geometry: geometry(heads, 288), dtype, seqs, seed: 130, run_max: 300, ..Case::default() }
                .check(device, tolerance);
        }
    }
}
