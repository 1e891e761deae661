//! Tokenizers of models without a `tokenizer.json`, against what sentencepiece and tiktoken wrote
//! (tests/goldens/tokenizers/*/text.json), and the handling of bad files.
#![allow(clippy::unwrap_used, reason = "tests")]

use lagoon_text::{TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/tokenizers")
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

/// Differences from the golden in `dir`, as texts.
fn differences(dir: &Path) -> Vec<String> {
    let tokenizer = Tokenizer::open(dir).unwrap();
    let golden: Value = serde_json::from_slice(&std::fs::read(dir.join("text.json")).unwrap()).unwrap();
    let mut found = Vec::new();
    let texts = golden["texts"].as_array().unwrap();
    assert!(texts.len() >= 30);
    for case in texts {
        let text = case["text"].as_str().unwrap();
        for (field, special) in [("ids", false), ("ids_with_special", true)] {
            let (encoded, expected) = (tokenizer.encode(text, special).unwrap(), ids(&case[field]));
            if encoded != expected {
                let shown = |ids: &[u32]| ids.iter().map(|id| tokenizer.token(*id)).collect::<Option<Vec<_>>>();
                found.push(format!("{field} of {text:?}: {:?} instead of {:?}", shown(&encoded), shown(&expected)));
            }
            let decoded = tokenizer.decode(&expected, true);
            if decoded != case["decoded"] {
                found.push(format!("{field} of {text:?} decoded: {decoded:?} instead of {}", case["decoded"]));
            }
        }
        assert!(tokenizer.tokens_min(text.len()) <= tokenizer.encode(text, false).unwrap().len(), "{text:?}");
    }
    found
}

#[test]
fn texts_are_tokenised_and_restored_as_by_the_libraries() {
    let mut found = Vec::new();
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(goldens()).unwrap().map(|entry| entry.unwrap().path()).collect();
    dirs.sort();
    assert_eq!(dirs.len(), 9);
    for dir in dirs {
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        found.extend(differences(&dir).into_iter().map(|difference| format!("{name}: {difference}")));
    }
    assert!(found.is_empty(), "{} differences:\n{}", found.len(), found.join("\n"));
}

/// A directory with the files of a golden.
fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(goldens().join(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// A directory with these files.
fn dir(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn error(files: &[(&str, &[u8])]) -> TextError {
    Tokenizer::open(dir(files).path()).unwrap_err()
}

#[test]
fn special_tokens_are_those_of_all_files() {
    let open = |name: &str| Tokenizer::open(&goldens().join(name)).unwrap();
    let llama = open("llama2");
    assert_eq!((llama.bos_id(), llama.eos_id()), (Some(1), Some(2)));
    assert_eq!(llama.special_ids(), [0, 1, 2, 520, 540]);
    assert_eq!((llama.token(540).as_deref(), llama.token(530)), (Some("<|end|>"), None));
    assert_eq!(open("llama2_first").special_ids(), [0, 1, 2, 520, 521]);
    let gemma = open("gemma");
    let [turn, newline] = ["<start_of_turn>", "\n"].map(|token| gemma.id(token).unwrap());
    assert!(gemma.is_special(turn) && !gemma.is_special(newline));
    let kimi = open("kimi");
    assert_eq!(kimi.special_ids().len(), 256);
    assert_eq!(kimi.encode("a", true).unwrap(), kimi.encode("a", false).unwrap());
    // A model without any file beside it has the names of its own pieces.
    let bare = copy("gemma");
    std::fs::remove_file(bare.path().join("tokenizer_config.json")).unwrap();
    let bare = Tokenizer::open(bare.path()).unwrap();
    assert_eq!((bare.bos_id(), bare.eos_id()), (gemma.bos_id(), gemma.eos_id()));
    assert_eq!(bare.encode("a", true).unwrap(), gemma.encode("a", true).unwrap());
    let model = std::fs::read(goldens().join("llama2/tokenizer.model")).unwrap();
    let config = br#"{"pad_token": "", "unk_token": null, "add_bos_token": false, "add_prefix_space": false}"#;
    let plain = Tokenizer::open(dir(&[("tokenizer.model", &model), ("tokenizer_config.json", config)]).path()).unwrap();
    assert_eq!(plain.encode("\u{2581}the", true).unwrap(), [llama.id("\u{2581}the").unwrap()]);
    assert_eq!(plain.encode("the", true).unwrap(), llama.encode("\u{0}the", false).unwrap()[2..]);
}

#[test]
fn added_tokens_rename_placeholders_only() {
    let model = std::fs::read(goldens().join("gemma/tokenizer.model")).unwrap();
    let open = |id: u32, text: &str| {
        let token = json!({"content": text, "special": true});
        let config = json!({"added_tokens_decoder": {id.to_string(): token}}).to_string();
        Tokenizer::open(dir(&[("tokenizer.model", &model), ("tokenizer_config.json", config.as_bytes())]).path())
    };
    let bold = Tokenizer::open(&goldens().join("gemma")).unwrap().id("<b>").unwrap();
    let renamed = open(bold, "<tool>").unwrap();
    assert_eq!(renamed.encode("<tool>", false).unwrap(), [bold]);
    assert!(renamed.id("<b>").is_none() && renamed.is_special(bold));
    let normal = open(500, "<tool>").unwrap_err().to_string();
    assert!(normal.contains("the id 500 is the piece") && normal.contains("\nhint: "), "{normal}");
    let twice = open(9000, "<b>").unwrap_err().to_string();
    assert!(twice.contains("have the same token \"<b>\""), "{twice}");
}

#[test]
fn tokenizer_json_is_preferred() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let json = std::fs::read(root.join("models/passkey/tokenizer.json")).unwrap();
    let model = std::fs::read(goldens().join("llama2/tokenizer.model")).unwrap();
    let both = dir(&[("tokenizer.json", &json), ("tokenizer.model", &model)]);
    assert_eq!(Tokenizer::open(both.path()).unwrap().vocab_size(), 1024);
    std::fs::remove_file(both.path().join("tokenizer.json")).unwrap();
    assert_eq!(Tokenizer::open(both.path()).unwrap().vocab_size(), 520);
}

#[test]
fn missing_and_foreign_files_are_named() {
    let none = error(&[("config.json", b"{}")]);
    assert!(matches!(none, TextError::NoTokenizer { .. }));
    let none = none.to_string();
    for name in ["tokenizer.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "\nhint: "] {
        assert!(none.contains(name), "{none}");
    }
    let refused = |name: &str, bytes: &[u8], parts: &[&str]| {
        let error = error(&[(name, bytes)]).to_string();
        assert!(error.contains(name) && parts.iter().all(|part| error.contains(part)), "{error}");
    };
    refused("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\noid", &["Git LFS", "git lfs pull"]);
    refused("tokenizer.model", b"", &["has no `pieces`"]);
    refused("tokenizer.model", b"hello world", &["neither a SentencePiece model nor tiktoken ranks"]);
    refused("tokenizer.model", b"IQ== 0\n", &["there is no `tokenizer_class`", "known are Qwen 1"]);
    refused("qwen.tiktoken", b"IQ== 0\n", &["the byte 0x00 is no token"]);
    refused("qwen.tiktoken", b"IQ== 0\nIQ= 1\n", &["the line 2 is not a token in base64"]);
    refused("qwen.tiktoken", b"IQ== 0\nIQ== 1\n", &["the line 2 has a token for the second time"]);
    refused("qwen.tiktoken", b"IQ== 0\nIg== 0\n", &["the line 2 has the rank 0 for the second time"]);
    refused("qwen.tiktoken", b"IQ== 4294967295\n", &["the line 1 has the rank 4294967295"]);
    refused("o200k_base.tiktoken", b"IQ== 0\n", &["splits a text is unknown"]);
    let two = error(&[("a.tiktoken", b""), ("b.tiktoken", b"")]).to_string();
    assert!(two.contains("a.tiktoken") && two.contains("b.tiktoken"), "{two}");
    let class = json!({"tokenizer_class": "ChatGLM4Tokenizer"}).to_string();
    let class = error(&[("tokenizer.model", b"IQ== 0\n"), ("tokenizer_config.json", class.as_bytes())]).to_string();
    assert!(class.contains("`tokenizer_class` is \"ChatGLM4Tokenizer\""), "{class}");
    let llama = copy("llama3");
    std::fs::remove_file(llama.path().join("tokenizer_config.json")).unwrap();
    let llama = Tokenizer::open(llama.path()).unwrap_err().to_string();
    assert!(llama.contains("not Llama 3's") && llama.contains("added_tokens_decoder"), "{llama}");
    // Llama 4 splits in another way.
    let ranks = std::fs::read(goldens().join("llama3/tokenizer.model")).unwrap();
    let tokens = json!({"added_tokens_decoder": {"585": "<|begin_of_text|>", "590": "<|header_start|>"}}).to_string();
    let llama4 = error(&[("tokenizer.model", &ranks), ("tokenizer_config.json", tokens.as_bytes())]).to_string();
    assert!(llama4.contains("not Llama 3's"), "{llama4}");
}

#[test]
fn files_beside_a_model_are_checked() {
    let model = std::fs::read(goldens().join("llama2/tokenizer.model")).unwrap();
    let refused = |name: &str, json: &str, part: &str| {
        let error = error(&[("tokenizer.model", &model), (name, json.as_bytes())]).to_string();
        assert!(error.contains(name) && error.contains(part), "{error}");
    };
    refused("tokenizer_config.json", r#"{"legacy": 3}"#, "`legacy` is 3");
    refused("tokenizer_config.json", r#"{"added_tokens_decoder": []}"#, "`added_tokens_decoder` is not an object");
    refused("tokenizer_config.json", r#"{"added_tokens_decoder": {"x": "a"}}"#, "has the id \"x\"");
    refused("tokenizer_config.json", r#"{"added_tokens_decoder": {"600": ""}}"#, "has no token of 1 to");
    refused("special_tokens_map.json", r#"{"additional_special_tokens": 1}"#, "is not a list");
    refused("special_tokens_map.json", "{", "is not valid");
    refused("added_tokens.json", r#"{"a": -1}"#, "`a` is not an id");
    refused("added_tokens.json", r#"{"a": 4294967295}"#, "`a` is not an id");
    refused("added_tokens.json", "[]", "is not an object");
}

/// A protobuf field with a length.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut length = bytes.len();
    let mut out = vec![number << 3 | 2];
    while length > 0x7f {
        out.push(u8::try_from(length & 0x7f).unwrap() | 0x80);
        length >>= 7;
    }
    out.push(u8::try_from(length).unwrap());
    out.extend_from_slice(bytes);
    out
}

/// A piece with a score and a type.
fn piece(text: &[u8], score: f32, kind: u8) -> Vec<u8> {
    let parts = [field(1, text), [&[2 << 3 | 5], score.to_le_bytes().as_slice()].concat(), vec![3 << 3, kind]];
    field(1, &parts.concat())
}

#[test]
fn malformed_and_unsupported_models_are_refused() {
    let start = piece(b"<unk>", 0.0, 2);
    let refused = |parts: &[Vec<u8>], part: &str| {
        let error = error(&[("tokenizer.model", &[start.clone(), parts.concat()].concat())]).to_string();
        assert!(error.contains("tokenizer.model") && error.contains(part), "{error}");
    };
    let trainer = |number: u8, value: u8| {
        let tag = usize::from(number) << 3;
        field(2, &[u8::try_from(tag & 0x7f).unwrap() | 0x80, u8::try_from(tag >> 7).unwrap(), value])
    };
    let long = "x".repeat(513);
    refused(&[piece(b"", 0.0, 1)], "the piece 1 is empty");
    refused(&[piece(b"\xff", 0.0, 1)], "the piece 1 is not UTF-8");
    refused(&[piece(long.as_bytes(), 0.0, 1)], "the piece 1 has 513 bytes");
    refused(&[piece(b"a", f32::NAN, 1)], "the piece 1 has the score NaN");
    refused(&[piece(b"a", 0.0, 5)], "the type UNUSED");
    refused(&[piece(b"a", 0.0, 9)], "the unknown type 9");
    refused(&[piece(b"a", 0.0, 1), piece(b"a", -1.0, 1)], "the ids 1 and 2 have the same token");
    refused(&[piece(b"b", 0.0, 2)], "two pieces of the type UNKNOWN");
    refused(&[piece(b"<0x41>", 0.0, 6)], "`byte_fallback` is not set");
    refused(&[piece(b"<0x4>", 0.0, 6)], "is no byte");
    refused(&[trainer(35, 1)], "only 0 of 256 bytes");
    refused(&[trainer(3, 3)], "3 (WORD)");
    refused(&[trainer(3, 4)], "4 (CHAR)");
    refused(&[trainer(3, 9)], "`model_type` 9");
    refused(&[trainer(24, 1)], "treat_whitespace_as_suffix");
    refused(&[trainer(3, 2), piece("é!".as_bytes(), 0.0, 1), piece(b"!", 0.0, 1)], "'é' of its pieces is no piece");
    refused(&[field(5, &field(2, b"x"))], "denormalizer_spec");
    refused(&[vec![7 << 3 | 3]], "wire type 3");
    refused(&[vec![7 << 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]], "more than 10 bytes");
    let error = error(&[("tokenizer.model", &piece(b"a", 0.0, 1))]).to_string();
    assert!(error.contains("no piece of the type UNKNOWN"), "{error}");
    // Character maps: too short, with odd lengths, a value outside of the trie, a cycle.
    let map = |units: &[u32], texts: &[u8]| {
        let size = u32::try_from(4 * units.len()).unwrap().to_le_bytes();
        let units: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        field(3, &field(2, &[&size, units.as_slice(), texts].concat()))
    };
    refused(&[field(3, &field(2, b"abc"))], "trie's length does not fit");
    refused(&[field(3, &field(2, &[5, 0, 0, 0, 1, 1, 1, 1, 1]))], "trie's length does not fit");
    refused(&[map(&[0; 8], b"\xff")], "not UTF-8");
    let mut leaf = vec![0_u32; 0x80];
    leaf[0x41] = 0x41 | 1 << 8 | 0x100 << 10;
    refused(&[map(&leaf, b"a\0")], "a value outside of it");
    leaf[0x41] = 0x41 | 1 << 8 | 0x40 << 10;
    leaf[1] = 5;
    refused(&[map(&leaf, b"a\0")], "replacement at 5 is not there");
    leaf[1] = 0;
    refused(&[map(&leaf, b"a")], "has no end within");
    leaf[0x41] = 0x41 | 0x41 << 10;
    refused(&[map(&leaf, b"a\0")], "a cycle");
}

/// Files that load, with the names under which they do.
static VALID: LazyLock<Vec<(&str, &str, Vec<u8>)>> = LazyLock::new(|| {
    let files = [
        ("llama2", "tokenizer.model"),
        ("gemma", "tokenizer.model"),
        ("bpe_rules", "tokenizer.model"),
        ("unigram_rules", "tokenizer.model"),
        ("unigram_bytes", "tokenizer.model"),
        ("qwen", "qwen.tiktoken"),
    ];
    files.map(|(golden, name)| (golden, name, std::fs::read(goldens().join(golden).join(name)).unwrap())).into()
});

/// Opens and uses a tokenizer; what matters is that nothing panics.
fn open_and_use(name: &str, bytes: &[u8]) -> Result<(), TextError> {
    let tokenizer = Tokenizer::open(dir(&[(name, bytes)]).path())?;
    for text in ["", "  the boats\n\n lie ﬁne ①\u{301} e\u{301} 船 <s>\0<b> ", "aababbab", "\u{ad}\u{3000}"] {
        let ids = tokenizer.encode(text, true).unwrap();
        let _ = tokenizer.decode(&ids, false);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), ranks: bool) {
        let name = if ranks { "qwen.tiktoken" } else { "tokenizer.model" };
        let _ = open_and_use(name, &bytes);
    }

    #[test]
    fn a_valid_file_with_other_bytes_never_panics(
        which in 0..6_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (_, name, bytes) = &VALID[which];
        let mut bytes = bytes.clone();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = open_and_use(name, &bytes);
    }

    /// What is cut between two fields may be a smaller model, and what is cut between two lines lacks bytes or tokens.
    #[test]
    fn a_truncated_file_is_an_error_or_a_smaller_tokenizer(which in 0..6_usize, at: prop::sample::Index) {
        let (golden, name, bytes) = &VALID[which];
        let kept = at.index(bytes.len());
        let whole = Tokenizer::open(&goldens().join(golden)).unwrap().vocab_size();
        match Tokenizer::open(dir(&[(name, &bytes[..kept])]).path()) {
            Ok(tokenizer) => prop_assert!(tokenizer.vocab_size() <= whole),
            Err(error) => prop_assert!(error.to_string().contains(name), "{}", error),
        }
    }
}

#[test]
fn a_model_that_is_cut_within_a_field_is_an_error() {
    let (_, name, bytes) = &VALID[0];
    for kept in [1, 5, 17, bytes.len() - 1] {
        let error = error(&[(name, &bytes[..kept])]).to_string();
        assert!(error.contains("ends within a field"), "{kept}: {error}");
    }
}
