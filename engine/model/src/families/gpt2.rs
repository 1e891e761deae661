//! GPT-2 (Radford et al. 2019): layer norms and projections with biases, learned positions, GELU by tanh. Projections are
//! stored `[in][out]`.

use super::Family;
use super::common::{count, divided, dtype, eps, max_positions, plain_gelu, refuse_quantised, refuse_unless, size};
use super::gguf::{Gguf, Layout};
use crate::fields::{Fields, narrow};
use crate::spec::{AttentionSpec, Dense, Embedding, LayerSpec, Mlp, Names, Norm, NormSpec, Part};
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_backend::Activation;
use lagoon_types::AttentionGeometry;
use lagoon_types::limits::{HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, LAYERS_MAX, VOCAB_MAX};

pub(super) const FAMILY: Family = Family {
    model_type: "gpt2",
    architectures: &["GPT2LMHeadModel"],
    models: "GPT-2, DistilGPT-2, Cerebras-GPT",
    goldens: &["gpt2"],
    gguf: Some(Gguf::of("gpt2", &[GGUF_FIELDS], &[GGUF_TENSORS])),
    read,
};

const GGUF_FIELDS: &[(&str, &str)] = &[
    ("context_length", "n_positions"),
    ("embedding_length", "n_embd"),
    ("block_count", "n_layer"),
    ("feed_forward_length", "n_inner"),
    ("attention.head_count", "n_head"),
    ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
];
/// GGUF files store projections `[out][in]`.
const GGUF_TENSORS: &[(&str, &str, Layout)] = &[
    ("transformer.wte.weight", "token_embd.weight", Layout::Same),
    ("transformer.wpe.weight", "position_embd.weight", Layout::Same),
    ("transformer.ln_f.weight", "output_norm.weight", Layout::Same),
    ("transformer.ln_f.bias", "output_norm.bias", Layout::Same),
    ("lm_head.weight", "output.weight", Layout::Same),
    ("transformer.h.{}.ln_1.weight", "blk.{}.attn_norm.weight", Layout::Same),
    ("transformer.h.{}.ln_1.bias", "blk.{}.attn_norm.bias", Layout::Same),
    ("transformer.h.{}.attn.c_attn.weight", "blk.{}.attn_qkv.weight", Layout::Turned),
    ("transformer.h.{}.attn.c_attn.bias", "blk.{}.attn_qkv.bias", Layout::Same),
    ("transformer.h.{}.attn.c_proj.weight", "blk.{}.attn_output.weight", Layout::Turned),
    ("transformer.h.{}.attn.c_proj.bias", "blk.{}.attn_output.bias", Layout::Same),
    ("transformer.h.{}.ln_2.weight", "blk.{}.ffn_norm.weight", Layout::Same),
    ("transformer.h.{}.ln_2.bias", "blk.{}.ffn_norm.bias", Layout::Same),
    ("transformer.h.{}.mlp.c_fc.weight", "blk.{}.ffn_up.weight", Layout::Turned),
    ("transformer.h.{}.mlp.c_fc.bias", "blk.{}.ffn_up.bias", Layout::Same),
    ("transformer.h.{}.mlp.c_proj.weight", "blk.{}.ffn_down.weight", Layout::Turned),
    ("transformer.h.{}.mlp.c_proj.bias", "blk.{}.ffn_down.bias", Layout::Same),
];

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_quantised(fields)?;
    let activation = plain_gelu(fields, "activation_function", Activation::GeluTanh)?;
    refuse_unless(fields, "scale_attn_weights", true, "only true is implemented")?;
    refuse_unless(fields, "scale_attn_by_inverse_layer_idx", false, "only false is implemented")?;
    fields.ignore(&[
        "n_ctx",
        "n_special",
        "output_past",
        "predict_special_tokens",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ]);
    let hidden = size(fields, "n_embd", HIDDEN_MAX)?;
    let heads = count(fields, "n_head", HEADS_MAX)?.ok_or_else(|| fields.missing("n_head"))?;
    let head_dim = divided(fields, "n_embd", hidden, heads as usize)?;
    if !head_dim.is_multiple_of(2) {
        return Err(fields.invalid("n_embd", "heads must have an even size"));
    }
    let width = count(fields, "n_inner", INTERMEDIATE_MAX)?.map_or(4 * hidden, |width| width as usize);
    let shape = Shape {
        hidden,
        width,
        activation,
        geometry: AttentionGeometry { heads, kv_heads: heads, head_dim, latent: false },
        eps: eps(fields, "layer_norm_epsilon")?.unwrap_or(1e-5),
    };
    let (vocab, layers) = (size(fields, "vocab_size", VOCAB_MAX)?, size(fields, "n_layer", LAYERS_MAX)?);
    let max_positions = max_positions(fields, "n_positions")?;
    let tied = fields.flag("tie_word_embeddings")?.unwrap_or(true);
    Ok(ModelSpec {
        split: None,
        family: FAMILY.model_type,
        hidden,
        vocab,
        geometry: shape.geometry,
        attention_scale: narrow(1.0 / f64::from(head_dim).sqrt()),
        attention_softcap: None,
        logits_softcap: None,
        alibi: None,
        ropes: vec![RopeSpec::NONE],
        embedding: Embedding {
            table: Part::matrix("transformer.wte.weight", vocab, hidden),
            scale: None,
            positions: Some(Part::matrix("transformer.wpe.weight", max_positions as usize, hidden)),
            norm: None,
        },
        layers: (0..layers).map(|i| shape.layer(i)).collect(),
        final_norm: shape.norm("transformer.ln_f"),
        head: (!tied).then(|| Part::matrix("lm_head.weight", vocab, hidden)),
        max_positions,
        dtype: dtype(fields)?,
        bos_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_ids: fields.token_ids("eos_token_id")?,
        names: Names {
            optional_prefix: "transformer.",
            redundant: &["attn.bias", "attn.masked_bias", "lm_head.weight"],
            layers_beyond: ("", 0),
        },
    })
}

#[derive(Clone, Copy)]
struct Shape {
    hidden: usize,
    width: usize,
    activation: Activation,
    geometry: AttentionGeometry,
    eps: f32,
}

impl Shape {
    fn norm(&self, name: &str) -> NormSpec {
        let vector = |end: &str| Part::vector(format!("{name}.{end}"), self.hidden);
        NormSpec { kind: Norm::Layer, eps: self.eps, weight: vector("weight"), bias: Some(vector("bias")), offset: 0.0 }
    }

    fn layer(&self, i: usize) -> LayerSpec {
        let &Self { hidden, width, geometry, .. } = self;
        let of = |name: &str| format!("transformer.h.{i}.{name}");
        let matrix = |name: &str, rows, cols| Part::transposed(of(&format!("{name}.weight")), rows, cols);
        let bias = |name: &str, len| Part::vector(of(&format!("{name}.bias")), len);
        LayerSpec {
            attention_norm: Some(self.norm(&of("ln_1"))),
            attention: AttentionSpec {
                qkv: vec![matrix("attn.c_attn", geometry.qkv_dim(), hidden)],
                qkv_bias: vec![bias("attn.c_attn", geometry.qkv_dim())],
                head_norms: None,
                latent: None,
                out: matrix("attn.c_proj", hidden, geometry.q_dim()),
                out_bias: Some(bias("attn.c_proj", hidden)),
                rope: 0,
                window: None,
                sinks: None,
            },
            attention_out_norm: None,
            mlp_norm: Some(self.norm(&of("ln_2"))),
            mlp: Mlp::Dense(Box::new(Dense {
                activation: self.activation,
                width,
                up: vec![matrix("mlp.c_fc", width, hidden)],
                up_bias: vec![bias("mlp.c_fc", width)],
                down: matrix("mlp.c_proj", hidden, width),
                down_bias: Some(bias("mlp.c_proj", hidden)),
            })),
            mlp_out_norm: None,
            parallel: false,
        }
    }
}
