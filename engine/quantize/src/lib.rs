//! Writes a model as a GGUF file with packed weights (`lagoon quantize`).
//!
//! [`Source::open`] opens a model with elements in 16 or 32 bits and its vocabulary, [`calibrate`] measures which columns of its
//! matrices matter by running it over a text, and [`Source::write`] quantises tensor by tensor into a file that is complete or is not
//! there. [`encode`] packs rows; names and layouts of the file are `lagoon-model`'s, which reads such files, too.
//!
//! It must never know a family of models, and never hold a whole tensor in f32 but for vectors.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

mod calibrate;
pub mod encode;
mod error;
mod observed;
mod plan;
mod source;
mod write;

pub use calibrate::{Importance, Site, calibrate};
pub use error::QuantizeError;
pub use plan::Target;
pub use source::Source;
pub use write::{KindSummary, Options, Progress, Summary, check_place};
