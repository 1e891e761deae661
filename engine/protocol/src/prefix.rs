//! Prefix cache of the pool: block hashes of lent rBlocks, what instances cache, where gateways sent prompts, and operators' orders.

use prost::Message;

/// Block hashes of lent rBlocks: the creditor caches them when their lease ends. A message that is lost costs their later
/// hits only.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LeaseHashes {
    #[prost(uint64, tag = "1")]
    pub lease: u64,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// First entry; the others follow it.
    #[prost(uint32, tag = "3")]
    pub first: u32,
    /// Number of rBlocks of the sequence before the first entry.
    #[prost(uint32, tag = "4")]
    pub depth: u32,
    /// Block hashes, 32 bytes each, at most `LEASE_HASHES_MAX`.
    #[prost(bytes = "vec", tag = "5")]
    pub hashes: Vec<u8>,
}

/// What an instance's prefix cache has: fingerprints of the smallest block hashes, a uniform sample of all. Soft state: the
/// instance verifies each use.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CacheSummary {
    /// Fingerprints (the first 8 bytes of a block hash), ascending, at most `CACHE_SUMMARY_HASHES`.
    #[prost(bytes = "vec", tag = "1")]
    pub fingerprints: Vec<u8>,
    /// Whether these are all: else the instance may also cache hashes above the last one.
    #[prost(bool, tag = "2")]
    pub complete: bool,
}

/// Run of a prompt's rBlocks that an instance may cache.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CachedRun {
    /// Its number.
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    /// As in `Register`.
    #[prost(string, tag = "2")]
    pub quic_addr: String,
    /// First rBlock of the prompt.
    #[prost(uint32, tag = "3")]
    pub first: u32,
    /// Number of rBlocks.
    #[prost(uint32, tag = "4")]
    pub blocks: u32,
    /// Number of rBlocks before the first one of which the summary does not tell.
    #[prost(uint32, tag = "5")]
    pub before: u32,
}

/// Counters of an instance's prefix cache: gauges of now, and sums since its process started.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CacheCounts {
    /// Cached rBlocks: free ones in KV memory, and copies in the host and disk tiers beside it.
    #[prost(uint32, tag = "1")]
    pub device_blocks: u32,
    #[prost(uint64, tag = "2")]
    pub host_blocks: u64,
    #[prost(uint64, tag = "3")]
    pub disk_blocks: u64,
    /// Cached rBlocks that debtors lease now: neither evicted nor dropped.
    #[prost(uint32, tag = "4")]
    pub leased_blocks: u32,
    /// Tokens looked up, and tokens found: on this instance, in its tiers too, or leased from others.
    #[prost(uint64, tag = "5")]
    pub looked_up_tokens: u64,
    #[prost(uint64, tag = "6")]
    pub hit_tokens: u64,
    /// Evictions of cached rBlocks from KV memory, and from the host and disk tiers.
    #[prost(uint64, tag = "7")]
    pub device_evicted_blocks: u64,
    #[prost(uint64, tag = "8")]
    pub host_evicted_blocks: u64,
    #[prost(uint64, tag = "9")]
    pub disk_evicted_blocks: u64,
    /// `CacheDrop::number` of the last order carried out; 0 if none.
    #[prost(uint64, tag = "10")]
    pub drop_done: u64,
    /// Tokens of an rBlock.
    #[prost(uint32, tag = "11")]
    pub block_tokens: u32,
    /// Tenants with most cached rBlocks, at most `CACHE_TENANTS_MAX`.
    #[prost(message, repeated, tag = "12")]
    pub tenants: Vec<CacheTenant>,
    /// Those of `hit_tokens` that were leased from other instances, loaded from the host tier, and loaded from disk.
    #[prost(uint64, tag = "13")]
    pub pool_hit_tokens: u64,
    #[prost(uint64, tag = "14")]
    pub host_hit_tokens: u64,
    #[prost(uint64, tag = "15")]
    pub disk_hit_tokens: u64,
    /// Estimated time that computing `hit_tokens` would have taken, less that of loads from tiers.
    #[prost(uint64, tag = "16")]
    pub saved_ms: u64,
}

/// Cached rBlocks of a tenant, which fingerprints name: of the name of its API key, and of its `cache_salt`; 0 for none.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct CacheTenant {
    #[prost(fixed32, tag = "1")]
    pub key: u32,
    #[prost(fixed32, tag = "2")]
    pub salt: u32,
    /// As in `CacheCounts`.
    #[prost(uint32, tag = "3")]
    pub device_blocks: u32,
    #[prost(uint64, tag = "4")]
    pub host_blocks: u64,
    #[prost(uint64, tag = "5")]
    pub disk_blocks: u64,
}

/// Tenants by the fingerprints of `CacheTenant`; absent: any.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct CacheTenants {
    #[prost(fixed32, optional, tag = "1")]
    pub key: Option<u32>,
    #[prost(fixed32, optional, tag = "2")]
    pub salt: Option<u32>,
}

/// Order of the gManager to an instance to empty its prefix cache: KV memory and the tiers beside it, except for what is in use.
/// Repeated until `CacheCounts::drop_done` is its number; carried out once.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct CacheDrop {
    /// Never 0; no gManager issues a number twice, and later ones are larger.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Only these tenants' rBlocks; absent: all.
    #[prost(message, optional, tag = "2")]
    pub of: Option<CacheTenants>,
}

/// Empties the prefix cache of one instance or all (`lagoon kv cache drop`).
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct AdminCacheDrop {
    /// 0: all live instances.
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    /// As in `CacheDrop`.
    #[prost(message, optional, tag = "2")]
    pub of: Option<CacheTenants>,
}

/// Instances that were ordered to empty their prefix caches.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CacheDropped {
    #[prost(uint32, repeated, tag = "1")]
    pub instances: Vec<u32>,
    /// `CacheDrop::number` of their orders.
    #[prost(uint64, tag = "2")]
    pub number: u64,
}

/// Prefix of a prompt that a gateway sent to an instance: soft state, for other gateways' dispatch.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PlacedPrefix {
    /// The instance's number.
    #[prost(uint32, tag = "1")]
    pub instance: u32,
    /// A gateway's hashes of the prompt's beginnings, 8 bytes each, the shortest first, at most `PREFIX_HASHES_MAX`.
    #[prost(bytes = "vec", tag = "2")]
    pub hashes: Vec<u8>,
    /// Tokens of prompt and answer that the instance is expected to compute.
    #[prost(uint64, tag = "3")]
    pub tokens: u64,
}

/// Prefixes that a gateway placed since its last query, at most `PLACED_HASHES_MAX` hashes, and what it knows of other gateways'.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefixesPlaced {
    /// Number of the gateway's process, drawn at random: what it placed itself is not sent to it.
    #[prost(fixed64, tag = "1")]
    pub gateway: u64,
    #[prost(message, repeated, tag = "2")]
    pub placed: Vec<PlacedPrefix>,
    /// `PrefixesKnown::last` of the last reply, and its `StatusReply::term`; 0 before the first.
    #[prost(uint64, tag = "3")]
    pub known: u64,
    #[prost(uint64, tag = "4")]
    pub term: u64,
}

/// Prefixes that other gateways placed, in their order, after those that the asking one knows; at most `PLACED_HASHES_MAX` hashes and the rest
/// with later replies.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrefixesKnown {
    #[prost(message, repeated, tag = "1")]
    pub placed: Vec<PlacedPrefix>,
    /// Number of the last one that was looked at.
    #[prost(uint64, tag = "2")]
    pub last: u64,
}
