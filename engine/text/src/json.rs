//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it, as templates expect: spaces after colons and
//! commas, and optional indentation.

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io;

/// Python's separators without indentation.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// `value` as JSON, optionally indented by `indent` spaces.
pub(crate) fn dumps(value: &impl Serialize, indent: Option<usize>) -> Result<String, String> {
    let mut out = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = vec![b' '; width.min(16)];
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&spaces)))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
    };
    written.map_err(|e| e.to_string())?;
    String::from_utf8(out).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn as_python_writes_it() {
        let value: Value = serde_json::from_str(r#"{"b":[1,2,{"c":null}],"a":"é<","e":[],"f":{}}"#).unwrap();
        assert_eq!(dumps(&value, None).unwrap(), r#"{"b": [1, 2, {"c": null}], "a": "é<", "e": [], "f": {}}"#);
        let value: Value = serde_json::from_str(r#"{"b":[1]}"#).unwrap();
        assert_eq!(dumps(&value, Some(2)).unwrap(), "{\n  \"b\": [\n    1\n  ]\n}");
    }
}
