//! Qwen2 and 2.5 (Yang et al. 2024): Llama with biases on queries, keys and values.

use super::Family;
use super::common::{Base, refuse_biases, refuse_other_activations, refuse_unless, upper_windows};
use super::gguf::{self, Gguf};
use crate::fields::Fields;
use crate::{ModelError, ModelSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2",
    architectures: &["Qwen2ForCausalLM"],
    models: "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    goldens: &["qwen2", "qwen2_f16", "qwen2_window"],
    gguf: Some(Gguf::of(
        "qwen2",
        &[gguf::LLAMA_FIELDS],
        &[gguf::LLAMA_TENSORS, gguf::MLP_NORM, gguf::HALVES, gguf::QKV_BIASES],
    )),
    read,
};

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_biases(fields, &["mlp_bias"])?;
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    refuse_unless(fields, "use_mrope", false, "only false is implemented")?;
    let base = Base::read(fields, FAMILY.model_type, None, None)?;
    let rope = base.rope(fields, 1e4)?;
    let mut layers: Vec<_> = (0..base.layers).map(|i| base.layer(i)).collect();
    let windows = upper_windows(fields, base.layers)?;
    for (i, (layer, window)) in layers.iter_mut().zip(windows).enumerate() {
        layer.attention.qkv_bias = base.qkv_bias(i);
        layer.attention.window = window;
    }
    base.model(fields, vec![rope], layers)
}
