//! lagoon-kv
