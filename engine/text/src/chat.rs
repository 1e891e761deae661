//! Chat templates: render messages to a model's prompt text.
//!
//! Templates are Jinja as transformers renders them: `trim_blocks` and `lstrip_blocks`, loop controls, Python's string
//! and list methods, `raise_exception`, `strftime_now`, a `tojson` that writes Python's JSON, and `{% generation %}`
//! blocks (which only mark text for training and are passed through). They come from the model's directory; each
//! rendering has a budget of instructions and therefore ends.

use crate::convert::gguf::GgufVocabulary;
use crate::date::{strftime, unix_seconds};
use crate::json::dumps;
use crate::tokenizer::{TextError, TokenizerConfig, read};
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or another role of the template.
    pub role: String,
    pub content: Content,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl ChatMessage {
    fn to_value(&self) -> Value {
        let fields = [("role", Some(&self.role)), ("content", Some(&self.content.0)), ("name", self.name.as_ref())];
        Value::from_pairs(fields.into_iter().filter_map(|(key, text)| Some((key, text?.as_str()))))
    }
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
        Ok(Self { environment, special: config.special.clone() })
    }

    /// Renders `messages` to text. With `add_generation_prompt` it ends where the assistant's answer begins. `now` is the
    /// date of `strftime_now` (in UTC). The text contains the special tokens: encode it without adding any.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        now: SystemTime,
    ) -> Result<String, ChatError> {
        let special = self.special.iter().map(|(name, text)| (*name, Value::from(text.as_str())));
        let own = [
            ("messages", messages.iter().map(ChatMessage::to_value).collect()),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            (NOW, Value::from(unix_seconds(now))),
        ];
        let context = Value::from_pairs(special.chain(own));
        let template = self.environment.get_template(NAME).map_err(|e| ChatError::Failed(describe(&e)))?;
        template.render(context).map_err(|e| match find_raised(&e) {
            Some(message) => ChatError::Refused(message),
            None => ChatError::Failed(describe(&e)),
        })
    }
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
