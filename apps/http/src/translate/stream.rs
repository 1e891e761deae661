//! Turns the events of a streamed chat into those of another interface, or into its whole answer.
//!
//! A [`Transcript`] has the answer as blocks, in the order in which they were written: reasoning, text, calls. A [`Shape`]
//! writes what happens to them in its interface's words. Invariants: at most one block is open; the shape's end or failure
//! is written exactly once, as the last thing; dropping the stream drops the chat's body, which cancels the chat.

use super::errors::ErrorBody;
use crate::{frames::KEEP_ALIVE, reply::CachedTokensDetails, state::unix_seconds};
use axum::body::{Body, BodyDataStream, Bytes};
use futures::StreamExt as _;
use serde::Deserialize;
use serde_json::Value;
use std::convert::Infallible;

/// Longest line of a chat's stream, in bytes; a call has at most 256 KiB.
const LINE_BYTES_MAX: usize = 8 << 20;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Chunk {
    model: String,
    created: u64,
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<ErrorBody>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Choice {
    delta: Delta,
    finish_reason: Option<String>,
    stop_reason: Value,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Vec<DeltaCall>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct DeltaCall {
    id: Option<String>,
    function: DeltaFunction,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct DeltaFunction {
    name: Option<String>,
    arguments: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct PromptTokensDetails {
    cached_tokens: usize,
    cached_tokens_details: Option<CachedTokensDetails>,
}

impl Usage {
    pub(super) fn cached_tokens(&self) -> usize {
        self.prompt_tokens_details.map_or(0, |details| details.cached_tokens)
    }

    /// Where they were found, if any were.
    pub(super) fn cached_details(&self) -> Option<CachedTokensDetails> {
        self.prompt_tokens_details?.cached_tokens_details
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Reasoning,
    Text,
    Call { id: String, name: String },
}

/// Consecutive text of one kind, or the arguments of a call.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) kind: Kind,
    pub(super) text: String,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum End {
    /// The model ended it, or a stop string did.
    #[default]
    Stop,
    /// The length limit did.
    Length,
    Calls,
}

/// An answer so far.
#[derive(Debug, Default)]
pub(super) struct Transcript {
    pub(super) model: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) blocks: Vec<Block>,
    pub(super) usage: Usage,
    /// Of the completion's tokens, those of chunks with reasoning.
    pub(super) reasoning_tokens: usize,
    pub(super) end: End,
    /// The stop string that ended the answer.
    pub(super) stop: Option<String>,
}

impl Transcript {
    /// Index and content of the latest block.
    pub(super) fn last(&self) -> (usize, &Block) {
        (self.blocks.len() - 1, self.blocks.last().expect("a block was opened"))
    }

    fn note_usage(&mut self, usage: Usage, reasoning: bool) {
        let new = usage.completion_tokens.saturating_sub(self.usage.completion_tokens);
        self.reasoning_tokens += if reasoning { new } else { 0 };
        self.usage = usage;
    }
}

/// An interface's way to write an answer.
pub(super) trait Shape: Send + 'static {
    /// The answer begins: the size of the prompt is known.
    fn begin(&mut self, answer: &Transcript, out: &mut String);
    /// The latest block begins, without text so far.
    fn open(&mut self, answer: &Transcript, out: &mut String);
    /// The latest block has grown by `text`.
    fn delta(&mut self, answer: &Transcript, text: &str, out: &mut String);
    /// The latest block is complete.
    fn close(&mut self, answer: &Transcript, out: &mut String);
    fn end(&mut self, answer: &Transcript, out: &mut String);
    fn fail(&mut self, answer: &Transcript, error: &ErrorBody, out: &mut String);
    /// The ended answer in one object.
    fn whole(&self, answer: &Transcript) -> String;
}

/// A chat's answer in translation.
pub(super) struct Translation<S> {
    lines: Lines,
    answer: Transcript,
    shape: S,
    begun: bool,
    open: bool,
}

/// Whether an answer goes on.
enum Step {
    More,
    Ended,
    Failed(ErrorBody),
}

impl<S: Shape> Translation<S> {
    pub(super) fn new(body: Body, shape: S) -> Self {
        let lines = Lines { body: body.into_data_stream(), buffer: Vec::new(), searched: 0 };
        Self { lines, answer: Transcript::default(), shape, begun: false, open: false }
    }

    /// The events of the other interface.
    pub(super) fn events(self) -> Body {
        let events = futures::stream::unfold(Some(self), |translation| async move {
            let mut translation = translation?;
            let mut out = String::new();
            loop {
                match translation.step(&mut out).await {
                    Step::More if out.is_empty() => {}
                    Step::More => return Some((Ok::<_, Infallible>(Bytes::from(out)), Some(translation))),
                    Step::Ended => return Some((Ok(out.into()), None)),
                    Step::Failed(error) => {
                        // Clients expect a beginning before an end.
                        if translation.answer.created == 0 {
                            translation.answer.created = unix_seconds();
                        }
                        translation.begin(&mut out);
                        translation.shape.fail(&translation.answer, &error, &mut out);
                        return Some((Ok(out.into()), None));
                    }
                }
            }
        });
        Body::from_stream(events)
    }

    /// The answer in one object.
    pub(super) async fn whole(mut self) -> Result<String, ErrorBody> {
        let mut out = String::new();
        loop {
            match self.step(&mut out).await {
                Step::More => out.clear(),
                Step::Ended => return Ok(self.shape.whole(&self.answer)),
                Step::Failed(error) => return Err(error),
            }
        }
    }

    /// Reads one line and writes what follows from it.
    async fn step(&mut self, out: &mut String) -> Step {
        let data = match self.lines.next().await {
            Ok(Some(Line::Data(data))) => data,
            Ok(Some(Line::Comment)) => {
                out.push_str(KEEP_ALIVE);
                return Step::More;
            }
            Ok(None) => return Step::Failed(ErrorBody::broken("it ended without an end mark")),
            Err(why) => return Step::Failed(ErrorBody::broken(&why)),
        };
        if data == b"[DONE]" {
            self.begin(out);
            self.close(out);
            self.shape.end(&self.answer, out);
            return Step::Ended;
        }
        match serde_json::from_slice::<Chunk>(&data) {
            Ok(Chunk { error: Some(error), .. }) => Step::Failed(error),
            Ok(chunk) => {
                self.chunk(chunk, out);
                Step::More
            }
            Err(error) => Step::Failed(ErrorBody::broken(&error.to_string())),
        }
    }

    fn chunk(&mut self, chunk: Chunk, out: &mut String) {
        let reasoning = chunk.choices.iter().any(|choice| choice.delta.reasoning_content.is_some());
        if let Some(usage) = chunk.usage {
            self.answer.note_usage(usage, reasoning);
        }
        if !self.begun {
            (self.answer.model, self.answer.created) = (chunk.model, chunk.created);
        }
        self.begin(out);
        for choice in chunk.choices {
            let Delta { content, reasoning_content, tool_calls } = choice.delta;
            self.text(Kind::Reasoning, reasoning_content, out);
            self.text(Kind::Text, content, out);
            tool_calls.into_iter().for_each(|call| self.call(call, out));
            match choice.finish_reason.as_deref() {
                None => continue,
                Some("stop") => self.answer.end = End::Stop,
                Some("tool_calls") => self.answer.end = End::Calls,
                Some(_) => self.answer.end = End::Length,
            }
            self.answer.stop = choice.stop_reason.as_str().map(str::to_owned);
        }
    }

    fn begin(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.begun, true) {
            self.shape.begin(&self.answer, out);
        }
    }

    fn text(&mut self, kind: Kind, text: Option<String>, out: &mut String) {
        let Some(text) = text.filter(|text| !text.is_empty()) else { return };
        if !self.open || self.answer.last().1.kind != kind {
            self.open(kind, out);
        }
        self.append(&text, out);
    }

    /// A call begins with its id; what follows without one belongs to it.
    fn call(&mut self, call: DeltaCall, out: &mut String) {
        let DeltaFunction { name, arguments } = call.function;
        if let Some(id) = call.id {
            self.open(Kind::Call { id, name: name.unwrap_or_default() }, out);
        }
        if let Some(arguments) = arguments.filter(|arguments| self.open && !arguments.is_empty()) {
            self.append(&arguments, out);
        }
    }

    fn open(&mut self, kind: Kind, out: &mut String) {
        self.close(out);
        self.answer.blocks.push(Block { kind, text: String::new() });
        self.open = true;
        self.shape.open(&self.answer, out);
    }

    fn append(&mut self, text: &str, out: &mut String) {
        if let Some(block) = self.answer.blocks.last_mut() {
            block.text.push_str(text);
        }
        self.shape.delta(&self.answer, text, out);
    }

    fn close(&mut self, out: &mut String) {
        if std::mem::replace(&mut self.open, false) {
            self.shape.close(&self.answer, out);
        }
    }
}

/// A line of a stream of server-sent events.
enum Line {
    /// The data of an event.
    Data(Vec<u8>),
    /// [`KEEP_ALIVE`].
    Comment,
}

/// The data lines and comments of a stream of server-sent events.
struct Lines {
    body: BodyDataStream,
    buffer: Vec<u8>,
    /// Bytes already searched for a line break.
    searched: usize,
}

impl Lines {
    /// The next event's data or comment; `None` at the end.
    async fn next(&mut self) -> Result<Option<Line>, String> {
        loop {
            while let Some(line) = self.line() {
                if let Some(data) = line.strip_prefix(b"data:") {
                    return Ok(Some(Line::Data(data.trim_ascii().to_vec())));
                }
                if KEEP_ALIVE.as_bytes().starts_with(&line) {
                    return Ok(Some(Line::Comment));
                }
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(format!("an event has more than {LINE_BYTES_MAX} bytes"));
            }
            match self.body.next().await {
                Some(Ok(chunk)) => self.buffer.extend_from_slice(&chunk),
                Some(Err(error)) => return Err(error.to_string()),
                None => return Ok(None),
            }
        }
    }

    fn line(&mut self) -> Option<Vec<u8>> {
        let Some(at) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.buffer.len();
            return None;
        };
        let line = self.buffer.drain(..=self.searched + at).collect();
        self.searched = 0;
        Some(line)
    }
}

/// Writes an event with its name.
pub(super) fn write_event(out: &mut String, name: &str, data: &Value) {
    use std::fmt::Write as _;
    let _ = write!(out, "event: {name}\ndata: {data}\n\n");
}
