//! SmolLM3 (Hugging Face 2025): Llama without rotation on some layers.

use super::Family;
use super::common::{Base, count, refuse_biases, refuse_other_activations, refuse_unless, windows};
use super::gguf::{self, Gguf};
use crate::fields::Fields;
use crate::{ModelError, ModelSpec, RopeSpec};
use lagoon_types::limits::LAYERS_MAX;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    model_type: "smollm3",
    architectures: &["SmolLM3ForCausalLM"],
    models: "SmolLM3",
    goldens: &["smollm3"],
    gguf: Some(Gguf::of("smollm3", &[gguf::LLAMA_FIELDS], &[gguf::LLAMA_TENSORS, gguf::MLP_NORM, gguf::IN_TURNS])),
    read,
};

/// Rotary tables by index.
const ROTATED: usize = 0;
const NOT_ROTATED: usize = 1;

fn read(fields: &Fields) -> Result<ModelSpec, ModelError> {
    refuse_biases(fields, &["attention_bias", "mlp_bias"])?;
    refuse_unless(fields, "use_sliding_window", false, "a window is not implemented for this family")?;
    refuse_other_activations(fields, "hidden_act", &["silu", "swish"])?;
    let base = Base::read(fields, FAMILY.model_type, Some(4), None)?;
    windows(fields, base.layers, None)?;
    fields.ignore(&["sliding_window", "max_window_layers", "no_rope_layer_interval"]);
    // In spite of its name the list has 1 where a layer is rotated.
    let rotated: Vec<bool> = match fields.get("no_rope_layers") {
        None => {
            let interval = count(fields, "no_rope_layer_interval", LAYERS_MAX)?.unwrap_or(4) as usize;
            (0..base.layers).map(|i| !(i + 1).is_multiple_of(interval)).collect()
        }
        Some(value) => {
            let flag = |flag: &Value| flag.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1);
            let flags = value.as_array().and_then(|flags| flags.iter().map(flag).collect::<Option<Vec<bool>>>());
            let flags = flags.filter(|flags| flags.len() == base.layers);
            flags.ok_or_else(|| fields.invalid("no_rope_layers", "it must be a list of 0 and 1, one a layer"))?
        }
    };
    let layer = |(i, rotated): (usize, bool)| {
        let mut layer = base.layer(i);
        layer.attention.rope = if rotated { ROTATED } else { NOT_ROTATED };
        layer
    };
    let layers = rotated.into_iter().enumerate().map(layer).collect();
    let mut model = base.model(fields, vec![base.rope(fields, 2e6)?, RopeSpec::NONE], layers)?;
    if fields.get("tie_word_embeddings").is_none() {
        model.head = None;
    }
    Ok(model)
}
