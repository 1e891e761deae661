//! What benchmarks share.
#![forbid(unsafe_code)]

pub mod cluster;
