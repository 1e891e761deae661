//! Retired words: each has a term of the field (ARCHITECTURE.md, glossary), and a name or comment with the old word
//! fails.

use std::path::Path;

use anyhow::{Context, Result};

use super::Finding;
use crate::workspace;

/// A retired word, its replacement, and the folders where the rule holds (none: everywhere).
struct Retired {
    word: &'static str,
    term: &'static str,
    within: &'static [&'static str],
}

const fn everywhere(word: &'static str, term: &'static str) -> Retired {
    Retired { word, term, within: &[] }
}

/// Folders where a lane would be a micro-batch, not a lane of a processor or warp.
const BATCHES: &[&str] =
    &["engine/cluster/", "engine/instance/", "engine/runner/", "engine/types/", "apps/sim/", "apps/http/"];

const RETIRED: [Retired; 8] = [
    everywhere("elder", "oldest waiting request"),
    everywhere("guest", "remote attention request; in KV memory, row of lent blocks"),
    everywhere("parked", "swapped out"),
    everywhere("patience", "timeout, deadline"),
    everywhere("unheard", "unacknowledged"),
    everywhere("untold", "unreported, unacknowledged"),
    everywhere("wish", "request"),
    Retired { word: "lane", term: "micro-batch; stream", within: BATCHES },
];

/// This file, which is exempt.
const SELF: &str = "xtask/src/tidy/words.rs";

pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut out = Vec::new();
    for path in workspace::files(root, "rs")? {
        let name = workspace::relative(root, &path);
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        out.extend(check_file(&name, &text));
    }
    Ok(out)
}

fn check_file(name: &str, text: &str) -> Vec<Finding> {
    if name == SELF {
        return Vec::new();
    }
    let holds =
        |retired: &&Retired| retired.within.is_empty() || retired.within.iter().any(|dir| name.starts_with(dir));
    let retired: Vec<&Retired> = RETIRED.iter().filter(holds).collect();
    let mut out = Vec::new();
    for (at, line) in text.lines().enumerate() {
        for part in parts(line) {
            let singular = part.strip_suffix('s').unwrap_or(&part);
            if let Some(old) = retired.iter().find(|old| old.word == singular || old.word == part) {
                let message = format!("line {}: `{part}` is retired; say {}", at + 1, old.term);
                out.push(Finding::new("retired-word", name, message));
            }
        }
    }
    out
}

/// The words of a line in lower case; identifiers are split at underscores and capital letters.
fn parts(line: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    let mut before = ' ';
    for c in line.chars() {
        let begins = c.is_ascii_uppercase() && !before.is_ascii_uppercase();
        if (!c.is_ascii_alphabetic() || begins) && out.last().is_some_and(|part| !part.is_empty()) {
            out.push(String::new());
        }
        if let (true, Some(part)) = (c.is_ascii_alphabetic(), out.last_mut()) {
            part.push(c.to_ascii_lowercase());
        }
        before = c;
    }
    out.retain(|part| !part.is_empty());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_in_names_of_every_case_and_in_prose() {
        assert_eq!(
            parts("on_GuestQuery(GUESTS_MAX) // a guest's"),
            ["on", "guest", "query", "guests", "max", "a", "guest", "s"]
        );
        for line in [
            "struct GuestTag;",
            "let guests_us = 1;",
            "const GUEST_MAX: u32 = 1;",
            "/// The guests' rows.",
            "told.untold()",
        ] {
            assert_eq!(check_file("engine/kv/src/lib.rs", line).len(), 1, "{line}");
        }
        for line in ["/// A plane.", "let elderly = guesthouse;", "swish(x)"] {
            assert!(check_file("engine/instance/src/lib.rs", line).is_empty(), "{line}");
        }
    }

    #[test]
    fn a_word_may_be_retired_in_some_folders_only() {
        assert_eq!(check_file("engine/runner/src/pass.rs", "let lanes = 2;").len(), 1);
        assert!(check_file("cuda/src/kernels/mod.rs", "let lanes = 32;").is_empty());
    }
}
