//! Why a grammar cannot be used.

/// Error of a grammar or of its compilation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// It is not a grammar, or more than the bounds allow.
    #[error("{0}")]
    Invalid(String),
    /// A part of a JSON schema that no grammar stands for. `path` leads there from the schema's root, and is empty for the root.
    #[error("`{what}` at `{}` is not supported\nhint: {hint}", if path.is_empty() { "#" } else { path })]
    Unsupported { path: String, what: String, hint: &'static str },
    /// It was not compiled in time.
    #[error("the grammar took more than {0} ms to compile\nhint: make it smaller, with smaller numbers of repetitions")]
    TooSlow(u64),
    /// As many grammars as may be are being compiled.
    #[error("{0} grammars are being compiled\nhint: send the request again in a moment")]
    Busy(usize),
    /// The tokenizer is of a kind whose tokens have no bytes of their own.
    #[error("structured output is not supported with this model's tokenizer: {0}")]
    Tokenizer(String),
}
