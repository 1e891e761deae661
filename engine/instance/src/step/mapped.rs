//! Attention over a creditor's memory where it lies ([ADR 19](../../../../docs/adr/0019-attention-over-a-creditors-memory.md)).
//!
//! A creditor whose KV store is memory that others map says so in its Hello. A debtor on the same host maps it once, and its own
//! device attends to what of a lease is sealed there: no query is sent for it.
//!
//! Invariants:
//! * a debtor attends only to rBlocks of which the creditor has said that they are sealed, as part of the lease that it holds;
//! * the creditor says so when its device has sealed them with the lease's epoch, behind their last byte, and the debtor's device
//!   compares that before anything that follows from them leaves a step: what is somebody else's by then is a lost block;
//! * memory is mapped as long as the connection on which it was offered stands.

use crate::cx::Cx;
use crate::event::Effect;
use crate::step::cost::RemotePolicy;
use lagoon_protocol::{LentMemory, TransferArena};
use lagoon_runner::{Command, MapId, RemoteWork, SealedBlock};
use lagoon_types::{InstanceId, KvRun, LeaseRun};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// How KV of creditors was attended to, and what is mapped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerAccessStatus {
    /// Micro attentions of a sequence's step over KV of a creditor: where it lies, by queries that were sent there, and
    /// here, where the KV was brought.
    pub attended_mapped: u64,
    pub attended_shipped: u64,
    pub attended_fetched: u64,
    /// Creditors whose memory is mapped, and how often one's could not be.
    pub mapped: usize,
    pub refused: u64,
    /// Steps that were thrown away because the memory was somebody else's by then.
    pub reused: u64,
    /// rBlocks that were sealed for debtors to map.
    pub sealed: u64,
}

/// A creditor's memory.
#[derive(Debug)]
struct Mapping {
    map: MapId,
    /// As offered.
    memory: TransferArena,
    blocks: u32,
    /// The device has mapped it.
    stands: bool,
}

/// Creditor KV that is mapped here.
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    mappings: BTreeMap<InstanceId, Mapping>,
    next_map: u64,
    status: PeerAccessStatus,
}

impl Mapped {
    pub(crate) fn status(&self) -> PeerAccessStatus {
        let mapped = self.mappings.values().filter(|mapping| mapping.stands).count();
        PeerAccessStatus { mapped, ..self.status.clone() }
    }

    /// Whether this creditor's memory is mapped here: its device computes nothing for sealed KV of this instance.
    pub(crate) fn maps(&self, creditor: InstanceId) -> bool {
        self.mappings.get(&creditor).is_some_and(|mapping| mapping.stands)
    }

    /// A step begins.
    pub(crate) fn count(&mut self, work: &RemoteWork) {
        let fetched: BTreeSet<_> = work.fetches.iter().map(|fetch| (fetch.creditor, fetch.seq_index)).collect();
        let shipped: usize = work.ships.iter().map(|ship| ship.segments.len()).sum();
        let mapped: usize = work.peer_access.iter().map(|reach| reach.seqs.len()).sum();
        self.status.attended_fetched += fetched.len() as u64;
        self.status.attended_shipped += shipped as u64;
        self.status.attended_mapped += mapped as u64;
    }

    /// A step is thrown away.
    pub(crate) fn note_reused(&mut self) {
        self.status.reused += 1;
    }
}

/// What of a sequence's runs at a creditor is in reach.
#[derive(Debug, Default)]
pub(crate) struct MappedRuns {
    /// In the creditor's store, ascending.
    pub(crate) runs: Vec<KvRun>,
    pub(crate) sealed: Vec<SealedBlock>,
    /// What is not.
    pub(crate) rest: Vec<LeaseRun>,
}

impl MappedRuns {
    /// `len` tokens from `offset` of a run, in a sealed rBlock or elsewhere.
    fn add(&mut self, of: &LeaseRun, offset: u32, len: u32, sealed: Option<(u32, u32)>) {
        let first_pos = of.first_pos + (offset - of.offset);
        let Some((block, base)) = sealed else {
            match self.rest.last_mut() {
                Some(last) if last.lease == of.lease && last.offset + last.len == offset => last.len += len,
                _ => self.rest.push(LeaseRun { offset, len, first_pos, ..*of }),
            }
            return;
        };
        self.sealed.push(SealedBlock { block, lease: of.lease, epoch: of.epoch });
        match self.runs.last_mut() {
            Some(last) if (last.base + last.len, last.first_pos + last.len) == (base, first_pos) => last.len += len,
            _ => self.runs.push(KvRun { base, len, first_pos }),
        }
    }
}

impl Mapped {
    /// A peer says in its Hello where it lends memory that can be mapped, if it does.
    pub(crate) fn on_lent_memory(&mut self, cx: &mut Cx, creditor: InstanceId, lent: Option<&LentMemory>) {
        let same_host = |lent: &&LentMemory| cx.config.peer_access.as_ref().is_some_and(|host| *host == lent.host);
        let wanted = cx.config.remote == RemotePolicy::Auto;
        let offered = lent.filter(same_host).filter(|_| wanted).and_then(|lent| Some((lent.memory.as_ref()?, lent)));
        let Some((memory, &LentMemory { blocks, .. })) = offered else { return self.unmap(cx, creditor) };
        // Hellos are repeated.
        if self.mappings.get(&creditor).is_some_and(|known| known.memory == *memory && known.blocks == blocks) {
            return;
        }
        self.unmap(cx, creditor);
        self.next_map += 1;
        let map = MapId(self.next_map);
        let mapping = Mapping { map, memory: memory.clone(), blocks, stands: false };
        self.mappings.insert(creditor, mapping);
        cx.effects.push(Effect::Map { map, blocks, memory: memory.clone() });
    }

    /// The device has mapped a creditor's memory, or it could not be.
    pub(crate) fn on_mapped(&mut self, cx: &mut Cx, map: MapId, mapped: bool) {
        let wanted = self.mappings.iter_mut().find(|(_, mapping)| mapping.map == map);
        match wanted {
            Some((creditor, mapping)) => {
                mapping.stands = mapped;
                cx.memory.rm.set_near(*creditor, mapped);
            }
            // The peer went meanwhile.
            None if mapped => cx.effects.push(Effect::Runner(Command::Unmap { map })),
            None => {}
        }
        self.status.refused += u64::from(!mapped);
    }

    /// A creditor's memory is not attended to any more: its sequences' steps have ended.
    pub(crate) fn unmap(&mut self, cx: &mut Cx, creditor: InstanceId) {
        if let Some(Mapping { map, stands: true, .. }) = self.mappings.remove(&creditor) {
            cx.memory.rm.set_near(creditor, false);
            cx.effects.push(Effect::Runner(Command::Unmap { map }));
        }
    }

    /// Divides a sequence's runs at a creditor into what its own device attends to there and the rest.
    pub(crate) fn mapped_runs(&self, cx: &Cx, creditor: InstanceId, runs: &[LeaseRun]) -> Option<(MapId, MappedRuns)> {
        let mapping = self.mappings.get(&creditor).filter(|mapping| mapping.stands)?;
        let block_tokens = cx.config.block_tokens;
        let mut found = MappedRuns::default();
        for run in runs {
            let places = cx.memory.rm.places(creditor, run.lease, run.epoch);
            let mut at = run.offset;
            while at < run.offset + run.len {
                let len = (block_tokens - at % block_tokens).min(run.offset + run.len - at);
                let place = places.get((at / block_tokens) as usize).filter(|block| **block < mapping.blocks);
                found.add(run, at, len, place.map(|block| (*block, block * block_tokens + at % block_tokens)));
                at += len;
            }
        }
        (!found.runs.is_empty()).then_some((mapping.map, found))
    }
}
