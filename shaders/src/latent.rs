//! The operations of latent attention (DeepSeek-V2 §2.1): products by head, and the append of rows that are keys and values at
//! once.

use crate::gpu::Gpu;
use crate::kernel::{Encoding, Kernel, MATVEC_ROWS_MAX, MatvecRows};
use crate::memory::{WgpuKv, WgpuTensor, quads, word};
use crate::params;
use crate::weight::WgpuWeight;
use lagoon_backend::{DeviceError, HeadStrides, LatentRow};
use lagoon_types::AttentionGeometry;

/// A latent row is read as one run of quads, so that no padding may lie between its halves.
pub(crate) fn check(geometry: AttentionGeometry) -> Result<(), DeviceError> {
    if geometry.latent && !geometry.head_dim.is_multiple_of(4) {
        let dim = geometry.query_dim();
        return Err(DeviceError::Unsupported(format!("latent rows of {dim} elements: they must be a multiple of 8")));
    }
    Ok(())
}

/// See [`lagoon_backend::Device::head_matmul`].
pub(crate) fn head_matmul(
    gpu: &mut Gpu,
    x: &WgpuTensor,
    weight: &WgpuWeight,
    strides: HeadStrides,
    rows: usize,
    out: &WgpuTensor,
) -> Result<(), DeviceError> {
    let HeadStrides { heads, x_stride, out_stride } = strides;
    let (n, k) = (weight.rows / heads, weight.cols);
    assert!(n * heads == weight.rows && n <= out_stride && k <= x_stride, "shapes of a product by head");
    assert!(heads * x_stride <= x.cols && heads * out_stride <= out.cols, "columns of a product by head");
    assert!(rows <= x.rows.min(out.rows), "rows of a product by head");
    for shard in &weight.shards {
        let few = gpu.matvec_outputs();
        let (kernel, outputs, depth) = match rows {
            0 => return Ok(()),
            1 => (Kernel::HeadMatvec(shard.encoding, MatvecRows::One), few, 1),
            2..=MATVEC_ROWS_MAX => (Kernel::HeadMatvec(shard.encoding, MatvecRows::Four), few, rows.div_ceil(4)),
            _ => (Kernel::HeadMatmulTiled(shard.encoding), 64, rows.div_ceil(64)),
        };
        let head0 = shard.row0 / n;
        let params = params::HeadMatmul {
            rows: word(rows),
            n: word(n),
            k: word(k),
            quads: word(quads(k)),
            head0: word(head0),
            heads: word((shard.row0 + shard.rows).div_ceil(n) - head0),
            x_stride: word(x.stride()),
            x_step: word(x_stride),
            out_stride: word(out.stride()),
            out_step: word(out_stride),
            shard_row0: word(shard.row0),
            shard_rows: word(shard.rows),
        };
        let buffers = [Some(&x.buf), Some(&shard.buf), Some(&out.buf)];
        gpu.dispatch(kernel, &params, &buffers, params.heads * params.n.div_ceil(word(outputs)), word(depth))?;
    }
    Ok(())
}

/// See [`lagoon_backend::Device::latent_append`].
pub(crate) fn latent_append(
    gpu: &mut Gpu,
    qkv: &WgpuTensor,
    row: LatentRow<'_, WgpuTensor>,
    geometry: AttentionGeometry,
    slots: &[u32],
    (kv, layer): (&WgpuKv, usize),
) -> Result<(), DeviceError> {
    let (dim, heads) = (geometry.query_dim(), geometry.heads as usize);
    let query = row.queries.cols / heads;
    assert!(geometry.latent && qkv.cols == geometry.qkv_dim(), "columns of a latent row");
    assert!(row.latent.cols + row.rope.cols == dim && row.key.cols == row.rope.cols, "parts of a latent row");
    assert!(query * heads == row.queries.cols && query >= row.rope.cols, "queries of a latent row");
    assert!((kv.shape.kv_heads, kv.shape.head_dim) == (geometry.kv_heads, geometry.head_dim), "store shape");
    let rows_least = [row.queries, row.latent, row.key, row.rope].map(|tensor| tensor.rows).into_iter().min();
    assert!(slots.len() <= qkv.rows && rows_least.is_some_and(|rows| slots.len() <= rows), "latent rows");
    assert!(slots.iter().all(|s| *s == u32::MAX || (*s as usize) < kv.slots), "slots beyond the store");
    check(geometry)?;
    if slots.is_empty() {
        return Ok(());
    }
    let params = params::LatentAppend {
        rows: word(slots.len()),
        heads: geometry.heads,
        dim: word(dim),
        latent: word(row.latent.cols),
        rotated: word(row.rope.cols),
        query: word(query),
        qkv_stride: word(qkv.stride()),
        input_stride: word(row.queries.stride()),
        key_stride: word(row.key.stride()),
        rope_stride: word(row.rope.stride()),
        ..Default::default()
    };
    let buffers = [Some(&row.queries.buf), Some(&row.rope.buf), Some(&qkv.buf)];
    gpu.dispatch(Kernel::LatentQueries, &params, &buffers, params.rows * geometry.heads, 1)?;
    let at = gpu.upload_words(slots)?;
    let kernel = Kernel::LatentAppend(Encoding::kv(kv.shape.dtype, false));
    for (index, shard) in kv.layers[layer].iter().enumerate() {
        let shard_slot0 = index * kv.shard_slots;
        let params = params::LatentAppend {
            input_stride: word(row.latent.stride()),
            slots: at,
            shard_slot0: word(shard_slot0),
            shard_slots: word(kv.shard_slots.min(kv.slots - shard_slot0)),
            ..params
        };
        let inputs = [Some(&row.latent.buf), Some(&row.key.buf), Some(&row.rope.buf)];
        let buffers = [None, inputs[0], inputs[1], inputs[2], Some(&qkv.buf), Some(shard)];
        gpu.dispatch(kernel, &params, &buffers, params.rows, 1)?;
    }
    Ok(())
}
