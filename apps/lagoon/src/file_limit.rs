//! The limit on open files (RLIMIT_NOFILE): each connection is one.

use lagoon_http::limits::CONNECTIONS_MAX;

/// Open files of a process with the maximum of connections: at the API's port, at the health port, and from a gateway
/// to its instances; and some for the model, devices and peers.
pub(crate) const FILES_WANTED: u64 = 3 * CONNECTIONS_MAX as u64 + 512;

/// Raises this process's limit as far as its user may.
#[cfg(unix)]
pub(crate) fn raise() {
    if let Err(error) = rlimit::increase_nofile_limit(u64::MAX) {
        tracing::warn!(%error, "the limit on open files could not be raised");
    }
}

/// No limit on this system.
#[cfg(not(unix))]
pub(crate) fn raise() {}

/// Files that this process may open; `None` without a limit.
#[cfg(unix)]
pub(crate) fn files_max() -> Option<u64> {
    rlimit::Resource::NOFILE.get_soft().ok()
}

/// No limit on this system.
#[cfg(not(unix))]
pub(crate) fn files_max() -> Option<u64> {
    None
}
