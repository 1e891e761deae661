//! [`Device`] for the host: memory here, each operation in its own file.

use super::{CpuDevice, CpuKv, CpuTensor, CpuWeight};
use super::{
    activate, add, add_bias, attention, embed, gather_rows, head_norm, latent_append, layer_norm, matmul, merge,
    rms_norm, rope_append, sink,
};
use crate::{
    Activation, AttnBatch, Device, DeviceError, DeviceInfo, ExpertBuffers, Experts, HeadStrides, KvPiece, LatentRow,
    Mode, Partials, WeightFormat, WeightSource,
};
#[cfg(target_os = "linux")]
use crate::{SharedArenas, SharedKv};
use lagoon_types::{AttentionGeometry, KvShape};
use std::ops::Range;

#[cfg(target_os = "linux")]
impl SharedArenas for CpuDevice {
    type Kv = CpuKv;

    fn kv_shared(
        &mut self,
        shape: KvShape,
        slots: usize,
        granule_slots: usize,
    ) -> Result<SharedKv<CpuKv>, DeviceError> {
        CpuKv::shared(shape, slots, granule_slots)
    }
}

impl Device for CpuDevice {
    type Tensor = CpuTensor;
    type Weight = CpuWeight;
    type Kv = CpuKv;

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            backend: "cpu",
            name: format!("host, {} threads, {}", self.threads.count(), self.isa),
            software: false,
            memory_bytes: None,
            pci: None,
        }
    }

    #[cfg(target_os = "linux")]
    fn shared_arenas(&mut self) -> Option<&mut (impl SharedArenas<Kv = CpuKv> + ?Sized)> {
        Some(self)
    }

    #[cfg(not(target_os = "linux"))]
    crate::without!(shared_arenas);

    // An operation is done when it returns; memory is the process's own, which no device maps.
    crate::without!(queued, sampling, virtual_memory, shared_regions, peer_access);

    fn tensor(&mut self, rows: usize, cols: usize) -> Result<CpuTensor, DeviceError> {
        CpuTensor::new(rows, cols)
    }

    fn takes(&self, format: WeightFormat) -> bool {
        Self::reads(format) && (!self.invariant || format.plain().is_some())
    }

    fn weight(&mut self, source: WeightSource) -> Result<CpuWeight, DeviceError> {
        match source.parts.iter().find(|part| !self.takes(part.format)) {
            Some(part) => Err(DeviceError::Unsupported(format!("a weight in {}", part.format))),
            None => Ok(CpuWeight::new(source)),
        }
    }

    fn kv(&mut self, shape: KvShape, slots: usize) -> Result<CpuKv, DeviceError> {
        CpuKv::new(shape, slots)
    }

    fn kv_shape(&self, kv: &CpuKv) -> KvShape {
        kv.shape
    }

    fn write(&mut self, tensor: &mut CpuTensor, row0: usize, data: &[f32]) -> Result<(), DeviceError> {
        assert_eq!(data.len() % tensor.cols, 0, "whole rows are written");
        let start = row0 * tensor.cols;
        tensor.data[start..start + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn read(
        &mut self,
        tensor: &CpuTensor,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        out.reserve(rows.len() * cols.len());
        for row in rows {
            out.extend_from_slice(&tensor.data[row * tensor.cols..][..tensor.cols][cols.clone()]);
        }
        Ok(())
    }

    fn kv_write(&mut self, kv: &mut CpuKv, layer: usize, slot0: u32, bytes: &[u8]) -> Result<(), DeviceError> {
        let token_bytes = kv.shape.layer_token_bytes();
        assert_eq!(bytes.len() % token_bytes, 0, "whole tokens are written");
        kv.store(layer, slot0, bytes)
    }

    fn kv_read(
        &mut self,
        kv: &CpuKv,
        layer: usize,
        slot0: u32,
        tokens: u32,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        kv.load(layer, slot0, tokens as usize, out)
    }

    fn kv_read_pieces(&mut self, kv: &CpuKv, pieces: &[KvPiece], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        pieces.iter().try_for_each(|p| self.kv_read(kv, p.layer as usize, p.slot0, p.tokens, out))
    }

    fn sync(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn embed(&mut self, table: &CpuWeight, ids: &[u32], out: &mut CpuTensor) -> Result<(), DeviceError> {
        embed::embed(table, ids, out);
        Ok(())
    }

    fn embed_add(&mut self, table: &CpuWeight, ids: &[u32], out: &mut CpuTensor) -> Result<(), DeviceError> {
        embed::embed_add(table, ids, out);
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        eps: f32,
        rows: usize,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        rms_norm::rms_norm((&self.threads, self.isa), x, weight, eps, rows, out);
        Ok(())
    }

    fn layer_norm(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        eps: f32,
        rows: usize,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        layer_norm::layer_norm((&self.threads, self.isa), x, weight, eps, rows, out);
        Ok(())
    }

    fn matmul(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        rows: usize,
        mode: Mode,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        matmul::matmul(self.on(), x, weight, rows, mode, out);
        Ok(())
    }

    fn matmul_activated(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        rows: usize,
        activation: Activation,
        product: &mut CpuTensor,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        matmul::matmul(self.on(), x, weight, rows, Mode::Set, product);
        activate((&self.threads, self.isa), activation, product, rows, out);
        Ok(())
    }

    fn head_norm(
        &mut self,
        qkv: &mut CpuTensor,
        weights: (&CpuWeight, &CpuWeight),
        eps: f32,
        geometry: AttentionGeometry,
        rows: usize,
    ) -> Result<(), DeviceError> {
        head_norm::head_norm((&self.threads, self.isa), qkv, weights, eps, geometry, rows);
        Ok(())
    }

    fn experts(
        &mut self,
        x: &CpuTensor,
        logits: &CpuTensor,
        experts: &Experts<'_, CpuWeight>,
        rows: usize,
        buffers: &mut ExpertBuffers<CpuTensor>,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        let Self { threads, isa, streams, routes, invariant, .. } = self;
        let on = matmul::On { threads, isa: *isa, streams, invariant: *invariant };
        super::experts::experts(on, routes, (x, logits), experts, rows, buffers, out);
        Ok(())
    }

    fn rope_append(
        &mut self,
        qkv: &mut CpuTensor,
        rope: &CpuTensor,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut CpuKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        rope_append::rope_append(&self.threads, qkv, rope, geometry, slots, kv, layer)
    }

    fn head_matmul(
        &mut self,
        x: &CpuTensor,
        weight: &CpuWeight,
        heads: HeadStrides,
        rows: usize,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        matmul::by_head(self.on(), x, weight, heads, rows, out);
        Ok(())
    }

    fn latent_append(
        &mut self,
        qkv: &mut CpuTensor,
        row: LatentRow<'_, CpuTensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        kv: &mut CpuKv,
        layer: usize,
    ) -> Result<(), DeviceError> {
        latent_append::latent_append(&self.threads, qkv, row, geometry, (slots, kv, layer))
    }

    fn attention(
        &mut self,
        q: &CpuTensor,
        batch: &AttnBatch<'_>,
        kv: &CpuKv,
        layer: usize,
        out: &mut Partials<CpuTensor>,
    ) -> Result<(), DeviceError> {
        batch.fill_counts(&mut out.count);
        let on = (&self.threads, self.isa, self.invariant);
        attention::attention(on, &mut self.attention, q, batch, (kv, layer), out)
    }

    fn merge(
        &mut self,
        acc: &mut Partials<CpuTensor>,
        other: &Partials<CpuTensor>,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        merge::merge(acc, other, geometry);
        Ok(())
    }

    fn add_bias(&mut self, x: &mut CpuTensor, bias: &CpuWeight, rows: usize) -> Result<(), DeviceError> {
        add_bias::add_bias((&self.threads, self.isa), x, bias, rows);
        Ok(())
    }

    fn activate(
        &mut self,
        product: &CpuTensor,
        rows: usize,
        activation: Activation,
        out: &mut CpuTensor,
    ) -> Result<(), DeviceError> {
        activate((&self.threads, self.isa), activation, product, rows, out);
        Ok(())
    }

    fn add(&mut self, x: &mut CpuTensor, y: &CpuTensor, rows: usize) -> Result<(), DeviceError> {
        add::add(&self.threads, x, y, rows);
        Ok(())
    }

    fn scale(&mut self, x: &mut CpuTensor, factor: f32, rows: usize) -> Result<(), DeviceError> {
        add::scale(&self.threads, x, factor, rows);
        Ok(())
    }

    fn softcap(&mut self, x: &mut CpuTensor, cap: f32, rows: usize) -> Result<(), DeviceError> {
        add::softcap(&self.threads, x, cap, rows);
        Ok(())
    }

    fn sink(
        &mut self,
        partials: &mut Partials<CpuTensor>,
        sinks: &CpuWeight,
        geometry: AttentionGeometry,
    ) -> Result<(), DeviceError> {
        sink::sink(partials, sinks, geometry);
        Ok(())
    }

    fn gather_rows(&mut self, x: &CpuTensor, rows: &[u32], out: &mut CpuTensor) -> Result<(), DeviceError> {
        gather_rows::gather_rows(x, rows, out);
        Ok(())
    }
}
