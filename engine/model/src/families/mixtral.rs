//! Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer.

use super::Family;
use super::common::{Base, count, experts, refuse_biases, refuse_other_activations, softmax};
use super::gguf::{self, Gguf, Layout};
use crate::fields::Fields;
use crate::spec::Mlp;
use crate::{ModelError, ModelSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "mixtral",
    architectures: &["MixtralForCausalLM"],
    models: "Mixtral 8x7B and 8x22B",
    goldens: &["mixtral"],
    gguf: Some(Gguf {
        matches: gguf::has_experts,
        ..Gguf::of(
            "llama",
            &[gguf::LLAMA_FIELDS, GGUF_FIELDS],
            &[gguf::LLAMA_TENSORS, gguf::MLP_NORM, gguf::IN_TURNS, GGUF_TENSORS],
        )
    }),
    read,
};

const GGUF_FIELDS: &[(&str, &str)] =
    &[("expert_count", "num_local_experts"), ("expert_used_count", "num_experts_per_tok")];
/// Experts of one tensor, by Mixtral's names.
pub(super) const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.block_sparse_moe.gate.weight", "blk.{}.ffn_gate_inp.weight", Layout::Same),
    ("model.layers.{}.block_sparse_moe.experts.{}.w1.weight", "blk.{}.ffn_gate_exps.weight", Layout::OfExperts),
    ("model.layers.{}.block_sparse_moe.experts.{}.w3.weight", "blk.{}.ffn_up_exps.weight", Layout::OfExperts),
    ("model.layers.{}.block_sparse_moe.experts.{}.w2.weight", "blk.{}.ffn_down_exps.weight", Layout::OfExperts),
];

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_biases(fields, &["attention_bias", "mlp_bias"])?;
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    let base = Base::read(fields, FAMILY.model_type, Some(8), None)?;
    let [experts, top_k, width] =
        experts(fields, base.layers, ["num_local_experts", "num_experts_per_tok", "intermediate_size"])?;
    let window = count(fields, "sliding_window", u32::MAX)?;
    let layer = |i: usize| {
        let of = |name: &str| format!("model.layers.{i}.block_sparse_moe.{name}");
        let mut layer = base.layer(i);
        let names = ["w1", "w3", "w2"];
        let routing = softmax(top_k, true);
        let mixture = base.mixture(of("gate.weight"), &of("experts."), names, (experts, width), routing);
        layer.mlp = Mlp::Experts(Box::new(mixture));
        layer.attention.window = window;
        layer
    };
    let rope = base.rope(fields, 1e6)?;
    base.model(fields, vec![rope], (0..base.layers).map(layer).collect())
}
