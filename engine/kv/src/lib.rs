//! rBlocks: the physical pool of one instance, the block table of one sequence, and the content and identity of a
//! block. Logical only: no device memory, no protocol, no I/O, no clock.
//!
//! * [`BlockPool`] says who has each physical rBlock: nobody, sequences of this instance, or leases.
//! * [`SeqBlocks`] says where each logical rBlock of one sequence lies: here, on a creditor, or nowhere any more
//!   (behind the window).
//! * [`LeaseHasher`] computes the hash of sealed remote blocks while their KV streams by, on both sides alike.
//! * [`BlockIdentity`] names what a block holds by the tokens that lead to it; a free block of the pool may keep that.
//! * [`vmm`] is the accounting of virtual memory on devices that map pages: which page group lies where.
//!
//! What must not be here: knowledge of instances beyond their ids, of messages, or of when anything happens.
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
pub mod vmm;

pub use account::KvAccount;
pub use hash::{BlockHasher, LeaseHasher};
pub use identity::{BlockIdentity, IdentityRoot};
pub use pool::{Adopted, BlockPool, BlockState, Joined, Owner, PoolCounts};
pub use ranges::RangeSet;
pub use seq::{Advance, Freed, Placement, RemoteBlock, RemoteEntries, RemoteGrant, Segment, SeqBlocks, SlotRef};
