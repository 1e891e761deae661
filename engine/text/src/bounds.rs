//! How few tokens a text can have, from its length alone.
//!
//! A token stands for at most as many bytes of a text as the longest entry of the vocabulary has, if nothing of the text is dropped
//! on the way to tokens and its normaliser does not shorten it. Where that is not certain of a tokenizer, texts have any length in
//! theory; those of more than [`UNCERTAIN_SHORTENS`] times as many bytes are refused all the same, before they are tokenised.

use crate::convert::{Inner, TextNormalizer};
use crate::pieces::{Scheme, letters};
use serde_json::Value;
use tokenizers::ModelWrapper;

/// How much shorter composition (NFC) makes UTF-8 at most: 3.5 times, U+1FBE U+0308 U+0301 (7 bytes) to U+0390 (2 bytes).
const NFC_SHORTENS: usize = 4;

/// What a text may be longer than its tokens where normalisation is not known. Compatibility composition (NFKC) shortens UTF-8 at most
/// four times (letters of mathematics); as much again is for white space, accents and marks that a normaliser drops.
const UNCERTAIN_SHORTENS: usize = 16;
/// Bytes of a text for a token there at least: whole words may be one token, known or not.
const UNCERTAIN_BYTES_MIN: usize = 1 << 10;

/// Bytes of a text for each token of the context, above which it is not tokenised: what a token stands for, or is assumed to.
pub(crate) fn text_bytes_a_token(certain: Option<usize>, inner: &Inner, scheme: &Scheme) -> usize {
    certain.unwrap_or_else(|| longest(inner, scheme).saturating_mul(UNCERTAIN_SHORTENS).max(UNCERTAIN_BYTES_MIN))
}

/// Bytes of the longest entry of the vocabulary.
fn longest(inner: &Inner, scheme: &Scheme) -> usize {
    let added = inner.get_added_tokens_decoder();
    let length = |token: &String| match scheme {
        Scheme::ByteLevel if inner.token_to_id(token).is_none_or(|id| !added.contains_key(&id)) => {
            token.chars().count()
        }
        _ => token.len(),
    };
    inner.get_vocab(true).keys().map(length).max().unwrap_or(0)
}

/// Bytes of a text that one token stands for at most; `None` where texts of any length may have few tokens.
pub(crate) fn token_bytes_max(inner: &Inner, scheme: &Scheme) -> Option<usize> {
    let shortens = match inner.get_normalizer() {
        None => 1,
        Some(TextNormalizer::Library(normalizer)) => shortens(&serde_json::to_value(normalizer).ok()?)?,
        Some(TextNormalizer::SentencePiece(normalizer)) => normalizer.keeps_all().then_some(1)?,
    };
    let kept = keeps(&serde_json::to_value(inner.get_pre_tokenizer()).ok()?);
    let added = inner.get_added_tokens_decoder();
    // These take all white space beside them along.
    let greedy = added.values().any(|token| token.lstrip || token.rstrip);
    if !kept || greedy || !knows_all_bytes(inner, scheme) {
        return None;
    }
    longest(inner, scheme).checked_mul(shortens).filter(|bytes| *bytes > 0)
}

/// Whether there is a token for every byte, so that no part of a text is unknown.
fn knows_all_bytes(inner: &Inner, scheme: &Scheme) -> bool {
    let ModelWrapper::BPE(model) = inner.get_model() else { return false };
    match scheme {
        Scheme::ByteLevel => letters().all(|letter| inner.token_to_id(&letter.to_string()).is_some()),
        Scheme::Pieces(_) => {
            model.byte_fallback && (0..=u8::MAX).all(|byte| inner.token_to_id(&format!("<0x{byte:02X}>")).is_some())
        }
    }
}

/// How much shorter a normaliser makes a text at most; `None` if it may drop any part of it, or is not known.
fn shortens(normalizer: &Value) -> Option<usize> {
    match normalizer["type"].as_str() {
        None if normalizer.is_null() => Some(1),
        Some("Prepend" | "ByteLevel") => Some(1),
        Some("NFC") => Some(NFC_SHORTENS),
        Some("Replace") => {
            let (from, to) = (normalizer["pattern"]["String"].as_str()?, normalizer["content"].as_str()?);
            (to.len() >= from.len()).then_some(1)
        }
        Some("Sequence") => {
            let parts = normalizer["normalizers"].as_array()?;
            parts.iter().try_fold(1, |factor, part| Some(factor * shortens(part)?))
        }
        _ => None,
    }
}

/// Whether a pre-tokenizer only cuts a text and drops nothing of it, as far as is known.
fn keeps(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None => pre_tokenizer.is_null(),
        Some("ByteLevel" | "Metaspace" | "Digits") => true,
        Some("Split" | "Punctuation") => pre_tokenizer["behavior"].as_str().is_some_and(|what| what != "Removed"),
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().is_some_and(|parts| parts.iter().all(keeps)),
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The text that NFC shortens most is within the bound.
    #[test]
    fn composition_shortens_no_more_than_is_assumed() {
        let mut text = tokenizers::NormalizedString::from("\u{1fbe}\u{308}\u{301}");
        let before = text.get().len();
        text.nfc();
        assert_eq!((before, text.get()), (7, "\u{390}"));
        assert!(before <= NFC_SHORTENS * text.get().len());
    }

    #[test]
    fn what_drops_or_shortens_a_text_bounds_nothing() {
        let replace = |from, to| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let llama =
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]});
        for (normalizer, factor) in [
            (Value::Null, Some(1)),
            (json!({"type": "NFC"}), Some(4)),
            (llama, Some(1)),
            (replace("ab", "c"), None),
            (json!({"type": "Strip", "strip_left": true, "strip_right": true}), None),
            (json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}), None),
        ] {
            assert_eq!(shortens(&normalizer), factor, "{normalizer}");
        }
        let split =
            |behavior| json!({"type": "Split", "pattern": {"Regex": "a"}, "behavior": behavior, "invert": false});
        let both = |behavior| json!({"type": "Sequence", "pretokenizers": [split(behavior), {"type": "ByteLevel"}]});
        for (pre_tokenizer, keeps_all) in [
            (Value::Null, true),
            (both("Isolated"), true),
            (both("Removed"), false),
            (json!({"type": "Whitespace"}), false),
        ] {
            assert_eq!(keeps(&pre_tokenizer), keeps_all, "{pre_tokenizer}");
        }
    }
}
