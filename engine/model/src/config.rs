//! A model's shape, from `config.json`.
//!
//! Fields are read by the names and defaults of transformers' `LlamaConfig`, `MistralConfig`, `Qwen2Config` and `MptConfig` (the last
//! in [`crate::mpt`]), in both spellings: `rope_theta`, `rope_scaling` and `torch_dtype` at the top level, or `rope_parameters` and `dtype`. Fields that have
//! a default only in code that nobody relies on (sizes, the normalisation's epsilon) are required.

use crate::fields::{Fields, narrow};
use crate::rope::RopeScaling;
use crate::{GenerationConfig, ModelError, mpt};
use lagoon_backend::Activation;
use lagoon_types::limits::{
    HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, LAYERS_MAX, SEQUENCE_TOKENS_MAX, VOCAB_MAX,
};
use lagoon_types::{Alibi, AttentionGeometry, DType, KvShape};
use std::path::Path;

/// Which of the supported architectures a model has. All are decoders of norm, attention, norm and feed-forward; they
/// differ in the kind of the norms and of the feed-forward layer, in positions, the window and defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3, Yi and everything else that says `"model_type": "llama"`.
    Llama,
    /// Mistral: Llama with an optional sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.
    Qwen2,
    /// MPT: layer norms, no gate in the feed-forward layer, and attention with linear biases instead of rotation.
    Mpt,
}

impl Family {
    /// The `model_type` that names it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Mpt => "mpt",
        }
    }

    /// Whether the projections of queries, keys and values add a vector.
    #[must_use]
    pub const fn qkv_bias(self) -> bool {
        matches!(self, Self::Qwen2)
    }

    /// What normalises a block's input.
    #[must_use]
    pub const fn norm(self) -> Norm {
        match self {
            Self::Llama | Self::Mistral | Self::Qwen2 => Norm::Rms,
            Self::Mpt => Norm::Layer,
        }
    }

    /// What stands between the feed-forward layer's projections.
    #[must_use]
    pub const fn activation(self) -> Activation {
        match self {
            Self::Llama | Self::Mistral | Self::Qwen2 => Activation::SiluMul,
            Self::Mpt => Activation::Gelu,
        }
    }
}

/// A block's norm, which has a weight and no bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    Rms,
    Layer,
}

/// The shape of a decoder, apart from its weights. All values have been checked against each other
/// and against `lagoon_types::limits`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer (of gate and of up, each).
    pub intermediate: usize,
    pub layers: usize,
    pub geometry: AttentionGeometry,
    pub vocab: usize,
    /// What norms add to the variance or the mean square.
    pub norm_eps: f32,
    /// The output projection is the embedding table.
    pub tie_word_embeddings: bool,
    /// Keys that a token sees at most, itself included; `None` is all.
    pub window: Option<u32>,
    /// Attention is biased by distance, and nothing is rotated; `None` where positions are rotary.
    pub alibi: Option<Alibi>,
    /// Longest sequence, in tokens; never above `SEQUENCE_TOKENS_MAX`.
    pub max_positions: u32,
    /// Element type that the file claims. The tensors decide; see [`crate::Checkpoint::dtype`].
    pub dtype: Option<DType>,
    /// Base of the rotary angles, if there are any.
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// Token ids of the configuration; `generation_config.json` takes precedence (see [`GenerationConfig`]).
    pub bos_id: Option<u32>,
    pub eos_ids: Vec<u32>,
}

impl ModelConfig {
    /// Reads `config.json` in `dir`.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        Self::from_fields(&Fields::read(&dir.join("config.json"))?)
    }

    /// Parses the text of a `config.json`; `path` is only for messages.
    pub fn parse(path: &Path, json: &str) -> Result<Self, ModelError> {
        Self::from_fields(&Fields::parse(path, json.as_bytes())?)
    }

    fn from_fields(fields: &Fields) -> Result<Self, ModelError> {
        let family = family(fields)?;
        if family == Family::Mpt {
            return mpt::from_fields(fields);
        }
        refuse_unsupported(fields)?;
        let hidden = size(fields, "hidden_size", HIDDEN_MAX)?;
        let geometry = geometry(fields, family, hidden)?;
        let (rope_theta, rope_scaling) = RopeScaling::from_fields(fields)?;
        Ok(Self {
            family,
            hidden,
            intermediate: size(fields, "intermediate_size", INTERMEDIATE_MAX)?,
            layers: size(fields, "num_hidden_layers", LAYERS_MAX)?,
            geometry,
            vocab: size(fields, "vocab_size", VOCAB_MAX)?,
            norm_eps: eps(fields, "rms_norm_eps")?.ok_or_else(|| fields.missing("rms_norm_eps"))?,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            window: window(fields, family)?,
            alibi: None,
            max_positions: max_positions(fields, "max_position_embeddings")?,
            dtype: dtype(fields)?,
            rope_theta,
            rope_scaling,
            bos_id: fields.token_ids("bos_token_id")?.first().copied(),
            eos_ids: fields.token_ids("eos_token_id")?,
        })
    }

    /// Factor on attention scores, `1 / sqrt(head_dim)`.
    #[must_use]
    pub fn attention_scale(&self) -> f32 {
        narrow(1.0 / f64::from(self.geometry.head_dim).sqrt())
    }

    /// The KV of one token when it is stored in `dtype`.
    ///
    /// # Panics
    /// Never for a configuration that was parsed: `layers` is within `LAYERS_MAX`.
    #[must_use]
    pub fn kv_shape(&self, dtype: DType) -> KvShape {
        KvShape {
            layers: u32::try_from(self.layers).expect("layers are within LAYERS_MAX"),
            kv_heads: self.geometry.kv_heads,
            head_dim: self.geometry.head_dim,
            dtype,
        }
    }

    /// Parameters of the model; shared embeddings count once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let (hidden, vocab) = (self.hidden as u64, self.vocab as u64);
        let (q, qkv) = (self.geometry.q_dim() as u64, self.geometry.qkv_dim() as u64);
        let projections = self.family.activation().inputs() as u64 + 1;
        let biases = if self.family.qkv_bias() { qkv } else { 0 };
        let layer = 2 * hidden + biases + hidden * qkv + q * hidden + projections * hidden * self.intermediate as u64;
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        self.layers as u64 * layer + tables * vocab * hidden + hidden
    }

    /// Generation defaults of this model without a `generation_config.json`.
    #[must_use]
    pub fn generation_defaults(&self) -> GenerationConfig {
        let mut eos_ids = self.eos_ids.clone();
        eos_ids.sort_unstable();
        eos_ids.dedup();
        GenerationConfig { bos_id: self.bos_id, eos_ids, ..GenerationConfig::default() }
    }
}

/// A required size in `1..=max`.
pub(crate) fn size(fields: &Fields, field: &str, max: u32) -> Result<usize, ModelError> {
    Ok(count(fields, field, max)?.ok_or_else(|| fields.missing(field))? as usize)
}

/// A size in `1..=max`.
pub(crate) fn count(fields: &Fields, field: &str, max: u32) -> Result<Option<u32>, ModelError> {
    let value = fields.count(field, u64::from(max))?;
    Ok(value.map(|n| u32::try_from(n).expect("it is at most a u32")))
}

fn family(fields: &Fields) -> Result<Family, ModelError> {
    let hint = "supported are \"llama\" (Llama 2 and 3, Yi), \"mistral\", \"qwen2\" (Qwen2 and 2.5) and \"mpt\"";
    let family = match fields.text("model_type")?.ok_or_else(|| fields.missing("model_type"))? {
        "llama" => Family::Llama,
        "mistral" => Family::Mistral,
        "qwen2" => Family::Qwen2,
        "mpt" => Family::Mpt,
        _ => return Err(fields.unsupported("model_type", hint)),
    };
    // The last one is how MosaicML writes it.
    let expected: &[&str] = match family {
        Family::Llama => &["LlamaForCausalLM"],
        Family::Mistral => &["MistralForCausalLM"],
        Family::Qwen2 => &["Qwen2ForCausalLM"],
        Family::Mpt => &["MptForCausalLM", "MPTForCausalLM"],
    };
    if let Some(value) = fields.get("architectures") {
        let names = value.as_array().ok_or_else(|| fields.invalid("architectures", "it must be a list of names"))?;
        if !names.is_empty() && !names.iter().any(|name| name.as_str().is_some_and(|name| expected.contains(&name))) {
            return Err(fields.unsupported("architectures", &format!("{} is what Lagoon serves", expected[0])));
        }
    }
    Ok(family)
}

/// Refuses whatever would change the result and is not implemented.
fn refuse_unsupported(fields: &Fields) -> Result<(), ModelError> {
    for bias in ["attention_bias", "mlp_bias"] {
        if fields.flag(bias)? == Some(true) {
            return Err(fields.unsupported(bias, "projections with biases are not implemented"));
        }
    }
    if !matches!(fields.text("hidden_act")?, None | Some("silu" | "swish")) {
        return Err(fields.unsupported("hidden_act", "only \"silu\" is implemented"));
    }
    refuse_quantised(fields)?;
    for (field, neutral) in [("embedding_multiplier", 1.0), ("partial_rotary_factor", 1.0)] {
        if fields.positive(field)?.is_some_and(|value| value != neutral) {
            return Err(fields.unsupported(field, "only 1 is implemented"));
        }
    }
    Ok(())
}

pub(crate) fn refuse_quantised(fields: &Fields) -> Result<(), ModelError> {
    for quantised in ["quantization_config", "compression_config"] {
        if fields.get(quantised).is_some() {
            return Err(fields.unsupported(quantised, "use a checkpoint in f32, f16 or bf16"));
        }
    }
    Ok(())
}

fn geometry(fields: &Fields, family: Family, hidden: usize) -> Result<AttentionGeometry, ModelError> {
    let heads = size(fields, "num_attention_heads", HEADS_MAX)?;
    let heads_u32 = u32::try_from(heads).expect("heads are within HEADS_MAX");
    let kv_heads = match (count(fields, "num_key_value_heads", HEADS_MAX)?, family) {
        (Some(n), _) => n,
        (None, Family::Mistral) if !fields.contains("num_key_value_heads") => 8,
        (None, _) => heads_u32,
    };
    if !heads_u32.is_multiple_of(kv_heads) {
        let problem = format!("{heads} attention heads cannot share {kv_heads} key-value heads evenly");
        return Err(fields.invalid("num_key_value_heads", &problem));
    }
    let head_dim = match count(fields, "head_dim", HEAD_DIM_MAX)? {
        Some(n) => n,
        None if hidden.is_multiple_of(heads) && hidden / heads <= HEAD_DIM_MAX as usize => {
            u32::try_from(hidden / heads).expect("it is within HEAD_DIM_MAX")
        }
        None => {
            let problem = format!("{heads} heads do not divide it into heads of at most {HEAD_DIM_MAX}");
            return Err(fields.invalid("hidden_size", &problem));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(fields.invalid("head_dim", "rotary positions need an even number"));
    }
    Ok(AttentionGeometry { heads: heads_u32, kv_heads, head_dim })
}

/// A norm's epsilon.
pub(crate) fn eps(fields: &Fields, field: &str) -> Result<Option<f32>, ModelError> {
    match fields.positive(field)?.map(narrow) {
        Some(eps) if !eps.is_normal() => Err(fields.invalid(field, "it does not fit f32")),
        eps => Ok(eps),
    }
}

/// Mistral's window; null is none, and an absent field is transformers' default.
fn window(fields: &Fields, family: Family) -> Result<Option<u32>, ModelError> {
    match family {
        Family::Llama | Family::Mpt => Ok(None),
        // `sliding_window` is written whether it is used or not, and where it is, then by some of the layers.
        Family::Qwen2 if fields.flag("use_sliding_window")? == Some(true) => {
            Err(fields.unsupported("use_sliding_window", "a window on some layers only is not implemented"))
        }
        Family::Qwen2 => Ok(None),
        Family::Mistral if !fields.contains("sliding_window") => Ok(Some(4096)),
        Family::Mistral => count(fields, "sliding_window", u32::MAX),
    }
}

pub(crate) fn max_positions(fields: &Fields, field: &str) -> Result<u32, ModelError> {
    let claimed = fields.required_count(field, u64::MAX)?;
    let kept = claimed.min(u64::from(SEQUENCE_TOKENS_MAX));
    if kept < claimed {
        tracing::warn!("{field} is {claimed}; sequences are limited to {kept} tokens");
    }
    Ok(u32::try_from(kept).expect("it is at most SEQUENCE_TOKENS_MAX"))
}

pub(crate) fn dtype(fields: &Fields) -> Result<Option<DType>, ModelError> {
    for field in ["dtype", "torch_dtype"] {
        if let Some(text) = fields.text(field)? {
            let hint = "use a checkpoint in f32, f16 or bf16";
            return text.parse().map(Some).map_err(|_unknown| fields.unsupported(field, hint));
        }
    }
    Ok(None)
}
