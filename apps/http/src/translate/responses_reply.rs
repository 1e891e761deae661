//! Answers in the shape of OpenAI's Responses API.

use super::{
    errors::ErrorBody,
    request::{Call, Message, append, join},
    stored::{Response, Stored, Turn},
    stream::{Block, End, Kind, Shape, Transcript, write_event},
};
use serde_json::{Map, Value, json};
use std::{sync::Arc, time::Instant};

/// Where a response is stored when it ends.
#[derive(Debug)]
pub(super) struct Storing {
    pub(super) stored: Arc<Stored>,
    pub(super) owner: Arc<str>,
    /// Turns before this one.
    pub(super) turns: Vec<Arc<Turn>>,
    /// Messages of this turn's input, in JSON with commas between them.
    pub(super) input: String,
}

/// A response, with its events.
#[derive(Debug)]
pub(super) struct ResponseShape {
    pub(super) number: u128,
    pub(super) previous: Option<String>,
    /// Fields of the request.
    pub(super) repeated: Map<String, Value>,
    pub(super) storing: Option<Storing>,
    /// Events so far.
    pub(super) events: u64,
}

/// The state of a response or of an item.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

impl Status {
    fn of(answer: &Transcript) -> Self {
        if answer.end == End::Length { Self::Incomplete } else { Self::Completed }
    }

    fn text(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed => "failed",
        }
    }
}

impl ResponseShape {
    fn id(&self) -> String {
        format!("resp_{:032x}", self.number)
    }

    fn item_id(&self, index: usize, block: &Block) -> String {
        let kind = match block.kind {
            Kind::Reasoning => "rs",
            Kind::Text => "msg",
            Kind::Call { .. } => "fc",
        };
        format!("{kind}_{:032x}{index:04x}", self.number)
    }

    /// The item of a block; without content where it begins.
    fn item(&self, index: usize, block: &Block, status: Status) -> Value {
        let (id, status) = (self.item_id(index, block), status.text());
        let parts = if status == "in_progress" { vec![] } else { vec![part(block, &block.text)] };
        match &block.kind {
            Kind::Reasoning => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": parts})
            }
            Kind::Text => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": parts})
            }
            Kind::Call { id: call_id, name } => {
                let arguments = if status == "in_progress" { "" } else { &block.text };
                json!({
                    "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                    "arguments": arguments,
                })
            }
        }
    }

    /// The response in a state, with an error if it failed.
    fn response(&self, answer: &Transcript, status: Status, error: Option<&ErrorBody>) -> Value {
        let ended = status != Status::InProgress;
        let last = answer.blocks.len().saturating_sub(1);
        let item = |(index, block): (usize, &Block)| {
            // Only the last block may have been cut.
            let status =
                if index == last && status != Status::Completed { Status::Incomplete } else { Status::Completed };
            self.item(index, block, status)
        };
        let output: Vec<Value> = if ended { answer.blocks.iter().enumerate().map(item).collect() } else { Vec::new() };
        let usage = (ended && error.is_none()).then(|| usage(answer));
        let mut response = json!({
            "id": self.id(), "object": "response", "created_at": answer.created, "status": status.text(),
            "background": false,
            "error": error.map(|error| json!({"code": "server_error", "message": error.message})),
            "incomplete_details": (status == Status::Incomplete).then(|| json!({"reason": "max_output_tokens"})),
            "instructions": null, "max_output_tokens": null, "metadata": {}, "model": answer.model, "output": output,
            "parallel_tool_calls": true, "previous_response_id": self.previous,
            "reasoning": {"effort": null, "summary": null}, "service_tier": "default", "temperature": null,
            "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": null,
            "truncation": "disabled", "usage": usage,
        });
        for (name, value) in &self.repeated {
            response[name] = value.clone();
        }
        response
    }

    fn event(&mut self, out: &mut String, name: &str, mut data: Value) {
        data["type"] = name.into();
        data["sequence_number"] = self.events.into();
        self.events += 1;
        write_event(out, name, &data);
    }

    /// An event of the latest block's only part, with a `field` of its own.
    fn part_event(&mut self, out: &mut String, answer: &Transcript, name: &str, field: (&str, Value)) {
        let (index, block) = answer.last();
        let mut data = json!({"item_id": self.item_id(index, block), "output_index": index});
        if !matches!(block.kind, Kind::Call { .. }) {
            data["content_index"] = 0.into();
        }
        if name.starts_with("response.output_text") {
            data["logprobs"] = json!([]);
        }
        data[field.0] = field.1;
        self.event(out, name, data);
    }

    fn store(&mut self, answer: &Transcript, response: &Value) {
        let (id, Some(storing)) = (self.id(), self.storing.take()) else { return };
        let Storing { stored, owner, mut turns, input } = storing;
        let answered = join(&[message(answer)]);
        let both = if input.is_empty() { answered } else { format!("{input},{answered}") };
        turns.push(stored.turn(&owner, both));
        stored.insert(&id, Response { owner, turns, json: response.to_string().into() }, Instant::now());
    }
}

/// The answer as a message of the chat that goes on.
fn message(answer: &Transcript) -> Message {
    let mut message = Message { role: "assistant", ..Message::default() };
    for Block { kind, text } in &answer.blocks {
        match kind {
            Kind::Reasoning => append(&mut message.reasoning_content, text),
            Kind::Text => append(&mut message.content, text),
            Kind::Call { id, name } => message.tool_calls.push(Call::new(id.clone(), name.clone(), text.clone())),
        }
    }
    if message.tool_calls.is_empty() {
        message.content.get_or_insert_default();
    }
    message
}

fn part(block: &Block, text: &str) -> Value {
    match block.kind {
        Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
        _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
    }
}

fn usage(answer: &Transcript) -> Value {
    let usage = answer.usage;
    let mut cached = json!({"cached_tokens": usage.cached_tokens()});
    usage.cached_details().into_iter().for_each(|details| cached["cached_tokens_details"] = json!(details));
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

impl Shape for ResponseShape {
    fn begin(&mut self, answer: &Transcript, out: &mut String) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response(answer, Status::InProgress, None);
            self.event(out, name, json!({"response": response}));
        }
    }

    fn open(&mut self, answer: &Transcript, out: &mut String) {
        let (index, block) = answer.last();
        let item = self.item(index, block, Status::InProgress);
        self.event(out, "response.output_item.added", json!({"output_index": index, "item": item}));
        if !matches!(block.kind, Kind::Call { .. }) {
            self.part_event(out, answer, "response.content_part.added", ("part", part(block, "")));
        }
    }

    fn delta(&mut self, answer: &Transcript, text: &str, out: &mut String) {
        let name = match answer.last().1.kind {
            Kind::Reasoning => "response.reasoning_text.delta",
            Kind::Text => "response.output_text.delta",
            Kind::Call { .. } => "response.function_call_arguments.delta",
        };
        self.part_event(out, answer, name, ("delta", text.into()));
    }

    fn close(&mut self, answer: &Transcript, out: &mut String) {
        let (index, block) = answer.last();
        let text = block.text.as_str();
        match &block.kind {
            Kind::Call { .. } => {
                let name = "response.function_call_arguments.done";
                self.part_event(out, answer, name, ("arguments", text.into()));
            }
            kind => {
                let reasoning = *kind == Kind::Reasoning;
                let name = if reasoning { "response.reasoning_text.done" } else { "response.output_text.done" };
                self.part_event(out, answer, name, ("text", text.into()));
                self.part_event(out, answer, "response.content_part.done", ("part", part(block, text)));
            }
        }
        let item = self.item(index, block, Status::of(answer));
        self.event(out, "response.output_item.done", json!({"output_index": index, "item": item}));
    }

    fn end(&mut self, answer: &Transcript, out: &mut String) {
        let status = Status::of(answer);
        let response = self.response(answer, status, None);
        self.store(answer, &response);
        self.event(out, &format!("response.{}", status.text()), json!({"response": response}));
    }

    fn fail(&mut self, answer: &Transcript, error: &ErrorBody, out: &mut String) {
        let response = self.response(answer, Status::Failed, Some(error));
        self.event(out, "response.failed", json!({"response": response}));
    }

    fn whole(&self, answer: &Transcript) -> String {
        self.response(answer, Status::of(answer), None).to_string()
    }
}
