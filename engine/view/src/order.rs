//! The published order of rows, in two buffers.
//!
//! Publication `n` lies in buffer `n % 2`. The writer fills the buffer of `n + 1` while readers use that of `n`, and
//! begins with `n + 2`, in the buffer of `n`, only after `n + 1` is out: a reader that finds `n` still current when it
//! has finished has read nothing else.

use crate::sync::{AtomicU32, AtomicU64, Ordering, half_words};

/// Parts of the order: instances that borrow nothing, in device and in host memory, then those that borrow.
pub(crate) const GROUPS: usize = 4;

/// The order in two buffers, and the number of the current publication.
#[derive(Debug)]
pub(crate) struct Order {
    current: AtomicU64,
    buffers: [Buffer; 2],
}

#[derive(Debug)]
struct Buffer {
    slots: Box<[AtomicU32]>,
    /// Where each group ends.
    ends: [AtomicU32; GROUPS],
}

/// One publication, valid while [`Order::is_current`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading<'a> {
    number: u64,
    buffer: &'a Buffer,
}

impl Reading<'_> {
    /// Slots of a group, best first.
    pub(crate) fn group(&self, group: usize) -> impl Iterator<Item = u32> {
        let end = |g: usize| self.buffer.ends[g].load(Ordering::Acquire) as usize;
        let first = if group == 0 { 0 } else { end(group - 1) };
        // A reader that was overtaken may see ends of two publications; it starts again after this.
        let range = first..end(group).max(first).min(self.buffer.slots.len());
        self.buffer.slots[range].iter().map(|s| s.load(Ordering::Acquire))
    }
}

impl Order {
    pub(crate) fn new(capacity: usize) -> Self {
        let buffer = || Buffer { slots: half_words(capacity), ends: std::array::from_fn(|_| AtomicU32::new(0)) };
        Self { current: AtomicU64::new(0), buffers: [buffer(), buffer()] }
    }

    pub(crate) fn read(&self) -> Reading<'_> {
        let number = self.current.load(Ordering::Acquire);
        Reading { number, buffer: &self.buffers[usize::from(number % 2 == 1)] }
    }

    /// Whether the words that were read are of one publication. A reader that saw a word of a later publication in its
    /// buffer also sees, by acquire and release, the switch before it.
    pub(crate) fn is_current(&self, reading: &Reading<'_>) -> bool {
        self.current.load(Ordering::Acquire) == reading.number
    }

    /// Publishes slots with their groups, ascending by group; called by the writer.
    pub(crate) fn publish(&self, slots: impl Iterator<Item = (usize, u32)>) {
        let next = self.current.load(Ordering::Relaxed) + 1;
        let buffer = &self.buffers[usize::from(next % 2 == 1)];
        let mut ends = [0; GROUPS];
        let mut len = 0;
        for ((group, slot), word) in slots.zip(&buffer.slots) {
            word.store(slot, Ordering::Release);
            len += 1;
            ends[group..].fill(len);
        }
        for (word, end) in buffer.ends.iter().zip(ends) {
            word.store(end, Ordering::Release);
        }
        self.current.store(next, Ordering::Release);
    }
}
