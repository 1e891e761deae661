//! Choice of an instance's backend and device.

use anyhow::{bail, ensure};
use lagoon_cuda::{CudaProbe, ProbedDevice};
use lagoon_shaders::{AdapterSummary, list_adapters};
use std::convert::Infallible;
use std::str::FromStr;

/// Which backend computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum BackendArg {
    /// The best that is found: a real GPU through wgpu, else the host CPU.
    #[default]
    Auto,
    /// The host CPU.
    Cpu,
    /// A GPU through wgpu (Vulkan, Metal, DX12); a software adapter if there is no other.
    Wgpu,
    /// An NVIDIA GPU through CUDA; only when asked for.
    Cuda,
}

/// A device of a backend, by number or name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    /// Its number in `lagoon doctor`.
    Number(u32),
    /// A part of its name, in letters of any case.
    Name(String),
}

impl FromStr for DeviceArg {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.parse().map_or_else(|_| Self::Name(text.to_owned()), Self::Number))
    }
}

impl DeviceArg {
    /// The flag for this device.
    pub(crate) fn to_flag(&self) -> String {
        match self {
            Self::Number(number) => format!("--device={number}"),
            Self::Name(name) => format!("--device={name}"),
        }
    }

    /// The index of this device among `names`.
    fn among(&self, names: &[String]) -> anyhow::Result<usize> {
        let found = match self {
            Self::Number(number) => usize::try_from(*number).ok().filter(|number| *number < names.len()),
            Self::Name(part) => {
                let part = part.to_lowercase();
                names.iter().position(|name| name.to_lowercase().contains(&part))
            }
        };
        let Some(found) = found else {
            let listed: Vec<String> = names.iter().enumerate().map(|(n, name)| format!("{n}: {name}")).collect();
            let requested = match self {
                Self::Number(number) => format!("number {number}"),
                Self::Name(name) => format!("{name:?} in its name"),
            };
            bail!("no device with {requested}; there is {}\nhint: `lagoon doctor` lists them", listed.join(", "))
        };
        Ok(found)
    }
}

/// A device that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chosen {
    Cpu,
    /// An adapter by number, and whether it is a software one.
    Wgpu {
        adapter: usize,
        software: bool,
    },
    /// A device by the driver's number, and its memory size.
    Cuda {
        ordinal: u32,
        memory_bytes: u64,
    },
}

impl Chosen {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Wgpu { .. } => "wgpu",
            Self::Cuda { .. } => "cuda",
        }
    }

    /// The flags that select this device for a child process.
    pub(crate) fn to_flags(self) -> Vec<String> {
        let device = match self {
            Self::Cpu => None,
            Self::Wgpu { adapter, .. } => u32::try_from(adapter).ok(),
            Self::Cuda { ordinal, .. } => Some(ordinal),
        };
        let backend = format!("--backend={}", self.name());
        std::iter::once(backend).chain(device.map(|n| DeviceArg::Number(n).to_flag())).collect()
    }
}

/// Why instances run on this device, for people.
pub(crate) fn because(backend: BackendArg, devices: &[DeviceArg], chosen: Chosen) -> &'static str {
    match (backend, chosen) {
        (BackendArg::Cpu, _) => "as --backend says",
        (BackendArg::Auto, Chosen::Cpu) => "wgpu found no GPU, and CUDA is used only when asked for",
        (BackendArg::Auto, _) if devices.is_empty() => "the first GPU that wgpu found",
        (BackendArg::Cuda, _) if devices.is_empty() => "as --backend says, all of its devices",
        (_, Chosen::Wgpu { software: true, .. }) if devices.is_empty() => {
            "as --backend says; there is only a software adapter"
        }
        (_, _) if devices.is_empty() => "as --backend says",
        _ => "as --device says",
    }
}

/// The device of one instance: the requested one, or the best. A software adapter is chosen only on request, and so is
/// CUDA while no pool of a large model has run on a GPU.
pub(crate) fn choose(backend: BackendArg, devices: &[DeviceArg]) -> anyhow::Result<Chosen> {
    ensure!(devices.len() < 2, "an instance runs on one device\nhint: `lagoon up` spreads instances over several");
    match (backend, devices.first()) {
        (BackendArg::Cpu, None) => Ok(Chosen::Cpu),
        (BackendArg::Cpu, Some(_)) => bail!("--device is for GPUs\nhint: --threads says how many cores are used"),
        (BackendArg::Cuda, device) => cuda(&cuda_devices()?, device),
        (BackendArg::Wgpu, device) => wgpu(&list_adapters(), device),
        (BackendArg::Auto, Some(device)) => wgpu(&list_adapters(), Some(device)),
        (BackendArg::Auto, None) => {
            let adapters = list_adapters();
            let gpu = adapters.iter().position(|a| !a.software && a.unusable.is_none());
            Ok(gpu.map_or(Chosen::Cpu, |adapter| Chosen::Wgpu { adapter, software: false }))
        }
    }
}

/// The devices that instances on this machine take in turn: the requested ones; else all of CUDA's.
pub(crate) fn spread(backend: BackendArg, devices: &[DeviceArg]) -> anyhow::Result<Vec<Chosen>> {
    if backend == BackendArg::Cuda && devices.is_empty() {
        let found = cuda_devices()?;
        return (0..).zip(&found).map(|(number, _)| cuda(&found, Some(&DeviceArg::Number(number)))).collect();
    }
    if devices.is_empty() {
        return Ok(vec![choose(backend, &[])?]);
    }
    devices.iter().map(|device| choose(backend, std::slice::from_ref(device))).collect()
}

fn cuda_devices() -> anyhow::Result<Vec<ProbedDevice>> {
    match lagoon_cuda::probe() {
        CudaProbe::Present { devices, .. } => Ok(devices),
        CudaProbe::Absent { reason } => bail!("no CUDA: {reason}\nhint: use --backend auto"),
    }
}

fn cuda(found: &[ProbedDevice], device: Option<&DeviceArg>) -> anyhow::Result<Chosen> {
    let names: Vec<String> = found.iter().map(|d| d.name.clone()).collect();
    let number = device.unwrap_or(&DeviceArg::Number(0)).among(&names)?;
    Ok(Chosen::Cuda { ordinal: u32::try_from(number)?, memory_bytes: found[number].memory_bytes })
}

fn wgpu(found: &[AdapterSummary], device: Option<&DeviceArg>) -> anyhow::Result<Chosen> {
    if let Some(device) = device {
        let names: Vec<String> = found.iter().map(|a| a.name.clone()).collect();
        let adapter = device.among(&names)?;
        if let Some(why) = &found[adapter].unusable {
            bail!("{} cannot be used: {why}", names[adapter]);
        }
        return Ok(Chosen::Wgpu { adapter, software: found[adapter].software });
    }
    let usable = |software: bool| found.iter().position(|a| a.software == software && a.unusable.is_none());
    if let Some(adapter) = usable(false) {
        return Ok(Chosen::Wgpu { adapter, software: false });
    }
    let Some(adapter) = usable(true) else {
        bail!(
            "wgpu finds no adapter\nhint: install a Vulkan driver (Debian: mesa-vulkan-drivers for a software \
             one), or use --backend cpu; `lagoon doctor` shows what is there"
        )
    };
    tracing::warn!("wgpu has a software adapter only: correct, but slower than --backend cpu");
    Ok(Chosen::Wgpu { adapter, software: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str, memory_bytes: u64) -> ProbedDevice {
        ProbedDevice { name: name.to_owned(), memory_bytes, compute_capability: (9, 0), multiprocessors: 132 }
    }

    fn named(text: &str) -> DeviceArg {
        let Ok(device) = text.parse();
        device
    }

    #[test]
    fn a_device_is_named_by_its_number_or_a_part_of_its_name() {
        let found = [gpu("NVIDIA A100-SXM4-80GB", 80 << 30), gpu("NVIDIA H200", 141 << 30)];
        let ordinal = |text: &str| match cuda(&found, Some(&named(text))) {
            Ok(Chosen::Cuda { ordinal, memory_bytes }) => {
                assert_eq!(memory_bytes, found[ordinal as usize].memory_bytes);
                Ok(ordinal)
            }
            Ok(other) => panic!("{other:?} is no CUDA device"),
            Err(error) => Err(error.to_string()),
        };
        assert_eq!(ordinal("1"), Ok(1));
        assert_eq!(ordinal("h200"), Ok(1));
        assert_eq!(ordinal("nvidia"), Ok(0));
        let error = ordinal("2").unwrap_err();
        assert!(error.contains("number 2") && error.contains("1: NVIDIA H200"), "{error}");
        assert!(ordinal("v100").unwrap_err().contains("\"v100\" in its name"));
        assert!(matches!(cuda(&found, None), Ok(Chosen::Cuda { ordinal: 0, .. })));
    }

    #[test]
    fn one_instance_has_one_device_and_the_host_is_only_one() {
        let two = choose(BackendArg::Cuda, &[named("0"), named("1")]).unwrap_err().to_string();
        assert!(two.contains("hint: `lagoon up`"), "{two}");
        let cpu = choose(BackendArg::Cpu, &[named("0")]).unwrap_err().to_string();
        assert!(cpu.contains("hint: --threads"), "{cpu}");
        assert_eq!(spread(BackendArg::Cpu, &[]).unwrap(), [Chosen::Cpu]);
    }

    #[test]
    fn a_child_gets_the_device_that_was_chosen() {
        let flags = Chosen::Cuda { ordinal: 3, memory_bytes: 1 }.to_flags();
        assert_eq!(flags, ["--backend=cuda", "--device=3"]);
        assert_eq!(Chosen::Cpu.to_flags(), ["--backend=cpu"]);
        assert_eq!(named("--x y").to_flag(), "--device=--x y");
    }
}
