//! What an rManager reports to its instance: messages to send, and what became of borrows, leases and reservations.

use lagoon_kv::RemoteGrant;
use lagoon_protocol::ControlBody;
use lagoon_types::{Epoch, InstanceId, LeaseId, SeqId, limits};
use std::ops::Range;

/// One negotiation; unique in its rManager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BorrowId(pub u64);

/// Why a borrow failed. Everything that it was granted is released.
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

/// A lease that a borrow got, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BorrowedLease {
    pub creditor: InstanceId,
    pub quic_addr: String,
    pub lease: LeaseId,
    pub epoch: Epoch,
    pub blocks: u32,
}

impl BorrowedLease {
    /// For the sequence's block table.
    #[must_use]
    pub fn grant(&self) -> RemoteGrant {
        RemoteGrant { creditor: self.creditor, lease: self.lease, epoch: self.epoch, blocks: self.blocks }
    }
}

/// What an rManager wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Send to the gManager; may be dropped when it is not connected (what matters is repeated).
    ToGManager(ControlBody),
    /// Send to a peer, connecting if need be. When that fails, call `on_peer_down`.
    ToPeer {
        instance: InstanceId,
        quic_addr: String,
        body: ControlBody,
    },
    /// A borrow is complete: the leases' blocks sum to what was asked for.
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
    /// The KV in a lease that was handed out is gone.
    LeaseLost {
        seq: SeqId,
        creditor: InstanceId,
        lease: LeaseId,
    },
    /// The KV in some entries of such a lease is gone: the creditor took them back.
    EntriesLost {
        seq: SeqId,
        creditor: InstanceId,
        lease: LeaseId,
        entries: Range<u32>,
    },
    /// A reservation for a move stands; it may have fewer blocks than were asked for.
    Reserved {
        borrow: BorrowId,
        seq: SeqId,
        lease: BorrowedLease,
    },
    /// Nobody reserves anything for a move. What the target could lend, if it said so.
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
    /// A reservation was not written for too long. What is not sealed of it was released.
    ReservationLost {
        seq: SeqId,
        creditor: InstanceId,
        lease: LeaseId,
    },
}
