//! Code shared by the benchmarks.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod gpu;
pub mod gpu_page;
pub mod measure;
pub mod model;
pub mod pace;
pub mod pool;
pub mod quic;
pub mod traces;
