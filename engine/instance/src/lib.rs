//! lagoon-instance
