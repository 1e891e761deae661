//! From a model in a directory to the keys and tensors of a GGUF file: a family's table ([`gguf::Gguf`]) in the other direction.
//!
//! The values of keys come from the [`ModelSpec`], by the fields that the table names. The family's parts are rewritten as at
//! reading, and each tensor of the file is put together from the parts that became rows of it. The keys are then read back as a
//! file's are: a model that they do not give again is refused, so that no file means another model than its directory.

use super::gguf::{self, Gguf, LONG_DIVISORS, Moved, ROPE_DIVISORS};
use super::{FAMILIES, Family};
use crate::fields::{Fields, narrow};
use crate::gguf::{Gguf as File, Item, Keys};
use crate::spec::{HeadNorms, Mlp, NormSpec, Part};
use crate::{ModelError, ModelSpec, Rope, RopeScaling, RopeSpec};
use std::collections::BTreeMap;
use std::path::Path;

/// How far frequencies and factors of rotation may be from the model's, as a share: some pass through a quotient.
const ROTATION_SHARE: f32 = 1e-6;

/// A part of the model that becomes rows of a file's tensor.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) from: Part,
    /// First row of `from`.
    pub(crate) first: usize,
    /// The same rows, as the file has them.
    pub(crate) to: Part,
    /// Added to every element.
    pub(crate) added: f32,
}

/// A tensor of a file: made of pieces, or a vector of its own.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    Pieces(Vec<Piece>),
    Vector(Vec<f32>),
}

impl Content {
    pub(crate) fn pieces(&self) -> Option<&[Piece]> {
        match self {
            Self::Pieces(pieces) => Some(pieces),
            Self::Vector(_) => None,
        }
    }
}

/// A model as a file has it, without its vocabulary.
#[derive(Debug)]
pub(crate) struct Translated {
    pub(crate) keys: Keys,
    /// Names, shapes and contents.
    pub(crate) tensors: Vec<(String, Vec<usize>, Content)>,
    /// With the file's names.
    pub(crate) spec: ModelSpec,
}

/// Translates the model whose configuration is at `path`.
///
/// # Errors
/// [`ModelError::NoGguf`] for a family without a table, [`ModelError::NotExpressed`] for a model that the keys cannot express.
pub(crate) fn translate(path: &Path, spec: &ModelSpec) -> Result<Translated, ModelError> {
    let (_, table) = find(path, spec.family)?;
    let fields = Fields::read(path)?;
    let refuse = |problem: String| {
        let architecture = table.architecture.to_owned();
        ModelError::NotExpressed { path: path.to_owned(), architecture, problem }
    };
    if spec.layers.iter().any(|layer| layer.attention.latent.is_some()) {
        return Err(refuse("its latent attention is read, and not written".to_owned()));
    }
    let (keys, vectors) = keys(spec, table, &fields);
    let mut rewritten = spec.clone();
    let moved = gguf::rewrite(&mut rewritten, table, &File::planned(path, &keys, &[], &[])?)?;
    let mut tensors = gather(spec, table, moved);
    for (name, shape, pieces) in &tensors {
        let elements: usize = pieces.iter().map(|piece| piece.to.rows * piece.to.cols).sum();
        if elements != shape.iter().product::<usize>() {
            return Err(refuse(format!("the tensor `{name}` would have {elements} elements for the shape {shape:?}")));
        }
    }
    let shapes: Vec<_> = tensors.iter().map(|(name, shape, _)| (name.clone(), shape.clone())).collect();
    let again =
        gguf::read(&File::planned(path, &keys, &shapes, &vectors)?).map_err(|error| refuse(error.to_string()))?;
    if let Some(what) = difference(&rewritten, &again) {
        return Err(refuse(format!("its {what} would be read back as another one")));
    }
    let vectors = vectors.into_iter().map(|(name, values)| (name, vec![values.len()], Content::Vector(values)));
    let pieces = tensors.drain(..).map(|(name, shape, pieces)| (name, shape, Content::Pieces(pieces)));
    Ok(Translated { keys, tensors: pieces.chain(vectors).collect(), spec: rewritten })
}

fn find(path: &Path, family: &str) -> Result<(&'static Family, &'static Gguf), ModelError> {
    let tables = || FAMILIES.iter().filter_map(|of| Some((of, of.gguf.as_ref()?)));
    tables().find(|(of, _)| of.model_type == family).ok_or_else(|| {
        let families: Vec<&str> = tables().map(|(of, _)| of.model_type).collect();
        ModelError::NoGguf { path: path.to_owned(), family: family.to_owned(), families: families.join(", ") }
    })
}

/// Tensors in the order of the model's parts, each with its pieces.
fn gather(spec: &ModelSpec, table: &Gguf, moved: Vec<Moved>) -> Vec<(String, Vec<usize>, Vec<Piece>)> {
    let offsets = if table.adds_offsets { offsets(spec) } else { BTreeMap::new() };
    let mut tensors: Vec<(String, Vec<usize>, Vec<Piece>)> = Vec::new();
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for Moved { from, to } in moved {
        let added = offsets.get(from.tensor.as_str()).copied().unwrap_or(0.0);
        let mut first = 0;
        for to in to {
            let place = *places.entry(to.tensor.clone()).or_insert_with(|| {
                tensors.push((to.tensor.clone(), to.shape.clone(), Vec::new()));
                tensors.len() - 1
            });
            let rows = to.rows;
            tensors[place].2.push(Piece { from: from.clone(), first, to, added });
            first += rows;
        }
    }
    tensors
}

/// Offsets of norms' weights by tensor.
fn offsets(spec: &ModelSpec) -> BTreeMap<&str, f32> {
    let of = |norm: &NormSpec| norm.offset;
    let mut found = BTreeMap::new();
    let outer = spec.embedding.norm.iter().chain([&spec.final_norm]);
    found.extend(outer.map(|norm| (norm.weight.tensor.as_str(), of(norm))));
    for layer in &spec.layers {
        let norms = [&layer.attention_norm, &layer.attention_out_norm, &layer.mlp_norm, &layer.mlp_out_norm];
        found.extend(norms.into_iter().flatten().map(|norm| (norm.weight.tensor.as_str(), of(norm))));
        if let Some(HeadNorms { q, k, offset, .. }) = &layer.attention.head_norms {
            found.extend(q.iter().chain(k).map(|part| (part.tensor.as_str(), *offset)));
        }
    }
    found
}

/// Vectors of a file by name.
type Vectors = Vec<(String, Vec<f32>)>;

/// The keys of a model, and the vectors that files have in place of keys.
fn keys(spec: &ModelSpec, table: &Gguf, fields: &Fields) -> (Keys, Vectors) {
    let mut keys = Keys::default();
    let prefix = table.architecture;
    keys.set(gguf::ARCHITECTURE, Item::Text(prefix.to_owned()));
    let of = |name: &str| format!("{prefix}.{name}");
    for (name, field) in table.fields.iter().flat_map(|fields| fields.iter()) {
        if let Some(item) = value(spec, fields, field) {
            keys.set(of(name), item);
        }
        if *name == KEY_LENGTH {
            keys.set(of(VALUE_LENGTH), Item::U32(spec.geometry.head_dim));
        }
    }
    keys.set(of("vocab_size"), count(spec.vocab));
    let mut vectors = Vec::new();
    if let Some(rope) = spec.ropes.first().filter(|rope| rope.rotated > 0) {
        keys.set(of("rope.dimension_count"), count(rope.rotated));
        let (items, divisors) = scaling(rope, spec.rope_dim());
        items.into_iter().for_each(|(name, item)| keys.set(of(name), item));
        vectors = divisors;
    }
    (table.more)(spec).into_iter().for_each(|(name, item)| keys.set(of(name), item));
    (keys, vectors)
}

const KEY_LENGTH: &str = "attention.key_length";
const VALUE_LENGTH: &str = "attention.value_length";

fn count(count: usize) -> Item {
    Item::U32(u32::try_from(count).unwrap_or(u32::MAX))
}

/// The value of a field of `config.json`: what the model has, whether the configuration says so or leaves it out. `None` where it has
/// no such thing.
fn value(spec: &ModelSpec, fields: &Fields, field: &str) -> Option<Item> {
    let layers = &spec.layers;
    let dense = || layers.iter().find_map(|of| if let Mlp::Dense(dense) = &of.mlp { Some(&**dense) } else { None });
    let mixture = || layers.iter().find_map(|of| if let Mlp::Experts(mix) = &of.mlp { Some(&**mix) } else { None });
    let written = || fields.get(field).and_then(serde_json::Value::as_u64).and_then(|n| u32::try_from(n).ok());
    let theta = |index: usize| spec.ropes.get(index).map(|rope| Item::F32(narrow(rope.theta)));
    match field {
        "hidden_size" | "n_embd" => Some(count(spec.hidden)),
        "num_hidden_layers" | "n_layer" => Some(count(layers.len())),
        "num_attention_heads" | "n_head" => Some(Item::U32(spec.geometry.heads)),
        "num_key_value_heads" => Some(Item::U32(spec.geometry.kv_heads)),
        "head_dim" => Some(Item::U32(spec.geometry.head_dim)),
        // A model may serve more than the field says (YaRN).
        "max_position_embeddings" | "n_positions" => Some(Item::U32(written().unwrap_or(spec.max_positions))),
        "intermediate_size" | "n_inner" => written().map(Item::U32).or_else(|| dense().map(|dense| count(dense.width))),
        "moe_intermediate_size" => mixture().map(|mixture| count(mixture.width)),
        "num_experts" | "num_local_experts" => mixture().map(|mixture| count(mixture.count)),
        "num_experts_per_tok" => mixture().map(|mixture| count(mixture.routing.top_k)),
        "rms_norm_eps" | "layer_norm_epsilon" => Some(Item::F32(spec.final_norm.eps)),
        "rope_theta" => theta(0),
        "rope_local_base_freq" => theta(1),
        "sliding_window" => layers.iter().find_map(|layer| layer.attention.window).map(Item::U32),
        "attn_logit_softcapping" => spec.attention_softcap.map(Item::F32),
        "final_logit_softcapping" => spec.logits_softcap.map(Item::F32),
        _ => written().map(Item::U32),
    }
}

/// Keys and vectors of a table's scaling.
fn scaling(rope: &RopeSpec, dim: u32) -> (Vec<(&'static str, Item)>, Vectors) {
    let kind = |name: &str| ("rope.scaling.type", Item::Text(name.to_owned()));
    let original = |positions: u64| {
        ("rope.scaling.original_context_length", Item::U32(u32::try_from(positions).unwrap_or(u32::MAX)))
    };
    match &rope.scaling {
        RopeScaling::None => (Vec::new(), Vec::new()),
        RopeScaling::Linear { factor } => {
            (vec![kind("linear"), ("rope.scaling.factor", Item::F32(*factor))], Vec::new())
        }
        RopeScaling::Yarn(yarn) => {
            let items = vec![
                kind("yarn"),
                ("rope.scaling.factor", Item::F32(narrow(yarn.factor))),
                original(yarn.original_positions.into()),
                ("rope.scaling.yarn_beta_fast", Item::F32(narrow(yarn.beta_fast))),
                ("rope.scaling.yarn_beta_slow", Item::F32(narrow(yarn.beta_slow))),
            ];
            (items, Vec::new())
        }
        // A quotient for each frequency, in place of the rule that it comes from.
        RopeScaling::Llama3 { .. } => {
            let plain = Rope::new(&RopeSpec { scaling: RopeScaling::None, ..rope.clone() }, dim);
            let scaled = Rope::new(rope, dim);
            let pairs = plain.inv_freq().iter().zip(scaled.inv_freq()).take(rope.rotated / 2);
            let divisors = pairs.map(|(plain, scaled)| plain / scaled).collect();
            (Vec::new(), vec![(ROPE_DIVISORS.to_owned(), divisors)])
        }
        RopeScaling::LongRope(long) => {
            let items = vec![
                original(long.original_positions),
                ("rope.scaling.attn_factor", Item::F32(narrow(long.attention_factor))),
            ];
            let [short, others] = LONG_DIVISORS.map(str::to_owned);
            (items, vec![(short, long.short.clone()), (others, long.long.clone())])
        }
    }
}

/// The first thing in which a model differs from the one that was read back, in a user's words.
fn difference(model: &ModelSpec, again: &ModelSpec) -> Option<&'static str> {
    let windows = |of: &ModelSpec| of.layers.iter().map(|layer| layer.attention.window).collect::<Vec<_>>();
    let eps = |of: &ModelSpec| of.final_norm.eps;
    let same = [
        ("hidden size", model.hidden == again.hidden),
        ("vocabulary's size", model.vocab == again.vocab),
        ("attention's shape (heads and their size)", model.geometry == again.geometry),
        ("scale of attention", model.attention_scale == again.attention_scale),
        ("soft cap of attention", model.attention_softcap == again.attention_softcap),
        ("soft cap of logits", model.logits_softcap == again.logits_softcap),
        ("biases by distance", model.alibi == again.alibi),
        ("longest sequence", model.max_positions == again.max_positions),
        ("epsilon of norms", eps(model) == eps(again)),
        ("windows of layers", windows(model) == windows(again)),
        ("rotation", same_ropes(model, again)),
        ("embedding", model.embedding == again.embedding),
        ("head", model.head == again.head),
        ("final norm", model.final_norm == again.final_norm),
        ("layers (their parts, activation or experts)", model.layers == again.layers),
    ];
    same.into_iter().find(|(_, same)| !same).map(|(what, _)| what)
}

/// Whether both turn by the same angles, in short contexts and in long ones.
fn same_ropes(model: &ModelSpec, again: &ModelSpec) -> bool {
    let near = |a: &f32, b: &f32| (a - b).abs() <= ROTATION_SHARE * a.abs().max(b.abs());
    let same = |(a, b): (&RopeSpec, &RopeSpec)| {
        [1, u64::MAX].into_iter().all(|context| {
            let [a, b] = [a, b].map(|rope| Rope::new(&rope.for_context(context), model.rope_dim()));
            a.inv_freq().iter().zip(b.inv_freq()).all(|(a, b)| near(a, b)) && near(&a.factor(), &b.factor())
        })
    };
    model.ropes.len() == again.ropes.len() && model.ropes.iter().zip(&again.ropes).all(same)
}
