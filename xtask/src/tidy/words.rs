//! Retired words: each has a term of the field (ARCHITECTURE.md, Terms), and a name, a comment or a page with the old word
//! fails.
//!
//! A word is matched as a whole part of a name (`guests` in `on_guests`, `GUESTS_MAX` and `OnGuests`) or of a sentence, in
//! the singular and with an `s`. Link targets in pages are left out: files of ADRs keep their names.

use std::path::Path;

use anyhow::{Context, Result};

use super::Finding;
use crate::{source, workspace};

/// Where a word is retired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// Rust identifiers; sentences may use the word in its plain sense.
    Names,
    /// Rust identifiers and pages.
    NamesAndPages,
    /// Rust sources with comments and strings, and pages.
    Text,
}

/// A retired word, or several in a row, its replacement, and the paths where the rule holds (none: everywhere).
struct Retired {
    words: &'static [&'static str],
    term: &'static str,
    scope: Scope,
    within: &'static [&'static str],
}

const fn text(words: &'static [&'static str], term: &'static str) -> Retired {
    Retired { words, term, scope: Scope::Text, within: &[] }
}

const fn give_up(words: &'static [&'static str]) -> Retired {
    Retired { words, term: "aborted, dropped, timed out", scope: Scope::NamesAndPages, within: &[] }
}

/// Where a lane would be a micro-batch or a stream, not a lane of a processor or warp.
const BATCHES: &[&str] = &[
    "engine/cluster/",
    "engine/instance/",
    "engine/runner/",
    "engine/types/",
    "apps/sim/",
    "apps/http/",
    "net/",
    "ARCHITECTURE.md",
    "docs/requests.md",
    "docs/dist-attention.md",
];

/// Where a window would be a shared device region or a locked range, not that of sliding-window attention or of QUIC.
const REGIONS: &[&str] = &[
    "cuda/src/device/shared_region.rs",
    "cuda/tests/regions.rs",
    "engine/backend/src/arena.rs",
    "engine/backend/src/shared_region.rs",
    "net/transport/src/direct/memory.rs",
    "net/transport/src/direct/serve.rs",
    "net/transport/src/exports.rs",
];

/// Where a name would be a block hash.
const HASHES: &[&str] =
    &["engine/instance/src/batch/prefix.rs", "engine/instance/src/prefill/affinity.rs", "engine/kv/src/pool/adopt.rs"];

/// Where a word would be a seal tag.
const SEALS: &[&str] = &["engine/instance/src/creditor/", "engine/instance/src/step/", "cuda/src/device/lent.rs"];

const RETIRED: [Retired; 24] = [
    text(&["elder"], "oldest waiting request"),
    text(&["guest"], "remote attention request; in KV memory, row of lent blocks"),
    text(&["heard"], "acknowledged, reported"),
    text(&["hole"], "lost range; gap"),
    text(&["market"], "dispatch, routing"),
    text(&["park"], "swap out"),
    text(&["parked"], "swapped out"),
    text(&["patience"], "timeout, deadline"),
    text(&["said"], "sent, reported"),
    text(&["told"], "reported, notified, distinguished"),
    text(&["under", "way"], "in flight, in progress"),
    text(&["unheard"], "unacknowledged"),
    text(&["unsaid"], "unreported"),
    text(&["untold"], "unreported, unacknowledged"),
    text(&["wish"], "request"),
    give_up(&["gave", "up"]),
    give_up(&["give", "up"]),
    give_up(&["given", "up"]),
    Retired { words: &["reach"], term: "peer access; mapped creditor KV", scope: Scope::Names, within: &[] },
    Retired { words: &["yield"], term: "preempt; let pass", scope: Scope::Names, within: &[] },
    Retired { words: &["lane"], term: "micro-batch; stream", scope: Scope::Text, within: BATCHES },
    Retired { words: &["window"], term: "region; read lock; snapshot", scope: Scope::Text, within: REGIONS },
    Retired { words: &["name"], term: "block hash", scope: Scope::Names, within: HASHES },
    Retired { words: &["word"], term: "seal tag", scope: Scope::Text, within: SEALS },
];

/// Names of other libraries' functions, which are exempt.
const FOREIGN: [&str; 1] = ["yield_now"];

/// This file, which is exempt.
const SELF: &str = "xtask/src/tidy/words.rs";

/// Pages that are histories or records: they keep the words that they were written with.
const RECORDS: [&str; 4] = ["CHANGELOG.md", "benches/results/", "docs/adr/", "models/"];

pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut out = Vec::new();
    for (extension, check) in [("rs", check_source as fn(&str, &str) -> _), ("md", check_page)] {
        for path in workspace::files(root, extension)? {
            let name = workspace::relative(root, &path);
            let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            out.extend(check(&name, &text));
        }
    }
    Ok(out)
}

/// Retired words of a Rust source: in names, and in comments and strings.
fn check_source(name: &str, text: &str) -> Vec<Finding> {
    if name == SELF {
        return Vec::new();
    }
    let masked = source::mask(text);
    let mut out = Vec::new();
    for (line, number) in String::from_utf8_lossy(&masked).lines().zip(1..) {
        let names = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let names = names.filter(|part| !FOREIGN.contains(part));
        names.for_each(|part| out.extend(findings(name, number, part, |scope| scope != Scope::Text)));
    }
    for (line, number) in text.lines().zip(1..) {
        out.extend(findings(name, number, line, |scope| scope == Scope::Text));
    }
    out
}

/// Retired words of a page.
fn check_page(name: &str, text: &str) -> Vec<Finding> {
    if RECORDS.iter().any(|record| name.starts_with(record)) {
        return Vec::new();
    }
    let lines = text.lines().map(without_targets).zip(1..);
    lines.flat_map(|(line, number)| findings(name, number, &line, |scope| scope != Scope::Names)).collect()
}

/// Retired words of a scope in a line of a file, or in a name there.
fn findings(name: &str, line: usize, text: &str, in_scope: impl Fn(Scope) -> bool) -> Vec<Finding> {
    let holds = |old: &&Retired| {
        in_scope(old.scope) && (old.within.is_empty() || old.within.iter().any(|path| name.starts_with(path)))
    };
    let parts = parts(text);
    let mut out = Vec::new();
    for at in 0..parts.len() {
        if let Some(old) = RETIRED.iter().filter(holds).find(|old| begins_with(&parts[at..], old.words)) {
            let message = format!("line {line}: `{}` is retired; say {}", old.words.join(" "), old.term);
            out.push(Finding::new("retired-word", name, message));
        }
    }
    out
}

/// Whether `parts` begin with `words`, each in the singular or with an `s`.
fn begins_with(parts: &[String], words: &[&str]) -> bool {
    let is = |(part, word): (&String, &&str)| part == word || part.strip_suffix('s') == Some(word);
    parts.len() >= words.len() && parts.iter().zip(words).all(is)
}

/// A line without the targets of its links: `[text](target)`.
fn without_targets(line: &str) -> String {
    let mut parts = line.split("](");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str("] ");
        out.push_str(part.split_once(')').map_or("", |(_, rest)| rest));
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
            "told.reported()",
            "// Copies under way.",
            "let bytes_under_way = 1;",
            "fn a_silent_peer_is_given_up() {}",
            "struct GiveUp;",
            "mod reach;",
            "fn cpu_reach() {}",
            "let yields = |head| head.waits();",
        ] {
            assert_eq!(check_source("engine/kv/src/lib.rs", line).len(), 1, "{line}");
        }
        for line in [
            "/// A plane.",
            "let elderly = guesthouse;",
            "swish(x)",
            "// Peers reach this address.",
            "let reached = unreachable;",
            "f(\"given up\")",
            "f(given).up()",
            "std::thread::yield_now(); // which yields",
        ] {
            assert!(check_source("engine/instance/src/lib.rs", line).is_empty(), "{line}");
        }
    }

    #[test]
    fn a_word_may_be_retired_in_some_folders_only() {
        assert_eq!(check_source("engine/runner/src/pass.rs", "let lanes = 2;").len(), 1);
        assert!(check_source("cuda/src/kernels/mod.rs", "let lanes = 32;").is_empty());
        assert_eq!(check_source("engine/kv/src/pool/adopt.rs", "fn f(names: &[BlockHash]) {}").len(), 1);
        assert_eq!(check_source("engine/backend/src/arena.rs", "struct Window;").len(), 1);
        assert!(check_source("engine/backend/src/device.rs", "window: None").is_empty());
    }

    #[test]
    fn pages_are_held_to_the_terms_and_records_are_not() {
        let old = "A guest is given up ([ADR 1](adr/0001-two-lanes.md)).";
        assert_eq!(check_page("docs/requests.md", old).len(), 2);
        assert_eq!(check_page("docs/requests.md", "Two lanes.").len(), 1);
        assert!(check_page("docs/requests.md", "See [ADR 1](adr/0001-two-lanes.md): peers reach it.").is_empty());
        assert!(check_page("docs/adr/0001-two-lanes.md", old).is_empty());
        assert!(check_page("CHANGELOG.md", old).is_empty());
    }
}
