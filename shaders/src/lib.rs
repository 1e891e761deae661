//! The WebGPU backend: [`WgpuDevice`] runs the operations of `lagoon_backend::Device` as WGSL kernels through wgpu,
//! on Vulkan, Metal and DX12. It runs on Vulkan in our tests (lavapipe); for Metal and DX12 only naga's translation of
//! every shader is checked.
//!
//! `wgsl/` holds one file an op, under the same stem as the host backend's file. Kernels are thin: what can be decided
//! on the host (work lists, key counts, shards) is decided there.

mod adapter;
mod device;
mod gpu;
mod kernel;
mod memory;
mod params;
mod plan;
#[cfg(test)]
mod validate;

pub use adapter::{AdapterChoice, AdapterSummary, list_adapters};
pub use device::{Options, WgpuDevice};
pub use kernel::sources;
pub use memory::{WgpuKv, WgpuTensor, WgpuWeight};
