//! Element types of stored KV, and rows of 8-bit codes.
//!
//! A *row* is one token's key, or value, of one KV head in one layer. Plain types store its `head_dim` elements. [`KvDType::Fp8`]
//! stores a code for each element, then zeros up to a multiple of four, then the row's scale as an f32. Invariants:
//! * a row depends on its own elements only: appending never changes a stored row, and no division of a prompt into
//!   chunks changes a byte;
//! * a scale is a power of two, so that encoding what was decoded gives the same bytes, and that all backends encode equal
//!   elements equally.

use crate::dtype::{DType, UnknownDType};
use crate::e4m3;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDType {
    F32,
    F16,
    BF16,
    /// E4M3 (Micikevicius et al. 2022: 4 bits of exponent, 3 of mantissa, no infinities) with a scale for each row.
    Fp8,
}

/// Bytes of a row's scale.
pub const SCALE_BYTES: usize = 4;
/// Codes of [`KvDType::Fp8`] are followed by zeros up to a multiple of this, so that scales are aligned.
const CODES_ALIGN: usize = 4;
/// Biased exponent of the smallest scale, 2^-100: scaled elements and decoded values are never subnormal, which some
/// devices flush to zero.
const SCALE_EXPONENT_MIN: u32 = 27;
/// The mantissa of 464 = 1.8125 * 2^8, the largest number that rounds to E4M3's largest, 448.
const LARGEST_MANTISSA: u32 = 0x68_0000;

impl From<DType> for KvDType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::BF16,
        }
    }
}

impl KvDType {
    /// All types.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::BF16, Self::Fp8];

    /// The element type, where rows have no scales.
    #[must_use]
    pub const fn plain(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::BF16 => Some(DType::BF16),
            Self::Fp8 => None,
        }
    }

    /// Bytes of one element, without its share of a scale.
    #[must_use]
    pub const fn element_bytes(self) -> usize {
        match self.plain() {
            Some(dtype) => dtype.size(),
            None => 1,
        }
    }

    /// Units of [`KvDType::element_bytes`] in a row: its elements, and with [`KvDType::Fp8`] the bytes of its scale.
    #[must_use]
    pub const fn row_elements(self, head_dim: u32) -> usize {
        match self {
            Self::Fp8 => (head_dim as usize).next_multiple_of(CODES_ALIGN) + SCALE_BYTES,
            Self::F32 | Self::F16 | Self::BF16 => head_dim as usize,
        }
    }

    /// Bytes of a row of `head_dim` elements.
    #[must_use]
    pub const fn row_bytes(self, head_dim: u32) -> usize {
        self.row_elements(head_dim) * self.element_bytes()
    }

    /// Stable number for the wire; the same as [`DType::code`] where there is one.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self.plain() {
            Some(dtype) => dtype.code(),
            None => 4,
        }
    }

    /// Inverse of [`KvDType::code`].
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::F32),
            2 => Some(Self::F16),
            3 => Some(Self::BF16),
            4 => Some(Self::Fp8),
            _ => None,
        }
    }
}

impl fmt::Display for KvDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.plain() {
            Some(dtype) => dtype.fmt(f),
            None => f.write_str("fp8"),
        }
    }
}

/// Error of [`KvDType::from_str`]: the text names no element type of KV.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown KV element type {0:?}: expected f32, f16, bf16 or fp8")]
pub struct UnknownKvDType(pub String);

impl FromStr for KvDType {
    type Err = UnknownKvDType;

    /// Accepts the names of [`DType`], and `fp8`, `fp8_e4m3` or `float8_e4m3fn`.
    fn from_str(text: &str) -> Result<Self, UnknownKvDType> {
        match text.to_ascii_lowercase().trim_start_matches("torch.") {
            "fp8" | "fp8_e4m3" | "float8_e4m3fn" => Ok(Self::Fp8),
            _ => text.parse::<DType>().map(Self::from).map_err(|UnknownDType(text)| UnknownKvDType(text)),
        }
    }
}

/// Writes a row: its codes, zeros, and the smallest power of two as its scale with which all elements round to a number of E4M3.
/// Elements that are not finite make the scale NaN, and so the whole row.
///
/// # Panics
/// If `out` is not [`KvDType::row_bytes`] long.
pub fn encode_row(values: &[f32], out: &mut [u8]) {
    let (codes, rest) = out.split_at_mut(values.len());
    let (zeros, scale) = rest.split_at_mut(rest.len() - SCALE_BYTES);
    assert!(zeros.len() < CODES_ALIGN, "a row's length");
    zeros.fill(0);
    let largest = values.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    let (factor, of_row) = match largest {
        0 => (0.0, 0.0),
        0x7f80_0000.. => (0.0, f32::NAN),
        _ => {
            let exponent = (largest >> 23) + u32::from(largest & 0x7f_ffff > LARGEST_MANTISSA);
            let biased = exponent.saturating_sub(8).max(SCALE_EXPONENT_MIN);
            (f32::from_bits((254 - biased) << 23), f32::from_bits(biased << 23))
        }
    };
    if factor == 0.0 {
        codes.fill(0);
    } else {
        codes.iter_mut().zip(values).for_each(|(code, value)| *code = e4m3::encode(value * factor));
    }
    scale.copy_from_slice(&of_row.to_le_bytes());
}

/// Reads as many elements of a row as `out` has.
///
/// # Panics
/// If `row` is not [`KvDType::row_bytes`] long.
pub fn decode_row(row: &[u8], out: &mut [f32]) {
    let (codes, scale) = row.split_at(row.len() - SCALE_BYTES);
    assert!(codes.len() >= out.len(), "a row's length");
    let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
    out.iter_mut().zip(codes).for_each(|(value, code)| *value = e4m3::decode(*code) * scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(values: &[f32]) -> Vec<u8> {
        let mut row = vec![0xaa; KvDType::Fp8.row_bytes(u32::try_from(values.len()).unwrap())];
        encode_row(values, &mut row);
        row
    }

    fn decoded(row: &[u8], n: usize) -> Vec<f32> {
        let mut values = vec![0.0; n];
        decode_row(row, &mut values);
        values
    }

    #[test]
    fn scales_are_the_smallest_powers_of_two_that_fit() {
        let cases = [
            (464.0, 1.0, 448.0),
            (465.0, 2.0, 480.0),
            (232.0, 0.5, 224.0),
            (233.0, 1.0, 240.0),
            (1.0, 1.0 / 256.0, 1.0),
        ];
        for (largest, scale, rounded) in cases {
            let row = encoded(&[0.0, -largest, 0.1 * largest]);
            assert_eq!(row[4..], f32::to_le_bytes(scale), "{largest}");
            assert_eq!(decoded(&row, 3)[1], -rounded);
        }
        assert_eq!(encoded(&[0.0, -0.0]), [0; 8], "zeros have the scale 0");
        let tiny = encoded(&[f32::MIN_POSITIVE / 8.0, 1e-38]);
        assert_eq!(tiny, [0, 0, 0, 0, 0, 0, 0x80, 13], "a scale of 2^-100");
    }

    #[test]
    fn rows_are_padded_and_encode_again_to_the_same_bytes() {
        let values: Vec<f32> = (0..7).map(|i| (i as f32 - 2.5) * 1.37).collect();
        let row = encoded(&values);
        assert_eq!((row.len(), row[7]), (12, 0));
        assert_eq!(encoded(&decoded(&row, 7)), row);
        for (got, want) in decoded(&row, 7).into_iter().zip(&values) {
            assert!((got - want).abs() <= want.abs() / 16.0, "{got} is {want} to four bits");
        }
    }

    #[test]
    fn what_is_not_finite_makes_the_row_nan() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(decoded(&encoded(&[1.0, bad, 0.0, 2.0]), 4).iter().all(|v| v.is_nan()));
        }
    }

    #[test]
    fn types_have_names_codes_and_sizes() {
        for dtype in KvDType::ALL {
            assert_eq!(KvDType::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
            assert!(dtype.plain().is_none_or(|plain| plain.code() == dtype.code() && KvDType::from(plain) == dtype));
        }
        assert_eq!((KvDType::from_code(0), KvDType::from_code(5)), (None, None));
        assert_eq!(KvDType::ALL.map(|dtype| dtype.row_bytes(128)), [512, 256, 256, 132]);
        assert_eq!((KvDType::Fp8.row_bytes(6), KvDType::Fp8.row_bytes(80)), (12, 84));
        assert!("fp4".parse::<KvDType>().is_err() && "bfloat16".parse() == Ok(KvDType::BF16));
    }
}
