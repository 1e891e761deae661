//! What the served model and the server's flags say of requests: defaults, limits, embeddings.

use crate::limits::Limits;
use lagoon_types::Pooling;

/// Defaults of a model, from its generation_config.json.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// `Some(false)` makes greedy decoding the default.
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    /// End-of-sequence tokens.
    pub eos_ids: Vec<u32>,
}

/// How the model's hidden states become embeddings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingRules {
    /// The pooling, or why the model has no embeddings here: its configuration asks for something else.
    pub pooling: Result<Pooling, String>,
    /// Whether an embedding has length 1, unless a request says otherwise.
    pub normalised: bool,
    /// Numbers of a hidden state.
    pub dimensions: u32,
}

/// The server's limits and defaults.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules<'a> {
    pub(crate) limits: &'a Limits,
    pub(crate) defaults: &'a GenerationDefaults,
    pub(crate) expose_logits: bool,
    pub(crate) vocab_size: u32,
    pub(crate) max_model_tokens: u32,
}
