//! One file a model family: from the fields of `config.json` and the names of its tensors to a [`ModelSpec`]. Nothing
//! outside of this folder names a family.
//!
//! Fields have the names and defaults of transformers' configurations, in both spellings: `rope_theta`, `rope_scaling`
//! and `torch_dtype` at the top level, or `rope_parameters` and `dtype`. GGUF files are translated to them by a table in the
//! family's file ([`gguf`]). A field that would change the result and that
//! Lagoon does not implement is refused by name, and so is one that a family neither reads nor ignores.

mod bloom;
mod common;
mod deepseek;
pub(crate) mod export;
mod gemma2;
mod gemma3;
pub(crate) mod gguf;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod ignored;
mod latent;
mod llama;
mod minimax_m2;
mod mistral;
mod mixtral;
mod mpt;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod routed;
mod smollm3;

use crate::fields::Fields;
use crate::{ModelError, ModelSpec};

/// A supported architecture.
#[derive(Debug)]
pub struct Family {
    /// Its `model_type`.
    pub model_type: &'static str,
    /// Its names in `architectures`; the first one is transformers'.
    pub architectures: &'static [&'static str],
    /// Published models of the family.
    pub models: &'static str,
    /// Its goldens: small models with transformers' logits, each a folder of tests/goldens.
    pub goldens: &'static [&'static str],
    /// How GGUF files spell the family, if they are read.
    gguf: Option<gguf::Gguf>,
    read: fn(&Fields) -> Result<ModelSpec, ModelError>,
}

impl Family {
    /// The family's name in GGUF files, `general.architecture`, if they are read.
    #[must_use]
    pub fn gguf_architecture(&self) -> Option<&'static str> {
        self.gguf.as_ref().map(|gguf| gguf.architecture)
    }
}

/// Every supported family, by `model_type`.
pub const FAMILIES: &[Family] = &[
    bloom::FAMILY,
    deepseek::V2,
    deepseek::V3,
    gemma2::FAMILY,
    gemma3::FAMILY,
    glm4_moe::FAMILY,
    glm4_moe_lite::FAMILY,
    gpt2::FAMILY,
    gpt_neox::FAMILY,
    gpt_oss::FAMILY,
    deepseek::KIMI_K2,
    llama::FAMILY,
    minimax_m2::FAMILY,
    mistral::FAMILY,
    mixtral::FAMILY,
    mpt::FAMILY,
    olmo2::FAMILY,
    phi3::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    qwen3_moe::FAMILY,
    smollm3::FAMILY,
];

/// Maps a configuration to its model.
pub(crate) fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    let model_type = fields.text("model_type")?.ok_or_else(|| fields.missing("model_type"))?;
    let Some(family) = FAMILIES.iter().find(|family| family.model_type == model_type) else {
        let names: Vec<String> = FAMILIES.iter().map(|family| format!("{:?}", family.model_type)).collect();
        return Err(fields.unsupported("model_type", &format!("supported are {}", names.join(", "))));
    };
    if let Some(value) = fields.get("architectures") {
        let names = value.as_array().ok_or_else(|| fields.invalid("architectures", "it must be a list of names"))?;
        let known = |name: &serde_json::Value| name.as_str().is_some_and(|name| family.architectures.contains(&name));
        if !names.is_empty() && !names.iter().any(known) {
            let hint = format!("{} is what Lagoon serves", family.architectures[0]);
            return Err(fields.unsupported("architectures", &hint));
        }
    }
    common::refuse_unless(fields, "is_encoder_decoder", false, "only decoders are implemented")?;
    common::refuse_unless(fields, "add_cross_attention", false, "only decoders are implemented")?;
    common::refuse_unless(
        fields,
        "cross_attention_hidden_size",
        serde_json::Value::Null,
        "only decoders are implemented",
    )?;
    let model = (family.read)(fields)?;
    let hint = format!(
        "Lagoon does not know this field of {:?} models; if it changes nothing of what the model computes, remove it",
        family.model_type
    );
    fields.refuse_others(ignored::IGNORED, &hint)?;
    Ok(model)
}
