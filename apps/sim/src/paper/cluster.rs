//! The papers' clusters: GPUs in nodes, a model, and its distribution over instances.

use super::hardware::{LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, Model, Parallel, Timing};

/// GPUs of one node (v2 §7.1).
pub const NODE_GPUS: u32 = 8;
/// One GPU's NVLink, one direction, in bytes per second.
pub const NVLINK_BYTES_PER_S: f64 = 300e9;
/// A node's network, one direction (v2 §7.1: Ethernet, 125 MB/s).
pub const ETHERNET_BYTES_PER_S: f64 = 125e6;
/// One way between GPUs of a node: a peer-to-peer copy and its launch.
pub const NVLINK_LATENCY_US: f64 = 10.0;
/// One way between nodes.
pub const ETHERNET_LATENCY_US: f64 = 50.0;

/// A distribution of one model over `gpus` GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    pub model: Model,
    pub gpus: u32,
    pub parallel: Parallel,
    pub ethernet_bytes_per_s: f64,
    /// Bandwidth from one GPU to another of its node, one direction.
    pub near_bytes_per_s: f64,
    pub near_latency_us: f64,
}

impl Cluster {
    /// Instances of tensor parallelism `tp`, as Lagoon and vLLM-multi run them.
    #[must_use]
    pub fn multi(model: Model, gpus: u32, tp: u32) -> Self {
        Self {
            model,
            gpus,
            parallel: Parallel::tp(tp),
            ethernet_bytes_per_s: ETHERNET_BYTES_PER_S,
            near_bytes_per_s: NVLINK_BYTES_PER_S,
            near_latency_us: NVLINK_LATENCY_US,
        }
    }

    /// One instance over all GPUs: tensor parallelism within a node, a pipeline across nodes (v2 §7.1).
    #[must_use]
    pub fn single(model: Model, gpus: u32, pipelined: bool) -> Self {
        let parallel = Parallel {
            tp: gpus.min(NODE_GPUS),
            pp: gpus.div_ceil(NODE_GPUS),
            pipelined,
            stage_bytes_per_s: ETHERNET_BYTES_PER_S,
            stage_latency_us: ETHERNET_LATENCY_US,
        };
        Self { parallel, ..Self::multi(model, gpus, 1) }
    }

    /// Number of instances.
    #[must_use]
    pub fn instances(&self) -> usize {
        (self.gpus / self.parallel.gpus()) as usize
    }

    /// The node of an instance (its first, if it has several).
    #[must_use]
    pub fn node(&self, instance: usize) -> usize {
        instance * self.parallel.gpus() as usize / NODE_GPUS as usize
    }

    /// Times of one instance.
    #[must_use]
    pub fn timing(&self) -> Timing {
        Timing::new(self.model, self.parallel)
    }

    /// Name, as `LLaMA2-7B, 16xtp1`.
    #[must_use]
    pub fn name(&self) -> String {
        let Parallel { tp, pp, .. } = self.parallel;
        let stages = if pp > 1 { format!("pp{pp}") } else { String::new() };
        match self.instances() {
            1 => format!("{}, {stages}tp{tp}", self.model.name),
            n => format!("{}, {n}x{stages}tp{tp}", self.model.name),
        }
    }
}

/// A row of v1 Figure 8 and v2 Figure 10 (b): model, GPUs and Lagoon's tensor parallelism, with v2's trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setup {
    pub model: Model,
    pub gpus: u32,
    pub tp: u32,
    /// Trace number of v2 Table 1.
    pub trace: usize,
    /// Longest context of the trace, in tokens.
    pub longest: u32,
}

impl Setup {
    /// The cluster with an instance on every tensor-parallel group (Lagoon, vLLM-multi).
    #[must_use]
    pub fn multi(&self) -> Cluster {
        Cluster::multi(self.model, self.gpus, self.tp)
    }
}

/// The six setups. v1's legends (2xtp1, 2xtp2, 2xtp4, 4xtp2, 16xtp1, 32xtp1) and v2's ranges name them.
pub const SETUPS: [Setup; 6] = [
    Setup { model: LLAMA2_7B, gpus: 2, tp: 1, trace: 3, longest: 200_000 },
    Setup { model: LLAMA2_13B, gpus: 4, tp: 2, trace: 4, longest: 280_000 },
    Setup { model: LLAMA2_70B, gpus: 8, tp: 4, trace: 5, longest: 600_000 },
    Setup { model: LLAMA2_13B, gpus: 8, tp: 2, trace: 6, longest: 480_000 },
    Setup { model: LLAMA2_7B, gpus: 16, tp: 1, trace: 7, longest: 1_200_000 },
    Setup { model: LLAMA2_7B, gpus: 32, tp: 1, trace: 8, longest: 2_000_000 },
];
