//! JSON read in place from a request's bytes, without a tree of values.
//!
//! [`Json::parse`] checks the whole text once. A [`Json`] is then a slice of it: lists and objects are walked entry by
//! entry, and only requested values are built. So a body takes memory for itself and for its used values only (a tree
//! takes 32 bytes and more for each `1,`).

use serde::{Deserialize, de::IgnoredAny};
use serde_json::Deserializer;

/// One value of a valid JSON text, without white space around it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Json<'a>(&'a str);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Null,
    Bool,
    Number,
    Text,
    List,
    Object,
}

impl Kind {
    /// Name of the kind with its article, for messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool => "a boolean",
            Self::Number => "a number",
            Self::Text => "a string",
            Self::List => "a list",
            Self::Object => "an object",
        }
    }
}

impl<'a> Json<'a> {
    /// Checks that `bytes` are one JSON value. Takes no memory but a bit for each level of nesting.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        serde_json::from_slice::<IgnoredAny>(bytes).map_err(|error| error.to_string())?;
        let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
        Ok(Self(trim(text)))
    }

    pub(crate) fn kind(self) -> Kind {
        match self.0.as_bytes().first() {
            Some(b'{') => Kind::Object,
            Some(b'[') => Kind::List,
            Some(b'"') => Kind::Text,
            Some(b't' | b'f') => Kind::Bool,
            Some(b'n') | None => Kind::Null,
            Some(_) => Kind::Number,
        }
    }

    /// Its text.
    pub(crate) fn source(self) -> &'a str {
        self.0
    }

    /// Length of its text.
    pub(crate) fn bytes(self) -> usize {
        self.0.len()
    }

    /// The value as type `T`.
    pub(crate) fn read<T: Deserialize<'a>>(self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.0)
    }

    /// A list or object without entries, or a text without characters.
    pub(crate) fn is_empty(self) -> bool {
        match self.kind() {
            Kind::Text => self.0 == r#""""#,
            Kind::List | Kind::Object => trim(&self.0[1..self.0.len() - 1]).is_empty(),
            Kind::Null | Kind::Bool | Kind::Number => false,
        }
    }

    /// The entries of a list; none of anything else.
    pub(crate) fn items(self) -> Items<'a> {
        Items { rest: if self.kind() == Kind::List { &self.0[1..] } else { "]" } }
    }

    /// The names, as they are written, and values of an object; none of anything else.
    pub(crate) fn members(self) -> Members<'a> {
        Members(Items { rest: if self.kind() == Kind::Object { &self.0[1..] } else { "}" } })
    }
}

/// JSON's white space only: a valid text has no other outside of strings.
fn trim(text: &str) -> &str {
    text.trim_matches([' ', '\t', '\n', '\r'])
}

/// The entries of a list, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Items<'a> {
    /// From an entry or the closing bracket on.
    rest: &'a str,
}

impl<'a> Items<'a> {
    /// The value that stands next.
    fn value(&mut self) -> Option<Json<'a>> {
        let mut values = Deserializer::from_str(self.rest).into_iter::<IgnoredAny>();
        values.next()?.ok()?;
        let (value, rest) = self.rest.split_at(values.byte_offset());
        self.rest = trim_start(rest);
        Some(Json(trim(value)))
    }
}

fn trim_start(text: &str) -> &str {
    text.trim_start_matches([' ', '\t', '\n', '\r'])
}

impl<'a> Iterator for Items<'a> {
    type Item = Json<'a>;

    fn next(&mut self) -> Option<Json<'a>> {
        self.rest = trim_start(self.rest.strip_prefix(',').unwrap_or(self.rest));
        if self.rest.starts_with([']', '}']) { None } else { self.value() }
    }
}

/// The members of an object, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Members<'a>(Items<'a>);

impl<'a> Iterator for Members<'a> {
    type Item = (Json<'a>, Json<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let name = self.0.next()?;
        self.0.rest = self.0.rest.strip_prefix(':')?;
        Some((name, self.0.value()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(value: Json<'_>) -> String {
        match value.kind() {
            Kind::List => format!("[{}]", value.items().map(shown).collect::<Vec<_>>().join(",")),
            Kind::Object => {
                let member = |(name, value): (Json<'_>, Json<'_>)| format!("{}:{}", shown(name), shown(value));
                format!("{{{}}}", value.members().map(member).collect::<Vec<_>>().join(","))
            }
            _ => value.0.to_owned(),
        }
    }

    #[test]
    fn values_are_walked_as_they_are_written() {
        for (text, whole) in [
            (" [ 1 , -2.5e3 ,\n[ ] , { } , null , \"a,]\\\"}\" ] ", r#"[1,-2.5e3,[],{},null,"a,]\"}"]"#),
            (
                "{ \"a\" : [true,false] ,\t\"b:\" :{\"c\":\"d\"} , \"a\":1}",
                r#"{"a":[true,false],"b:":{"c":"d"},"a":1}"#,
            ),
            ("5", "5"),
            ("[[[1],2],3]", "[[[1],2],3]"),
        ] {
            let value = Json::parse(text.as_bytes()).unwrap();
            assert_eq!(shown(value), whole);
            let same = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
            assert_eq!(same(text), same(&shown(value)));
        }
        for (text, empty) in
            [("[ ]", true), ("{\n}", true), ("\"\"", true), ("[0]", false), ("\" \"", false), ("0", false)]
        {
            assert_eq!(Json::parse(text.as_bytes()).unwrap().is_empty(), empty, "{text}");
        }
    }

    #[test]
    fn what_is_no_json_is_refused_before_anything_is_taken() {
        for text in ["", "{", "[1,]", "{\"a\" 1}", "[1 2]", "nul", "01", "\"\u{0}\"", "1 2"] {
            assert!(Json::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(Json::parse(b"\"\xff\"").is_err());
        let deep = ["[".repeat(100_000), "]".repeat(100_000)].concat();
        assert!(Json::parse(deep.as_bytes()).unwrap().items().count() == 1, "nesting takes no stack");
    }
}
