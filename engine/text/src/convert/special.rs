//! Files beside a vocabulary: added and special tokens, and flags of the tokenizer.
//!
//! Read are `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`; each may be absent. Of two files that name a token, the first in this order decides.

use crate::files::{TextError, read};
use crate::tokenizer_config::SPECIAL;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokenizers::AddedToken;

/// Largest id of an added token.
const ID_MAX: u64 = 1 << 24;
/// Longest added token, in bytes.
const TOKEN_BYTES_MAX: usize = 4096;

/// The used fields of the files beside a vocabulary.
#[derive(Clone, Debug, Default)]
pub(super) struct Beside {
    /// Added tokens by id.
    pub(super) added: BTreeMap<u32, AddedToken>,
    /// Tokens that are named as special, in the vocabulary or not.
    pub(super) special: BTreeMap<String, AddedToken>,
    /// Texts of the tokens that templates name.
    names: BTreeMap<&'static str, String>,
    pub(super) class: Option<String>,
    /// Whether a space is put before each part of a text, not only the first (`legacy`).
    pub(super) legacy: Option<bool>,
    pub(super) add_prefix_space: Option<bool>,
    pub(super) add_bos: Option<bool>,
    pub(super) add_eos: Option<bool>,
}

impl Beside {
    /// Reads the files in `dir`.
    ///
    /// # Errors
    /// If a file that is there is not valid, naming it and the field.
    pub(super) fn read(dir: &Path) -> Result<Self, TextError> {
        let mut beside = Self::default();
        if let Some(file) = File::open(dir, "tokenizer_config.json")? {
            beside.class = file.value["tokenizer_class"].as_str().map(str::to_owned);
            beside.legacy = file.flag("legacy")?;
            beside.add_prefix_space = file.flag("add_prefix_space")?;
            beside.add_bos = file.flag("add_bos_token")?;
            beside.add_eos = file.flag("add_eos_token")?;
            beside.decoder(&file)?;
            beside.named(&file)?;
        }
        if let Some(file) = File::open(dir, "special_tokens_map.json")? {
            beside.named(&file)?;
        }
        if let Some(file) = File::open(dir, "added_tokens.json")? {
            beside.listed(&file)?;
        }
        Ok(beside)
    }

    /// The token of a name such as `bos_token`.
    pub(super) fn name(&self, name: &str) -> Option<&str> {
        self.names.get(name).map(String::as_str)
    }

    /// Whether a token with this text is added after the vocabulary.
    pub(super) fn adds(&self, text: &str) -> bool {
        self.added.values().any(|token| token.content == text)
    }

    /// Reads `added_tokens_decoder`: tokens by id.
    fn decoder(&mut self, file: &File) -> Result<(), TextError> {
        let field = "added_tokens_decoder";
        for (id, token) in file.object(field)? {
            let number = id.parse().ok().and_then(valid_id);
            let id = number.ok_or_else(|| file.malformed(field, &format!("has the id {id:?}")))?;
            let token = file.token(field, token)?;
            self.added.insert(id, token);
        }
        Ok(())
    }

    /// Reads special tokens: those with names, and lists without.
    fn named(&mut self, file: &File) -> Result<(), TextError> {
        for name in SPECIAL {
            // An empty name is that of no token.
            if !file.value[name].is_null() && file.value[name] != "" {
                let token = file.token(name, &file.value[name])?;
                self.names.entry(name).or_insert_with(|| token.content.clone());
                self.special.entry(token.content.clone()).or_insert(token);
            }
        }
        for name in ["additional_special_tokens", "extra_special_tokens"] {
            let tokens: Vec<&Value> = match &file.value[name] {
                Value::Null => Vec::new(),
                Value::Array(list) => list.iter().collect(),
                Value::Object(map) => map.values().collect(),
                _ => return Err(file.malformed(name, "is not a list of tokens")),
            };
            for token in tokens {
                let token = file.token(name, token)?;
                self.special.entry(token.content.clone()).or_insert(token);
            }
        }
        Ok(())
    }

    /// Reads `added_tokens.json`: ids by token.
    fn listed(&mut self, file: &File) -> Result<(), TextError> {
        let tokens = file.value.as_object().ok_or_else(|| file.malformed("", "is not an object"))?;
        for (text, id) in tokens {
            let id = id.as_u64().and_then(valid_id).ok_or_else(|| file.malformed(text, "is not an id"))?;
            let token = self.special.get(text).cloned().unwrap_or_else(|| AddedToken::from(text.clone(), false));
            self.added.entry(id).or_insert(token.normalized(false));
        }
        Ok(())
    }
}

fn valid_id(id: u64) -> Option<u32> {
    u32::try_from(id).ok().filter(|id| u64::from(*id) <= ID_MAX)
}

/// A parsed JSON file.
struct File {
    path: PathBuf,
    value: Value,
}

impl File {
    fn open(dir: &Path, name: &str) -> Result<Option<Self>, TextError> {
        let path = dir.join(name);
        if !path.exists() {
            return Ok(None);
        }
        match serde_json::from_slice(&read(&path)?) {
            Ok(value) => Ok(Some(Self { path, value })),
            Err(error) => Err(TextError::Malformed { path, problem: error.to_string() }),
        }
    }

    fn malformed(&self, field: &str, problem: &str) -> TextError {
        let problem = if field.is_empty() { problem.to_owned() } else { format!("the field `{field}` {problem}") };
        TextError::Malformed { path: self.path.clone(), problem }
    }

    fn flag(&self, field: &str) -> Result<Option<bool>, TextError> {
        match &self.value[field] {
            Value::Null => Ok(None),
            Value::Bool(flag) => Ok(Some(*flag)),
            other => Err(self.malformed(field, &format!("is {other}; it must be true or false"))),
        }
    }

    fn object(&self, field: &str) -> Result<impl Iterator<Item = (&String, &Value)>, TextError> {
        match &self.value[field] {
            Value::Null => Ok(None.into_iter().flatten()),
            Value::Object(map) => Ok(Some(map).into_iter().flatten()),
            _ => Err(self.malformed(field, "is not an object")),
        }
    }

    /// A token as its text, or as an object with `content` and flags. Names of special tokens are special.
    fn token(&self, field: &str, value: &Value) -> Result<AddedToken, TextError> {
        let content = value.as_str().or_else(|| value["content"].as_str());
        let valid = content.filter(|text| !text.is_empty() && text.len() <= TOKEN_BYTES_MAX);
        let content = valid.ok_or_else(|| {
            self.malformed(field, &format!("has no token of 1 to {TOKEN_BYTES_MAX} bytes, but {value}"))
        })?;
        let flag = |name: &str, default| value[name].as_bool().unwrap_or(default);
        let special = flag("special", field != "added_tokens_decoder");
        Ok(AddedToken::from(content.to_owned(), special)
            .normalized(false)
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .single_word(flag("single_word", false)))
    }
}
