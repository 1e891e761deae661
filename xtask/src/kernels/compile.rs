//! Compiles the kernels with nvrtc.py, and parses the output of NVRTC and ptxas: each kernel's resources, and
//! warnings.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::budget::{Use, Uses};

/// By architecture (`sm_80`): NVRTC's log.
pub(super) type Logs = BTreeMap<String, String>;

/// Compiles the sources in `dir`. Writes ARCH.cubin for each architecture, and kernels.fatbin, to `out`.
pub(super) fn compile(root: &Path, dir: &Path, toolkit: &Path, out: &Path) -> Result<Logs> {
    let flags = std::fs::read_to_string(dir.join("nvrtc.flags")).context("read nvrtc.flags")?;
    // Relative source names keep paths of this machine out of the output.
    let status = Command::new("python3")
        .arg(root.join("xtask/src/kernels/nvrtc.py"))
        .args([toolkit, out])
        .args(flags.lines())
        .current_dir(dir)
        .stdin(Stdio::null())
        .status()
        .context("run python3")?;
    let logs = logs(out)?;
    for (arch, log) in &logs {
        for line in remarks(log) {
            println!("{arch}: {line}");
        }
    }
    ensure!(status.success(), "NVRTC failed: {status}");
    ensure!(!logs.is_empty(), "NVRTC left no log");
    Ok(logs)
}

fn logs(out: &Path) -> Result<Logs> {
    let mut logs = Logs::new();
    for entry in std::fs::read_dir(out).context("read what NVRTC wrote")? {
        let path = entry?.path();
        if let Some(arch) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".log")) {
            let log = std::fs::read_to_string(&path).with_context(|| format!("read the log of {arch}"))?;
            logs.insert(arch.to_owned(), log);
        }
    }
    Ok(logs)
}

/// Errors and warnings except [`serialized`] ones: lines outside ptxas's list of kernel resources.
fn remarks(log: &str) -> impl Iterator<Item = &str> {
    let listed = |line: &&str| {
        let listed =
            ["Compiling entry function", "Function properties for", "Used ", "bytes stack frame", "bytes gmem"];
        line.starts_with("ptxas") && listed.iter().any(|part| line.contains(part))
    };
    log.lines().filter(move |line| !line.trim().is_empty() && !listed(line) && !is_serialization(line))
}

/// ptxas's advisories C7500 to C7599, by architecture: warpgroup products are serialized, which costs most of their
/// speed.
pub(super) fn serialized(logs: &Logs) -> Vec<String> {
    let lines = |(arch, log): (&String, &String)| {
        log.lines().filter(|line| is_serialization(line)).map(|line| format!("{arch}: {line}")).collect::<Vec<_>>()
    };
    logs.iter().flat_map(lines).collect()
}

fn is_serialization(line: &str) -> bool {
    let code = line.split_once("(C75").and_then(|(_, rest)| rest.split_once(')'));
    code.is_some_and(|(digits, _)| digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Each kernel's resources, from ptxas's lines `Compiling entry function 'F'`, `N bytes stack frame, …` and `Used N
/// registers, …`.
pub(super) fn uses(logs: &Logs) -> Result<Uses> {
    let mut uses = Uses::new();
    for (arch, log) in logs {
        let (mut function, mut spilled_bytes) = ("", 0);
        for line in log.lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                function = rest.split_once('\'').context("ptxas names no function")?.0;
            } else if line.contains(" bytes stack frame") {
                let parts = [" bytes stack frame", " bytes spill stores", " bytes spill loads"];
                let counts = parts.iter().map(|part| before(line, part)).collect::<Result<Vec<_>>>()?;
                spilled_bytes = counts.into_iter().max().unwrap_or(0);
            } else if line.contains("Used ") {
                let shared_bytes = if line.contains(" bytes smem") { before(line, " bytes smem")? } else { 0 };
                let found = Use { registers: before(line, " registers")?, shared_bytes, spilled_bytes };
                uses.entry(arch.clone()).or_default().insert(function.to_owned(), found);
            }
        }
        ensure!(uses.contains_key(arch), "ptxas lists no kernel for {arch}");
    }
    Ok(uses)
}

/// The number before `what` in a line of ptxas.
fn before(line: &str, what: &str) -> Result<u32> {
    let number = line.split_once(what).and_then(|(head, _)| head.split([' ', ',']).next_back());
    let number = number.with_context(|| format!("ptxas gives no{what}: {line}"))?;
    number.parse().with_context(|| format!("a number of ptxas before{what}: {line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVRTC 12.2's output for two kernels.
    const CLEAN: &str = "ptxas info    : 404 bytes gmem
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
ptxas info    : Function properties for merge
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 25 registers, 2048 bytes smem
ptxas info    : Compiling entry function 'attention_wgmma_f16_128' for 'sm_90a'
ptxas info    : Function properties for attention_wgmma_f16_128
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers
";
    /// ptxas's line before those of [`CLEAN`] for accumulators that are read while products write them.
    const SERIALIZED: &str = "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
        due to insufficient register resources for the wgmma pipeline in the function 'attention_wgmma_f16_128'\n";

    fn logs(log: &str) -> Logs {
        Logs::from([("sm_90a".to_owned(), log.to_owned())])
    }

    #[test]
    fn serialized_products_are_found_in_ptxas_output() {
        assert!(serialized(&logs(CLEAN)).is_empty());
        let found = serialized(&logs(&format!("{SERIALIZED}{CLEAN}")));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("sm_90a: ") && found[0].ends_with("'attention_wgmma_f16_128'"), "{found:?}");
        // Every code of the class, and no other.
        for (code, count) in [("(C7500)", 1), ("(C7599)", 1), ("(C7600)", 0), ("(C751)", 0), ("(C75110)", 0)] {
            assert_eq!(serialized(&logs(&SERIALIZED.replace("(C7511)", code))).len(), count, "{code}");
        }
    }

    #[test]
    fn remarks_are_what_is_no_list_of_uses() {
        assert_eq!(remarks(CLEAN).count(), 0);
        let warning = "all.cu(3): warning #177-D: variable \"x\" was declared but never referenced";
        let text = format!("{warning}\n\n{SERIALIZED}{CLEAN}");
        assert_eq!(remarks(&text).collect::<Vec<_>>(), [warning]);
    }

    #[test]
    fn uses_are_read_from_ptxas_output() {
        let found = uses(&logs(CLEAN)).unwrap();
        assert_eq!(found["sm_90a"]["merge"], Use { registers: 25, shared_bytes: 2048, spilled_bytes: 0 });
        assert_eq!(
            found["sm_90a"]["attention_wgmma_f16_128"],
            Use { registers: 168, shared_bytes: 0, spilled_bytes: 0 }
        );
        for part in ["stack frame", "spill stores", "spill loads"] {
            let spills =
                uses(&logs(&CLEAN.replacen(&format!("0 bytes {part}"), &format!("8 bytes {part}"), 1))).unwrap();
            assert_eq!(spills["sm_90a"]["merge"].spilled_bytes, 8, "{part}");
        }
    }

    #[test]
    fn a_log_without_kernels_is_an_error() {
        assert!(uses(&logs("")).is_err());
        assert!(uses(&logs(&CLEAN.replace("Used 25", "Used many"))).is_err());
    }
}
