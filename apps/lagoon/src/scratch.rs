//! Temporary directories for the life of the process: keys, sockets, an unpacked model. Only this user may enter them.
//!
//! Each holds a locked file. The lock ends with the process, however it ends, so that the next process removes
//! directories left by a crash.

use anyhow::Context;
use lagoon_transport::direct::PRIVATE_FOLDER_PREFIX as PREFIX;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

/// Name of the locked file.
const LOCK: &str = ".lock";

/// This process's directories.
static OWN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn own() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A temporary directory. Removed on drop.
#[derive(Debug)]
pub(crate) struct Scratch {
    dir: TempDir,
    _lock: File,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        own().remove(self.dir.path());
    }
}

impl Scratch {
    /// Creates a directory with a name of `lagoon-KIND-…`.
    pub(crate) fn new(kind: &str) -> anyhow::Result<Self> {
        Self::within(&std::env::temp_dir(), kind)
    }

    fn within(parent: &Path, kind: &str) -> anyhow::Result<Self> {
        sweep(parent);
        let prefix = format!("{PREFIX}{kind}-");
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix);
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
        let dir = builder.tempdir_in(parent).with_context(|| format!("make a folder in {}", parent.display()))?;
        // Locked before it has the name that `sweep` looks for.
        let new = dir.path().join("new");
        let lock = File::create_new(&new).and_then(|file| file.lock().map(|()| file)).context("lock a file")?;
        fs::rename(new, dir.path().join(LOCK)).context("lock a file")?;
        own().insert(dir.path().to_owned());
        Ok(Self { dir, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes what processes of this user left that ended without their destructors. For the start of a command.
pub(crate) fn sweep_all() {
    sweep(&std::env::temp_dir());
}

/// Removes this process's directories, for an end without destructors.
pub(crate) fn remove_own() {
    let paths = std::mem::take(&mut *own());
    for path in paths {
        if let Err(error) = fs::remove_dir_all(&path) {
            tracing::debug!(%error, folder = %path.display(), "a temporary folder is left behind");
        }
    }
}

/// Removes this user's directories whose process has ended.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        // What another user names so may be anything: opening a pipe there would wait for ever.
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) || !is_own_folder(&entry.path()) {
            continue;
        }
        let abandoned = File::open(entry.path().join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok());
        if abandoned && let Err(error) = fs::remove_dir_all(entry.path()) {
            tracing::debug!(%error, folder = %entry.path().display(), "a folder that a crash left cannot be removed");
        }
    }
}

/// Whether it is a directory, no link to one, that only this user may write to.
#[cfg(unix)]
fn is_own_folder(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let own = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir() && meta.uid() == own && meta.mode() & 0o022 == 0)
}

#[cfg(not(unix))]
fn is_own_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_crash_left_goes_and_what_lives_stays() {
        let parent = tempfile::tempdir().unwrap();
        let living = Scratch::within(parent.path(), "a").unwrap();
        fs::write(living.path().join("key"), "secret").unwrap();
        // A crash: the lock is gone, the folder is not.
        let left = tempfile::Builder::new().prefix("lagoon-b-").tempdir_in(parent.path()).unwrap().keep();
        fs::write(left.join(LOCK), "").unwrap();
        fs::write(left.join("key"), "secret").unwrap();
        for other in ["lagoon-unlocked", "other"] {
            fs::create_dir(parent.path().join(other)).unwrap();
        }
        let next = Scratch::within(parent.path(), "b").unwrap();
        assert!(!left.exists() && living.path().join("key").exists() && next.path().exists());
        assert!(parent.path().join("other").exists() && parent.path().join("lagoon-unlocked").exists());
        let gone = living.path().to_owned();
        drop(living);
        assert!(!gone.exists());
    }

    /// Whoever may write to the folder of temporary files could hold up a process that starts.
    #[cfg(unix)]
    #[test]
    fn only_folders_of_this_user_alone_are_looked_into() {
        use std::os::unix::fs::PermissionsExt as _;
        let parent = tempfile::tempdir().unwrap();
        let (target, open) = (parent.path().join("target"), parent.path().join("lagoon-open"));
        for folder in [&target, &open] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join(LOCK), "").unwrap();
        }
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        std::os::unix::fs::symlink(&target, parent.path().join("lagoon-link")).unwrap();
        sweep(parent.path());
        assert!(target.join(LOCK).exists() && open.exists() && parent.path().join("lagoon-link").exists());
    }

    #[cfg(unix)]
    #[test]
    fn only_this_user_may_enter() {
        use std::os::unix::fs::PermissionsExt as _;
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::within(parent.path(), "a").unwrap();
        assert_eq!(fs::metadata(scratch.path()).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
