//! The sections of the check, in the order in which they run: first what tells whether the rest means anything, then what the
//! targets need, then comparisons that take long or may be absent.

use super::{Args, Out, conformance, external, goldens, mixed, speed, steps, vmm};

/// A section.
pub(crate) struct Section {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// Seconds that it may take.
    pub(crate) limit_s: u64,
    pub(crate) run: fn(&Args, &mut Out) -> anyhow::Result<()>,
}

macro_rules! sections {
    ($($name:literal, $limit:literal, $run:path, $what:literal;)+) => {
        &[$(Section { name: $name, what: $what, limit_s: $limit, run: $run }),+]
    };
}

pub(crate) const SECTIONS: &[Section] = sections![
    "ceilings", 60, speed::ceilings, "copy bandwidth of the device and over PCIe, products of matrices";
    "conformance", 150, conformance::run, "the backend's contract, cut in three ways";
    "goldens", 120, goldens::run, "logits of small models against transformers'";
    "tune", 60, speed::tune, "decode's shapes; warpgroup products compared with the other kernel, and timed";
    "decode", 120, speed::decode_all, "decode attention against copy bandwidth, with page groups sliced and not";
    "prefill", 120, speed::prefill_all, "a prompt's attention in the kernels that there are";
    "paged", 90, speed::paged, "contiguous KV against blocks in the same kernels (vAttention, Tables 6 and 7)";
    "linear", 90, speed::linear_all, "linear layers by own kernels and by cuBLASLt";
    "vmm", 60, vmm::run, "calls of virtual memory, allocation bandwidth, steps and prompts with and without overlap and reuse, windows";
    "steps", 150, steps::run, "decoding of a model of Llama-3.1-8B's shape against its roofline, with graphs and without";
    "torch", 240, external::torch, "torch's scaled_dot_product_attention with every backend";
    "wgpu", 120, mixed::wgpu, "the same work through wgpu, and its ratio to CUDA";
    "dist", 60, mixed::dist, "attention over KV half on CUDA and half on wgpu, merged, against the host";
    "demo", 150, mixed::demo, "a pooled answer equal to a single instance's, all on CUDA";
    "demo_mixed", 180, mixed::demo_mixed, "the same with a CUDA debtor and wgpu creditors";
    "sanitizer", 240, external::sanitizer, "conformance under compute-sanitizer, where it is there";
    "llama", 400, external::llama, "llama.cpp's CUDA build on a model of the same shape, where it can be had";
];
