//! The OpenAI-compatible server: JSON and server-sent events above, tokens below.
//!
//! It uses an [`Engine`] that generates tokens, and the tokenizer and chat template of `lagoon_text`; it knows no
//! instance, pool or device. Guarantees: a field is honoured or refused by name, never ignored; every failure is an
//! OpenAI error body with its own status; every wait has a deadline; when a client disconnects, its sequences are
//! cancelled.
#![forbid(unsafe_code)]

// The tests' scripted engine names this crate as the binary's tests do, which include it.
#[cfg(test)]
extern crate self as lagoon_http;

pub mod access;
mod answer;
pub mod bodies;
mod chats;
pub mod client;
mod client_addr;
mod constraints;
mod embeddings;
pub mod engine;
pub mod error;
pub mod exposition;
mod fields;
mod forms;
mod frames;
pub mod front;
mod generate;
mod generations;
pub mod journal;
mod json;
pub mod keys;
pub mod limits;
mod llama_cpp;
mod messages;
pub mod metrics;
mod models;
pub mod openapi;
mod options;
mod params;
mod piece;
mod rate;
mod reload;
mod reply;
mod rules;
#[cfg(test)]
mod scripted;
pub mod serve;
pub mod server;
mod stalls;
pub mod state;
#[cfg(test)]
mod tests;
pub mod text_jobs;
pub mod tls;
mod token_ids;
mod tokenizer_info;
mod tokens;
mod tools;
mod translate;
pub mod vllm_names;

pub use bodies::{Bodies, Holder, Share};
pub use client_addr::ClientAddr;
pub use engine::{CancelGuard, Engine, EngineInfo, Generation};
pub use error::ApiError;
pub use front::Front;
pub use keys::{Caller, Keys};
pub use limits::Limits;
pub use rules::{EmbeddingRules, GenerationDefaults};
pub use serve::{Port, serve};
pub use server::router;
pub use state::{ServerState, unix_seconds};
pub use text_jobs::TextJobs;
pub use translate::translated;
