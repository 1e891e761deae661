//! Fields of a JSON file ([`Fields`]); every error names the file, the field and its value.

use crate::ModelError;
use crate::error::shown;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Largest JSON file read, in bytes (a tokenizer is the largest in practice, and is not read here).
const JSON_BYTES_MAX: u64 = 64 << 20;

/// The bytes of a JSON file, at most [`JSON_BYTES_MAX`].
pub(crate) fn read_bounded(path: &Path) -> Result<Vec<u8>, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > JSON_BYTES_MAX {
        let problem = format!("it has {size} bytes, more than {JSON_BYTES_MAX}");
        return Err(ModelError::Malformed { path: path.to_owned(), problem });
    }
    std::fs::read(path).map_err(io)
}

/// A JSON object and its file. A field that is `null` counts as absent, as in transformers. The object knows which fields were
/// asked for, so that a field that nothing understands can be refused ([`Fields::refuse_others`]).
#[derive(Clone, Debug)]
pub struct Fields {
    path: PathBuf,
    /// Prefix of field names in messages, for example `rope_scaling.`.
    prefix: String,
    map: Map<String, Value>,
    /// Full names of fields that were asked for, here and in nested objects; the names of those objects end in a full stop.
    asked: Rc<RefCell<BTreeSet<String>>>,
    /// What messages call a field, by its full name, if the file has it under another one.
    keys: Rc<BTreeMap<String, String>>,
}

impl Fields {
    /// Reads a file whose top level is an object.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        Self::parse(path, &read_bounded(path)?)
    }

    /// Parses `bytes`; `path` is only for messages.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, ModelError> {
        let malformed = |problem| ModelError::Malformed { path: path.to_owned(), problem };
        match serde_json::from_slice(bytes).map_err(|e| malformed(e.to_string()))? {
            Value::Object(map) => Ok(Self::of(path, map, BTreeMap::new())),
            _ => Err(malformed("the top level is not an object".to_owned())),
        }
    }

    /// Fields that were made of another file's; `keys` are the names that the file has for them.
    pub(crate) fn of(path: &Path, map: Map<String, Value>, keys: BTreeMap<String, String>) -> Self {
        Self { path: path.to_owned(), prefix: String::new(), map, asked: Rc::default(), keys: Rc::new(keys) }
    }

    /// What messages call a field.
    fn named(&self, field: &str) -> String {
        let full = format!("{}{field}", self.prefix);
        self.keys.get(&full).cloned().unwrap_or(full)
    }

    /// The object's file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of `field`; `None` if absent or null.
    #[must_use]
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.ask(field);
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Whether the field is present, even if null.
    #[must_use]
    pub fn contains(&self, field: &str) -> bool {
        self.ask(field);
        self.map.contains_key(field)
    }

    fn ask(&self, field: &str) {
        self.asked.borrow_mut().insert(format!("{}{field}", self.prefix));
    }

    /// Marks fields as known: they change no logits.
    pub fn ignore(&self, fields: &[&str]) {
        fields.iter().for_each(|field| self.ask(field));
    }

    /// Refuses the first field that is not null, was not asked for and is not among `ignored`, of this object and of the nested
    /// ones that were asked for as objects.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] with `hint`.
    pub fn refuse_others(&self, ignored: &[&str], hint: &str) -> Result<(), ModelError> {
        for (field, value) in &self.map {
            let full = format!("{}{field}", self.prefix);
            let was_asked = |name: &str| self.asked.borrow().contains(name);
            if value.is_object() && was_asked(&format!("{full}.")) {
                self.object(field)?.map_or(Ok(()), |object| object.refuse_others(ignored, hint))?;
            } else if !value.is_null() && !was_asked(&full) && !ignored.contains(&field.as_str()) {
                return Err(self.unsupported(field, hint));
            }
        }
        Ok(())
    }

    /// Names of fields that are not null.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.map.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str())
    }

    /// The object in `field`.
    pub fn object(&self, field: &str) -> Result<Option<Self>, ModelError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                self.ask(&format!("{field}."));
                let prefix = format!("{}{field}.", self.prefix);
                let (asked, keys) = (Rc::clone(&self.asked), Rc::clone(&self.keys));
                Ok(Some(Self { path: self.path.clone(), prefix, map: map.clone(), asked, keys }))
            }
            Some(_) => Err(self.invalid(field, "it must be an object")),
        }
    }

    /// The first field that holds an object.
    #[must_use]
    pub fn nested(&self) -> Option<&str> {
        self.map.iter().find(|(_, value)| value.is_object()).map(|(field, _)| field.as_str())
    }

    /// A whole number in `1..=max`.
    pub fn count(&self, field: &str, max: u64) -> Result<Option<u64>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=max).contains(&n) => Ok(Some(n)),
            _ => Err(self.invalid(field, &format!("it must be a whole number from 1 to {max}"))),
        }
    }

    /// A whole number in `0..=max`.
    pub fn number(&self, field: &str, max: u64) -> Result<Option<u64>, ModelError> {
        match self.get(field).map(Value::as_u64) {
            None => Ok(None),
            Some(Some(number)) if number <= max => Ok(Some(number)),
            Some(_) => Err(self.invalid(field, &format!("it must be a whole number from 0 to {max}"))),
        }
    }

    /// As [`Fields::count`]; an error if the field is absent.
    pub fn required_count(&self, field: &str, max: u64) -> Result<u64, ModelError> {
        self.count(field, max)?.ok_or_else(|| self.missing(field))
    }

    /// A finite number above zero.
    pub fn positive(&self, field: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
            _ => Err(self.invalid(field, "it must be a finite number above zero")),
        }
    }

    /// As [`Fields::positive`]; an error if the field is absent.
    pub fn required_positive(&self, field: &str) -> Result<f64, ModelError> {
        self.positive(field)?.ok_or_else(|| self.missing(field))
    }

    /// A list of `len` numbers above zero that are finite in f32; an error if the field is absent.
    pub fn positives(&self, field: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let value = self.get(field).ok_or_else(|| self.missing(field))?;
        let positive = |value: &Value| value.as_f64().map(narrow).filter(|x| x.is_normal() && *x > 0.0);
        let list = value.as_array().filter(|values| values.len() == len);
        list.and_then(|values| values.iter().map(positive).collect())
            .ok_or_else(|| self.invalid(field, &format!("it must be a list of {len} finite numbers above zero")))
    }

    /// A boolean.
    pub fn flag(&self, field: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.invalid(field, "it must be true or false"))
    }

    /// A string.
    pub fn text(&self, field: &str) -> Result<Option<&str>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.invalid(field, "it must be a string"))
    }

    /// One token id or a list of them; empty when the field is absent.
    pub fn token_ids(&self, field: &str) -> Result<Vec<u32>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(Vec::new()) };
        let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        values
            .iter()
            .map(id)
            .collect::<Option<Vec<u32>>>()
            .ok_or_else(|| self.invalid(field, "it must be a token id or a list of token ids"))
    }

    /// The error that `field` is absent.
    #[must_use]
    pub fn missing(&self, field: &str) -> ModelError {
        let hint = "the file may be incomplete; compare it with the model's page on the hub".to_owned();
        ModelError::MissingField { path: self.path.clone(), field: self.full(field), hint }
    }

    /// The error that `field`'s value is impossible.
    #[must_use]
    pub fn invalid(&self, field: &str, problem: &str) -> ModelError {
        ModelError::InvalidField {
            path: self.path.clone(),
            field: self.full(field),
            value: self.value(field),
            problem: problem.to_owned(),
        }
    }

    /// The error that Lagoon does not implement `field`'s value.
    #[must_use]
    pub fn unsupported(&self, field: &str, hint: &str) -> ModelError {
        ModelError::Unsupported {
            path: self.path.clone(),
            field: self.full(field),
            value: self.value(field),
            hint: hint.to_owned(),
        }
    }

    /// The field's name in messages.
    fn full(&self, field: &str) -> String {
        shown(&self.named(field))
    }

    /// The value as JSON, cut to a readable length.
    fn value(&self, field: &str) -> String {
        self.map.get(field).map_or_else(|| "absent".to_owned(), |value| shown(&value.to_string()))
    }
}

/// `value` rounded to f32, which is what the arithmetic uses.
#[allow(clippy::cast_possible_truncation, reason = "rounding is the purpose")]
pub(crate) fn narrow(value: f64) -> f32 {
    value as f32
}
