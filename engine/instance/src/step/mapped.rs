//! Mapped creditor KV: attention over a creditor's memory in place ([ADR
//! 19](../../../../docs/adr/0019-attention-over-a-creditors-memory.md)).
//!
//! A creditor whose KV store other processes can map offers it in its Hello. A debtor on the same host maps the store
//! once, and its own device attends to the sealed rBlocks of its leases there: it sends no query for them.
//!
//! Invariants:
//! * a debtor attends only to rBlocks that the creditor has reported sealed, under a lease that it holds;
//! * the creditor reports an rBlock after its device has sealed it with the lease's epoch, behind the block's last
//!   byte; the debtor's device compares the seal tag before results leave a step: a reused rBlock is a lost block;
//! * memory stays mapped as long as the connection stands on which it was offered.

use crate::cx::Cx;
use crate::event::Effect;
use crate::step::cost::RemotePolicy;
use lagoon_protocol::{LentMemory, TransferArena};
use lagoon_runner::{Command, MapId, RemoteWork, SealedBlock};
use lagoon_types::{InstanceId, KvRun, LeaseRun};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Counters of remote attention by kind, and of mapped creditor KV.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerAccessStatus {
    /// Micro attentions of a sequence's step over a creditor's KV: mapped, by shipped queries, and by fetched KV.
    pub attended_mapped: u64,
    pub attended_shipped: u64,
    pub attended_fetched: u64,
    /// Creditors whose memory is mapped, and mappings that failed.
    pub mapped: usize,
    pub refused: u64,
    /// Steps dropped because mapped memory had been reused.
    pub reused: u64,
    /// rBlocks sealed for debtors to map.
    pub sealed: u64,
}

/// A creditor's memory, mapped or being mapped.
#[derive(Debug)]
struct Mapping {
    map: MapId,
    /// The memory as offered in its Hello.
    memory: TransferArena,
    blocks: u32,
    /// Whether the device has mapped it.
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

    /// Whether this creditor's memory is mapped here: its device then computes nothing for sealed KV of this instance.
    pub(crate) fn maps(&self, creditor: InstanceId) -> bool {
        self.mappings.get(&creditor).is_some_and(|mapping| mapping.stands)
    }

    /// Counts the remote attention of a step that begins.
    pub(crate) fn count(&mut self, work: &RemoteWork) {
        let fetched: BTreeSet<_> = work.fetches.iter().map(|fetch| (fetch.creditor, fetch.seq_index)).collect();
        let shipped: usize = work.ships.iter().map(|ship| ship.segments.len()).sum();
        let mapped: usize = work.peer_access.iter().map(|mapped| mapped.seqs.len()).sum();
        self.status.attended_fetched += fetched.len() as u64;
        self.status.attended_shipped += shipped as u64;
        self.status.attended_mapped += mapped as u64;
    }

    /// Counts a step dropped because mapped memory had been reused.
    pub(crate) fn note_reused(&mut self) {
        self.status.reused += 1;
    }
}

/// A sequence's runs at a creditor, split into mapped and other ones.
#[derive(Debug, Default)]
pub(crate) struct MappedRuns {
    /// Mapped runs, in the creditor's store, ascending.
    pub(crate) runs: Vec<KvRun>,
    pub(crate) sealed: Vec<SealedBlock>,
    /// Runs that are not mapped.
    pub(crate) rest: Vec<LeaseRun>,
}

impl MappedRuns {
    /// Adds `len` tokens from `offset` of a run; `sealed`: their rBlock and slot, if mapped.
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
    /// Maps the memory that a creditor offers in its Hello, if it is on this host; unmaps it if it offers none.
    pub(crate) fn on_lent_memory(&mut self, cx: &mut Cx, creditor: InstanceId, lent: Option<&LentMemory>) {
        let same_host = |lent: &&LentMemory| cx.config.peer_access.as_ref().is_some_and(|host| *host == lent.host);
        // Its slots are numbered by u32, as every instance's.
        let sizes = |lent: &&LentMemory| lent.blocks.checked_mul(cx.config.block_tokens).is_some_and(|n| n < u32::MAX);
        let wanted = cx.config.remote == RemotePolicy::Auto;
        let offered = lent
            .filter(same_host)
            .filter(sizes)
            .filter(|_| wanted)
            .and_then(|lent| Some((lent.memory.as_ref()?, lent)));
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

    /// The device has mapped a creditor's memory, or failed to.
    pub(crate) fn on_mapped(&mut self, cx: &mut Cx, map: MapId, mapped: bool) {
        let wanted = self.mappings.iter_mut().find(|(_, mapping)| mapping.map == map);
        match wanted {
            Some((creditor, mapping)) => {
                mapping.stands = mapped;
                cx.memory.rm.debtor.set_near(*creditor, mapped);
            }
            // The peer left meanwhile.
            None if mapped => cx.effects.push(Effect::Runner(Command::Unmap { map })),
            None => {}
        }
        self.status.refused += u64::from(!mapped);
    }

    /// Unmaps a creditor's memory. Steps that attend to it must have ended.
    pub(crate) fn unmap(&mut self, cx: &mut Cx, creditor: InstanceId) {
        if let Some(Mapping { map, stands: true, .. }) = self.mappings.remove(&creditor) {
            cx.memory.rm.debtor.set_near(creditor, false);
            cx.effects.push(Effect::Runner(Command::Unmap { map }));
        }
    }

    /// Splits a sequence's runs at a creditor into mapped sealed ones, for the own device, and the rest; `None` if not
    /// mapped.
    pub(crate) fn mapped_runs(&self, cx: &Cx, creditor: InstanceId, runs: &[LeaseRun]) -> Option<(MapId, MappedRuns)> {
        let mapping = self.mappings.get(&creditor).filter(|mapping| mapping.stands)?;
        let block_tokens = cx.config.block_tokens;
        let mut found = MappedRuns::default();
        for run in runs {
            let places = cx.memory.rm.debtor.held.places(creditor, run.lease, run.epoch);
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
