//! lagoon-runner

pub mod sampling;
