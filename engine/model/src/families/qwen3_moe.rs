//! Qwen3's mixtures of experts (Yang et al. 2025).

use super::common::{experts, refuse_unless, size, softmax};
use super::gguf::{self, Config, Gguf, Layout};
use super::{Family, qwen3};
use crate::fields::Fields;
use crate::spec::Mlp;
use crate::{ModelError, ModelSpec};
use lagoon_types::limits::LAYERS_MAX;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_moe",
    architectures: &["Qwen3MoeForCausalLM"],
    models: "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    goldens: &["qwen3_moe"],
    gguf: Some(Gguf {
        refine: refine_gguf,
        ..Gguf::of(
            "qwen3moe",
            &[gguf::LLAMA_FIELDS, GGUF_FIELDS],
            &[gguf::LLAMA_TENSORS, gguf::MLP_NORM, gguf::HALVES, gguf::HEAD_NORMS, GGUF_TENSORS],
        )
    }),
    read,
};

const GGUF_FIELDS: &[(&str, &str)] = &[
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
];
const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight", Layout::Same),
    ("model.layers.{}.mlp.experts.{}.gate_proj.weight", "blk.{}.ffn_gate_exps.weight", Layout::OfExperts),
    ("model.layers.{}.mlp.experts.{}.up_proj.weight", "blk.{}.ffn_up_exps.weight", Layout::OfExperts),
    ("model.layers.{}.mlp.experts.{}.down_proj.weight", "blk.{}.ffn_down_exps.weight", Layout::OfExperts),
];

/// All of the line's models divide the shares of a token's experts by their sum, and no key says so.
fn refine_gguf(config: &mut Config<'_>) -> Result<(), ModelError> {
    config.set("norm_topk_prob", true.into(), "expert_used_count");
    Ok(())
}

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_unless(fields, "use_sliding_window", false, "a window is not implemented for this family")?;
    // Qwen3-Coder's files.
    refuse_unless(fields, "qkv_bias", false, "only false is implemented")?;
    refuse_unless(fields, "use_qk_norm", true, "only true is implemented")?;
    refuse_unless(fields, "shared_expert_intermediate_size", 0, "shared experts are not implemented for this family")?;
    fields.ignore(&["sliding_window", "max_window_layers", "layer_types", "num_experts"]);
    let base = qwen3::base(fields, FAMILY.model_type)?;
    // transformers 5 writes another name.
    let experts_field = if fields.get("num_local_experts").is_some() { "num_local_experts" } else { "num_experts" };
    let [count, top_k, width] =
        experts(fields, base.layers, [experts_field, "num_experts_per_tok", "moe_intermediate_size"])?;
    let routing = softmax(top_k, fields.flag("norm_topk_prob")?.unwrap_or(false));
    let sparse_step =
        if fields.get("decoder_sparse_step").is_some() { size(fields, "decoder_sparse_step", LAYERS_MAX)? } else { 1 };
    let dense = fields.get("mlp_only_layers").map_or(Ok(Vec::new()), |value| {
        let index = |layer: &Value| layer.as_u64().and_then(|layer| usize::try_from(layer).ok());
        let layers = value.as_array().and_then(|layers| layers.iter().map(index).collect::<Option<Vec<usize>>>());
        layers.ok_or_else(|| fields.invalid("mlp_only_layers", "it must be a list of layers"))
    })?;
    let layer = |i: usize| {
        let mut layer = qwen3::layer(&base, i);
        if !dense.contains(&i) && (i + 1).is_multiple_of(sparse_step) {
            let of = |name: &str| format!("model.layers.{i}.mlp.{name}");
            let names = ["gate_proj", "up_proj", "down_proj"];
            let mixture = base.mixture(of("gate.weight"), &of("experts."), names, (count, width), routing);
            layer.mlp = Mlp::Experts(Box::new(mixture));
        }
        layer
    };
    let rope = base.rope(fields, 1e4)?;
    base.model(fields, vec![rope], (0..base.layers).map(layer).collect())
}
