//! Text to tokens and back: tokenizer, chat template, incremental detokenizer, stop strings.
//!
//! Above this crate there is text, below it there are tokens only. Nothing here knows models' weights, requests or
//! sockets. What streams ([`IncrementalDetokenizer`], [`StopStrings`]) gives the same result however its input is cut.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

pub mod chat;
mod date;
pub mod detokenize;
mod json;
mod pieces;
pub mod stop;
pub mod tokenizer;

pub use chat::{ChatError, ChatMessage, ChatTemplate, Content};
pub use detokenize::IncrementalDetokenizer;
pub use stop::{StopError, StopStrings};
pub use tokenizer::{EncodeError, TextError, Tokenizer, TokenizerConfig};
