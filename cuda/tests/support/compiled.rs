//! Libraries that tests compile when they are first wanted.

use std::fs::File;
use std::path::Path;

/// Has `build` make the file at the given path, unless it exists. Threads and processes that need the same
/// file at the same time wait for the one that makes it; no reader sees a partial file.
pub(crate) fn once(file: &Path, build: impl FnOnce(&Path) -> Result<(), String>) -> Result<(), String> {
    if file.exists() {
        return Ok(());
    }
    let output = |error: std::io::Error| format!("{}: {error}", file.display());
    // Let go of when it is closed, also by the end of a process.
    let lock = File::create(file.with_extension("lock")).map_err(output)?;
    lock.lock().map_err(output)?;
    if file.exists() {
        return Ok(());
    }
    let fresh = file.with_extension("part");
    build(&fresh)?;
    std::fs::rename(&fresh, file).map_err(output)
}
