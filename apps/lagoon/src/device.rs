//! Opens the chosen device: everything below is generic over its backend.

use crate::args::{AddressRowsArg, CalibrateArg, EngineArgs, PrecisionArg, StageMemoryArg};
use crate::calibrate::{Subject, calibrate};
use crate::calibration_cache::{self as cache, Key, MEASUREMENTS};
use crate::cuda_tuning;
use crate::draft::DraftModel;
use crate::model::OpenModel;
use crate::placement::Chosen;
use anyhow::Context;
use lagoon_backend::{Device, DeviceInfo, VirtualMemory, WeightFormat, cpu::CpuDevice};
use lagoon_cuda::kernels::attention::{Precision, Tuning};
use lagoon_cuda::{CudaDevice, CudaOptions, kernels};
use lagoon_grammar::Grammars;
use lagoon_protocol::Calibration;
use lagoon_runner::{Executor, ExecutorConfig, ExecutorThread, KvMemory, KvRegion, Models, Report};
use lagoon_shaders::{AdapterChoice, WgpuDevice};
use lagoon_types::{DType, KvSpace};
use std::fmt::{self, Debug, Formatter};
use std::time::{Duration, Instant};

/// Whether a backend computes with matrices in a format as they are.
pub(crate) type Reads = fn(WeightFormat) -> bool;
/// The backends by name.
pub(crate) const BACKENDS: [(&str, Reads); 3] =
    [("CPU", CpuDevice::reads), ("wgpu", WgpuDevice::reads), ("CUDA", CudaDevice::reads)];

/// Largest piece of fetched KV, in tokens.
pub(crate) const FETCH_TOKENS: u32 = 512;

/// A running executor and its device.
#[derive(Debug)]
pub struct Running {
    pub(crate) thread: ExecutorThread,
    pub(crate) info: DeviceInfo,
    /// Address space of its KV.
    pub(crate) space: KvSpace,
    /// Its KV if shared, or its staging buffer of `stage_blocks` rBlocks.
    pub(crate) memory: KvMemory,
    pub(crate) stage_blocks: u32,
    /// The KV's memory, if lent for mapping.
    pub(crate) lent: Option<KvRegion>,
    /// Whether its device can map creditors' KV.
    pub(crate) peer_access: bool,
    /// Its calibration, measured now or cached.
    pub(crate) calibration: Option<Calibration>,
}

/// Time budget of an instance's calibration.
const CALIBRATION_BUDGET: Duration = Duration::from_secs(1);

/// Sizes and kinds of the executor's KV memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) blocks_total: u32,
    pub(crate) kv_dtype: lagoon_types::KvDType,
    /// KV in memory that transports can read and write, where the backend has such; else with a staging buffer of
    /// `stage_blocks`.
    pub(crate) shared: bool,
    pub(crate) stage_blocks: u32,
    /// KV in memory that debtors may map.
    pub(crate) lend: bool,
}

/// KV addresses with one row for each running or soon running sequence, as long as the model's longest sequence.
fn requested_space(args: &EngineArgs, model: &OpenModel, sizes: Sizes) -> KvSpace {
    let rows = u32::try_from(args.max_running).unwrap_or(u32::MAX).saturating_add(SPARE_ROWS);
    let row_blocks = model.config.max_positions.div_ceil(args.block_tokens);
    KvSpace::flat(sizes.blocks_total, args.block_tokens).with_rows(rows, row_blocks)
}

/// Sequences that have memory but do not run yet: being admitted, or borrowing. Further ones have no address row.
const SPARE_ROWS: u32 = 4;

/// Opens the device that an instance runs on.
pub trait Devices: Debug + Sync {
    /// Opens the device, loads the weights and starts the device thread.
    ///
    /// # Errors
    /// If the device cannot be opened, or its memory is too small.
    fn start(&self, loading: Loading<'_>) -> anyhow::Result<Running>;
}

/// The device of this machine that the flags name.
#[derive(Clone, Copy, Debug)]
pub struct OwnDevices;

impl Devices for OwnDevices {
    fn start(&self, loading: Loading<'_>) -> anyhow::Result<Running> {
        match loading.chosen {
            Chosen::Cpu => loading.start_on(Loading::cpu),
            Chosen::Cuda { ordinal, .. } => {
                loading.check_batch_invariant()?;
                loading.start_on(|loading| loading.cuda(ordinal))
            }
            Chosen::Wgpu { adapter, .. } => {
                loading.check_batch_invariant()?;
                let adapter = AdapterChoice::Numbered(adapter);
                loading.start_on(|_| WgpuDevice::open(&adapter).context("open the wgpu adapter"))
            }
        }
    }
}

/// An instance's model, sizes and flags, before its device is opened.
pub struct Loading<'a> {
    chosen: Chosen,
    args: &'a EngineArgs,
    model: &'a OpenModel,
    draft: Option<&'a DraftModel>,
    sizes: Sizes,
    report: Box<dyn FnMut(Report) + Send>,
    /// Grammars of constrained answers; `None` without a tokenizer.
    grammars: Option<Grammars>,
    /// Whether its calibration may come from the cache and is stored there.
    cached: bool,
}

impl Debug for Loading<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loading").field("chosen", &self.chosen).field("sizes", &self.sizes).finish_non_exhaustive()
    }
}

impl<'a> Loading<'a> {
    pub(crate) fn new(
        chosen: Chosen,
        args: &'a EngineArgs,
        model: &'a OpenModel,
        sizes: Sizes,
        report: impl FnMut(Report) + Send + 'static,
    ) -> Self {
        Self { chosen, args, model, draft: None, sizes, report: Box::new(report), grammars: None, cached: true }
    }

    /// Adds the draft model of speculative decoding.
    pub(crate) fn drafting(self, draft: Option<&'a DraftModel>) -> Self {
        Self { draft, ..self }
    }

    /// Compiles the grammars of constrained answers with `grammars`.
    pub(crate) fn with_grammars(self, grammars: Option<Grammars>) -> Self {
        Self { grammars, ..self }
    }

    /// The host CPU, with the threads that the flags ask for.
    ///
    /// # Errors
    /// If the flags choose another backend.
    pub fn cpu(&self) -> anyhow::Result<CpuDevice> {
        let chosen = self.chosen;
        anyhow::ensure!(chosen == Chosen::Cpu, "{} is not the CPU\nhint: --backend=cpu", chosen.name());
        let device = self.args.threads.map_or_else(CpuDevice::new, CpuDevice::with_threads);
        if !self.args.batch_invariant {
            return Ok(device);
        }
        let (tokens, aligned) = (self.args.block_tokens, CpuDevice::INVARIANT_RUNS);
        anyhow::ensure!(
            tokens.is_multiple_of(aligned),
            "--batch-invariant needs rBlocks of a multiple of {aligned} tokens, not of {tokens}\nhint: --block-tokens=32"
        );
        anyhow::ensure!(!self.args.kv_groups, "--batch-invariant does not go with --kv-groups=on");
        Ok(device.batch_invariant())
    }

    /// Refuses `--batch-invariant` on a backend whose kernels depend on the number of rows.
    fn check_batch_invariant(&self) -> anyhow::Result<()> {
        let name = self.chosen.name();
        anyhow::ensure!(
            !self.args.batch_invariant,
            "--batch-invariant is not supported on {name}: its kernels depend on the number of rows\nhint: --backend=cpu"
        );
        Ok(())
    }

    /// Disables the calibration cache, which may have numbers of the machine's own device.
    #[must_use]
    pub fn without_cache(self) -> Self {
        Self { cached: false, ..self }
    }

    /// Calls `look` before each report of the device thread.
    #[must_use]
    pub fn watched(self, mut look: impl FnMut() + Send + 'static) -> Self {
        let mut report = self.report;
        let report = Box::new(move |r| {
            look();
            report(r);
        });
        Self { report, ..self }
    }

    fn cuda(&self, ordinal: u32) -> anyhow::Result<CudaDevice> {
        let Self { args, model, sizes, .. } = self;
        let precision = match args.cuda_precision {
            PrecisionArg::Exact => Precision::Exact,
            PrecisionArg::Fast => Precision::Fast,
        };
        let geometry = model.config.geometry;
        // KV in 8 bits takes its launch shapes from those that are measured in 16.
        let dtype = sizes.kv_dtype.plain().unwrap_or(DType::BF16);
        let attention = cuda_tuning::prepare(ordinal, args.calibrate, precision, geometry, dtype);
        let options = CudaOptions { ordinal, ..CudaOptions::default() };
        let mut device = CudaDevice::open(kernels::FATBIN, options).context("open the CUDA device")?;
        device.set_tuning(Tuning { precision, ..*device.tuning() });
        attention.apply(&mut device, geometry, dtype);
        let shape = model.config.kv_shape(sizes.kv_dtype);
        let rows = args.has_address_rows()?;
        let wanted = rows && !sizes.lend;
        let why_flat = wanted.then(|| device.why_flat(shape, &requested_space(args, model, *sizes))).flatten();
        if let Some(why) = why_flat {
            tracing::warn!("sequences are contiguous in memory only by chance: {why}");
        }
        if !rows && args.kv_address_rows == AddressRowsArg::Auto {
            tracing::info!("KV is found by a block table, not in address rows, as --prefill-instances needs");
        }
        Ok(device)
    }

    /// Opens a device by `open`, loads the weights onto it and starts its thread. The draft model gets a device of its own.
    ///
    /// # Errors
    /// If it cannot be opened, its memory does not hold weights, KV and buffers, or it cannot be measured.
    pub fn start_on<D: Device>(self, open: impl Fn(&Self) -> anyhow::Result<D>) -> anyhow::Result<Running> {
        let mut device = open(&self)?;
        let drafter = self.draft.map(|draft| draft.load(open(&self)?, self.args)).transpose()?;
        let Self { args, model, sizes, report, grammars, cached, .. } = self;
        let info = device.info();
        let weights = model.load(&mut device, args.dtype)?;
        // KV that debtors map has flat addresses, as on devices without virtual memory.
        let space = match device.virtual_memory() {
            Some(memory) if !sizes.lend && args.has_address_rows()? => {
                memory.kv_space(model.config.kv_shape(sizes.kv_dtype), requested_space(args, model, sizes))
            }
            _ => KvSpace::flat(sizes.blocks_total, args.block_tokens),
        };
        let rings = match (&weights, &model.config.split) {
            (Some(_), Some(_)) => u32::try_from(args.max_running).unwrap_or(u32::MAX),
            _ => 0,
        };
        let config = ExecutorConfig {
            kv: space,
            kv_dtype: sizes.kv_dtype,
            step_rows: args.step_tokens as usize,
            sampled_rows: args.sampled_rows(),
            rings,
            fetch_tokens: FETCH_TOKENS as usize,
            share_blocks: sizes.shared.then_some(args.block_tokens),
            stage_blocks: sizes.stage_blocks,
            stage_on_device: args.stage_memory == StageMemoryArg::Device,
            lend: sizes.lend,
        };
        let runs_requests = weights.is_some();
        let mut executor = Executor::new(device, &model.config, weights, config).context(
            "allocate the KV cache and buffers\nhint: choose a smaller --kv-tokens, --step-tokens, --stage-kv-tokens or, with --kv-groups=on, --max-running",
        )?;
        let subject = Subject {
            geometry: model.config.geometry,
            kv: model.config.kv_shape(sizes.kv_dtype),
            slots: sizes.blocks_total * args.block_tokens,
            positions: model.config.max_positions,
            step_rows: u32::try_from(config.step_rows).unwrap_or(u32::MAX),
            step_seqs: u32::try_from(args.max_running.min(config.step_rows)).unwrap_or(u32::MAX),
            runs_requests,
            rings: config.rings > 0,
            window: model.config.window(),
            vocab: model.config.vocab,
        };
        let calibration = measured(&mut executor, subject, (args, cached), model, &info)?;
        let memory = executor.memory().clone();
        let (lent, peer_access) = (executor.lent().cloned(), executor.maps_peers());
        let stage_blocks = if executor.stages() { sizes.stage_blocks } else { 0 };
        if let Some(grammars) = grammars {
            executor = executor.with_grammars(grammars);
        }
        let thread = lagoon_runner::spawn(Models::new(executor, drafter), report);
        Ok(Running { thread, info, space, memory, stage_blocks, lent, peer_access, calibration })
    }
}

/// The executor's calibration: cached, or measured now, by the flag.
fn measured<D: Device>(
    executor: &mut Executor<D>,
    subject: Subject,
    (args, cached): (&EngineArgs, bool),
    model: &OpenModel,
    info: &DeviceInfo,
) -> anyhow::Result<Option<Calibration>> {
    let key = Key {
        version: format!("{}.{MEASUREMENTS}", env!("CARGO_PKG_VERSION")),
        model: model.hash.to_string(),
        backend: info.backend.to_owned(),
        device: info.name.clone(),
        kv_dtype: subject.kv.dtype.to_string(),
        kv_layers: subject.kv.layers,
        threads: args.threads,
        runs_requests: subject.runs_requests,
        step: (subject.step_rows, subject.step_seqs),
    };
    if args.calibrate == CalibrateArg::Off {
        return Ok(None);
    }
    if cached
        && args.calibrate == CalibrateArg::Auto
        && let Some(known) = cache::load(&key)
    {
        return Ok(Some(known));
    }
    let started = Instant::now();
    let calibration = calibrate(executor, subject, CALIBRATION_BUDGET)
        .context("measure the device\nhint: --calibrate=off does not")?;
    tracing::info!(took = ?started.elapsed(), ?calibration, "measured");
    if cached {
        cache::store(&key, &calibration);
    }
    Ok(Some(calibration))
}
