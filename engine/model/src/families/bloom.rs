//! BLOOM (Le Scao et al. 2022): layer norms (of the embedding too) and projections with biases, attention with linear biases,
//! GELU by tanh. The projection is stored `[head][q | k | v]`.

use super::Family;
use super::common::{Base, check_pieces, count, divided, dtype, eps, refuse_quantised, refuse_unless, size};
use super::gguf::{Config, Gguf, Layout};
use super::gpt_neox::{layer, norm};
use crate::fields::{Fields, narrow};
use crate::spec::{Embedding, Names, Part};
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_backend::Activation;
use lagoon_types::limits::{HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, LAYERS_MAX, SEQUENCE_TOKENS_MAX, VOCAB_MAX};
use lagoon_types::{Alibi, AttentionGeometry};

pub(super) const FAMILY: Family = Family {
    model_type: "bloom",
    architectures: &["BloomForCausalLM"],
    models: "BLOOM, BLOOMZ",
    goldens: &["bloom"],
    gguf: Some(Gguf { refine: refine_gguf, ..Gguf::of("bloom", &[GGUF_FIELDS], &[GGUF_TENSORS]) }),
    read,
};

const GGUF_FIELDS: &[(&str, &str)] = &[
    ("context_length", "seq_length"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
];
const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("transformer.word_embeddings.weight", "token_embd.weight", Layout::Same),
    ("transformer.word_embeddings_layernorm.weight", "token_embd_norm.weight", Layout::Same),
    ("transformer.word_embeddings_layernorm.bias", "token_embd_norm.bias", Layout::Same),
    ("transformer.ln_f.weight", "output_norm.weight", Layout::Same),
    ("transformer.ln_f.bias", "output_norm.bias", Layout::Same),
    ("lm_head.weight", "output.weight", Layout::Same),
    ("transformer.h.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", Layout::Same),
    ("transformer.h.{}.input_layernorm.bias", "blk.{}.attn_norm.bias", Layout::Same),
    ("transformer.h.{}.self_attention.query_key_value.weight", "blk.{}.attn_qkv.weight", Layout::ByKind),
    ("transformer.h.{}.self_attention.query_key_value.bias", "blk.{}.attn_qkv.bias", Layout::ByKind),
    ("transformer.h.{}.self_attention.dense.weight", "blk.{}.attn_output.weight", Layout::Same),
    ("transformer.h.{}.self_attention.dense.bias", "blk.{}.attn_output.bias", Layout::Same),
    ("transformer.h.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", Layout::Same),
    ("transformer.h.{}.post_attention_layernorm.bias", "blk.{}.ffn_norm.bias", Layout::Same),
    ("transformer.h.{}.mlp.dense_h_to_4h.weight", "blk.{}.ffn_up.weight", Layout::Same),
    ("transformer.h.{}.mlp.dense_h_to_4h.bias", "blk.{}.ffn_up.bias", Layout::Same),
    ("transformer.h.{}.mlp.dense_4h_to_h.weight", "blk.{}.ffn_down.weight", Layout::Same),
    ("transformer.h.{}.mlp.dense_4h_to_h.bias", "blk.{}.ffn_down.bias", Layout::Same),
];

/// Keys that follow from others.
fn refine_gguf(config: &mut Config<'_>) -> Result<(), ModelError> {
    config.expect("attention.head_count_kv", config.field("num_attention_heads"))?;
    config.expect("feed_forward_length", config.field("hidden_size").map(|hidden| hidden.saturating_mul(4)))
}

/// Tokens that the models were trained on; biases by distance go on from there, but files name no limit.
const POSITIONS_DEFAULT: u32 = 2048;
/// All of BLOOM's slopes are those of MPT's default.
const BIAS_MAX: f32 = 8.0;

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_quantised(fields)?;
    let hint = "only false is implemented";
    refuse_unless(fields, "apply_residual_connection_post_layernorm", false, hint)?;
    fields.ignore(&[
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "n_embed",
        "n_head",
        "n_inner",
        "n_layer",
        "offset_alibi",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "slow_but_exact",
    ]);
    let either = |a, b| if fields.get(a).is_some() { a } else { b };
    let (width_field, heads_field) = (either("hidden_size", "n_embed"), either("num_attention_heads", "n_head"));
    let hidden = size(fields, width_field, HIDDEN_MAX.min(INTERMEDIATE_MAX / 4))?;
    let heads = count(fields, heads_field, HEADS_MAX)?.ok_or_else(|| fields.missing(heads_field))?;
    let head_dim = divided(fields, width_field, hidden, heads as usize)?;
    if !head_dim.is_multiple_of(2) {
        return Err(fields.invalid(width_field, "heads must have an even size"));
    }
    let base = Base {
        family: FAMILY.model_type,
        hidden,
        intermediate: 4 * hidden,
        layers: size(fields, either("num_hidden_layers", "n_layer"), LAYERS_MAX)?,
        geometry: AttentionGeometry { heads, kv_heads: heads, head_dim, latent: false },
        vocab: size(fields, "vocab_size", VOCAB_MAX)?,
        eps: eps(fields, "layer_norm_epsilon")?.unwrap_or(1e-5),
        rotated: head_dim as usize,
        norm_offset: 0.0,
        activation: Activation::GeluTanh,
    };
    check_pieces(fields, heads_field, base.layers, heads as usize)?;
    let tied = fields.flag("tie_word_embeddings")?.unwrap_or(true);
    Ok(ModelSpec {
        split: None,
        family: base.family,
        hidden,
        vocab: base.vocab,
        geometry: base.geometry,
        attention_scale: narrow(1.0 / f64::from(head_dim).sqrt()),
        attention_softcap: None,
        logits_softcap: None,
        alibi: Some(Alibi { bias_max: BIAS_MAX }),
        ropes: vec![RopeSpec::NONE],
        embedding: Embedding {
            table: Part::matrix("transformer.word_embeddings.weight", base.vocab, hidden),
            scale: None,
            positions: None,
            norm: Some(norm(&base, "transformer.word_embeddings_layernorm")),
        },
        layers: (0..base.layers)
            .map(|i| layer(&base, &format!("transformer.h.{i}"), "self_attention", false))
            .collect(),
        final_norm: norm(&base, "transformer.ln_f"),
        head: (!tied).then(|| Part::matrix("lm_head.weight", base.vocab, hidden)),
        max_positions: count(fields, "seq_length", SEQUENCE_TOKENS_MAX)?.unwrap_or(POSITIONS_DEFAULT),
        dtype: dtype(fields)?,
        bos_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_ids: fields.token_ids("eos_token_id")?,
        names: Names { optional_prefix: "transformer.", redundant: &["lm_head.weight"], layers_beyond: ("", 0) },
    })
}
