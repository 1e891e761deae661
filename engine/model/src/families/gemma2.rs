//! Gemma 2 (Gemma Team 2024): Gemma 3's norms before and after each block and its gated GELU, soft caps of attention scores and
//! logits, and a window on every other layer.

use super::common::windows;
use super::gguf::{self, Gguf};
use super::{Family, gemma3};
use crate::fields::{Fields, narrow};
use crate::{ModelError, ModelSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "gemma2",
    architectures: &["Gemma2ForCausalLM"],
    models: "Gemma 2 2B, 9B and 27B",
    goldens: &["gemma2"],
    gguf: Some(Gguf {
        adds_offsets: true,
        refine: |config| gemma3::refine_scale(config, LAYERS_OF_27B),
        ..Gguf::of(
            "gemma2",
            &[gguf::LLAMA_FIELDS, GGUF_FIELDS],
            &[gguf::LLAMA_TENSORS, gguf::HALVES, gguf::OUT_NORMS, gemma3::GGUF_TENSORS],
        )
    }),
    read,
};

/// The 27B scales scores by the hidden size of a head, not by the head's size.
const LAYERS_OF_27B: u64 = 46;
const GGUF_FIELDS: &[(&str, &str)] = &[
    gguf::WINDOW,
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
];

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    let base = gemma3::base(fields, FAMILY.model_type)?;
    let window = gemma3::window(fields)?;
    // Without a list, every other layer sees everything, from the second on.
    let alternating = || (0..base.layers).map(|i| i.is_multiple_of(2).then_some(window)).collect();
    let windows = windows(fields, base.layers, Some(window))?.unwrap_or_else(alternating);
    let layers = windows.into_iter().enumerate().map(|(i, window)| gemma3::layer(&base, i, window)).collect();
    let mut model = gemma3::model(fields, &base, vec![base.rope(fields, 1e4)?], layers)?;
    model.attention_softcap = softcap(fields, "attn_logit_softcapping", 50.0)?;
    model.logits_softcap = softcap(fields, "final_logit_softcapping", 30.0)?;
    Ok(model)
}

/// A soft cap; null is none, and an absent field the default.
fn softcap(fields: &Fields, field: &str, default: f64) -> Result<Option<f32>, ModelError> {
    match fields.positive(field)? {
        Some(cap) => Ok(Some(narrow(cap))),
        None => Ok((!fields.contains(field)).then_some(narrow(default))),
    }
}
