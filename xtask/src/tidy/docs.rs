//! Rules about pages: links lead to files, hops name existing functions, quoted limits have the value of their
//! constant (`quoted.rs`), quoted messages exist in the sources, docs/SUMMARY.md lists every page, ARCHITECTURE.md is short.
//!
//! A hop is `` `path: function` `` with a path from the repository's root: a Rust file, or a directory below which one file
//! has the function. A quoted message is a line of a `text` fence in the troubleshooting page, with `…` in the place of
//! values.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};

use super::limits::Limits;
use super::{Finding, quoted};
use crate::{source, workspace};

const SUMMARY: &str = "docs/SUMMARY.md";
const TROUBLE: &str = "docs/guide/troubleshoot.md";
/// Sources of messages.
const SAYS: [&str; 4] = ["apps", "cuda/src", "engine", "net"];
/// Page with every flag and its default.
const FLAGS: &str = "docs/reference/flags.md";
/// Files of limits. Constants of other sources may be quoted, too, if one value has their name.
const LIMITS: [&str; 2] = ["engine/types/src/limits.rs", "apps/http/src/limits.rs"];
/// The map for the first hour, and its lines at most.
const MAP: &str = "ARCHITECTURE.md";
const MAP_LINES_MAX: usize = 200;

/// A line of a page outside of code fences.
pub(super) struct Line<'a> {
    pub(super) page: &'a str,
    pub(super) number: usize,
    pub(super) text: &'a str,
}

impl Line<'_> {
    pub(super) fn finding(&self, rule: &'static str, message: String) -> Finding {
        Finding::new(rule, format!("{}:{}", self.page, self.number), message)
    }
}

/// Pages under the rules: those at the root and below docs, as paths from the root with their texts.
fn pages(root: &Path) -> Result<Vec<(String, String)>> {
    let mut out = Vec::new();
    for path in workspace::files(root, "md")? {
        let name = workspace::relative(root, &path);
        if !name.contains('/') || name.starts_with("docs/") {
            let text = std::fs::read_to_string(&path).with_context(|| format!("read {name}"))?;
            out.push((name, text));
        }
    }
    Ok(out)
}

/// Violations in all pages.
pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let pages = pages(root)?;
    let mut of_limits = String::new();
    for file in LIMITS {
        of_limits += &std::fs::read_to_string(root.join(file)).with_context(|| format!("read {file}"))?;
    }
    let sources = source_texts(root)?;
    let limits = Limits::parse(&of_limits, &sources);
    let mut functions = Functions::new(root);
    let mut out = unlisted(&pages);
    out.extend(long_map(&pages));
    let flags = pages.iter().find(|(name, _)| name == FLAGS).map_or("", |(_, text)| text.as_str());
    let trouble = pages.iter().find(|(name, _)| name == TROUBLE);
    if let Some((_, text)) = trouble {
        out.extend(unquotable(text, &sources));
    }
    for (page, text) in &pages {
        for line in lines(page, text) {
            out.extend(broken_links(root, &line));
            out.extend(quoted::check(&limits, flags, &line));
            for (path, function) in hops(line.text) {
                let missing = functions.missing(path, function)?;
                out.extend(missing.map(|why| line.finding("hop", format!("`{path}: {function}`: {why}"))));
            }
        }
    }
    Ok(out)
}

fn lines<'a>(page: &'a str, text: &'a str) -> impl Iterator<Item = Line<'a>> {
    let mut fenced = false;
    text.lines().zip(1..).filter_map(move |(text, number)| {
        let fence = text.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some(Line { page, number, text })
    })
}

/// The texts between backticks, each with the text behind it.
pub(super) fn spans(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once('`')?;
        let (span, after) = after.split_once('`')?;
        rest = after;
        Some((span, after))
    })
}

/// Pages below docs that the summary does not link to, except the summary.
fn unlisted(pages: &[(String, String)]) -> Vec<Finding> {
    let Some((_, summary)) = pages.iter().find(|(name, _)| name == SUMMARY) else {
        return vec![Finding::new("summary", SUMMARY, "is missing: it lists every page below docs")];
    };
    let listed = |name: &str| name.strip_prefix("docs/").is_none_or(|path| summary.contains(&format!("({path})")));
    let lost = pages.iter().map(|(name, _)| name).filter(|name| *name != SUMMARY && !listed(name));
    lost.map(|name| Finding::new("summary", name.clone(), format!("{SUMMARY} does not list this page"))).collect()
}

/// The map, if it is too long for the first hour.
fn long_map(pages: &[(String, String)]) -> Option<Finding> {
    let (_, map) = pages.iter().find(|(name, _)| name == MAP)?;
    let lines = map.lines().count();
    (lines > MAP_LINES_MAX).then(|| Finding::new("map-size", MAP, format!("{lines} lines, at most {MAP_LINES_MAX}")))
}

/// All sources' text without comment lines, with continued literals joined.
fn source_texts(root: &Path) -> Result<String> {
    let mut out = String::new();
    for dir in SAYS {
        for path in workspace::files(&root.join(dir), "rs")? {
            let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            for line in text.lines().map(str::trim_start).filter(|line| !line.starts_with("//")) {
                match line.strip_suffix('\\') {
                    Some(part) => out.push_str(part),
                    None => out.extend([line, "\n"]),
                }
            }
        }
    }
    Ok(out)
}

/// Lines of `text` fences with a part that no source contains.
fn unquotable(page: &str, sources: &str) -> Vec<Finding> {
    let (mut quoted, mut out) = (false, Vec::new());
    for (text, number) in page.lines().zip(1..) {
        if text.starts_with("```") {
            quoted = text == "```text";
        } else if quoted && let Some(part) = text.split('…').map(str::trim).find(|part| !sources.contains(part)) {
            let line = Line { page: TROUBLE, number, text };
            out.push(line.finding("message", format!("no source says {part:?}")));
        }
    }
    out
}

/// Targets of Markdown links that are no files of the repository. URLs and anchors are not checked.
fn broken_links(root: &Path, line: &Line<'_>) -> Vec<Finding> {
    let dir = Path::new(line.page).parent().unwrap_or(Path::new(""));
    let target = |(at, _): (usize, &str)| Some(line.text[at + 2..].split_once(')')?.0);
    let targets = line.text.match_indices("](").filter_map(target);
    let files = targets.map(|t| t.split('#').next().unwrap_or(t)).filter(|t| !t.is_empty() && !t.contains("://"));
    let broken = files.filter(|file| !root.join(dir).join(file).exists());
    broken.map(|file| line.finding("link", format!("there is no {file}"))).collect()
}

/// Pairs of path and function that a line names.
fn hops(text: &str) -> impl Iterator<Item = (&str, &str)> {
    spans(text).filter_map(|(span, _)| {
        let (path, function) = span.split_once(": ")?;
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':');
        let is_path = |path: &str| path.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
        (path.contains('/') && is_path(path) && is_name(function)).then_some((path, function))
    })
}

/// Functions of files, read once each.
struct Functions<'a> {
    root: &'a Path,
    /// Masked texts by path.
    read: BTreeMap<String, Vec<Vec<u8>>>,
}

impl<'a> Functions<'a> {
    fn new(root: &'a Path) -> Self {
        Self { root, read: BTreeMap::new() }
    }

    /// Why the hop is wrong, if it is. Of `Type::function` only the function is checked.
    fn missing(&mut self, path: &str, function: &str) -> Result<Option<String>> {
        let at = self.root.join(path);
        if !at.exists() {
            return Ok(Some(format!("there is no {path}")));
        }
        if !self.read.contains_key(path) {
            let files = if at.is_dir() { workspace::files(&at, "rs")? } else { vec![at] };
            let read = |file: &std::path::PathBuf| std::fs::read_to_string(file).map(|text| source::mask(&text));
            let texts = files.iter().map(read).collect::<Result<_, _>>().with_context(|| format!("read {path}"))?;
            self.read.insert(path.to_owned(), texts);
        }
        let name = function.rsplit("::").next().unwrap_or(function);
        let found = self.read[path].iter().any(|text| defines(text, name));
        Ok((!found).then(|| format!("there is no `fn {name}` in {path}")))
    }
}

/// Whether masked text has `fn name`.
fn defines(masked: &[u8], name: &str) -> bool {
    source::words(masked, name).into_iter().any(|at| masked[..at].trim_ascii_end().ends_with(b"fn"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Line<'_> {
        Line { page: "docs/a.md", number: 7, text }
    }

    #[test]
    fn hops_are_a_path_and_a_function() {
        let found: Vec<_> =
            hops("1. `a/b.rs: run` and `engine/kv: Pool::take`, not `x: y`, `a/b.rs` or `a/b: c d`").collect();
        assert_eq!(found, [("a/b.rs", "run"), ("engine/kv", "Pool::take")]);
    }

    #[test]
    fn a_hop_needs_a_definition() {
        let text = source::mask("fn run() {}\n// fn gone() {}\nimpl A { pub fn  take(&self) {} }\nrunner();\n");
        assert!(defines(&text, "run") && defines(&text, "take"));
        assert!(!defines(&text, "gone") && !defines(&text, "runner") && !defines(&text, "ru"));
    }

    #[test]
    fn hops_are_looked_up_below_this_repository() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut functions = Functions::new(root);
        assert_eq!(functions.missing("src/tidy/docs.rs", "check").unwrap(), None);
        assert_eq!(functions.missing("src/tidy", "Functions::missing").unwrap(), None);
        let why = functions.missing("src/tidy/docs.rs", "no_such").unwrap().unwrap();
        assert_eq!(why, "there is no `fn no_such` in src/tidy/docs.rs");
        assert_eq!(functions.missing("src/none.rs", "x").unwrap().unwrap(), "there is no src/none.rs");
    }

    #[test]
    fn links_lead_to_files() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let broken = |text: &str| broken_links(root, &Line { page: "src/a.md", ..line(text) }).len();
        assert_eq!(broken("[a](main.rs), [b](../Cargo.toml#x), [c](https://a.b/c), [d](#here)"), 0);
        assert_eq!(broken("[a](none.rs) and [b](../none.toml)"), 2);
    }

    #[test]
    fn quoted_messages_are_in_some_source() {
        let sources = "bail!(\"listen on {addr}: failed\")";
        let wrong = |line: &str| unquotable(&format!("```text\n{line}\n```\n"), sources).len();
        assert_eq!((wrong("listen on …"), wrong("listen on …: failed")), (0, 0));
        assert_eq!((wrong("listens on …"), wrong("listen on … : broken")), (1, 1));
        assert!(unquotable("```sh\nnothing\n```\nnothing\n", sources).is_empty());
    }

    #[test]
    fn fences_are_left_out() {
        let of = |text: &str| lines("a", text).map(|l| l.number).collect::<Vec<_>>();
        assert_eq!(of("a\n```sh\nb\n```\nc\n"), [1, 5]);
    }

    #[test]
    fn the_map_is_short() {
        let map = |lines: usize| [(MAP.to_owned(), "x\n".repeat(lines))];
        assert!(long_map(&map(MAP_LINES_MAX)).is_none() && long_map(&[]).is_none());
        assert_eq!(long_map(&map(MAP_LINES_MAX + 1)).unwrap().rule, "map-size");
    }

    #[test]
    fn the_summary_lists_every_page() {
        let page = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        let summary = page(SUMMARY, "- [A](a.md)\n");
        assert!(unlisted(&[summary.clone(), page("docs/a.md", ""), page("README.md", "")]).is_empty());
        let lost = unlisted(&[summary, page("docs/guide/b.md", "")]);
        assert_eq!(lost[0].subject, "docs/guide/b.md");
        assert_eq!(unlisted(&[page("docs/a.md", "")]).len(), 1);
    }
}
