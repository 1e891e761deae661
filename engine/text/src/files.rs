//! Reading a model's text files: sizes have a limit, and each error names its file.

use std::path::{Path, PathBuf};

/// Largest tokenizer file, in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Error of loading a tokenizer or a template.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} has no tokenizer: none of tokenizer.json, tokenizer.model, tiktoken.model and *.tiktoken is there\nhint: copy \
             the file from where the model is published", dir.display())]
    NoTokenizer { dir: PathBuf },
    #[error("{} cannot be used: {problem}\nhint: {hint}", path.display())]
    Unsupported { path: PathBuf, problem: String, hint: String },
    #[error("{} is not valid: {problem}", path.display())]
    Malformed { path: PathBuf, problem: String },
    #[error("{}: the decoder {decoder} is not supported\nhint: supported are byte-level BPE (Llama 3, GPT-2) and \
             SentencePiece pieces (Llama 2, Mistral, Yi)", path.display())]
    UnsupportedDecoder { path: PathBuf, decoder: String },
    #[error("{}: the chat template cannot be parsed: {problem}", path.display())]
    Template { path: PathBuf, problem: String },
}

/// Reads a file of at most `FILE_BYTES_MAX` bytes.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    let io = |source| TextError::Io { path: path.to_owned(), source };
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > FILE_BYTES_MAX {
        let problem = format!("it has {size} bytes, more than {FILE_BYTES_MAX}");
        return Err(TextError::Malformed { path: path.to_owned(), problem });
    }
    std::fs::read(path).map_err(io)
}
