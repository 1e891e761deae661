//! A model's identity.
//!
//! Reading a large checkpoint whole would take minutes, so the hash covers all that says what the model is and samples
//! of its content. Precisely, blake3 over, in this order:
//!
//! 1. the text `lagoon model 1`;
//! 2. the fields of [`ModelConfig`] that decide the computation (not token ids, nor the claimed element type), in a
//!    fixed order, numbers in decimal and reals as the bits of their f64 or f32;
//! 3. the element type that weights are converted to at loading, or `as stored`;
//! 4. each tensor's name, element type and shape, by name;
//! 5. of each safetensors file, in the order of their names: its length, its header, the first and the last 64 KiB of
//!    its data, and 64 KiB at every multiple of 64 MiB of its data.
//!
//! Directory names, modification times and the other files do not count. Two shardings of the same weights hash
//! differently, and a change that touches only bytes between samples is not seen: the hash tells models apart, it does
//! not authenticate them.

use crate::checkpoint::TensorFile;
use crate::{Checkpoint, ModelConfig, RopeScaling};
use lagoon_types::{DType, ModelHash};
use std::fmt::Write as _;

/// Bytes of one sample.
const SAMPLE_BYTES: usize = 64 << 10;
/// Distance of samples in a file's data, in bytes.
const SAMPLE_STRIDE: usize = 64 << 20;

/// The identity of `checkpoint` under `config` when its weights are converted to `dtype` (or kept).
#[must_use]
pub fn model_hash(config: &ModelConfig, checkpoint: &Checkpoint, dtype: Option<DType>) -> ModelHash {
    let mut hasher = blake3::Hasher::new();
    let mut text = format!("lagoon model 1\n{}", canonical(config));
    let _ = match dtype {
        Some(dtype) => writeln!(text, "converted {dtype}"),
        None => writeln!(text, "as stored"),
    };
    for (name, info) in checkpoint.tensors() {
        let _ = writeln!(text, "{name} {:?} {:?}", info.stored, info.shape);
    }
    hasher.update(text.as_bytes());
    for file in checkpoint.files() {
        hash_file(&mut hasher, file);
    }
    ModelHash(*hasher.finalize().as_bytes())
}

/// The fields that decide the computation, as text.
fn canonical(config: &ModelConfig) -> String {
    let ModelConfig { family, hidden, intermediate, layers, geometry, vocab, .. } = config;
    let (heads, kv_heads, head_dim) = (geometry.heads, geometry.kv_heads, geometry.head_dim);
    let scaling = match config.rope_scaling {
        RopeScaling::None => "none".to_owned(),
        RopeScaling::Linear { factor } => format!("linear {:08x}", factor.to_bits()),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
            let [f, l, h] = [factor, low_freq_factor, high_freq_factor].map(f32::to_bits);
            format!("llama3 {f:08x} {l:08x} {h:08x} {original_positions}")
        }
    };
    // Models without biases hash as they did before there were any.
    let alibi = config.alibi.map(|alibi| format!("alibi {:08x}\n", alibi.bias_max.to_bits())).unwrap_or_default();
    format!(
        "{}\nhidden {hidden}\nintermediate {intermediate}\nlayers {layers}\nheads {heads}\nkv heads {kv_heads}\n\
         head dim {head_dim}\nvocab {vocab}\neps {:08x}\ntied {}\nwindow {:?}\npositions {}\ntheta {:016x}\n\
         scaling {scaling}\n{alibi}",
        family.name(),
        config.norm_eps.to_bits(),
        config.tie_word_embeddings,
        config.window,
        config.max_positions,
        config.rope_theta.to_bits(),
    )
}

fn hash_file(hasher: &mut blake3::Hasher, file: &TensorFile) {
    let (header, data) = file.bytes.split_at(file.data_start);
    hasher.update(&(file.bytes.len() as u64).to_le_bytes());
    hasher.update(header);
    // The first sample is the one at 0; samples may overlap the last one, which does no harm.
    for start in (0..data.len()).step_by(SAMPLE_STRIDE) {
        hasher.update(&data[start..data.len().min(start + SAMPLE_BYTES)]);
    }
    hasher.update(&data[data.len().saturating_sub(SAMPLE_BYTES)..]);
}
