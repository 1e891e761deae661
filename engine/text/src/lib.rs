//! Text to tokens and back: tokenizer, chat template, incremental detokenizer, stop strings, tool calls and reasoning.
//!
//! The HTTP server calls it; below it there are tokens only. It must never know weights, requests or sockets. The
//! streaming types ([`IncrementalDetokenizer`], [`StopStrings`]) give the same result however their input is split.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

mod bounds;
pub mod chat;
mod convert;
mod date;
pub mod detokenize;
mod export;
mod files;
mod json;
pub mod parse;
mod pieces;
pub mod stop;
pub mod tokenizer;
mod tokenizer_config;

pub use chat::{ChatError, ChatMessage, ChatTemplate, Content, Rendering, ToolCall};
pub use convert::gguf::GgufVocabulary;
pub use detokenize::IncrementalDetokenizer;
pub use export::Exported;
pub use files::TextError;
pub use stop::{StopError, StopStrings};
pub use tokenizer::{EncodeError, Tokenizer};
pub use tokenizer_config::TokenizerConfig;
