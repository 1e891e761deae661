//! Mistral (Jiang et al. 2023): Llama with an optional sliding window.

use super::Family;
use super::common::{Base, count, refuse_biases, refuse_other_activations, windows};
use super::gguf::{self, Gguf};
use crate::fields::Fields;
use crate::{ModelError, ModelSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "mistral",
    architectures: &["MistralForCausalLM"],
    models: "Mistral 7B, Mistral Nemo, Mistral Small (text), Ministral 8B",
    goldens: &["mistral_window"],
    // Without a window, files of this family are called as Llama's, and read as such.
    gguf: Some(Gguf {
        is_read: false,
        ..Gguf::of("llama", &[gguf::LLAMA_FIELDS], &[gguf::LLAMA_TENSORS, gguf::MLP_NORM, gguf::IN_TURNS])
    }),
    read,
};

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_biases(fields, &["attention_bias", "mlp_bias"])?;
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    let base = Base::read(fields, FAMILY.model_type, Some(8), None)?;
    // Null is no window; an absent field is transformers' default.
    let window = match count(fields, "sliding_window", u32::MAX)? {
        None if !fields.contains("sliding_window") => Some(4096),
        window => window,
    };
    let rope = base.rope(fields, 1e4)?;
    let mut layers: Vec<_> = (0..base.layers).map(|i| base.layer(i)).collect();
    // Ministral's files have this model_type and name the layers that have the window.
    let windows = windows(fields, base.layers, window)?.unwrap_or_else(|| vec![window; base.layers]);
    layers.iter_mut().zip(windows).for_each(|(layer, window)| layer.attention.window = window);
    base.model(fields, vec![rope], layers)
}
