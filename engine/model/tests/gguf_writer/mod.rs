//! Writes small GGUF files, also such as no other program would.
#![allow(dead_code, reason = "not every test that includes this module uses all of it")]

/// A value of a key.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    U8(u8),
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    F64(f64),
    Bool(bool),
    U64(u64),
    Text(&'static str),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    Bools(Vec<bool>),
    /// So many lists within each other, the innermost empty.
    Nested(usize),
    /// A list that claims a type and a length, and has no elements.
    ListOf(u32, u64),
    /// A value of an unknown type.
    Type(u32),
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn list(out: &mut Vec<u8>, kind: u32, len: usize) {
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&(len as u64).to_le_bytes());
}

impl Item {
    fn write(&self, out: &mut Vec<u8>) {
        let kind: u32 = match self {
            Self::U8(_) => 0,
            Self::U16(_) => 2,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::Texts(_) | Self::I32s(_) | Self::Bools(_) | Self::Nested(_) | Self::ListOf(..) => 9,
            Self::U64(_) => 10,
            Self::F64(_) => 12,
            Self::Type(kind) => *kind,
        };
        out.extend_from_slice(&kind.to_le_bytes());
        match self {
            Self::U8(value) => out.push(*value),
            Self::U16(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::U32(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::I32(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::F32(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::F64(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::U64(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::Bool(value) => out.push(u8::from(*value)),
            Self::Text(value) => text(out, value),
            Self::Texts(values) => {
                list(out, 8, values.len());
                values.iter().for_each(|value| text(out, value));
            }
            Self::I32s(values) => {
                list(out, 5, values.len());
                values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
            }
            Self::Bools(values) => {
                list(out, 7, values.len());
                out.extend(values.iter().map(|value| u8::from(*value)));
            }
            Self::Nested(depth) => {
                (1..*depth).for_each(|_| list(out, 9, 1));
                list(out, 4, 0);
            }
            Self::ListOf(kind, len) => {
                out.extend_from_slice(&kind.to_le_bytes());
                out.extend_from_slice(&len.to_le_bytes());
            }
            Self::Type(_) => {}
        }
    }
}

struct Tensor {
    name: String,
    kind: u32,
    /// The slowest dimension first.
    shape: Vec<u64>,
    offset: u64,
}

/// A file under writing.
pub(crate) struct File {
    version: u32,
    items: Vec<(String, Item)>,
    tensors: Vec<Tensor>,
    data: Vec<u8>,
}

impl File {
    /// A file of an architecture.
    pub(crate) fn new(architecture: &str) -> Self {
        let architecture = ("general.architecture".to_owned(), Item::Text(architecture.to_owned().leak()));
        Self { version: 3, items: vec![architecture], tensors: Vec::new(), data: Vec::new() }
    }

    pub(crate) fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    pub(crate) fn item(&mut self, key: &str, item: Item) {
        self.items.push((key.to_owned(), item));
    }

    /// Adds a tensor of a type by its number, the slowest dimension first.
    pub(crate) fn tensor(&mut self, name: &str, kind: u32, shape: &[u64], data: &[u8]) {
        let offset = self.data.len().next_multiple_of(32);
        self.data.resize(offset, 0);
        self.tensor_at(name, kind, shape, data, offset as u64);
    }

    /// Adds a tensor that claims to lie at `offset`.
    pub(crate) fn tensor_at(&mut self, name: &str, kind: u32, shape: &[u64], data: &[u8], offset: u64) {
        self.tensors.push(Tensor { name: name.to_owned(), kind, shape: shape.to_vec(), offset });
        self.data.extend_from_slice(data);
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        out.extend_from_slice(&(self.items.len() as u64).to_le_bytes());
        for (key, item) in &self.items {
            text(&mut out, key);
            item.write(&mut out);
        }
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend_from_slice(&u32::try_from(tensor.shape.len()).unwrap().to_le_bytes());
            tensor.shape.iter().rev().for_each(|size| out.extend_from_slice(&size.to_le_bytes()));
            out.extend_from_slice(&tensor.kind.to_le_bytes());
            out.extend_from_slice(&tensor.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend_from_slice(&self.data);
        out
    }
}
