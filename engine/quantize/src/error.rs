//! Reasons why a model cannot be quantised.

use lagoon_backend::{DeviceError, WeightFormat};
use lagoon_model::ModelError;
use lagoon_text::{EncodeError, TextError};
use std::path::PathBuf;

/// Reason why no file was written.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("cannot write the tokenizer: {0}")]
    Text(#[from] TextError),
    #[error("cannot write {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// The file is there.
    #[error("{} exists\nhint: --force replaces it", path.display())]
    Exists { path: PathBuf },
    /// The file has another end than its readers take.
    #[error("{} must end in .gguf", path.display())]
    NotGguf { path: PathBuf },
    /// An element is NaN or infinite.
    #[error(
        "the tensor `{tensor}` has {value} in row {row}: it cannot be quantised\nhint: the weights are damaged, or overflowed in f16"
    )]
    NotFinite { tensor: String, row: usize, value: f32 },
    /// An element is too large for the format's scales.
    #[error("the tensor `{tensor}` has {value} in row {row}, which {format} cannot hold\nhint: --format bf16")]
    TooLarge { tensor: String, row: usize, value: f32, format: WeightFormat },
    /// The calibration text is of no use.
    #[error("cannot calibrate with {}: {problem}", path.display())]
    Calibration { path: PathBuf, problem: String },
    #[error("the calibration text cannot be tokenised: {0}")]
    Encode(#[from] EncodeError),
    #[error("cannot run the model over the calibration text: {0}")]
    Device(#[from] DeviceError),
    /// The caller stopped.
    #[error("stopped by a signal; no file was written")]
    Stopped,
}
