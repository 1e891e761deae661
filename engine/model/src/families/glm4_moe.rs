//! GLM-4.5 and 4.6 (Zeng et al. 2025): partly rotated heads, a sigmoid router with a bias of the choice, a shared expert, and
//! dense first layers.

use super::Family;
use super::common::{Base, check_pieces, refuse_other_activations};
use super::gguf::{self, Config, Gguf, Layout};
use super::routed::{self, Defaults, RoutedExperts, layers_beyond};
use crate::fields::Fields;
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_backend::Scoring;

pub(super) const FAMILY: Family = Family {
    model_type: "glm4_moe",
    architectures: &["Glm4MoeForCausalLM"],
    models: "GLM-4.5, GLM-4.5-Air, GLM-4.6",
    goldens: &["glm4_moe"],
    gguf: Some(Gguf {
        refine: refine_gguf,
        ..Gguf::of(
            "glm4moe",
            &[gguf::LLAMA_FIELDS, routed::GGUF_FIELDS],
            &[
                gguf::LLAMA_TENSORS,
                gguf::HALVES,
                gguf::QKV_BIASES,
                gguf::HEAD_NORMS,
                routed::GGUF_TENSORS,
                GGUF_TENSORS,
            ],
        )
    }),
    read,
};

/// The norm before the feed-forward layer, by the name that others have for one of attention's output.
const GGUF_TENSORS: &[(&str, &str, Layout)] =
    &[("model.layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight", Layout::Same)];

/// Biases and norms of heads are there if the first layer has them.
fn refine_gguf(config: &mut Config<'_>) -> Result<(), ModelError> {
    config.set("attention_bias", config.has("blk.0.attn_q.bias").into(), "attention.head_count");
    config.set("use_qk_norm", config.has("blk.0.attn_q_norm.weight").into(), "attention.head_count");
    // Heads that are rotated as a whole; the family's default is a half.
    config.set_absent("partial_rotary_factor", 1.0, "rope.dimension_count");
    routed::sigmoid_gguf(config)?;
    routed::refine_gguf(config, &[])
}

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    let mut base = Base::read(fields, FAMILY.model_type, Some(8), Some(128))?;
    base.rotated = RopeSpec::rotated(fields, base.geometry.head_dim as usize, 0.5)?;
    let normed = fields.flag("use_qk_norm")?.unwrap_or(false);
    check_pieces(fields, "num_attention_heads", base.layers, base.geometry.heads as usize)?;
    let biased = fields.flag("attention_bias")?.unwrap_or(false);
    let absent = Defaults { shared: 1, groups: (1, 1), dense_layers: 1, normalised: true, scale: 1.0 };
    let experts = RoutedExperts::read(fields, &base, Scoring::Sigmoid, absent)?;
    let layer = |i: usize| {
        let mut layer = base.layer(i);
        if biased {
            layer.attention.qkv_bias = base.qkv_bias(i);
        }
        if normed {
            layer.attention.head_norms = Some(base.head_norms(i));
        }
        if let Some(mlp) = experts.mlp(&base, i) {
            layer.mlp = mlp;
        }
        layer
    };
    let rope = RopeSpec::read(fields, base.rotated)?;
    let mut model = base.model(fields, vec![rope], (0..base.layers).map(layer).collect())?;
    model.names.layers_beyond = layers_beyond(fields)?;
    Ok(model)
}
