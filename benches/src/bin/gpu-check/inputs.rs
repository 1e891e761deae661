//! Inputs of the measurements: pseudo-random without a period, bounded, and in so many copies that each call reads
//! memory and not the L2 cache.

use crate::attention::G;
use lagoon_backend::conformance::Data;
use lagoon_backend::{Device, WeightFormat, WeightPart, WeightSource};
use lagoon_types::{DType, KvDType, KvShape};
use rayon::prelude::*;

/// Values of one piece of noise; pieces are made in parallel.
const PIECE: usize = 1 << 16;

/// The next state of a generator (splitmix64), and its output.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// One piece: uniform in `-scale..scale`.
fn piece(n: usize, scale: f32, seed: u64, number: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0xd134_2543_de82_ef95) ^ ((number as u64) << 32);
    let unit = |bits: u64| (bits & 0xff_ffff) as f32 / 8_388_608.0 - 1.0;
    (0..n).map(|_| unit(next(&mut state) >> 40) * scale).collect()
}

/// `n` values between `-scale` and `scale`; another seed gives others.
pub(crate) fn noise(n: usize, scale: f32, seed: u64) -> Vec<f32> {
    let count = n.div_ceil(PIECE);
    let pieces = (0..count).into_par_iter().flat_map_iter(|i| piece(PIECE.min(n - i * PIECE), scale, seed, i));
    pieces.collect()
}

/// The same, encoded.
pub(crate) fn stored_noise(dtype: DType, n: usize, scale: f32, seed: u64) -> Vec<u8> {
    let mut out = vec![0; n * dtype.size()];
    out.par_chunks_mut(PIECE * dtype.size()).enumerate().for_each(|(i, out)| {
        let mut bytes = Vec::with_capacity(out.len());
        dtype.encode(&piece(out.len() / dtype.size(), scale, seed, i), &mut bytes);
        out.copy_from_slice(&bytes);
    });
    out
}

/// Copies of inputs of `bytes` bytes to rotate through, so that twice the L2 cache is read between two uses of one.
pub(crate) fn copies(l2_bytes: u32, bytes: usize) -> usize {
    let twice = 2 * l2_bytes as usize;
    if bytes >= twice { 1 } else { twice.div_ceil(bytes.max(1)).min(256) + 1 }
}

/// A weight of noise, small enough that sums over its columns stay near 1.
pub(crate) fn weight<D: Device>(
    d: &mut D,
    dtype: DType,
    rows: usize,
    cols: usize,
    seed: u64,
) -> anyhow::Result<D::Weight> {
    let bytes = stored_noise(dtype, rows * cols, (3.0 / cols as f32).sqrt(), seed);
    Ok(d.weight(WeightSource::plain(dtype, cols, vec![(rows, bytes.into())]))?)
}

/// Elements of a packed weight's blocks that are drawn; more repeat them from another block on.
const PACKED: usize = 1 << 20;

/// A packed weight of random blocks, with elements about 1 / 64.
pub(crate) fn packed_weight<D: Device>(
    d: &mut D,
    format: WeightFormat,
    rows: usize,
    cols: usize,
    seed: u64,
) -> anyhow::Result<D::Weight> {
    let bytes = format.bytes(rows * cols).ok_or_else(|| anyhow::anyhow!("{cols} columns are no whole blocks"))?;
    let drawn = Data::new(seed).packed(format, PACKED.min(rows * cols)).0;
    let mut all = Vec::with_capacity(bytes);
    // Each repetition begins at another block, so that it lies elsewhere in the rows.
    let mut first = 0;
    while all.len() < bytes {
        let part = &drawn[first..];
        all.extend_from_slice(&part[..part.len().min(bytes - all.len())]);
        first = (first + 7 * format.block().bytes) % drawn.len();
    }
    Ok(d.weight(WeightSource { cols, parts: vec![WeightPart { rows, format, bytes: all.into() }] })?)
}

/// A tensor of noise between -1 and 1.
pub(crate) fn tensor<D: Device>(d: &mut D, rows: usize, cols: usize, seed: u64) -> anyhow::Result<D::Tensor> {
    let mut tensor = d.tensor(rows, cols)?;
    d.write(&mut tensor, 0, &noise(rows * cols, 1.0, seed))?;
    Ok(tensor)
}

/// Fills the first `tokens` slots of every layer of a store with noise.
pub(crate) fn fill<D: Device>(d: &mut D, kv: &mut D::Kv, shape: KvShape, tokens: usize) -> anyhow::Result<()> {
    // Chunks of 64 MiB.
    let most = ((64 << 20) / shape.layer_token_bytes()).max(1);
    for layer in 0..shape.layers as usize {
        for slot in (0..tokens).step_by(most) {
            let count = most.min(tokens - slot);
            let seed = ((layer as u64) << 32) + slot as u64;
            let bytes = match shape.dtype.plain() {
                Some(dtype) => stored_noise(dtype, count * shape.layer_token_bytes() / dtype.size(), 1.0, seed),
                None => packed_rows(shape, count, seed),
            };
            d.kv_write(kv, layer, u32::try_from(slot)?, &bytes)?;
        }
    }
    Ok(())
}

/// Tokens of one layer in 8 bits; more than [`PACKED`] elements repeat.
fn packed_rows(shape: KvShape, tokens: usize, seed: u64) -> Vec<u8> {
    let row = 2 * (shape.kv_heads * shape.head_dim) as usize;
    let (mut bytes, wanted) = (Vec::new(), tokens * shape.layer_token_bytes());
    shape.encode(&noise(tokens.min(PACKED / row) * row, 1.0, seed), &mut bytes);
    let drawn = bytes.len();
    (drawn..wanted).step_by(drawn).for_each(|at| bytes.extend_from_within(..drawn.min(wanted - at)));
    bytes
}

/// A store of noise with this many layers of [`G`]'s shape.
pub(crate) fn store<D: Device>(
    d: &mut D,
    layers: u32,
    tokens: usize,
    dtype: impl Into<KvDType>,
) -> anyhow::Result<D::Kv> {
    let shape = KvShape { layers, kv_heads: G.kv_heads, head_dim: G.head_dim, dtype: dtype.into() };
    let mut kv = d.kv(shape, tokens)?;
    fill(d, &mut kv, shape, tokens)?;
    Ok(kv)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_no_period_and_stays_within_its_scale() {
        let n = 5 * PIECE + 77;
        let values = noise(n, 0.5, 7);
        assert!(values.len() == n && values.iter().all(|v| v.abs() <= 0.5));
        for shift in [1, 2, 64, 128, 4096, PIECE, 2 * PIECE, 4 * PIECE] {
            let same = values.iter().zip(&values[shift..]).filter(|(a, b)| a == b).count();
            assert!(same < n / 1000, "{same} of {n} values are those {shift} later");
        }
        let mean = values.iter().sum::<f32>() / n as f32;
        assert!(mean.abs() < 0.01 && noise(n, 0.5, 8) != values, "{mean}");
        let (mut bytes, mut read) = (Vec::new(), Vec::new());
        DType::F16.encode(&values, &mut bytes);
        assert_eq!(stored_noise(DType::F16, n, 0.5, 7), bytes);
        DType::F16.decode(&bytes, &mut read);
        assert!(read.iter().zip(&values).all(|(a, b)| (a - b).abs() < 1e-3));
    }

    #[test]
    fn copies_exceed_twice_the_cache_between_two_uses() {
        for (l2, bytes) in [(50 << 20, 1 << 20), (50 << 20, 117 << 20), (60 << 20, 117 << 20), (1 << 20, 3 << 20)] {
            let copies = copies(l2, bytes);
            assert!(copies == 1 && bytes >= 2 * l2 as usize || (copies - 1) * bytes >= 2 * l2 as usize);
        }
    }
}
