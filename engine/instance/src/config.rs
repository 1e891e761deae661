//! What an instance is configured with; nothing of it changes while it runs.

use crate::batch::scheduler::SchedulerConfig;
use crate::step::cost::RemotePolicy;
use lagoon_protocol::{Calibration, LentMemory, MemoryTier, PoolShape, Role};
use lagoon_transfer::{Axis, Dim, Layout, LayoutError, LayoutParts, Part, Plane};
use lagoon_types::{Alibi, AttentionGeometry, DType, KvShape, ModelHash};

/// How others read this instance's KV, and how it reads theirs.
#[derive(Clone, Debug)]
pub struct TransferConfig {
    /// Where its KV lies.
    pub layout: Layout,
    /// As `TransferConnect::host`.
    pub host: String,
    /// A decode worker allocates memory before a prompt is computed and reads its KV meanwhile, rather than afterwards.
    pub push: bool,
    /// The layout is that of so many rBlocks of memory beside the KV store, through which what others read and what is read
    /// passes: the store itself is the device's alone. 0 where it is not.
    pub stage_blocks: u32,
}

impl TransferConfig {
    /// Of a store that the device has alone, with memory for `stage_blocks` rBlocks beside it.
    ///
    /// # Errors
    /// For sizes that no layout has.
    pub fn staged(
        model: ModelHash,
        kv: KvShape,
        (stage_blocks, block_tokens): (u32, u32),
        host: String,
    ) -> Result<Self, LayoutError> {
        Ok(Self { stage_blocks, ..Self::new(model, kv, (stage_blocks, block_tokens), host)? })
    }

    /// Of a store with one region a layer, each `[slot][k | v][kv_heads][head_dim]`: blocks of `block_tokens` slots.
    ///
    /// # Errors
    /// For sizes that no layout has.
    pub fn new(
        model: ModelHash,
        kv: KvShape,
        (blocks, block_tokens): (u32, u32),
        host: String,
    ) -> Result<Self, LayoutError> {
        let (heads, dim) = (u64::from(kv.kv_heads), u64::from(kv.head_dim));
        let token = 2 * heads * dim;
        let axis = |dim, size, stride| Axis { dim, size, stride };
        let axes = vec![
            axis(Dim::Block, blocks, u64::from(block_tokens) * token),
            axis(Dim::Token, block_tokens, token),
            axis(Dim::Kv, 2, heads * dim),
            axis(Dim::Head, kv.kv_heads, dim),
            axis(Dim::Elem, kv.head_dim, 1),
        ];
        let plane = |layer| Plane {
            region: layer,
            base: 0,
            axes: axes.clone(),
            dtype: kv.dtype,
            first_layer: layer,
            part: Part::Both,
        };
        let region_bytes = u64::from(blocks) * u64::from(block_tokens) * kv.layer_token_bytes() as u64;
        let layout = Layout::new(LayoutParts {
            model,
            block_tokens,
            blocks,
            layers: 0..kv.layers,
            heads: 0..kv.kv_heads,
            head_dim: kv.head_dim,
            region_bytes: vec![region_bytes; kv.layers as usize],
            planes: (0..kv.layers).map(plane).collect(),
        })?;
        Ok(Self { layout, host, push: false, stage_blocks: 0 })
    }
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct InstanceConfig {
    /// For people.
    pub name: String,
    /// `ip:port` as peers reach this instance.
    pub quic_addr: String,
    /// `ip:port` of its HTTP server; empty if it has none.
    pub http_addr: String,
    /// `cpu`, `wgpu` or `cuda`.
    pub backend: String,
    /// The role that it begins with.
    pub role: Role,
    /// Where its rBlocks are.
    pub tier: MemoryTier,
    /// What was measured of this instance at start, for the planner.
    pub calibration: Option<Calibration>,
    /// Random per process.
    pub incarnation: u64,
    pub model_hash: ModelHash,
    pub geometry: AttentionGeometry,
    pub kv: KvShape,
    /// Sliding window, in tokens.
    pub window: Option<u32>,
    /// Biases of attention by distance.
    pub alibi: Option<Alibi>,
    /// Longest sequence that the model takes, in tokens.
    pub max_positions: u32,
    pub vocab: u32,
    /// Tokens in an rBlock; the same in the whole pool.
    pub block_tokens: u32,
    /// Physical rBlocks of this instance.
    pub blocks_total: u32,
    /// Cap on what it lends, in rBlocks.
    pub lend_blocks_max: u32,
    /// rBlocks that it never lends: growth goes before lending.
    pub lend_reserve_blocks: u32,
    pub sched: SchedulerConfig,
    pub remote: RemotePolicy,
    /// Element type of shipped queries and partial outputs.
    pub wire: DType,
    /// Largest piece of fetched KV, in tokens; what the executor has scratch for.
    pub fetch_tokens: u32,
    /// Bandwidth to peers that the cost model assumes until a transfer has measured it, in bytes per second.
    pub link_bytes_per_s: f64,
    /// Attention operations per second that the cost model assumes of this instance if it has no calibration.
    pub attention_flops: f64,
    /// `None` where its KV store cannot be shared.
    pub transfer: Option<TransferConfig>,
    /// Its KV store, if that is memory which debtors on this host map to attend to it where it lies.
    pub lent: Option<LentMemory>,
    /// This host, as [`lagoon_protocol::TransferConnect::host`], if its device can map such memory of creditors.
    pub peer_access: Option<String>,
    /// Free blocks keep what they hold, and prompts that begin alike are not computed again.
    pub prefix_cache: bool,
    /// Latency that its own decode steps shall have, in milliseconds: peers' micro attention must not break it.
    pub target_step_ms: Option<u32>,
}

impl InstanceConfig {
    /// What peers must have in common with this instance.
    #[must_use]
    pub fn pool_shape(&self) -> PoolShape {
        PoolShape {
            model_hash: self.model_hash.0.to_vec(),
            layers: self.kv.layers,
            heads: self.geometry.heads,
            kv_heads: self.geometry.kv_heads,
            head_dim: self.geometry.head_dim,
            kv_dtype: u32::from(self.kv.dtype.code()),
            block_tokens: self.block_tokens,
            window: self.window.unwrap_or(0),
            alibi_bias_max: self.alibi.map_or(0, |alibi| alibi.bias_max.to_bits()),
        }
    }
}
