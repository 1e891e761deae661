//! MPT's `config.json`, with the names and defaults of transformers' `MptConfig` and of MosaicML's code.
//!
//! A field that transformers reads but ignores is refused if it would change the result. One exception:
//! `alibi_bias_max` is honoured, as in MosaicML's code; transformers (up to 5.23 at least) always computes with 8.

use super::Family;
use super::common::{count, dtype, eps, max_positions, refuse_quantised, refuse_unless, size};
use super::gguf::{Config, Gguf, Layout};
use crate::fields::{Fields, narrow};
use crate::spec::{AttentionSpec, Dense, Embedding, LayerSpec, Mlp, Names, Norm, NormSpec, Part};
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_backend::Activation;
use lagoon_types::limits::{HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, LAYERS_MAX, VOCAB_MAX};
use lagoon_types::{Alibi, AttentionGeometry};
use serde_json::Value;

/// The feed-forward layer's width, as a multiple of the model's.
const EXPANSION: usize = 4;
/// The default of both implementations.
const BIAS_MAX_DEFAULT: f64 = 8.0;
/// The default of both implementations; files on the hub lack the field.
const NORM_EPS_DEFAULT: f32 = 1e-5;

pub(super) const FAMILY: Family = Family {
    model_type: "mpt",
    architectures: &["MptForCausalLM", "MPTForCausalLM"],
    models: "MPT 7B and 30B",
    goldens: &["mpt", "mpt_f16"],
    gguf: Some(Gguf { refine: refine_gguf, ..Gguf::of("mpt", &[GGUF_FIELDS], &[GGUF_TENSORS]) }),
    read,
};

const GGUF_FIELDS: &[(&str, &str)] = &[
    ("context_length", "max_seq_len"),
    ("embedding_length", "d_model"),
    ("block_count", "n_layers"),
    ("attention.head_count", "n_heads"),
    ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
];
const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("transformer.wte.weight", "token_embd.weight", Layout::Same),
    ("transformer.norm_f.weight", "output_norm.weight", Layout::Same),
    ("lm_head.weight", "output.weight", Layout::Same),
    ("transformer.blocks.{}.norm_1.weight", "blk.{}.attn_norm.weight", Layout::Same),
    ("transformer.blocks.{}.attn.Wqkv.weight", "blk.{}.attn_qkv.weight", Layout::Same),
    ("transformer.blocks.{}.attn.out_proj.weight", "blk.{}.attn_output.weight", Layout::Same),
    ("transformer.blocks.{}.norm_2.weight", "blk.{}.ffn_norm.weight", Layout::Same),
    ("transformer.blocks.{}.ffn.up_proj.weight", "blk.{}.ffn_up.weight", Layout::Same),
    ("transformer.blocks.{}.ffn.down_proj.weight", "blk.{}.ffn_down.weight", Layout::Same),
];

/// Keys of attention, which config.json has in an object of their own, and keys that follow from others.
fn refine_gguf(config: &mut Config<'_>) -> Result<(), ModelError> {
    let (heads, hidden) = (config.field("n_heads"), config.field("d_model"));
    config.expect("attention.head_count_kv", heads)?;
    config.expect("feed_forward_length", hidden.map(|hidden| hidden.saturating_mul(EXPANSION as u64)))?;
    let (bias, clip) = ("attention.max_alibi_bias", "attention.clamp_kqv");
    match config.float(bias)? {
        Some(0.0) => return Err(config.unsupported(bias, "learned positions are not implemented")),
        Some(max) => config.set_inner("attn_config", "alibi_bias_max", max.into(), bias),
        None => {}
    }
    if let Some(limit) = config.float(clip)? {
        config.set_inner("attn_config", "clip_qkv", limit.into(), clip);
    }
    Ok(())
}

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_unsupported(fields)?;
    // Training, and positions that models with linear biases do not have.
    fields.ignore(&[
        "embedding_fraction",
        "fc_type",
        "init_config",
        "init_device",
        "learned_pos_emb",
        "tokenizer_name",
        "verbose",
    ]);
    let attention = fields.object("attn_config")?;
    let hidden = size(fields, "d_model", HIDDEN_MAX)?;
    if EXPANSION * hidden > INTERMEDIATE_MAX as usize {
        return Err(
            fields.invalid("d_model", &format!("the feed-forward layer would be wider than {INTERMEDIATE_MAX}"))
        );
    }
    let geometry = geometry(fields, hidden)?;
    let bias_max = match &attention {
        None => None,
        Some(attention) => {
            refuse_unsupported_attention(attention, geometry.heads)?;
            attention.positive("alibi_bias_max")?
        }
    };
    let eps = eps(fields, "layer_norm_epsilon")?.unwrap_or(NORM_EPS_DEFAULT);
    let vocab = size(fields, "vocab_size", VOCAB_MAX)?;
    let norm = |tensor: String| NormSpec {
        kind: Norm::Layer,
        eps,
        weight: Part::vector(tensor, hidden),
        bias: None,
        offset: 0.0,
    };
    let tied = fields.flag("tie_word_embeddings")?.unwrap_or(true);
    let layers = size(fields, "n_layers", LAYERS_MAX)?;
    Ok(ModelSpec {
        split: None,
        family: FAMILY.model_type,
        hidden,
        vocab,
        geometry,
        attention_scale: narrow(1.0 / f64::from(geometry.head_dim).sqrt()),
        attention_softcap: None,
        logits_softcap: None,
        alibi: Some(Alibi { bias_max: narrow(bias_max.unwrap_or(BIAS_MAX_DEFAULT)) }),
        ropes: vec![RopeSpec::NONE],
        embedding: Embedding {
            table: Part::matrix("transformer.wte.weight", vocab, hidden),
            scale: None,
            positions: None,
            norm: None,
        },
        layers: (0..layers).map(|i| layer(i, hidden, geometry, norm)).collect(),
        final_norm: norm("transformer.norm_f.weight".to_owned()),
        head: (!tied).then(|| Part::matrix("lm_head.weight", vocab, hidden)),
        max_positions: max_positions(fields, "max_seq_len")?,
        dtype: dtype(fields)?,
        bos_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_ids: fields.token_ids("eos_token_id")?,
        names: Names { optional_prefix: "", redundant: &["lm_head.weight"], layers_beyond: ("", 0) },
    })
}

fn layer(i: usize, hidden: usize, geometry: AttentionGeometry, norm: impl Fn(String) -> NormSpec) -> LayerSpec {
    let of = |name: &str| format!("transformer.blocks.{i}.{name}.weight");
    LayerSpec {
        attention_norm: Some(norm(of("norm_1"))),
        attention: AttentionSpec {
            qkv: vec![Part::matrix(of("attn.Wqkv"), geometry.qkv_dim(), hidden)],
            qkv_bias: Vec::new(),
            head_norms: None,
            latent: None,
            out: Part::matrix(of("attn.out_proj"), hidden, geometry.q_dim()),
            out_bias: None,
            rope: 0,
            window: None,
            sinks: None,
        },
        attention_out_norm: None,
        mlp_norm: Some(norm(of("norm_2"))),
        mlp: Mlp::Dense(Box::new(Dense {
            activation: Activation::Gelu,
            width: EXPANSION * hidden,
            up: vec![Part::matrix(of("ffn.up_proj"), EXPANSION * hidden, hidden)],
            up_bias: Vec::new(),
            down: Part::matrix(of("ffn.down_proj"), hidden, EXPANSION * hidden),
            down_bias: None,
        })),
        mlp_out_norm: None,
        parallel: false,
    }
}

fn geometry(fields: &Fields, hidden: usize) -> Result<AttentionGeometry, ModelError> {
    let heads = count(fields, "n_heads", HEADS_MAX)?.ok_or_else(|| fields.missing("n_heads"))?;
    let head_dim = hidden / heads as usize;
    if !hidden.is_multiple_of(heads as usize) || head_dim > HEAD_DIM_MAX as usize || !head_dim.is_multiple_of(2) {
        let problem = format!("{heads} heads do not divide it into heads of an even size up to {HEAD_DIM_MAX}");
        return Err(fields.invalid("d_model", &problem));
    }
    let head_dim = u32::try_from(head_dim).expect("it is within HEAD_DIM_MAX");
    Ok(AttentionGeometry { heads, kv_heads: heads, head_dim, latent: false })
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ModelError> {
    refuse_quantised(fields)?;
    refuse_unless(fields, "no_bias", true, "projections and norms with biases are not implemented")?;
    refuse_unless(
        fields,
        "expansion_ratio",
        EXPANSION,
        "only 4 is implemented, which is what transformers computes with",
    )?;
    refuse_unless(fields, "logit_scale", Value::Null, "only null is implemented")?;
    match fields.text("norm_type")? {
        None | Some("layernorm" | "low_precision_layernorm") => Ok(()),
        Some(_) => Err(fields.unsupported("norm_type", "layer norm is what Lagoon implements for MPT")),
    }
}

fn refuse_unsupported_attention(attention: &Fields, heads: u32) -> Result<(), ModelError> {
    // Saved as a configuration of its own, by transformers 5.
    refuse_unless(attention, "is_encoder_decoder", false, "only decoders are implemented")?;
    attention.ignore(&["attn_impl", "rope_dail_config", "rope_hf_config", "rope_impl", "rope_theta"]);
    refuse_unless(attention, "alibi", true, "learned positions are not implemented")?;
    refuse_unless(attention, "attn_type", "multihead_attention", "only multi-head attention is implemented")?;
    refuse_unless(attention, "kv_n_heads", heads, "as many as n_heads is what transformers computes with")?;
    refuse_unless(attention, "softmax_scale", Value::Null, "only null, 1 / sqrt(head size), is implemented")?;
    refuse_unless(attention, "clip_qkv", 0, "clipped projections are not implemented")?;
    refuse_unless(attention, "sliding_window_size", -1, "windows are not implemented for MPT")?;
    for field in ["qk_ln", "qk_gn", "prefix_lm", "attn_uses_sequence_id", "rope"] {
        refuse_unless(attention, field, false, "only false is implemented")?;
    }
    Ok(())
}
