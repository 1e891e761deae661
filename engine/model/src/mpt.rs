//! MPT's `config.json`, by the names and defaults of transformers' `MptConfig` and by MosaicML's own.
//!
//! Where transformers reads a field and then computes without it, whatever would change the result is refused, with one
//! exception: `alibi_bias_max`, which MosaicML's code honours and transformers (up to 5.23 at least) takes to be 8
//! whatever it says, is honoured.

use crate::config::{Family, ModelConfig, count, dtype, eps, max_positions, refuse_quantised, size};
use crate::fields::{Fields, narrow};
use crate::{ModelError, RopeScaling};
use lagoon_types::limits::{HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, LAYERS_MAX, VOCAB_MAX};
use lagoon_types::{Alibi, AttentionGeometry};
use serde_json::Value;

/// The feed-forward layer's width over the model's.
const EXPANSION: usize = 4;
/// The default of both implementations.
const BIAS_MAX_DEFAULT: f64 = 8.0;
/// The default of both implementations; files on the hub do not say it.
const NORM_EPS_DEFAULT: f32 = 1e-5;

pub(crate) fn from_fields(fields: &Fields) -> Result<ModelConfig, ModelError> {
    refuse_unsupported(fields)?;
    let attention = fields.object("attn_config")?;
    let hidden = size(fields, "d_model", HIDDEN_MAX)?;
    let intermediate = EXPANSION * hidden;
    if intermediate > INTERMEDIATE_MAX as usize {
        return Err(
            fields.invalid("d_model", &format!("the feed-forward layer would be wider than {INTERMEDIATE_MAX}"))
        );
    }
    let geometry = geometry(fields, hidden)?;
    let bias_max = match &attention {
        None => None,
        Some(attention) => {
            refuse_unsupported_attention(attention, geometry.heads)?;
            attention.positive("alibi_bias_max")?
        }
    };
    Ok(ModelConfig {
        family: Family::Mpt,
        hidden,
        intermediate,
        layers: size(fields, "n_layers", LAYERS_MAX)?,
        geometry,
        vocab: size(fields, "vocab_size", VOCAB_MAX)?,
        norm_eps: eps(fields, "layer_norm_epsilon")?.unwrap_or(NORM_EPS_DEFAULT),
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        window: None,
        alibi: Some(Alibi { bias_max: narrow(bias_max.unwrap_or(BIAS_MAX_DEFAULT)) }),
        max_positions: max_positions(fields, "max_seq_len")?,
        dtype: dtype(fields)?,
        rope_theta: 0.0,
        rope_scaling: RopeScaling::None,
        bos_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_ids: fields.token_ids("eos_token_id")?,
    })
}

fn geometry(fields: &Fields, hidden: usize) -> Result<AttentionGeometry, ModelError> {
    let heads = count(fields, "n_heads", HEADS_MAX)?.ok_or_else(|| fields.missing("n_heads"))?;
    let head_dim = hidden / heads as usize;
    if !hidden.is_multiple_of(heads as usize) || head_dim > HEAD_DIM_MAX as usize || !head_dim.is_multiple_of(2) {
        let problem = format!("{heads} heads do not divide it into heads of an even size up to {HEAD_DIM_MAX}");
        return Err(fields.invalid("d_model", &problem));
    }
    let head_dim = u32::try_from(head_dim).expect("it is within HEAD_DIM_MAX");
    Ok(AttentionGeometry { heads, kv_heads: heads, head_dim })
}

/// Refuses `field` unless it is absent, null or `neutral`, be a number written whole or not.
fn neutral(fields: &Fields, field: &str, neutral: impl Into<Value>, hint: &str) -> Result<(), ModelError> {
    let neutral = neutral.into();
    match fields.get(field) {
        Some(value) if *value != neutral && (!value.is_number() || value.as_f64() != neutral.as_f64()) => {
            Err(fields.unsupported(field, hint))
        }
        _ => Ok(()),
    }
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ModelError> {
    refuse_quantised(fields)?;
    neutral(fields, "no_bias", true, "projections and norms with biases are not implemented")?;
    neutral(fields, "expansion_ratio", EXPANSION, "only 4 is implemented, which is what transformers computes with")?;
    neutral(fields, "logit_scale", Value::Null, "only null is implemented")?;
    match fields.text("norm_type")? {
        None | Some("layernorm" | "low_precision_layernorm") => Ok(()),
        Some(_) => Err(fields.unsupported("norm_type", "layer norm is what Lagoon implements for MPT")),
    }
}

fn refuse_unsupported_attention(attention: &Fields, heads: u32) -> Result<(), ModelError> {
    neutral(attention, "alibi", true, "learned positions are not implemented")?;
    neutral(attention, "attn_type", "multihead_attention", "only multi-head attention is implemented")?;
    neutral(attention, "kv_n_heads", heads, "as many as n_heads is what transformers computes with")?;
    neutral(attention, "softmax_scale", Value::Null, "only null, 1 / sqrt(head size), is implemented")?;
    neutral(attention, "clip_qkv", 0, "clipped projections are not implemented")?;
    neutral(attention, "sliding_window_size", -1, "windows are not implemented for MPT")?;
    for field in ["qk_ln", "qk_gn", "prefix_lm", "attn_uses_sequence_id", "rope"] {
        neutral(attention, field, false, "only false is implemented")?;
    }
    Ok(())
}
