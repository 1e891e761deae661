//! Status of an instance, for `lagoon status`, metrics and tests.

use crate::batch::freeze::FrozenDebt;
use crate::cx::prefix::PrefixStatus;
use crate::cx::tiers::CacheTiersStatus;
use crate::instance::Instance;
use crate::joint::{JointState, JointStatus};
use crate::look::Look;
use crate::moves::{MovePace, MoveStatus};
use crate::prefill::{LastTimes, PrefillStatus, StageUser};
use crate::step::mapped::PeerAccessStatus;
use crate::step::relays::RelayStatus;
use lagoon_backend::{KvCounters, LaunchCounters};
use lagoon_cluster::RManager;
use lagoon_kv::{BlockHash, KvAccount, Placement};
use lagoon_protocol::{Load, Role};
use lagoon_types::limits::REMOTE_REQUEST_WRITE_BYTES_MAX;
use lagoon_types::{InstanceId, LeaseId, SeqId};
use serde::Serialize;
use std::collections::BTreeMap;

/// Size of a stored hash and its key, in a B-tree whose nodes are at least half full.
const HASH_ENTRY_BYTES: usize = 2 * (size_of::<u32>() + size_of::<lagoon_kv::hash::ContentHash>());

/// A snapshot of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InstanceStatus {
    pub instance: Option<InstanceId>,
    /// Its role, and the role that it changes to. Shells name them.
    #[serde(skip)]
    pub role: Role,
    #[serde(skip)]
    pub becoming: Option<Role>,
    pub registered: bool,
    /// Whether it drains: lends nothing more and finishes its requests.
    pub draining: bool,
    /// Times that the gManager declared it dead.
    pub fences: u64,
    /// rBlocks of the whole pool, from the gManager's last message.
    pub pool_blocks_total: u64,
    /// Tokens of an rBlock.
    pub block_tokens: u32,
    pub blocks_total: u32,
    pub blocks_free: u32,
    pub blocks_lent: u32,
    pub blocks_borrowed: u32,
    /// rBlocks borrowed for its requests since the start, moves left out.
    pub blocks_borrowed_total: u64,
    pub running: usize,
    pub waiting: usize,
    /// Peers' frames that wait or are on the device.
    pub remote_request_frames: usize,
    /// Peers' steps that attend to KV here.
    pub remote_steps: usize,
    /// Running sequences preempted for recomputation.
    pub preemptions: u64,
    /// Tokens whose KV preempted sequences had and must recompute.
    pub preempted_tokens: u64,
    /// Waiting requests given back to their gateway.
    pub handed_back: u64,
    /// Running sequences swapped out to host memory.
    pub offloads: u64,
    /// Sequences swapped out now.
    pub swapped_out: usize,
    /// Losses of KV at a creditor, by sequence.
    pub recoveries: u64,
    /// Tokens recomputed because their KV was lost.
    pub recomputed_tokens: u64,
    /// Tokens that were drafted (speculative decoding), and those of them that were sampled.
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    /// Tokens computed again for windowed KV alone.
    pub warm_up_tokens: u64,
    /// Peers' steps refused because own steps were far over the latency target.
    pub steps_shed: u64,
    pub moves: MoveStatus,
    /// Counters of mapped memory, in page groups; on a device that maps memory behind addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<KvCounters>,
    /// Counters of step launches; on a device that counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launches: Option<LaunchCounters>,
    pub prefill: PrefillStatus,
    pub prefix: PrefixStatus,
    pub joint: JointStatus,
    pub relays: RelayStatus,
    /// Tiers of the prefix cache beside the KV memory, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_tiers: Option<CacheTiersStatus>,
    pub peer_access: PeerAccessStatus,
    pub sequences: Vec<SequencePlacement>,
}

/// Placement of one sequence's rBlocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SequencePlacement {
    pub seq: SeqId,
    pub tokens: u32,
    pub local_blocks: u32,
    /// Own blocks that wait until the rest is borrowed, or for blocks that move home.
    pub reserved_blocks: u32,
    /// Blocks lost with a creditor and not placed again yet.
    pub lost_blocks: u32,
    /// Tokens whose KV was lost and is not recomputed yet.
    pub lost_tokens: u32,
    /// Borrowed blocks, by creditor.
    pub remote_blocks: BTreeMap<InstanceId, u32>,
}

impl Instance {
    /// The instance's rBlocks, for reading.
    #[must_use]
    pub fn rmanager(&self) -> &RManager {
        &self.cx.memory.rm
    }

    /// Its role, and the role that it changes to.
    #[must_use]
    pub fn role(&self) -> (Role, Option<Role>) {
        (self.cx.standing.roles.now(), self.cx.standing.roles.becoming())
    }

    /// The joint prefills that it owns, and its parts in those of others, for reading.
    #[must_use]
    pub fn joint_states(&self) -> Vec<JointState> {
        self.joint.parts(self.cx.config.block_tokens)
    }

    /// The block tables, for reading: each block of a sequence, by position.
    pub fn tables(&self) -> impl Iterator<Item = (SeqId, &[Placement])> {
        self.batch.seqs().map(|s| (s.id, s.blocks.placements()))
    }

    /// Whether a peer's frame is due at any moment: partials of a layer whose queries are out, or the next queries of a
    /// step that is served here. A shell with a core to spare then polls instead of sleeping.
    #[must_use]
    pub fn expects_frames(&self) -> bool {
        self.step.expects_partials() || self.creditor.expects_queries()
    }

    /// Whether the shell should hand in more bulk frames now. Not while the device lags behind with peers' KV: the
    /// transport's flow control then holds the peers back.
    #[must_use]
    pub fn takes_bulk(&self) -> bool {
        self.cx.writes.waiting() < REMOTE_REQUEST_WRITE_BYTES_MAX
    }

    /// Whether rows with and without remote KV are one batch now.
    #[must_use]
    pub fn is_one_batch(&self) -> bool {
        self.batch.is_one_batch()
    }

    /// The frozen debt; at most one.
    #[must_use]
    pub fn frozen(&self) -> Option<FrozenDebt> {
        self.batch.frozen()
    }

    /// Bytes of the KV store and of its bookkeeping: the pool's table, block tables, hashing state of leases on both
    /// sides.
    #[must_use]
    pub fn kv_account(&self) -> KvAccount {
        let leases = || self.batch.seqs().flat_map(|s| s.leases.values());
        let borrowed = leases().filter_map(|held| held.hasher.as_ref()).chain(self.moves.hashers());
        let hashes: usize = leases().map(|held| held.hashes.len() * HASH_ENTRY_BYTES).sum();
        let mut account = KvAccount::of(
            &self.cx.config.kv,
            self.cx.config.block_tokens,
            &self.cx.memory.rm.pool,
            self.batch.seqs().map(|s| &s.blocks),
            self.cx.memory.rm.creditor.hashers().chain(borrowed),
        );
        let block_hashes: usize = self.batch.seqs().map(|s| s.block_hashes.capacity() * size_of::<BlockHash>()).sum();
        account.metadata_bytes += (hashes + block_hashes) as u64;
        account
    }

    pub(crate) fn look(&self) -> Look<'_> {
        let Self { batch, step, creditor, prefill: prefills, moves, .. } = self;
        Look { batch, step, creditor, prefills, moves }
    }

    /// Longest sequence that the pool holds when free, in tokens.
    #[must_use]
    pub fn pool_tokens(&self) -> u64 {
        self.cx.pool_tokens()
    }

    /// Whether a lease is of a prompt whose decode worker is not informed yet: exporting may wait for the staging
    /// buffer.
    #[must_use]
    pub fn is_unreported(&self, lease: LeaseId) -> bool {
        self.prefill.is_unreported(lease)
    }

    /// Blocks of the staging buffer by user: exports from it, and reads into it.
    pub fn stages(&self) -> impl Iterator<Item = (StageUser, &[u32])> {
        self.prefill.stages()
    }

    /// Load of batch and queue, as heartbeats say it.
    #[must_use]
    pub fn load(&self) -> Load {
        self.membership.load(&self.cx, &self.batch)
    }

    /// Sets the pace of moves beside decoding.
    pub fn set_move_pace(&mut self, pace: MovePace) {
        self.moves.set_pace(pace);
    }

    /// Sets the total time with reads in progress, in microseconds: only the shell sees reads begin and end.
    pub fn set_reading_us(&mut self, reading_us: u64) {
        self.prefill.set_reading_us(reading_us);
    }

    /// Takes the times, since the last call, of requests whose prompts prefill workers computed.
    pub fn take_prefill_times(&mut self) -> LastTimes {
        self.prefill.take_times()
    }

    /// See [`InstanceStatus`].
    #[must_use]
    pub fn status(&self) -> InstanceStatus {
        let counts = self.cx.memory.rm.pool.counts();
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
                    s.beside() + self.moves.reserved_here(s.id) + self.prefill.landing(s.id),
                )
                .unwrap_or(u32::MAX),
                lost_blocks: s.blocks.lost_blocks(),
                lost_tokens: s.blocks.lost().iter().map(|lost| lost.end - lost.start).sum(),
                remote_blocks,
            }
        };
        InstanceStatus {
            instance: self.cx.standing.id,
            role: self.cx.standing.roles.now(),
            becoming: self.cx.standing.roles.becoming(),
            registered: self.cx.standing.registered,
            draining: self.cx.standing.draining,
            fences: self.membership.fences(),
            pool_blocks_total: self.cx.standing.pool_blocks(),
            block_tokens: self.cx.config.block_tokens,
            blocks_total: self.cx.config.blocks_total,
            blocks_free: counts.free,
            blocks_lent: counts.lent,
            blocks_borrowed: self.cx.memory.rm.debtor.held.blocks(),
            blocks_borrowed_total: self.batch.counts().borrowed_blocks,
            running: self.batch.running_len(),
            waiting: self.batch.waiting_len(&self.prefill) + self.joint.waiting(),
            remote_request_frames: self.creditor.load(),
            remote_steps: self.creditor.open_steps(),
            preemptions: self.batch.counts().preemptions,
            preempted_tokens: self.batch.counts().preempted_tokens,
            handed_back: self.batch.counts().handed_back,
            offloads: self.batch.counts().offloads,
            swapped_out: self.batch.seqs().filter(|s| s.is_swapped_out()).count(),
            recoveries: self.batch.counts().recoveries,
            recomputed_tokens: self.batch.counts().recomputed_tokens,
            drafted_tokens: self.batch.counts().drafted_tokens,
            accepted_tokens: self.batch.counts().accepted_tokens,
            warm_up_tokens: self.batch.counts().warm_up_tokens,
            steps_shed: self.creditor.shed_steps(),
            moves: self.look().moves(&self.cx),
            memory: self.cx.memory.counters,
            launches: self.step.launches(),
            prefill: self.prefill.look(&self.cx, &self.batch),
            prefix: self.cx.memory.prefix.status(&self.cx.memory.rm),
            joint: self.joint.status(),
            relays: RelayStatus { merged_layers: self.creditor.merged_layers(), ..self.step.relays().status() },
            cache_tiers: self.cx.memory.tiers.status(&self.cx.memory.rm.pool),
            peer_access: PeerAccessStatus { sealed: self.creditor.sealed(), ..self.step.mapped().status() },
            sequences: self.batch.seqs().map(placement).collect(),
        }
    }
}
