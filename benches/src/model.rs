//! Models that exist only as shapes.

use lagoon_model::{Family, ModelConfig, RopeScaling};
use lagoon_types::AttentionGeometry;

/// A model of the Llama family with few tokens in its vocabulary, so that its layers are what takes time and memory.
#[must_use]
pub fn llama(layers: usize, (hidden, intermediate): (usize, usize), geometry: AttentionGeometry) -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        hidden,
        intermediate,
        layers,
        geometry,
        vocab: 2048,
        norm_eps: 1e-5,
        tie_word_embeddings: true,
        window: None,
        alibi: None,
        max_positions: 1 << 18,
        dtype: None,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        bos_id: None,
        eos_ids: Vec::new(),
    }
}
