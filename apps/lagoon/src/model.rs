//! Opens a model, in a directory or a GGUF file: configuration, tokenizer, template, checkpoint, identity.

use crate::log;
use crate::progress::{self, Unit};
use anyhow::Context;
use lagoon_backend::{Device, WeightFormat};
use lagoon_http::{EmbeddingRules, GenerationDefaults};
use lagoon_model::checkpoint::Unpackable;
use lagoon_model::gguf::{self, Gguf, is_gguf};
use lagoon_model::{
    Checkpoint, EmbeddingConfig, GenerationConfig, Hub, Loaded, ModelSpec, Weights, loaded, model_hash, resolve_model,
};
use lagoon_runner::Model;
use lagoon_text::{ChatTemplate, Tokenizer};
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

/// The directory or the GGUF file of a model; downloads a hub name.
pub(crate) fn resolve(name: &str) -> anyhow::Result<PathBuf> {
    let hub = Hub::from_env()?;
    let bar = progress::bar("downloading", 0, Unit::Bytes);
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
    /// Opens the model in `dir` (a directory or a GGUF file), named `id` for clients. `context` limits its context, in tokens.
    pub(crate) fn open(dir: &Path, id: String, dtype: Option<DType>, context: Option<u32>) -> anyhow::Result<Self> {
        let config = read_spec(dir, context)?;
        let checkpoint = Checkpoint::open(dir)?;
        let hash = model_hash(&config, &checkpoint, dtype);
        let stored = checkpoint.dtype().context("the checkpoint's weights have no single element type")?;
        let dtype = dtype.unwrap_or(stored);
        Ok(Self { id, dtype, config, checkpoint: Some(checkpoint), hash })
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
        let dtype = dtype.or(config.dtype).context("--kv-dtype is needed: the configuration names no element type")?;
        Ok(Self { id, dtype, config, checkpoint: None, hash })
    }

    /// Loads its weights onto a device; `None` if it has none. With a `dtype` all of them get it, packed ones too.
    ///
    /// # Errors
    /// If they cannot be read, or the device's memory does not hold them.
    pub(crate) fn load<D: Device>(&self, device: &mut D, dtype: Option<DType>) -> anyhow::Result<Option<Model<D>>> {
        let Some(checkpoint) = &self.checkpoint else { return Ok(None) };
        let takes = |format| dtype.is_none() && device.takes(format);
        if let Some(text) = conversion(&self.id, checkpoint, &self.config, self.dtype, takes) {
            log::notice(&text);
        }
        let bar = progress::bar("loading weights", 0, Unit::Bytes);
        let weights = Weights::load(device, checkpoint, &self.config, dtype, &mut |done, all| {
            bar.set_length(all);
            bar.set_position(done);
        })?;
        bar.finish_and_clear();
        Ok(Some(Model::new(&self.config, weights)))
    }
}

/// What happens to packed weights at loading on a device that takes some packed formats; `None` if they stay as they are.
fn conversion(
    id: &str,
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    dtype: DType,
    takes: impl Fn(WeightFormat) -> bool,
) -> Option<String> {
    let loaded = loaded(checkpoint, spec, dtype, takes);
    let is_converted = |of: &&Loaded| of.becomes != of.stored && !of.unpackable;
    let mut converted: Vec<WeightFormat> = loaded.iter().filter(is_converted).map(|of| of.stored).collect();
    converted.dedup();
    let decoded = decoded(id, checkpoint, dtype);
    if !checkpoint.is_mixed() || converted.is_empty() {
        return decoded;
    }
    let stored = gib(loaded.iter().map(|of| of.stored_bytes).sum());
    let loaded = gib(loaded.iter().map(|of| of.loaded_bytes).sum());
    let how = match dtype {
        _ if converted.iter().all(|format| format.is_exact_in(dtype)) => "exactly",
        DType::BF16 => "rounded to 8 bits; --dtype f32 is exact",
        DType::F16 | DType::F32 => "rounded to 11 bits; --dtype f32 is exact",
    };
    let converted: Vec<&str> = converted.into_iter().map(WeightFormat::name).collect();
    let converted = converted.join(", ");
    Some(format!(
        "{id}: weights in {converted} are converted to {dtype} ({how}): {stored:.2} GiB become {loaded:.2} GiB\n{}",
        decoded.unwrap_or_default()
    ))
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// Which quantised matrices no device takes; `None` if there are none.
fn decoded(id: &str, checkpoint: &Checkpoint, dtype: DType) -> Option<String> {
    let Unpackable { tensors, elements, example: (name, why) } = checkpoint.unpackable()?;
    let size = gib(elements * dtype.size() as u64);
    Some(format!("{id}: {tensors} quantised matrices are converted to {dtype}, {size:.2} GiB; of `{name}`, {why}\n"))
}

/// Tokenizer and chat template of the model at `path`.
pub(crate) fn text(path: &Path) -> anyhow::Result<(Tokenizer, Option<ChatTemplate>)> {
    let opening = "open the tokenizer";
    if !is_gguf(path) {
        return Ok((Tokenizer::open(path).context(opening)?, ChatTemplate::open(path)?));
    }
    let vocabulary = gguf::vocabulary(Gguf::open(path)?.metadata()).context(opening)?;
    Ok((Tokenizer::from_gguf(&vocabulary).context(opening)?, ChatTemplate::from_gguf(&vocabulary)?))
}

/// The last part of a path or hub name; of a GGUF file, without its end.
pub(crate) fn short_name(name: &str) -> String {
    let path = Path::new(name);
    if is_gguf(path) {
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        // The first file of a split one.
        return stem.split_once("-00001-of-").map_or(stem.as_str(), |(name, _)| name).to_owned();
    }
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

/// How the model in `dir` is pooled, for the HTTP server. A model that asks for another pooling has no embeddings.
pub(crate) fn embeddings(dir: &Path, model: &OpenModel) -> EmbeddingRules {
    let found = EmbeddingConfig::open(dir).map_err(|error| error.to_string());
    if let Err(why) = &found {
        tracing::warn!(model = model.id, why, "the model is served without /v1/embeddings");
    }
    EmbeddingRules {
        normalised: found.as_ref().map_or(true, |config| config.normalised),
        pooling: found.map(|config| config.pooling),
        dimensions: u32::try_from(model.config.hidden).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_last_part() {
        for (name, short) in [
            ("models/passkey.gguf", "passkey"),
            ("big-Q4_K-00001-of-00003.gguf", "big-Q4_K"),
            ("org/name@main", "org/name@main"),
        ] {
            assert_eq!(short_name(name), short);
        }
    }

    /// A packed file says what it becomes; one that is used as it is says nothing.
    #[test]
    fn a_conversion_is_announced() {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/gguf");
        let announced_on = |name: &str, dtype, takes: &dyn Fn(WeightFormat) -> bool| {
            let path = goldens.join(name);
            let (checkpoint, spec) = (Checkpoint::open(&path).unwrap(), ModelSpec::open(&path).unwrap());
            conversion("m", &checkpoint, &spec, dtype, takes)
        };
        let announced = |name: &str, dtype| announced_on(name, dtype, &|_| false);
        let text = announced("llama-q4_k.gguf", DType::F16).unwrap();
        assert!(text.contains("Q4_K") && text.contains("converted to f16 (rounded to 11 bits"), "{text}");
        let exact = announced("llama-q4_k.gguf", DType::F32).unwrap();
        assert!(exact.contains("converted to f32 (exactly)"), "{exact}");
        let wide = announced("llama-f32.gguf", DType::F16).unwrap();
        assert!(wide.starts_with("m: weights in F32 are converted to f16 (rounded to 11 bits"), "{wide}");
        assert_eq!(announced("qwen2-f16.gguf", DType::F16), None);
        assert_eq!(announced_on("llama-q4_k.gguf", DType::F16, &|_| true), None);
        let some = announced_on("llama-q4_k.gguf", DType::F16, &|format| format != WeightFormat::Q4K).unwrap();
        assert!(some.starts_with("m: weights in Q4_K are converted"), "{some}");
        let awq = announced_on("../quantised/awq", DType::F16, &|_| false).unwrap();
        assert!(awq.starts_with("m: weights in INT4_G64 are converted to f16 (rounded to 11 bits"), "{awq}");
        assert_eq!(announced_on("../quantised/awq", DType::F16, &|_| true), None);
        let order = announced_on("../quantised/gptq-order", DType::F16, &|_| true).unwrap();
        assert!(
            order.starts_with("m: 7 quantised matrices are converted to f16, 0.00 GiB; of `model.layers.0."),
            "{order}"
        );
        assert!(order.ends_with("desc_act, actorder)\n"), "{order}");
    }
}
