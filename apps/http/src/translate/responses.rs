//! Requests of OpenAI's Responses API as chat requests.

use super::{
    errors::Names,
    request::{
        Call, ChatRequest, Message, Messages, append, items, joined_text, kind_of, required_text, tree,
        unsupported_kind,
    },
    table::{Field, finish, ignores, needs, refuses, takes},
};
use crate::{
    error::ApiError,
    fields::{Fields, Neutral, required, text, wrong_type},
    json::{Json, Kind},
    limits::{MESSAGES_MAX, TOOLS_MAX},
};
use serde_json::{Map, Value, json};

/// Fields of a chat by their names here.
pub(super) const NAMES: Names = &[
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("tool_choice.function", "tool_choice"),
];

const REQUEST: &[Field] = &[
    takes("model", "the served model's name; without it, the served one"),
    needs("input", "a text or a list of items: message, function_call, function_call_output, reasoning"),
    takes("instructions", "a system message before all others; not kept for the next response"),
    takes("max_output_tokens", "most tokens of the answer"),
    takes("temperature", "0 is greedy"),
    takes("top_p", "nucleus sampling"),
    takes("tools", "of type `function`; others are refused by their `type`"),
    takes("tool_choice", "as the chat's: auto, none, required, a function"),
    takes("parallel_tool_calls", "false ends the answer behind one call"),
    takes("reasoning", "`effort`"),
    takes("text", "`format`"),
    takes("store", "true by default; in memory, bounded in bytes, number and age"),
    takes("previous_response_id", "of the same API key"),
    takes("include", "`reasoning.encrypted_content` changes nothing: reasoning is plain text; others are refused"),
    takes("stream", "server-sent events"),
    takes("stream_options", "with values that change nothing"),
    takes("metadata", "is part of the response"),
    ignores("user", ""),
    ignores("safety_identifier", ""),
    ignores("client_metadata", ""),
    ignores("prompt_cache_key", "a prompt's KV stays cached anyway while its memory lasts"),
    ignores("prompt_cache_retention", ""),
    ignores("prompt_cache_options", ""),
    refuses("background", Neutral::Bool(false)),
    refuses("truncation", Neutral::Text(&["disabled"])),
    refuses("service_tier", Neutral::Text(&["auto", "default"])),
    refuses("top_logprobs", Neutral::Number(0.0)),
    refuses("max_tool_calls", Neutral::Null),
    refuses("conversation", Neutral::Null),
    refuses("prompt", Neutral::Null),
    refuses("context_management", Neutral::Empty),
    refuses("moderation", Neutral::Null),
];

const STREAM_OPTIONS: &[Field] = &[refuses("include_obfuscation", Neutral::Bool(false))];

const TEXT: &[Field] = &[
    takes("format", "the chat's `response_format`: text, json_object, json_schema"),
    refuses("verbosity", Neutral::Text(&["medium"])),
];

const FORMAT: &[Field] =
    &[needs("type", ""), takes("name", ""), takes("description", ""), takes("schema", ""), takes("strict", "")];

const REASONING: &[Field] = &[
    takes("effort", "the template's `reasoning_effort`"),
    refuses("summary", Neutral::Text(&["auto"])),
    refuses("generate_summary", Neutral::Text(&["auto"])),
];

const TOOL: &[Field] = &[
    needs("type", "`function` only"),
    needs("name", ""),
    takes("description", ""),
    takes("parameters", ""),
    takes("strict", "as the chat's `strict`"),
];

const MESSAGE: &[Field] = &[
    takes("type", ""),
    needs("role", "user, assistant, system or developer"),
    needs("content", "a text or a list of text parts"),
    ignores("id", ""),
    ignores("status", ""),
    refuses("phase", Neutral::Null),
];

const PART: &[Field] = &[
    needs("type", "input_text or output_text"),
    needs("text", ""),
    ignores("annotations", ""),
    ignores("logprobs", ""),
];

const CALL: &[Field] = &[
    needs("call_id", ""),
    needs("name", ""),
    needs("arguments", ""),
    ignores("id", ""),
    ignores("status", ""),
    refuses("caller", Neutral::Null),
    refuses("namespace", Neutral::Null),
];

const CALL_OUTPUT: &[Field] = &[
    needs("call_id", ""),
    needs("output", "a text or a list of text parts"),
    ignores("id", ""),
    ignores("name", ""),
    ignores("status", ""),
    refuses("caller", Neutral::Null),
    refuses("namespace", Neutral::Null),
];

const REASONING_ITEM: &[Field] = &[
    takes("content", "parts of type reasoning_text"),
    takes("summary", "parts of type summary_text, read where there is no content"),
    ignores("id", ""),
    ignores("status", ""),
    refuses("encrypted_content", Neutral::Empty),
];

const REASONING_PART: &[Field] = &[needs("type", ""), needs("text", "")];

/// The reference page's tables.
pub(super) const OBJECTS: &[(&str, &[Field])] = &[
    ("", REQUEST),
    ("stream_options.", STREAM_OPTIONS),
    ("text.", TEXT),
    ("text.format.", FORMAT),
    ("reasoning.", REASONING),
    ("tools[].", TOOL),
    ("input[message].", MESSAGE),
    ("input[message].content[].", PART),
    ("input[function_call].", CALL),
    ("input[function_call_output].", CALL_OUTPUT),
    ("input[reasoning].", REASONING_ITEM),
    ("input[reasoning].content[].", REASONING_PART),
];

/// A chat request, with what concerns its response.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) chat: ChatRequest,
    pub(super) stream: bool,
    pub(super) store: bool,
    pub(super) previous: Option<String>,
    /// Fields of the request that its response repeats.
    pub(super) repeated: Map<String, Value>,
}

pub(super) fn read(body: &[u8]) -> Result<Asked, ApiError> {
    let mut fields = Fields::parse(body)?;
    let (mut chat, mut repeated) = (ChatRequest::default(), Map::new());
    chat.pass(&mut fields, "model", "model")?;
    if let Some(instructions) = fields.string("instructions")? {
        repeated.insert("instructions".to_owned(), instructions.as_str().into());
        chat.system = Some(Message::new("system", instructions));
    }
    chat.messages = input(required(&mut fields, "input")?)?;
    let passed = [
        ("max_output_tokens", "max_completion_tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("parallel_tool_calls", "parallel_tool_calls"),
    ];
    for (from, to) in passed {
        repeated.extend(chat.pass(&mut fields, from, to)?.map(|value| (from.to_owned(), value)));
    }
    for (name, take) in [
        ("tools", take_tools as fn(Json<'_>, &mut ChatRequest) -> Result<(), ApiError>),
        ("tool_choice", take_choice),
        ("reasoning", take_reasoning),
        ("text", take_text),
    ] {
        if let Some(value) = fields.take(name) {
            repeated.insert(name.to_owned(), tree(name, value)?);
            take(value, &mut chat)?;
        }
    }
    if let Some(metadata) = fields.take("metadata") {
        if metadata.kind() != Kind::Object {
            return Err(wrong_type("metadata", "an object", metadata));
        }
        repeated.insert("metadata".to_owned(), tree("metadata", metadata)?);
    }
    let store = fields.bool("store", true)?;
    repeated.insert("store".to_owned(), store.into());
    let previous = fields.string("previous_response_id")?;
    take_include(&mut fields)?;
    if let Some(options) = fields.take("stream_options") {
        finish(Fields::nested("stream_options", options)?, STREAM_OPTIONS)?;
    }
    let stream = fields.bool("stream", false)?;
    finish(fields, REQUEST)?;
    chat.stream();
    Ok(Asked { chat, stream, store, previous, repeated })
}

fn input(value: Json<'_>) -> Result<Vec<Message>, ApiError> {
    const NAME: &str = "input";
    if value.kind() == Kind::Text {
        return Ok(vec![Message::new("user", text(NAME, value)?)]);
    }
    let mut messages = Messages::default();
    for (path, item) in items(NAME, value, "a string or a list of items", MESSAGES_MAX)? {
        add_item(&path, item, &mut messages)?;
    }
    Ok(messages.list)
}

fn add_item(path: &str, item: Json<'_>, messages: &mut Messages) -> Result<(), ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let kind = fields.string("type")?.unwrap_or_else(|| "message".to_owned());
    match kind.as_str() {
        "message" => add_message(path, fields, messages),
        "function_call" => {
            let [id, name, arguments] = ["call_id", "name", "arguments"].map(|name| required_text(&mut fields, name));
            finish(fields, CALL)?;
            messages.call(path, Call::new(id?, name?, arguments?))
        }
        "function_call_output" => {
            let id = required_text(&mut fields, "call_id")?;
            let output = required(&mut fields, "output")?;
            let output = joined_text(&fields.name("output"), output, part)?;
            finish(fields, CALL_OUTPUT)?;
            messages.push(path, Message::tool_result(id, output))
        }
        "reasoning" => {
            let mut text = None;
            for name in ["summary", "content"] {
                let path = fields.name(name);
                let Some(value) = fields.take(name).filter(|value| !value.is_empty()) else { continue };
                if value.kind() != Kind::List {
                    return Err(wrong_type(&path, "a list of parts", value));
                }
                text = Some(joined_text(&path, value, reasoning_part)?);
            }
            finish(fields, REASONING_ITEM)?;
            let Some(text) = text else { return Ok(()) };
            append(&mut messages.assistant(path)?.reasoning_content, &text);
            Ok(())
        }
        _ => Err(unsupported_kind(path, &kind, "message, function_call, function_call_output and reasoning")),
    }
}

fn add_message(path: &str, mut fields: Fields<'_>, messages: &mut Messages) -> Result<(), ApiError> {
    let role = required_text(&mut fields, "role")?;
    let content = required(&mut fields, "content")?;
    let content = joined_text(&fields.name("content"), content, part)?;
    let name = fields.name("role");
    finish(fields, MESSAGE)?;
    let role = match role.as_str() {
        "assistant" => {
            append(&mut messages.assistant(path)?.content, &content);
            return Ok(());
        }
        "user" => "user",
        "system" | "developer" => "system",
        _ => {
            let message = format!("the field `{name}` is `{role}`, but must be user, assistant, system or developer");
            return Err(ApiError::field(name, "invalid_value", message));
        }
    };
    messages.push(path, Message::new(role, content))
}

fn part(path: &str, item: Json<'_>) -> Result<String, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let kind = kind_of(&mut fields)?;
    if !matches!(kind.as_str(), "input_text" | "output_text") {
        return Err(unsupported_kind(path, &kind, "input_text and output_text"));
    }
    let text = required_text(&mut fields, "text")?;
    finish(fields, PART)?;
    Ok(text)
}

fn reasoning_part(path: &str, item: Json<'_>) -> Result<String, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let kind = kind_of(&mut fields)?;
    if !matches!(kind.as_str(), "reasoning_text" | "summary_text") {
        return Err(unsupported_kind(path, &kind, "reasoning_text and summary_text"));
    }
    let text = required_text(&mut fields, "text")?;
    finish(fields, REASONING_PART)?;
    Ok(text)
}

fn take_tools(value: Json<'_>, chat: &mut ChatRequest) -> Result<(), ApiError> {
    let tools: Result<Vec<Value>, _> =
        items("tools", value, "a list of tools", TOOLS_MAX)?.map(|(path, item)| tool(&path, item)).collect();
    chat.set("tools", tools?);
    Ok(())
}

fn tool(path: &str, item: Json<'_>) -> Result<Value, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let kind = kind_of(&mut fields)?;
    if kind != "function" {
        return Err(unsupported_kind(path, &kind, "`function` tools"));
    }
    let mut function = ChatRequest::default();
    function.set("name", required_text(&mut fields, "name")?);
    for name in ["description", "parameters", "strict"] {
        function.pass(&mut fields, name, name)?;
    }
    finish(fields, TOOL)?;
    Ok(json!({"type": "function", "function": function.fields}))
}

fn take_choice(value: Json<'_>, chat: &mut ChatRequest) -> Result<(), ApiError> {
    const NAME: &str = "tool_choice";
    let choice = match value.kind() {
        Kind::Object => {
            let mut fields = Fields::nested(NAME, value)?;
            let kind = kind_of(&mut fields)?;
            if kind != "function" {
                return Err(unsupported_kind(NAME, &kind, "a text and `function`"));
            }
            let name = required_text(&mut fields, "name")?;
            fields.finish()?;
            json!({"type": "function", "function": {"name": name}})
        }
        _ => text(NAME, value)?.into(),
    };
    chat.set(NAME, choice);
    Ok(())
}

fn take_reasoning(value: Json<'_>, chat: &mut ChatRequest) -> Result<(), ApiError> {
    let mut fields = Fields::nested("reasoning", value)?;
    chat.pass(&mut fields, "effort", "reasoning_effort")?;
    finish(fields, REASONING)
}

fn take_text(value: Json<'_>, chat: &mut ChatRequest) -> Result<(), ApiError> {
    let mut fields = Fields::nested("text", value)?;
    if let Some(format) = fields.take("format") {
        let mut fields = Fields::nested("text.format", format)?;
        let kind = kind_of(&mut fields)?;
        let mut schema = ChatRequest::default();
        if kind == "json_schema" {
            for name in ["name", "description", "schema", "strict"] {
                schema.pass(&mut fields, name, name)?;
            }
        }
        fields.finish()?;
        chat.set(
            "response_format",
            match kind.as_str() {
                "json_schema" => json!({"type": kind, "json_schema": schema.fields}),
                _ => json!({"type": kind}),
            },
        );
    }
    finish(fields, TEXT)
}

fn take_include(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    const NAME: &str = "include";
    let Some(value) = fields.take(NAME) else { return Ok(()) };
    for (path, item) in items(NAME, value, "a list of strings", TOOLS_MAX)? {
        let name = text(&path, item)?;
        if name != "reasoning.encrypted_content" {
            let message = format!("the field `{NAME}` asks for `{name}`, which is not supported");
            return Err(ApiError::field(NAME, "unsupported_parameter", message));
        }
    }
    Ok(())
}
