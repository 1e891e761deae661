//! Rows of numbers to blocks of packed formats ([`encode`]): the inverse of `lagoon_backend::formats`.
//!
//! A block's scales are searched for: of several candidates, plain rounding among them, the one with the least weighted square error
//! stays. The error is measured on the numbers that a reader of the block gets, with scales as they are stored. Weights are
//! the importance of columns: the mean square of a matrix's inputs, so that the sum is the expected square error of a product if
//! inputs are independent. Without importance all weights are 1.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "codes are whole numbers that were clamped to their range"
)]

mod affine;
mod mxfp4;
mod signed;

use half::f16;
use lagoon_backend::WeightFormat;
use lagoon_types::DType;

/// Weight of a column without inputs, as a share of the block's mean: its elements still keep their size.
const LEAST_WEIGHT: f32 = 1e-4;
/// Magnitude below which a block is zero: less than half of the least scale above 0.
const LEAST: f32 = 1.0 / (1 << 26) as f32;
/// The largest number of an f16.
const HALF_MAX: f32 = 65_504.0;
/// The least f32 that rounds to infinity in f16.
const HALF_OVERFLOW: f32 = 65_520.0;

/// Formats that [`encode`] writes.
pub const FORMATS: [WeightFormat; 9] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::BF16,
    WeightFormat::Q8_0,
    WeightFormat::Q4_0,
    WeightFormat::Q4K,
    WeightFormat::Q5K,
    WeightFormat::Q6K,
    WeightFormat::Mxfp4,
];

/// The magnitude up to which every element fits a format.
#[must_use]
pub fn largest(format: WeightFormat) -> f32 {
    match format {
        WeightFormat::F16 => HALF_OVERFLOW.next_down(),
        WeightFormat::Q8_0 => HALF_MAX * 127.0,
        WeightFormat::Q4_0 => HALF_MAX * 7.0,
        // Offsets of sub-blocks have six bits.
        WeightFormat::Q4K | WeightFormat::Q5K => HALF_MAX * 63.0,
        WeightFormat::Q6K => HALF_MAX * 127.0 * 31.0,
        // The largest number of bf16, which half of the next step rounds up from.
        WeightFormat::BF16 => f32::from_bits(0x7f7f_7fff),
        // The largest float of 4 bits times a power of two that f32 holds.
        WeightFormat::Mxfp4 => 6.0 * (1_u128 << 125) as f32,
        _ => f32::MAX,
    }
}

/// Writes a row's blocks to `out`. `importance` has a weight for each column, none of them negative.
///
/// # Panics
/// If `values` are no whole blocks or not finite, `out` has not as many bytes as the blocks, or [`FORMATS`] has no `format`.
pub fn encode(format: WeightFormat, values: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    assert_eq!(format.bytes(values.len()), Some(out.len()), "bytes of {} elements in {format}", values.len());
    let row = Row { values, importance };
    match format {
        WeightFormat::F32 => plain(DType::F32, values, out),
        WeightFormat::F16 => plain(DType::F16, values, out),
        WeightFormat::BF16 => plain(DType::BF16, values, out),
        WeightFormat::Q8_0 => row.each(out, signed::q8_0),
        WeightFormat::Q4_0 => row.each(out, signed::q4_0),
        WeightFormat::Q4K => row.each(out, affine::q4k),
        WeightFormat::Q5K => row.each(out, affine::q5k),
        WeightFormat::Q6K => row.each(out, signed::q6k),
        WeightFormat::Mxfp4 => row.each(out, mxfp4::mxfp4),
        _ => panic!("{format} is not written"),
    }
}

fn plain(dtype: DType, values: &[f32], out: &mut [u8]) {
    let mut bytes = Vec::with_capacity(out.len());
    dtype.encode(values, &mut bytes);
    out.copy_from_slice(&bytes);
}

/// A row with the importance of its columns.
struct Row<'a> {
    values: &'a [f32],
    importance: Option<&'a [f32]>,
}

impl Row<'_> {
    /// Calls `pack` with each block's elements, their weights (1 on average) and the place of its bytes, which are zeros.
    fn each<const LEN: usize, const BYTES: usize>(
        &self,
        out: &mut [u8],
        pack: impl Fn(&[f32; LEN], &[f32; LEN], &mut [u8; BYTES]),
    ) {
        let ((blocks, _), (out, _)) = (self.values.as_chunks::<LEN>(), out.as_chunks_mut::<BYTES>());
        for (index, (block, out)) in blocks.iter().zip(out).enumerate() {
            let mut weights = [1.0; LEN];
            if let Some(importance) = self.importance {
                weigh(&importance[index * LEN..][..LEN], &mut weights);
            }
            out.fill(0);
            pack(block, &weights, out);
        }
    }
}

/// Divides a block's importance by its mean. Columns without inputs keep a little of it, and all are equal if none has inputs.
fn weigh(importance: &[f32], weights: &mut [f32]) {
    let mean = importance.iter().map(|x| f64::from(*x)).sum::<f64>() / importance.len() as f64;
    let share = 1.0 / mean;
    if !share.is_finite() || share == 0.0 {
        return;
    }
    for (weight, x) in weights.iter_mut().zip(importance) {
        *weight = (f64::from(*x) * share) as f32 + LEAST_WEIGHT;
    }
}

/// The nearest whole number, the even one of two; for magnitudes below 2^22. Compilers make vectors of it.
#[inline]
fn nearest(x: f32) -> f32 {
    const MAGIC: f32 = (3 << 22) as f32;
    (x + MAGIC) - MAGIC
}

/// The largest magnitude.
fn magnitude(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// A scale as its 16 bits hold it; of a scale above 0 never 0, and never infinite.
fn stored(scale: f32) -> f32 {
    let rounded = f16::from_f32(scale.clamp(-HALF_MAX, HALF_MAX)).to_f32();
    if rounded == 0.0 && scale != 0.0 { f16::from_bits(1).to_f32().copysign(scale) } else { rounded }
}

/// [`stored`], and where steps of scales are coarse also the next scale away from 0: the largest code would be cut off.
fn stored_or_next(scale: f32) -> impl Iterator<Item = f32> + Clone {
    /// Scales as multiples of the least one above 0, below which steps are coarse.
    const COARSE: u16 = 64;
    let nearest = stored(scale);
    let bits = f16::from_f32(nearest).to_bits();
    let is_coarse = (1..COARSE).contains(&(bits & 0x7fff));
    std::iter::once(nearest).chain(is_coarse.then(|| f16::from_bits(bits + 1).to_f32()))
}

/// Writes a scale that [`stored`] gave.
fn put_half(scale: f32, out: &mut [u8]) {
    out.copy_from_slice(&f16::from_f32(scale).to_le_bytes());
}

/// The candidate with the least error; the first of equal ones. `error` may be NaN where a candidate is of no use.
fn best<T: Copy>(candidates: impl IntoIterator<Item = T>, error: impl Fn(T) -> f32) -> Option<(T, f32)> {
    let mut found: Option<(T, f32)> = None;
    for candidate in candidates {
        let error = error(candidate);
        if found.is_none_or(|(_, least)| error < least) && !error.is_nan() {
            found = Some((candidate, error));
        }
    }
    found
}
