//! Attention plans on the device: made and uploaded once for a step's batch, used by every layer.

use super::lane::Lane;
use crate::driver::{Buffer, Context, CudaError};
use crate::kernels::attention::{Plan, Tuning};
use lagoon_backend::{AttnBatch, AttnRows};
use lagoon_types::{Alibi, AttentionGeometry, DType, KvRun};
use std::sync::Arc;

/// Plans that a lane keeps: the layers of a step repeat one, and steps' kinds alternate.
const PLANS_KEPT: usize = 8;
/// Bytes of a plan's buffer at least.
const PLAN_BYTES_MIN: usize = 64 << 10;

/// A plan and the call that it was made for.
#[derive(Debug)]
pub(super) struct PlanOnDevice {
    geometry: AttentionGeometry,
    scale: f32,
    window: Option<u32>,
    alibi: Option<Alibi>,
    seqs: Vec<AttnRows>,
    runs: Vec<KvRun>,
    store: (DType, bool),
    pub(super) plan: Plan,
    pub(super) count: Vec<u32>,
    buffer: Buffer,
    /// Where the slopes lie, or 0.
    pub(super) slopes: u64,
}

impl PlanOnDevice {
    fn fits(&self, batch: &AttnBatch<'_>, store: (DType, bool)) -> bool {
        self.geometry == batch.geometry
            && self.scale.to_bits() == batch.scale.to_bits()
            && self.window == batch.window
            && self.alibi == batch.alibi
            && self.store == store
            && self.seqs == batch.seqs
            && self.runs == batch.runs
    }

    /// Where the plan's arrays lie.
    pub(super) fn address(&self) -> u64 {
        self.buffer.address()
    }
}

/// The plans of one lane, the latest last.
#[derive(Debug, Default)]
pub(super) struct Plans {
    kept: Vec<PlanOnDevice>,
    bytes: Vec<u8>,
}

impl Plans {
    /// The plan for this call, made and uploaded unless a kept one fits.
    pub(super) fn get(
        &mut self,
        context: &Arc<Context>,
        lane: &mut Lane,
        batch: &AttnBatch<'_>,
        store: (DType, bool),
        tuning: &Tuning,
    ) -> Result<&PlanOnDevice, CudaError> {
        if let Some(at) = self.kept.iter().position(|kept| kept.fits(batch, store)) {
            let kept = self.kept.remove(at);
            self.kept.push(kept);
            return Ok(&self.kept[self.kept.len() - 1]);
        }
        // The oldest gives its memory: the lane's order keeps the upload behind the kernels that still read it.
        let old = (self.kept.len() == PLANS_KEPT).then(|| self.kept.remove(0));
        let (mut plan, buffer) = old.map_or((Plan::default(), None), |old| (old.plan, Some(old.buffer)));
        plan.make(batch, store.0, store.1, tuning);
        self.bytes.clear();
        plan.bytes(&mut self.bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let slopes_at = self.bytes.len();
        let slopes = batch.alibi.iter().flat_map(|alibi| alibi.slopes(batch.geometry.heads));
        self.bytes.extend(slopes.flat_map(f32::to_le_bytes));
        let buffer = match buffer {
            Some(buffer) if buffer.bytes() >= self.bytes.len() => buffer,
            _ => Buffer::new(context, "an attention plan", self.bytes.len().next_power_of_two().max(PLAN_BYTES_MIN))?,
        };
        lane.copy(buffer.address(), &self.bytes)?;
        let mut count = Vec::new();
        batch.fill_counts(&mut count);
        self.kept.push(PlanOnDevice {
            geometry: batch.geometry,
            scale: batch.scale,
            window: batch.window,
            alibi: batch.alibi,
            seqs: batch.seqs.to_vec(),
            runs: batch.runs.to_vec(),
            store,
            plan,
            count,
            slopes: if batch.alibi.is_some() { buffer.range(slopes_at, 0) } else { 0 },
            buffer,
        });
        Ok(&self.kept[self.kept.len() - 1])
    }
}
