//! Checkers of prefill elsewhere: exported KV does not change, and transfers leave nothing behind.

use super::check::{Pool, failure};
use super::run::Failure;
use crate::place::Place;
use crate::process::Process;
use crate::runner::SimRunner;
use crate::symbolic::Symbolic;
use lagoon_instance::StageUser;
use lagoon_kv::Owner;
use lagoon_types::PhysBlock;
use std::collections::BTreeMap;

/// Checks that no read was unauthorised, or came after its end.
pub(super) fn reads(world: &Pool) -> Result<(), Failure> {
    match world.kv.violations.first() {
        Some(violation) => failure("transfer", violation.clone()),
        None => Ok(()),
    }
}

/// Checks exports: blocks that transports may read belong to the sequence that is prefilled, or to one lease; they
/// may be shared. In staging buffers, only blocks kept for an export are readable, and each has one user.
pub(super) fn exports(world: &Pool, place: Place, process: &Process<Symbolic>) -> Result<(), Failure> {
    if process.runner.is_staged() {
        return staged(world, place, process);
    }
    let pool = &process.instance.rmanager().pool;
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

fn staged(world: &Pool, place: Place, process: &Process<Symbolic>) -> Result<(), Failure> {
    let mut users = BTreeMap::new();
    for (user, blocks) in process.instance.stages() {
        for block in blocks {
            if let Some(other) = users.insert(*block, user) {
                return failure(
                    "export",
                    format!("node {place}: block {block} beside the store is {other:?}, {user:?}"),
                );
            }
        }
    }
    let used = process.instance.status().prefill.stage_blocks_used as usize;
    if used != users.len() {
        return failure(
            "leak",
            format!("node {place}: {used} blocks beside the store are taken, {} used", users.len()),
        );
    }
    for (export, job, blocks) in world.kv.exports(place) {
        let user = |block: &u32| users.get(block).copied();
        if let Some(block) = blocks.iter().find(|block| user(block) != Some(StageUser::Exported(job))) {
            let user = user(block);
            return failure("export", format!("node {place} lets export {export} of {job} be read, of {user:?}"));
        }
    }
    Ok(())
}

/// Checks that no transfer is left when no request is.
pub(super) fn empty(world: &Pool, place: Place, process: &Process<Symbolic>) -> Result<(), Failure> {
    let status = process.instance.status().prefill;
    let left = (status.away, status.pulling, status.blocks_settling, status.jobs, world.kv.kept(place));
    if left != (0, 0, 0, 0, 0) || status.stage_blocks_used > 0 {
        return failure("leak", format!("node {place} has {left:?} of hand-overs: {status:?}"));
    }
    Ok(())
}
