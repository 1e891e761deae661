//! The event queue ([`Agenda`]): ordered by time, then by insertion.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A queue of timed events. Time is in microseconds and never goes back.
pub struct Agenda<T> {
    /// Time, number in the order of insertion, and slot.
    heap: BinaryHeap<Reverse<(u64, u64, usize)>>,
    /// The events stay in place while the heap moves their keys.
    slots: Vec<Option<T>>,
    free: Vec<usize>,
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
        Self { heap: BinaryHeap::new(), slots: Vec::new(), free: Vec::new(), planned: 0, now_us: 0 }
    }
}

impl<T> Agenda<T> {
    /// Simulated time, in microseconds.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Plans an event at `at_us`, or now if that is past.
    pub fn at(&mut self, at_us: u64, what: impl Into<T>) {
        self.planned += 1;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(what.into());
        self.heap.push(Reverse((at_us.max(self.now_us), self.planned, slot)));
    }

    /// Plans an event `us` from now.
    pub fn after(&mut self, us: u64, what: impl Into<T>) {
        self.at(self.now_us + us, what);
    }

    /// Removes the next event and advances the time to it.
    pub fn pop(&mut self) -> Option<T> {
        let Reverse((at_us, _, slot)) = self.heap.pop()?;
        self.now_us = at_us;
        self.free.push(slot);
        self.slots[slot].take()
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
