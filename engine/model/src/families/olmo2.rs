//! OLMo 2 (OLMo Team 2025): post-norm, which is RMS norms of block outputs and none of block inputs, and norms of queries and keys over all
//! heads.

use super::Family;
use super::common::{Base, refuse_biases, refuse_other_activations};
use super::gguf::{self, Gguf};
use crate::fields::Fields;
use crate::{ModelError, ModelSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "olmo2",
    architectures: &["Olmo2ForCausalLM"],
    models: "OLMo 2 (1B, 7B, 13B, 32B)",
    goldens: &["olmo2"],
    gguf: Some(Gguf::of(
        "olmo2",
        &[gguf::LLAMA_FIELDS],
        &[gguf::LLAMA_TENSORS, gguf::HALVES, gguf::HEAD_NORMS, gguf::OUT_NORMS],
    )),
    read,
};

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_biases(fields, &["attention_bias"])?;
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    let base = Base::read(fields, FAMILY.model_type, None, None)?;
    let rope = base.rope(fields, 1e4)?;
    let layer = |i: usize| {
        let of = |name: &str| format!("model.layers.{i}.{name}.weight");
        let mut layer = base.layer(i);
        layer.attention.head_norms = Some(base.norms_of_all_heads(i));
        (layer.attention_norm, layer.mlp_norm) = (None, None);
        layer.attention_out_norm = Some(base.norm(of("post_attention_layernorm")));
        layer.mlp_out_norm = Some(base.norm(of("post_feedforward_layernorm")));
        layer
    };
    base.model(fields, vec![rope], (0..base.layers).map(layer).collect())
}
