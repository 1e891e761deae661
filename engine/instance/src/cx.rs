//! What every machine may touch besides itself: the clock, the configuration, the peers, the effects and the memory.
//!
//! Memory answers synchronously: an allocation is a call, so that what a machine gets is its own when the call returns.

use crate::batch::prefix::PrefixCounts;
use crate::config::InstanceConfig;
use crate::event::{Effect, PeerKey};
use crate::membership::peers::Peers;
use lagoon_backend::KvCounters;
use lagoon_cluster::{ConfigError, RManager, RManagerConfig};
use lagoon_protocol::ControlBody;
use lagoon_runner::{Command, RemoteTag};
use lagoon_types::limits::{LEASE_TTL_MS, STEP_DEADLINE_MS};
use lagoon_types::{InstanceId, PhysBlock};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Cx {
    /// The time of the event that is handled, in milliseconds. It never goes back.
    pub(crate) now_ms: u64,
    pub(crate) config: InstanceConfig,
    /// Time that a step may go without progress, in milliseconds.
    pub(crate) step_deadline_ms: u64,
    pub(crate) peers: Peers,
    /// Effects of the event that is handled, in order.
    pub(crate) effects: Vec<Effect>,
    pub(crate) memory: Memory,
    pub(crate) tags: Tags,
}

/// rBlocks: the pool, leases on both sides, the prefix cache.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The block pool and the leases of both sides.
    pub(crate) rm: RManager,
    /// The prefix cache's counters.
    pub(crate) prefix: PrefixCounts,
    /// The device's last report of mapped memory.
    pub(crate) counters: Option<KvCounters>,
}

/// Who asked the device for work beside steps: each owner's tags have a bit of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TagOwner {
    /// A remote attention request or a read of a peer.
    Request,
    /// A seal tag of a lent rBlock.
    Seal,
    /// A block movement.
    Move,
}

impl TagOwner {
    const fn bits(self) -> u64 {
        match self {
            Self::Request => 0,
            Self::Seal => 1 << 62,
            Self::Move => 1 << 63,
        }
    }

    /// Who took this tag.
    pub(crate) fn of(tag: RemoteTag) -> Self {
        let bits = tag.0 & (Self::Seal.bits() | Self::Move.bits());
        let owners = [Self::Request, Self::Seal, Self::Move];
        owners.into_iter().find(|owner| owner.bits() == bits).expect("a tag has one owner")
    }
}

/// Tags of work on the device beside steps.
#[derive(Debug, Default)]
pub(crate) struct Tags {
    /// Tags that were taken, by owner.
    taken: [u64; 3],
}

impl Tags {
    /// A new tag of this owner.
    pub(crate) fn take(&mut self, owner: TagOwner) -> RemoteTag {
        let taken = &mut self.taken[owner as usize];
        *taken += 1;
        RemoteTag(owner.bits() | *taken)
    }
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
        })?;
        let memory = Memory { rm, prefix: PrefixCounts::new(&config), counters: None };
        let (peers, tags) = (Peers::default(), Tags::default());
        Ok(Self { now_ms: 0, config, step_deadline_ms: STEP_DEADLINE_MS, peers, effects: Vec::new(), memory, tags })
    }

    /// Sends a control message to an instance that is connected; drops it otherwise.
    pub(crate) fn send_if_connected(&mut self, to: InstanceId, body: ControlBody) {
        if let Some(peer) = self.peers.key(to) {
            self.send(peer, body);
        }
    }

    /// Sends a control message to a peer.
    pub(crate) fn send(&mut self, peer: PeerKey, body: ControlBody) {
        self.effects.push(Effect::Control { peer, body });
    }

    /// Reports freed addresses to the device. Called before every command that may use them anew.
    pub(crate) fn release_freed(&mut self) {
        let freed = self.memory.rm.take_freed();
        self.release_blocks(freed);
    }

    /// Has the device take memory from behind the addresses of these blocks.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_says_who_took_it() {
        let mut tags = Tags::default();
        for owner in [TagOwner::Request, TagOwner::Seal, TagOwner::Move, TagOwner::Request] {
            let (first, second) = (tags.take(owner), tags.take(owner));
            assert_eq!((TagOwner::of(first), TagOwner::of(second)), (owner, owner));
            assert_ne!(first, second);
        }
    }
}
