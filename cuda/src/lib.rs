//! The CUDA backend: the driver behind owned handles ([`driver`]), kernels as the host sees them
//! ([`kernels`]), KV in virtual memory ([`VirtualKv`]), and [`CudaDevice`], which is the backend.
//!
//! The driver is loaded at run time: this crate builds and runs on machines without CUDA, where [`probe`] and
//! [`driver::Context::open`] say what is missing.

pub mod arena;
pub mod blas;
pub mod device;
pub mod driver;
pub mod kernels;
mod probe;
pub mod virtual_kv;

pub use arena::Arena;
pub use device::{CudaDevice, CudaKv, CudaOptions, CudaTensor, CudaWeight, LinearLayers, Tried, TuneFor};
pub use driver::CudaError;
pub use probe::{CudaProbe, ProbedDevice, probe};
pub use virtual_kv::{KvPlaneView, VirtualKv, VirtualKvError};
