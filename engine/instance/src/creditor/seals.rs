//! Seal tags of lent rBlocks, for debtors that map this instance's KV.

use super::Creditor;
use crate::cx::Cx;
use crate::cx::tags::TagOwner;
use crate::event::{Effect, PeerKey};
use lagoon_protocol::{ControlBody, LeaseSealed};
use lagoon_runner::{Command, RemoteTag};
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

/// Seal tags that the device is writing, and the number written.
#[derive(Debug, Default)]
pub(super) struct Seals {
    /// At most one for each rBlock of the store.
    sealing: BTreeMap<RemoteTag, Sealing>,
    sealed: u64,
}

impl Seals {
    /// rBlocks sealed for debtors to map.
    pub(super) fn sealed(&self) -> u64 {
        self.sealed
    }

    /// Seals that wait for the device.
    pub(super) fn waiting(&self) -> usize {
        self.sealing.len()
    }
}

impl Creditor {
    /// Seals a whole and verified rBlock of a debtor if debtors may map it; the debtor is informed once the tag is
    /// written.
    pub(super) fn seal_lent(&mut self, cx: &mut Cx, peer: PeerKey, lease: LeaseId, epoch: Epoch, entry: u32) {
        let Some(block) = cx.memory.rm.creditor.entry(lease, entry).map(|lent| lent.block.0) else { return };
        let tag = cx.tags.take(TagOwner::Seal);
        self.seals.sealing.insert(tag, Sealing { peer, lease, epoch, entry, block });
        cx.effects.push(Effect::Runner(Command::RemoteSeal { tag, block, epoch }));
    }

    /// Ends a sealing, done or failed.
    pub(super) fn on_remote_sealed(&mut self, cx: &mut Cx, tag: RemoteTag, sealed: bool) {
        let Some(Sealing { peer, lease, epoch, entry, block }) = self.seals.sealing.remove(&tag) else {
            return;
        };
        if sealed {
            self.seals.sealed += 1;
            let body = LeaseSealed { lease: lease.0, epoch: epoch.0, entries: vec![entry], blocks: vec![block] };
            cx.send(peer, ControlBody::LeaseSealed(body));
        }
    }
}
