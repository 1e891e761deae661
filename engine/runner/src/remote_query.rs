//! Work for peers: micro attention over lent rBlocks, and KV written to and read from them.

use crate::work::{RemoteMerge, RemotePart, RemoteQuery, Report};
use bytes::Bytes;
use lagoon_backend::{AttnBatch, AttnRows, Device, DeviceError, Partials};
use lagoon_model::{KvPlace, ModelSpec};
use lagoon_types::{Alibi, AttentionGeometry, DType, KvRun, Partial};
use std::ops::Range;

/// Tensors for remote requests' queries, grown to the largest query frame so far (the instance bounds frames).
#[derive(Debug)]
pub(crate) struct RemoteQueryBuffers<D: Device> {
    rows: usize,
    q: D::Tensor,
    partial: Partials<D::Tensor>,
    host: Vec<f32>,
}

impl<D: Device> RemoteQueryBuffers<D> {
    pub(crate) fn new(device: &mut D, geometry: AttentionGeometry, rows: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            rows,
            q: device.tensor(rows, geometry.q_dim())?,
            partial: Partials::new(device, rows, geometry)?,
            host: Vec::new(),
        })
    }

    /// Runs `query` over `kv` and encodes the partial.
    pub(crate) fn attend(
        &mut self,
        device: &mut D,
        kv: &D::Kv,
        shape: &AttentionShape,
        query: &RemoteQuery,
    ) -> Result<Report, DeviceError> {
        let geometry = shape.geometry;
        let batch = shape.batch(shape.pooled[query.layer as usize], &query.seqs, &query.runs);
        let rows = batch.rows();
        if rows > self.rows {
            *self = Self::new(device, geometry, rows.next_power_of_two())?;
        }
        self.host.clear();
        query.dtype.decode(&query.queries, &mut self.host);
        assert_eq!(self.host.len(), rows * geometry.q_dim(), "the instance validates remote requests' frames");
        device.write(&mut self.q, 0, &self.host)?;
        device.attention(&self.q, &batch, kv, query.layer as usize, &mut self.partial)?;
        let out = read_encoded(device, &self.partial.out, 0..rows, geometry.q_dim(), query.dtype, &mut self.host)?;
        let lse =
            read_encoded(device, &self.partial.lse, 0..rows, geometry.heads as usize, DType::F32, &mut self.host)?;
        let mut count = Vec::with_capacity(rows * 4);
        self.partial.count.iter().for_each(|n| count.extend_from_slice(&n.to_le_bytes()));
        Ok(Report::RemotePartial { tag: query.tag, out, lse, count: count.into() })
    }
}

/// Merges the partials of a host's creditors into one.
pub(crate) fn merge(geometry: AttentionGeometry, work: &RemoteMerge) -> Report {
    let heads = geometry.heads as usize;
    let rows = work.rows as usize;
    let mut merged = Partial::empty(rows, heads, geometry.q_dim() / heads);
    for RemotePart { out: out_bytes, lse: lse_bytes, count: count_bytes, .. } in &work.parts {
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        work.dtype.decode(out_bytes, &mut out);
        DType::F32.decode(lse_bytes, &mut lse);
        let count = count_bytes.chunks_exact(4).map(|n| u32::from_le_bytes([n[0], n[1], n[2], n[3]])).collect();
        merged.merge(&Partial { out, lse, count, ..Partial::empty(0, heads, merged.head_dim) });
    }
    let (mut out, mut lse, mut count) = (Vec::new(), Vec::new(), Vec::with_capacity(rows * 4));
    work.dtype.encode(&merged.out, &mut out);
    DType::F32.encode(&merged.lse, &mut lse);
    merged.count.iter().for_each(|n| count.extend_from_slice(&n.to_le_bytes()));
    Report::RemotePartial { tag: work.tag, out: out.into(), lse: lse.into(), count: count.into() }
}

/// The model's parameters for attention over KV: all that a kv node knows of a model.
#[derive(Clone, Debug)]
pub(crate) struct AttentionShape {
    pub(crate) geometry: AttentionGeometry,
    pub(crate) scale: f32,
    /// By layer.
    pub(crate) windows: Vec<Option<u32>>,
    /// The layers whose KV is pooled, by index in the pooled store.
    pub(crate) pooled: Vec<u32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) alibi: Option<Alibi>,
}

impl AttentionShape {
    pub(crate) fn new(spec: &ModelSpec) -> Self {
        Self {
            geometry: spec.geometry,
            scale: spec.attention_scale,
            windows: spec.layers.iter().map(|layer| layer.attention.window).collect(),
            pooled: (0..spec.layers.len())
                .filter(|layer| matches!(spec.kv_place(*layer), KvPlace::Pooled(_)))
                .map(|layer| u32::try_from(layer).unwrap_or(u32::MAX))
                .collect(),
            softcap: spec.attention_softcap,
            alibi: spec.alibi,
        }
    }

    pub(crate) fn batch<'a>(&self, layer: u32, seqs: &'a [AttnRows], runs: &'a [KvRun]) -> AttnBatch<'a> {
        let &Self { geometry, scale, softcap, alibi, .. } = self;
        let window = self.windows[layer as usize];
        AttnBatch { geometry, scale, window, softcap, alibi, seqs, runs }
    }
}

fn read_encoded<D: Device>(
    device: &mut D,
    tensor: &D::Tensor,
    rows: Range<usize>,
    cols: usize,
    dtype: DType,
    host: &mut Vec<f32>,
) -> Result<Bytes, DeviceError> {
    host.clear();
    device.read(tensor, rows, 0..cols, host)?;
    let mut bytes = Vec::new();
    dtype.encode(host, &mut bytes);
    Ok(bytes.into())
}
