//! `cargo xtask kernels`: the CUDA kernels' fatbin, built reproducibly, and what its kernels use.
//!
//! The compiler is pinned and installed with pip into a cache folder of the user's: nothing of CUDA needs to be on the machine.
//! Its output depends on the sources, the flags (cuda/kernels/nvcc.flags) and its version only, not on where it runs, so the
//! committed fatbin can be compared by hash. cuda/kernels/kernels.lock holds the hashes of the sources and of the fatbin;
//! cuda/kernels/budget.toml what each kernel may use on each architecture. No kernel may spill.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

/// What pip installs. The compiler's parts must be of one release; cuobjdump reads the fatbin from 13.2 on.
const PACKAGES: [&str; 2] = ["cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.2", "nvidia-cuda-cuobjdump==13.2.51"];
/// Names the cache folder: of the packages above.
const TOOLKIT: &str = "nvcc-13.0.2-cuobjdump-13.2.51";
const DIR: &str = "cuda/kernels";
/// A build without the sources' PTX and code for two architectures would be larger than what a repository should carry.
const FATBIN_BYTES_MAX: usize = 8 << 20;

/// What to do with the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Build and commit to the working tree.
    Write,
    /// The same, and take the kernels' present use as their budget.
    WriteBudget,
    /// Compare with what is committed.
    Check,
}

/// cuda/kernels/kernels.lock.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lock {
    /// blake3 of the sources and flags, and of the fatbin that they give.
    sources: String,
    fatbin: String,
}

/// What a kernel uses on one architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Use {
    /// For each thread.
    registers: u32,
    /// Static shared memory of a block.
    shared_bytes: u32,
    /// Stack and spilled registers of a thread; never in a budget.
    #[serde(default, skip_serializing)]
    spilled_bytes: u32,
}

/// By architecture and kernel.
type Uses = BTreeMap<String, BTreeMap<String, Use>>;

pub(crate) fn run(root: &Path, task: Task) -> Result<bool> {
    let dir = root.join(DIR);
    let sources = sources_hash(&dir)?;
    if task == Task::Check {
        let lock = lock(&dir)?;
        ensure!(
            lock.sources == sources,
            "the kernels' sources are not those of the committed fatbin\nhint: cargo xtask kernels, and commit"
        );
    }
    let toolkit = toolkit()?;
    let scratch = std::env::temp_dir().join(format!("lagoon-kernels-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).context("create a temporary directory")?;
    let result = build(&toolkit, &dir, &scratch).and_then(|fatbin| {
        let uses = uses(&toolkit, &scratch.join("kernels.fatbin"))?;
        Ok((fatbin, uses))
    });
    // What is left in the temporary directory does no harm.
    let _ = std::fs::remove_dir_all(&scratch);
    let (fatbin, uses) = result?;
    ensure!(fatbin.len() <= FATBIN_BYTES_MAX, "the fatbin has {} bytes, at most {FATBIN_BYTES_MAX}", fatbin.len());
    let hash = blake3::hash(&fatbin).to_hex().to_string();
    println!("kernels: {} bytes, blake3 {hash}", fatbin.len());
    match task {
        Task::Check => {
            let same = lock(&dir)?.fatbin == hash;
            if !same {
                println!(
                    "error: the committed fatbin is not what its sources give\nhint: cargo xtask kernels, and commit"
                );
            }
            Ok(within_budget(&dir, &uses)? && same)
        }
        Task::Write | Task::WriteBudget => {
            std::fs::write(dir.join("kernels.fatbin"), &fatbin).context("write the fatbin")?;
            let lock = toml::to_string(&Lock { sources, fatbin: hash }).context("write the lock")?;
            std::fs::write(dir.join("kernels.lock"), lock).context("write the lock")?;
            if task == Task::WriteBudget {
                std::fs::write(dir.join("budget.toml"), budget_text(&uses)).context("write the budget")?;
            }
            within_budget(&dir, &uses)
        }
    }
}

fn lock(dir: &Path) -> Result<Lock> {
    let text = std::fs::read_to_string(dir.join("kernels.lock")).context("read kernels.lock")?;
    toml::from_str(&text).context("parse kernels.lock")
}

/// Names and contents of everything that the fatbin is made of.
fn sources_hash(dir: &Path) -> Result<String> {
    let mut files = Vec::new();
    for at in [dir.to_owned(), dir.join("shared")] {
        for entry in std::fs::read_dir(&at).with_context(|| format!("read {}", at.display()))? {
            let path = entry?.path();
            let made_of = path.extension().is_some_and(|e| e == "cu" || e == "cuh" || e == "flags");
            if made_of {
                files.push(path);
            }
        }
    }
    files.sort();
    let mut hash = blake3::Hasher::new();
    for path in files {
        let name = path.strip_prefix(dir).context("a source of the kernels")?.to_string_lossy().replace('\\', "/");
        let text = std::fs::read(&path).with_context(|| format!("read {name}"))?;
        hash.update(name.as_bytes()).update(&(text.len() as u64).to_le_bytes()).update(&text);
    }
    Ok(hash.finalize().to_hex().to_string())
}

/// The folder of the pinned compiler, installed first where it is missing.
fn toolkit() -> Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .context("neither XDG_CACHE_HOME nor a home directory says where to install the compiler")?;
    let dir = cache.join("lagoon").join(TOOLKIT);
    if !tool(&dir, "nvcc").is_file() {
        let partial = dir.with_extension(format!("partial-{}", std::process::id()));
        println!("installing {} to {}", PACKAGES.join(" "), dir.display());
        let status = Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--target"])
            .arg(&partial)
            .args(PACKAGES)
            .stdin(Stdio::null())
            .status()
            .context("run python3 -m pip (hint: apt-get install python3-pip)")?;
        ensure!(status.success(), "pip could not install the compiler (hint: apt-get install python3-pip)");
        // Another process may have been faster: what it installed is the same.
        if let Err(error) = std::fs::rename(&partial, &dir)
            && !tool(&dir, "nvcc").is_file()
        {
            bail!("put the compiler in place: {error}");
        }
        let _ = std::fs::remove_dir_all(&partial);
    }
    Ok(dir)
}

fn tool(toolkit: &Path, name: &str) -> PathBuf {
    toolkit.join("nvidia/cu13/bin").join(name)
}

fn build(toolkit: &Path, dir: &Path, scratch: &Path) -> Result<Vec<u8>> {
    let flags = std::fs::read_to_string(dir.join("nvcc.flags")).context("read nvcc.flags")?;
    let out = scratch.join("kernels.fatbin");
    // Relative to the sources' folder: no path of this machine can get into the output.
    let status = Command::new(tool(toolkit, "nvcc"))
        .args(flags.lines())
        .arg("-o")
        .arg(&out)
        .arg("all.cu")
        .current_dir(dir)
        .env("TMPDIR", scratch)
        .stdin(Stdio::null())
        .status()
        .context("run nvcc")?;
    ensure!(status.success(), "nvcc failed: {status}");
    std::fs::read(&out).context("read what nvcc wrote")
}

fn uses(toolkit: &Path, fatbin: &Path) -> Result<Uses> {
    let output = Command::new(tool(toolkit, "cuobjdump"))
        .arg("--dump-resource-usage")
        .arg(fatbin)
        .stdin(Stdio::null())
        .output()
        .context("run cuobjdump")?;
    ensure!(output.status.success(), "cuobjdump failed: {}", String::from_utf8_lossy(&output.stderr));
    parse_uses(&String::from_utf8_lossy(&output.stdout))
}

/// The lines `arch = A`, `Function F:` and `REG:n STACK:n SHARED:n LOCAL:n …` of cuobjdump.
fn parse_uses(text: &str) -> Result<Uses> {
    let (mut arch, mut function) = (String::new(), String::new());
    let mut uses = Uses::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("arch = ") {
            arch = name.to_owned();
        } else if let Some(name) = line.strip_prefix("Function ").and_then(|rest| rest.strip_suffix(':')) {
            function = name.to_owned();
        } else if line.starts_with("REG:") {
            let field = |name: &str| -> Result<u32> {
                let value = line.split_whitespace().find_map(|part| part.strip_prefix(name));
                value.with_context(|| format!("cuobjdump gives no {name}"))?.parse().context("a number of cuobjdump")
            };
            let found = Use {
                registers: field("REG:")?,
                shared_bytes: field("SHARED:")?,
                spilled_bytes: field("STACK:")?.max(field("LOCAL:")?),
            };
            uses.entry(arch.clone()).or_default().insert(function.clone(), found);
        }
    }
    ensure!(!uses.is_empty(), "cuobjdump found no kernel");
    Ok(uses)
}

fn budget_text(uses: &Uses) -> String {
    let mut text = String::from(
        "# Registers of a thread and static shared memory of a block that each kernel may use; none may spill.\n\
         # Written by `cargo xtask kernels --budget`; an increase is a decision.\n",
    );
    for (arch, kernels) in uses {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n[{arch}]");
        for (name, used) in kernels {
            let (registers, shared) = (used.registers, used.shared_bytes);
            let _ = writeln!(text, "{name} = {{ registers = {registers}, shared_bytes = {shared} }}");
        }
    }
    text
}

fn within_budget(dir: &Path, uses: &Uses) -> Result<bool> {
    let text = std::fs::read_to_string(dir.join("budget.toml")).context("read budget.toml")?;
    let budget: Uses = toml::from_str(&text).context("parse budget.toml")?;
    let complaints = complaints(&budget, uses);
    for complaint in &complaints {
        println!("error: {complaint}");
    }
    let count: usize = uses.values().map(BTreeMap::len).sum();
    if complaints.is_empty() {
        println!("kernels: {count} on {} architectures within their budget, none spills", uses.len());
    } else {
        println!("hint: cargo xtask kernels --budget takes the present use as the budget (spills are never taken)");
    }
    Ok(complaints.is_empty())
}

fn complaints(budget: &Uses, uses: &Uses) -> Vec<String> {
    let mut out = Vec::new();
    for (arch, kernels) in uses {
        for (name, used) in kernels {
            if used.spilled_bytes > 0 {
                out.push(format!("{name} on {arch} spills {} bytes", used.spilled_bytes));
            }
            match budget.get(arch).and_then(|kernels| kernels.get(name)) {
                None => out.push(format!("{name} on {arch} has no budget")),
                Some(b) if used.registers > b.registers || used.shared_bytes > b.shared_bytes => out.push(format!(
                    "{name} on {arch} uses {} registers and {} bytes of shared memory, its budget is {} and {}",
                    used.registers, used.shared_bytes, b.registers, b.shared_bytes
                )),
                Some(_) => {}
            }
        }
    }
    for (arch, kernels) in budget {
        let gone = kernels.keys().filter(|name| !uses.get(arch).is_some_and(|used| used.contains_key(*name)));
        out.extend(gone.map(|name| format!("{name} on {arch} has a budget, but is not in the fatbin")));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "Fatbin elf code:\n================\narch = sm_80\ncode version = [1,8]\n\nResource usage:\n Common:\n  \
        GLOBAL:0\n Function embed:\n  REG:16 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:392 TEXTURE:0\n Function merge:\n  REG:24 \
        STACK:0 SHARED:2048 LOCAL:0 CONSTANT[0]:408\n";

    #[test]
    fn the_lock_names_the_committed_sources_and_fatbin() {
        let dir = crate::root().join(DIR);
        let fatbin = std::fs::read(dir.join("kernels.fatbin")).unwrap();
        let found = Lock { sources: sources_hash(&dir).unwrap(), fatbin: blake3::hash(&fatbin).to_hex().to_string() };
        assert_eq!(lock(&dir).unwrap(), found, "hint: cargo xtask kernels, and commit");
    }

    #[test]
    fn uses_are_read_and_held_against_a_budget() {
        let uses = parse_uses(DUMP).unwrap();
        assert_eq!(uses["sm_80"]["merge"], Use { registers: 24, shared_bytes: 2048, spilled_bytes: 0 });
        let budget: Uses = toml::from_str(&budget_text(&uses)).unwrap();
        assert_eq!(budget, uses);
        assert!(complaints(&budget, &uses).is_empty());
        for (from, to) in [("REG:24", "REG:25"), ("SHARED:2048", "SHARED:4096"), ("STACK:0", "STACK:8"), ("embed", "e")]
        {
            let changed = parse_uses(&DUMP.replacen(from, to, 1)).unwrap();
            assert!(!complaints(&budget, &changed).is_empty(), "{from} -> {to}");
        }
    }

    #[test]
    fn an_empty_dump_is_an_error() {
        assert!(parse_uses("").is_err());
    }
}
