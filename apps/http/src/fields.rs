//! Takes a JSON object apart field by field, so that unsupported fields are refused by name.
//!
//! A missing field and an explicit `null` both mean the default. Fields left after all supported ones were taken are an
//! error that names the first. A value is parsed from its place in the request's body ([`crate::json`]): refused or
//! ignored values are never built.

use crate::error::ApiError;
use crate::json::{Json, Kind};
use axum::http::StatusCode;
use serde::Deserialize;

/// Maximum of fields in one object; no valid request has as many.
const FIELDS_MAX: usize = 128;

/// The fields of a request (or of an object inside it) that were not taken yet.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    /// In the order of the request.
    fields: Vec<(String, Json<'a>)>,
    /// Prefix of names in messages, such as `stream_options.`.
    path: String,
    /// Fields that are read by another name, and what the request calls them.
    renamed: Vec<(&'static str, &'static str)>,
}

impl<'a> Fields<'a> {
    /// Parses a request body.
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let invalid = |message: String| ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_json"), message);
        let value =
            Json::parse(body).map_err(|problem| invalid(format!("the request body is not valid JSON: {problem}")))?;
        if value.kind() != Kind::Object {
            return Err(invalid(format!("the request body must be a JSON object, not {}", value.kind().name())));
        }
        Self::of(value, String::new(), "the request body")
    }

    /// The fields of a nested object called `name`.
    pub(crate) fn nested(name: &str, value: Json<'a>) -> Result<Self, ApiError> {
        if value.kind() != Kind::Object {
            return Err(wrong_type(name, "an object", value));
        }
        Self::of(value, format!("{name}."), &format!("the field `{name}`"))
    }

    /// The fields of `object`; of a repeated field the last value counts.
    fn of(object: Json<'a>, path: String, called: &str) -> Result<Self, ApiError> {
        let mut fields: Vec<(String, Json<'a>)> = Vec::new();
        for (name, value) in object.members() {
            let name = text_of(called, name)?;
            match fields.iter().position(|(known, _)| *known == name) {
                Some(at) => fields[at].1 = value,
                None if fields.len() == FIELDS_MAX => {
                    let message = format!("{called} has more than {FIELDS_MAX} fields");
                    return Err(ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_value"), message));
                }
                None => fields.push((name, value)),
            }
        }
        Ok(Self { fields, path, renamed: Vec::new() })
    }

    /// The full name of `name` in messages.
    pub(crate) fn name(&self, name: &str) -> String {
        let own = self.renamed.iter().find(|(to, _)| *to == name);
        format!("{}{}", self.path, own.map_or(name, |(_, from)| from))
    }

    /// Reads the field `from` as `to` from now on, if it is there; messages call it `from`.
    pub(crate) fn rename(&mut self, from: &'static str, to: &'static str) {
        if let Some(value) = self.take(from) {
            self.put(to, value);
            self.renamed.push((to, from));
        }
    }

    /// Drops a field whose value is `number`, by which clients of llama.cpp say that there is none.
    pub(crate) fn drop_number(&mut self, name: &str, number: i64) {
        if let Some(value) = self.take(name)
            && value.read::<i64>().ok() != Some(number)
        {
            self.put(name, value);
        }
    }

    /// Puts a field back that was taken.
    pub(crate) fn put(&mut self, name: &str, value: Json<'a>) {
        _ = self.take(name);
        self.fields.push((name.to_owned(), value));
    }

    /// Takes a field; `null` counts as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Json<'a>> {
        #[cfg(test)]
        asked::note(&self.path, name);
        let at = self.fields.iter().position(|(known, _)| known == name)?;
        let (_, value) = self.fields.remove(at);
        (value.kind() != Kind::Null).then_some(value)
    }

    pub(crate) fn bool(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        self.take(name).map_or(Ok(default), |value| self.read(name, "a boolean", value))
    }

    pub(crate) fn optional_bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.take(name).map(|value| self.read(name, "a boolean", value)).transpose()
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.take(name).map(|value| text(&self.name(name), value)).transpose()
    }

    fn read<T: Deserialize<'a>>(&self, name: &str, expected: &str, value: Json<'a>) -> Result<T, ApiError> {
        value.read().map_err(|_wrong| wrong_type(&self.name(name), expected, value))
    }

    /// A whole number within `range` (inclusive).
    pub(crate) fn integer(&mut self, name: &str, range: (i64, i64)) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number: i64 = self.read(name, "an integer", value)?;
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
        // A literal such as 1e999 is JSON, but no number that fits.
        let expected = if value.kind() == Kind::Number { "a finite number" } else { "a number" };
        let number: f64 = self.read(name, expected, value)?;
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
                && !neutral.accepts(value)
            {
                let name = self.name(name);
                let but = neutral.shown().map_or_else(String::new, |values| format!(" but for {values}"));
                let message = format!("the field `{name}` is not supported{but}");
                return Err(ApiError::field(name, "unsupported_parameter", message));
            }
        }
        Ok(())
    }

    /// Refuses the first field that was not taken, by name.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.fields.first() {
            None => Ok(()),
            Some((name, _)) => Err(unsupported(&self.name(name))),
        }
    }
}

/// The values of an unsupported field that change nothing, and are therefore accepted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Neutral {
    /// Only `null`.
    Null,
    /// Any value: no response depends on the field.
    Any,
    /// This number.
    Number(f64),
    /// This boolean.
    Bool(bool),
    /// One of these strings, or no value at all.
    Text(&'static [&'static str]),
    /// An empty list, object or string.
    Empty,
    /// `["text"]`.
    TextModality,
}

impl Neutral {
    /// The neutral values, for pages; `None` if there is only `null`.
    pub(crate) fn shown(self) -> Option<String> {
        match self {
            Self::Null => None,
            Self::Any => Some("any value".to_owned()),
            Self::Number(neutral) => Some(format!("`{neutral}`")),
            Self::Bool(neutral) => Some(format!("`{neutral}`")),
            Self::Text(neutral) => Some(neutral.iter().map(|text| format!("`{text}`")).collect::<Vec<_>>().join(", ")),
            Self::Empty => Some("an empty value".to_owned()),
            Self::TextModality => Some("`[\"text\"]`".to_owned()),
        }
    }

    fn accepts(self, value: Json<'_>) -> bool {
        let is = |value: Json<'_>, wanted: &str| value.read::<&str>().is_ok_and(|text| text == wanted);
        match self {
            Self::Null => false,
            Self::Any => true,
            Self::Number(neutral) => value.read::<f64>().is_ok_and(|number| number == neutral),
            Self::Bool(neutral) => value.read::<bool>().is_ok_and(|flag| flag == neutral),
            Self::Text(neutral) => neutral.iter().any(|text| is(value, text)),
            Self::Empty => value.is_empty(),
            Self::TextModality => {
                let mut items = value.items();
                items.next().is_some_and(|item| is(item, "text")) && items.next().is_none()
            }
        }
    }
}

/// The string value of the field `name`.
pub(crate) fn text(name: &str, value: Json<'_>) -> Result<String, ApiError> {
    if value.kind() != Kind::Text {
        return Err(wrong_type(name, "a string", value));
    }
    text_of(&format!("the field `{name}`"), value)
}

/// A string with its escapes resolved; `called` names it in errors.
fn text_of(called: &str, value: Json<'_>) -> Result<String, ApiError> {
    value.read().map_err(|error| {
        let message = format!("the request body is not valid JSON: a string in {called}: {error}");
        ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_json"), message)
    })
}

pub(crate) fn unsupported(name: &str) -> ApiError {
    ApiError::field(name, "unsupported_parameter", format!("the field `{name}` is not supported"))
}

pub(crate) fn wrong_type(name: &str, expected: &str, got: Json<'_>) -> ApiError {
    let message = format!("the field `{name}` must be {expected}, not {}", got.kind().name());
    ApiError::field(name, "invalid_type", message)
}

pub(crate) fn missing(name: &str) -> ApiError {
    ApiError::field(name, "missing_required_parameter", format!("the field `{name}` is required"))
}

pub(crate) fn too_many(name: &str, got: usize, limit: usize) -> ApiError {
    let message = format!("the field `{name}` has {got} entries, but at most {limit} are allowed");
    ApiError::field(name, "invalid_value", message)
}

/// Takes a required field.
pub(crate) fn required<'a>(fields: &mut Fields<'a>, name: &str) -> Result<Json<'a>, ApiError> {
    fields.take(name).ok_or_else(|| missing(&fields.name(name)))
}

pub(crate) fn out_of_range<T: std::fmt::Display>(name: &str, got: &T, low: &T, high: &T) -> ApiError {
    let message = format!("the field `{name}` is {got}, but must be between {low} and {high}");
    ApiError::field(name, "invalid_value", message)
}

/// Names of fields of whole requests that this thread has asked for.
#[cfg(test)]
pub(crate) mod asked {
    use std::{cell::RefCell, collections::BTreeSet};

    thread_local! {
        static NAMES: RefCell<BTreeSet<String>> = RefCell::default();
    }

    pub(super) fn note(path: &str, name: &str) {
        if path.is_empty() {
            NAMES.with_borrow_mut(|names| names.insert(name.to_owned()));
        }
    }

    pub(crate) fn forget() {
        NAMES.with_borrow_mut(BTreeSet::clear);
    }

    pub(crate) fn names() -> BTreeSet<String> {
        NAMES.with_borrow(BTreeSet::clone)
    }
}
