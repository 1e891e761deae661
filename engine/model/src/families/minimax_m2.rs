//! MiniMax-M2 (MiniMax 2025): norms of queries and keys over all heads, partly rotated heads, a sigmoid router with a bias of
//! the choice.

use super::common::{Base, check_pieces, count, experts, refuse_other_activations, refuse_unless, softmax};
use super::gguf::{self, Gguf, Layout};
use super::{Family, mixtral, routed};
use crate::fields::Fields;
use crate::spec::{Mlp, Part};
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_backend::{Routing, Scoring};
use lagoon_types::limits::LAYERS_MAX;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    model_type: "minimax_m2",
    architectures: &["MiniMaxM2ForCausalLM"],
    models: "MiniMax-M2 and M2.1",
    goldens: &["minimax_m2"],
    gguf: Some(Gguf {
        refine: routed::sigmoid_gguf,
        ..Gguf::of(
            "minimax-m2",
            &[gguf::LLAMA_FIELDS, GGUF_FIELDS],
            &[gguf::LLAMA_TENSORS, gguf::MLP_NORM, gguf::HALVES, gguf::HEAD_NORMS, mixtral::GGUF_TENSORS, GGUF_TENSORS],
        )
    }),
    read,
};

const GGUF_FIELDS: &[(&str, &str)] = &[
    ("expert_count", "num_local_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    // An expert's width, which the file has twice.
    ("expert_feed_forward_length", "intermediate_size"),
];
const GGUF_TENSORS: &[(&str, &str, Layout)] =
    &[("model.layers.{}.block_sparse_moe.e_score_correction_bias", "blk.{}.exp_probs_b.bias", Layout::Same)];

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    refuse_unimplemented(fields)?;
    let mut base = Base::read(fields, FAMILY.model_type, None, Some(128))?;
    let dim = base.geometry.head_dim;
    let rotated = count(fields, "rotary_dim", dim)?.unwrap_or(dim);
    if !rotated.is_multiple_of(2) {
        return Err(fields.invalid("rotary_dim", "dimensions are rotated in pairs"));
    }
    base.rotated = RopeSpec::rotated(fields, dim as usize, f64::from(rotated) / f64::from(dim))?;
    check_pieces(fields, "num_attention_heads", base.layers, base.geometry.heads as usize)?;
    // transformers has a second name.
    let experts_field = if fields.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let [all, top_k, width] =
        experts(fields, base.layers, [experts_field, "num_experts_per_tok", "intermediate_size"])?;
    let routing = Routing { scoring: Scoring::Sigmoid, ..softmax(top_k, true) };
    let layer = |i: usize| {
        let of = |name: &str| format!("model.layers.{i}.block_sparse_moe.{name}");
        let mut layer = base.layer(i);
        layer.attention.head_norms = Some(base.norms_of_all_heads(i));
        let names = ["w1", "w3", "w2"];
        let mut mixture = base.mixture(of("gate.weight"), &of("experts."), names, (all, width), routing);
        mixture.choice_bias = Some(Part::vector(of("e_score_correction_bias"), all));
        layer.mlp = Mlp::Experts(Box::new(mixture));
        layer
    };
    let rope = RopeSpec::with_default(fields, base.rotated, 5e6)?;
    let mut model = base.model(fields, vec![rope], (0..base.layers).map(layer).collect())?;
    let beyond = fields.count("num_mtp_modules", u64::from(LAYERS_MAX))?.unwrap_or(0);
    model.names.layers_beyond = ("model.layers.", usize::try_from(beyond).unwrap_or(0));
    Ok(model)
}

/// Fields of the authors' configuration that have one value in all files, and those of layers that predict further tokens.
/// transformers knows none of them.
fn refuse_unimplemented(fields: &Fields) -> Result<(), ModelError> {
    fields.ignore(&["mlp_intermediate_size", "mtp_transformer_layers", "shared_moe_mode", "swa_rope_theta", "use_mtp"]);
    for beta in ["layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"] {
        refuse_unless(fields, beta, 1, "only 1 is implemented")?;
    }
    refuse_unless(fields, "use_qk_norm", true, "only true is implemented")?;
    refuse_unless(fields, "qk_norm_type", "per_layer", "only \"per_layer\" is implemented")?;
    refuse_unless(fields, "use_routing_bias", true, "only true is implemented")?;
    refuse_unless(fields, "scoring_func", "sigmoid", "only \"sigmoid\" is implemented")?;
    refuse_unless(fields, "shared_intermediate_size", 0, "shared experts are not implemented for this family")?;
    refuse_unless(fields, "sliding_window", Value::Null, "windows are not implemented for this family")?;
    let full = |kind: &Value| kind.as_u64() == Some(1);
    match fields.get("attn_type_list").map(|list| list.as_array().is_some_and(|kinds| kinds.iter().all(full))) {
        None | Some(true) => Ok(()),
        Some(false) => Err(fields.unsupported("attn_type_list", "only 1, full attention, is implemented")),
    }
}
