//! The WebGPU backend: [`WgpuDevice`] runs the operations of `lagoon_backend::Device` as WGSL kernels through wgpu,
//! on Vulkan, Metal and DX12. Tests run it on Vulkan (lavapipe); for Metal and DX12 they check only naga's
//! translation of every shader.
//!
//! `wgsl/` holds one file an op, under the same stem as the host backend's file; further files of an op lie in a folder of
//! that name. Kernels are thin: the host computes
//! work lists, key counts and shards.

mod activation;
mod adapter;
mod device;
mod experts;
mod gpu;
mod kernel;
mod latent;
mod memory;
mod params;
mod plan;
#[cfg(test)]
mod validate;
mod weight;

pub use adapter::{AdapterChoice, AdapterSummary, Options, list_adapters};
pub use device::WgpuDevice;
pub use kernel::sources;
pub use memory::{WgpuKv, WgpuTensor};
pub use weight::WgpuWeight;
