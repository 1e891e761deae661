//! Opens a model: configuration, tokenizer, template, checkpoint, identity.

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use lagoon_http::GenerationDefaults;
use lagoon_model::hub::{Hub, resolve_model};
use lagoon_model::{Checkpoint, GenerationConfig, ModelSpec, model_hash};
use lagoon_types::{DType, ModelHash};
use std::path::{Path, PathBuf};

/// A model without its weights on a device.
#[derive(Debug)]
pub(crate) struct OpenModel {
    /// Model name for clients.
    pub(crate) id: String,
    pub(crate) config: ModelSpec,
    /// `None` on a kv node, which needs only the shape.
    pub(crate) checkpoint: Option<Checkpoint>,
    pub(crate) hash: ModelHash,
    /// Element type of the weights after conversion.
    pub(crate) dtype: DType,
}

/// A progress bar in bytes on standard error; hidden if that is no terminal.
pub(crate) fn bytes_bar(what: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar
}

/// The directory of a model; downloads a hub name.
pub(crate) fn resolve(name: &str) -> anyhow::Result<PathBuf> {
    let hub = Hub::from_env()?;
    let bar = bytes_bar("downloading");
    let dir = resolve_model(name, &hub, &mut |p| {
        bar.set_message(format!("{} ({}/{})", p.file, p.files_done + 1, p.files));
        bar.set_length(p.total_bytes);
        bar.set_position(p.done_bytes);
    })?;
    bar.finish_and_clear();
    Ok(dir)
}

/// The configuration in `dir`, for a context of `context` tokens.
fn read_spec(dir: &Path, context: Option<u32>) -> anyhow::Result<ModelSpec> {
    let mut spec = ModelSpec::open(dir)?;
    if let Some(tokens) = context {
        spec.limit_context(tokens)?;
    }
    Ok(spec)
}

impl OpenModel {
    /// Opens the model in `dir`, named `id` for clients. `context` limits its context, in tokens.
    pub(crate) fn open(dir: &Path, id: String, dtype: Option<DType>, context: Option<u32>) -> anyhow::Result<Self> {
        let config = read_spec(dir, context)?;
        let checkpoint = Checkpoint::open(dir)?;
        let hash = model_hash(&config, &checkpoint, dtype);
        let stored = checkpoint.dtype().context("the checkpoint's weights have no single element type")?;
        Ok(Self { id, dtype: dtype.unwrap_or(stored), config, checkpoint: Some(checkpoint), hash })
    }

    /// A copy without the checkpoint.
    pub(crate) fn shape(&self) -> Self {
        let (id, config) = (self.id.clone(), self.config.clone());
        Self { id, config, checkpoint: None, hash: self.hash, dtype: self.dtype }
    }

    /// Opens the model's shape in `dir`, for a kv node: it needs the weights' hash, not the weights.
    pub(crate) fn open_shape(
        dir: &Path,
        id: String,
        dtype: Option<DType>,
        context: Option<u32>,
        hash: ModelHash,
    ) -> anyhow::Result<Self> {
        let config = read_spec(dir, context)?;
        let dtype = dtype.or(config.dtype).context("--kv-dtype is needed: config.json names no element type")?;
        Ok(Self { id, dtype, config, checkpoint: None, hash })
    }
}

/// The last part of a path or hub name.
pub(crate) fn short_name(name: &str) -> String {
    let trimmed = name.trim_end_matches(['/', '\\']);
    if Path::new(name).is_dir() {
        let dir = Path::new(trimmed).file_name().map(|n| n.to_string_lossy().into_owned());
        return dir.unwrap_or_else(|| trimmed.to_owned());
    }
    trimmed.to_owned()
}

/// Sampling defaults from the model's generation_config.json, for the HTTP server.
pub(crate) fn defaults(dir: &Path, config: &ModelSpec) -> anyhow::Result<GenerationDefaults> {
    let generation = GenerationConfig::open(dir, config)?;
    Ok(GenerationDefaults {
        do_sample: generation.do_sample,
        temperature: generation.temperature,
        top_p: generation.top_p,
        top_k: generation.top_k,
        min_p: generation.min_p,
        eos_ids: generation.eos_ids,
    })
}
