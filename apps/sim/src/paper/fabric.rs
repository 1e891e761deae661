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

use super::cluster::ETHERNET_LATENCY_US;
use super::device::{Bill, Prefill};
use super::run::Setting;
use crate::agenda::Agenda;
use crate::happening::Happening;
use crate::network::{Delivery, Network};
use crate::place::{GMANAGER, Place};
use lagoon_protocol::{BulkFrame, PartialsFrame};
use lagoon_types::limits::{MOVE_BYTES_IN_FLIGHT_MAX, MOVE_WINDOW_MS};
use lagoon_types::{InstanceId, StepId};
use lagoon_wire::Frame;
use std::collections::BTreeMap;

/// One-way latency between an instance and the gManager, and of other control messages.
const CONTROL_US: u64 = 100;
/// Modelled bytes of a frame without payload.
const SMALL_FRAME_BYTES: f64 = 200.0;

/// A frame arrives.
#[derive(Debug)]
pub(super) struct Arrival {
    from: Place,
    to: Place,
    frame: Frame,
}

/// Priority classes, as on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Control,
    Partials,
    /// KV that steps write.
    Growth,
    Bulk,
}

impl Class {
    const COUNT: usize = Self::Bulk as usize + 1;
}

/// Kinds of ports, by number.
const NVLINK_OUT: usize = 0;
const NVLINK_IN: usize = 1;
const NODE_OUT: usize = 2;
const NODE_IN: usize = 3;
const PORT_KINDS: usize = 4;

/// Number of an egress or ingress port among all, by its kind and instance or node.
fn port(kind: usize, of: usize) -> usize {
    of * PORT_KINDS + kind
}

/// The network; see the module's documentation.
#[derive(Debug)]
pub(super) struct Fabric {
    setting: Setting,
    /// Time when a port is free again: without bulk, and with it.
    free_us: Vec<[f64; 2]>,
    /// Last arrival between two instances, by class.
    arrived_us: Vec<[u64; Class::COUNT]>,
    /// Instances, and the gManager.
    places: usize,
    /// Modelled bytes between nodes, and within a node.
    pub(super) ethernet_bytes: f64,
    pub(super) nvlink_bytes: f64,
    /// Total time that frames of queries and partials were in flight.
    pub(super) exchange_us: u64,
    /// Rows that count of each debtor's last queries. Relays pass them on, and answer with merges, without a bill of their own.
    asked: BTreeMap<Place, (StepId, u32)>,
}

impl Fabric {
    pub(super) fn new(setting: Setting) -> Self {
        let places = setting.cluster.instances() + 1;
        Self {
            setting,
            free_us: vec![[0.0; 2]; places * PORT_KINDS],
            arrived_us: vec![[0; Class::COUNT]; places * places],
            places,
            ethernet_bytes: 0.0,
            nvlink_bytes: 0.0,
            exchange_us: 0,
            asked: BTreeMap::new(),
        }
    }

    /// The machine of an instance.
    fn node(&self, place: Place) -> usize {
        self.setting.cluster.node(place - 1)
    }

    fn near(&self, a: usize, b: usize) -> bool {
        self.node(a) == self.node(b)
    }

    /// One way, in microseconds.
    pub(super) fn latency_us(&self, a: usize, b: usize) -> f64 {
        if self.near(a, b) { self.setting.cluster.near_latency_us } else { ETHERNET_LATENCY_US }
    }

    /// Bytes per second between two instances. Each GPU sends its own heads' share to its counterpart.
    fn bytes_per_s(&self, a: usize, b: usize) -> f64 {
        if self.near(a, b) {
            self.setting.cluster.near_bytes_per_s * f64::from(self.setting.cluster.parallel.tp)
        } else {
            self.setting.cluster.ethernet_bytes_per_s
        }
    }

    /// Arrival time of a frame that costs `bytes` and `hops` latencies (one per layer that it stands for).
    fn carry(&mut self, (from, to): (Place, Place), class: Class, bytes: f64, hops: f64, now_us: u64) -> u64 {
        if self.setting.study.free_network {
            return now_us;
        }
        let near = self.near(from, to);
        let ports = if near {
            self.nvlink_bytes += bytes;
            [port(NVLINK_OUT, from), port(NVLINK_IN, to)]
        } else {
            self.ethernet_bytes += bytes;
            [port(NODE_OUT, self.node(from)), port(NODE_IN, self.node(to))]
        };
        let bulk = class == Class::Bulk;
        let kind = usize::from(bulk);
        let took = bytes / self.bytes_per_s(from, to) * 1e6;
        let mut start = ports.iter().map(|port| self.free_us[*port][kind]).fold(now_us as f64, f64::max);
        if class == Class::Growth {
            let before = ports.iter().map(|port| self.free_us[*port][1]).fold(0.0, f64::max);
            let window =
                (MOVE_BYTES_IN_FLIGHT_MAX as f64 / self.bytes_per_s(from, to) * 1e6).min(MOVE_WINDOW_MS as f64 * 1e3);
            start = start.max(before.min(now_us as f64 + window));
        }
        for port in ports {
            // Bulk behind moves does not delay later partials.
            let until = &mut self.free_us[port];
            until[kind] = took + if class == Class::Growth { until[kind].max(now_us as f64) } else { start };
            if !bulk && until[1] > now_us as f64 {
                until[1] += took;
            }
        }
        let at = (start + took + hops * self.latency_us(from, to)).ceil() as u64;
        let last = &mut self.arrived_us[from * self.places + to][class as usize];
        *last = at.max(*last);
        *last
    }

    /// Modelled bytes and number of latencies: a frame stands for one frame in every layer, sequentially.
    fn partials_cost(&mut self, (from, to): (Place, Place), frame: &PartialsFrame, bill: &Bill) -> (f64, f64) {
        let model = self.setting.timing.model;
        let billed = |party: Place| {
            let party = InstanceId(u32::try_from(party).unwrap_or(u32::MAX));
            bill.rows.iter().find(|(billed, _)| *billed == party).map(|(_, rows)| *rows)
        };
        let asked = |debtor: Place, step: StepId| {
            self.asked.get(&debtor).filter(|(asked, _)| *asked == step).map_or(0, |(_, rows)| *rows)
        };
        let (rows, row_bytes) = match frame {
            PartialsFrame::Query { step, .. } => {
                let rows = billed(to).unwrap_or(0);
                self.asked.insert(from, (*step, rows));
                (rows, model.query_row_bytes())
            }
            PartialsFrame::RelayedQuery { debtor, step, .. } => {
                (asked(debtor.0 as usize, *step), model.query_row_bytes())
            }
            PartialsFrame::Partial { step, .. } => {
                (billed(0).unwrap_or_else(|| asked(to, *step)), model.partial_row_bytes())
            }
            PartialsFrame::RelayedPartial { .. } => (billed(0).unwrap_or(0), model.partial_row_bytes()),
            _ => return (SMALL_FRAME_BYTES, 1.0),
        };
        let layers = if rows > 0 { f64::from(model.layers) } else { 1.0 };
        (f64::from(rows) * row_bytes + SMALL_FRAME_BYTES, layers)
    }

    fn bulk_cost(&self, frame: &BulkFrame, bill: &Bill) -> f64 {
        let tokens = match frame {
            // Resident prompts' KV is already there.
            BulkFrame::Write { tokens, .. }
                if bill.written && *tokens > 1 && self.setting.prefill == Prefill::Resident =>
            {
                0
            }
            BulkFrame::Write { tokens, .. } | BulkFrame::Data { tokens, .. } => *tokens,
            _ => 0,
        };
        f64::from(tokens) * self.setting.timing.model.kv_token_bytes() + SMALL_FRAME_BYTES
    }

    /// Arrival time of a frame that is sent now.
    fn arrives_us(&mut self, ends: (Place, Place), frame: &Frame, bill: &Bill, now: u64) -> u64 {
        match frame {
            _ if ends.0 == GMANAGER || ends.1 == GMANAGER => now + CONTROL_US,
            Frame::Control(_) => self.carry(ends, Class::Control, SMALL_FRAME_BYTES, 1.0, now + CONTROL_US),
            Frame::Partials(frame) => {
                let (bytes, hops) = self.partials_cost(ends, frame, bill);
                let arrives_us = self.carry(ends, Class::Partials, bytes, hops, now);
                self.exchange_us += if hops > 1.0 { arrives_us - now } else { 0 };
                arrives_us
            }
            Frame::Bulk(frame) => {
                let class = if bill.written { Class::Growth } else { Class::Bulk };
                self.carry(ends, class, self.bulk_cost(frame, bill), 1.0, now)
            }
        }
    }
}

/// Processes run from the start to the end, and are connected throughout.
impl Network for Fabric {
    type Due = Arrival;
    type Bill = Bill;

    fn start(&mut self, _: Place) {}

    fn resume(&mut self, _: Place, _: &mut Agenda<Happening<Arrival>>) {}

    fn connect(&mut self, _: Place, _: Place, _: &mut Agenda<Happening<Arrival>>) {}

    fn release(&mut self, _: Place, _: Place, _: &mut Agenda<Happening<Arrival>>) {}

    fn send(&mut self, from: Place, to: Place, frame: Frame, bill: &Bill, agenda: &mut Agenda<Happening<Arrival>>) {
        let arrives_us = self.arrives_us((from, to), &frame, bill, agenda.now_us());
        agenda.at(arrives_us, Arrival { from, to, frame });
    }

    fn happen(
        &mut self,
        Arrival { from, to, frame }: Arrival,
        _: &mut Agenda<Happening<Arrival>>,
        _: impl Fn(Place, usize) -> bool,
        deliveries: &mut Vec<Delivery>,
    ) {
        deliveries.push(Delivery::Frame { at: to, peer: from, frame });
    }

    /// None: an instance learns of them once, when the pool is connected.
    fn round_trips(&self, _: Place) -> Vec<(Place, u32)> {
        Vec::new()
    }

    fn arrival_us(&self, from: Place, to: Place, bytes: usize, now_us: u64) -> u64 {
        now_us + (self.latency_us(from, to) + bytes as f64 / self.bytes_per_s(from, to) * 1e6).ceil() as u64
    }

    fn is_silent(&self, _: Place, _: Place, _: u64) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::super::cluster::Cluster;
    use super::super::hardware::LLAMA2_7B;
    use super::super::measure::{Job, Measured, run_one};
    use super::super::run::{Setting, Study};
    use super::super::traces::Request;

    /// Two nodes of two instances each: a request that needs all four has two creditors on the other node.
    #[test]
    fn two_creditors_on_another_node_cost_its_network_one_query() {
        let run = |once_a_node| -> Measured {
            let setting = Setting {
                kv_tokens: 20_480,
                planner: false,
                study: Study { once_a_node, ..Study::default() },
                ..Setting::new(Cluster::multi(LLAMA2_7B, 16, 4), true, 512)
            };
            let requests = vec![Request { arrival_us: 0, prompt_tokens: 75_000, output_tokens: 160 }];
            run_one(&Job { setting, requests })
        };
        let (each, once) = (run(false), run(true));
        assert_eq!((each.finished, once.finished), (1, 1));
        let share = once.ethernet_bytes / each.ethernet_bytes;
        assert!((0.45..0.60).contains(&share), "{share}");
        assert!(once.tokens_per_s > 1.05 * each.tokens_per_s, "{} and {}", once.tokens_per_s, each.tokens_per_s);
    }
}
