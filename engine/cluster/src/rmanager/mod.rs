//! The rManager: owner of one instance's rBlocks, for all their users (Infinite-LLM v1 §4.3 and §4.4).
//!
//! Three roles share one pool: the owner (the pool itself), the creditor (leases to other instances) and the debtor
//! (leases from other instances). Callers use these parts directly; the rManager itself handles messages and timers that
//! concern several of them. Invariants:
//! * free + own + lent = total + shared (asserted by the pool at every change);
//! * growth goes before lending: at most `lend_blocks_max` blocks are lent, and never one of the last
//!   `lend_reserve_blocks` free ones. Lending never borrows;
//! * the blocks that a creditor has lent always contain the blocks that its debtors hold: a debtor drops a lease before the
//!   creditor's time to live can end, and releases it at the creditor only after it stopped using it.
//!
//! **Freed blocks and queued device work.** A freed block may go to the next allocation at once. That is safe as long
//! as one thread queues device work in the order of these calls, and the device executes in that order: work queued for
//! the old owner then precedes all work of the new one. So resolve a lease's runs when work is queued (per layer, not
//! once per step), and commit a write right when it is queued.

mod cache_report;
mod creditor;
mod debtor;
mod fence;
mod held;
mod lent_blocks;
mod output;
mod recall;
mod report;
#[cfg(test)]
mod tests;
mod watched;

pub use cache_report::CacheReport;
pub use creditor::{LeaseEnded, LentEntry};
pub use lent_blocks::WritePiece;
pub use output::{BorrowFailure, BorrowId, BorrowedLease, CachedPart, Output};
pub use recall::{Revoked, Unmet};
pub use report::PlacementReport;

use creditor::Creditor;
use debtor::Debtor;
use lagoon_kv::BlockPool;
use lagoon_protocol::{ControlBody, Heartbeat, LeaseGrant, LeaseRefuse, LeaseRequest, Link};
use lagoon_types::{InstanceId, KvShape, KvSpace, LeaseId, limits};
use std::collections::BTreeMap;
use watched::Watched;

/// Sizes and lending limits of an rManager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RManagerConfig {
    pub blocks_total: u32,
    pub block_tokens: u32,
    pub shape: KvShape,
    /// Maximum of lent blocks, for all debtors together (v1 §4.3: a hyper-parameter).
    pub lend_blocks_max: u32,
    /// Free blocks kept from lending.
    pub lend_reserve_blocks: u32,
    /// Time to live of a lease without renewal, in milliseconds.
    pub lease_ttl_ms: u64,
    /// Random number of this process: epochs and lease ids start from it, so that those of an earlier process are
    /// unknown here.
    pub incarnation: u64,
    /// Fingerprint of its host, as [`lagoon_protocol::Register::host`].
    pub host: u64,
}

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("block_tokens is {0}: expected 1 to {max}", max = limits::BLOCK_TOKENS_MAX)]
    BlockTokens(u32),
    #[error("{blocks} blocks of {block_tokens} tokens exceed 32-bit slots")]
    TooManySlots { blocks: u32, block_tokens: u32 },
    #[error("{0:?} is no space for the blocks of this instance")]
    Space(KvSpace),
    #[error("the KV shape {0:?} holds nothing")]
    EmptyShape(KvShape),
    #[error("lease_ttl_ms is {0}: expected at least {min}", min = limits::LEASE_RENEW_MS * 3)]
    LeaseTtl(u64),
}

/// The manager of one instance's rBlocks. See the module for invariants.
#[derive(Debug)]
pub struct RManager {
    config: RManagerConfig,
    /// The block pool; owners of blocks call it directly.
    pub pool: BlockPool,
    /// Leases to others. Methods that free or allocate blocks take the pool.
    pub creditor: Watched<Creditor>,
    /// Leases from others, and negotiations for them.
    pub debtor: Watched<Debtor>,
    /// The next timer, in milliseconds, as long as neither half is touched.
    wake_ms: u64,
    /// Last known incarnation of each peer.
    peers: BTreeMap<InstanceId, u64>,
    /// Peers declared dead: the dead incarnation, and until when it is lent nothing.
    fenced_peers: BTreeMap<InstanceId, (u64, u64)>,
    /// This instance was declared dead and is not registered again yet.
    is_fenced: bool,
    is_draining: bool,
    heartbeats: u64,
}

impl RManager {
    /// A manager of free blocks.
    pub fn new(config: RManagerConfig) -> Result<Self, ConfigError> {
        let RManagerConfig { blocks_total, block_tokens, shape, .. } = config;
        if block_tokens == 0 || block_tokens > limits::BLOCK_TOKENS_MAX {
            return Err(ConfigError::BlockTokens(block_tokens));
        }
        // u32::MAX itself stands for "no slot" in the device contract.
        if blocks_total.checked_mul(block_tokens).is_none_or(|slots| slots == u32::MAX) {
            return Err(ConfigError::TooManySlots { blocks: blocks_total, block_tokens });
        }
        if shape.token_bytes() == 0 {
            return Err(ConfigError::EmptyShape(shape));
        }
        if config.lease_ttl_ms < limits::LEASE_RENEW_MS * 3 {
            return Err(ConfigError::LeaseTtl(config.lease_ttl_ms));
        }
        Ok(Self {
            pool: BlockPool::new(blocks_total),
            creditor: Watched::new(Creditor::new(&config)),
            debtor: Watched::new(Debtor::new(blocks_total, config.host)),
            wake_ms: 0,
            peers: BTreeMap::new(),
            fenced_peers: BTreeMap::new(),
            is_fenced: false,
            is_draining: false,
            heartbeats: 0,
            config,
        })
    }

    /// The device did not store what a debtor wrote: nothing that is here is a prefix-cache hit any more, and lent blocks become none.
    pub fn distrust_lent(&mut self) {
        self.creditor.distrust(&mut self.pool);
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &RManagerConfig {
        &self.config
    }

    /// Free blocks, for own sequences.
    #[must_use]
    pub fn available(&self) -> u32 {
        self.pool.counts().free
    }

    /// Blocks that would be lent now.
    #[must_use]
    pub fn lendable(&self) -> u32 {
        if self.is_draining || self.is_fenced { 0 } else { self.creditor.lendable(&self.pool) }
    }

    /// Sets the id from the gManager. Borrow queries wait for it.
    pub fn set_instance(&mut self, instance: InstanceId) {
        self.is_fenced = false;
        self.debtor.set_instance(instance);
    }

    /// Numbers blocks by virtual addresses. Call before the first allocation.
    ///
    /// # Errors
    /// [`ConfigError`] if the space is not that of this instance's blocks, or its slots cannot be numbered.
    pub fn address(&mut self, space: KvSpace) -> Result<(), ConfigError> {
        let RManagerConfig { blocks_total: blocks, block_tokens, .. } = self.config;
        if (space.blocks, space.block_tokens) != (blocks, block_tokens) || space.addresses().is_none() {
            return Err(ConfigError::Space(space));
        }
        assert_eq!(self.available(), blocks, "addresses are chosen before they are given out");
        self.pool = BlockPool::over(space);
        Ok(())
    }

    /// Handles a peer's Hello; call it before the first message on a connection. If the peer's process was replaced,
    /// its leases here are freed, and leases from it are lost.
    pub fn on_peer_hello(&mut self, peer: InstanceId, incarnation: u64, now_ms: u64) -> Vec<LeaseEnded> {
        if self.peers.len() >= 2 * limits::INSTANCES_MAX {
            let (creditor, debtor) = (&self.creditor, &self.debtor);
            self.peers.retain(|p, _| creditor.lends_to(*p) || debtor.held.has_from(*p));
            self.fenced_peers.retain(|p, _| self.peers.contains_key(p));
        }
        if self.fenced_peers.get(&peer).is_some_and(|(fenced, _)| *fenced != incarnation) {
            self.fenced_peers.remove(&peer);
        }
        match self.peers.insert(peer, incarnation) {
            Some(old) if old != incarnation => {
                self.debtor.on_peer_restarted(peer, now_ms);
                self.creditor.free_debtor(peer, &mut self.pool)
            }
            _ => Vec::new(),
        }
    }

    /// Handles a lease message of a peer; returns the reply to it, if any. Other messages are ignored.
    pub fn on_peer_control(&mut self, from: InstanceId, body: ControlBody, now_ms: u64) -> Option<ControlBody> {
        match body {
            ControlBody::LeaseRequest(request) => Some(match self.on_lease_request(from, &request, now_ms) {
                Ok(grant) => ControlBody::LeaseGrant(grant),
                Err(refuse) => ControlBody::LeaseRefuse(refuse),
            }),
            ControlBody::LeaseRelease(m) => {
                Some(ControlBody::LeaseReleased(self.creditor.on_release(from, &m, &mut self.pool)))
            }
            ControlBody::LeaseHashes(m) => {
                // Block hashes change no timer.
                self.creditor.unnoted().on_hashes(from, &m, &mut self.pool);
                None
            }
            ControlBody::LeaseRenew(m) => Some(ControlBody::LeaseRenewed(self.creditor.on_renew(from, &m, now_ms))),
            ControlBody::LeaseGrant(m) => {
                self.debtor.on_grant(from, &m, now_ms);
                None
            }
            ControlBody::LeaseRefuse(m) => {
                self.debtor.on_refuse(from, &m, now_ms);
                None
            }
            ControlBody::LeaseReleased(m) => {
                self.debtor.held.on_released(from, &m);
                None
            }
            ControlBody::LeaseRenewed(m) => {
                self.debtor.on_renewed(from, &m);
                None
            }
            ControlBody::LeaseSealed(m) => {
                self.debtor.held.on_sealed(from, &m);
                None
            }
            ControlBody::LeaseRevoked(m) => {
                self.debtor.on_revoked(from, &m, now_ms);
                None
            }
            _ => None,
        }
    }

    /// Runs the timers: deadlines, renewals, repetitions. Frees leases that were not renewed, and returns them.
    pub fn tick(&mut self, now_ms: u64) -> Vec<LeaseEnded> {
        if now_ms < self.wake_ms && !self.debtor.touched() && !self.creditor.touched() {
            return Vec::new();
        }
        self.debtor.tick(now_ms);
        let ended = self.creditor.expire(now_ms, &mut self.pool);
        self.wake_ms = self.next_wake_ms().unwrap_or(u64::MAX);
        self.debtor.forget();
        self.creditor.forget();
        ended
    }

    /// When [`RManager::tick`] has something to do next, if nothing else happens.
    #[must_use]
    pub fn next_wake_ms(&self) -> Option<u64> {
        self.debtor.next_wake_ms().into_iter().chain(self.creditor.next_wake_ms()).min()
    }

    /// The next message or report for the instance; `None` when there are no more.
    pub fn poll(&mut self) -> Option<Output> {
        self.debtor.unnoted().poll()
    }

    /// The next heartbeat, without its rows and the batch's load: see [`PlacementReport::fill`].
    pub fn heartbeat(&mut self, requests_running: u32, requests_waiting: u32, links: Vec<Link>) -> Heartbeat {
        self.heartbeats += 1;
        Heartbeat {
            instance: self.debtor.instance().map_or(0, |i| i.0),
            incarnation: self.config.incarnation,
            seq: self.heartbeats,
            blocks_total: self.config.blocks_total,
            blocks_free: self.available(),
            blocks_lendable: self.lendable(),
            lent: self.creditor.debts(),
            blocks_borrowed: self.debtor.held.blocks(),
            requests_running,
            requests_waiting,
            links,
            ..Heartbeat::default()
        }
    }

    /// Extends a reservation: KV for it was sent.
    pub fn note_written(&mut self, creditor: InstanceId, lease: LeaseId, now_ms: u64) {
        // The expiry only moves later, never earlier.
        self.debtor.unnoted().held.note_written(creditor, lease, now_ms);
    }

    /// Keeps blocks from lending that own sequences will need soon.
    pub fn set_growth_reserve(&mut self, blocks: u32) {
        self.creditor.unnoted().growth_reserve = blocks;
    }

    /// Sets since when an own request waits for memory that this instance has, and the pool's oldest waiting request. A
    /// creditor refuses a loan that admits a younger request than either.
    pub fn set_waiting(&mut self, own_since_ms: Option<u64>, oldest_waiting: Option<(InstanceId, u64)>) {
        let creditor = self.creditor.unnoted();
        (creditor.waiting_since_ms, creditor.oldest_waiting) = (own_since_ms, oldest_waiting);
    }

    /// Limits lending from now on, below the configured limits, with a reason. Lent blocks stay lent.
    pub fn set_lend_bound(&mut self, bound: Option<(u32, String)>) {
        self.creditor.unnoted().bound = bound;
    }

    /// Handles a debtor's lease request. First come, first served; a repeated request gets the same grant again.
    pub fn on_lease_request(
        &mut self,
        from: InstanceId,
        request: &LeaseRequest,
        now_ms: u64,
    ) -> Result<LeaseGrant, LeaseRefuse> {
        if self.debtor.instance() == Some(from) {
            let reason = "an instance does not lend to itself".to_owned();
            return Err(LeaseRefuse { request: request.request, blocks_lendable: 0, reason });
        }
        if let Some(refuse) = self.refuses(from, request.request, now_ms) {
            return Err(refuse);
        }
        self.creditor.on_request(from, request, now_ms, &mut self.pool)
    }

    /// Commits a queued write that [`Creditor::begin_write`] allowed: `bytes` is all its KV in the canonical layout.
    ///
    /// # Panics
    /// If the lease has ended or `bytes` does not continue it: [`Creditor::begin_write`] must precede in the same turn.
    pub fn commit_write(&mut self, lease: LeaseId, layer: u32, bytes: &[u8], now_ms: u64) {
        // A reservation's expiry only moves later, never earlier.
        self.creditor.unnoted().commit_write(lease, layer, bytes, now_ms, &mut self.pool);
    }

    /// Ends recalls whose deadline has passed, and returns them.
    pub fn unmet_recalls(&mut self, now_ms: u64) -> Vec<Unmet> {
        if !self.creditor.has_overdue_recalls(now_ms) {
            return Vec::new();
        }
        self.creditor.recalls().overdue(now_ms)
    }
}
