//! How byte-level BPE vocabularies of GGUF files split a text into words: the kinds that `tokenizer.ggml.pre` names.

use super::tiktoken::{CL100K_SPLIT, KIMI_SPLIT, QWEN_SPLIT};
use serde_json::{Value, json};

/// A kind of splitting.
#[derive(Debug)]
pub(crate) struct Pre {
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
    /// Expressions, each applied to what the ones before it made.
    By(&'static [&'static str]),
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

/// DeepSeek-V3's: numbers, Chinese and Japanese, then the rest.
const DEEPSEEK_V3_SPLITS: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];
/// Letters of scripts that have two cases, as DeepSeek's first tokenizer lists them. Numbers where a letter has an equivalent of
/// another number, into which editors turn it.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿ\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}",
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}",
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}",
    r"\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}",
    r"\x{2145}-\x{2149}\x{214E}ↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}Ａ-Ｚａ-ｚ",
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}",
    r"\x{1E900}-\x{1E943}]+"
);
const DEEPSEEK_SPLITS: [&str; 6] =
    [r"[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"];
const DEEPSEEK_CODER_SPLITS: [&str; 5] = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"];
const BLOOM_SPLIT: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";

const fn plain(names: &'static [&'static str], split: Split) -> Pre {
    Pre { names, split, composes: false, ignore_merges: false, adds_bos: false }
}

const PRES: [Pre; 14] = [
    plain(&["gpt-2"], Split::Gpt2),
    // GPT-NeoX's tokenizer, which MPT and OLMo took.
    Pre { composes: true, ..plain(&["olmo", "mpt"], Split::Gpt2) },
    Pre {
        ignore_merges: true,
        adds_bos: true,
        ..plain(&["llama-bpe", "llama3", "llama-v3"], Split::By(&[CL100K_SPLIT]))
    },
    // Llama 3 took cl100k's expression, and so did GLM.
    plain(&["dbrx", "glm4", "chatglm-bpe"], Split::By(&[CL100K_SPLIT])),
    Pre { composes: true, ..plain(&["qwen2"], Split::By(&[QWEN_SPLIT])) },
    plain(&["deepseek-r1-qwen"], Split::By(&[QWEN_SPLIT])),
    plain(&["gpt-4o", "minimax-m2"], Split::By(&[O200K_SPLIT])),
    Pre { ignore_merges: true, adds_bos: true, ..plain(&["tekken"], Split::By(&[TEKKEN_SPLIT])) },
    plain(&["smollm"], Split::DigitsThenGpt2),
    plain(&["deepseek-v3"], Split::By(&DEEPSEEK_V3_SPLITS)),
    plain(&["deepseek-llm"], Split::By(&DEEPSEEK_SPLITS)),
    plain(&["deepseek-coder"], Split::By(&DEEPSEEK_CODER_SPLITS)),
    plain(&["kimi-k2"], Split::By(&[KIMI_SPLIT])),
    plain(&["bloom"], Split::By(&[BLOOM_SPLIT])),
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
    pub(crate) fn of(splits: &Value, composes: bool, ignores: bool) -> Option<(&'static str, Option<&'static str>)> {
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
        let mut steps: Vec<Value> = match self.split {
            Split::Gpt2 => return bytes(true),
            Split::DigitsThenGpt2 => vec![json!({"type": "Digits", "individual_digits": true})],
            Split::By(patterns) => {
                let step = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
                patterns.iter().map(step).collect()
            }
        };
        steps.push(bytes(matches!(self.split, Split::DigitsThenGpt2)));
        json!({"type": "Sequence", "pretokenizers": steps})
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, PreTokenizerWrapper};

    /// The pieces that a kind splits a text into.
    fn pieces(name: &str, text: &str) -> Vec<String> {
        let pre = Pre::find(name).unwrap().pre_tokenizer();
        let pre: PreTokenizerWrapper = serde_json::from_value(pre).unwrap();
        let mut split = PreTokenizedString::from(text);
        pre.pre_tokenize(&mut split).unwrap();
        let splits = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
    }

    /// Numbers, apostrophes, scripts without spaces, signs and line ends, by hand from the expressions.
    #[test]
    fn kinds_split_as_their_expressions_say() {
        let text = "It's 12345 (x+y)\n\n 世界です!";
        for (name, expected) in [
            ("olmo", &["It", "'s", " 12345", " (", "x", "+", "y", ")", "\n\n", " 世界です", "!"][..]),
            ("glm4", &["It", "'s", " ", "123", "45", " (", "x", "+y", ")\n\n", " 世界です", "!"]),
            (
                "deepseek-r1-qwen",
                &["It", "'s", " ", "1", "2", "3", "4", "5", " (", "x", "+y", ")\n\n", " 世界です", "!"],
            ),
            ("minimax-m2", &["It's", " ", "123", "45", " (", "x", "+y", ")\n\n", " 世界です", "!"]),
            ("deepseek-v3", &["It", "'s", " ", "123", "45", " (", "x", "+y", ")\n\n", " ", "世界です", "!"]),
            ("kimi-k2", &["It's", " ", "123", "45", " (", "x", "+y", ")\n\n", " ", "世界", "です", "!"]),
            ("bloom", &["It's", " 12345", " (", "x+y", ")\n\n", " 世界です", "!"]),
        ] {
            assert_eq!(pieces(name, text), expected, "{name}");
        }
        for name in ["deepseek-llm", "deepseek-coder"] {
            let expected = "It|'|s| |1|2|3|4|5| (|x|+|y|)|\n|\n| |世界です|!";
            assert_eq!(pieces(name, text), expected.split('|').collect::<Vec<_>>(), "{name}");
        }
        assert_eq!(pieces("mpt", text), pieces("gpt-2", text));
        assert_eq!(pieces("deepseek-llm", "Ωμέγα жук"), ["Ωμέγα", " жук"]);
    }
}
