//! JSON inside of calls.

use super::{Call, Tool};
use serde_json::{Map, Value};

/// A call from a JSON object with `name` and the arguments under one of `keys`.
pub(super) fn call(json: &str, keys: &[&str]) -> Option<Call> {
    call_of(&serde_json::from_str(json).ok()?, keys)
}

/// A call from a JSON value with `name` and the arguments under one of `keys`: an object, or an object as a string.
pub(super) fn call_of(value: &Value, keys: &[&str]) -> Option<Call> {
    let name = value.get("name")?.as_str()?.to_owned();
    let arguments = match keys.iter().find_map(|key| value.get(key)) {
        None => "{}".to_owned(),
        Some(Value::String(text)) => object(text)?,
        Some(value) => value.is_object().then(|| value.to_string())?,
    };
    Some(Call { name, arguments })
}

/// `text` without white space around it, if it is a JSON object.
pub(super) fn object(text: &str) -> Option<String> {
    let text = text.trim();
    serde_json::from_str::<Map<String, Value>>(text).is_ok().then(|| text.to_owned())
}

/// The arguments `pairs` of the function `name` as JSON: a value is a string where the tool's schema says so, else what it is
/// as JSON, or a string if it is none.
pub(super) fn arguments<'a>(name: &str, pairs: impl Iterator<Item = (&'a str, &'a str)>, tools: &[Tool]) -> String {
    let properties = tools.iter().find(|tool| tool.name == name).map(|tool| &tool.parameters["properties"]);
    let map: Map<String, Value> = pairs
        .map(|(key, text)| {
            let is_text = properties.is_some_and(|properties| properties[key]["type"] == "string");
            let json = (!is_text).then(|| serde_json::from_str(text.trim()).ok()).flatten();
            (key.to_owned(), json.unwrap_or_else(|| Value::from(text)))
        })
        .collect();
    Value::Object(map).to_string()
}
