//! The papers' network: NVLink inside a node, one Ethernet port per node, loaded by modelled bytes.
//!
//! Frames here carry the KV and queries of a one-layer stand-in; they cost the bytes of the real model's layers. A
//! port sends one frame at a time. Partials have priority over bulk: a partial delays the bulk that waits at its
//! port. Frames of one class between two instances arrive in order.
//!
//! KV that steps write at creditors shares the streams of moves, whose bytes in flight are bounded
//! (`MOVE_BYTES_IN_FLIGHT_MAX`, `MOVE_WINDOW_MS`): it waits for at most these, not for the port's whole queue. (A
//! block of the stand-in is larger than the product's, so a move's whole block is one frame here.)
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are rounded up and not negative")]

use super::cluster::{Cluster, ETHERNET_LATENCY_US};
use lagoon_types::limits::{MOVE_BYTES_IN_FLIGHT_MAX, MOVE_WINDOW_MS};
use std::collections::BTreeMap;

/// Priority classes, as on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Control,
    Partials,
    /// KV that steps write.
    Growth,
    Bulk,
}

/// An egress or ingress port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Port {
    NvLinkOut(usize),
    NvLinkIn(usize),
    NodeOut(usize),
    NodeIn(usize),
}

#[derive(Debug)]
pub(super) struct Fabric {
    cluster: Cluster,
    /// Frames take no time.
    free: bool,
    /// Time when a port is free again, by class.
    free_us: BTreeMap<(Port, bool), f64>,
    arrived_us: BTreeMap<(usize, usize, Class), u64>,
    /// Modelled bytes between nodes, and within a node.
    pub(super) ethernet_bytes: f64,
    pub(super) nvlink_bytes: f64,
}

impl Fabric {
    pub(super) fn new(cluster: Cluster, free: bool) -> Self {
        Self {
            cluster,
            free,
            free_us: BTreeMap::new(),
            arrived_us: BTreeMap::new(),
            ethernet_bytes: 0.0,
            nvlink_bytes: 0.0,
        }
    }

    fn near(&self, a: usize, b: usize) -> bool {
        self.cluster.node(a) == self.cluster.node(b)
    }

    /// One way, in microseconds.
    pub(super) fn latency_us(&self, a: usize, b: usize) -> f64 {
        if self.near(a, b) { self.cluster.near_latency_us } else { ETHERNET_LATENCY_US }
    }

    /// Bytes per second between two instances. Each GPU sends its own heads' share to its counterpart.
    pub(super) fn bytes_per_s(&self, a: usize, b: usize) -> f64 {
        if self.near(a, b) {
            self.cluster.near_bytes_per_s * f64::from(self.cluster.parallel.tp)
        } else {
            self.cluster.ethernet_bytes_per_s
        }
    }

    /// Arrival time of a frame that costs `bytes` and `hops` latencies (one per layer that it stands for).
    pub(super) fn send(&mut self, from: usize, to: usize, class: Class, bytes: f64, hops: f64, now_us: u64) -> u64 {
        if self.free {
            return now_us;
        }
        let near = self.near(from, to);
        let ports = if near {
            self.nvlink_bytes += bytes;
            [Port::NvLinkOut(from), Port::NvLinkIn(to)]
        } else {
            self.ethernet_bytes += bytes;
            [Port::NodeOut(self.cluster.node(from)), Port::NodeIn(self.cluster.node(to))]
        };
        let bulk = class == Class::Bulk;
        let took = bytes / self.bytes_per_s(from, to) * 1e6;
        let free = |port: &Port| self.free_us.get(&(*port, bulk)).copied().unwrap_or(0.0);
        let mut start = ports.iter().map(free).fold(now_us as f64, f64::max);
        if class == Class::Growth {
            let before = ports.iter().filter_map(|p| self.free_us.get(&(*p, true))).copied().fold(0.0, f64::max);
            let window =
                (MOVE_BYTES_IN_FLIGHT_MAX as f64 / self.bytes_per_s(from, to) * 1e6).min(MOVE_WINDOW_MS as f64 * 1e3);
            start = start.max(before.min(now_us as f64 + window));
        }
        for port in ports {
            // Bulk behind moves does not delay later partials.
            let until = self.free_us.entry((port, bulk)).or_insert(0.0);
            *until = took + if class == Class::Growth { until.max(now_us as f64) } else { start };
            if !bulk && let Some(waits) = self.free_us.get_mut(&(port, true)).filter(|f| **f > now_us as f64) {
                *waits += took;
            }
        }
        let at = (start + took + hops * self.latency_us(from, to)).ceil() as u64;
        let last = self.arrived_us.entry((from, to, class)).or_default();
        *last = at.max(*last);
        *last
    }
}
