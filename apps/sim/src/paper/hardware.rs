//! The performance model: times of a step on A100s, from published figures only.
//!
//! | figure | value | source |
//! |---|---|---|
//! | dense bf16 peak | 312 TFLOP/s | NVIDIA A100 data sheet |
//! | HBM2e | 2,039 GB/s | NVIDIA A100 80GB data sheet |
//! | NVLink, one direction | 300 GB/s | data sheet (600 GB/s both ways, v2 §7.1) |
//! | network between nodes | 125 MB/s | v2 §7.1 |
//! | GEMM, share of peak | 0.65 | usual for large bf16 GEMMs of LLM inference |
//! | GEMV, share of HBM | 0.80 | usual for weight streaming |
//! | prefill attention, share of peak | 0.60 | FlashAttention-2: 50 to 73 % of A100 peak |
//! | decode attention, share of HBM | 0.85 | usual for split-KV decode kernels |
//! | kernels of a layer and their gap | 10 at 4 µs | eager launches of the papers' time |
//! | all-reduce, bus bandwidth | 230 GB/s | nccl-tests on DGX A100 |
//! | all-reduce, small message | 10, 14, 20 µs at 2, 4, 8 GPUs | nccl-tests on DGX A100 |
//! | memory for weights and KV | 90 % of 80 GB | vLLM's `gpu_memory_utilization` |
//! | host, per step and per sequence | 500 and 10 µs | assumed: a tenth of vLLM 0.5's, see [`HOST_STEP_US`] |
//!
//! Times are in microseconds, sizes in bytes, as f64.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes are far below 2^53 and not negative"
)]

use lagoon_protocol::{BatchPoint, Calibration};

const PEAK_FLOPS: f64 = 312e12;
const HBM_BYTES_PER_S: f64 = 2_039e9;
const GPU_BYTES: f64 = 80e9;
const MEMORY_SHARE: f64 = 0.90;
const GEMM_SHARE: f64 = 0.65;
const GEMV_SHARE: f64 = 0.80;
const PREFILL_ATTENTION_SHARE: f64 = 0.60;
const DECODE_ATTENTION_SHARE: f64 = 0.85;

/// Effective rates of a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chip {
    pub gemm_flops: f64,
    /// Rate of streaming weights.
    pub gemm_bytes_per_s: f64,
    pub attention_flops: f64,
    /// Rate of reading KV in decode attention.
    pub attention_bytes_per_s: f64,
    /// Rate of copying KV out of and into its store.
    pub copy_bytes_per_s: f64,
    pub kernel_gap_us: f64,
    /// Memory for weights and KV.
    pub memory_bytes: f64,
    /// Tokens of the modelled prompt that one row of a prompt stands for, where lengths are scaled and steps are not.
    pub prompt_scale: f64,
}

/// The A100 by the table above.
pub const A100: Chip = Chip {
    gemm_flops: PEAK_FLOPS * GEMM_SHARE,
    gemm_bytes_per_s: HBM_BYTES_PER_S * GEMV_SHARE,
    attention_flops: PEAK_FLOPS * PREFILL_ATTENTION_SHARE,
    attention_bytes_per_s: HBM_BYTES_PER_S * DECODE_ATTENTION_SHARE,
    copy_bytes_per_s: HBM_BYTES_PER_S * GEMV_SHARE / 2.0,
    kernel_gap_us: 4.0,
    memory_bytes: GPU_BYTES * MEMORY_SHARE,
    prompt_scale: 1.0,
};

/// Time of the host between two steps, which the GPUs wait for, and its part per sequence: schedule, build inputs, read
/// results. Assumed, the same for every system. vLLM 0.5.3 spent 0.76 of the GPU's time on it (29 % of all against 38 %,
/// LLaMA3-8B on an H100; vLLM's report on 0.6.0, September 2024), which is about ten times as much.
pub const HOST_STEP_US: f64 = 500.0;
/// Host time of a step for each sequence, in microseconds.
pub const HOST_SEQ_US: f64 = 10.0;
const KERNELS_PER_LAYER: f64 = 10.0;
/// Kernels of a remote request in a layer: the attention and its reduction.
const KERNELS_PER_REMOTE_REQUEST_LAYER: f64 = 2.0;
const ALL_REDUCE_BYTES_PER_S: f64 = 230e9;
const ELEMENT_BYTES: f64 = 2.0;
const MICRO: f64 = 1e6;

/// A model's sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    pub name: &'static str,
    pub layers: u32,
    pub hidden: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub intermediate: u32,
    pub vocab: u32,
}

/// LLaMA2-7B in 16 bits (arXiv:2307.09288, Table 1).
pub const LLAMA2_7B: Model = Model {
    name: "LLaMA2-7B",
    layers: 32,
    hidden: 4096,
    heads: 32,
    kv_heads: 32,
    head_dim: 128,
    intermediate: 11_008,
    vocab: 32_000,
};
/// LLaMA2-13B in 16 bits.
pub const LLAMA2_13B: Model =
    Model { name: "LLaMA2-13B", layers: 40, hidden: 5120, heads: 40, kv_heads: 40, intermediate: 13_824, ..LLAMA2_7B };
/// LLaMA2-70B in 16 bits, with grouped queries.
pub const LLAMA2_70B: Model =
    Model { name: "LLaMA2-70B", layers: 80, hidden: 8192, heads: 64, kv_heads: 8, intermediate: 28_672, ..LLAMA2_7B };

impl Model {
    fn q_dim(&self) -> f64 {
        f64::from(self.heads * self.head_dim)
    }

    fn kv_dim(&self) -> f64 {
        f64::from(self.kv_heads * self.head_dim)
    }

    /// Number of weights in one layer's matrices.
    fn layer_params(&self) -> f64 {
        let (h, i) = (f64::from(self.hidden), f64::from(self.intermediate));
        2.0 * h * self.q_dim() + 2.0 * h * self.kv_dim() + 3.0 * h * i
    }

    fn head_params(&self) -> f64 {
        f64::from(self.hidden) * f64::from(self.vocab)
    }

    /// Bytes of all weights.
    #[must_use]
    pub fn weight_bytes(&self) -> f64 {
        (f64::from(self.layers) * self.layer_params() + 2.0 * self.head_params()) * ELEMENT_BYTES
    }

    /// Number of weights that a step reads.
    #[must_use]
    pub fn step_params(&self) -> f64 {
        f64::from(self.layers) * self.layer_params() + self.head_params()
    }

    /// Bytes of one token's KV in all layers.
    #[must_use]
    pub fn kv_token_bytes(&self) -> f64 {
        2.0 * self.kv_dim() * ELEMENT_BYTES * f64::from(self.layers)
    }

    /// Bytes of one row's queries in all layers.
    #[must_use]
    pub fn query_row_bytes(&self) -> f64 {
        self.q_dim() * ELEMENT_BYTES * f64::from(self.layers)
    }

    /// Bytes of one row's partial in all layers: output, log-sum-exp and count.
    #[must_use]
    pub fn partial_row_bytes(&self) -> f64 {
        (self.q_dim() * ELEMENT_BYTES + f64::from(self.heads) * 4.0 + 4.0) * f64::from(self.layers)
    }
}

/// Parallelism of one instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parallel {
    pub tp: u32,
    pub pp: u32,
    /// Several micro-batches are in flight in the pipeline; otherwise one batch passes all stages before the next
    /// begins.
    pub pipelined: bool,
    /// Bytes per second and latency between pipeline stages.
    pub stage_bytes_per_s: f64,
    pub stage_latency_us: f64,
}

impl Parallel {
    /// Tensor parallelism within a node.
    #[must_use]
    pub const fn tp(tp: u32) -> Self {
        Self { tp, pp: 1, pipelined: true, stage_bytes_per_s: 1.0, stage_latency_us: 0.0 }
    }

    /// GPUs of an instance.
    #[must_use]
    pub const fn gpus(&self) -> u32 {
        self.tp * self.pp
    }
}

/// Size of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepShape {
    /// Rows through the linear layers, and those of them that are rows of prompts.
    pub rows: f64,
    pub prompt_rows: f64,
    /// Rows whose logits are needed.
    pub sampled: f64,
    /// Sequences in the step.
    pub seqs: f64,
    /// Keys that decode rows read, summed over rows.
    pub decode_keys: f64,
    /// Query-key pairs of prefill rows.
    pub prefill_pairs: f64,
    /// Attention of the sequence that has the most, in microseconds: a pipeline cannot divide it.
    pub longest_us: f64,
}

/// Times of the two parts of a step, without communication with creditors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    pub linear_us: f64,
    pub attention_us: f64,
}

impl StepTime {
    /// Time of the whole step, in microseconds.
    #[must_use]
    pub fn total_us(&self) -> f64 {
        self.linear_us + self.attention_us
    }
}

/// A model on the GPUs of one instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    pub model: Model,
    pub parallel: Parallel,
    pub chip: Chip,
    /// Host time per step, and per sequence of a step, that the GPUs wait for.
    pub host_step_us: f64,
    pub host_seq_us: f64,
}

impl Timing {
    /// Times of a model on so many A100s.
    #[must_use]
    pub const fn new(model: Model, parallel: Parallel) -> Self {
        Self { model, parallel, chip: A100, host_step_us: HOST_STEP_US, host_seq_us: HOST_SEQ_US }
    }

    /// KV capacity of the instance in tokens.
    #[must_use]
    pub fn kv_tokens(&self) -> u64 {
        let bytes = f64::from(self.parallel.gpus()) * self.chip.memory_bytes - self.model.weight_bytes();
        (bytes.max(0.0) / self.model.kv_token_bytes()) as u64
    }

    /// Time of one matrix product: the longer of streaming its weights and computing.
    fn gemm_us(&self, params: f64, rows: f64) -> f64 {
        let tp = f64::from(self.parallel.tp);
        let stream = params * ELEMENT_BYTES / tp / self.chip.gemm_bytes_per_s;
        let compute = 2.0 * params * rows / tp / self.chip.gemm_flops;
        stream.max(compute) * MICRO
    }

    fn all_reduce_us(&self, rows: f64) -> f64 {
        let tp = f64::from(self.parallel.tp);
        let small_us = match self.parallel.tp {
            1 => return 0.0,
            2 => 10.0,
            3 | 4 => 14.0,
            _ => 20.0,
        };
        let bytes = rows * f64::from(self.model.hidden) * ELEMENT_BYTES;
        small_us + 2.0 * (tp - 1.0) / tp * bytes / ALL_REDUCE_BYTES_PER_S * MICRO
    }

    /// Time of all layers without attention, for one batch of `rows`.
    fn linear_us(&self, rows: f64, sampled: f64) -> f64 {
        let layer = self.gemm_us(self.model.layer_params(), rows)
            + KERNELS_PER_LAYER * self.chip.kernel_gap_us
            + 2.0 * self.all_reduce_us(rows);
        f64::from(self.model.layers) * layer + self.gemm_us(self.model.head_params(), sampled)
    }

    /// Attention over keys and pairs, all layers.
    #[must_use]
    pub fn attention_us(&self, decode_keys: f64, prefill_pairs: f64) -> f64 {
        let tp = f64::from(self.parallel.tp);
        let read = decode_keys * self.model.kv_token_bytes() / tp / self.chip.attention_bytes_per_s;
        let pairs = prefill_pairs * self.chip.prompt_scale;
        let flops = 4.0 * self.model.q_dim() * f64::from(self.model.layers) * pairs;
        (read + flops / tp / self.chip.attention_flops) * MICRO
    }

    /// Time of copying `tokens` tokens' KV out of the store or into it.
    #[must_use]
    pub fn copy_us(&self, tokens: f64) -> f64 {
        tokens * self.model.kv_token_bytes() / f64::from(self.parallel.tp) / self.chip.copy_bytes_per_s * MICRO
    }

    /// Micro attention for a peer, all layers.
    #[must_use]
    pub fn remote_request_us(&self, decode_keys: f64, prefill_pairs: f64) -> f64 {
        let kernels = f64::from(self.model.layers) * KERNELS_PER_REMOTE_REQUEST_LAYER * self.chip.kernel_gap_us;
        kernels + self.attention_us(decode_keys, prefill_pairs)
    }

    /// Time of one step. With a pipeline, the time in which every sequence of the batch advances by one step.
    #[must_use]
    pub fn step(&self, shape: &StepShape) -> StepTime {
        if shape.rows <= 0.0 {
            return StepTime::default();
        }
        let attention = self.attention_us(shape.decode_keys, shape.prefill_pairs);
        let host = self.host_step_us + self.host_seq_us * shape.seqs;
        let rows = shape.rows + shape.prompt_rows * (self.chip.prompt_scale - 1.0);
        if self.parallel.pp == 1 {
            return StepTime { linear_us: host + self.linear_us(rows, shape.sampled), attention_us: attention };
        }
        let pp = f64::from(self.parallel.pp);
        let micro = if self.parallel.pipelined { pp.min(shape.seqs.max(1.0)) } else { 1.0 };
        let transfer = rows / micro * f64::from(self.model.hidden) * ELEMENT_BYTES;
        let transfer_us = self.parallel.stage_latency_us + transfer / self.parallel.stage_bytes_per_s * MICRO;
        // A stage's time for one micro-batch. Stages work in parallel on different micro-batches: a full pipeline's
        // round takes one stage time for each stage.
        let linear_us = self.linear_us(rows / micro, shape.sampled / micro) / pp;
        let filled_us = pp * (linear_us + attention / micro / pp).max(transfer_us);
        // No round is shorter than the way of the slowest micro-batch through all stages: that of the longest sequence,
        // whose attention no other micro-batch can take over.
        let slowest = (attention / micro).max(shape.longest_us.min(attention));
        let round_us = filled_us.max(pp * (linear_us + transfer_us) + slowest);
        StepTime { linear_us: host + round_us - slowest, attention_us: slowest }
    }

    /// The calibration that an instance with this timing would measure.
    #[must_use]
    pub fn calibration(&self) -> Calibration {
        let batches = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
        let point = |batch: u32| {
            let rows = f64::from(batch);
            let shape = StepShape { rows, sampled: rows, seqs: rows, ..StepShape::default() };
            BatchPoint { batch, step_us: self.step(&shape).linear_us }
        };
        let chunk = StepShape { rows: 2048.0, prompt_rows: 2048.0, seqs: 1.0, ..StepShape::default() };
        Calibration {
            batches: batches.into_iter().map(point).collect(),
            attention_us_per_ktoken: self.attention_us(1024.0, 0.0),
            prefill_us_per_token: self.step(&chunk).total_us() / chunk.rows,
            copy_bytes_per_s: self.chip.copy_bytes_per_s,
            prompt_attention_us_per_ktoken: self.attention_us(0.0, 1024.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_models() {
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 0.01;
        assert!(near(LLAMA2_7B.weight_bytes(), 2.0 * 6.738e9), "{}", LLAMA2_7B.weight_bytes());
        assert!(near(LLAMA2_13B.weight_bytes(), 2.0 * 13.016e9), "{}", LLAMA2_13B.weight_bytes());
        assert!(near(LLAMA2_70B.weight_bytes(), 2.0 * 68.977e9), "{}", LLAMA2_70B.weight_bytes());
        assert_eq!(LLAMA2_7B.kv_token_bytes(), 524_288.0);
        assert_eq!(LLAMA2_70B.kv_token_bytes(), 327_680.0);
    }

    /// v1 §6.3: one A100 holds 108k tokens of LLaMA2-7B. v2 §2.2: the non-attention layers of a lone request reach about
    /// a third of one GPU's efficiency on eight.
    #[test]
    fn published_points_that_are_not_inputs_are_met() {
        let one = Timing::new(LLAMA2_7B, Parallel::tp(1));
        assert!((one.kv_tokens() as f64 / 108_000.0 - 1.0).abs() < 0.05, "{}", one.kv_tokens());
        let eight = Timing::new(LLAMA2_7B, Parallel::tp(8));
        let shape = StepShape { rows: 1.0, sampled: 1.0, seqs: 1.0, ..StepShape::default() };
        // The layers alone: the published figure is the GPUs' efficiency.
        let layers = |timing: Timing| Timing { host_step_us: 0.0, host_seq_us: 0.0, ..timing }.step(&shape).linear_us;
        let efficiency = layers(one) / 8.0 / layers(eight);
        assert!((0.25..0.45).contains(&efficiency), "{efficiency}");
    }

    #[test]
    fn a_pipeline_helps_only_when_it_is_filled() {
        let stage = Parallel { tp: 8, pp: 4, pipelined: true, stage_bytes_per_s: 125e6, stage_latency_us: 50.0 };
        let shape = |seqs: f64| StepShape {
            rows: seqs,
            sampled: seqs,
            seqs,
            decode_keys: 400_000.0 * seqs,
            ..StepShape::default()
        };
        let filled = Timing::new(LLAMA2_7B, stage);
        let alone = Timing::new(LLAMA2_7B, Parallel { pipelined: false, ..stage });
        assert_eq!(filled.step(&shape(1.0)), alone.step(&shape(1.0)));
        let ratio = alone.step(&shape(8.0)).total_us() / filled.step(&shape(8.0)).total_us();
        assert!((2.0..4.0).contains(&ratio), "{ratio}");
    }

    /// Seven short sequences and a long one: a pipeline of four cannot give the long one's attention to other stages at
    /// the same time.
    #[test]
    fn a_pipeline_does_not_divide_one_sequence() {
        let stage = Parallel { tp: 8, pp: 4, pipelined: true, stage_bytes_per_s: 125e6, stage_latency_us: 50.0 };
        let timing = Timing::new(LLAMA2_7B, stage);
        let (short, long) = (1_000.0, 800_000.0);
        let shape = StepShape {
            rows: 8.0,
            sampled: 8.0,
            seqs: 8.0,
            decode_keys: 7.0 * short + long,
            longest_us: timing.attention_us(long, 0.0),
            ..StepShape::default()
        };
        let divided = timing.step(&StepShape { longest_us: 0.0, ..shape });
        let whole = timing.step(&shape);
        assert!(whole.attention_us >= timing.attention_us(long, 0.0), "{whole:?}");
        assert!(whole.total_us() > 2.0 * divided.total_us(), "{whole:?}, not {divided:?}");
    }

    #[test]
    fn a_step_has_host_time_and_rows_of_prompts_have_their_own_scale() {
        let timing = Timing::new(LLAMA2_7B, Parallel::tp(1));
        let bare = Timing { host_step_us: 0.0, host_seq_us: 0.0, ..timing };
        let shape = StepShape { rows: 64.0, sampled: 64.0, seqs: 64.0, decode_keys: 64e3, ..StepShape::default() };
        let host_us = timing.step(&shape).total_us() - bare.step(&shape).total_us();
        assert!((host_us - HOST_STEP_US - 64.0 * HOST_SEQ_US).abs() < 1e-6, "{host_us}");
        let scaled = Timing { chip: Chip { prompt_scale: 10.0, ..bare.chip }, ..bare };
        assert_eq!(scaled.step(&shape), bare.step(&shape), "decoding has none");
        let prompt = StepShape { rows: 1e3, prompt_rows: 1e3, seqs: 1.0, prefill_pairs: 5e5, ..StepShape::default() };
        let ten = StepShape { rows: 1e4, prompt_rows: 1e4, prefill_pairs: 5e6, ..prompt };
        assert!((scaled.step(&prompt).total_us() / bare.step(&ten).total_us() - 1.0).abs() < 1e-9);
    }
}
