//! Small files that are read again when they change: keys, certificates.
//!
//! Files are compared by content, which also detects a link that is moved (Kubernetes' secrets), or a file written
//! twice within the clock's resolution.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Weak,
    time::Duration,
};

/// Interval of looks at the files.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Longest file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a whole file of at most [`FILE_BYTES_MAX`].
///
/// # Errors
/// If it cannot be read, is longer, or is not UTF-8.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let read = File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if u64::try_from(read).map_or(true, |read| read > FILE_BYTES_MAX) {
        return Err(io::Error::other(format!("it is longer than {FILE_BYTES_MAX} bytes")));
    }
    Ok(text)
}

/// Files and their contents as last seen.
pub(crate) struct Reload {
    paths: Vec<PathBuf>,
    seen: blake3::Hash,
}

impl Reload {
    pub(crate) fn new(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let paths: Vec<PathBuf> = paths.into_iter().collect();
        Self { seen: digest(&paths), paths }
    }

    /// Reads the files. True if they differ from the last time.
    fn poll_change(&mut self) -> bool {
        let now = digest(&self.paths);
        std::mem::replace(&mut self.seen, now) != now
    }

    /// Calls `changed` after each change, for as long as `owner` lives.
    pub(crate) fn spawn<T: Send + Sync + 'static>(mut self, owner: Weak<T>, changed: impl Fn(&T) + Send + 'static) {
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK_EVERY).await;
                let Some(owner) = owner.upgrade() else { return };
                // At most a megabyte, mostly from the page cache.
                if self.poll_change() {
                    changed(&owner);
                }
            }
        });
    }
}

fn digest(paths: &[PathBuf]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for path in paths {
        // A missing file differs from every existing one.
        let text = read_text(path).ok();
        hasher.update(&[u8::from(text.is_some())]);
        hasher.update(blake3::hash(text.unwrap_or_default().as_bytes()).as_bytes());
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_seen_once() {
        let path = std::env::temp_dir().join(format!("lagoon-reload-test-{}", std::process::id()));
        let mut reload = Reload::new([path.clone()]);
        assert!(!reload.poll_change());
        std::fs::write(&path, "a").unwrap();
        assert!(reload.poll_change() && !reload.poll_change());
        std::fs::write(&path, "b").unwrap();
        assert!(reload.poll_change() && !reload.poll_change());
        std::fs::remove_file(&path).unwrap();
        assert!(reload.poll_change());
    }
}
