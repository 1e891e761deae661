//! `lagoon doctor`: capabilities of this machine, and problems.

use crate::calibration_cache as cache;
use crate::cuda_trial::{Outcome, Warpgroups};
use crate::cuda_tuning::{self, Remembered};
use crate::file_limit::{self, FILES_WANTED};
use crate::interfaces::{self, Interface, Nearness, Place};
use crate::local::EphemeralCa;
use crate::log::outln;
use crate::pool_client::PoolClient;
use crate::transfer_addr::{describe, ranked};
use lagoon_backend::{Device, DeviceInfo, PciAddress};
use lagoon_cuda::kernels::attention::SHARED_BYTES_MAX;
use lagoon_cuda::{CudaDevice, CudaOptions, CudaProbe, ProbedDevice, kernels};
use lagoon_protocol::{VERSION_MAX, VERSION_MIN};
use lagoon_shaders::list_adapters;
use lagoon_transport::{Node, NodeRole, TransportConfig};
use serde::Serialize;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};

/// `lagoon doctor`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Print this model's size and how long a context fits (directory, GGUF file or hub name), in place of the machine's findings.
    model: Option<String>,
    /// Free memory of an instance for that, in GiB; by default this machine's.
    #[arg(long, value_name = "GIB", requires = "model", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    memory_gib: Option<u32>,
    /// The HTTP port to check.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// A node's certificate, to check when it expires.
    #[arg(long, value_name = "PEM", env = "LAGOON_TLS_CERT")]
    tls_cert: Option<PathBuf>,
}

/// One finding.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    ok: bool,
    finding: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

fn check(name: &'static str, ok: bool, finding: impl Into<String>, hint: &str) -> Check {
    let hint = (!ok && !hint.is_empty()).then(|| hint.to_owned());
    Check { name, ok, finding: finding.into(), hint }
}

/// Prints the findings. Missing optional features are no failures.
pub(crate) async fn run(args: DoctorArgs) -> anyhow::Result<()> {
    if let Some(model) = &args.model {
        return crate::model_size::run(model, args.memory_gib, args.json);
    }
    let mut gpus = Vec::new();
    let mut checks = vec![versions(), cpu()];
    checks.extend(cuda(&mut gpus));
    checks.extend(adapters(&mut gpus));
    checks.extend(network(&gpus));
    checks.push(udp_buffers());
    checks.push(segmentation_offload());
    checks.extend(files());
    checks.push(port(args.port));
    checks.push(loopback().await);
    checks.extend(certificate(args.tls_cert.as_deref()));
    checks.push(calibration());
    if args.json {
        outln!("{}", serde_json::to_string(&serde_json::json!({ "checks": checks }))?);
        return Ok(());
    }
    for check in &checks {
        outln!("{} {:<12} {}", if check.ok { "ok  " } else { "note" }, check.name, check.finding);
        if let Some(hint) = &check.hint {
            outln!("     hint: {hint}");
        }
    }
    Ok(())
}

/// Remaining days of a certificate below which it is noted.
const EXPIRES_SOON_DAYS: i64 = 60;

/// When the named certificate expires.
fn certificate(file: Option<&Path>) -> Option<Check> {
    let file = file?;
    let left = crate::certs::days_left(file);
    Some(match left {
        Ok((what, days)) if days > EXPIRES_SOON_DAYS => check("certificate", true, format!("{what}, {days} days"), ""),
        Ok((what, days)) => {
            let text = format!("{what}, {days} days");
            check("certificate", false, text, "`lagoon certs renew DIR NAME`; running nodes load it by themselves")
        }
        Err(error) => check("certificate", false, format!("{error:#}"), "`lagoon certs issue DIR NAME --role ROLE`"),
    })
}

/// Number and directory of cached calibrations.
fn calibration() -> Check {
    match cache::dir() {
        Some(dir) => {
            let text = format!("{} measured instances in {}", cache::entries(), dir.display());
            check("calibration", true, text, "")
        }
        None => check(
            "calibration",
            false,
            "no cache directory: every instance measures itself at each start",
            "set XDG_CACHE_HOME or HOME",
        ),
    }
}

fn versions() -> Check {
    let text = format!("lagoon {}, protocol versions {VERSION_MIN} to {VERSION_MAX}", env!("CARGO_PKG_VERSION"));
    check("version", true, text, "")
}

fn cpu() -> Check {
    let info = Device::info(&lagoon_backend::cpu::CpuDevice::new());
    check("cpu", true, info.name, "")
}

/// A GPU's name and PCI address.
type Gpu = (String, PciAddress);

/// Whether `--backend cuda` could open each device, and its matrix units.
fn cuda(gpus: &mut Vec<Gpu>) -> Vec<Check> {
    match lagoon_cuda::probe() {
        CudaProbe::Present { devices, driver_version } => (0..)
            .zip(&devices)
            .flat_map(|(ordinal, device)| {
                let trials = cuda_trials(ordinal, &cuda_tuning::machine(device, driver_version));
                std::iter::once(cuda_device(ordinal, device, gpus)).chain(trials)
            })
            .collect(),
        absent @ CudaProbe::Absent { .. } => vec![check("cuda", false, absent.to_string(), "")],
    }
}

fn cuda_device(ordinal: u32, probed: &ProbedDevice, gpus: &mut Vec<Gpu>) -> Check {
    let kernels = format!("kernels: {}", kernels::FATBIN_SOURCE);
    match CudaDevice::open(kernels::FATBIN, CudaOptions { ordinal, ..CudaOptions::default() }) {
        Ok(mut device) => {
            let DeviceInfo { name, pci, memory_bytes, .. } = Device::info(&device);
            gpus.extend(pci.map(|pci| (name.clone(), pci)));
            let linear = device.linear_layers();
            let shared = device.attributes().shared_bytes_per_block;
            let tiles = if shared < SHARED_BYTES_MAX {
                format!("; small attention tiles: a block has {} KB of shared memory", shared >> 10)
            } else {
                String::new()
            };
            let free = memory_bytes.unwrap_or(0) >> 20;
            let all = probed.memory_bytes >> 20;
            let sharing = if device.peer_access().is_some() { "mapped by other processes" } else { "not shared" };
            let text = format!(
                "{ordinal}: {name}; {free} of {all} MiB free, {sharing}; {kernels}; linear layers: {linear}{tiles}"
            );
            check("cuda", true, text, "")
        }
        Err(error) => check(
            "cuda",
            false,
            format!("{ordinal}: {}: {error}; {kernels}", probed.name),
            "`--backend wgpu` and `--backend cpu` do without",
        ),
    }
}

/// Cached trials of warpgroup attention on this device.
fn cuda_trials(ordinal: u32, machine: &str) -> Vec<Check> {
    let row = |(shape, remembered, file): (String, Remembered, PathBuf)| {
        let Warpgroups { outcome, finding } = remembered.warpgroups?;
        let is = match outcome {
            Outcome::Used => "used",
            Outcome::Slower => "not used: they are slower",
            Outcome::Failed => "not used: their trial failed",
        };
        let text = format!("{ordinal}: warpgroup kernels for {shape} are {is}: {finding} ({})", file.display());
        let hint = "`lagoon serve --calibrate=always` tries them again";
        Some(check("cuda-trial", outcome != Outcome::Failed, text, hint))
    };
    cuda_tuning::all(machine).into_iter().filter_map(row).collect()
}

fn adapters(gpus: &mut Vec<Gpu>) -> Vec<Check> {
    let found = list_adapters();
    for adapter in &found {
        let new = adapter.pci.filter(|pci| gpus.iter().all(|(_, known)| known != pci));
        gpus.extend(new.map(|pci| (adapter.name.clone(), pci)));
    }
    if found.is_empty() {
        let hint = "install a Vulkan driver; Debian's mesa-vulkan-drivers has a software one";
        return vec![check("wgpu", false, "no adapter", hint)];
    }
    let row = |(number, a): (usize, &lagoon_shaders::AdapterSummary)| {
        let kind = if a.software { "software, used only when asked for" } else { "GPU" };
        let f16 = if a.f16 { "f16" } else { "no f16" };
        let subgroups = match &a.subgroup {
            None => "no subgroups".to_owned(),
            Some(sizes) if sizes.start() == sizes.end() => format!("subgroups of {}", sizes.end()),
            Some(sizes) => format!("subgroups of {} to {}", sizes.start(), sizes.end()),
        };
        let (features, mib) = (format!("{f16}, {subgroups}"), a.binding_bytes_max >> 20);
        let text =
            format!("{number}: {} ({}, {}; {kind}; {features}; bindings of {mib} MiB)", a.name, a.backend, a.driver);
        match &a.unusable {
            Some(reason) => check("wgpu", false, format!("{text}: {reason}"), ""),
            None => check("wgpu", true, text, ""),
        }
    };
    found.iter().enumerate().map(row).collect()
}

/// The network card that serves each GPU's KV, if there are several.
fn network(gpus: &[Gpu]) -> Vec<Check> {
    let addresses = match interfaces::addresses() {
        Ok(addresses) => addresses,
        Err(error) => return vec![check("network", false, format!("addresses of network interfaces: {error}"), "")],
    };
    let sysfs = Path::new(interfaces::SYSFS);
    let all = interfaces::interfaces(sysfs, &addresses);
    let cards = all.iter().filter(|interface| interface.up && !interface.places.is_empty());
    let cards: Vec<&str> = cards.filter(|card| !card.addresses.is_empty()).map(|card| card.name.as_str()).collect();
    let row = |(name, pci): &Gpu| {
        let Some(place) = Place::of_pci(sysfs, *pci) else {
            return check("network", true, format!("{name} at {pci}: the kernel does not know where that is"), "");
        };
        let node = place.node().map_or_else(String::new, |node| format!(", NUMA node {node}"));
        let described = |(interface, address, nearness): &(&Interface, IpAddr, Nearness)| {
            format!("{} {address} ({})", interface.name, describe(interface, *nearness))
        };
        let families = [IpAddr::from([0, 0, 0, 0]), IpAddr::from([0u16; 8])];
        let best = families.iter().map(|any| ranked(&all, *any, *any, &place)).find(|found| !found.is_empty());
        let best: Vec<String> = best.unwrap_or_default().iter().map(described).collect();
        let found = if best.is_empty() { "no network card".to_owned() } else { best.join(", then ") };
        check("network", true, format!("{name} at {pci}{node}: {found}"), "")
    };
    if gpus.is_empty() {
        let text = format!("no GPU on the PCI bus; network cards with addresses: {}", cards.join(", "));
        return vec![check("network", true, text, "")];
    }
    gpus.iter().map(row).collect()
}

/// Limits of socket buffers in the kernel: small ones lose datagrams in bursts.
fn udp_buffers() -> Check {
    let wanted = TransportConfig::default().socket_buffer_bytes;
    let read = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?;
        text.trim().parse::<usize>().ok()
    };
    match (read("rmem_max"), read("wmem_max")) {
        (Some(receive), Some(send)) => {
            let text = format!("UDP buffers: receive up to {receive} bytes, send up to {send}; wanted {wanted}");
            let hint = format!("sysctl -w net.core.rmem_max={wanted} net.core.wmem_max={wanted}");
            check("udp", receive.min(send) >= wanted, text, &hint)
        }
        _ => check("udp", true, "UDP buffers: this system does not say", ""),
    }
}

/// Whether the kernel supports UDP segmentation offload.
fn segmentation_offload() -> Check {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut parts = release.trim().split(['.', '-']).map_while(|p| p.parse::<u32>().ok());
    match (parts.next(), parts.next()) {
        (Some(major), Some(minor)) => {
            let ok = (major, minor) >= (4, 18);
            check(
                "gso",
                ok,
                format!("Linux {major}.{minor}: UDP segmentation offload needs 4.18"),
                "upgrade the kernel",
            )
        }
        _ => check("gso", true, "UDP segmentation offload: this system does not say", ""),
    }
}

/// Whether the limit of open files allows enough connections.
fn files() -> Option<Check> {
    let files = file_limit::files_max()?;
    let hint = format!(
        "allow {FILES_WANTED} or more: `ulimit -Hn`, or `LimitNOFILE=` of a systemd unit; with fewer, connections are refused under load"
    );
    Some(check("files", files >= FILES_WANTED, format!("a process may open {files} files"), &hint))
}

fn port(port: u16) -> Check {
    let tcp = TcpListener::bind(("127.0.0.1", port)).is_ok();
    let udp = UdpSocket::bind(("127.0.0.1", 7600)).is_ok();
    let state = |free: bool| if free { "free" } else { "in use" };
    let text = format!("TCP {port} (OpenAI endpoint) is {}, UDP 7600 (gManager) is {}", state(tcp), state(udp));
    check("ports", tcp && udp, text, "`lagoon up --port`, `lagoon gmanager --listen` name others")
}

/// A handshake and a message over QUIC with mutual TLS on loopback.
async fn loopback() -> Check {
    match handshake().await {
        Ok(us) => check("quic", true, format!("mutual TLS on loopback works, round trip {us} µs"), ""),
        Err(error) => check("quic", false, format!("{error:#}"), "is UDP on 127.0.0.1 filtered?"),
    }
}

async fn handshake() -> anyhow::Result<u128> {
    let ca = EphemeralCa::new()?;
    let local: SocketAddr = "127.0.0.1:0".parse()?;
    let mut peer = Node::bind(local, &ca.identity(NodeRole::GManager)?, TransportConfig::default())?;
    let addr = peer.node.local_addr();
    let node = peer.node.clone();
    let mut gmanager = lagoon_cluster::GManager::new(1);
    let answer = tokio::spawn(async move {
        while let Some(event) = peer.events.recv().await {
            if let lagoon_transport::Event::Control { peer: from, message, .. } = event
                && let Some(body) = message.body
                && let Some(reply) = gmanager.on_control(None, &body, 0)
            {
                node.try_send(from, &lagoon_transport::Frame::Control(reply.into()))?;
            }
        }
        anyhow::Ok(())
    });
    let mut client = PoolClient::new(&[addr], &ca.identity(NodeRole::Operator)?)?;
    client.rows().await?;
    let started = std::time::Instant::now();
    client.rows().await?;
    let took = started.elapsed().as_micros();
    answer.abort();
    Ok(took)
}
