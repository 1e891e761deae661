//! Linear layers of a device: cuBLASLt for many rows if installed, own kernels for few rows and without the library.
//!
//! Activations are f32 and enter 16-bit products as one or two terms (see [`crate::kernels::linear`]). The library
//! multiplies the terms one after the other into the same output, so products in bf16 need no scratch for results. In
//! f16 each row has a scale, which the library cannot apply: terms are multiplied as one matrix into scratch, and
//! `gemm_reduce` adds and scales. Elements of packed weights are f16.

use super::memory::word;
use super::work_stream::WorkStream;
use super::{CudaDevice, CudaTensor, CudaWeight};
use crate::blas::{Blas, CublasLt, Shape};
use crate::driver::{Context, CudaError};
use crate::kernels::attention::Precision;
use crate::kernels::linear::{Launches, Product, is_fused, is_streamed, workspace_bytes};
use crate::kernels::packed::{self, Encoding, PackedProduct, StreamLimits, Streamed, UNPACKED_BYTES};
use crate::kernels::pointwise::activate;
use crate::kernels::weight_ld;
use lagoon_backend::{Activation, DeviceError};
use lagoon_types::DType;
use std::path::PathBuf;
use std::sync::Arc;

/// Choice of the kernels for linear layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LinearLayers {
    /// cuBLASLt if installed, for more rows than the streaming kernels take.
    #[default]
    Auto,
    /// As `Auto`, with the library in this file.
    File(PathBuf),
    /// This project's kernels only.
    Own,
}

/// The linear-layer kernels of a device.
#[derive(Debug)]
pub(super) enum Linear {
    Library(Box<Blas>),
    /// Own kernels, and why there is no library.
    Own(String),
}

impl Linear {
    pub(super) fn open(context: &Arc<Context>, wanted: &LinearLayers, tf32: bool) -> Self {
        let found = match wanted {
            LinearLayers::Auto => CublasLt::find(context.attributes().driver_version as usize / 1000),
            LinearLayers::File(file) => CublasLt::open(file),
            LinearLayers::Own => Err("asked for".to_owned()),
        };
        let opened = found.and_then(|library| Blas::new(library, context, tf32).map_err(|error| error.to_string()));
        opened.map_or_else(Self::Own, |blas| Self::Library(Box::new(blas)))
    }

    pub(super) fn name(&self) -> String {
        match self {
            Self::Library(blas) => format!("{}; own kernels for few rows", blas.name()),
            Self::Own(reason) => format!("own kernels ({reason})"),
        }
    }
}

impl CudaDevice {
    /// `out (=|+=) x · weightᵀ`; an activation is applied only if [`applies`] says so.
    pub(super) fn multiply(
        &mut self,
        x: &CudaTensor,
        weight: &CudaWeight,
        rows: usize,
        (add, activation): (bool, Option<Activation>),
        out: &CudaTensor,
    ) -> Result<(), DeviceError> {
        assert!(weight.cols == x.cols && rows <= x.rows.min(out.rows), "product shapes");
        if rows == 0 {
            return Ok(());
        }
        for segment in weight.layout.segments() {
            let product = Product {
                x: x.address(),
                x_stride: word(x.cols),
                w: segment.address,
                dtype: segment.encoding.dtype(),
                factor: 1.0,
                bias: 0,
                out: out.address() + 4 * segment.row0 as u64,
                out_stride: word(out.cols),
                rows: word(rows),
                n: word(segment.rows),
                k: word(weight.cols),
                add,
                activation,
            };
            match weight.layout.packed(segment) {
                None => self.product(&product)?,
                Some(rows) => self.packed_product(&PackedProduct { product, rows })?,
            }
        }
        Ok(())
    }

    /// See [`lagoon_backend::Device::matmul_activated`]: one kernel if it applies the activation, else two.
    pub(super) fn up_projection(
        &mut self,
        x: &CudaTensor,
        weight: &CudaWeight,
        rows: usize,
        activation: Activation,
        product: &CudaTensor,
        out: &CudaTensor,
    ) -> Result<(), DeviceError> {
        let columns = activation.inputs() * out.cols;
        assert!(weight.rows == columns && product.cols == columns, "shapes of an up projection");
        assert!(rows <= product.rows.min(out.rows), "rows of an up projection");
        if applies(weight, word(rows), activation) {
            return self.multiply(x, weight, rows, (false, Some(activation)), out);
        }
        self.multiply(x, weight, rows, (false, None), product)?;
        self.activation(product, rows, activation, out)
    }

    /// See [`lagoon_backend::Device::activate`].
    pub(super) fn activation(
        &mut self,
        product: &CudaTensor,
        rows: usize,
        activation: Activation,
        out: &CudaTensor,
    ) -> Result<(), DeviceError> {
        assert_eq!(product.cols, activation.inputs() * out.cols, "columns of an activation's product");
        assert!(rows <= product.rows.min(out.rows), "rows of an activation");
        if rows == 0 {
            return Ok(());
        }
        let launch = activate(activation, word(rows), word(out.cols), product.address(), out.address());
        Ok(self.work_stream().activate(&launch)?)
    }

    /// One product with a packed weight: streamed, or in parts whose elements are written as f16 first.
    fn packed_product(&mut self, product: &PackedProduct) -> Result<(), CudaError> {
        let precision = self.tuning.precision;
        if packed::is_streamed(product.product.rows) {
            let bytes = product.stream_bytes(precision);
            let terms = self.work_stream().scratch(usize::try_from(bytes).expect("scratch fits"))?;
            let limits = StreamLimits { sms: self.tuning.sms, shared_bytes_max: self.tuning.shared_bytes_max };
            let Streamed { split, product } = product.stream(precision, limits, terms);
            self.work_stream().launch(&split)?;
            return self.work_stream().launch(&product);
        }
        let bytes = product.part_bytes(UNPACKED_BYTES, precision);
        let elements = self.work_stream().elements(usize::try_from(bytes).expect("elements fit"))?;
        for part in product.parts(elements, UNPACKED_BYTES, precision) {
            self.work_stream().launch(&part.unpack)?;
            for (product, precision) in part.products.iter().flatten() {
                self.product_with(product, *precision)?;
            }
        }
        Ok(())
    }

    /// One product with a plain weight.
    pub(super) fn product(&mut self, product: &Product) -> Result<(), CudaError> {
        self.product_with(product, self.tuning.precision)
    }

    fn product_with(&mut self, product: &Product, precision: Precision) -> Result<(), CudaError> {
        let Self { work_streams, linear, at, tuning, .. } = self;
        let work_stream = &mut work_streams[*at];
        // The library's workspace belongs to the first stream.
        if let Linear::Library(blas) = linear
            && *at == 0
            && product.bias == 0
            && !is_streamed(product.rows, product.dtype)
            && by_library(work_stream, blas, product, precision)?
        {
            return Ok(());
        }
        by_own_kernels(work_stream, product, precision, tuning.sms)
    }
}

/// Whether a product of `rows` rows applies this activation as it writes. Gates and ups must be stored in one way.
fn applies(weight: &CudaWeight, rows: u32, activation: Activation) -> bool {
    weight.layout.only().is_ok_and(|segment| match segment.encoding {
        Encoding::Plain(dtype) => is_fused(rows, dtype, activation),
        Encoding::Packed(_) => packed::is_fused(rows, activation),
    })
}

fn by_own_kernels(
    work_stream: &mut WorkStream,
    product: &Product,
    precision: Precision,
    sms: u32,
) -> Result<(), CudaError> {
    let bytes = workspace_bytes(product.rows, product.n, product.k, product.dtype, sms);
    let workspace = work_stream.scratch(usize::try_from(bytes).expect("scratch fits"))?;
    match product.launches(workspace, precision, sms) {
        Launches::Stream(launch) => work_stream.launch(&launch),
        Launches::Tiles { split, gemm, reduce } => {
            split.iter().try_for_each(|launch| work_stream.launch(launch))?;
            work_stream.launch(&gemm)?;
            reduce.iter().try_for_each(|launch| work_stream.launch(launch))
        }
    }
}

/// Runs the product by the library; false if it has no algorithm for the shape.
fn by_library(
    work_stream: &mut WorkStream,
    blas: &mut Blas,
    p: &Product,
    precision: Precision,
) -> Result<bool, CudaError> {
    let ldw = u32::try_from(weight_ld(p.k as usize, p.dtype.size())).expect("columns fit");
    let shape = Shape { rows: p.rows, n: p.n, k: p.k, ldx: p.x_stride, ldw, ldo: p.out_stride, dtype: p.dtype };
    let bytes = |address: u64| usize::try_from(address).expect("scratch fits");
    // The end of the terms gives their size.
    let Some(terms) = p.terms(0, precision) else {
        // The library was promised rows aligned to 16 bytes.
        let aligned = p.x_stride.is_multiple_of(4) && p.out_stride.is_multiple_of(4);
        let call = if aligned { blas.call(shape, p.x, p.w, p.out, p.add)? } else { None };
        return call.map_or(Ok(false), |call| work_stream.blas(call).map(|()| true));
    };
    let shape = Shape { ldx: terms.ld, ..shape };
    if p.dtype == DType::BF16 {
        if !p.out_stride.is_multiple_of(4) {
            return Ok(false);
        }
        let workspace = work_stream.scratch(bytes(terms.end))?;
        let terms = p.terms(workspace, precision).expect("of bf16");
        let Some(first) = blas.call(shape, terms.hi, p.w, p.out, p.add)? else { return Ok(false) };
        work_stream.launch(&terms.split)?;
        work_stream.blas(first)?;
        if terms.terms == 2
            && let Some(second) = blas.call(shape, terms.lo, p.w, p.out, true)?
        {
            work_stream.blas(second)?;
        }
        return Ok(true);
    }
    // Rows of a partial result are aligned to 16 bytes only if it has a multiple of 4 columns.
    if !p.n.is_multiple_of(4) {
        return Ok(false);
    }
    let rows = p.rows * terms.terms;
    let partial = terms.end.next_multiple_of(256);
    let workspace = work_stream.scratch(bytes(partial) + rows as usize * p.n as usize * 4)?;
    let terms = p.terms(workspace, precision).expect("of f16");
    let partial = workspace + partial;
    let Some(call) = blas.call(Shape { rows, ldo: p.n, ..shape }, terms.hi, p.w, partial, false)? else {
        return Ok(false);
    };
    work_stream.launch(&terms.split)?;
    work_stream.blas(call)?;
    work_stream.launch(&p.reduce(partial, terms.scale, terms.terms))?;
    Ok(true)
}
