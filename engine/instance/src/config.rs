//! Configuration of an instance; it does not change while the instance runs.

use lagoon_protocol::{Calibration, LentMemory, MemoryTier, PoolShape, Role};
use lagoon_transfer::{Axis, Dim, Layout, LayoutAttention, LayoutError, LayoutParts, Part, Plane};
use lagoon_types::limits::{DATA_FRAME_BYTES_MAX, HEAD_DIM_MAX, HEADS_MAX, JOINT_TOKENS_MIN};
use lagoon_types::{Alibi, AttentionGeometry, DType, KvShape, ModelHash, WindowShape};

/// Bounds of one scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Maximum of waiting sequences.
    pub queue: usize,
    /// Maximum of running sequences.
    pub running: usize,
    /// Maximum of rows in one step.
    pub step_rows: u32,
    /// Speculative decoding: tokens drafted for a sequence in one step, at most; 0 without.
    pub drafts: u32,
    /// The runner has a draft model, which proposes them; else only what was there before is looked up.
    pub draft_model: bool,
}

/// Whether remote attention ships queries or fetches KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemotePolicy {
    /// By cost, per sequence and creditor, for each chunk.
    #[default]
    Auto,
    /// Always ship queries.
    Ship,
    /// Always fetch KV.
    Fetch,
}

/// How peers read this instance's KV, and how it reads theirs.
#[derive(Clone, Debug)]
pub struct TransferConfig {
    /// Layout of the memory that transports read and write.
    pub layout: Layout,
    /// This host, as `TransferConnect::host`.
    pub host: String,
    /// Push: a decode worker allocates memory before it asks for a prompt and reads the KV while it is computed.
    pub push: bool,
    /// Size of the staging buffer, in rBlocks, whose layout `layout` is: KV from and to peers passes through it, as the
    /// store is the device's alone. 0 if transports read the store itself.
    pub stage_blocks: u32,
}

impl TransferConfig {
    /// For a store that only the device can access, with a staging buffer of `stage_blocks` rBlocks.
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

    /// For a store with one region a layer, each `[slot][k | v][kv_heads]` rows of KV: blocks of `block_tokens` slots.
    ///
    /// # Errors
    /// For sizes that no layout has.
    pub fn new(
        model: ModelHash,
        kv: KvShape,
        (blocks, block_tokens): (u32, u32),
        host: String,
    ) -> Result<Self, LayoutError> {
        let elements = kv.dtype.row_elements(kv.head_dim);
        let (heads, row) = (u64::from(kv.kv_heads), elements as u64);
        let token = 2 * heads * row;
        let axis = |dim, size, stride| Axis { dim, size, stride };
        let axes = vec![
            axis(Dim::Block, blocks, u64::from(block_tokens) * token),
            axis(Dim::Token, block_tokens, token),
            axis(Dim::Kv, 2, heads * row),
            axis(Dim::Head, kv.kv_heads, row),
            axis(Dim::Elem, u32::try_from(elements).unwrap_or(u32::MAX), 1),
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

    /// Adds the model's properties that planes do not show (latent, windowed layers) to the layout: peers refuse a difference by
    /// its name.
    #[must_use]
    pub fn of_model(self, config: &InstanceConfig) -> Self {
        let windowed_layers = u32::try_from(config.layer_windows.unpooled.len()).unwrap_or(u32::MAX);
        let window = config.windowed.map_or(0, |windowed| windowed.tokens);
        let attention = LayoutAttention { latent: config.geometry.latent, windowed_layers, window };
        Self { layout: self.layout.with_attention(attention), ..self }
    }
}

/// Joint prefill: several instances compute one prompt together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JointConfig {
    /// Instances that compute a prompt, this one included, at most: 1 is this one alone, 0 as many as pay.
    pub instances: u32,
    /// Tokens to compute from which on a prompt is computed together.
    pub tokens_min: u32,
}

impl JointConfig {
    /// Every instance computes its prompts alone.
    pub const OFF: Self = Self::of(1);

    /// With up to `instances` instances (0: as many as pay) for prompts from [`JOINT_TOKENS_MIN`] on.
    #[must_use]
    pub const fn of(instances: u32) -> Self {
        Self { instances, tokens_min: JOINT_TOKENS_MIN }
    }
}

/// Sliding windows of a model's layers, in tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerWindows {
    /// Windows of the layers whose KV is in rBlocks, 0 for none; empty if all have [`InstanceConfig::window`].
    pub pooled: Vec<u32>,
    /// Windows of the layers whose KV is kept in rings (`--kv-groups`).
    pub unpooled: Vec<u32>,
}

/// Configuration of an instance.
#[derive(Clone, Debug)]
pub struct InstanceConfig {
    /// Name, for operators.
    pub name: String,
    /// `ip:port` at which peers reach this instance.
    pub quic_addr: String,
    /// `ip:port` of its HTTP server; empty if it has none.
    pub http_addr: String,
    /// Name of its host, equal for all instances there; empty if unknown. Creditors on one other host are asked through one of
    /// them (docs/adr/0039).
    pub host: String,
    /// `cpu`, `wgpu` or `cuda`.
    pub backend: String,
    /// The role at start.
    pub role: Role,
    /// Memory tier of its rBlocks.
    pub tier: MemoryTier,
    /// Measurements at start, for the planner.
    pub calibration: Option<Calibration>,
    /// Random number of this process.
    pub incarnation: u64,
    pub model_hash: ModelHash,
    pub geometry: AttentionGeometry,
    pub kv: KvShape,
    /// Sliding window, in tokens; `None` without one.
    pub window: Option<u32>,
    /// The windowed KV of a sequence; `None` if that is not kept apart (ADR 24). [`InstanceConfig::kv`] is then the pooled KV
    /// alone.
    pub windowed: Option<WindowShape>,
    /// Sliding windows by layer.
    pub layer_windows: LayerWindows,
    /// Factor on attention scores.
    pub attention_scale: f32,
    /// ALiBi slopes; `None` without.
    pub alibi: Option<Alibi>,
    /// Soft cap of attention scores; `None` without.
    pub attention_softcap: Option<f32>,
    /// Longest sequence that the model takes, in tokens.
    pub max_positions: u32,
    pub vocab: u32,
    /// Tokens in an rBlock; equal in the whole pool.
    pub block_tokens: u32,
    /// rBlocks of this instance.
    pub blocks_total: u32,
    /// Maximum of lent rBlocks.
    pub lend_blocks_max: u32,
    /// rBlocks kept from lending, for growth.
    pub lend_reserve_blocks: u32,
    pub sched: SchedulerConfig,
    pub remote: RemotePolicy,
    /// Element type of shipped queries and partial outputs.
    pub wire: DType,
    /// Largest piece of fetched KV, in tokens; the runner has scratch memory for it.
    pub fetch_tokens: u32,
    /// Bandwidth to peers, in bytes per second, that the cost model assumes until a transfer measures it.
    pub link_bytes_per_s: f64,
    /// Attention operations per second that the cost model assumes without a calibration.
    pub attention_flops: f64,
    /// KV transfer; `None` if the KV store cannot be shared.
    pub transfer: Option<TransferConfig>,
    /// The KV store, if debtors on this host can map it.
    pub lent: Option<LentMemory>,
    /// This host, as [`lagoon_protocol::TransferConnect::host`], if its device can map creditors' KV stores.
    pub peer_access: Option<String>,
    /// Prefix cache: free blocks keep their KV for prompts with the same prefix.
    pub prefix_cache: bool,
    pub joint: JointConfig,
    /// Latency target of own decode steps, in milliseconds: bounds peers' micro attention, and rows of prompts beside own decoding.
    pub target_step_ms: Option<u32>,
}

/// Bytes of a data frame that are reserved for headers and fields beside the rows.
const FRAME_BYTES_BESIDE: usize = 4096;
// The widest row of all: heads and their sizes within limits, twice as long where latent, in f32.
const _: () = assert!(
    FRAME_BYTES_BESIDE + 2 * 4 * (HEADS_MAX as usize) * (HEAD_DIM_MAX as usize) + 8 * HEADS_MAX as usize
        <= DATA_FRAME_BYTES_MAX
);

impl InstanceConfig {
    /// Maximum rows of a step with remote KV: frames of their queries and of creditors' partials stay within
    /// `DATA_FRAME_BYTES_MAX`.
    #[must_use]
    pub fn remote_rows(&self) -> u32 {
        let row = self.geometry.q_dim() * self.wire.size() + self.geometry.heads as usize * 4 + 4;
        let rows = (DATA_FRAME_BYTES_MAX - FRAME_BYTES_BESIDE) / row;
        u32::try_from(rows).unwrap_or(u32::MAX).min(self.sched.step_rows)
    }

    /// Whether queries to other hosts may be relayed: this instance names its host, and no layer has a window of its own, with which
    /// layers ask different creditors.
    pub(crate) fn can_relay(&self) -> bool {
        !self.host.is_empty() && self.layer_windows.pooled.is_empty()
    }

    /// As in [`Register`](lagoon_protocol::Register::host).
    pub(crate) fn host_fingerprint(&self) -> u64 {
        let first = blake3::hash(self.host.as_bytes()).as_bytes().first_chunk().copied();
        if self.host.is_empty() { 0 } else { u64::from_le_bytes(first.unwrap_or_default()) }
    }

    /// The properties that all instances of a pool must share.
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
            attention_softcap: self.attention_softcap.map_or(0, f32::to_bits),
            latent: self.geometry.latent,
            attention_scale: self.attention_scale.to_bits(),
            windows: self.layer_windows.pooled.clone(),
            unpooled_windows: self.layer_windows.unpooled.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::InstanceConfig;
    use crate::batch::freeze::tests::config;

    /// The value is blake3's reference implementation's: versions of an instance must agree on it.
    #[test]
    fn a_hosts_fingerprint_is_that_of_the_wire() {
        let of = |host: &str| InstanceConfig { host: host.to_owned(), ..config() }.host_fingerprint();
        assert_eq!((of("rack-7"), of("")), (0xf2a8_d87d_d908_f19b, 0));
    }
}
