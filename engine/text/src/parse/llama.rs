//! Llama 3: `{"name": …, "parameters": {…}}`, possibly after `<|python_tag|>`. Only the name of a given tool makes it a call:
//! other JSON is an answer.

use super::{Call, Tool, values};

pub(super) const TAG: &str = "<|python_tag|>";

pub(super) fn parse(block: &str, tools: &[Tool]) -> Option<Vec<Call>> {
    let call = values::call(block.strip_prefix(TAG).unwrap_or(block), &["parameters", "arguments"])?;
    tools.iter().any(|tool| tool.name == call.name).then(|| vec![call])
}
