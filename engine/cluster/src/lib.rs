//! lagoon-cluster
