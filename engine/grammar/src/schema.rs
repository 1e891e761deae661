//! What of a JSON schema no grammar stands for, by its path.
//!
//! Keywords for validation that the compiler does not take are in [`REFUSED`]; annotations and unknown keywords
//! change nothing, as JSON Schema has it.

use crate::error::GrammarError;
use serde_json::{Map, Value, json};

/// Deepest nesting of a schema.
const DEPTH_MAX: usize = 64;

/// Keywords that hold a schema, or a list of schemas.
const SCHEMAS: &[&str] =
    &["items", "additionalItems", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"];
/// Keywords that hold an object of schemas.
const MAPS: &[&str] = &["properties", "patternProperties", "$defs", "definitions"];
/// Values of `format`.
const FORMATS: &[&str] =
    &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];
/// The keyword of the compiler's own options.
const OPTIONS: &str = "x-guidance";
/// White space between two parts of JSON: an empty line, and the indentation of deeply nested parts.
const WHITE_SPACE: &str = "(\r?\n){1,2}[ \t]{0,32}|[ \t]{1,32}";
/// A time with at most 60 seconds in its minute.
const SECONDS: &str = "^[^:]*:[0-9]{2}:[0-5]";
/// Keywords that no grammar stands for, with what to do instead.
const REFUSED: &[(&str, &str)] = &[
    ("not", "describe what is allowed instead"),
    ("if", "use anyOf with one schema a case"),
    ("then", "use anyOf with one schema a case"),
    ("else", "use anyOf with one schema a case"),
    ("contains", "describe every item with items or prefixItems"),
    ("minContains", "describe every item with items or prefixItems"),
    ("maxContains", "describe every item with items or prefixItems"),
    ("propertyNames", "use patternProperties with additionalProperties: false"),
    ("dependentRequired", "use anyOf with one schema a case"),
    ("dependentSchemas", "use anyOf with one schema a case"),
    ("dependencies", "use anyOf with one schema a case"),
    ("unevaluatedItems", "use items"),
    ("unevaluatedProperties", "use additionalProperties"),
    ("$dynamicRef", "use $ref to a place in the same schema (#/...)"),
    ("$recursiveRef", "use $ref to a place in the same schema (#/...)"),
    // The compiler's own options, which may switch these checks off.
    (OPTIONS, "leave it out"),
];

/// A schema as the compiler is given it: without keywords that change nothing but that it would refuse (`uniqueItems: false`),
/// with times as validators have them (it takes a 61st second in any minute), and with an end to what a weak model would go on with
/// for ever: white space between two parts, and properties that nobody named. Objects with `properties` have no others, unless
/// `additionalProperties` says so, or schemas are composed of several.
///
/// # Errors
/// [`GrammarError::Unsupported`] for what the compiler would not honour, with its path; [`GrammarError::Invalid`] for what is no
/// schema.
pub fn compilable(mut schema: Value) -> Result<Value, GrammarError> {
    let is_compact = schema.get(OPTIONS) == Some(&compact());
    if is_compact && let Some(keywords) = schema.as_object_mut() {
        keywords.remove(OPTIONS);
    }
    check(&schema)?;
    prepare(&mut schema);
    if !is_composed(&schema) {
        close(&mut schema);
    }
    if schema == true {
        schema = json!({});
    }
    if let Some(keywords) = schema.as_object_mut() {
        let options = if is_compact { compact() } else { json!({"whitespace_pattern": WHITE_SPACE}) };
        keywords.insert(OPTIONS.to_owned(), options);
    }
    Ok(schema)
}

/// The schema of the same values without white space between their parts.
#[must_use]
pub fn without_white_space(schema: Value) -> Value {
    let mut schema = if schema == true { json!({}) } else { schema };
    if let Some(keywords) = schema.as_object_mut() {
        keywords.entry(OPTIONS).or_insert_with(compact);
    }
    schema
}

/// The compiler's options for a schema of [`without_white_space`].
fn compact() -> Value {
    json!({"whitespace_flexible": false})
}

fn check(schema: &Value) -> Result<(), GrammarError> {
    at(schema, &mut Vec::new())
}

fn unsupported(path: &[String], what: &str, hint: &'static str) -> GrammarError {
    GrammarError::Unsupported { path: path.join("."), what: what.to_owned(), hint }
}

fn at(schema: &Value, path: &mut Vec<String>) -> Result<(), GrammarError> {
    if path.len() > DEPTH_MAX {
        return Err(GrammarError::Invalid(format!("the schema is nested more than {DEPTH_MAX} deep")));
    }
    match schema {
        Value::Bool(_) => Ok(()),
        Value::Object(keywords) => keywords.iter().try_for_each(|(keyword, value)| of(keyword, value, path)),
        _ => Err(GrammarError::Invalid(format!("`{}` of the schema is neither an object nor a boolean", place(path)))),
    }
}

fn place(path: &[String]) -> String {
    if path.is_empty() { "#".to_owned() } else { path.join(".") }
}

fn of(keyword: &str, value: &Value, path: &mut Vec<String>) -> Result<(), GrammarError> {
    if let Some((name, hint)) = REFUSED.iter().find(|(name, _)| *name == keyword) {
        return Err(unsupported(path, name, hint));
    }
    match (keyword, value) {
        ("uniqueItems", Value::Bool(true)) => {
            Err(unsupported(path, keyword, "leave it out, and check the answer for it"))
        }
        ("$ref", Value::String(to)) if to == "#" || to.starts_with("#/") => Ok(()),
        ("$ref", _) => Err(unsupported(path, keyword, "only a place in the same schema (#/...) can be referred to")),
        ("format", Value::String(name)) if !FORMATS.contains(&name.as_str()) => {
            Err(unsupported(path, &format!("format: {name}"), "use pattern, or leave it out"))
        }
        _ if MAPS.contains(&keyword) => {
            let empty = Map::new();
            let members = value.as_object().unwrap_or(&empty);
            members.iter().try_for_each(|(name, schema)| within(schema, path, &[keyword, name]))
        }
        (_, Value::Array(list)) if SCHEMAS.contains(&keyword) => {
            list.iter().enumerate().try_for_each(|(n, schema)| within(schema, path, &[&format!("{keyword}[{n}]")]))
        }
        _ if SCHEMAS.contains(&keyword) => within(value, path, &[keyword]),
        _ => Ok(()),
    }
}

fn within(schema: &Value, path: &mut Vec<String>, steps: &[&str]) -> Result<(), GrammarError> {
    let before = path.len();
    path.extend(steps.iter().map(|step| (*step).to_owned()));
    let checked = at(schema, path);
    path.truncate(before);
    checked
}

fn prepare(schema: &mut Value) {
    let Value::Object(keywords) = schema else { return };
    if keywords.get("uniqueItems") == Some(&Value::Bool(false)) {
        keywords.remove("uniqueItems");
    }
    if keywords.get("format").is_some_and(|format| format == "time" || format == "date-time") {
        let all = keywords.entry("allOf").or_insert_with(|| Value::Array(Vec::new()));
        all.as_array_mut().into_iter().for_each(|all| all.push(json!({"pattern": SECONDS})));
    }
    for (keyword, value) in keywords {
        match value {
            Value::Object(members) if MAPS.contains(&keyword.as_str()) => members.values_mut().for_each(prepare),
            Value::Array(list) if SCHEMAS.contains(&keyword.as_str()) => list.iter_mut().for_each(prepare),
            value if SCHEMAS.contains(&keyword.as_str()) => prepare(value),
            _ => {}
        }
    }
}

/// Whether an object may be described by several schemas at once.
fn is_composed(schema: &Value) -> bool {
    let Value::Object(keywords) = schema else { return false };
    let beside = ["$ref", "anyOf", "oneOf"].iter().any(|key| keywords.contains_key(*key));
    keywords.contains_key("allOf")
        || (beside && keywords.contains_key("properties"))
        || parts(keywords).any(is_composed)
}

/// Allows objects with `properties` no others, where the schema does not say.
fn close(schema: &mut Value) {
    let Value::Object(keywords) = schema else { return };
    let is_open = ["additionalProperties", "patternProperties"].iter().all(|key| !keywords.contains_key(*key));
    if is_open && keywords.contains_key("properties") {
        keywords.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
    for (keyword, value) in keywords {
        match value {
            Value::Object(members) if MAPS.contains(&keyword.as_str()) => members.values_mut().for_each(close),
            Value::Array(list) if SCHEMAS.contains(&keyword.as_str()) => list.iter_mut().for_each(close),
            value if SCHEMAS.contains(&keyword.as_str()) => close(value),
            _ => {}
        }
    }
}

/// The schemas that a schema's keywords hold.
fn parts(keywords: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    keywords.iter().flat_map(|(keyword, value)| -> Vec<&Value> {
        match value {
            Value::Object(members) if MAPS.contains(&keyword.as_str()) => members.values().collect(),
            Value::Array(list) if SCHEMAS.contains(&keyword.as_str()) => list.iter().collect(),
            value if SCHEMAS.contains(&keyword.as_str()) => vec![value],
            _ => Vec::new(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_grammar_stands_for_is_refused_with_its_path() {
        for (schema, message) in [
            (json!({"not": {}}), "`not` at `#` is not supported"),
            (json!({"properties": {"a": {"items": {"uniqueItems": true}}}}), "`uniqueItems` at `properties.a.items`"),
            (json!({"$defs": {"x": {"if": {}}}, "$ref": "#/$defs/x"}), "`if` at `$defs.x`"),
            (json!({"anyOf": [{}, {"format": "regex"}]}), "`format: regex` at `anyOf[1]`"),
            (json!({"prefixItems": [{"$ref": "https://example.com"}]}), "`$ref` at `prefixItems[0]`"),
            (json!({"x-guidance": {"lenient": true}}), "`x-guidance` at `#`"),
            (json!({"items": 3}), "`items` of the schema is neither"),
        ] {
            let error = check(&schema).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn annotations_and_names_of_properties_are_no_keywords() {
        let schema = json!({
            "title": "t", "x-order": 1, "deprecated": true, "type": "object",
            "properties": {"not": {"type": "string", "uniqueItems": false}, "if": true}, "required": ["not"],
        });
        assert_eq!(check(&schema), Ok(()));
        assert_eq!(compilable(schema).unwrap()["properties"]["not"], json!({"type": "string"}));
    }

    #[test]
    fn objects_have_the_properties_that_they_name() {
        let open = |schema: Value| compilable(schema).unwrap().get("additionalProperties").is_none();
        let inner = json!({"properties": {"b": {}}});
        assert!(!open(inner.clone()) && open(json!({"type": "object"})));
        assert_eq!(compilable(json!({"items": inner})).unwrap()["items"]["additionalProperties"], json!(false));
        assert_eq!(
            compilable(json!({"properties": {}, "additionalProperties": true})).unwrap()["additionalProperties"],
            true
        );
        let of = |key: &str| json!({"properties": {"a": {}}, key: [{"properties": {"b": {}}}]});
        assert!(open(of("allOf")) && open(of("anyOf")));
        assert!(open(json!({"properties": {"a": {}}, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}})));
    }

    #[test]
    fn white_space_is_bounded_or_none() {
        let of = |schema: Value| compilable(schema).unwrap()[OPTIONS].clone();
        let compact = without_white_space(json!({"type": "object"}));
        assert_eq!((of(json!({}))["whitespace_pattern"].is_string(), of(compact)), (true, super::compact()));
        assert_eq!(of(without_white_space(json!(true))), super::compact());
        assert!(
            check(&json!({"items": without_white_space(json!({}))})).is_err(),
            "the compiler's options are no one else's"
        );
    }

    #[test]
    fn deep_schemas_are_refused() {
        let deep = (0..100).fold(json!({}), |inner, _| json!({"items": inner}));
        assert!(check(&deep).unwrap_err().to_string().contains("nested"));
    }
}
