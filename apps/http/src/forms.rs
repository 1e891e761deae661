//! Fields that ask for a form of the answer: `response_format`, `structured_outputs`, the older `guided_…`, llama.cpp's
//! `json_schema` and `grammar`. A request has at most one of them.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral, required, text, too_many, wrong_type},
    json::{Json, Kind},
};
use axum::http::StatusCode;
use lagoon_grammar::GrammarError;
use lagoon_types::{
    Grammar,
    limits::{CHOICES_MAX, GRAMMAR_BYTES_MAX},
};

const FORMAT: &str = "response_format";
const STRUCTURED: &str = "structured_outputs";

/// A grammar, and the field that asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) grammar: Grammar,
    pub(crate) field: String,
}

/// Takes the fields. None of them, or a format of text, leaves the answer free.
pub(crate) fn take(fields: &mut Fields<'_>) -> Result<Option<Asked>, ApiError> {
    let mut asked = Vec::new();
    if let Some(value) = fields.take(FORMAT) {
        asked.extend(response_format(value)?);
    }
    if let Some(value) = fields.take(STRUCTURED) {
        asked.push(structured(value)?);
    }
    let forms = [
        ("guided_json", json as Take),
        ("guided_regex", regex),
        ("guided_choice", choice),
        ("guided_grammar", lark),
        ("json_schema", json),
    ];
    for (name, of) in forms {
        if let Some(value) = fields.take(name) {
            asked.push(of(name, value)?);
        }
    }
    // llama.cpp's clients send an empty one for none.
    if let Some(value) = fields.take("grammar") {
        let grammar = lark("grammar", value)?;
        asked.extend(Some(grammar).filter(|asked| asked.grammar != Grammar::Lark(String::new())));
    }
    one(asked)
}

type Take = fn(&str, Json<'_>) -> Result<Asked, ApiError>;

/// The only one of `asked`.
fn one(mut asked: Vec<Asked>) -> Result<Option<Asked>, ApiError> {
    let Some(last) = asked.pop() else { return Ok(None) };
    match asked.first() {
        None => Ok(Some(last)),
        Some(first) => {
            let (first, second) = (&first.field, &last.field);
            let message =
                format!("the fields `{first}` and `{second}` both ask for a form of the answer\nhint: leave out one");
            Err(ApiError::field(second.clone(), "invalid_value", message))
        }
    }
}

fn response_format(value: Json<'_>) -> Result<Option<Asked>, ApiError> {
    let mut format = Fields::nested(FORMAT, value)?;
    let kind = text("response_format.type", required(&mut format, "type")?)?;
    let asked = match kind.as_str() {
        "text" => None,
        "json_object" => Some(json_object(FORMAT)),
        "json_schema" => {
            let path = format.name("json_schema");
            let mut of = Fields::nested(&path, required(&mut format, "json_schema")?)?;
            // A name and a description for the model's eyes; held to its schema is every answer.
            of.neutral(&[("name", Neutral::Any), ("description", Neutral::Any)])?;
            of.bool("strict", true)?;
            let name = of.name("schema");
            let asked = json(&name, required(&mut of, "schema")?)?;
            of.finish()?;
            Some(asked)
        }
        other => {
            let message =
                format!("the field `{FORMAT}.type` is `{other}`, but must be text, json_object or json_schema");
            return Err(ApiError::field(format!("{FORMAT}.type"), "unsupported_parameter", message));
        }
    };
    format.finish()?;
    Ok(asked)
}

/// vLLM's object: one form, and options that are off.
fn structured(value: Json<'_>) -> Result<Asked, ApiError> {
    let mut fields = Fields::nested(STRUCTURED, value)?;
    let mut asked = Vec::new();
    for (name, of) in [("json", json as Take), ("regex", regex), ("choice", choice), ("grammar", lark)] {
        let path = fields.name(name);
        if let Some(value) = fields.take(name) {
            asked.push(of(&path, value)?);
        }
    }
    if fields.bool("json_object", false)? {
        asked.push(json_object(&fields.name("json_object")));
    }
    let is_compact = fields.bool("disable_any_whitespace", false)?;
    fields.neutral(&[
        ("disable_fallback", Neutral::Any),
        ("disable_additional_properties", Neutral::Bool(false)),
        ("whitespace_pattern", Neutral::Null),
        ("structural_tag", Neutral::Null),
    ])?;
    fields.finish()?;
    let asked = one(asked)?.ok_or_else(|| {
        let message = format!("the field `{STRUCTURED}` must have json, regex, choice, grammar or json_object");
        ApiError::field(STRUCTURED, "invalid_value", message)
    })?;
    if is_compact { compact(asked) } else { Ok(asked) }
}

/// JSON without white space between its parts; other forms as they are.
fn compact(asked: Asked) -> Result<Asked, ApiError> {
    let Grammar::JsonSchema(text) = &asked.grammar else { return Ok(asked) };
    let schema = serde_json::from_str(text).map_err(|error| {
        let message = format!("the field `{}` is not JSON: {error}", asked.field);
        ApiError::field(asked.field.clone(), "invalid_value", message)
    })?;
    let schema = lagoon_grammar::without_white_space(schema).to_string();
    Ok(Asked { grammar: Grammar::JsonSchema(schema), ..asked })
}

fn json_object(field: &str) -> Asked {
    Asked { grammar: Grammar::JsonSchema(r#"{"type":"object"}"#.to_owned()), field: field.to_owned() }
}

/// A schema: an object, a boolean, or a text of one.
fn json(name: &str, value: Json<'_>) -> Result<Asked, ApiError> {
    let schema = match value.kind() {
        Kind::Object | Kind::Bool => value.text().to_owned(),
        Kind::Text => text(name, value)?,
        _ => return Err(wrong_type(name, "a JSON schema", value)),
    };
    Ok(Asked { grammar: Grammar::JsonSchema(sized(name, schema)?), field: name.to_owned() })
}

fn regex(name: &str, value: Json<'_>) -> Result<Asked, ApiError> {
    Ok(Asked { grammar: Grammar::Regex(sized(name, text(name, value)?)?), field: name.to_owned() })
}

fn lark(name: &str, value: Json<'_>) -> Result<Asked, ApiError> {
    Ok(Asked { grammar: Grammar::Lark(sized(name, text(name, value)?)?), field: name.to_owned() })
}

fn choice(name: &str, value: Json<'_>) -> Result<Asked, ApiError> {
    if value.kind() != Kind::List {
        return Err(wrong_type(name, "a list of strings", value));
    }
    let count = value.items().count();
    if count > CHOICES_MAX {
        return Err(too_many(name, count, CHOICES_MAX));
    }
    let texts: Vec<String> = value.items().map(|item| text(name, item)).collect::<Result<_, _>>()?;
    Ok(Asked { grammar: Grammar::Choice(texts), field: name.to_owned() })
}

fn sized(name: &str, text: String) -> Result<String, ApiError> {
    let bytes = text.len();
    if bytes <= GRAMMAR_BYTES_MAX {
        return Ok(text);
    }
    let message = format!("the field `{name}` has {bytes} bytes, but at most {GRAMMAR_BYTES_MAX} are allowed");
    Err(ApiError::field(name, "invalid_value", message))
}

/// The refusal of a field whose grammar cannot be used.
pub(crate) fn refusal(field: &str, error: &GrammarError) -> ApiError {
    let message = format!("the field `{field}` cannot be used: {error}");
    match error {
        GrammarError::Unsupported { path, .. } => {
            let param = if path.is_empty() { field.to_owned() } else { format!("{field}.{path}") };
            ApiError::field(param, "unsupported_parameter", message)
        }
        GrammarError::Busy(_) => {
            let busy = ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message);
            ApiError { retry_after_s: Some(1), ..busy }
        }
        GrammarError::Tokenizer(_) => ApiError::field(field, "unsupported_parameter", message),
        GrammarError::Invalid(_) | GrammarError::TooSlow(_) => ApiError::field(field, "invalid_value", message),
    }
}
