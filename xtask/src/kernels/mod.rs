//! `cargo xtask kernels`: builds the CUDA kernels' fatbin reproducibly, and checks its machine code.
//!
//! NVRTC is pinned and installed with pip into the user's cache folder: the machine needs no CUDA. Its output depends
//! only on the sources, the flags (cuda/kernels/nvrtc.flags) and its release, so the committed fatbin can be compared
//! by hash. Files in cuda/kernels:
//!
//! * kernels.lock has three hashes: of the sources, of the fatbin that was built from them, and of the two files of rules that it was
//!   checked with. A test compares them with the committed files, so that CI needs no NVRTC;
//! * budget.toml has the resource budget of each kernel on each architecture; no kernel may spill;
//! * sass.toml has rules for the machine code: required instructions, and limits on their numbers.
//!
//! Kernels with serialized warpgroup products, or whose machine code breaks a rule or their budget, are never written.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

mod budget;
mod compile;
mod sass;
mod toolkit;

const DIR: &str = "cuda/kernels";
/// Size limit: the fatbin is committed, and every version stays in the repository's history.
const FATBIN_BYTES_MAX: usize = 8 << 20;

/// Task of `cargo xtask kernels` after the build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Writes it to the working tree.
    Write,
    /// As `Write`, and takes the kernels' present resources as their budget.
    WriteBudget,
    /// Compares it with the committed one.
    Check,
}

/// cuda/kernels/kernels.lock.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lock {
    /// blake3 of the sources and flags.
    sources: String,
    /// That of budget.toml and sass.toml.
    rules: String,
    /// That of the fatbin.
    fatbin: String,
}

/// The built fatbin, and whether it may be written.
struct Built {
    fatbin: Vec<u8>,
    uses: budget::Uses,
    good: bool,
}

pub(crate) fn run(root: &Path, task: Task) -> Result<bool> {
    let dir = root.join(DIR);
    let sources = sources_hash(&dir)?;
    if task == Task::Check {
        let lock = lock(&dir)?;
        ensure!(
            lock.sources == sources && lock.rules == rules_hash(&dir)?,
            "the kernels' sources or rules are not those of the committed fatbin\nhint: cargo xtask kernels, and commit"
        );
    }
    let toolkit = toolkit::install()?;
    let scratch = std::env::temp_dir().join(format!("lagoon-kernels-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).context("create a temporary directory")?;
    let result = build(root, &dir, &toolkit, &scratch);
    // Leftovers in the temporary directory are harmless.
    let _ = std::fs::remove_dir_all(&scratch);
    let Built { fatbin, uses, good } = result?;
    let hash = blake3::hash(&fatbin).to_hex().to_string();
    println!("kernels: {} bytes, blake3 {hash}", fatbin.len());
    if task == Task::Check {
        let same = lock(&dir)?.fatbin == hash;
        if !same {
            println!("error: the committed fatbin is not what its sources give\nhint: cargo xtask kernels, and commit");
        }
        return Ok(budget::hold(&dir, &uses)? && same && good);
    }
    if good && task == Task::WriteBudget {
        budget::write(&dir, &uses)?;
    }
    if !good || !budget::hold(&dir, &uses)? {
        println!("kernels: no fatbin is written");
        return Ok(false);
    }
    std::fs::write(dir.join("kernels.fatbin"), &fatbin).context("write the fatbin")?;
    let lock = Lock { sources, rules: rules_hash(&dir)?, fatbin: hash };
    let lock = toml::to_string(&lock).context("write the lock")?;
    std::fs::write(dir.join("kernels.lock"), lock).context("write the lock")?;
    println!("kernels: wrote kernels.fatbin and kernels.lock to {DIR}");
    Ok(true)
}

/// Compiles the kernels, and checks everything but their budget.
fn build(root: &Path, dir: &Path, toolkit: &Path, scratch: &Path) -> Result<Built> {
    let logs = compile::compile(root, dir, toolkit, scratch)?;
    let serialized = compile::serialized(&logs);
    for line in &serialized {
        println!("error: warpgroup products are serialized: {line}");
    }
    let by_rules = sass::hold(dir, toolkit, scratch, logs.keys())?;
    let fatbin = std::fs::read(scratch.join("kernels.fatbin")).context("read the fatbin")?;
    ensure!(fatbin.len() <= FATBIN_BYTES_MAX, "the fatbin has {} bytes, at most {FATBIN_BYTES_MAX}", fatbin.len());
    Ok(Built { fatbin, uses: compile::uses(&logs)?, good: serialized.is_empty() && by_rules })
}

fn lock(dir: &Path) -> Result<Lock> {
    let text = std::fs::read_to_string(dir.join("kernels.lock")).context("read kernels.lock")?;
    toml::from_str(&text).context("parse kernels.lock")
}

/// Hash of the names and contents of all inputs of the fatbin.
fn sources_hash(dir: &Path) -> Result<String> {
    let mut files: Vec<PathBuf> = Vec::new();
    for at in [dir.to_owned(), dir.join("nvrtc"), dir.join("shared")] {
        for entry in std::fs::read_dir(&at).with_context(|| format!("read {}", at.display()))? {
            let path = entry?.path();
            let made_of = ["cu", "cuh", "h", "flags"];
            if path.extension().is_some_and(|extension| made_of.iter().any(|made_of| extension == *made_of)) {
                files.push(path);
            }
        }
    }
    hash(dir, files)
}

/// Hash of the rules that the machine code is held against.
fn rules_hash(dir: &Path) -> Result<String> {
    hash(dir, ["budget.toml", "sass.toml"].map(|name| dir.join(name)).into())
}

/// Hash of the names and contents of `files` in `dir`.
fn hash(dir: &Path, mut files: Vec<PathBuf>) -> Result<String> {
    files.sort();
    let mut hash = blake3::Hasher::new();
    for path in files {
        let name = path.strip_prefix(dir).context("a source of the kernels")?.to_string_lossy().replace('\\', "/");
        let text = std::fs::read(&path).with_context(|| format!("read {name}"))?;
        hash.update(name.as_bytes()).update(&(text.len() as u64).to_le_bytes()).update(&text);
    }
    Ok(hash.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_names_the_committed_sources_rules_and_fatbin() {
        let dir = crate::root().join(DIR);
        let fatbin = std::fs::read(dir.join("kernels.fatbin")).unwrap();
        let found = Lock {
            sources: sources_hash(&dir).unwrap(),
            rules: rules_hash(&dir).unwrap(),
            fatbin: blake3::hash(&fatbin).to_hex().to_string(),
        };
        assert_eq!(lock(&dir).unwrap(), found, "hint: cargo xtask kernels, and commit");
    }
}
