//! The OpenAI-compatible server: JSON and server-sent events above, tokens below.
//!
//! It knows an [`Engine`] that generates tokens and the tokenizer and chat template of `lagoon_text`; it knows no
//! instance, pool or device. What it promises: a field is honoured or refused by name, never ignored; every failure is an
//! OpenAI error body with its own status; every wait has a deadline; when a client goes away its sequences are
//! cancelled.
#![forbid(unsafe_code)]

mod answer;
pub mod engine;
pub mod error;
mod fields;
mod generate;
mod generations;
pub mod journal;
pub mod limits;
mod messages;
pub mod metrics;
mod params;
mod reply;
#[cfg(any(test, feature = "scripted"))]
pub mod scripted;
pub mod serve;
pub mod server;
pub mod state;
#[cfg(test)]
mod tests;
mod tokens;

pub use engine::{CancelGuard, Engine, EngineInfo, Generation};
pub use error::ApiError;
pub use limits::Limits;
pub use params::GenerationDefaults;
pub use serve::{ClientAddr, serve};
pub use server::router;
pub use state::{ServerState, read_body, unix_seconds};
