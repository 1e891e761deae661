//! The messages of a chat, parsed and turned into a prompt.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, wrong_type},
    params::required,
};
use lagoon_text::{ChatMessage, Content};
use serde_json::Value;

/// What clients send back of an assistant's message that carries nothing here.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("refusal", Neutral::Null),
    ("audio", Neutral::Null),
    ("annotations", Neutral::Empty),
    ("tool_calls", Neutral::Empty),
    ("function_call", Neutral::Null),
    ("reasoning_content", Neutral::Null),
    ("reasoning", Neutral::Null),
];

/// Parses `messages`: at least one, text only.
pub(crate) fn take(fields: &mut Fields) -> Result<Vec<ChatMessage>, ApiError> {
    let items = match required(fields, "messages")? {
        Value::Array(items) => items,
        other => return Err(wrong_type("messages", "a list of messages", &other)),
    };
    if items.is_empty() {
        return Err(ApiError::field("messages", "invalid_value", "the field `messages` must not be empty"));
    }
    items.into_iter().enumerate().map(|(index, item)| message(&format!("messages[{index}]"), item)).collect()
}

fn message(path: &str, item: Value) -> Result<ChatMessage, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let role = match required(&mut fields, "role")? {
        Value::String(role) => role,
        other => return Err(wrong_type(&fields.name("role"), "a string", &other)),
    };
    let role = match role.as_str() {
        "system" | "user" | "assistant" => role,
        // OpenAI's newer name of the system role; chat templates know only the older one.
        "developer" => "system".to_owned(),
        _ => {
            let name = fields.name("role");
            let message = format!("the field `{name}` is `{role}`, but must be system, developer, user or assistant");
            return Err(ApiError::field(name, "invalid_value", message));
        }
    };
    let content_name = fields.name("content");
    let content = match required(&mut fields, "content")? {
        Value::String(text) => text,
        Value::Array(parts) => {
            let parts = parts.into_iter().enumerate();
            let parts = parts.map(|(index, part)| text_part(&format!("{content_name}[{index}]"), part));
            parts.collect::<Result<Vec<_>, _>>()?.join("\n")
        }
        other => return Err(wrong_type(&content_name, "a string or a list of text parts", &other)),
    };
    let name = fields.string("name")?;
    fields.neutral(UNSUPPORTED)?;
    fields.finish()?;
    Ok(ChatMessage { role, content: Content(content), name })
}

fn text_part(path: &str, part: Value) -> Result<String, ApiError> {
    let mut fields = Fields::nested(path, part)?;
    let name = fields.name("type");
    match fields.string("type")?.as_deref() {
        Some("text") => {}
        Some(other) => {
            let message = format!("the field `{name}` is `{other}`, but only text parts are supported");
            return Err(ApiError::field(name, "unsupported_parameter", message));
        }
        None => return Err(crate::fields::missing(&name)),
    }
    let text = fields.string("text")?.ok_or_else(|| crate::fields::missing(&fields.name("text")))?;
    fields.finish()?;
    Ok(text)
}
