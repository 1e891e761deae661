//! Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and from v11 of its tokenizer on `[TOOL_CALLS]NAME{…}` for each
//! call, with `[CALL_ID]ID` or `[ARGS]` after the name.

use super::{Call, values};
use serde_json::Value;

pub(super) const CALLS: &str = "[TOOL_CALLS]";
pub(super) const ARGS: &str = "[ARGS]";
const ID: &str = "[CALL_ID]";
pub(super) const MARKS: &[&str] = &[CALLS, ARGS, ID];

pub(super) fn parse(block: &str) -> Option<Vec<Call>> {
    let block = block.strip_prefix(CALLS)?.trim();
    if block.starts_with('[') {
        let list: Vec<Value> = serde_json::from_str(block).ok()?;
        return list.iter().map(|call| values::call_of(call, &["arguments"])).collect();
    }
    let (head, json) = block.split_at(block.find('{')?);
    let end = [ARGS, ID].iter().filter_map(|mark| head.find(mark)).min().unwrap_or(head.len());
    let name = head[..end].trim();
    (!name.is_empty()).then_some(())?;
    Some(vec![Call { name: name.to_owned(), arguments: values::object(json)? }])
}
