//! Bounds of the HTTP server, with units last in the names. Every wait of this crate ends at one of these. (Bounds of
//! texts and stop strings are in `lagoon_text`.)

use std::time::Duration;

/// Limits on a client's requests and on the server's waits; one set per server.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Largest request body, in bytes.
    pub body_bytes_max: usize,
    /// Maximum of sequences in one request: prompts times `n`.
    pub sequences_max: usize,
    /// Maximum of stop token ids in one request.
    pub stop_ids_max: usize,
    /// Maximum of alternatives per token in `logprobs` and `top_logprobs`.
    pub logprobs_max: u32,
    /// Deadline for a request's body.
    pub body_deadline: Duration,
    /// How long a streaming response's headers wait for the first event, so that a request that fails at once gets its
    /// true status code instead of an error inside a 200.
    pub headers_hold: Duration,
    /// Silence of a stream after which it gets a comment, so that proxies and clients keep its connection.
    pub keep_alive: Duration,
    /// Time from submission to the first token (queueing and prefill).
    pub first_token_deadline: Duration,
    /// Time between two tokens of one sequence.
    pub token_deadline: Duration,
    /// Seconds in `Retry-After` of a refusal.
    pub retry_after_s: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes_max: BODY_BYTES_MAX,
            sequences_max: SEQUENCES_MAX,
            stop_ids_max: 256,
            logprobs_max: 20,
            body_deadline: Duration::from_secs(30),
            headers_hold: Duration::from_secs(5),
            keep_alive: STREAM_KEEP_ALIVE,
            first_token_deadline: Duration::from_secs(3600),
            token_deadline: Duration::from_secs(300),
            retry_after_s: 1,
        }
    }
}

/// Default of [`Limits::body_bytes_max`].
pub const BODY_BYTES_MAX: usize = 32 << 20;
/// Default of [`Limits::keep_alive`].
pub const STREAM_KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Default of [`Limits::sequences_max`].
pub const SEQUENCES_MAX: usize = 128;
/// Maximum of inputs in one request for embeddings, as in OpenAI's API.
pub const EMBEDDING_INPUTS_MAX: usize = 2048;
/// Maximum of numbers in its response.
pub const EMBEDDING_NUMBERS_MAX: usize = 4 << 20;
/// Maximum of its inputs that the engine has at a time.
pub const EMBEDDINGS_IN_FLIGHT_MAX: usize = 16;
/// Maximum of messages in one chat.
pub const MESSAGES_MAX: usize = 16 << 10;
/// Maximum of tools in one chat.
pub const TOOLS_MAX: usize = 128;
/// Maximum of tool calls in one message.
pub const MESSAGE_CALLS_MAX: usize = 128;
/// Maximum bytes of `tools` and of `chat_template_kwargs`, and of one call's arguments: they are read into trees.
pub const TEMPLATE_FIELD_BYTES_MAX: usize = 1 << 20;
/// Maximum of open connections per listener; further ones wait in the kernel's backlog.
pub const CONNECTIONS_MAX: usize = 1024;
/// Maximum of these from one address. (All clients of a reverse proxy share its address.)
pub const ADDRESS_CONNECTIONS_MAX: usize = 512;
/// Maximum of a request's header fields; 431 above.
pub const HEADERS_MAX: usize = 100;
/// Maximum of a request's line and header fields together, in bytes; 431 above. Also what a connection buffers of a body.
pub const HEADER_BYTES_MAX: usize = 64 << 10;
/// Deadline for a request's headers.
pub const HEADERS_DEADLINE: Duration = Duration::from_secs(30);
/// Longest time without progress while a client reads; then its connection is closed, and its request cancelled.
pub const WRITE_DEADLINE: Duration = Duration::from_secs(60);
/// How long open responses may go on after shutdown begins.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(10);
