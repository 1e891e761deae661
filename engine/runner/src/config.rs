//! Sizes of an executor.

use lagoon_types::{DType, KvSpace};

/// Sizes that are fixed for an executor's life.
#[derive(Clone, Copy, Debug)]
pub struct ExecutorConfig {
    /// The KV store's rBlocks.
    pub kv: KvSpace,
    /// Element type of the KV.
    pub kv_dtype: DType,
    /// Rows of the largest step.
    pub step_rows: usize,
    /// Sequences whose logits one step may ask for.
    pub step_seqs: usize,
    /// Largest piece of remote KV that is fetched at once, in tokens; 0 where nothing is ever fetched.
    pub fetch_tokens: usize,
    /// The KV store is to lie in memory of the device that other processes on the host map, to attend to it there. It has no rows
    /// then, and is not shared in other ways.
    pub lend: bool,
    /// Tokens of an rBlock, if the KV store is to lie in memory that others read and fill by whole rBlocks (KV transfer).
    pub share_blocks: Option<u32>,
    /// rBlocks of the memory beside the store that others read and fill where they cannot read and fill the store itself;
    /// 0 for none.
    pub stage_blocks: u32,
    /// That memory is to be the device's own, where other processes can map it; else the host's.
    pub stage_on_device: bool,
}
