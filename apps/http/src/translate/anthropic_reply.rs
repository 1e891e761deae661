//! Answers in the shape of Anthropic's Messages API.

use super::{
    errors::{ErrorBody, anthropic},
    stream::{Block, End, Kind, Shape, Transcript, write_event},
};
use serde_json::{Value, json};

/// A message, with its events.
#[derive(Debug)]
pub(super) struct MessageShape {
    id: String,
}

impl MessageShape {
    pub(super) fn new() -> Self {
        Self { id: format!("msg_{:032x}", rand::random::<u128>()) }
    }

    fn message(&self, answer: &Transcript, content: &[Value], ended: bool) -> Value {
        let (reason, stop) = if ended { stop_reason(answer) } else { (Value::Null, Value::Null) };
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": answer.model, "content": content,
            "stop_reason": reason, "stop_sequence": stop, "usage": usage(answer),
        })
    }
}

/// Why a message ended, and the stop sequence that did it.
fn stop_reason(answer: &Transcript) -> (Value, Value) {
    match (answer.end, &answer.stop) {
        (End::Stop, Some(stop)) => ("stop_sequence".into(), stop.as_str().into()),
        (End::Stop, None) => ("end_turn".into(), Value::Null),
        (End::Length, _) => ("max_tokens".into(), Value::Null),
        (End::Calls, _) => ("tool_use".into(), Value::Null),
    }
}

/// Tokens that were cached do not count as input tokens.
fn usage(answer: &Transcript) -> Value {
    let cached = answer.usage.cached_tokens();
    json!({
        "input_tokens": answer.usage.prompt_tokens.saturating_sub(cached),
        "cache_read_input_tokens": cached,
        "output_tokens": answer.usage.completion_tokens,
    })
}

/// A content block with `text`: its own, or none where it begins.
fn content(block: &Block, text: &str) -> Value {
    match &block.kind {
        Kind::Reasoning => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Kind::Text => json!({"type": "text", "text": text}),
        Kind::Call { id, name } => {
            // A parser gives only objects as arguments.
            let input = serde_json::from_str::<Value>(text).unwrap_or_else(|_| json!({}));
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

impl Shape for MessageShape {
    fn begin(&mut self, answer: &Transcript, out: &mut String) {
        let message = self.message(answer, &[], false);
        write_event(out, "message_start", &json!({"type": "message_start", "message": message}));
    }

    fn open(&mut self, answer: &Transcript, out: &mut String) {
        let (index, block) = answer.last();
        let start = json!({"type": "content_block_start", "index": index, "content_block": content(block, "")});
        write_event(out, "content_block_start", &start);
    }

    fn delta(&mut self, answer: &Transcript, text: &str, out: &mut String) {
        let (index, block) = answer.last();
        let delta = match block.kind {
            Kind::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
            Kind::Text => json!({"type": "text_delta", "text": text}),
            Kind::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
        };
        let delta = json!({"type": "content_block_delta", "index": index, "delta": delta});
        write_event(out, "content_block_delta", &delta);
    }

    fn close(&mut self, answer: &Transcript, out: &mut String) {
        let stop = json!({"type": "content_block_stop", "index": answer.last().0});
        write_event(out, "content_block_stop", &stop);
    }

    fn end(&mut self, answer: &Transcript, out: &mut String) {
        let (reason, stop) = stop_reason(answer);
        let delta = json!({"stop_reason": reason, "stop_sequence": stop});
        let delta = json!({"type": "message_delta", "delta": delta, "usage": usage(answer)});
        write_event(out, "message_delta", &delta);
        write_event(out, "message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, _: &Transcript, error: &ErrorBody, out: &mut String) {
        write_event(out, "error", &anthropic(error, None));
    }

    fn whole(&self, answer: &Transcript) -> String {
        let blocks: Vec<Value> = answer.blocks.iter().map(|block| content(block, &block.text)).collect();
        self.message(answer, &blocks, true).to_string()
    }
}
