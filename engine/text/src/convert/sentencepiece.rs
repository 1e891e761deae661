//! SentencePiece models: BPE with merges in the order of the pieces' scores, or unigram.
//!
//! Control pieces and the unknown piece are special tokens, found in a text before it is normalised, as in transformers.
//! User-defined pieces are found after it, as in SentencePiece. BPE pieces with equal scores merge in the order in which
//! transformers merges them; SentencePiece takes the leftmost first. Its trainer gives no two BPE pieces the same score. Of two ways
//! to cut a text into unigram pieces with the same score, the sum's rounding decides: the library adds in f64, SentencePiece in
//! f32.

use super::normalize::{Charsmap, DummyPrefix, PieceNormalizer, SPACE, TextNormalizer};
use super::proto::{Algorithm, ModelProto, PIECE_BYTES_MAX, Piece, PieceKind, Refusal};
use super::special::Beside;
use super::{Converted, Inner, add, around, part};
use crate::files::TextError;
use serde_json::json;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::models::unigram::Unigram;
use tokenizers::{AddedToken, DecoderWrapper, ModelWrapper};

/// How far below the rarest piece the library's unigram model scores an unknown character.
const UNKNOWN_PENALTY: f64 = 10.0;
/// Characters of a byte piece such as `<0x41>`.
const BYTE_PIECE_CHARS: f64 = 6.0;

const HINT: &str = "make a tokenizer.json of it with transformers (`save_pretrained`)";

/// Makes a tokenizer of the bytes of a `tokenizer.model`.
pub(super) fn convert(path: &Path, bytes: &[u8], beside: Beside) -> Result<Converted, TextError> {
    let parsed = ModelProto::parse(bytes).map_err(|refusal| match refusal {
        Refusal::Malformed(problem) => Refusal::Malformed(format!(
            "{problem} (neither a SentencePiece model nor tiktoken ranks can be read from it)"
        )),
        unsupported @ Refusal::Unsupported(_) => unsupported,
    });
    build(path, parsed.map_err(|refusal| refusal_error(path, refusal))?, beside)
}

/// Makes a tokenizer of a model; `path` is only for messages.
pub(super) fn build(path: &Path, model: ModelProto, beside: Beside) -> Result<Converted, TextError> {
    let refused = |refusal| refusal_error(path, refusal);
    let vocabulary = Vocabulary::new(model, beside).map_err(refused)?;
    let inner_model = match vocabulary.model.algorithm {
        Algorithm::Bpe => vocabulary.bpe().map_err(refused)?,
        Algorithm::Unigram => vocabulary.unigram().map_err(refused)?,
    };
    let mut inner = Inner::new(inner_model);
    add(path, &mut inner, &vocabulary.tokens())?;
    let normalizer = vocabulary.normalizer().map_err(refused)?;
    // Spaces that decoding removes from the beginning.
    let strips = match (normalizer.remove_extra_whitespaces, normalizer.dummy_prefix) {
        (true, _) => u32::MAX,
        (false, DummyPrefix::Never) => 0,
        (false, _) => 1,
    };
    inner.with_normalizer(Some(TextNormalizer::SentencePiece(normalizer)));
    inner.with_decoder(Some(decoder(path, vocabulary.model.byte_fallback, strips)?));
    let bos = vocabulary.named("bos_token", vocabulary.model.bos_id);
    let eos = vocabulary.named("eos_token", vocabulary.model.eos_id);
    let before = bos.filter(|_| vocabulary.beside.add_bos != Some(false));
    let after = eos.filter(|_| vocabulary.beside.add_eos == Some(true));
    inner.with_post_processor(around(path, before, after)?);
    let named = [("bos_token", bos), ("eos_token", eos)];
    let special = named.into_iter().filter_map(|(name, token)| Some((name, token?.0.to_owned()))).collect();
    Ok(Converted { path: path.to_owned(), inner, special })
}

fn refusal_error(path: &Path, refusal: Refusal) -> TextError {
    match refusal {
        Refusal::Malformed(problem) => TextError::Malformed { path: path.to_owned(), problem },
        Refusal::Unsupported(problem) => {
            TextError::Unsupported { path: path.to_owned(), problem, hint: HINT.to_owned() }
        }
    }
}

fn decoder(path: &Path, byte_fallback: bool, strips: u32) -> Result<DecoderWrapper, TextError> {
    let mut parts = vec![json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "})];
    if byte_fallback {
        parts.push(json!({"type": "ByteFallback"}));
    }
    parts.push(json!({"type": "Fuse"}));
    if strips > 0 {
        parts.push(json!({"type": "Strip", "content": " ", "start": strips, "stop": 0}));
    }
    part(path, json!({"type": "Sequence", "decoders": parts}))
}

/// The pieces, with the names from the files beside the model, and the tokens that those files add.
struct Vocabulary {
    model: ModelProto,
    beside: Beside,
    /// Ids by text: pieces and added tokens.
    ids: HashMap<String, u32>,
    unknown: u32,
}

impl Vocabulary {
    fn new(mut model: ModelProto, beside: Beside) -> Result<Self, Refusal> {
        for (id, token) in &beside.added {
            if let Some(piece) = usize::try_from(*id).ok().and_then(|id| model.pieces.get_mut(id)) {
                rename(piece, *id, token)?;
            }
        }
        let mut ids = HashMap::with_capacity(model.pieces.len() + beside.added.len());
        let pieces = model.pieces.iter().map(|piece| &piece.text);
        let beyond = beside.added.range(len(&model.pieces)..).map(|(id, token)| (*id, &token.content));
        for (id, text) in (0..).zip(pieces).chain(beyond) {
            if let Some(other) = ids.insert(text.clone(), id) {
                return Err(Refusal::Malformed(format!("the ids {other} and {id} have the same token {text:?}")));
            }
        }
        let mut unknown = (0..).zip(&model.pieces).filter(|(_, piece)| piece.kind == PieceKind::Unknown);
        let unknown = match (unknown.next(), unknown.next()) {
            (Some((id, _)), None) => id,
            (None, _) => return Err(Refusal::Malformed("it has no piece of the type UNKNOWN".to_owned())),
            (Some(_), Some(_)) => return Err(Refusal::Malformed("it has two pieces of the type UNKNOWN".to_owned())),
        };
        check_bytes(&model)?;
        Ok(Self { model, beside, ids, unknown })
    }

    fn of(&self, kind: PieceKind) -> impl Iterator<Item = (u32, &Piece)> {
        (0..).zip(&self.model.pieces).filter(move |(_, piece)| piece.kind == kind)
    }

    /// A special token by name with its id; the model names it by id if nothing else does.
    fn named(&self, name: &str, id: Option<u32>) -> Option<(&str, u32)> {
        if let Some(text) = self.beside.name(name) {
            return self.ids.get_key_value(text).map(|(text, id)| (text.as_str(), *id));
        }
        let id = id?;
        let piece = self.model.pieces.get(usize::try_from(id).ok()?)?;
        (piece.kind == PieceKind::Control).then_some((piece.text.as_str(), id))
    }

    /// Added tokens in the library's sense, ascending by id.
    fn tokens(&self) -> Vec<(u32, AddedToken)> {
        let mut tokens: BTreeMap<u32, AddedToken> = BTreeMap::new();
        for (id, piece) in (0..).zip(&self.model.pieces) {
            let token = match piece.kind {
                PieceKind::Normal | PieceKind::Byte | PieceKind::Unused => continue,
                PieceKind::Control | PieceKind::Unknown => AddedToken::from(piece.text.clone(), true).normalized(false),
                PieceKind::UserDefined => AddedToken::from(piece.text.clone(), false).normalized(true),
            };
            tokens.insert(id, token);
        }
        for (id, token) in &self.beside.added {
            let user_defined = tokens.get(id).is_some_and(|token| !token.special) && !token.special;
            tokens.insert(*id, token.clone().normalized(user_defined));
        }
        for (text, token) in &self.beside.special {
            if let Some(id) = self.ids.get(text) {
                let mut token = tokens.get(id).unwrap_or(token).clone().normalized(false);
                token.special = true;
                tokens.insert(*id, token);
            }
        }
        tokens.into_iter().collect()
    }

    fn normalizer(&self) -> Result<PieceNormalizer, Refusal> {
        let model = &self.model;
        let charsmap = match model.charsmap.as_slice() {
            [] => None,
            bytes => Some(Charsmap::parse(bytes).map_err(|problem| format!("`precompiled_charsmap`: {problem}"))?),
        };
        let mut kept = super::normalize::Trie::default();
        for (id, piece) in self.of(PieceKind::UserDefined) {
            kept.insert(&piece.text, id);
        }
        let dummy_prefix = match self.beside.add_prefix_space.unwrap_or(model.add_dummy_prefix) {
            false => DummyPrefix::Never,
            // Models without the `legacy` flag are older than the flag, and use the legacy behaviour.
            true if self.beside.legacy.unwrap_or(true) => DummyPrefix::Always,
            true => DummyPrefix::First,
        };
        let (remove_extra_whitespaces, escape_whitespaces) = (model.remove_extra_whitespaces, model.escape_whitespaces);
        Ok(PieceNormalizer { charsmap, kept, dummy_prefix, remove_extra_whitespaces, escape_whitespaces })
    }

    fn bpe(&self) -> Result<ModelWrapper, Refusal> {
        let mut vocabulary: Vocab = self.ids.iter().map(|(text, id)| (text.clone(), *id)).collect();
        for letter in self.lone_letters()? {
            let byte = format!("<0x{letter:02X}>");
            let id = vocabulary.remove(&byte);
            let id = id.ok_or_else(|| Refusal::Unsupported(format!("the byte {letter} is in pieces, but is none")))?;
            vocabulary.insert(char::from(letter).to_string(), id);
        }
        let unknown = usize::try_from(self.unknown).ok().and_then(|id| self.model.pieces.get(id));
        let unknown = unknown.map(|piece| piece.text.clone()).unwrap_or_default();
        let built = BPE::builder()
            .vocab_and_merges(vocabulary, self.merges())
            .unk_token(unknown)
            .fuse_unk(true)
            .byte_fallback(self.model.byte_fallback)
            .build();
        built.map(ModelWrapper::BPE).map_err(|error| Refusal::Malformed(error.to_string()))
    }

    /// Characters of pieces that are no pieces themselves, so that no merge begins with them: SentencePiece merges texts, the
    /// library tokens. If all are ASCII, the byte's piece can stand for the character (Gemma has no tab).
    fn lone_letters(&self) -> Result<Vec<u8>, Refusal> {
        let mut lone = Vec::new();
        for letter in self.of(PieceKind::Normal).flat_map(|(_, piece)| piece.text.chars()) {
            if self.ids.contains_key(letter.encode_utf8(&mut [0; 4])) {
                continue;
            }
            match u8::try_from(letter) {
                Ok(byte) if byte.is_ascii() && self.model.byte_fallback => lone.push(byte),
                _ => {
                    let problem = format!("the character {letter:?} of its pieces is no piece, which is not supported");
                    return Err(Refusal::Unsupported(problem));
                }
            }
        }
        lone.sort_unstable();
        lone.dedup();
        Ok(lone)
    }

    /// Merges of two pieces to a third, the highest score first. Frozen and reserved pieces are never merged.
    fn merges(&self) -> Merges {
        let normal: HashMap<&str, u32> =
            self.of(PieceKind::Normal).map(|(id, piece)| (piece.text.as_str(), id)).collect();
        let mut pieces: Vec<&Piece> = self.of(PieceKind::Normal).map(|(_, piece)| piece).collect();
        pieces.sort_by(|a, b| b.score.total_cmp(&a.score));
        let is_part = |text: &str| {
            let mut letters = text.chars();
            normal.contains_key(text) || (letters.next().is_some() && letters.next().is_none())
        };
        let mut merges = Merges::new();
        for same in pieces.chunk_by(|a, b| a.score.total_cmp(&b.score).is_eq()) {
            let splits =
                same.iter().flat_map(|piece| piece.text.char_indices().skip(1).map(|(at, _)| piece.text.split_at(at)));
            let mut splits: Vec<(&str, &str)> = splits.filter(|(a, b)| is_part(a) && is_part(b)).collect();
            splits.sort_by_key(|(a, b)| Reverse((a.chars().count(), b.chars().count())));
            merges.extend(splits.into_iter().map(|(a, b)| (a.to_owned(), b.to_owned())));
        }
        merges
    }

    fn unigram(&self) -> Result<ModelWrapper, Refusal> {
        let lowest = self.of(PieceKind::Normal).map(|(_, piece)| f64::from(piece.score)).fold(0.0, f64::min);
        // Less than the characters of its name together, so that a text with that name is not the byte. (It is where one of
        // these characters is unknown to the model: the library scores that below the lowest piece, which is now this one.)
        let byte = BYTE_PIECE_CHARS * (lowest - UNKNOWN_PENALTY);
        let score = |piece: &Piece| if piece.kind == PieceKind::Byte { byte } else { f64::from(piece.score) };
        let mut vocabulary: Vec<(String, f64)> =
            self.model.pieces.iter().map(|piece| (piece.text.clone(), score(piece))).collect();
        for (id, token) in self.beside.added.range(len(&self.model.pieces)..) {
            if usize::try_from(*id) != Ok(vocabulary.len()) {
                let problem = format!("the added token {:?} has the id {id}, which leaves ids out", token.content);
                return Err(Refusal::Unsupported(problem));
            }
            vocabulary.push((token.content.clone(), 0.0));
        }
        let unknown = usize::try_from(self.unknown).ok();
        let built = Unigram::from(vocabulary, unknown, self.model.byte_fallback);
        built.map(ModelWrapper::Unigram).map_err(|error| Refusal::Malformed(error.to_string()))
    }
}

fn len(pieces: &[Piece]) -> u32 {
    u32::try_from(pieces.len()).unwrap_or(u32::MAX)
}

/// Gives a piece the name that `added_tokens_decoder` or `added_tokens.json` has for its id.
fn rename(piece: &mut Piece, id: u32, token: &AddedToken) -> Result<(), Refusal> {
    if piece.text == token.content {
        return Ok(());
    }
    if matches!(piece.kind, PieceKind::Normal | PieceKind::Byte | PieceKind::Unused)
        || token.content.len() > PIECE_BYTES_MAX
    {
        let problem =
            format!("the id {id} is the piece {:?}, but an added token has it: {:?}", piece.text, token.content);
        return Err(Refusal::Unsupported(problem));
    }
    piece.text.clone_from(&token.content);
    Ok(())
}

/// With byte fallback there is a piece for each byte, and without it for none.
fn check_bytes(model: &ModelProto) -> Result<(), Refusal> {
    let mut seen = [false; 256];
    for piece in model.pieces.iter().filter(|piece| piece.kind == PieceKind::Byte) {
        let hex = piece.text.strip_prefix("<0x").and_then(|text| text.strip_suffix('>')).filter(|hex| hex.len() == 2);
        let byte = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).map(usize::from);
        let slot = byte.and_then(|byte| seen.get_mut(byte));
        *slot.ok_or_else(|| format!("the piece {:?} of the type BYTE is no byte", piece.text))? = true;
    }
    let count = seen.iter().filter(|seen| **seen).count();
    match (model.byte_fallback, count) {
        (true, 256) | (false, 0) => Ok(()),
        (true, _) => {
            Err(Refusal::Malformed(format!("`byte_fallback` is set, but only {count} of 256 bytes are pieces")))
        }
        (false, _) => {
            Err(Refusal::Malformed("it has pieces of the type BYTE, but `byte_fallback` is not set".to_owned()))
        }
    }
}
