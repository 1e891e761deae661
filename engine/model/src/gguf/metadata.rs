//! A GGUF file's metadata: values by key. Lists stay in the file's memory and are decoded when they are asked for.

use super::cursor::Cursor;
use crate::ModelError;
use crate::error::shown;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Most keys.
const KEYS_MAX: u64 = 1 << 16;
/// Longest key, in bytes (the format's own bound).
const KEY_BYTES_MAX: u64 = (1 << 16) - 1;
/// Longest string, in bytes. Chat templates have some 10,000, a whole tokenizer.json some 30 million.
const TEXT_BYTES_MAX: u64 = 64 << 20;
/// Longest list. The longest of published files are merges, some 500,000.
const LIST_MAX: u64 = 4 << 20;
/// Lists within lists at most.
const NESTING_MAX: usize = 4;

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl Kind {
    fn parse(code: u32) -> Result<Self, String> {
        let kinds = [
            Self::U8,
            Self::I8,
            Self::U16,
            Self::I16,
            Self::U32,
            Self::I32,
            Self::F32,
            Self::Bool,
            Self::Text,
            Self::List,
            Self::U64,
            Self::I64,
            Self::F64,
        ];
        let kind = usize::try_from(code).ok().and_then(|code| kinds.get(code)).copied();
        kind.ok_or_else(|| format!("it has the type {code}; known are 0 to {}", kinds.len() - 1))
    }

    /// Bytes of a value; `None` for strings and lists, whose length is stored.
    const fn size(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::List => None,
        }
    }
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    List(List),
}

/// A list of values of one type, all of whose lengths were checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List {
    kind: Kind,
    len: usize,
    bytes: Bytes,
}

impl Value {
    fn read(cursor: &mut Cursor, kind: Kind, depth: usize) -> Result<Self, String> {
        Ok(match kind {
            Kind::U8 => Self::Unsigned(cursor.array::<1>()?[0].into()),
            Kind::U16 => Self::Unsigned(u16::from_le_bytes(cursor.array()?).into()),
            Kind::U32 => Self::Unsigned(cursor.u32()?.into()),
            Kind::U64 => Self::Unsigned(cursor.u64()?),
            Kind::I8 => Self::Signed(i8::from_le_bytes(cursor.array()?).into()),
            Kind::I16 => Self::Signed(i16::from_le_bytes(cursor.array()?).into()),
            Kind::I32 => Self::Signed(i32::from_le_bytes(cursor.array()?).into()),
            Kind::I64 => Self::Signed(i64::from_le_bytes(cursor.array()?)),
            Kind::F32 => Self::Float(f32::from_le_bytes(cursor.array()?).into()),
            Kind::F64 => Self::Float(f64::from_le_bytes(cursor.array()?)),
            Kind::Bool => match cursor.array::<1>()?[0] {
                0 => Self::Bool(false),
                1 => Self::Bool(true),
                other => return Err(format!("a boolean is {other}")),
            },
            Kind::Text => Self::Text(cursor.text(TEXT_BYTES_MAX)?),
            Kind::List => Self::List(List::read(cursor, depth)?),
        })
    }

    /// A number that is whole and not negative.
    #[must_use]
    pub fn unsigned(&self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(*value),
            Self::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A string.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value as a configuration would have it: lists of at most `max` elements, finite numbers.
    pub(crate) fn json(&self, max: usize) -> Option<serde_json::Value> {
        Some(match self {
            Self::Unsigned(value) => (*value).into(),
            Self::Signed(value) => (*value).into(),
            Self::Float(value) => serde_json::Number::from_f64(*value)?.into(),
            Self::Bool(value) => (*value).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(list) if list.len <= max => {
                serde_json::Value::Array(list.values().map(|value| value.ok()?.json(max)).collect::<Option<_>>()?)
            }
            Self::List(_) => return None,
        })
    }
}

impl List {
    fn read(cursor: &mut Cursor, depth: usize) -> Result<Self, String> {
        if depth == NESTING_MAX {
            return Err(format!("it has more than {NESTING_MAX} lists within each other"));
        }
        let kind = Kind::parse(cursor.u32()?)?;
        let len = cursor.count("elements in a list", LIST_MAX)?;
        // Of elements with lengths of their own, each is walked over.
        let mut ahead = cursor.ahead();
        match kind.size() {
            Some(size) => drop(ahead.take(len * size)?),
            None => (0..len).try_for_each(|_| skip(&mut ahead, kind, depth))?,
        }
        let bytes = cursor.take((ahead.position() - cursor.position()) as u64)?;
        Ok(Self { kind, len: usize::try_from(len).expect("it is at most LIST_MAX"), bytes })
    }

    /// Number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements; an error where a string is not UTF-8 or a boolean neither 0 nor 1.
    pub fn values(&self) -> impl Iterator<Item = Result<Value, String>> {
        let mut cursor = Cursor::new(self.bytes.clone());
        (0..self.len).map(move |_| Value::read(&mut cursor, self.kind, 1))
    }
}

/// Passes over a string or a list.
fn skip(cursor: &mut Cursor, kind: Kind, depth: usize) -> Result<(), String> {
    match kind {
        Kind::List => List::read(cursor, depth + 1).map(drop),
        _ => {
            let len = cursor.count("bytes in a string", TEXT_BYTES_MAX)?;
            cursor.take(len).map(drop)
        }
    }
}

/// Values by key.
#[derive(Clone, Debug)]
pub struct Metadata {
    path: PathBuf,
    values: BTreeMap<String, Value>,
    /// Type and value of each key as the file has them.
    stored: BTreeMap<String, Bytes>,
}

impl Metadata {
    /// Reads `count` keys and values.
    pub(super) fn read(path: &Path, cursor: &mut Cursor, count: u64) -> Result<Self, String> {
        if count > KEYS_MAX {
            return Err(format!("it has {count} keys, more than {KEYS_MAX}"));
        }
        let (mut values, mut stored) = (BTreeMap::new(), BTreeMap::new());
        for index in 0..count {
            let key = cursor.text(KEY_BYTES_MAX).map_err(|problem| format!("the key {index}: {problem}"))?;
            let mut ahead = cursor.ahead();
            let value = Kind::parse(cursor.u32()?).and_then(|kind| Value::read(cursor, kind, 0));
            let value = value.map_err(|problem| format!("the key `{}`: {problem}", shown(&key)))?;
            stored.insert(key.clone(), ahead.take((cursor.position() - ahead.position()) as u64)?);
            if values.insert(key.clone(), value).is_some() {
                return Err(format!("the key `{}` is there twice", shown(&key)));
            }
        }
        Ok(Self { path: path.to_owned(), values, stored })
    }

    /// All keys with their types and values as the file has them, in the order of the keys.
    pub(crate) fn stored(&self) -> impl Iterator<Item = (&str, &Bytes)> {
        self.stored.iter().map(|(key, bytes)| (key.as_str(), bytes))
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// All keys with their values, in the order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// A string; `None` if the key is absent.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.typed(key, "a string", Value::text)
    }

    /// A whole number that is not negative; `None` if the key is absent.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, ModelError> {
        self.typed(key, "a whole number that is not negative", Value::unsigned)
    }

    /// A boolean; `None` if the key is absent.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// A list; `None` if the key is absent.
    pub fn list(&self, key: &str) -> Result<Option<&List>, ModelError> {
        self.typed(key, "a list", |value| match value {
            Value::List(list) => Some(list),
            _ => None,
        })
    }

    /// A list whose elements are all what `of` takes, as `kind` says; empty if the key is absent.
    pub fn list_of<T>(&self, key: &str, kind: &str, of: impl Fn(Value) -> Option<T>) -> Result<Vec<T>, ModelError> {
        let Some(list) = self.list(key)? else { return Ok(Vec::new()) };
        let convert = |value: Result<Value, String>| match value {
            Ok(value) => of(value).ok_or_else(|| self.invalid(key, &format!("it must be a list of {kind}"))),
            Err(problem) => Err(self.invalid(key, &problem)),
        };
        list.values().map(convert).collect()
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        what: &str,
        of: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        of(value).map(Some).ok_or_else(|| self.invalid(key, &format!("it must be {what}")))
    }

    /// The error that a key's value is impossible.
    #[must_use]
    pub fn invalid(&self, key: &str, problem: &str) -> ModelError {
        let (path, field, value) = (self.path.clone(), shown(key), self.shown(key));
        ModelError::InvalidField { path, field, value, problem: problem.to_owned() }
    }

    /// The error that a key is absent.
    #[must_use]
    pub fn missing(&self, key: &str) -> ModelError {
        let hint = "the file may be incomplete, or older than this key".to_owned();
        ModelError::MissingField { path: self.path.clone(), field: shown(key), hint }
    }

    /// The error that Lagoon does not implement a key's value.
    #[must_use]
    pub fn unsupported(&self, key: &str, hint: &str) -> ModelError {
        let (path, field, value) = (self.path.clone(), shown(key), self.shown(key));
        ModelError::Unsupported { path, field, value, hint: hint.to_owned() }
    }

    /// The value in a readable length.
    fn shown(&self, key: &str) -> String {
        match self.get(key) {
            None => "absent".to_owned(),
            Some(Value::List(list)) => format!("a list of {}", list.len()),
            Some(Value::Text(text)) => format!("{:?}", text.chars().take(100).collect::<String>()),
            Some(Value::Unsigned(value)) => value.to_string(),
            Some(Value::Signed(value)) => value.to_string(),
            Some(Value::Float(value)) => value.to_string(),
            Some(Value::Bool(value)) => value.to_string(),
        }
    }
}
