//! Llama (Touvron et al. 2023): RMS norms, rotary positions, SwiGLU, no biases.

use super::Family;
use super::common::{Base, refuse_biases, refuse_other_activations, refuse_unless};
use super::gguf::{self, Gguf};
use crate::fields::Fields;
use crate::{ModelError, ModelSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "llama",
    architectures: &["LlamaForCausalLM"],
    models: "Llama 2 and 3, Yi, SmolLM2, DeepSeek-R1-Distill-Llama",
    goldens: &[
        "bf16",
        "f16",
        "head_dim_64",
        "llama2_mha",
        "llama3_new",
        "llama3_old",
        "sharded",
        "tied_sentencepiece",
        "yi",
    ],
    gguf: Some(Gguf {
        matches: |metadata| Ok(!gguf::has_experts(metadata)?),
        ..Gguf::of("llama", &[gguf::LLAMA_FIELDS], &[gguf::LLAMA_TENSORS, gguf::MLP_NORM, gguf::IN_TURNS])
    }),
    read,
};

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_biases(fields, &["attention_bias", "mlp_bias"])?;
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    // SmolLM's files.
    refuse_unless(fields, "rope_interleaved", false, "only false is implemented")?;
    fields.ignore(&["is_llama_config"]);
    let base = Base::read(fields, FAMILY.model_type, None, None)?;
    let rope = base.rope(fields, 1e4)?;
    base.model(fields, vec![rope], (0..base.layers).map(|i| base.layer(i)).collect())
}
