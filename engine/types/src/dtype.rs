//! Element types of weights, KV and wire payloads, and their conversion to and from f32.

use half::{f16, slice::HalfFloatSliceExt};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// An element type. In memory and on the wire the elements are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    F32,
    F16,
    BF16,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Stable number for the wire.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::F32 => 1,
            Self::F16 => 2,
            Self::BF16 => 3,
        }
    }

    /// Inverse of [`DType::code`].
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::F32),
            2 => Some(Self::F16),
            3 => Some(Self::BF16),
            _ => None,
        }
    }

    /// Appends `values` rounded to this type (nearest even), little-endian.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + values.len() * self.size(), 0);
        let bytes = &mut out[start..];
        match self {
            Self::F32 => {
                let elements = bytes.as_chunks_mut::<4>().0;
                elements.iter_mut().zip(values).for_each(|(b, v)| *b = v.to_le_bytes());
            }
            Self::BF16 => {
                let elements = bytes.as_chunks_mut::<2>().0;
                elements.iter_mut().zip(values).for_each(|(b, v)| *b = round_to_bf16(*v).to_le_bytes());
            }
            Self::F16 => {
                let mut halves = [f16::ZERO; PIECE];
                for (bytes, values) in bytes.chunks_mut(2 * PIECE).zip(values.chunks(PIECE)) {
                    let halves = &mut halves[..values.len()];
                    halves.convert_from_f32_slice(values);
                    let elements = bytes.as_chunks_mut::<2>().0;
                    elements.iter_mut().zip(halves).for_each(|(b, half)| *b = half.to_le_bytes());
                }
            }
        }
    }

    /// Appends the f32 values of `bytes`; a trailing part of an element is ignored (callers validate lengths).
    pub fn decode(self, bytes: &[u8], out: &mut Vec<f32>) {
        let start = out.len();
        out.resize(start + bytes.len() / self.size(), 0.0);
        let values = &mut out[start..];
        match self {
            Self::F32 => values.iter_mut().zip(bytes.as_chunks().0).for_each(|(v, b)| *v = f32::from_le_bytes(*b)),
            Self::BF16 => {
                let widen = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                values.iter_mut().zip(bytes.as_chunks().0).for_each(|(v, b)| *v = widen(b));
            }
            Self::F16 => {
                let mut halves = [f16::ZERO; PIECE];
                for (values, bytes) in values.chunks_mut(PIECE).zip(bytes.chunks(2 * PIECE)) {
                    let halves = &mut halves[..values.len()];
                    halves.iter_mut().zip(bytes.as_chunks().0).for_each(|(half, b)| *half = f16::from_le_bytes(*b));
                    halves.convert_to_f32_slice(values);
                }
            }
        }
    }
}

/// Elements that are converted at once where an instruction converts many: a buffer of so many is on the stack.
const PIECE: usize = 512;

/// `x` as bf16, to the nearest, ties to even; a NaN becomes a quiet one. Without a branch, so that loops become vector instructions.
#[allow(clippy::cast_possible_truncation, reason = "shifts leave 16 bits")]
fn round_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if x.is_nan() { quiet } else { rounded }) as u16
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        })
    }
}

/// Error of [`DType::from_str`]: the text names no element type of Lagoon.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown element type {0:?}: expected f32, f16 or bf16")]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    /// Accepts both our names and PyTorch's (`float32`, `float16`, `bfloat16`).
    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        match text.to_ascii_lowercase().trim_start_matches("torch.") {
            "f32" | "float32" | "float" => Ok(Self::F32),
            "f16" | "float16" | "half" => Ok(Self::F16),
            "bf16" | "bfloat16" => Ok(Self::BF16),
            _ => Err(UnknownDType(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// All f32 with some low bits, all signs, exponents and ties, infinities and NaNs.
    fn values() -> Vec<f32> {
        let low = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        (0..1_u32 << 16).flat_map(|high| low.map(|low| f32::from_bits(high << 16 | low))).collect()
    }

    #[test]
    fn slices_are_converted_as_single_elements_are() {
        let values = values();
        for n in [0, 1, PIECE - 1, PIECE, PIECE + 1, values.len()] {
            let values = &values[..n];
            let mut bytes = vec![9];
            DType::BF16.encode(values, &mut bytes);
            DType::F16.encode(values, &mut bytes);
            DType::F32.encode(values, &mut bytes);
            let mut single = vec![9];
            values.iter().for_each(|v| single.extend(bf16::from_f32(*v).to_le_bytes()));
            values.iter().for_each(|v| single.extend(f16::from_f32(*v).to_le_bytes()));
            values.iter().for_each(|v| single.extend(v.to_le_bytes()));
            assert_eq!(bytes, single, "{n} elements");
        }
    }

    #[test]
    fn decoding_inverts_encoding_and_ignores_a_part_of_an_element() {
        let values: Vec<f32> = values().into_iter().filter(|v| !v.is_nan()).collect();
        let to_bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let mut bytes = Vec::new();
            dtype.encode(&values, &mut bytes);
            bytes.push(1);
            let mut decoded = vec![7.0];
            dtype.decode(&bytes, &mut decoded);
            assert_eq!(decoded.len(), values.len() + 1, "{dtype}");
            assert_eq!(decoded[0], 7.0);
            let mut again = Vec::new();
            dtype.encode(&decoded[1..], &mut again);
            assert_eq!(again, bytes[..bytes.len() - 1], "{dtype}: what is represented does not change");
            let single = |v: &f32| match dtype {
                DType::F32 => *v,
                DType::F16 => f16::from_f32(*v).to_f32(),
                DType::BF16 => bf16::from_f32(*v).to_f32(),
            };
            assert_eq!(to_bits(&decoded[1..]), to_bits(&values.iter().map(single).collect::<Vec<_>>()), "{dtype}");
        }
    }
}
