//! Vocabularies that are made for GGUF files give the tokens of the tokenizers that they come from.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_text::{GgufVocabulary, Tokenizer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every text of a golden gives the same tokens and texts by both tokenizers.
fn compare(dir: &Path, exported: &GgufVocabulary) {
    let (own, again) = (Tokenizer::open(dir).unwrap(), Tokenizer::from_gguf(exported).unwrap());
    let golden: Value = serde_json::from_slice(&std::fs::read(dir.join("text.json")).unwrap()).unwrap();
    let cases = golden["texts"].as_array().unwrap();
    assert!(cases.len() >= 10, "{}", dir.display());
    for text in cases.iter().map(|case| case["text"].as_str().unwrap()) {
        for special in [false, true] {
            let ids = own.encode(text, special).unwrap();
            assert_eq!(again.encode(text, special).unwrap(), ids, "{}: {text:?}", dir.display());
            assert_eq!(again.decode(&ids, true), own.decode(&ids, true), "{}: {text:?}", dir.display());
        }
    }
    assert_eq!((again.bos_id(), again.eos_id()), (own.bos_id(), own.eos_id()));
}

#[test]
fn keys_express_published_kinds() {
    let kinds = [
        ("tests/goldens/tied_sentencepiece", "llama", Some("default")),
        ("tests/goldens/tokenizers/llama2", "llama", Some("default")),
        ("tests/goldens/tokenizers/gemma", "llama", Some("default")),
        ("tests/goldens/tokenizers/llama3", "gpt2", Some("llama-bpe")),
    ];
    for (name, model, pre) in kinds {
        let dir = root().join(name);
        let rows = Tokenizer::open(&dir).unwrap().vocab_size() + 64;
        let exported = GgufVocabulary::of_dir(&dir, rows).unwrap();
        assert_eq!(exported.kept_whole, None, "{name}");
        assert!(exported.is_portable && exported.vocabulary.tokenizer_json.is_none());
        let vocabulary = exported.vocabulary;
        assert_eq!((vocabulary.model.as_str(), vocabulary.pre.as_deref()), (model, pre), "{name}");
        // Rows of the table that no token has are unused tokens.
        assert_eq!((vocabulary.tokens.len(), vocabulary.kinds.len()), (rows, rows));
        assert_eq!(
            (vocabulary.tokens[rows - 1].as_str(), vocabulary.kinds[rows - 1]),
            (&*format!("[PAD{}]", rows - 1), 5)
        );
        compare(&dir, &vocabulary);
    }
}

/// A tokenizer.json that keys express only nearly, or not at all, is in the file as a whole.
#[test]
fn other_tokenizers_are_kept_whole() {
    let dir = root().join("models/passkey");
    let own = Tokenizer::open(&dir).unwrap();
    let exported = GgufVocabulary::of_dir(&dir, 1024).unwrap();
    // It splits as Qwen2 does, and does not compose characters.
    assert_eq!((exported.kept_whole, exported.is_portable), (None, true));
    assert_eq!(exported.vocabulary.pre.as_deref(), Some("deepseek-r1-qwen"));
    let again = Tokenizer::from_gguf(&exported.vocabulary).unwrap();
    for text in ["cafe\u{301} 2024", "the key is 12345", "<|bos|> a<|eos|>"] {
        assert_eq!(again.encode(text, true).unwrap(), own.encode(text, true).unwrap(), "{text:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let model = json!({"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"});
    let text = json!({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}).to_string();
    std::fs::write(dir.path().join("tokenizer.json"), &text).unwrap();
    let exported = GgufVocabulary::of_dir(dir.path(), 4).unwrap();
    assert!(!exported.is_portable && exported.kept_whole.unwrap().contains("WordLevel"));
    assert_eq!(exported.vocabulary.tokens, ["a", "b", "?", "[PAD3]"]);
    let again = Tokenizer::from_gguf(&exported.vocabulary).unwrap();
    assert_eq!(again.encode("b a c", false).unwrap(), [1, 0, 2]);
    let short = GgufVocabulary::of_dir(dir.path(), 2).unwrap_err().to_string();
    assert!(short.contains("\"?\"") && short.contains("the table 2 rows"), "{short}");
}

/// Without a tokenizer.json there is nothing to keep.
#[test]
fn what_no_keys_express_is_refused_by_its_reason() {
    let dir = root().join("tests/goldens/tokenizers/unigram_bytes");
    let rows = Tokenizer::open(&dir).unwrap().vocab_size();
    let error = GgufVocabulary::of_dir(&dir, rows).unwrap_err().to_string();
    assert!(error.contains("Unigram") && error.contains("hint: make a tokenizer.json"), "{error}");
}
