//! lagoon-runner
