//! Parses the messages of a chat.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, text, wrong_type},
    json::{Json, Kind},
    limits::MESSAGES_MAX,
    params::{required, too_many},
};
use lagoon_text::{ChatMessage, Content};

/// Unsupported fields of an assistant message that clients send back, with the values that change nothing.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("refusal", Neutral::Null),
    ("audio", Neutral::Null),
    ("annotations", Neutral::Empty),
    ("tool_calls", Neutral::Empty),
    ("function_call", Neutral::Null),
    ("reasoning_content", Neutral::Null),
    ("reasoning", Neutral::Null),
];

/// Parses `messages`: at least one and at most [`MESSAGES_MAX`], text only.
pub(crate) fn take(fields: &mut Fields<'_>) -> Result<Vec<ChatMessage>, ApiError> {
    let list = required(fields, "messages")?;
    if list.kind() != Kind::List {
        return Err(wrong_type("messages", "a list of messages", list));
    }
    if list.is_empty() {
        return Err(ApiError::field("messages", "invalid_value", "the field `messages` must not be empty"));
    }
    let count = list.items().count();
    if count > MESSAGES_MAX {
        return Err(too_many("messages", count, MESSAGES_MAX));
    }
    list.items().enumerate().map(|(index, item)| message(&format!("messages[{index}]"), item)).collect()
}

fn message(path: &str, item: Json<'_>) -> Result<ChatMessage, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let role = required(&mut fields, "role")?;
    let role = match text(&fields.name("role"), role)? {
        role if matches!(role.as_str(), "system" | "user" | "assistant") => role,
        // OpenAI's newer name of the system role; chat templates know only the older one.
        role if role == "developer" => "system".to_owned(),
        role => {
            let name = fields.name("role");
            let message = format!("the field `{name}` is `{role}`, but must be system, developer, user or assistant");
            return Err(ApiError::field(name, "invalid_value", message));
        }
    };
    let content = required(&mut fields, "content")?;
    let content = content_text(&fields.name("content"), content)?;
    let name = fields.string("name")?;
    fields.neutral(UNSUPPORTED)?;
    fields.finish()?;
    Ok(ChatMessage { role, content: Content(content), name })
}

/// The text of a message's content; the texts of parts are joined by line breaks.
fn content_text(name: &str, content: Json<'_>) -> Result<String, ApiError> {
    match content.kind() {
        Kind::Text => text(name, content),
        Kind::List => {
            let mut joined = String::new();
            for (index, part) in content.items().enumerate() {
                if index > 0 {
                    joined.push('\n');
                }
                joined.push_str(&text_part(&format!("{name}[{index}]"), part)?);
            }
            Ok(joined)
        }
        _ => Err(wrong_type(name, "a string or a list of text parts", content)),
    }
}

fn text_part(path: &str, part: Json<'_>) -> Result<String, ApiError> {
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
