//! `cargo xtask gpu-check`: packs what a machine with an NVIDIA GPU needs to check the CUDA backend, and no Rust: the check
//! itself, the product for its demo, the golden models and a script. The script leaves one JSON report.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// What the script runs, in its own folder.
const SCRIPT: &str = "#!/bin/sh\n\
    # Checks the CUDA backend on this machine; the report goes to the first argument, or to report.json here.\n\
    # It ends within ten minutes; run it again until it says no more what is left: the report goes on.\n\
    # Arguments behind it go to the check: see ./gpu-check --help and --list.\n\
    set -eu\n\
    here=$(cd \"$(dirname \"$0\")\" && pwd)\n\
    out=${1:-$here/report.json}\n\
    [ $# -eq 0 ] || shift\n\
    exec \"$here/gpu-check\" --goldens \"$here/goldens\" --lagoon \"$here/lagoon\" --label \"$(cat \"$here/commit\")\" \
    --out \"$out\" \"$@\"\n";

/// Machines with a GPU may be far away.
const PACK_BYTES_MAX: u64 = 64 << 20;

pub(crate) fn run(root: &Path, here: bool) -> Result<bool> {
    build(root)?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let pack = target.join("gpu-check");
    if pack.exists() {
        fs::remove_dir_all(&pack).with_context(|| format!("remove {}", pack.display()))?;
    }
    fs::create_dir_all(&pack)?;
    for program in ["lagoon", "gpu-check"] {
        let to = pack.join(program);
        fs::copy(target.join("release").join(program), &to).with_context(|| format!("copy {program}"))?;
        // Smaller without symbols; where there is no strip, as it is.
        let _not_stripped = Command::new("strip").arg(&to).stderr(Stdio::null()).status();
    }
    copy(&root.join("tests/goldens"), &pack.join("goldens"))?;
    fs::write(pack.join("commit"), commit(root)?)?;
    fs::write(pack.join("run.sh"), SCRIPT)?;
    let archive = target.join("gpu-check.tar.gz");
    let tar = Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(&target).arg("gpu-check").status();
    ensure!(tar.context("run tar")?.success(), "tar failed");
    let bytes = fs::metadata(&archive)?.len();
    ensure!(bytes <= PACK_BYTES_MAX, "{} has {bytes} bytes, at most {PACK_BYTES_MAX}", archive.display());
    println!("{}: {} KiB", archive.display(), bytes >> 10);
    println!("there: tar -xzf gpu-check.tar.gz && sh gpu-check/run.sh report.json");
    if !here {
        return Ok(true);
    }
    let report = root.join(REPORT);
    let status = Command::new("sh").arg(pack.join("run.sh")).arg(&report).status().context("run the check")?;
    println!("{}: {status}", report.display());
    Ok(status.success())
}

/// The report that the repository has.
const REPORT: &str = "benches/results/gpu-check.json";

/// Fills docs/gpu.md and its figures from [`REPORT`].
pub(crate) fn page(root: &Path) -> Result<bool> {
    let report = root.join(REPORT);
    ensure!(report.is_file(), "there is no {REPORT}\nhint: cargo xtask gpu-check says how one is made");
    let program = ["run", "--locked", "--release", "--package", "lagoon-benches", "--bin", "gpu-page", "--"];
    let mut command = Command::new("cargo");
    command.args(program).arg(&report).arg("--docs").arg(root.join("docs")).current_dir(root);
    Ok(command.stdin(Stdio::null()).status().context("run cargo")?.success())
}

fn build(root: &Path) -> Result<()> {
    // The workspace's features, so that what other commands built serves here, too.
    let both = ["--workspace", "--bin", "lagoon", "--bin", "gpu-check"];
    let mut command = Command::new("cargo");
    command.args(["build", "--locked", "--release"]).args(both).current_dir(root).stdin(Stdio::null());
    ensure!(command.status().context("run cargo")?.success(), "the check does not build");
    Ok(())
}

/// The commit, and whether files differ from it.
fn commit(root: &Path) -> Result<String> {
    let describe = ["describe", "--always", "--abbrev=12", "--dirty"];
    let output = Command::new("git").args(describe).current_dir(root).output().context("run git")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), &to).with_context(|| format!("copy {}", entry.path().display()))?;
        }
    }
    Ok(())
}
