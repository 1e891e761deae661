//! deny.toml: licences, banned crates and sources.
//!
//! cargo-deny reads it if installed (`cargo xtask deny`, and CI). `tidy` enforces the same licences, wrappers and
//! sources itself, also on machines without cargo-deny.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::finding::Finding;
use crate::licence;
use crate::workspace::{self, External, Graph};

/// The part of deny.toml that tidy reads; cargo-deny has more fields.
#[derive(Debug, Deserialize)]
struct Config {
    licenses: Licences,
    bans: Bans,
}

#[derive(Debug, Deserialize)]
struct Licences {
    allow: Vec<String>,
    #[serde(default)]
    exceptions: Vec<LicenceException>,
}

#[derive(Debug, Deserialize)]
struct LicenceException {
    #[serde(rename = "crate")]
    name: String,
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    #[serde(default)]
    deny: Vec<Ban>,
}

#[derive(Debug, Deserialize)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
    #[serde(default)]
    wrappers: BTreeSet<String>,
}

/// Violations of deny.toml in the dependency graph.
pub(crate) fn findings(root: &Path, graph: &Graph) -> Result<Vec<Finding>> {
    let text = std::fs::read_to_string(root.join("deny.toml")).context("read deny.toml")?;
    let config: Config = toml::from_str(&text).context("parse deny.toml")?;
    check(&config, &graph.all)
}

fn check(config: &Config, crates: &[External]) -> Result<Vec<Finding>> {
    let mut out = Vec::new();
    let allowed: BTreeSet<String> = config.licenses.allow.iter().cloned().collect();
    for package in crates {
        let subject = format!("{} {}", package.name, package.version);
        let mut accepted = allowed.clone();
        let own = config.licenses.exceptions.iter().filter(|e| e.name == package.name);
        accepted.extend(own.flat_map(|e| e.allow.iter().cloned()));
        match &package.licence {
            None => out.push(Finding::new("licence", &subject, "declares no licence")),
            Some(expression) if !licence::satisfied(expression, &accepted)? => {
                out.push(Finding::new("licence", &subject, format!("deny.toml does not allow `{expression}`")));
            }
            Some(_) => {}
        }
        if !package.from_registry {
            out.push(Finding::new("source", &subject, "comes neither from this workspace nor from the registry"));
        }
        for ban in config.bans.deny.iter().filter(|ban| package.dependencies.contains(&ban.name)) {
            if !ban.wrappers.contains(&package.name) {
                let message = format!("deny.toml lets only {:?} depend on {}", ban.wrappers, ban.name);
                out.push(Finding::new("ban", format!("{} -> {}", package.name, ban.name), message));
            }
        }
    }
    Ok(out)
}

/// `cargo xtask deny`: runs cargo-deny, if installed.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let installed = workspace::cargo().args(["deny", "--version"]).output().is_ok_and(|o| o.status.success());
    if !installed {
        println!(
            "cargo-deny is not installed: nothing was checked here (tidy checks licences, bans and sources itself)"
        );
        println!("hint: cargo install cargo-deny --locked");
        return Ok(true);
    }
    let status = workspace::cargo()
        .args(["deny", "--locked", "check", "licenses", "bans", "sources"])
        .current_dir(root)
        .status()
        .context("run cargo deny")?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"
        [licenses]
        allow = ["MIT"]
        exceptions = [{ crate = "odd", allow = ["MPL-2.0"] }]
        [bans]
        deny = [{ crate = "wgpu", wrappers = ["lagoon-shaders"] }]
    "#;

    fn package(name: &str, licence: &str) -> External {
        External {
            name: name.into(),
            version: "1.0.0".into(),
            licence: Some(licence.into()),
            from_registry: true,
            dependencies: BTreeSet::new(),
        }
    }

    fn rules(package: External) -> Vec<&'static str> {
        let config: Config = toml::from_str(CONFIG).unwrap();
        check(&config, &[package]).unwrap().into_iter().map(|f| f.rule).collect()
    }

    #[test]
    fn licences_and_their_exceptions() {
        assert!(rules(package("a", "MIT OR GPL-3.0-only")).is_empty());
        assert!(rules(package("odd", "MPL-2.0")).is_empty());
        assert_eq!(rules(package("a", "MPL-2.0")), ["licence"]);
        assert_eq!(rules(External { licence: None, ..package("a", "") }), ["licence"]);
    }

    #[test]
    fn wrappers_and_sources() {
        let uses = |name: &str| External { dependencies: ["wgpu".to_owned()].into(), ..package(name, "MIT") };
        assert!(rules(uses("lagoon-shaders")).is_empty());
        assert_eq!(rules(uses("lagoon-kv")), ["ban"]);
        assert_eq!(rules(External { from_registry: false, ..package("a", "MIT") }), ["source"]);
    }

    #[test]
    fn a_bad_expression_is_an_error() {
        let config: Config = toml::from_str(CONFIG).unwrap();
        assert!(check(&config, &[package("a", "MIT OR")]).is_err());
    }
}
