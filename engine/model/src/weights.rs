//! A model's weights on a device.
//!
//! Tensors are looked up by transformers' names and checked against the configuration; q, k and v (and gate and up) are
//! handed to the device as one weight of stacked parts, so that each layer is four matrix products, whatever
//! the family. Nothing is copied
//! on the host unless a conversion is asked for. Tensors that the model would not use are refused, since a checkpoint
//! with, say, projection biases would otherwise be computed wrongly.

use crate::{Checkpoint, Family, ModelConfig, ModelError};
use bytes::Bytes;
use lagoon_backend::{Device, WeightSource};
use lagoon_types::DType;
use std::fmt;

/// A tensor's element type and little-endian bytes.
#[derive(Clone, Debug)]
pub struct LoadedTensor {
    pub dtype: DType,
    pub bytes: Bytes,
}

/// The weights of one decoder layer.
pub struct Layer<D: Device> {
    /// `[hidden]`.
    pub attn_norm: D::Weight,
    /// `[qkv_dim][hidden]`: q, k, v stacked by rows.
    pub qkv: D::Weight,
    /// `[qkv_dim]`, added to what `qkv` makes ([`Family::qkv_bias`]).
    pub qkv_bias: Option<D::Weight>,
    /// `[hidden][q_dim]`.
    pub o: D::Weight,
    /// `[hidden]`.
    pub mlp_norm: D::Weight,
    /// `[2 * intermediate][hidden]`: gate, then up; `[intermediate][hidden]` where the activation has no gate.
    pub up: D::Weight,
    /// `[hidden][intermediate]`.
    pub down: D::Weight,
}

/// The weights of a model.
pub struct LlamaWeights<D: Device> {
    /// `[vocab][hidden]`.
    pub embed: D::Weight,
    pub layers: Vec<Layer<D>>,
    /// `[hidden]`.
    pub final_norm: D::Weight,
    /// `[vocab][hidden]`; `None` when the embedding table serves ([`LlamaWeights::output`]).
    pub lm_head: Option<D::Weight>,
    /// Element type of all weights.
    pub dtype: DType,
    /// Bytes of all weights.
    pub bytes: u64,
}

impl<D: Device> fmt::Debug for Layer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer").finish_non_exhaustive()
    }
}

impl<D: Device> fmt::Debug for LlamaWeights<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("LlamaWeights");
        shown.field("dtype", &self.dtype).field("bytes", &self.bytes).field("layers", &self.layers.len());
        shown.finish_non_exhaustive()
    }
}

impl<D: Device> LlamaWeights<D> {
    /// The output projection, `[vocab][hidden]`.
    #[must_use]
    pub fn output(&self) -> &D::Weight {
        self.lm_head.as_ref().unwrap_or(&self.embed)
    }

    /// Loads `checkpoint` to `device`. `dtype` converts every tensor (nearest even, by way of f32); `None` keeps the
    /// type of the file, which must then be one for all tensors. `progress` is told the bytes done and in all.
    pub fn load(
        device: &mut D,
        checkpoint: &Checkpoint,
        config: &ModelConfig,
        dtype: Option<DType>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ModelError> {
        check_no_others(checkpoint, config)?;
        let Some(target) = dtype.or_else(|| checkpoint.dtype()) else {
            return Err(
                checkpoint.error(names(config.family).embed, "is missing or has no supported element type".to_owned())
            );
        };
        Self::build(device, config, target, progress, &mut |name, shape| {
            let (stored, bytes) = checkpoint.tensor(name, shape)?;
            if stored == target {
                Ok(LoadedTensor { dtype: target, bytes })
            } else if dtype.is_some() {
                Ok(LoadedTensor { dtype: target, bytes: convert(stored, target, &bytes) })
            } else {
                let problem = format!(
                    "has elements of type {stored}, others have {target}\nhint: convert all with --dtype {target}"
                );
                Err(checkpoint.error(name, problem))
            }
        })
    }

    /// Builds the weights from whatever `source` returns for a tensor's name and shape; all are of type `dtype`. Used
    /// by [`LlamaWeights::load`] and by benchmarks that make random weights.
    ///
    /// # Panics
    /// If `source` returns another type or number of bytes than was asked for.
    pub fn build(
        device: &mut D,
        config: &ModelConfig,
        dtype: DType,
        progress: &mut dyn FnMut(u64, u64),
        source: &mut TensorSource<'_>,
    ) -> Result<Self, ModelError> {
        let total = config.parameters() * dtype.size() as u64;
        let mut loader = Loader { device, config, dtype, source, progress, done: 0, total };
        let (hidden, vocab) = (config.hidden, config.vocab);
        let names = names(config.family);
        let embed = loader.matrix(&[(names.embed, vocab)], hidden)?;
        let layers = (0..config.layers).map(|i| loader.layer(i)).collect::<Result<_, _>>()?;
        let final_norm = loader.vector(names.final_norm)?;
        let lm_head = match config.tie_word_embeddings {
            true => None,
            false => Some(loader.matrix(&[(LM_HEAD, vocab)], hidden)?),
        };
        assert_eq!(loader.done, total, "ModelConfig::parameters counts what is loaded");
        Ok(Self { embed, layers, final_norm, lm_head, dtype, bytes: total })
    }
}

/// Gives a tensor by name and shape.
pub type TensorSource<'a> = dyn FnMut(&str, &[usize]) -> Result<LoadedTensor, ModelError> + 'a;

/// Where a family keeps its tensors.
struct Names {
    embed: &'static str,
    final_norm: &'static str,
    /// What precedes a layer's index.
    layers: &'static str,
    attn_norm: &'static str,
    /// q, k and v, or one tensor with their rows in that order.
    qkv: &'static [&'static str],
    /// Their biases, in the same order, if there are any.
    qkv_bias: &'static [&'static str],
    o: &'static str,
    mlp_norm: &'static str,
    /// Gate and up, or up alone.
    up: &'static [&'static str],
    down: &'static str,
    /// Repeats what is known: rotary frequencies of early Llama 2 files.
    ignored: Option<&'static str>,
}

const LM_HEAD: &str = "lm_head.weight";

const LLAMA: Names = Names {
    embed: "model.embed_tokens.weight",
    final_norm: "model.norm.weight",
    layers: "model.layers.",
    attn_norm: "input_layernorm.weight",
    qkv: &["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    qkv_bias: &[],
    o: "self_attn.o_proj.weight",
    mlp_norm: "post_attention_layernorm.weight",
    up: &["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    down: "mlp.down_proj.weight",
    ignored: Some("self_attn.rotary_emb.inv_freq"),
};

const QWEN2: Names =
    Names { qkv_bias: &["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"], ..LLAMA };

const MPT: Names = Names {
    embed: "transformer.wte.weight",
    final_norm: "transformer.norm_f.weight",
    layers: "transformer.blocks.",
    attn_norm: "norm_1.weight",
    qkv: &["attn.Wqkv.weight"],
    qkv_bias: &[],
    o: "attn.out_proj.weight",
    mlp_norm: "norm_2.weight",
    up: &["ffn.up_proj.weight"],
    down: "ffn.down_proj.weight",
    ignored: None,
};

fn names(family: Family) -> &'static Names {
    match family {
        Family::Llama | Family::Mistral => &LLAMA,
        Family::Qwen2 => &QWEN2,
        Family::Mpt => &MPT,
    }
}

impl Names {
    /// Whether a layer has this tensor.
    fn in_layer(&self, tensor: &str) -> bool {
        let single = [self.attn_norm, self.o, self.mlp_norm, self.down];
        single.contains(&tensor)
            || self.qkv.contains(&tensor)
            || self.qkv_bias.contains(&tensor)
            || self.up.contains(&tensor)
            || self.ignored == Some(tensor)
    }
}

struct Loader<'a, 'p, 's, D: Device> {
    device: &'a mut D,
    config: &'a ModelConfig,
    dtype: DType,
    source: &'a mut TensorSource<'s>,
    progress: &'a mut (dyn FnMut(u64, u64) + 'p),
    done: u64,
    total: u64,
}

impl<D: Device> Loader<'_, '_, '_, D> {
    fn layer(&mut self, index: usize) -> Result<Layer<D>, ModelError> {
        let ModelConfig { hidden, intermediate, geometry, .. } = *self.config;
        let names = names(self.config.family);
        let of = |tensor: &str| format!("{}{index}.{tensor}", names.layers);
        let (q_dim, kv_dim) = (geometry.q_dim(), geometry.kv_dim());
        let qkv_rows: &[usize] = if names.qkv.len() == 1 { &[q_dim + 2 * kv_dim] } else { &[q_dim, kv_dim, kv_dim] };
        let qkv: Vec<_> = names.qkv.iter().map(|tensor| of(tensor)).zip(qkv_rows.iter().copied()).collect();
        let biases: Vec<_> = names.qkv_bias.iter().map(|tensor| of(tensor)).zip(qkv_rows.iter().copied()).collect();
        let up: Vec<_> = names.up.iter().map(|tensor| (of(tensor), intermediate)).collect();
        Ok(Layer {
            attn_norm: self.vector(&of(names.attn_norm))?,
            qkv: self.matrix(&qkv, hidden)?,
            qkv_bias: if names.qkv_bias.is_empty() { None } else { Some(self.joined(&biases)?) },
            o: self.matrix(&[(of(names.o), hidden)], q_dim)?,
            mlp_norm: self.vector(&of(names.mlp_norm))?,
            up: self.matrix(&up, hidden)?,
            down: self.matrix(&[(of(names.down), hidden)], intermediate)?,
        })
    }

    fn vector(&mut self, name: &str) -> Result<D::Weight, ModelError> {
        let cols = self.config.hidden;
        let bytes = self.fetch(name, &[cols])?;
        self.give(cols, vec![(1, bytes)])
    }

    /// Vectors of these lengths, one behind the other.
    fn joined(&mut self, parts: &[(String, usize)]) -> Result<D::Weight, ModelError> {
        let mut bytes = Vec::new();
        for (name, len) in parts {
            bytes.extend_from_slice(&self.fetch(name, &[*len])?);
        }
        self.give(parts.iter().map(|(_, len)| len).sum(), vec![(1, bytes.into())])
    }

    /// Matrices `[rows][cols]`, stacked.
    fn matrix(&mut self, parts: &[(impl AsRef<str>, usize)], cols: usize) -> Result<D::Weight, ModelError> {
        let fetched = parts.iter().map(|(name, rows)| Ok((*rows, self.fetch(name.as_ref(), &[*rows, cols])?)));
        let fetched = fetched.collect::<Result<Vec<_>, ModelError>>()?;
        self.give(cols, fetched)
    }

    fn fetch(&mut self, name: &str, shape: &[usize]) -> Result<Bytes, ModelError> {
        let tensor = (self.source)(name, shape)?;
        let expected = shape.iter().product::<usize>() * self.dtype.size();
        assert!(tensor.dtype == self.dtype && tensor.bytes.len() == expected, "{name} is not what was asked for");
        Ok(tensor.bytes)
    }

    fn give(&mut self, cols: usize, parts: Vec<(usize, Bytes)>) -> Result<D::Weight, ModelError> {
        let bytes: u64 = parts.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let weight = self.device.weight(WeightSource { dtype: self.dtype, cols, parts })?;
        self.done += bytes;
        (self.progress)(self.done, self.total);
        Ok(weight)
    }
}

/// Elements that are converted at once; bounds the f32 copy.
const CONVERT_ELEMENTS: usize = 1 << 16;

fn convert(from: DType, to: DType, bytes: &[u8]) -> Bytes {
    let mut wide = Vec::with_capacity(CONVERT_ELEMENTS);
    let mut out = Vec::with_capacity(bytes.len() / from.size() * to.size());
    for chunk in bytes.chunks(CONVERT_ELEMENTS * from.size()) {
        wide.clear();
        from.decode(chunk, &mut wide);
        to.encode(&wide, &mut out);
    }
    Bytes::from(out)
}

/// Refuses tensors that the model has no use for, except those that are known to repeat what is known: see
/// [`Names::ignored`], and a copy of the embedding table where it is tied.
fn check_no_others(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<(), ModelError> {
    let names = names(config.family);
    let known = |name: &str| {
        if let Some((index, tensor)) = name.strip_prefix(names.layers).and_then(|rest| rest.split_once('.')) {
            return index.parse::<usize>().is_ok_and(|i| i < config.layers) && names.in_layer(tensor);
        }
        [names.embed, names.final_norm, LM_HEAD].contains(&name)
    };
    match checkpoint.tensors().find(|(name, _)| !known(name)) {
        None => Ok(()),
        Some((name, _)) => {
            let problem = format!(
                "has no place in a {} model of {} layers\nhint: config.json may belong to another model, or the model \
                 has parts (such as biases) that Lagoon does not support",
                config.family.name(),
                config.layers
            );
            Err(checkpoint.error(name, problem))
        }
    }
}
