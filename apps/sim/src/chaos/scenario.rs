//! Draws a scenario, a pool and its ops, from a seed.

use super::aim::Aim;
use super::ops::{Op, What};
use crate::fabric::LinkProfile;
use crate::place::{GMANAGER, Place};
use crate::pool::{CacheTiers, NodeSpec, PoolSpec};
use crate::rng::Rng;
use crate::shared::DeviceFault;
use crate::symbolic::{Speed, Windows};
use lagoon_instance::RemotePolicy;
use lagoon_protocol::{MemoryTier, Role};
use lagoon_wire::Class;

/// Bounds and switches for drawing scenarios.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of instances; 0 draws 2 to 5.
    pub nodes: usize,
    /// Number of requests; 0 draws it.
    pub requests: usize,
    /// Seconds in which requests and faults begin; 0 draws them.
    pub seconds: u64,
    /// Draw faults in most scenarios.
    pub faults: bool,
    /// All pools have prefill and decode workers, or none has; `None`: one in four has.
    pub roles: Option<bool>,
    /// A coincidence to provoke in every pool; it determines instances and roles.
    pub aim: Option<Aim>,
    /// Steps after which a run ends; 0 runs to its end.
    pub steps: u64,
    /// Prefix caches have tiers in host memory, on disk or both.
    pub cache_tiers: bool,
    /// Long prompts are computed by several instances.
    pub joint: bool,
    /// Instances are on two hosts, whose creditors others ask through one of them.
    pub hosts: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            nodes: 0,
            requests: 0,
            seconds: 0,
            faults: true,
            roles: None,
            aim: None,
            steps: 0,
            cache_tiers: false,
            joint: false,
            hosts: false,
        }
    }
}

/// A pool and its ops.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    pub seed: u64,
    pub pool: PoolSpec,
    /// Ordered by time.
    pub ops: Vec<Op>,
    /// [`Limits::steps`].
    pub steps_max: u64,
}

/// No op begins before: all instances have registered by then.
const WARM_US: u64 = 1_000_000;

impl Scenario {
    /// The seed's scenario.
    #[must_use]
    pub fn draw(seed: u64, limits: Limits) -> Self {
        let limits = match limits.aim {
            Some(aim) => Limits { nodes: aim.nodes(), roles: Some(true), ..limits },
            None => limits,
        };
        let mut rng = Rng::new(seed ^ 0x6c61_676f_6f6e);
        let mut pool = draw_pool(&mut rng.split(), limits);
        // A generator of its own, so that seeds without roles do not change.
        let mut roles = Rng::new(seed ^ 0x726f_6c65);
        let drawn = roles.once_in(4);
        if limits.roles.unwrap_or(drawn) {
            draw_roles(&mut roles, &mut pool);
            draw_stages(&mut Rng::new(seed ^ 0x7374_6167_6564), &mut pool);
        }
        draw_rings(&mut Rng::new(seed ^ 0x7269_6e67), &mut pool);
        draw_drafts(&mut Rng::new(seed ^ 0x6472_6166_7473), &mut pool);
        if limits.cache_tiers {
            draw_cache_tiers(&mut Rng::new(seed ^ 0x7469_6572), &mut pool);
        }
        draw_hosts(&mut Rng::new(seed ^ 0x6d61_6368), &mut pool, limits.hosts);
        if limits.joint {
            draw_joint(&mut Rng::new(seed ^ 0x006a_6f69_6e74), &mut pool);
        }
        let span_us = match limits.seconds {
            0 => 1_000_000 * rng.pick(&[2, 4, 8, 20]),
            seconds => seconds * 1_000_000,
        };
        let aimed = limits.aim.map(|aim| aim.draw(&mut Rng::new(seed ^ 0x0061_696d), &mut pool, WARM_US));
        let mut ops = draw_requests(&mut rng.split(), &pool, span_us, limits.requests);
        // One in four has no faults, so that nothing but bugs can explain a finding.
        let disturbed = limits.faults && !rng.once_in(4);
        if disturbed {
            let faults = rng.pick(&[1, 2, 4, 8, 16]);
            draw_faults(&mut rng.split(), &pool, span_us, faults, &mut ops);
        }
        // Half of the pools with roles change them.
        if pool.has_roles() && roles.once_in(2) {
            ops.extend(super::roles::draw(&mut roles, &mut pool, span_us, WARM_US, disturbed));
        }
        ops.extend(aimed.into_iter().flatten());
        ops.sort_by_key(|op| op.at_us);
        Self { seed, pool, ops, steps_max: limits.steps }
    }
}

impl Scenario {
    /// Whether roles may change in the scenario.
    pub(super) fn changes_roles(&self) -> bool {
        self.pool.balancer.is_some() || self.ops.iter().any(|op| matches!(op.what, What::Role { .. }))
    }
}

/// Half of the pools draft tokens, with a draft model or without.
fn draw_drafts(rng: &mut Rng, pool: &mut PoolSpec) {
    if rng.once_in(2) {
        for node in &mut pool.nodes {
            (node.drafts, node.draft_model) = (rng.pick(&[0, 2, 9]), !rng.once_in(4));
        }
    }
}

/// Draws joint prefill: no windows, which it does not take, and a mix of lengths from which on it begins.
fn draw_joint(rng: &mut Rng, pool: &mut PoolSpec) {
    pool.windows = Windows::default();
    pool.joint_tokens_min = rng.pick(&[12, 40, 100]);
    // Steps of a few rows: prompts of a small pool have several stripes.
    for node in &mut pool.nodes {
        node.step_rows = node.step_rows.min(small(rng.within(6..=24)));
    }
}

fn draw_pool(rng: &mut Rng, limits: Limits) -> PoolSpec {
    let block_tokens = rng.pick(&[4, 4, 8, 16]);
    let few = if limits.hosts { 4 } else { 2 };
    let count = if limits.nodes > 0 { limits.nodes } else { few + rng.index(4) };
    let policies = [RemotePolicy::Ship, RemotePolicy::Fetch, RemotePolicy::Auto];
    let skews = rng.pick(&[0, 100, 5_000, 20_000]);
    let mut nodes = Vec::new();
    for index in 0..count {
        let blocks = small(rng.within(6..=30));
        // The first instance always runs requests.
        let kv = index > 0 && rng.once_in(6);
        nodes.push(NodeSpec {
            role: if kv { Role::Kv } else { Role::Instance },
            tier: if kv && rng.once_in(2) { MemoryTier::Host } else { MemoryTier::Device },
            lend_blocks_max: if rng.once_in(4) { blocks / 2 } else { blocks },
            lend_reserve_blocks: small(rng.below(3)),
            step_rows: small(rng.within(6..=24)),
            running: 1 + rng.index(8),
            queue: rng.pick(&[4, 64]),
            remote: rng.pick(&policies),
            fetch_tokens: small(rng.within(8..=32)),
            speed: Speed {
                layer_ns: rng.pick(&[50_000, 400_000, 2_000_000]),
                row_ns: 20_000,
                key_ns: rng.pick(&[100, 2_000]),
            },
            skew_ppm: i32::try_from(rng.below(2 * skews + 1)).unwrap_or(0) - i32::try_from(skews).unwrap_or(0),
            offset_ms: rng.below(1 << 40),
            ..NodeSpec::of(blocks)
        });
    }
    let latency_us = rng.pick(&[30, 100, 1_000, 15_000]);
    PoolSpec {
        windows: Windows { pooled: rng.once_in(4).then(|| small(rng.within(10..=60))), rings: None },
        max_positions: if rng.once_in(4) { 200 } else { 4_000 },
        link: LinkProfile {
            latency_us,
            jitter_us: latency_us * rng.pick(&[0, 1, 4]),
            bytes_per_us: rng.pick(&[5, 1_000]),
        },
        prefix_cache: !rng.once_in(4),
        ..PoolSpec::of(block_tokens, nodes)
    }
}

/// Draws rings: one in three of the pools whose other layers have no window also has layers with one.
fn draw_rings(rng: &mut Rng, pool: &mut PoolSpec) {
    if pool.windows.pooled.is_none() && rng.once_in(3) {
        pool.windows.rings = Some(small(rng.within(1..=20)));
    }
}

/// Draws hosts: in half of the pools, or in all, where queries are then shipped more often. Some instances name none, as those
/// of earlier versions.
fn draw_hosts(rng: &mut Rng, pool: &mut PoolSpec, all: bool) {
    if !all && rng.once_in(2) {
        return;
    }
    for (index, node) in pool.nodes.iter_mut().enumerate() {
        let first = index == 0 || (!all && rng.once_in(2)) || rng.once_in(4);
        node.host = if rng.once_in(10) { 0 } else { 1 + u32::from(!first) };
        if all && !rng.once_in(4) {
            (node.remote, node.blocks) = (RemotePolicy::Ship, node.blocks.min(12));
            node.lend_blocks_max = node.lend_blocks_max.min(node.blocks);
        }
    }
}

/// Draws tiers of the prefix cache: larger than the KV memory or smaller, and with damage on disk.
fn draw_cache_tiers(rng: &mut Rng, pool: &mut PoolSpec) {
    pool.prefix_cache = true;
    let blocks = |rng: &mut Rng| rng.pick(&[0, 3, 20, 60]);
    let (host_blocks, disk_blocks) = (blocks(rng), blocks(rng));
    pool.cache_tiers = Some(CacheTiers {
        host_blocks: host_blocks.max(u64::from(disk_blocks == 0)),
        disk_blocks,
        damaged: small(rng.below(4)),
    });
}

/// Draws roles: one decode worker, one prefill worker, the others anything.
fn draw_roles(rng: &mut Rng, pool: &mut PoolSpec) {
    for (index, node) in pool.nodes.iter_mut().enumerate() {
        node.role = match index {
            0 => Role::Decode,
            1 if rng.once_in(4) => Role::Instance,
            1 => Role::Prefill,
            _ if node.role == Role::Kv => continue,
            _ => rng.pick(&[Role::Decode, Role::Prefill, Role::Instance]),
        };
        node.tier = MemoryTier::Device;
        // Some instances have memory that transports cannot read, as on most devices.
        node.transfers = node.role != Role::Instance || !rng.once_in(6);
    }
    pool.push = rng.once_in(2);
}

/// Draws staging buffers: in one pool of three some devices have private memory, with staging buffers smaller or
/// larger than a prompt.
fn draw_stages(rng: &mut Rng, pool: &mut PoolSpec) {
    if !rng.once_in(3) {
        return;
    }
    for node in pool.nodes.iter_mut().filter(|node| node.transfers) {
        let (blocks, staged) = (u64::from(node.blocks), rng.once_in(2));
        let few = rng.once_in(3);
        let beside = small(if few { rng.within(1..=blocks) } else { rng.within(blocks..=3 * blocks) });
        node.stage_blocks = if staged { beside } else { 0 };
    }
}

fn small(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn draw_requests(rng: &mut Rng, pool: &PoolSpec, span_us: u64, requests: usize) -> Vec<Op> {
    let runs = |place: &Place| pool.nodes[place - 1].role.serves();
    let debtors: Vec<Place> = (1..=pool.nodes.len()).filter(runs).collect();
    let count = if requests > 0 { requests } else { rng.pick(&[2, 5, 10, 20]) };
    let total = pool.nodes.iter().map(|n| n.blocks * pool.block_tokens).sum::<u32>();
    let burst = rng.once_in(3);
    let mut ops = Vec::new();
    for id in 0..count {
        let at_us = WARM_US + if burst { rng.below(100_000) } else { rng.below(span_us) };
        let place = rng.pick(&debtors);
        let own = pool.nodes[place - 1].blocks * pool.block_tokens;
        let prompt = match rng.below(8) {
            0 => rng.within(1..=u64::from(total) + 10),
            1..=3 => rng.within(u64::from(own) / 2..=u64::from(own) * 3 / 2),
            _ => rng.within(1..=u64::from(own) / 2 + 1),
        };
        let max_tokens = small(rng.pick(&[1, 8, 30, 80]) + rng.below(8));
        let what = What::Submit { id, place, prompt: small(prompt).max(1), max_tokens, seed: rng.draw() };
        ops.push(Op { at_us, what });
        if rng.once_in(3) {
            let (to, blocks) = (1 + rng.index(pool.nodes.len()), small(rng.within(1..=12)));
            ops.push(Op { at_us: at_us + rng.below(3_000_000), what: What::Move { id, to, blocks } });
        }
        if rng.once_in(8) {
            ops.push(Op { at_us: at_us + rng.below(2_000_000), what: What::Cancel { id } });
        }
    }
    ops
}

fn draw_faults(rng: &mut Rng, pool: &PoolSpec, span_us: u64, faults: usize, ops: &mut Vec<Op>) {
    let count = pool.nodes.len();
    // A scenario has few kinds of faults, each often: bugs of single kinds are found sooner.
    let most = if pool.has_roles() { 13 } else { 11 };
    let kinds: Vec<u64> = (0..rng.pick(&[1, 2, 8])).map(|_| rng.below(most)).collect();
    for _ in 0..faults {
        let at_us = WARM_US + rng.below(span_us + 2_000_000);
        let place = 1 + rng.index(count);
        let mut other = rng.index(count + 1);
        while other == place {
            other = rng.index(count + 1);
        }
        let (a, b) = (place, other);
        // Short; longer than a session's silence timeout; than a step's deadline; than a lease's time to live.
        let us = rng.pick(&[300_000, 1_500_000, 4_000_000, 12_000_000, 25_000_000]);
        let us = us / 2 + rng.below(us);
        let what = match rng.pick(&kinds) {
            0 => What::Crash { place, down_us: us },
            1 => What::Crash { place: GMANAGER, down_us: us },
            2 | 3 => What::Cut { a, b },
            4 => What::Partition { a, b, us },
            5 => What::Pause { place, us },
            6 => What::Pause { place: other, us },
            7 => What::Slow { a, b, us: rng.within(1_000..=3_000_000), for_us: us },
            8 => What::Break { place, fault: rng.pick(&[DeviceFault::Step, DeviceFault::RemoteRequest]) },
            9 => What::Drain { place, us },
            10 => What::Full { place, class: rng.pick(&Class::ALL) },
            _ => What::CutKv { a, b },
        };
        ops.push(Op { at_us, what });
    }
}
