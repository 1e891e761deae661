//! tiktoken's ranks: a line for each token, its bytes in base64 and its rank, which is its id.
//!
//! How a text is split before merging, and the special tokens, are not in the file. Which tokenizer it is, and so which split, is
//! known from its class, from the file's name, or from special tokens that only one tokenizer has.
//!
//! The library's BPE takes merges of two tokens, tiktoken the ranks of the merged bytes. All splits of a token into two tokens
//! become merges of its rank's order; a run of merges reaches at most one of them, so that both give the same tokens.

use super::special::Beside;
use super::{Converted, Inner, add, around, part};
use crate::files::TextError;
use crate::pieces::letters_by_byte;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, ModelWrapper, NormalizerWrapper};

/// Most tokens of a file.
const TOKENS_MAX: usize = 4 << 20;
/// Longest token, in bytes. The longest of known files are runs of 128 spaces or so.
const TOKEN_BYTES_MAX: usize = 512;
/// Largest rank.
const RANK_MAX: u32 = 1 << 24;
/// Tokens that Kimi's tokenizer reserves after the ranks; those without a name are `<|reserved_token_ID|>`.
const KIMI_RESERVED: u32 = 256;
/// Qwen's `<|extra_0|>` and on.
const QWEN_EXTRAS: u32 = 205;
/// Token with which Llama 3's texts begin; Llama 4's, too, which are split in another way.
const LLAMA3_BEGIN: &str = "<|begin_of_text|>";
/// A token of Llama 4 that Llama 3 does not have.
const LLAMA4_HEADER: &str = "<|header_start|>";

/// Classes that say nothing about how texts are split.
const PLAIN_CLASSES: [&str; 7] = [
    "PreTrainedTokenizer",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
];

pub(super) const CL100K_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
pub(super) const QWEN_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
pub(super) const KIMI_SPLIT: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Pattern and special tokens that a family of models adds to the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Qwen,
    Llama3,
    Kimi,
    Cl100k,
}

impl Kind {
    /// The tokenizer by `tokenizer_class`, else by the file's name, else by Llama 3's special tokens.
    fn find(file: &str, beside: &Beside) -> Option<Self> {
        match beside.class.as_deref() {
            Some("QWenTokenizer") => return Some(Self::Qwen),
            Some("TikTokenTokenizer") => return Some(Self::Kimi),
            Some(class) if !PLAIN_CLASSES.contains(&class) => return None,
            _ => {}
        }
        match file {
            "qwen.tiktoken" => Some(Self::Qwen),
            "cl100k_base.tiktoken" => Some(Self::Cl100k),
            _ => (beside.adds(LLAMA3_BEGIN) && !beside.adds(LLAMA4_HEADER)).then_some(Self::Llama3),
        }
    }

    /// The regular expression that splits a text into words, as the tokenizer's own code has it.
    fn split(self) -> &'static str {
        match self {
            Self::Qwen => QWEN_SPLIT,
            // Llama 3 took cl100k's.
            Self::Llama3 | Self::Cl100k => CL100K_SPLIT,
            Self::Kimi => KIMI_SPLIT,
        }
    }

    /// Special tokens from the id `first` on that the tokenizer's own code has; those of Llama 3 are in `tokenizer_config.json`.
    fn special(self, first: u32) -> Vec<(u32, String)> {
        let numbered = |from: u32, texts: &[&str]| (from..).zip(texts.iter().map(|text| (*text).to_owned())).collect();
        match self {
            Self::Qwen => {
                let mut tokens: Vec<_> = numbered(first, &["<|endoftext|>", "<|im_start|>", "<|im_end|>"]);
                tokens.extend((0..QWEN_EXTRAS).map(|extra| (first + 3 + extra, format!("<|extra_{extra}|>"))));
                tokens
            }
            Self::Llama3 => Vec::new(),
            Self::Kimi => (first..first + KIMI_RESERVED).map(|id| (id, format!("<|reserved_token_{id}|>"))).collect(),
            Self::Cl100k => {
                let texts = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"];
                let mut tokens: Vec<_> = numbered(first + 1, &texts);
                tokens.push((first + 20, "<|endofprompt|>".to_owned()));
                tokens
            }
        }
    }
}

/// Whether the first line of a file is a token and its rank.
pub(super) fn is_ranks(bytes: &[u8]) -> bool {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    line.len() <= 2 * TOKEN_BYTES_MAX && parse_line(line).is_ok_and(|parsed| parsed.is_some())
}

/// Makes a tokenizer of the bytes of a file of ranks.
pub(super) fn convert(path: &Path, bytes: &[u8], beside: &Beside) -> Result<Converted, TextError> {
    let malformed = |problem| TextError::Malformed { path: path.to_owned(), problem };
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let kind = Kind::find(file, beside).ok_or_else(|| unknown(path, beside))?;
    let ranks = Ranks::parse(bytes).map_err(malformed)?;
    let special = special_tokens(kind, &ranks, beside).map_err(malformed)?;
    let mut inner = Inner::new(ranks.bpe(&special).map_err(malformed)?);
    let tokens: Vec<(u32, AddedToken)> = special.into_iter().collect();
    add(path, &mut inner, &tokens)?;
    if kind == Kind::Qwen {
        let normalizer: NormalizerWrapper = part(path, json!({"type": "NFC"}))?;
        inner.with_normalizer(Some(super::TextNormalizer::Library(normalizer)));
    }
    let split = json!({"type": "Split", "pattern": {"Regex": kind.split()}, "behavior": "Isolated", "invert": false});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let both = json!({"type": "Sequence", "pretokenizers": [split, &bytes]});
    inner.with_pre_tokenizer(Some(part::<tokenizers::PreTokenizerWrapper>(path, both)?));
    inner.with_decoder(Some(part::<tokenizers::DecoderWrapper>(path, bytes)?));
    let bos = (beside.add_bos.unwrap_or(kind == Kind::Llama3), "bos_token", LLAMA3_BEGIN);
    let eos = (beside.add_eos == Some(true), "eos_token", "");
    let [bos, eos] = [bos, eos].map(|(wanted, name, text)| {
        let text = beside.name(name).unwrap_or(text);
        Some((text, inner.token_to_id(text)?)).filter(|_| wanted)
    });
    inner.with_post_processor(around(path, bos, eos)?);
    let names = ["bos_token", "eos_token"].map(|name| Some((name, beside.name(name)?.to_owned())));
    let mut names: Vec<_> = names.into_iter().flatten().collect();
    if kind == Kind::Llama3 && beside.name("bos_token").is_none() {
        names.push(("bos_token", LLAMA3_BEGIN.to_owned()));
    }
    Ok(Converted { path: path.to_owned(), inner, special: names })
}

fn unknown(path: &Path, beside: &Beside) -> TextError {
    let class = match &beside.class {
        Some(class) => format!("`tokenizer_class` is {class:?}"),
        None => "there is no `tokenizer_class`".to_owned(),
    };
    TextError::Unsupported {
        path: path.to_owned(),
        problem: format!(
            "how its tiktoken tokenizer splits a text is unknown: {class}, and its tokens are not Llama 3's"
        ),
        hint:
            "known are Qwen 1, Kimi-K2 and Moonlight, cl100k_base, and Llama 3 with the `added_tokens_decoder` of its \
               tokenizer_config.json; for others, make a tokenizer.json with transformers (`save_pretrained`)"
                .to_owned(),
    }
}

/// Special tokens by id: the tokenizer's, under the names that the files beside the ranks give them, and those that they add.
fn special_tokens(kind: Kind, ranks: &Ranks, beside: &Beside) -> Result<BTreeMap<u32, AddedToken>, String> {
    let first = ranks.next;
    let known = kind.special(first).into_iter();
    let mut tokens: BTreeMap<u32, AddedToken> =
        known.map(|(id, text)| (id, AddedToken::from(text, true).normalized(false))).collect();
    for (id, token) in &beside.added {
        if *id < first && !ranks.by_rank.contains_key(id) {
            return Err(format!("the added token {:?} has the id {id}, which is no rank", token.content));
        }
        if *id >= first {
            tokens.insert(*id, token.clone());
        }
    }
    for (text, named) in &beside.special {
        if let Some(token) = tokens.values_mut().find(|token| token.content == *text) {
            *token = AddedToken { special: true, ..named.clone() };
        }
    }
    Ok(tokens)
}

/// Tokens and their ranks.
struct Ranks {
    by_rank: BTreeMap<u32, Vec<u8>>,
    by_token: HashMap<Vec<u8>, u32>,
    /// The first id after the ranks.
    next: u32,
}

impl Ranks {
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut ranks = Self { by_rank: BTreeMap::new(), by_token: HashMap::new(), next: 0 };
        for (line, text) in (1_usize..).zip(bytes.split(|byte| *byte == b'\n')) {
            let Some((token, rank)) = parse_line(text).map_err(|problem| format!("the line {line} {problem}"))? else {
                continue;
            };
            if ranks.by_rank.len() == TOKENS_MAX {
                return Err(format!("it has more than {TOKENS_MAX} tokens"));
            }
            if ranks.by_token.insert(token.clone(), rank).is_some() {
                return Err(format!("the line {line} has a token for the second time"));
            }
            if ranks.by_rank.insert(rank, token).is_some() {
                return Err(format!("the line {line} has the rank {rank} for the second time"));
            }
            ranks.next = ranks.next.max(rank + 1);
        }
        match (0..=u8::MAX).find(|byte| !ranks.by_token.contains_key([*byte].as_slice())) {
            Some(byte) => Err(format!("the byte {byte:#04x} is no token")),
            None => Ok(ranks),
        }
    }

    /// The model, with the special tokens in its vocabulary, so that they keep their ids.
    fn bpe(&self, special: &BTreeMap<u32, AddedToken>) -> Result<ModelWrapper, String> {
        let letters = letters_by_byte();
        let spell = |bytes: &[u8]| bytes.iter().map(|byte| letters[usize::from(*byte)]).collect::<String>();
        let mut vocabulary: Vocab = self.by_rank.iter().map(|(rank, token)| (spell(token), *rank)).collect();
        for (id, token) in special {
            if let Some(other) = vocabulary.insert(token.content.clone(), *id) {
                return Err(format!("the ids {other} and {id} have the same token {:?}", token.content));
            }
        }
        let mut merges = Merges::new();
        for token in self.by_rank.values() {
            let splits = (1..token.len()).map(|at| token.split_at(at));
            let known = splits.filter(|(a, b)| self.by_token.contains_key(*a) && self.by_token.contains_key(*b));
            merges.extend(known.map(|(a, b)| (spell(a), spell(b))));
        }
        // A word that is a token is that token, whether or not merges reach it.
        let built = BPE::builder().vocab_and_merges(vocabulary, merges).ignore_merges(true).build();
        built.map(ModelWrapper::BPE).map_err(|error| error.to_string())
    }
}

/// The token and the rank of a line; `None` for an empty one.
fn parse_line(line: &[u8]) -> Result<Option<(Vec<u8>, u32)>, String> {
    let line = line.trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    let wrong = || "is not a token in base64 and a rank".to_owned();
    let at = line.iter().position(|byte| *byte == b' ').ok_or_else(wrong)?;
    let token = decode_base64(&line[..at]).ok_or_else(wrong)?;
    let rank = std::str::from_utf8(&line[at + 1..]).ok().and_then(|rank| rank.parse::<u32>().ok()).ok_or_else(wrong)?;
    if token.is_empty() || token.len() > TOKEN_BYTES_MAX {
        return Err(format!("has a token of {} bytes, not of 1 to {TOKEN_BYTES_MAX}", token.len()));
    }
    if rank > RANK_MAX {
        return Err(format!("has the rank {rank}, which is more than {RANK_MAX}"));
    }
    Ok(Some((token, rank)))
}

/// Standard base64 with padding.
fn decode_base64(text: &[u8]) -> Option<Vec<u8>> {
    let (quads, rest) = text.as_chunks::<4>();
    if !rest.is_empty() {
        return None;
    }
    let mut bytes = Vec::with_capacity(3 * quads.len());
    for (index, quad) in quads.iter().enumerate() {
        let padding = quad.iter().rev().take_while(|c| **c == b'=').count();
        if padding > 2 || (padding > 0 && index + 1 < quads.len()) {
            return None;
        }
        let mut value = 0;
        for c in &quad[..4 - padding] {
            value = value << 6 | sextet(*c)?;
        }
        let [_, a, b, c] = (value << (6 * padding)).to_be_bytes();
        bytes.extend_from_slice(&[a, b, c][..3 - padding]);
    }
    Some(bytes)
}

fn sextet(c: u8) -> Option<u32> {
    let value = match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(u32::from(value))
}
