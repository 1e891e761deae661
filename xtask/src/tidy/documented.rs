//! Every public item has a doc: functions, types, traits and constants. Fields and variants need one only where their name does not say it
//! all.

use std::path::Path;

use anyhow::{Context, Result};

use super::Finding;
use crate::{source, workspace};

/// Words that may stand between `pub` and an item's kind.
const QUALIFIERS: [&str; 3] = ["async", "unsafe", "extern"];
const KINDS: [&str; 7] = ["fn", "struct", "enum", "trait", "type", "const", "static"];

pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut out = Vec::new();
    for path in workspace::files(root, "rs")? {
        let name = workspace::relative(root, &path);
        // Test binaries publish nothing; their support modules say `pub` for one another.
        if name.contains("/src/") {
            let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            out.extend(check_file(&name, &text));
        }
    }
    Ok(out)
}

fn check_file(name: &str, text: &str) -> Vec<Finding> {
    let masked = String::from_utf8_lossy(&source::mask(text)).into_owned();
    let code = masked.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let raw: Vec<&str> = text.lines().map(str::trim).collect();
    let lines: Vec<&str> = code.lines().map(str::trim).collect();
    let undocumented = (0..lines.len()).filter_map(|at| {
        let item = item(lines[at])?;
        (!is_documented(&raw[..at])).then(|| {
            let message = format!("line {}: a public item has a doc: what it is or returns", at + 1);
            Finding::new("undocumented", format!("{name}: {item}"), message)
        })
    });
    undocumented.collect()
}

/// The name of the public item that a line begins.
fn item(line: &str) -> Option<&str> {
    let mut words = line.strip_prefix("pub ")?.split_whitespace().skip_while(|word| QUALIFIERS.contains(word));
    let kind = words.next().filter(|word| KINDS.contains(word))?;
    let named = words.find(|word| !KINDS.contains(word) && !QUALIFIERS.contains(word) && *word != "mut");
    let name = named?.split(|c: char| !(c.is_alphanumeric() || c == '_')).next()?;
    (!name.is_empty() && !kind.is_empty()).then_some(name)
}

/// Whether the lines above an item end with a doc, attributes left out.
fn is_documented(above: &[&str]) -> bool {
    let mut in_attribute = false;
    for line in above.iter().rev() {
        in_attribute = in_attribute && !line.starts_with("#[") || line.ends_with(")]") && !line.starts_with("#[");
        if in_attribute || line.starts_with("#[") {
            continue;
        }
        return line.starts_with("///");
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subjects(text: &str) -> Vec<String> {
        check_file("a.rs", text).into_iter().map(|finding| finding.subject).collect()
    }

    #[test]
    fn public_items_without_a_doc_are_found() {
        for (bad, name) in [
            ("pub fn size(&self) -> usize {", "size"),
            ("// Comment.\n#[must_use]\npub const fn new() -> Self {", "new"),
            ("/// Doc.\npub struct A;\npub enum B {}", "B"),
            ("#[allow(\n    dead_code,\n    reason = \"why\"\n)]\npub async fn run() {}", "run"),
            ("pub const MAX: u32 = 1;", "MAX"),
            ("    pub unsafe fn set(&self) {}", "set"),
        ] {
            assert_eq!(subjects(bad), [format!("a.rs: {name}")], "{bad}");
        }
    }

    #[test]
    fn documented_and_private_ones_and_tests_are_not() {
        for good in [
            "/// Doc.\n#[must_use]\npub fn size(&self) -> usize {",
            "/// Doc.\n#[allow(\n    dead_code,\n    reason = \"why\"\n)]\npub fn run() {}",
            "pub(crate) fn size() {}\nfn run() {}\npub mod a;\npub use b::c;",
            "// pub fn size() {}",
            "#[cfg(test)]\nmod tests {\n    pub fn helper() {}\n}",
            "/// Doc.\npub struct A {\n    pub field: u32,\n}",
        ] {
            assert!(subjects(good).is_empty(), "{good}");
        }
    }
}
