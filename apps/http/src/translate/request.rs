//! The chat request that a translated request becomes.

use super::stored::Turn;
use crate::{
    error::ApiError,
    fields::{Fields, missing, text, too_many, wrong_type},
    json::{Json, Kind},
    limits::{MESSAGES_MAX, TEMPLATE_FIELD_BYTES_MAX},
};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A message of a chat.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Message {
    pub(super) role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<Call>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_call_id: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Call {
    id: String,
    r#type: &'static str,
    function: Function,
}

#[derive(Clone, Debug, Serialize)]
struct Function {
    name: String,
    arguments: String,
}

impl Call {
    pub(super) fn new(id: String, name: String, arguments: String) -> Self {
        Self { id, r#type: "function", function: Function { name, arguments } }
    }
}

impl Message {
    pub(super) fn new(role: &'static str, content: String) -> Self {
        Self { role, content: Some(content), ..Self::default() }
    }

    pub(super) fn tool_result(id: String, content: String) -> Self {
        Self { tool_call_id: Some(id), ..Self::new("tool", content) }
    }
}

/// Appends a text to another one, on a line of its own.
pub(super) fn append(to: &mut Option<String>, text: &str) {
    match to {
        None => *to = Some(text.to_owned()),
        Some(to) => {
            to.push('\n');
            to.push_str(text);
        }
    }
}

/// The messages of a request, bounded: a call or a result may be a message.
#[derive(Debug, Default)]
pub(super) struct Messages {
    pub(super) list: Vec<Message>,
    calls: usize,
}

impl Messages {
    /// Adds a message of the field `name`.
    pub(super) fn push(&mut self, name: &str, message: Message) -> Result<(), ApiError> {
        if self.list.len() == MESSAGES_MAX {
            return Err(too_many(name, self.list.len() + 1, MESSAGES_MAX));
        }
        self.list.push(message);
        Ok(())
    }

    /// The assistant's message that further parts of the same turn belong to.
    pub(super) fn assistant(&mut self, name: &str) -> Result<&mut Message, ApiError> {
        if self.list.last().is_none_or(|message| message.role != "assistant") {
            self.push(name, Message { role: "assistant", ..Message::default() })?;
        }
        Ok(self.list.last_mut().expect("one was added"))
    }

    /// Adds a call to the assistant's message.
    pub(super) fn call(&mut self, name: &str, call: Call) -> Result<(), ApiError> {
        self.calls += 1;
        if self.calls > MESSAGES_MAX {
            return Err(too_many(name, self.calls, MESSAGES_MAX));
        }
        self.assistant(name)?.tool_calls.push(call);
        Ok(())
    }
}

/// A chat request: its messages, and all other fields.
#[derive(Debug, Default)]
pub(super) struct ChatRequest {
    pub(super) system: Option<Message>,
    pub(super) messages: Vec<Message>,
    pub(super) fields: Map<String, Value>,
}

impl ChatRequest {
    /// Passes the field on, unchanged, as the chat's field `to`. Returns it if it is there.
    pub(super) fn pass(&mut self, fields: &mut Fields<'_>, from: &str, to: &str) -> Result<Option<Value>, ApiError> {
        let Some(value) = fields.take(from) else { return Ok(None) };
        let value = tree(&fields.name(from), value)?;
        self.set(to, value.clone());
        Ok(Some(value))
    }

    pub(super) fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.fields.insert(name.to_owned(), value.into());
    }

    /// Has the answer streamed with its usage: the translation reads streams only.
    pub(super) fn stream(&mut self) {
        self.set("stream", true);
        self.set("stream_options", json!({"include_usage": true, "continuous_usage_stats": true}));
    }

    /// The request's body.
    pub(super) fn body(&self) -> Vec<u8> {
        self.body_after(&[], &join(&self.messages))
    }

    /// The body of a request with `own` messages after those of earlier turns, in JSON with commas between them.
    pub(super) fn body_after(&self, before: &[Arc<Turn>], own: &str) -> Vec<u8> {
        let system = self.system.as_ref().map(|message| join(std::slice::from_ref(message)));
        let fields = serde_json::to_string(&self.fields).expect("strings serialise");
        let earlier = before.iter().map(|turn| &*turn.messages);
        let messages = system.as_deref().into_iter().chain(earlier).chain([own]).filter(|part| !part.is_empty());
        let mut body = String::from("{\"messages\":[");
        body.reserve_exact(fields.len() + 2 + messages.clone().map(|part| part.len() + 1).sum::<usize>());
        for (index, part) in messages.enumerate() {
            body.push_str(if index == 0 { "" } else { "," });
            body.push_str(part);
        }
        body.push_str(if self.fields.is_empty() { "]" } else { "]," });
        body.push_str(&fields[1..]);
        body.into_bytes()
    }
}

/// Messages in JSON with commas between them.
pub(super) fn join(messages: &[Message]) -> String {
    let list = serde_json::to_string(messages).expect("strings serialise");
    list[1..list.len() - 1].to_owned()
}

/// A value as a tree: bounded, as it takes several times its bytes.
pub(super) fn tree(name: &str, value: Json<'_>) -> Result<Value, ApiError> {
    let bytes = value.bytes();
    if bytes > TEMPLATE_FIELD_BYTES_MAX && value.kind() != Kind::Text {
        let message =
            format!("the field `{name}` has {bytes} bytes, but at most {TEMPLATE_FIELD_BYTES_MAX} are allowed");
        return Err(ApiError::field(name, "invalid_value", message));
    }
    value
        .read()
        .map_err(|error| ApiError::field(name, "invalid_value", format!("the field `{name}` cannot be read: {error}")))
}

/// The items of a list of at most `limit`.
pub(super) fn items<'a>(
    name: &str,
    value: Json<'a>,
    expected: &str,
    limit: usize,
) -> Result<impl Iterator<Item = (String, Json<'a>)> + use<'a>, ApiError> {
    if value.kind() != Kind::List {
        return Err(wrong_type(name, expected, value));
    }
    let count = value.items().count();
    if count > limit {
        return Err(too_many(name, count, limit));
    }
    let name = name.to_owned();
    Ok(value.items().enumerate().map(move |(index, item)| (format!("{name}[{index}]"), item)))
}

/// Takes a field with text.
pub(super) fn required_text(fields: &mut Fields<'_>, name: &str) -> Result<String, ApiError> {
    fields.string(name)?.ok_or_else(|| missing(&fields.name(name)))
}

/// Takes `type`.
pub(super) fn kind_of(fields: &mut Fields<'_>) -> Result<String, ApiError> {
    required_text(fields, "type")
}

/// The refusal of an object's `type`.
pub(super) fn unsupported_kind(path: &str, kind: &str, supported: &str) -> ApiError {
    let name = format!("{path}.type");
    let message = format!("the field `{name}` is `{kind}`, but only {supported} are supported");
    ApiError::field(name, "unsupported_parameter", message)
}

/// A text, or the texts of a list's parts, joined by line breaks.
pub(super) fn joined_text(
    name: &str,
    value: Json<'_>,
    part: impl Fn(&str, Json<'_>) -> Result<String, ApiError>,
) -> Result<String, ApiError> {
    match value.kind() {
        Kind::Text => text(name, value),
        Kind::List => {
            let mut joined = String::new();
            for (index, item) in value.items().enumerate() {
                if index > 0 {
                    joined.push('\n');
                }
                joined.push_str(&part(&format!("{name}[{index}]"), item)?);
            }
            Ok(joined)
        }
        _ => Err(wrong_type(name, "a string or a list of parts", value)),
    }
}

/// An object's JSON as it is written.
pub(super) fn object_text(name: &str, value: Json<'_>) -> Result<String, ApiError> {
    if value.kind() != Kind::Object {
        return Err(wrong_type(name, "an object", value));
    }
    Ok(value.text().to_owned())
}
