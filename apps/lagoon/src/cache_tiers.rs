//! Tiers of the prefix cache beside an instance's KV memory, from their flags.

use crate::args::EngineArgs;
use crate::cache_dir::CacheDir;
use crate::cache_file::BlockShape;
use anyhow::ensure;
use lagoon_instance::{CacheTierConfig, DiskEvent, Instance};

/// The disk tier, and what it found.
pub(crate) type Opened = (CacheDir, DiskEvent);

/// Gives an instance the tiers that the flags ask for. Returns the disk tier.
///
/// # Errors
/// For flags that do not go together, and a directory that cannot be had.
pub(crate) fn start(args: &EngineArgs, is_kv_node: bool, instance: &mut Instance) -> anyhow::Result<Option<Opened>> {
    if args.host_cache_tokens == 0 && args.cache_dir.is_none() {
        return Ok(None);
    }
    ensure!(
        args.prefix_cache && !is_kv_node,
        "--host-cache-tokens and --cache-dir keep what the prefix cache evicts, and there is none here\n\
         hint: {}",
        if is_kv_node { "a kv node computes no prompts: give the flags to instances" } else { "--prefix-cache=on" }
    );
    let config = instance.rmanager().config();
    let (shape, block_tokens) = (config.shape, config.block_tokens);
    let host_bytes = u64::from(args.host_cache_tokens).saturating_mul(shape.token_bytes() as u64);
    let layer_token_bytes = u32::try_from(shape.layer_token_bytes()).unwrap_or(u32::MAX);
    let block = BlockShape { layers: shape.layers, block_tokens, layer_token_bytes };
    // Copies of blocks that are still in KV memory fill half of the larger tier.
    let two = 2 * u64::from(block_tokens).saturating_mul(shape.token_bytes() as u64);
    let disk_bytes = args.cache_dir.as_ref().map_or(0, |_| args.cache_dir_bytes);
    ensure!(
        host_bytes.max(disk_bytes) >= two,
        "the cache beside the KV memory holds less than two rBlocks of {block_tokens} tokens\n\
         hint: at least --host-cache-tokens={} or --cache-dir-bytes={two}",
        2 * block_tokens
    );
    let open = |dir| CacheDir::open(dir, args.cache_dir_bytes, block);
    let cache_dir = args.cache_dir.as_deref().map(open).transpose()?;
    let load_tokens_min = args.cache_load_tokens;
    instance.keep_copies(CacheTierConfig { host_bytes, disk_bytes, load_tokens_min });
    Ok(cache_dir)
}
