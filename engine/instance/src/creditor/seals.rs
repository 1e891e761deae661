//! Seal tags of lent rBlocks, for debtors that map this instance's KV.

use crate::cx::TagOwner;
use crate::event::{Effect, PeerKey};
use crate::instance::Instance;
use lagoon_protocol::{ControlBody, LeaseSealed};
use lagoon_runner::{Command, GuestTag};
use lagoon_types::{Epoch, LeaseId};
use std::collections::BTreeMap;

/// An rBlock that the device is sealing for a debtor.
#[derive(Debug)]
struct Sealing {
    peer: PeerKey,
    lease: LeaseId,
    epoch: Epoch,
    entry: u32,
    block: u32,
}

/// Seal tags that the device is writing, and how many it wrote.
#[derive(Debug, Default)]
pub(super) struct Seals {
    /// At most one for each rBlock of the store.
    sealing: BTreeMap<GuestTag, Sealing>,
    sealed: u64,
}

impl Seals {
    /// rBlocks that were sealed for debtors to map.
    pub(super) fn sealed(&self) -> u64 {
        self.sealed
    }
}

impl Instance {
    /// A debtor's rBlock is whole and verified. If debtors may map it, the device seals it, and they are told then.
    pub(crate) fn seal_lent(&mut self, peer: PeerKey, lease: LeaseId, epoch: Epoch, entry: u32) {
        let Some(block) = self.cx.memory.rm.lent_entry(lease, entry).map(|lent| lent.block.0) else { return };
        let tag = self.cx.tags.take(TagOwner::Seal);
        self.creditor.seals.sealing.insert(tag, Sealing { peer, lease, epoch, entry, block });
        self.cx.effects.push(Effect::Runner(Command::GuestSeal { tag, block, epoch }));
    }

    /// The device has sealed an rBlock, or failed.
    pub(crate) fn on_guest_sealed(&mut self, tag: GuestTag, sealed: bool) {
        let Some(Sealing { peer, lease, epoch, entry, block }) = self.creditor.seals.sealing.remove(&tag) else {
            return;
        };
        if sealed {
            self.creditor.seals.sealed += 1;
            let body = LeaseSealed { lease: lease.0, epoch: epoch.0, entries: vec![entry], blocks: vec![block] };
            self.cx.send(peer, ControlBody::LeaseSealed(body));
        }
    }
}
