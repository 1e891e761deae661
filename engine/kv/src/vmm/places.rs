//! [`Places`]: the stripe mapped at each place of the virtual tensors.
//!
//! A place is empty, **held** (in use) or **kept** (unused, but still mapped for the next holder of the place: deferred
//! reclamation, vAttention §6.1.2). Kept stripes are reclaimed when no free one is left, the longest kept first.

use super::VmmError;
use super::state::{Command, Plan, Stripe};
use std::collections::BTreeMap;

/// State of one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Empty,
    Held(Stripe),
    /// Kept, with the sequence number of its release.
    Kept(Stripe, u64),
}

impl Place {
    pub(super) fn stripe(self) -> Option<Stripe> {
        match self {
            Self::Empty => None,
            Self::Held(stripe) | Self::Kept(stripe, _) => Some(stripe),
        }
    }
}

/// Mapping of places to stripes.
///
/// Invariants: `free + stripes mapped at any place == total`; a kept stripe is mapped at its one place only.
#[derive(Debug)]
pub(super) struct Places {
    states: Vec<Place>,
    /// Reference count of each stripe: places where it is mapped; 0 is free.
    refs: Vec<u32>,
    free: Vec<Stripe>,
    /// Kept places by the sequence number of their release.
    kept: BTreeMap<u64, u32>,
    releases: u64,
}

impl Places {
    pub(super) fn new(places: u32, stripes: u32) -> Self {
        Self {
            states: vec![Place::Empty; places as usize],
            refs: vec![0; stripes as usize],
            free: (0..stripes).rev().map(Stripe).collect(),
            kept: BTreeMap::new(),
            releases: 0,
        }
    }

    pub(super) fn at(&self, place: u32) -> Place {
        self.states[place as usize]
    }

    /// Number of unmapped stripes.
    pub(super) fn free(&self) -> u32 {
        u32::try_from(self.free.len()).expect("stripes fit u32")
    }

    /// Number of kept stripes.
    pub(super) fn kept(&self) -> u32 {
        u32::try_from(self.kept.len()).expect("stripes fit u32")
    }

    /// The stripe that the next [`Places::map`] of a fresh one takes.
    pub(super) fn next_free(&self) -> Option<Stripe> {
        self.free.last().copied()
    }

    /// Whether a stripe is mapped at several places.
    pub(super) fn is_shared(&self, stripe: Stripe) -> bool {
        self.refs[stripe.0 as usize] > 1
    }

    fn set(&mut self, place: u32, state: Place) -> Place {
        if let Place::Kept(_, at) = self.states[place as usize] {
            self.kept.remove(&at);
        }
        if let Place::Kept(_, at) = state {
            self.kept.insert(at, place);
        }
        std::mem::replace(&mut self.states[place as usize], state)
    }

    fn change(&mut self, plan: &mut Plan, place: u32, state: Place) {
        let before = self.set(place, state);
        plan.states.push((place, before));
    }

    /// Maps a stripe at an empty place: a free one, or one that is mapped elsewhere as well.
    pub(super) fn map(&mut self, plan: &mut Plan, place: u32, stripe: Stripe) {
        assert_eq!(self.at(place), Place::Empty, "place {place} is taken");
        if self.refs[stripe.0 as usize] == 0 {
            assert_eq!(self.free.pop(), Some(stripe), "free stripes are taken from the end");
        }
        self.refs[stripe.0 as usize] += 1;
        self.change(plan, place, Place::Held(stripe));
        plan.commands.push(Command::Map { stripe, place });
    }

    /// Empties a place.
    pub(super) fn unmap(&mut self, plan: &mut Plan, place: u32) {
        let stripe = self.at(place).stripe().unwrap_or_else(|| panic!("nothing is mapped at place {place}"));
        self.change(plan, place, Place::Empty);
        let refs = &mut self.refs[stripe.0 as usize];
        *refs -= 1;
        if *refs == 0 {
            self.free.push(stripe);
        }
        plan.commands.push(Command::Unmap { stripe, place });
    }

    /// Turns a kept place into a held one. Returns whether it was kept.
    pub(super) fn hold(&mut self, plan: &mut Plan, place: u32) -> bool {
        let Place::Kept(stripe, _) = self.at(place) else { return false };
        self.change(plan, place, Place::Held(stripe));
        true
    }

    /// Turns a held place into a kept one. A shared stripe is unmapped instead: a new holder could write memory that the
    /// others read.
    pub(super) fn release(&mut self, plan: &mut Plan, place: u32) {
        let Place::Held(stripe) = self.at(place) else { return };
        if self.is_shared(stripe) {
            self.unmap(plan, place);
        } else {
            self.releases += 1;
            self.change(plan, place, Place::Kept(stripe, self.releases));
        }
    }

    /// Makes `wanted` stripes free, by unmapping kept ones if necessary. Returns how many were unmapped.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`], counted in stripes.
    pub(super) fn ensure_free(&mut self, plan: &mut Plan, wanted: u32) -> Result<u32, VmmError> {
        let available = self.free() + self.kept();
        if wanted > available {
            return Err(VmmError::OutOfMemory { needed: wanted.into(), available: available.into() });
        }
        Ok(self.reclaim(plan, wanted))
    }

    /// Unmaps kept stripes until `wanted` are free, or none is kept. Returns how many were unmapped.
    pub(super) fn reclaim(&mut self, plan: &mut Plan, wanted: u32) -> u32 {
        let mut reclaimed = 0;
        while self.free() < wanted {
            let Some((_, &place)) = self.kept.first_key_value() else { break };
            self.unmap(plan, place);
            reclaimed += 1;
        }
        reclaimed
    }

    /// Reverts the changes of a plan.
    pub(super) fn undo(&mut self, plan: &Plan) {
        for command in plan.commands.iter().rev() {
            match *command {
                Command::Map { stripe, .. } => {
                    let refs = &mut self.refs[stripe.0 as usize];
                    *refs -= 1;
                    if *refs == 0 {
                        self.free.push(stripe);
                    }
                }
                Command::Unmap { stripe, .. } => {
                    let refs = &mut self.refs[stripe.0 as usize];
                    if *refs == 0 {
                        assert_eq!(self.free.pop(), Some(stripe), "plans are undone in the reverse order");
                    }
                    *refs += 1;
                }
            }
        }
        for (place, before) in plan.states.iter().rev() {
            self.set(*place, *before);
        }
    }

    /// Recomputes all counts and compares them. Linear; for tests.
    pub(super) fn check(&self) {
        let mut refs = vec![0; self.refs.len()];
        let mut kept = BTreeMap::new();
        for (place, state) in (0..).zip(&self.states) {
            state.stripe().into_iter().for_each(|stripe| refs[stripe.0 as usize] += 1);
            if let Place::Kept(stripe, at) = state {
                kept.insert(*at, place);
                assert!(!self.is_shared(*stripe), "a kept stripe is mapped once");
            }
        }
        assert_eq!(refs, self.refs, "stripes are mapped as often as is counted");
        assert_eq!(kept, self.kept, "kept places are listed");
        let mut free: Vec<u32> = self.free.iter().map(|s| s.0).collect();
        free.sort_unstable();
        let want = (0..).zip(&refs).filter(|(_, refs)| **refs == 0).map(|(at, _)| at);
        assert!(free.into_iter().eq(want), "the free stripes are those mapped nowhere");
    }
}
