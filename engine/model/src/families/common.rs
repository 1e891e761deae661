//! Common parts of families: sizes and their checks, and Llama's tensors, of which most other families are variations.

use crate::checkpoint::quantised::Quantisation;
use crate::fields::{Fields, narrow};
use crate::spec::{
    AttentionSpec, Dense, Embedding, HeadNorms, LayerSpec, MixtureSpec, Mlp, Names, Norm, NormSpec, Part,
};
use crate::{ModelError, ModelSpec, RopeScaling, RopeSpec};
use lagoon_backend::{Activation, GroupScore, Routing, Scoring};
use lagoon_types::limits::{
    EXPERTS_MAX, EXPERTS_PER_TOKEN_MAX, HEAD_DIM_MAX, HEADS_MAX, HIDDEN_MAX, INTERMEDIATE_MAX, LAYERS_MAX,
    SEQUENCE_TOKENS_MAX, VOCAB_MAX,
};
use lagoon_types::{AttentionGeometry, DType};
use serde_json::Value;

/// Most experts, or heads of which parts are rotated, of all layers together. Published models have some 25,000; each is a part of
/// its own in memory.
pub(super) const PIECES_MAX: usize = 1 << 17;

/// Refuses `each` experts or heads of `field` in each of `layers` layers if they are beyond [`PIECES_MAX`].
pub(super) fn check_pieces(fields: &Fields, field: &str, layers: usize, each: usize) -> Result<(), ModelError> {
    if layers * each <= PIECES_MAX {
        return Ok(());
    }
    Err(fields.invalid(field, &format!("with {layers} layers that makes more than {PIECES_MAX}")))
}

/// Redundant tensors of Llama's descendants: frequencies of early files, and a copy of a tied table.
pub(super) const LLAMA_NAMES: Names =
    Names { optional_prefix: "", redundant: &["rotary_emb.inv_freq", "lm_head.weight"], layers_beyond: ("", 0) };

/// Fields that the configurations of Llama's descendants have in common.
#[derive(Clone, Debug)]
pub(super) struct Base {
    pub(super) family: &'static str,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) layers: usize,
    pub(super) geometry: AttentionGeometry,
    pub(super) vocab: usize,
    pub(super) eps: f32,
    /// Rotated dimensions of a head.
    pub(super) rotated: usize,
    /// Added to the stored weights of norms.
    pub(super) norm_offset: f32,
    pub(super) activation: Activation,
}

impl Base {
    /// Reads the sizes; `kv_heads` and `head_dim` are the defaults of absent fields.
    pub(super) fn read(
        fields: &Fields,
        family: &'static str,
        kv_heads: Option<u32>,
        head_dim: Option<u32>,
    ) -> Result<Self, ModelError> {
        check_quantised(fields)?;
        refuse_unless(fields, "embedding_multiplier", 1, "only 1 is implemented")?;
        let hidden = size(fields, "hidden_size", HIDDEN_MAX)?;
        let geometry = geometry(fields, hidden, kv_heads, head_dim)?;
        Ok(Self {
            family,
            hidden,
            intermediate: size(fields, "intermediate_size", INTERMEDIATE_MAX)?,
            layers: size(fields, "num_hidden_layers", LAYERS_MAX)?,
            geometry,
            vocab: size(fields, "vocab_size", VOCAB_MAX)?,
            eps: eps(fields, "rms_norm_eps")?.ok_or_else(|| fields.missing("rms_norm_eps"))?,
            rotated: geometry.head_dim as usize,
            norm_offset: 0.0,
            activation: Activation::SiluMul,
        })
    }

    pub(super) fn norm(&self, tensor: String) -> NormSpec {
        let weight = Part::vector(tensor, self.hidden);
        NormSpec { kind: Norm::Rms, eps: self.eps, weight, bias: None, offset: self.norm_offset }
    }

    /// Norms of each of layer `i`'s heads, their elements in the order of rotation.
    pub(super) fn head_norms(&self, i: usize) -> HeadNorms {
        let dim = self.geometry.head_dim as usize;
        self.norms_of_heads(i, false, (dim, dim))
    }

    /// Norms of layer `i`'s queries and keys over all heads, their elements in the order of rotation.
    pub(super) fn norms_of_all_heads(&self, i: usize) -> HeadNorms {
        self.norms_of_heads(i, true, (self.geometry.q_dim(), self.geometry.kv_dim()))
    }

    fn norms_of_heads(&self, i: usize, all_heads: bool, (q_len, k_len): (usize, usize)) -> HeadNorms {
        let vector = |name: &str, len| {
            self.rotated_first(&Part::vector(format!("model.layers.{i}.self_attn.{name}.weight"), len))
        };
        let (q, k) = (vector("q_norm", q_len), vector("k_norm", k_len));
        HeadNorms { eps: self.eps, all_heads, q, k, offset: self.norm_offset }
    }

    /// Layer `i` with Llama's tensors.
    pub(super) fn layer(&self, i: usize) -> LayerSpec {
        let of = |name: &str| format!("model.layers.{i}.{name}");
        let (hidden, q_dim, kv_dim) = (self.hidden, self.geometry.q_dim(), self.geometry.kv_dim());
        let projection = |name: &str, rows| Part::matrix(of(&format!("self_attn.{name}.weight")), rows, hidden);
        let qkv = [projection("q_proj", q_dim), projection("k_proj", kv_dim), projection("v_proj", kv_dim)];
        LayerSpec {
            attention_norm: Some(self.norm(of("input_layernorm.weight"))),
            attention: AttentionSpec {
                qkv: self.in_order(qkv),
                qkv_bias: Vec::new(),
                head_norms: None,
                latent: None,
                out: Part::matrix(of("self_attn.o_proj.weight"), hidden, q_dim),
                out_bias: None,
                rope: 0,
                window: None,
                sinks: None,
            },
            attention_out_norm: None,
            mlp_norm: Some(self.norm(of("post_attention_layernorm.weight"))),
            mlp: Mlp::Dense(Box::new(self.dense(&of("mlp."), self.intermediate))),
            mlp_out_norm: None,
            parallel: false,
        }
    }

    /// Biases of q, k and v of layer `i`.
    pub(super) fn qkv_bias(&self, i: usize) -> Vec<Part> {
        let (q_dim, kv_dim) = (self.geometry.q_dim(), self.geometry.kv_dim());
        let bias = |name: &str, len| Part::vector(format!("model.layers.{i}.self_attn.{name}.bias"), len);
        self.in_order([bias("q_proj", q_dim), bias("k_proj", kv_dim), bias("v_proj", kv_dim)])
    }

    /// q, k and v with the rows (of vectors, the elements) of q's and k's heads in the order of rotation.
    pub(super) fn in_order(&self, [q, k, v]: [Part; 3]) -> Vec<Part> {
        let mut parts = self.rotated_first(&q);
        parts.extend(self.rotated_first(&k));
        parts.push(v);
        parts
    }

    /// The heads of a projection with their rotated dimensions where devices pair them (`j` with `j + dim / 2`): files
    /// pair `j` with `j + rotated / 2`, and the other dimensions have no pair. Scores are sums over dimensions, so their
    /// order does not matter as long as q and k have the same one.
    pub(super) fn rotated_first(&self, projection: &Part) -> Vec<Part> {
        let (dim, rotated) = (self.geometry.head_dim as usize, self.rotated);
        if rotated == dim {
            return vec![projection.clone()];
        }
        let (half, rest) = (rotated / 2, (dim - rotated) / 2);
        let is_vector = projection.shape.len() == 1;
        let heads = if is_vector { projection.cols } else { projection.rows } / dim;
        let stretches = [(0, half), (rotated, rest), (half, half), (rotated + rest, rest)];
        let one = |head: usize| {
            stretches.map(|(first, len)| match is_vector {
                true => projection.elements(head * dim + first, len, 1),
                false => projection.rows(head * dim + first, len, 1),
            })
        };
        (0..heads).flat_map(one).filter(|part| part.rows > 0 && part.cols > 0).collect()
    }

    /// A gated feed-forward layer with Llama's tensors behind `prefix`.
    pub(super) fn dense(&self, prefix: &str, width: usize) -> Dense {
        let up = |name: &str| Part::matrix(format!("{prefix}{name}.weight"), width, self.hidden);
        Dense {
            activation: self.activation,
            width,
            up: vec![up("gate_proj"), up("up_proj")],
            up_bias: Vec::new(),
            down: Part::matrix(format!("{prefix}down_proj.weight"), self.hidden, width),
            down_bias: None,
        }
    }

    /// A mixture whose experts are gated layers with tensors of their own: `prefix{expert}.{gate, up, down}.weight`.
    pub(super) fn mixture(
        &self,
        router: String,
        prefix: &str,
        [gate, up, down]: [&str; 3],
        (count, width): (usize, usize),
        routing: Routing,
    ) -> MixtureSpec {
        let matrix =
            |expert: usize, name: &str, rows, cols| Part::matrix(format!("{prefix}{expert}.{name}.weight"), rows, cols);
        let hidden = self.hidden;
        MixtureSpec {
            count,
            width,
            activation: self.activation,
            routing,
            router: Part::matrix(router, count, hidden),
            router_bias: None,
            choice_bias: None,
            up: (0..count).flat_map(|e| [gate, up].map(|name| matrix(e, name, width, hidden))).collect(),
            up_bias: Vec::new(),
            down: (0..count).map(|e| matrix(e, down, hidden, width)).collect(),
            down_bias: Vec::new(),
            shared: None,
        }
    }

    /// The table of a family whose heads are rotated as a whole; `theta` is the default.
    pub(super) fn rope(&self, fields: &Fields, theta: f64) -> Result<RopeSpec, ModelError> {
        let hint = "only 1 is implemented for this family";
        refuse_unless(fields, "partial_rotary_factor", 1, hint)?;
        for spelling in ["rope_scaling", "rope_parameters"] {
            if let Some(parameters) = fields.object(spelling)? {
                refuse_unless(&parameters, "partial_rotary_factor", 1, hint)?;
            }
        }
        RopeSpec::with_default(fields, self.rotated, theta)
    }

    /// The model with these layers.
    pub(super) fn model(
        &self,
        fields: &Fields,
        ropes: Vec<RopeSpec>,
        layers: Vec<LayerSpec>,
    ) -> Result<ModelSpec, ModelError> {
        let tied = fields.flag("tie_word_embeddings")?.unwrap_or(false);
        Ok(ModelSpec {
            split: None,
            family: self.family,
            hidden: self.hidden,
            vocab: self.vocab,
            geometry: self.geometry,
            attention_scale: narrow(1.0 / f64::from(self.geometry.head_dim).sqrt()),
            attention_softcap: None,
            logits_softcap: None,
            alibi: None,
            embedding: Embedding {
                table: Part::matrix("model.embed_tokens.weight", self.vocab, self.hidden),
                scale: None,
                positions: None,
                norm: None,
            },
            layers,
            final_norm: self.norm("model.norm.weight".to_owned()),
            head: (!tied).then(|| Part::matrix("lm_head.weight", self.vocab, self.hidden)),
            max_positions: lengthened(max_positions(fields, "max_position_embeddings")?, &ropes),
            dtype: dtype(fields)?,
            bos_id: fields.token_ids("bos_token_id")?.first().copied(),
            eos_ids: fields.token_ids("eos_token_id")?,
            ropes,
            names: LLAMA_NAMES,
        })
    }
}

/// Softmax over all experts, without groups.
pub(super) const fn softmax(top_k: usize, normalised: bool) -> Routing {
    let (scoring, group_score) = (Scoring::Softmax, GroupScore::Best);
    Routing { top_k, scoring, normalised, scale: 1.0, groups: 1, top_groups: 1, group_score }
}

/// The numbers of experts in `count` and `top_k`, and the width of an expert in `width`.
pub(super) fn experts(
    fields: &Fields,
    layers: usize,
    [experts, top_k, width]: [&str; 3],
) -> Result<[usize; 3], ModelError> {
    let all = size(fields, experts, EXPERTS_MAX)?;
    check_pieces(fields, experts, layers, all)?;
    let chosen = size(fields, top_k, EXPERTS_PER_TOKEN_MAX)?;
    if chosen > all {
        return Err(fields.invalid(top_k, &format!("there are {all} experts")));
    }
    Ok([all, chosen, size(fields, width, INTERMEDIATE_MAX)?])
}

/// A required size in `1..=max`.
pub(super) fn size(fields: &Fields, field: &str, max: u32) -> Result<usize, ModelError> {
    Ok(count(fields, field, max)?.ok_or_else(|| fields.missing(field))? as usize)
}

/// A size in `1..=max`.
pub(super) fn count(fields: &Fields, field: &str, max: u32) -> Result<Option<u32>, ModelError> {
    let value = fields.count(field, u64::from(max))?;
    Ok(value.map(|n| u32::try_from(n).expect("it is at most a u32")))
}

/// Refuses `field` unless it is absent, null or `neutral` (as an integer or a float).
pub(super) fn refuse_unless(
    fields: &Fields,
    field: &str,
    neutral: impl Into<Value>,
    hint: &str,
) -> Result<(), ModelError> {
    let neutral = neutral.into();
    match fields.get(field) {
        Some(value) if *value != neutral && (!value.is_number() || value.as_f64() != neutral.as_f64()) => {
            Err(fields.unsupported(field, hint))
        }
        _ => Ok(()),
    }
}

/// Refuses flags that add biases to projections.
pub(super) fn refuse_biases(fields: &Fields, flags: &[&str]) -> Result<(), ModelError> {
    for bias in flags {
        refuse_unless(fields, bias, false, "projections with biases are not implemented for this family")?;
    }
    Ok(())
}

/// Refuses activations other than `names`; an absent field is the first.
pub(super) fn refuse_other_activations(fields: &Fields, field: &str, names: &[&str]) -> Result<(), ModelError> {
    match fields.text(field)? {
        Some(name) if !names.contains(&name) => {
            Err(fields.unsupported(field, &format!("only {:?} is implemented", names[0])))
        }
        _ => Ok(()),
    }
}

/// A GELU without a gate.
pub(super) fn plain_gelu(fields: &Fields, field: &str, absent: Activation) -> Result<Activation, ModelError> {
    match fields.text(field)? {
        None => Ok(absent),
        Some("gelu") => Ok(Activation::Gelu),
        Some("gelu_new" | "gelu_fast" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some(_) => Err(fields.unsupported(field, "supported are \"gelu\" and \"gelu_new\"")),
    }
}

/// Refuses ways of quantising that are not read.
pub(super) fn check_quantised(fields: &Fields) -> Result<(), ModelError> {
    Quantisation::read(fields).map(drop)
}

/// Refuses every way of quantising, in families that are not published so.
pub(super) fn refuse_quantised(fields: &Fields) -> Result<(), ModelError> {
    for quantised in ["quantization_config", "compression_config"] {
        if fields.get(quantised).is_some() {
            return Err(fields.unsupported(quantised, "use a checkpoint in f32, f16 or bf16"));
        }
    }
    Ok(())
}

fn geometry(
    fields: &Fields,
    hidden: usize,
    kv_heads: Option<u32>,
    head_dim: Option<u32>,
) -> Result<AttentionGeometry, ModelError> {
    let heads = size(fields, "num_attention_heads", HEADS_MAX)?;
    let heads_u32 = u32::try_from(heads).expect("heads are within HEADS_MAX");
    let kv_heads = match count(fields, "num_key_value_heads", HEADS_MAX)? {
        Some(n) => n,
        None if !fields.contains("num_key_value_heads") => kv_heads.unwrap_or(heads_u32),
        None => heads_u32,
    };
    if !heads_u32.is_multiple_of(kv_heads) {
        let problem = format!("{heads} attention heads cannot share {kv_heads} key-value heads evenly");
        return Err(fields.invalid("num_key_value_heads", &problem));
    }
    let head_dim = match count(fields, "head_dim", HEAD_DIM_MAX)?.or(head_dim) {
        Some(n) => n,
        None => divided(fields, "hidden_size", hidden, heads)?,
    };
    if !head_dim.is_multiple_of(2) {
        return Err(fields.invalid("head_dim", "rotary positions need an even number"));
    }
    Ok(AttentionGeometry { heads: heads_u32, kv_heads, head_dim, latent: false })
}

/// The size of a head where heads divide `hidden`, the value of `field`.
pub(super) fn divided(fields: &Fields, field: &str, hidden: usize, heads: usize) -> Result<u32, ModelError> {
    if hidden.is_multiple_of(heads) && hidden / heads <= HEAD_DIM_MAX as usize {
        return Ok(u32::try_from(hidden / heads).expect("it is within HEAD_DIM_MAX"));
    }
    let problem = format!("{heads} heads do not divide it into heads of at most {HEAD_DIM_MAX}");
    Err(fields.invalid(field, &problem))
}

/// A norm's epsilon.
pub(super) fn eps(fields: &Fields, field: &str) -> Result<Option<f32>, ModelError> {
    match fields.positive(field)?.map(narrow) {
        Some(eps) if !eps.is_normal() => Err(fields.invalid(field, "it does not fit f32")),
        eps => Ok(eps),
    }
}

/// The window of each layer: `window` where `layer_types` says `sliding_attention`.
pub(super) fn windows(
    fields: &Fields,
    layers: usize,
    window: Option<u32>,
) -> Result<Option<Vec<Option<u32>>>, ModelError> {
    let Some(value) = fields.get("layer_types") else { return Ok(None) };
    let names = value.as_array().filter(|names| names.len() == layers);
    let names = names.ok_or_else(|| fields.invalid("layer_types", &format!("it must list {layers} layers")))?;
    let kind = |name: &Value| match name.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") => window.map(Some).ok_or_else(|| fields.missing("sliding_window")),
        _ => Err(fields.unsupported("layer_types", "supported are \"full_attention\" and \"sliding_attention\"")),
    };
    names.iter().map(kind).collect::<Result<_, _>>().map(Some)
}

/// The windows of Qwen's layers. Files always have a window and few use it: then where `layer_types` says so, or from layer
/// `max_window_layers` on.
pub(super) fn upper_windows(fields: &Fields, layers: usize) -> Result<Vec<Option<u32>>, ModelError> {
    if fields.flag("use_sliding_window")? != Some(true) {
        fields.ignore(&["sliding_window", "max_window_layers", "layer_types"]);
        return Ok(vec![None; layers]);
    }
    let window = match count(fields, "sliding_window", u32::MAX)? {
        None if !fields.contains("sliding_window") => Some(4096),
        window => window,
    };
    if let Some(windows) = windows(fields, layers, window)? {
        fields.ignore(&["max_window_layers"]);
        return Ok(windows);
    }
    let first = match fields.get("max_window_layers").map(Value::as_u64) {
        None => 28,
        Some(Some(first)) => usize::try_from(first).unwrap_or(usize::MAX),
        Some(None) => return Err(fields.invalid("max_window_layers", "it must be a number of layers")),
    };
    Ok((0..layers).map(|i| window.filter(|_| i >= first)).collect())
}

/// YaRN's context where a file names the original one, as Qwen's model cards ask for.
fn lengthened(claimed: u32, ropes: &[RopeSpec]) -> u32 {
    let yarn = |rope: &RopeSpec| match &rope.scaling {
        RopeScaling::Yarn(yarn) => yarn.context(),
        _ => 0,
    };
    ropes.iter().map(yarn).max().unwrap_or(0).max(claimed).min(SEQUENCE_TOKENS_MAX)
}

pub(super) fn max_positions(fields: &Fields, field: &str) -> Result<u32, ModelError> {
    let claimed = fields.required_count(field, u64::MAX)?;
    let kept = claimed.min(u64::from(SEQUENCE_TOKENS_MAX));
    if kept < claimed {
        tracing::warn!("{field} is {claimed}; sequences are limited to {kept} tokens");
    }
    Ok(u32::try_from(kept).expect("it is at most SEQUENCE_TOKENS_MAX"))
}

pub(super) fn dtype(fields: &Fields) -> Result<Option<DType>, ModelError> {
    for field in ["dtype", "torch_dtype"] {
        if let Some(text) = fields.text(field)? {
            let hint = "use a checkpoint in f32, f16 or bf16";
            return text.parse().map(Some).map_err(|_unknown| fields.unsupported(field, hint));
        }
    }
    Ok(None)
}
