//! lagoon-backend
