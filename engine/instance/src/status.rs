//! What an instance tells of itself, for `lagoon status`, metrics and tests.

use crate::batch::freeze::FrozenDebt;
use crate::batch::prefix::PrefixStatus;
use crate::instance::Instance;
use crate::moves::MoveStatus;
use crate::prefill::{LastTimes, PrefillStatus};
use crate::step::mapped::PeerAccessStatus;
use lagoon_backend::{KvCounters, LaunchCounters};
use lagoon_cluster::RManager;
use lagoon_kv::{BlockIdentity, KvAccount, Placement};
use lagoon_protocol::Role;
use lagoon_types::{InstanceId, SeqId};
use serde::Serialize;
use std::collections::BTreeMap;

/// A kept hash and its key, in a B-tree whose nodes are at least half full.
const HASH_ENTRY_BYTES: usize = 2 * (size_of::<u32>() + size_of::<lagoon_kv::hash::ContentHash>());

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InstanceStatus {
    pub instance: Option<InstanceId>,
    /// The role that it has, and the one that it changes to. Shells name them.
    #[serde(skip)]
    pub role: Role,
    #[serde(skip)]
    pub becoming: Option<Role>,
    pub registered: bool,
    /// It lends nothing more and finishes what it has.
    pub draining: bool,
    /// Times that the gManager took it for dead.
    pub fences: u64,
    /// rBlocks of the whole pool, as the gManager last said.
    pub pool_blocks_total: u64,
    /// Tokens of an rBlock.
    pub block_tokens: u32,
    pub blocks_total: u32,
    pub blocks_free: u32,
    pub blocks_lent: u32,
    pub blocks_borrowed: u32,
    /// rBlocks that were lent to its requests since the start, without those that moved there.
    pub blocks_borrowed_total: u64,
    pub running: usize,
    pub waiting: usize,
    /// Frames of peers that wait or are on the device.
    pub remote_request_frames: usize,
    /// Times that a running sequence gave its memory up, to be computed again.
    pub preemptions: u64,
    /// Tokens whose KV these had and must compute again.
    pub preempted_tokens: u64,
    /// Times that a running sequence gave its memory up and kept its KV in host memory.
    pub offloads: u64,
    /// Sequences whose KV is in host memory until there is room for them to go on.
    pub swapped_out: usize,
    /// Times that a sequence lost KV with a creditor.
    pub recoveries: u64,
    /// Tokens that were computed again because their KV was lost.
    pub recomputed_tokens: u64,
    /// Peers' steps that were refused because own steps were far over their latency target.
    pub steps_shed: u64,
    pub moves: MoveStatus,
    /// On a device that maps memory behind addresses: what that has come to, in page groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<KvCounters>,
    /// On a device that keeps how steps were launched: what that has come to, in steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launches: Option<LaunchCounters>,
    pub prefill: PrefillStatus,
    pub prefix: PrefixStatus,
    pub peer_access: PeerAccessStatus,
    pub sequences: Vec<SequencePlacement>,
}

/// Where one sequence's rBlocks are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SequencePlacement {
    pub seq: SeqId,
    pub tokens: u32,
    pub local_blocks: u32,
    /// Own blocks that wait until the rest is borrowed, or for blocks that come home.
    pub reserved_blocks: u32,
    /// Blocks that were lost with a creditor and have no new place yet.
    pub lost_blocks: u32,
    /// Tokens whose KV was lost and is not computed again yet.
    pub lost_tokens: u32,
    /// Blocks by creditor.
    pub remote_blocks: BTreeMap<InstanceId, u32>,
}

impl Instance {
    /// The instance's rBlocks, to look at.
    #[must_use]
    pub fn rmanager(&self) -> &RManager {
        &self.cx.memory.rm
    }

    /// The role that it has, and the one that it changes to.
    #[must_use]
    pub fn role(&self) -> (Role, Option<Role>) {
        (self.membership.roles.now(), self.membership.roles.becoming())
    }

    /// The block tables, to look at: where each block of a sequence is, by position.
    pub fn tables(&self) -> impl Iterator<Item = (SeqId, &[Placement])> {
        self.batch.seqs().map(|s| (s.id, s.blocks.placements()))
    }

    /// Whether a peer's frame is due at any moment: the partials of a layer whose queries are out, or the next queries of
    /// a step that is served here. A shell with a processor to spare then polls instead of sleeping.
    #[must_use]
    pub fn expects_frames(&self) -> bool {
        self.step.expects_partials() || self.creditor.expects_queries()
    }

    /// Whether the shell should hand in more bulk frames now. While the device is behind with peers' KV it should not:
    /// the transport's flow control then holds the peers back.
    #[must_use]
    pub fn takes_bulk(&self) -> bool {
        self.creditor.takes_bulk()
    }

    /// Whether rows with and without KV elsewhere are one batch now.
    #[must_use]
    pub fn is_one_batch(&self) -> bool {
        self.batch.is_one_batch()
    }

    /// The debt that is frozen now. At most one is.
    #[must_use]
    pub fn frozen(&self) -> Option<FrozenDebt> {
        self.batch.frozen()
    }

    /// Bytes of its KV store, and of what it keeps beside: its pool's table, block tables, hashing state of leases on
    /// both sides.
    #[must_use]
    pub fn kv_account(&self) -> KvAccount {
        let leases = || self.batch.seqs().flat_map(|s| s.leases.values());
        let borrowed = leases().filter_map(|held| held.hasher.as_ref()).chain(self.moves.hashers());
        let hashes: usize = leases().map(|held| held.hashes.len() * HASH_ENTRY_BYTES).sum();
        let mut account = KvAccount::of(
            &self.cx.config.kv,
            self.cx.config.block_tokens,
            self.cx.memory.rm.pool(),
            self.batch.seqs().map(|s| &s.blocks),
            self.cx.memory.rm.lent_hashers().chain(borrowed),
        );
        let names: usize = self.batch.seqs().map(|s| s.names.capacity() * size_of::<BlockIdentity>()).sum();
        account.metadata_bytes += (hashes + names) as u64;
        account
    }

    pub(crate) fn move_status(&self) -> MoveStatus {
        let (recalls_missed, blocks_revoked) = self.creditor.missed();
        let recalls_met = self.cx.memory.rm.recalls_met();
        MoveStatus { recalls_met, recalls_missed, blocks_revoked, ..self.moves.status() }
    }

    /// The time in which anything was read so far, in microseconds: only the shell sees reads begin and end.
    pub fn set_reading_us(&mut self, reading_us: u64) {
        self.prefill.set_reading_us(reading_us);
    }

    /// Where the time of requests went whose prompts were computed elsewhere, since this was last asked.
    pub fn take_prefill_times(&mut self) -> LastTimes {
        self.prefill.take_times()
    }

    /// See [`PrefillStatus`].
    pub(crate) fn prefill_status(&self) -> PrefillStatus {
        PrefillStatus {
            workers: self.readable_workers(),
            waiting_here: self.waiting_here(),
            blocks_handed_over: self.cx.memory.rm.handed_over(),
            blocks_held_back: self.cx.memory.rm.held_back(),
            jobs: self.jobs(),
            queued_tokens: self.queued_tokens(),
            ..self.prefill.look()
        }
    }

    /// See [`InstanceStatus`].
    #[must_use]
    pub fn status(&self) -> InstanceStatus {
        let counts = self.cx.memory.rm.counts();
        let placement = |s: &crate::batch::sequence::Sequence| {
            let mut remote_blocks = BTreeMap::new();
            for ((creditor, _), held) in &s.leases {
                *remote_blocks.entry(*creditor).or_default() += held.blocks;
            }
            SequencePlacement {
                seq: s.id,
                tokens: s.len(),
                local_blocks: s.blocks.local_blocks(),
                reserved_blocks: u32::try_from(
                    s.aside.len() + self.moves.reserved_here(s.id) + self.prefill.landing(s.id),
                )
                .unwrap_or(u32::MAX),
                lost_blocks: s.blocks.lost_blocks(),
                lost_tokens: s.blocks.lost().iter().map(|lost| lost.end - lost.start).sum(),
                remote_blocks,
            }
        };
        InstanceStatus {
            instance: self.membership.id,
            role: self.membership.roles.now(),
            becoming: self.membership.roles.becoming(),
            registered: self.membership.is_registered(),
            draining: self.membership.is_draining(),
            fences: self.membership.fences,
            pool_blocks_total: self.membership.pool_blocks_total,
            block_tokens: self.cx.config.block_tokens,
            blocks_total: self.cx.config.blocks_total,
            blocks_free: counts.free,
            blocks_lent: counts.lent,
            blocks_borrowed: self.cx.memory.rm.borrowed(),
            blocks_borrowed_total: self.batch.counts.borrowed_blocks,
            running: self.batch.running_len(),
            waiting: self.waiting(),
            remote_request_frames: self.creditor.load(),
            preemptions: self.batch.counts.preemptions,
            preempted_tokens: self.batch.counts.preempted_tokens,
            offloads: self.batch.counts.offloads,
            swapped_out: self.batch.seqs().filter(|s| s.is_swapped_out()).count(),
            recoveries: self.batch.counts.recoveries,
            recomputed_tokens: self.batch.counts.recomputed_tokens,
            steps_shed: self.creditor.shed_steps(),
            moves: self.move_status(),
            memory: self.cx.memory.counters,
            launches: self.step.launches,
            prefill: self.prefill_status(),
            prefix: self.prefix_status(),
            peer_access: PeerAccessStatus { sealed: self.creditor.sealed(), ..self.step.mapped.status() },
            sequences: self.batch.seqs().map(placement).collect(),
        }
    }
}
