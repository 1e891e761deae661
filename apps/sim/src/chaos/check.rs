//! Checkers: invariants after every event, and at rest.

use super::run::Failure;
use super::{handed, unreported};
use crate::leases::{self, Leases, Violation};
use crate::place::Place;
use crate::process::Process;
use crate::shared;
use crate::symbolic::Symbolic;
use crate::world::World;
use lagoon_types::{LeaseId, limits};
use std::collections::BTreeMap;

pub(super) type Pool = World<Symbolic>;

/// Longest time that a lease may be lent without being held by its debtor, without faults.
const ORPHAN_US: u64 = 5_000_000;
/// Time after a fault until all releases have been repeated and confirmed.
const RELEASED_US: u64 = 10_000_000;
/// A fault of at least this length may outlast the repetitions of a release.
pub(super) const LONG_US: u64 = limits::LEASE_TTL_MS * 1000 / 2;
/// Time after a fault until unknown leases have expired (clocks are skewed by some percent).
pub(super) const FORGOTTEN_US: u64 = (limits::LEASE_TTL_MS + limits::LEASE_TTL_MS / 8) * 1000 + 2_000_000;

/// State of the checkers.
#[derive(Debug, Default)]
pub(super) struct Checkers {
    leases: Leases,
    /// Counts of a process's blocks at its last check.
    seen: Vec<[u64; 6]>,
    /// Leases that are lent and not held, with the time since when.
    orphans: BTreeMap<(Place, LeaseId), u64>,
    unacknowledged: unreported::Unreported,
}

pub(super) fn failure<T>(checker: &'static str, detail: String) -> Result<T, Failure> {
    Err(Failure::new(checker, detail))
}

impl From<Violation> for Failure {
    fn from((checker, detail): Violation) -> Self {
        Self::new(checker, detail)
    }
}

impl Checkers {
    /// Notes the death of a process, and of its leases.
    pub(super) fn died(&mut self, process: &Process<Symbolic>) {
        self.leases.died(process);
    }

    /// Checks after an event of the process at `place`.
    pub(super) fn after(&mut self, world: &Pool, place: Place) -> Result<(), Failure> {
        let Some(process) = world.process(place) else { return Ok(()) };
        if let Some(violation) = process.runner.violations.first() {
            return failure("coverage", format!("node {place}: {violation}"));
        }
        if let Some(reason) = &process.rejected {
            return failure("registration", format!("node {place} was refused: {reason}"));
        }
        handed::reads(world)?;
        let rm = process.instance.rmanager();
        let counts = rm.pool.counts();
        let dazed = u32::from(process.dazed);
        let now = [counts.free, counts.own, counts.lent, counts.shared, rm.debtor.held.blocks(), dazed].map(u64::from);
        if self.seen.len() <= place {
            self.seen.resize(place + 1, [u64::MAX; 6]);
        }
        if std::mem::replace(&mut self.seen[place], now) == now {
            return Ok(());
        }
        self.leases.note(process);
        leases::own(place, process)?;
        self.blocks(place, process)?;
        handed::exports(world, place, process)?;
        Ok(self.leases.pairs(world, Some(place))?)
    }

    /// Checks everything, including changes that counts do not show.
    pub(super) fn all(&mut self, world: &Pool) -> Result<(), Failure> {
        for (place, process) in world.live() {
            leases::own(place, process)?;
            self.blocks(place, process)?;
            handed::exports(world, place, process)?;
        }
        Ok(self.leases.pairs(world, None)?)
    }

    /// Checks that blocks add up, and that KV read by other instances had not changed.
    fn blocks(&self, place: Place, process: &Process<Symbolic>) -> Result<(), Failure> {
        let damaged = process.instance.status().prefill.damaged_blocks;
        if damaged > 0 {
            return failure("export", format!("node {place} read {damaged} blocks that had changed meanwhile"));
        }
        shared::blocks(&process.instance).or_else(|why| failure("blocks", format!("node {place}: {why}")))
    }

    /// Checks that every lease that is lent and not held is being returned, or that a fault explains it. A release is
    /// repeated until it is confirmed, while the lease lives; a lease whose grant never reached the debtor ends with
    /// its time to live. `calm_us`: time since the end of the last fault, and of the last long one.
    pub(super) fn orphans(&mut self, world: &Pool, calm_us: [u64; 2]) -> Result<(), Failure> {
        self.unacknowledged.look(world, calm_us[0] > RELEASED_US && calm_us[1] > FORGOTTEN_US)?;
        let now = world.now_us();
        let mut orphans = BTreeMap::new();
        for (place, process) in world.live() {
            for (debtor, lease, ..) in process.instance.rmanager().creditor.iter() {
                let Some((_, debtor)) = world.by_id(debtor) else { continue };
                let rm = debtor.instance.rmanager();
                let unacknowledged = process.instance.is_unreported(lease);
                if unacknowledged || rm.debtor.borrowing() > 0 || rm.debtor.held.iter().any(|held| held.1 == lease) {
                    continue;
                }
                let released = self.leases.was_held(lease) && calm_us[0] > RELEASED_US && calm_us[1] > FORGOTTEN_US;
                let calm = released || calm_us[0] > FORGOTTEN_US;
                let since = self.orphans.get(&(place, lease)).copied().unwrap_or(now);
                if calm && now - since > ORPHAN_US {
                    let age = (now - since) / 1000;
                    return failure("leak", format!("node {place} lends {lease} to nobody, for {age} ms"));
                }
                orphans.insert((place, lease), since);
            }
        }
        self.orphans = orphans;
        Ok(())
    }

    /// Checks that no memory is used when no request is left.
    pub(super) fn empty(&self, world: &Pool) -> Result<(), Failure> {
        for (place, process) in world.live() {
            let (status, rm) = (process.instance.status(), process.instance.rmanager());
            let used = (
                status.blocks_lent,
                status.blocks_borrowed,
                status.remote_request_frames,
                status.remote_steps,
                rm.debtor.borrowing(),
                rm.debtor.held.releasing(),
            );
            if status.blocks_free != status.blocks_total || used != (0, 0, 0, 0, 0, 0) || !status.sequences.is_empty() {
                return failure("leak", format!("node {place} is not empty: {status:?}"));
            }
            handed::empty(world, place, process)?;
        }
        Ok(())
    }
}
