//! GLM-4.5 and 4.6 (Zeng et al. 2025): partly rotated heads, a sigmoid router with a bias of the choice, a shared expert, and
//! dense first layers.

use super::Family;
use super::common::{Base, check_pieces, refuse_other_activations};
use super::routed::{Defaults, RoutedExperts, layers_beyond};
use crate::fields::Fields;
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_backend::Scoring;

pub(super) const FAMILY: Family = Family {
    model_type: "glm4_moe",
    architectures: &["Glm4MoeForCausalLM"],
    models: "GLM-4.5, GLM-4.5-Air, GLM-4.6",
    goldens: &["glm4_moe"],
    gguf: None,
    read,
};

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
