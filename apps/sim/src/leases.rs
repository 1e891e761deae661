//! Checks of leases and block tables, for pools on modelled devices (the simulator) and on real ones (the system tests).

use crate::network::Network;
use crate::place::Place;
use crate::process::Process;
use crate::runner::SimRunner;
use crate::shared;
use crate::world::World;
use lagoon_cluster::LentEntry;
use lagoon_instance::MEMBER_SEQ_BASE;
use lagoon_kv::{BlockState, Owner, Placement, RemoteBlock};
use lagoon_protocol::LeasePurpose;
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Name of the check that failed, and what it found.
pub type Violation = (&'static str, String);

/// What is known of leases over time.
#[derive(Debug, Default)]
pub struct Leases {
    /// Leases of processes that died.
    dead: BTreeSet<LeaseId>,
    /// Leases that their debtor has held.
    held: BTreeSet<LeaseId>,
    /// Leases, and the incarnation of their creditor.
    lent: BTreeMap<LeaseId, u64>,
}

impl Leases {
    /// Notes the death of a process, and of its leases.
    pub fn died<R>(&mut self, process: &Process<R>) {
        self.dead.extend(process.instance.rmanager().creditor.iter().map(|l| l.1));
    }

    /// Whether a debtor has ever held a lease.
    #[must_use]
    pub fn was_held(&self, lease: LeaseId) -> bool {
        self.held.contains(&lease)
    }

    /// Notes the leases that a process lends now.
    pub fn note<R>(&mut self, process: &Process<R>) {
        let rm = process.instance.rmanager();
        self.lent.extend(rm.creditor.iter().map(|lent| (lent.1, rm.config().incarnation)));
    }

    /// Checks one process's blocks, and its leases and block tables against those of others.
    ///
    /// # Errors
    /// The first violation.
    pub fn check<R: SimRunner<Bill = N::Bill>, N: Network>(
        &mut self,
        world: &World<R, N>,
        place: Place,
    ) -> Result<(), Violation> {
        let Some(process) = world.process(place) else { return Ok(()) };
        self.note(process);
        own(place, process)?;
        shared::blocks(&process.instance).map_err(|why| ("blocks", format!("node {place}: {why}")))?;
        self.pairs(world, Some(place))
    }

    /// Checks that creditors lend all that debtors hold and attend to; for all pairs, or those of one place.
    ///
    /// # Errors
    /// The first violation.
    pub fn pairs<R: SimRunner<Bill = N::Bill>, N: Network>(
        &mut self,
        world: &World<R, N>,
        of: Option<Place>,
    ) -> Result<(), Violation> {
        let ids: BTreeMap<InstanceId, (Place, &Process<R>)> =
            world.live().filter_map(|(place, p)| Some((p.id()?, (place, p)))).collect();
        for (id, (debtor, process)) in &ids {
            // A paused process learns of expired leases when it reads its clock. One declared dead has lost its
            // loans, and learns of that later.
            if process.dazed || world.fenced.contains(&process.instance.rmanager().config().incarnation) {
                continue;
            }
            let home =
                |creditor| ids.get(&creditor).filter(|(place, _)| of.is_none_or(|of| of == *debtor || of == *place));
            for (creditor, lease, epoch, first, end) in process.instance.rmanager().debtor.held.iter() {
                let Some((place, home)) = home(creditor) else { continue };
                self.held.insert(lease);
                if self.is_excused(home, lease, &(first..end)) {
                    continue;
                }
                // Returned entries may lie between held ones.
                let covers = |&(to, l, e, from, until): &(InstanceId, LeaseId, Epoch, u32, u32)| {
                    (to, l, e) == (*id, lease, epoch) && from <= first && end <= until
                };
                if !home.instance.rmanager().creditor.iter().any(|lent| covers(&lent)) {
                    let held = format!("{epoch}, entries {first} to {end}");
                    let lent: Vec<_> = home.instance.rmanager().creditor.iter().filter(|l| l.1 == lease).collect();
                    let what = format!("node {debtor} holds {lease} ({held}), node {place} lends {lent:?}");
                    return Err(("leases", what));
                }
            }
            for (seq, placements) in process.instance.tables() {
                for placement in placements {
                    let Placement::Remote(block) = placement else { continue };
                    let Some(home) = home(block.creditor) else { continue };
                    self.held.insert(block.lease);
                    if !self.is_excused(home.1, block.lease, &(block.entry..block.entry + 1)) {
                        lent((*id, seq, block), *home)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether a fault explains that a creditor does not lend entries that a debtor believes to hold.
    fn is_excused<R>(&self, home: &Process<R>, lease: LeaseId, entries: &Range<u32>) -> bool {
        let rm = home.instance.rmanager();
        let incarnation = rm.config().incarnation;
        // A fenced creditor has forgotten its leases; its debtors learn of that later, also for leases granted
        // meanwhile.
        let former = self.lent.get(&lease).is_some_and(|lent| *lent != incarnation);
        if former || self.dead.contains(&lease) {
            return true;
        }
        // Recalled entries of which the debtor does not know yet.
        rm.creditor
            .revoked()
            .any(|r| r.lease == lease && r.entries.start < entries.end && entries.start < r.entries.end)
    }
}

/// Checks that every local block of a table belongs to its sequence, alone or shared, or is held.
///
/// # Errors
/// The first violation.
pub fn own<R>(place: Place, process: &Process<R>) -> Result<(), Violation> {
    let rm = process.instance.rmanager();
    let mut held = BTreeMap::<_, Vec<_>>::new();
    for (creditor, lease, epoch, first, end) in rm.debtor.held.iter() {
        held.entry((creditor, lease, epoch)).or_default().push(first..end);
    }
    for (seq, placements) in process.instance.tables() {
        for placement in placements {
            let good = match placement {
                Placement::Local(b) => rm.pool.has(Owner::Own(seq), *b),
                Placement::Remote(b) => held
                    .get(&(b.creditor, b.lease, b.epoch))
                    .is_some_and(|ranges| ranges.iter().any(|r| r.contains(&b.entry))),
                Placement::Gone | Placement::Lost => true,
            };
            if !good {
                let what = format!("node {place}: {seq} attends to {placement:?} and does not have it");
                return Err(("table", what));
            }
        }
    }
    Ok(())
}

/// Checks that a remote block of a sequence's table is lent for that sequence and not freed; a moved one is sealed.
fn lent<R>(
    (debtor, seq, block): (InstanceId, SeqId, &RemoteBlock),
    (place, creditor): (Place, &Process<R>),
) -> Result<(), Violation> {
    let rm = creditor.instance.rmanager();
    let entry = rm.creditor.entry(block.lease, block.entry);
    let good = entry.is_some_and(|e: LentEntry| {
        // A member of a joint prefill has a sequence of its own; its leases name the owner's.
        let member = e.purpose == LeasePurpose::Joint && seq.0 >= MEMBER_SEQ_BASE;
        let for_it = (e.debtor, e.epoch) == (debtor, block.epoch) && (member || e.seq == seq);
        let moved = matches!(e.purpose, LeasePurpose::Move | LeasePurpose::Swap | LeasePurpose::Handover);
        for_it
            && rm.pool.has(Owner::Lent(block.lease), e.block)
            && (!moved || rm.pool.state(e.block) == BlockState::Sealed)
    });
    if good {
        return Ok(());
    }
    Err(("table", format!("{debtor}'s {seq} attends to {block:?}, and node {place} has there {entry:?}")))
}
