//! Fields of the translated endpoints, as data: what is not taken is refused by these tables, and `/openapi.json` and the reference
//! page ([`crate::openapi`]) show them.

use crate::{
    error::ApiError,
    fields::{Fields, Neutral},
};

/// A field of a request, or of an object inside it.
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) support: Support,
    pub(crate) note: &'static str,
}

#[derive(Clone, Copy)]
pub(crate) enum Support {
    Required,
    Supported,
    /// Accepted with any value; no answer depends on it.
    WithoutEffect,
    /// Refused by name, but for values that change nothing.
    Refused(Neutral),
}

/// A field without which a request is refused.
pub(super) const fn needs(name: &'static str, note: &'static str) -> Field {
    Field { name, support: Support::Required, note }
}

/// A field that is honoured.
pub(super) const fn takes(name: &'static str, note: &'static str) -> Field {
    Field { name, support: Support::Supported, note }
}

/// A field that is accepted and changes no answer.
pub(super) const fn ignores(name: &'static str, note: &'static str) -> Field {
    Field { name, support: Support::WithoutEffect, note }
}

/// A field that is refused unless its value is `neutral`.
pub(super) const fn refuses(name: &'static str, neutral: Neutral) -> Field {
    Field { name, support: Support::Refused(neutral), note: "" }
}

impl Field {
    fn neutral(&self) -> Option<Neutral> {
        match self.support {
            Support::Required | Support::Supported => None,
            Support::WithoutEffect => Some(Neutral::Any),
            Support::Refused(neutral) => Some(neutral),
        }
    }
}

/// Refuses by name what is left of an object's fields, but for what `table` lets pass.
pub(super) fn finish(mut fields: Fields<'_>, table: &[Field]) -> Result<(), ApiError> {
    for field in table {
        if let Some(neutral) = field.neutral() {
            fields.neutral(&[(field.name, neutral)])?;
        }
    }
    fields.finish()
}

/// The objects of an endpoint's requests: each with its path, empty for the request itself.
type Objects = &'static [(&'static str, &'static [Field])];

/// Every translated route that takes a body.
pub(crate) const ENDPOINTS: [(&str, Objects); 3] = [
    ("/v1/messages", super::anthropic::MESSAGES_OBJECTS),
    ("/v1/messages/count_tokens", super::anthropic::COUNT_OBJECTS),
    ("/v1/responses", super::responses::OBJECTS),
];

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Names of the request's own fields by support: honoured ones, ones without effect, refused ones, and of the honoured ones those
    /// that are required.
    pub(crate) fn names(route: &str) -> [Vec<&'static str>; 4] {
        let (_, objects) = ENDPOINTS.iter().find(|(known, _)| *known == route).unwrap();
        let fields = objects.iter().filter(|(path, _)| path.is_empty()).flat_map(|(_, fields)| fields.iter());
        let mut out = <[Vec<&str>; 4]>::default();
        for field in fields {
            let at = match field.support {
                Support::Required => {
                    out[3].push(field.name);
                    0
                }
                Support::Supported => 0,
                Support::WithoutEffect => 1,
                Support::Refused(_) => 2,
            };
            out[at].push(field.name);
        }
        out
    }

    #[test]
    fn no_field_of_an_object_is_listed_twice() {
        for (route, objects) in ENDPOINTS {
            let all = objects.iter().flat_map(|(path, fields)| fields.iter().map(move |field| (path, field.name)));
            let mut seen = std::collections::BTreeSet::new();
            for name in all {
                assert!(seen.insert(name), "{name:?} of {route}");
            }
        }
    }
}
