//! lagoon-types
