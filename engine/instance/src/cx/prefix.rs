//! The prefix cache's root hash and counters; `batch/prefix.rs` finds and shares the blocks.

use crate::config::InstanceConfig;
use lagoon_cluster::RManager;
use lagoon_kv::{BlockHash, IdentityRoot};
use lagoon_runner::ShareId;
use lagoon_types::CachedTokens;
use serde::Serialize;

/// Counters of the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefixStatus {
    /// Tokens of sequences whose prefix was looked up.
    pub looked_up_tokens: u64,
    /// Tokens among them whose KV was cached and not recomputed.
    pub hit_tokens: u64,
    /// Those by where they were found.
    pub found: CachedTokens,
    /// Estimated time that computing them would have taken, less that of loads from tiers.
    pub saved_ms: u64,
    /// Cached rBlocks that this instance leased to others, for their hits.
    pub lent_blocks: u64,
    /// rBlocks of these hits that were in use and became shared.
    pub shared_blocks: u64,
    /// rBlocks that sharing saves now.
    pub saved_blocks: u32,
    /// Free rBlocks that keep their KV (cached blocks).
    pub blocks: u32,
    /// Cached rBlocks that were evicted since the start.
    pub evicted_blocks: u64,
}

/// The prefix cache's root hash and counters.
#[derive(Debug)]
pub(crate) struct PrefixCounts {
    /// Root of the hash chain; `None` where the prefix cache is off.
    root: Option<BlockHash>,
    looked_up_tokens: u64,
    found: CachedTokens,
    saved_us: f64,
    shared_blocks: u64,
    next_share: u64,
    /// Mappings commanded and not made yet, also of sequences that are gone.
    in_flight: u64,
}

impl PrefixCounts {
    /// Whether the device has mappings to make.
    pub(crate) fn maps(&self) -> bool {
        self.in_flight > 0
    }

    pub(crate) fn new(config: &InstanceConfig) -> Self {
        // The model's hash covers its rotary embedding, its window and its biases.
        let root = IdentityRoot {
            model: config.model_hash,
            adapter: b"",
            dtype: config.kv.dtype,
            rope: b"",
            block_tokens: config.block_tokens,
        };
        let root = config.prefix_cache.then(|| BlockHash::root(&root));
        Self {
            root,
            looked_up_tokens: 0,
            found: CachedTokens::default(),
            saved_us: 0.0,
            shared_blocks: 0,
            next_share: 0,
            in_flight: 0,
        }
    }

    /// Root of the hash chain; `None` where the prefix cache is off.
    pub(crate) fn root(&self) -> Option<BlockHash> {
        self.root
    }

    /// Counts tokens whose prefix is looked up.
    pub(crate) fn note_lookup(&mut self, tokens: u32) {
        self.looked_up_tokens += u64::from(tokens);
    }

    /// Counts tokens whose KV was cached, and the time that this is estimated to save.
    pub(crate) fn note_found(&mut self, found: CachedTokens, saved_us: f64) {
        self.found += found;
        self.saved_us += saved_us.max(0.0);
    }

    /// Counts rBlocks in use that became shared.
    pub(crate) fn note_shared(&mut self, blocks: u32) {
        self.shared_blocks += u64::from(blocks);
    }

    /// Issues the number of a mapping that the device is to make.
    pub(crate) fn begin_mapping(&mut self) -> ShareId {
        self.next_share += 1;
        self.in_flight += 1;
        ShareId(self.next_share)
    }

    /// The device has made a mapping, or failed to.
    pub(crate) fn end_mapping(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// The counters, with those of the rManager.
    pub(crate) fn status(&self, rm: &RManager) -> PrefixStatus {
        let pool = &rm.pool;
        let Self { looked_up_tokens, found, shared_blocks, .. } = *self;
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative; a float casts to the bounds"
        )]
        let saved_ms = (self.saved_us / 1e3) as u64;
        PrefixStatus {
            looked_up_tokens,
            hit_tokens: found.total(),
            found,
            saved_ms,
            lent_blocks: rm.creditor.cached_lent(),
            shared_blocks,
            saved_blocks: pool.counts().shared,
            blocks: pool.cached(),
            evicted_blocks: pool.evictions(),
        }
    }
}
