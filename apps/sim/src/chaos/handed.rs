//! Prompts that are computed elsewhere: what is exported stays what it was, and nothing of a hand-over is left over.

use super::check::{Pool, failure};
use super::run::Failure;
use crate::fabric::Place;
use crate::process::Process;
use crate::symbolic::Symbolic;
use lagoon_kv::Owner;
use lagoon_types::PhysBlock;

/// Reads that were not allowed, or that somebody believed to be over.
pub(super) fn reads(world: &Pool) -> Result<(), Failure> {
    match world.kv.violations.first() {
        Some(violation) => failure("transfer", violation.clone()),
        None => Ok(()),
    }
}

/// Blocks that transports may read are those of the sequence that computes them, or of one lease; others may share them.
pub(super) fn exports(world: &Pool, place: Place, process: &Process<Symbolic>) -> Result<(), Failure> {
    let pool = process.instance.rmanager().pool();
    for (export, job, blocks) in world.kv.exports(place) {
        let may = |owner: &Owner| matches!(owner, Owner::Lent(_)) || *owner == Owner::Own(job);
        let has_all = |owner: Owner| blocks.iter().all(|block| pool.has(owner, PhysBlock(*block)));
        let mut first = blocks.first().into_iter().flat_map(|block| pool.owners(PhysBlock(*block))).filter(may);
        if !first.any(has_all) {
            let owners: Vec<Owner> = blocks.iter().map(|block| pool.owner(PhysBlock(*block))).collect();
            return failure("export", format!("node {place} lets export {export} of {job} be read, of {owners:?}"));
        }
    }
    Ok(())
}

/// Nobody wants anything any more.
pub(super) fn empty(world: &Pool, place: Place, process: &Process<Symbolic>) -> Result<(), Failure> {
    let status = process.instance.status().prefill;
    let left = (status.away, status.pulling, status.blocks_settling, status.jobs, world.kv.kept(place));
    if left != (0, 0, 0, 0, 0) {
        return failure("leak", format!("node {place} has {left:?} of hand-overs: {status:?}"));
    }
    Ok(())
}
