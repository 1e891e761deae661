//! The system from outside: one test binary.
#![allow(clippy::unwrap_used, reason = "tests")]

mod failures;
mod goldens;
mod hostile;
mod pooled;
mod random;
