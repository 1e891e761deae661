//! Golden models (tools/goldens): small models of every supported variant with transformers' logits.

use serde::Deserialize;
use std::path::PathBuf;

/// All goldens with a model: those that the families name.
pub fn models() -> impl Iterator<Item = &'static str> {
    lagoon_model::FAMILIES.iter().flat_map(|family| family.goldens).copied()
}

/// Contents of `golden.json`.
#[derive(Debug, Deserialize)]
pub struct Description {
    /// The model's directory, from the repository's root, if it is not beside the golden.
    pub model: Option<PathBuf>,
    pub tokens: Vec<u32>,
    pub greedy_continuation: Vec<u32>,
    /// Limit of the model's context, in tokens.
    pub max_model_len: Option<u32>,
    pub logit_std: f32,
    /// Largest allowed difference with weights and KV in the model's own type.
    pub tolerance: f32,
    /// Largest allowed difference with weights widened and KV in f32; 1e-3 if absent.
    #[serde(default = "f32_default")]
    pub tolerance_f32: f32,
}

fn f32_default() -> f32 {
    1e-3
}

/// A golden model.
#[derive(Debug)]
pub struct Golden {
    pub name: String,
    /// The model's directory.
    pub dir: PathBuf,
    pub description: Description,
    /// Logits of the last `rows` positions, `[rows][vocab]`.
    pub logits: Vec<f32>,
    pub rows: usize,
    pub vocab: usize,
}

impl Golden {
    /// Reads `tests/goldens/<name>`.
    ///
    /// # Panics
    /// If it is absent or malformed.
    #[must_use]
    pub fn load(name: &str) -> Self {
        let dir = crate::root().join("tests/goldens").join(name);
        let text = std::fs::read_to_string(dir.join("golden.json")).unwrap();
        let description: Description = serde_json::from_str(&text).unwrap();
        let bytes = std::fs::read(dir.join("logits.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = tensors.tensor("logits").unwrap();
        let [rows, vocab] = *tensor.shape() else { panic!("logits are a matrix") };
        let logits = tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let dir = description.model.as_ref().map_or(dir, |model| crate::root().join(model));
        Self { name: name.to_owned(), dir, description, logits, rows, vocab }
    }

    /// Logits of position `pos`, if the golden has them.
    #[must_use]
    pub fn at(&self, pos: usize) -> Option<&[f32]> {
        let first = self.description.tokens.len() - self.rows;
        let row = pos.checked_sub(first)?;
        self.logits.get(row * self.vocab..(row + 1) * self.vocab)
    }
}

/// Largest absolute difference.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) })
}
