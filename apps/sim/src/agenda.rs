//! The event queue ([`Agenda`]): ordered by time, then by insertion.
#![allow(clippy::cast_possible_truncation, reason = "parts of a key have the bits that they were made of")]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Time, number in the order of insertion (40 bits) and slot (24 bits) in one number, from the high bits to the low ones: compared
/// at once.
type Key = u128;
const NUMBER_BITS: u32 = 40;
const SLOT_BITS: u32 = 24;

/// A queue of timed events. Time is in microseconds and never goes back.
pub struct Agenda<T> {
    heap: BinaryHeap<Reverse<Key>>,
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
        assert!(self.planned < 1 << NUMBER_BITS && slot < 1 << SLOT_BITS, "an agenda is bounded");
        let place = u128::from(self.planned) << SLOT_BITS | slot as u128;
        self.heap.push(Reverse(u128::from(at_us.max(self.now_us)) << (NUMBER_BITS + SLOT_BITS) | place));
    }

    /// Plans an event `us` from now.
    pub fn after(&mut self, us: u64, what: impl Into<T>) {
        self.at(self.now_us + us, what);
    }

    /// Removes the next event and advances the time to it.
    pub fn pop(&mut self) -> Option<T> {
        let Reverse(key) = self.heap.pop()?;
        let slot = (key & ((1 << SLOT_BITS) - 1)) as usize;
        self.now_us = (key >> (NUMBER_BITS + SLOT_BITS)) as u64;
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
