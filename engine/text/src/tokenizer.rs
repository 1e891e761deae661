//! The tokenizer of a model: `tokenizer.json` with `tokenizer_config.json`.

use crate::detokenize::Assembly;
use crate::pieces::Scheme;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Longest text that is tokenised, in bytes: two million tokens of 16 bytes.
pub const ENCODE_BYTES_MAX: usize = 32 << 20;
/// Largest tokenizer file, in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Why a tokenizer or a template cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} is not valid: {problem}", path.display())]
    Malformed { path: PathBuf, problem: String },
    #[error("{}: the decoder {decoder} is not supported\nhint: supported are byte-level BPE (Llama 3, GPT-2) and \
             SentencePiece pieces (Llama 2, Mistral, Yi)", path.display())]
    UnsupportedDecoder { path: PathBuf, decoder: String },
    #[error("{}: the chat template cannot be parsed: {problem}", path.display())]
    Template { path: PathBuf, problem: String },
}

/// Why a text was not tokenised.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    #[error("the text has {bytes} bytes, the limit is {max}")]
    TooLong { bytes: usize, max: usize },
    #[error("the text cannot be tokenised: {0}")]
    Refused(String),
}

/// What `tokenizer_config.json` says that matters here. A file that is absent says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenizerConfig {
    /// Special tokens by the names that templates use (`bos_token`, `eos_token`, `unk_token`, `pad_token`).
    pub special: Vec<(&'static str, String)>,
    pub add_bos_token: Option<bool>,
    /// The templates by name; one without a name is `default`.
    pub chat_templates: Vec<(String, String)>,
}

const SPECIAL: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

impl TokenizerConfig {
    /// Reads `tokenizer_config.json` in `dir`, which may be absent.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer_config.json");
        if path.exists() { Self::parse(&path, &read(&path)?) } else { Ok(Self::default()) }
    }

    /// Parses the bytes of a `tokenizer_config.json`; `path` is only for messages.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self, TextError> {
        let malformed = |problem: String| TextError::Malformed { path: path.to_owned(), problem };
        let value: Value = serde_json::from_slice(json).map_err(|e| malformed(e.to_string()))?;
        let mut special = Vec::new();
        for name in SPECIAL {
            let token = &value[name];
            match token.as_str().or_else(|| token["content"].as_str()) {
                Some(text) => special.push((name, text.to_owned())),
                None if token.is_null() => {}
                None => return Err(malformed(format!("the field `{name}` is {token}; it must be a token"))),
            }
        }
        let chat_templates = match &value["chat_template"] {
            Value::Null => Vec::new(),
            Value::String(text) => vec![("default".to_owned(), text.clone())],
            Value::Array(list) => list
                .iter()
                .map(|item| Some((item["name"].as_str()?.to_owned(), item["template"].as_str()?.to_owned())))
                .collect::<Option<_>>()
                .ok_or_else(|| malformed("`chat_template` is a list of something else than templates".to_owned()))?,
            _ => return Err(malformed("the field `chat_template` is neither a string nor a list".to_owned())),
        };
        Ok(Self { special, add_bos_token: value["add_bos_token"].as_bool(), chat_templates })
    }

    /// The text of a special token by its name, for example `bos_token`.
    #[must_use]
    pub fn special(&self, name: &str) -> Option<&str> {
        self.special.iter().find(|(key, _)| *key == name).map(|(_, text)| text.as_str())
    }
}

/// Text to token ids and back.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    scheme: Scheme,
    /// Ascending.
    special_ids: Vec<u32>,
    bos_id: Option<u32>,
    eos_id: Option<u32>,
    bos: BosRule,
    vocab: usize,
}

/// What is done about the beginning-of-sequence token when special tokens are asked for, beyond the post-processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BosRule {
    AsIs,
    Prepend(u32),
    DropFirst,
}

impl Tokenizer {
    /// Reads `tokenizer.json` and `tokenizer_config.json` in `dir`.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        Self::parse(&path, &read(&path)?, &TokenizerConfig::open(dir)?)
    }

    /// Parses the bytes of a `tokenizer.json`; `path` is only for messages. Truncation and padding that the file asks
    /// for are ignored: a prompt is never cut silently.
    pub fn parse(path: &Path, json: &[u8], config: &TokenizerConfig) -> Result<Self, TextError> {
        let malformed = |problem: String| TextError::Malformed { path: path.to_owned(), problem };
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| malformed(e.to_string()))?;
        inner.with_truncation(None).map_err(|e| malformed(e.to_string()))?;
        inner.with_padding(None);
        let decoder = serde_json::to_value(inner.get_decoder()).map_err(|e| malformed(e.to_string()))?;
        let scheme = Scheme::parse(&decoder)
            .map_err(|decoder| TextError::UnsupportedDecoder { path: path.to_owned(), decoder })?;
        let mut special_ids: Vec<u32> =
            inner.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special).map(|(id, _)| id).collect();
        special_ids.sort_unstable();
        let bos_id = config.special("bos_token").and_then(|token| inner.token_to_id(token));
        let eos_id = config.special("eos_token").and_then(|token| inner.token_to_id(token));
        let empty = inner.encode_fast("", true).map_err(|e| malformed(e.to_string()))?;
        let adds = bos_id.is_some() && empty.get_ids().first().copied() == bos_id;
        let bos = match (config.add_bos_token, bos_id) {
            (Some(true), Some(id)) if !adds => BosRule::Prepend(id),
            (Some(false), _) if adds => BosRule::DropFirst,
            _ => BosRule::AsIs,
        };
        let vocab = inner.get_vocab_size(true);
        Ok(Self { inner, scheme, special_ids, bos_id, eos_id, bos, vocab })
    }

    /// Token ids of `text`. With `special` the tokens that the model's tokenizer puts around a text are added (for most
    /// models, beginning-of-sequence); texts from a chat template have them already. Names of special tokens in the
    /// text become those tokens either way, as in transformers.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, EncodeError> {
        if text.len() > ENCODE_BYTES_MAX {
            return Err(EncodeError::TooLong { bytes: text.len(), max: ENCODE_BYTES_MAX });
        }
        let encoding = self.inner.encode_fast(text, special).map_err(|e| EncodeError::Refused(e.to_string()))?;
        let ids = encoding.get_ids();
        Ok(match self.bos {
            BosRule::Prepend(bos) if special => std::iter::once(bos).chain(ids.iter().copied()).collect(),
            BosRule::DropFirst if special => ids[1..].to_vec(),
            _ => ids.to_vec(),
        })
    }

    /// The text of `ids`; unknown ids give nothing, and special tokens do not with `skip_special`.
    ///
    /// This is transformers' `decode` (without its English-only clean-up of spaces before punctuation), but for
    /// SentencePiece's byte tokens where they are not UTF-8: what is valid of them is kept, and each invalid part is one
    /// U+FFFD, so that text which was streamed never has to change.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let (mut assembly, mut text) = (Assembly::new(self), String::new());
        for &id in ids {
            assembly.push(self, id, skip_special, &mut text);
        }
        assembly.finish(&mut text);
        text
    }

    /// The token as the vocabulary has it, for example `Ġthe`.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as the vocabulary has it.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The bytes that the token adds in the middle of a text; empty if there is no such token.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Some(token) = self.token(id) {
            self.scheme.append(&token, false, &mut bytes);
        }
        bytes
    }

    /// Tokens in the vocabulary, added ones included. A model's embedding table may be longer.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab
    }

    /// Whether the token is special, such as end-of-sequence.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.binary_search(&id).is_ok()
    }

    /// All special tokens, ascending.
    #[must_use]
    pub fn special_ids(&self) -> &[u32] {
        &self.special_ids
    }

    /// Beginning of sequence, if `tokenizer_config.json` names it.
    #[must_use]
    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    /// End of sequence, if `tokenizer_config.json` names it. `generation_config.json` may name more.
    #[must_use]
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    pub(crate) fn scheme(&self) -> &Scheme {
        &self.scheme
    }
}

/// Reads a file of reasonable size.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    let io = |source| TextError::Io { path: path.to_owned(), source };
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > FILE_BYTES_MAX {
        let problem = format!("it has {size} bytes, more than {FILE_BYTES_MAX}");
        return Err(TextError::Malformed { path: path.to_owned(), problem });
    }
    std::fs::read(path).map_err(io)
}
