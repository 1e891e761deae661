//! Atomics: loom's in its tests, the standard library's otherwise.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// `n` zero words.
pub(crate) fn words(n: usize) -> Box<[AtomicU64]> {
    (0..n).map(|_| AtomicU64::new(0)).collect()
}

/// `n` zero half words.
pub(crate) fn half_words(n: usize) -> Box<[AtomicU32]> {
    (0..n).map(|_| AtomicU32::new(0)).collect()
}

/// The upper half of a word.
#[allow(clippy::cast_possible_truncation, reason = "the halves are taken apart")]
pub(crate) const fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

/// The lower half of a word.
#[allow(clippy::cast_possible_truncation, reason = "the halves are taken apart")]
pub(crate) const fn low(word: u64) -> u32 {
    word as u32
}

/// A word of two halves.
pub(crate) const fn word(high: u32, low: u32) -> u64 {
    ((high as u64) << 32) | low as u64
}
