//! `cargo xtask wgsl`: compiles every shader with `tint`, a second compiler beside naga, if it is installed.
//!
//! lagoon-shaders' example `dump_wgsl` composes every permutation from the files of shaders/wgsl with their includes
//! and constants. naga refuses the line `enable subgroups;` but takes the operations; tint requires the line. The
//! sources lack it, and this command adds it to those with a subgroup operation.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// Validates the shaders; prints a note if tint is missing.
pub(crate) fn run(root: &Path) -> Result<bool> {
    if Command::new("tint").arg("--help").stdin(Stdio::null()).output().is_err() {
        println!("tint is not installed: no shader was checked with it (naga checks all of them in the tests)");
        println!("hint: build Dawn's `tint` and put it in PATH");
        return Ok(true);
    }
    let scratch = std::env::temp_dir().join(format!("lagoon-tint-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).context("create a temporary directory")?;
    let result = dump(root, &scratch).and_then(|()| check_all(&scratch));
    // Leftovers in the temporary directory are harmless.
    let _ = std::fs::remove_dir_all(&scratch);
    let (good, bad) = result?;
    println!("tint: {good} shaders valid, {bad} not");
    Ok(bad == 0)
}

fn dump(root: &Path, out: &Path) -> Result<()> {
    // Of the workspace, not of its package: so it shares the build of the tests.
    let build = ["build", "--locked", "--quiet", "--release", "--workspace", "--example", "dump_wgsl"];
    let built = workspace::cargo().args(build).current_dir(root).stdin(Stdio::null()).status();
    ensure!(built.context("build the example dump_wgsl")?.success(), "the example dump_wgsl does not build");
    let target = workspace::target(root);
    let example = target.join("release/examples/dump_wgsl");
    let status = Command::new(example).arg(out).stdin(Stdio::null()).status().context("run the example dump_wgsl")?;
    ensure!(status.success(), "the example dump_wgsl failed: {status}");
    Ok(())
}

/// Numbers of valid and invalid shaders.
fn check_all(dir: &Path) -> Result<(usize, usize)> {
    let (mut good, mut bad) = (0, 0);
    for path in workspace::files(dir, "wgsl")? {
        let name = workspace::relative(dir, &path);
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {name}"))?;
        std::fs::write(&path, for_tint(&text)).with_context(|| format!("write {name}"))?;
        let output = Command::new("tint")
            .args(["--format", "wgsl", "-o", "/dev/null"])
            .arg(&path)
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
    ensure!(good + bad > 0, "the example dump_wgsl wrote no shader");
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
