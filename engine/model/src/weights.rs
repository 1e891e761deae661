//! A model's weights on a device.
//!
//! Tensors are looked up by the names of the [`ModelSpec`] and checked against its shapes. q, k and v (and gate and up, and all
//! experts) go to the device as one weight of stacked parts. Whole tensors and rows of them are not copied on the host
//! without a conversion; transposed and interleaved ones, and many small parts, are. Packed matrices stay as they are on devices
//! that take their format; others are converted row by row, and pages of the file that were converted are given back. Unused tensors are refused: a checkpoint with, say, projection biases
//! would otherwise give wrong results.

use crate::convert::{packed_rows, part_in};
use crate::spec::{Dense, HeadNorms, LatentSpec, MixtureSpec, Mlp, NormSpec, Part};
use crate::{Checkpoint, LoadedTensor, ModelError, ModelSpec, spec};
use bytes::Bytes;
use lagoon_backend::{Device, WeightFormat, WeightPart, WeightSource};
use lagoon_types::DType;
use std::collections::BTreeSet;
use std::fmt;

/// A norm's vectors.
#[derive(Debug)]
pub struct NormWeights<W> {
    pub weight: W,
    pub bias: Option<W>,
}

/// The weights of norms of queries and keys.
#[derive(Debug)]
pub enum HeadNormWeights<W> {
    /// Of each head; vectors of `head_dim`.
    Each { q: W, k: W },
    /// Over all heads.
    All(AllHeadsWeights<W>),
}

/// The weights of norms of queries and keys over all heads, all in f32, in the form that lets devices compute them by norms of
/// whole rows of the fused projection and by norms of heads.
#[derive(Debug)]
pub struct AllHeadsWeights<W> {
    /// `[qkv_dim]`: `sqrt(`[`KEEP_EPS`]`)` for queries, 0 for keys and values. The norm of a row with this weight and epsilon is
    /// the row's queries.
    pub keep_q: W,
    /// `[qkv_dim]`: the norm's weight times `sqrt(q_dim / qkv_dim)`, then 0.
    pub q: W,
    /// The epsilon that belongs to `q`: the norm's, times `q_dim / qkv_dim`.
    pub q_eps: f32,
    /// `[kv_dim]`: zeros.
    pub zeros: W,
    /// `[kv_dim]`.
    pub k: W,
}

/// An epsilon beside which a row's mean square vanishes, so that the norm is a product with its weight. A power of four: its
/// square root is exact.
pub const KEEP_EPS: f32 = (1u64 << 60) as f32;

/// The weights that make an attention's rows.
#[derive(Debug)]
pub enum ProjectionWeights<W> {
    Heads(HeadWeights<W>),
    Latent(Box<LatentWeights<W>>),
}

/// The weights of queries, keys and values.
#[derive(Debug)]
pub struct HeadWeights<W> {
    /// q, k, v stacked by rows.
    pub qkv: W,
    pub bias: Option<W>,
    pub norms: Option<HeadNormWeights<W>>,
}

/// The weights of latent attention. Shapes are those of [`LatentSpec`].
#[derive(Debug)]
pub struct LatentWeights<W> {
    pub low_rank: Option<LowRankWeights<W>>,
    pub queries: W,
    pub latent: W,
    pub latent_bias: Option<W>,
    pub norm: NormWeights<W>,
    pub key: W,
    pub key_bias: Option<W>,
    pub absorb: W,
    pub values: W,
}

/// The weights of [`spec::LowRank`].
#[derive(Debug)]
pub struct LowRankWeights<W> {
    pub down: W,
    pub bias: Option<W>,
    pub norm: NormWeights<W>,
}

/// The weights of one decoder layer. Shapes are those of [`spec::LayerSpec`].
pub struct Layer<D: Device> {
    pub attention_norm: Option<NormWeights<D::Weight>>,
    pub projection: ProjectionWeights<D::Weight>,
    pub out: D::Weight,
    pub out_bias: Option<D::Weight>,
    pub sinks: Option<D::Weight>,
    pub attention_out_norm: Option<NormWeights<D::Weight>>,
    pub mlp_norm: Option<NormWeights<D::Weight>>,
    pub mlp: MlpWeights<D::Weight>,
    pub mlp_out_norm: Option<NormWeights<D::Weight>>,
}

/// The weights of a feed-forward part.
#[derive(Debug)]
pub enum MlpWeights<W> {
    Dense(DenseWeights<W>),
    Experts(Box<MixtureWeights<W>>),
}

/// The weights of a feed-forward layer. Shapes are those of [`Dense`].
#[derive(Debug)]
pub struct DenseWeights<W> {
    pub up: W,
    pub up_bias: Option<W>,
    pub down: W,
    pub down_bias: Option<W>,
}

/// The weights of a mixture of experts. Shapes are those of [`MixtureSpec`].
#[derive(Debug)]
pub struct MixtureWeights<W> {
    pub router: W,
    pub router_bias: Option<W>,
    pub choice_bias: Option<W>,
    pub up: W,
    pub up_bias: Option<W>,
    pub down: W,
    pub down_bias: Option<W>,
    pub shared: Option<DenseWeights<W>>,
}

/// The weights of a model.
pub struct Weights<D: Device> {
    /// `[vocab][hidden]`.
    pub embed: D::Weight,
    /// Learned positions, `[max_positions][hidden]`.
    pub positions: Option<D::Weight>,
    pub embed_norm: Option<NormWeights<D::Weight>>,
    pub layers: Vec<Layer<D>>,
    pub final_norm: NormWeights<D::Weight>,
    /// `[vocab][hidden]`; `None` if the embedding table serves ([`Weights::output`]).
    pub head: Option<D::Weight>,
    /// Element type of all matrices but routers.
    pub dtype: DType,
    /// Bytes of all weights in that type.
    pub bytes: u64,
}

impl<D: Device> fmt::Debug for Layer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer").finish_non_exhaustive()
    }
}

impl<D: Device> fmt::Debug for Weights<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Weights");
        shown.field("dtype", &self.dtype).field("bytes", &self.bytes).field("layers", &self.layers.len());
        shown.finish_non_exhaustive()
    }
}

impl<D: Device> Weights<D> {
    /// The output projection, `[vocab][hidden]`.
    #[must_use]
    pub fn output(&self) -> &D::Weight {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    /// Loads `checkpoint` to `device`. `dtype` converts every tensor (round to nearest even, by way of f32); `None` keeps the
    /// type of the file's matrices, to which vectors in f32 are converted. Where matrices have several, packed ones stay as they
    /// are if `device` takes their format, and others are converted to [`Checkpoint::dtype`].
    /// Routers in f32 stay so. The bias of experts' choice, and weights of norms with an offset, over all heads or of a GGUF file,
    /// are f32.
    /// `progress` is called with the bytes done and the total.
    ///
    /// # Errors
    /// A [`ModelError`] that names the file and the tensor.
    pub fn load(
        device: &mut D,
        checkpoint: &Checkpoint,
        spec: &ModelSpec,
        dtype: Option<DType>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ModelError> {
        check_no_others(checkpoint, spec)?;
        let Some(target) = dtype.or_else(|| checkpoint.dtype()) else {
            let table = &spec.embedding.table.tensor;
            return Err(checkpoint.error(table, "is missing or has no supported element type".to_owned()));
        };
        let routers: BTreeSet<&str> = spec.routers().map(|part| stored_name(checkpoint, spec, &part.tensor)).collect();
        let source = &mut |name: &str, shape: &[usize]| {
            let name = stored_name(checkpoint, spec, name);
            let tensor = checkpoint.tensor(name, shape)?;
            let stored = tensor.format;
            let wide = stored == WeightFormat::F32 && (shape.len() == 1 || routers.contains(name));
            if stored.plain() != Some(target) && dtype.is_none() && !wide && !checkpoint.is_mixed() {
                let stored = stored.plain().map_or_else(|| stored.to_string(), |dtype| dtype.to_string());
                let problem = format!(
                    "has elements of type {stored}, others have {target}\nhint: convert all with --dtype {target}"
                );
                return Err(checkpoint.error(name, problem));
            }
            Ok(tensor)
        };
        let keep_packed = dtype.is_none() && checkpoint.is_mixed();
        Self::build_with(device, spec, (target, checkpoint.has_wide_norms(), keep_packed), progress, source)
    }

    /// Builds the weights from the tensors of `source`, called with each name and shape. Matrices are converted to `dtype`.
    /// Used by [`Weights::load`] and by benchmarks with random weights.
    ///
    /// # Errors
    /// Those of `source` and of the device.
    ///
    /// # Panics
    /// If `source` returns another number of bytes than requested.
    pub fn build(
        device: &mut D,
        spec: &ModelSpec,
        dtype: DType,
        progress: &mut dyn FnMut(u64, u64),
        source: &mut TensorSource<'_>,
    ) -> Result<Self, ModelError> {
        Self::build_with(device, spec, (dtype, false, false), progress, source)
    }

    fn build_with(
        device: &mut D,
        spec: &ModelSpec,
        (dtype, wide_norms, keep_packed): (DType, bool, bool),
        progress: &mut dyn FnMut(u64, u64),
        source: &mut TensorSource<'_>,
    ) -> Result<Self, ModelError> {
        let total = spec.parameters() * dtype.size() as u64;
        let mut loader = Loader { device, dtype, wide_norms, keep_packed, source, progress, done: 0, total, bytes: 0 };
        let embedding = &spec.embedding;
        let mut weights = Self {
            embed: loader.matrix(&[&embedding.table])?,
            positions: embedding.positions.as_ref().map(|part| loader.matrix(&[part])).transpose()?,
            embed_norm: embedding.norm.as_ref().map(|norm| loader.norm(norm)).transpose()?,
            layers: spec.layers.iter().map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?,
            final_norm: loader.norm(&spec.final_norm)?,
            head: spec.head.as_ref().map(|part| loader.matrix(&[part])).transpose()?,
            dtype,
            bytes: 0,
        };
        weights.bytes = loader.bytes;
        assert_eq!(loader.done, total, "ModelSpec::parameters counts what is loaded");
        Ok(weights)
    }
}

/// Source of stored tensors by name and shape.
pub type TensorSource<'a> = dyn FnMut(&str, &[usize]) -> Result<LoadedTensor, ModelError> + 'a;

/// Parts that are smaller than this on average are copied into one.
const PART_BYTES_MIN: usize = 16 << 10;

struct Loader<'a, 'p, 's, D: Device> {
    device: &'a mut D,
    dtype: DType,
    /// Whether norms' weights are f32 beside matrices in 16 bits.
    wide_norms: bool,
    /// Whether packed matrices stay as they are where the device takes their format.
    keep_packed: bool,
    source: &'a mut TensorSource<'s>,
    progress: &'a mut (dyn FnMut(u64, u64) + 'p),
    done: u64,
    total: u64,
    /// Bytes that the device was given.
    bytes: u64,
}

impl<D: Device> Loader<'_, '_, '_, D> {
    fn layer(&mut self, layer: &spec::LayerSpec) -> Result<Layer<D>, ModelError> {
        let attention = &layer.attention;
        Ok(Layer {
            attention_norm: layer.attention_norm.as_ref().map(|norm| self.norm(norm)).transpose()?,
            projection: match &attention.latent {
                Some(latent) => ProjectionWeights::Latent(Box::new(self.latent(latent)?)),
                None => ProjectionWeights::Heads(HeadWeights {
                    qkv: self.stacked(&attention.qkv)?,
                    bias: self.vectors(&attention.qkv_bias, 1)?,
                    norms: attention.head_norms.as_ref().map(|norms| self.head_norms(norms)).transpose()?,
                }),
            },
            out: self.matrix(&[&attention.out])?,
            out_bias: self.vector(attention.out_bias.as_ref())?,
            sinks: self.vector(attention.sinks.as_ref())?,
            attention_out_norm: layer.attention_out_norm.as_ref().map(|norm| self.norm(norm)).transpose()?,
            mlp_norm: layer.mlp_norm.as_ref().map(|norm| self.norm(norm)).transpose()?,
            mlp: match &layer.mlp {
                Mlp::Dense(dense) => MlpWeights::Dense(self.dense(dense)?),
                Mlp::Experts(mixture) => MlpWeights::Experts(Box::new(self.mixture(mixture)?)),
            },
            mlp_out_norm: layer.mlp_out_norm.as_ref().map(|norm| self.norm(norm)).transpose()?,
        })
    }

    fn latent(&mut self, latent: &LatentSpec) -> Result<LatentWeights<D::Weight>, ModelError> {
        let low_rank = latent.low_rank.as_ref().map(|low| {
            Ok::<_, ModelError>(LowRankWeights {
                down: self.matrix(&[&low.down])?,
                bias: self.vector(low.bias.as_ref())?,
                norm: self.norm(&low.norm)?,
            })
        });
        Ok(LatentWeights {
            low_rank: low_rank.transpose()?,
            queries: self.stacked(&latent.queries)?,
            latent: self.matrix(&[&latent.latent])?,
            latent_bias: self.vector(latent.latent_bias.as_ref())?,
            norm: self.norm(&latent.norm)?,
            key: self.stacked(&latent.key)?,
            key_bias: self.vectors(&latent.key_bias, 1)?,
            absorb: self.stacked(&latent.absorb)?,
            values: self.stacked(&latent.values)?,
        })
    }

    fn head_norms(&mut self, norms: &HeadNorms) -> Result<HeadNormWeights<D::Weight>, ModelError> {
        let (q, k): (Vec<&Part>, Vec<&Part>) = (norms.q.iter().collect(), norms.k.iter().collect());
        if !norms.all_heads {
            let (q, k) = (self.scale(&q, norms.offset)?, self.scale(&k, norms.offset)?);
            return Ok(HeadNormWeights::Each { q, k });
        }
        let mut weight = self.values(&q, norms.offset)?;
        let (q_dim, kv_dim) = (weight.len(), k.iter().map(|part| part.cols).sum::<usize>());
        let qkv_dim = q_dim + 2 * kv_dim;
        let share = q_dim as f32 / qkv_dim as f32;
        weight.iter_mut().for_each(|x| *x *= share.sqrt());
        weight.resize(qkv_dim, 0.0);
        let mut keep = vec![KEEP_EPS.sqrt(); q_dim];
        keep.resize(qkv_dim, 0.0);
        Ok(HeadNormWeights::All(AllHeadsWeights {
            keep_q: self.pass_on(&[], vector(&keep))?,
            q: self.pass_on(&q, vector(&weight))?,
            q_eps: norms.eps * share,
            zeros: self.pass_on(&[], vector(&vec![0.0; kv_dim]))?,
            k: self.wide(&k, norms.offset)?,
        }))
    }

    fn norm(&mut self, norm: &NormSpec) -> Result<NormWeights<D::Weight>, ModelError> {
        let weight = self.scale(&[&norm.weight], norm.offset)?;
        Ok(NormWeights { weight, bias: self.vector(norm.bias.as_ref())? })
    }

    fn dense(&mut self, dense: &Dense) -> Result<DenseWeights<D::Weight>, ModelError> {
        Ok(DenseWeights {
            up: self.stacked(&dense.up)?,
            up_bias: self.vectors(&dense.up_bias, 1)?,
            down: self.matrix(&[&dense.down])?,
            down_bias: self.vector(dense.down_bias.as_ref())?,
        })
    }

    fn mixture(&mut self, mixture: &MixtureSpec) -> Result<MixtureWeights<D::Weight>, ModelError> {
        // Scores differ by less than 16 bits tell.
        let choice_bias = mixture.choice_bias.as_ref().map(|part| self.wide(&[part], 0.0)).transpose()?;
        Ok(MixtureWeights {
            router: self.router(&mixture.router)?,
            router_bias: self.vector(mixture.router_bias.as_ref())?,
            choice_bias,
            up: self.stacked(&mixture.up)?,
            up_bias: self.vectors(&mixture.up_bias, mixture.count)?,
            down: self.stacked(&mixture.down)?,
            down_bias: self.vectors(&mixture.down_bias, mixture.count)?,
            shared: mixture.shared.as_ref().map(|dense| self.dense(dense)).transpose()?,
        })
    }

    /// A vector as one row; `None` if there is none.
    fn vector(&mut self, part: Option<&Part>) -> Result<Option<D::Weight>, ModelError> {
        part.map(|part| self.joined(&[part], 1)).transpose()
    }

    /// Vectors as one weight of `rows` rows; `None` if there are none.
    fn vectors(&mut self, parts: &[Part], rows: usize) -> Result<Option<D::Weight>, ModelError> {
        if parts.is_empty() { Ok(None) } else { self.joined(&parts.iter().collect::<Vec<_>>(), rows).map(Some) }
    }

    /// Vectors one behind the other, as one weight of `rows` rows in the matrices' type.
    fn joined(&mut self, parts: &[&Part], rows: usize) -> Result<D::Weight, ModelError> {
        let mut bytes = Vec::new();
        for part in parts {
            let fetched = self.fetch(part, self.dtype)?;
            bytes.extend_from_slice(&fetched);
        }
        self.give(self.dtype, parts, rows, bytes)
    }

    /// Vectors one behind the other, plus `offset`, in f32 independent of the matrices' type.
    fn wide(&mut self, parts: &[&Part], offset: f32) -> Result<D::Weight, ModelError> {
        let values = self.values(parts, offset)?;
        self.pass_on(parts, vector(&values))
    }

    /// The elements of vectors, one behind the other, plus `offset`.
    fn values(&mut self, parts: &[&Part], offset: f32) -> Result<Vec<f32>, ModelError> {
        let mut values = Vec::new();
        for part in parts {
            let bytes = self.fetch(part, DType::F32)?;
            DType::F32.decode(&bytes, &mut values);
        }
        values.iter_mut().for_each(|x| *x += offset);
        Ok(values)
    }

    /// A norm's weight. A sum would lose too much in 16 bits.
    fn scale(&mut self, parts: &[&Part], offset: f32) -> Result<D::Weight, ModelError> {
        if offset == 0.0 && !self.wide_norms { self.joined(parts, 1) } else { self.wide(parts, offset) }
    }

    fn give(&mut self, dtype: DType, parts: &[&Part], rows: usize, bytes: Vec<u8>) -> Result<D::Weight, ModelError> {
        let cols = bytes.len() / dtype.size() / rows;
        self.pass_on(parts, WeightSource::plain(dtype, cols, vec![(rows, bytes.into())]))
    }

    /// A router, which stays in f32 if it is: files that have it so choose experts by small differences.
    fn router(&mut self, part: &Part) -> Result<D::Weight, ModelError> {
        let tensor = (self.source)(&part.tensor, &part.shape)?;
        let dtype = if tensor.format == WeightFormat::F32 { DType::F32 } else { self.dtype };
        let parts = vec![(part.rows, part_in(part, &tensor, dtype)?)];
        self.pass_on(&[part], WeightSource::plain(dtype, part.cols, parts))
    }

    /// [`Loader::matrix`] of owned parts.
    fn stacked(&mut self, parts: &[Part]) -> Result<D::Weight, ModelError> {
        self.matrix(&parts.iter().collect::<Vec<_>>())
    }

    /// Matrices of as many columns, stacked by rows.
    fn matrix(&mut self, parts: &[&Part]) -> Result<D::Weight, ModelError> {
        let cols = parts[0].cols;
        let mut stacked: Vec<WeightPart> = Vec::with_capacity(parts.len());
        for part in parts {
            assert_eq!(part.cols, cols, "columns of {}", part.tensor);
            stacked.push(self.matrix_part(part)?);
        }
        let bytes: usize = stacked.iter().map(|part| part.bytes.len()).sum();
        let format = stacked[0].format;
        let same = stacked.iter().all(|part| part.format == format);
        if same && stacked.len() > 3 && bytes / stacked.len() < PART_BYTES_MIN {
            let rows = stacked.iter().map(|part| part.rows).sum();
            let mut whole = Vec::with_capacity(bytes);
            stacked.iter().for_each(|part| whole.extend_from_slice(&part.bytes));
            stacked = vec![WeightPart { rows, format, bytes: whole.into() }];
        }
        self.pass_on(parts, WeightSource { cols, parts: stacked })
    }

    /// A matrix as it is stored, if it is packed and stays so, else in the matrices' type.
    fn matrix_part(&mut self, part: &Part) -> Result<WeightPart, ModelError> {
        let tensor = (self.source)(&part.tensor, &part.shape)?;
        let (rows, format) = (part.rows, tensor.format);
        if self.keep_packed
            && format.plain().is_none()
            && self.device.takes(format)
            && let Some(bytes) = packed_rows(part, &tensor)?
        {
            return Ok(WeightPart { rows, format, bytes });
        }
        Ok(WeightPart { rows, format: self.dtype.into(), bytes: part_in(part, &tensor, self.dtype)? })
    }

    fn pass_on(&mut self, parts: &[&Part], source: WeightSource) -> Result<D::Weight, ModelError> {
        self.bytes += source.parts.iter().map(|part| part.bytes.len() as u64).sum::<u64>();
        let weight = self.device.weight(source)?;
        let elements: u64 = parts.iter().map(|part| (part.rows * part.cols) as u64).sum();
        self.done += elements * self.dtype.size() as u64;
        (self.progress)(self.done, self.total);
        Ok(weight)
    }

    /// A part's elements, in `dtype`.
    fn fetch(&mut self, part: &Part, dtype: DType) -> Result<Bytes, ModelError> {
        let tensor = (self.source)(&part.tensor, &part.shape)?;
        part_in(part, &tensor, dtype)
    }
}

/// A vector in f32.
fn vector(values: &[f32]) -> WeightSource {
    let mut bytes = Vec::new();
    DType::F32.encode(values, &mut bytes);
    WeightSource::plain(DType::F32, values.len(), vec![(1, bytes.into())])
}

/// A tensor's name in this checkpoint, which may leave out a prefix.
pub(crate) fn stored_name<'a>(checkpoint: &Checkpoint, spec: &ModelSpec, name: &'a str) -> &'a str {
    match name.strip_prefix(spec.names.optional_prefix) {
        Some(short) if checkpoint.info(name).is_none() && checkpoint.info(short).is_some() => short,
        _ => name,
    }
}

/// Refuses a stored head that differs from the table it is tied to: a fine-tuned one, whose configuration says something else.
fn check_tied_head(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<(), ModelError> {
    let table = stored_name(checkpoint, spec, &spec.embedding.table.tensor);
    let heads = ["lm_head.weight", "embed_out.weight"].into_iter().filter(|_| spec.head.is_none());
    for head in heads.filter(|head| checkpoint.info(head).is_some()) {
        let shape = [spec.vocab, spec.hidden];
        let (stored, tied) = (checkpoint.tensor(head, &shape)?, checkpoint.tensor(table, &shape)?);
        let quantised = stored.quantised.is_some() || tied.quantised.is_some();
        if quantised || (stored.format, &stored.bytes) != (tied.format, &tied.bytes) {
            let problem = format!(
                "differs from `{table}`, to which the configuration ties it\nhint: set tie_word_embeddings to false in \
                 config.json"
            );
            return Err(checkpoint.error(head, problem));
        }
    }
    Ok(())
}

/// Refuses tensors that the model does not use, except redundant ones and layers behind the last one ([`spec::Names`]).
pub(crate) fn check_no_others(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<(), ModelError> {
    let names = &spec.names;
    let used: BTreeSet<&str> = spec.parts().map(|part| stored_name(checkpoint, spec, &part.tensor)).collect();
    let beyond = |name: &str| {
        let (prefix, count) = names.layers_beyond;
        let index = name.strip_prefix(prefix).and_then(|rest| rest.split_once('.'));
        let index = index.and_then(|(index, _)| index.parse::<usize>().ok());
        index.is_some_and(|index| (spec.layers.len()..spec.layers.len() + count).contains(&index))
    };
    // Tools give modules that they quantise biases that are zero.
    let redundant = |name: &str| names.redundant.iter().any(|end| name.ends_with(end)) || checkpoint.is_zero_bias(name);
    check_tied_head(checkpoint, spec)?;
    match checkpoint.tensors().find(|(name, _)| !used.contains(name) && !redundant(name) && !beyond(name)) {
        None => Ok(()),
        Some((name, _)) => {
            let problem = format!(
                "has no place in a {} model of {} layers\nhint: config.json may belong to another model, or the model \
                 has parts (such as biases) that Lagoon does not support",
                spec.family,
                spec.layers.len()
            );
            Err(checkpoint.error(name, problem))
        }
    }
}
