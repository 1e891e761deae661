//! Writes a GGUF file, version 3, little-endian: keys, the list of tensors, then their data in the list's order.

use super::{ALIGNMENT_DEFAULT, MAGIC, Stored};
use bytes::Bytes;
use lagoon_backend::WeightFormat;
use std::io::{self, Read as _, Write};

const VERSION: u32 = 3;

/// A key's value.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Bytes(Vec<u8>),
    U32s(Vec<u32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
    Texts(Vec<String>),
    /// Type and value as another file has them.
    Stored(Bytes),
}

/// Numbers of types.
mod kind {
    pub(super) const U8: u32 = 0;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const TEXT: u32 = 8;
    pub(super) const LIST: u32 = 9;
}

impl Item {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U32(value) => {
                number(out, kind::U32);
                number(out, *value);
            }
            Self::F32(value) => {
                number(out, kind::F32);
                out.extend_from_slice(&value.to_le_bytes());
            }
            Self::Bool(value) => {
                number(out, kind::BOOL);
                out.push((*value).into());
            }
            Self::Text(value) => {
                number(out, kind::TEXT);
                text(out, value);
            }
            Self::Bytes(values) => {
                list(out, kind::U8, values.len());
                out.extend_from_slice(values);
            }
            // Readers want types of tokens in this type.
            Self::U32s(values) => {
                list(out, kind::I32, values.len());
                values.iter().for_each(|value| number(out, *value));
            }
            Self::F32s(values) => {
                list(out, kind::F32, values.len());
                values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
            }
            Self::Bools(values) => {
                list(out, kind::BOOL, values.len());
                out.extend(values.iter().map(|value| u8::from(*value)));
            }
            Self::Texts(values) => {
                list(out, kind::TEXT, values.len());
                values.iter().for_each(|value| text(out, value));
            }
            Self::Stored(bytes) => out.extend_from_slice(bytes),
        }
    }
}

fn number(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn length(out: &mut Vec<u8>, value: usize) {
    out.extend_from_slice(&(value as u64).to_le_bytes());
}

fn text(out: &mut Vec<u8>, value: &str) {
    length(out, value.len());
    out.extend_from_slice(value.as_bytes());
}

fn list(out: &mut Vec<u8>, kind: u32, len: usize) {
    number(out, kind::LIST);
    number(out, kind);
    length(out, len);
}

/// Keys with their values, in the order in which they were set first.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<(String, Item)>);

impl Keys {
    /// Sets a key, in place of the value that it has.
    pub fn set(&mut self, key: impl Into<String>, item: Item) {
        let key = key.into();
        match self.0.iter_mut().find(|(known, _)| *known == key) {
            Some((_, value)) => *value = item,
            None => self.0.push((key, item)),
        }
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Item> {
        self.0.iter().find(|(known, _)| known == key).map(|(_, item)| item)
    }

    pub(super) fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// All keys and values as a file has them.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (key, item) in &self.0 {
            text(&mut out, key);
            item.write(&mut out);
        }
        out
    }
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    /// The slowest dimension first; rows are whole blocks.
    pub shape: Vec<usize>,
    pub format: WeightFormat,
}

impl Entry {
    /// Bytes of the data.
    ///
    /// # Panics
    /// If rows are no whole blocks.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let rows_are_whole = self.shape.last().and_then(|cols| self.format.bytes(*cols)).is_some();
        let bytes = self.format.bytes(self.shape.iter().product()).filter(|_| rows_are_whole);
        bytes.unwrap_or_else(|| panic!("{:?} in {}: rows are no whole blocks", self.shape, self.format))
    }
}

/// Bytes between the end of tensors' data and the next tensor.
fn padding(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT_DEFAULT) - bytes
}

/// A file whose tensors' data is awaited in the order of its list.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    /// Bytes of each tensor that are awaited, the last tensor first.
    awaited: Vec<u64>,
    /// Bytes of the first of them that were written.
    written: u64,
}

impl<W: Write> Writer<W> {
    /// Writes keys and the list of tensors.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn begin(mut out: W, keys: &Keys, entries: &[Entry]) -> io::Result<Self> {
        let mut head = MAGIC.to_vec();
        number(&mut head, VERSION);
        length(&mut head, entries.len());
        head.extend_from_slice(&keys.len().to_le_bytes());
        head.extend(keys.bytes());
        let mut offset = 0;
        for entry in entries {
            text(&mut head, &entry.name);
            number(&mut head, u32::try_from(entry.shape.len()).expect("a tensor has few dimensions"));
            entry.shape.iter().rev().for_each(|size| length(&mut head, *size));
            number(&mut head, Stored::of(entry.format).expect("a format that GGUF files have").0);
            head.extend_from_slice(&u64::to_le_bytes(offset));
            offset += entry.bytes() as u64;
            offset += padding(offset);
        }
        let end = head.len() as u64;
        pad(&mut head, padding(end))?;
        out.write_all(&head)?;
        let awaited = entries.iter().rev().map(|entry| entry.bytes() as u64).collect();
        Ok(Self { out, awaited, written: 0 })
    }

    /// Writes the next bytes of the tensor whose turn it is.
    ///
    /// # Errors
    /// Those of the file.
    ///
    /// # Panics
    /// If they are more than the tensor has.
    pub fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        let awaited = self.awaited.last().copied().unwrap_or(0);
        assert!(self.written <= awaited, "{} bytes of a tensor of {awaited}", self.written);
        if self.written == awaited {
            self.awaited.pop();
            self.written = 0;
            pad(&mut self.out, padding(awaited))?;
        }
        Ok(())
    }

    /// The whole file.
    ///
    /// # Errors
    /// Those of the file.
    ///
    /// # Panics
    /// If data of a tensor is missing.
    pub fn finish(mut self) -> io::Result<W> {
        assert_eq!(self.awaited.len(), 0, "tensors without data");
        self.out.flush()?;
        Ok(self.out)
    }
}

fn pad(out: &mut impl Write, count: u64) -> io::Result<()> {
    io::copy(&mut io::repeat(0).take(count), out).map(drop)
}
