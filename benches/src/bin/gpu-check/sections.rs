//! The sections of the check in the order in which they run, their time limits, and their division into parts for a
//! lent GPU: one command each, the most telling first.
//!
//! Invariants, asserted at compile time:
//! * a part's sections end within its command, so that the last of them always runs;
//! * a command ends within [`COMMAND_S_MAX`], all commands together within [`LOAN_S_MAX`].

use super::{
    Args, Out, attention, conformance, external, goldens, linear, mixed, packed, sanitizer, steps, tune, vmm,
    warpgroups,
};

/// A section.
pub(crate) struct Section {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// The command that runs it, counted from 1; 0: only if selected by name.
    pub(crate) part: u64,
    /// Time limits of the section and of one row in seconds: a kernel that hangs costs its row.
    pub(crate) limit_s: u64,
    pub(crate) row_s: u64,
    pub(crate) run: fn(&Args, &mut Out) -> anyhow::Result<()>,
}

/// Seconds of each part's command, unpacking the archive included.
pub(crate) const PARTS_S: [u64; 3] = [380, 410, 200];

/// Seconds for unpacking, the first look at the device and the report's last write.
pub(crate) const AROUND_S: u64 = 20;

/// Most seconds of one command, and of all commands.
const COMMAND_S_MAX: u64 = 540;
const LOAN_S_MAX: u64 = 1000;

macro_rules! sections {
    ($($part:literal $name:literal, $limit:literal, $row:literal, $run:path, $what:literal;)+) => {
        &[$(Section { name: $name, what: $what, part: $part, limit_s: $limit, row_s: $row, run: $run }),+]
    };
}

// Warpgroup kernels and the sanitizer come last in their parts: a trap, or a GPU in disorder after it, costs no other
// section.
pub(crate) const SECTIONS: &[Section] = sections![
    1 "ceilings", 20, 20, linear::ceilings, "copy bandwidth of the device and over PCIe, products of matrices";
    1 "conformance", 100, 20, conformance::run, "the backend's contract in both precisions, untuned and in small pieces";
    1 "goldens", 30, 15, goldens::run, "logits of small models against transformers', in both precisions";
    1 "tune", 25, 25, tune::run, "shapes of decode attention that later sections use";
    1 "decode", 60, 20, attention::decode_all, "decode attention against copy bandwidth, with page groups sliced and not";
    1 "steps", 100, 40, steps::run, "decoding at Llama-3.1-8B's shape against its roofline: graphs, dependent launches, packed weights; a prompt";
    1 "warpgroup_trial", 25, 15, warpgroups::trial, "warpgroup products compared with the other kernel, and timed";
    2 "prefill", 30, 15, attention::prefill_all, "a prompt's attention in the kernels on mma.sync";
    2 "vmm", 50, 20, vmm::run, "calls of virtual memory, allocation, steps and prompts with and without overlap and reuse, windows";
    2 "linear", 30, 15, linear::rows, "linear layers by own kernels and by cuBLASLt";
    2 "packed", 60, 15, packed::run, "linear layers with packed weights against copy bandwidth";
    2 "paged", 60, 15, attention::paged, "contiguous KV against blocks in the same kernels (vAttention, Tables 6 and 7)";
    2 "torch", 80, 80, external::torch, "torch's scaled_dot_product_attention with every backend";
    2 "demo", 30, 30, mixed::demo, "a pooled answer equal to a single instance's, all on CUDA";
    2 "warpgroups", 50, 25, warpgroups::run, "conformance, prefill attention and whole prompts on warpgroup products";
    3 "dist", 20, 20, mixed::dist, "attention over KV half on CUDA and half on wgpu, merged, against the host";
    3 "wgpu", 30, 30, mixed::wgpu, "the same work through wgpu, and its ratio to CUDA";
    3 "demo_mixed", 40, 40, mixed::demo_mixed, "the demo with a CUDA debtor and wgpu creditors";
    3 "sanitizer", 90, 40, sanitizer::run, "small cases under compute-sanitizer: memcheck, racecheck, synccheck";
    0 "llama", 400, 400, external::llama, "llama.cpp's CUDA build on a model of the same shape, where it can be had";
];

/// Sections whose kernels may leave the GPU in disorder: they come last, behind what earlier parts left.
pub(crate) const RISKY: [&str; 3] = ["warpgroup_trial", "warpgroups", "sanitizer"];

/// Seconds of all sections of a part.
const fn seconds_of(part: u64) -> u64 {
    let (mut i, mut sum) = (0, 0);
    while i < SECTIONS.len() {
        if SECTIONS[i].part == part {
            sum += SECTIONS[i].limit_s;
        }
        i += 1;
    }
    sum
}

const _: () = {
    let (mut part, mut all) = (0, 0);
    while part < PARTS_S.len() {
        assert!(seconds_of(part as u64 + 1) + AROUND_S <= PARTS_S[part], "a part's sections end within its command");
        assert!(PARTS_S[part] <= COMMAND_S_MAX, "a command ends before it is killed");
        all += PARTS_S[part];
        part += 1;
    }
    assert!(all <= LOAN_S_MAX, "all commands fit a loan");
};
