//! A function for fuzzing GGUF files: the bounded test drives it (engine/model/tests/gguf.rs).

use super::Gguf;
use crate::{Checkpoint, ModelSpec};
use std::path::Path;

/// What became of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is no GGUF file.
    Refused,
    /// It is one, of no model that is served.
    Read,
    /// It has a model's configuration.
    Model,
}

/// Opens the file at `path`, checks what an open one promises, and reads configuration and vocabulary from it.
///
/// # Panics
/// If an error does not name the file, or a tensor lies outside of it: a bug of the reader.
#[must_use]
pub fn open(path: &Path) -> Outcome {
    let shown = path.display().to_string();
    let names = |error: String| assert!(error.contains(&shown), "an error names no file: {error}");
    let file = match Gguf::open(path) {
        Ok(file) => file,
        Err(error) => {
            names(error.to_string());
            return Outcome::Refused;
        }
    };
    for (name, tensor) in &file.tensors {
        let part = &file.parts[tensor.file];
        assert!(tensor.range.end <= part.map.bytes().len(), "`{name}` ends behind its file");
        // The size of others is not known, and not checked.
        let bytes = tensor.stored.format().map(|format| format.bytes(tensor.shape.iter().product()));
        assert!(bytes.is_none_or(|bytes| bytes == Some(tensor.range.len())), "`{name}` has another size");
    }
    for (_, value) in file.metadata().iter() {
        if let super::Value::List(list) = value {
            assert_eq!(list.values().count(), list.len(), "a list has another length");
        }
    }
    match super::vocabulary(file.metadata()) {
        Ok(vocabulary) => drop(lagoon_text::Tokenizer::from_gguf(&vocabulary).map_err(|e| names(e.to_string()))),
        Err(error) => names(error.to_string()),
    }
    match ModelSpec::open(path) {
        Err(error) => {
            names(error.to_string());
            Outcome::Read
        }
        Ok(spec) => {
            assert!(spec.kv_shape(lagoon_types::DType::F32).token_bytes() > 0);
            Checkpoint::open(path).map_err(|e| names(e.to_string())).map_or(Outcome::Read, |_| Outcome::Model)
        }
    }
}
