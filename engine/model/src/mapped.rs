//! The crate's only unsafe code: mapping a file read-only.

use bytes::Bytes;
use std::fs::File;
use std::io;
use std::path::Path;

/// Owner of a map, so that slices of it can outlive the checkpoint.
struct Mapped(memmap2::Mmap);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Maps `path` into memory; slices of the result keep the map alive. An empty file gives empty bytes.
///
/// The file must not change while the process runs. If it is truncated, a read of the lost part raises SIGBUS and
/// ends the process; if it is rewritten in place, the weights change. Operators must replace model files by renaming
/// new ones over them, which leaves the mapped ones intact.
pub(crate) fn map(path: &Path) -> io::Result<Bytes> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only, covers the file's length at this time, and lives as long as any slice of it. That
    // the file does not change meanwhile is the operator's documented duty, which no program can enforce.
    let map = unsafe { memmap2::Mmap::map(&file)? };
    Ok(Bytes::from_owner(Mapped(map)))
}
