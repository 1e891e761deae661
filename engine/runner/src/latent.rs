//! Latent attention, absorbed (DeepSeek-V2 §2.1): the operations around micro attention, and their tensors.
//!
//! Heads' keys and values are products of a token's latent. A query is multiplied with the matrix of its keys instead, and the sum of
//! latents with that of its values, so that the cache holds latents and nothing of any head.

use crate::biased::{linear, norm};
use lagoon_backend::{Device, DeviceError, HeadStrides, LatentRow, Mode};
use lagoon_model::spec::LatentSpec;
use lagoon_model::weights::LatentWeights;
use lagoon_types::AttentionGeometry;

/// Tensors of layers with latent attention, which all have the same sizes.
#[derive(Debug)]
pub(crate) struct LatentTensors<T> {
    /// Queries of low rank and their norm, `[rows][rank]` each.
    low_rank: Option<[T; 2]>,
    /// `[rows][heads * (key_dim + rotated)]`.
    queries: T,
    /// Latents and their norm, `[rows][latent_dim]` each.
    latent: [T; 2],
    /// `[rows][rotated]`.
    key: T,
    /// `[rows][heads * value_dim]`.
    values: T,
    value_dim: usize,
}

/// Elements of [`LatentTensors`] for each row.
pub(crate) fn elements(of: &LatentSpec, heads: usize) -> usize {
    let rank = of.low_rank.as_ref().map_or(0, |low| low.down.rows);
    2 * rank + heads * (of.key_dim + of.rotated + of.value_dim) + 2 * of.latent_dim + of.rotated
}

impl<T> LatentTensors<T> {
    pub(crate) fn new<D: Device<Tensor = T>>(
        device: &mut D,
        of: &LatentSpec,
        heads: usize,
        rows: usize,
    ) -> Result<Self, DeviceError> {
        let low_rank = of.low_rank.as_ref().map(|low| {
            let rank = low.down.rows;
            Ok::<_, DeviceError>([device.tensor(rows, rank)?, device.tensor(rows, rank)?])
        });
        Ok(Self {
            low_rank: low_rank.transpose()?,
            queries: device.tensor(rows, heads * (of.key_dim + of.rotated))?,
            latent: [device.tensor(rows, of.latent_dim)?, device.tensor(rows, of.latent_dim)?],
            key: device.tensor(rows, of.rotated)?,
            values: device.tensor(rows, heads * of.value_dim)?,
            value_dim: of.value_dim,
        })
    }

    /// Makes the rows `qkv` of `x`, and stores those of `slots`.
    pub(crate) fn project<D: Device<Tensor = T>>(
        &mut self,
        device: &mut D,
        (of, weights): (&LatentSpec, &LatentWeights<D::Weight>),
        x: &T,
        (rope, geometry): (&T, AttentionGeometry),
        qkv: &mut T,
        (slots, kv, layer): (&[u32], &mut D::Kv, usize),
    ) -> Result<(), DeviceError> {
        let (rows, heads) = (slots.len(), geometry.heads as usize);
        let input = match (&mut self.low_rank, &of.low_rank, &weights.low_rank) {
            (Some([low, normed]), Some(of), Some(weights)) => {
                linear(device, (&weights.down, weights.bias.as_ref()), x, rows, Mode::Set, low)?;
                norm(device, &of.norm, &weights.norm, low, rows, normed)?;
                &*normed
            }
            _ => x,
        };
        device.matmul(input, &weights.queries, rows, Mode::Set, &mut self.queries)?;
        let absorbed = HeadStrides { heads, x_stride: of.key_dim + of.rotated, out_stride: geometry.query_dim() };
        device.head_matmul(&self.queries, &weights.absorb, absorbed, rows, qkv)?;
        let [latent, normed] = &mut self.latent;
        linear(device, (&weights.latent, weights.latent_bias.as_ref()), x, rows, Mode::Set, latent)?;
        norm(device, &of.norm, &weights.norm, latent, rows, normed)?;
        linear(device, (&weights.key, weights.key_bias.as_ref()), x, rows, Mode::Set, &mut self.key)?;
        let row = LatentRow { queries: &self.queries, latent: normed, key: &self.key, rope };
        device.latent_append(qkv, row, geometry, slots, kv, layer)
    }

    /// Heads' values from the sums of latents that attention gives.
    pub(crate) fn values<D: Device<Tensor = T>>(
        &mut self,
        device: &mut D,
        weights: &LatentWeights<D::Weight>,
        geometry: AttentionGeometry,
        attended: &T,
        rows: usize,
    ) -> Result<&T, DeviceError> {
        let (heads, x_stride) = (geometry.heads as usize, geometry.query_dim());
        let strides = HeadStrides { heads, x_stride, out_stride: self.value_dim };
        device.head_matmul(attended, &weights.values, strides, rows, &mut self.values)?;
        Ok(&self.values)
    }
}
