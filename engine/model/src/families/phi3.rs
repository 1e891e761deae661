//! Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections, partly rotated heads and LongRoPE.

use super::Family;
use super::common::{Base, check_pieces, count, refuse_biases, refuse_other_activations, refuse_unless};
use super::gguf::{self, Config, Gguf, Layout};
use crate::fields::Fields;
use crate::gguf::Item;
use crate::spec::{Mlp, Part};
use crate::{ModelError, ModelSpec, RopeScaling, RopeSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "phi3",
    architectures: &["Phi3ForCausalLM"],
    models: "Phi-3 and Phi-3.5 mini and medium, Phi-4, Phi-4-mini (LongRoPE with the factors for the longest context, or for a \
             short one with `--max-model-len`)",
    goldens: &["phi3", "phi3_longrope"],
    gguf: Some(Gguf {
        refine: refine_gguf,
        more: |spec| vec![(gguf::WINDOW.0, Item::U32(spec.window().unwrap_or(0)))],
        ..Gguf::of("phi3", &[gguf::LLAMA_FIELDS], &[gguf::LLAMA_TENSORS, gguf::MLP_NORM, GGUF_TENSORS])
    }),
    read,
};

const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.self_attn.qkv_proj.weight", "blk.{}.attn_qkv.weight", Layout::Same),
    ("model.layers.{}.mlp.gate_up_proj.weight", "blk.{}.ffn_up.weight", Layout::Same),
];

/// Files without a window have 0.
fn refine_gguf(config: &mut Config<'_>) -> Result<(), ModelError> {
    let (name, field) = gguf::WINDOW;
    if let Some(window) = config.number(name)?.filter(|window| *window > 0) {
        config.set(field, window.into(), name);
    }
    Ok(())
}

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_biases(fields, &["attention_bias", "mlp_bias", "lm_head_bias"])?;
    // Phi-4-mini's files.
    refuse_unless(fields, "full_attn_mod", 1, "only 1 is implemented")?;
    refuse_unless(fields, "interpolate_factor", 1, "only 1 is implemented")?;
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    let mut base = Base::read(fields, FAMILY.model_type, None, None)?;
    base.rotated = RopeSpec::rotated(fields, base.geometry.head_dim as usize, 1.0)?;
    check_pieces(fields, "num_attention_heads", base.layers, base.geometry.heads as usize)?;
    let window = count(fields, "sliding_window", u32::MAX)?;
    let layer = |i: usize| {
        let of = |name: &str| format!("model.layers.{i}.{name}.weight");
        let (q_dim, kv_dim) = (base.geometry.q_dim(), base.geometry.kv_dim());
        let mut layer = base.layer(i);
        let fused = Part::matrix(of("self_attn.qkv_proj"), q_dim + 2 * kv_dim, base.hidden);
        let thirds = [(0, q_dim), (q_dim, kv_dim), (q_dim + kv_dim, kv_dim)];
        layer.attention.qkv = base.in_order(thirds.map(|(first, rows)| fused.rows(first, rows, 1)));
        layer.attention.window = window;
        let mut dense = base.dense(&format!("model.layers.{i}.mlp."), base.intermediate);
        dense.up = vec![Part::matrix(of("mlp.gate_up_proj"), 2 * base.intermediate, base.hidden)];
        layer.mlp = Mlp::Dense(Box::new(dense));
        layer
    };
    let rope = RopeSpec::read(fields, base.rotated)?;
    if !matches!(rope.scaling, RopeScaling::None | RopeScaling::LongRope(_)) {
        return Err(fields.unsupported("rope_scaling", "this family has \"longrope\" only"));
    }
    base.model(fields, vec![rope], (0..base.layers).map(layer).collect())
}
