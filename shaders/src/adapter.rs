//! GPU adapters: listing them and opening one.
//!
//! A software adapter (lavapipe, WARP) is opened only if asked for: it is correct, but slower than the host backend.

use crate::kernel::{BINDINGS_MAX, WORKGROUP_BYTES, WORKGROUP_INVOCATIONS};
use lagoon_backend::{DeviceError, PciAddress};
use std::ops::RangeInclusive;
use wgpu::{Adapter, Backends, DeviceType, Features, Instance, InstanceDescriptor, Limits};

/// Share of the memory budget that the driver reports (Vulkan, DX12) beyond which buffers are refused.
const MEMORY_PERCENT_MAX: u8 = 95;

/// The adapter to open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AdapterChoice {
    /// The best real GPU: discrete before integrated before virtual.
    #[default]
    Gpu,
    /// A software implementation of a GPU.
    Software,
    /// The adapter at this index of [`list_adapters`].
    Numbered(usize),
}

/// Restrictions of an adapter, so that tests on one adapter cover the limits of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Largest buffer in bytes: larger weights and stores are sharded. The adapter's own limit also holds.
    pub binding_bytes_max: u64,
    /// Read KV in f16 by the adapter's own f16, where it has that.
    pub native_f16: bool,
    /// Use subgroups where the adapter has them.
    pub subgroups: bool,
    /// Many results an invocation in products of many rows and in attention, where the adapter is software.
    pub wide_kernels: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { binding_bytes_max: u64::MAX, native_f16: true, subgroups: true, wide_kernels: true }
    }
}

/// Description of an adapter for `lagoon doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSummary {
    pub name: String,
    /// `vulkan`, `metal`, `dx12`.
    pub backend: String,
    pub driver: String,
    pub software: bool,
    /// Shaders may use f16.
    pub f16: bool,
    /// Invocations of a subgroup, if shaders may use subgroups.
    pub subgroup: Option<RangeInclusive<u32>>,
    /// Largest buffer, and largest binding of one to a kernel, in bytes; larger weights are sharded.
    pub buffer_bytes_max: u64,
    pub binding_bytes_max: u64,
    /// Memory that one workgroup shares, in bytes.
    pub workgroup_bytes: u32,
    /// PCI address, if the driver reports it.
    pub pci: Option<PciAddress>,
    /// Reason why Lagoon cannot use this adapter, if any.
    pub unusable: Option<String>,
}

/// Every adapter of this machine, the best real GPU first, software last.
#[must_use]
pub fn list_adapters() -> Vec<AdapterSummary> {
    adapters().iter().map(summary).collect()
}

/// Adapters on Vulkan, Metal and DX12, as far as this build has them. Best first.
fn adapters() -> Vec<Adapter> {
    let mut descriptor = InstanceDescriptor::new_without_display_handle();
    descriptor.backends = Backends::VULKAN | Backends::METAL | Backends::DX12;
    // Gives an error at buffer creation rather than a lost device at its use.
    descriptor.memory_budget_thresholds.for_resource_creation = Some(MEMORY_PERCENT_MAX);
    let instance = Instance::new(descriptor);
    let mut found = pollster::block_on(instance.enumerate_adapters(Backends::all()));
    found.sort_by_key(|adapter| match adapter.get_info().device_type {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    });
    found
}

fn summary(adapter: &Adapter) -> AdapterSummary {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let driver = format!("{} {}", info.driver, info.driver_info).trim().to_owned();
    AdapterSummary {
        software: info.device_type == DeviceType::Cpu,
        name: info.name,
        backend: info.backend.to_string(),
        driver,
        f16: adapter.features().contains(Features::SHADER_F16),
        subgroup: adapter
            .features()
            .contains(Features::SUBGROUP)
            .then_some(info.subgroup_min_size..=info.subgroup_max_size),
        buffer_bytes_max: limits.max_buffer_size,
        binding_bytes_max: limits.max_storage_buffer_binding_size,
        workgroup_bytes: limits.max_compute_workgroup_storage_size,
        pci: info.device_pci_bus_id.parse().ok(),
        unusable: unusable(&limits),
    }
}

fn unusable(limits: &Limits) -> Option<String> {
    let storage = u32::try_from(BINDINGS_MAX).unwrap_or(u32::MAX);
    let needs = [
        ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size, WORKGROUP_BYTES),
        ("invocations in a workgroup", limits.max_compute_invocations_per_workgroup, WORKGROUP_INVOCATIONS),
        ("storage buffers in a stage", limits.max_storage_buffers_per_shader_stage, storage),
    ];
    needs.iter().find(|(_, has, need)| has < need).map(|(what, has, need)| format!("it has {has} {what}, not {need}"))
}

/// An open device and its properties.
pub(crate) struct Opened {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) limits: Limits,
    pub(crate) summary: AdapterSummary,
}

/// Opens the adapter that `choice` names, with all its limits.
///
/// # Errors
/// [`DeviceError::Unsupported`] where there is no such adapter or it cannot run the kernels.
pub(crate) fn open(choice: &AdapterChoice) -> Result<Opened, DeviceError> {
    let found = adapters();
    let all: Vec<AdapterSummary> = found.iter().map(summary).collect();
    let wanted = |number: usize, s: &AdapterSummary| match choice {
        AdapterChoice::Gpu => !s.software,
        AdapterChoice::Software => s.software,
        AdapterChoice::Numbered(wanted) => number == *wanted,
    };
    let Some(number) = all.iter().enumerate().position(|(number, s)| wanted(number, s)) else {
        return Err(DeviceError::Unsupported(absent(choice, &all)));
    };
    let (adapter, summary) = (&found[number], all[number].clone());
    if let Some(why) = &summary.unusable {
        return Err(DeviceError::Unsupported(format!("the adapter {} is too small: {why}", summary.name)));
    }
    let limits = adapter.limits();
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("lagoon"),
        required_features: adapter.features() & (Features::SHADER_F16 | Features::SUBGROUP),
        required_limits: limits.clone(),
        ..Default::default()
    };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))
        .map_err(|error| DeviceError::Unsupported(format!("the adapter {} does not open: {error}", summary.name)))?;
    Ok(Opened { device, queue, limits, summary })
}

/// The error that no adapter fits, with a list of those present.
fn absent(choice: &AdapterChoice, all: &[AdapterSummary]) -> String {
    let requested = match choice {
        AdapterChoice::Gpu => "no GPU adapter (Vulkan, Metal or DX12)".to_owned(),
        AdapterChoice::Software => "no software adapter (lavapipe, WARP)".to_owned(),
        AdapterChoice::Numbered(number) => format!("no adapter with number {number}"),
    };
    let names: Vec<String> =
        all.iter().map(|s| format!("{}{}", s.name, if s.software { " (software)" } else { "" })).collect();
    match names.is_empty() {
        true => format!("{requested} on this machine: there is no adapter at all"),
        false => format!("{requested} on this machine: there is {}", names.join(", ")),
    }
}
