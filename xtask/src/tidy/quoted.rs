//! Limits that pages quote have the value of their constant, and no page quotes one without its constant's name.
//!
//! A quoted limit is `` `NAME` (value) `` or ``value (`NAME`)``, a flag's default `` `--flag` (value by default) ``, on one line. Any
//! other number with a unit of time or size, and a number from 1,000 on of what limits count, is bare, and an error in
//! [`holds`]'s pages. Figures that are no limits are exceptions in tidy.toml.

use super::Finding;
use super::docs::{Line, spans};
use super::limits::{Limits, is_constant};

/// Units that a bare number must not have.
const UNITS: [&str; 12] =
    ["ms", "s", "second", "seconds", "min", "minute", "minutes", "hour", "hours", "KiB", "MiB", "GiB"];
/// The same of numbers with a comma between thousands.
const COUNTED: [&str; 7] = ["bytes", "connections", "frames", "requests", "hashes", "leases", "rBlocks"];

/// Pages of measurements and histories, and generated ones: their numbers are no limits.
const RECORDS: [&str; 5] = ["CHANGELOG.md", "docs/adr/", "docs/gpu.md", "docs/paper-results.md", "docs/reference/"];

/// Whether a page may have no bare numbers.
pub(super) fn holds(page: &str) -> bool {
    !RECORDS.iter().any(|record| page.starts_with(record))
}

/// Quoted limits of a line that do not exist or have another value, and its bare numbers. `flags` is the text of the page of flags.
pub(super) fn check(limits: &Limits, flags: &str, line: &Line<'_>) -> Vec<Finding> {
    let mut rest = line.text.to_owned();
    let mut out = Vec::new();
    let mut check = |quote: String, result: Result<(), String>| {
        rest = rest.replacen(&quote, "", 1);
        out.extend(result.err().map(|why| line.finding("limit", why)));
    };
    for (name, after) in spans(line.text) {
        let before = &line.text[..line.text.len() - after.len() - name.len() - 2];
        let behind = after.strip_prefix(" (").and_then(|rest| rest.split_once(')')).map(|(value, _)| value);
        let behind = behind.filter(|value| value.starts_with(|c: char| c.is_ascii_digit()));
        if let Some(value) = behind.filter(|_| is_constant(name)) {
            check(format!("`{name}` ({value})"), limits.check(name, value));
        } else if let Some(value) = behind.and_then(|value| value.strip_suffix(" by default"))
            && name.starts_with("--")
        {
            check(format!("`{name}` ({value} by default)"), check_default(flags, name, value));
        } else if let Some(value) = before.strip_suffix(" (").and_then(last_value)
            && is_constant(name)
            && after.starts_with(')')
        {
            check(format!("{value} (`{name}`)"), limits.check(name, value));
        }
    }
    if holds(line.page) {
        out.extend(bare(&rest).map(|figure| {
            let message =
                format!("line {}: a bare figure: write `NAME` (value), or except what was measured", line.number);
            Finding::new("bare-figure", format!("{}: {figure}", line.page), message)
        }));
    }
    out
}

/// The number and unit that a text ends in, or the number alone.
fn last_value(text: &str) -> Option<&str> {
    let from = |parts: usize| text.rmatch_indices(' ').nth(parts - 1).map_or(text, |(at, _)| &text[at + 1..]);
    let is_number = |part: &str| part.starts_with(|c: char| c.is_ascii_digit());
    [from(1), from(2)].into_iter().find(|value| is_number(value))
}

/// Whether some command's flag has this default.
fn check_default(flags: &str, name: &str, value: &str) -> Result<(), String> {
    let number = value.split(' ').next().unwrap_or(value);
    let row = format!("| `{name} ");
    let mut rows = flags.lines().filter(|line| line.starts_with(&row));
    match rows.any(|line| line.contains(&format!("| `{number}` |"))) {
        true => Ok(()),
        false => Err(format!("no command's `{name}` has the default {number}")),
    }
}

/// Numbers of a text with a unit of [`UNITS`], or with thousands and a unit of [`COUNTED`].
fn bare(text: &str) -> impl Iterator<Item = String> {
    let words: Vec<&str> = text.split([' ', '|', '(', ')']).collect();
    let pairs: Vec<(String, String)> = words
        .windows(2)
        .map(|pair| {
            let unit = pair[1].trim_end_matches(|c: char| !c.is_ascii_alphabetic());
            (pair[0].to_owned(), unit.to_owned())
        })
        .collect();
    pairs.into_iter().filter_map(|(number, unit)| {
        let is_number = number.starts_with(|c: char| c.is_ascii_digit())
            && number.chars().all(|c| c.is_ascii_digit() || matches!(c, ',' | '.'));
        let is_bare = UNITS.contains(&unit.as_str()) || (number.contains(',') && COUNTED.contains(&unit.as_str()));
        (is_number && is_bare).then(|| format!("{number} {unit}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAGS: &str = "| `--wait-s N` | `25` | Seconds. |\n| `--wait-s N` | `60` | Seconds. |\n";

    fn rules(page: &str, text: &str) -> Vec<&'static str> {
        let limits = Limits::parse("pub const FENCE_MS: u64 = 6_000;\n", "");
        check(&limits, FLAGS, &Line { page, number: 7, text }).into_iter().map(|finding| finding.rule).collect()
    }

    #[test]
    fn limits_are_compared_with_their_constants() {
        let of = |text: &str| rules("docs/a.md", text);
        assert!(of("after `FENCE_MS` (6 s) it is fenced").is_empty());
        assert!(of("after 6 s (`FENCE_MS`) it is fenced").is_empty());
        assert_eq!(of("after `FENCE_MS` (7 s) it is fenced"), ["limit"]);
        assert_eq!(of("after 7 s (`FENCE_MS`) it is fenced"), ["limit"]);
        assert_eq!(of("after `FENCED_MS` (6 s) it is fenced"), ["limit"]);
        assert!(of("`FENCE_MS` (see below), `FENCE_MS`, `A_B` (of c), one (`FENCE_MS`)").is_empty());
        assert!(of("`--wait-s` (25 s by default), `--wait-s` (60 s by default)").is_empty());
        assert_eq!(of("`--wait-s` (26 s by default)"), ["limit"]);
    }

    #[test]
    fn bare_figures_are_found() {
        let of = |text: &str| rules("docs/a.md", text);
        for bad in [
            "within 6 s.",
            "| 2.5 s |",
            "`FENCE_MS`: 6 s",
            "at most 4 MiB, so",
            "(30 s)",
            "1,024 frames",
            "6 s (or so)",
        ] {
            assert_eq!(of(bad), ["bare-figure"], "{bad}");
        }
        assert_eq!(of("after `FENCE_MS` (6 s) and 6 s more"), ["bare-figure"]);
        for good in ["16 bytes", "256 requests", "4 instances", "1,024 of them", "a 2-s pause", "v2 s", "`FENCE_MS`"] {
            assert!(of(good).is_empty(), "{good}");
        }
        assert!(rules("docs/adr/0001-two-lanes.md", "within 6 s").is_empty());
        assert_eq!(rules("docs/adr/0001-two-lanes.md", "`FENCE_MS` (7 s)"), ["limit"]);
    }
}
