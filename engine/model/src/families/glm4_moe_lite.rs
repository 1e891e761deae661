//! GLM-4.7-Flash: GLM-4.5's experts and DeepSeek's latent attention.

use super::Family;
use super::common::{refuse_other_activations, refuse_unless};
use super::latent::Latent;
use super::routed::{Defaults, RoutedExperts};
use crate::fields::Fields;
use crate::{ModelError, ModelSpec};
use lagoon_backend::Scoring;

pub(super) const FAMILY: Family = Family {
    model_type: "glm4_moe_lite",
    architectures: &["Glm4MoeLiteForCausalLM"],
    models: "GLM-4.7-Flash",
    goldens: &["glm4_moe_lite"],
    gguf: None,
    read,
};

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    refuse_unless(fields, "partial_rotary_factor", 1, "only 1 is implemented for this family")?;
    refuse_unless(fields, "topk_method", "noaux_tc", "only \"noaux_tc\" is implemented for this family")?;
    let interleaved = fields.flag("rope_interleave")?.unwrap_or(true);
    let (base, latent) = Latent::read(fields, FAMILY.model_type, 768, interleaved)?;
    let absent = Defaults { shared: 1, groups: (1, 1), dense_layers: 1, normalised: true, scale: 1.8 };
    let experts =
        RoutedExperts::read(fields, &base, Scoring::Sigmoid, absent)?.with_layer_types(fields, base.layers)?;
    latent.model(fields, &base, &experts)
}
