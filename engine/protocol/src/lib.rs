//! lagoon-protocol
