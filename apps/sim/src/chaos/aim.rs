//! Faults that are aimed at one coincidence, which drawn ones meet in one scenario of thousands.

use super::ops::{Op, What};
use crate::fabric::{GMANAGER, Place};
use crate::pool::PoolSpec;
use crate::rng::Rng;
use lagoon_protocol::{MemoryTier, Role};

/// What happens to a pool with roles beside everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// An instance hears of a role, and not that it was taken back; then another one of its kind is told to change, too.
    TakenBack,
}

/// Instances that the pool has to have for this.
const NODES: usize = 3;

impl Aim {
    /// By its name on the command line.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::TakenBack].into_iter().find(|aim| aim.name() == name)
    }

    /// On the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TakenBack => "taken-back",
        }
    }

    /// Makes the pool one in which it can happen, and says what does.
    pub(super) fn draw(self, rng: &mut Rng, pool: &mut PoolSpec, first_us: u64) -> Vec<Op> {
        match self {
            Self::TakenBack => taken_back(rng, pool, first_us),
        }
    }
}

fn taken_back(rng: &mut Rng, pool: &mut PoolSpec, first_us: u64) -> Vec<Op> {
    pool.nodes.truncate(NODES);
    let (role, other) = if rng.once_in(2) { (Role::Prefill, Role::Decode) } else { (Role::Decode, Role::Prefill) };
    let (a, b): (Place, Place) = if rng.once_in(2) { (1, 2) } else { (2, 1) };
    for (node, place) in pool.nodes.iter_mut().zip(1..) {
        node.role = if place == a || place == b { role } else { other };
        (node.transfers, node.tier) = (true, MemoryTier::Device);
    }
    let mut at_us = first_us + rng.below(2_000_000);
    let mut ops = Vec::new();
    let mut then = |after_us: u64, what| {
        at_us += after_us;
        ops.push(Op { at_us, what });
    };
    then(0, What::Role { place: a, role: other });
    // Sooner or later than its answer.
    let (delay_us, us) = (rng.below(8 * pool.link.latency_us), rng.within(2_000_000..=12_000_000));
    then(delay_us, What::Partition { a, b: GMANAGER, us });
    then(rng.below(600_000), What::Role { place: a, role });
    then(rng.below(600_000), What::Role { place: b, role: other });
    ops
}
