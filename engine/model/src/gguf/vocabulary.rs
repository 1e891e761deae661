//! A GGUF file's keys about text, as lagoon-text takes them, and the tokens that end an answer.

use super::{Item, Keys, Metadata, Value};
use crate::ModelError;
use lagoon_text::GgufVocabulary;

/// Prefix of keys about the vocabulary.
const KEYS: &str = "tokenizer.ggml.";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
/// A whole tokenizer.json, which is read in place of the other keys where a file has it.
const TOKENIZER_JSON: &str = "tokenizer.huggingface.json";
/// Types of tokens that are matched in a text before it is split, and are candidates for ending an answer: control and user-defined.
const MARKERS: [u64; 2] = [3, 4];
/// Texts of markers that end an answer although no key names them.
const ENDS: [&str; 9] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
];
/// In a vocabulary with this marker, [`END_OF_MESSAGE`] ends a message and not an answer (gpt-oss).
const END_OF_ANSWER: &str = "<|return|>";
const END_OF_MESSAGE: &str = "<|end|>";

fn key(name: &str) -> String {
    format!("{KEYS}{name}")
}

/// An id, `None` if the key is absent.
fn id(metadata: &Metadata, name: &str) -> Result<Option<u32>, ModelError> {
    let key = key(name);
    let Some(value) = metadata.unsigned(&key)? else { return Ok(None) };
    // The number of no token, in files that have one.
    if value == u64::from(u32::MAX) {
        return Ok(None);
    }
    u32::try_from(value).map(Some).map_err(|_large| metadata.invalid(&key, "it is no token id"))
}

fn text(value: Value) -> Option<String> {
    match value {
        Value::Text(text) => Some(text),
        _ => None,
    }
}

/// The vocabulary and the chat template of a file.
///
/// # Errors
/// If a key is missing or of the wrong type, naming it.
pub fn vocabulary(metadata: &Metadata) -> Result<GgufVocabulary, ModelError> {
    let tokenizer_json = metadata.text(TOKENIZER_JSON)?.map(str::to_owned);
    let model = match metadata.text(&key("model"))? {
        None if tokenizer_json.is_some() => "",
        model => model.ok_or_else(|| metadata.missing(&key("model")))?,
    };
    let strings = |name: &str| metadata.list_of(&key(name), "strings", text);
    let small = |value: Value| value.unsigned().and_then(|value| u32::try_from(value).ok());
    #[allow(clippy::cast_possible_truncation, reason = "files have scores in f32; those in f64 are rounded to it")]
    let scores = metadata.list_of(&key("scores"), "numbers", |value| match value {
        Value::Float(score) => Some(score as f32),
        _ => None,
    })?;
    let charsmap = metadata.list_of(&key("precompiled_charsmap"), "bytes", |value| match value {
        Value::Unsigned(byte) => u8::try_from(byte).ok(),
        Value::Signed(byte) => i8::try_from(byte).ok().map(i8::cast_unsigned),
        _ => None,
    })?;
    Ok(GgufVocabulary {
        path: metadata.path().to_owned(),
        model: model.to_owned(),
        pre: metadata.text(&key("pre"))?.map(str::to_owned),
        tokens: strings("tokens")?,
        scores,
        kinds: metadata.list_of(&key("token_type"), "types of tokens", small)?,
        merges: strings("merges")?,
        bos_id: id(metadata, "bos_token_id")?,
        eos_id: id(metadata, "eos_token_id")?,
        unknown_id: id(metadata, "unknown_token_id")?,
        padding_id: id(metadata, "padding_token_id")?,
        add_bos: metadata.flag(&key("add_bos_token"))?,
        add_eos: metadata.flag(&key("add_eos_token"))?,
        add_space_prefix: metadata.flag(&key("add_space_prefix"))?,
        remove_extra_whitespaces: metadata.flag(&key("remove_extra_whitespaces"))?,
        charsmap,
        chat_template: metadata.text(CHAT_TEMPLATE)?.map(str::to_owned),
        tokenizer_json,
    })
}

/// Sets the keys of a vocabulary, and of the tokens that end an answer: `ends`, the first of which is the end of a text. Returns
/// those that no key and no marker names.
pub fn set_vocabulary(vocabulary: &GgufVocabulary, ends: &[u32], keys: &mut Keys) -> Vec<u32> {
    let mut set = |name: &str, item: Option<Item>| {
        if let Some(item) = item {
            keys.set(key(name), item);
        }
    };
    let GgufVocabulary { model, pre, tokens, scores, kinds, merges, charsmap, .. } = vocabulary;
    let text = |text: &String| Item::Text(text.clone());
    set("model", Some(model).filter(|model| !model.is_empty()).map(text));
    set("pre", pre.as_ref().map(text));
    set("tokens", Some(Item::Texts(tokens.clone())));
    set("scores", Some(scores).filter(|scores| !scores.is_empty()).map(|scores| Item::F32s(scores.clone())));
    set("token_type", Some(Item::U32s(kinds.clone())));
    set("merges", Some(merges).filter(|merges| !merges.is_empty()).map(|merges| Item::Texts(merges.clone())));
    let marker = |id: &u32| {
        let at = usize::try_from(*id).unwrap_or(usize::MAX);
        let kind = kinds.get(at).is_some_and(|kind| MARKERS.contains(&u64::from(*kind)));
        kind && tokens.get(at).is_some_and(|text| ENDS.contains(&text.as_str()))
    };
    let mut others = ends.iter().copied().skip(1).filter(|id| !marker(id));
    let ids = [
        ("bos_token_id", vocabulary.bos_id),
        ("eos_token_id", ends.first().copied().or(vocabulary.eos_id)),
        ("eot_token_id", others.next()),
        ("eom_token_id", others.next()),
        ("unknown_token_id", vocabulary.unknown_id),
        ("padding_token_id", vocabulary.padding_id),
    ];
    ids.into_iter().for_each(|(name, id)| set(name, id.map(Item::U32)));
    let flags = [
        ("add_bos_token", vocabulary.add_bos),
        ("add_eos_token", vocabulary.add_eos),
        ("add_space_prefix", vocabulary.add_space_prefix),
        ("remove_extra_whitespaces", vocabulary.remove_extra_whitespaces),
    ];
    flags.into_iter().for_each(|(name, flag)| set(name, flag.map(Item::Bool)));
    set("precompiled_charsmap", Some(charsmap).filter(|map| !map.is_empty()).map(|map| Item::Bytes(map.clone())));
    for (key, value) in [(CHAT_TEMPLATE, &vocabulary.chat_template), (TOKENIZER_JSON, &vocabulary.tokenizer_json)] {
        if let Some(value) = value {
            keys.set(key, text(value));
        }
    }
    others.collect()
}

/// Ids of the first token of a text and of those that end an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndTokens {
    pub bos_id: Option<u32>,
    /// Those of keys, and markers whose texts end an answer; ascending.
    pub end_ids: Vec<u32>,
}

impl EndTokens {
    /// Reads them.
    ///
    /// # Errors
    /// As [`vocabulary`].
    pub fn read(metadata: &Metadata) -> Result<Self, ModelError> {
        let mut end_ids = Vec::new();
        for name in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            end_ids.extend(id(metadata, name)?);
        }
        let kinds = metadata.list_of(&key("token_type"), "types of tokens", |value| value.unsigned())?;
        let tokens = metadata.list_of(&key("tokens"), "strings", text)?;
        let markers = (0..).zip(tokens.iter().zip(&kinds)).filter(|(_, (_, kind))| MARKERS.contains(kind));
        let markers: Vec<(u32, &str)> = markers.map(|(id, (text, _))| (id, text.as_str())).collect();
        let has_answers = markers.iter().any(|(_, text)| *text == END_OF_ANSWER);
        let ends = markers.iter().filter(|(_, text)| ENDS.contains(text) && !(has_answers && *text == END_OF_MESSAGE));
        end_ids.extend(ends.map(|(id, _)| *id));
        if has_answers {
            // Files name it as the end of a turn.
            let message = markers.iter().find(|(_, text)| *text == END_OF_MESSAGE).map(|(id, _)| *id);
            end_ids.retain(|id| Some(*id) != message);
        }
        end_ids.sort_unstable();
        end_ids.dedup();
        Ok(Self { bos_id: id(metadata, "bos_token_id")?, end_ids })
    }
}
