//! Wide accesses give what narrow ones give: each kernel over arrays aligned to 16 bytes, and over the same arrays one element
//! further on, whose rows are accessed element by element.

use crate::support::device::{ShimDevice, number};
use lagoon_backend::conformance::Data;
use lagoon_cuda::kernels::Launch;
use lagoon_cuda::kernels::attention::{AttentionMergeParams, KvView, MergeItem};
use lagoon_cuda::kernels::latent::{HeadProductParams, LatentParams, head_product};
use lagoon_cuda::kernels::pointwise::{
    AddParams, BiasParams, EmbedParams, GateParams, GatherParams, GeluParams, HeadNormParams, MergeParams, NormParams,
    RopeParams, ScaleParams, SinkParams, add, gated, gelu, head_norm, per_row, scale, sink, softcap,
};
use lagoon_types::DType;

/// Elements that begin `shift` elements after a multiple of 16 bytes, and end where the memory does.
struct Array {
    words: Vec<u128>,
    at: usize,
    bytes: usize,
}

impl Array {
    fn new(bytes: &[u8], shift_bytes: usize) -> Self {
        let mut words = vec![u128::MAX; (shift_bytes + bytes.len()).div_ceil(16)];
        bytemuck::cast_slice_mut(&mut words)[shift_bytes..][..bytes.len()].copy_from_slice(bytes);
        Self { words, at: shift_bytes, bytes: bytes.len() }
    }

    fn of(values: &[f32], shift: usize) -> Self {
        Self::new(bytemuck::cast_slice(values), 4 * shift)
    }

    fn address(&mut self) -> u64 {
        self.words.as_mut_ptr() as u64 + self.at as u64
    }

    fn contents(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.at..][..self.bytes]
    }

    fn floats(&self) -> Vec<f32> {
        self.contents().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

/// Asserts that a kernel gives the same by both kinds of accesses: the same numbers to `bound` of each, where 0 means bits.
fn same(what: &str, bound: f32, mut run: impl FnMut(&mut ShimDevice, usize) -> Vec<f32>) {
    let mut device = ShimDevice::open().expect("the shim");
    let [wide, narrow] = [0, 1].map(|shift| run(&mut device, shift));
    assert_eq!(wide.len(), narrow.len());
    for (i, (wide, narrow)) in wide.iter().zip(&narrow).enumerate() {
        let same = wide.to_bits() == narrow.to_bits() || (wide - narrow).abs() <= bound * narrow.abs().max(1.0);
        assert!(same, "{what}: element {i} is {wide} by wide accesses and {narrow} by narrow ones");
    }
}

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn code(dtype: DType) -> u32 {
    u32::from(dtype.code())
}

/// Of rows that a block loads at once, and of longer ones.
const COLS: [usize; 4] = [4, 1028, 4096, 4100];

#[test]
fn norms() {
    let mut data = Data::new(41);
    for (cols, dtype, delta) in COLS.into_iter().flat_map(|cols| TYPES.map(|dtype| (cols, dtype, dtype != DType::F16)))
    {
        let (x, more) = (data.values(2 * cols), data.values(2 * cols));
        let (weight, bias) = (data.stored(dtype, cols).0, data.stored(dtype, cols).0);
        for name in ["rms_norm", "layer_norm"] {
            same(&format!("{name} of {cols} with {dtype} weights"), 2e-6, |device, shift| {
                let (mut x, mut more, mut out) =
                    (Array::of(&x, shift), Array::of(&more, shift), Array::of(&vec![0.0; 2 * cols], shift));
                let [mut weight, mut bias] = [&weight, &bias].map(|w| Array::new(w, shift * dtype.size()));
                let params = NormParams {
                    x: x.address(),
                    delta: if delta { more.address() } else { 0 },
                    weight: weight.address(),
                    bias: if name == "layer_norm" && delta { bias.address() } else { 0 },
                    out: out.address(),
                    cols: number(cols),
                    eps: 1e-5,
                    weight_type: code(dtype),
                    pad: 0,
                };
                device.launch(&per_row(name, 2, params));
                [x.floats(), out.floats()].concat()
            });
        }
    }
}

#[test]
fn rows_of_tables() {
    let mut data = Data::new(42);
    for (cols, dtype) in COLS.into_iter().flat_map(|cols| TYPES.map(|dtype| (cols, dtype))) {
        let (table, x) = (data.stored(dtype, 3 * (cols + 8)).0, data.values(3 * cols));
        for add in [0, 1] {
            same(&format!("embed of {cols} from {dtype}"), 0.0, |device, shift| {
                let (mut table, mut out) = (Array::new(&table, shift * dtype.size()), Array::of(&x, shift));
                let ids = [2u32, 0, 2];
                let params = EmbedParams {
                    table: table.address(),
                    ids: ids.as_ptr() as u64,
                    out: out.address(),
                    cols: number(cols),
                    ld: number(cols + 8),
                    table_type: code(dtype),
                    add,
                };
                device.launch(&per_row("embed", 3, params));
                out.floats()
            });
        }
        same(&format!("add_bias of {cols} {dtype}"), 0.0, |device, shift| {
            let (mut bias, mut x) = (Array::new(&table, shift * dtype.size()), Array::of(&x, shift));
            let params =
                BiasParams { x: x.address(), bias: bias.address(), cols: number(cols), bias_type: code(dtype) };
            device.launch(&per_row("add_bias", 3, params));
            x.floats()
        });
    }
    let x = data.values(3 * 4100);
    same("gather_rows", 0.0, |device, shift| {
        let (mut x, mut out) = (Array::of(&x, shift), Array::of(&vec![0.0; 2 * 4100], shift));
        let rows = [2u32, 1];
        let params =
            GatherParams { x: x.address(), rows: rows.as_ptr() as u64, out: out.address(), cols: 4100, pad: 0 };
        device.launch(&per_row("gather_rows", 2, params));
        out.floats()
    });
}

#[test]
fn activations() {
    let mut data = Data::new(43);
    for n in [4, 1024, 1032] {
        let x = data.values(2 * 2 * n);
        for name in ["silu_mul", "gelu_tanh_mul", "clamped_swiglu"] {
            same(name, 0.0, |device, shift| {
                let (mut x, mut out) = (Array::of(&x, shift), Array::of(&vec![0.0; 2 * n], shift));
                device.launch(&gated(name, 2, GateParams { x: x.address(), out: out.address(), n: number(n), pad: 0 }));
                out.floats()
            });
        }
    }
    // The last elements are not four.
    for (count, tanh) in [(4099, 0), (4096, 1), (3, 0)] {
        let x = data.values(count);
        same("gelu", 0.0, |device, shift| {
            let mut x = Array::of(&x, shift);
            device.launch(&gelu(GeluParams { x: x.address(), out: x.address(), count: count as u64, tanh, pad: 0 }));
            x.floats()
        });
    }
}

#[test]
fn sums_and_multiples() {
    let mut data = Data::new(46);
    // The last elements are not four.
    for count in [4099usize, 4096, 3] {
        let (x, y) = (data.values(count), data.values(count));
        same("add, scale and softcap", 0.0, |device, shift| {
            let (mut x, mut y) = (Array::of(&x, shift), Array::of(&y, shift));
            let elements = count as u64;
            device.launch(&add(AddParams { x: x.address(), y: y.address(), count: elements }));
            device.launch(&scale(ScaleParams { x: x.address(), count: elements, factor: 0.3, pad: 0 }));
            device.launch(&softcap(ScaleParams { x: x.address(), count: elements, factor: 0.5, pad: 0 }));
            x.floats()
        });
    }
}

#[test]
fn heads() {
    let mut data = Data::new(47);
    // The last has more than a warp loads at once.
    for (dim, dtype) in [4usize, 128, 520].into_iter().flat_map(|dim| TYPES.map(|dtype| (dim, dtype))) {
        let (heads, kv_heads, rows) = (3usize, 2usize, 2usize);
        let (qkv, lse) = (data.values(rows * (heads + 2 * kv_heads) * dim), data.values(rows * heads));
        let [q, k] = [(); 2].map(|()| data.stored(dtype, dim).0);
        same(&format!("head_norm of {dim} with {dtype} weights"), 2e-6, |device, shift| {
            let mut qkv = Array::of(&qkv, shift);
            let [mut q, mut k] = [&q, &k].map(|w| Array::new(w, shift * dtype.size()));
            device.launch(&head_norm(HeadNormParams {
                qkv: qkv.address(),
                q_weight: q.address(),
                k_weight: k.address(),
                heads: number(heads),
                kv_heads: number(kv_heads),
                head_dim: number(dim),
                rows: number(rows),
                q_type: code(dtype),
                k_type: code(dtype),
                eps: 1e-6,
                pad: 0,
            }));
            qkv.floats()
        });
        same(&format!("sink of {dim}, {dtype}"), 0.0, |device, shift| {
            let mut out = Array::of(&qkv[..rows * heads * dim], shift);
            let (mut lse, mut sinks) = (Array::of(&lse, shift), Array::new(&q, shift * dtype.size()));
            device.launch(&sink(SinkParams {
                out: out.address(),
                lse: lse.address(),
                sinks: sinks.address(),
                count: 0,
                heads: number(heads),
                head_dim: number(dim),
                rows: number(rows),
                sink_type: code(dtype),
            }));
            out.floats()
        });
    }
}

#[test]
fn rotations_and_appends() {
    let mut data = Data::new(44);
    // The last has more parts than a block loads at once; 12 has halves that are not fours.
    for (heads, kv_heads, dim) in [(2usize, 1usize, 8usize), (3, 2, 12), (4, 2, 128), (64, 8, 128)] {
        for (dtype, rotated) in TYPES.into_iter().flat_map(|dtype| [(dtype, true), (dtype, false)]) {
            let cols = (heads + 2 * kv_heads) * dim;
            let (qkv, angles) = (data.values(3 * cols), data.values(3 * dim));
            let plane = 5 * kv_heads * dim;
            let stored = data.stored(dtype, plane).0;
            same(&format!("rope_append of {heads} heads of {dim} to {dtype}"), 0.0, |device, shift| {
                let (mut qkv, mut angles) = (Array::of(&qkv, shift), Array::of(&angles, shift));
                let [mut k, mut v] = [(); 2].map(|()| Array::new(&stored, shift * dtype.size()));
                let slots = [4u32, u32::MAX, 0];
                let kv = KvView {
                    k: k.address(),
                    v: v.address(),
                    token_stride: (kv_heads * dim) as u64,
                    head_stride: dim as u64,
                };
                let params = RopeParams {
                    qkv: qkv.address(),
                    rope: if rotated { angles.address() } else { 0 },
                    slots: slots.as_ptr() as u64,
                    kv,
                    heads: number(heads),
                    kv_heads: number(kv_heads),
                    head_dim: number(dim),
                    kv_type: code(dtype),
                };
                device.launch(&per_row("rope_append", 3, params));
                let bytes = k.contents().iter().chain(v.contents()).map(|byte| f32::from(*byte));
                qkv.floats().into_iter().chain(bytes).collect()
            });
        }
    }
}

#[test]
fn appends_of_latents() {
    let mut data = Data::new(47);
    // (heads, latent, rotated, elements of a query): more parts than a block loads at once, halves and queries that are not
    // fours, and DeepSeek-V2-Lite's sizes.
    for (heads, latent, rotated, query) in
        [(70usize, 96usize, 32usize, 48usize), (3, 28, 12, 12), (5, 24, 8, 11), (16, 512, 64, 192)]
    {
        for dtype in TYPES {
            let dim = latent + rotated;
            let qkv = data.values(3 * (heads + 1) * dim);
            let [queries, latents, keys, angles] =
                [heads * query, latent, rotated, rotated].map(|cols| data.values(3 * cols));
            let stored = data.stored(dtype, 5 * dim / 2).0;
            same(&format!("latent_append of {heads} heads of {latent}+{rotated} to {dtype}"), 0.0, |device, shift| {
                let [mut qkv, mut queries, mut latents, mut keys, mut angles] =
                    [&qkv, &queries, &latents, &keys, &angles].map(|values| Array::of(values, shift));
                let [mut k, mut v] = [(); 2].map(|()| Array::new(&stored, shift * dtype.size()));
                let slots = [4u32, u32::MAX, 0];
                let (token_stride, head_stride) = ((dim / 2) as u64, (dim / 2) as u64);
                let params = LatentParams {
                    qkv: qkv.address(),
                    queries: queries.address(),
                    latents: latents.address(),
                    keys: keys.address(),
                    rope: angles.address(),
                    slots: slots.as_ptr() as u64,
                    kv: KvView { k: k.address(), v: v.address(), token_stride, head_stride },
                    heads: number(heads),
                    head_dim: number(dim / 2),
                    latent: number(latent),
                    rotated: number(rotated),
                    query: number(query),
                    kv_type: code(dtype),
                };
                device.launch(&per_row("latent_append", 3, params));
                let bytes = k.contents().iter().chain(v.contents()).map(|byte| f32::from(*byte));
                qkv.floats().into_iter().chain(bytes).collect()
            });
        }
    }
}

#[test]
fn products_by_head() {
    let mut data = Data::new(48);
    // Rows of all kernels; of weights as short as a lane's, and longer than what is loaded at once.
    for (dtype, rows, (n, k)) in TYPES
        .into_iter()
        .flat_map(|dtype| [1usize, 6, 40].map(|rows| (dtype, rows)))
        .flat_map(|(dtype, rows)| [(20usize, 8usize), (33, 600)].map(|size| (dtype, rows, size)))
    {
        let (heads, gap) = (3usize, 4usize);
        let (x, out) = (data.values(rows * heads * (k + gap)), data.values(rows * heads * n));
        // As weights lie: aligned, and their rows padded (`weight_ld`).
        let weights = data.stored(dtype, heads * n * k).0;
        same(&format!("a product by head of {rows} rows with {n}x{k} {dtype}"), 0.0, |device, shift| {
            let (mut x, mut out) = (Array::of(&x, shift), Array::of(&out, shift));
            let mut weights = Array::new(&weights, 0);
            let params = HeadProductParams {
                x: x.address(),
                w: weights.address(),
                out: out.address(),
                rows: number(rows),
                n: number(n),
                k: number(k),
                ldw: number(k),
                heads: number(heads),
                x_stride: number(heads * (k + gap)),
                x_step: number(k + gap),
                out_stride: number(heads * n),
                out_step: number(n),
                unpacked: u32::from(shift == 0),
            };
            device.launch(&head_product(dtype, params));
            out.floats()
        });
    }
}

#[test]
fn scale_reduces() {
    let mut data = Data::new(45);
    for (heads, dim) in [(3usize, 64usize), (300, 4)] {
        let cols = heads * dim;
        let (acc, other) = (data.values(3 * cols), data.values(3 * cols));
        let (acc_lse, lse) = (data.values(3 * heads), data.values(3 * heads));
        same("merge", 0.0, |device, shift| {
            // The second accumulator is empty, and holds anything.
            let mut acc = acc.clone();
            acc[cols..2 * cols].fill(f32::NAN);
            let [mut acc, mut other] = [&acc, &other].map(|x| Array::of(x, shift));
            let mut acc_lse = acc_lse.clone();
            let (acc_count, count) = ([5u32, 0, 7], [3u32, 2, 0]);
            let params = MergeParams {
                acc_out: acc.address(),
                acc_lse: acc_lse.as_mut_ptr() as u64,
                out: other.address(),
                lse: lse.as_ptr() as u64,
                acc_count: acc_count.as_ptr() as u64,
                count: count.as_ptr() as u64,
                heads: number(heads),
                head_dim: number(dim),
            };
            device.launch(&per_row("merge", 3, params));
            let [acc, lse] = [acc.floats(), acc_lse];
            assert!(acc.iter().all(|x| x.is_finite()));
            [acc, lse].concat()
        });
    }
}

/// More pieces than a warp has lanes, wide and narrow, against f64. Two pieces saw nothing.
#[test]
fn merges_of_many_pieces() {
    let mut data = Data::new(46);
    for (dim, pieces) in [(64usize, 70usize), (256, 33), (130, 5), (128, 32), (20, 1)] {
        let (heads, rows) = (5usize, 2usize);
        let mut out = data.values(pieces * rows * heads * dim);
        let mut lse: Vec<f32> = data.values(pieces * rows * heads).iter().map(|x| 4.0 * x).collect();
        for (seen, out) in lse.iter_mut().zip(out.chunks_exact_mut(dim)).skip(3).step_by(17) {
            *seen = f32::NEG_INFINITY;
            out.fill(f32::NAN);
        }
        // Rows lie in the reverse order, a row's pieces `rows` apart.
        let items: Vec<MergeItem> = (0..rows)
            .map(|row| MergeItem {
                row: number(rows - 1 - row),
                piece_row: number(row),
                pieces: number(pieces),
                stride: number(rows),
            })
            .collect();
        let mut device = ShimDevice::open().expect("the shim");
        for shift in [0, 1] {
            let [mut merged, mut merged_lse] = [dim, 1].map(|n| Array::of(&vec![f32::NAN; rows * heads * n], shift));
            let mut pieces_out = Array::of(&out, shift);
            let params = AttentionMergeParams {
                merges: items.as_ptr() as u64,
                piece_out: pieces_out.address(),
                piece_lse: lse.as_ptr() as u64,
                out: merged.address(),
                lse: merged_lse.address(),
                heads: number(heads),
                head_dim: number(dim),
            };
            let grid = [number(heads.div_ceil(4)), number(rows), 1];
            device.launch(&Launch { name: "attention_merge", grid, block: 128, shared_bytes: 0, params });
            let (merged, merged_lse) = (merged.floats(), merged_lse.floats());
            for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
                let at = |piece: usize| (row + piece * rows) * heads + head;
                let weights: Vec<f64> = (0..pieces).map(|piece| f64::from(lse[at(piece)]).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let to = (rows - 1 - row) * heads + head;
                let want_lse = if sum > 0.0 { sum.ln() } else { 0.0 };
                assert!((f64::from(merged_lse[to]) - want_lse).abs() < 1e-5);
                for d in 0..dim {
                    let seen = (0..pieces).filter(|piece| weights[*piece] > 0.0);
                    let want: f64 = seen.map(|piece| weights[piece] * f64::from(out[at(piece) * dim + d])).sum();
                    let want = if sum > 0.0 { want / sum } else { 0.0 };
                    let got = f64::from(merged[to * dim + d]);
                    assert!((got - want).abs() < 2e-6, "{pieces} pieces of {dim}: element {d} is {got}, not {want}");
                }
            }
        }
    }
}
