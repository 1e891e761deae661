//! lagoon-transport
