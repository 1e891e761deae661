//! The model and document bundled with the binary: the demo needs no download and no working directory.

use anyhow::Context;
use serde::Deserialize;
use std::path::Path;

macro_rules! file {
    ($name:literal) => {
        ($name, include_bytes!(concat!("../../../models/passkey/", $name)))
    };
}

/// Files of the model directory. See models/passkey/README.md.
const FILES: [(&str, &[u8]); 5] = [
    file!("config.json"),
    file!("generation_config.json"),
    file!("model.safetensors"),
    file!("tokenizer.json"),
    file!("tokenizer_config.json"),
];

/// A log book of about 20,000 tokens with pass keys hidden in it.
pub(crate) const DOCUMENT: &str = include_str!("../../../models/passkey/document.txt");

/// Model name for clients.
pub(crate) const NAME: &str = "passkey";

/// A question about [`DOCUMENT`].
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Question {
    pub(crate) question: String,
    /// Text behind the document in the prompt.
    pub(crate) prompt_suffix: String,
    /// The correct answer.
    pub(crate) answer: String,
}

/// The questions, in the order of the file.
pub(crate) fn questions() -> anyhow::Result<Vec<Question>> {
    serde_json::from_str(include_str!("../../../models/passkey/questions.json")).context("read the bundled questions")
}

/// Writes the model to `dir`, where instances memory-map it.
pub(crate) fn extract(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    for (name, bytes) in FILES {
        let path = dir.join(name);
        std::fs::write(&path, bytes).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}
