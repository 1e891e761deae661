//! Tests that may be skipped: tests/skips.toml lists each with its reason. Any other skipped test fails the test command.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::finding::Finding;
use crate::{source, workspace};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    skip: Vec<Listed>,
}

/// A test that may be skipped, by its name in the harness's output, or a module of tests: `a::b::*`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Listed {
    pub(crate) name: String,
    reason: String,
}

impl Listed {
    /// Whether the entry is for this test.
    pub(crate) fn names(&self, test: &str) -> bool {
        self.name.strip_suffix('*').map_or(self.name == test, |module| test.starts_with(module))
    }

    /// The function or module that must exist, and the keyword that declares it.
    fn declared(&self) -> (&'static str, &str) {
        let (keyword, path) = self.name.strip_suffix("::*").map_or(("fn", self.name.as_str()), |path| ("mod", path));
        (keyword, path.rsplit("::").next().unwrap_or(path))
    }
}

pub(crate) fn listed(root: &Path) -> Result<Vec<Listed>> {
    parse(&std::fs::read_to_string(root.join("tests/skips.toml")).context("read tests/skips.toml")?)
}

pub(crate) fn parse(text: &str) -> Result<Vec<Listed>> {
    let file: File = toml::from_str(text).context("parse tests/skips.toml")?;
    for entry in &file.skip {
        ensure!(!entry.reason.trim().is_empty(), "tests/skips.toml: `{}` has no reason", entry.name);
        let path = entry.name.strip_suffix("::*").unwrap_or(&entry.name);
        ensure!(
            !path.is_empty() && !path.contains('*'),
            "tests/skips.toml: `{}` is neither a test's name nor a module's with `::*` at its end",
            entry.name
        );
    }
    Ok(file.skip)
}

/// A skipped test: its name, and its own reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Skipped {
    pub(crate) name: String,
    pub(crate) reason: String,
}

/// Parses the log to which skipped tests append a line `name<TAB>reason`.
pub(crate) fn parse_log(text: &str) -> BTreeSet<Skipped> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, reason) = line.split_once('\t').unwrap_or((line, "no reason given"));
            Skipped { name: name.trim().to_owned(), reason: reason.trim().to_owned() }
        })
        .collect()
}

/// Listed names whose function or module does not exist any more.
pub(crate) fn dead(root: &Path) -> Result<Vec<Finding>> {
    let mut names: BTreeSet<(&str, String)> = BTreeSet::new();
    for path in workspace::files(root, "rs")? {
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let masked = source::mask(&text);
        names.extend(source::functions(&masked).into_iter().map(|f| ("fn", f.name)));
        names.extend(source::modules(&masked).into_iter().map(|name| ("mod", name)));
    }
    let listed = listed(root)?;
    let gone = listed.iter().filter(|l| {
        let (keyword, name) = l.declared();
        !names.contains(&(keyword, name.to_owned()))
    });
    Ok(gone.map(|l| Finding::new("skip", &l.name, "tests/skips.toml lists what does not exist")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_list_and_log() {
        let list = parse("[[skip]]\nname = \"gpu::a\"\nreason = \"needs a GPU\"\n").unwrap();
        assert_eq!(list[0].name, "gpu::a");
        assert!(parse("[[skip]]\nname = \"gpu::a\"\nreason = \"\"\n").is_err());
        assert!(parse("[[skip]]\nname = \"gpu::*::a\"\nreason = \"r\"\n").is_err());
        assert!(parse("[[skip]]\nname = \"gpu*\"\nreason = \"r\"\n").is_err());
        assert!(parse("[[skip]]\nname = \"::*\"\nreason = \"r\"\n").is_err());
        assert!(parse("[[skip]]\nname = \"gpu::a\"\n").is_err());
        let log = parse_log("a::b\tno adapter\n\na::b\tno adapter\nc\n");
        assert_eq!(log.len(), 2);
        assert!(log.contains(&Skipped { name: "c".into(), reason: "no reason given".into() }));
    }

    #[test]
    fn an_entry_is_for_a_test_or_a_module() {
        let entry = |name: &str| Listed { name: name.to_owned(), reason: "r".to_owned() };
        assert!(entry("a::b").names("a::b"));
        assert!(!entry("a::b").names("a::b::c") && !entry("a::b").names("a::bc"));
        assert!(entry("a::b::*").names("a::b::c") && entry("a::b::*").names("a::b::c::d"));
        assert!(!entry("a::b::*").names("a::bc::d") && !entry("a::b::*").names("a::b"));
        assert_eq!(entry("a::b::c").declared(), ("fn", "c"));
        assert_eq!(entry("c").declared(), ("fn", "c"));
        assert_eq!(entry("a::b::*").declared(), ("mod", "b"));
    }
}
