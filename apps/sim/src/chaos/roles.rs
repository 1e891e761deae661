//! Role changes while a pool works: orders, and checkers of each role's duties and of every switch's end.

use super::check::{Pool, failure};
use super::ops::{Op, What};
use super::requests::Asked;
use super::run::Failure;
use crate::place::{GMANAGER, Place};
use crate::pool::PoolSpec;
use crate::process::Process;
use crate::rng::Rng;
use crate::symbolic::Symbolic;
use lagoon_cluster::BalancerConfig;
use lagoon_protocol::{AdminBody, AdminRole, Role};
use lagoon_wire::Class;
use std::collections::BTreeMap;

/// Draws role orders and, in some pools, a balancer with short delays. Half of the faults drawn here meet a switch.
pub(super) fn draw(rng: &mut Rng, pool: &mut PoolSpec, span_us: u64, first_us: u64, faults: bool) -> Vec<Op> {
    if rng.once_in(3) {
        let (sustain_ms, dwell_ms) = (rng.pick(&[500, 2_000]), rng.pick(&[500, 4_000]));
        let spare_load = if rng.once_in(2) { 0.5 } else { 1.0 };
        pool.balancer = Some(BalancerConfig { sustain_ms, dwell_ms, window_ms: 1_000, spare_load });
    }
    let change = |place: &Place| pool.nodes[place - 1].role.runs();
    let may: Vec<Place> = (1..=pool.nodes.len()).filter(change).collect();
    let (orders, aimed, mut ops) = (rng.pick(&[1, 2, 4, 8]), faults && rng.once_in(2), Vec::new());
    for _ in 0..orders {
        let (at_us, place) = (first_us + rng.below(span_us + 2_000_000), rng.pick(&may));
        let role = rng.pick(&[Role::Prefill, Role::Decode, Role::Instance]);
        ops.push(Op { at_us, what: What::Role { place, role } });
        if aimed && rng.once_in(2) {
            let us = rng.pick(&[300_000, 1_500_000, 4_000_000, 12_000_000]);
            let at_us = at_us + rng.below(rng.clone().pick(&[20_000, 3_000_000]));
            ops.push(Op { at_us, what: fault(rng, &may, place, us) });
        }
    }
    ops
}

/// A fault during a role change of the instance at `place`.
fn fault(rng: &mut Rng, may: &[Place], place: Place, us: u64) -> What {
    let us = us / 2 + rng.below(us);
    let other = rng.pick(may);
    match rng.below(9) {
        0 => What::Crash { place, down_us: us },
        1 | 2 => What::Crash { place: GMANAGER, down_us: us },
        3 => What::Crash { place: other, down_us: us },
        4 => What::Cut { a: place, b: GMANAGER },
        5 => What::Partition { a: place, b: GMANAGER, us },
        6 => What::Pause { place, us },
        7 => What::Full { place, class: Class::Control },
        _ => What::CutKv { a: place, b: if other == place { GMANAGER } else { other } },
    }
}

/// Role orders, and the checks that follow from them.
#[derive(Debug, Default)]
pub(super) struct Roles {
    /// The last role order to the process at a place, delivered or in flight.
    ordered: BTreeMap<Place, Role>,
    /// A process has died, and restarted with its first role.
    died: bool,
    /// Switches that processes have completed.
    pub(super) switches: u64,
    /// Completed switches, role and target role of each process at the last look.
    seen: BTreeMap<Place, (u64, Role, Option<Role>)>,
}

fn target(process: &Process<Symbolic>) -> Role {
    let (now, becoming) = process.instance.role();
    becoming.unwrap_or(now)
}

/// Whether a process takes clients' requests, also after its switch.
fn serves(process: &Process<Symbolic>) -> bool {
    process.instance.role().0.serves() && target(process).serves()
}

impl Roles {
    /// Orders a role for an instance, as an operator.
    pub(super) fn order(&mut self, world: &mut Pool, place: Place, role: Role) {
        let Some(id) = world.process(place).and_then(Process::id) else { return };
        let reply = world.admin(AdminBody::Role(AdminRole { instance: id.0, role: role.into() }));
        if reply.is_some_and(|reply| reply.error.is_empty()) {
            self.ordered.insert(place, role);
        }
    }

    /// Notes the death of a process, and of its order.
    pub(super) fn died(&mut self, place: Place) {
        self.died = true;
        self.ordered.remove(&place);
    }

    /// Notes the gManager's death: undelivered orders may be lost.
    pub(super) fn gmanager_died(&mut self, world: &Pool) {
        self.ordered.retain(|place, role| world.process(*place).is_some_and(|process| target(process) == *role));
    }

    /// The place to which a request meant for `place` is dispatched by the gManager's list, and whether that place must accept
    /// it.
    pub(super) fn dispatch(world: &Pool, place: Place) -> (Place, bool) {
        let takes = |place: &Place| world.process(*place).is_some_and(serves);
        let mut chosen = place;
        if let Some(coordinator) = &world.coordinator {
            let rows = coordinator.gmanager.status(coordinator.clock.now_ms(world.now_us()));
            let listed = |place: &Place| {
                let id = world.process(*place).filter(|p| p.paused_until_us.is_none()).and_then(Process::id);
                let row = rows.iter().find(|row| Some(row.instance) == id.map(|id| id.0));
                row.is_some_and(|row| {
                    let becoming = row.heartbeat.as_ref().and_then(|h| h.role.as_deref()?.becoming);
                    let becoming = becoming.and_then(|role| Role::try_from(role).ok());
                    row.alive && row.role().serves() && becoming.is_none_or(Role::serves)
                })
            };
            if !listed(&place) {
                chosen = (1..world.processes.len()).find(listed).unwrap_or(place);
            }
        }
        (chosen, takes(&chosen))
    }

    /// Checks after an event of the process at `place`: it has finished work of its former role, and each kind of
    /// work has an instance.
    pub(super) fn after(
        &mut self,
        world: &Pool,
        place: Place,
        pool: &PoolSpec,
        asked: &BTreeMap<usize, Asked>,
    ) -> Result<(), Failure> {
        let Some(process) = world.process(place) else { return Ok(()) };
        let (now, becoming) = process.instance.role();
        let before = self.seen.insert(place, (process.life, now, becoming));
        if before == Some((process.life, now, becoming)) {
            return Ok(());
        }
        self.somebody(world, pool)?;
        if before.is_some_and(|(life, was, _)| (life, was) == (process.life, now)) {
            return Ok(());
        }
        self.switches += u64::from(before.is_some_and(|(life, ..)| life == process.life));
        if let Some(open) = asked.values().find(|a| a.place == place && a.end.is_none() && !now.serves()) {
            return failure("role", format!("node {place} is {now:?}, and request {} is not over", open.id));
        }
        let status = process.instance.status().prefill;
        if !now.prefills() && status.jobs > 0 {
            return failure(
                "role",
                format!("node {place} is {now:?}, and computes {} prompts for others", status.jobs),
            );
        }
        let reads = (status.away, status.pulling, status.blocks_settling);
        if now != Role::Decode && reads != (0, 0, 0) {
            return failure("role", format!("node {place} is {now:?}, and has {reads:?} of prompts elsewhere"));
        }
        Ok(())
    }

    /// Checks at rest: every switch has ended, all processes agree on all roles, and each kind of work has an
    /// instance.
    pub(super) fn at_rest(&self, world: &Pool, pool: &PoolSpec) -> Result<(), Failure> {
        let rows = world.coordinator.as_ref().map(|c| c.gmanager.status(c.clock.now_ms(world.now_us())));
        for (place, process) in world.live() {
            let (now, becoming) = process.instance.role();
            if let Some(becoming) = becoming {
                return failure("role", format!("node {place} is {now:?} and still to become {becoming:?}"));
            }
            let row = rows.iter().flatten().find(|row| process.id().is_some_and(|id| id.0 == row.instance));
            let known = row.map(|r| (r.role(), r.heartbeat.as_ref().and_then(|h| h.role.as_deref()?.becoming)));
            if known.is_some_and(|known| known != (now, None)) {
                return failure("role", format!("node {place} is {now:?}, and {known:?} to the gManager"));
            }
            let ordered = self.ordered.get(&place);
            if pool.balancer.is_none() && ordered.is_some_and(|ordered| *ordered != now) {
                return failure("role", format!("node {place} is {now:?}, and was ordered to be {ordered:?}"));
            }
        }
        self.somebody(world, pool)
    }

    /// Checks that each kind of work has a permanent instance, unless one died.
    fn somebody(&self, world: &Pool, pool: &PoolSpec) -> Result<(), Failure> {
        if self.died {
            return Ok(());
        }
        if !world.live().any(|(_, process)| serves(process)) {
            return failure("role", "nobody takes requests any more".to_owned());
        }
        let prefills = |place: Place, role: Role| role.prefills() && pool.nodes[place - 1].transfers;
        let computed = pool.nodes.iter().any(|node| node.transfers && node.role.prefills());
        let computes = |(place, process): (Place, &Process<Symbolic>)| {
            prefills(place, process.instance.role().0) && prefills(place, target(process))
        };
        if computed && !world.live().any(computes) {
            return failure("role", "nobody computes prompts for others any more".to_owned());
        }
        Ok(())
    }
}
