//! Prefix cache of the pool: block hashes of lent rBlocks, and what instances cache.

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
