//! A model's identity ([`model_hash`]).
//!
//! Reading a large checkpoint whole would take minutes, so the hash covers its metadata and samples of its data:
//! blake3 over, in this order:
//!
//! 1. the text `lagoon model 3`;
//! 2. the [`ModelSpec`] without token ids, the claimed element type and the longest sequence, as its `Debug` text (rotary tables
//!    are those of that sequence: [`ModelSpec::limit_context`]);
//! 3. the element type that weights are converted to at loading, or `as stored`;
//! 4. each tensor's name, element type and shape, by name;
//! 5. of each file of tensors, in the order of their names: its length, its header, the first and the last 64 KiB of
//!    its data, and 64 KiB at every multiple of 64 MiB of its data.
//!
//! Directory names, modification times and other files do not count. Two shardings of the same weights hash
//! differently, and a change of bytes between samples is missed: the hash distinguishes models, it does not
//! authenticate them.

use crate::checkpoint::TensorFile;
use crate::{Checkpoint, ModelSpec};
use lagoon_types::{DType, ModelHash};
use std::fmt::Write as _;

/// Bytes of one sample.
const SAMPLE_BYTES: usize = 64 << 10;
/// Distance of samples in a file's data, in bytes.
const SAMPLE_STRIDE: usize = 64 << 20;

/// The identity of `checkpoint` under `spec` when its weights are converted to `dtype` (or kept).
#[must_use]
pub fn model_hash(spec: &ModelSpec, checkpoint: &Checkpoint, dtype: Option<DType>) -> ModelHash {
    let mut hasher = blake3::Hasher::new();
    let computed = ModelSpec { dtype: None, bos_id: None, eos_ids: Vec::new(), max_positions: 0, ..spec.clone() };
    let mut text = format!("lagoon model 3\n{computed:?}\n");
    let _ = match dtype {
        Some(dtype) => writeln!(text, "converted {dtype}"),
        None => writeln!(text, "as stored"),
    };
    for (name, info) in checkpoint.tensors() {
        let _ = writeln!(text, "{name} {} {:?}", info.stored, info.shape);
    }
    hasher.update(text.as_bytes());
    for file in checkpoint.files() {
        hash_file(&mut hasher, file);
    }
    ModelHash(*hasher.finalize().as_bytes())
}

fn hash_file(hasher: &mut blake3::Hasher, file: &TensorFile) {
    let bytes = file.map.bytes();
    let (header, data) = bytes.split_at(file.data_start);
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(header);
    // The first sample is the one at 0; an overlap with the last one is harmless.
    for start in (0..data.len()).step_by(SAMPLE_STRIDE) {
        hasher.update(&data[start..data.len().min(start + SAMPLE_BYTES)]);
    }
    hasher.update(&data[data.len().saturating_sub(SAMPLE_BYTES)..]);
}
