//! GLM-4.5: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`.

use super::{Call, Tool, values};

pub(super) fn parse(block: &str, tools: &[Tool]) -> Option<Vec<Call>> {
    let body = block.strip_prefix("<tool_call>")?.strip_suffix("</tool_call>")?;
    let (name, mut rest) = body.split_at(body.find("<arg_key>").unwrap_or(body.len()));
    let name = name.trim();
    (!name.is_empty() && !name.contains(['\n', '<', '{'])).then_some(())?;
    let mut pairs = Vec::new();
    while !rest.trim_start().is_empty() {
        let (key, after) = rest.trim_start().strip_prefix("<arg_key>")?.split_once("</arg_key>")?;
        let (value, after) = after.trim_start().strip_prefix("<arg_value>")?.split_once("</arg_value>")?;
        pairs.push((key.trim(), value));
        rest = after;
    }
    Some(vec![Call { name: name.to_owned(), arguments: values::arguments(name, pairs.into_iter(), tools) }])
}
