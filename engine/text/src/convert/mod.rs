//! Tokenizers of models without a `tokenizer.json`: SentencePiece models, tiktoken ranks, and vocabularies of GGUF files.
//!
//! Each file becomes a tokenizer of the library in memory, and the rest of the crate cannot tell it from one that was read from
//! a `tokenizer.json`. The files are untrusted: their sizes have limits, and a malformed or unsupported file is an error with
//! its name. [`Tokenizer::open`](crate::Tokenizer::open) and [`Tokenizer::from_gguf`](crate::Tokenizer::from_gguf) call this
//! module.

pub(crate) mod gguf;
mod normalize;
mod pre;
mod proto;
mod sentencepiece;
mod special;
mod tiktoken;

use crate::files::{TextError, read};
pub(crate) use normalize::{SPACE, TextNormalizer};
pub(crate) use pre::Pre;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use special::Beside;
use std::path::{Path, PathBuf};
use tokenizers::{AddedToken, DecoderWrapper, ModelWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl};

/// The library's tokenizer, with normalizers of this crate besides the library's.
pub(crate) type Inner =
    TokenizerImpl<ModelWrapper, TextNormalizer, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Largest SentencePiece model or file of ranks, in bytes.
const FILE_BYTES_MAX: usize = 64 << 20;
/// Where Git LFS stores a file elsewhere, it leaves a text that begins so.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// A tokenizer made from another file than `tokenizer.json`.
pub(crate) struct Converted {
    /// The file that has the vocabulary.
    pub(crate) path: PathBuf,
    pub(crate) inner: Inner,
    /// Texts of special tokens by name (`bos_token`, `eos_token`), where `tokenizer_config.json` may not name them.
    pub(crate) special: Vec<(&'static str, String)>,
}

/// Reads the tokenizer in `dir`, which has no `tokenizer.json`: `tokenizer.model`, `tiktoken.model` or the one `*.tiktoken`, the
/// first that is there.
///
/// # Errors
/// If there is none of them, or it cannot be read, is malformed, or needs an unsupported feature.
pub(crate) fn open(dir: &Path) -> Result<Converted, TextError> {
    let path = find(dir)?;
    let bytes = read(&path)?;
    if bytes.len() > FILE_BYTES_MAX {
        let problem = format!("it has {} bytes, more than {FILE_BYTES_MAX}", bytes.len());
        return Err(TextError::Malformed { path, problem });
    }
    if bytes.starts_with(LFS_POINTER) {
        let problem = "it is a pointer of Git LFS, not the file itself".to_owned();
        return Err(TextError::Unsupported { path, problem, hint: "fetch the file with `git lfs pull`".to_owned() });
    }
    let beside = Beside::read(dir)?;
    let is_ranks = tiktoken::is_ranks(&bytes) || path.file_name().is_none_or(|name| name != "tokenizer.model");
    if is_ranks { tiktoken::convert(&path, &bytes, &beside) } else { sentencepiece::convert(&path, &bytes, beside) }
}

/// The file that has the vocabulary.
fn find(dir: &Path) -> Result<PathBuf, TextError> {
    if let Some(path) =
        ["tokenizer.model", "tiktoken.model"].map(|name| dir.join(name)).into_iter().find(|path| path.exists())
    {
        return Ok(path);
    }
    let io = |source| TextError::Io { path: dir.to_owned(), source };
    let mut found = Vec::new();
    if dir.is_dir() {
        for entry in std::fs::read_dir(dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|extension| extension == "tiktoken") {
                found.push(path);
            }
        }
    }
    found.sort();
    match found.as_slice() {
        [] => Err(TextError::NoTokenizer { dir: dir.to_owned() }),
        [path] => Ok(path.clone()),
        [path, other, ..] => {
            let problem = format!("{} is there, too", other.display());
            Err(TextError::Unsupported {
                path: path.clone(),
                problem,
                hint: "keep the model's own file only".to_owned(),
            })
        }
    }
}

/// A part of the library's tokenizer from its form in a `tokenizer.json`.
fn part<T: DeserializeOwned>(path: &Path, json: Value) -> Result<T, TextError> {
    serde_json::from_value(json)
        .map_err(|error| TextError::Malformed { path: path.to_owned(), problem: error.to_string() })
}

/// A post-processor that puts `before` and `after`, tokens with their ids, around a text.
fn around(
    path: &Path,
    before: Option<(&str, u32)>,
    after: Option<(&str, u32)>,
) -> Result<Option<PostProcessorWrapper>, TextError> {
    if before.is_none() && after.is_none() {
        return Ok(None);
    }
    let item = |(token, _): (&str, u32)| json!({"SpecialToken": {"id": token, "type_id": 0}});
    let text = |id, kind| json!({"Sequence": {"id": id, "type_id": kind}});
    let single: Vec<Value> = before.map(item).into_iter().chain([text("A", 0)]).chain(after.map(item)).collect();
    let pair: Vec<Value> = single.iter().cloned().chain([text("B", 1)]).collect();
    let tokens = before
        .into_iter()
        .chain(after)
        .map(|(token, id)| (token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]})));
    let tokens: serde_json::Map<String, Value> = tokens.collect();
    let json = json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens});
    part(path, json).map(Some)
}

/// Adds `tokens` to a tokenizer whose model has them, so that each keeps its id. The tokenizer has no normalizer yet: those with
/// `normalized` are found in normalized texts as they are.
fn add(path: &Path, inner: &mut Inner, tokens: &[(u32, AddedToken)]) -> Result<(), TextError> {
    let added: Vec<AddedToken> = tokens.iter().map(|(_, token)| token.clone()).collect();
    inner.add_tokens(&added);
    match tokens.iter().find(|(id, token)| inner.token_to_id(&token.content) != Some(*id)) {
        None => Ok(()),
        Some((id, token)) => {
            let problem = format!("the token {:?} is there twice, not only with the id {id}", token.content);
            Err(TextError::Malformed { path: path.to_owned(), problem })
        }
    }
}
