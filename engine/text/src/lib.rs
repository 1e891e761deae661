//! lagoon-text
