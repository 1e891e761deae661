//! DeepSeek: between begin and end of all calls, `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, then the arguments in a
//! code block (V3, R1), or `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}` (V3.1).

use super::{Call, values};

pub(super) const BEGIN: &str = "<｜tool▁calls▁begin｜>";
pub(super) const END: &str = "<｜tool▁calls▁end｜>";
pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```";
pub(super) const MARKS: &[&str] = &[BEGIN, END, CALL_BEGIN, CALL_END, SEPARATOR];

pub(super) fn parse(block: &str) -> Option<Vec<Call>> {
    let body = block.strip_prefix(BEGIN)?;
    let mut rest = body.strip_suffix(END).unwrap_or(body).trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let (call, after) = rest.strip_prefix(CALL_BEGIN)?.split_once(CALL_END)?;
        calls.push(one(call)?);
        rest = after.trim_start();
    }
    Some(calls)
}

fn one(call: &str) -> Option<Call> {
    let (kind, rest) = call.split_once(SEPARATOR)?;
    let (name, json) = match rest.split_once("```json") {
        Some((name, json)) if kind.trim() == "function" => (name, json.trim_end().strip_suffix(FENCE)?),
        _ => (kind, rest),
    };
    let name = name.trim();
    (!name.is_empty()).then_some(())?;
    Some(Call { name: name.to_owned(), arguments: values::object(json)? })
}
