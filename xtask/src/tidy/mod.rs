//! `cargo xtask tidy`: the rules of ARCHITECTURE.md as a test.
//!
//! Every rule yields findings; tidy.toml lists the exceptions, each with its reason. A finding without an exception
//! is an error, and so is an exception without a finding.

use std::path::Path;

use anyhow::{Context, Result};

use crate::finding::Finding;
use crate::{deny, skips, workspace};

mod circles;
mod docs;
mod documented;
mod exceptions;
mod families;
mod features;
mod files;
mod layers;
mod limits;
mod predicates;
mod quoted;
pub(crate) mod wire;
mod words;

/// Checks all rules and prints the findings. Returns whether there are none.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let graph = workspace::graph(root)?;
    let mut findings = layers::check(&graph.members);
    findings.extend(circles::check(root, &graph.members)?);
    findings.extend(files::check(root)?);
    findings.extend(files::op_parity(root)?);
    findings.extend(predicates::check(root)?);
    findings.extend(families::check(root)?);
    findings.extend(words::check(root)?);
    findings.extend(wire::check(root)?);
    findings.extend(docs::check(root)?);
    findings.extend(documented::check(root)?);
    findings.extend(deny::findings(root, &graph)?);
    findings.extend(skips::dead(root)?);
    findings.extend(features::check(root)?);
    let text = std::fs::read_to_string(root.join("xtask/tidy.toml")).context("read xtask/tidy.toml")?;
    let listed = exceptions::parse(&text)?;
    let remaining = exceptions::apply(&listed, findings);
    for finding in &remaining {
        println!("{}: {}: {}", finding.rule, finding.subject, finding.message);
    }
    match remaining.len() {
        0 => println!("tidy: ok ({} crates, {} listed exceptions)", graph.members.len(), listed.len()),
        count => println!("tidy: {count} errors"),
    }
    Ok(remaining.is_empty())
}
