//! Errors of models: every message names the file, the field or tensor and its value; most end with a `hint:` line
//! for the user.

use lagoon_backend::DeviceError;
use std::path::PathBuf;

/// Characters of a name or value of a file in a message.
const SHOWN_CHARS: usize = 100;

/// `text`, which a file may have made long, cut to a readable length.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Reason why a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file or directory cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// A file's content is invalid.
    #[error("{} is not valid: {problem}", path.display())]
    Malformed { path: PathBuf, problem: String },
    /// A field that has no default is absent (or null).
    #[error("{}: the field `{field}` is missing\nhint: {hint}", path.display())]
    MissingField { path: PathBuf, field: String, hint: String },
    /// A field's value is of the wrong type, out of range or contradicts another.
    #[error("{}: the field `{field}` is {value}, which is not valid: {problem}", path.display())]
    InvalidField { path: PathBuf, field: String, value: String, problem: String },
    /// The model needs a feature that Lagoon does not implement.
    #[error("{}: the field `{field}` is {value}, which Lagoon does not support\nhint: {hint}", path.display())]
    Unsupported { path: PathBuf, field: String, value: String, hint: String },
    /// A tensor is absent, has another shape or type than the configuration says, or lies outside its file.
    #[error("{}: the tensor `{tensor}` {problem}", path.display())]
    Tensor { path: PathBuf, tensor: String, problem: String },
    /// The family has no table of GGUF's names.
    #[error("{}: {family:?} models are not written as GGUF files\nhint: families that are: {families}", path.display())]
    NoGguf { path: PathBuf, family: String, families: String },
    /// A GGUF file of the architecture would be read as another model.
    #[error("{}: a GGUF file of the architecture {architecture:?} cannot express this model: {problem}", path.display())]
    NotExpressed { path: PathBuf, architecture: String, problem: String },
    /// A context longer than the model's was asked for.
    #[error(
        "a context of {asked} tokens was asked for, and the model's has {most}\nhint: lower --max-model-len, or leave it out"
    )]
    Context { asked: u32, most: u32 },
    /// The KV of layers with a window cannot be kept apart.
    #[error("KV of a {family} model has one group: {problem}\nhint: --kv-groups=off")]
    NotSplit { family: String, problem: String },
    /// Neither a directory nor a hub name, or a directory that holds no model.
    #[error("{name:?} is not a model: {problem}\nhint: {hint}")]
    NotAModel { name: String, problem: String, hint: String },
    /// The hub refused, could not be reached, or broke off.
    #[error("cannot get {file} of {name} from {endpoint}: {problem}\nhint: {hint}")]
    Hub { name: String, endpoint: String, file: String, problem: String, hint: String },
    /// The device refused a weight.
    #[error("cannot load the weights: {0}")]
    Device(#[from] DeviceError),
}
