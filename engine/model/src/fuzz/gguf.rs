//! The entry of the fuzz target for GGUF files (engine/model/fuzz) and of the bounded tests that drive it in CI
//! (engine/model/tests/fuzz.rs and gguf.rs).

use crate::gguf::{Gguf, Value, vocabulary};
use crate::mapped::Map;
use crate::{Checkpoint, families};
use bytes::Bytes;
use std::path::Path;

/// Most bytes of an error's text: a few names and values of at most 100 characters, and the names of all families or kinds.
const MESSAGE_BYTES_MAX: usize = 4096;
/// What errors call the file. No file has the name: those of a split one are not there.
const FILE: &str = "dir/m.gguf";

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

/// Checks that an error names the file and is short.
fn check(text: &str) {
    assert!(text.contains("dir/"), "an error names no file: {text}");
    assert!(text.len() <= MESSAGE_BYTES_MAX, "{} bytes: {text}", text.len());
}

/// Reads `data` as a GGUF file, checks what an open one promises, and reads configuration and vocabulary from it.
///
/// # Panics
/// If an error does not name the file, or a tensor lies outside of it: a bug of the reader.
#[must_use]
pub fn read(data: &[u8]) -> Outcome {
    let file = match Gguf::of(Path::new(FILE), Map::of(Bytes::copy_from_slice(data))) {
        Ok(file) => file,
        Err(error) => {
            check(&error.to_string());
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
        if let Value::List(list) = value {
            assert_eq!(list.values().count(), list.len(), "a list has another length");
        }
    }
    match vocabulary(file.metadata()) {
        Ok(vocabulary) => drop(lagoon_text::Tokenizer::from_gguf(&vocabulary).map_err(|e| check(&e.to_string()))),
        Err(error) => check(&error.to_string()),
    }
    match families::gguf::read(&file) {
        Err(error) => {
            check(&error.to_string());
            Outcome::Read
        }
        Ok(spec) => {
            assert!(spec.kv_shape(lagoon_types::DType::F32).token_bytes() > 0);
            let checkpoint = Checkpoint::of(file);
            for part in spec.parts() {
                let _ = checkpoint.tensor(&part.tensor, &part.shape).map_err(|e| check(&e.to_string()));
            }
            Outcome::Model
        }
    }
}
