//! Tokenizer of a model: `tokenizer.json`, a SentencePiece model or tiktoken ranks, with `tokenizer_config.json`.

use crate::bounds::{text_bytes_a_token, token_bytes_max};
use crate::convert::gguf::GgufVocabulary;
use crate::convert::{self, Inner};
use crate::detokenize::Assembly;
use crate::pieces::Scheme;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Longest text to tokenise, in bytes: two million tokens of 16 bytes.
pub const ENCODE_BYTES_MAX: usize = 32 << 20;
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

/// Error of tokenising a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    #[error("the text has {bytes} bytes, the limit is {max}")]
    TooLong { bytes: usize, max: usize },
    #[error("the text cannot be tokenised: {0}")]
    Refused(String),
}

/// The used fields of `tokenizer_config.json`; empty if the file is absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenizerConfig {
    /// Special tokens by the names that templates use (`bos_token`, `eos_token`, `unk_token`, `pad_token`).
    pub special: Vec<(&'static str, String)>,
    pub add_bos_token: Option<bool>,
    /// Chat templates by name; an unnamed one is `default`.
    pub chat_templates: Vec<(String, String)>,
}

pub(crate) const SPECIAL: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

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

/// Tokenizer: text to token ids and back.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
    scheme: Scheme,
    /// Ascending.
    special_ids: Vec<u32>,
    bos_id: Option<u32>,
    eos_id: Option<u32>,
    bos: BosRule,
    vocab: usize,
    /// Bytes of a text that one token stands for at most, if that is known.
    token_bytes_max: Option<usize>,
    /// Bytes of a text for each token of a context, above which it is refused.
    text_bytes_a_token: usize,
}

/// Correction of the post-processor's beginning-of-sequence token when special tokens are requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BosRule {
    AsIs,
    Prepend(u32),
    DropFirst,
}

impl Tokenizer {
    /// Reads the tokenizer in `dir`: `tokenizer.json`, or if there is none the first of `tokenizer.model` (SentencePiece or
    /// tiktoken), `tiktoken.model` and `*.tiktoken`. Special tokens and flags are those of `tokenizer_config.json`; without a
    /// `tokenizer.json` also those of `special_tokens_map.json` and `added_tokens.json`.
    ///
    /// # Errors
    /// If there is no tokenizer, or a file cannot be read, is malformed, or needs an unsupported feature.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let (path, config) = (dir.join("tokenizer.json"), TokenizerConfig::open(dir)?);
        if path.exists() {
            return Self::parse(&path, &read(&path)?, &config);
        }
        let converted = convert::open(dir)?;
        let (mut special, mut config) = (converted.special, config);
        special.retain(|(name, _)| config.special(name).is_none());
        config.special.append(&mut special);
        Self::new(&converted.path, converted.inner, &config)
    }

    /// Makes the tokenizer of a GGUF file's vocabulary.
    ///
    /// # Errors
    /// If the vocabulary is malformed, or of a kind that is not supported.
    pub fn from_gguf(vocabulary: &GgufVocabulary) -> Result<Self, TextError> {
        if let Some(json) = &vocabulary.tokenizer_json {
            let config = TokenizerConfig { add_bos_token: vocabulary.add_bos, ..vocabulary.config() };
            return Self::parse(&vocabulary.path, json.as_bytes(), &config);
        }
        let converted = convert::gguf::convert(vocabulary)?;
        Self::new(&converted.path, converted.inner, &vocabulary.config())
    }

    /// Parses the bytes of a `tokenizer.json`; `path` is only for messages. The file's truncation and padding are ignored:
    /// a prompt is never cut silently.
    ///
    /// # Errors
    /// If the bytes are not a tokenizer, or its decoder is not supported.
    pub fn parse(path: &Path, json: &[u8], config: &TokenizerConfig) -> Result<Self, TextError> {
        let malformed = |problem: String| TextError::Malformed { path: path.to_owned(), problem };
        let mut inner = Inner::from_bytes(json).map_err(|e| malformed(e.to_string()))?;
        inner.with_truncation(None).map_err(|e| malformed(e.to_string()))?;
        inner.with_padding(None);
        Self::new(path, inner, config)
    }

    fn new(path: &Path, inner: Inner, config: &TokenizerConfig) -> Result<Self, TextError> {
        let malformed = |problem: String| TextError::Malformed { path: path.to_owned(), problem };
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
        let token_bytes_max = token_bytes_max(&inner, &scheme);
        let text_bytes_a_token = text_bytes_a_token(token_bytes_max, &inner, &scheme);
        Ok(Self { inner, scheme, special_ids, bos_id, eos_id, bos, vocab, token_bytes_max, text_bytes_a_token })
    }

    /// Token ids of `text`. `special` adds the tokens that the model's tokenizer puts around a text (mostly
    /// beginning-of-sequence); texts from a chat template contain them already. Names of special tokens in the text become
    /// those tokens either way, as in transformers.
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

    /// Tokens that a text of so many bytes has at least, special ones not counted; 0 where that is not known, because the
    /// normaliser may drop a part of the text, say.
    #[must_use]
    pub fn tokens_min(&self, text_bytes: usize) -> usize {
        self.token_bytes_max.map_or(0, |longest| text_bytes.div_ceil(longest))
    }

    /// Bytes of the longest text to tokenise for a context of so many tokens. Where [`Tokenizer::tokens_min`] knows no bound, a
    /// longer text might fit in theory, if nearly all of it was white space, accents or the like that the normaliser drops.
    #[must_use]
    pub fn text_bytes_max(&self, tokens: usize) -> usize {
        tokens.saturating_mul(self.text_bytes_a_token).min(ENCODE_BYTES_MAX)
    }

    /// The text of `ids`. Unknown ids give no text, nor do special tokens with `skip_special`.
    ///
    /// This is transformers' `decode` (without its English-only clean-up of spaces before punctuation), except for
    /// SentencePiece byte tokens that are not UTF-8: their valid parts are kept, and each invalid part is one U+FFFD, so
    /// that streamed text never has to change.
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

    /// Bytes of the token in the middle of a text; empty for an unknown id.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Some(token) = self.token(id) {
            self.scheme.append(&token, false, &mut bytes);
        }
        bytes
    }

    /// Number of tokens in the vocabulary, added ones included. A model's embedding table may be longer.
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

    /// Id of the beginning-of-sequence token, if `tokenizer_config.json` names it.
    #[must_use]
    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    /// Id of the end-of-sequence token, if `tokenizer_config.json` names it. `generation_config.json` may name more.
    #[must_use]
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    pub(crate) fn scheme(&self) -> &Scheme {
        &self.scheme
    }
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
