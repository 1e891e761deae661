//! One instance of a pool under test: its configuration, and its executor as a device in virtual time.

use super::mapped::MappedDevice;
use lagoon_backend::{Device, KvCounters, cpu::CpuDevice};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, LinearLayers};
use lagoon_instance::{InstanceConfig, JointConfig, LayerWindows, RemotePolicy, SchedulerConfig, TransferConfig};
use lagoon_model::{Checkpoint, ModelSpec, Weights, model_hash};
use lagoon_protocol::{Calibration, LentMemory, MemoryTier, Role, TransferArena};
use lagoon_runner::{
    Command, Drafter, Executor, ExecutorConfig, KvMemory, KvRegion, Model, Models, PeerMemory, Report,
};
use lagoon_sim::place::address;
use lagoon_sim::{Rng, SimRunner};
use lagoon_transfer::{DeviceRegion, Region};
use lagoon_types::limits::DRAFT_ROWS_MAX;
use lagoon_types::{DType, KvDType, KvSpace, StepId};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Models on any backend.
pub(super) trait Engine {
    fn push(&mut self, command: Command);
    /// See [`Models::turn`].
    fn turn(&mut self, reports: &mut dyn FnMut(Report)) -> bool;
    /// See [`Executor::kv_counters`].
    fn kv_counters(&mut self) -> Option<KvCounters>;
}

impl<D: Device> Engine for Models<D> {
    fn push(&mut self, command: Command) {
        Self::push(self, command);
    }

    fn turn(&mut self, reports: &mut dyn FnMut(Report)) -> bool {
        Self::turn(self, reports)
    }

    fn kv_counters(&mut self) -> Option<KvCounters> {
        self.served().kv_counters()
    }
}

/// Backend of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Cpu,
    /// WebGPU on the software adapter.
    Wgpu,
    /// CUDA on this process's driver: a fake one, in tests.
    Cuda,
}

/// Configuration that all instances of a pool share.
#[derive(Clone, Debug)]
pub struct PoolSpec {
    pub dir: PathBuf,
    pub kv_dtype: KvDType,
    pub block_tokens: u32,
    /// Windowed KV is kept apart.
    pub split: bool,
}

impl PoolSpec {
    /// A golden model with f32 KV.
    #[must_use]
    pub fn golden(name: &str, block_tokens: u32) -> Self {
        Self { dir: crate::root().join("tests/goldens").join(name), kv_dtype: KvDType::F32, block_tokens, split: false }
    }

    fn model(&self) -> ModelSpec {
        let mut model = ModelSpec::open(&self.dir).unwrap();
        if self.split {
            model.split_kv().unwrap();
        }
        model
    }
}

/// Configuration of one instance.
#[derive(Clone, Debug)]
pub struct Spec {
    pub backend: Backend,
    /// Name of its host; empty if it names none.
    pub host: &'static str,
    /// Precision of products on CUDA.
    pub precision: Precision,
    pub role: Role,
    pub tier: MemoryTier,
    pub blocks: u32,
    pub lend_blocks_max: u32,
    pub lend_reserve_blocks: u32,
    pub step_rows: u32,
    pub running: usize,
    /// Tokens drafted for a sequence in one step, at most.
    pub drafts: u32,
    /// The golden model that proposes drafts, and tokens of its KV store.
    pub draft_model: Option<(&'static str, u32)>,
    pub queue: usize,
    pub remote: RemotePolicy,
    pub wire: DType,
    pub fetch_tokens: u32,
    /// Claims another model hash.
    pub other_model: bool,
    /// Attention rate for the cost model and the threshold.
    pub attention_flops: f64,
    pub joint: JointConfig,
    pub target_step_ms: Option<u32>,
    pub prefix_cache: bool,
    /// Bytes of the prefix cache's host tier, and of its disk tier.
    pub host_cache_bytes: u64,
    pub disk_cache_bytes: u64,
    /// The CPU's results of a row do not depend on other rows.
    pub batch_invariant: bool,
    /// Calibration that the instance pretends to have measured.
    pub calibration: Option<Calibration>,
    /// Virtual time of the device for a piece of work, and besides for a step of the instance, and for one layer of a
    /// peer's step.
    pub piece_us: u64,
    pub step_ms: u64,
    pub remote_request_ms: u64,
    /// Virtual time of each row of a step of the instance, besides.
    pub row_us: u64,
    /// Sequences have address rows, as with virtual memory. Ignored if the store is shared.
    pub rows: bool,
    /// Takes part in KV transfer, whatever its role.
    pub share: bool,
    /// Push: it reads prompts' KV while they are prefilled.
    pub push: bool,
    /// rBlocks of the staging buffer; `None` is as many as the store's, and none on the CPU, whose store is shared.
    pub stage_blocks: Option<u32>,
    /// The staging buffer is device memory, if the backend supports that.
    pub stage_on_device: bool,
    /// The store has peer access (CUDA): others can map it.
    pub lends: bool,
    /// Maps stores of others that have peer access.
    pub peer_access: bool,
}

impl Spec {
    /// A prefill worker on the CPU: see [`Spec::cpu`].
    #[must_use]
    pub fn prefill(blocks: u32) -> Self {
        Self { role: Role::Prefill, ..Self::cpu(blocks) }
    }

    /// A decode worker on the CPU: see [`Spec::cpu`].
    #[must_use]
    pub fn decode(blocks: u32) -> Self {
        Self { role: Role::Decode, ..Self::cpu(blocks) }
    }

    fn has_rows(&self) -> bool {
        self.rows && self.backend != Backend::Wgpu && !self.shares() && !self.lends
    }

    /// Whether the instance takes part in KV transfer.
    fn takes_part(&self) -> bool {
        self.share || matches!(self.role, Role::Prefill | Role::Decode)
    }

    fn stages(&self) -> u32 {
        let else_all = if self.backend == Backend::Cpu { 0 } else { self.blocks };
        if self.takes_part() { self.stage_blocks.unwrap_or(else_all) } else { 0 }
    }

    /// Whether transports read and fill the store itself.
    fn shares(&self) -> bool {
        self.takes_part() && self.stages() == 0
    }

    /// An instance on the CPU, with simulated virtual memory ([`MappedDevice`]), that lends all its memory.
    #[must_use]
    pub fn cpu(blocks: u32) -> Self {
        Self {
            backend: Backend::Cpu,
            host: "",
            precision: Precision::default(),
            role: Role::Instance,
            tier: MemoryTier::Device,
            blocks,
            lend_blocks_max: blocks,
            lend_reserve_blocks: 0,
            step_rows: 16,
            running: 8,
            drafts: 0,
            draft_model: None,
            queue: 16,
            remote: RemotePolicy::Ship,
            wire: DType::F32,
            fetch_tokens: 24,
            other_model: false,
            attention_flops: 1e12,
            joint: JointConfig::OFF,
            target_step_ms: None,
            prefix_cache: true,
            host_cache_bytes: 0,
            disk_cache_bytes: 0,
            batch_invariant: false,
            calibration: None,
            piece_us: 10,
            step_ms: 0,
            remote_request_ms: 0,
            row_us: 0,
            rows: true,
            share: false,
            push: false,
            stage_blocks: None,
            stage_on_device: true,
            lends: false,
            peer_access: false,
        }
    }
}

/// Virtual time of a device's work.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Each piece of work, a layer at most; in shuffled runs a random time up to eight times as long.
    piece_us: u64,
    /// A step of the instance, and one layer of a peer's step, besides.
    step_us: u64,
    remote_request_us: u64,
    /// Each row of a step.
    row_us: u64,
}

/// A device in virtual time: a real executor, whose work is done at once and takes its [`Cost`].
pub(super) struct TimedExecutor {
    pub(super) engine: Box<dyn Engine>,
    /// The memory that transports read, if it takes part in KV transfer.
    regions: Vec<Arc<dyn Region>>,
    is_staged: bool,
    /// The store's name and region, if it has peer access.
    lent: Option<(String, KvRegion)>,
    cost: Cost,
    /// Rows of the steps that it was given.
    rows: BTreeMap<StepId, u64>,
    /// Draws the times of pieces in shuffled runs.
    shuffle: Option<Rng>,
}

impl SimRunner for TimedExecutor {
    type Bill = ();
    const PREEMPTIVE: bool = false;

    fn push(&mut self, command: Command, _: u64) {
        if let Command::Step(work) = &command {
            self.rows.insert(work.step, work.tokens.len() as u64);
        }
        self.engine.push(command);
    }

    fn turn(&mut self, _: u64, reports: &mut Vec<Report>) -> Option<u64> {
        let worked = self.engine.turn(&mut |report| reports.push(report));
        if !worked && reports.is_empty() {
            return None;
        }
        let Cost { piece_us, step_us, remote_request_us, row_us } = self.cost;
        let mut took_us = |report: &Report| match report {
            Report::Done { step, .. } => step_us + row_us * self.rows.remove(step).unwrap_or(0),
            Report::RemotePartial { .. } => remote_request_us,
            _ => 0,
        };
        let piece_us = self.shuffle.as_mut().map_or(piece_us, |rng| rng.below(8 * piece_us + 1));
        Some(piece_us + reports.iter().map(&mut took_us).sum::<u64>())
    }

    fn end(&mut self, _: u64, _: &mut Vec<Report>) {}

    fn bill(&mut self) {}

    fn is_staged(&self) -> bool {
        self.is_staged
    }

    fn regions(&self) -> Vec<Arc<dyn Region>> {
        self.regions.clone()
    }

    /// They are the memory itself.
    fn take_regions(&mut self, _: &[Arc<dyn Region>]) {}

    fn peer_memory(&self, socket: &str) -> Option<PeerMemory> {
        let (_, region) = self.lent.as_ref().filter(|(name, _)| name == socket)?;
        let descriptor = region.descriptor().unwrap();
        Some(PeerMemory { device: region.device(), bytes: region.bytes(), descriptor })
    }
}

fn regions(memory: &KvMemory) -> Vec<Arc<dyn Region>> {
    match memory {
        KvMemory::Host(arenas) => arenas.iter().map(|arena| Arc::new(arena.clone()) as Arc<dyn Region>).collect(),
        KvMemory::Device { region, layers, layer_bytes } => {
            DeviceRegion::consecutive(region, *layers, *layer_bytes as u64)
        }
    }
}

/// The one host of all nodes.
const HOST: &str = "a host";

/// Name of a process's store with peer access.
fn lent_name(index: usize, life: u64) -> String {
    format!("node {index}, life {life}")
}

fn lent_memory(spec: &Spec, socket: String) -> LentMemory {
    let memory = Some(TransferArena { socket, ..TransferArena::default() });
    LentMemory { memory, host: HOST.to_owned(), blocks: spec.blocks }
}

/// Configuration of the `life`-th process of a node.
pub(super) fn config(pool: &PoolSpec, spec: &Spec, index: usize, life: u64) -> InstanceConfig {
    let (config, checkpoint) = (pool.model(), Checkpoint::open(&pool.dir).unwrap());
    let mut hash = model_hash(&config, &checkpoint, None);
    hash.0[0] ^= u8::from(spec.other_model);
    let instance_config = InstanceConfig {
        name: format!("node {index}"),
        quic_addr: address(super::place(index)),
        http_addr: String::new(),
        host: spec.host.to_owned(),
        backend: format!("{:?}", spec.backend),
        role: spec.role,
        tier: spec.tier,
        calibration: spec.calibration.clone(),
        incarnation: 0x1000 * (index as u64 + 1) + life,
        model_hash: hash,
        geometry: config.geometry,
        kv: config.kv_shape(pool.kv_dtype),
        window: config.window(),
        windowed: config.window_shape(),
        layer_windows: layer_windows(&config),
        attention_scale: config.attention_scale,
        alibi: config.alibi,
        attention_softcap: config.attention_softcap,
        max_positions: config.max_positions,
        vocab: config.vocab as u32,
        block_tokens: pool.block_tokens,
        blocks_total: spec.blocks,
        lend_blocks_max: spec.lend_blocks_max,
        lend_reserve_blocks: spec.lend_reserve_blocks,
        sched: SchedulerConfig {
            queue: spec.queue,
            running: spec.running,
            step_rows: spec.step_rows,
            drafts: spec.drafts,
            draft_model: spec.draft_model.is_some(),
        },
        remote: spec.remote,
        wire: spec.wire,
        fetch_tokens: spec.fetch_tokens,
        link_bytes_per_s: 1e9,
        attention_flops: spec.attention_flops,
        prefix_cache: spec.prefix_cache,
        joint: spec.joint,
        target_step_ms: spec.target_step_ms,
        transfer: None,
        lent: spec.lends.then(|| lent_memory(spec, lent_name(index, life))),
        peer_access: spec.peer_access.then(|| HOST.to_owned()),
    };
    InstanceConfig { transfer: transfer_config(pool, spec, &instance_config), ..instance_config }
}

/// The device of the `life`-th process of a node, and the address space of its KV.
pub(super) fn device(
    pool: &PoolSpec,
    spec: &Spec,
    (index, life): (usize, u64),
    shuffle: Option<Rng>,
) -> (TimedExecutor, KvSpace) {
    let (config, checkpoint) = (pool.model(), Checkpoint::open(&pool.dir).unwrap());
    let (engine, memory, lent) = engine(pool, spec, &config, &checkpoint);
    let cost = Cost {
        piece_us: spec.piece_us,
        step_us: spec.step_ms * 1000,
        remote_request_us: spec.remote_request_ms * 1000,
        row_us: spec.row_us,
    };
    let device = TimedExecutor {
        engine,
        regions: regions(&memory),
        is_staged: spec.stages() > 0,
        lent: lent.map(|region| (lent_name(index, life), region)),
        cost,
        rows: BTreeMap::new(),
        shuffle,
    };
    (device, space(pool, spec, &config))
}

/// Windows of the model's layers.
fn layer_windows(spec: &ModelSpec) -> LayerWindows {
    let (pooled, unpooled) = spec.layer_windows();
    LayerWindows { pooled, unpooled }
}

/// KV transfer configuration of a node; `None` if it takes no part.
fn transfer_config(pool: &PoolSpec, spec: &Spec, of: &InstanceConfig) -> Option<TransferConfig> {
    let config = match spec.stages() {
        _ if !spec.takes_part() => return None,
        0 => TransferConfig::new(of.model_hash, of.kv, (spec.blocks, pool.block_tokens), String::new()),
        blocks => TransferConfig::staged(of.model_hash, of.kv, (blocks, pool.block_tokens), String::new()),
    };
    Some(TransferConfig { push: spec.push, ..config.unwrap().of_model(of) })
}

/// The models of a node on its backend, with its KV memory for transports and peers.
fn engine(
    pool: &PoolSpec,
    spec: &Spec,
    config: &ModelSpec,
    checkpoint: &Checkpoint,
) -> (Box<dyn Engine>, KvMemory, Option<KvRegion>) {
    fn boxed<D: Device>(mut models: Models<D>) -> (Box<dyn Engine>, KvMemory, Option<KvRegion>)
    where
        Models<D>: Engine,
    {
        let (memory, lent) = (models.served().memory().clone(), models.served().lent().cloned());
        (Box::new(models), memory, lent)
    }
    let cpu = || if spec.batch_invariant { CpuDevice::new().batch_invariant() } else { CpuDevice::new() };
    let cuda = || {
        let options = CudaOptions { linear: LinearLayers::Own, ..CudaOptions::default() };
        let mut device = CudaDevice::open(lagoon_cuda::kernels::FATBIN, options).unwrap();
        device.set_tuning(Tuning { precision: spec.precision, ..*device.tuning() });
        device
    };
    match spec.backend {
        Backend::Cpu if spec.has_rows() => boxed(models(|| MappedDevice::new(cpu()), pool, spec, config, checkpoint)),
        Backend::Cpu => boxed(models(cpu, pool, spec, config, checkpoint)),
        Backend::Cuda => boxed(models(cuda, pool, spec, config, checkpoint)),
        Backend::Wgpu => boxed(models(|| crate::wgpu().unwrap(), pool, spec, config, checkpoint)),
    }
}

/// Address space of a node's KV: with address rows if its specification says so; in host memory they are simulated
/// with a larger store.
fn space(pool: &PoolSpec, spec: &Spec, config: &ModelSpec) -> KvSpace {
    let flat = KvSpace::flat(spec.blocks, pool.block_tokens);
    let row_blocks = config.max_positions.div_ceil(pool.block_tokens);
    // Few rows, so that some sequences find none.
    if spec.has_rows() { flat.with_rows(spec.running as u32 / 2 + 1, row_blocks) } else { flat }
}

fn models<D: Device>(
    open: impl Fn() -> D,
    pool: &PoolSpec,
    spec: &Spec,
    config: &ModelSpec,
    checkpoint: &Checkpoint,
) -> Models<D> {
    let mut device = open();
    let model = spec
        .role
        .runs()
        .then(|| Model::new(config, Weights::load(&mut device, checkpoint, config, None, &mut |_, _| {}).unwrap()));
    let executor_config = ExecutorConfig {
        kv: space(pool, spec, config),
        kv_dtype: pool.kv_dtype,
        step_rows: spec.step_rows as usize,
        sampled_rows: spec.running + if spec.drafts > 0 { DRAFT_ROWS_MAX as usize } else { 0 },
        rings: config.split.as_ref().map_or(0, |_| spec.running as u32),
        fetch_tokens: spec.fetch_tokens as usize,
        share_blocks: spec.takes_part().then_some(pool.block_tokens),
        stage_blocks: spec.stages(),
        stage_on_device: spec.stage_on_device,
        lend: spec.lends,
    };
    let executor = Executor::new(device, config, model, executor_config).unwrap();
    let executor = executor.with_grammars(crate::ascii::grammars(config.vocab));
    assert_eq!(executor.stages(), spec.stages() > 0, "only the host's stores are shared, unless they have rows");
    let draft_model = spec.draft_model.filter(|_| spec.role.runs());
    Models::new(executor, draft_model.map(|(name, kv_tokens)| drafter(open(), spec, name, kv_tokens)))
}

fn drafter<D: Device>(mut device: D, spec: &Spec, name: &str, kv_tokens: u32) -> Drafter<D> {
    let pool = PoolSpec::golden(name, 4);
    let (config, checkpoint) = (pool.model(), Checkpoint::open(&pool.dir).unwrap());
    let weights = Weights::load(&mut device, &checkpoint, &config, None, &mut |_, _| {}).unwrap();
    let sizes = ExecutorConfig {
        sampled_rows: spec.running,
        ..ExecutorConfig::alone(
            KvSpace::flat(kv_tokens / pool.block_tokens, pool.block_tokens),
            pool.kv_dtype,
            spec.step_rows as usize,
        )
    };
    let model = Model::new(&config, weights);
    let executor = Executor::new(device, &config, Some(model), sizes).unwrap();
    Drafter::new(executor, config.max_positions, config.vocab as u32)
}
