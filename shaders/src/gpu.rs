//! The recorder between operations and wgpu: commands are recorded on the host and submitted together.
//!
//! Invariants: within a batch every dispatch has its own uniform slot and every upload its own part of the arena, so
//! recorded data is not overwritten before the batch is submitted. The queue writes both before the batch's commands
//! and after all earlier batches, so they are reused at once. In steady state no objects are created per call: bind
//! groups are cached by kernel and buffers until one of the buffers is dropped.

use crate::adapter::{AdapterSummary, Opened, Options};
use crate::kernel::{Access, BINDINGS_MAX, Encoding, Kernel, Teams};
use bytemuck::Pod;
use lagoon_backend::DeviceError;
use lagoon_types::KvDType;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use wgpu::{BindGroup, BindGroupLayout, BufferUsages, ComputePipeline};

/// Uniform slots of a batch.
const SLOTS: u64 = 512;
/// Dispatches after which a batch is submitted, so that the device starts while the host records on. The remaining
/// uniform slots are for the dispatches of one operation.
const BATCH_DISPATCHES: usize = 128;
/// Smaller subgroups are not used: with four invocations, the ninth subgroup of a workgroup sums wrongly on llvmpipe (Mesa 22.3).
const SUBGROUP_LEAST: u32 = 8;
/// First size of the upload arena, in bytes. It grows when one upload needs more.
const ARENA_BYTES: u64 = 4 << 20;
/// Size of a readback, in bytes.
const READ_BYTES: u64 = 16 << 20;
/// Timeout after which a silent device counts as lost; long, for software adapters on a loaded machine.
const WAIT: Duration = Duration::from_secs(60);
const WAIT_SOFTWARE: Duration = Duration::from_secs(900);
/// Workgroups in one dimension of a dispatch, at most (the minimum over all adapters).
const GROUPS_MAX: u32 = 65_535;

/// State written by wgpu's callbacks, and dropped buffers.
#[derive(Debug, Default)]
struct Shared {
    fault: Mutex<Option<DeviceError>>,
    dropped: Mutex<Vec<u64>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A buffer with an identity that is never reused.
#[derive(Debug)]
pub(crate) struct Buf {
    raw: wgpu::Buffer,
    id: u64,
    shared: Arc<Shared>,
}

impl Drop for Buf {
    fn drop(&mut self) {
        lock(&self.shared.dropped).push(self.id);
    }
}

#[derive(Debug)]
struct Pipeline {
    pipeline: ComputePipeline,
    layout: BindGroupLayout,
}

#[derive(Debug)]
enum Command {
    Dispatch { pipeline: ComputePipeline, group: BindGroup, uniform: u32, grid: [u32; 3] },
    Copy { from: wgpu::Buffer, from_at: u64, to: wgpu::Buffer, to_at: u64, bytes: u64 },
}

type GroupKey = (Kernel, [u64; BINDINGS_MAX]);

/// An open adapter with its recorder.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    summary: AdapterSummary,
    binding_bytes_max: u64,
    native_f16: bool,
    teams: Teams,
    wide_kernels: bool,
    shared: Arc<Shared>,
    next_id: u64,
    pipelines: HashMap<Kernel, Pipeline>,
    groups: HashMap<GroupKey, BindGroup>,
    commands: Vec<Command>,
    dispatches: usize,
    uniform_stride: usize,
    uniforms: wgpu::Buffer,
    uniform_bytes: Vec<u8>,
    arena: Buf,
    arena_bytes: Vec<u8>,
    readback: wgpu::Buffer,
}

impl Gpu {
    pub(crate) fn new(opened: Opened, options: Options) -> Result<Self, DeviceError> {
        let Opened { device, queue, limits, summary } = opened;
        let shared = Arc::new(Shared::default());
        watch(&device, &shared);
        let uniform_stride = limits.min_uniform_buffer_offset_alignment.max(64) as usize;
        let uniform_size = SLOTS * uniform_stride as u64;
        let uniforms = create(&device, "uniforms", uniform_size, BufferUsages::UNIFORM | BufferUsages::COPY_DST)?;
        let readback = create(&device, "readback", READ_BYTES, BufferUsages::MAP_READ | BufferUsages::COPY_DST)?;
        let arena = create(&device, "arena", ARENA_BYTES, STORAGE)?;
        Ok(Self {
            binding_bytes_max: options
                .binding_bytes_max
                .min(limits.max_storage_buffer_binding_size)
                .min(limits.max_buffer_size),
            native_f16: summary.f16 && options.native_f16,
            teams: match &summary.subgroup {
                Some(sizes) if options.subgroups && *sizes.start() >= SUBGROUP_LEAST => {
                    Teams::Subgroup { least: *sizes.start(), most: *sizes.end() }
                }
                _ => Teams::Workgroup,
            },
            wide_kernels: summary.software && options.wide_kernels,
            device,
            queue,
            summary,
            next_id: 1,
            pipelines: HashMap::new(),
            groups: HashMap::new(),
            commands: Vec::new(),
            dispatches: 0,
            uniform_stride,
            uniforms,
            uniform_bytes: Vec::new(),
            arena: Buf { raw: arena, id: 0, shared: shared.clone() },
            arena_bytes: Vec::new(),
            readback,
            shared,
        })
    }

    pub(crate) fn summary(&self) -> &AdapterSummary {
        &self.summary
    }

    /// Largest binding of a buffer to a kernel, in bytes.
    pub(crate) fn binding_bytes_max(&self) -> u64 {
        self.binding_bytes_max
    }

    /// Of a KV store.
    pub(crate) fn kv(&self, dtype: KvDType) -> Encoding {
        Encoding::kv(dtype, self.native_f16)
    }

    /// Outputs of a workgroup in a product of few rows, at least.
    pub(crate) fn matvec_outputs(&self) -> usize {
        self.teams.outputs() as usize
    }

    /// Whether kernels make as many results an invocation as only a device without a register file can.
    pub(crate) fn wide_kernels(&self) -> bool {
        self.wide_kernels
    }

    /// Invocations of a wide kernel that load for each other.
    pub(crate) fn lanes(&self) -> u32 {
        self.teams.lanes()
    }

    /// A zeroed storage buffer of `bytes` bytes, rounded up to 16.
    pub(crate) fn buffer(&mut self, what: &str, bytes: u64) -> Result<Buf, DeviceError> {
        let bytes = bytes.max(16).next_multiple_of(16);
        if bytes > self.binding_bytes_max() {
            let max = self.binding_bytes_max();
            return Err(DeviceError::Unsupported(format!(
                "{what} needs {bytes} bytes in one buffer, of at most {max}"
            )));
        }
        self.bury();
        let raw = create(&self.device, what, bytes, STORAGE)?;
        self.next_id += 1;
        Ok(Buf { raw, id: self.next_id, shared: self.shared.clone() })
    }

    /// Writes to a buffer outside of the recording, for buffers that no recorded command uses yet (weights).
    pub(crate) fn write_now(&mut self, buf: &Buf, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.queue.write_buffer(&buf.raw, at, bytes);
        // wgpu keeps a copy until the next submission: submit, so that a large weight is not held twice.
        let index = self.queue.submit([]);
        self.wait(index)
    }

    /// Begins an operation; submits the batch if it is large enough. Never within an operation, whose dispatches
    /// share its upload.
    pub(crate) fn begin(&mut self) -> Result<(), DeviceError> {
        if self.dispatches >= BATCH_DISPATCHES { self.flush() } else { Ok(()) }
    }

    /// Uploads words to the arena for the dispatches of this operation, once an operation; returns their offset in
    /// words.
    pub(crate) fn upload_words(&mut self, words: &[u32]) -> Result<u32, DeviceError> {
        let at = self.upload(bytemuck::cast_slice(words))?;
        Ok(u32::try_from(at / 4).expect("the arena is far below 16 GiB"))
    }

    fn upload(&mut self, bytes: &[u8]) -> Result<u64, DeviceError> {
        assert!(bytes.len().is_multiple_of(4));
        if (self.arena_bytes.len() + bytes.len()) as u64 > self.arena.raw.size() {
            self.flush()?;
        }
        if bytes.len() as u64 > self.arena.raw.size() {
            self.arena = self.buffer("the upload arena", (bytes.len() as u64).next_power_of_two())?;
        }
        let at = self.arena_bytes.len() as u64;
        self.arena_bytes.extend_from_slice(bytes);
        Ok(at)
    }

    /// Records a write of `bytes` (whole words) to `buf`.
    pub(crate) fn write(&mut self, buf: &Buf, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let step = usize::try_from(ARENA_BYTES / 2).expect("a few MiB");
        let mut to_at = at;
        for chunk in bytes.chunks(step) {
            let from_at = self.upload(chunk)?;
            let (from, to) = (self.arena.raw.clone(), buf.raw.clone());
            self.commands.push(Command::Copy { from, from_at, to, to_at, bytes: chunk.len() as u64 });
            to_at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Records a dispatch of `kernel`: `groups` workgroups (folded into x and y) times `depth`. `None` binds the
    /// arena.
    pub(crate) fn dispatch<P: Pod>(
        &mut self,
        kernel: Kernel,
        params: &P,
        buffers: &[Option<&Buf>],
        groups: u32,
        depth: u32,
    ) -> Result<(), DeviceError> {
        assert_eq!(buffers.len(), kernel.bindings().len());
        if groups == 0 || depth == 0 {
            return Ok(());
        }
        assert!(
            (self.uniform_bytes.len() as u64) < SLOTS * self.uniform_stride as u64,
            "too many dispatches in one op"
        );
        let uniform = self.uniform_bytes.len();
        self.uniform_bytes.extend_from_slice(bytemuck::bytes_of(params));
        self.uniform_bytes.resize(uniform + self.uniform_stride, 0);
        let pipeline = self.pipeline(kernel)?;
        let group = self.group(kernel, buffers);
        let x = groups.min(GROUPS_MAX);
        let uniform = u32::try_from(uniform).expect("the uniform ring is small");
        self.commands.push(Command::Dispatch { pipeline, group, uniform, grid: [x, groups.div_ceil(x), depth] });
        self.dispatches += 1;
        Ok(())
    }

    fn group(&mut self, kernel: Kernel, buffers: &[Option<&Buf>]) -> BindGroup {
        let mut ids = [u64::MAX; BINDINGS_MAX];
        for (id, buffer) in ids.iter_mut().zip(buffers) {
            *id = buffer.map_or(self.arena.id, |buf| buf.id);
        }
        if let Some(group) = self.groups.get(&(kernel, ids)) {
            return group.clone();
        }
        self.bury();
        let params = wgpu::BufferBinding {
            buffer: &self.uniforms,
            offset: 0,
            size: wgpu::BufferSize::new(self.uniform_stride as u64),
        };
        let mut entries = vec![wgpu::BindGroupEntry { binding: 0, resource: wgpu::BindingResource::Buffer(params) }];
        for ((binding, _), buffer) in kernel.bindings().iter().zip(buffers) {
            let raw = buffer.map_or(&self.arena.raw, |buf| &buf.raw);
            entries.push(wgpu::BindGroupEntry { binding: *binding, resource: raw.as_entire_binding() });
        }
        let layout = &self.pipelines[&kernel].layout;
        let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(kernel.stem()),
            layout,
            entries: &entries,
        });
        self.groups.insert((kernel, ids), group.clone());
        group
    }

    /// Drops the bind groups of dropped buffers, which would keep their memory.
    fn bury(&mut self) {
        let dropped = std::mem::take(&mut *lock(&self.shared.dropped));
        if !dropped.is_empty() {
            self.groups.retain(|(_, ids), _| !ids.iter().any(|id| dropped.contains(id)));
        }
    }

    /// The pipeline of `kernel`, compiled at its first use.
    fn pipeline(&mut self, kernel: Kernel) -> Result<ComputePipeline, DeviceError> {
        if let Some(found) = self.pipelines.get(&kernel) {
            return Ok(found.pipeline.clone());
        }
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let made = compile(&self.device, kernel, self.teams);
        if let Some(error) = pollster::block_on(scope.pop()) {
            return Err(DeviceError::Unsupported(format!("the kernel {} does not compile: {error}", kernel.name())));
        }
        let pipeline = made.pipeline.clone();
        self.pipelines.insert(kernel, made);
        Ok(pipeline)
    }

    /// Submits the recorded commands.
    pub(crate) fn flush(&mut self) -> Result<(), DeviceError> {
        self.submit().map(|_| ())
    }

    fn submit(&mut self) -> Result<wgpu::SubmissionIndex, DeviceError> {
        if !self.uniform_bytes.is_empty() {
            self.queue.write_buffer(&self.uniforms, 0, &self.uniform_bytes);
        }
        if !self.arena_bytes.is_empty() {
            self.queue.write_buffer(&self.arena.raw, 0, &self.arena_bytes);
        }
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("batch") });
        encode(&mut encoder, self.commands.drain(..));
        let index = self.queue.submit([encoder.finish()]);
        self.dispatches = 0;
        self.uniform_bytes.clear();
        self.arena_bytes.clear();
        self.fault()?;
        Ok(index)
    }

    /// Submits the recorded commands and waits for all.
    pub(crate) fn sync(&mut self) -> Result<(), DeviceError> {
        let index = self.submit()?;
        self.wait(index)
    }

    fn wait(&self, index: wgpu::SubmissionIndex) -> Result<(), DeviceError> {
        let timeout = if self.summary.software { WAIT_SOFTWARE } else { WAIT };
        let poll = wgpu::PollType::Wait { submission_index: Some(index), timeout: Some(timeout) };
        let waited = self.device.poll(poll);
        self.fault()?;
        waited
            .map(|_| ())
            .map_err(|error| DeviceError::Lost(format!("no answer within {} s: {error}", timeout.as_secs())))
    }

    /// Reads parts of buffers, `(buffer, at, bytes)` in whole words, after all recorded commands: in order, in as few
    /// waits as the readback buffer allows.
    pub(crate) fn read<'a>(
        &mut self,
        parts: impl IntoIterator<Item = (&'a Buf, u64, u64)>,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), DeviceError> {
        let mut filled = 0;
        for (buf, at, bytes) in parts {
            let mut done = 0;
            while done < bytes {
                if filled == READ_BYTES {
                    self.read_back(filled, &mut take)?;
                    filled = 0;
                }
                let step = (bytes - done).min(READ_BYTES - filled);
                let (from, to) = (buf.raw.clone(), self.readback.clone());
                self.commands.push(Command::Copy { from, from_at: at + done, to, to_at: filled, bytes: step });
                (done, filled) = (done + step, filled + step);
            }
        }
        if filled > 0 { self.read_back(filled, &mut take) } else { Ok(()) }
    }

    /// Submits the recorded commands, waits, and passes the first `bytes` bytes of the readback buffer to `take`.
    fn read_back(&mut self, bytes: u64, take: &mut impl FnMut(&[u8])) -> Result<(), DeviceError> {
        let index = self.submit()?;
        let slice = self.readback.slice(..bytes);
        slice.map_async(wgpu::MapMode::Read, |_| {});
        self.wait(index)?;
        let view = slice.get_mapped_range().map_err(|error| DeviceError::Failed(format!("reading back: {error}")))?;
        take(&view);
        drop(view);
        self.readback.unmap();
        Ok(())
    }

    fn fault(&self) -> Result<(), DeviceError> {
        lock(&self.shared.fault).clone().map_or(Ok(()), Err)
    }
}

/// Storage buffers are also copied to and from.
const STORAGE: BufferUsages = BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

/// Records the first fault that wgpu reports outside of a call, which every later call returns; the device's loss replaces others.
fn watch(device: &wgpu::Device, shared: &Arc<Shared>) {
    let lost = shared.clone();
    device.set_device_lost_callback(move |reason, message| {
        *lock(&lost.fault) = Some(DeviceError::Lost(format!("{reason:?}: {message}")));
    });
    let failed = shared.clone();
    device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
        let error = match error {
            wgpu::Error::OutOfMemory { .. } => DeviceError::OutOfMemory { what: "a submission".to_owned(), bytes: 0 },
            other => DeviceError::Lost(other.to_string()),
        };
        lock(&failed.fault).get_or_insert(error);
    }));
}

fn create(device: &wgpu::Device, what: &str, bytes: u64, usage: BufferUsages) -> Result<wgpu::Buffer, DeviceError> {
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let valid = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some(what),
        size: bytes,
        usage,
        mapped_at_creation: false,
    });
    let (invalid, exhausted) = (pollster::block_on(valid.pop()), pollster::block_on(memory.pop()));
    match (invalid, exhausted) {
        (None, None) => Ok(buffer),
        (_, Some(_)) => Err(DeviceError::OutOfMemory { what: what.to_owned(), bytes }),
        (Some(error), None) => Err(DeviceError::Unsupported(format!("{what} of {bytes} bytes: {error}"))),
    }
}

fn compile(device: &wgpu::Device, kernel: Kernel, teams: Teams) -> Pipeline {
    let storage = |(binding, access): &(u32, Access)| {
        let ty = wgpu::BufferBindingType::Storage { read_only: *access == Access::Read };
        layout_entry(*binding, ty, false)
    };
    let mut entries = vec![layout_entry(0, wgpu::BufferBindingType::Uniform, true)];
    entries.extend(kernel.bindings().iter().map(storage));
    let name = kernel.name();
    let layout = device
        .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(name.as_str()), entries: &entries });
    let descriptor = wgpu::ShaderModuleDescriptor {
        label: Some(name.as_str()),
        source: wgpu::ShaderSource::Wgsl(kernel.source(teams).into()),
    };
    let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..wgpu::ShaderRuntimeChecks::checked() };
    // SAFETY: only the bound on loops is disabled, as it keeps drivers from unrolling; every loop of our shaders
    // counts towards a bound in its parameters or work list, which the host computes, so none is infinite. Bounds
    // checks stay on.
    let module = unsafe { device.create_shader_module_trusted(descriptor, checks) };
    let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: Some(name.as_str()),
        bind_group_layouts: &[Some(&layout)],
        immediate_size: 0,
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(name.as_str()),
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some(kernel.entry()),
        compilation_options: wgpu::PipelineCompilationOptions {
            // Kernels write workgroup memory before they read it.
            zero_initialize_workgroup_memory: false,
            ..Default::default()
        },
        cache: None,
    });
    Pipeline { pipeline, layout }
}

fn layout_entry(binding: u32, ty: wgpu::BufferBindingType, has_dynamic_offset: bool) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset, min_binding_size: None },
        count: None,
    }
}

/// Consecutive dispatches share a pass; wgpu orders those that depend on each other.
fn encode(encoder: &mut wgpu::CommandEncoder, commands: impl Iterator<Item = Command>) {
    let mut pass: Option<wgpu::ComputePass<'static>> = None;
    for command in commands {
        match command {
            Command::Dispatch { pipeline, group, uniform, grid } => {
                let pass = pass.get_or_insert_with(|| {
                    let descriptor = wgpu::ComputePassDescriptor { label: Some("ops"), timestamp_writes: None };
                    encoder.begin_compute_pass(&descriptor).forget_lifetime()
                });
                pass.set_pipeline(&pipeline);
                pass.set_bind_group(0, &group, &[uniform]);
                pass.dispatch_workgroups(grid[0], grid[1], grid[2]);
            }
            Command::Copy { from, from_at, to, to_at, bytes } => {
                // Ends the pass, if there is one: the encoder takes copies outside of passes only.
                pass = None;
                encoder.copy_buffer_to_buffer(&from, from_at, &to, to_at, bytes);
            }
        }
    }
}
