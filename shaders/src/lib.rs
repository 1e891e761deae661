//! lagoon-shaders
