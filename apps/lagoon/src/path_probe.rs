//! Measured and expected rates of paths to prefill workers' KV; measured when a path is first opened.
//!
//! Expected rates:
//! * memory of this process, or of another one on this host: one thread's copy rate within its own memory at the same
//!   time. Pages of another process copy like own ones; a far lower rate means pages of another NUMA node, or
//!   swapped-out ones.
//! * memory of the same device in another process: the copy rate within this process's own device memory. None for a
//!   peer device: the link between two devices is not queried.
//! * QUIC: the link's speed if the kernel reports it (`/sys/class/net/*/speed`), at most [`QUIC_BYTES_PER_S`], which a
//!   core encrypts, sends and checks on one connection with reserve (3 GB/s and more were measured on loopback). A far
//!   lower rate means lost packets, small socket buffers or no segmentation offload; see `lagoon doctor`.

use crate::log;
use lagoon_transport::direct::Probe;
use serde::Serialize;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Highest expected rate of a QUIC path, in bytes per second.
const QUIC_BYTES_PER_S: f64 = 1e9;
/// Bytes to measure a QUIC path with.
pub(crate) const QUIC_PROBE_BYTES: u64 = 16 << 20;
/// Smallest memory whose copy rate is meaningful, in bytes.
const TELLING_BYTES: usize = 1 << 20;

/// Paths between shared device regions, as named in [`Probe::path`].
pub(crate) const SAME_DEVICE: &str = "same device";
pub(crate) const PEER_DEVICE: &str = "peer device";

/// A measured path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct PathRow {
    /// Id of the prefill worker.
    pub(crate) worker: u32,
    /// `same device`, `peer device`, `same process`, `same host` or `quic`.
    pub(crate) path: &'static str,
    pub(crate) bytes_per_s: f64,
    /// Expected rate; 0 if none.
    pub(crate) expected_bytes_per_s: f64,
    /// Source of the expected rate.
    pub(crate) expected_as: String,
}

impl PathRow {
    /// A path to `bytes` bytes of memory: of this process, shared, or of a device.
    pub(crate) fn memory(worker: u32, probe: Probe, bytes: usize) -> Self {
        let emits = bytes >= TELLING_BYTES && probe.path != PEER_DEVICE;
        let expected_as = match probe.path {
            PEER_DEVICE => "nothing: what links the devices is not known",
            _ if !emits => "nothing: the memory is too small to measure",
            SAME_DEVICE => "a copy within the device",
            _ => "one thread's memcpy",
        };
        Self {
            worker,
            path: probe.path,
            bytes_per_s: probe.bytes_per_s,
            expected_bytes_per_s: if emits { probe.expected_bytes_per_s } else { 0.0 },
            expected_as: expected_as.to_owned(),
        }
    }

    pub(crate) fn quic(worker: u32, probe: Probe, expected_as: String) -> Self {
        Self {
            worker,
            path: probe.path,
            bytes_per_s: probe.bytes_per_s,
            expected_bytes_per_s: probe.expected_bytes_per_s,
            expected_as,
        }
    }

    fn is_slow(&self) -> bool {
        let (bytes_per_s, expected_bytes_per_s) = (self.bytes_per_s, self.expected_bytes_per_s);
        Probe { path: self.path, bytes_per_s, expected_bytes_per_s }.is_slow()
    }

    /// The row as text.
    pub(crate) fn line(&self) -> String {
        let expected = match self.expected_bytes_per_s {
            0.0 => String::new(),
            bytes_per_s => format!("{:.2} GB/s, ", bytes_per_s / 1e9),
        };
        format!(
            "KV of prefill worker {}: {:.2} GB/s by {} (expected: {expected}{})",
            self.worker,
            self.bytes_per_s / 1e9,
            self.path,
            self.expected_as
        )
    }

    /// Logs the row if `announce`, and warns if the path is far below its expected rate.
    pub(crate) fn report(&self, announce: bool) {
        if self.is_slow() {
            let line = self.line();
            tracing::warn!("{line}\nhint: `lagoon doctor` shows what UDP and the memory of this machine allow");
        } else if announce {
            log::notice(&format!("{}\n", self.line()));
        }
    }
}

/// Expected rate of one QUIC connection to `addr`, in bytes per second, and its basis.
pub(crate) fn expect_quic(addr: SocketAddr) -> (f64, String) {
    let link = std::fs::read_to_string("/proc/net/route").ok().and_then(|routes| match addr.ip() {
        IpAddr::V4(ip) => route(&routes, ip),
        IpAddr::V6(_) => None,
    });
    let speed = link.and_then(|link| {
        let megabits =
            std::fs::read_to_string(format!("/sys/class/net/{link}/speed")).ok()?.trim().parse::<u32>().ok()?;
        Some((link, f64::from(megabits) * 1e6 / 8.0))
    });
    match speed {
        Some((link, bytes_per_s)) if bytes_per_s < QUIC_BYTES_PER_S => (bytes_per_s, format!("the speed of {link}")),
        _ => (QUIC_BYTES_PER_S, "one core's QUIC".to_owned()),
    }
}

/// The interface that routes to `ip`, by the kernel's table (hexadecimal numbers in host byte order).
fn route(table: &str, ip: Ipv4Addr) -> Option<String> {
    let ip = u32::from_ne_bytes(ip.octets());
    let rows = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let hex = |field: Option<&&str>| u32::from_str_radix(field?, 16).ok();
        let (destination, mask) = (hex(fields.get(1))?, hex(fields.get(7))?);
        (ip & mask == destination).then(|| (mask.count_ones(), (*fields.first().unwrap_or(&"")).to_owned()))
    });
    // The table has no loopback addresses.
    rows.filter(|_| ip.to_ne_bytes()[0] != 127).max().map(|(_, link)| link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn the_narrowest_route_names_the_link() {
        let table = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
                     eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n\
                     eth1 0000000A 00000000 0001 0 0 0 000000FF 0 0 0\n\
                     eth2 0001000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n";
        let to = |ip: &str| route(table, ip.parse().unwrap());
        assert_eq!(to("8.8.8.8").as_deref(), Some("eth0"));
        assert_eq!(to("10.9.0.1").as_deref(), Some("eth1"));
        assert_eq!(to("10.0.1.7").as_deref(), Some("eth2"));
        assert_eq!(to("127.0.0.1"), None);
        assert_eq!(route("garbage\nx y\n", "10.0.0.1".parse().unwrap()), None);
    }

    #[test]
    fn a_path_far_under_its_expectation_is_slow() {
        let probe = |bytes_per_s| Probe { path: "same host", bytes_per_s, expected_bytes_per_s: 8e9 };
        assert!(!PathRow::memory(3, probe(4.1e9), 32 << 20).is_slow());
        assert!(PathRow::memory(3, probe(3.9e9), 32 << 20).is_slow());
        assert!(!PathRow::memory(3, probe(1e3), 1000).is_slow());
        let on = |path| PathRow::memory(3, Probe { path, ..probe(1e9) }, 32 << 20);
        assert_eq!((on(SAME_DEVICE).is_slow(), on(PEER_DEVICE).is_slow()), (true, false));
        let row = PathRow::memory(3, probe(3.9e9), 32 << 20);
        assert_eq!(
            row.line(),
            "KV of prefill worker 3: 3.90 GB/s by same host (expected: 8.00 GB/s, one thread's memcpy)"
        );
    }
}
