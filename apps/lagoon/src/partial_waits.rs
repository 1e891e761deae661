//! Waits of steps for creditors: from a layer's queries to its last partials. The device attends to local KV meanwhile,
//! so a step may lose less than this.

use lagoon_types::StepId;
use metrics::histogram;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Maximum of steps measured at once: one for each micro-batch, and some that are ending.
const STEPS_MAX: usize = 4;

#[derive(Debug)]
struct Step {
    layer: u32,
    sent: Instant,
    /// Creditors that have not answered this layer.
    missing: usize,
    waited: Duration,
}

/// Waits of the steps in flight.
#[derive(Debug, Default)]
pub(crate) struct PartialWaits {
    steps: BTreeMap<StepId, Step>,
}

impl PartialWaits {
    /// A layer's queries were sent to `creditors` creditors.
    pub(crate) fn sent(&mut self, step: StepId, layer: u32, creditors: usize, now: Instant) {
        if creditors == 0 {
            return;
        }
        let waited = self.steps.remove(&step).map_or(Duration::ZERO, |s| s.waited);
        self.steps.insert(step, Step { layer, sent: now, missing: creditors, waited });
        // Steps are numbered in order: steps that ended without a report are the oldest.
        while self.steps.len() > STEPS_MAX {
            self.steps.pop_first();
        }
    }

    /// A creditor's partials of a layer arrived; returns the layer's wait if they were the last.
    pub(crate) fn came(&mut self, step: StepId, layer: u32, now: Instant) -> Option<Duration> {
        let step = self.steps.get_mut(&step).filter(|s| s.layer == layer && s.missing > 0)?;
        step.missing -= 1;
        if step.missing > 0 {
            return None;
        }
        let wait = now.saturating_duration_since(step.sent);
        step.waited += wait;
        histogram!("lagoon_layer_partials_wait_seconds").record(wait.as_secs_f64());
        Some(wait)
    }

    /// A step ended well; returns the sum of its layers' waits, if any.
    pub(crate) fn done(&mut self, step: StepId) -> Option<Duration> {
        let waited = self.steps.remove(&step)?.waited;
        histogram!("lagoon_step_partials_wait_seconds").record(waited.as_secs_f64());
        Some(waited)
    }

    /// A step failed: its wait does not count.
    pub(crate) fn failed(&mut self, step: StepId) {
        self.steps.remove(&step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_waits_for_its_last_creditor_and_a_step_for_its_layers() {
        let (mut waits, start, ms) = (PartialWaits::default(), Instant::now(), Duration::from_millis);
        let (one, two) = (StepId(1), StepId(2));
        waits.sent(one, 0, 2, start);
        waits.sent(two, 0, 1, start);
        assert_eq!(waits.came(one, 0, start + ms(3)), None);
        assert_eq!(waits.came(one, 1, start + ms(4)), None, "another layer's");
        assert_eq!(waits.came(one, 0, start + ms(5)), Some(ms(5)));
        assert_eq!(waits.came(one, 0, start + ms(6)), None, "one too many");
        waits.sent(one, 1, 1, start + ms(10));
        assert_eq!(waits.came(one, 1, start + ms(12)), Some(ms(2)));
        assert_eq!(waits.done(one), Some(ms(7)));
        assert_eq!(waits.done(one), None);
        waits.failed(two);
        assert_eq!(waits.done(two), None);
        // Layers without creditors and steps that end without a word cost nothing.
        waits.sent(one, 0, 0, start);
        assert_eq!(waits.done(one), None);
        (10..100).for_each(|step| waits.sent(StepId(step), 0, 1, start));
        assert_eq!(waits.steps.len(), STEPS_MAX);
    }
}
