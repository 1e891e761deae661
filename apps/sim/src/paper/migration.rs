//! Growing past one GPU: borrowing against live migration (v1 §6.3, Figure 9).
//!
//! A request outgrows an A100. Lagoon borrows from a second one. The alternative starts a new instance on two GPUs:
//! weights are downloaded, the engine loads them and starts, and the request's KV is recomputed there.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "token counts are small")]

use super::cluster::{Cluster, ETHERNET_BYTES_PER_S};
use super::hardware::{LLAMA2_7B, StepShape, Timing};
use super::measure::{Job, Measured, run_one};
use super::run::{Setting, Study};
use super::traces::Request;
use super::{Prefill, measure::run_all};
use std::fmt::Write as _;

/// Prompt and output of v1 Figure 9, in tokens.
pub const CASES: [(u32, u32); 4] = [(105_000, 5_000), (100_000, 10_000), (90_000, 20_000), (80_000, 30_000)];
/// The paper's speed-up of each case.
pub const PUBLISHED: [f64; 4] = [3.5, 2.2, 1.6, 1.4];
/// The paper's overhead of migration over that of communication.
pub const PUBLISHED_OVERHEADS: f64 = 45.0;
/// Reading the downloaded weights from a local NVMe disk into GPUs.
const LOAD_BYTES_PER_S: f64 = 2e9;
/// Starting an engine: processes, CUDA contexts, profiling, KV allocation.
const ENGINE_START_S: f64 = 30.0;
/// Tokens that one A100 holds (v1 §6.3); our memory model says 3 % more.
const ONE_GPU_TOKENS: u64 = 108_000;
/// Rows of a prefill step.
const CHUNK: u32 = 2_048;

/// One case, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    pub prompt: u32,
    pub output: u32,
    /// Lagoon's time from arrival to the last token.
    pub lagoon_s: f64,
    /// The part of it that an infinitely fast network would save.
    pub waiting_s: f64,
    /// Time that queries and partials were on the network, waited for or not.
    pub communication_s: f64,
    /// Computing before and after the migration.
    pub compute_s: f64,
    /// Download, load, start, and recomputed KV.
    pub migration_s: f64,
}

impl Case {
    /// Throughput with migration over that without.
    #[must_use]
    pub fn speedup(&self) -> f64 {
        (self.compute_s + self.migration_s) / self.lagoon_s
    }
}

/// Seconds that a migration takes beside computing.
#[must_use]
pub fn migration_s(context: u32) -> f64 {
    let two = Cluster::multi(LLAMA2_7B, 2, 2).timing();
    let weights = LLAMA2_7B.weight_bytes();
    weights / ETHERNET_BYTES_PER_S + weights / LOAD_BYTES_PER_S + ENGINE_START_S + prefill_s(&two, context)
}

fn prefill_s(timing: &Timing, context: u32) -> f64 {
    let rows = f64::from(CHUNK);
    let chunks = f64::from(context.div_ceil(CHUNK));
    let linear = timing.step(&StepShape { rows, prompt_rows: rows, seqs: 1.0, ..StepShape::default() }).linear_us;
    let pairs = f64::from(context) * f64::from(context) / 2.0;
    (chunks * linear + timing.attention_us(0.0, pairs)) / 1e6
}

/// Seconds to decode `tokens` tokens of one request from `context` on.
fn decode_s(timing: &Timing, context: u32, tokens: u32) -> f64 {
    let mean = f64::from(context) + f64::from(tokens) / 2.0;
    let shape = StepShape { rows: 1.0, sampled: 1.0, seqs: 1.0, decode_keys: mean, ..StepShape::default() };
    f64::from(tokens) * timing.step(&shape).total_us() / 1e6
}

/// All cases.
#[must_use]
pub fn cases() -> Vec<Case> {
    let pool = Setting {
        kv_tokens: ONE_GPU_TOKENS,
        prefill: Prefill::Computed,
        step_rows: CHUNK,
        ..Setting::new(Cluster::multi(LLAMA2_7B, 2, 1), true, 32)
    };
    let free = Setting { study: Study { free_network: true, ..pool.study }, ..pool };
    let jobs: Vec<Job> = CASES
        .iter()
        .flat_map(|(prompt, output)| {
            let request = Request { arrival_us: 0, prompt_tokens: *prompt, output_tokens: *output };
            [pool, free].map(|setting| Job { setting, requests: vec![request] })
        })
        .collect();
    let measured = run_all(&jobs, &|_| ());
    let ended = |m: &Measured| m.ended_s[0].unwrap_or(f64::INFINITY);
    let (one, two) = (Cluster::multi(LLAMA2_7B, 1, 1).timing(), Cluster::multi(LLAMA2_7B, 2, 2).timing());
    let full = ONE_GPU_TOKENS as u32;
    CASES
        .iter()
        .zip(measured.chunks_exact(2))
        .map(|((prompt, output), runs)| {
            // The first GPU is full when the context is; the remaining tokens are generated on both.
            let before = full.saturating_sub(*prompt).min(*output);
            let after = output - before;
            let compute_s = prefill_s(&one, *prompt) + decode_s(&one, *prompt, before) + decode_s(&two, full, after);
            let lagoon_s = ended(&runs[0]);
            let migration_s = if after > 0 { migration_s(full) } else { 0.0 };
            Case {
                prompt: *prompt,
                output: *output,
                lagoon_s,
                waiting_s: lagoon_s - ended(&runs[1]),
                communication_s: runs[0].exchange_s,
                compute_s,
                migration_s,
            }
        })
        .collect()
}

/// All cases as CSV.
#[must_use]
pub fn to_csv(cases: &[Case]) -> String {
    let mut text = String::from(
        "prompt,output,lagoon_s,of_it_waiting_for_the_network_s,frames_on_it_s,migration_compute_s,migration_overhead_s,speedup\n",
    );
    for c in cases {
        let _ = writeln!(
            text,
            "{},{},{:.1},{:.3},{:.3},{:.1},{:.1},{:.2}",
            c.prompt,
            c.output,
            c.lagoon_s,
            c.waiting_s,
            c.communication_s,
            c.compute_s,
            c.migration_s,
            c.speedup()
        );
    }
    text
}

/// One request through the shortest case, for tests.
#[must_use]
pub fn small() -> Measured {
    let setting = Setting::new(Cluster::multi(LLAMA2_7B, 2, 1), true, 256);
    let request = Request { arrival_us: 0, prompt_tokens: 111_000, output_tokens: 1_500 };
    run_one(&Job { setting, requests: vec![request] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_grows_past_its_gpu_without_a_break() {
        let grown = small();
        assert_eq!((grown.finished, grown.recoveries, grown.preemptions), (1, 0, 0));
        assert!(grown.borrowed_max > 0, "it borrowed");
        // A migration costs minutes.
        assert!(migration_s(110_000) > 100.0);
    }
}
