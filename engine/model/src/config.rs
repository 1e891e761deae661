//! Reads a model's configuration: `config.json`, or the metadata of a GGUF file.

use crate::fields::Fields;
use crate::gguf::{Gguf, is_gguf};
use crate::{ModelError, ModelSpec, families};
use std::path::Path;

/// The configuration of an adapter (LoRA and others), as peft names it.
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
pub(crate) const ADAPTER_HINT: &str =
    "adapters such as LoRA are not served; merge it into its base model first, for example by peft's merge_and_unload";

impl ModelSpec {
    /// Reads `config.json` in the directory `dir`, or the metadata of the GGUF file that it is.
    ///
    /// # Errors
    /// A [`ModelError`] that names the file, the field and its value.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        if is_gguf(dir) {
            return families::gguf::read(&Gguf::open(dir)?);
        }
        let (config, adapter) = (dir.join("config.json"), dir.join(ADAPTER_CONFIG));
        if !config.exists() && adapter.exists() {
            let fields = Fields::read(&adapter)?;
            let base = fields.text("base_model_name_or_path").ok().flatten().unwrap_or("another model");
            let problem = format!("it has {ADAPTER_CONFIG} and no config.json: an adapter of {base}");
            return Err(ModelError::NotAModel {
                name: dir.display().to_string(),
                problem,
                hint: ADAPTER_HINT.to_owned(),
            });
        }
        families::read(&Fields::read(&config)?)
    }

    /// Parses the text of a `config.json`; `path` is only for messages.
    ///
    /// # Errors
    /// As [`ModelSpec::open`].
    pub fn parse(path: &Path, json: &str) -> Result<Self, ModelError> {
        families::read(&Fields::parse(path, json.as_bytes())?)
    }
}
