//! Rules about files: their size, their functions' size, module docs, unsafe, and one op, one stem, three files.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};

use super::Finding;
use crate::{source, workspace};

const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;

/// Where `unsafe` may be written: kernels' launches, memory maps, SIMD.
const UNSAFE_DIRS: [&str; 4] = ["cuda/", "shaders/", "engine/model/", "engine/backend/"];

/// The instance's router: only these files may have `impl Instance`.
const INSTANCE_DIR: &str = "engine/instance/src/";
const ROUTER: [&str; 2] = ["instance.rs", "status.rs"];

const CPU_OPS: &str = "engine/backend/src/cpu";
const WGSL_OPS: &str = "shaders/wgsl";

/// Checks the rules for single Rust files.
pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut out = Vec::new();
    for path in workspace::files(root, "rs")? {
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        out.extend(check_file(&workspace::relative(root, &path), &text));
    }
    Ok(out)
}

fn check_file(name: &str, text: &str) -> Vec<Finding> {
    let mut out = Vec::new();
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        out.push(Finding::new("file-size", name, format!("{lines} lines, at most {FILE_LINES_MAX}")));
    }
    if !source::has_module_doc(text) {
        out.push(Finding::new("module-doc", name, "must start with a `//!` module doc: its purpose and invariants"));
    }
    let masked = source::mask(text);
    for function in source::functions(&masked) {
        if function.lines > FUNCTION_LINES_MAX {
            let message = format!("line {}: {} lines, at most {FUNCTION_LINES_MAX}", function.line, function.lines);
            out.push(Finding::new("function-size", format!("{name}: {}", function.name), message));
        }
    }
    if !UNSAFE_DIRS.iter().any(|dir| name.starts_with(dir))
        && let Some(position) = source::words(&masked, "unsafe").first()
    {
        let message =
            format!("line {}: unsafe is only for {}", source::line_of(&masked, *position), UNSAFE_DIRS.join(", "));
        out.push(Finding::new("unsafe", name, message));
    }
    if let Some(file) = name.strip_prefix(INSTANCE_DIR)
        && !ROUTER.contains(&file)
        && let Some(position) = source::words(&masked, "impl Instance").first()
    {
        let message =
            format!("line {}: only {} implement the router", source::line_of(&masked, *position), ROUTER.join(", "));
        out.push(Finding::new("router", name, message));
    }
    out
}

/// Stems of the files with this extension directly in `dir`, without mod.rs; empty where there is no such directory.
fn stems(dir: &Path, extension: &str) -> Result<BTreeSet<String>> {
    let mut out = BTreeSet::new();
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(out) };
    for entry in entries {
        let path = entry?.path();
        let (Some(stem), Some(found)) = (path.file_stem(), path.extension()) else { continue };
        if path.is_file() && found == extension && stem != "mod" {
            out.insert(stem.to_string_lossy().into_owned());
        }
    }
    Ok(out)
}

/// Checks that every op has a host file and a shader of the same stem. Other files there are listed exceptions.
pub(super) fn op_parity(root: &Path) -> Result<Vec<Finding>> {
    let host = stems(&root.join(CPU_OPS), "rs")?;
    let shaders = stems(&root.join(WGSL_OPS), "wgsl")?;
    Ok(unpaired(&host, &shaders))
}

fn unpaired(host: &BTreeSet<String>, shaders: &BTreeSet<String>) -> Vec<Finding> {
    let no_shader =
        host.difference(shaders).map(|stem| (format!("{CPU_OPS}/{stem}.rs"), format!("{WGSL_OPS}/{stem}.wgsl")));
    let no_host =
        shaders.difference(host).map(|stem| (format!("{WGSL_OPS}/{stem}.wgsl"), format!("{CPU_OPS}/{stem}.rs")));
    no_shader
        .chain(no_host)
        .map(|(file, missing)| Finding::new("op-parity", file, format!("there is no {missing}: one op, one stem")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(name: &str, text: &str) -> Vec<&'static str> {
        check_file(name, text).into_iter().map(|f| f.rule).collect()
    }

    #[test]
    fn sizes_at_and_over_the_limit() {
        let file = |lines: usize| format!("//! Doc.\n{}", "// x\n".repeat(lines - 1));
        assert!(rules("a.rs", &file(800)).is_empty());
        assert_eq!(rules("a.rs", &file(801)), ["file-size"]);
        let function = |lines: usize| format!("//! Doc.\nfn a() {{\n{}}}\n", "    x();\n".repeat(lines - 2));
        assert!(rules("a.rs", &function(70)).is_empty());
        assert_eq!(rules("a.rs", &function(71)), ["function-size"]);
    }

    #[test]
    fn unsafe_outside_its_crates() {
        let text = "//! Doc.\nfn a() { unsafe { b() } }\n";
        assert_eq!(rules("net/wire/src/lib.rs", text), ["unsafe"]);
        assert!(rules("cuda/src/lib.rs", text).is_empty());
        assert!(rules("net/wire/src/lib.rs", "//! Doc.\n#![forbid(unsafe_code)]\n// unsafe\n").is_empty());
    }

    #[test]
    fn the_router_in_a_machines_file() {
        let text = "//! Doc.\nimpl Instance {\n}\n";
        assert_eq!(rules("engine/instance/src/moves/mod.rs", text), ["router"]);
        assert!(rules("engine/instance/src/instance.rs", text).is_empty());
        assert!(rules("engine/instance/src/config.rs", "//! Doc.\nimpl InstanceConfig {\n}\n").is_empty());
        assert!(rules("apps/lagoon/src/a.rs", text).is_empty(), "another crate's");
    }

    #[test]
    fn a_missing_module_doc() {
        assert_eq!(rules("a.rs", "fn a() {}\n"), ["module-doc"]);
    }

    #[test]
    fn ops_without_a_twin() {
        let set = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<BTreeSet<_>>();
        assert!(unpaired(&set(&["rope", "rms_norm"]), &set(&["rms_norm", "rope"])).is_empty());
        let found = unpaired(&set(&["rope", "pool"]), &set(&["rope", "cast"]));
        let subjects: Vec<&str> = found.iter().map(|f| f.subject.as_str()).collect();
        assert_eq!(subjects, ["engine/backend/src/cpu/pool.rs", "shaders/wgsl/cast.wgsl"]);
    }
}
