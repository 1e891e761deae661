//! lagoon-http
