//! DeepSeek-V2 (Liu et al. 2024) and V3 (Liu et al. 2024), and Kimi-K2, which has V3's architecture: latent attention, and experts
//! in groups behind dense first layers.

use super::Family;
use super::common::{refuse_other_activations, refuse_unless};
use super::gguf::{self, Config, Gguf};
use super::latent::{self, Latent};
use super::routed::{self, Defaults, GATING, RoutedExperts, SIGMOID, SOFTMAX};
use crate::fields::Fields;
use crate::gguf::Metadata;
use crate::{ModelError, ModelSpec};
use lagoon_backend::{GroupScore, Scoring};
use lagoon_types::limits::EXPERTS_MAX;

pub(super) const V2: Family = Family {
    model_type: "deepseek_v2",
    architectures: &["DeepseekV2ForCausalLM"],
    models: "DeepSeek-V2 and V2.5, V2-Lite, DeepSeek-Coder-V2",
    goldens: &["deepseek_v2", "deepseek_v2_groups"],
    gguf: Some(Gguf { matches: |metadata| Ok(!is_sigmoid(metadata)?), refine: refine_v2, ..GGUF }),
    read: read_v2,
};

pub(super) const V3: Family = Family {
    model_type: "deepseek_v3",
    architectures: &["DeepseekV3ForCausalLM"],
    models: "DeepSeek-V3 and R1, Moonlight",
    goldens: &["deepseek_v3"],
    gguf: Some(Gguf { matches: is_sigmoid, refine: refine_v3, ..GGUF }),
    read: |fields| read(fields, "deepseek_v3"),
};

pub(super) const KIMI_K2: Family = Family {
    model_type: "kimi_k2",
    architectures: &["DeepseekV3ForCausalLM"],
    models: "Kimi-K2",
    goldens: &["kimi_k2"],
    // Files do not tell it from V3, and it computes the same.
    gguf: None,
    read: |fields| read(fields, "kimi_k2"),
};

const GGUF: Gguf = Gguf {
    heads: latent::gguf_heads,
    ..Gguf::of(
        "deepseek2",
        &[latent::GGUF_FIELDS, routed::GGUF_FIELDS],
        &[latent::GGUF_TENSORS, gguf::MLP_NORM, routed::GGUF_TENSORS],
    )
};
/// Groups of published models by their number of experts, for files that are older than the keys of groups.
const GROUPS: &[(u64, (u64, u64))] = &[(160, (8, 3)), (256, (8, 4))];
/// Layers and tokens of GLM-4.7-Flash, whose first files lack the kind of its scores.
const GLM_FLASH: (u64, u64) = (47, 154_880);

/// Whether a file's scores are sigmoids, as V3's are and those of the models that followed it.
fn is_sigmoid(metadata: &Metadata) -> Result<bool, ModelError> {
    let number = |name: &str| metadata.unsigned(&format!("deepseek2.{name}"));
    let glm = number("block_count")?.zip(number("vocab_size")?) == Some(GLM_FLASH);
    Ok(number(GATING)?.map_or(glm, |gating| gating == SIGMOID))
}

fn refine_v3(config: &mut Config<'_>) -> Result<(), ModelError> {
    routed::sigmoid_gguf(config)?;
    routed::refine_gguf(config, GROUPS)
}

fn refine_v2(config: &mut Config<'_>) -> Result<(), ModelError> {
    config.expect(GATING, Some(SOFTMAX))?;
    routed::refine_gguf(config, GROUPS)?;
    let method = if config.field("n_group") == Some(1) { "greedy" } else { "group_limited_greedy" };
    config.set("topk_method", method.into(), "expert_group_count");
    Ok(())
}

fn read(fields: &Fields, family: &'static str) -> Result<ModelSpec, ModelError> {
    refuse_unless(fields, "scoring_func", "sigmoid", "only \"sigmoid\" is implemented for this family")?;
    refuse_unless(fields, "topk_method", "noaux_tc", "only \"noaux_tc\" is implemented for this family")?;
    let interleaved = fields.flag("rope_interleave")?.unwrap_or(true);
    let absent = Defaults { shared: 1, groups: (8, 4), dense_layers: 3, normalised: true, scale: 2.5 };
    model(fields, (family, 1536, interleaved), (Scoring::Sigmoid, GroupScore::TwoBest), absent)
}

fn read_v2(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_unless(fields, "scoring_func", "softmax", "only \"softmax\" is implemented for this family")?;
    refuse_unless(fields, "norm_topk_prob", false, "only false is implemented for this family, as in transformers")?;
    refuse_unless(fields, "mlp_bias", false, "only false is implemented")?;
    let limited = match fields.text("topk_method")?.unwrap_or("greedy") {
        "greedy" => false,
        "group_limited_greedy" => true,
        _ => return Err(fields.unsupported("topk_method", "supported are \"greedy\" and \"group_limited_greedy\"")),
    };
    for groups in ["n_group", "topk_group"] {
        if limited {
            fields.required_count(groups, u64::from(EXPERTS_MAX))?;
        } else {
            refuse_unless(fields, groups, 1, "\"topk_method\": \"greedy\" chooses among all experts, without groups")?;
        }
    }
    let absent = Defaults { shared: 2, groups: (1, 1), dense_layers: 0, normalised: false, scale: 1.0 };
    model(fields, (V2.model_type, 1536, true), (Scoring::Softmax, GroupScore::Best), absent)
}

fn model(
    fields: &Fields,
    (family, rank, interleaved): (&'static str, usize, bool),
    (scoring, group_score): (Scoring, GroupScore),
    absent: Defaults,
) -> Result<ModelSpec, ModelError> {
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    refuse_unless(fields, "moe_layer_freq", 1, "only 1 is implemented")?;
    // Training, and the authors' way to spread experts over devices.
    fields.ignore(&["aux_loss_alpha", "ep_size", "seq_aux"]);
    let (base, latent) = Latent::read(fields, family, rank, interleaved)?;
    let experts = RoutedExperts::read(fields, &base, scoring, absent)?.with_group_score(group_score);
    latent.model(fields, &base, &experts)
}
