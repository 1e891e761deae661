//! The plainest forward pass of a model on the host backend, for tests that compare logits.

use lagoon_backend::CpuDevice;
use lagoon_model::{Checkpoint, ModelSpec, Weights};
use lagoon_runner::{Decoder, Model};
use lagoon_types::DType;
use std::path::{Path, PathBuf};

pub(crate) fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens")
}

/// Logits of every token, `[tokens][vocab]`, with the weights in `dtype`, or as the files have them.
pub(crate) fn logits(path: &Path, tokens: &[u32], dtype: Option<DType>) -> Vec<f32> {
    let (spec, checkpoint) = (ModelSpec::open(path).unwrap(), Checkpoint::open(path).unwrap());
    let mut device = CpuDevice::with_threads(1);
    let weights = Weights::load(&mut device, &checkpoint, &spec, dtype, &mut |_, _| {}).unwrap();
    Decoder::new(&Model::new(&spec, weights)).plain_logits(&mut device, DType::F32, tokens).unwrap()
}

pub(crate) fn worst(found: &[f32], expected: &[f32]) -> f32 {
    let found = &found[found.len() - expected.len()..];
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
