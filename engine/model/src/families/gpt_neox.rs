//! GPT-NeoX (Black et al. 2022): layer norms and projections with biases, partly rotated heads, and blocks that read the same
//! residual stream. The projection is stored `[head][q | k | v]`.

use super::Family;
use super::common::{
    Base, check_pieces, count, divided, dtype, eps, max_positions, plain_gelu, refuse_quantised, refuse_unless, size,
};
use super::gguf::{Config, Gguf, Layout};
use crate::fields::{Fields, narrow};
use crate::spec::{AttentionSpec, Dense, Embedding, LayerSpec, Mlp, Names, Norm, NormSpec, Part};
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_backend::Activation;
use lagoon_types::AttentionGeometry;
use lagoon_types::limits::{HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, LAYERS_MAX, VOCAB_MAX};

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_neox",
    architectures: &["GPTNeoXForCausalLM"],
    models: "GPT-NeoX-20B, Pythia",
    goldens: &["gpt_neox"],
    gguf: Some(Gguf { refine: refine_gguf, ..Gguf::of("gptneox", &[GGUF_FIELDS], &[GGUF_TENSORS]) }),
    read,
};

/// GPT-NeoX-20B's activation is GELU by tanh, that of other models is exact; no key says so.
const LAYERS_OF_20B: u64 = 44;
const GGUF_FIELDS: &[(&str, &str)] = &[
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("rope.freq_base", "rotary_emb_base"),
    ("use_parallel_residual", "use_parallel_residual"),
];
const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("gpt_neox.embed_in.weight", "token_embd.weight", Layout::Same),
    ("gpt_neox.final_layer_norm.weight", "output_norm.weight", Layout::Same),
    ("gpt_neox.final_layer_norm.bias", "output_norm.bias", Layout::Same),
    ("embed_out.weight", "output.weight", Layout::Same),
    ("gpt_neox.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", Layout::Same),
    ("gpt_neox.layers.{}.input_layernorm.bias", "blk.{}.attn_norm.bias", Layout::Same),
    ("gpt_neox.layers.{}.attention.query_key_value.weight", "blk.{}.attn_qkv.weight", Layout::ByKind),
    ("gpt_neox.layers.{}.attention.query_key_value.bias", "blk.{}.attn_qkv.bias", Layout::ByKind),
    ("gpt_neox.layers.{}.attention.dense.weight", "blk.{}.attn_output.weight", Layout::Same),
    ("gpt_neox.layers.{}.attention.dense.bias", "blk.{}.attn_output.bias", Layout::Same),
    ("gpt_neox.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", Layout::Same),
    ("gpt_neox.layers.{}.post_attention_layernorm.bias", "blk.{}.ffn_norm.bias", Layout::Same),
    ("gpt_neox.layers.{}.mlp.dense_h_to_4h.weight", "blk.{}.ffn_up.weight", Layout::Same),
    ("gpt_neox.layers.{}.mlp.dense_h_to_4h.bias", "blk.{}.ffn_up.bias", Layout::Same),
    ("gpt_neox.layers.{}.mlp.dense_4h_to_h.weight", "blk.{}.ffn_down.weight", Layout::Same),
    ("gpt_neox.layers.{}.mlp.dense_4h_to_h.bias", "blk.{}.ffn_down.bias", Layout::Same),
];

fn refine_gguf(config: &mut Config<'_>) -> Result<(), ModelError> {
    if config.field("num_hidden_layers") == Some(LAYERS_OF_20B) {
        config.set("hidden_act", "gelu_fast".into(), "block_count");
    }
    // Heads that are rotated as a whole; the family's default is a quarter.
    config.set_absent("partial_rotary_factor", 1.0, "rope.dimension_count");
    config.expect("attention.head_count_kv", config.field("num_attention_heads"))
}

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_quantised(fields)?;
    refuse_unless(fields, "attention_bias", true, "only true is implemented")?;
    let activation = plain_gelu(fields, "hidden_act", Activation::Gelu)?;
    let hidden = size(fields, "hidden_size", HIDDEN_MAX)?;
    let heads =
        count(fields, "num_attention_heads", HEADS_MAX)?.ok_or_else(|| fields.missing("num_attention_heads"))?;
    let head_dim = divided(fields, "hidden_size", hidden, heads as usize)?;
    if !head_dim.is_multiple_of(2) {
        return Err(fields.invalid("hidden_size", "heads must have an even size"));
    }
    let geometry = AttentionGeometry { heads, kv_heads: heads, head_dim, latent: false };
    let rotated = RopeSpec::rotated(fields, head_dim as usize, fields.positive("rotary_pct")?.unwrap_or(0.25))?;
    let base = Base {
        family: FAMILY.model_type,
        hidden,
        intermediate: size(fields, "intermediate_size", INTERMEDIATE_MAX)?,
        layers: size(fields, "num_hidden_layers", LAYERS_MAX)?,
        geometry,
        vocab: size(fields, "vocab_size", VOCAB_MAX)?,
        eps: eps(fields, "layer_norm_eps")?.ok_or_else(|| fields.missing("layer_norm_eps"))?,
        rotated,
        norm_offset: 0.0,
        activation,
    };
    check_pieces(fields, "num_attention_heads", base.layers, heads as usize)?;
    let theta = fields.positive("rotary_emb_base")?.unwrap_or(1e4);
    let parallel = fields.flag("use_parallel_residual")?.unwrap_or(true);
    let tied = fields.flag("tie_word_embeddings")?.unwrap_or(false);
    Ok(ModelSpec {
        split: None,
        family: base.family,
        hidden,
        vocab: base.vocab,
        geometry,
        attention_scale: narrow(1.0 / f64::from(head_dim).sqrt()),
        attention_softcap: None,
        logits_softcap: None,
        alibi: None,
        ropes: vec![RopeSpec::with_default(fields, rotated, theta)?],
        embedding: Embedding {
            table: Part::matrix("gpt_neox.embed_in.weight", base.vocab, hidden),
            scale: None,
            positions: None,
            norm: None,
        },
        layers: (0..base.layers)
            .map(|i| layer(&base, &format!("gpt_neox.layers.{i}"), "attention", parallel))
            .collect(),
        final_norm: norm(&base, "gpt_neox.final_layer_norm"),
        head: (!tied).then(|| Part::matrix("embed_out.weight", base.vocab, hidden)),
        max_positions: max_positions(fields, "max_position_embeddings")?,
        dtype: dtype(fields)?,
        bos_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_ids: fields.token_ids("eos_token_id")?,
        names: Names {
            optional_prefix: "",
            redundant: &["attention.bias", "attention.masked_bias", "rotary_emb.inv_freq", "embed_out.weight"],
            layers_beyond: ("", 0),
        },
    })
}

pub(super) fn norm(base: &Base, name: &str) -> NormSpec {
    let vector = |end: &str| Part::vector(format!("{name}.{end}"), base.hidden);
    NormSpec { kind: Norm::Layer, eps: base.eps, weight: vector("weight"), bias: Some(vector("bias")), offset: 0.0 }
}

/// The layer whose tensors begin with `prefix` and whose attention is called `attention`.
pub(super) fn layer(base: &Base, prefix: &str, attention: &str, parallel: bool) -> LayerSpec {
    let (hidden, width) = (base.hidden, base.intermediate);
    let of = |name: &str| format!("{prefix}.{name}");
    let matrix = |name: &str, rows, cols| Part::matrix(of(&format!("{name}.weight")), rows, cols);
    let bias = |name: &str, len| Part::vector(of(&format!("{name}.bias")), len);
    let (fused, out) = (format!("{attention}.query_key_value"), format!("{attention}.dense"));
    LayerSpec {
        attention_norm: Some(norm(base, &of("input_layernorm"))),
        attention: AttentionSpec {
            qkv: by_head(base, &matrix(&fused, 3 * hidden, hidden)),
            qkv_bias: by_head(base, &bias(&fused, 3 * hidden)),
            head_norms: None,
            latent: None,
            out: matrix(&out, hidden, hidden),
            out_bias: Some(bias(&out, hidden)),
            rope: 0,
            window: None,
            sinks: None,
        },
        attention_out_norm: None,
        mlp_norm: Some(norm(base, &of("post_attention_layernorm"))),
        mlp: Mlp::Dense(Box::new(Dense {
            activation: base.activation,
            width,
            up: vec![matrix("mlp.dense_h_to_4h", width, hidden)],
            up_bias: vec![bias("mlp.dense_h_to_4h", width)],
            down: matrix("mlp.dense_4h_to_h", hidden, width),
            down_bias: Some(bias("mlp.dense_4h_to_h", hidden)),
        })),
        mlp_out_norm: None,
        parallel,
    }
}

/// All queries, then all keys, then all values of a projection that is stored head by head.
fn by_head(base: &Base, fused: &Part) -> Vec<Part> {
    let dim = base.geometry.head_dim as usize;
    let take = |first: usize, len: usize| match fused.shape.len() {
        1 => fused.elements(first, len, 1),
        _ => fused.rows(first, len, 1),
    };
    let heads = base.geometry.heads as usize;
    let of_head = |head: usize, which: usize| take((3 * head + which) * dim, dim);
    let rotated = |head: usize, which: usize| base.rotated_first(&of_head(head, which));
    let queries = (0..heads).flat_map(|head| rotated(head, 0));
    let keys = (0..heads).flat_map(|head| rotated(head, 1));
    queries.chain(keys).chain((0..heads).map(|head| of_head(head, 2))).collect()
}
