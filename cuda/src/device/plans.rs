//! Attention plans on the device: made and uploaded once for a step's batch, used by all layers.

use super::work_stream::WorkStream;
use crate::driver::{Buffer, Context, CudaError};
use crate::kernels::attention::{Plan, Store, Tuning};
use lagoon_backend::{AttnBatch, AttnRows};
use lagoon_types::{Alibi, AttentionGeometry, KvRun};
use std::sync::Arc;

/// Plans cached per stream: the layers of a step repeat one, and kinds of steps alternate.
const PLANS_KEPT: usize = 8;
/// Plans of one recorded step.
const LISTED_KEPT: usize = 8;
/// Smallest size of a plan's buffer, in bytes.
const PLAN_BYTES_MIN: usize = 64 << 10;

/// A plan and the key of its call.
#[derive(Debug)]
pub(super) struct PlanOnDevice {
    geometry: AttentionGeometry,
    scale: f32,
    softcap: Option<f32>,
    window: Option<u32>,
    alibi: Option<Alibi>,
    seqs: Vec<AttnRows>,
    runs: Vec<KvRun>,
    store: Store,
    pub(super) plan: Plan,
    pub(super) count: Vec<u32>,
    place: Place,
    /// Address of the slopes, or 0.
    pub(super) slopes: u64,
}

/// Place of a plan's arrays: an own buffer, or the uploads of a recorded step.
#[derive(Debug)]
enum Place {
    Own(Buffer),
    Listed { step: u64, address: u64 },
}

impl PlanOnDevice {
    fn new(batch: &AttnBatch<'_>, store: Store, plan: Plan, place: Place, slopes: u64) -> Self {
        let mut count = Vec::new();
        batch.fill_counts(&mut count);
        Self {
            geometry: batch.geometry,
            scale: batch.scale,
            softcap: batch.softcap,
            window: batch.window,
            alibi: batch.alibi,
            seqs: batch.seqs.to_vec(),
            runs: batch.runs.to_vec(),
            store,
            plan,
            count,
            place,
            slopes,
        }
    }

    fn fits(&self, batch: &AttnBatch<'_>, store: Store) -> bool {
        self.geometry == batch.geometry
            && self.scale.to_bits() == batch.scale.to_bits()
            && self.softcap == batch.softcap
            && self.window == batch.window
            && self.alibi == batch.alibi
            && self.store == store
            && self.seqs == batch.seqs
            && self.runs == batch.runs
    }

    /// Address of the plan's arrays.
    pub(super) fn address(&self) -> u64 {
        match &self.place {
            Place::Own(buffer) => buffer.address(),
            Place::Listed { address, .. } => *address,
        }
    }
}

/// The plans of one stream, the latest last.
#[derive(Debug, Default)]
pub(super) struct Plans {
    kept: Vec<PlanOnDevice>,
    listed: Vec<PlanOnDevice>,
    bytes: Vec<u8>,
}

/// `n` rounded up by an eighth at most (or to a multiple of 4), so that slow growth seldom changes the result.
fn rounded(n: usize) -> usize {
    n.next_multiple_of((n.next_power_of_two() / 8).max(4))
}

impl Plans {
    /// The plan for this call, made and uploaded unless a kept one fits.
    pub(super) fn get(
        &mut self,
        context: &Arc<Context>,
        work_stream: &mut WorkStream,
        batch: &AttnBatch<'_>,
        store: Store,
        tuning: &Tuning,
    ) -> Result<&PlanOnDevice, CudaError> {
        if let Some(step) = work_stream.listed_step()
            && let Some(at) = self.listed(work_stream, batch, store, tuning, step)?
        {
            return Ok(&self.listed[at]);
        }
        if let Some(at) = self.kept.iter().position(|kept| kept.fits(batch, store)) {
            let kept = self.kept.remove(at);
            self.kept.push(kept);
            return Ok(&self.kept[self.kept.len() - 1]);
        }
        // Reuses the oldest plan's buffer: the stream's order keeps the upload behind kernels that still read it.
        let old = (self.kept.len() == PLANS_KEPT).then(|| self.kept.remove(0));
        let (mut plan, buffer) = old.map_or((Plan::default(), None), |old| match old.place {
            Place::Own(buffer) => (old.plan, Some(buffer)),
            Place::Listed { .. } => (old.plan, None),
        });
        plan.make(batch, store, tuning);
        let slopes_at = self.fill(&plan, batch, |bytes| bytes.next_multiple_of(16));
        let buffer = match buffer {
            Some(buffer) if buffer.bytes() >= self.bytes.len() => buffer,
            _ => Buffer::new(context, "an attention plan", self.bytes.len().next_power_of_two().max(PLAN_BYTES_MIN))?,
        };
        work_stream.copy(buffer.address(), &self.bytes)?;
        let slopes = if batch.alibi.is_some() { buffer.range(slopes_at, 0) } else { 0 };
        self.kept.push(PlanOnDevice::new(batch, store, plan, Place::Own(buffer), slopes));
        Ok(&self.kept[self.kept.len() - 1])
    }

    /// Lays out the plan's bytes and, at the returned offset, the slopes. `round` aligns that offset.
    fn fill(&mut self, plan: &Plan, batch: &AttnBatch<'_>, round: impl FnOnce(usize) -> usize) -> usize {
        self.bytes.clear();
        plan.bytes(&mut self.bytes);
        self.bytes.resize(round(self.bytes.len()), 0);
        let at = self.bytes.len();
        let slopes = batch.alibi.iter().flat_map(|alibi| alibi.slopes(batch.geometry.heads));
        self.bytes.extend(slopes.flat_map(f32::to_le_bytes));
        at
    }

    /// The index of the plan for this call of a recorded step, with padded sizes that neighbouring steps share.
    /// `None` if the step has ended because it uploads too much.
    fn listed(
        &mut self,
        work_stream: &mut WorkStream,
        batch: &AttnBatch<'_>,
        store: Store,
        tuning: &Tuning,
        now: u64,
    ) -> Result<Option<usize>, CudaError> {
        let of_now = |kept: &PlanOnDevice| matches!(kept.place, Place::Listed { step, .. } if step == now);
        if let Some(at) = self.listed.iter().position(|kept| of_now(kept) && kept.fits(batch, store)) {
            return Ok(Some(at));
        }
        // Reuses the memory of plans of earlier steps.
        let old = self.listed.iter().position(|kept| !of_now(kept)).or((self.listed.len() == LISTED_KEPT).then_some(0));
        let mut plan = old.map(|at| self.listed.swap_remove(at)).map_or_else(Plan::default, |old| old.plan);
        plan.make(batch, store, tuning);
        let [decode, _, _, merges] = plan.counts();
        plan.pad(rounded(decode), rounded(merges));
        plan.piece_rows = u32::try_from(rounded(plan.piece_rows as usize)).expect("rows fit");
        let slopes_at = self.fill(&plan, batch, |bytes| rounded(bytes).next_multiple_of(16));
        let address = work_stream.upload(&self.bytes)?;
        if work_stream.listed_step() != Some(now) {
            return Ok(None);
        }
        let slopes = if batch.alibi.is_some() { address + slopes_at as u64 } else { 0 };
        self.listed.push(PlanOnDevice::new(batch, store, plan, Place::Listed { step: now, address }, slopes));
        Ok(Some(self.listed.len() - 1))
    }
}
