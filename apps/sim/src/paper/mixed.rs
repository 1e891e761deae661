//! A pool against no pool on a trace whose requests all fit one instance: the cluster of
//! `benches/benches/throughput.rs` in simulation, with the same trace from the same generator.
//!
//! The instances' device reads its weights in 10 ms a step and a full KV cache in 30 ms, the proportions of LLaMA2-7B
//! on an A100, and computes 150 rows in the same time. A token of KV stands for 54.5 of that model's, but a step for one
//! of its steps: rows of prompts have a scale of their own ([`Mix::prompt_scale`]). The model is the bundled one (4
//! layers): a step has an eighth of LLaMA2-7B's exchanges, and each weighs more.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "lengths and times are small, not negative"
)]

use super::cluster::Cluster;
use super::device::Prefill;
use super::hardware::{Chip, Model};
use super::measure::System;
use super::run::Setting;
use super::traces::Request;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Time to read the weights, in seconds.
pub const WEIGHTS_S: f64 = 10e-3;
/// Time to attend to a full KV cache, in seconds.
pub const CACHE_S: f64 = 30e-3;
/// Rows of a step whose arithmetic takes as long as reading the weights.
pub const ROWS_BALANCE: f64 = 150.0;
/// Tokens of LLaMA2-7B on an A100 that a token of KV stands for: 111,615 over [`Mix::kv_tokens`]' default.
pub const TOKEN_STANDS_FOR: f64 = 54.5;

/// The bundled model.
const PASSKEY: Model = Model {
    name: "passkey",
    layers: 4,
    hidden: 256,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    intermediate: 512,
    vocab: 1024,
};
/// One-way latency between processes of one machine, from loop to loop, and the rate of its QUIC, as the transport
/// benchmark measures them on two busy cores.
const LOOPBACK_LATENCY_US: f64 = 200.0;
const LOOPBACK_BYTES_PER_S: f64 = 5e8;

/// A mixed trace: Poisson arrivals, short requests and some that take most of an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    pub instances: u32,
    /// KV capacity of an instance, in tokens.
    pub kv_tokens: u32,
    pub requests: u32,
    /// Requests per second.
    pub rate: f64,
    pub long_percent: u32,
    /// A long request's prompt, as shares of an instance's capacity.
    pub long: (f64, f64),
    /// Rows of the modelled prompt that one row of a prompt stands for; 1: prompts cost next to nothing.
    pub prompt_scale: f64,
    pub seed: u64,
}

impl Default for Mix {
    fn default() -> Self {
        Self {
            instances: 4,
            kv_tokens: 2048,
            requests: 160,
            rate: 40.0,
            long_percent: 12,
            long: (0.55, 0.85),
            prompt_scale: TOKEN_STANDS_FOR,
            seed: 1,
        }
    }
}

impl Mix {
    /// The requests, in order of arrival.
    #[must_use]
    pub fn trace(&self) -> Vec<Request> {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        let mut at_s = 0.0;
        let request = |_| {
            let long = random.random_range(0..100) < self.long_percent;
            let share =
                if long { random.random_range(self.long.0..self.long.1) } else { random.random_range(0.01..0.08) };
            let prompt_tokens = (f64::from(self.kv_tokens) * share) as u32 + 1;
            let output_tokens = if long { random.random_range(96..192) } else { random.random_range(24..128) };
            let arrival_us = (at_s * 1e6) as u64;
            at_s += -(1.0 - random.random::<f64>()).ln() / self.rate;
            Request { arrival_us, prompt_tokens, output_tokens }
        };
        (0..self.requests).map(request).collect()
    }

    /// The benchmark's instances, as a pool or each on its own.
    #[must_use]
    pub fn setting(&self, system: System) -> Setting {
        let near = Cluster::multi(PASSKEY, self.instances, 1);
        let cluster = Cluster { near_bytes_per_s: LOOPBACK_BYTES_PER_S, near_latency_us: LOOPBACK_LATENCY_US, ..near };
        let mut setting = Setting::new(cluster, system == System::Lagoon, 16);
        let params = PASSKEY.step_params();
        let token_bytes = PASSKEY.kv_token_bytes();
        let attention_bytes_per_s = token_bytes * f64::from(self.kv_tokens) / CACHE_S;
        setting.timing.chip = Chip {
            gemm_flops: 2.0 * params * ROWS_BALANCE / WEIGHTS_S,
            gemm_bytes_per_s: 2.0 * params / WEIGHTS_S,
            // The modelled KV and its operations are scaled alike: balanced at 75 rows of two KV heads for four.
            attention_flops: attention_bytes_per_s * ROWS_BALANCE,
            attention_bytes_per_s,
            copy_bytes_per_s: attention_bytes_per_s / 10.0,
            kernel_gap_us: 3.0,
            prompt_scale: self.prompt_scale,
            ..setting.timing.chip
        };
        setting.kv_tokens = u64::from(self.kv_tokens);
        setting.prefill = Prefill::Computed;
        (setting.step_rows, setting.running) = (self.step_rows(), 64);
        setting
    }

    /// Rows of a step: 128 of the modelled device's, fewer where a prompt's row stands for many, and always more than a
    /// full batch of short requests.
    #[must_use]
    pub fn step_rows(&self) -> u32 {
        if self.prompt_scale > 2.0 { 48 } else { 128 }
    }
}
