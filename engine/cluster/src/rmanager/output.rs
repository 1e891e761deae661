//! Outputs of an rManager for its instance: messages to send, and results of borrows, leases and reservations.

use lagoon_kv::RemoteGrant;
use lagoon_protocol::{Candidate, ControlBody};
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId, limits};
use std::ops::Range;

/// Id of a borrow; unique in its rManager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BorrowId(pub u64);

/// Why a borrow failed. All its grants are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BorrowFailure {
    #[error("no instance has blocks to lend")]
    NoCreditors,
    #[error("the instances that have blocks to lend do not have enough")]
    Refused,
    #[error("the borrow took longer than {} ms", limits::BORROW_DEADLINE_MS)]
    Deadline,
    #[error("the whole pool has {pool_blocks_total} blocks")]
    PoolTooSmall { pool_blocks_total: u64 },
}

/// A lease granted to a borrow, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BorrowedLease {
    pub creditor: InstanceId,
    pub quic_addr: String,
    pub lease: LeaseId,
    pub epoch: Epoch,
    pub blocks: u32,
}

impl BorrowedLease {
    /// The lease as the sequence's block table takes it.
    #[must_use]
    pub fn grant(&self) -> RemoteGrant {
        RemoteGrant { creditor: self.creditor, lease: self.lease, epoch: self.epoch, blocks: self.blocks }
    }
}

/// Part of a prompt's cached run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CachedPart {
    /// Blocks that this instance caches.
    Here { blocks: u32 },
    /// A lease of blocks that their creditor caches.
    Leased(BorrowedLease),
    /// Blocks that nobody was found to cache.
    Missing { blocks: u32 },
}

impl CachedPart {
    /// The lease, if the part has one.
    #[must_use]
    pub fn into_lease(self) -> Option<BorrowedLease> {
        if let Self::Leased(lease) = self { Some(lease) } else { None }
    }
}

/// An output of an rManager.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Send to the gManager; may be dropped while it is not connected (important messages are repeated).
    ToGManager(ControlBody),
    /// Send to a peer, connecting if need be. When that fails, call `on_peer_down`.
    ToPeer {
        instance: InstanceId,
        quic_addr: String,
        body: ControlBody,
    },
    /// A borrow is complete: the leases' blocks sum to the number requested.
    Borrowed {
        borrow: BorrowId,
        seq: SeqId,
        leases: Vec<BorrowedLease>,
    },
    BorrowFailed {
        borrow: BorrowId,
        seq: SeqId,
        reason: BorrowFailure,
    },
    /// The search of a prompt's cached blocks has ended: its first parts, in order; none if nothing was found.
    PrefixFound {
        borrow: BorrowId,
        seq: SeqId,
        parts: Vec<CachedPart>,
    },
    /// Instances that may compute a part of a sequence's prompt, as far as the gManager named any in time.
    Members {
        seq: SeqId,
        candidates: Vec<Candidate>,
    },
    /// The KV of a lease in use is lost.
    LeaseLost {
        seq: SeqId,
        creditor: InstanceId,
        lease: LeaseId,
    },
    /// The KV of some entries of a lease in use is lost: the creditor revoked them.
    EntriesLost {
        seq: SeqId,
        creditor: InstanceId,
        lease: LeaseId,
        entries: Range<u32>,
    },
    /// A reservation for a move was granted; it may have fewer blocks than requested.
    Reserved {
        borrow: BorrowId,
        seq: SeqId,
        lease: BorrowedLease,
    },
    /// No reservation for a move was granted. `blocks_lendable`: the blocks that the target could lend, if it replied.
    NotReserved {
        borrow: BorrowId,
        seq: SeqId,
        blocks_lendable: Option<u32>,
    },
    /// Entries of a reservation are verified: the sequence may switch to them.
    Sealed {
        seq: SeqId,
        creditor: InstanceId,
        lease: LeaseId,
        entries: Vec<u32>,
    },
    /// A reservation was not written for too long. Its unsealed entries were released.
    ReservationLost {
        seq: SeqId,
        creditor: InstanceId,
        lease: LeaseId,
    },
}
