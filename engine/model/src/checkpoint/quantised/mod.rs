//! Quantised safetensors checkpoints as people have them: FP8, MXFP4 and 4-bit groups (ADR 29).
//!
//! A quantised matrix is several tensors of a file: codes, scales, zero points. When a checkpoint is opened they become one tensor
//! under the name that families ask for ([`assemble`]), whose rows are made into blocks of a [`lagoon_backend::WeightFormat`], or
//! decoded, as the loader asks for them ([`matrix::Matrix`]). Nothing outside of this folder knows how methods lay out tensors.

mod assemble;
mod config;
mod int4;
pub(crate) mod matrix;
#[cfg(test)]
mod tests;

use crate::ModelError;
use crate::fields::Fields;
pub(crate) use assemble::assemble;
pub(crate) use config::Quantisation;
use std::path::Path;

/// How the checkpoint in the directory `dir` is quantised, by its config.json; `None` if it is not, or has none.
pub(crate) fn of_dir(dir: &Path) -> Result<Option<Quantisation>, ModelError> {
    let config = dir.join("config.json");
    if config.exists() { Quantisation::read(&Fields::read(&config)?) } else { Ok(None) }
}
