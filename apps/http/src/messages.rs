//! Parses the messages of a chat.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, required, text, too_many, wrong_type},
    json::{Json, Kind},
    limits::{MESSAGE_CALLS_MAX, MESSAGES_MAX, TEMPLATE_FIELD_BYTES_MAX},
    tools::{CACHE_CONTROL, function_name_of, function_type},
};
use lagoon_text::{ChatMessage, Content, ToolCall};
use serde_json::{Map, Value};

/// Unsupported fields of an assistant message that clients send back, with the values that change nothing.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("refusal", Neutral::Null),
    ("audio", Neutral::Null),
    ("annotations", Neutral::Empty),
    ("tool_calls", Neutral::Empty),
    ("tool_call_id", Neutral::Null),
    ("function_call", Neutral::Null),
    ("reasoning_content", Neutral::Null),
    ("reasoning", Neutral::Null),
    // As LiteLLM and OpenRouter write them.
    ("provider_specific_fields", Neutral::Any),
    ("reasoning_details", Neutral::Empty),
    ("thinking_blocks", Neutral::Empty),
    ("images", Neutral::Empty),
];

/// Parses the messages of a chat, in the field `name`: at least one and at most [`MESSAGES_MAX`], text only.
pub(crate) fn list(name: &str, list: Json<'_>) -> Result<Vec<ChatMessage>, ApiError> {
    if list.kind() != Kind::List {
        return Err(wrong_type(name, "a list of messages", list));
    }
    if list.is_empty() {
        return Err(ApiError::field(name, "invalid_value", format!("the field `{name}` must not be empty")));
    }
    let count = list.items().count();
    if count > MESSAGES_MAX {
        return Err(too_many(name, count, MESSAGES_MAX));
    }
    // Of the arguments of all calls together: as a tree they take several times their bytes.
    let mut bytes_left = TEMPLATE_FIELD_BYTES_MAX;
    let one = |(index, item)| message(&format!("{name}[{index}]"), item, &mut bytes_left);
    list.items().enumerate().map(one).collect()
}

fn message(path: &str, item: Json<'_>, bytes_left: &mut usize) -> Result<ChatMessage, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let role = required(&mut fields, "role")?;
    let role = match text(&fields.name("role"), role)? {
        role if matches!(role.as_str(), "system" | "user" | "assistant" | "tool") => role,
        // OpenAI's newer name of the system role; chat templates know only the older one.
        role if role == "developer" => "system".to_owned(),
        role => {
            let name = fields.name("role");
            let message =
                format!("the field `{name}` is `{role}`, but must be system, developer, user, assistant or tool");
            return Err(ApiError::field(name, "invalid_value", message));
        }
    };
    let mut message = ChatMessage { role, ..ChatMessage::default() };
    if message.role == "assistant" {
        if let Some(calls) = fields.take("tool_calls") {
            message.tool_calls = tool_calls(&fields.name("tool_calls"), calls, bytes_left)?;
        }
        // vLLM calls it `reasoning` as well.
        let reasoning = fields.string("reasoning")?;
        message.reasoning_content = fields.string("reasoning_content")?.or(reasoning);
    } else if message.role == "tool" {
        let id = required(&mut fields, "tool_call_id")?;
        message.tool_call_id = Some(text(&fields.name("tool_call_id"), id)?);
    }
    let content = fields.take("content");
    if let Some(content) = content {
        message.content = Content(content_text(&fields.name("content"), content)?);
    } else if message.tool_calls.is_empty() && message.reasoning_content.is_none() {
        return Err(crate::fields::missing(&fields.name("content")));
    }
    message.name = fields.string("name")?;
    fields.neutral(UNSUPPORTED)?;
    fields.neutral(CACHE_CONTROL)?;
    fields.finish()?;
    Ok(message)
}

fn tool_calls(name: &str, list: Json<'_>, bytes_left: &mut usize) -> Result<Vec<ToolCall>, ApiError> {
    if list.kind() != Kind::List {
        return Err(wrong_type(name, "a list of tool calls", list));
    }
    let count = list.items().count();
    if count > MESSAGE_CALLS_MAX {
        return Err(too_many(name, count, MESSAGE_CALLS_MAX));
    }
    let one = |(index, item)| tool_call(&format!("{name}[{index}]"), item, bytes_left);
    list.items().enumerate().map(one).collect()
}

fn tool_call(path: &str, item: Json<'_>, bytes_left: &mut usize) -> Result<ToolCall, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    function_type(&mut fields)?;
    let id = required(&mut fields, "id")?;
    let id = text(&fields.name("id"), id)?;
    // Clients that collect a stream send its indexes back.
    fields.integer("index", (0, i64::MAX))?;
    let function = required(&mut fields, "function")?;
    let mut function = Fields::nested(&fields.name("function"), function)?;
    fields.finish()?;
    let name = function_name_of(&mut function)?;
    let arguments = required(&mut function, "arguments")?;
    let path = function.name("arguments");
    let arguments = text(&path, arguments)?;
    function.finish()?;
    Ok(ToolCall { id, name, arguments: arguments_of(&path, &arguments, bytes_left)? })
}

/// The arguments of a call: a JSON object in a string, or an empty string.
fn arguments_of(path: &str, arguments: &str, bytes_left: &mut usize) -> Result<Value, ApiError> {
    let wrong = |problem: String| ApiError::field(path, "invalid_value", format!("the field `{path}` {problem}"));
    *bytes_left = bytes_left.checked_sub(arguments.len()).ok_or_else(|| {
        wrong(format!("is too long: the arguments of all calls have at most {TEMPLATE_FIELD_BYTES_MAX} bytes"))
    })?;
    if arguments.trim().is_empty() {
        return Ok(Value::Object(Map::new()));
    }
    let object: Result<Map<String, Value>, _> = serde_json::from_str(arguments);
    object.map(Value::Object).map_err(|error| wrong(format!("must be a JSON object in a string: {error}")))
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
    fields.neutral(CACHE_CONTROL)?;
    fields.finish()?;
    Ok(text)
}
