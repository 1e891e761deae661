//! Models as Hugging Face stores them: `config.json`, `generation_config.json`, safetensors, and hub names.
//!
//! This crate turns a directory (or a hub name) into three things: a [`ModelConfig`], which is the model's shape apart
//! from its weights; a [`Checkpoint`], which is its tensors, memory-mapped and checked; and [`LlamaWeights`], which is
//! those tensors on a [`lagoon_backend::Device`]. It computes nothing but rotary angles ([`Rope`]) and the model's
//! identity ([`model_hash`]).
//!
//! Whatever a file says is checked before it is used: a field that would change the result and that Lagoon does not
//! implement is refused by its name, never ignored.

pub mod checkpoint;
pub mod config;
mod download;
mod error;
pub mod fields;
pub mod generation;
pub mod hash;
pub mod hub;
mod mapped;
mod mpt;
pub mod rope;
pub mod weights;

pub use checkpoint::{Checkpoint, TensorInfo};
pub use config::{Family, ModelConfig, Norm};
pub use error::ModelError;
pub use generation::GenerationConfig;
pub use hash::model_hash;
pub use hub::{DownloadProgress, Hub, HubName, resolve_model};
pub use rope::{Rope, RopeScaling};
pub use weights::{Layer, LlamaWeights, LoadedTensor};
