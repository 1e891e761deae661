//! Sizes of an executor, fixed for its life.

use lagoon_types::{KvDType, KvSpace};

/// Sizes and placement of an executor's memory.
#[derive(Clone, Copy, Debug)]
pub struct ExecutorConfig {
    /// The KV store's rBlocks.
    pub kv: KvSpace,
    /// Element type of the KV.
    pub kv_dtype: KvDType,
    /// Rows of the largest step.
    pub step_rows: usize,
    /// Rows that one step may sample: one of each sequence, and drafts.
    pub sampled_rows: usize,
    /// Rings of windowed KV, one a running sequence, if the model keeps it apart; 0 on kv nodes.
    pub rings: u32,
    /// Largest piece of remote KV fetched at once, in tokens; 0 if nothing is ever fetched.
    pub fetch_tokens: usize,
    /// Peer access: the KV store is device memory that other processes on the host map and attend to. Such a store
    /// has no address rows and is not shared in other ways.
    pub lend: bool,
    /// Tokens of an rBlock, if transports read and fill the KV store by whole rBlocks (KV transfer).
    pub share_blocks: Option<u32>,
    /// rBlocks of the staging buffer, for a store that transports cannot read and fill directly; 0 for none.
    pub stage_blocks: u32,
    /// The staging buffer is device memory that other processes can map; else host memory.
    pub stage_on_device: bool,
}

impl ExecutorConfig {
    /// An executor that only computes: no rings, nothing remote, nothing shared, staged or lent. It samples one row of a step.
    #[must_use]
    pub const fn alone(kv: KvSpace, kv_dtype: KvDType, step_rows: usize) -> Self {
        Self {
            kv,
            kv_dtype,
            step_rows,
            sampled_rows: 1,
            rings: 0,
            fetch_tokens: 0,
            share_blocks: None,
            stage_blocks: 0,
            stage_on_device: false,
            lend: false,
        }
    }
}
