//! How fast blocks move while the device computes (Infinite-LLM v2 §7.4, Figure 12a).
//!
//! Each step that ends allows some tokens to move: one for every row that it computed in a prompt, and for every
//! sequence that grew as many as overlap with decoding for free. That number is measured: decoding steps beside which
//! KV moved are compared with those beside which none did. It grows while they take the same time, and is halved when
//! they do not. It is never less than one, so that moving keeps up with growth.

use lagoon_types::limits::{MOVE_TOKENS_PER_STEP, MOVE_TOKENS_PER_STEP_MAX};

/// Steps of a kind over which times are compared.
const SAMPLES: u32 = 16;
/// Steps beside which KV moves, between two measurements of steps beside which none does.
const PROBE_EVERY: u32 = 128;
/// A step beside moves may take this much longer, as a ratio, before they count as a burden.
const SLOWER_MAX: f64 = 1.05;

/// How KV moves beside decoding, if not as measured: for benchmarks of what moving costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovePace {
    /// Tokens per sequence that grows, in one step; `None`: as measured.
    pub tokens_per_step: Option<u32>,
    /// Steps go on while KV is copied. If not, a step waits until what moves beside the step before it is copied.
    pub overlap: bool,
}

impl Default for MovePace {
    fn default() -> Self {
        Self { tokens_per_step: None, overlap: true }
    }
}

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    set: MovePace,
    /// Tokens per sequence that grows, in one step.
    tokens: u32,
    /// Tokens times layers that may move now; below 0 where more has moved.
    credit: i64,
    layers: u32,
    block_tokens: u32,
    /// KV moved since the last step ended.
    moved: bool,
    /// Sum of step times and their number, without and with moves beside them.
    quiet: (f64, u32),
    busy: (f64, u32),
    /// Time of a step without moves, once it was measured.
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

    /// Steps go on while KV is copied.
    pub(crate) fn overlaps(&self) -> bool {
        self.set.overlap
    }

    /// Tokens per sequence that grows, in one step.
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Whether a piece may move while the device computes.
    pub(crate) fn allows(&self) -> bool {
        self.credit > 0
    }

    /// One layer of a block moves.
    pub(crate) fn spend(&mut self) {
        self.credit -= i64::from(self.block_tokens);
        self.moved = true;
    }

    /// Time passes: a long step does not hold a move for ever.
    pub(crate) fn tick(&mut self) {
        if self.set.tokens_per_step.is_none() {
            self.grant(1);
        }
    }

    fn grant(&mut self, tokens: u32) {
        let granted = i64::from(tokens) * i64::from(self.layers);
        // What was not used is not saved up, but for a block.
        let most = granted.max(i64::from(self.block_tokens) * i64::from(self.layers));
        self.credit = (self.credit + granted).min(most);
    }

    /// A step ended: sequences that grew by it, rows of prompts that it computed, and its time.
    pub(crate) fn on_step(&mut self, growing: u32, prompt_rows: u32, step_ms: u64) {
        if self.set.tokens_per_step.is_some() {
            return self.grant(growing.saturating_mul(self.tokens));
        }
        if prompt_rows == 0 && growing > 0 {
            self.measure(f64::from(u32::try_from(step_ms).unwrap_or(u32::MAX)));
        }
        let probing = self.baseline.is_none() && self.since_probe >= PROBE_EVERY;
        self.grant(if probing { growing } else { growing.saturating_mul(self.tokens) + prompt_rows });
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
            // The batch has changed since: what a step takes without moves is measured again, on few moves.
            (self.baseline, self.busy) = (None, (0.0, 0));
        }
        self.busy = (self.busy.0 + step_ms, self.busy.1 + 1);
        let Some(baseline) = self.baseline else { return };
        if self.busy.1 >= SAMPLES {
            let mean = self.busy.0 / f64::from(self.busy.1);
            self.busy = (0.0, 0);
            // A quarter of a millisecond is what a clock of milliseconds tells apart over so many steps.
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
