//! The listed exceptions of xtask/tidy.toml.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::Finding;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    exception: Vec<Exception>,
}

/// One exception. `subject` is a finding's subject; a `*` at its end stands for any ending.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Exception {
    rule: String,
    subject: String,
    reason: String,
}

impl Exception {
    fn covers(&self, finding: &Finding) -> bool {
        self.rule == finding.rule
            && match self.subject.strip_suffix('*') {
                Some(start) => finding.subject.starts_with(start),
                None => self.subject == finding.subject,
            }
    }
}

pub(super) fn parse(text: &str) -> Result<Vec<Exception>> {
    let file: File = toml::from_str(text).context("parse xtask/tidy.toml")?;
    for exception in &file.exception {
        ensure!(
            !exception.reason.trim().is_empty(),
            "xtask/tidy.toml: the exception for `{}` gives no reason",
            exception.subject
        );
    }
    Ok(file.exception)
}

/// The findings that no exception covers, and one finding for each exception that covers none.
pub(super) fn apply(exceptions: &[Exception], findings: Vec<Finding>) -> Vec<Finding> {
    let unused = exceptions.iter().filter(|e| !findings.iter().any(|f| e.covers(f))).map(|e| {
        let message = format!("this exception of xtask/tidy.toml (rule {}) no longer applies: remove it", e.rule);
        Finding::new("exception", e.subject.clone(), message)
    });
    let unused: Vec<Finding> = unused.collect();
    findings.into_iter().filter(|f| !exceptions.iter().any(|e| e.covers(f))).chain(unused).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "[[exception]]\nrule = \"layer\"\nsubject = \"a -> *\"\nreason = \"r\"\n";

    #[test]
    fn covers_exactly_what_it_names() {
        let listed = parse(TEXT).unwrap();
        let covered = Finding::new("layer", "a -> b", "");
        let other = Finding::new("layer", "b -> a", "");
        let rule = Finding::new("owner", "a -> b", "");
        assert_eq!(apply(&listed, vec![covered, other.clone(), rule.clone()]), [other, rule]);
    }

    #[test]
    fn an_exception_that_covers_nothing_is_an_error() {
        let left = apply(&parse(TEXT).unwrap(), vec![]);
        assert_eq!(left.len(), 1);
        assert_eq!((left[0].rule, left[0].subject.as_str()), ("exception", "a -> *"));
    }

    #[test]
    fn needs_a_reason_and_known_fields() {
        assert!(parse(&TEXT.replace("\"r\"", "\" \"")).is_err());
        assert!(parse(&TEXT.replace("reason", "because")).is_err());
        assert!(parse("").unwrap().is_empty());
    }
}
