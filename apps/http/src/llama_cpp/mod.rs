//! llama.cpp's own endpoints, as far as its web page and common clients use them: `/completion`, `/props`, `/slots`,
//! `/apply-template`. (`/tokenize` and `/detokenize` take its shapes beside vLLM's: [`crate::tokens`].)
//!
//! `/completion` is a completion whose fields have other names, and whose response has another shape: sampling, limits, streams
//! and their journal are those of `/v1/completions`.

mod completion;
mod fields;
mod props;
mod reply;

#[cfg(test)]
pub(crate) use completion::ask;
pub(crate) use completion::completion;
pub(crate) use fields::UNREPORTED;
#[cfg(test)]
pub(crate) use props::applied;
pub(crate) use props::{Applied, Props, Slot, apply_template, props, slots};
pub(crate) use reply::Completion;
