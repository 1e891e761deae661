//! Gemma 3, text (Gemma Team 2025): norms before and after each block, norms of heads, gated GELU, and layers with a window
//! and a rotary base of their own.

use super::Family;
use super::common::{Base, count, refuse_biases, refuse_other_activations, refuse_unless, windows};
use super::gguf::{self, Config, Gguf, Layout};
use crate::fields::{Fields, narrow};
use crate::gguf::{Item, Value};
use crate::spec::LayerSpec;
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_backend::Activation;
use lagoon_types::limits::LAYERS_MAX;
use serde_json::Value as Json;

pub(super) const FAMILY: Family = Family {
    model_type: "gemma3_text",
    architectures: &["Gemma3ForCausalLM"],
    models: "Gemma 3 1B and 270M, and other text-only Gemma 3",
    goldens: &["gemma3"],
    gguf: Some(Gguf {
        adds_offsets: true,
        // Of the images that other files of the line take.
        ignored: &["mm.tokens_per_image"],
        refine: refine_gguf,
        more: |spec| pattern(spec).into_iter().map(|item| ("attention.sliding_window_pattern", item)).collect(),
        ..Gguf::of(
            "gemma3",
            &[gguf::LLAMA_FIELDS, GGUF_FIELDS],
            &[gguf::LLAMA_TENSORS, gguf::HALVES, gguf::HEAD_NORMS, gguf::OUT_NORMS, GGUF_TENSORS],
        )
    }),
    read,
};

const LAYERS_OF_27B: u64 = 62;
const GGUF_FIELDS: &[(&str, &str)] = &[gguf::WINDOW, ("rope.freq_base_swa", "rope_local_base_freq")];
/// The norm before the feed-forward layer, which Llama's files call by the same name for another of the family's.
pub(super) const GGUF_TENSORS: &[(&str, &str, Layout)] =
    &[("model.layers.{}.pre_feedforward_layernorm.weight", "blk.{}.ffn_norm.weight", Layout::Same)];

fn refine_gguf(config: &mut Config<'_>) -> Result<(), ModelError> {
    let name = "attention.sliding_window_pattern";
    match config.get(name).cloned() {
        None => {}
        Some(Value::List(list)) => {
            let kind = |windowed| match windowed {
                Ok(Value::Bool(true)) => Some("sliding_attention"),
                Ok(Value::Bool(false)) => Some("full_attention"),
                _ => None,
            };
            let kinds: Option<Vec<&str>> = list.values().take(LAYERS_MAX as usize + 1).map(kind).collect();
            let kinds = kinds.ok_or_else(|| config.unsupported(name, "it must be a number or a list of booleans"))?;
            config.set("layer_types", kinds.into(), name);
        }
        Some(value) => {
            let pattern = value.unsigned().ok_or_else(|| config.unsupported(name, "it must be a number or a list"))?;
            config.set("sliding_window_pattern", pattern.into(), name);
        }
    }
    refine_scale(config, LAYERS_OF_27B)
}

/// Which layers have a window, where it is not all but each sixth.
fn pattern(spec: &ModelSpec) -> Option<Item> {
    let windowed: Vec<bool> = spec.layers.iter().map(|layer| layer.attention.window.is_some()).collect();
    let is_usual = windowed.iter().zip(1_usize..).all(|(windowed, number)| *windowed != number.is_multiple_of(6));
    (!is_usual).then_some(Item::Bools(windowed))
}

/// The scale of scores, which no key has: models of `layers_of_27b` layers take the hidden size of a head, others its size.
pub(super) fn refine_scale(config: &mut Config<'_>, layers_of_27b: u64) -> Result<(), ModelError> {
    let by_hidden = config.field("num_hidden_layers") == Some(layers_of_27b);
    let hidden = config.field("hidden_size").zip(config.field("num_attention_heads"));
    let of_head = hidden.filter(|(_, heads)| *heads > 0).map(|(hidden, heads)| hidden / heads);
    let scalar = if by_hidden { of_head } else { config.field("head_dim").or(of_head) };
    if let Some(scalar) = scalar {
        config.set("query_pre_attn_scalar", scalar.into(), "attention.key_length");
    }
    Ok(())
}

/// Rotary tables by index.
const GLOBAL: usize = 0;
const LOCAL: usize = 1;

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
        refuse_unless(fields, cap, Json::Null, "Gemma 3 has no soft caps")?;
    }
    let base = base(fields, FAMILY.model_type)?;
    let window = window(fields)?;
    // Without a list, each sixth layer sees everything.
    let pattern = count(fields, "sliding_window_pattern", LAYERS_MAX)?.unwrap_or(6) as usize;
    let by_pattern = || (0..base.layers).map(|i| (!(i + 1).is_multiple_of(pattern)).then_some(window)).collect();
    let windows = windows(fields, base.layers, Some(window))?.unwrap_or_else(by_pattern);
    let layers = windows.into_iter().enumerate().map(|(i, window)| {
        let mut layer = layer(&base, i, window);
        layer.attention.head_norms = Some(base.head_norms(i));
        layer.attention.rope = if window.is_some() { LOCAL } else { GLOBAL };
        layer
    });
    model(fields, &base, ropes(fields, base.rotated)?, layers.collect())
}

/// The sizes of Gemma 2 and 3, after checks of the fields that both refuse.
pub(super) fn base(fields: &Fields, family: &'static str) -> Result<Base, ModelError> {
    refuse_biases(fields, &["attention_bias"])?;
    refuse_other_activations(fields, "hidden_activation", &["gelu_pytorch_tanh"])?;
    refuse_unless(fields, "use_bidirectional_attention", false, "only causal attention is implemented")?;
    // transformers reads none of them: the layers' list decides, `hidden_activation`, and `sliding_window`.
    fields.ignore(&["_sliding_window_pattern", "hidden_act", "sliding_window_size"]);
    let base = Base::read(fields, family, Some(4), Some(256))?;
    Ok(Base { activation: Activation::GeluTanhMul, norm_offset: 1.0, ..base })
}

/// The window of layers that have one.
pub(super) fn window(fields: &Fields) -> Result<u32, ModelError> {
    Ok(count(fields, "sliding_window", u32::MAX)?.unwrap_or(4096))
}

/// Layer `i` of Gemma 2 and 3: norms before and after each block.
pub(super) fn layer(base: &Base, i: usize, window: Option<u32>) -> LayerSpec {
    let of = |name: &str| format!("model.layers.{i}.{name}.weight");
    let mut layer = base.layer(i);
    layer.attention.window = window;
    layer.attention_out_norm = Some(base.norm(of("post_attention_layernorm")));
    layer.mlp_norm = Some(base.norm(of("pre_feedforward_layernorm")));
    layer.mlp_out_norm = Some(base.norm(of("post_feedforward_layernorm")));
    layer
}

/// Gemma 2 and 3 with these layers: embeddings tied by default and scaled, and a scale of attention of their own.
pub(super) fn model(
    fields: &Fields,
    base: &Base,
    ropes: Vec<RopeSpec>,
    layers: Vec<LayerSpec>,
) -> Result<ModelSpec, ModelError> {
    let mut model = base.model(fields, ropes, layers)?;
    if fields.get("tie_word_embeddings").is_none() {
        model.head = None;
    }
    let scalar = fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    model.attention_scale = narrow(1.0 / scalar.sqrt());
    model.embedding.scale = Some(narrow((base.hidden as f64).sqrt()));
    Ok(model)
}

/// The tables of layers that see everything, and of those with a window.
fn ropes(fields: &Fields, rotated: usize) -> Result<Vec<RopeSpec>, ModelError> {
    if let Some(parameters) = fields.object("rope_parameters")? {
        fields.ignore(&["rope_theta", "rope_local_base_freq"]);
        let of = |name| parameters.object(name)?.ok_or_else(|| parameters.missing(name));
        let (global, local) = (of("full_attention")?, of("sliding_attention")?);
        return [(global, 1e6), (local, 1e4)].iter().map(|(of, theta)| RopeSpec::inner(of, rotated, *theta)).collect();
    }
    let global = RopeSpec::with_default(fields, rotated, 1e6)?;
    let theta = fields.positive("rope_local_base_freq")?.unwrap_or(1e4);
    Ok(vec![global, RopeSpec::plain(theta, rotated)])
}
