//! From a layer's spec to device operations ([`Decoder`]), and the tensors that they work on ([`Activations`]).
//!
//! A layer is [`Decoder::project`], attention, which is the caller's, and [`Decoder::finish`].

use crate::biased::{linear, norm};
use crate::latent::LatentTensors;
use lagoon_backend::{AttnBatch, AttnRows, Device, DeviceError, ExpertBuffers, Experts, Mode, Partials};
use lagoon_model::spec::{Dense, LatentSpec, LayerSpec, MixtureSpec, Mlp, NormSpec};
use lagoon_model::weights::{
    AllHeadsWeights, DenseWeights, HeadNormWeights, KEEP_EPS, MixtureWeights, MlpWeights, NormWeights,
    ProjectionWeights,
};
use lagoon_model::{ModelSpec, Rope, Weights};
use lagoon_types::{AttentionGeometry, DType, KvDType, KvRun, KvShape};
use std::collections::BTreeMap;

/// A model on a device.
#[derive(Debug)]
pub struct Model<D: Device> {
    pub spec: ModelSpec,
    pub weights: Weights<D>,
    /// The tables of [`ModelSpec::ropes`].
    pub ropes: Vec<Rope>,
}

impl<D: Device> Model<D> {
    /// A model on a device.
    #[must_use]
    pub fn new(spec: &ModelSpec, weights: Weights<D>) -> Self {
        let ropes = spec.ropes.iter().map(|rope| Rope::new(rope, spec.rope_dim())).collect();
        let mut spec = spec.clone();
        spec.embedding.scale = spec.embedding.scale.map(|scale| rounded(scale, weights.dtype));
        Self { spec, weights, ropes }
    }
}

/// A number in another type.
fn rounded(x: f32, dtype: DType) -> f32 {
    let (mut bytes, mut wide) = (Vec::new(), Vec::new());
    dtype.encode(&[x], &mut bytes);
    dtype.decode(&bytes, &mut wide);
    wide[0]
}

/// Tensors of a feed-forward layer of one width.
#[derive(Debug)]
struct DenseTensors<T> {
    shape: (usize, usize),
    /// The product of the up projection, `[rows][columns]`.
    product: T,
    /// `[rows][width]`.
    act: T,
}

/// Tensors of a mixture of experts of one shape.
#[derive(Debug)]
struct MixtureTensors<T> {
    shape: (usize, usize, usize, usize),
    /// `[rows][count]`.
    logits: T,
    buffers: ExpertBuffers<T>,
}

/// Tensors of a forward pass, allocated once for the largest step of `rows` rows and `seqs` sequences.
#[derive(Debug)]
pub struct Activations<D: Device> {
    /// Residual stream, `[rows][hidden]`.
    pub x: D::Tensor,
    /// Normalised input of a block, `[rows][hidden]`.
    normed: D::Tensor,
    /// Output of a block that is normalised before it joins the residual stream, `[rows][hidden]`.
    block: Option<D::Tensor>,
    /// Fused projection, `[rows][qkv_dim]`.
    pub qkv: D::Tensor,
    latent: Option<LatentTensors<D::Tensor>>,
    /// Queries alone, and their norms over all heads, `[rows][qkv_dim]`; the other columns are 0.
    queries: Option<[D::Tensor; 2]>,
    /// Cosines and sines per row, `[rows][rope_dim]`, by index of [`ModelSpec::ropes`].
    ropes: Vec<D::Tensor>,
    pub attention: Partials<D::Tensor>,
    dense: Vec<DenseTensors<D::Tensor>>,
    mixtures: Vec<MixtureTensors<D::Tensor>>,
    /// Last rows, `[seqs][hidden]`.
    last: D::Tensor,
    /// Their hidden states after the final norm, `[seqs][hidden]`.
    pub hidden: D::Tensor,
    /// `[seqs][vocab]`.
    pub logits: D::Tensor,
    /// Host staging buffer.
    host: Vec<f32>,
}

/// Columns of a layer's product, and its width.
const fn dense_shape(of: &Dense) -> (usize, usize) {
    (of.activation.inputs() * of.width, of.width)
}

/// A mixture's number of experts, experts of a token, columns of a product, and width.
const fn shape(of: &MixtureSpec) -> (usize, usize, usize, usize) {
    (of.count, of.routing.top_k, of.activation.inputs() * of.width, of.width)
}

/// Sizes on which a layer's tensors depend. Layers of equal sizes share their tensors.
struct Shapes<'a> {
    /// A feed-forward layer of each shape.
    dense: Vec<&'a Dense>,
    /// A mixture of each shape.
    mixtures: Vec<&'a MixtureSpec>,
    /// Whether outputs of blocks are normalised.
    blocks: bool,
    /// Whether queries are normalised over all heads.
    queries: bool,
    /// The first layer's latent attention; all layers have its sizes.
    latent: Option<&'a LatentSpec>,
}

fn shapes(spec: &ModelSpec) -> Shapes<'_> {
    let (mut dense, mut mixtures) = (BTreeMap::new(), BTreeMap::new());
    for layer in &spec.layers {
        let plain = match &layer.mlp {
            Mlp::Dense(of) => Some(&**of),
            Mlp::Experts(of) => {
                mixtures.entry(shape(of)).or_insert(&**of);
                of.shared.as_ref()
            }
        };
        if let Some(of) = plain {
            dense.entry(dense_shape(of)).or_insert(of);
        }
    }
    Shapes {
        dense: dense.into_values().collect(),
        mixtures: mixtures.into_values().collect(),
        blocks: spec.layers.iter().any(|layer| layer.attention_out_norm.is_some() || layer.mlp_out_norm.is_some()),
        queries: spec.layers.iter().any(|of| of.attention.head_norms.as_ref().is_some_and(|norms| norms.all_heads)),
        latent: spec.layers.first().and_then(|layer| layer.attention.latent.as_deref()),
    }
}

impl<D: Device> Activations<D> {
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    ///
    /// # Panics
    /// If a layer has parallel blocks or experts together with norms of their outputs, or without a norm of their input: no family
    /// does.
    pub fn new(device: &mut D, spec: &ModelSpec, rows: usize, seqs: usize) -> Result<Self, DeviceError> {
        let (geometry, hidden) = (spec.geometry, spec.hidden);
        for layer in &spec.layers {
            assert!(
                !layer.parallel || layer.attention_out_norm.is_none() && layer.mlp_norm.is_some(),
                "parallel blocks join the stream as they are, and read a norm of it"
            );
            let experts = matches!(layer.mlp, Mlp::Experts(_));
            assert!(
                !experts || layer.mlp_out_norm.is_none() && layer.mlp_norm.is_some(),
                "what experts give joins the stream as it is, and they read a norm of it"
            );
        }
        let shapes = shapes(spec);
        let dense = shapes.dense.into_iter().map(|of| {
            let (columns, width) = dense_shape(of);
            let (product, act) = (device.tensor(rows, columns)?, device.tensor(rows, width)?);
            Ok::<_, DeviceError>(DenseTensors { shape: (columns, width), product, act })
        });
        let dense = dense.collect::<Result<_, _>>()?;
        let mixtures =
            shapes.mixtures.into_iter().map(|of| mixture(device, of, hidden, rows)).collect::<Result<_, _>>()?;
        Ok(Self {
            x: device.tensor(rows, hidden)?,
            normed: device.tensor(rows, hidden)?,
            block: if shapes.blocks { Some(device.tensor(rows, hidden)?) } else { None },
            qkv: device.tensor(rows, geometry.qkv_dim())?,
            queries: match shapes.queries {
                true => Some([device.tensor(rows, geometry.qkv_dim())?, device.tensor(rows, geometry.qkv_dim())?]),
                false => None,
            },
            latent: shapes
                .latent
                .map(|of| LatentTensors::new(device, of, geometry.heads as usize, rows))
                .transpose()?,
            ropes: spec
                .ropes
                .iter()
                .map(|_| device.tensor(rows, spec.rope_dim() as usize))
                .collect::<Result<_, _>>()?,
            attention: Partials::new(device, rows, geometry)?,
            dense,
            mixtures,
            last: device.tensor(seqs, hidden)?,
            hidden: device.tensor(seqs, hidden)?,
            logits: device.tensor(seqs, spec.vocab)?,
            host: Vec::new(),
        })
    }
}

/// Elements that [`Activations`] have for each row, and for each sequence.
#[must_use]
pub fn activation_elements(spec: &ModelSpec) -> (u64, u64) {
    let (geometry, hidden) = (spec.geometry, spec.hidden);
    let shapes = shapes(spec);
    let stream = (if shapes.blocks { 3 } else { 2 }) * hidden;
    let projections = if shapes.queries { 3 } else { 1 };
    let attention = projections * geometry.qkv_dim() + geometry.q_dim() + geometry.heads as usize;
    let latent = shapes.latent.map_or(0, |of| crate::latent::elements(of, geometry.heads as usize));
    let ropes = spec.ropes.len() * spec.rope_dim() as usize;
    let dense = shapes.dense.into_iter().map(dense_shape).map(|(columns, width)| columns + width);
    let mixtures = shapes.mixtures.into_iter().map(shape);
    let mixtures = mixtures.map(|(count, top_k, columns, width)| count + top_k * (hidden + columns + width));
    let (dense, mixtures) = (dense.sum::<usize>(), mixtures.sum::<usize>());
    ((stream + attention + latent + ropes + dense + mixtures) as u64, (2 * hidden + spec.vocab) as u64)
}

fn mixture<D: Device>(
    device: &mut D,
    of: &MixtureSpec,
    hidden: usize,
    rows: usize,
) -> Result<MixtureTensors<D::Tensor>, DeviceError> {
    Ok(MixtureTensors {
        shape: shape(of),
        logits: device.tensor(rows, of.count)?,
        buffers: ExpertBuffers::new(device, rows, of.routing.top_k, (hidden, of.width), of.activation)?,
    })
}

/// Where the result of a block goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Joins {
    /// Added to the residual stream.
    Stream,
    /// Written to [`Activations::block`], to be normalised first.
    Block,
}

/// The forward pass of a model, layer by layer.
#[derive(Debug)]
pub struct Decoder<'a, D: Device> {
    pub model: &'a Model<D>,
}

impl<'a, D: Device> Decoder<'a, D> {
    /// A decoder of a model.
    #[must_use]
    pub fn new(model: &'a Model<D>) -> Self {
        Self { model }
    }

    /// Embeds tokens at positions and computes the rotary tables.
    ///
    /// # Errors
    /// Those of the device, as in all functions here.
    pub fn embed(
        &self,
        device: &mut D,
        tokens: &[u32],
        positions: &[u32],
        a: &mut Activations<D>,
    ) -> Result<(), DeviceError> {
        let (embedding, weights) = (&self.model.spec.embedding, &self.model.weights);
        for (rope, tensor) in self.model.ropes.iter().zip(&mut a.ropes) {
            a.host.clear();
            rope.fill(positions, &mut a.host);
            device.write(tensor, 0, &a.host)?;
        }
        let x = if embedding.norm.is_some() { &mut a.normed } else { &mut a.x };
        device.embed(&weights.embed, tokens, x)?;
        if let Some(scale) = embedding.scale {
            device.scale(x, scale, tokens.len())?;
        }
        if let Some(table) = &weights.positions {
            device.embed_add(table, positions, x)?;
        }
        match (&embedding.norm, &weights.embed_norm) {
            (Some(spec), Some(weights)) => norm(device, spec, weights, &a.normed, tokens.len(), &mut a.x),
            _ => Ok(()),
        }
    }

    /// Norm, projection, norms of heads and rotation of `rows` rows; appends K and V to `slots` of the store's layer
    /// `kv_layer`.
    ///
    /// # Errors
    /// Those of the device.
    pub fn project(
        &self,
        device: &mut D,
        layer: usize,
        rows: usize,
        a: &mut Activations<D>,
        (slots, kv, kv_layer): (&[u32], &mut D::Kv, usize),
    ) -> Result<(), DeviceError> {
        let (spec, weights) = (&self.model.spec.layers[layer], &self.model.weights.layers[layer]);
        let x = match (&spec.attention_norm, &weights.attention_norm) {
            (Some(spec), Some(weights)) => {
                norm(device, spec, weights, &a.x, rows, &mut a.normed)?;
                &a.normed
            }
            _ => &a.x,
        };
        let geometry = self.model.spec.geometry;
        let rope = &a.ropes[spec.attention.rope];
        let weights = match &weights.projection {
            ProjectionWeights::Heads(weights) => weights,
            ProjectionWeights::Latent(weights) => {
                let latent = spec.attention.latent.as_ref().expect("weights are built from their spec");
                let tensors = a.latent.as_mut().expect("there are tensors if a layer has latents");
                return tensors.project(
                    device,
                    (latent, weights),
                    x,
                    (rope, geometry),
                    &mut a.qkv,
                    (slots, kv, kv_layer),
                );
            }
        };
        device.matmul(x, &weights.qkv, rows, Mode::Set, &mut a.qkv)?;
        if let Some(bias) = &weights.bias {
            device.add_bias(&mut a.qkv, bias, rows)?;
        }
        if let (Some(norms), Some(weights)) = (&spec.attention.head_norms, &weights.norms) {
            match weights {
                HeadNormWeights::Each { q, k } => device.head_norm(&mut a.qkv, (q, k), norms.eps, geometry, rows)?,
                HeadNormWeights::All(weights) => norm_all_heads(device, weights, norms.eps, geometry, rows, a)?,
            }
        }
        device.rope_append(&mut a.qkv, &a.ropes[spec.attention.rope], geometry, slots, kv, kv_layer)
    }

    /// Output projection of attention, and the feed-forward part.
    ///
    /// # Errors
    /// Those of the device.
    pub fn finish(&self, device: &mut D, layer: usize, rows: usize, a: &mut Activations<D>) -> Result<(), DeviceError> {
        let (spec, weights) = (&self.model.spec.layers[layer], &self.model.weights.layers[layer]);
        if let Some(sinks) = &weights.sinks {
            device.sink(&mut a.attention, sinks, self.model.spec.geometry)?;
        }
        let mlp_norm = spec.mlp_norm.as_ref().zip(weights.mlp_norm.as_ref());
        if let Some((spec, weights)) = mlp_norm.filter(|_| spec.parallel) {
            norm(device, spec, weights, &a.x, rows, &mut a.normed)?;
        }
        let joins = if spec.attention_out_norm.is_some() { Joins::Block } else { Joins::Stream };
        let (mode, out) = joined(joins, &mut a.x, &mut a.block);
        let attended = match (&weights.projection, &mut a.latent) {
            (ProjectionWeights::Latent(weights), Some(tensors)) => {
                tensors.values(device, weights, self.model.spec.geometry, &a.attention.out, rows)?
            }
            _ => &a.attention.out,
        };
        linear(device, (&weights.out, weights.out_bias.as_ref()), attended, rows, mode, out)?;
        if let (Some(spec), Some(weights)) = (&spec.attention_out_norm, &weights.attention_out_norm) {
            join(device, spec, weights, rows, a)?;
        }
        if let Some((spec, weights)) = mlp_norm.filter(|_| !spec.parallel) {
            norm(device, spec, weights, &a.x, rows, &mut a.normed)?;
        }
        self.mlp(device, spec, &weights.mlp, rows, a)?;
        match (&spec.mlp_out_norm, &weights.mlp_out_norm) {
            (Some(spec), Some(weights)) => join(device, spec, weights, rows, a),
            _ => Ok(()),
        }
    }

    fn mlp(
        &self,
        device: &mut D,
        layer: &LayerSpec,
        weights: &MlpWeights<D::Weight>,
        rows: usize,
        a: &mut Activations<D>,
    ) -> Result<(), DeviceError> {
        let joins = if layer.mlp_out_norm.is_some() { Joins::Block } else { Joins::Stream };
        let normed = layer.mlp_norm.is_some();
        match (&layer.mlp, weights) {
            (Mlp::Dense(spec), MlpWeights::Dense(weights)) => dense(device, (spec, normed), weights, rows, joins, a),
            (Mlp::Experts(spec), MlpWeights::Experts(weights)) => {
                experts(device, spec, weights, rows, a)?;
                match (&spec.shared, &weights.shared) {
                    (Some(spec), Some(weights)) => dense(device, (spec, normed), weights, rows, joins, a),
                    _ => Ok(()),
                }
            }
            _ => unreachable!("weights are built from their spec"),
        }
    }

    /// Hidden states of the rows `last` of the residual stream after the final norm, in [`Activations::hidden`].
    ///
    /// # Errors
    /// Those of the device.
    pub fn hidden(&self, device: &mut D, last: &[u32], a: &mut Activations<D>) -> Result<(), DeviceError> {
        device.gather_rows(&a.x, last, &mut a.last)?;
        let weights = &self.model.weights.final_norm;
        norm(device, &self.model.spec.final_norm, weights, &a.last, last.len(), &mut a.hidden)
    }

    /// Logits of the rows `last` of the residual stream, in [`Activations::logits`].
    ///
    /// # Errors
    /// Those of the device.
    pub fn logits(&self, device: &mut D, last: &[u32], a: &mut Activations<D>) -> Result<(), DeviceError> {
        self.hidden(device, last, a)?;
        device.matmul(&a.hidden, self.model.weights.output(), last.len(), Mode::Set, &mut a.logits)?;
        match self.model.spec.logits_softcap {
            Some(cap) => device.softcap(&mut a.logits, cap, last.len()),
            None => Ok(()),
        }
    }

    /// Logits of every token, `[tokens][vocab]`, by the plainest forward pass: all tokens at once, one run of KV.
    ///
    /// # Errors
    /// Those of the device.
    ///
    /// # Panics
    /// If there are more tokens than the model's positions.
    pub fn plain_logits(
        &self,
        device: &mut D,
        kv_dtype: impl Into<KvDType>,
        tokens: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        let (spec, n) = (&self.model.spec, tokens.len());
        let rows = u32::try_from(n).expect("positions are a u32");
        assert!(rows <= spec.max_positions, "tokens within the model's positions");
        let positions: Vec<u32> = (0..rows).collect();
        let mut a = Activations::new(device, spec, n, n)?;
        let layers = u32::try_from(spec.layers.len()).expect("layers are within LAYERS_MAX");
        let mut kv = device.kv(KvShape { layers, ..spec.kv_shape(kv_dtype) }, n)?;
        self.plain_pass(device, tokens, &mut a, &mut kv)?;
        self.logits(device, &positions, &mut a)?;
        let mut logits = Vec::with_capacity(n * spec.vocab);
        device.read(&a.logits, 0..n, 0..spec.vocab, &mut logits)?;
        Ok(logits)
    }

    /// All layers over tokens without a past, whose KV becomes one run in `kv`.
    ///
    /// # Errors
    /// Those of the device.
    ///
    /// # Panics
    /// If the activations or the store have no room for the tokens.
    pub fn plain_pass(
        &self,
        device: &mut D,
        tokens: &[u32],
        a: &mut Activations<D>,
        kv: &mut D::Kv,
    ) -> Result<(), DeviceError> {
        let (spec, n) = (&self.model.spec, tokens.len());
        let rows = u32::try_from(n).expect("positions are a u32");
        let positions: Vec<u32> = (0..rows).collect();
        let seqs = [AttnRows { row0: 0, rows, pos0: 0, run0: 0, runs: 1 }];
        let runs = [KvRun { base: 0, len: rows, first_pos: 0 }];
        self.embed(device, tokens, &positions, a)?;
        for (i, layer) in spec.layers.iter().enumerate() {
            self.project(device, i, n, a, (&positions, kv, i))?;
            let batch = AttnBatch {
                geometry: spec.geometry,
                scale: spec.attention_scale,
                window: layer.attention.window,
                softcap: spec.attention_softcap,
                alibi: spec.alibi,
                seqs: &seqs,
                runs: &runs,
            };
            device.attention(&a.qkv, &batch, kv, i, &mut a.attention)?;
            self.finish(device, i, n, a)?;
        }
        Ok(())
    }
}

/// The mode and the tensor of a block's last product.
fn joined<'a, T>(joins: Joins, x: &'a mut T, block: &'a mut Option<T>) -> (Mode, &'a mut T) {
    match joins {
        Joins::Stream => (Mode::Add, x),
        Joins::Block => (Mode::Set, block.as_mut().expect("there is a tensor if a layer has such a norm")),
    }
}

/// Adds the norm of [`Activations::block`] to the residual stream.
fn join<D: Device>(
    device: &mut D,
    spec: &NormSpec,
    weights: &NormWeights<D::Weight>,
    rows: usize,
    a: &mut Activations<D>,
) -> Result<(), DeviceError> {
    let block = a.block.as_ref().expect("there is a tensor if a layer has such a norm");
    norm(device, spec, weights, block, rows, &mut a.normed)?;
    device.add(&mut a.x, &a.normed, rows)
}

/// Norms of queries and keys over all heads, in place.
///
/// 1. A copy of the rows in which keys and values are 0: the norm with [`KEEP_EPS`].
/// 2. Its norm. The mean is over all columns: the weight is scaled by `sqrt(q_dim / qkv_dim)`, the epsilon by `q_dim / qkv_dim`.
/// 3. The norm of keys, which are one head of `kv_dim`. Queries, as heads of that size, become 0 by their weight.
/// 4. The sum of the two.
fn norm_all_heads<D: Device>(
    device: &mut D,
    weights: &AllHeadsWeights<D::Weight>,
    eps: f32,
    geometry: AttentionGeometry,
    rows: usize,
    a: &mut Activations<D>,
) -> Result<(), DeviceError> {
    let [alone, normed] = a.queries.as_mut().expect("there are tensors if a layer has such norms");
    device.rms_norm(&a.qkv, &weights.keep_q, KEEP_EPS, rows, alone)?;
    device.rms_norm(alone, &weights.q, weights.q_eps, rows, normed)?;
    let kv_dim = u32::try_from(geometry.kv_dim()).expect("heads and their sizes are within limits");
    let whole =
        AttentionGeometry { heads: geometry.heads / geometry.kv_heads, kv_heads: 1, head_dim: kv_dim, latent: false };
    device.head_norm(&mut a.qkv, (&weights.zeros, &weights.k), eps, whole, rows)?;
    device.add(&mut a.qkv, normed, rows)
}

/// A feed-forward layer of [`Activations::normed`], or of the residual stream where that is not `normed`.
fn dense<D: Device>(
    device: &mut D,
    (spec, normed): (&Dense, bool),
    weights: &DenseWeights<D::Weight>,
    rows: usize,
    joins: Joins,
    a: &mut Activations<D>,
) -> Result<(), DeviceError> {
    let tensors = a.dense.iter_mut().find(|tensors| tensors.shape == dense_shape(spec));
    let DenseTensors { product, act, .. } = tensors.expect("every width has its tensors");
    let activation = spec.activation;
    let x = if normed { &a.normed } else { &a.x };
    match &weights.up_bias {
        None => device.matmul_activated(x, &weights.up, rows, activation, product, act)?,
        Some(bias) => {
            device.matmul(x, &weights.up, rows, Mode::Set, product)?;
            device.add_bias(product, bias, rows)?;
            device.activate(product, rows, activation, act)?;
        }
    }
    let (mode, out) = joined(joins, &mut a.x, &mut a.block);
    linear(device, (&weights.down, weights.down_bias.as_ref()), act, rows, mode, out)
}

/// A mixture of experts of [`Activations::normed`].
fn experts<D: Device>(
    device: &mut D,
    spec: &MixtureSpec,
    weights: &MixtureWeights<D::Weight>,
    rows: usize,
    a: &mut Activations<D>,
) -> Result<(), DeviceError> {
    let tensors = a.mixtures.iter_mut().find(|tensors| tensors.shape == shape(spec));
    let MixtureTensors { logits, buffers, .. } = tensors.expect("every shape has its tensors");
    linear(device, (&weights.router, weights.router_bias.as_ref()), &a.normed, rows, Mode::Set, logits)?;
    let experts = Experts {
        count: spec.count,
        up: &weights.up,
        up_bias: weights.up_bias.as_ref(),
        down: &weights.down,
        down_bias: weights.down_bias.as_ref(),
        choice_bias: weights.choice_bias.as_ref(),
        activation: spec.activation,
        routing: spec.routing,
    };
    device.experts(&a.normed, logits, &experts, rows, buffers, &mut a.x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn elements_are_those_of_the_widest_tensors() {
        let golden = |name: &str| {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(name);
            activation_elements(&ModelSpec::open(&dir).expect("a golden"))
        };
        // Hidden 48, q, k and v of 4 + 2 + 2 heads of 24, one table; a dense layer of 72, and 2 of 6 experts of 40.
        let attention = 8 * 24 + 4 * 24 + 4 + 24;
        assert_eq!(golden("qwen3_moe"), (2 * 48 + attention + 3 * 72 + 6 + 2 * (48 + 3 * 40), 2 * 48 + 140));
        // Hidden 48, q, k, v of 10 heads of 16 and two more of these, one table; 2 of 6 experts of 40.
        assert_eq!(golden("minimax_m2").0, 2 * 48 + 3 * 160 + 6 * 16 + 6 + 16 + 6 + 2 * (48 + 3 * 40));
        // Hidden 48 and a block's output, two tables of 16, a gated layer of 64.
        assert_eq!(golden("gemma3").0, 3 * 48 + 8 * 16 + 4 * 16 + 4 + 2 * 16 + 3 * 64);
    }
}
