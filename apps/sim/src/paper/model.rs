//! Predicted throughput of a debtor, a creditor and both, over the blocks moved: v2 Figure 7, by the planner's own
//! performance model ([`lagoon_cluster::perf`]).
//!
//! [`curve`] takes any instance's [`Calibration`], so our pool's prediction can be compared with its benchmark.
//! [`figure_7`] is the paper's setting: two A100s with LLaMA2-7B, 500-token requests on the creditor, one long
//! request on the debtor. The paper prints 1000K tokens for it, which would take 500 GB: 100K is what one A100 holds
//! beside a small batch. Its batches and block size are not published. The creditor's batch is the one free parameter
//! here: it is chosen so that without moves the total is the published 6500 tokens/s; the rest follows.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "batches and blocks are small and positive"
)]

use super::cluster::{NVLINK_BYTES_PER_S, NVLINK_LATENCY_US};
use super::hardware::{LLAMA2_7B, Parallel, Timing};
use lagoon_cluster::perf::{CreditorState, DebtorState, LinkView, ModelConfig, ModelShape, Pair, Rates};
use lagoon_protocol::Calibration;

/// A debtor with one long request and a queue of short ones, and a creditor that runs short ones.
#[derive(Clone, Debug, PartialEq)]
pub struct PairSpec {
    /// Calibration of either instance.
    pub calibration: Calibration,
    pub shape: ModelShape,
    pub link: LinkView,
    /// Tokens of KV that one instance has room for.
    pub capacity_tokens: u64,
    /// The debtor's long request.
    pub long_tokens: u64,
    /// Tokens that a short request holds on average while it runs.
    pub short_tokens: u64,
    /// Short requests on the creditor before any move. The debtor fills its free room with them.
    pub creditor_batch: u32,
    pub config: ModelConfig,
}

/// One point of the curve, in tokens per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurvePoint {
    pub blocks: u32,
    pub debtor: f64,
    pub creditor: f64,
    pub debtor_batch: u32,
    pub creditor_batch: u32,
}

impl CurvePoint {
    /// Tokens per second of both instances.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.debtor + self.creditor
    }
}

/// Throughput with 0, `step`, 2 `step`, ... blocks moved, as long as they fit the creditor. `None` if the calibration
/// is invalid.
#[must_use]
pub fn curve(spec: &PairSpec, step: u32) -> Option<Vec<CurvePoint>> {
    let block = u64::from(spec.shape.block_tokens);
    let most = spec.long_tokens.min(spec.capacity_tokens) / block;
    (0..=most as u32).step_by(step.max(1) as usize).map(|blocks| point(spec, blocks)).collect()
}

fn point(spec: &PairSpec, blocks: u32) -> Option<CurvePoint> {
    let rates = Rates::new(&spec.calibration, true)?;
    let block = u64::from(spec.shape.block_tokens);
    let room = spec.capacity_tokens.saturating_sub(spec.long_tokens);
    let beside = (room / spec.short_tokens) as u32;
    let remote_request = u64::from(blocks) * block;
    // The creditor's batch shrinks to what fits beside the remote request (v2 §5.2.2).
    let creditor_batch =
        spec.creditor_batch.min((spec.capacity_tokens.saturating_sub(remote_request) / spec.short_tokens) as u32);
    let need = spec.short_tokens.div_ceil(block) as u32;
    let queue = vec![need; 4096];
    let pair = Pair {
        shape: spec.shape,
        config: spec.config,
        debtor: DebtorState {
            rates,
            batch: 1 + beside,
            batch_max: u32::MAX,
            remote_rows: 0,
            local_tokens: (spec.long_tokens + u64::from(beside) * spec.short_tokens) as f64,
            remote_request_tokens: 0.0,
            spare: 0,
            sequence_blocks: i64::from(need),
            queue: &queue,
            elsewhere_us: 0.0,
        },
        creditor: CreditorState {
            rates,
            batch: creditor_batch,
            tokens: (u64::from(creditor_batch) * spec.short_tokens) as f64,
            wait_us: 0.0,
        },
        link: spec.link,
        mapped: false,
        blocks_there: 0,
        rows_there: 0,
        request_there: 0,
        request_remote: 0,
    };
    let predicted = pair.predict(i64::from(blocks));
    Some(CurvePoint {
        blocks,
        debtor: predicted.debtor_tokens_per_s,
        creditor: predicted.creditor_tokens_per_s,
        debtor_batch: predicted.batch,
        creditor_batch,
    })
}

/// The published total throughput without moves (v2 §5.2.3).
pub const FIGURE_7_START: f64 = 6_500.0;
/// The published maximum and its place.
pub const FIGURE_7_BEST: (u32, f64) = (200, 8_800.0);
/// Tokens of a block, not published. With vLLM's 16, 200 blocks would make room for half a dozen requests only.
const FIGURE_7_BLOCK_TOKENS: u32 = 256;

/// The setting of Figure 7, for the planner's model of the papers' engine or of Lagoon's micro-batches.
#[must_use]
pub fn figure_7(config: ModelConfig) -> PairSpec {
    let timing = Timing::new(LLAMA2_7B, Parallel::tp(1));
    let model = timing.model;
    let layer = f64::from(model.layers);
    let row_bytes = (model.query_row_bytes() + model.partial_row_bytes()) / layer;
    let mut spec = PairSpec {
        calibration: timing.calibration(),
        shape: ModelShape {
            layers: model.layers,
            block_tokens: FIGURE_7_BLOCK_TOKENS,
            token_bytes: model.kv_token_bytes() as u64,
            row_bytes: row_bytes as u64,
        },
        link: LinkView { rtt_us: 2.0 * NVLINK_LATENCY_US, bytes_per_s: NVLINK_BYTES_PER_S },
        capacity_tokens: timing.kv_tokens(),
        long_tokens: 100_000,
        // Requests of 500 tokens are half grown on average.
        short_tokens: 250,
        creditor_batch: 1,
        config,
    };
    let most = (spec.capacity_tokens / spec.short_tokens) as u32;
    let off = |batch: &u32| {
        let at = point(&PairSpec { creditor_batch: *batch, ..spec.clone() }, 0);
        at.map_or(f64::INFINITY, |p| (p.total() - FIGURE_7_START).abs())
    };
    spec.creditor_batch = (1..=most).min_by(|a, b| off(a).total_cmp(&off(b))).unwrap_or(1);
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure_7_starts_at_the_published_point_rises_and_falls() {
        let spec = figure_7(ModelConfig::paper());
        let points = curve(&spec, 4).unwrap();
        assert!((points[0].total() / FIGURE_7_START - 1.0).abs() < 0.02, "{:?}", points[0]);
        let best = points.iter().max_by(|a, b| a.total().total_cmp(&b.total())).unwrap();
        assert!(best.blocks > 0 && best.total() > 1.1 * points[0].total(), "{best:?}");
        let last = points.last().unwrap();
        assert!(last.total() < best.total(), "too much moved costs the creditor its batch: {last:?}");
        assert!(points.windows(2).all(|w| w[1].creditor <= w[0].creditor), "a remote request never helps its host");
        let broken = PairSpec { calibration: Calibration::default(), ..spec };
        assert_eq!(curve(&broken, 4), None);
    }
}
