//! `cargo xtask wgsl`: every shader through `tint`, a second compiler beside naga, where it is installed.
//!
//! naga refuses the line `enable subgroups;` but takes the operations; tint requires the line. The sources are kept without
//! it, and it is put in front of those that use a subgroup operation here.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::workspace;

const DIR: &str = "shaders/wgsl";
/// Directory with sources that others include: no shaders by themselves.
const SHARED: &str = "shaders/wgsl/shared/";

/// Validate the shaders. Where tint or the shaders are missing, say so.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let version = Command::new("tint").arg("--help").stdin(Stdio::null()).output();
    if version.is_err() {
        println!("tint is not installed: no shader was checked with it (naga checks all of them in the tests)");
        println!("hint: build Dawn's `tint` and put it in PATH");
        return Ok(true);
    }
    if !root.join(DIR).is_dir() {
        println!("{DIR} does not exist: there is no shader to check");
        return Ok(true);
    }
    let scratch = std::env::temp_dir().join(format!("lagoon-tint-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).context("create a temporary directory")?;
    let result = check_all(root, &scratch);
    // What is left in the temporary directory does no harm.
    let _ = std::fs::remove_dir_all(&scratch);
    let (good, bad) = result?;
    println!("tint: {good} shaders valid, {bad} not");
    Ok(bad == 0)
}

fn check_all(root: &Path, scratch: &Path) -> Result<(usize, usize)> {
    let (mut good, mut bad) = (0, 0);
    for path in workspace::files(&root.join(DIR), "wgsl")? {
        let name = workspace::relative(root, &path);
        if name.starts_with(SHARED) {
            continue;
        }
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {name}"))?;
        let copy = scratch.join("shader.wgsl");
        std::fs::write(&copy, for_tint(&text)).context("write a temporary file")?;
        let output = Command::new("tint")
            .args(["--format", "wgsl", "-o", "/dev/null"])
            .arg(&copy)
            .stdin(Stdio::null())
            .output()
            .context("run tint")?;
        if output.status.success() {
            good += 1;
        } else {
            bad += 1;
            println!("{name}:\n{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    Ok((good, bad))
}

fn for_tint(text: &str) -> String {
    let prefix = if text.contains("subgroup") { "enable subgroups;\n" } else { "" };
    format!("{prefix}{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_added_where_subgroups_are_used() {
        assert_eq!(for_tint("fn a() {}"), "fn a() {}");
        assert!(for_tint("let x = subgroupAdd(y);").starts_with("enable subgroups;\n"));
    }
}
