//! How byte-level BPE vocabularies of GGUF files split a text into words: the kinds that `tokenizer.ggml.pre` names.

use super::tiktoken::{CL100K_SPLIT, QWEN_SPLIT};
use serde_json::{Value, json};

/// A kind of splitting.
#[derive(Debug)]
pub(super) struct Pre {
    /// Names in files.
    names: &'static [&'static str],
    split: Split,
    /// Whether texts are composed (NFC) first.
    pub(super) composes: bool,
    /// Whether a word that is a token is that token, whether or not merges reach it.
    pub(super) ignore_merges: bool,
    /// Whether a text begins with the beginning-of-sequence token where the file does not say.
    pub(super) adds_bos: bool,
}

#[derive(Debug)]
enum Split {
    /// GPT-2's expression, which the library has.
    Gpt2,
    /// Every digit apart, then GPT-2's expression.
    DigitsThenGpt2,
    By(&'static str),
}

const O200K_SPLIT: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN_SPLIT: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const fn plain(names: &'static [&'static str], split: Split) -> Pre {
    Pre { names, split, composes: false, ignore_merges: false, adds_bos: false }
}

const PRES: [Pre; 7] = [
    plain(&["gpt-2"], Split::Gpt2),
    Pre { ignore_merges: true, adds_bos: true, ..plain(&["llama-bpe", "llama3", "llama-v3"], Split::By(CL100K_SPLIT)) },
    // Llama 3 took cl100k's expression.
    plain(&["dbrx"], Split::By(CL100K_SPLIT)),
    Pre { composes: true, ..plain(&["qwen2"], Split::By(QWEN_SPLIT)) },
    plain(&["gpt-4o"], Split::By(O200K_SPLIT)),
    Pre { ignore_merges: true, adds_bos: true, ..plain(&["tekken"], Split::By(TEKKEN_SPLIT)) },
    plain(&["smollm"], Split::DigitsThenGpt2),
];

impl Pre {
    /// The kind of a name.
    pub(super) fn find(name: &str) -> Option<&'static Self> {
        PRES.iter().find(|pre| pre.names.contains(&name))
    }

    /// All names, for messages.
    pub(super) fn names() -> String {
        let names: Vec<String> = PRES.iter().flat_map(|pre| pre.names).map(|name| format!("{name:?}")).collect();
        names.join(", ")
    }

    /// The library's pre-tokenizer as a `tokenizer.json` has it.
    pub(super) fn pre_tokenizer(&self) -> Value {
        let bytes = |use_regex| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex});
        let first = match self.split {
            Split::Gpt2 => return bytes(true),
            Split::DigitsThenGpt2 => json!({"type": "Digits", "individual_digits": true}),
            Split::By(pattern) => {
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
            }
        };
        let second = bytes(matches!(self.split, Split::DigitsThenGpt2));
        json!({"type": "Sequence", "pretokenizers": [first, second]})
    }
}
