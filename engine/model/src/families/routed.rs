//! Layers of experts as DeepSeek and GLM have them: experts in groups, experts of every token, and dense first layers.

use super::common::{Base, experts};
use super::gguf::{self, Config, Layout};
use crate::ModelError;
use crate::fields::{Fields, narrow};
use crate::spec::{Mlp, Part};
use lagoon_backend::{GroupScore, Routing, Scoring};
use lagoon_types::limits::{EXPERTS_MAX, INTERMEDIATE_MAX, LAYERS_MAX};
use serde_json::Value;

/// Transformers' defaults of absent fields.
#[derive(Clone, Copy, Debug)]
pub(super) struct Defaults {
    /// Experts of every token.
    pub(super) shared: usize,
    /// Groups, and those that a token's experts are chosen from.
    pub(super) groups: (usize, usize),
    pub(super) dense_layers: usize,
    /// Whether a token's shares are made to sum to one.
    pub(super) normalised: bool,
    /// Factor on shares.
    pub(super) scale: f32,
}

/// Experts behind `model.layers.{i}.mlp.`.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoutedExperts {
    count: usize,
    width: usize,
    shared: usize,
    dense_layers: usize,
    routing: Routing,
}

impl RoutedExperts {
    /// Experts of groups with the largest sums of their two best scores, as `noaux_tc` chooses them.
    pub(super) fn read(fields: &Fields, base: &Base, scoring: Scoring, absent: Defaults) -> Result<Self, ModelError> {
        let [count, top_k, width] =
            experts(fields, base.layers, ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
        let count_of = |field, absent: usize| {
            Ok::<_, ModelError>(fields.count(field, u64::from(EXPERTS_MAX))?.map_or(absent, index))
        };
        let groups = count_of("n_group", absent.groups.0)?;
        let top_groups = count_of("topk_group", absent.groups.1)?;
        let shared = fields.number("n_shared_experts", u64::from(EXPERTS_MAX))?.map_or(absent.shared, index);
        if shared * width > INTERMEDIATE_MAX as usize {
            return Err(
                fields.invalid("n_shared_experts", &format!("they would be wider than {INTERMEDIATE_MAX} together"))
            );
        }
        if !count.is_multiple_of(groups) || top_groups > groups || top_k > count / groups * top_groups {
            let problem = format!(
                "{count} experts, {top_k} of them for a token, in {top_groups} of {groups} groups: groups must be of one size, and \
                 the chosen ones must hold a token's experts"
            );
            return Err(fields.invalid("n_group", &problem));
        }
        let dense_layers = fields.number("first_k_dense_replace", u64::from(LAYERS_MAX))?;
        let dense_layers = dense_layers.map_or(absent.dense_layers, index);
        let normalised = fields.flag("norm_topk_prob")?.unwrap_or(absent.normalised);
        let scale = fields.positive("routed_scaling_factor")?.map_or(absent.scale, narrow);
        let routing =
            Routing { top_k, scoring, normalised, scale, groups, top_groups, group_score: GroupScore::TwoBest };
        Ok(Self { count, width, shared, dense_layers, routing })
    }

    /// The same with groups compared by `group_score`.
    pub(super) fn with_group_score(mut self, group_score: GroupScore) -> Self {
        self.routing.group_score = group_score;
        self
    }

    /// With the dense first layers that `mlp_layer_types` names, as transformers 5 writes it, if it is there.
    pub(super) fn with_layer_types(self, fields: &Fields, layers: usize) -> Result<Self, ModelError> {
        let field = "mlp_layer_types";
        let Some(value) = fields.get(field) else { return Ok(self) };
        let kinds: Option<Vec<&str>> = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        let kinds = kinds.filter(|kinds| kinds.len() == layers);
        let kinds =
            kinds.ok_or_else(|| fields.invalid(field, &format!("it must name the kinds of {layers} layers")))?;
        let dense_layers = kinds.iter().take_while(|kind| **kind == "dense").count();
        if kinds[dense_layers..].iter().any(|kind| *kind != "sparse") {
            return Err(fields.unsupported(field, "supported are \"dense\" layers before \"sparse\" ones"));
        }
        Ok(Self { dense_layers, ..self })
    }

    /// The experts of layer `i`; `None` if it is dense.
    pub(super) fn mlp(&self, base: &Base, i: usize) -> Option<Mlp> {
        if i < self.dense_layers {
            return None;
        }
        let of = |name: &str| format!("model.layers.{i}.mlp.{name}");
        let names = ["gate_proj", "up_proj", "down_proj"];
        let sizes = (self.count, self.width);
        let mut mixture = base.mixture(of("gate.weight"), &of("experts."), names, sizes, self.routing);
        if self.routing.scoring == Scoring::Sigmoid {
            mixture.choice_bias = Some(Part::vector(of("gate.e_score_correction_bias"), self.count));
        }
        if self.shared > 0 {
            mixture.shared = Some(base.dense(&of("shared_experts."), self.shared * self.width));
        }
        Some(Mlp::Experts(Box::new(mixture)))
    }
}

/// Layers behind the last one, which predict further tokens: files have two names for their number.
pub(super) fn layers_beyond(fields: &Fields) -> Result<(&'static str, usize), ModelError> {
    let number = |field| Ok::<_, ModelError>(fields.number(field, u64::from(LAYERS_MAX))?.map(index));
    // transformers 5 writes the first name.
    let (new, old) = (number("num_mtp_layers")?, number("num_nextn_predict_layers")?);
    Ok(("model.layers.", old.or(new).unwrap_or(0)))
}

/// Keys of experts, beside those that [`refine_gguf`] reads.
pub(super) const GGUF_FIELDS: &[(&str, &str)] = &[
    ("expert_count", "n_routed_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_count", "n_shared_experts"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("expert_weights_norm", "norm_topk_prob"),
];
pub(super) const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight", Layout::Same),
    ("model.layers.{}.mlp.gate.e_score_correction_bias", "blk.{}.exp_probs_b.bias", Layout::Same),
    ("model.layers.{}.mlp.experts.{}.gate_proj.weight", "blk.{}.ffn_gate_exps.weight", Layout::OfExperts),
    ("model.layers.{}.mlp.experts.{}.up_proj.weight", "blk.{}.ffn_up_exps.weight", Layout::OfExperts),
    ("model.layers.{}.mlp.experts.{}.down_proj.weight", "blk.{}.ffn_down_exps.weight", Layout::OfExperts),
    ("model.layers.{}.mlp.shared_experts.gate_proj.weight", "blk.{}.ffn_gate_shexp.weight", Layout::Same),
    ("model.layers.{}.mlp.shared_experts.up_proj.weight", "blk.{}.ffn_up_shexp.weight", Layout::Same),
    ("model.layers.{}.mlp.shared_experts.down_proj.weight", "blk.{}.ffn_down_shexp.weight", Layout::Same),
];
/// Numbers of `expert_gating_func`.
pub(super) const GATING: &str = "expert_gating_func";
pub(super) const SOFTMAX: u64 = 1;
pub(super) const SIGMOID: u64 = 2;

/// Experts of a family whose scores are sigmoids in every model.
pub(super) fn sigmoid_gguf(config: &mut Config<'_>) -> Result<(), ModelError> {
    config.expect(GATING, Some(SIGMOID))
}

/// Keys that are absent where they change nothing, which transformers' defaults do not. `groups` are those of models with so many
/// experts whose files are older than the keys of groups.
pub(super) fn refine_gguf(config: &mut Config<'_>, groups: &[(u64, (u64, u64))]) -> Result<(), ModelError> {
    gguf::layers_beyond(config)?;
    for (field, name) in [("n_shared_experts", "expert_shared_count"), ("first_k_dense_replace", "block_count")] {
        config.set_absent(field, 0, name);
    }
    config.set_absent("norm_topk_prob", false, "expert_weights_norm");
    let scale = "expert_weights_scale";
    let factor = config.float(scale)?.filter(|factor| *factor != 0.0).unwrap_or(1.0);
    config.set("routed_scaling_factor", factor.into(), scale);
    let names = ["expert_group_count", "expert_group_used_count"];
    let [all, top] = names.map(|name| config.number(name));
    let (all, top) = (all?.filter(|groups| *groups > 0), top?.filter(|groups| *groups > 0));
    let experts = config.field("n_routed_experts");
    let known = groups.iter().find(|(count, _)| Some(*count) == experts).map_or((1, 1), |(_, groups)| *groups);
    let (all, top) = all.map_or(known, |all| (all, top.unwrap_or(all)));
    config.set("n_group", all.into(), names[0]);
    config.set("topk_group", top.into(), names[1]);
    Ok(())
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
