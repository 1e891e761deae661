//! The used fields of `tokenizer_config.json`: special tokens, flags and chat templates.

use crate::files::{TextError, read};
use serde_json::Value;
use std::path::Path;

/// The used fields of `tokenizer_config.json`; empty if the file is absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenizerConfig {
    /// Special tokens by the names that templates use (`bos_token`, `eos_token`, `unk_token`, `pad_token`).
    pub special: Vec<(&'static str, String)>,
    pub add_bos_token: Option<bool>,
    /// Chat templates by name; an unnamed one is `default`.
    pub chat_templates: Vec<(String, String)>,
}

/// Names of special tokens, as templates use them.
pub(crate) const SPECIAL: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

impl TokenizerConfig {
    /// Reads `tokenizer_config.json` in `dir`, which may be absent.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer_config.json");
        if path.exists() { Self::parse(&path, &read(&path)?) } else { Ok(Self::default()) }
    }

    /// Parses the bytes of a `tokenizer_config.json`; `path` is only for messages.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self, TextError> {
        let malformed = |problem: String| TextError::Malformed { path: path.to_owned(), problem };
        let value: Value = serde_json::from_slice(json).map_err(|e| malformed(e.to_string()))?;
        let mut special = Vec::new();
        for name in SPECIAL {
            let token = &value[name];
            match token.as_str().or_else(|| token["content"].as_str()) {
                Some(text) => special.push((name, text.to_owned())),
                None if token.is_null() => {}
                None => return Err(malformed(format!("the field `{name}` is {token}; it must be a token"))),
            }
        }
        let chat_templates = match &value["chat_template"] {
            Value::Null => Vec::new(),
            Value::String(text) => vec![("default".to_owned(), text.clone())],
            Value::Array(list) => list
                .iter()
                .map(|item| Some((item["name"].as_str()?.to_owned(), item["template"].as_str()?.to_owned())))
                .collect::<Option<_>>()
                .ok_or_else(|| malformed("`chat_template` is a list of something else than templates".to_owned()))?,
            _ => return Err(malformed("the field `chat_template` is neither a string nor a list".to_owned())),
        };
        Ok(Self { special, add_bos_token: value["add_bos_token"].as_bool(), chat_templates })
    }

    /// The text of a special token by its name, for example `bos_token`.
    #[must_use]
    pub fn special(&self, name: &str) -> Option<&str> {
        self.special.iter().find(|(key, _)| *key == name).map(|(_, text)| text.as_str())
    }
}
