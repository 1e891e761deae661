//! Aimed faults: each provokes one rare coincidence, which random faults meet in one of thousands of scenarios.

use super::ops::{Op, What};
use crate::place::{GMANAGER, Place};
use crate::pool::PoolSpec;
use crate::rng::Rng;
use lagoon_protocol::{MemoryTier, Role};
use lagoon_wire::Class;

/// A coincidence to provoke in a pool with roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// A role order reaches an instance, but its withdrawal does not; then another instance of the same kind is
    /// ordered to change.
    TakenBack,
    /// An instance is declared dead that has a pending role order, or has asked for prefills; its requests and their
    /// replies are in flight when it learns of its death, and the worker learns of it late.
    Fenced,
    /// Prefill workers' replies find full queues.
    Unacknowledged,
    /// A decode worker with a slow device lends memory to requests that are cancelled, and reads prompts into that
    /// memory.
    LateWrites,
    /// A debtor's requests that hold leases are cancelled, and its messages to creditors find full queues at that moment.
    Unreleased,
}

/// First request id of aimed requests.
const FIRST_ID: usize = 1_000;

impl Aim {
    /// All aims, in the order of their names' help text.
    pub const ALL: [Self; 5] =
        [Self::TakenBack, Self::Fenced, Self::Unacknowledged, Self::LateWrites, Self::Unreleased];

    /// The aim of this command-line name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|aim| aim.name() == name)
    }

    /// The command-line name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TakenBack => "taken-back",
            Self::Fenced => "fenced",
            Self::Unacknowledged => "unacknowledged",
            Self::LateWrites => "late-writes",
            Self::Unreleased => "unreleased",
        }
    }

    /// Number of instances that the aim needs.
    pub(super) const fn nodes(self) -> usize {
        match self {
            Self::TakenBack | Self::Unacknowledged | Self::LateWrites | Self::Unreleased => 3,
            // The gManager declares no instance dead while more than half are silent.
            Self::Fenced => 4,
        }
    }

    /// Adapts the pool to the aim, and returns its ops.
    pub(super) fn draw(self, rng: &mut Rng, pool: &mut PoolSpec, first_us: u64) -> Vec<Op> {
        for node in &mut pool.nodes {
            (node.transfers, node.tier) = (true, MemoryTier::Device);
        }
        let first_us = first_us + rng.below(2_000_000);
        match self {
            Self::TakenBack => taken_back(rng, pool, first_us),
            Self::Fenced if rng.once_in(4) => ordered_before(rng, pool, first_us),
            Self::Fenced => asked_before(rng, pool, first_us),
            Self::Unacknowledged => unacknowledged(rng, pool, first_us),
            Self::LateWrites => late_writes(rng, pool, first_us),
            Self::Unreleased => unreleased(rng, pool, first_us),
        }
    }
}

fn set_roles(pool: &mut PoolSpec, roles: impl IntoIterator<Item = Role>) {
    pool.nodes.iter_mut().zip(roles).for_each(|(node, role)| node.role = role);
}

fn taken_back(rng: &mut Rng, pool: &mut PoolSpec, mut at_us: u64) -> Vec<Op> {
    let (role, other) = if rng.once_in(2) { (Role::Prefill, Role::Decode) } else { (Role::Decode, Role::Prefill) };
    let (a, b): (Place, Place) = if rng.once_in(2) { (1, 2) } else { (2, 1) };
    set_roles(pool, [role, role, other]);
    let mut ops = Vec::new();
    let mut then = |after_us: u64, what| {
        at_us += after_us;
        ops.push(Op { at_us, what });
    };
    then(0, What::Role { place: a, role: other });
    // Sooner or later than the reply.
    let (delay_us, us) = (rng.below(8 * pool.link.latency_us), rng.within(2_000_000..=12_000_000));
    then(delay_us, What::Partition { a, b: GMANAGER, us });
    then(rng.below(600_000), What::Role { place: a, role });
    then(rng.below(600_000), What::Role { place: b, role: other });
    ops
}

fn ordered_before(rng: &mut Rng, pool: &mut PoolSpec, at_us: u64) -> Vec<Op> {
    set_roles(pool, [Role::Decode, Role::Prefill, Role::Instance, Role::Instance]);
    let (place, us) = (3 + rng.index(2), rng.within(7_000_000..=12_000_000));
    let order_us = at_us + rng.below(1_500_000);
    let role = rng.pick(&[Role::Prefill, Role::Decode]);
    vec![
        Op { at_us, what: What::Partition { a: place, b: GMANAGER, us } },
        Op { at_us: order_us, what: What::Role { place, role } },
    ]
}

/// Ops: short prompts at a decode worker, one after another.
fn prompts(rng: &mut Rng, pool: &PoolSpec, place: Place, (first_us, every_us): (u64, u64)) -> Vec<Op> {
    let most = u64::from(4 * pool.block_tokens);
    let ops = (0..16).map(|n| {
        let prompt = u32::try_from(rng.within(2..=most)).unwrap_or(2);
        let what = What::Submit { id: FIRST_ID + n, place, prompt, max_tokens: 2, seed: rng.draw() };
        Op { at_us: first_us + n as u64 * every_us, what }
    });
    ops.collect()
}

/// Adds memory for [`prompts`], and queue capacity.
fn make_room(pool: &mut PoolSpec) {
    for node in &mut pool.nodes[..2] {
        (node.blocks, node.stage_blocks) = (node.blocks + 20, if node.stage_blocks > 0 { 60 } else { 0 });
        (node.lend_blocks_max, node.queue) = (node.blocks, 64);
    }
}

fn asked_before(rng: &mut Rng, pool: &mut PoolSpec, at_us: u64) -> Vec<Op> {
    set_roles(pool, [Role::Decode, Role::Prefill, Role::Instance, Role::Instance]);
    make_room(pool);
    let (asker, worker): (Place, Place) = (1, 2);
    let us = rng.within(7_000_000..=8_500_000);
    let end_us = at_us + us;
    let late_us = rng.within(200_000..=1_000_000);
    let slow = What::Slow { a: asker, b: worker, us: late_us, for_us: 6_000_000 };
    let mut ops = vec![
        Op { at_us, what: What::Partition { a: asker, b: GMANAGER, us } },
        Op { at_us: end_us - 3_000_000, what: What::Partition { a: worker, b: GMANAGER, us: 4_500_000 } },
        Op { at_us: end_us - 2_500_000, what: slow },
    ];
    ops.extend(prompts(rng, pool, asker, (end_us - 2_000_000, 200_000)));
    ops
}

fn unacknowledged(rng: &mut Rng, pool: &mut PoolSpec, at_us: u64) -> Vec<Op> {
    set_roles(pool, [Role::Decode, Role::Prefill, Role::Instance]);
    make_room(pool);
    let (asker, worker): (Place, Place) = (1, 2);
    let mut ops = prompts(rng, pool, asker, (at_us, 200_000));
    let full = What::Full { place: worker, class: Class::Control };
    ops.extend((0..16).map(|n| Op { at_us: at_us + n * 200_000 + rng.below(100_000), what: full }));
    ops
}

fn unreleased(rng: &mut Rng, pool: &mut PoolSpec, at_us: u64) -> Vec<Op> {
    set_roles(pool, [Role::Instance; 3]);
    let debtor: Place = 1;
    for node in &mut pool.nodes {
        (node.stage_blocks, node.queue, node.blocks) = (0, 64, 30);
        (node.lend_blocks_max, node.lend_reserve_blocks) = (30, 0);
    }
    pool.nodes[debtor - 1].blocks = 8;
    let room = u64::from(8 * pool.block_tokens);
    let mut ops = Vec::new();
    for n in 0..8 {
        let at_us = at_us + n * 400_000;
        let id = FIRST_ID + usize::try_from(n).unwrap_or(0);
        let prompt = u32::try_from(room + rng.below(room)).unwrap_or(1);
        ops.push(Op { at_us, what: What::Submit { id, place: debtor, prompt, max_tokens: 80, seed: rng.draw() } });
        // The first message behind the full queue is a release, unless a step sends one before.
        let at_us = at_us + 100_000 + rng.below(300_000);
        ops.push(Op { at_us, what: What::Full { place: debtor, class: Class::Control } });
        ops.push(Op { at_us, what: What::Cancel { id } });
    }
    ops
}

fn late_writes(rng: &mut Rng, pool: &mut PoolSpec, at_us: u64) -> Vec<Op> {
    set_roles(pool, [Role::Decode, Role::Prefill, Role::Instance]);
    let (asker, debtor): (Place, Place) = (1, 3);
    for node in &mut pool.nodes {
        (node.stage_blocks, node.queue) = (0, 64);
        (node.lend_blocks_max, node.lend_reserve_blocks) = (0, 0);
    }
    let lender = &mut pool.nodes[asker - 1];
    (lender.blocks, lender.lend_blocks_max, lender.speed.layer_ns) = (18, 18, 4_000_000);
    // Many writes arrive at once.
    let writer = &mut pool.nodes[debtor - 1];
    (writer.step_rows, writer.speed.layer_ns) = (64, 20_000);
    (pool.link.latency_us, pool.link.jitter_us, pool.link.bytes_per_us) = (50, 0, 1_000);
    let room = u64::from(pool.nodes[debtor - 1].blocks * pool.block_tokens);
    let mut ops = prompts(rng, pool, asker, (at_us, 150_000));
    for n in 0..16 {
        let at_us = at_us + n * 150_000 + rng.below(100_000);
        let id = 2 * FIRST_ID + usize::try_from(n).unwrap_or(0);
        let prompt = u32::try_from(rng.within(room..=room + u64::from(10 * pool.block_tokens))).unwrap_or(1);
        let what = What::Submit { id, place: debtor, prompt, max_tokens: 30, seed: rng.draw() };
        ops.push(Op { at_us, what });
        ops.push(Op { at_us: at_us + rng.below(200_000), what: What::Cancel { id } });
    }
    ops
}
