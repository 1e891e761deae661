//! A tokenizer for golden models, whose vocabularies of 128 tokens or more have no texts: printable ASCII, some pieces of JSON,
//! and one token at the end.

use lagoon_grammar::Grammars;
use lagoon_text::{Tokenizer, TokenizerConfig};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::{Arc, LazyLock};

/// The token at the end of answers.
pub const END: u32 = 127;

/// Texts of the tokens behind the 95 printable characters.
const PIECES: [&str; 12] = ["{\"", "\":", "\",\"", "\"}", "true", "false", "null", "[]", "12", "the", " a", "ing"];

/// The tokenizer; tokens without a text are beyond it.
///
/// # Panics
/// If it is refused.
pub static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let printable = (0x20u8..0x7f).map(|byte| char::from(byte).to_string());
    let texts = printable.chain(PIECES.map(str::to_owned));
    // Byte-level BPE writes a space as Ġ.
    let vocab: Map<String, Value> = texts.zip(0u32..).map(|(text, id)| (text.replace(' ', "Ġ"), json!(id))).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let end = json!({"id": END, "content": "<end>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": [end],
        "pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    let config = TokenizerConfig { special: vec![("eos_token", "<end>".to_owned())], ..TokenizerConfig::default() };
    Arc::new(Tokenizer::parse(Path::new("ascii"), file.to_string().as_bytes(), &config).expect("a valid tokenizer"))
});

/// The grammars of a golden model with `vocab` tokens.
#[must_use]
pub fn grammars(vocab: usize) -> Grammars {
    Grammars::new(Arc::clone(&TOKENIZER), vocab as u32, &[END])
}
