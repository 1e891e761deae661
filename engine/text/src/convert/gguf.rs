//! Vocabularies of GGUF files: SentencePiece's BPE (`llama`) and byte-level BPE (`gpt2`).
//!
//! The lists are untrusted; the reader of the file bounds their number and lengths. What is malformed or not supported is an
//! error with the file's name and the key.

use super::pre::Pre;
use super::proto::{Algorithm, ModelProto, PIECE_BYTES_MAX, Piece, PieceKind};
use super::special::Beside;
use super::{Converted, Inner, TextNormalizer, add, around, part, sentencepiece};
use crate::files::TextError;
use crate::pieces::letters;
use crate::tokenizer_config::TokenizerConfig;
use serde_json::json;
use std::path::PathBuf;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, ModelWrapper, NormalizerWrapper};

/// `tokenizer.ggml.model` of SentencePiece's BPE.
pub(crate) const PIECES: &str = "llama";
/// The same of byte-level BPE.
pub(crate) const BYTE_LEVEL: &str = "gpt2";

/// A GGUF file's keys about text.
#[derive(Clone, Debug, Default)]
pub struct GgufVocabulary {
    /// The file, for messages.
    pub path: PathBuf,
    /// `tokenizer.ggml.model`.
    pub model: String,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    /// Texts by id: pieces, or tokens spelled in GPT-2's alphabet.
    pub tokens: Vec<String>,
    /// As many as tokens, or none.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`: as many as tokens, or none.
    pub kinds: Vec<u32>,
    /// Two tokens each, with a space between them; the first merges come first.
    pub merges: Vec<String>,
    pub bos_id: Option<u32>,
    pub eos_id: Option<u32>,
    pub unknown_id: Option<u32>,
    pub padding_id: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
    pub remove_extra_whitespaces: Option<bool>,
    /// SentencePiece's character map; empty for none.
    pub charsmap: Vec<u8>,
    pub chat_template: Option<String>,
    /// A whole tokenizer.json, which decides where it is there.
    pub tokenizer_json: Option<String>,
}

impl GgufVocabulary {
    /// The text of a token.
    fn text(&self, id: Option<u32>) -> Option<&str> {
        let id = usize::try_from(id?).ok()?;
        self.tokens.get(id).map(String::as_str)
    }

    /// Special tokens by the names that templates use.
    pub(crate) fn config(&self) -> TokenizerConfig {
        let ids = [
            ("bos_token", self.bos_id),
            ("eos_token", self.eos_id),
            ("unk_token", self.unknown_id),
            ("pad_token", self.padding_id),
        ];
        let special = ids.into_iter().filter_map(|(name, id)| Some((name, self.text(id)?.to_owned())));
        TokenizerConfig { special: special.collect(), ..TokenizerConfig::default() }
    }

    fn kind(&self, index: usize) -> Result<PieceKind, TextError> {
        match self.kinds.get(index) {
            None | Some(1) => Ok(PieceKind::Normal),
            Some(2) => Ok(PieceKind::Unknown),
            Some(3) => Ok(PieceKind::Control),
            Some(4) => Ok(PieceKind::UserDefined),
            Some(5) => Ok(PieceKind::Unused),
            Some(6) => Ok(PieceKind::Byte),
            Some(other) => {
                Err(self.malformed(&format!("`tokenizer.ggml.token_type` has {other} for the token {index}")))
            }
        }
    }

    fn malformed(&self, problem: &str) -> TextError {
        TextError::Malformed { path: self.path.clone(), problem: problem.to_owned() }
    }

    fn unsupported(&self, key: &str, value: &str, hint: String) -> TextError {
        let problem = format!("the key `{key}` is {value}, which is not supported");
        TextError::Unsupported { path: self.path.clone(), problem, hint }
    }
}

/// Makes a tokenizer.
pub(crate) fn convert(vocabulary: &GgufVocabulary) -> Result<Converted, TextError> {
    let count = vocabulary.tokens.len();
    if count == 0 {
        return Err(vocabulary.malformed("the key `tokenizer.ggml.tokens` has no tokens"));
    }
    for (key, len) in [("scores", vocabulary.scores.len()), ("token_type", vocabulary.kinds.len())] {
        if len != 0 && len != count {
            let problem = format!("the key `tokenizer.ggml.{key}` has {len} elements for {count} tokens");
            return Err(vocabulary.malformed(&problem));
        }
    }
    match vocabulary.model.as_str() {
        PIECES => sentencepiece_model(vocabulary),
        BYTE_LEVEL => byte_level(vocabulary),
        other => {
            let hint = "supported are \"llama\" (SentencePiece's BPE) and \"gpt2\" (byte-level BPE)".to_owned();
            Err(vocabulary.unsupported("tokenizer.ggml.model", &format!("{other:?}"), hint))
        }
    }
}

/// SentencePiece's BPE: merges in the order of the pieces' scores.
fn sentencepiece_model(vocabulary: &GgufVocabulary) -> Result<Converted, TextError> {
    if vocabulary.scores.is_empty() {
        return Err(vocabulary.malformed("the key `tokenizer.ggml.scores` is missing"));
    }
    let mut pieces = Vec::with_capacity(vocabulary.tokens.len());
    for (index, (text, score)) in vocabulary.tokens.iter().zip(&vocabulary.scores).enumerate() {
        if text.is_empty() || text.len() > PIECE_BYTES_MAX || !score.is_finite() {
            let problem =
                format!("the token {index} has {} bytes, not 1 to {PIECE_BYTES_MAX}, or the score {score}", text.len());
            return Err(vocabulary.malformed(&problem));
        }
        pieces.push(Piece { text: text.clone(), score: *score, kind: vocabulary.kind(index)? });
    }
    let byte_fallback = pieces.iter().any(|piece| piece.kind == PieceKind::Byte);
    let model = ModelProto {
        pieces,
        algorithm: Algorithm::Bpe,
        byte_fallback,
        bos_id: vocabulary.bos_id,
        eos_id: vocabulary.eos_id,
        charsmap: vocabulary.charsmap.clone(),
        add_dummy_prefix: vocabulary.add_space_prefix.unwrap_or(true),
        remove_extra_whitespaces: vocabulary.remove_extra_whitespaces.unwrap_or(false),
        escape_whitespaces: true,
    };
    let mut beside = Beside::default();
    (beside.add_bos, beside.add_eos) = (vocabulary.add_bos, vocabulary.add_eos);
    sentencepiece::build(&vocabulary.path, model, beside)
}

/// Byte-level BPE, split as `tokenizer.ggml.pre` says.
fn byte_level(vocabulary: &GgufVocabulary) -> Result<Converted, TextError> {
    let path = &vocabulary.path;
    let pre = vocabulary.pre.as_deref().and_then(Pre::find).ok_or_else(|| {
        let value = vocabulary.pre.as_ref().map_or_else(|| "absent".to_owned(), |name| format!("{name:?}"));
        vocabulary.unsupported("tokenizer.ggml.pre", &value, format!("supported are {}", Pre::names()))
    })?;
    let (model, tokens) = merged(vocabulary, pre)?;
    let mut inner = Inner::new(model);
    add(path, &mut inner, &tokens)?;
    if pre.composes {
        let normalizer: NormalizerWrapper = part(path, json!({"type": "NFC"}))?;
        inner.with_normalizer(Some(TextNormalizer::Library(normalizer)));
    }
    inner.with_pre_tokenizer(Some(part::<tokenizers::PreTokenizerWrapper>(path, pre.pre_tokenizer())?));
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    inner.with_decoder(Some(part::<tokenizers::DecoderWrapper>(path, bytes)?));
    let named = |id: Option<u32>, wanted: bool| vocabulary.text(id).zip(id).filter(|_| wanted);
    let before = named(vocabulary.bos_id, vocabulary.add_bos.unwrap_or(pre.adds_bos));
    let after = named(vocabulary.eos_id, vocabulary.add_eos == Some(true));
    inner.with_post_processor(around(path, before, after)?);
    Ok(Converted { path: path.clone(), inner, special: Vec::new() })
}

/// The model, and the tokens that are found in a text before it is split.
fn merged(vocabulary: &GgufVocabulary, pre: &Pre) -> Result<(ModelWrapper, Vec<(u32, AddedToken)>), TextError> {
    let (mut ids, mut added) = (Vocab::default(), Vec::new());
    for (index, text) in vocabulary.tokens.iter().enumerate() {
        let (kind, id) = (vocabulary.kind(index)?, u32::try_from(index).unwrap_or(u32::MAX));
        if let Some(other) = ids.insert(text.clone(), id) {
            return Err(vocabulary.malformed(&format!("the ids {other} and {id} have the same token {text:?}")));
        }
        let special = match kind {
            PieceKind::Control | PieceKind::Unknown => true,
            PieceKind::UserDefined => false,
            PieceKind::Normal | PieceKind::Byte | PieceKind::Unused => continue,
        };
        if text.is_empty() {
            return Err(vocabulary.malformed(&format!("the special token {id} is empty")));
        }
        added.push((id, AddedToken::from(text.clone(), special).normalized(false)));
    }
    if let Some(letter) = letters().find(|letter| !ids.contains_key(letter.encode_utf8(&mut [0; 4]))) {
        return Err(vocabulary.malformed(&format!("a byte, spelled {letter:?}, is no token")));
    }
    let mut merges = Merges::new();
    for (index, merge) in vocabulary.merges.iter().enumerate() {
        let pair = merge.split_once(' ').filter(|(_, second)| !second.contains(' '));
        let (first, second) =
            pair.ok_or_else(|| vocabulary.malformed(&format!("the merge {index} is not of two tokens: {merge:?}")))?;
        merges.push((first.to_owned(), second.to_owned()));
    }
    let built = BPE::builder().vocab_and_merges(ids, merges).ignore_merges(pre.ignore_merges).build();
    let built = built.map_err(|error| vocabulary.malformed(&format!("`tokenizer.ggml.merges`: {error}")))?;
    Ok((ModelWrapper::BPE(built), added))
}
