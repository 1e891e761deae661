//! The event queue ([`Agenda`]): ordered by time, then by insertion.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

struct Entry<T> {
    at_us: u64,
    seq: u64,
    what: T,
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.seq == other.seq
    }
}

impl<T> Eq for Entry<T> {}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Entry<T> {
    /// Reversed: the heap's greatest entry is the next event.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at_us, other.seq).cmp(&(self.at_us, self.seq))
    }
}

/// A queue of timed events. Time is in microseconds and never goes back.
pub struct Agenda<T> {
    heap: BinaryHeap<Entry<T>>,
    planned: u64,
    now_us: u64,
}

impl<T> std::fmt::Debug for Agenda<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agenda").field("now_us", &self.now_us).field("planned", &self.heap.len()).finish()
    }
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), planned: 0, now_us: 0 }
    }
}

impl<T> Agenda<T> {
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Plans an event at `at_us`, or now if that is past.
    pub fn at(&mut self, at_us: u64, what: impl Into<T>) {
        self.planned += 1;
        self.heap.push(Entry { at_us: at_us.max(self.now_us), seq: self.planned, what: what.into() });
    }

    /// Plans an event `us` from now.
    pub fn after(&mut self, us: u64, what: impl Into<T>) {
        self.at(self.now_us + us, what);
    }

    /// Removes the next event and advances the time to it.
    pub fn pop(&mut self) -> Option<T> {
        let entry = self.heap.pop()?;
        self.now_us = entry.at_us;
        Some(entry.what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_happen_by_time_and_then_in_order() {
        let mut agenda = Agenda::default();
        agenda.at(20, 'c');
        agenda.at(10, 'a');
        agenda.at(20, 'd');
        agenda.at(10, 'b');
        let mut order = Vec::new();
        while let Some(what) = agenda.pop() {
            order.push((agenda.now_us(), what));
            if what == 'b' {
                agenda.at(5, 'x');
                agenda.after(10, 'e');
            }
        }
        assert_eq!(order, [(10, 'a'), (10, 'b'), (10, 'x'), (20, 'c'), (20, 'd'), (20, 'e')]);
    }
}
