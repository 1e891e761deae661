//! How a model's hidden states become an embedding, as sentence-transformers stores it: `modules.json`, and the `config.json` of the
//! pooling module. GGUF files say it in `pooling_type`.

use crate::ModelError;
use crate::fields::{Fields, read_bounded};
use crate::gguf::{Gguf, is_gguf};
use lagoon_types::Pooling;
use serde_json::Value;
use std::path::Path;

/// The list of a model's modules.
pub(crate) const MODULES: &str = "modules.json";
/// The pooling module's configuration, where sentence-transformers writes it.
pub(crate) const POOLING: &str = "1_Pooling/config.json";

const HINT: &str = "/v1/embeddings pools the first token (cls), the last one (lasttoken) or all of them (mean)";

/// How hidden states become an embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingConfig {
    pub pooling: Pooling,
    /// Whether the embedding is divided by its length.
    pub normalised: bool,
}

impl Default for EmbeddingConfig {
    fn default() -> Self {
        Self { pooling: Pooling::default(), normalised: true }
    }
}

impl EmbeddingConfig {
    /// That of the model in `path`, a directory or a GGUF file; the default if it has none.
    ///
    /// # Errors
    /// If a file is malformed, or asks for what Lagoon does not implement.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        if is_gguf(path) {
            return Ok(Self { pooling: pooling_of_gguf(path)?, ..Self::default() });
        }
        let (modules, pooling) = (path.join(MODULES), path.join(POOLING));
        let normalised = if modules.exists() { normalises(&modules)? } else { true };
        let pooling = if pooling.exists() { pooling_of(&Fields::read(&pooling)?)? } else { Pooling::default() };
        Ok(Self { pooling, normalised })
    }
}

/// Whether the modules end with a normalisation. All of them are such that Lagoon implements.
fn normalises(path: &Path) -> Result<bool, ModelError> {
    let malformed = |problem: String| ModelError::Malformed { path: path.to_owned(), problem };
    let modules: Value = serde_json::from_slice(&read_bounded(path)?).map_err(|error| malformed(error.to_string()))?;
    let modules = modules.as_array().ok_or_else(|| malformed("the top level is not a list".to_owned()))?;
    let mut normalised = false;
    for (index, module) in modules.iter().enumerate() {
        let text = |field: &str| module.get(field).and_then(Value::as_str);
        let kind = text("type").ok_or_else(|| malformed(format!("module {index} has no type")))?;
        let unsupported = |field: &str, value: &str| ModelError::Unsupported {
            path: path.to_owned(),
            field: format!("{index}.{field}"),
            value: value.to_owned(),
            hint: HINT.to_owned(),
        };
        match kind.rsplit('.').next() {
            Some("Transformer") => {}
            Some("Pooling") => match text("path") {
                Some("1_Pooling") => {}
                other => return Err(unsupported("path", other.unwrap_or_default())),
            },
            Some("Normalize") => normalised = true,
            _ => return Err(unsupported("type", kind)),
        }
    }
    Ok(normalised)
}

/// The modes that Lagoon has.
const MODES: [(&str, Pooling); 3] = [("cls", Pooling::First), ("lasttoken", Pooling::Last), ("mean", Pooling::Mean)];
/// A mode's field in older files.
const OLDER: [(&str, &str); 6] = [
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_lasttoken", "lasttoken"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
];

/// `pooling_mode`, or the one of the older fields `pooling_mode_…` that is true.
fn pooling_of(fields: &Fields) -> Result<Pooling, ModelError> {
    // Widths of hidden states, and how prompts are counted that Lagoon does not add.
    fields.ignore(&["word_embedding_dimension", "embedding_dimension", "include_prompt"]);
    let mode = |name: &str, field: &str| {
        let known = MODES.iter().find(|(mode, _)| *mode == name);
        known.map(|(_, pooling)| *pooling).ok_or_else(|| fields.unsupported(field, HINT))
    };
    let mut found = match fields.text("pooling_mode")? {
        Some(name) => Some(mode(name, "pooling_mode")?),
        None => None,
    };
    for (field, name) in OLDER {
        if fields.flag(field)? != Some(true) {
            continue;
        }
        let pooling = mode(name, field)?;
        if found.is_some_and(|found| found != pooling) {
            return Err(fields.unsupported(field, "one mode of pooling at a time"));
        }
        found = Some(pooling);
    }
    fields.refuse_others(&[], HINT)?;
    found.ok_or_else(|| fields.missing("pooling_mode"))
}

/// `pooling_type` of llama.cpp: 0 none, 1 mean, 2 cls, 3 last, 4 rank.
fn pooling_of_gguf(path: &Path) -> Result<Pooling, ModelError> {
    let file = Gguf::open(path)?;
    let metadata = file.metadata();
    let key = format!("{}.pooling_type", metadata.text("general.architecture")?.unwrap_or_default());
    match metadata.unsigned(&key)? {
        None | Some(0 | 3) => Ok(Pooling::Last),
        Some(1) => Ok(Pooling::Mean),
        Some(2) => Ok(Pooling::First),
        Some(_) => Err(metadata.unsupported(&key, HINT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(modules: Option<Value>, pooling: Option<Value>) -> Result<EmbeddingConfig, String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("1_Pooling")).unwrap();
        for (name, value) in [(MODULES, modules), (POOLING, pooling)] {
            value.into_iter().for_each(|value| std::fs::write(dir.path().join(name), value.to_string()).unwrap());
        }
        EmbeddingConfig::open(dir.path()).map_err(|error| error.to_string())
    }

    fn modules(kinds: &[&str]) -> Value {
        let module = |(at, kind): (usize, &&str)| {
            json!({"idx": at, "name": at.to_string(), "type": format!("sentence_transformers.models.{kind}"),
                "path": if at == 0 { String::new() } else { format!("{at}_{kind}") }})
        };
        kinds.iter().enumerate().map(module).collect()
    }

    /// As the files of Qwen3-Embedding, of BGE and of models without a normalisation are.
    #[test]
    fn a_model_says_how_it_is_pooled() {
        assert_eq!(read(None, None), Ok(EmbeddingConfig { pooling: Pooling::Last, normalised: true }));
        let mode = |name: &str| {
            let mut fields = json!({"word_embedding_dimension": 64, "pooling_mode_cls_token": false,
                "pooling_mode_mean_tokens": false, "pooling_mode_max_tokens": false,
                "pooling_mode_mean_sqrt_len_tokens": false, "pooling_mode_weightedmean_tokens": false,
                "pooling_mode_lasttoken": false, "include_prompt": true});
            fields[name] = json!(true);
            fields
        };
        for (name, pooling) in [
            ("pooling_mode_cls_token", Pooling::First),
            ("pooling_mode_lasttoken", Pooling::Last),
            ("pooling_mode_mean_tokens", Pooling::Mean),
        ] {
            for (kinds, normalised) in
                [(&["Transformer", "Pooling", "Normalize"][..], true), (&["Transformer", "Pooling"][..], false)]
            {
                let read = read(Some(modules(kinds)), Some(mode(name)));
                assert_eq!(read, Ok(EmbeddingConfig { pooling, normalised }), "{name}");
            }
        }
        let newer = json!({"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": true});
        assert_eq!(read(None, Some(newer)).unwrap().pooling, Pooling::Mean);
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_name() {
        let pooled = |pooling| read(None, Some(pooling)).unwrap_err();
        let max = pooled(json!({"pooling_mode_max_tokens": true}));
        assert!(max.contains("`pooling_mode_max_tokens` is true") && max.contains("hint:"), "{max}");
        let both = pooled(json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}));
        assert!(both.contains("one mode of pooling at a time"), "{both}");
        assert!(pooled(json!({"pooling_mode": "max"})).contains("`pooling_mode` is \"max\""));
        assert!(pooled(json!({"pooling_mode_lasttoken": true, "more": 1})).contains("`more` is 1"));
        assert!(pooled(json!({})).contains("`pooling_mode` is missing"));
        let dense = read(Some(modules(&["Transformer", "Pooling", "Dense"])), None).unwrap_err();
        assert!(dense.contains("`2.type` is sentence_transformers.models.Dense"), "{dense}");
    }
}
