//! lagoon-wire
