//! What steps report of sequences in joint prefill.

use super::Steps;
use crate::batch::Batch;
use crate::cx::Cx;
use crate::outcome::{JointNews, Outcome};
use lagoon_types::{Chunk, StepId, StepPlan};

/// Reports the stripes whose last rows are in a step that starts. Returns whether the step's layers are to be reported.
pub(super) fn announce(cx: &mut Cx, batch: &Batch, plan: &StepPlan) -> bool {
    let mut announced = false;
    for chunk in &plan.chunks {
        let Some(joint) = batch.seq(chunk.seq).and_then(|seq| seq.joint.as_ref()) else { continue };
        announced = true;
        if let Some(stripe) = joint.ends_at(chunk.start + chunk.len, cx.config.block_tokens) {
            cx.emit(Outcome::Joint(JointNews::StripeStarted { seq: chunk.seq, stripe }));
        }
    }
    announced
}

/// Reports that a chunk is computed.
pub(super) fn computed(cx: &mut Cx, batch: &Batch, chunk: &Chunk) {
    if batch.seq(chunk.seq).is_some_and(|seq| seq.joint.is_some()) {
        cx.emit(Outcome::Joint(JointNews::Computed(chunk.seq)));
    }
}

impl Steps {
    /// A step's KV of a layer is in the store.
    pub(super) fn on_appended(&mut self, cx: &mut Cx, batch: &Batch, step: StepId, layer: u32) {
        let Some(flight) = self.flights.iter().flatten().find(|flight| flight.step == step) else { return };
        for chunk in &flight.chunks {
            if batch.seq(chunk.seq).is_some_and(|seq| seq.joint.is_some()) {
                cx.emit(Outcome::Joint(JointNews::Appended { seq: chunk.seq, layer, end: chunk.start + chunk.len }));
            }
        }
    }
}
