//! Generation defaults, from `generation_config.json` merged with `config.json`.

use crate::fields::{Fields, narrow};
use crate::gguf::is_gguf;
use crate::{ModelError, ModelSpec};
use std::path::Path;

/// Generation defaults of the model's authors; `None` if they give none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end generation; sorted, without duplicates.
    pub eos_ids: Vec<u32>,
    pub bos_id: Option<u32>,
    /// `false` means greedy decoding; the other values are ignored then.
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
}

impl GenerationConfig {
    /// Reads `generation_config.json` in `dir`, which may be absent. Its ids take precedence over those of `spec`;
    /// ids outside the vocabulary are refused. Beside a GGUF file there is none.
    pub fn open(dir: &Path, spec: &ModelSpec) -> Result<Self, ModelError> {
        let path = dir.join("generation_config.json");
        if is_gguf(dir) || !path.exists() {
            return Ok(spec.generation_defaults());
        }
        Self::from_fields(&Fields::read(&path)?, spec)
    }

    /// Parses the text of a `generation_config.json`; `path` is only for messages.
    pub fn parse(path: &Path, json: &str, spec: &ModelSpec) -> Result<Self, ModelError> {
        Self::from_fields(&Fields::parse(path, json.as_bytes())?, spec)
    }

    fn from_fields(fields: &Fields, spec: &ModelSpec) -> Result<Self, ModelError> {
        let ids = |field| -> Result<Vec<u32>, ModelError> {
            let ids = fields.token_ids(field)?;
            match ids.iter().find(|id| **id as usize >= spec.vocab) {
                Some(id) => Err(fields.invalid(field, &format!("{id} is outside the vocabulary of {}", spec.vocab))),
                None => Ok(ids),
            }
        };
        let mut eos_ids = ids("eos_token_id")?;
        if eos_ids.is_empty() {
            eos_ids.clone_from(&spec.eos_ids);
        }
        eos_ids.sort_unstable();
        eos_ids.dedup();
        Ok(Self {
            eos_ids,
            bos_id: ids("bos_token_id")?.first().copied().or(spec.bos_id),
            do_sample: fields.flag("do_sample")?,
            temperature: ranged(fields, "temperature", 0.0, f64::from(f32::MAX))?,
            top_p: ranged(fields, "top_p", 0.0, 1.0)?,
            top_k: top_k(fields)?,
            min_p: ranged(fields, "min_p", 0.0, 1.0)?,
        })
    }
}

fn ranged(fields: &Fields, field: &str, min: f64, max: f64) -> Result<Option<f32>, ModelError> {
    let Some(value) = fields.get(field) else { return Ok(None) };
    match value.as_f64() {
        Some(x) if (min..=max).contains(&x) => Ok(Some(narrow(x))),
        _ => Err(fields.invalid(field, &format!("it must be from {min} to {max}"))),
    }
}

/// 0 (or, in some files, -1) keeps all tokens.
fn top_k(fields: &Fields) -> Result<Option<u32>, ModelError> {
    let Some(value) = fields.get("top_k") else { return Ok(None) };
    match value.as_i64() {
        Some(-1) => Ok(Some(0)),
        Some(k) => u32::try_from(k).map(Some).map_err(|_range| fields.invalid("top_k", "it must be 0 or above")),
        None => Err(fields.invalid("top_k", "it must be a whole number")),
    }
}
