//! lagoon-model
