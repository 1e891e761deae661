//! The CUDA backend: [`CudaDevice`], over the driver behind owned handles ([`driver`]), the kernels seen from the
//! host ([`kernels`]), and KV in virtual memory ([`VirtualKv`]).
//!
//! The driver is loaded at run time: this crate builds and runs on machines without CUDA, where [`probe`] and
//! [`driver::Context::open`] report the missing part.

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
