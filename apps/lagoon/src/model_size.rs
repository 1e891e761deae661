//! `lagoon doctor MODEL`: parameters and bytes of a model, and how long a context one instance and several hold.

use crate::device::BACKENDS;
use crate::log::outln;
use crate::model::resolve;
use anyhow::Context as _;
use lagoon_model::{Checkpoint, Loaded, ModelSpec, loaded};
use lagoon_types::limits::{RUNNING_DEFAULT, STEP_ROWS_DEFAULT};
use lagoon_types::{DType, KvDType};
use serde::Serialize;

/// Pools whose context is printed, in instances.
const INSTANCES: [u64; 4] = [1, 2, 4, 8];
/// The share of memory for weights and KV; buffers and the system have the rest.
const MEMORY_PERCENT: u64 = 90;

/// A model's size.
#[derive(Debug, Serialize)]
struct Size {
    family: &'static str,
    layers: usize,
    /// Layers with a window of their own.
    windowed_layers: usize,
    parameters: u64,
    /// Parameters that one token uses.
    active_parameters: u64,
    dtype: String,
    weight_bytes: u64,
    /// Of a GGUF file, whose weights are converted when they are loaded.
    stored: Option<StoredSize>,
    kv_bytes_per_token: u64,
    /// With --kv-dtype=fp8.
    fp8_bytes_per_token: u64,
    /// With --kv-groups=on, if layers differ in that.
    split: Option<SplitSize>,
    /// Longest sequence of the configuration, in tokens.
    max_positions: u32,
    memory_bytes: u64,
    contexts: Vec<Context>,
}

/// Weights as a file has them.
#[derive(Debug, Serialize)]
struct StoredSize {
    bytes: u64,
    formats: Vec<&'static str>,
    backends: Vec<BackendSize>,
}

/// A file's matrices as a backend loads them.
#[derive(Debug, Serialize)]
struct BackendSize {
    backend: &'static str,
    bytes: u64,
    matrices: Vec<MatricesSize>,
}

/// Matrices of one format.
#[derive(Debug, Serialize)]
struct MatricesSize {
    format: &'static str,
    /// The format that they have in memory.
    loaded_as: &'static str,
    bytes: u64,
}

/// KV of a model whose windowed KV is kept apart.
#[derive(Debug, Serialize)]
struct SplitSize {
    kv_bytes_per_token: u64,
    /// Of each running sequence, with the default --step-tokens.
    ring_bytes: u64,
}

/// Context that a number of instances holds.
#[derive(Debug, Serialize)]
struct Context {
    instances: u64,
    #[serde(flatten)]
    room: Room,
    /// With --kv-dtype=fp8.
    fp8: Room,
    /// With --kv-groups=on, if layers differ in that.
    split: Option<Room>,
}

/// Tokens that fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Room {
    /// Tokens of KV in the pool.
    kv_tokens: u64,
    /// Tokens of the longest sequence: at most [`Size::max_positions`].
    context_tokens: u64,
}

pub(crate) fn run(model: &str, memory_gib: Option<u32>, json: bool) -> anyhow::Result<()> {
    let dir = resolve(model)?;
    let spec = ModelSpec::open(&dir)?;
    let checkpoint = Checkpoint::open(&dir)?;
    let dtype = checkpoint.dtype().context("the checkpoint's weights have no single element type")?;
    let memory = match memory_gib {
        Some(gib) => u64::from(gib) << 30,
        None => host_memory()?,
    };
    let stored = stored(&checkpoint, &spec, dtype);
    let loaded = stored.as_ref().map(|stored| stored.backends[0].bytes);
    let size = Size { stored, ..size(&spec, dtype, memory, loaded) };
    if json {
        outln!("{}", serde_json::to_string(&size)?);
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    outln!("family        {}, {} layers, {} of them with a window", size.family, size.layers, size.windowed_layers);
    outln!("parameters    {}, {} for a token", size.parameters, size.active_parameters);
    outln!("weights       {:.2} GiB in {}", gib(size.weight_bytes), size.dtype);
    if let Some(stored) = &size.stored {
        stored.print();
    }
    outln!("KV            {} bytes a token, in {}", size.kv_bytes_per_token, size.dtype);
    outln!("              {} bytes a token with --kv-dtype=fp8", size.fp8_bytes_per_token);
    if let Some(split) = &size.split {
        let mib = split.ring_bytes as f64 / f64::from(1 << 20);
        outln!(
            "              {} bytes a token and {mib:.1} MiB a running sequence with --kv-groups=on",
            split.kv_bytes_per_token
        );
    }
    outln!(
        "context       at most {} tokens by the configuration; {:.1} GiB an instance{}:",
        size.max_positions,
        gib(memory),
        if size.stored.is_some() { ", weights as on the CPU" } else { "" }
    );
    for Context { instances, room, fp8, split } in &size.contexts {
        let what = if *instances == 1 { "instance " } else { "instances" };
        outln!("{instances:>4} {what} {} tokens of KV, a context of {}", room.kv_tokens, room.context_tokens);
        outln!("               {} and {} with --kv-dtype=fp8", fp8.kv_tokens, fp8.context_tokens);
        if let Some(room) = split {
            outln!("               {} and {} with --kv-groups=on", room.kv_tokens, room.context_tokens);
        }
    }
    if size.contexts[0].room.kv_tokens == 0 {
        outln!("hint: the weights do not fit; --memory-gib gives another size");
    }
    Ok(())
}

/// `loaded` are the bytes of weights in memory where they are not all in `dtype`.
fn size(spec: &ModelSpec, dtype: DType, memory_bytes: u64, loaded: Option<u64>) -> Size {
    let weight_bytes = spec.parameters() * dtype.size() as u64;
    let [kv_bytes_per_token, fp8_bytes_per_token] =
        [dtype.into(), KvDType::Fp8].map(|dtype| spec.kv_shape(dtype).token_bytes() as u64);
    let left = (memory_bytes / 100 * MEMORY_PERCENT).saturating_sub(loaded.unwrap_or(weight_bytes));
    let split = split_size(spec, dtype);
    let room = |tokens: u64| Room { kv_tokens: tokens, context_tokens: tokens.min(u64::from(spec.max_positions)) };
    let context = |instances: u64| Context {
        instances,
        room: room(instances * (left / kv_bytes_per_token)),
        fp8: room(instances * (left / fp8_bytes_per_token)),
        split: split.as_ref().map(|split| room(instances * split.tokens(left))),
    };
    Size {
        family: spec.family,
        layers: spec.layers.len(),
        windowed_layers: spec.layers.iter().filter(|layer| layer.attention.window.is_some()).count(),
        parameters: spec.parameters(),
        active_parameters: spec.active_parameters(),
        dtype: dtype.to_string(),
        weight_bytes,
        stored: None,
        kv_bytes_per_token,
        fp8_bytes_per_token,
        max_positions: spec.max_positions,
        memory_bytes,
        contexts: INSTANCES.map(context).into(),
        split,
    }
}

impl SplitSize {
    /// Tokens of KV in `bytes`, after the rings of the default --max-running.
    fn tokens(&self, bytes: u64) -> u64 {
        bytes.saturating_sub(self.ring_bytes.saturating_mul(RUNNING_DEFAULT as u64)) / self.kv_bytes_per_token
    }
}

/// A GGUF file's weights, and what each backend makes of its matrices.
fn stored(checkpoint: &Checkpoint, spec: &ModelSpec, dtype: DType) -> Option<StoredSize> {
    let formats = checkpoint.formats();
    let bytes = formats.iter().map(|(_, bytes)| bytes).sum();
    let formats = formats.iter().map(|(format, _)| format.name()).collect();
    let backends = BACKENDS.map(|(backend, reads)| {
        let matrices = loaded(checkpoint, spec, dtype, reads);
        let one = |of: &Loaded| MatricesSize {
            format: of.stored.name(),
            loaded_as: of.becomes.name(),
            bytes: of.loaded_bytes,
        };
        let bytes = matrices.iter().map(|of| of.loaded_bytes).sum();
        BackendSize { backend, bytes, matrices: matrices.iter().map(one).collect() }
    });
    checkpoint.is_mixed().then(|| StoredSize { bytes, formats, backends: backends.into() })
}

impl StoredSize {
    fn print(&self) {
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        outln!("              {} in the file, in {}", mib(self.bytes), self.formats.join(", "));
        for BackendSize { backend, bytes, matrices } in &self.backends {
            let one = |of: &MatricesSize| match of.format == of.loaded_as {
                true => format!("{} in {}", mib(of.bytes), of.format),
                false => format!("{} in {} from {}", mib(of.bytes), of.loaded_as, of.format),
            };
            let matrices: Vec<String> = matrices.iter().map(one).collect();
            outln!("  on {backend:<10}{} of matrices: {}", mib(*bytes), matrices.join(", "));
        }
    }
}

fn split_size(spec: &ModelSpec, dtype: DType) -> Option<SplitSize> {
    let mut spec = spec.clone();
    spec.split_kv().ok()?;
    let (slots, ring) = (spec.ring_slots(u32::try_from(STEP_ROWS_DEFAULT).ok()?), spec.windowed_shape(dtype)?);
    Some(SplitSize {
        kv_bytes_per_token: spec.kv_shape(dtype).token_bytes() as u64,
        ring_bytes: u64::from(slots) * ring.token_bytes() as u64,
    })
}

/// This machine's memory.
fn host_memory() -> anyhow::Result<u64> {
    let text =
        std::fs::read_to_string("/proc/meminfo").context("--memory-gib is needed: /proc/meminfo is not there")?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    Ok(kib.context("--memory-gib is needed: /proc/meminfo has no MemTotal")? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn experts_count_as_parameters_and_a_token_uses_some() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/qwen3_moe");
        let spec = ModelSpec::open(&golden).unwrap();
        let size = size(&spec, DType::F32, 1 << 20, None);
        // Two of the three layers have six experts of 3 * 48 * 40 parameters, of which a token uses two.
        assert_eq!(size.parameters - size.active_parameters, 2 * 4 * 3 * 48 * 40);
        // Keys and values of two heads of 24, in three layers.
        assert_eq!(size.kv_bytes_per_token, 3 * 2 * 2 * 24 * 4);
        assert_eq!(size.fp8_bytes_per_token, 3 * 2 * 2 * (24 + 4));
        assert_eq!(size.contexts[1].fp8.context_tokens, 256);
        assert!(size.split.is_none(), "no layer has a window");
        let left = (1 << 20) / 100 * 90 - size.parameters * 4;
        let tokens = 2 * (left / size.kv_bytes_per_token);
        assert_eq!(size.contexts[1].room, Room { kv_tokens: tokens, context_tokens: 256 });
        assert!(tokens > 256 && size.contexts[1].split.is_none(), "{size:?}");
    }

    #[test]
    fn windowed_layers_are_counted_apart() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/gemma3");
        let size = size(&ModelSpec::open(&golden).unwrap(), DType::F16, 64 << 20, None);
        let split = size.split.unwrap();
        // One layer of three sees everything; two have windows of 12.
        assert_eq!(split.kv_bytes_per_token * 3, size.kv_bytes_per_token);
        assert_eq!(split.ring_bytes, (11 + STEP_ROWS_DEFAULT as u64) * 2 * split.kv_bytes_per_token);
        let left = (64 << 20) / 100 * 90 - size.parameters * 2;
        let tokens = (left - RUNNING_DEFAULT as u64 * split.ring_bytes) / split.kv_bytes_per_token;
        assert_eq!(size.contexts[0].split, Some(Room { kv_tokens: tokens, context_tokens: 256 }));
        assert_eq!(size.contexts[0].room.kv_tokens, left / size.kv_bytes_per_token);
        assert_eq!(size.contexts[0].fp8.kv_tokens, left / size.fp8_bytes_per_token);
    }
}
