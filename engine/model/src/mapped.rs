//! The crate's only unsafe code: mapping a file read-only, and giving back its pages.

use bytes::Bytes;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Files of one model at most.
pub(crate) const FILES_MAX: usize = 4096;

/// A mapped file. Slices of its bytes keep the map alive.
#[derive(Clone, Debug)]
pub(crate) struct Map {
    bytes: Bytes,
    /// `None` for an empty file.
    map: Option<Arc<memmap2::Mmap>>,
}

/// Owner of a map, so that slices of it can outlive the checkpoint.
struct Mapped(Arc<memmap2::Mmap>);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Map {
    /// Bytes that are in memory already.
    pub(crate) fn of(bytes: Bytes) -> Self {
        Self { bytes, map: None }
    }

    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Lets the kernel take back the pages of `range` from this process's memory. Slices stay valid: a later read maps the
    /// pages again. Best effort: where the kernel refuses, memory stays as it is.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Some(map) = &self.map
            && range.end <= map.len()
            && !range.is_empty()
        {
            // SAFETY: MADV_DONTNEED on a shared, read-only map of a file drops page-table entries, and reads after it get the
            // file's bytes again, the same as before (the operator's duty, as below). Nobody writes through the map.
            let refused =
                unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
            if let Err(error) = refused {
                tracing::debug!(%error, "pages of a weight file are not released");
            }
        }
        #[cfg(not(unix))]
        drop(range);
    }
}

/// Maps `path` into memory; slices of the result keep the map alive. An empty file gives empty bytes.
///
/// The file must not change while the process runs. If it is truncated, a read of the lost part raises SIGBUS and
/// ends the process; if it is rewritten in place, the weights change. Operators must replace model files by renaming
/// new ones over them, which leaves the mapped ones intact.
pub(crate) fn map(path: &Path) -> io::Result<Map> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Map { bytes: Bytes::new(), map: None });
    }
    // SAFETY: the map is read-only, covers the file's length at this time, and lives as long as any slice of it. That
    // the file does not change meanwhile is the operator's documented duty, which no program can enforce.
    let map = Arc::new(unsafe { memmap2::Mmap::map(&file)? });
    Ok(Map { bytes: Bytes::from_owner(Mapped(Arc::clone(&map))), map: Some(map) })
}
