//! Resource budgets of each kernel on each architecture: cuda/kernels/budget.toml.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Resources of a kernel on one architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Use {
    /// Registers of a thread.
    pub(super) registers: u32,
    /// Static shared memory of a block.
    pub(super) shared_bytes: u32,
    /// Stack and spilled registers of a thread; never in a budget.
    #[serde(default, skip_serializing)]
    pub(super) spilled_bytes: u32,
}

/// By architecture and kernel.
pub(super) type Uses = BTreeMap<String, BTreeMap<String, Use>>;

/// Writes the present use as the budget.
pub(super) fn write(dir: &Path, uses: &Uses) -> Result<()> {
    std::fs::write(dir.join("budget.toml"), text(uses)).context("write the budget")
}

/// Whether every kernel is within its budget; prints violations.
pub(super) fn hold(dir: &Path, uses: &Uses) -> Result<bool> {
    let text = std::fs::read_to_string(dir.join("budget.toml")).context("read budget.toml")?;
    let budget: Uses = toml::from_str(&text).context("parse budget.toml")?;
    let complaints = complaints(&budget, uses);
    for complaint in &complaints {
        println!("error: {complaint}");
    }
    if complaints.is_empty() {
        let count: usize = uses.values().map(BTreeMap::len).sum();
        println!("kernels: {count} on {} architectures within their budget, none spills", uses.len());
    } else {
        println!("hint: cargo xtask kernels --budget takes the present use as the budget (spills are never taken)");
    }
    Ok(complaints.is_empty())
}

fn text(uses: &Uses) -> String {
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

    #[test]
    fn uses_are_held_against_a_budget() {
        let used = Use { registers: 24, shared_bytes: 2048, spilled_bytes: 0 };
        let uses = |name: &str, used| Uses::from([("sm_80".to_owned(), BTreeMap::from([(name.to_owned(), used)]))]);
        let budget: Uses = toml::from_str(&text(&uses("merge", used))).unwrap();
        assert_eq!(budget, uses("merge", used));
        assert!(complaints(&budget, &uses("merge", used)).is_empty());
        for (name, used) in [
            ("merge", Use { registers: 25, ..used }),
            ("merge", Use { shared_bytes: 4096, ..used }),
            ("merge", Use { spilled_bytes: 8, ..used }),
            ("other", used),
        ] {
            assert!(!complaints(&budget, &uses(name, used)).is_empty(), "{name} {used:?}");
        }
    }
}
