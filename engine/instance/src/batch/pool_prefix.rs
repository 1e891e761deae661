//! The prefix cache over the pool (docs/adr/0036): cached blocks of a prompt that needs a loan are leased where they lie.
//!
//! A sequence that lacks memory here first searches the pool ([`Batch::search_pool`]): the rManager leases run after run of
//! its prompt from the instances that cache them, between runs that this instance caches itself. What was found becomes the
//! beginning of its block table; the rest is allocated and borrowed as for any prompt, and computed.
//!
//! Invariants:
//! * found blocks behind missing ones keep their KV: only the missing ones are computed, as lost ranges (`recovery.rs`);
//! * a sequence holds found blocks only while it gets the rest: an attempt that fails gives all back.

use super::Batch;
use super::others::PrefillQueries;
use super::sequence::{HeldLease, Need, PoolSearch, Sequence};
use crate::cx::Cx;
use lagoon_cluster::CachedPart;
use lagoon_kv::{BlockHash, Owner, Placement, RemoteBlock};
use lagoon_protocol::{ControlBody, LeaseHashes};
use lagoon_types::limits::LEASE_HASHES_MAX;
use lagoon_types::{CachedTokens, InstanceId, SeqId};
use std::collections::BTreeMap;
use std::ops::Range;

impl Batch {
    /// Starts the search of a waiting sequence's cached blocks in the pool, if one is due. Returns whether it did.
    pub(super) fn search_pool(&mut self, cx: &mut Cx, id: SeqId) -> bool {
        let wanted = self.hash_wanted(cx, id);
        let due = |seq: &&mut Sequence| seq.search == PoolSearch::Due && wanted > 0;
        let Some(seq) = self.seqs.get_mut(&id).filter(due) else { return false };
        let hashes = seq.block_hashes[..wanted].to_vec();
        let here = cached_here(cx, &hashes);
        let search = cx.memory.rm.debtor.search_prefix(id, hashes, here, seq.since_ms, cx.now_ms);
        seq.set_need(Need::Borrowing(search));
        true
    }

    /// Begins a waiting sequence's table with the blocks that its search found, and gets the rest.
    pub(crate) fn on_prefix_found(
        &mut self,
        cx: &mut Cx,
        prefills: &dyn PrefillQueries,
        id: SeqId,
        parts: Vec<CachedPart>,
    ) {
        let mut parts = parts.into_iter();
        let waits = self.seqs.get(&id).is_some_and(|seq| !seq.is_running() && seq.blocks.blocks() == 0);
        let found = if waits { self.take_found(cx, id, &mut parts) } else { Found::default() };
        for lease in parts.filter_map(CachedPart::into_lease) {
            let all = lease.grant().all();
            cx.memory.rm.debtor.held.release(&all, cx.now_ms);
        }
        let row_us = self.row_us(cx);
        let Some(seq) = self.seqs.get_mut(&id).filter(|_| waits) else { return };
        seq.set_need(Need::Met);
        seq.blocks.begin().mark(&mut cx.memory.rm.pool);
        // Missing blocks, and those behind them, get their hashes when they are computed.
        (seq.search, seq.hashed) = (PoolSearch::Done, seq.blocks.next_position() / cx.config.block_tokens);
        let tokens = |blocks: u32| u64::from(blocks * cx.config.block_tokens);
        let cached = CachedTokens { pool: tokens(found.leased), ..CachedTokens::on_device(tokens(found.here)) };
        let known = (found.here + found.leased) * cx.config.block_tokens;
        cx.memory.prefix.note_lookup(seq.len());
        cx.memory.prefix.note_found(cached, f64::from(known) * row_us);
        cx.memory.prefix.note_shared(found.shared);
        // A preempted sequence finds its own blocks.
        let prompt = seq.prompt.as_mut().filter(|_| seq.began_ms.is_none());
        prompt.into_iter().for_each(|prompt| prompt.cached = cached);
        if self.place(cx, prefills, id) {
            self.admit_placed(cx);
        }
    }

    /// Appends found parts to a sequence's empty table, up to the first one that is not there any more.
    fn take_found(&mut self, cx: &mut Cx, id: SeqId, parts: &mut std::vec::IntoIter<CachedPart>) -> Found {
        let mut found = Found::default();
        while let Some(part) = parts.as_slice().first() {
            let room = self.room(cx);
            let Some(seq) = self.seqs.get_mut(&id) else { break };
            let first = seq.blocks.blocks() as usize;
            match part {
                CachedPart::Here { blocks } => {
                    let Some(hashes) = seq.block_hashes.get(first..first + *blocks as usize) else { break };
                    let shared = cx.memory.rm.pool.counts().shared;
                    let taken = cx.memory.rm.pool.adopt_run(Owner::Own(id), hashes, room, *blocks);
                    found.shared += cx.memory.rm.pool.counts().shared - shared;
                    seq.blocks.push_local(&taken);
                    found.here += seq.blocks.blocks() - u32::try_from(first).unwrap_or(u32::MAX);
                    if taken.len() < *blocks as usize {
                        break;
                    }
                }
                CachedPart::Leased(lease) if cx.peers.key(lease.creditor).is_some() => {
                    seq.blocks.push_remote(&lease.grant());
                    let held = HeldLease::handed(lease.blocks, BTreeMap::new());
                    seq.leases.insert((lease.creditor, lease.lease), held);
                    found.leased += lease.blocks;
                }
                // Windows' KV would have to be there before the missing blocks.
                CachedPart::Missing { .. } if cx.config.window.is_some() || cx.config.windowed.is_some() => break,
                CachedPart::Missing { blocks } => seq.blocks.push_lost(*blocks),
                // A connection that broke meanwhile lost no KV, but nothing would dial its creditor again.
                CachedPart::Leased(_) => break,
            }
            parts.next();
        }
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.blocks.drop_last_lost();
        }
        found
    }

    /// Gives back the blocks that a waiting sequence's search found: the rest of its memory is not there.
    pub(super) fn drop_found(&mut self, cx: &mut Cx, prefills: &dyn PrefillQueries, id: SeqId) {
        if self.seqs.get(&id).is_some_and(|seq| seq.search == PoolSearch::Done && seq.blocks.blocks() > 0) {
            self.release_memory(cx, prefills, id);
        }
    }
}

/// Blocks that a search found.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    /// In this instance's memory, and those of them that others own as well.
    here: u32,
    shared: u32,
    /// Leased from others.
    leased: u32,
}

/// Ranges of a prompt's blocks that this instance caches, where it may begin anywhere with them.
fn cached_here(cx: &Cx, hashes: &[BlockHash]) -> Vec<Range<u32>> {
    let pool = &cx.memory.rm.pool;
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for (at, hash) in (0..).zip(hashes).filter(|_| pool.caches_runs()) {
        if pool.found(std::slice::from_ref(hash)) == 0 {
            continue;
        }
        match ranges.last_mut().filter(|last| last.end == at) {
            Some(last) => last.end += 1,
            None => ranges.push(at..at + 1),
        }
    }
    ranges
}

/// Sends creditors the block hashes of a sequence's remote blocks among `blocks`, which are written: they stay cached there.
pub(super) fn send_hashes(cx: &mut Cx, seq: &Sequence, blocks: Range<u32>) {
    if seq.blocks.remote_blocks() == 0 {
        return;
    }
    let mut open: Option<(InstanceId, LeaseHashes)> = None;
    for block in blocks {
        let Placement::Remote(at) = seq.blocks.placements()[block as usize] else { continue };
        let RemoteBlock { creditor, lease, epoch, entry } = at;
        let hash = &seq.block_hashes[block as usize].0;
        let follows = |(of, hashes): &(InstanceId, LeaseHashes)| {
            let sent = u32::try_from(hashes.hashes.len() / hash.len()).unwrap_or(u32::MAX);
            let is_next = (hashes.first + sent, hashes.depth + sent) == (entry, block);
            (*of, hashes.lease) == (creditor, lease.0) && is_next && (sent as usize) < LEASE_HASHES_MAX
        };
        match open.as_mut().filter(|open| follows(open)) {
            Some((_, hashes)) => hashes.hashes.extend_from_slice(hash),
            None => {
                let next =
                    LeaseHashes { lease: lease.0, epoch: epoch.0, first: entry, depth: block, hashes: hash.to_vec() };
                send(cx, open.replace((creditor, next)));
            }
        }
    }
    send(cx, open);
}

fn send(cx: &mut Cx, hashes: Option<(InstanceId, LeaseHashes)>) {
    let Some((creditor, hashes)) = hashes else { return };
    if let Some(peer) = cx.peers.key(creditor) {
        cx.send(peer, ControlBody::LeaseHashes(hashes));
    }
}
