//! Tokenizer of a model: `tokenizer.json`, a SentencePiece model or tiktoken ranks, with `tokenizer_config.json`.

use crate::bounds::{text_bytes_a_token, token_bytes_max};
use crate::convert::gguf::GgufVocabulary;
use crate::convert::{self, Inner};
use crate::detokenize::Assembly;
use crate::files::{TextError, read};
use crate::pieces::Scheme;
use crate::tokenizer_config::TokenizerConfig;
use std::path::Path;

/// Longest text to tokenise, in bytes: two million tokens of 16 bytes.
pub const ENCODE_BYTES_MAX: usize = 32 << 20;

/// Error of tokenising a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    #[error("the text has {bytes} bytes, the limit is {max}")]
    TooLong { bytes: usize, max: usize },
    #[error("the text cannot be tokenised: {0}")]
    Refused(String),
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
