//! Structured output: grammars compiled for a model's tokens, and the matcher of one answer that tells which tokens may come next.
//!
//! A server checks a request's grammar with [`Grammars::check`]; the runner draws from the tokens that an [`AnswerMatcher`] allows.
//! The matcher is a function of constraint and answer: it is made again from the answer's tokens wherever a sequence goes on.
//! Only this crate knows llguidance.
//!
//! What must not be here: logits, requests, and work without a bound in size and time.
#![forbid(unsafe_code)]

mod environment;
mod error;
mod gbnf;
mod grammars;
mod matcher;
mod reasoning;
mod schema;

pub use error::GrammarError;
pub use grammars::Grammars;
pub use matcher::{AnswerMatcher, Next};
pub use schema::{compilable, without_white_space};
