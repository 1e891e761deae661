//! `cargo xtask gpu-check`: packs a check of the CUDA backend for a machine with an NVIDIA GPU and without Rust: the
//! check itself, the product for its demo and a script. The script writes one JSON report. The golden models are the
//! checkout's: both travel, and no file should twice.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// The pack's script, run in its own folder.
const SCRIPT: &str = "#!/bin/sh\n\
    # Checks the CUDA backend on this machine, goes on from report.json in the folder that it is called in, if that is there, and writes\n\
    # the report to the folder that OUT names, or over the one it went on from. Arguments go to the check: ./gpu-check --help.\n\
    # GPU_CHECK_SMOKE=1 takes tiny sizes, where numbers mean nothing. GOLDENS names the golden models' folder, tests/goldens of the\n\
    # checkout that this folder lies in (target/gpu/gpu-check) by default.\n\
    set -eu\n\
    here=$(cd \"$(dirname \"$0\")\" && pwd)\n\
    exec \"$here/gpu-check\" --goldens \"${GOLDENS:-$here/../../../tests/goldens}\" --lagoon \"$here/lagoon\" --label \"$(cat \"$here/commit\")\" \
    --from report.json --out \"${OUT:-.}/report.json\" ${GPU_CHECK_SMOKE:+--smoke} \"$@\"\n";

/// Bytes sent to a machine with a GPU, at most: the archive, a report to continue, and the checkout around them.
pub(crate) const SENT_BYTES_MAX: u64 = 64 << 20;

/// The folder of the archive, ignored by git.
pub(crate) const FOLDER: &str = "target/gpu";

/// The golden models' folder.
pub(crate) const GOLDENS: &str = "tests/goldens";

/// The archive's name.
pub(crate) const ARCHIVE: &str = "gpu-check.tar.xz";

pub(crate) fn run(root: &Path, here: bool) -> Result<bool> {
    let (archive, pack) = build_pack(root, SMALL)?;
    println!("{}: {} KiB", archive.display(), fs::metadata(&archive)?.len() >> 10);
    println!("there: the commands of docs/gpu.md");
    if !here {
        return Ok(true);
    }
    // Continues the repository's report.
    let results = root.join("benches/results");
    let folder = archive.with_file_name("here");
    fs::create_dir_all(&folder)?;
    if root.join(REPORT).is_file() {
        fs::copy(root.join(REPORT), folder.join("report.json"))?;
    }
    let mut check = Command::new("sh");
    check.arg(pack.join("run.sh")).current_dir(&folder).env_remove("OUT").env("GOLDENS", root.join(GOLDENS));
    let status = check.status();
    let status = status.context("run the check")?;
    fs::copy(folder.join("report.json"), root.join(REPORT))
        .with_context(|| format!("write to {}", results.display()))?;
    println!("{REPORT}: {status}");
    Ok(status.success())
}

/// Presets of xz: for an archive that is sent, and for one that is not.
const SMALL: u8 = 6;
pub(crate) const QUICK: u8 = 0;

/// Builds the archive, compressed with a preset of xz, and its folder.
pub(crate) fn build_pack(root: &Path, preset: u8) -> Result<(PathBuf, PathBuf)> {
    build(root)?;
    let target = workspace::target(root);
    let packs = target.join("gpu-pack");
    let pack = packs.join("gpu-check");
    if pack.exists() {
        fs::remove_dir_all(&pack).with_context(|| format!("remove {}", pack.display()))?;
    }
    fs::create_dir_all(&pack)?;
    for program in ["lagoon", "gpu-check"] {
        let to = pack.join(program);
        fs::copy(target.join("release").join(program), &to).with_context(|| format!("copy {program}"))?;
        // Smaller without symbols; unchanged if there is no strip.
        let _not_stripped = Command::new("strip").arg(&to).stderr(Stdio::null()).status();
    }
    fs::write(pack.join("commit"), commit(root)?)?;
    fs::write(pack.join("run.sh"), SCRIPT)?;
    let folder = root.join(FOLDER);
    fs::create_dir_all(&folder)?;
    let archive = folder.join(ARCHIVE);
    let mut tar = Command::new("tar");
    // A dictionary as large as both programs, which share most of their bytes: several threads would compress them apart.
    let xz = format!("--lzma2=preset={preset},dict=128MiB");
    tar.arg("-cJf").arg(&archive).arg("-C").arg(&packs).arg("gpu-check").env("XZ_OPT", xz);
    ensure!(tar.status().context("run tar")?.success(), "tar failed (hint: apt-get install xz-utils)");
    let bytes = fs::metadata(&archive)?.len();
    // A report has some hundred KiB.
    let sent = bytes + checkout_bytes(root)? + (1 << 20);
    ensure!(sent <= SENT_BYTES_MAX, "{sent} bytes are sent with {}, at most {SENT_BYTES_MAX}", archive.display());
    Ok((archive, pack))
}

/// The repository's report.
const REPORT: &str = "benches/results/gpu-check.json";

/// Fills docs/gpu.md and its figures from [`REPORT`]; without a report, its cells become empty.
pub(crate) fn page(root: &Path) -> Result<bool> {
    let report = root.join(REPORT);
    let program = ["run", "--locked", "--release", "--package", "lagoon-benches", "--bin", "gpu-page", "--"];
    let mut command = workspace::cargo();
    command
        .args(program)
        .args(report.is_file().then_some(&report))
        .arg("--docs")
        .arg(root.join("docs"))
        .current_dir(root);
    Ok(command.stdin(Stdio::null()).status().context("run cargo")?.success())
}

fn build(root: &Path) -> Result<()> {
    // The workspace's features, so that builds of other commands are reused.
    let both = ["--workspace", "--bin", "lagoon", "--bin", "gpu-check"];
    let mut command = workspace::cargo();
    command.args(["build", "--locked", "--release"]).args(both).current_dir(root).stdin(Stdio::null());
    ensure!(command.status().context("run cargo")?.success(), "the check does not build");
    Ok(())
}

/// Bytes of the files that git tracks, and of those that it does not ignore: both travel.
pub(crate) fn checkout_bytes(root: &Path) -> Result<u64> {
    let all = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").args(all).current_dir(root).output().context("run git")?;
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    // Files deleted in the checkout are not sent.
    let bytes = |name: &str| fs::metadata(root.join(name)).map_or(0, |file| file.len());
    Ok(names.split_terminator('\0').map(bytes).sum())
}

/// The commit, and whether files differ from it.
fn commit(root: &Path) -> Result<String> {
    let describe = ["describe", "--always", "--abbrev=12", "--dirty"];
    let output = Command::new("git").args(describe).current_dir(root).output().context("run git")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
