//! lagoon-cuda
