//! Model configurations without weights.

use lagoon_model::ModelSpec;
use lagoon_types::AttentionGeometry;
use std::path::Path;

/// A model of the Llama family with a small vocabulary, so that its layers take most of the time and memory.
///
/// # Panics
/// If sizes are beyond limits.
#[must_use]
pub fn llama(layers: usize, (hidden, intermediate): (usize, usize), geometry: AttentionGeometry) -> ModelSpec {
    let AttentionGeometry { heads, kv_heads, head_dim, .. } = geometry;
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": 2048,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 1 << 18, "tie_word_embeddings": true,
    });
    ModelSpec::parse(Path::new("config.json"), &config.to_string()).expect("a Llama of these sizes")
}
