//! Features of kernels that `Device` does not use: residuals and biases of norms, positions added to embeddings, biases,
//! the approximate GELU, appends without a rotation.

use crate::support::device::{ShimDevice, number};
use lagoon_backend::{Xxh3, conformance::Data};
use lagoon_cuda::kernels::attention::KvView;
use lagoon_cuda::kernels::pointwise::{
    BiasParams, EmbedParams, GeluParams, KvCheckParams, KvExtent, NormParams, RopeParams, gelu, kv_check, per_row,
};

const F32: u32 = 1;

fn assert_near(what: &str, got: &[f32], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (f64::from(*got) - want).abs() <= bound * want.abs().max(1.0),
            "{what}: element {i} is {got}, not {want}"
        );
    }
}

#[test]
fn norms_add_the_residual_first() {
    let mut device = ShimDevice::open().expect("the shim");
    let mut data = Data::new(1);
    for (rows, cols) in [(1usize, 33usize), (3, 700)] {
        for layer in [false, true] {
            let mut x = data.values(rows * cols);
            let (delta, weight, bias) = (data.values(rows * cols), data.values(cols), data.values(cols));
            let mut out = vec![0.0f32; rows * cols];
            let eps = 1e-5f32;
            let mut sums = Vec::new();
            let mut want = Vec::new();
            for row in 0..rows {
                let sum: Vec<f64> = (row * cols..(row + 1) * cols).map(|i| f64::from(x[i] + delta[i])).collect();
                let mean = if layer { sum.iter().sum::<f64>() / cols as f64 } else { 0.0 };
                let squares: f64 = sum.iter().map(|v| (v - mean).powi(2)).sum();
                let factor = 1.0 / (squares / cols as f64 + f64::from(eps)).sqrt();
                want.extend(sum.iter().enumerate().map(|(i, v)| {
                    (v - mean) * factor * f64::from(weight[i]) + if layer { f64::from(bias[i]) } else { 0.0 }
                }));
                sums.extend(sum);
            }
            let params = NormParams {
                x: x.as_mut_ptr() as u64,
                delta: delta.as_ptr() as u64,
                weight: weight.as_ptr() as u64,
                bias: if layer { bias.as_ptr() as u64 } else { 0 },
                out: out.as_mut_ptr() as u64,
                cols: number(cols),
                eps,
                weight_type: F32,
                pad: 0,
            };
            device.launch(&per_row(if layer { "layer_norm" } else { "rms_norm" }, number(rows), params));
            assert_near("the residual", &x, &sums, 1e-7);
            assert_near("the norm", &out, &want, 4e-6);
        }
    }
}

#[test]
fn embeddings_and_biases_are_added() {
    let mut device = ShimDevice::open().expect("the shim");
    let mut data = Data::new(2);
    let (cols, rows) = (45usize, 3usize);
    let (table, bias, before) = (data.values(10 * 48), data.values(cols), data.values(rows * cols));
    let ids = [9u32, 0, 4];
    let mut out = before.clone();
    let params = EmbedParams {
        table: table.as_ptr() as u64,
        ids: ids.as_ptr() as u64,
        out: out.as_mut_ptr() as u64,
        cols: number(cols),
        ld: 48,
        table_type: F32,
        add: 1,
    };
    device.launch(&per_row("embed", 3, params));
    let add_bias =
        BiasParams { x: out.as_mut_ptr() as u64, bias: bias.as_ptr() as u64, cols: number(cols), bias_type: F32 };
    device.launch(&per_row("add_bias", 3, add_bias));
    let want: Vec<f64> = (0..rows * cols)
        .map(|i| {
            let (row, col) = (i / cols, i % cols);
            f64::from(before[i]) + f64::from(table[ids[row] as usize * 48 + col]) + f64::from(bias[col])
        })
        .collect();
    assert_near("sums", &out, &want, 3e-7);
}

#[test]
fn gelu_by_tanh() {
    let mut device = ShimDevice::open().expect("the shim");
    let x: Vec<f32> = (-300..300).map(|i| i as f32 / 25.0).collect();
    let mut out = vec![0.0f32; x.len()];
    device.launch(&gelu(GeluParams {
        x: x.as_ptr() as u64,
        out: out.as_mut_ptr() as u64,
        count: x.len() as u64,
        tanh: 1,
        pad: 0,
    }));
    let want: Vec<f64> = x
        .iter()
        .map(|&v| {
            let v = f64::from(v);
            0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044_715 * v.powi(3))).tanh())
        })
        .collect();
    assert_near("gelu", &out, &want, 1e-6);
}

#[test]
fn appends_without_angles_change_nothing() {
    let mut device = ShimDevice::open().expect("the shim");
    let mut data = Data::new(3);
    // Two heads of 6, one of K and V; layers interleaved: the token's stride is that of two layers of both planes.
    let mut qkv = data.values(2 * 24);
    let before = qkv.clone();
    let mut store = vec![0.0f32; 5 * 24];
    let base = store.as_mut_ptr() as u64;
    let kv = KvView { k: base + 4 * 12, v: base + 4 * 18, token_stride: 24, head_stride: 6 };
    let slots = [3u32, u32::MAX];
    let params = RopeParams {
        qkv: qkv.as_mut_ptr() as u64,
        rope: 0,
        slots: slots.as_ptr() as u64,
        kv,
        heads: 2,
        kv_heads: 1,
        head_dim: 6,
        kv_type: F32,
    };
    device.launch(&per_row("rope_append", 2, params));
    assert_eq!(qkv, before);
    let mut want = vec![0.0; store.len()];
    want[3 * 24 + 12..][..12].copy_from_slice(&before[12..24]);
    assert_eq!(store, want);
}

#[test]
fn checks_are_those_of_the_host() {
    let mut device = ShimDevice::open().expect("the shim");
    let (secret, sums) = Xxh3::tables();
    let tables = [&secret[..], bytemuck::bytes_of(&sums)].concat();
    let mut data = Data::new(4);
    // Around whole stripes and whole blocks of the algorithm, and many; words, so that extents are aligned.
    let lengths = [256, 272, 1008, 1024, 1040, 1088, 1104, 2032, 2048, 2064, 4096, 5008, 9 * 1024 + 16];
    let contents: Vec<Vec<[u64; 2]>> = lengths
        .iter()
        .map(|bytes| (0..bytes / 16).map(|_| [0, 1].map(|_| u64::from(data.values(1)[0].to_bits()) << 17)).collect())
        .collect();
    let extent = |words: &Vec<[u64; 2]>| KvExtent { address: words.as_ptr() as u64, bytes: 16 * words.len() as u64 };
    let extents: Vec<KvExtent> = contents.iter().map(extent).collect();
    let tables: Vec<u64> = tables.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("a word"))).collect();
    for count in [1, 7, 8, 9, extents.len()] {
        let mut out = vec![[7u64; 2]; extents.len()];
        let params = KvCheckParams {
            extents: extents.as_ptr() as u64,
            out: out.as_mut_ptr() as u64,
            secret: tables.as_ptr() as u64,
            count: number(count),
            pad: 0,
        };
        device.launch(&kv_check(params));
        for (n, words) in contents.iter().enumerate() {
            let mut hash = Xxh3::default();
            hash.update(bytemuck::cast_slice(words));
            let want = if n < count { bytemuck::cast(hash.finish().to_le_bytes()) } else { [7; 2] };
            assert_eq!(out[n], want, "{} bytes, {count} extents", lengths[n]);
        }
    }
}
