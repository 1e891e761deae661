//! Pace of moves while the device computes (Infinite-LLM v2 §7.4, Figure 12a).
//!
//! Each step that ends allows some tokens to move: one for every prompt row that it computed, and, for every sequence
//! that grew, as many as overlap with decoding for free. That number is measured: decoding steps with moves are
//! compared with decoding steps without. It grows while their times are equal, and is halved when they are not. It is
//! never less than one, so that moving keeps up with growth.

use lagoon_types::limits::{MOVE_TOKENS_PER_STEP, MOVE_TOKENS_PER_STEP_MAX};

/// Steps of a kind whose times are averaged for a comparison.
const SAMPLES: u32 = 16;
/// Steps with moves between two measurements of steps without.
const PROBE_EVERY: u32 = 128;
/// Ratio of step times, with moves to without, above which moves slow decoding down.
const SLOWER_MAX: f64 = 1.05;

/// Fixed pace of moves beside decoding, for benchmarks of the cost of moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovePace {
    /// Tokens per growing sequence in one step; `None`: as measured.
    pub tokens_per_step: Option<u32>,
    /// Whether steps go on while KV is copied. If not, a step waits until the copies requested beside the step before
    /// are done.
    pub overlap: bool,
}

impl Default for MovePace {
    fn default() -> Self {
        Self { tokens_per_step: None, overlap: true }
    }
}

/// The pace. See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    set: MovePace,
    /// Tokens per growing sequence in one step.
    tokens: u32,
    /// Tokens times layers that may move now; below 0 after moving more.
    credit: i64,
    layers: u32,
    block_tokens: u32,
    /// Whether KV has moved since the last step ended.
    moved: bool,
    /// Sum and number of step times, without and with moves.
    quiet: (f64, u32),
    busy: (f64, u32),
    /// Mean time of a step without moves, once measured.
    baseline: Option<f64>,
    since_probe: u32,
}

impl Pace {
    pub(crate) fn new(layers: u32, block_tokens: u32) -> Self {
        Self {
            set: MovePace::default(),
            tokens: MOVE_TOKENS_PER_STEP,
            credit: 0,
            layers,
            block_tokens,
            moved: false,
            quiet: (0.0, 0),
            busy: (0.0, 0),
            baseline: None,
            since_probe: 0,
        }
    }

    pub(crate) fn set(&mut self, set: MovePace) {
        self.set = set;
        self.tokens = set.tokens_per_step.unwrap_or(self.tokens);
    }

    /// Whether steps go on while KV is copied.
    pub(crate) fn overlaps(&self) -> bool {
        self.set.overlap
    }

    /// Tokens per growing sequence in one step.
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Whether one layer of a block may move while the device computes.
    pub(crate) fn allows(&self) -> bool {
        self.credit > 0
    }

    /// Spends the credit of one layer of a block.
    pub(crate) fn spend(&mut self) {
        self.credit -= i64::from(self.block_tokens);
        self.moved = true;
    }

    /// Grants a little credit as time passes, so that a long step does not stop a move.
    pub(crate) fn tick(&mut self) {
        if self.set.tokens_per_step.is_none() {
            self.grant(1);
        }
    }

    fn grant(&mut self, tokens: u32) {
        let granted = i64::from(tokens) * i64::from(self.layers);
        // Unused credit is not saved up, except for one block.
        let most = granted.max(i64::from(self.block_tokens) * i64::from(self.layers));
        self.credit = (self.credit + granted).min(most);
    }

    /// Grants the credit of a step that ended: sequences that grew, other rows (of prompts, and accepted drafts), and its time.
    pub(crate) fn on_step(&mut self, growing: u32, other_rows: u32, step_ms: u64) {
        if self.set.tokens_per_step.is_some() {
            return self.grant(growing.saturating_mul(self.tokens));
        }
        if other_rows == 0 && growing > 0 {
            self.measure(f64::from(u32::try_from(step_ms).unwrap_or(u32::MAX)));
        }
        let probing = self.baseline.is_none() && self.since_probe >= PROBE_EVERY;
        self.grant(if probing { growing } else { growing.saturating_mul(self.tokens) + other_rows });
    }

    fn measure(&mut self, step_ms: f64) {
        if !std::mem::take(&mut self.moved) {
            self.quiet = (self.quiet.0 + step_ms, self.quiet.1 + 1);
            if self.quiet.1 >= SAMPLES {
                self.baseline = Some(self.quiet.0 / f64::from(self.quiet.1));
                self.quiet = (0.0, 0);
                self.since_probe = 0;
            }
            return;
        }
        self.since_probe += 1;
        if self.since_probe >= PROBE_EVERY {
            // The batch has changed since: the time without moves is measured again, with few moves.
            (self.baseline, self.busy) = (None, (0.0, 0));
        }
        self.busy = (self.busy.0 + step_ms, self.busy.1 + 1);
        let Some(baseline) = self.baseline else { return };
        if self.busy.1 >= SAMPLES {
            let mean = self.busy.0 / f64::from(self.busy.1);
            self.busy = (0.0, 0);
            // Over so many steps, a clock of milliseconds tells a quarter of a millisecond apart.
            self.tokens = if mean > baseline * SLOWER_MAX + 0.25 {
                (self.tokens / 2).max(1)
            } else {
                (self.tokens + (self.tokens / 4).max(1)).min(MOVE_TOKENS_PER_STEP_MAX)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps of `base_ms`, and `slow_ms` more for every token beyond `free` that moves beside one.
    fn run(pace: &mut Pace, steps: u32, base_ms: u64, free: u32, slow_ms: u64) -> u32 {
        let mut moved_layers = 0;
        for _ in 0..steps {
            let mut pieces = 0u32;
            while pace.allows() {
                pace.spend();
                pieces += 1;
            }
            moved_layers += pieces;
            let tokens = pieces * 32 / 4;
            let late = u64::from(tokens.saturating_sub(free)) * slow_ms;
            pace.on_step(1, 0, base_ms + late);
        }
        moved_layers * 32 / 4 / steps.max(1)
    }

    #[test]
    fn sixteen_tokens_move_with_a_growing_sequence_before_anything_is_known() {
        let mut pace = Pace::new(4, 32);
        let tokens = run(&mut pace, 12, 20, 1000, 0);
        assert!((14..=18).contains(&tokens), "{tokens} tokens a step");
    }

    #[test]
    fn the_pace_grows_while_steps_do_not_suffer_and_halves_when_they_do() {
        let mut pace = Pace::new(4, 32);
        (0..SAMPLES).for_each(|_| pace.on_step(1, 0, 20));
        run(&mut pace, 110, 20, 1000, 0);
        assert!(pace.tokens() > 40, "{} tokens a step", pace.tokens());
        run(&mut pace, 2_000, 20, 24, 1);
        assert!((1..=40).contains(&pace.tokens()), "{} tokens a step", pace.tokens());
        // However slow it gets, it keeps up with growth.
        run(&mut pace, 4_000, 20, 0, 50);
        let tokens = run(&mut pace, 1_000, 20, 0, 50);
        assert!(tokens >= 1, "{tokens} tokens a step");
    }

    #[test]
    fn a_pace_that_is_set_is_kept() {
        let mut pace = Pace::new(4, 32);
        pace.set(MovePace { tokens_per_step: Some(2), overlap: false });
        let tokens = run(&mut pace, 2_000, 20, 0, 50);
        assert_eq!((tokens, pace.tokens(), pace.overlaps()), (2, 2, false));
        pace.set(MovePace { tokens_per_step: Some(0), overlap: true });
        (0..100).for_each(|_| pace.tick());
        run(&mut pace, 100, 20, 0, 0);
        assert!(!pace.allows());
    }

    #[test]
    fn what_is_not_used_is_not_saved_up() {
        let mut pace = Pace::new(4, 32);
        (0..100).for_each(|_| pace.on_step(1, 0, 20));
        let mut pieces = 0;
        while pace.allows() {
            pace.spend();
            pieces += 1;
        }
        assert!(pieces <= 8, "{pieces} pieces at once");
    }
}
