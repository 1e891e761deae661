//! Qwen3 (Yang et al. 2025): Llama with norms of query and key heads.

use super::Family;
use super::common::{Base, refuse_biases, refuse_other_activations, upper_windows};
use super::gguf::{self, Gguf};
use crate::fields::Fields;
use crate::spec::LayerSpec;
use crate::{ModelError, ModelSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3",
    architectures: &["Qwen3ForCausalLM"],
    models: "Qwen3 (dense), DeepSeek-R1-0528-Qwen3",
    goldens: &["qwen3"],
    gguf: Some(Gguf::of(
        "qwen3",
        &[gguf::LLAMA_FIELDS],
        &[gguf::LLAMA_TENSORS, gguf::MLP_NORM, gguf::HALVES, gguf::HEAD_NORMS],
    )),
    read,
};

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    let base = base(fields, FAMILY.model_type)?;
    let rope = base.rope(fields, 1e4)?;
    let mut layers: Vec<_> = (0..base.layers).map(|i| layer(&base, i)).collect();
    let windows = upper_windows(fields, base.layers)?;
    layers.iter_mut().zip(windows).for_each(|(layer, window)| layer.attention.window = window);
    base.model(fields, vec![rope], layers)
}

/// The sizes, after refusing biases and activations other than SiLU, which no Qwen3 model has.
pub(super) fn base(fields: &Fields, family: &'static str) -> Result<Base, ModelError> {
    refuse_biases(fields, &["attention_bias", "mlp_bias"])?;
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    Base::read(fields, family, None, Some(128))
}

/// A layer of Llama's with norms of heads.
pub(super) fn layer(base: &Base, i: usize) -> LayerSpec {
    let mut layer = base.layer(i);
    layer.attention.head_norms = Some(base.head_norms(i));
    layer
}
