//! Element types of weights, KV and wire payloads, and their conversion to and from f32.

use half::{bf16, f16};
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
        out.reserve(values.len() * self.size());
        match self {
            Self::F32 => values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes())),
            Self::F16 => values.iter().for_each(|v| out.extend_from_slice(&f16::from_f32(*v).to_le_bytes())),
            Self::BF16 => values.iter().for_each(|v| out.extend_from_slice(&bf16::from_f32(*v).to_le_bytes())),
        }
    }

    /// Appends the f32 values of `bytes`; a trailing part of an element is ignored (callers validate lengths).
    pub fn decode(self, bytes: &[u8], out: &mut Vec<f32>) {
        out.reserve(bytes.len() / self.size());
        match self {
            Self::F32 => out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            Self::F16 => out.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())),
            Self::BF16 => out.extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())),
        }
    }
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
