//! Chat templates: render messages to a model's prompt text.
//!
//! Templates are Jinja as transformers renders them: `trim_blocks` and `lstrip_blocks`, loop controls, Python's string
//! and list methods, `raise_exception`, `strftime_now`, a `tojson` that writes Python's JSON, and `{% generation %}`
//! blocks (which only mark text for training and are passed through). They come from the model's directory; each
//! rendering has a budget of instructions and therefore ends.

use crate::convert::gguf::GgufVocabulary;
use crate::date::{strftime, unix_seconds};
use crate::files::{TextError, read};
use crate::json::dumps;
use crate::parse::{Formats, ReasoningFormat, ToolFormat};
use crate::tokenizer_config::TokenizerConfig;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Instructions that one rendering may take; a message takes some tens.
const FUEL: u64 = 20_000_000;
/// Name of the template inside its environment.
const NAME: &str = "chat_template";
/// Variable with the time of the rendering for `strftime_now`, in seconds since 1970.
const NOW: &str = "lagoon_now";

/// Chat message. Parsing refuses unknown fields by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or another role of the template.
    pub role: String,
    pub content: Content,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Calls of an assistant.
    #[serde(skip)]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a message of the role `tool` answers.
    #[serde(skip)]
    pub tool_call_id: Option<String>,
    /// Reasoning of an assistant.
    #[serde(skip)]
    pub reasoning_content: Option<String>,
}

/// A tool call of an assistant's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// A JSON object: templates get it as transformers gives it, not as text.
    pub arguments: serde_json::Value,
}

impl ChatMessage {
    /// The message as templates get it. Content is none where there are only calls.
    fn to_value(&self) -> Value {
        let optional = [
            ("name", self.name.as_ref()),
            ("tool_call_id", self.tool_call_id.as_ref()),
            ("reasoning_content", self.reasoning_content.as_ref()),
        ];
        let only_calls = self.content.0.is_empty() && !self.tool_calls.is_empty();
        let content = if only_calls { Value::from(()) } else { Value::from(self.content.0.as_str()) };
        let fields = [("role", Value::from(self.role.as_str())), ("content", content)];
        let optional = optional.into_iter().filter_map(|(key, text)| Some((key, Value::from(text?.as_str()))));
        let calls = (!self.tool_calls.is_empty())
            .then(|| ("tool_calls", self.tool_calls.iter().map(ToolCall::to_value).collect::<Value>()));
        Value::from_pairs(fields.into_iter().chain(optional).chain(calls))
    }
}

impl ToolCall {
    fn to_value(&self) -> Value {
        let arguments = of_json(&self.arguments);
        let function = Value::from_pairs([("name", Value::from(self.name.as_str())), ("arguments", arguments)]);
        let head = [("id", Value::from(self.id.as_str())), ("type", Value::from("function"))];
        Value::from_pairs(head.into_iter().chain([("function", function)]))
    }
}

/// What a rendering depends on besides the messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rendering {
    /// End where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Definitions of the tools; the template's `tools` is none if there are none.
    pub tools: Vec<serde_json::Value>,
    /// Further variables of the template.
    pub variables: Vec<(String, serde_json::Value)>,
}

/// Text of a message. As JSON it is a string or a list of `{"type": "text", "text": "…"}`, joined by line breaks; other
/// types of parts are refused by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Content(pub String);

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let parts = match value {
            serde_json::Value::String(text) => return Ok(Self(text)),
            serde_json::Value::Array(parts) => parts,
            _ => return Err(de::Error::custom("`content` must be a string or a list of text parts")),
        };
        let text = |part: &serde_json::Value| match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(text)) => Ok(text.to_owned()),
            (Some("text"), None) => Err(de::Error::custom("a text part of `content` has no string in `text`")),
            (Some(other), _) => Err(de::Error::custom(format!(
                "a part of `content` has the type {other:?}, which is not supported: only \"text\" is"
            ))),
            (None, _) => Err(de::Error::custom("a part of `content` has no `type`")),
        };
        let texts = parts.iter().map(text).collect::<Result<Vec<String>, D::Error>>()?;
        Ok(Self(texts.join("\n")))
    }
}

/// Error of rendering messages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The template refused the messages by `raise_exception`.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// The template failed: it uses an unsupported feature, is wrong, or exceeds its budget of instructions.
    #[error("the model's chat template failed: {0}")]
    Failed(String),
}

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: Vec<(&'static str, String)>,
    source: String,
}

impl ChatTemplate {
    /// Error message for a chat with a model without a template.
    pub const MISSING: &'static str = "the model has no chat template\nhint: use /v1/completions, or put a \
                                       chat_template.jinja into the model's directory";

    /// The template in `dir`: `chat_template.jinja`, else the one in `tokenizer_config.json` (of several, the one named
    /// `default`). `None` if there is none (see [`ChatTemplate::MISSING`]).
    pub fn open(dir: &Path) -> Result<Option<Self>, TextError> {
        let config = TokenizerConfig::open(dir)?;
        let source = Self::source(dir)?;
        source.map(|(path, source)| Self::new(&path, &source, &config)).transpose()
    }

    /// The text of the template in `dir`, and its file.
    pub(crate) fn source(dir: &Path) -> Result<Option<(PathBuf, String)>, TextError> {
        let path = dir.join("chat_template.jinja");
        if path.exists() {
            let source = String::from_utf8(read(&path)?)
                .map_err(|e| TextError::Malformed { path: path.clone(), problem: e.to_string() })?;
            return Ok(Some((path, source)));
        }
        let path = dir.join("tokenizer_config.json");
        let mut templates = TokenizerConfig::open(dir)?.chat_templates;
        let default = templates.iter().position(|(name, _)| name == "default").unwrap_or(0);
        Ok((default < templates.len()).then(|| (path, templates.swap_remove(default).1)))
    }

    /// The template of a GGUF file's vocabulary; `None` if it has none.
    ///
    /// # Errors
    /// If it cannot be parsed.
    pub fn from_gguf(vocabulary: &GgufVocabulary) -> Result<Option<Self>, TextError> {
        let config = vocabulary.config();
        let source = vocabulary.chat_template.as_deref();
        source.map(|source| Self::new(&vocabulary.path, source, &config)).transpose()
    }

    /// Parses a template; `path` is only for messages.
    pub fn new(path: &Path, source: &str, config: &TokenizerConfig) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the default delimiters are valid"));
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_name| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson);
        environment
            .add_template_owned(NAME, pass_generation_blocks(source))
            .map_err(|e| TextError::Template { path: path.to_owned(), problem: describe(&e) })?;
        Ok(Self { environment, special: config.special.clone(), source: source.to_owned() })
    }

    /// Renders `messages` to text. With `add_generation_prompt` it ends where the assistant's answer begins. `now` is the
    /// date of `strftime_now` (in UTC). The text contains the special tokens: encode it without adding any.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        now: SystemTime,
    ) -> Result<String, ChatError> {
        self.render_with(messages, &Rendering { add_generation_prompt, ..Rendering::default() }, now)
    }

    /// The template's text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.source
    }

    /// Whether the template's text has the variable `name`.
    #[must_use]
    pub fn mentions(&self, name: &str) -> bool {
        let part = |c: char| c.is_alphanumeric() || c == '_';
        self.source
            .match_indices(name)
            .any(|(at, _)| !self.source[..at].ends_with(part) && !self.source[at + name.len()..].starts_with(part))
    }

    /// Whether `name` is that of a special token, which the tokenizer's configuration sets.
    #[must_use]
    pub fn has_special(&self, name: &str) -> bool {
        self.special.iter().any(|(special, _)| *special == name)
    }

    /// Special tokens by the names that templates use.
    #[must_use]
    pub fn special_tokens(&self) -> &[(&'static str, String)] {
        &self.special
    }

    /// How the template writes tool calls and reasoning, as far as its text shows.
    #[must_use]
    pub fn formats(&self) -> Formats {
        Formats { tools: ToolFormat::of_template(&self.source), reasoning: ReasoningFormat::of_template(&self.source) }
    }

    /// [`ChatTemplate::render`] with tools and further variables. The server's variables win over those of the same name.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::render`].
    pub fn render_with(
        &self,
        messages: &[ChatMessage],
        rendering: &Rendering,
        now: SystemTime,
    ) -> Result<String, ChatError> {
        let special = self.special.iter().map(|(name, text)| (*name, Value::from(text.as_str())));
        let tools =
            if rendering.tools.is_empty() { Value::from(()) } else { rendering.tools.iter().map(of_json).collect() };
        let own = [
            ("messages", messages.iter().map(ChatMessage::to_value).collect()),
            ("add_generation_prompt", Value::from(rendering.add_generation_prompt)),
            ("tools", tools),
            ("documents", Value::from(())),
            (NOW, Value::from(unix_seconds(now))),
        ];
        let variables = rendering.variables.iter().map(|(name, value)| (name.as_str(), of_json(value)));
        let context = Value::from_pairs(variables.chain(special).chain(own));
        let template = self.environment.get_template(NAME).map_err(|e| ChatError::Failed(describe(&e)))?;
        template.render(context).map_err(|e| match find_raised(&e) {
            Some(message) => ChatError::Refused(message),
            None => ChatError::Failed(describe(&e)),
        })
    }
}

fn of_json(value: &serde_json::Value) -> Value {
    Value::deserialize(value).expect("every JSON value is a value of a template")
}

/// Message of a template's `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn find_raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(current) = source {
        if let Some(Raised(message)) = current.downcast_ref() {
            return Some(message.clone());
        }
        source = current.source();
    }
    None
}

fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let now = state.lookup(NOW).and_then(|value| u64::try_from(value).ok()).unwrap_or(0);
    strftime(now, format).map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
}

fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    for ignored in ["ensure_ascii", "sort_keys", "separators"] {
        let _: Option<Value> = kwargs.get(ignored)?;
    }
    kwargs.assert_all_used()?;
    dumps(value, indent).map(Value::from).map_err(|problem| Error::new(ErrorKind::BadSerialization, problem))
}

/// The error's message with its line number, on one line.
fn describe(error: &Error) -> String {
    let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    match error.detail() {
        Some(detail) => format!("{}: {detail}{line}", error.kind()),
        None => format!("{}{line}", error.kind()),
    }
}

/// Replaces `{% generation %}` and `{% endgeneration %}`, which minijinja does not know, by blocks that do nothing.
fn pass_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + length]);
        let word = tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['-', '+']).trim();
        out.push_str(before);
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[start + length..];
    }
    out.push_str(rest);
    out
}
