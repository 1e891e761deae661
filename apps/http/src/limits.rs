//! Bounds of the HTTP server, with units last in the names. Every wait of this crate ends at one of these. (Bounds of
//! texts and stop strings are in `lagoon_text`.)

use std::time::Duration;

/// Bounds on what one client may ask for and how long the server waits. All are per server.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Largest request body, in bytes.
    pub body_bytes_max: usize,
    /// Sequences of one request: prompts times `n`.
    pub sequences_max: usize,
    /// Stop token ids of one request.
    pub stop_ids_max: usize,
    /// Alternatives per token in `logprobs` and `top_logprobs`.
    pub logprobs_max: u32,
    /// Time to receive a request's body.
    pub body_deadline: Duration,
    /// Time that a streaming response's headers wait for the first event, so that a request that fails at once gets
    /// its true status code rather than an error inside a 200.
    pub headers_hold: Duration,
    /// Time from submission to the first token (queueing and prefill).
    pub first_token_deadline: Duration,
    /// Time between two tokens of one sequence.
    pub token_deadline: Duration,
    /// What a refused client is told to wait before it tries again, in seconds.
    pub retry_after_s: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes_max: 32 << 20,
            sequences_max: SEQUENCES_MAX,
            stop_ids_max: 256,
            logprobs_max: 20,
            body_deadline: Duration::from_secs(30),
            headers_hold: Duration::from_secs(5),
            first_token_deadline: Duration::from_secs(3600),
            token_deadline: Duration::from_secs(300),
            retry_after_s: 1,
        }
    }
}

/// [`Limits::sequences_max`] unless it is set.
pub const SEQUENCES_MAX: usize = 128;
/// Connections that one listener holds open; further ones wait in the kernel's backlog.
pub const CONNECTIONS_MAX: usize = 1024;
/// Of these, from one address: one client leaves room for others. (All clients of a reverse proxy share its address.)
pub const ADDRESS_CONNECTIONS_MAX: usize = 512;
/// Time for a client to send a request's headers.
pub const HEADERS_DEADLINE: Duration = Duration::from_secs(30);
/// Time that open responses get to finish after shutdown was asked for.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(10);
