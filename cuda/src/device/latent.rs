//! Latent attention beside attention itself: products by head, and the append of rows to the store.

use super::memory::word;
use super::{CudaDevice, CudaKv, CudaTensor, CudaWeight};
use crate::driver::CudaError;
use crate::kernels::latent::{HeadProductParams, LatentParams, head_product};
use crate::kernels::packed::{Encoding, PackedRows, UNPACKED_BYTES};
use crate::kernels::weight_ld;
use lagoon_backend::{DeviceError, HeadStrides, LatentRow};
use lagoon_types::{AttentionGeometry, DType};

impl CudaDevice {
    /// Ensures memory for the slots that a step's rows are stored in, and gives the slots' address on the device.
    pub(super) fn slots_of_rows(&mut self, slots: &[u32], kv: &mut CudaKv, layer: usize) -> Result<u64, DeviceError> {
        let end = slots.iter().filter(|slot| **slot != u32::MAX).max().map_or(0, |slot| slot + 1);
        assert!(end as usize <= kv.slots, "slots beyond the store");
        self.kv_ensure(kv, end)?;
        let writes_memory = |slot: &u32| *slot == u32::MAX || kv.has_own(*slot..*slot + 1);
        assert!(layer > 0 || slots.iter().all(writes_memory), "slots that are written are held, and not shared");
        Ok(self.work_stream().upload_again(bytemuck::cast_slice(slots))?)
    }

    /// See [`lagoon_backend::Device::head_matmul`].
    pub(super) fn product_by_head(
        &mut self,
        x: &CudaTensor,
        weight: &CudaWeight,
        strides: HeadStrides,
        rows: usize,
        out: &CudaTensor,
    ) -> Result<(), DeviceError> {
        let HeadStrides { heads, x_stride, out_stride } = strides;
        let (n, k) = (weight.rows / heads, weight.cols);
        assert!(n * heads == weight.rows && n <= out_stride && k <= x_stride, "shapes of a product by head");
        assert!(heads * x_stride <= x.cols && heads * out_stride <= out.cols, "columns of a product by head");
        assert!(rows <= x.rows.min(out.rows), "rows of a product by head");
        if rows == 0 {
            return Ok(());
        }
        let segment = weight.layout.only()?;
        let dtype = if matches!(segment.encoding, Encoding::Packed(_)) { DType::F32 } else { segment.encoding.dtype() };
        let params = HeadProductParams {
            x: x.address(),
            w: segment.address,
            out: out.address(),
            rows: word(rows),
            n: word(n),
            k: word(k),
            ldw: word(weight_ld(k, dtype.size())),
            heads: word(heads),
            x_stride: word(x.cols),
            x_step: word(x_stride),
            out_stride: word(out.cols),
            out_step: word(out_stride),
            unpacked: 0,
        };
        match weight.layout.packed(segment) {
            None => Ok(self.work_stream().launch(&head_product(dtype, params))?),
            Some(stored) => Ok(self.packed_heads(&stored, params)?),
        }
    }

    /// A product by head with a packed weight, whose elements are written in f32 first, some heads' at a time.
    fn packed_heads(&mut self, stored: &PackedRows, params: HeadProductParams) -> Result<(), CudaError> {
        let head_bytes = u64::from(params.n) * u64::from(params.k) * 4;
        let most = u32::try_from(UNPACKED_BYTES / head_bytes).unwrap_or(u32::MAX).clamp(1, params.heads);
        let bytes = usize::try_from(u64::from(most) * head_bytes).expect("elements fit");
        let work_stream = self.work_stream();
        let elements = work_stream.elements(bytes)?;
        for first in (0..params.heads).step_by(most as usize) {
            let heads = most.min(params.heads - first);
            let rows = stored.from_row(first * params.n);
            work_stream.launch(&rows.rows(0, heads * params.n, false, elements))?;
            let x = params.x + u64::from(first * params.x_step) * 4;
            let out = params.out + u64::from(first * params.out_step) * 4;
            let params = HeadProductParams { x, w: elements, out, heads, unpacked: 1, ..params };
            work_stream.launch(&head_product(DType::F32, params))?;
        }
        Ok(())
    }

    /// See [`lagoon_backend::Device::latent_append`].
    pub(super) fn append_latents(
        &mut self,
        qkv: &CudaTensor,
        row: LatentRow<'_, CudaTensor>,
        geometry: AttentionGeometry,
        slots: &[u32],
        (kv, layer): (&mut CudaKv, usize),
    ) -> Result<(), DeviceError> {
        let (rows, query) = (slots.len(), row.queries.cols / geometry.heads as usize);
        assert!(geometry.latent && qkv.cols == geometry.qkv_dim(), "columns of a latent row");
        let dim = row.latent.cols + row.rope.cols;
        assert!(dim == geometry.query_dim() && row.key.cols == row.rope.cols, "parts of a latent row");
        assert!(
            query * geometry.heads as usize == row.queries.cols && query >= row.rope.cols,
            "queries of a latent row"
        );
        assert!((kv.shape.kv_heads, kv.shape.head_dim) == (geometry.kv_heads, geometry.head_dim), "store shape");
        let tensors = [qkv, row.queries, row.latent, row.key, row.rope];
        assert!(tensors.iter().all(|tensor| rows <= tensor.rows), "latent rows");
        let params = LatentParams {
            qkv: qkv.address(),
            queries: row.queries.address(),
            latents: row.latent.address(),
            keys: row.key.address(),
            rope: row.rope.address(),
            slots: self.slots_of_rows(slots, kv, layer)?,
            kv: kv.view(layer),
            heads: geometry.heads,
            head_dim: geometry.head_dim,
            latent: word(row.latent.cols),
            rotated: word(row.rope.cols),
            query: word(query),
            kv_type: u32::from(kv.shape.dtype.code()),
        };
        self.per_row("latent_append", rows, params)?;
        kv.used_by(&mut self.work_streams[self.at])
    }
}
