//! From a GGUF file's keys and names to those that families understand: a family's file has a table ([`Gguf`]), and the rest is
//! the same for all.
//!
//! Keys become fields of `config.json`, which the family's own function reads. Its [`Part`]s are then rewritten to the file's
//! tensors: renamed, taken out of a tensor of all experts, turned where a projection is stored the other way round, and taken in
//! the order of halves where rows of rotated heads are stored in turns. A rewritten part never cuts a row, so that packed rows
//! stay packed. A key that a family neither reads nor ignores is refused by name.

use super::{FAMILIES, Family};
use crate::fields::Fields;
use crate::gguf::{EndTokens, Gguf as File, Item, Metadata, Value};
use crate::spec::{Embedding, HeadNorms, Mlp, NormSpec, Part};
use crate::{ModelError, ModelSpec};
use lagoon_types::limits::{LAYERS_MAX, VOCAB_MAX};
use serde_json::{Map, json};
use std::cell::RefCell;
use std::collections::BTreeMap;

pub(super) const ARCHITECTURE: &str = "general.architecture";
const KIND: &str = "general.type";
/// The embedding table, whose rows are the vocabulary.
const TABLE: &str = "token_embd.weight";
const HEAD: &str = "output.weight";
/// Divisors of rotary frequencies, by the name that Llama 3's files have.
pub(super) const ROPE_DIVISORS: &str = "rope_freqs.weight";
/// The same of LongRoPE.
pub(super) const LONG_DIVISORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
/// Tensors that are read with the configuration.
const READ_AS_KEYS: &[&str] = &[ROPE_DIVISORS, LONG_DIVISORS[0], LONG_DIVISORS[1]];

/// Keys of all architectures that change nothing.
const IGNORED: &[&str] = &["tensor_data_layout"];

/// How GGUF files spell a family.
#[derive(Debug)]
pub(super) struct Gguf {
    /// `general.architecture`, which is also the prefix of keys.
    pub(super) architecture: &'static str,
    /// Whether the file has experts, where two families have the same architecture.
    pub(super) experts: bool,
    /// Keys without their prefix, and the fields of `config.json` that they are.
    pub(super) fields: &'static [&'static [(&'static str, &'static str)]],
    /// Keys that change nothing.
    pub(super) ignored: &'static [&'static str],
    /// Names of the family's tensors and of the file's. `{}` is a number: of the layer, and in the former's second place of an
    /// expert.
    pub(super) tensors: &'static [&'static [(&'static str, &'static str, Layout)]],
    /// Whether norms' weights are stored with their offset added.
    pub(super) adds_offsets: bool,
    /// Fields that need more than a table.
    pub(super) refine: fn(&mut Config<'_>) -> Result<(), ModelError>,
    /// Parts that need more than a table; `None` where the table has them.
    pub(super) part: fn(&Part) -> Option<Part>,
    /// Keys without their prefix that files have besides the table's, by the model: what `refine` reads.
    pub(super) more: fn(&ModelSpec) -> Vec<(&'static str, Item)>,
    /// Whether files of this architecture are read as this family, and not as another one.
    pub(super) is_read: bool,
}

/// How a file stores a tensor, beside the layout that the family knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Same,
    /// A head's rows in turns: the first of the first half, the first of the second half, and so on.
    InTurns,
    /// Rows are columns.
    Turned,
    /// One tensor of all experts.
    OfExperts,
}

/// Sizes and rotation, by the names of Llama's configuration.
pub(super) const LLAMA_FIELDS: &[(&str, &str)] = &[
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.key_length", "head_dim"),
    ("rope.freq_base", "rope_theta"),
];
pub(super) const WINDOW: (&str, &str) = ("attention.sliding_window", "sliding_window");
/// Tensors outside of layers, and projections and norms of Llama's layers but those of queries and keys.
pub(super) const LLAMA_TENSORS: &[(&str, &str, Layout)] = &[
    ("model.embed_tokens.weight", TABLE, Layout::Same),
    ("model.norm.weight", "output_norm.weight", Layout::Same),
    ("lm_head.weight", HEAD, Layout::Same),
    ("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", Layout::Same),
    ("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", Layout::Same),
    ("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", Layout::Same),
    ("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", Layout::Same),
    ("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", Layout::Same),
    ("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", Layout::Same),
];
/// The norm between attention and the feed-forward layer.
pub(super) const MLP_NORM: &[(&str, &str, Layout)] =
    &[("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", Layout::Same)];
/// Queries and keys as families store them.
pub(super) const HALVES: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", Layout::Same),
    ("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", Layout::Same),
];
/// Queries and keys of files for which llama.cpp rotates neighbours.
pub(super) const IN_TURNS: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", Layout::InTurns),
    ("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", Layout::InTurns),
];
pub(super) const QKV_BIASES: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", Layout::Same),
    ("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", Layout::Same),
    ("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", Layout::Same),
];
pub(super) const HEAD_NORMS: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight", Layout::Same),
    ("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight", Layout::Same),
];
/// Norms of a block's output, beside one before the feed-forward layer.
pub(super) const OUT_NORMS: &[(&str, &str, Layout)] = &[
    ("model.layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight", Layout::Same),
    ("model.layers.{}.post_feedforward_layernorm.weight", "blk.{}.post_ffw_norm.weight", Layout::Same),
];

/// Nothing to refine.
pub(super) fn as_it_is(_: &mut Config<'_>) -> Result<(), ModelError> {
    Ok(())
}

/// All parts are in the table.
pub(super) fn in_table(_: &Part) -> Option<Part> {
    None
}

/// The table has all keys.
pub(super) fn no_more(_: &ModelSpec) -> Vec<(&'static str, Item)> {
    Vec::new()
}

impl Gguf {
    /// A family of Llama's descendants.
    pub(super) const fn of(
        architecture: &'static str,
        fields: &'static [&'static [(&'static str, &'static str)]],
        tensors: &'static [&'static [(&'static str, &'static str, Layout)]],
    ) -> Self {
        Self {
            architecture,
            experts: false,
            fields,
            ignored: &[],
            tensors,
            adds_offsets: false,
            refine: as_it_is,
            part: in_table,
            more: no_more,
            is_read: true,
        }
    }
}

/// A configuration under translation.
pub(super) struct Config<'a> {
    pub(super) file: &'a File,
    prefix: &'static str,
    map: Map<String, serde_json::Value>,
    /// Keys by field, for messages.
    keys: BTreeMap<String, String>,
    /// Keys that were read.
    known: Vec<String>,
}

impl Config<'_> {
    pub(super) fn metadata(&self) -> &Metadata {
        self.file.metadata()
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// A key's value, which counts as known.
    pub(super) fn get(&mut self, name: &str) -> Option<&Value> {
        let key = self.key(name);
        self.known.push(key.clone());
        self.file.metadata().get(&key)
    }

    /// A whole number; `None` if the key is absent.
    pub(super) fn number(&mut self, name: &str) -> Result<Option<u64>, ModelError> {
        let key = self.key(name);
        self.known.push(key.clone());
        self.metadata().unsigned(&key)
    }

    /// A finite number; `None` if the key is absent.
    pub(super) fn float(&mut self, name: &str) -> Result<Option<f64>, ModelError> {
        let value = match self.get(name) {
            None => return Ok(None),
            Some(Value::Float(value)) if value.is_finite() => Some(*value),
            Some(_) => None,
        };
        value.map(Some).ok_or_else(|| self.metadata().invalid(&self.key(name), "it must be a finite number"))
    }

    /// A value of a field that was set.
    pub(super) fn field(&self, field: &str) -> Option<u64> {
        self.map.get(field).and_then(serde_json::Value::as_u64)
    }

    /// Sets a field, which messages call by `name`'s key.
    pub(super) fn set(&mut self, field: &str, value: serde_json::Value, name: &str) {
        self.keys.insert(field.to_owned(), self.key(name));
        self.map.insert(field.to_owned(), value);
    }

    /// A field that holds an object.
    pub(super) fn object(&mut self, field: &str) -> Option<&mut Map<String, serde_json::Value>> {
        self.map.get_mut(field)?.as_object_mut()
    }

    /// The error that Lagoon does not implement a key's value.
    pub(super) fn unsupported(&self, name: &str, hint: &str) -> ModelError {
        self.metadata().unsupported(&self.key(name), hint)
    }

    /// Takes a key for a field, if it is there.
    fn take(&mut self, name: &str, field: &str) -> Result<(), ModelError> {
        let key = self.key(name);
        self.keys.insert(field.to_owned(), key.clone());
        let Some(value) = self.get(name) else { return Ok(()) };
        match value.json(LAYERS_MAX as usize) {
            Some(value) => {
                self.set(field, value, name);
                Ok(())
            }
            None => Err(self.metadata().invalid(&key, "it is no finite number, or too long a list")),
        }
    }
}

/// Maps a file to its model.
///
/// # Errors
/// A [`ModelError`] that names the file and the key or the tensor.
pub(crate) fn read(file: &File) -> Result<ModelSpec, ModelError> {
    let (family, gguf) = find(file)?;
    let mut config =
        Config { file, prefix: gguf.architecture, map: Map::new(), keys: BTreeMap::new(), known: Vec::new() };
    config.map.insert("model_type".to_owned(), family.model_type.into());
    for (name, field) in gguf.fields.iter().flat_map(|fields| fields.iter()) {
        config.take(name, field)?;
    }
    check_layers(&config)?;
    vocabulary(&mut config)?;
    heads(&mut config)?;
    rope(&mut config)?;
    (gguf.refine)(&mut config)?;
    refuse_others(&config, gguf)?;
    let Config { map, keys, .. } = config;
    let mut spec = super::read(&Fields::of(file.metadata().path(), map, keys))?;
    rewrite(&mut spec, gguf, file)?;
    spec.dtype = crate::checkpoint::computed_in(file);
    Ok(spec)
}

/// The family of a file's architecture.
fn find(file: &File) -> Result<(&'static Family, &'static Gguf), ModelError> {
    let metadata = file.metadata();
    if let Some(kind) = metadata.text(KIND)?
        && kind != "model"
    {
        return Err(metadata.unsupported(KIND, "adapters and projectors are not served; pass the model's own file"));
    }
    let architecture = metadata.text(ARCHITECTURE)?.ok_or_else(|| metadata.missing(ARCHITECTURE))?;
    let experts = metadata.unsigned(&format!("{architecture}.expert_count"))?.unwrap_or(0) > 0;
    let spelled =
        || FAMILIES.iter().filter_map(|family| Some((family, family.gguf.as_ref().filter(|gguf| gguf.is_read)?)));
    let found = spelled().filter(|(_, gguf)| gguf.architecture == architecture);
    let found: Vec<_> = found.collect();
    let one = found.iter().find(|(_, gguf)| found.len() == 1 || gguf.experts == experts);
    one.copied().ok_or_else(|| {
        let mut names: Vec<String> = spelled().map(|(_, gguf)| format!("{:?}", gguf.architecture)).collect();
        names.dedup();
        names.sort_unstable();
        names.dedup();
        metadata.unsupported(ARCHITECTURE, &format!("supported are {}", names.join(", ")))
    })
}

/// A file has at least one tensor for each layer that it claims, so that no small file makes a large model.
fn check_layers(config: &Config<'_>) -> Result<(), ModelError> {
    let key = config.key("block_count");
    match config.metadata().unsigned(&key)? {
        Some(layers) if layers > config.file.tensor_count() as u64 => {
            Err(config.metadata().invalid(&key, &format!("there are {} tensors", config.file.tensor_count())))
        }
        _ => Ok(()),
    }
}

/// The vocabulary's size, its special tokens, and whether the head is the table.
fn vocabulary(config: &mut Config<'_>) -> Result<(), ModelError> {
    let rows = match config.file.shape(TABLE) {
        Some([rows, _]) if *rows <= VOCAB_MAX as usize => *rows,
        found => {
            let problem = match found {
                None => "is missing".to_owned(),
                Some(shape) => {
                    format!("has the shape {shape:?}; it must have two dimensions, the first at most {VOCAB_MAX}")
                }
            };
            let path = config.metadata().path().to_owned();
            return Err(ModelError::Tensor { path, tensor: TABLE.to_owned(), problem });
        }
    };
    // The key counts what the vocabulary has; a table may be longer.
    config.get("vocab_size");
    config.set("vocab_size", rows.into(), "vocab_size");
    config.map.insert("tie_word_embeddings".to_owned(), config.file.shape(HEAD).is_none().into());
    let ends = EndTokens::read(config.metadata())?;
    if let Some(bos) = ends.bos_id {
        config.map.insert("bos_token_id".to_owned(), bos.into());
    }
    config.map.insert("eos_token_id".to_owned(), ends.end_ids.into());
    Ok(())
}

/// Checks that keys and values have the same size.
fn heads(config: &mut Config<'_>) -> Result<(), ModelError> {
    let (key, value) = (config.number("attention.key_length")?, config.number("attention.value_length")?);
    if value.is_some() && key != value {
        return Err(config.unsupported("attention.value_length", "it must be attention.key_length"));
    }
    // Some files of dense models count their experts.
    for name in ["expert_count", "expert_used_count"] {
        let key = config.key(name);
        if config.metadata().unsigned(&key)? == Some(0) {
            config.known.push(key);
        }
    }
    Ok(())
}

/// The share of a head that is rotated, and the scaling of frequencies.
fn rope(config: &mut Config<'_>) -> Result<(), ModelError> {
    let head_dim = match (config.field("head_dim"), config.field("hidden_size"), config.field("num_attention_heads")) {
        (Some(dim), _, _) => Some(dim),
        (None, Some(hidden), Some(heads)) if heads > 0 => Some(hidden / heads),
        _ => None,
    };
    let rotated = config.number("rope.dimension_count")?;
    if let (Some(rotated), Some(dim)) = (rotated, head_dim)
        && rotated != dim
    {
        #[allow(clippy::cast_precision_loss, reason = "sizes of heads; those that lose precision are refused")]
        let share = rotated as f64 / dim as f64;
        config.set("partial_rotary_factor", json!(share), "rope.dimension_count");
    }
    let scaling = scaling(config, rotated.or(head_dim).unwrap_or(0))?;
    if let Some(scaling) = scaling {
        config.set("rope_scaling", scaling, "rope.scaling.type");
    }
    Ok(())
}

/// The scaling of frequencies as an object of `config.json`; `None` for none.
fn scaling(config: &mut Config<'_>, rotated: u64) -> Result<Option<serde_json::Value>, ModelError> {
    // Notes that nothing follows from.
    config.get("rope.scaling.finetuned");
    let kind = config.get("rope.scaling.type").cloned();
    let kind = match &kind {
        None => None,
        Some(Value::Text(kind)) => Some(kind.as_str()).filter(|kind| *kind != "none"),
        Some(_) => return Err(config.unsupported("rope.scaling.type", "it must be a string")),
    };
    let pairs = usize::try_from(rotated / 2).unwrap_or(usize::MAX);
    let [short, long] = LONG_DIVISORS.map(|name| config.file.vector(name, pairs));
    let (short, long, plain) = (short?, long?, config.file.vector(ROPE_DIVISORS, pairs)?);
    let (factor, attention) = (config.float("rope.scaling.factor")?, config.float("rope.scaling.attn_factor")?);
    let original = config.number("rope.scaling.original_context_length")?;
    let betas = (config.float("rope.scaling.yarn_beta_fast")?, config.float("rope.scaling.yarn_beta_slow")?);
    let longrope = |short: Vec<f32>, long: Vec<f32>, original: u64, attention: f64| {
        json!({"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention,
               "original_max_position_embeddings": original})
    };
    if short.is_some() != long.is_some() {
        let hint = format!("{} and {} are used together", LONG_DIVISORS[0], LONG_DIVISORS[1]);
        return Err(config.unsupported("rope.scaling.type", &hint));
    }
    // Old files have a linear scaling's factor alone.
    let kind = match factor {
        Some(factor) if kind.is_none() && short.is_none() && plain.is_none() && factor != 1.0 && factor != 0.0 => {
            Some("linear")
        }
        _ => kind,
    };
    match (kind, short.zip(long), plain) {
        (None | Some("longrope"), Some((short, long)), None) => {
            let original = original
                .ok_or_else(|| config.metadata().missing(&config.key("rope.scaling.original_context_length")))?;
            Ok(Some(longrope(short, long, original, attention.unwrap_or(1.0))))
        }
        // Llama 3's scaling has no key: its divisors are a tensor, for contexts of all lengths.
        (None, None, Some(plain)) => Ok(Some(longrope(plain.clone(), plain, 1, 1.0))),
        (None, None, None) => Ok(None),
        (Some("linear"), None, None) => Ok(Some(json!({"rope_type": "linear", "factor": factor}))),
        (Some("yarn"), None, None) => {
            let mut object = json!({"rope_type": "yarn", "factor": factor, "beta_fast": betas.0, "beta_slow": betas.1});
            if let Some(original) = original {
                object["original_max_position_embeddings"] = original.into();
            }
            if attention.is_some_and(|factor| factor != 1.0) {
                return Err(config.unsupported("rope.scaling.attn_factor", "only 1 is implemented for yarn"));
            }
            Ok(Some(object))
        }
        _ => {
            let hint = "supported are \"none\", \"linear\", \"yarn\", and \"longrope\" with its tensors of factors";
            Err(config.unsupported("rope.scaling.type", hint))
        }
    }
}

/// Refuses the first key of the architecture that nothing read and nothing ignores.
fn refuse_others(config: &Config<'_>, gguf: &Gguf) -> Result<(), ModelError> {
    let ignored: Vec<String> = IGNORED.iter().chain(gguf.ignored).map(|name| config.key(name)).collect();
    let prefix = config.key("");
    let known = |key: &str| config.known.iter().chain(&ignored).any(|known| known == key);
    match config.metadata().iter().find(|(key, _)| key.starts_with(&prefix) && !known(key)) {
        None => Ok(()),
        Some((key, _)) => {
            let hint = format!("Lagoon does not know this key of {:?} models", gguf.architecture);
            Err(config.metadata().unsupported(key, &hint))
        }
    }
}

/// A part of a model, and the parts of a file's tensors that are its rows in this order.
pub(super) struct Moved {
    pub(super) from: Part,
    pub(super) to: Vec<Part>,
}

/// Rewrites a model's parts to the file's tensors. Returns each with those that it became.
pub(super) fn rewrite(spec: &mut ModelSpec, gguf: &Gguf, file: &File) -> Result<Vec<Moved>, ModelError> {
    let experts = spec.layers.iter().find_map(|layer| match &layer.mlp {
        Mlp::Dense(_) => None,
        Mlp::Experts(mixture) => Some(mixture.count),
    });
    let (head_dim, experts) = (spec.geometry.head_dim as usize, experts.unwrap_or(0));
    let rewriter = Rewriter { gguf, file, head_dim, experts, moved: RefCell::default() };
    let heads = spec.geometry.heads as usize + spec.geometry.kv_heads as usize;
    if 2 * heads * spec.layers.len() > super::common::PIECES_MAX {
        let key = format!("{}.attention.head_count", gguf.architecture);
        return Err(file.metadata().invalid(&key, "all layers together have too many heads"));
    }
    let Embedding { table, positions, norm, .. } = &mut spec.embedding;
    rewriter.all(std::iter::once(table).chain(positions).chain(&mut spec.head))?;
    rewriter.norms(norm.iter_mut().chain([&mut spec.final_norm]))?;
    for layer in &mut spec.layers {
        let norms =
            [&mut layer.attention_norm, &mut layer.attention_out_norm, &mut layer.mlp_norm, &mut layer.mlp_out_norm];
        rewriter.norms(norms.into_iter().flatten())?;
        let attention = &mut layer.attention;
        rewriter.lists([&mut attention.qkv, &mut attention.qkv_bias])?;
        rewriter.all([&mut attention.out].into_iter().chain(&mut attention.out_bias).chain(&mut attention.sinks))?;
        if let Some(HeadNorms { q, k, offset, .. }) = &mut attention.head_norms {
            rewriter.lists([q, k])?;
            rewriter.add(offset);
        }
        match &mut layer.mlp {
            Mlp::Dense(dense) => {
                rewriter.lists([&mut dense.up, &mut dense.up_bias])?;
                rewriter.all([&mut dense.down].into_iter().chain(&mut dense.down_bias))?;
            }
            Mlp::Experts(of) => {
                let outer = [&mut of.router].into_iter().chain(&mut of.router_bias).chain(&mut of.choice_bias);
                rewriter.all(outer)?;
                rewriter.lists([&mut of.up, &mut of.up_bias, &mut of.down, &mut of.down_bias])?;
                if let Some(shared) = &mut of.shared {
                    rewriter.lists([&mut shared.up, &mut shared.up_bias])?;
                    rewriter.all([&mut shared.down].into_iter().chain(&mut shared.down_bias))?;
                }
            }
        }
    }
    spec.names.optional_prefix = "";
    spec.names.redundant = READ_AS_KEYS;
    spec.names.layers_beyond = ("blk.", spec.names.layers_beyond.1);
    Ok(rewriter.moved.into_inner())
}

struct Rewriter<'a> {
    gguf: &'a Gguf,
    file: &'a File,
    head_dim: usize,
    /// Experts of a layer.
    experts: usize,
    moved: RefCell<Vec<Moved>>,
}

impl Rewriter<'_> {
    /// Parts that stay single.
    fn all<'p>(&self, parts: impl IntoIterator<Item = &'p mut Part>) -> Result<(), ModelError> {
        for part in parts {
            let rewritten = self.part(part)?;
            let [one] = <[Part; 1]>::try_from(rewritten).map_err(|_several| self.unknown(&part.tensor))?;
            *part = one;
        }
        Ok(())
    }

    fn lists<'p>(&self, lists: impl IntoIterator<Item = &'p mut Vec<Part>>) -> Result<(), ModelError> {
        for list in lists {
            let rewritten = list.iter().map(|part| self.part(part)).collect::<Result<Vec<_>, _>>()?;
            *list = rewritten.into_iter().flatten().collect();
        }
        Ok(())
    }

    fn norms<'p>(&self, norms: impl IntoIterator<Item = &'p mut NormSpec>) -> Result<(), ModelError> {
        for norm in norms {
            self.all([&mut norm.weight].into_iter().chain(&mut norm.bias))?;
            self.add(&mut norm.offset);
        }
        Ok(())
    }

    /// An offset that the file has added already.
    fn add(&self, offset: &mut f32) {
        if self.gguf.adds_offsets {
            *offset = 0.0;
        }
    }

    fn unknown(&self, tensor: &str) -> ModelError {
        let problem = format!("has no name in {:?} files", self.gguf.architecture);
        ModelError::Tensor { path: self.file.metadata().path().to_owned(), tensor: tensor.to_owned(), problem }
    }

    /// [`Rewriter::place`], noted.
    fn part(&self, part: &Part) -> Result<Vec<Part>, ModelError> {
        let to = self.place(part)?;
        self.moved.borrow_mut().push(Moved { from: part.clone(), to: to.clone() });
        Ok(to)
    }

    /// A part of the file's tensors, or several that are it together.
    fn place(&self, part: &Part) -> Result<Vec<Part>, ModelError> {
        if let Some(own) = (self.gguf.part)(part) {
            return Ok(vec![own]);
        }
        let (pattern, numbers) = pattern(&part.tensor);
        let mut entries = self.gguf.tensors.iter().flat_map(|entries| entries.iter());
        let found = entries.find(|(name, _, _)| *name == pattern);
        let (_, name, layout) = found.ok_or_else(|| self.unknown(&part.tensor))?;
        let tensor = match numbers.first() {
            Some(layer) => name.replacen("{}", &layer.to_string(), 1),
            None => (*name).to_owned(),
        };
        let renamed = Part { tensor, ..part.clone() };
        Ok(match layout {
            Layout::Same => vec![renamed],
            Layout::InTurns => self.in_turns(&renamed),
            Layout::Turned => vec![Part::matrix(renamed.tensor, part.rows, part.cols)],
            Layout::OfExperts => {
                let expert = numbers.get(1).copied().unwrap_or(0);
                let shape = vec![self.experts, part.rows, part.cols];
                vec![Part { shape, offset: expert * part.rows * part.cols, ..renamed }]
            }
        })
    }

    /// Rows of heads in the order of halves.
    fn in_turns(&self, part: &Part) -> Vec<Part> {
        let dim = self.head_dim;
        let halves = (0..part.rows / dim).flat_map(|head| [head * dim, head * dim + 1]);
        halves.map(|first| part.rows(first, dim / 2, 2)).collect()
    }
}

/// A name with `{}` in place of its numbers, and those.
pub(super) fn pattern(name: &str) -> (String, Vec<usize>) {
    let mut numbers = Vec::new();
    let pieces = name.split('.').map(|piece| match piece.parse() {
        Ok(number) => {
            numbers.push(number);
            "{}"
        }
        Err(_word) => piece,
    });
    (pieces.collect::<Vec<_>>().join("."), numbers)
}
