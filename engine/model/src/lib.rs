//! Models as Hugging Face stores them (`config.json`, `generation_config.json`, safetensors, and hub names) and as llama.cpp does
//! ([`gguf`]).
//!
//! This crate turns a directory, a GGUF file or a hub name into three things: a [`ModelSpec`], the model as data; a
//! [`Checkpoint`], its tensors, memory-mapped and checked; and [`Weights`], those tensors on a
//! [`lagoon_backend::Device`]. It computes nothing but rotary angles ([`Rope`]) and the model's identity
//! ([`model_hash`]).
//!
//! Files are checked before use: a field that would change the result and that Lagoon does not implement is refused
//! by name, never ignored.

pub mod checkpoint;
mod config;
mod convert;
mod download;
mod error;
pub mod export;
pub mod families;
pub mod fields;
pub mod fuzz;
pub mod generation;
pub mod gguf;
pub mod hash;
pub mod hub;
mod hub_gguf;
mod loaded;
mod mapped;
pub mod pooling;
mod resolve;
pub mod rope;
pub mod spec;
pub mod split;
mod verify;
pub mod weights;

pub use checkpoint::{Checkpoint, LoadedTensor, TensorInfo};
pub use error::ModelError;
pub use export::Export;
pub use families::{FAMILIES, Family};
pub use generation::GenerationConfig;
pub use hash::model_hash;
pub use hub::{DownloadProgress, Hub, HubName};
pub use loaded::{Loaded, loaded};
pub use pooling::EmbeddingConfig;
pub use resolve::resolve_model;
pub use rope::{Rope, RopeScaling, RopeSpec};
pub use spec::{ModelSpec, Norm};
pub use split::{KvPlace, KvSplit};
pub use verify::{Reading, Verified, verify};
pub use weights::{Layer, Weights};
