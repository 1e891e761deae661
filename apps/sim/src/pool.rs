//! Pools of instances over symbolic devices: configuration and start.

use crate::clock::Clock;
use crate::disk::Disk;
use crate::fabric::LinkProfile;
use crate::place::{Place, address};
use crate::rng::{Rng, mix};
use crate::symbolic::{Speed, Symbolic, Windows, model};
use crate::world::World;
use lagoon_cluster::{BalancerConfig, DgfmConfig, GManager, GManagerConfig, PlannerConfig};
use lagoon_instance::{
    CacheTierConfig, Event, InstanceConfig, JointConfig, LayerWindows, RemotePolicy, SchedulerConfig, TransferConfig,
};
use lagoon_protocol::{BatchPoint, Calibration, MemoryTier, Role};
use lagoon_types::{DType, ModelHash};

/// Most instances, restarts included, that a gManager knows.
const INSTANCES_MAX: usize = 512;

/// The gManager's tick.
const GMANAGER_TICK_US: u64 = 100_000;

const MODEL: ModelHash = ModelHash([7; 32]);

/// Configuration of one instance.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSpec {
    pub role: Role,
    /// Number of its host; 0 if it names none.
    pub host: u32,
    /// Takes part in KV transfer.
    pub transfers: bool,
    /// Blocks of its staging buffer; 0 if transports use the store itself.
    pub stage_blocks: u32,
    pub tier: MemoryTier,
    pub blocks: u32,
    pub lend_blocks_max: u32,
    pub lend_reserve_blocks: u32,
    pub step_rows: u32,
    pub running: usize,
    pub drafts: u32,
    /// Drafts come from a draft model, not only from what was there before.
    pub draft_model: bool,
    pub queue: usize,
    pub remote: RemotePolicy,
    pub fetch_tokens: u32,
    pub speed: Speed,
    pub skew_ppm: i32,
    /// The clock's reading at the start.
    pub offset_ms: u64,
}

/// Sizes of a prefix cache's tiers beside the KV memory, in rBlocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheTiers {
    pub host_blocks: u64,
    pub disk_blocks: u64,
    /// Reads of the disk, by each process, that find damage.
    pub damaged: u32,
}

impl CacheTiers {
    /// Gives a new process its tiers: on disk is what earlier ones at the place left.
    fn start(self, world: &mut World<Symbolic>, place: Place, block_tokens: u32) {
        let block_bytes = model::kv_shape().token_bytes() as u64 * u64::from(block_tokens);
        let Some(process) = world.processes[place].as_mut() else { return };
        process.instance.keep_copies(CacheTierConfig {
            host_bytes: self.host_blocks * block_bytes,
            disk_bytes: self.disk_blocks * block_bytes,
            load_tokens_min: Some(1),
        });
        if self.disk_blocks > 0 {
            let disk = world.disks.entry(place).or_insert_with(|| Disk::new(self.disk_blocks * block_bytes));
            disk.damaged_reads = self.damaged;
            let found = disk.found();
            world.handle(place, Event::Disk(found));
        }
    }
}

/// Configuration of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSpec {
    pub block_tokens: u32,
    pub windows: Windows,
    pub max_positions: u32,
    pub prefix_cache: bool,
    /// Tiers of each instance's prefix cache beside its KV memory.
    pub cache_tiers: Option<CacheTiers>,
    /// Tokens from which on a prompt is computed by several instances; 0: none is.
    pub joint_tokens_min: u32,
    /// Push: decode workers have memory before a prompt is prefilled, and read it meanwhile.
    pub push: bool,
    /// Role balancer, if roles change by load.
    pub balancer: Option<BalancerConfig>,
    pub link: LinkProfile,
    pub nodes: Vec<NodeSpec>,
}

impl NodeSpec {
    /// An instance that lends all its memory, with an exact clock.
    #[must_use]
    pub fn of(blocks: u32) -> Self {
        Self {
            role: Role::Instance,
            host: 0,
            transfers: false,
            stage_blocks: 0,
            tier: MemoryTier::Device,
            blocks,
            lend_blocks_max: blocks,
            lend_reserve_blocks: 0,
            step_rows: 16,
            running: 8,
            drafts: 0,
            draft_model: false,
            queue: 64,
            remote: RemotePolicy::Ship,
            fetch_tokens: 24,
            speed: Speed { layer_ns: 400_000, row_ns: 20_000, key_ns: 500 },
            skew_ppm: 0,
            offset_ms: 0,
        }
    }

    /// Every other instance has a calibration: it may merge its two micro-batches.
    fn calibration(&self, place: Place) -> Option<Calibration> {
        let us = |ns: u64| f64::from(u32::try_from(ns).unwrap_or(u32::MAX)) * f64::from(model::kv_shape().layers) / 1e3;
        let point =
            |batch| BatchPoint { batch, step_us: us(self.speed.layer_ns + u64::from(batch) * self.speed.row_ns) };
        (self.role == Role::Instance && place % 2 == 1).then(|| Calibration {
            batches: vec![point(1), point(8)],
            attention_us_per_ktoken: us(1_024 * self.speed.key_ns),
            prefill_us_per_token: 0.0,
            copy_bytes_per_s: 0.0,
            prompt_attention_us_per_ktoken: 0.0,
        })
    }

    /// The configuration of the process at `place`, in its `life`-th life.
    #[must_use]
    pub fn config(&self, pool: &PoolSpec, place: Place, life: u64) -> InstanceConfig {
        InstanceConfig {
            name: format!("node {place}"),
            quic_addr: address(place),
            http_addr: String::new(),
            host: if self.host == 0 { String::new() } else { format!("host {}", self.host) },
            backend: "symbolic".to_owned(),
            role: self.role,
            tier: self.tier,
            calibration: self.calibration(place),
            incarnation: mix((place as u64) << 32 | life),
            model_hash: MODEL,
            geometry: model::geometry(),
            kv: model::kv_shape(),
            window: pool.windows.pooled,
            windowed: pool.windows.shape(),
            layer_windows: LayerWindows::default(),
            attention_scale: 1.0,
            alibi: None,
            attention_softcap: None,
            max_positions: pool.max_positions,
            vocab: model::VOCAB,
            block_tokens: pool.block_tokens,
            blocks_total: self.blocks,
            lend_blocks_max: self.lend_blocks_max,
            lend_reserve_blocks: self.lend_reserve_blocks,
            sched: SchedulerConfig {
                queue: self.queue,
                running: self.running,
                step_rows: self.step_rows,
                drafts: self.drafts,
                draft_model: self.draft_model,
            },
            remote: self.remote,
            wire: DType::F32,
            fetch_tokens: self.fetch_tokens,
            link_bytes_per_s: 1e9,
            attention_flops: 1e12,
            prefix_cache: pool.prefix_cache,
            joint: JointConfig {
                // Whatever is predicted: prompts here are short.
                instances: if pool.joint_tokens_min == 0 { 1 } else { u32::MAX },
                tokens_min: pool.joint_tokens_min,
            },
            target_step_ms: None,
            transfer: self.transfers.then(|| self.transfer(pool)),
            lent: None,
            peer_access: None,
        }
    }

    fn transfer(&self, pool: &PoolSpec) -> TransferConfig {
        let (shape, block_tokens) = (model::kv_shape(), pool.block_tokens);
        let transfer = match self.stage_blocks {
            0 => TransferConfig::new(MODEL, shape, (self.blocks, block_tokens), String::new()),
            blocks => TransferConfig::staged(MODEL, shape, (blocks, block_tokens), String::new()),
        };
        TransferConfig { push: pool.push, ..transfer.expect("the simulator's stores have a layout") }
    }
}

impl PoolSpec {
    /// A pool of `nodes` over a local network.
    #[must_use]
    pub fn of(block_tokens: u32, nodes: Vec<NodeSpec>) -> Self {
        let link = LinkProfile { latency_us: 100, jitter_us: 50, bytes_per_us: 1_000 };
        Self {
            block_tokens,
            windows: Windows::default(),
            max_positions: 100_000,
            prefix_cache: true,
            cache_tiers: None,
            joint_tokens_min: 0,
            push: false,
            balancer: None,
            link,
            nodes,
        }
    }

    /// Whether the pool has prefill workers.
    #[must_use]
    pub fn has_roles(&self) -> bool {
        self.nodes.iter().any(|node| node.transfers)
    }

    /// Place of the `index`-th instance.
    #[must_use]
    pub const fn place(index: usize) -> Place {
        index + 1
    }

    /// Starts (or restarts) the process at a place.
    pub fn start(&self, world: &mut World<Symbolic>, place: Place, life: u64) {
        let spec = &self.nodes[place - 1];
        let runner = Symbolic::new(
            (spec.blocks * self.block_tokens, spec.stage_blocks * self.block_tokens),
            self.windows,
            spec.step_rows,
            spec.speed,
        );
        let clock = Clock { born_us: world.now_us(), offset_ms: spec.offset_ms, skew_ppm: spec.skew_ppm };
        let first_us = world.first_tick_us();
        world.start(place, (spec.config(self, place, life), runner), clock, life, first_us);
        self.cache_tiers.iter().for_each(|tiers| tiers.start(world, place, self.block_tokens));
    }

    /// Starts the `life`-th gManager.
    pub fn start_gmanager(&self, world: &mut World<Symbolic>, life: u64) {
        // As in the shell: a new gManager does not reuse another one's numbers.
        let first = u32::try_from(1 + 1_000 * life).unwrap_or(u32::MAX / 2);
        let clock = Clock { born_us: world.now_us(), offset_ms: 0, skew_ppm: 0 };
        let gmanager = GManager::with_config(GManagerConfig {
            first_instance: first,
            term: life + 1,
            planner: Some(PlannerConfig::default()),
            dgfm: Some(DgfmConfig::default()),
            balancer: self.balancer.clone(),
            // Small: the view allocates for all of them, and a gManager is started for every seed.
            instances_max: INSTANCES_MAX,
            ..GManagerConfig::default()
        });
        world.start_gmanager(gmanager, clock, life, GMANAGER_TICK_US);
    }

    /// A world with a gManager and all instances just started.
    #[must_use]
    pub fn world(&self, seed: u64) -> World<Symbolic> {
        let mut world = World::new(self.link, Rng::new(seed));
        self.start_gmanager(&mut world, 0);
        for index in 0..self.nodes.len() {
            self.start(&mut world, Self::place(index), 0);
        }
        world
    }
}
