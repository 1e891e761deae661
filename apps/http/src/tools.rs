//! Fields of a chat about tools and about what its template gets: `tools`, `tool_choice`, `parallel_tool_calls`,
//! `reasoning_effort`, `chat_template_kwargs`, `thinking`.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, missing, required, text, too_many, wrong_type},
    forms::{Asked, refusal},
    json::{Json, Kind},
    limits::{TEMPLATE_FIELD_BYTES_MAX, TOOLS_MAX},
};
use lagoon_text::{
    ChatTemplate, Rendering, Tokenizer,
    parse::{AnswerParser, Beside, Calls, Formats, Tool, ToolFormat, is_function_name},
};
use lagoon_types::Grammar;
use serde_json::{Value, json};
use std::sync::Arc;

/// Variables of a template that a request may not set by `chat_template_kwargs`.
const RESERVED: &[&str] = &["messages", "tools", "documents", "add_generation_prompt", "lagoon_now"];
/// Where another server ends a cached prefix: here every prefix is cached.
pub(crate) const CACHE_CONTROL: &[(&str, Neutral)] = &[("cache_control", Neutral::Any)];
const EFFORT: &str = "reasoning_effort";
const VARIABLES: &str = "chat_template_kwargs";
const THINKING: &str = "thinking";

/// The fields of a chat for its template and for the parser of its answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToolFields {
    /// Tools that may be called: none with `tool_choice` none.
    pub(crate) tools: Arc<[Tool]>,
    pub(crate) parallel: bool,
    /// Whether the answer must be calls: then `tools` are those that it may call.
    is_required: bool,
    /// Place in the request of the first of `tools`.
    first: usize,
    /// Further variables of the template.
    pub(crate) variables: Vec<(String, Value)>,
}

impl ToolFields {
    /// Takes the fields; refuses variables that the template does not have.
    pub(crate) fn take(fields: &mut Fields<'_>, template: Option<&ChatTemplate>) -> Result<Self, ApiError> {
        let tools = fields.take("tools").map_or(Ok(Vec::new()), tool_list)?;
        let choice = take_choice(fields, &tools)?;
        let parallel = fields.bool("parallel_tool_calls", true)?;
        let mut variables = Vec::new();
        if let Some(value) = fields.take(VARIABLES) {
            take_variables(value, &mut variables)?;
        }
        if let Some(effort) = fields.string(EFFORT)? {
            if !["none", "minimal", "low", "medium", "high", "xhigh"].contains(&effort.as_str()) {
                let message = format!(
                    "the field `{EFFORT}` is `{effort}`, but must be none, minimal, low, medium, high or xhigh"
                );
                return Err(ApiError::field(EFFORT, "invalid_value", message));
            }
            variables.retain(|(name, _)| name != EFFORT);
            variables.push((EFFORT.to_owned(), Value::from(effort)));
        }
        if let Some(value) = fields.take(THINKING) {
            let variable = thinking_variable(value, template)?;
            variables.retain(|(name, _)| variable.as_ref().is_none_or(|(other, _)| name != other));
            variables.extend(variable);
        }
        let is_required = matches!(choice, Choice::Required | Choice::Named(_));
        let parallel = parallel && !matches!(choice, Choice::Named(_));
        let named = |tool: &Tool| matches!(&choice, Choice::Named(name) if tool.name == *name);
        let first = tools.iter().position(named).unwrap_or(0);
        let tools: Arc<[Tool]> = match choice {
            Choice::None => Arc::default(),
            Choice::Auto | Choice::Required => tools.into(),
            Choice::Named(name) => tools.into_iter().filter(|tool| tool.name == name).collect(),
        };
        let all = Self { tools, parallel, is_required, first, variables };
        template.map_or(Ok(()), |template| all.check(template))?;
        Ok(all)
    }

    /// The grammar of the answer, if it has one, and whether the reasoning is a part of it: calls that must be made, calls with
    /// strict arguments, or what is `asked`, or calls instead.
    pub(crate) fn constrained(
        &self,
        asked: Option<Asked>,
        formats: Formats,
        tokenizer: &Tokenizer,
    ) -> Result<Option<(Asked, bool)>, ApiError> {
        let is_strict = self.tools.iter().any(|tool| tool.strict);
        let field = match &asked {
            _ if self.is_required => "tool_choice",
            None if is_strict => "tools",
            Some(asked) if !self.tools.is_empty() => &asked.field,
            _ => return Ok(asked.map(|asked| (asked, false))),
        };
        let refused = |why: &str| {
            let message = format!("the field `{field}` is not supported with these tools: {why}");
            Err(ApiError::field(field, "unsupported_parameter", message))
        };
        let Some(format) = formats.tools else {
            return refused("the model has no parser of calls\nhint: --tool-parser");
        };
        let beside = match &asked {
            Some(asked) if self.is_required => {
                let message =
                    format!("the fields `tool_choice` and `{}` both ask for a form of the answer", asked.field);
                return Err(ApiError::field("tool_choice", "invalid_value", message));
            }
            // Calls stand in a channel before the answer, which the grammar leaves free.
            Some(asked) if format == ToolFormat::Harmony && !is_strict => return Ok(Some((asked.clone(), false))),
            Some(asked) => match expression(asked)? {
                Some(form) => Beside::Instead(form),
                None => {
                    return refused("a grammar of your own\nhint: tool_choice none, or a grammar that has the calls");
                }
            },
            None if self.is_required => Beside::Nothing,
            None => Beside::Text,
        };
        let tools = self.compilable()?;
        let calls = Calls { tools: &tools, many: self.parallel };
        match format.grammar(calls, &beside, tokenizer) {
            Ok(lark) => {
                let asked = Asked { grammar: Grammar::Lark(lark), field: field.to_owned() };
                Ok(Some((asked, format == ToolFormat::Harmony)))
            }
            Err(why) => refused(&why),
        }
    }

    /// The tools with schemas that the compiler takes.
    fn compilable(&self) -> Result<Vec<Tool>, ApiError> {
        let of = |(at, tool): (usize, &Tool)| {
            let schema = if tool.parameters.is_null() { json!({}) } else { tool.parameters.clone() };
            let field = format!("tools[{at}].function.parameters");
            let parameters = lagoon_grammar::compilable(schema).map_err(|error| refusal(&field, &error))?;
            Ok(Tool { parameters, ..tool.clone() })
        };
        (self.first..).zip(self.tools.iter()).map(of).collect()
    }

    pub(crate) fn rendering(&self, add_generation_prompt: bool) -> Rendering {
        let tools = self.tools.iter().map(|tool| tool.definition.clone()).collect();
        Rendering { add_generation_prompt, tools, variables: self.variables.clone() }
    }

    /// The parser of answers to `prompt`, where the model's `formats` or the request leave anything to find.
    pub(crate) fn parser(&self, formats: Formats, prompt: &str) -> Option<ChatParser> {
        let formats = Formats { tools: formats.tools.filter(|_| !self.tools.is_empty()), ..formats };
        if formats == Formats::default() {
            return None;
        }
        let calls_max = if self.parallel { usize::MAX } else { 1 };
        Some(ChatParser { formats, answer: AnswerParser::new(formats, &self.tools, prompt, calls_max) })
    }

    /// Refuses by name what the template would ignore.
    fn check(&self, template: &ChatTemplate) -> Result<(), ApiError> {
        let special = self.variables.iter().map(|(name, _)| name).find(|name| template.has_special(name));
        if let Some(name) = special {
            return Err(reserved(name));
        }
        let name = self.variables.iter().map(|(name, _)| name.as_str()).find(|name| !template.mentions(name));
        if let Some(name) = name {
            let field = if name == EFFORT { EFFORT } else { VARIABLES };
            let message = format!("the field `{field}` is not supported: the model's chat template has no `{name}`");
            return Err(ApiError::field(field, "unsupported_parameter", message));
        }
        if !self.tools.is_empty() && !template.mentions("tools") {
            let message = "the field `tools` is not supported: the model's chat template has no tools";
            return Err(ApiError::field("tools", "unsupported_parameter", message));
        }
        Ok(())
    }
}

/// Parser of a chat's answers; each sequence takes a clone.
#[derive(Clone, Debug)]
pub(crate) struct ChatParser {
    pub(crate) formats: Formats,
    pub(crate) answer: AnswerParser,
}

impl ChatParser {
    /// Special tokens that the parser must see.
    pub(crate) fn marks(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        self.formats.marks().filter_map(|mark| tokenizer.id(mark)).filter(|id| tokenizer.is_special(*id)).collect()
    }
}

fn tool_list(value: Json<'_>) -> Result<Vec<Tool>, ApiError> {
    if value.kind() != Kind::List {
        return Err(wrong_type("tools", "a list of tools", value));
    }
    check_size("tools", value)?;
    let count = value.items().count();
    if count > TOOLS_MAX {
        return Err(too_many("tools", count, TOOLS_MAX));
    }
    let tools: Vec<Tool> = value
        .items()
        .enumerate()
        .map(|(index, item)| tool(&format!("tools[{index}]"), item))
        .collect::<Result<_, _>>()?;
    let repeated = tools.iter().enumerate().find(|(at, tool)| tools[..*at].iter().any(|other| other.name == tool.name));
    match repeated {
        None => Ok(tools),
        Some((_, tool)) => {
            let message = format!("the field `tools` has two functions of the name `{}`", tool.name);
            Err(ApiError::field("tools", "invalid_value", message))
        }
    }
}

fn tool(path: &str, item: Json<'_>) -> Result<Tool, ApiError> {
    let mut fields = Fields::nested(path, item)?;
    function_type(&mut fields)?;
    let function_name = fields.name("function");
    let mut function = Fields::nested(&function_name, required(&mut fields, "function")?)?;
    fields.neutral(CACHE_CONTROL)?;
    fields.finish()?;
    function.neutral(CACHE_CONTROL)?;
    let name = function_name_of(&mut function)?;
    let description = function.string("description")?;
    let parameters = match function.take("parameters") {
        None => Value::Null,
        Some(value) if value.kind() == Kind::Object => tree(&function.name("parameters"), value)?,
        Some(value) => return Err(wrong_type(&function.name("parameters"), "a JSON schema", value)),
    };
    let strict = function.bool("strict", false)?;
    function.finish()?;
    let mut definition = json!({"type": "function", "function": {"name": name}});
    let written = [("description", description.map(Value::from)), ("parameters", Some(parameters.clone()))];
    for (key, value) in written {
        if let Some(value) = value.filter(|value| !value.is_null()) {
            definition["function"][key] = value;
        }
    }
    Ok(Tool { name, parameters, definition, strict })
}

/// Takes a function's name.
pub(crate) fn function_name_of(function: &mut Fields<'_>) -> Result<String, ApiError> {
    let path = function.name("name");
    let name = text(&path, required(function, "name")?)?;
    if !is_function_name(&name) {
        let message = format!("the field `{path}` must have 1 to 64 letters, digits, `_`, `-` or `.`");
        return Err(ApiError::field(path, "invalid_value", message));
    }
    Ok(name)
}

/// Takes `type`, which must be `function`.
pub(crate) fn function_type(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let name = fields.name("type");
    match fields.string("type")?.as_deref() {
        Some("function") => Ok(()),
        Some(other) => {
            let message = format!("the field `{name}` is `{other}`, but only `function` is supported");
            Err(ApiError::field(name, "unsupported_parameter", message))
        }
        None => Err(missing(&name)),
    }
}

/// A grammar as an expression in another one, if it can be that.
fn expression(asked: &Asked) -> Result<Option<String>, ApiError> {
    let literal = |text: &String| Value::from(text.as_str()).to_string();
    Ok(match &asked.grammar {
        Grammar::JsonSchema(text) => {
            let schema = serde_json::from_str(text).map_err(|error| {
                let message = format!("the field `{}` is not JSON: {error}", asked.field);
                ApiError::field(asked.field.clone(), "invalid_value", message)
            })?;
            let schema = lagoon_grammar::compilable(schema).map_err(|error| refusal(&asked.field, &error))?;
            Some(format!("%json {schema}"))
        }
        Grammar::Choice(texts) => Some(texts.iter().map(literal).collect::<Vec<_>>().join(" | ")),
        Grammar::Regex(_) | Grammar::Lark(_) => None,
    })
}

/// `thinking`, as DeepSeek, GLM and Anthropic have it: the template's variable for it. A template without one either always
/// or never opens reasoning: only that is accepted.
fn thinking_variable(value: Json<'_>, template: Option<&ChatTemplate>) -> Result<Option<(String, Value)>, ApiError> {
    let mut fields = Fields::nested(THINKING, value)?;
    let name = fields.name("type");
    let kind = text(&name, required(&mut fields, "type")?)?;
    fields.finish()?;
    let enabled = match kind.as_str() {
        "enabled" => true,
        "disabled" => false,
        _ => {
            let message = format!("the field `{name}` is `{kind}`, but must be enabled or disabled");
            return Err(ApiError::field(name, "invalid_value", message));
        }
    };
    let Some(template) = template else { return Ok(None) };
    if let Some(variable) = ["enable_thinking", THINKING].into_iter().find(|name| template.mentions(name)) {
        return Ok(Some((variable.to_owned(), enabled.into())));
    }
    if template.formats().reasoning.is_some() == enabled {
        return Ok(None);
    }
    let cannot = if enabled { "has no reasoning" } else { "cannot turn reasoning off" };
    let message = format!("the field `{name}` is `{kind}`, but the model's chat template {cannot}");
    Err(ApiError::field(name, "unsupported_parameter", message))
}

/// What of the tools must be called.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    None,
    Auto,
    Required,
    Named(String),
}

fn take_choice(fields: &mut Fields<'_>, tools: &[Tool]) -> Result<Choice, ApiError> {
    const NAME: &str = "tool_choice";
    let Some(value) = fields.take(NAME) else { return Ok(Choice::Auto) };
    match value.kind() {
        Kind::Text => match text(NAME, value)?.as_str() {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" if tools.is_empty() => {
                let message = format!("the field `{NAME}` is `required`, but there are no `tools`");
                Err(ApiError::field(NAME, "invalid_value", message))
            }
            "required" => Ok(Choice::Required),
            other => {
                let message =
                    format!("the field `{NAME}` is `{other}`, but must be none, auto, required or a function");
                Err(ApiError::field(NAME, "invalid_value", message))
            }
        },
        Kind::Object => named_choice(NAME, value, tools).map(Choice::Named),
        _ => Err(wrong_type(NAME, "a string or an object", value)),
    }
}

/// The function that must be called.
fn named_choice(name: &str, value: Json<'_>, tools: &[Tool]) -> Result<String, ApiError> {
    let mut choice = Fields::nested(name, value)?;
    function_type(&mut choice)?;
    let path = choice.name("function");
    let mut function = Fields::nested(&path, required(&mut choice, "function")?)?;
    choice.finish()?;
    let name = function_name_of(&mut function)?;
    function.finish()?;
    if tools.iter().all(|tool| tool.name != name) {
        let message = format!("the field `{path}.name` is `{name}`, which is none of `tools`");
        return Err(ApiError::field(format!("{path}.name"), "invalid_value", message));
    }
    Ok(name)
}

fn take_variables(value: Json<'_>, variables: &mut Vec<(String, Value)>) -> Result<(), ApiError> {
    if value.kind() != Kind::Object {
        return Err(wrong_type(VARIABLES, "an object", value));
    }
    check_size(VARIABLES, value)?;
    let Value::Object(map) = tree(VARIABLES, value)? else { return Err(wrong_type(VARIABLES, "an object", value)) };
    if let Some(name) = map.keys().find(|name| RESERVED.contains(&name.as_str())) {
        return Err(reserved(name));
    }
    variables.extend(map);
    Ok(())
}

/// The refusal of a variable that the server sets.
fn reserved(name: &str) -> ApiError {
    let field = format!("{VARIABLES}.{name}");
    let message = format!("the field `{field}` is not supported: the server sets this variable");
    ApiError::field(field, "unsupported_parameter", message)
}

fn check_size(name: &str, value: Json<'_>) -> Result<(), ApiError> {
    let bytes = value.bytes();
    if bytes <= TEMPLATE_FIELD_BYTES_MAX {
        return Ok(());
    }
    let message = format!("the field `{name}` has {bytes} bytes, but at most {TEMPLATE_FIELD_BYTES_MAX} are allowed");
    Err(ApiError::field(name, "invalid_value", message))
}

fn tree(name: &str, value: Json<'_>) -> Result<Value, ApiError> {
    value
        .read()
        .map_err(|error| ApiError::field(name, "invalid_value", format!("the field `{name}` cannot be read: {error}")))
}
