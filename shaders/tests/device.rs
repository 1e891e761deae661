//! What the conformance suite does not reach: sharding, rounding on store, many recorded operations, plain errors.
#![allow(clippy::unwrap_used, reason = "tests")]

use bytes::Bytes;
use half::{bf16, f16};
use lagoon_backend::conformance;
use lagoon_backend::{
    Activation, AttnBatch, AttnRows, CpuDevice, Device, DeviceError, ExpertBuffers, Experts, GroupScore, HeadStrides,
    LatentRow, Mode, Partials, Routing, Scoring, WeightFormat, WeightPart, WeightSource,
};
use lagoon_shaders::{AdapterChoice, Options, WgpuDevice, list_adapters};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvRun, KvShape};

fn open(options: Options) -> Result<WgpuDevice, String> {
    WgpuDevice::open_with(&AdapterChoice::Software, options).map_err(|error| error.to_string())
}

/// Runs `case` on the software adapter, or notes the skip.
fn with_device(name: &str, options: Options, case: impl FnOnce(&mut WgpuDevice)) {
    conformance::run(name, open(options), case);
}

/// Deterministic values in -1..1.
fn values(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        f32::from(u16::try_from(state >> 16).unwrap()) / 32_768.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn weight(dtype: DType, rows: usize, cols: usize, seed: u32) -> WeightSource {
    let mut bytes = Vec::new();
    dtype.encode(&values(seed, rows * cols), &mut bytes);
    WeightSource::plain(dtype, cols, vec![(rows, Bytes::from(bytes))])
}

fn read_all(device: &mut WgpuDevice, tensor: &<WgpuDevice as Device>::Tensor, rows: usize, cols: usize) -> Vec<f32> {
    let mut out = Vec::new();
    device.read(tensor, 0..rows, 0..cols, &mut out).unwrap();
    out
}

/// Products and embeddings of a weight of 300 x 70.
fn products(device: &mut WgpuDevice, dtype: DType) -> Vec<Vec<f32>> {
    let table = device.weight(weight(dtype, 300, 70, 7)).unwrap();
    let mut results = Vec::new();
    for rows in [1, 5, 70] {
        let mut x = device.tensor(rows, 70).unwrap();
        device.write(&mut x, 0, &values(3, rows * 70)).unwrap();
        let mut out = device.tensor(rows, 300).unwrap();
        device.matmul(&x, &table, rows, Mode::Set, &mut out).unwrap();
        results.push(read_all(device, &out, rows, 300));
        let ids: Vec<u32> = (0..u32::try_from(rows).unwrap()).map(|i| (i * 131 + 299) % 300).collect();
        device.embed(&table, &ids, &mut x).unwrap();
        results.push(read_all(device, &x, rows, 70));
    }
    results
}

#[test]
fn sharded_weights_give_the_same_bits() {
    with_device("sharded_weights_give_the_same_bits", Options::default(), |whole| {
        // 64 to 128 rows a shard, and one that is not a multiple of the tiles.
        let options = Options { binding_bytes_max: 100_000, ..Options::default() };
        let small = Options { binding_bytes_max: 84_000, ..Options::default() };
        for dtype in [DType::F32, DType::BF16] {
            let want = products(whole, dtype);
            assert_eq!(products(&mut open(options).unwrap(), dtype), want, "{dtype}");
            assert_eq!(products(&mut open(small).unwrap(), dtype), want, "{dtype}");
        }
    });
}

/// A weight of 300 x 512 whose parts have several formats, and the same elements in f32.
fn several_formats() -> (WeightSource, WeightSource) {
    use WeightFormat::{BF16, F32, Mxfp4, Q4_0, Q4K, Q5K, Q6K, Q8_0};
    let (cols, mut data) = (512, conformance::Data::new(5));
    let (mut parts, mut elements) = (Vec::new(), Vec::new());
    let formats = [(6, Q4K), (2, Q8_0), (3, Q8_0), (0, Q4K), (7, BF16), (210, Q6K), (9, Mxfp4), (3, Q4_0), (60, Q5K)];
    for (rows, format) in formats {
        let (bytes, exact) = match format.plain() {
            Some(dtype) => data.stored(dtype, rows * cols),
            None => data.packed(format, rows * cols),
        };
        parts.push(WeightPart { rows, format, bytes: bytes.into() });
        elements.extend(exact);
    }
    let mut bytes = Vec::new();
    DType::F32.encode(&elements, &mut bytes);
    let same = vec![WeightPart { rows: 300, format: F32, bytes: bytes.into() }];
    (WeightSource { cols, parts }, WeightSource { cols, parts: same })
}

/// Products, products by head and embeddings of a weight of 300 x 512.
fn uses(device: &mut WgpuDevice, source: WeightSource) -> Vec<Vec<f32>> {
    let weight = device.weight(source).unwrap();
    let mut results = Vec::new();
    for rows in [1, 3, 9] {
        let mut x = device.tensor(rows, 512).unwrap();
        device.write(&mut x, 0, &values(3, rows * 512)).unwrap();
        let mut out = device.tensor(rows, 300).unwrap();
        device.matmul(&x, &weight, rows, Mode::Set, &mut out).unwrap();
        results.push(read_all(device, &out, rows, 300));
        device.matmul(&x, &weight, rows, Mode::Add, &mut out).unwrap();
        results.push(read_all(device, &out, rows, 300));
        let ids: Vec<u32> = (0..u32::try_from(rows).unwrap()).map(|i| (i * 131 + 299) % 300).collect();
        device.embed(&weight, &ids, &mut x).unwrap();
        results.push(read_all(device, &x, rows, 512));
        let mut x = device.tensor(rows, 4 * 512).unwrap();
        device.write(&mut x, 0, &values(4, rows * 4 * 512)).unwrap();
        device
            .head_matmul(&x, &weight, HeadStrides { heads: 4, x_stride: 512, out_stride: 75 }, rows, &mut out)
            .unwrap();
        results.push(read_all(device, &out, rows, 300));
    }
    results
}

#[test]
fn parts_of_several_formats_are_one_weight() {
    with_device("parts_of_several_formats_are_one_weight", Options::default(), |whole| {
        let (several, plain) = several_formats();
        let want = uses(whole, plain);
        // The part in Q6_K takes 89,040 bytes.
        let options = Options { binding_bytes_max: 80_000, ..Options::default() };
        for got in [uses(whole, several.clone()), uses(&mut open(options).unwrap(), several)] {
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                for (i, (got, want)) in got.iter().zip(want).enumerate() {
                    // Sums of 512 products of at most 2, of elements that are rounded once.
                    assert!((got - want).abs() <= 3e-4, "result {index}, element {i}: {got}, expected {want}");
                }
            }
        }
    });
}

/// Mixtures of 6 experts of 33 columns on rows of 70: choices alone, in fours and in tiles.
fn mixtures(device: &mut WgpuDevice, dtype: DType) -> Vec<Vec<f32>> {
    let (count, hidden, n, activation) = (6, 70, 33, Activation::SiluMul);
    let mut given = |rows, cols, seed| device.weight(weight(dtype, rows, cols, seed)).unwrap();
    let (up, down) = (given(count * 2 * n, hidden, 1), given(count * hidden, n, 2));
    let (up_bias, down_bias) = (given(count, 2 * n, 3), given(count, hidden, 4));
    let (scoring, normalised, group_score) = (Scoring::Softmax, true, GroupScore::Best);
    let routing = Routing { top_k: 2, scoring, normalised, scale: 1.0, groups: 1, top_groups: 1, group_score };
    let (up_bias, down_bias) = (Some(&up_bias), Some(&down_bias));
    let experts = Experts { count, up: &up, up_bias, down: &down, down_bias, choice_bias: None, activation, routing };
    let mut results = Vec::new();
    for rows in [3, 20, 70] {
        let mut tensor = |cols, seed| {
            let mut tensor = device.tensor(rows, cols).unwrap();
            device.write(&mut tensor, 0, &values(seed, rows * cols)).unwrap();
            tensor
        };
        let (x, logits, mut out) = (tensor(hidden, 5), tensor(count, 6), tensor(hidden, 7));
        let mut buffers = ExpertBuffers::new(device, rows, 2, (hidden, n), activation).unwrap();
        device.experts(&x, &logits, &experts, rows, &mut buffers, &mut out).unwrap();
        results.push(read_all(device, &out, rows, hidden));
    }
    results
}

#[test]
fn sharded_experts_give_the_same_bits() {
    with_device("sharded_experts_give_the_same_bits", Options::default(), |whole| {
        for dtype in [DType::F32, DType::BF16] {
            let want = mixtures(whole, dtype);
            // Shards that end within an expert, and within four of its columns.
            for binding_bytes_max in [44_000, 42_000] {
                let options = Options { binding_bytes_max, ..Options::default() };
                assert_eq!(mixtures(&mut open(options).unwrap(), dtype), want, "{dtype} {binding_bytes_max}");
            }
        }
    });
}

/// The most experts, of 4 columns on rows of 8, and the most of a token.
fn many_experts<D: Device>(device: &mut D, rows: usize, routing: Routing) -> Vec<f32> {
    let (count, hidden, n, activation) = (1024, 8, 4, Activation::GeluTanhMul);
    let mut given = |rows, cols, seed| device.weight(weight(DType::F16, rows, cols, seed)).unwrap();
    let (up, down, choice_bias) = (given(count * 2 * n, hidden, 1), given(count * hidden, n, 2), given(1, count, 3));
    let choice_bias = (routing.scoring == Scoring::Sigmoid).then_some(&choice_bias);
    let experts =
        Experts { count, up: &up, up_bias: None, down: &down, down_bias: None, choice_bias, activation, routing };
    let mut tensor = |cols, seed| {
        let mut tensor = device.tensor(rows, cols).unwrap();
        device.write(&mut tensor, 0, &values(seed, rows * cols)).unwrap();
        tensor
    };
    let (x, logits, mut out) = (tensor(hidden, 5), tensor(count, 6), tensor(hidden, 7));
    let mut buffers = ExpertBuffers::new(device, rows, routing.top_k, (hidden, n), activation).unwrap();
    device.experts(&x, &logits, &experts, rows, &mut buffers, &mut out).unwrap();
    let mut all = Vec::new();
    device.read(&out, 0..rows, 0..hidden, &mut all).unwrap();
    all
}

#[test]
fn the_most_experts_are_routed_as_on_the_host() {
    with_device("the_most_experts_are_routed_as_on_the_host", Options::default(), |device| {
        let (scoring, group_score) = (Scoring::Softmax, GroupScore::TwoBest);
        let softmax =
            Routing { top_k: 32, scoring, normalised: true, scale: 1.0, groups: 1, top_groups: 1, group_score };
        let grouped = Routing { scoring: Scoring::Sigmoid, groups: 64, top_groups: 5, ..softmax };
        let alone = Routing { groups: 1024, top_groups: 40, ..softmax };
        let all_groups = Routing { groups: 8, top_groups: 8, ..softmax };
        let best = Routing { groups: 128, top_groups: 7, group_score: GroupScore::Best, ..softmax };
        let biased_best = Routing { group_score: GroupScore::Best, ..grouped };
        for routing in [softmax, grouped, alone, all_groups, best, biased_best] {
            for rows in [1, 5, 300] {
                let want = many_experts(&mut CpuDevice::new(), rows, routing);
                let got = many_experts(device, rows, routing);
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!((got - want).abs() <= 1e-4, "{routing:?}, {rows} rows: {i} is {got}, not {want}");
                }
            }
        }
    });
}

const GEOMETRY: AttentionGeometry = AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 16, latent: false };
const SLOTS: u32 = 900;

/// Appends, copies and attends over runs that cross shard borders.
fn attend(device: &mut WgpuDevice, dtype: DType) -> (Vec<f32>, Vec<f32>, Vec<u8>, Vec<u32>) {
    let shape = KvShape { layers: 2, kv_heads: 2, head_dim: 16, dtype: dtype.into() };
    let mut kv = device.kv(shape, SLOTS as usize).unwrap();
    let mut bytes = Vec::new();
    dtype.encode(&values(5, SLOTS as usize * 2 * GEOMETRY.kv_dim()), &mut bytes);
    device.kv_write(&mut kv, 1, 0, &bytes).unwrap();
    let rows = 90;
    let mut qkv = device.tensor(rows, GEOMETRY.qkv_dim()).unwrap();
    device.write(&mut qkv, 0, &values(6, rows * GEOMETRY.qkv_dim())).unwrap();
    let mut rope = device.tensor(rows, 16).unwrap();
    device.write(&mut rope, 0, &values(8, rows * 16)).unwrap();
    let slots: Vec<u32> = (0..90).map(|row| if row % 7 == 3 { u32::MAX } else { SLOTS - 1 - row * 9 }).collect();
    device.rope_append(&mut qkv, &rope, GEOMETRY, &slots, &mut kv, 1).unwrap();
    let runs = [KvRun { base: 30, len: 850, first_pos: 0 }, KvRun { base: 0, len: 20, first_pos: 850 }];
    let seqs = [
        AttnRows { row0: 0, rows: 89, pos0: 781, run0: 0, runs: 2 },
        AttnRows { row0: 89, rows: 1, pos0: 900, run0: 0, runs: 2 },
    ];
    let batch = AttnBatch {
        geometry: GEOMETRY,
        scale: 0.25,
        window: None,
        alibi: None,
        softcap: None,
        seqs: &seqs,
        runs: &runs,
    };
    let mut out = Partials::new(device, rows, GEOMETRY).unwrap();
    device.attention(&qkv, &batch, &kv, 1, &mut out).unwrap();
    let mut stored = Vec::new();
    device.kv_read(&kv, 1, 0, SLOTS, &mut stored).unwrap();
    let o = read_all(device, &out.out, rows, GEOMETRY.q_dim());
    let lse = read_all(device, &out.lse, rows, GEOMETRY.heads as usize);
    (o, lse, stored, out.count)
}

#[test]
fn a_sharded_store_gives_the_same_attention() {
    with_device("a_sharded_store_gives_the_same_attention", Options::default(), |whole| {
        let options = Options { binding_bytes_max: 66_000, ..Options::default() };
        for dtype in [DType::F32, DType::F16] {
            let want = attend(whole, dtype);
            let got = attend(&mut open(options).unwrap(), dtype);
            assert_eq!((got.2, got.3), (want.2, want.3), "{dtype}: stored bytes and counts");
            for (got, want) in got.0.iter().chain(&got.1).zip(want.0.iter().chain(&want.1)) {
                assert!((got - want).abs() <= 1e-5, "{dtype}: {got} against {want}");
            }
        }
    });
}

fn uploaded<D: Device>(device: &mut D, rows: usize, cols: usize, seed: u32) -> D::Tensor {
    let mut tensor = device.tensor(rows, cols).unwrap();
    device.write(&mut tensor, 0, &values(seed, rows * cols)).unwrap();
    tensor
}

/// Appends rows to a store and attends to it: partials, and what is stored.
fn append_and_attend<D: Device>(device: &mut D, geometry: AttentionGeometry) -> Result<[Vec<f32>; 3], DeviceError> {
    let (rows, slots_all, dtype) = (20, 2000, DType::F32);
    let AttentionGeometry { heads, kv_heads, head_dim, latent } = geometry;
    let mut kv = device.kv(KvShape { layers: 2, kv_heads, head_dim, dtype: dtype.into() }, slots_all)?;
    let mut bytes = Vec::new();
    dtype.encode(&values(5, slots_all * 2 * geometry.kv_dim()), &mut bytes);
    device.kv_write(&mut kv, 1, 0, &bytes)?;
    let mut qkv = uploaded(device, rows, geometry.qkv_dim(), 6);
    let rotated = if latent { 8 } else { head_dim as usize };
    let rope = uploaded(device, rows, rotated, 8);
    let slots: Vec<u32> = (0..20).map(|row| if row % 7 == 3 { u32::MAX } else { 1999 - row * 90 }).collect();
    if latent {
        let queries = uploaded(device, rows, heads as usize * 13, 9);
        let (latents, key) = (uploaded(device, rows, geometry.query_dim() - 8, 10), uploaded(device, rows, 8, 11));
        let row = LatentRow { queries: &queries, latent: &latents, key: &key, rope: &rope };
        device.latent_append(&mut qkv, row, geometry, &slots, &mut kv, 1)?;
    } else {
        device.rope_append(&mut qkv, &rope, geometry, &slots, &mut kv, 1)?;
    }
    let runs = [KvRun { base: 60, len: 1940, first_pos: 0 }];
    let seqs = [AttnRows { row0: 0, rows: 20, pos0: 1920, run0: 0, runs: 1 }];
    let batch = AttnBatch { geometry, scale: 0.2, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
    let mut out = Partials::new(device, rows, geometry)?;
    device.attention(&qkv, &batch, &kv, 1, &mut out)?;
    let (mut stored, mut results) = (Vec::new(), [const { Vec::new() }; 3]);
    device.kv_read(&kv, 1, 0, 2000, &mut stored)?;
    dtype.decode(&stored, &mut results[2]);
    device.read(&out.out, 0..rows, 0..geometry.q_dim(), &mut results[0])?;
    device.read(&out.lse, 0..rows, 0..heads as usize, &mut results[1])?;
    Ok(results)
}

#[test]
fn latent_rows_and_wide_heads_are_those_of_the_host_in_sharded_stores_too() {
    let latent = AttentionGeometry { heads: 5, kv_heads: 1, head_dim: 12, latent: true };
    let wide = AttentionGeometry { heads: 2, kv_heads: 1, head_dim: 288, latent: false };
    for (geometry, binding_bytes_max) in [(latent, 130_000), (wide, 2_000_000)] {
        let options = Options { binding_bytes_max, ..Options::default() };
        with_device("latent_rows_and_wide_heads_are_those_of_the_host", options, |device| {
            let want = append_and_attend(&mut CpuDevice::new(), geometry).unwrap();
            let got = append_and_attend(device, geometry).unwrap();
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                assert!((got - want).abs() <= 1e-5, "{geometry:?}: {got} against {want}");
            }
        });
    }
}

/// Products by head for each count of rows.
fn head_products<D: Device>(device: &mut D) -> Vec<Vec<f32>> {
    let strides = HeadStrides { heads: 20, x_stride: 71, out_stride: 41 };
    let weight = device.weight(weight(DType::F32, 800, 70, 12)).unwrap();
    let of_rows = |rows: usize| {
        let (mut x, mut out) = (device.tensor(rows, 20 * 71).unwrap(), uploaded(device, rows, 20 * 41 + 3, 14));
        // What lies between heads may be anything.
        let mut inputs = values(13, rows * 20 * 71);
        inputs.chunks_exact_mut(71).for_each(|head| head[70] = f32::INFINITY);
        device.write(&mut x, 0, &inputs).unwrap();
        device.head_matmul(&x, &weight, strides, rows, &mut out).unwrap();
        let mut values = Vec::new();
        device.read(&out, 0..rows, 0..20 * 41 + 3, &mut values).unwrap();
        values
    };
    [1, 7, 20].map(of_rows).to_vec()
}

#[test]
fn shards_of_a_weight_may_cut_heads() {
    let options = Options { binding_bytes_max: 130_000, ..Options::default() };
    with_device("shards_of_a_weight_may_cut_heads", options, |device| {
        let (got, want) = (head_products(device), head_products(&mut CpuDevice::new()));
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((got - want).abs() <= 1e-4, "{got} against {want}");
        }
    });
}

/// Values at and around every rounding decision: ties, subnormals, overflow, signs.
fn edges() -> Vec<f32> {
    let mut edges = Vec::new();
    for exponent in 0..255_u32 {
        for mantissa in
            [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0x18000, 0x7f_ffff]
        {
            for sign in [0, 1_u32 << 31] {
                edges.push(f32::from_bits(sign | (exponent << 23) | mantissa));
            }
        }
    }
    edges.resize(edges.len().next_multiple_of(256), 0.0);
    edges
}

#[test]
fn stores_round_to_nearest_even() {
    with_device("stores_round_to_nearest_even", Options::default(), |device| {
        let geometry = AttentionGeometry { heads: 1, kv_heads: 1, head_dim: 256, latent: false };
        let edges = edges();
        let rows = edges.len() / 256;
        let mut qkv = device.tensor(rows, geometry.qkv_dim()).unwrap();
        let rope = device.tensor(rows, 256).unwrap();
        for (row, values) in edges.chunks(256).enumerate() {
            let mut data = vec![0.0; 512];
            data.extend(values);
            device.write(&mut qkv, row, &data).unwrap();
        }
        let slots: Vec<u32> = (0..u32::try_from(rows).unwrap()).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 256, dtype: dtype.into() };
            let mut kv = device.kv(shape, rows).unwrap();
            device.rope_append(&mut qkv, &rope, geometry, &slots, &mut kv, 0).unwrap();
            let mut bytes = Vec::new();
            device.kv_read(&kv, 0, 0, u32::try_from(rows).unwrap(), &mut bytes).unwrap();
            let token = shape.layer_token_bytes();
            let mut want = Vec::new();
            dtype.encode(&edges, &mut want);
            let got: Vec<u8> = bytes.chunks(token).flat_map(|slot| &slot[token / 2..]).copied().collect();
            let size = dtype.size();
            for ((got, want), value) in got.chunks(size).zip(want.chunks(size)).zip(&edges) {
                assert_eq!(got, want, "{dtype}: {value:e} ({:#x})", value.to_bits());
            }
        }
        // The reference itself: half's conversions round to nearest even.
        assert_eq!(f16::from_f32(1.0 + f32::exp2(-11.0)).to_f32(), 1.0);
        assert_eq!(bf16::from_f32(1.0 + f32::exp2(-8.0)).to_f32(), 1.0);
    });
}

#[test]
fn thousands_of_operations_between_reads_keep_their_own_inputs() {
    with_device("thousands_of_operations_between_reads_keep_their_own_inputs", Options::default(), |device| {
        let (rows, cols) = (16, 8);
        let mut x = device.tensor(rows, cols).unwrap();
        let mut y = device.tensor(rows, cols).unwrap();
        let start = values(9, rows * cols);
        device.write(&mut x, 0, &start).unwrap();
        let mut want: Vec<&[f32]> = start.chunks(cols).collect();
        for round in 0..1500_u32 {
            let order: Vec<u32> = (0..16).map(|i| (i * 5 + round) % 16).collect();
            device.gather_rows(&x, &order, &mut y).unwrap();
            std::mem::swap(&mut x, &mut y);
            want = order.iter().map(|i| want[*i as usize]).collect();
        }
        assert_eq!(read_all(device, &x, rows, cols), want.concat());
    });
}

#[test]
fn writes_and_operations_keep_their_order() {
    with_device("writes_and_operations_keep_their_order", Options::default(), |device| {
        // 6 MiB a write: more than the upload arena holds.
        let (rows, cols) = (1536, 1024);
        let mut x = device.tensor(rows, cols).unwrap();
        let mut y = device.tensor(4, cols).unwrap();
        let (first, second) = (values(1, rows * cols), values(2, rows * cols));
        device.write(&mut x, 0, &first).unwrap();
        device.gather_rows(&x, &[0, 1535, 700, 3], &mut y).unwrap();
        device.write(&mut x, 0, &second).unwrap();
        let row = |data: &[f32], row: usize| data[row * cols..(row + 1) * cols].to_vec();
        let want = [row(&first, 0), row(&first, 1535), row(&first, 700), row(&first, 3)].concat();
        assert_eq!(read_all(device, &y, 4, cols), want);
        assert_eq!(read_all(device, &x, rows, cols), second);
    });
}

#[test]
fn what_cannot_be_done_is_an_error() {
    with_device("what_cannot_be_done_is_an_error", Options::default(), |device| {
        let odd = KvShape { layers: 1, kv_heads: 1, head_dim: 7, dtype: KvDType::F16 };
        assert!(matches!(device.kv(odd, 4), Err(DeviceError::Unsupported(text)) if text.contains("7 elements")));
        let latent = |head_dim| AttentionGeometry { heads: 2, kv_heads: 1, head_dim, latent: true };
        for (head_dim, named) in [(6, "12 elements"), (290, "580 elements"), (292, "584 elements")] {
            let refused = append_and_attend(device, latent(head_dim));
            assert!(matches!(&refused, Err(DeviceError::Unsupported(text)) if text.contains(named)), "{refused:?}");
        }
        let huge = device.tensor(1 << 20, 1 << 16);
        assert!(matches!(huge, Err(DeviceError::Unsupported(text)) if text.contains("274877906944 bytes")));
        // And the device still works.
        let mut x = device.tensor(1, 4).unwrap();
        device.write(&mut x, 0, &[1.0, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!(read_all(device, &x, 1, 4), [1.0, 2.0, 3.0, 4.0]);
    });
}

#[test]
fn an_absent_adapter_is_named() {
    let error = WgpuDevice::open(&AdapterChoice::Numbered(usize::MAX)).unwrap_err();
    let requested = format!("number {}", usize::MAX);
    assert!(matches!(&error, DeviceError::Unsupported(text) if text.contains(&requested)), "{error}");
}

#[test]
fn adapters_are_listed_and_software_is_never_the_default() {
    let adapters = list_adapters();
    assert!(adapters.is_sorted_by_key(|adapter| adapter.software), "software comes last");
    for adapter in &adapters {
        assert!(!adapter.name.is_empty() && !adapter.backend.is_empty());
        assert!(adapter.binding_bytes_max >= 128 << 20 || adapter.unusable.is_some(), "{adapter:?}");
    }
    match WgpuDevice::open(&AdapterChoice::Gpu) {
        Ok(device) => assert!(!device.info().software),
        Err(error) => {
            assert!(adapters.iter().all(|adapter| adapter.software || adapter.unusable.is_some()), "{error}");
            assert!(adapters.iter().all(|adapter| error.to_string().contains(&adapter.name)), "{error}");
        }
    }
}
