//! Tokenizers and templates against what transformers wrote (tests/goldens/*/text.json), and streaming against both.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_text::{ChatError, ChatMessage, ChatTemplate, IncrementalDetokenizer, Tokenizer};
use proptest::prelude::*;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::UNIX_EPOCH;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A byte-level tokenizer and a SentencePiece one with byte fallback: where they lie and where their goldens do.
fn models() -> [(PathBuf, PathBuf); 2] {
    let goldens = root().join("tests/goldens");
    let sentencepiece = goldens.join("tied_sentencepiece");
    [(root().join("models/passkey"), goldens.join("passkey")), (sentencepiece.clone(), sentencepiece)]
}

fn golden(dir: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join("text.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> String {
    let mut detokenizer = IncrementalDetokenizer::new(tokenizer.clone(), skip_special);
    let mut text = String::new();
    ids.iter().for_each(|id| detokenizer.push(*id, &mut text));
    detokenizer.finish(&mut text);
    text
}

#[test]
fn texts_are_tokenised_and_restored_as_by_transformers() {
    for (model, goldens) in models() {
        let tokenizer = Arc::new(Tokenizer::open(&model).unwrap());
        let golden = golden(&goldens);
        let texts = golden["texts"].as_array().unwrap();
        assert!(texts.len() >= 10);
        for case in texts {
            let text = case["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&case["ids"]), "{text:?}");
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids(&case["ids_with_special"]), "{text:?}");
            let decoded = case["decoded"].as_str().unwrap();
            assert_eq!(tokenizer.decode(&ids(&case["ids"]), true), decoded, "{text:?}");
            assert_eq!(tokenizer.decode(&ids(&case["ids_with_special"]), true), decoded, "{text:?}");
            assert_eq!(streamed(&tokenizer, &ids(&case["ids_with_special"]), true), decoded, "{text:?}");
        }
    }
}

#[test]
fn chats_are_rendered_as_by_transformers() {
    for (model, goldens) in models() {
        let template = ChatTemplate::open(&model).unwrap().unwrap();
        let golden = golden(&goldens);
        let chats = golden["chats"].as_array().unwrap();
        assert!(chats.len() >= 4);
        for chat in chats {
            let messages: Vec<ChatMessage> = serde_json::from_value(chat["messages"].clone()).unwrap();
            let prompt = chat["add_generation_prompt"].as_bool().unwrap();
            let rendered = template.render(&messages, prompt, UNIX_EPOCH).unwrap();
            assert_eq!(rendered, chat["rendered"].as_str().unwrap());
        }
    }
}

/// A template in gpt-oss's harmony format: macros, a namespace, the date, fields that are not there, refusals.
#[test]
fn a_harmony_template_is_rendered_as_by_transformers() {
    let dir = root().join("tests/goldens/harmony");
    let template = ChatTemplate::open(&dir).unwrap().unwrap();
    let golden = golden(&dir);
    let (mut rendered, mut refused) = (0, 0);
    for chat in golden["chats"].as_array().unwrap() {
        let messages: Vec<ChatMessage> = serde_json::from_value(chat["messages"].clone()).unwrap();
        match template.render(&messages, chat["add_generation_prompt"].as_bool().unwrap(), UNIX_EPOCH) {
            Ok(text) => {
                assert_eq!(text, chat["rendered"]);
                rendered += 1;
            }
            Err(ChatError::Refused(reason)) => {
                assert_eq!(reason, chat["refused"]);
                refused += 1;
            }
            Err(error) => panic!("{error}: {chat}"),
        }
    }
    assert_eq!((rendered, refused), (6, 4));
}

static LOADED: LazyLock<[(Arc<Tokenizer>, tokenizers::Tokenizer); 2]> = LazyLock::new(|| {
    models().map(|(model, _)| {
        let reference = tokenizers::Tokenizer::from_file(model.join("tokenizer.json")).unwrap();
        (Arc::new(Tokenizer::open(&model).unwrap()), reference)
    })
});

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    /// Any tokens at all: incomplete and invalid characters, special tokens, ids that do not exist.
    #[test]
    fn streaming_any_tokens_equals_decoding_them(
        which in 0..2usize,
        parts in prop::collection::vec(prop_oneof![0..1100u32, 3..259u32], 0..40),
        skip_special: bool,
    ) {
        let (tokenizer, reference) = &LOADED[which];
        let text = tokenizer.decode(&parts, skip_special);
        prop_assert_eq!(&streamed(tokenizer, &parts, skip_special), &text);
        // The library writes one U+FFFD for each byte of a byte-fallback run that is invalid anywhere; all else is the
        // same.
        let expected = reference.decode(&parts, skip_special).unwrap();
        if which == 0 || !expected.contains(char::REPLACEMENT_CHARACTER) {
            prop_assert_eq!(text, expected);
        }
    }

    /// Text that people write survives encoding and streaming.
    #[test]
    fn any_text_is_restored(which in 0..2usize, text in "\\PC{0,40}") {
        let (tokenizer, reference) = &LOADED[which];
        let ids = tokenizer.encode(&text, true).unwrap();
        let expected = reference.decode(&ids, true).unwrap();
        prop_assert_eq!(streamed(tokenizer, &ids, true), expected.clone());
        if which == 0 && !text.contains("<|") {
            prop_assert_eq!(expected, text);
        }
    }
}

#[test]
fn nothing_is_held_back_longer_than_a_character() {
    let (tokenizer, _) = &LOADED[1];
    let mut detokenizer = IncrementalDetokenizer::new(tokenizer.clone(), true);
    let byte = |b: u8| tokenizer.id(&format!("<0x{b:02X}>")).unwrap();
    let mut text = String::new();
    let bytes = "é日🚀".bytes();
    let seen: Vec<String> = bytes
        .map(|b| {
            detokenizer.push(byte(b), &mut text);
            text.clone()
        })
        .collect();
    assert_eq!(seen, ["", "é", "é", "é", "é日", "é日", "é日", "é日", "é日🚀"]);
    detokenizer.push(byte(0xe6), &mut text);
    assert_eq!(text, "é日🚀");
    detokenizer.finish(&mut text);
    assert_eq!(text, "é日🚀\u{fffd}");
}
