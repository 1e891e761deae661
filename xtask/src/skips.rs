//! Tests that may be skipped: tests/skips.toml lists each with its reason. Any other skipped test fails the test command.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::tidy::Finding;
use crate::{source, workspace};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    skip: Vec<Listed>,
}

/// A test that may be skipped, by the name under which the harness reports it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Listed {
    pub(crate) name: String,
    reason: String,
}

pub(crate) fn listed(root: &Path) -> Result<Vec<Listed>> {
    parse(&std::fs::read_to_string(root.join("tests/skips.toml")).context("read tests/skips.toml")?)
}

fn parse(text: &str) -> Result<Vec<Listed>> {
    let file: File = toml::from_str(text).context("parse tests/skips.toml")?;
    for entry in &file.skip {
        ensure!(!entry.reason.trim().is_empty(), "tests/skips.toml: `{}` has no reason", entry.name);
    }
    Ok(file.skip)
}

/// A skipped test: its name and why, in the test's own words.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Skipped {
    pub(crate) name: String,
    pub(crate) reason: String,
}

/// The log that tests append to when they cannot run: a line `name<TAB>reason` each.
pub(crate) fn parse_log(text: &str) -> BTreeSet<Skipped> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, reason) = line.split_once('\t').unwrap_or((line, "no reason given"));
            Skipped { name: name.trim().to_owned(), reason: reason.trim().to_owned() }
        })
        .collect()
}

/// Listed names for which there is no function any more.
pub(crate) fn dead(root: &Path) -> Result<Vec<Finding>> {
    let mut names: BTreeSet<String> = BTreeSet::new();
    for path in workspace::files(root, "rs")? {
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        names.extend(source::functions(&source::mask(&text)).into_iter().map(|f| f.name));
    }
    let listed = listed(root)?;
    let gone = listed.iter().filter(|l| !names.contains(function_name(&l.name)));
    Ok(gone.map(|l| Finding::new("skip", &l.name, "tests/skips.toml lists a test that does not exist")).collect())
}

fn function_name(test: &str) -> &str {
    test.rsplit("::").next().unwrap_or(test)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_list_and_log() {
        let list = parse("[[skip]]\nname = \"gpu::a\"\nreason = \"needs a GPU\"\n").unwrap();
        assert_eq!(list[0].name, "gpu::a");
        assert!(parse("[[skip]]\nname = \"gpu::a\"\nreason = \"\"\n").is_err());
        assert!(parse("[[skip]]\nname = \"gpu::a\"\n").is_err());
        let log = parse_log("a::b\tno adapter\n\na::b\tno adapter\nc\n");
        assert_eq!(log.len(), 2);
        assert!(log.contains(&Skipped { name: "c".into(), reason: "no reason given".into() }));
    }

    #[test]
    fn names_end_in_the_function() {
        assert_eq!(function_name("a::b::c"), "c");
        assert_eq!(function_name("c"), "c");
    }
}
