//! One range of virtual memory and what is mapped in it.

use super::state::Stripe;
use std::ops::Range;

/// What is at one place of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// Nothing yet; filled when the row grows over it.
    Empty,
    /// Nothing, on purpose: moved away, behind the window, or recalled. Not filled by growth.
    Vacant,
    Mapped(Stripe),
}

/// Who uses a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Nobody; what is mapped is cached for the next request.
    Idle,
    Request,
    Guest,
}

#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) used: Use,
    /// rBlocks of addresses, in every tensor; empty until first needed.
    pub(super) range: Range<u32>,
    /// By place, from the range's first; shorter than the range where nothing is mapped behind.
    pub(super) slots: Vec<Slot>,
    /// Tokens that the last step asked for.
    pub(super) tokens: u32,
    /// Tokens at the front whose stripes other rows may see, too.
    pub(super) shared_tokens: u32,
    /// Of a guest: position of the first token of each rBlock, `None` for a recalled one.
    pub(super) guests: Vec<Option<u32>>,
}

impl Row {
    pub(super) fn new() -> Self {
        Self { used: Use::Idle, range: 0..0, slots: Vec::new(), tokens: 0, shared_tokens: 0, guests: Vec::new() }
    }

    pub(super) fn stripes(&self) -> impl Iterator<Item = (usize, Stripe)> + '_ {
        self.slots.iter().enumerate().filter_map(|(at, slot)| match slot {
            Slot::Mapped(stripe) => Some((at, *stripe)),
            _ => None,
        })
    }

    pub(super) fn mapped(&self) -> u32 {
        u32::try_from(self.stripes().count()).expect("places fit u32")
    }

    /// Places among the first `stripes` that have to be filled.
    pub(super) fn empty_below(&self, stripes: u32) -> impl Iterator<Item = usize> + '_ {
        (0..stripes as usize).filter(|at| matches!(self.slots.get(*at), None | Some(Slot::Empty)))
    }

    pub(super) fn set(&mut self, at: usize, slot: Slot) {
        if self.slots.len() <= at {
            self.slots.resize(at + 1, Slot::Empty);
        }
        self.slots[at] = slot;
        while self.slots.last() == Some(&Slot::Empty) {
            self.slots.pop();
        }
    }
}
