//! Leases of rBlocks that a sequence of this instance computes, in joint prefill: the debtor reads them layer by layer, while they
//! are computed, and keeps them when the sequence has ended.
//!
//! Invariants:
//! * only the sequence writes these blocks, in ascending offset per layer; a lease's written lengths follow it;
//! * as with handed-over leases, the limit on lending does not count them: they cost no memory while the sequence has them.

use super::super::recall::Revoked;
use super::Creditor;
use crate::mutants::{self, Mutant};
use lagoon_kv::BlockPool;
use lagoon_protocol::{LeaseGrant, LeasePurpose};
use lagoon_types::{InstanceId, LeaseId, PhysBlock, SeqId};

impl Creditor {
    /// Leases blocks of the sequence `own` to `debtor`, for its sequence or job `seq`. The first `known` tokens are written.
    ///
    /// # Panics
    /// If a block is not the sequence's.
    pub fn lease_out(
        &mut self,
        own: SeqId,
        (debtor, seq): (InstanceId, SeqId),
        blocks: &[PhysBlock],
        known: u32,
        now_ms: u64,
        pool: &mut BlockPool,
    ) -> LeaseGrant {
        let leased = u32::try_from(blocks.len()).expect("at most the pool's blocks") * self.block_tokens;
        let written = if mutants::is(Mutant::StripeUnawaited) { leased } else { known };
        let (lease, grant) = self.give((debtor, seq, 0), LeasePurpose::Joint, blocks, written, now_ms);
        pool.lease_out(own, lease, blocks);
        grant
    }

    /// Takes a lease back that its debtor may or may not have taken over: the caller informs it. `None` if it has ended.
    pub fn withdraw(&mut self, lease: LeaseId, now_ms: u64, pool: &mut BlockPool) -> Option<Revoked> {
        let entries = 0..self.leases.get(&lease)?.entries();
        let ended = self.remove(lease, pool);
        let revoked = Revoked { debtor: ended.debtor, lease, entries };
        self.revoked.push((now_ms, revoked.clone()));
        Some(revoked)
    }

    /// The sequence has computed the first `tokens` tokens of a lease in `layer`. Nothing if the lease has ended.
    pub fn note_computed(&mut self, lease: LeaseId, layer: u32, tokens: u32) {
        if let Some(lease) = self.leases.get_mut(&lease).filter(|_| layer < self.layers) {
            lease.hasher.follow(layer as usize, tokens);
        }
    }
}
