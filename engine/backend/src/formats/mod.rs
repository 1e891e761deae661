//! Formats of stored weights ([`WeightFormat`]): sizes of blocks, and their elements in f32.
//!
//! A packed format stores a row as blocks of as many elements each, with their scales. Layouts are ggml's, or Lagoon's own for
//! what safetensors checkpoints have in several tensors ([`WeightFormat::Fp8`] and on), and little-endian. A format is not a [`DType`], which activations, KV and the wire have: a device computes with the types that it knows, and the
//! loader converts the rest. Names and numbers of formats in files are the business of a file's reader.

mod k_quants;
mod nonlinear;
mod round;
mod scaled;

pub use scaled::{INT4_RUN, INT4_ZERO_MAX, int4_header};

use half::f16;
use lagoon_types::DType;
use std::fmt;

/// How a stored tensor's elements are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightFormat {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
    /// E4M3FN codes with a scale in f32 for 128.
    Fp8,
    /// 4-bit codes with a scale and a zero point for 32.
    Int4G32,
    /// 4-bit codes with a scale and a zero point for 64.
    Int4G64,
    /// 4-bit codes with a scale and a zero point for 128.
    Int4G128,
}

/// Size of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Elements; a row has a whole number of blocks.
    pub elements: usize,
    pub bytes: usize,
}

/// Elements of the blocks with two levels of scales.
const SUPER_ELEMENTS: usize = 256;
/// Elements of other packed blocks.
const ELEMENTS: usize = 32;
/// Elements of the largest block.
pub const BLOCK_ELEMENTS_MAX: usize = SUPER_ELEMENTS;

impl WeightFormat {
    /// Every format.
    pub const ALL: [Self; 20] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
        Self::Fp8,
        Self::Int4G32,
        Self::Int4G64,
        Self::Int4G128,
    ];

    /// The name that files and tools print.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 => "MXFP4",
            Self::Fp8 => "FP8",
            Self::Int4G32 => "INT4_G32",
            Self::Int4G64 => "INT4_G64",
            Self::Int4G128 => "INT4_G128",
        }
    }

    /// Size of a block.
    #[must_use]
    pub const fn block(self) -> Block {
        let (elements, bytes) = match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q8_0 => (ELEMENTS, round::Q8_0_BYTES),
            Self::Q4_0 => (ELEMENTS, round::Q4_0_BYTES),
            Self::Q4_1 => (ELEMENTS, round::Q4_1_BYTES),
            Self::Q5_0 => (ELEMENTS, round::Q5_0_BYTES),
            Self::Q5_1 => (ELEMENTS, round::Q5_1_BYTES),
            Self::Q2K => (SUPER_ELEMENTS, k_quants::Q2K_BYTES),
            Self::Q3K => (SUPER_ELEMENTS, k_quants::Q3K_BYTES),
            Self::Q4K => (SUPER_ELEMENTS, k_quants::Q4K_BYTES),
            Self::Q5K => (SUPER_ELEMENTS, k_quants::Q5K_BYTES),
            Self::Q6K => (SUPER_ELEMENTS, k_quants::Q6K_BYTES),
            Self::Iq4Nl => (ELEMENTS, nonlinear::IQ4_NL_BYTES),
            Self::Iq4Xs => (SUPER_ELEMENTS, nonlinear::IQ4_XS_BYTES),
            Self::Mxfp4 => (ELEMENTS, nonlinear::MXFP4_BYTES),
            Self::Fp8 => (scaled::FP8_ELEMENTS, scaled::FP8_BYTES),
            Self::Int4G32 => (32, scaled::INT4_G32_BYTES),
            Self::Int4G64 => (64, scaled::INT4_G64_BYTES),
            Self::Int4G128 => (128, scaled::INT4_G128_BYTES),
        };
        Block { elements, bytes }
    }

    /// Bytes of so many consecutive elements; `None` if they are no whole number of blocks, or too many to count.
    #[must_use]
    pub const fn bytes(self, elements: usize) -> Option<usize> {
        let block = self.block();
        if !elements.is_multiple_of(block.elements) {
            return None;
        }
        (elements / block.elements).checked_mul(block.bytes)
    }

    /// The element type, if elements are stored one by one.
    #[must_use]
    pub const fn plain(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::BF16 => Some(DType::BF16),
            _ => None,
        }
    }

    /// Whether every element is a number of `dtype`, MXFP4's least scale apart. Other packed elements are products of a scale of
    /// 11 bits or more with a small number, and need f32.
    #[must_use]
    pub fn is_exact_in(self, dtype: DType) -> bool {
        dtype == DType::F32 || self.plain() == Some(dtype) || (self == Self::Mxfp4 && dtype == DType::BF16)
    }

    /// Appends the elements of `blocks`, in f32. Each is the format's own number, rounded once where f32 cannot hold it.
    ///
    /// # Panics
    /// If `blocks` is no whole number of blocks.
    pub fn decode(self, blocks: &[u8], out: &mut Vec<f32>) {
        let Block { elements, bytes } = self.block();
        if let Some(dtype) = self.plain() {
            return dtype.decode(blocks, out);
        }
        let first = out.len();
        out.resize(first + blocks.len() / bytes * elements, 0.0);
        self.decode_into(blocks, &mut out[first..]);
    }

    /// [`Self::decode`] of a packed format into `out`, of as many elements.
    ///
    /// # Panics
    /// If `blocks` is no whole number of blocks, or the format is plain.
    pub fn decode_into(self, blocks: &[u8], out: &mut [f32]) {
        let Block { elements, bytes } = self.block();
        assert!(blocks.len().is_multiple_of(bytes), "{} bytes are no whole blocks of {self}", blocks.len());
        assert_eq!(blocks.len() / bytes * elements, out.len(), "elements of the blocks");
        match self {
            Self::Q8_0 => each(blocks, out, round::q8_0),
            Self::Q4_0 => each(blocks, out, round::q4_0),
            Self::Q4_1 => each(blocks, out, round::q4_1),
            Self::Q5_0 => each(blocks, out, round::q5_0),
            Self::Q5_1 => each(blocks, out, round::q5_1),
            Self::Q2K => each(blocks, out, k_quants::q2k),
            Self::Q3K => each(blocks, out, k_quants::q3k),
            Self::Q4K => each(blocks, out, k_quants::q4k),
            Self::Q5K => each(blocks, out, k_quants::q5k),
            Self::Q6K => each(blocks, out, k_quants::q6k),
            Self::Iq4Nl => each(blocks, out, nonlinear::iq4_nl),
            Self::Iq4Xs => each(blocks, out, nonlinear::iq4_xs),
            Self::Mxfp4 => each(blocks, out, nonlinear::mxfp4),
            Self::Fp8 => each(blocks, out, scaled::fp8),
            Self::Int4G32 => each(blocks, out, scaled::int4::<{ scaled::INT4_G32_BYTES }, 32>),
            Self::Int4G64 => each(blocks, out, scaled::int4::<{ scaled::INT4_G64_BYTES }, 64>),
            Self::Int4G128 => each(blocks, out, scaled::int4::<{ scaled::INT4_G128_BYTES }, 128>),
            Self::F32 | Self::F16 | Self::BF16 => unreachable!("they are plain"),
        }
    }
}

impl From<DType> for WeightFormat {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::BF16,
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Calls `unpack` with each block and the place of its elements.
fn each<const BYTES: usize, const LEN: usize>(
    blocks: &[u8],
    out: &mut [f32],
    unpack: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    let ((blocks, _), (out, _)) = (blocks.as_chunks::<BYTES>(), out.as_chunks_mut::<LEN>());
    blocks.iter().zip(out).for_each(|(block, out)| unpack(block, out));
}

/// The 16-bit number at `at` of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The elements of 16 bytes with two codes each: the low halves are the first 16 elements.
fn nibbles(codes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(codes.len());
    for ((code, low), high) in codes.iter().zip(low).zip(high) {
        *low = value(code & 15);
        *high = value(code >> 4);
    }
}
