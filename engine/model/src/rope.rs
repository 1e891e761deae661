//! Rotary position embedding (Su et al., RoFormer, 2021), with the frequencies of transformers' `default`, `linear`,
//! `llama3`, `yarn` and `longrope` types.
//!
//! Frequencies and angles are f32, as in transformers: the angle of frequency `j` at position `p` is the f32 product
//! `p as f32 * inv_freq[j]`, so long contexts see the same rounding as the reference does.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "numeric code: f64 intermediates are rounded to f32 once, by design; positions are below 2^24"
)]

use crate::ModelError;
use crate::fields::{Fields, narrow};
use lagoon_types::limits::SEQUENCE_TOKENS_MAX;
use std::f32::consts::TAU;

const _: () = assert!(SEQUENCE_TOKENS_MAX <= 1 << 24, "positions are exact in f32");

/// Scaling of rotary frequencies for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Unscaled.
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        factor: f32,
    },
    /// Llama 3.1: frequencies with wavelengths above `original_positions / low_freq_factor` are divided by `factor`,
    /// those below `original_positions / high_freq_factor` are kept, and between them both are blended.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_positions: u32,
    },
    Yarn(Yarn),
    LongRope(LongRope),
}

/// YaRN (Peng et al. 2023): frequencies that turn more than `beta_fast` times within the original context are kept, those
/// that turn less than `beta_slow` times are divided by `factor`, and between them both are blended; cosines and sines
/// grow by `attention_factor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub original_positions: u32,
    pub beta_fast: f64,
    pub beta_slow: f64,
    /// Whether the bounds of the blend are rounded to whole dimensions.
    pub truncate: bool,
    pub attention_factor: f64,
}

impl Yarn {
    /// `context` is that of the file, whose original one is the default.
    fn parse(object: &Fields, context: Option<Context>) -> Result<Self, ModelError> {
        let factor = object.required_positive("factor")?;
        let field = ORIGINAL_POSITIONS;
        let original = context.map(|context| context.original.unwrap_or(context.positions));
        let positions = object.count(field, u64::from(u32::MAX))?.or(original).ok_or_else(|| object.missing(field))?;
        let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        // In transformers, 0 is no value.
        let nonzero = |name: &str| match object.get(name).and_then(serde_json::Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => object.positive(name),
        };
        let mscales = (nonzero("mscale")?, nonzero("mscale_all_dim")?);
        let attention_factor = match (object.positive("attention_factor")?, mscales) {
            (Some(given), _) => given,
            (None, (Some(mscale), Some(all))) => scale(mscale) / scale(all),
            (None, _) => scale(1.0),
        };
        if object.get("attn_factor").is_some() {
            tracing::warn!("`attn_factor` of the rotary scaling is ignored, as transformers ignores it");
        }
        Ok(Self {
            factor,
            original_positions: u32::try_from(positions).map_err(|_large| object.invalid(field, "it is too large"))?,
            beta_fast: nonzero("beta_fast")?.unwrap_or(32.0),
            beta_slow: nonzero("beta_slow")?.unwrap_or(1.0),
            truncate: object.flag("truncate")?.unwrap_or(!object.contains("truncate")),
            attention_factor,
        })
    }

    /// Tokens of the lengthened context.
    pub(crate) fn context(&self) -> u32 {
        #[allow(clippy::cast_sign_loss, reason = "both are positive; the cast saturates")]
        let tokens = (f64::from(self.original_positions) * self.factor) as u32;
        tokens
    }

    /// Frequency `i` of `rotated / 2`, of base `theta`.
    fn frequency(&self, i: usize, rotated: usize, theta: f64, plain: f32) -> f32 {
        let dimension = |turns: f64| {
            let turned = f64::from(self.original_positions) / (turns * std::f64::consts::TAU);
            rotated as f64 * turned.ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (dimension(self.beta_fast), dimension(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(rotated as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let ramp = (((i as f64) - low) / (high - low)).clamp(0.0, 1.0) as f32;
        plain / self.factor as f32 * ramp + plain * (1.0 - ramp)
    }
}

/// LongRoPE (Ding et al. 2024; Phi-3 and 4): each frequency has a divisor of its own; cosines and sines grow by
/// `attention_factor`.
///
/// Files have two lists of divisors. transformers takes `short_factor` until a sequence is longer than the original context and
/// `long_factor` from then on, so that keys cached before do not fit those after. A cached key is shared by sequences of all
/// lengths here, so a model has one list, as in vLLM: `long_factor` if it serves more positions than its original context.
/// Sequences beyond the original context get transformers' logits; shorter ones those of the long list.
/// [`crate::ModelSpec::limit_context`] chooses anew.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// A divisor for each of the `rotated / 2` frequencies: `short_factor` of the file.
    pub short: Vec<f32>,
    /// `long_factor` of the file.
    pub long: Vec<f32>,
    /// Tokens of the context that the model was trained with before.
    pub original_positions: u64,
    /// Whether `long` is used.
    pub is_long: bool,
    /// By the file's context, for both lists, as in transformers.
    pub attention_factor: f64,
}

impl LongRope {
    /// The list that is used.
    #[must_use]
    pub fn divisors(&self) -> &[f32] {
        if self.is_long { &self.long } else { &self.short }
    }

    /// Both lists, and the one for `context.positions` chosen.
    fn parse(object: &Fields, context: Context, rotated: usize) -> Result<Self, ModelError> {
        let (short, long) =
            (object.positives("short_factor", rotated / 2)?, object.positives("long_factor", rotated / 2)?);
        let original = object.count(ORIGINAL_POSITIONS, u64::MAX)?;
        let original = context.original.or(original).ok_or_else(|| object.missing(ORIGINAL_POSITIONS))?;
        let factor = object.positive("factor")?.unwrap_or(context.positions as f64 / original as f64);
        let grown = || if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
        Ok(Self {
            short,
            long,
            original_positions: original,
            is_long: context.positions > original,
            attention_factor: object.positive("attention_factor")?.unwrap_or_else(grown),
        })
    }
}

const ORIGINAL_POSITIONS: &str = "original_max_position_embeddings";

/// Positions that a file claims, and those that it was trained with before, if it names them at the top level.
#[derive(Clone, Copy, Debug)]
struct Context {
    positions: u64,
    original: Option<u64>,
}

/// One rotary table of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the angles.
    pub theta: f64,
    pub scaling: RopeScaling,
    /// Rotated dimensions of a head, which are its first ones; 0 where nothing is rotated.
    pub rotated: usize,
}

/// The base of the angles if the configuration has none, as in Llama 2.
const THETA_DEFAULT: f64 = 10_000.0;

impl RopeSpec {
    /// Nothing is rotated.
    pub const NONE: Self = Self { theta: 1.0, scaling: RopeScaling::None, rotated: 0 };

    /// Unscaled frequencies.
    #[must_use]
    pub const fn plain(theta: f64, rotated: usize) -> Self {
        Self { theta, scaling: RopeScaling::None, rotated }
    }

    /// The table of heads that are rotated as a whole.
    pub(crate) fn read(fields: &Fields, rotated: usize) -> Result<Self, ModelError> {
        Self::with_default(fields, rotated, THETA_DEFAULT)
    }

    /// The table from either spelling; if a file has both, they must agree. `theta` is the default.
    pub(crate) fn with_default(fields: &Fields, rotated: usize, theta: f64) -> Result<Self, ModelError> {
        let context = Context {
            positions: fields.required_count("max_position_embeddings", u64::MAX)?,
            original: fields.count(ORIGINAL_POSITIONS, u64::MAX)?,
        };
        let mut found = fields.positive("rope_theta")?;
        let mut scaling = None;
        for spelling in ["rope_scaling", "rope_parameters"] {
            let Some(object) = fields.object(spelling)? else { continue };
            let inner = object.positive("rope_theta")?;
            if found.is_some() && inner.is_some() && found != inner {
                return Err(fields.invalid("rope_theta", &format!("{spelling} has another one")));
            }
            let new = RopeScaling::parse(&object, Some(context), rotated)?;
            if scaling.is_some_and(|old| old != new) {
                return Err(fields.invalid("rope_scaling", "rope_parameters says something else"));
            }
            (found, scaling) = (inner.or(found), Some(new));
        }
        let theta = found.unwrap_or(theta);
        Self { theta, scaling: scaling.unwrap_or(RopeScaling::None), rotated }.checked(fields)
    }

    /// Refuses numbers that give no finite angle or factor, also in a list that a shorter or longer context would use.
    fn checked(self, fields: &Fields) -> Result<Self, ModelError> {
        let dim = u32::try_from(self.rotated).expect("heads are within HEAD_DIM_MAX");
        let finite = |context| {
            let rope = Rope::new(&self.for_context(context), dim);
            let angle = |frequency: &f32| frequency * SEQUENCE_TOKENS_MAX as f32;
            rope.factor.is_normal() && rope.inv_freq.iter().map(angle).all(f32::is_finite)
        };
        if finite(1) && finite(u64::MAX) {
            return Ok(self);
        }
        let field = if fields.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
        Err(fields.invalid(field, "its numbers give no finite angles"))
    }

    /// The table of a model whose sequences have at most `positions` tokens.
    #[must_use]
    pub fn for_context(&self, positions: u64) -> Self {
        let mut rope = self.clone();
        if let RopeScaling::LongRope(long) = &mut rope.scaling {
            long.is_long = positions > long.original_positions;
        }
        rope
    }

    /// The table of one kind of layer, from its object in `rope_parameters`.
    pub(crate) fn inner(parameters: &Fields, rotated: usize, theta: f64) -> Result<Self, ModelError> {
        let scaling = RopeScaling::parse(parameters, None, rotated)?;
        Self { theta: parameters.positive("rope_theta")?.unwrap_or(theta), scaling, rotated }.checked(parameters)
    }

    /// Rotated dimensions of a head of `dim`: the share that the configuration says, or else `absent`.
    pub(crate) fn rotated(fields: &Fields, dim: usize, absent: f64) -> Result<usize, ModelError> {
        let field = "partial_rotary_factor";
        let mut share = fields.positive(field)?;
        for spelling in ["rope_scaling", "rope_parameters"] {
            let Some(object) = fields.object(spelling)? else { continue };
            share = object.positive(field)?.or(share);
        }
        let share = share.unwrap_or(absent);
        #[allow(clippy::cast_sign_loss, reason = "shares are positive")]
        let rotated = (dim as f64 * share) as usize;
        if rotated < 2 || rotated > dim || !rotated.is_multiple_of(2) || !(dim - rotated).is_multiple_of(2) {
            let problem = format!("{rotated} of a head's {dim} dimensions cannot be rotated in pairs");
            return Err(fields.invalid(field, &problem));
        }
        Ok(rotated)
    }
}

impl RopeScaling {
    /// The scaling of a table of `rotated` dimensions; `context` is `None` for the table of one kind of layer.
    fn parse(object: &Fields, context: Option<Context>, rotated: usize) -> Result<Self, ModelError> {
        let field = if object.get("rope_type").is_some() { "rope_type" } else { "type" };
        // Some files have both names of the type, YaRN's authors noted that they trained, and any type may note its first context.
        object.ignore(&["type", "finetuned", ORIGINAL_POSITIONS]);
        if let Some(nested) = object.nested() {
            return Err(object.unsupported(nested, "this family has one table for all layers"));
        }
        let number = |name| object.required_positive(name).map(narrow);
        match object.text(field)? {
            Some("default") => Ok(Self::None),
            // An object with theta alone has the default type.
            None if object.names().all(|name| ["rope_theta", "partial_rotary_factor"].contains(&name)) => {
                Ok(Self::None)
            }
            Some("linear") => Ok(Self::Linear { factor: number("factor")? }),
            Some("yarn") => Yarn::parse(object, context).map(Self::Yarn),
            Some("longrope" | "su") => {
                let hint = "longrope is implemented for models with one table for all layers";
                let context = context.ok_or_else(|| object.unsupported(field, hint))?;
                LongRope::parse(object, context, rotated).map(Self::LongRope)
            }
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
            Some(_) => {
                let hint = "supported are \"default\", \"linear\", \"llama3\", \"yarn\" and \"longrope\"";
                Err(object.unsupported(field, hint))
            }
        }
    }

    /// Frequency `i` of `rotated / 2`, of base `theta`; `period` is its inverse without scaling.
    fn frequency(&self, i: usize, rotated: usize, theta: f64, period: f32) -> f32 {
        let inv_freq = 1.0 / period;
        match *self {
            Self::None => inv_freq,
            Self::Yarn(yarn) => yarn.frequency(i, rotated, theta, inv_freq),
            // The product is rounded before its inverse is taken, as in transformers.
            Self::LongRope(ref long) => 1.0 / (long.divisors()[i] * period),
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

/// The rotary frequencies of one table.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    inv_freq: Vec<f32>,
    /// Factor on cosines and sines of rotated dimensions.
    factor: f32,
    /// Rotated pairs of a head; the others turn by no angle.
    pairs: usize,
}

impl Rope {
    /// The frequencies of heads of `head_dim`; zero, so that nothing turns, for pairs that are not rotated.
    #[must_use]
    pub fn new(spec: &RopeSpec, head_dim: u32) -> Self {
        let pairs = spec.rotated / 2;
        let frequency = |i: usize| {
            if i >= pairs {
                return 0.0;
            }
            // The exponent is rounded to f32 as transformers does; the power is then correct to f32's last place.
            let exponent = (2 * i) as f32 / spec.rotated as f32;
            let period = spec.theta.powf(f64::from(exponent)) as f32;
            spec.scaling.frequency(i, spec.rotated, spec.theta, period)
        };
        let factor = match &spec.scaling {
            RopeScaling::Yarn(Yarn { attention_factor, .. })
            | RopeScaling::LongRope(LongRope { attention_factor, .. }) => *attention_factor as f32,
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
        };
        Self { inv_freq: (0..head_dim as usize / 2).map(frequency).collect(), factor, pairs }
    }

    /// Angle per position of each of the `head_dim / 2` pairs, in radians.
    #[must_use]
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// Factor on cosines and sines of rotated dimensions.
    #[must_use]
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// Replaces `table` by one row of `head_dim` values per position, the cosines of the `head_dim / 2` angles and
    /// then their sines, as [`lagoon_backend::Device::rope_append`] takes it. Allocates only if `table` is too small.
    pub fn fill(&self, positions: &[u32], table: &mut Vec<f32>) {
        let half = self.inv_freq.len();
        table.clear();
        table.resize(positions.len() * 2 * half, 0.0);
        for (row, &position) in table.chunks_exact_mut(2 * half).zip(positions) {
            let (cos, sin) = row.split_at_mut(half);
            for ((c, s), &frequency) in cos.iter_mut().zip(sin.iter_mut()).zip(&self.inv_freq) {
                (*s, *c) = (position as f32 * frequency).sin_cos();
            }
            if self.factor != 1.0 {
                cos[..self.pairs].iter_mut().chain(&mut sin[..self.pairs]).for_each(|x| *x *= self.factor);
            }
        }
    }
}
