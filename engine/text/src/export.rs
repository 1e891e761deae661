//! From a tokenizer to a GGUF file's keys ([`GgufVocabulary::of_dir`]): the inverse of [`crate::convert::gguf`].
//!
//! The vocabulary is taken from the tokenizer as the library has it, so it does not matter which file it came from. What was made is
//! turned into a tokenizer again and compared with the first one on texts with everything in which tokenizers differ: the file must
//! give the same tokens. Where it does not, or no keys express the tokenizer, its tokenizer.json goes into the file as a whole
//! (`tokenizer.huggingface.json` of the GGUF specification), which Lagoon reads and llama.cpp does not.

use crate::chat::ChatTemplate;
use crate::convert::gguf::{BYTE_LEVEL, GgufVocabulary, PIECES};
use crate::convert::{Pre, SPACE, TextNormalizer};
use crate::files::{TextError, read};
use crate::pieces::Scheme;
use crate::tokenizer::Tokenizer;
use crate::tokenizer_config::TokenizerConfig;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// Types of tokens in files.
const NORMAL: u32 = 1;
const UNKNOWN: u32 = 2;
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;
const UNUSED: u32 = 5;
const BYTE: u32 = 6;

/// Added tokens that are compared within texts.
const ADDED_COMPARED: usize = 64;

/// Largest tokenizer.json that a file keeps, in bytes: readers bound strings.
const WHOLE_BYTES_MAX: usize = 64 << 20;

/// Texts on which both tokenizers must agree: cases, contractions, numbers, runs of spaces and lines, scripts, composed and decomposed
/// accents, emoji, control characters, code.
const TEXTS: [&str; 22] = [
    "",
    " ",
    "a",
    "Hello, world! It's 2024, isn't it? I'll say THEY'RE We'Ve done.",
    "  leading, trailing and   inner    spaces  ",
    "tabs\tand\nlines\r\n\r\n\n  indented\n\t\tmore   \n",
    "0 12 345 6789 12345678901 3.14159 1,000,000 0x1F 1e-5 ١٢٣ ⅷ²",
    "fn main() { let x = a[i]->b; // comment\n    return \"s\" + 'c' != 0x00 && !y;\n}",
    "CamelCase snake_case kebab-case SCREAMING_CASE iPhone McDonald's XMLHttpRequest",
    "Größe, naïve, cafe\u{301}, Å, A\u{30a}, ﬁ, ①, ＡＢＣ, ½",
    "Это проверка. Ελληνικά, ένα δύο. עברית וערבית: العربية",
    "中文分词测试，没有空格。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "हिन्दी में एक वाक्य। ภาษาไทยไม่มีช่องว่าง",
    "🙂👍🏽👩‍👩‍👧‍👦 🇩🇪 ☃️ — “quotes” ‘single’ … • © ™",
    "a\u{a0}b\u{2003}c\u{200b}d\u{feff}e\u{0}f\u{7f}g",
    "https://example.com/path?q=1&r=%20#frag user@example.org",
    "...!!!???---___***===/// \\\\ {{}} [[]] (()) <<>> $$ %% ^^ ~~ ``",
    "\n",
    "\n\n\n \n",
    "word\u{2581}word \u{2581}",
    "<s></s> <unk> <0x41> <|endoftext|> [INST] [PAD1]",
    "I'M HE'S you'd x's 'tis 's 'S ''ll",
];

/// A vocabulary for a file, and what a user should know about it.
#[derive(Debug)]
pub struct Exported {
    pub vocabulary: GgufVocabulary,
    /// Why the file has a tokenizer.json as a whole; `None` if its keys say everything.
    pub kept_whole: Option<String>,
    /// Whether the file has the keys that other programs read.
    pub is_portable: bool,
}

impl GgufVocabulary {
    /// The vocabulary and the chat template of the model in `dir`, whose embedding table has `rows` rows.
    ///
    /// # Errors
    /// If the tokenizer cannot be read, or is one that no keys express and that has no tokenizer.json.
    pub fn of_dir(dir: &Path, rows: usize) -> Result<Exported, TextError> {
        let (tokenizer, config) = (Tokenizer::open(dir)?, TokenizerConfig::open(dir)?);
        let path = dir.join("tokenizer.json");
        let chat_template = ChatTemplate::source(dir)?.map(|(_, source)| source);
        let refuse = |problem: String| {
            let hint = "make a tokenizer.json with transformers (`save_pretrained`): it is kept as a whole".to_owned();
            TextError::Unsupported { path: dir.to_owned(), problem, hint }
        };
        let mut tokens = Tokens::of(&tokenizer, rows).map_err(refuse)?;
        let (mut vocabulary, problem) = match expressed(&tokenizer, &mut tokens) {
            Ok((vocabulary, problem)) => (vocabulary, problem),
            Err(problem) => (Self::default(), Some(problem)),
        };
        vocabulary.path = dir.to_owned();
        (vocabulary.tokens, vocabulary.kinds) = (tokens.texts, tokens.kinds);
        (vocabulary.bos_id, vocabulary.eos_id) = (tokenizer.bos_id(), tokenizer.eos_id());
        let named = |name: &str| config.special(name).and_then(|token| tokenizer.id(token));
        (vocabulary.unknown_id, vocabulary.padding_id) =
            (named("unk_token").or(vocabulary.unknown_id), named("pad_token"));
        let is_portable = !vocabulary.model.is_empty();
        let kept_whole = problem.or_else(|| {
            let again = Tokenizer::from_gguf(&vocabulary);
            again.map_or_else(|error| Some(error.to_string()), |again| disagreement(&tokenizer, &again))
        });
        if let Some(problem) = &kept_whole {
            if !path.exists() {
                return Err(refuse(format!("no keys of a GGUF file express its tokenizer: {problem}")));
            }
            let bytes = read(&path)?;
            if bytes.len() > WHOLE_BYTES_MAX {
                let problem =
                    format!("tokenizer.json has {} bytes, more than {WHOLE_BYTES_MAX}: {problem}", bytes.len());
                return Err(refuse(problem));
            }
            let text = String::from_utf8(bytes);
            let text = text.map_err(|error| TextError::Malformed { path, problem: error.to_string() })?;
            vocabulary.tokenizer_json = Some(text);
            // With a whole tokenizer the flag corrects it, as in tokenizer_config.json.
            vocabulary.add_bos = config.add_bos_token;
            vocabulary.add_eos = None;
        }
        vocabulary.chat_template = chat_template;
        Ok(Exported { vocabulary, kept_whole, is_portable })
    }
}

/// All tokens by id.
struct Tokens {
    texts: Vec<String>,
    kinds: Vec<u32>,
    ids: HashMap<String, u32>,
}

impl Tokens {
    /// A token for each of `rows` ids; those that the tokenizer leaves out are unused.
    fn of(tokenizer: &Tokenizer, rows: usize) -> Result<Self, String> {
        let ids = tokenizer.inner().get_vocab(true);
        let (mut texts, mut kinds) = (vec![None; rows], vec![NORMAL; rows]);
        let mut listed: Vec<(&String, &u32)> = ids.iter().collect();
        listed.sort_unstable_by_key(|(_, id)| **id);
        for (text, id) in listed {
            let slot = usize::try_from(*id).ok().and_then(|id| texts.get_mut(id));
            let slot = slot.ok_or_else(|| format!("the token {text:?} has the id {id}, and the table {rows} rows"))?;
            if let Some(other) = slot.replace(text.clone()) {
                return Err(format!("the tokens {other:?} and {text:?} have the id {id}"));
            }
        }
        for (id, token) in tokenizer.inner().get_added_tokens_decoder() {
            if let Some(kind) = usize::try_from(id).ok().and_then(|id| kinds.get_mut(id)) {
                *kind = if token.special { CONTROL } else { USER_DEFINED };
            }
        }
        let named = texts.into_iter().enumerate().map(|(id, text): (usize, Option<String>)| match text {
            Some(text) => text,
            None => {
                kinds[id] = UNUSED;
                format!("[PAD{id}]")
            }
        });
        Ok(Self { texts: named.collect(), kinds, ids })
    }

    fn set(&mut self, id: u32, text: String, kind: u32) {
        let id = usize::try_from(id).unwrap_or(usize::MAX);
        if let (Some(of), Some(slot)) = (self.texts.get_mut(id), self.kinds.get_mut(id)) {
            (*of, *slot) = (text, kind);
        }
    }
}

/// A tokenizer in keys without its tokens, and what they do not say of it. An error if there are no such keys.
fn expressed(tokenizer: &Tokenizer, tokens: &mut Tokens) -> Result<(GgufVocabulary, Option<String>), String> {
    let inner = tokenizer.inner();
    let model = serde_json::to_value(inner.get_model()).map_err(|error| error.to_string())?;
    if model["type"] != "BPE" {
        return Err(format!("its model is {}, and files have BPE only", model["type"]));
    }
    let affixes = ["continuing_subword_prefix", "end_of_word_suffix", "dropout"];
    let is_neutral = |value: &Value| value.is_null() || *value == "";
    if let Some(field) = affixes.into_iter().find(|field| !is_neutral(&model[*field])) {
        return Err(format!("its model has a {field}"));
    }
    let merges = merges(&model)?;
    let around = tokenizer.encode("", true).map_err(|error| error.to_string())?;
    let (bos, eos) = (tokenizer.bos_id(), tokenizer.eos_id());
    let add_bos = bos.is_some() && around.first().copied() == bos;
    let add_eos = eos.is_some() && around.len() > usize::from(add_bos) && around.last().copied() == eos;
    if around.len() != usize::from(add_bos) + usize::from(add_eos) {
        return Err(format!("it puts the tokens {around:?} around a text"));
    }
    let flags = GgufVocabulary { add_bos: Some(add_bos), add_eos: Some(add_eos), ..GgufVocabulary::default() };
    match tokenizer.scheme() {
        Scheme::ByteLevel => byte_level(tokenizer, &model, merges, flags),
        Scheme::Pieces(_) => pieces(tokenizer, &model, &merges, flags, tokens),
    }
}

/// Merges in their order.
fn merges(model: &Value) -> Result<Vec<(String, String)>, String> {
    let merges = model["merges"].as_array().ok_or("its model has no merges")?;
    let pair = |merge: &Value| match merge {
        Value::String(text) => text.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())),
        _ => Some((merge[0].as_str()?.to_owned(), merge[1].as_str()?.to_owned())),
    };
    merges.iter().map(pair).collect::<Option<_>>().ok_or_else(|| "a merge of its model is none".to_owned())
}

/// GPT-2's alphabet: merges as they are, and the kind of splitting by its name.
fn byte_level(
    tokenizer: &Tokenizer,
    model: &Value,
    merges: Vec<(String, String)>,
    flags: GgufVocabulary,
) -> Result<(GgufVocabulary, Option<String>), String> {
    if merges.iter().any(|(a, b)| a.contains(' ') || b.contains(' ')) {
        return Err("a merge has a space in a token".to_owned());
    }
    let splits = serde_json::to_value(tokenizer.inner().get_pre_tokenizer()).map_err(|error| error.to_string())?;
    let composes = match tokenizer.inner().get_normalizer() {
        None => false,
        Some(TextNormalizer::Library(tokenizers::NormalizerWrapper::NFC(_))) => true,
        Some(_) => return Err("its normalizer is not NFC".to_owned()),
    };
    let ignores = model["ignore_merges"] == true;
    let (pre, problem) = Pre::of(&splits, composes, ignores).ok_or("how it splits a text into words has no name")?;
    let merges = merges.into_iter().map(|(a, b)| format!("{a} {b}")).collect();
    let vocabulary = GgufVocabulary { model: BYTE_LEVEL.to_owned(), pre: Some(pre.to_owned()), merges, ..flags };
    Ok((vocabulary, problem.map(str::to_owned)))
}

/// SentencePiece's BPE: scores in the order of merges.
fn pieces(
    tokenizer: &Tokenizer,
    model: &Value,
    merges: &[(String, String)],
    flags: GgufVocabulary,
    tokens: &mut Tokens,
) -> Result<(GgufVocabulary, Option<String>), String> {
    if model["byte_fallback"] != true {
        return Err("its pieces have no bytes to fall back to".to_owned());
    }
    for byte in 0..=u8::MAX {
        let text = format!("<0x{byte:02X}>");
        // Where a character is no piece, its byte's piece stands for it under its name.
        let letter = char::from(byte).to_string();
        let id = tokens.ids.get(&text).or_else(|| tokens.ids.get(&letter)).copied();
        let id = id.ok_or_else(|| format!("{text} is no token"))?;
        tokens.set(id, text, BYTE);
    }
    let unknown = model["unk_token"].as_str().and_then(|text| tokens.ids.get(text)).copied();
    let unknown = unknown.ok_or("it has no unknown token")?;
    let name = tokens.texts.get(usize::try_from(unknown).unwrap_or(usize::MAX)).cloned().unwrap_or_default();
    tokens.set(unknown, name, UNKNOWN);
    let mut order: HashMap<String, usize> = HashMap::new();
    for (a, b) in merges {
        let next = order.len();
        order.entry(format!("{a}{b}")).or_insert(next);
    }
    let last = order.len();
    #[allow(clippy::cast_precision_loss, reason = "numbers of tokens, which are below 2^24")]
    let score = |(id, text): (usize, &String)| match tokens.kinds[id] {
        NORMAL => -(order.get(text).copied().unwrap_or(last + id) as f32),
        _ => 0.0,
    };
    let scores = tokens.texts.iter().enumerate().map(score).collect();
    let first = tokenizer.encode("a", false).map_err(|error| error.to_string())?;
    let first = first.first().and_then(|id| tokenizer.token(*id)).unwrap_or_default();
    let vocabulary = GgufVocabulary {
        model: PIECES.to_owned(),
        pre: Some("default".to_owned()),
        scores,
        unknown_id: Some(unknown),
        add_space_prefix: Some(first.starts_with(SPACE)),
        ..flags
    };
    Ok((vocabulary, None))
}

/// The first text on which two tokenizers differ, in a user's words.
fn disagreement(one: &Tokenizer, other: &Tokenizer) -> Option<String> {
    let mut added: Vec<(u32, String)> =
        one.inner().get_added_tokens_decoder().into_iter().map(|(id, token)| (id, token.content)).collect();
    added.sort_unstable();
    let around = added.iter().take(ADDED_COMPARED).map(|(_, token)| format!("one {token} two{token}\n x {token}"));
    let mut texts = TEXTS.iter().map(|text| (*text).to_owned()).chain(around);
    let differs = |text: &String| {
        let ids = |special| (one.encode(text, special), other.encode(text, special));
        let (plain, with_special) = (ids(false), ids(true));
        let decoded = |ids: &[u32]| one.decode(ids, false) == other.decode(ids, false);
        plain.0 != plain.1 || with_special.0 != with_special.1 || !plain.0.as_ref().is_ok_and(|ids| decoded(ids))
    };
    texts.find(differs).map(|text| format!("they would give other tokens for {text:?}"))
}
