//! The dependency graph from `cargo metadata`, reduced to the rules' needs, and the list of source files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use cargo_metadata::MetadataCommand;

/// A member of the workspace.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// Its directory from the repository's root, with forward slashes.
    pub(crate) dir: String,
    /// Names of all its direct dependencies: normal, build and dev.
    pub(crate) dependencies: BTreeSet<String>,
}

/// A crate in the lock file, for any platform.
#[derive(Debug, Clone)]
pub(crate) struct External {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) licence: Option<String>,
    pub(crate) from_registry: bool,
    /// Its dependencies in the build, without unused optional ones.
    pub(crate) dependencies: BTreeSet<String>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Graph {
    pub(crate) members: Vec<Member>,
    /// Every crate, members included.
    pub(crate) all: Vec<External>,
}

/// A cargo command without the variables that the cargo which runs this program has set: ring's build script is run again where they
/// differ, and all that depends on it is built again (QUIC, HTTP, the binaries).
pub(crate) fn cargo() -> Command {
    let mut command = Command::new("cargo");
    let of_package = |name: &str| ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|prefix| name.starts_with(prefix));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_package)) {
        command.env_remove(name);
    }
    command
}

/// Cargo's target folder.
pub(crate) fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

/// The graph, from cargo. The lock file must be up to date.
pub(crate) fn graph(root: &Path) -> Result<Graph> {
    let metadata = MetadataCommand::new()
        .manifest_path(root.join("Cargo.toml"))
        .other_options(vec!["--locked".to_owned()])
        .exec()
        .context("read cargo metadata (hint: if Cargo.lock is out of date, run `cargo metadata` and commit it)")?;
    let names: BTreeMap<_, _> = metadata.packages.iter().map(|p| (&p.id, p.name.to_string())).collect();
    let nodes = metadata.resolve.as_ref().map(|resolve| resolve.nodes.as_slice()).unwrap_or_default();
    let built_with: BTreeMap<_, BTreeSet<String>> =
        nodes.iter().map(|n| (&n.id, n.dependencies.iter().filter_map(|d| names.get(d).cloned()).collect())).collect();
    let mut graph = Graph::default();
    for package in &metadata.packages {
        let name = package.name.to_string();
        if metadata.workspace_members.contains(&package.id) {
            let dir = package.manifest_path.parent().map(|p| p.as_std_path().to_owned()).unwrap_or_default();
            let dependencies = package.dependencies.iter().map(|d| d.name.clone()).collect();
            graph.members.push(Member { name: name.clone(), dir: relative(root, &dir), dependencies });
        }
        graph.all.push(External {
            name,
            version: package.version.to_string(),
            licence: package.license.clone(),
            from_registry: package.source.as_ref().is_none_or(|s| s.repr.starts_with("registry+")),
            dependencies: built_with.get(&package.id).cloned().unwrap_or_default(),
        });
    }
    graph.members.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(graph)
}

/// `path` from the root, with forward slashes.
pub(crate) fn relative(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).to_string_lossy().replace('\\', "/")
}

/// Every file below `dir` with the extension, sorted, without build outputs and hidden directories.
pub(crate) fn files(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut out = Vec::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(&dir).with_context(|| format!("list {}", dir.display()))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type()?;
            if kind.is_dir() && !name.starts_with('.') && name != "target" && name != "node_modules" {
                open.push(entry.path());
            } else if kind.is_file() && entry.path().extension().is_some_and(|e| e == extension) {
                out.push(entry.path());
            }
        }
    }
    out.sort();
    Ok(out)
}
