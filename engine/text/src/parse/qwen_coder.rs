//! Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

use super::{Call, Tool, values};

pub(super) fn parse(block: &str, tools: &[Tool]) -> Option<Vec<Call>> {
    let body = block.strip_prefix("<tool_call>")?.trim_start().strip_prefix("<function=")?;
    let (name, mut rest) = body.split_once('>')?;
    let mut pairs = Vec::new();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix("</function>") {
            let after = after.trim();
            (after.is_empty() || after == "</tool_call>").then_some(())?;
            break;
        }
        let (key, value) = rest.strip_prefix("<parameter=")?.split_once('>')?;
        let (value, after) = value.split_once("</parameter>")?;
        // The template puts line breaks around a value.
        let value = value.strip_prefix('\n').unwrap_or(value);
        pairs.push((key.trim(), value.strip_suffix('\n').unwrap_or(value)));
        rest = after;
    }
    let name = name.trim();
    Some(vec![Call { name: name.to_owned(), arguments: values::arguments(name, pairs.into_iter(), tools) }])
}
