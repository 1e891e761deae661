//! [`Observed`]: the CPU, and sums of the squares of what is multiplied with some of its weights.
//!
//! Every operation is the CPU's own. Rows of activations are read before a product with a weight that is watched.

use crate::Site;
use lagoon_backend::{Activation, CpuDevice, Device, DeviceError, ExpertBuffers, Experts, Mode, forward, without};
use std::collections::BTreeMap;

type Tensor = <CpuDevice as Device>::Tensor;
type Weight = <CpuDevice as Device>::Weight;
type Kv = <CpuDevice as Device>::Kv;

/// Sums of squares by column.
#[derive(Clone, Debug, Default)]
pub(crate) struct Squares {
    pub(crate) sums: Vec<f64>,
    pub(crate) rows: u64,
}

/// The CPU under observation; see the module's documentation.
#[derive(Debug)]
pub(crate) struct Observed {
    inner: CpuDevice,
    /// What a weight multiplies and its columns, by the weight's address: they stay where they are while they are watched.
    watched: BTreeMap<usize, (Site, usize)>,
    squares: BTreeMap<Site, Squares>,
    host: Vec<f32>,
}

fn address(weight: &Weight) -> usize {
    std::ptr::from_ref(weight).addr()
}

impl Observed {
    pub(crate) fn new(threads: usize) -> Self {
        let inner = CpuDevice::with_threads(threads);
        Self { inner, watched: BTreeMap::new(), squares: BTreeMap::new(), host: Vec::new() }
    }

    /// Watches these weights, which must not be moved from now on.
    pub(crate) fn watch(&mut self, weights: Vec<(&Weight, Site, usize)>) {
        self.watched = weights.into_iter().map(|(weight, site, cols)| (address(weight), (site, cols))).collect();
    }

    /// Sums so far.
    pub(crate) fn squares(&self) -> &BTreeMap<Site, Squares> {
        &self.squares
    }

    /// Adds the squares of rows that are multiplied with a weight.
    fn observe(&mut self, x: &Tensor, weight: &Weight, rows: usize) -> Result<(), DeviceError> {
        let Some(&(site, cols)) = self.watched.get(&address(weight)) else { return Ok(()) };
        self.host.clear();
        self.inner.read(x, 0..rows, 0..cols, &mut self.host)?;
        let squares = self.squares.entry(site).or_default();
        squares.sums.resize(cols, 0.0);
        squares.rows += rows as u64;
        for row in self.host.chunks_exact(cols) {
            squares.sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
        }
        Ok(())
    }
}

impl Device for Observed {
    type Tensor = Tensor;
    type Weight = Weight;
    type Kv = Kv;

    forward!(
        inner: info, takes, tensor, weight, kv, kv_shape, write, read, kv_write, kv_read, kv_read_pieces, sync, embed,
        embed_add, rms_norm, layer_norm, activate, add, scale, softcap, add_bias, head_norm, rope_append,
        head_matmul, latent_append, attention, merge, sink, gather_rows
    );

    without!(queued, sampling, virtual_memory, shared_arenas, shared_regions, peer_access);

    fn matmul(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        rows: usize,
        mode: Mode,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.observe(x, weight, rows)?;
        self.inner.matmul(x, weight, rows, mode, out)
    }

    fn matmul_activated(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        rows: usize,
        activation: Activation,
        product: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.observe(x, weight, rows)?;
        self.inner.matmul_activated(x, weight, rows, activation, product, out)
    }

    /// The CPU leaves the activations of all chosen experts in the buffers, which is what the down projections multiply.
    fn experts(
        &mut self,
        x: &Tensor,
        logits: &Tensor,
        experts: &Experts<'_, Weight>,
        rows: usize,
        buffers: &mut ExpertBuffers<Tensor>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.observe(x, experts.up, rows)?;
        self.inner.experts(x, logits, experts, rows, buffers, out)?;
        self.observe(&buffers.act, experts.down, rows * experts.routing.top_k)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_backend::WeightSource;
    use lagoon_types::DType;

    #[test]
    fn squares_of_watched_products_are_summed() {
        let mut device = Observed::new(1);
        let mut bytes = Vec::new();
        DType::F32.encode(&[1.0; 12], &mut bytes);
        let [watched, other] =
            [0; 2].map(|_| device.weight(WeightSource::plain(DType::F32, 3, vec![(4, bytes.clone().into())])).unwrap());
        device.watch(vec![(&watched, Site::Head, 3)]);
        let (mut x, mut out) = (device.tensor(5, 3).unwrap(), device.tensor(5, 4).unwrap());
        device.write(&mut x, 0, &[1.0, 2.0, 0.5, -3.0, 0.0, 0.5, 9.0, 9.0, 9.0]).unwrap();
        device.matmul(&x, &other, 2, Mode::Set, &mut out).unwrap();
        assert!(device.squares().is_empty());
        // The third row is no part of the product.
        device.matmul(&x, &watched, 2, Mode::Set, &mut out).unwrap();
        device.matmul(&x, &watched, 1, Mode::Set, &mut out).unwrap();
        let squares = &device.squares()[&Site::Head];
        assert_eq!((squares.sums.as_slice(), squares.rows), (&[11.0, 8.0, 0.75][..], 3));
        let mut product = Vec::new();
        device.read(&out, 0..1, 0..4, &mut product).unwrap();
        assert_eq!(product, [3.5; 4]);
    }
}
