//! Hermes, Qwen 2.5 and Qwen3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

use super::{Call, values};

pub(super) fn parse(block: &str) -> Option<Vec<Call>> {
    let json = block.strip_prefix("<tool_call>")?;
    let json = json.strip_suffix("</tool_call>").unwrap_or(json);
    Some(vec![values::call(json, &["arguments", "parameters"])?])
}
