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

    /// The kind that splits as the library's pre-tokenizer does, by its first name. Where it differs in whether texts are composed or
    /// merges ignored, also what a file cannot express.
    pub(super) fn of(splits: &Value, composes: bool, ignores: bool) -> Option<(&'static str, Option<&'static str>)> {
        let wanted = steps(splits);
        let same = |pre: &&Self| steps(&pre.pre_tokenizer()) == wanted;
        let exact = |pre: &&Self| (pre.composes, pre.ignore_merges) == (composes, ignores);
        let found = PRES.iter().filter(same).find(exact);
        let found = found.map(|pre| (pre, None));
        let near = || PRES.iter().find(same).map(|pre| (pre, Some("it composes characters or skips merges otherwise")));
        found.or_else(near).map(|(pre, problem)| (pre.names[0], problem))
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

/// The steps of a pre-tokenizer in the form of a `tokenizer.json`: each kind with its expression or flag. Flags of offsets change no
/// token.
fn steps(splits: &Value) -> Vec<String> {
    let steps = splits["pretokenizers"].as_array().map_or(std::slice::from_ref(splits), Vec::as_slice);
    let step = |step: &Value| match step["type"].as_str() {
        Some("ByteLevel") => format!("bytes {} {}", step["add_prefix_space"], step["use_regex"]),
        Some("Split") => format!("split {} {} {}", step["pattern"], step["behavior"], step["invert"]),
        Some("Digits") => format!("digits {}", step["individual_digits"]),
        _ => step.to_string(),
    };
    steps.iter().map(step).collect()
}
