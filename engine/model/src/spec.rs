//! A decoder as data ([`ModelSpec`]): all that the loader and the runner know of a model. A family
//! ([`crate::families`]) maps `config.json` to it.
//!
//! Weights are named by [`Part`]s of stored tensors, so that fused, transposed and interleaved tensors of files become
//! the matrices that devices multiply with, without another step.

use crate::{GenerationConfig, KvSplit, ModelError, RopeSpec};
use lagoon_backend::{Activation, Routing};
use lagoon_types::{Alibi, AttentionGeometry, DType};

/// A decoder: embedding, layers, norm and head. All values have been checked against each other and against
/// `lagoon_types::limits`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The family's `model_type`.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    pub vocab: usize,
    /// Shape of attention, the same in all layers.
    pub geometry: AttentionGeometry,
    /// Factor on attention scores.
    pub attention_scale: f32,
    /// Soft cap of scaled attention scores ([`lagoon_backend::AttnBatch::softcap`]).
    pub attention_softcap: Option<f32>,
    /// Soft cap of logits ([`lagoon_backend::Device::softcap`]).
    pub logits_softcap: Option<f32>,
    /// Biases by distance in place of rotation.
    pub alibi: Option<Alibi>,
    /// Rotary tables; layers name them by index.
    pub ropes: Vec<RopeSpec>,
    pub embedding: Embedding,
    pub layers: Vec<LayerSpec>,
    /// Set if layers with a window keep their KV apart.
    pub split: Option<KvSplit>,
    pub final_norm: NormSpec,
    /// The output projection, `[vocab][hidden]`; `None` if the embedding table serves.
    pub head: Option<Part>,
    /// Longest sequence, in tokens; never above `SEQUENCE_TOKENS_MAX`.
    pub max_positions: u32,
    /// Element type that `config.json` claims. The tensors decide; see [`crate::Checkpoint::dtype`].
    pub dtype: Option<DType>,
    /// Token ids of the configuration; `generation_config.json` takes precedence (see [`GenerationConfig`]).
    pub bos_id: Option<u32>,
    pub eos_ids: Vec<u32>,
    pub names: Names,
}

/// How a family's files spell tensor names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// A prefix that some files leave out, such as `transformer.`.
    pub optional_prefix: &'static str,
    /// Ends of names of redundant tensors, such as masks and rotary frequencies, and `lm_head.weight` where the head is
    /// tied.
    pub redundant: &'static [&'static str],
    /// Prefix of a layer's index and a number: layers behind the last one, which predict further tokens and are left out.
    pub layers_beyond: (&'static str, usize),
}

/// From token ids to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// `[vocab][hidden]`.
    pub table: Part,
    /// Factor on the rows, rounded to the type of the loaded weights, as transformers does.
    pub scale: Option<f32>,
    /// Learned positions, `[max_positions][hidden]`, added to the rows.
    pub positions: Option<Part>,
    pub norm: Option<NormSpec>,
}

/// A kind of norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    Rms,
    Layer,
}

/// A norm and its vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct NormSpec {
    pub kind: Norm,
    /// Added to the variance or the mean square.
    pub eps: f32,
    pub weight: Part,
    pub bias: Option<Part>,
    /// Added to every stored weight (Gemma: 1).
    pub offset: f32,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Norm of attention's input; `None` if attention reads the residual stream as it is (OLMo 2).
    pub attention_norm: Option<NormSpec>,
    pub attention: AttentionSpec,
    /// Norm of the attention's output before it joins the residual stream.
    pub attention_out_norm: Option<NormSpec>,
    /// Norm of the feed-forward layer's input; `None` if that layer reads the residual stream as it is.
    pub mlp_norm: Option<NormSpec>,
    pub mlp: Mlp,
    /// Norm of the feed-forward layer's output before it joins the residual stream.
    pub mlp_out_norm: Option<NormSpec>,
    /// Whether the feed-forward layer reads the residual stream before attention is added (parallel residual, GPT-NeoX).
    pub parallel: bool,
}

/// Attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// `[qkv_dim][hidden]`: q, then k, then v. Empty for latent attention.
    pub qkv: Vec<Part>,
    /// `[qkv_dim]`; empty for none.
    pub qkv_bias: Vec<Part>,
    pub head_norms: Option<HeadNorms>,
    /// Where the model's geometry is latent.
    pub latent: Option<Box<LatentSpec>>,
    /// `[hidden][q_dim]`; for latent attention, `[hidden][heads * value_dim]`.
    pub out: Part,
    pub out_bias: Option<Part>,
    /// Index of [`ModelSpec::ropes`].
    pub rope: usize,
    /// Most keys that a token sees, itself included; `None` is all.
    pub window: Option<u32>,
    /// A logit of each head that joins the softmax's sum, `[heads]`.
    pub sinks: Option<Part>,
}

/// Latent attention, absorbed (DeepSeek-V2 §2.1). A token's row is a normalised latent and a rotated part, `latent_dim + rotated`
/// elements. Keys and values of heads are products of the latent, which queries and outputs are multiplied with instead.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentSpec {
    pub latent_dim: usize,
    /// Rotated elements of a head's query, and of the row.
    pub rotated: usize,
    /// The other elements of a head's query.
    pub key_dim: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Queries of low rank; `None` if `queries` is applied to attention's input itself.
    pub low_rank: Option<LowRank>,
    /// `[heads * (key_dim + rotated)][hidden or rank]`.
    pub queries: Vec<Part>,
    /// `[latent_dim][hidden]`.
    pub latent: Part,
    pub latent_bias: Option<Part>,
    /// Of the latent.
    pub norm: NormSpec,
    /// The rotated part, `[rotated][hidden]`.
    pub key: Vec<Part>,
    pub key_bias: Vec<Part>,
    /// A head's product of its query that is multiplied with latents, `[heads * latent_dim][key_dim]`.
    pub absorb: Vec<Part>,
    /// A head's value from a sum of latents, `[heads * value_dim][latent_dim]`.
    pub values: Vec<Part>,
}

/// Weights of low-rank queries.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRank {
    /// `[rank][hidden]`.
    pub down: Part,
    pub bias: Option<Part>,
    pub norm: NormSpec,
}

impl LatentSpec {
    fn parts(&self) -> impl Iterator<Item = &Part> {
        let Self { low_rank, queries, latent, latent_bias, norm, key, key_bias, absorb, values, .. } = self;
        let low = low_rank.iter().flat_map(|low| [&low.down].into_iter().chain(&low.bias).chain(low.norm.parts()));
        let latent = [latent].into_iter().chain(latent_bias).chain(norm.parts());
        low.chain(queries).chain(latent).chain(key).chain(key_bias).chain(absorb).chain(values)
    }
}

/// Root-mean-square norms of queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadNorms {
    pub eps: f32,
    /// Whether a mean is over all heads (MiniMax-M2), not over each one (Qwen3).
    pub all_heads: bool,
    /// `[head_dim]` each; over all heads, `[q_dim]` and `[kv_dim]`.
    pub q: Vec<Part>,
    pub k: Vec<Part>,
    /// Added to every stored weight (Gemma: 1).
    pub offset: f32,
}

/// A layer's feed-forward part.
#[derive(Clone, Debug, PartialEq)]
pub enum Mlp {
    Dense(Box<Dense>),
    Experts(Box<MixtureSpec>),
}

/// A feed-forward layer: up projection (gate, then up, if gated), activation, down projection.
#[derive(Clone, Debug, PartialEq)]
pub struct Dense {
    pub activation: Activation,
    /// Width between the projections.
    pub width: usize,
    /// `[width * inputs][hidden]`.
    pub up: Vec<Part>,
    pub up_bias: Vec<Part>,
    /// `[hidden][width]`.
    pub down: Part,
    pub down_bias: Option<Part>,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MixtureSpec {
    /// Experts of the layer.
    pub count: usize,
    /// Width of an expert.
    pub width: usize,
    pub activation: Activation,
    pub routing: Routing,
    /// `[count][hidden]`.
    pub router: Part,
    pub router_bias: Option<Part>,
    /// Added to scores where experts are chosen, `[count]`.
    pub choice_bias: Option<Part>,
    /// `[count * width * inputs][hidden]`, expert by expert.
    pub up: Vec<Part>,
    /// `[count][width * inputs]`; empty for none.
    pub up_bias: Vec<Part>,
    /// `[count * hidden][width]`.
    pub down: Vec<Part>,
    /// `[count][hidden]`; empty for none.
    pub down_bias: Vec<Part>,
    /// An expert of every token.
    pub shared: Option<Dense>,
}

/// Rows of a matrix, or elements of a vector, as a stored tensor has them: element `(row, col)` lies at
/// `offset + row * row_stride + col * col_stride`, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub tensor: String,
    /// The stored tensor's shape.
    pub shape: Vec<usize>,
    pub rows: usize,
    pub cols: usize,
    pub offset: usize,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl Part {
    /// A whole matrix `[rows][cols]`.
    #[must_use]
    pub fn matrix(tensor: impl Into<String>, rows: usize, cols: usize) -> Self {
        let (tensor, shape) = (tensor.into(), vec![rows, cols]);
        Self { tensor, shape, rows, cols, offset: 0, row_stride: cols, col_stride: 1 }
    }

    /// A matrix that is stored `[cols][rows]`.
    #[must_use]
    pub fn transposed(tensor: impl Into<String>, rows: usize, cols: usize) -> Self {
        let (tensor, shape) = (tensor.into(), vec![cols, rows]);
        Self { tensor, shape, rows, cols, offset: 0, row_stride: 1, col_stride: rows }
    }

    /// A whole vector.
    #[must_use]
    pub fn vector(tensor: impl Into<String>, len: usize) -> Self {
        Self { tensor: tensor.into(), shape: vec![len], rows: 1, cols: len, offset: 0, row_stride: len, col_stride: 1 }
    }

    /// `count` rows from row `first` on, `step` rows apart.
    #[must_use]
    pub fn rows(&self, first: usize, count: usize, step: usize) -> Self {
        assert!(count == 0 || first + (count - 1) * step < self.rows, "rows of {}", self.tensor);
        Self {
            rows: count,
            offset: self.offset + first * self.row_stride,
            row_stride: self.row_stride * step,
            ..self.clone()
        }
    }

    /// `count` elements of a vector from `first` on, `step` apart.
    #[must_use]
    pub fn elements(&self, first: usize, count: usize, step: usize) -> Self {
        assert!(count == 0 || first + (count - 1) * step < self.cols, "elements of {}", self.tensor);
        Self {
            cols: count,
            offset: self.offset + first * self.col_stride,
            col_stride: self.col_stride * step,
            ..self.clone()
        }
    }

    /// Whether the rows lie one behind the other as a device takes them.
    #[must_use]
    pub const fn is_contiguous(&self) -> bool {
        (self.row_stride == self.cols || self.rows == 1) && self.col_stride == 1
    }

    const fn len(&self) -> u64 {
        self.rows as u64 * self.cols as u64
    }
}

fn total<'a>(parts: impl IntoIterator<Item = &'a Part>) -> u64 {
    parts.into_iter().map(Part::len).sum()
}

impl NormSpec {
    fn parts(&self) -> impl Iterator<Item = &Part> {
        std::iter::once(&self.weight).chain(&self.bias)
    }
}

impl Dense {
    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.up.iter().chain(&self.up_bias).chain([&self.down]).chain(&self.down_bias)
    }
}

impl MixtureSpec {
    /// Parts that every token uses.
    fn common_parts(&self) -> impl Iterator<Item = &Part> {
        let shared = self.shared.iter().flat_map(Dense::parts);
        std::iter::once(&self.router).chain(&self.router_bias).chain(&self.choice_bias).chain(shared)
    }

    fn expert_parts(&self) -> impl Iterator<Item = &Part> {
        self.up.iter().chain(&self.up_bias).chain(&self.down).chain(&self.down_bias)
    }
}

impl LayerSpec {
    /// All parts but those of experts.
    fn common_parts(&self) -> Vec<&Part> {
        let AttentionSpec { qkv, qkv_bias, head_norms, latent, out, out_bias, sinks, .. } = &self.attention;
        let norms = [&self.attention_norm, &self.attention_out_norm, &self.mlp_norm, &self.mlp_out_norm];
        let norms = norms.into_iter().flatten();
        let mut parts: Vec<&Part> = norms.flat_map(NormSpec::parts).collect();
        parts.extend(head_norms.iter().flat_map(|norms| norms.q.iter().chain(&norms.k)));
        parts.extend(latent.iter().flat_map(|latent| latent.parts()));
        parts.extend(qkv.iter().chain(qkv_bias).chain([out]).chain(out_bias).chain(sinks));
        match &self.mlp {
            Mlp::Dense(dense) => parts.extend(dense.parts()),
            Mlp::Experts(mixture) => parts.extend(mixture.common_parts()),
        }
        parts
    }

    /// Columns of the widest activation of a row.
    fn widest(&self) -> usize {
        let dense = |dense: &Dense| dense.activation.inputs() * dense.width;
        match &self.mlp {
            Mlp::Dense(mlp) => dense(mlp),
            Mlp::Experts(mixture) => {
                let experts = mixture.routing.top_k * mixture.activation.inputs() * mixture.width;
                experts.max(mixture.shared.as_ref().map_or(0, dense))
            }
        }
    }
}

impl ModelSpec {
    /// Limits sequences to `tokens`. The tables of [`crate::rope::LongRope`] are those for that context, so instances that share
    /// KV need limits on the same side of the original one ([`crate::model_hash`] differs otherwise).
    ///
    /// # Errors
    /// [`ModelError::Context`] if the model's context is shorter, or `tokens` is 0.
    pub fn limit_context(&mut self, tokens: u32) -> Result<(), ModelError> {
        if tokens == 0 || tokens > self.max_positions {
            return Err(ModelError::Context { asked: tokens, most: self.max_positions });
        }
        self.max_positions = tokens;
        self.ropes.iter_mut().for_each(|rope| *rope = rope.for_context(u64::from(tokens)));
        Ok(())
    }

    /// The window of all layers, if they have one and the same: then KV outside of it is not needed.
    #[must_use]
    pub fn window(&self) -> Option<u32> {
        let mut windows = self.layers.iter().map(|layer| layer.attention.window);
        let first = windows.next().flatten();
        first.filter(|_| windows.all(|window| window == first))
    }

    /// Cosines and sines of a position in each of [`ModelSpec::ropes`].
    #[must_use]
    pub fn rope_dim(&self) -> u32 {
        let latent = self.layers.first().and_then(|layer| layer.attention.latent.as_ref());
        latent.map_or(self.geometry.head_dim, |of| u32::try_from(of.rotated).expect("it is within HEAD_DIM_MAX"))
    }

    /// All parts; shared embeddings once.
    pub fn parts(&self) -> impl Iterator<Item = &Part> {
        let layers = self.layers.iter().flat_map(|layer| {
            let experts = match &layer.mlp {
                Mlp::Dense(_) => None,
                Mlp::Experts(mixture) => Some(mixture.expert_parts()),
            };
            layer.common_parts().into_iter().chain(experts.into_iter().flatten())
        });
        self.outer_parts().chain(layers)
    }

    /// Routers of mixtures of experts.
    pub fn routers(&self) -> impl Iterator<Item = &Part> {
        self.layers.iter().filter_map(|layer| match &layer.mlp {
            Mlp::Dense(_) => None,
            Mlp::Experts(mixture) => Some(&mixture.router),
        })
    }

    /// Parts outside of layers.
    fn outer_parts(&self) -> impl Iterator<Item = &Part> {
        let Embedding { table, positions, norm, .. } = &self.embedding;
        let norms = norm.iter().chain([&self.final_norm]).flat_map(NormSpec::parts);
        std::iter::once(table).chain(positions).chain(norms).chain(&self.head)
    }

    /// Parameters of the model; shared embeddings count once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        total(self.parts())
    }

    /// Parameters that one token uses: all but those of experts that it does not choose.
    #[must_use]
    pub fn active_parameters(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| {
            let experts = match &layer.mlp {
                Mlp::Dense(_) => 0,
                Mlp::Experts(of) => total(of.expert_parts()) / of.count as u64 * of.routing.top_k as u64,
            };
            total(layer.common_parts()) + experts
        });
        total(self.outer_parts()) + layers.sum::<u64>()
    }

    /// Columns of the widest activation of a row, between the projections of a feed-forward layer.
    #[must_use]
    pub fn widest(&self) -> usize {
        self.layers.iter().map(LayerSpec::widest).max().unwrap_or(0)
    }

    /// Generation defaults of this model without a `generation_config.json`.
    #[must_use]
    pub fn generation_defaults(&self) -> GenerationConfig {
        let mut eos_ids = self.eos_ids.clone();
        eos_ids.sort_unstable();
        eos_ids.dedup();
        GenerationConfig { bos_id: self.bos_id, eos_ids, ..GenerationConfig::default() }
    }
}
