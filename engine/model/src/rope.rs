//! Rotary position embedding (Su et al., RoFormer, 2021), with the frequencies of transformers' `default`, `linear`
//! and `llama3` types.
//!
//! Frequencies and angles are f32, as in transformers: the angle of frequency `j` at position `p` is the f32 product
//! `p as f32 * inv_freq[j]`, so long contexts see the same rounding as the reference does.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "numeric code: f64 intermediates are rounded to f32 once, by design; positions are below 2^24"
)]

use crate::ModelError;
use crate::config::ModelConfig;
use crate::fields::{Fields, narrow};
use lagoon_types::limits::SEQUENCE_TOKENS_MAX;
use std::f32::consts::TAU;

const _: () = assert!(SEQUENCE_TOKENS_MAX <= 1 << 24, "positions are exact in f32");

/// How frequencies are changed to reach longer contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All frequencies are divided by `factor`.
    Linear { factor: f32 },
    /// Llama 3.1: frequencies with wavelengths above `original_positions / low_freq_factor` are divided by `factor`,
    /// those below `original_positions / high_freq_factor` are kept, and between them both are blended.
    Llama3 { factor: f32, low_freq_factor: f32, high_freq_factor: f32, original_positions: u32 },
}

/// The base of the angles when the configuration names none, as in Llama 2.
const THETA_DEFAULT: f64 = 10_000.0;

impl RopeScaling {
    /// Theta and scaling from either spelling; where a file has both, they must agree.
    pub(crate) fn from_fields(fields: &Fields) -> Result<(f64, Self), ModelError> {
        let old = fields.object("rope_scaling")?.map(|object| Self::parse(&object)).transpose()?;
        let mut theta = fields.positive("rope_theta")?;
        let mut scaling = old;
        if let Some(parameters) = fields.object("rope_parameters")? {
            let inner = parameters.positive("rope_theta")?;
            if theta.is_some() && inner.is_some() && theta != inner {
                return Err(fields.invalid("rope_theta", "rope_parameters has another one"));
            }
            let new = Self::parse(&parameters)?;
            if old.is_some_and(|old| old != new) {
                return Err(fields.invalid("rope_scaling", "rope_parameters says something else"));
            }
            (theta, scaling) = (inner.or(theta), Some(new));
        }
        Ok((theta.unwrap_or(THETA_DEFAULT), scaling.unwrap_or(Self::None)))
    }

    fn parse(object: &Fields) -> Result<Self, ModelError> {
        let field = if object.contains("rope_type") { "rope_type" } else { "type" };
        if let Some(nested) = object.nested() {
            return Err(object.unsupported(nested, "positions that differ from layer to layer are not implemented"));
        }
        if object.positive("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
            return Err(object.unsupported("partial_rotary_factor", "only 1 is implemented"));
        }
        let number = |name| object.required_positive(name).map(narrow);
        match object.text(field)? {
            Some("default") => Ok(Self::None),
            // An object with theta alone has the default type.
            None if !object.contains("factor") => Ok(Self::None),
            Some("linear") => Ok(Self::Linear { factor: number("factor")? }),
            Some("llama3") => {
                let (low_freq_factor, high_freq_factor) = (number("low_freq_factor")?, number("high_freq_factor")?);
                if high_freq_factor <= low_freq_factor {
                    return Err(object.invalid("high_freq_factor", "it must be above low_freq_factor"));
                }
                let original = object.required_count("original_max_position_embeddings", u64::from(u32::MAX))?;
                let original_positions = u32::try_from(original).expect("it is at most a u32");
                Ok(Self::Llama3 { factor: number("factor")?, low_freq_factor, high_freq_factor, original_positions })
            }
            None => Err(object.missing(field)),
            Some(_) => Err(object.unsupported(field, "supported are \"default\", \"linear\" and \"llama3\"")),
        }
    }

    fn scale(self, inv_freq: f32) -> f32 {
        match self {
            Self::None => inv_freq,
            Self::Linear { factor } => inv_freq / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                let original = original_positions as f32;
                let wavelength = TAU / inv_freq;
                if wavelength > original / low_freq_factor {
                    inv_freq / factor
                } else if wavelength < original / high_freq_factor {
                    inv_freq
                } else {
                    let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * inv_freq / factor + smooth * inv_freq
                }
            }
        }
    }
}

/// The rotary frequencies of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    inv_freq: Vec<f32>,
}

impl Rope {
    /// The frequencies that `config` asks for: zero, so that nothing is rotated, for models without rotary positions.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        let dim = config.geometry.head_dim;
        let frequency = |i: u32| {
            if config.alibi.is_some() {
                return 0.0;
            }
            // The exponent is rounded to f32 as transformers does; the power is then correct to f32's last place.
            let exponent = (2 * i) as f32 / dim as f32;
            let power = config.rope_theta.powf(f64::from(exponent)) as f32;
            config.rope_scaling.scale(1.0 / power)
        };
        Self { inv_freq: (0..dim / 2).map(frequency).collect() }
    }

    /// Angle per position of each of the `head_dim / 2` pairs.
    #[must_use]
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// Replaces `table` by one row of `head_dim` values per position, the cosines of the `head_dim / 2` angles and
    /// then their sines, as [`lagoon_backend::Device::rope_append`] takes it. Allocates only if `table` is too small.
    pub fn fill(&self, positions: &[u32], table: &mut Vec<f32>) {
        let half = self.inv_freq.len();
        table.clear();
        table.resize(positions.len() * 2 * half, 0.0);
        for (row, &position) in table.chunks_exact_mut(2 * half).zip(positions) {
            let (cos, sin) = row.split_at_mut(half);
            for ((c, s), &frequency) in cos.iter_mut().zip(sin).zip(&self.inv_freq) {
                (*s, *c) = (position as f32 * frequency).sin_cos();
            }
        }
    }
}
