//! Plain data in the signatures of [`Device`] and of its capabilities: weights as files store them, parameters of operations,
//! rows and runs of attention, pieces of KV.

#[cfg(doc)]
use crate::Device;
use crate::error::DeviceError;
use crate::formats::WeightFormat;
use bytes::Bytes;
use lagoon_types::{Alibi, AttentionGeometry, DType, KvRun};
use std::collections::BTreeSet;

/// The nonlinearity of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// SwiGLU (Shazeer 2020): `out[i] = silu(p[i]) * p[n + i]` of a product of `2 n` columns (gate, then up).
    SiluMul,
    /// The exact GELU (Hendrycks and Gimpel 2016), `out[i] = p[i] * Φ(p[i])` with the normal distribution function `Φ`: no
    /// approximation by tanh.
    Gelu,
    /// The GELU's approximation by tanh: `out[i] = p[i] / (1 + exp(-2 u))` with `u = sqrt(2/π) (p[i] + 0.044715 p[i]³)`.
    GeluTanh,
    /// [`Activation::GeluTanh`] of the gate, times up: `2 n` columns, as [`Activation::SiluMul`] (Gemma).
    GeluTanhMul,
    /// The clamped gate of gpt-oss, of `2 n` columns: with `g = min(p[i], 7)` and `u = min(max(p[n + i], -7), 7)`,
    /// `out[i] = (u + 1) g / (1 + exp(-1.702 g))`.
    ClampedSwiglu,
}

/// The bound of [`Activation::ClampedSwiglu`].
pub const SWIGLU_LIMIT: f32 = 7.0;
/// The steepness of [`Activation::ClampedSwiglu`].
pub const SWIGLU_ALPHA: f32 = 1.702;

impl Activation {
    /// Columns of the product for each column of the result.
    #[must_use]
    pub const fn inputs(self) -> usize {
        match self {
            Self::SiluMul | Self::GeluTanhMul | Self::ClampedSwiglu => 2,
            Self::Gelu | Self::GeluTanh => 1,
        }
    }
}

/// How a router's logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scoring {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each logit (DeepSeek-V3, GLM-4.5).
    Sigmoid,
}

/// The score that groups of experts are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupScore {
    /// That of the group's best expert (DeepSeek-V2 §2.2.2).
    Best,
    /// The sum of its two best ones', or of its only one's (DeepSeek-V3).
    TwoBest,
}

/// How the tokens of a mixture of experts choose among them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts of a token, from 1 to the number of experts in `top_groups` groups, and at most
    /// [`lagoon_types::limits::EXPERTS_PER_TOKEN_MAX`].
    pub top_k: usize,
    pub scoring: Scoring,
    /// Whether the scores of a token's experts are divided by their sum.
    pub normalised: bool,
    /// Factor on the scores of a token's experts.
    pub scale: f32,
    /// Groups of consecutive experts, which divide them evenly; 1 for none.
    pub groups: usize,
    /// Groups that a token chooses experts from: those with the largest `group_score` of biased scores.
    pub top_groups: usize,
    pub group_score: GroupScore,
}

impl Routing {
    /// Whether groups are compared by sums of scores.
    #[must_use]
    pub const fn adds_scores(&self) -> bool {
        self.groups > 1 && matches!(self.group_score, GroupScore::TwoBest)
    }
}

/// The feed-forward layers of a mixture of experts (Shazeer et al. 2017; Switch Transformers, Fedus et al. 2021).
#[derive(Debug)]
pub struct Experts<'a, W> {
    /// Experts, at most [`lagoon_types::limits::EXPERTS_MAX`].
    pub count: usize,
    /// `[count * n * inputs][hidden]`: each expert's up projection ([`Activation::inputs`] matrices `[n][hidden]`: gate,
    /// then up), one expert behind the other.
    pub up: &'a W,
    /// `[count][n * inputs]`, added to the products of the up projections.
    pub up_bias: Option<&'a W>,
    /// `[count * hidden][n]`: each expert's down projection, one behind the other.
    pub down: &'a W,
    /// `[count][hidden]`, added to the products of the down projections.
    pub down_bias: Option<&'a W>,
    /// A vector of `count`, added to scores where experts and groups are chosen, and only there.
    pub choice_bias: Option<&'a W>,
    pub activation: Activation,
    pub routing: Routing,
}

/// A weight as its file stores it: a matrix `[rows][cols]` in row-major order (`y = x · Wᵀ`), possibly given as
/// several matrices stacked by rows (q, k and v; gate and up). A vector has `rows == 1` and is never packed.
#[derive(Clone, Debug)]
pub struct WeightSource {
    pub cols: usize,
    pub parts: Vec<WeightPart>,
}

/// Consecutive rows of a [`WeightSource`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightPart {
    pub rows: usize,
    pub format: WeightFormat,
    /// Little-endian, typically a slice of a memory map. The host backend keeps it without a copy, unless plain elements are
    /// misaligned.
    pub bytes: Bytes,
}

impl WeightSource {
    /// A weight of plain elements: row count and bytes of each part.
    #[must_use]
    pub fn plain(dtype: DType, cols: usize, parts: Vec<(usize, Bytes)>) -> Self {
        let parts = parts.into_iter().map(|(rows, bytes)| WeightPart { rows, format: dtype.into(), bytes });
        Self { cols, parts: parts.collect() }
    }

    /// Rows of all parts together.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// The element type of all parts, for devices that take plain weights only.
    pub fn dtype(&self) -> Result<DType, DeviceError> {
        let first = self.parts.first().map_or(WeightFormat::F32, |part| part.format);
        let same = self.parts.iter().all(|part| part.format == first);
        first.plain().filter(|_| same).ok_or_else(|| {
            let formats: BTreeSet<_> = self.parts.iter().map(|part| part.format.name()).collect();
            let formats: Vec<_> = formats.into_iter().collect();
            DeviceError::Unsupported(format!("a weight in {}", formats.join(" and ")))
        })
    }
}

/// Whether a matrix product replaces its output or is added to it (residual connections).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Set,
    Add,
}

/// Where heads lie in the rows of a [`Device::head_matmul`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadStrides {
    pub heads: usize,
    /// Elements from a head's input to the next one's.
    pub x_stride: usize,
    /// Elements from a head's output to the next one's.
    pub out_stride: usize,
}

/// Inputs of [`Device::latent_append`].
#[derive(Clone, Copy, Debug)]
pub struct LatentRow<'a, T> {
    /// Queries before absorption, `[rows][heads * any]`; the last elements of each head are those to rotate.
    pub queries: &'a T,
    /// Normalised latents.
    pub latent: &'a T,
    /// The part of the key that is rotated, the same for all heads.
    pub key: &'a T,
    /// As in [`Device::rope_append`], with as many columns as elements are rotated.
    pub rope: &'a T,
}

/// Consecutive query rows of one sequence, at consecutive positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttnRows {
    /// First row in the query tensor (and in the output).
    pub row0: u32,
    pub rows: u32,
    /// Position of the first row.
    pub pos0: u32,
    /// Index of this sequence's first run in [`AttnBatch::runs`], and how many there are (may be 0).
    pub run0: u32,
    pub runs: u32,
}

/// The queries of one attention call and the runs that each sequence attends to.
#[derive(Clone, Copy, Debug)]
pub struct AttnBatch<'a> {
    pub geometry: AttentionGeometry,
    /// Factor on scores before the softmax, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    pub window: Option<u32>,
    /// Soft cap of scaled scores (Gemma 2), above 0: a score `s` becomes `cap * tanh(s / cap)`, before its bias.
    pub softcap: Option<f32>,
    /// Biases by distance, added to scaled scores in the form that [`lagoon_types::alibi`] fixes.
    pub alibi: Option<Alibi>,
    pub seqs: &'a [AttnRows],
    /// Runs of a sequence are disjoint and ascending in position.
    pub runs: &'a [KvRun],
}

impl AttnBatch<'_> {
    /// Rows that the output must hold.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.seqs.iter().map(|s| (s.row0 + s.rows) as usize).max().unwrap_or(0)
    }

    /// Fills `count[..rows]` with the keys that each row sees in its runs; rows of no sequence get 0.
    pub fn fill_counts(&self, count: &mut Vec<u32>) {
        count.clear();
        count.resize(self.rows(), 0);
        for seq in self.seqs {
            let runs = &self.runs[seq.run0 as usize..][..seq.runs as usize];
            for i in 0..seq.rows {
                count[(seq.row0 + i) as usize] =
                    runs.iter().map(|run| run.visible_count(seq.pos0 + i, self.window)).sum();
            }
        }
    }
}

/// Consecutive tokens of one layer of a store. Buffers and shared device regions have them in the canonical layout
/// `[token][k | v][kv_heads]` rows (see [`lagoon_types::KvShape`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPiece {
    pub layer: u32,
    /// First slot in the store.
    pub slot0: u32,
    pub tokens: u32,
}
