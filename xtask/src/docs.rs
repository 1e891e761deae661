//! `cargo xtask docs`: writes the reference pages that the program prints. A test of the program fails if one is
//! stale.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// Pages below docs/reference, and the argument of `lagoon reference` that prints each.
const PAGES: [&str; 4] = ["flags", "metrics", "models", "requests"];

/// Builds the program and writes the pages.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let dir = root.join("docs/reference");
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    for page in PAGES {
        let output = workspace::cargo()
            .args(["run", "--locked", "--quiet", "--release", "--package", "lagoon", "--", "reference", page])
            .current_dir(root)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .context("run lagoon")?;
        ensure!(output.status.success(), "`lagoon reference {page}` failed");
        let path = dir.join(page).with_extension("md");
        std::fs::write(&path, &output.stdout).with_context(|| format!("write {}", path.display()))?;
        println!("docs/reference/{page}.md");
    }
    Ok(true)
}
