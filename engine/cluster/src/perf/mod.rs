//! Performance model of Infinite-LLM v2 §5.3, Eq. 5 to 7, in microseconds and tokens.
//!
//! Eq. 5 gives the time of a decode step: W(β)/f(β) for everything but attention, which each instance measures by batch
//! size ([`Rates::other_us`]), plus attention over S tokens at the rate g, also measured. Eq. 6 moves K tokens of a
//! debtor's context to a creditor: the debtor's step loses K/g, the creditor's gains K/g. Here a debtor's step also takes
//! at least as long as its remote part (v2 Fig. 6a): the creditor's micro attention, and per layer a round trip and the
//! rows on the wire. Eq. 7 sums the throughputs β/T.
//!
//! * [`Rates`]: f and g of one instance; instances differ (CPU, GPU, host memory), so every side has its own.
//! * [`Pair`]: a debtor, a creditor and one request: predicted throughput after moving k blocks, and the best k.
//! * [`StepTimes`]: the borrow guard, whether local work covers the remote part.
//! * [`crossover`]: number of tokens after which moving KV is cheaper than shipping queries.

mod crossover;
mod guard;
mod pair;
mod rates;

pub use crossover::{Crossover, crossover};
pub use guard::{RemotePart, StepTimes};
pub use pair::{Best, BestMove, CreditorState, DebtorState, Pair, Prediction};
pub use rates::Rates;

pub(crate) use crossover::as_f64;
pub use pair::whole;

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

/// Link between two instances, as the model uses it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkView {
    /// Round trip, in microseconds.
    pub rtt_us: f64,
    /// Bulk rate, in bytes per second; 0 if none was measured yet.
    pub bytes_per_s: f64,
}

impl LinkView {
    /// This link, with unmeasured values taken from `assumed`.
    #[must_use]
    pub fn or(self, assumed: Self) -> Self {
        let known = |x: f64, y: f64| if x.is_finite() && x > 0.0 { x } else { y };
        Self { rtt_us: known(self.rtt_us, assumed.rtt_us), bytes_per_s: known(self.bytes_per_s, assumed.bytes_per_s) }
    }

    /// Time on the wire, beyond the round trip.
    #[must_use]
    pub fn transfer_us(&self, bytes: f64) -> f64 {
        bytes * 1e6 / self.bytes_per_s
    }
}

/// Engine variant that the model describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// Sequences with remote KV form a micro-batch of their own (as in Lagoon): weights are read twice, and its wait for
    /// creditors adds to its own work. Without it, one batch waits as a whole (the papers' engine).
    pub micro_batches: bool,
    /// A creditor serves a debtor once per step of the *debtor*. Without it, once per step of its own (v2 Eq. 6), which is
    /// equal if both steps take equally long.
    pub pace: bool,
}

impl ModelConfig {
    /// The papers' engine: Eq. 5 to 7 unmodified.
    #[must_use]
    pub fn paper() -> Self {
        Self { micro_batches: false, pace: false }
    }
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self { micro_batches: true, pace: true }
    }
}
