//! [`Observed`]: the CPU, and sums of the squares of what is multiplied with some of its weights.
//!
//! Every operation is the CPU's own. Rows of activations are read before a product with a weight that is watched.

use crate::Site;
use lagoon_backend::{
    Activation, AttnBatch, CpuDevice, Device, DeviceError, DeviceInfo, ExpertBuffers, Experts, HeadStrides, KvPiece,
    LatentRow, Mode, Partials, WeightFormat, WeightSource, without,
};
use lagoon_types::{AttentionGeometry, KvShape};
use std::collections::BTreeMap;
use std::ops::Range;

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

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    without!(queued, sampling, virtual_memory, shared_arenas, shared_regions, peer_access);

    fn tensor(&mut self, rows: usize, cols: usize) -> Result<Tensor, DeviceError> {
        self.inner.tensor(rows, cols)
    }

    fn takes(&self, format: WeightFormat) -> bool {
        self.inner.takes(format)
    }

    fn weight(&mut self, source: WeightSource) -> Result<Weight, DeviceError> {
        self.inner.weight(source)
    }

    fn kv(&mut self, shape: KvShape, slots: usize) -> Result<Kv, DeviceError> {
        self.inner.kv(shape, slots)
    }

    fn kv_shape(&self, kv: &Kv) -> KvShape {
        self.inner.kv_shape(kv)
    }

    fn write(&mut self, tensor: &mut Tensor, row0: usize, data: &[f32]) -> Result<(), DeviceError> {
        self.inner.write(tensor, row0, data)
    }

    fn read(
        &mut self,
        tensor: &Tensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        self.inner.read(tensor, rows, cols, out)
    }

    fn kv_write(&mut self, kv: &mut Kv, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        self.inner.kv_write(kv, layer, slot0, bytes)
    }

    fn kv_read(
        &mut self,
        kv: &Kv,
        layer: usize,
        slot0: u32,
        tokens: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        self.inner.kv_read(kv, layer, slot0, tokens, out)
    }

    fn kv_read_pieces(&mut self, kv: &Kv, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.inner.kv_read_pieces(kv, pieces, out)
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        self.inner.sync()
    }

    fn embed(&mut self, table: &Weight, ids: &[u32], out: &mut Tensor) -> Result<(), DeviceError> {
        self.inner.embed(table, ids, out)
    }

    fn embed_add(&mut self, table: &Weight, ids: &[u32], out: &mut Tensor) -> Result<(), DeviceError> {
        self.inner.embed_add(table, ids, out)
    }

    fn rms_norm(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        eps: f32,
        rows: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.inner.rms_norm(x, weight, eps, rows, out)
    }

    fn layer_norm(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        eps: f32,
        rows: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.inner.layer_norm(x, weight, eps, rows, out)
    }

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

    fn activate(
        &mut self,
        product: &Tensor,
        rows: usize,
        activation: Activation,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.inner.activate(product, rows, activation, out)
    }

    fn add(&mut self, x: &mut Tensor, y: &Tensor, rows: usize) -> Result<(), DeviceError> {
        self.inner.add(x, y, rows)
    }

    fn scale(&mut self, x: &mut Tensor, factor: f32, rows: usize) -> Result<(), DeviceError> {
        self.inner.scale(x, factor, rows)
    }

    fn softcap(&mut self, x: &mut Tensor, cap: f32, rows: usize) -> Result<(), DeviceError> {
        self.inner.softcap(x, cap, rows)
    }

    fn add_bias(&mut self, x: &mut Tensor, bias: &Weight, rows: usize) -> Result<(), DeviceError> {
        self.inner.add_bias(x, bias, rows)
    }

    fn head_norm(
        &mut self,
        qkv: &mut Tensor,
        weights: (&Weight, &Weight),
        eps: f32,
        geometry: AttentionGeometry,
        rows: usize,
    ) -> Result<(), DeviceError> {
        self.inner.head_norm(qkv, weights, eps, geometry, rows)
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

    fn rope_append(
        &mut self,
        qkv: &mut Tensor,
        rope: &Tensor,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut Kv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        self.inner.rope_append(qkv, rope, geometry, slots, kv, layer)
    }

    fn head_matmul(
        &mut self,
        x: &Tensor,
        weight: &Weight,
        heads: HeadStrides,
        rows: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.inner.head_matmul(x, weight, heads, rows, out)
    }

    fn latent_append(
        &mut self,
        qkv: &mut Tensor,
        row: LatentRow<'_, Tensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut Kv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        self.inner.latent_append(qkv, row, geometry, slots, kv, layer)
    }

    fn attention(
        &mut self,
        q: &Tensor,
        batch: &AttnBatch<'_>,
        kv: &Kv,
        layer: usize,
        out: &mut Partials<Tensor>,
    ) -> Result<(), DeviceError> {
        self.inner.attention(q, batch, kv, layer, out)
    }

    fn merge(
        &mut self,
        acc: &mut Partials<Tensor>,
        other: &Partials<Tensor>,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        self.inner.merge(acc, other, geometry)
    }

    fn sink(
        &mut self,
        partials: &mut Partials<Tensor>,
        sinks: &Weight,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        self.inner.sink(partials, sinks, geometry)
    }

    fn gather_rows(&mut self, x: &Tensor, rows: &[u32], out: &mut Tensor) -> Result<(), DeviceError> {
        self.inner.gather_rows(x, rows, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
