//! Requests of Anthropic's Messages API as chat requests.

use super::{
    errors::Names,
    request::{
        Call, ChatRequest, Message, Messages, append, items, joined_text, kind_of, object_text, required_text, tree,
        unsupported_kind,
    },
    table::{Field, finish, ignores, needs, refuses, takes},
};
use crate::{
    error::ApiError,
    fields::{Fields, Neutral, missing, required, text, wrong_type},
    json::{Json, Kind},
    limits::{MESSAGES_MAX, TOOLS_MAX},
};
use serde_json::{Value, json};

/// Fields of a chat by their names here.
pub(super) const NAMES: Names = &[
    ("messages", "messages"),
    ("stop", "stop_sequences"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("tool_choice.function", "tool_choice"),
    (".parameters", ".input_schema"),
];

const MESSAGES: &[Field] = &[
    takes("model", "the served model's name; without it, the served one"),
    needs("messages", "roles user and assistant; consecutive texts of one role are one message"),
    takes("system", "a text or a list of text blocks"),
    needs("max_tokens", "most tokens of the answer"),
    takes("stop_sequences", "texts that end the answer"),
    takes("temperature", "0 is greedy"),
    takes("top_p", "nucleus sampling"),
    takes("top_k", "only so many likeliest tokens are drawn"),
    takes("tools", "client tools; others are refused by their `type`"),
    takes("tool_choice", "as the chat's `tool_choice`: auto, any (required), tool (a function), none"),
    takes("thinking", "`disabled` and `enabled` set the template's variable; `adaptive` leaves the template's default"),
    takes("output_config", "`effort` and `format`"),
    takes("stream", "server-sent events"),
    ignores("metadata", ""),
    ignores("cache_control", "a prompt's KV stays cached anyway while its memory lasts"),
    refuses("service_tier", Neutral::Text(&["auto", "standard_only"])),
    refuses("speed", Neutral::Text(&["standard"])),
    refuses("container", Neutral::Null),
    refuses("context_management", Neutral::Null),
    refuses("diagnostics", Neutral::Null),
    refuses("inference_geo", Neutral::Null),
    refuses("mcp_servers", Neutral::Empty),
    refuses("user_profile_id", Neutral::Null),
    refuses("workspace_id", Neutral::Null),
];

const COUNT: &[Field] = &[
    takes("model", "the served model's name; without it, the served one"),
    needs("messages", "as in `/v1/messages`, and all objects inside of it"),
    takes("system", "as in `/v1/messages`"),
    takes("tools", "as in `/v1/messages`"),
    takes("tool_choice", "as in `/v1/messages`"),
    takes("thinking", "as in `/v1/messages`"),
    takes("output_config", "as in `/v1/messages`"),
    ignores("cache_control", "as in `/v1/messages`"),
    refuses("speed", Neutral::Text(&["standard"])),
    refuses("context_management", Neutral::Null),
    refuses("mcp_servers", Neutral::Empty),
    refuses("user_profile_id", Neutral::Null),
    refuses("workspace_id", Neutral::Null),
];

const TEXT: &[Field] = &[needs("text", ""), ignores("cache_control", ""), refuses("citations", Neutral::Empty)];

const THINKING: &[Field] =
    &[needs("thinking", "the template decides whether it is part of the prompt"), ignores("signature", "")];

const TOOL_USE: &[Field] = &[
    needs("id", ""),
    needs("name", ""),
    needs("input", ""),
    ignores("cache_control", ""),
    refuses("caller", Neutral::Null),
    refuses("toolset_name", Neutral::Null),
];

const TOOL_RESULT: &[Field] = &[
    needs("tool_use_id", ""),
    takes("content", "a text or a list of text blocks"),
    takes("is_error", "the result begins with a line `Error:`: chat templates have no place for it"),
    ignores("cache_control", ""),
    refuses("toolset_name", Neutral::Null),
];

const TOOL: &[Field] = &[
    takes("type", "`custom` only"),
    needs("name", ""),
    takes("description", ""),
    needs("input_schema", ""),
    takes("strict", "as the chat's `strict`"),
    ignores("cache_control", ""),
    ignores("eager_input_streaming", "a call is given when it is complete"),
    refuses("allowed_callers", Neutral::Empty),
    refuses("defer_loading", Neutral::Bool(false)),
    refuses("input_examples", Neutral::Empty),
];

const CHOICE: &[Field] =
    &[needs("type", ""), takes("name", ""), takes("disable_parallel_tool_use", "the answer ends after its first call")];

const THINKING_CONFIG: &[Field] = &[
    needs("type", "enabled, disabled or adaptive"),
    ignores("budget_tokens", "a target, not a limit: nothing here steers a model towards it"),
    refuses("display", Neutral::Null),
];

const OUTPUT_CONFIG: &[Field] =
    &[takes("effort", "the template's `reasoning_effort`"), takes("format", "the chat's `response_format`")];

const FORMAT: &[Field] = &[needs("type", "`json_schema`"), needs("schema", "")];

/// The reference page's tables.
pub(super) const MESSAGES_OBJECTS: &[(&str, &[Field])] = &[
    ("", MESSAGES),
    ("…content[text].", TEXT),
    ("…content[thinking].", THINKING),
    ("…content[tool_use].", TOOL_USE),
    ("…content[tool_result].", TOOL_RESULT),
    ("tools[].", TOOL),
    ("tool_choice.", CHOICE),
    ("thinking.", THINKING_CONFIG),
    ("output_config.", OUTPUT_CONFIG),
    ("output_config.format.", FORMAT),
];

pub(super) const COUNT_OBJECTS: &[(&str, &[Field])] = &[("", COUNT)];

/// A chat request, and whether its answer is streamed.
pub(super) fn read(body: &[u8]) -> Result<(ChatRequest, bool), ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut chat = common(&mut fields)?;
    let max_tokens = fields.u32("max_tokens", (1, u32::MAX))?.ok_or_else(|| missing("max_tokens"))?;
    chat.set("max_tokens", max_tokens);
    chat.pass(&mut fields, "stop_sequences", "stop")?;
    for name in ["temperature", "top_p", "top_k"] {
        chat.pass(&mut fields, name, name)?;
    }
    let stream = fields.bool("stream", false)?;
    finish(fields, MESSAGES)?;
    chat.stream();
    Ok((chat, stream))
}

/// A request to `/tokenize` for the prompt of a request.
pub(super) fn read_count(body: &[u8]) -> Result<ChatRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut chat = common(&mut fields)?;
    chat.fields.remove("response_format");
    finish(fields, COUNT)?;
    Ok(chat)
}

/// Takes what the prompt is made of.
fn common(fields: &mut Fields<'_>) -> Result<ChatRequest, ApiError> {
    let mut chat = ChatRequest::default();
    chat.pass(fields, "model", "model")?;
    if let Some(system) = fields.take("system") {
        chat.system = Some(Message::new("system", joined_text("system", system, text_block)?));
    }
    let list = required(fields, "messages")?;
    let mut messages = Messages::default();
    for (path, item) in items("messages", list, "a list of messages", MESSAGES_MAX)? {
        message(&path, item, &mut messages)?;
    }
    if messages.list.last().is_some_and(|message| message.role == "assistant") {
        let text = "the field `messages` ends with an assistant message, but an answer is not continued";
        return Err(ApiError::field("messages", "unsupported_parameter", text));
    }
    chat.messages = messages.list;
    if let Some(tools) = fields.take("tools") {
        let tools: Result<Vec<Value>, _> =
            items("tools", tools, "a list of tools", TOOLS_MAX)?.map(|(path, item)| tool(&path, item)).collect();
        chat.set("tools", tools?);
    }
    if let Some(choice) = fields.take("tool_choice") {
        take_choice(choice, &mut chat)?;
    }
    if let Some(thinking) = fields.take("thinking") {
        take_thinking(thinking, &mut chat)?;
    }
    if let Some(config) = fields.take("output_config") {
        take_output_config(config, &mut chat)?;
    }
    Ok(chat)
}

fn message(path: &str, item: Json<'_>, messages: &mut Messages) -> Result<(), ApiError> {
    let mut fields = Fields::nested(path, item)?;
    let role = required_text(&mut fields, "role")?;
    let assistant = match role.as_str() {
        "user" => false,
        "assistant" => true,
        _ => {
            let name = fields.name("role");
            let message = format!("the field `{name}` is `{role}`, but must be user or assistant");
            return Err(ApiError::field(name, "invalid_value", message));
        }
    };
    let content = required(&mut fields, "content")?;
    let name = fields.name("content");
    fields.finish()?;
    if content.kind() == Kind::Text {
        return add_text(&name, assistant, &text(&name, content)?, messages);
    }
    if content.kind() != Kind::List {
        return Err(wrong_type(&name, "a string or a list of blocks", content));
    }
    for (index, block) in content.items().enumerate() {
        add_block(&format!("{name}[{index}]"), assistant, block, messages)?;
    }
    Ok(())
}

fn add_text(name: &str, assistant: bool, text: &str, messages: &mut Messages) -> Result<(), ApiError> {
    if assistant {
        append(&mut messages.assistant(name)?.content, text);
    } else if let Some(last) = messages.list.last_mut().filter(|message| message.role == "user") {
        append(&mut last.content, text);
    } else {
        messages.push(name, Message::new("user", text.to_owned()))?;
    }
    Ok(())
}

fn add_block(path: &str, assistant: bool, block: Json<'_>, messages: &mut Messages) -> Result<(), ApiError> {
    let mut fields = Fields::nested(path, block)?;
    let kind = kind_of(&mut fields)?;
    match (kind.as_str(), assistant) {
        ("text", _) => add_text(path, assistant, &text_fields(fields)?, messages),
        ("thinking", true) => {
            let thinking = required_text(&mut fields, "thinking")?;
            finish(fields, THINKING)?;
            append(&mut messages.assistant(path)?.reasoning_content, &thinking);
            Ok(())
        }
        ("tool_use", true) => {
            let (id, name) = (required_text(&mut fields, "id")?, required_text(&mut fields, "name")?);
            let input = required(&mut fields, "input")?;
            let input = object_text(&fields.name("input"), input)?;
            finish(fields, TOOL_USE)?;
            messages.call(path, Call::new(id, name, input))
        }
        ("tool_result", false) => {
            let id = required_text(&mut fields, "tool_use_id")?;
            let name = fields.name("content");
            let content = fields.take("content").map_or(Ok(String::new()), |c| joined_text(&name, c, text_block))?;
            let failed = fields.bool("is_error", false)?;
            finish(fields, TOOL_RESULT)?;
            let content = if failed { format!("Error:\n{content}") } else { content };
            messages.push(path, Message::tool_result(id, content))
        }
        (_, true) => Err(unsupported_kind(path, &kind, "`text`, `thinking` and `tool_use` of an assistant")),
        (_, false) => Err(unsupported_kind(path, &kind, "`text` and `tool_result` of a user")),
    }
}

/// The text of a text block.
fn text_block(path: &str, block: Json<'_>) -> Result<String, ApiError> {
    let mut fields = Fields::nested(path, block)?;
    let kind = kind_of(&mut fields)?;
    if kind != "text" { Err(unsupported_kind(path, &kind, "`text` blocks")) } else { text_fields(fields) }
}

fn text_fields(mut fields: Fields<'_>) -> Result<String, ApiError> {
    let text = required_text(&mut fields, "text")?;
    finish(fields, TEXT)?;
    Ok(text)
}

fn tool(path: &str, item: Json<'_>) -> Result<Value, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    if let Some(kind) = fields.string("type")?.filter(|kind| kind != "custom") {
        return Err(unsupported_kind(path, &kind, "`custom` tools"));
    }
    let mut function = ChatRequest::default();
    function.set("name", required_text(&mut fields, "name")?);
    function.pass(&mut fields, "description", "description")?;
    function.pass(&mut fields, "strict", "strict")?;
    let schema = function.pass(&mut fields, "input_schema", "parameters")?;
    schema.ok_or_else(|| missing(&fields.name("input_schema")))?;
    finish(fields, TOOL)?;
    Ok(json!({"type": "function", "function": function.fields}))
}

fn take_choice(value: Json<'_>, chat: &mut ChatRequest) -> Result<(), ApiError> {
    let mut fields = Fields::nested("tool_choice", value)?;
    let kind = kind_of(&mut fields)?;
    let choice = match kind.as_str() {
        "auto" | "none" => Value::from(kind),
        "any" => Value::from("required"),
        "tool" => json!({"type": "function", "function": {"name": required_text(&mut fields, "name")?}}),
        _ => return Err(unsupported_kind("tool_choice", &kind, "auto, any, tool and none")),
    };
    chat.set("tool_choice", choice);
    if fields.bool("disable_parallel_tool_use", false)? {
        chat.set("parallel_tool_calls", false);
    }
    finish(fields, CHOICE)
}

fn take_thinking(value: Json<'_>, chat: &mut ChatRequest) -> Result<(), ApiError> {
    let mut fields = Fields::nested("thinking", value)?;
    let kind = kind_of(&mut fields)?;
    match kind.as_str() {
        "enabled" | "disabled" => chat.set("thinking", json!({"type": kind})),
        "adaptive" => {}
        _ => return Err(unsupported_kind("thinking", &kind, "enabled, disabled and adaptive")),
    }
    finish(fields, THINKING_CONFIG)
}

fn take_output_config(value: Json<'_>, chat: &mut ChatRequest) -> Result<(), ApiError> {
    let mut fields = Fields::nested("output_config", value)?;
    chat.pass(&mut fields, "effort", "reasoning_effort")?;
    if let Some(format) = fields.take("format") {
        let mut format = Fields::nested("output_config.format", format)?;
        let kind = kind_of(&mut format)?;
        if kind != "json_schema" {
            return Err(unsupported_kind("output_config.format", &kind, "`json_schema`"));
        }
        let schema = tree(&format.name("schema"), required(&mut format, "schema")?)?;
        finish(format, FORMAT)?;
        let schema = json!({"name": "output", "schema": schema, "strict": true});
        chat.set("response_format", json!({"type": "json_schema", "json_schema": schema}));
    }
    finish(fields, OUTPUT_CONFIG)
}
