//! Counters of frames and bytes.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Traffic of one class. Bytes are those of frames with headers; QUIC's own overhead is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassStats {
    pub frames_sent: u64,
    pub bytes_sent: u64,
    pub frames_received: u64,
    pub bytes_received: u64,
    /// Frames that were queued and never handed to QUIC: a session ended or a deadline passed.
    pub frames_dropped: u64,
}

/// Shared counters behind [`ClassStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    frames_sent: AtomicU64,
    bytes_sent: AtomicU64,
    frames_received: AtomicU64,
    bytes_received: AtomicU64,
    frames_dropped: AtomicU64,
}

fn count(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

impl Counters {
    pub(crate) fn sent(&self, bytes: usize) {
        self.frames_sent.fetch_add(1, Relaxed);
        self.bytes_sent.fetch_add(count(bytes), Relaxed);
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.frames_received.fetch_add(1, Relaxed);
        self.bytes_received.fetch_add(count(bytes), Relaxed);
    }

    pub(crate) fn dropped(&self, frames: usize) {
        self.frames_dropped.fetch_add(count(frames), Relaxed);
    }

    pub(crate) fn snapshot(&self) -> ClassStats {
        ClassStats {
            frames_sent: self.frames_sent.load(Relaxed),
            bytes_sent: self.bytes_sent.load(Relaxed),
            frames_received: self.frames_received.load(Relaxed),
            bytes_received: self.bytes_received.load(Relaxed),
            frames_dropped: self.frames_dropped.load(Relaxed),
        }
    }
}
