//! Shared state that every machine may touch besides its own: clock, configuration, peers, effects and memory.
//!
//! It depends on no machine. Memory answers synchronously: an allocation is a call, and the blocks belong to the machine when the call returns.

pub(crate) mod drops;
pub(crate) mod peers;
pub(crate) mod prefix;
pub(crate) mod roles;
pub(crate) mod saves;
pub(crate) mod standing;
pub(crate) mod tags;
pub(crate) mod tiers;

use crate::config::InstanceConfig;
use crate::event::{Effect, PeerKey};
use crate::outcome::{Outcome, Outcomes};
use drops::Drops;
use lagoon_backend::KvCounters;
use lagoon_cluster::gmanager::model_shape;
use lagoon_cluster::perf::ModelShape;
use lagoon_cluster::{ConfigError, RManager, RManagerConfig};
use lagoon_protocol::ControlBody;
use lagoon_runner::Command;
use lagoon_types::limits::{LEASE_TTL_MS, STEP_DEADLINE_MS};
use lagoon_types::{InstanceId, PhysBlock};
use peers::Peers;
use prefix::PrefixCounts;
use roles::Roles;
use standing::Standing;
use tags::Tags;
use tiers::Tiers;

/// State shared by all machines. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Cx {
    /// Time of the event in progress, in milliseconds. It never goes back.
    pub(crate) now_ms: u64,
    pub(crate) config: InstanceConfig,
    /// Sizes of the model for predictions.
    pub(crate) model: ModelShape,
    /// Longest time of a step without progress, in milliseconds.
    pub(crate) step_deadline_ms: u64,
    pub(crate) peers: Peers,
    pub(crate) standing: Standing,
    /// Outcomes of the machine at work, in order: the router hands them on afterwards.
    pub(crate) outcomes: Outcomes,
    /// Effects of the event in progress, in order.
    pub(crate) effects: Vec<Effect>,
    pub(crate) memory: Memory,
    pub(crate) tags: Tags,
    pub(crate) writes: Writes,
}

/// Bytes of KV of peers and moves that are written to the device beside steps.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    waiting: usize,
    written: u64,
}

impl Writes {
    /// Counts KV queued for the device.
    pub(crate) fn queue(&mut self, bytes: usize) {
        self.waiting += bytes;
    }

    /// Counts queued KV that the device has written.
    pub(crate) fn done(&mut self, bytes: usize) {
        self.waiting -= bytes;
        self.written += bytes as u64;
    }

    /// Bytes that wait for the device.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// A mark behind all writes queued now, for [`Writes::has_written`].
    pub(crate) fn queued(&self) -> u64 {
        self.written + self.waiting as u64
    }

    /// Whether all writes before the mark `queued` have left the queue.
    pub(crate) fn has_written(&self, queued: u64) -> bool {
        self.written >= queued
    }
}

/// rBlocks: the pool, leases on both sides, the prefix cache.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The block pool and the leases of both sides.
    pub(crate) rm: RManager,
    /// The prefix cache's root hash and counters.
    pub(crate) prefix: PrefixCounts,
    /// Its tiers beside the KV memory.
    pub(crate) tiers: Tiers,
    /// Orders to empty it.
    pub(crate) drops: Drops,
    /// The device's last counters of mapped memory.
    pub(crate) counters: Option<KvCounters>,
}

impl Cx {
    /// # Errors
    /// [`ConfigError`] for sizes that cannot work.
    pub(crate) fn new(config: InstanceConfig) -> Result<Self, ConfigError> {
        let rm = RManager::new(RManagerConfig {
            blocks_total: config.blocks_total,
            block_tokens: config.block_tokens,
            lend_blocks_max: config.lend_blocks_max,
            lend_reserve_blocks: config.lend_reserve_blocks,
            shape: config.kv,
            lease_ttl_ms: LEASE_TTL_MS,
            incarnation: config.incarnation,
            // Of an instance that relays nothing, no candidate is on a host that it knows.
            host: if config.can_relay() { config.host_fingerprint() } else { 0 },
        })?;
        let memory = Memory {
            rm,
            prefix: PrefixCounts::new(&config),
            tiers: Tiers::default(),
            drops: Drops::default(),
            counters: None,
        };
        Ok(Self {
            now_ms: 0,
            standing: Standing::new(config.incarnation, Roles::new(config.role), config.blocks_total),
            model: model_shape(&config.pool_shape()),
            config,
            step_deadline_ms: STEP_DEADLINE_MS,
            peers: Peers::default(),
            outcomes: Vec::new(),
            effects: Vec::new(),
            memory,
            tags: Tags::default(),
            writes: Writes::default(),
        })
    }

    /// Takes the outcomes of the machine at work: the end of every `handle`.
    pub(crate) fn take_outcomes(&mut self) -> Outcomes {
        std::mem::take(&mut self.outcomes)
    }

    /// Adds an outcome for other machines; the router hands it on when this machine is done.
    pub(crate) fn emit(&mut self, outcome: Outcome) {
        self.outcomes.push(outcome);
    }

    /// rBlocks of the whole pool, as far as known; at least this instance's.
    pub(crate) fn pool_blocks(&self) -> u64 {
        self.standing.pool_blocks().max(u64::from(self.config.blocks_total))
    }

    /// Longest sequence that the pool holds when free, in tokens.
    pub(crate) fn pool_tokens(&self) -> u64 {
        self.pool_blocks().saturating_mul(self.config.block_tokens.into())
    }

    /// Whether prefill workers compute the prompts of this instance's requests.
    pub(crate) fn sends_away(&self) -> bool {
        self.standing.roles.sends_away() && self.config.transfer.is_some() && self.config.role.runs()
    }

    /// Size of the staging buffer, in blocks; 0 if transports read and write the store itself.
    pub(crate) fn stage_blocks(&self) -> u32 {
        self.config.transfer.as_ref().map_or(0, |transfer| transfer.stage_blocks)
    }

    /// Whether transports write into the store by themselves.
    pub(crate) fn reads_directly(&self) -> bool {
        self.standing.roles.reads() && self.stage_blocks() == 0
    }

    /// Sends a control message to a connected instance; drops it if not connected.
    pub(crate) fn send_if_connected(&mut self, to: InstanceId, body: ControlBody) {
        if let Some(peer) = self.peers.key(to) {
            self.send(peer, body);
        }
    }

    /// Sends a control message now, or dials and sends it after the peer's Hello. Messages to a peer that does not connect are
    /// dropped; requests have deadlines for their replies.
    pub(crate) fn send_or_dial(&mut self, to: InstanceId, quic_addr: &str, body: ControlBody) {
        if let Some(peer) = self.peers.key(to) {
            self.send(peer, body);
        } else {
            self.dial(to, quic_addr, Some(body));
        }
    }

    /// Dials an instance that is not known, unless it is being dialled, and keeps a message for it.
    pub(crate) fn dial(&mut self, to: InstanceId, quic_addr: &str, body: Option<ControlBody>) {
        self.dial_as(true, to, quic_addr, body);
    }

    /// As [`Cx::dial`]; `is_advised`: the address is the gManager's word, or a peer's, which proves no instance's number.
    pub(crate) fn dial_as(&mut self, is_advised: bool, to: InstanceId, quic_addr: &str, body: Option<ControlBody>) {
        if self.peers.send_when_known(to, body, self.now_ms) {
            self.effects.push(Effect::Connect { instance: to, quic_addr: quic_addr.to_owned(), is_advised });
        }
    }

    /// Sends a control message to a peer.
    pub(crate) fn send(&mut self, peer: PeerKey, body: ControlBody) {
        self.effects.push(Effect::Control { peer, body });
    }

    /// Reports freed addresses to the device. Called before every command that may reuse them.
    pub(crate) fn release_freed(&mut self) {
        let freed = self.memory.rm.pool.take_freed();
        self.release_blocks(freed);
    }

    /// Has the device unmap the memory of these blocks.
    pub(crate) fn release_blocks(&mut self, mut freed: Vec<PhysBlock>) {
        if freed.is_empty() {
            return;
        }
        freed.sort_unstable();
        let tokens = self.config.block_tokens;
        let runs = freed.chunk_by(|a, b| a.0 + 1 == b.0);
        let slots = runs.map(|run| run[0].0 * tokens..(run[run.len() - 1].0 + 1) * tokens).collect();
        self.effects.push(Effect::Runner(Command::Release { slots }));
    }
}
