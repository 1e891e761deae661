//! The host CPU backend: reference for GPU backends, and default without a GPU.
//!
//! One file an op, named as the op in [`Device`]. Calls are complete when they return. Weights and KV are read in their
//! own element type and widened to f32 in registers or in cache-sized tiles; sums are f32.

mod add;
mod add_bias;
mod attention;
mod buffer;
mod device;
mod dots;
mod embed;
mod experts;
mod gated;
mod gather_rows;
mod gelu;
mod head_norm;
mod kv;
mod latent_append;
mod layer_norm;
mod matmul;
mod merge;
mod multiply;
mod pack;
mod packed;
mod rms_norm;
mod rope_append;
mod scaled;
pub(crate) mod simd;
mod sink;
mod streams;
mod threads;
mod weight;
mod widen;

use crate::{Activation, DeviceError, WeightFormat};
use buffer::Buffer;
pub use kv::CpuKv;
pub use simd::Isa;
use std::num::NonZeroUsize;
use threads::Threads;
pub use weight::CpuWeight;

#[cfg(target_endian = "big")]
compile_error!("weights, KV and wire payloads are little-endian and are used in place");

/// f32 activations `[rows][cols]` in host memory.
#[derive(Debug)]
pub struct CpuTensor {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) data: Buffer<f32>,
}

impl CpuTensor {
    fn new(rows: usize, cols: usize) -> Result<Self, DeviceError> {
        Ok(Self { rows, cols, data: Buffer::zeroed(rows.saturating_mul(cols), "tensor")? })
    }

    /// The first `rows` rows.
    pub(crate) fn head(&self, rows: usize) -> &[f32] {
        assert!(rows <= self.rows, "rows within the tensor");
        &self.data[..rows * self.cols]
    }

    /// The first `rows` rows, for writing.
    pub(crate) fn head_mut(&mut self, rows: usize) -> &mut [f32] {
        assert!(rows <= self.rows, "rows within the tensor");
        &mut self.data[..rows * self.cols]
    }
}

/// An activation of the first `rows` rows of a product.
fn activate(on: (&Threads, Isa), activation: Activation, product: &CpuTensor, rows: usize, out: &mut CpuTensor) {
    match activation {
        Activation::SiluMul => gated::apply::<gated::SiluMul>(on, product, rows, out),
        Activation::Gelu => gelu::gelu(on, product, rows, out),
        Activation::GeluTanh => gated::apply::<gated::GeluTanh>(on, product, rows, out),
        Activation::GeluTanhMul => gated::apply::<gated::GeluTanhMul>(on, product, rows, out),
        Activation::ClampedSwiglu => gated::apply::<gated::ClampedSwiglu>(on, product, rows, out),
    }
}

/// The host's processors and memory as a [`crate::Device`].
#[derive(Debug)]
pub struct CpuDevice {
    threads: Threads,
    isa: Isa,
    streams: streams::Streams,
    attention: attention::Scratch,
    routes: experts::Routes,
    /// See [`CpuDevice::batch_invariant`].
    invariant: bool,
}

impl CpuDevice {
    /// Whether every device of this backend computes with matrices in `format` as they are ([`crate::Device::takes`]).
    #[must_use]
    pub fn reads(format: WeightFormat) -> bool {
        matmul::takes(format)
    }

    /// A device with as many threads as the process may use.
    #[must_use]
    pub fn new() -> Self {
        Self::with_threads(std::thread::available_parallelism().map_or(1, NonZeroUsize::get))
    }

    /// A device with `threads` threads (at least one).
    #[must_use]
    pub fn with_threads(threads: usize) -> Self {
        Self {
            threads: Threads::new(threads.max(1)),
            isa: Isa::best(),
            streams: streams::Streams::default(),
            attention: attention::Scratch::default(),
            routes: experts::Routes::default(),
            invariant: false,
        }
    }

    /// The same device, on which a row's results do not depend on the other rows of a call, nor on where runs end, if they end
    /// at multiples of [`CpuDevice::INVARIANT_RUNS`] positions. Prompts are computed more slowly, and the attention of one row
    /// on one thread. Packed weights are converted.
    #[must_use]
    pub fn batch_invariant(self) -> Self {
        Self { invariant: true, ..self }
    }

    /// Positions at multiples of which runs end, for results that do not depend on them.
    pub const INVARIANT_RUNS: u32 = attention::ALIGNED;

    fn on(&self) -> matmul::On<'_> {
        matmul::On { threads: &self.threads, isa: self.isa, streams: &self.streams, invariant: self.invariant }
    }

    /// The same device with another instruction set, to test and to compare.
    ///
    /// # Errors
    /// `Unsupported` if this processor lacks it.
    pub fn with_isa(self, isa: Isa) -> Result<Self, DeviceError> {
        if isa.is_supported() {
            Ok(Self { isa, ..self })
        } else {
            Err(DeviceError::Unsupported(format!("the processor has no {isa}")))
        }
    }
}

impl Default for CpuDevice {
    fn default() -> Self {
        Self::new()
    }
}
