//! Stripes: who computes what of a prompt in joint prefill, and which of it may start (docs/adr/0038).
//!
//! A **stripe** is a number of consecutive rBlocks behind those that the owner knows; members compute stripes in turn, and the
//! owner the last one. A member's lease has its rBlocks in order; the owner's begins with those that it knows.
//!
//! A stripe may start when the last steps of all earlier ones have started: every step of a joint prefill then waits only for
//! steps that run already, of which the earliest waits for none.

use std::ops::Range;

/// Who computes what. Blocks are numbered within the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Leading blocks that the owner knows.
    pub(crate) known: u32,
    /// The blocks behind the last stripe.
    pub(crate) end: u32,
    /// Blocks of a stripe; the last one may have fewer.
    pub(crate) stripe: u32,
    /// Number of members; the owner is member 0.
    pub(crate) members: u32,
}

impl Layout {
    /// A layout in which every member has a stripe; `None` for other numbers.
    pub(crate) fn new(known: u32, end: u32, stripe: u32, members: u32) -> Option<Self> {
        let layout = Self { known, end, stripe, members };
        let sensible = stripe > 0 && members > 1 && known < end && layout.stripes() >= members;
        sensible.then_some(layout)
    }

    pub(crate) fn stripes(&self) -> u32 {
        (self.end - self.known).div_ceil(self.stripe)
    }

    /// The member that computes a stripe.
    pub(crate) fn member_of(&self, stripe: u32) -> u32 {
        let last = (self.stripes() - 1) % self.members;
        (stripe % self.members + self.members - last) % self.members
    }

    pub(crate) fn blocks_of(&self, stripe: u32) -> Range<u32> {
        let first = self.known + stripe * self.stripe;
        first..(first + self.stripe).min(self.end)
    }

    /// The stripe of a block that the owner does not know; the number of stripes for one behind them.
    pub(crate) fn stripe_of(&self, block: u32) -> u32 {
        if block >= self.end { self.stripes() } else { (block - self.known) / self.stripe }
    }

    /// Entry of a member's lease at which a block of its stripe lies; the lease's length for `end`.
    pub(crate) fn entry(&self, member: u32, block: u32) -> u32 {
        let (stripe, last) = (self.stripe_of(block), self.stripes() - 1);
        let first = (member + last) % self.members;
        let before = stripe.saturating_sub(first).div_ceil(self.members) * self.stripe;
        let known = if member == 0 { self.known } else { 0 };
        if block < self.end {
            return known + before + (block - self.known) % self.stripe;
        }
        // The last stripe, which is the owner's, may have fewer blocks.
        let missing = if member == 0 { self.stripe - as_u32(self.blocks_of(last).len()) } else { 0 };
        known + before - missing
    }

    /// Blocks that a member leases to the others.
    pub(crate) fn leased(&self, member: u32) -> u32 {
        self.entry(member, self.end)
    }

    /// Blocks that a member computes.
    pub(crate) fn computed_by(&self, member: u32) -> u32 {
        self.leased(member) - if member == 0 { self.known } else { 0 }
    }
}

/// A sequence's part in a joint prefill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stripes {
    pub(crate) layout: Layout,
    /// The number of this instance among the members.
    pub(crate) me: u32,
    /// The last stripe of each member whose last step has started.
    started: Vec<Option<u32>>,
    /// The joint prefill ends: nothing starts.
    pub(crate) stopped: bool,
}

impl Stripes {
    pub(crate) fn new(layout: Layout, me: u32) -> Self {
        Self { layout, me, started: vec![None; layout.members as usize], stopped: false }
    }

    /// Records that the last step of a stripe has started.
    pub(crate) fn note_started(&mut self, stripe: u32) {
        if stripe < self.layout.stripes() {
            let latest = &mut self.started[self.layout.member_of(stripe) as usize];
            *latest = (*latest).max(Some(stripe));
        }
    }

    /// Blocks of the other members' stripes whose last step has not started.
    pub(crate) fn not_started(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        let waits = move |stripe: &u32| {
            let of = self.layout.member_of(*stripe);
            of != self.me && self.started[of as usize] < Some(*stripe)
        };
        (0..self.layout.stripes()).filter(waits).map(move |stripe| self.layout.blocks_of(stripe))
    }

    /// Whether a step may compute positions from this block on.
    pub(crate) fn may_start(&self, block: u32) -> bool {
        let stripe = self.layout.stripe_of(block);
        let has_started = |of: u32| self.started[self.layout.member_of(of) as usize] >= Some(of);
        !self.stopped && (stripe.saturating_sub(self.layout.members)..stripe).all(has_started)
    }

    /// The stripe whose last position is before `end`, a position, if that is one's last.
    pub(crate) fn ends_at(&self, end: u32, block_tokens: u32) -> Option<u32> {
        let block = (end.is_multiple_of(block_tokens)).then_some(end / block_tokens)?;
        let stripe =
            (self.layout.known < block && block <= self.layout.end).then(|| self.layout.stripe_of(block - 1))?;
        (self.layout.blocks_of(stripe).end == block).then_some(stripe)
    }
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every block has one stripe, every stripe one member, the owner the last; leases have their blocks in order.
        #[test]
        fn stripes_cover_the_prompt_once(known in 0u32..20, blocks in 1u32..200, stripe in 1u32..20, members in 2u32..6) {
            let Some(layout) = Layout::new(known, known + blocks, stripe, members) else {
                prop_assert!(blocks.div_ceil(stripe) < members);
                return Ok(());
            };
            let mut entries: Vec<u32> = (0..members).map(|member| if member == 0 { known } else { 0 }).collect();
            let mut next = known;
            for stripe in 0..layout.stripes() {
                let of = layout.blocks_of(stripe);
                prop_assert_eq!(of.start, next);
                let member = layout.member_of(stripe);
                // So a range that is due to a member, and a chunk of it, crosses into no other stripe.
                prop_assert_ne!(member, layout.member_of(stripe + 1), "of neighbours");
                for block in of.clone() {
                    prop_assert_eq!((layout.stripe_of(block), layout.entry(member, block)), (stripe, entries[member as usize]));
                    entries[member as usize] += 1;
                }
                next = of.end;
            }
            prop_assert_eq!((next, layout.member_of(layout.stripes() - 1)), (layout.end, 0));
            for (member, entries) in (0..).zip(entries) {
                prop_assert_eq!(layout.leased(member), entries);
                prop_assert!(layout.computed_by(member) > 0);
            }
        }

        /// Whatever the order of notices, a stripe starts when all before it have started, and not before.
        #[test]
        fn a_stripe_starts_behind_all_before_it(blocks in 8u32..60, members in 2u32..5, seed in any::<u64>()) {
            let layout = Layout::new(0, blocks, 2, members).unwrap();
            let (mut stripes, mut seed) = (Stripes::new(layout, 0), seed);
            // The next stripe of each member to start.
            let mut next: Vec<u32> = (0..members).map(|m| (0..members).find(|s| layout.member_of(*s) == m).unwrap()).collect();
            for _ in 0..500 {
                let started = |stripe: u32| next[layout.member_of(stripe) as usize] > stripe;
                for stripe in 0..layout.stripes() {
                    let open = stripes.may_start(layout.blocks_of(stripe).start);
                    prop_assert_eq!(open, (0..stripe).all(started), "stripe {}", stripe);
                }
                prop_assert_eq!(stripes.may_start(blocks), (0..layout.stripes()).all(started));
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let member = (seed >> 33) as u32 % members;
                let stripe = next[member as usize];
                if stripe < layout.stripes() {
                    stripes.note_started(stripe);
                    next[member as usize] += members;
                }
            }
        }
    }

    #[test]
    fn the_end_of_a_stripe_is_known_by_its_position() {
        let stripes = Stripes::new(Layout::new(1, 8, 3, 2).unwrap(), 0);
        let ends: Vec<(u32, u32)> = (0..40).filter_map(|end| Some((end, stripes.ends_at(end, 4)?))).collect();
        assert_eq!(ends, [(16, 0), (28, 1), (32, 2)]);
    }
}
