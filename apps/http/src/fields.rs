//! A JSON object taken apart field by field, so that what is not supported is refused by name.
//!
//! A missing field and an explicit `null` mean the same: the default. What remains when all supported fields were
//! taken is an error that names the first such field.

use crate::error::ApiError;
use axum::http::StatusCode;
use serde_json::{Map, Value};

/// The fields of a request (or of an object inside it) that nobody has taken yet.
#[derive(Debug)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// Prefix of names in messages, such as `stream_options.`.
    path: String,
}

impl Fields {
    /// Parses a request body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body).map_err(|error| {
            let message = format!("the request body is not valid JSON: {error}");
            ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_json"), message)
        })?;
        match value {
            Value::Object(map) => Ok(Self { map, path: String::new() }),
            other => {
                let message = format!("the request body must be a JSON object, not {}", kind_of(&other));
                Err(ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_json"), message))
            }
        }
    }

    /// The fields of a nested object called `name`.
    pub(crate) fn nested(name: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path: format!("{name}.") }),
            other => Err(wrong_type(name, "an object", &other)),
        }
    }

    /// The full name of `name` in messages.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Takes a field; `null` counts as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn bool(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(other) => Err(wrong_type(&self.name(name), "a boolean", &other)),
        }
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(&self.name(name), "a string", &other)),
        }
    }

    /// A whole number within `range` (inclusive).
    pub(crate) fn integer(&mut self, name: &str, range: (i64, i64)) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_i64().ok_or_else(|| wrong_type(&self.name(name), "an integer", &value))?;
        if (range.0..=range.1).contains(&number) {
            return Ok(Some(number));
        }
        Err(out_of_range(&self.name(name), &number, &range.0, &range.1))
    }

    /// [`Fields::integer`] that is not negative and fits u32.
    pub(crate) fn u32(&mut self, name: &str, range: (u32, u32)) -> Result<Option<u32>, ApiError> {
        let value = self.integer(name, (i64::from(range.0), i64::from(range.1)))?;
        Ok(value.map(|v| u32::try_from(v).expect("the range is within u32")))
    }

    /// A finite number within `range` (inclusive).
    pub(crate) fn number(&mut self, name: &str, range: (f64, f64)) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| wrong_type(&self.name(name), "a number", &value))?;
        if !(range.0..=range.1).contains(&number) {
            return Err(out_of_range(&self.name(name), &number, &range.0, &range.1));
        }
        #[allow(clippy::cast_possible_truncation, reason = "rounding a sampling parameter to f32 is intended")]
        Ok(Some(number as f32))
    }

    /// Takes each field of `table` and refuses it by name unless its value changes nothing.
    pub(crate) fn neutral(&mut self, table: &[(&str, Neutral)]) -> Result<(), ApiError> {
        for (name, neutral) in table {
            if let Some(value) = self.take(name)
                && !neutral.accepts(&value)
            {
                let name = self.name(name);
                let message = format!("the field `{name}` is not supported (only its neutral value is accepted)");
                return Err(ApiError::field(name, "unsupported_parameter", message));
            }
        }
        Ok(())
    }

    /// All supported fields were taken: any other is refused by name.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(name) => Err(unsupported(&self.name(name))),
        }
    }
}

/// Which values of an unsupported field change nothing, and are therefore accepted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Neutral {
    /// Only `null`.
    Null,
    /// Anything: the field is a label that no answer depends on.
    Any,
    /// This number.
    Number(f64),
    /// This boolean.
    Bool(bool),
    /// One of these strings, or no value at all.
    Text(&'static [&'static str]),
    /// An empty list, object or string.
    Empty,
    /// `{"type": "text"}`.
    TextFormat,
    /// `["text"]`.
    TextModality,
}

impl Neutral {
    fn accepts(self, value: &Value) -> bool {
        match self {
            Self::Null => false,
            Self::Any => true,
            Self::Number(neutral) => value.as_f64() == Some(neutral),
            Self::Bool(neutral) => value.as_bool() == Some(neutral),
            Self::Text(neutral) => value.as_str().is_some_and(|text| neutral.contains(&text)),
            Self::Empty => match value {
                Value::Array(items) => items.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::String(text) => text.is_empty(),
                _ => false,
            },
            Self::TextFormat => value
                .as_object()
                .is_some_and(|map| map.len() == 1 && map.get("type").and_then(Value::as_str) == Some("text")),
            Self::TextModality => value.as_array().is_some_and(|m| m.len() == 1 && m[0] == "text"),
        }
    }
}

pub(crate) fn unsupported(name: &str) -> ApiError {
    ApiError::field(name, "unsupported_parameter", format!("the field `{name}` is not supported"))
}

pub(crate) fn wrong_type(name: &str, expected: &str, got: &Value) -> ApiError {
    let message = format!("the field `{name}` must be {expected}, not {}", kind_of(got));
    ApiError::field(name, "invalid_type", message)
}

pub(crate) fn missing(name: &str) -> ApiError {
    ApiError::field(name, "missing_required_parameter", format!("the field `{name}` is required"))
}

pub(crate) fn out_of_range<T: std::fmt::Display>(name: &str, got: &T, low: &T, high: &T) -> ApiError {
    let message = format!("the field `{name}` is {got}, but must be between {low} and {high}");
    ApiError::field(name, "invalid_value", message)
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
