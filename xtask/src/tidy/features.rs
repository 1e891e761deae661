//! Rule `one-build`: the binaries have no other features of a crate than the tests of the workspace.
//!
//! Cargo unites features over the packages that a command selects. Where a dev-dependency alone turns one on, all that
//! depends on its crate is compiled once for `cargo run` and once more for `cargo test`.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::finding::Finding;
use crate::workspace;

/// What `cargo run` and the test command build for people: the packages of binaries.
const BINARIES: [&str; 6] = ["--package", "lagoon", "--package", "lagoon-paced", "--edges", "normal,build"];

/// What the test command builds.
const WORKSPACE: [&str; 3] = ["--workspace", "--edges", "normal,build,dev"];

pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    Ok(compare(&tree(root, &WORKSPACE)?, &tree(root, &BINARIES)?))
}

/// The features of each crate, as `name version|feature,feature`.
fn tree(root: &Path, selection: &[&str]) -> Result<BTreeSet<String>> {
    let mut command = workspace::cargo();
    command.args(["tree", "--locked", "--prefix", "none", "--format", "{p}|{f}"]).args(selection).current_dir(root);
    let output = command.output().context("run cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

fn parse(text: &str) -> BTreeSet<String> {
    let lines = text.lines().map(|line| line.trim_end_matches(" (*)").replace(" (proc-macro)", ""));
    lines.filter(|line| line.contains('|')).collect()
}

fn compare(workspace: &BTreeSet<String>, binaries: &BTreeSet<String>) -> Vec<Finding> {
    let name = |line: &str| line.split(['|', '(']).next().unwrap_or_default().trim().to_owned();
    let findings = binaries.difference(workspace).map(|line| {
        let others = workspace.iter().filter(|other| name(other) == name(line));
        let others: Vec<&str> =
            others.filter_map(|other| other.split_once('|')).map(|(_, features)| features).collect();
        let own = line.split_once('|').map_or("", |(_, features)| features);
        Finding::new(
            "one-build",
            name(line),
            format!(
                "binaries have its features [{own}], the workspace with its tests [{}]: everything above it is built \
                 twice (hint: `cargo tree --workspace --edges features,dev --invert {}`)",
                others.join("] and ["),
                line.split(' ').next().unwrap_or_default()
            ),
        )
    });
    findings.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_of_a_dev_dependency_is_found() {
        let binaries =
            parse("lagoon v0.1.0 (/l)|\nserde v1.0.0|std\nserde v1.0.0|std (*)\n\nmacros v1.0.0 (proc-macro)|\n");
        assert_eq!(binaries.len(), 3);
        let equal = parse("lagoon v0.1.0 (/l)|\nserde v1.0.0|std\nmacros v1.0.0|\ninsta v1.0.0|\n");
        assert!(compare(&equal, &binaries).is_empty());
        let more = parse("lagoon v0.1.0 (/l)|\nserde v1.0.0|derive,std\nmacros v1.0.0|\n");
        let found = compare(&more, &binaries);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].subject, "serde v1.0.0");
        assert!(
            found[0].message.contains("[std]") && found[0].message.contains("[derive,std]"),
            "{}",
            found[0].message
        );
    }
}
