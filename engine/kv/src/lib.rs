//! rBlocks: the physical block pool of one instance, the block table of one sequence, content hashes and block hashes.
//! Logical only: no device memory, no protocol, no I/O, no clock.
//!
//! * [`BlockPool`] owns the physical rBlocks and their owners: none, sequences of this instance, or leases. It is also
//!   the prefix cache.
//! * [`SeqBlocks`] is a block table: each logical rBlock of one sequence is local, on a creditor, lost, or freed behind
//!   the window.
//! * [`LeaseHasher`] computes the content hash of sealed remote blocks while their KV is written, on both sides alike.
//! * [`BlockHash`] is the block hash of the prefix chain, the key of the prefix cache.
//! * [`Tier`] is a tier of the prefix cache beside the KV memory, in host memory or on disk: blocks by hash, bounded by bytes.
//! * [`vmm`] is the accounting of virtual memory on devices that map pages.
//!
//! The scheduler of `lagoon-instance` and the rManager call this crate. It must never know more of other instances than
//! their ids, nor messages, nor time.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

pub mod account;
mod cache;
#[cfg(test)]
mod cache_tests;
mod extents;
pub mod hash;
pub mod identity;
#[cfg(test)]
mod model_tests;
pub mod mutants;
pub mod pool;
pub mod ranges;
pub mod seq;
mod tenants;
pub mod tier;
pub mod vmm;

pub use account::KvAccount;
pub use hash::{BlockHasher, LeaseHasher};
pub use identity::{BlockHash, IdentityRoot, Tenant, Tenants};
pub use pool::Unsaved;
pub use pool::{Adopted, BlockPool, BlockState, Joined, Owner, PoolCounts};
pub use ranges::RangeSet;
pub use seq::{
    Advance, Freed, JointPart, Placement, RemoteBlock, RemoteEntries, RemoteGrant, Segment, SeqBlocks, SlotRef,
};
pub use tenants::TenantCounts;
pub use tier::{Tier, TierDrop};
