//! The CUDA backend. For now it finds out whether this machine has a CUDA driver and devices ([`probe`]); there is no
//! implementation of `lagoon_backend::Device` yet, and nothing here launches a kernel.
//!
//! The driver is loaded at run time: this crate builds and runs on machines without CUDA.

pub mod kernels;
mod probe;

pub use probe::{CudaDevice, CudaProbe, probe};
