//! Latent attention with DeepSeek's tensors (DeepSeek-V2 §2.1).

use super::common::{self, Base, check_pieces, eps, size};
use super::gguf::{self, Config, Layout};
use super::routed::{RoutedExperts, layers_beyond};
use crate::fields::{Fields, narrow};
use crate::spec::{AttentionSpec, LatentSpec, LowRank, Norm, NormSpec, Part};
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_backend::Activation;
use lagoon_types::AttentionGeometry;
use lagoon_types::limits::{HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, LAYERS_MAX, VOCAB_MAX};

/// The epsilon of norms of latents: that of transformers' module, which ignores `rms_norm_eps` there.
const EPS: f32 = 1e-6;

pub(super) const GGUF_FIELDS: &[(&str, &str)] = &[
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.kv_lora_rank", "kv_lora_rank"),
    ("rope.freq_base", "rope_theta"),
    ("rope.dimension_count", "qk_rope_head_dim"),
];
pub(super) const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("model.embed_tokens.weight", "token_embd.weight", Layout::Same),
    ("model.norm.weight", "output_norm.weight", Layout::Same),
    ("lm_head.weight", "output.weight", Layout::Same),
    ("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", Layout::Same),
    ("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", Layout::Same),
    ("model.layers.{}.self_attn.q_a_proj.weight", "blk.{}.attn_q_a.weight", Layout::Same),
    ("model.layers.{}.self_attn.q_a_layernorm.weight", "blk.{}.attn_q_a_norm.weight", Layout::Same),
    ("model.layers.{}.self_attn.q_b_proj.weight", "blk.{}.attn_q_b.weight", Layout::Same),
    ("model.layers.{}.self_attn.kv_a_proj_with_mqa.weight", "blk.{}.attn_kv_a_mqa.weight", Layout::Same),
    ("model.layers.{}.self_attn.kv_a_layernorm.weight", "blk.{}.attn_kv_a_norm.weight", Layout::Same),
    ("model.layers.{}.self_attn.kv_b_proj.weight", "blk.{}.attn_kv_b.weight", Layout::KeysApart),
    ("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", Layout::Same),
    ("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", Layout::Same),
    ("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", Layout::Same),
    ("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", Layout::Same),
];
/// The logarithm's factor in a GGUF file: a tenth of `mscale_all_dim`.
const LOG_FACTOR: &str = "rope.scaling.yarn_log_multiplier";

/// Sizes of heads, and the scaling of frequencies. Newer files have the sizes of the latent under the plain keys, and those of
/// heads under keys of their own.
pub(super) fn gguf_heads(config: &mut Config<'_>) -> Result<(), ModelError> {
    let rotated = config.field("qk_rope_head_dim").unwrap_or(0);
    for (field, apart, plain, minus) in [
        ("qk_nope_head_dim", "attention.key_length_mla", "attention.key_length", rotated),
        ("v_head_dim", "attention.value_length_mla", "attention.value_length", 0),
    ] {
        let (whole, of_latent) = (config.number(apart)?, config.number(plain)?);
        let (len, name) = whole.map_or((of_latent, plain), |len| (Some(len), apart));
        if let Some(len) = len {
            config.set(field, len.saturating_sub(minus).into(), name);
        }
    }
    // The number of heads, or the one of latents; keys of latent attention are those of all heads.
    let heads = config.field("num_attention_heads");
    if config.number("attention.head_count_kv")? != Some(1) {
        config.expect("attention.head_count_kv", heads)?;
    }
    config.set_absent("q_lora_rank", serde_json::Value::Null, "attention.q_lora_rank");
    let (scaling, factor) = (gguf::scaling(config, rotated)?, config.float(LOG_FACTOR)?);
    let Some(mut scaling) = scaling else { return Ok(()) };
    if let Some(factor) = factor {
        scaling["mscale"] = (10.0 * factor).into();
        scaling["mscale_all_dim"] = (10.0 * factor).into();
    }
    config.set("rope_scaling", scaling, "rope.scaling.type");
    Ok(())
}

/// A model's latent attention.
#[derive(Clone, Debug)]
pub(super) struct Latent {
    heads: usize,
    hidden: usize,
    /// Of queries; `None` if they have full rank.
    rank: Option<usize>,
    latent: usize,
    rotated: usize,
    key: usize,
    value: usize,
    biased: bool,
    /// Whether files have the elements that are rotated together side by side.
    interleaved: bool,
}

impl Latent {
    /// Reads the sizes of a model and of its attention; `rank` is that of queries where the field is absent.
    pub(super) fn read(
        fields: &Fields,
        family: &'static str,
        rank: usize,
        interleaved: bool,
    ) -> Result<(Base, Self), ModelError> {
        common::check_quantised(fields)?;
        // Sizes of heads that follow from others.
        fields.ignore(&["head_dim", "qk_head_dim"]);
        let hidden = size(fields, "hidden_size", HIDDEN_MAX)?;
        let layers = size(fields, "num_hidden_layers", LAYERS_MAX)?;
        let heads = size(fields, "num_attention_heads", HEADS_MAX)?;
        common::refuse_unless(fields, "num_key_value_heads", heads, "latent attention has keys for each head")?;
        check_pieces(fields, "num_attention_heads", layers, heads)?;
        let rank = match common::count(fields, "q_lora_rank", HIDDEN_MAX)? {
            Some(rank) => Some(rank as usize),
            None => Some(rank).filter(|_| !fields.contains("q_lora_rank")),
        };
        let [latent, rotated, key, value] = ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"]
            .map(|f| size(fields, f, HEAD_DIM_MAX));
        let (latent, rotated, key, value) = (latent?, rotated?, key?, value?);
        if !rotated.is_multiple_of(2) {
            return Err(fields.invalid("qk_rope_head_dim", "dimensions are rotated in pairs"));
        }
        if !latent.is_multiple_of(2) || latent + rotated > 2 * HEAD_DIM_MAX as usize {
            let problem =
                format!("with {rotated} rotated elements it must make an even row of at most {}", 2 * HEAD_DIM_MAX);
            return Err(fields.invalid("kv_lora_rank", &problem));
        }
        let number = |n: usize| u32::try_from(n).expect("it is within a limit");
        let geometry = AttentionGeometry {
            heads: number(heads),
            kv_heads: 1,
            head_dim: number((latent + rotated) / 2),
            latent: true,
        };
        let base = Base {
            family,
            hidden,
            intermediate: size(fields, "intermediate_size", INTERMEDIATE_MAX)?,
            layers,
            geometry,
            vocab: size(fields, "vocab_size", VOCAB_MAX)?,
            eps: eps(fields, "rms_norm_eps")?.ok_or_else(|| fields.missing("rms_norm_eps"))?,
            rotated: geometry.head_dim as usize,
            norm_offset: 0.0,
            activation: Activation::SiluMul,
        };
        let biased = fields.flag("attention_bias")?.unwrap_or(false);
        Ok((base, Self { heads, hidden, rank, latent, rotated, key, value, biased, interleaved }))
    }

    /// The table, and the factor on scores: YaRN's grows with the context (`mscale_all_dim`).
    fn rope(&self, fields: &Fields) -> Result<(RopeSpec, f32), ModelError> {
        let rope = RopeSpec::read(fields, self.rotated)?;
        let mut scale = 1.0 / ((self.key + self.rotated) as f64).sqrt();
        for spelling in ["rope_parameters", "rope_scaling"] {
            let Some(object) = fields.object(spelling)? else { continue };
            // The table above has checked both.
            let number = |name| object.get(name).and_then(serde_json::Value::as_f64);
            if let (Some(share), Some(factor)) =
                (number("mscale_all_dim"), number("factor").filter(|factor| *factor > 1.0))
            {
                scale *= (0.1 * share * factor.ln() + 1.0).powi(2);
                break;
            }
        }
        Ok((rope, narrow(scale)))
    }

    /// The attention of layer `i`.
    fn attention(&self, i: usize) -> AttentionSpec {
        let of = |name: &str| format!("model.layers.{i}.self_attn.{name}");
        let &Self { heads, hidden, rank, latent, rotated, key, value, .. } = self;
        let norm = |name: &str, len| NormSpec {
            kind: Norm::Rms,
            eps: EPS,
            weight: Part::vector(of(name), len),
            bias: None,
            offset: 0.0,
        };
        let bias = |name: &str, len| self.biased.then(|| Part::vector(of(name), len));
        let low_rank = rank.map(|rank| LowRank {
            down: Part::matrix(of("q_a_proj.weight"), rank, hidden),
            bias: bias("q_a_proj.bias", rank),
            norm: norm("q_a_layernorm.weight", rank),
        });
        let query = key + rotated;
        let queries = match rank {
            Some(rank) => Part::matrix(of("q_b_proj.weight"), heads * query, rank),
            None => Part::matrix(of("q_proj.weight"), heads * query, hidden),
        };
        let down = Part::matrix(of("kv_a_proj_with_mqa.weight"), latent + rotated, hidden);
        let down_bias = bias("kv_a_proj_with_mqa.bias", latent + rotated);
        let up = Part::matrix(of("kv_b_proj.weight"), heads * (key + value), latent);
        let absorbed = |head: usize| Part {
            rows: latent,
            cols: key,
            offset: head * (key + value) * latent,
            row_stride: 1,
            col_stride: latent,
            ..up.clone()
        };
        let in_order = |head: usize| {
            let mut parts = vec![queries.rows(head * query, key, 1)];
            parts.extend(self.pairs(head * query + key).map(|(first, step)| queries.rows(first, rotated / 2, step)));
            parts
        };
        AttentionSpec {
            qkv: Vec::new(),
            qkv_bias: Vec::new(),
            head_norms: None,
            latent: Some(Box::new(LatentSpec {
                latent_dim: latent,
                rotated,
                key_dim: key,
                value_dim: value,
                low_rank,
                queries: (0..heads).flat_map(in_order).collect(),
                latent: down.rows(0, latent, 1),
                latent_bias: down_bias.as_ref().map(|bias| bias.elements(0, latent, 1)),
                norm: norm("kv_a_layernorm.weight", latent),
                key: self.pairs(latent).map(|(first, step)| down.rows(first, rotated / 2, step)).to_vec(),
                key_bias: down_bias.map_or(Vec::new(), |bias| {
                    self.pairs(latent).map(|(first, step)| bias.elements(first, rotated / 2, step)).to_vec()
                }),
                absorb: (0..heads).map(absorbed).collect(),
                values: (0..heads).map(|head| up.rows(head * (key + value) + key, value, 1)).collect(),
            })),
            out: Part::matrix(of("o_proj.weight"), hidden, heads * value),
            out_bias: bias("o_proj.bias", hidden),
            rope: 0,
            window: None,
            sinks: None,
        }
    }

    /// The halves of the rotated elements from `first` on, as devices pair them: where each begins, and its step.
    fn pairs(&self, first: usize) -> [(usize, usize); 2] {
        if self.interleaved { [(first, 2), (first + 1, 2)] } else { [(first, 1), (first + self.rotated / 2, 1)] }
    }

    /// The model whose layers have this attention, and these experts.
    pub(super) fn model(&self, fields: &Fields, base: &Base, experts: &RoutedExperts) -> Result<ModelSpec, ModelError> {
        let layer = |i: usize| {
            let mut layer = base.layer(i);
            layer.attention = self.attention(i);
            if let Some(mlp) = experts.mlp(base, i) {
                layer.mlp = mlp;
            }
            layer
        };
        let (rope, scale) = self.rope(fields)?;
        let mut model = base.model(fields, vec![rope], (0..base.layers).map(layer).collect())?;
        model.attention_scale = scale;
        model.names.layers_beyond = layers_beyond(fields)?;
        Ok(model)
    }
}
