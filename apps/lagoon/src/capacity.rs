//! Default KV capacity of an instance.

use crate::placement::Chosen;
use anyhow::ensure;
use lagoon_model::ModelSpec;
use lagoon_runner::activation_elements;

/// Other users of the memory that the KV cache is in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beside {
    /// Bytes of KV per token.
    pub(crate) token_bytes: u64,
    /// Bytes of rings of windowed KV.
    pub(crate) ring_bytes: u64,
    /// Bytes per element of the weights; 0 without weights.
    pub(crate) weight_bytes: u64,
    /// Rows of one step, and sequences in it.
    pub(crate) step_rows: u64,
    pub(crate) step_seqs: u64,
    /// Rows of a step whose logits are wanted.
    pub(crate) sampled_rows: u64,
    /// Whether the staging buffer is in the same memory, with `stage_tokens` or its default size.
    pub(crate) stages: bool,
    pub(crate) stage_tokens: Option<u64>,
    /// Tokens of KV lent there in addition (`--lend-device-tokens`).
    pub(crate) lent_tokens: u64,
    /// Bytes of the draft model: weights, KV and buffers.
    pub(crate) draft_bytes: u64,
}

/// A default KV capacity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DefaultKv {
    pub(crate) tokens: u32,
    /// What limits it, for people.
    pub(crate) because: String,
}

/// Longest contexts of the model that the default holds in host memory, at most.
const HOST_CONTEXTS: u64 = 4;

/// Default tokens of KV on this device, within the instance's percentage of the device's memory.
///
/// # Errors
/// If weights and buffers leave no room.
pub(crate) fn default_kv_tokens(
    chosen: Chosen,
    config: &ModelSpec,
    beside: &Beside,
    memory_percent: u32,
) -> anyhow::Result<DefaultKv> {
    let (fits, contexts, of_memory) = match chosen {
        Chosen::Cuda { memory_bytes, .. } => {
            let fits = on_device(memory_bytes / 100 * u64::from(memory_percent), config, beside)?;
            let of_memory = format!("what weights and buffers leave of {memory_percent}% of the device's memory");
            (fits, beside.step_seqs, of_memory)
        }
        Chosen::Cpu | Chosen::Wgpu { .. } => {
            (in_host_memory(beside)?, HOST_CONTEXTS, "a quarter of the free host memory".to_owned())
        }
    };
    let enough = contexts * u64::from(config.max_positions);
    let because = match fits < enough {
        true => of_memory,
        false => format!("{contexts} contexts of {} tokens", config.max_positions),
    };
    Ok(DefaultKv { tokens: u32::try_from(fits.min(enough)).unwrap_or(u32::MAX), because })
}

/// Tokens that fit into a quarter of the free host memory. Also for adapters: WebGPU does not report their memory size.
fn in_host_memory(beside: &Beside) -> anyhow::Result<u64> {
    const BUDGET_BYTES: u64 = 4 << 30;
    let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    let budget = available.map_or(BUDGET_BYTES, |kib| kib * 1024 / 4);
    ensure!(
        beside.ring_bytes < budget,
        "rings of {} MiB for windowed KV leave no room in {} MiB for KV\n\
         hint: lower --max-running or --step-tokens, or set --kv-tokens or --kv-groups=off",
        beside.ring_bytes >> 20,
        budget >> 20,
    );
    Ok((budget - beside.ring_bytes) / beside.token_bytes)
}

/// Tokens of KV in `budget` bytes of device memory: the memory that weights and buffers leave free.
fn on_device(budget: u64, config: &ModelSpec, beside: &Beside) -> anyhow::Result<u64> {
    let weights = config.parameters() * beside.weight_bytes;
    let taken = weights + beside.ring_bytes + beside.draft_bytes + buffer_bytes(config, beside);
    let tokens = budget.saturating_sub(taken) / beside.token_bytes;
    ensure!(
        tokens > 0,
        "weights of {} MiB and {} MiB of buffers leave no room for KV in {} MiB of the device's memory\n\
         hint: raise --memory-percent, lower --step-tokens or --max-running, or choose a smaller --dtype",
        weights >> 20,
        (taken - weights) >> 20,
        budget >> 20,
    );
    ensure!(
        beside.lent_tokens < tokens,
        "--lend-device-tokens {} leaves no room for KV: there is memory for {tokens} tokens in all\nhint: lower it",
        beside.lent_tokens
    );
    let tokens = tokens - beside.lent_tokens;
    let staged = match (beside.stages, beside.stage_tokens) {
        (false, _) => 0,
        (true, Some(asked)) => asked,
        // Default staging size: two of the longest sequences, at most as much as the KV.
        (true, None) => (2 * u64::from(config.max_positions)).min(tokens / 2),
    };
    ensure!(
        staged < tokens,
        "--stage-kv-tokens {staged} leaves no room for KV: there is memory for {tokens} tokens in all\nhint: lower it"
    );
    Ok(tokens - staged)
}

/// Micro-batches of an instance, each with its activations.
const MICRO_BATCHES: u64 = 2;

/// Approximate bytes of a step's buffers: activations in f32, and logits. Memory of the driver and its libraries comes
/// out of the unassigned percentage.
fn buffer_bytes(config: &ModelSpec, beside: &Beside) -> u64 {
    step_bytes(config, beside.step_rows, beside.sampled_rows)
}

/// Approximate bytes of a step's buffers, of `rows` rows of which `sampled` have logits.
pub(crate) fn step_bytes(config: &ModelSpec, rows: u64, sampled: u64) -> u64 {
    let (row, sequence) = activation_elements(config);
    4 * MICRO_BATCHES * (rows * row + sampled * sequence)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Llama-3.1-8B's shape.
    fn config() -> ModelSpec {
        let json = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "hidden_act": "silu", "tie_word_embeddings": false, "bos_token_id": 128000, "eos_token_id": 128001}"#;
        ModelSpec::parse(Path::new("config.json"), json).unwrap()
    }

    fn beside() -> Beside {
        Beside {
            token_bytes: 128 << 10,
            weight_bytes: 2,
            ring_bytes: 0,
            step_rows: 512,
            step_seqs: 64,
            sampled_rows: 64,
            stages: false,
            stage_tokens: None,
            lent_tokens: 0,
            draft_bytes: 0,
        }
    }

    fn tokens(gib: u64, percent: u32, beside: &Beside) -> anyhow::Result<u32> {
        let chosen = Chosen::Cuda { ordinal: 0, memory_bytes: gib << 30 };
        default_kv_tokens(chosen, &config(), beside, percent).map(|kv| kv.tokens)
    }

    #[test]
    fn the_limit_is_named() {
        let kv = |gib: u64, beside: &Beside| {
            let chosen = Chosen::Cuda { ordinal: 0, memory_bytes: gib << 30 };
            default_kv_tokens(chosen, &config(), beside, 90).unwrap()
        };
        let DefaultKv { because, .. } = kv(80, &beside());
        assert_eq!(because, "what weights and buffers leave of 90% of the device's memory");
        let few = kv(80, &Beside { step_seqs: 2, ..beside() });
        assert_eq!(few, DefaultKv { tokens: 2 * 131_072, because: "2 contexts of 131072 tokens".to_owned() });
        let tiny = Beside { token_bytes: 1, ..beside() };
        let host = default_kv_tokens(Chosen::Cpu, &config(), &tiny, 90).unwrap();
        assert_eq!(host, DefaultKv { tokens: 4 * 131_072, because: "4 contexts of 131072 tokens".to_owned() });
    }

    #[test]
    fn a_device_is_filled_with_what_weights_and_buffers_leave() {
        // 8.03 G parameters are 14.96 GiB; 0.9 of 80 GiB are 72; buffers are under 1 GiB: 56 to 57 GiB of 128 KiB each.
        let kv = tokens(80, 90, &beside()).unwrap();
        assert!((56 << 13..57 << 13).contains(&kv), "{kv}");
        // A kv node has no weights.
        let kv = tokens(80, 90, &Beside { weight_bytes: 0, ..beside() }).unwrap();
        assert!((71 << 13..72 << 13).contains(&kv), "{kv}");
        // Half of the share for each of two.
        assert!(tokens(80, 45, &beside()).unwrap() < (21 << 13));
    }

    #[test]
    fn staging_takes_its_part_first() {
        let whole = tokens(80, 90, &beside()).unwrap();
        let shared = Beside { stages: true, ..beside() };
        assert_eq!(tokens(80, 90, &shared).unwrap(), whole - whole / 2);
        assert_eq!(tokens(141, 90, &shared).unwrap() + 2 * 131_072, tokens(141, 90, &beside()).unwrap());
        let asked = Beside { stage_tokens: Some(1000), ..shared };
        assert_eq!(tokens(80, 90, &asked).unwrap(), whole - 1000);
        let error = tokens(80, 90, &Beside { stage_tokens: Some(1 << 40), ..shared }).unwrap_err().to_string();
        assert!(error.contains("hint: lower it"), "{error}");
    }

    #[test]
    fn what_is_lent_besides_comes_out_of_it() {
        let whole = tokens(80, 90, &beside()).unwrap();
        assert_eq!(tokens(80, 90, &Beside { lent_tokens: 4096, ..beside() }).unwrap(), whole - 4096);
        let error = tokens(80, 90, &Beside { lent_tokens: 1 << 40, ..beside() }).unwrap_err().to_string();
        assert!(error.contains("--lend-device-tokens") && error.contains("hint: lower it"), "{error}");
    }

    #[test]
    fn rings_of_windowed_kv_come_out_of_it() {
        let (whole, each) = (tokens(80, 90, &beside()).unwrap(), beside().token_bytes);
        assert_eq!(tokens(80, 90, &Beside { ring_bytes: 1000 * each, ..beside() }).unwrap(), whole - 1000);
        let all = Beside { ring_bytes: u64::MAX, ..beside() };
        let error = default_kv_tokens(Chosen::Cpu, &config(), &all, 90).unwrap_err().to_string();
        assert!(error.contains("--max-running"), "{error}");
    }

    #[test]
    fn a_model_that_is_too_large_says_so() {
        let error = tokens(16, 90, &beside()).unwrap_err().to_string();
        assert!(error.contains("weights of 15316 MiB") && error.contains("hint: raise --memory-percent"), "{error}");
    }
}
