//! The performance model of Infinite-LLM v2 §5.3, Eq. 5 to 7, in microseconds and tokens.

/// Sizes of the model that all instances of a pool share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelShape {
    pub layers: u32,
    /// Tokens in an rBlock.
    pub block_tokens: u32,
    /// Bytes of one token's KV, all layers.
    pub token_bytes: u64,
    /// Bytes that travel per row and layer when queries are shipped, both ways: query, output, log-sum-exp, count.
    pub row_bytes: u64,
}

/// A link between two instances.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkView {
    /// Round trip, in microseconds.
    pub rtt_us: f64,
    /// Bulk rate, in bytes per second.
    pub bytes_per_s: f64,
}

/// Which engine the model describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// Rows with remote KV form a batch of their own (Lagoon's two lanes): weights are read twice, and only those rows
    /// wait for creditors. Without it, one batch waits as a whole (the papers' engine).
    pub lanes: bool,
    /// A creditor answers a debtor once per step of the *debtor*. Without it, once per step of its own (v2 Eq. 6), which
    /// is the same if both take as long.
    pub pace: bool,
}

impl ModelConfig {
    /// Eq. 5 to 7 to the letter.
    #[must_use]
    pub fn paper() -> Self {
        Self { lanes: false, pace: false }
    }
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self { lanes: true, pace: true }
    }
}
