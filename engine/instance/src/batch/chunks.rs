//! Sizes of prefill chunks under a latency target (`--target-tbt-ms`): while sequences decode here, a step has as many rows of prompts
//! as fit beside the decoding rows within the target.

use super::policy::RowTime;
use super::sequence::Sequence;
use super::{Batch, policy};
use crate::cx::Cx;
use lagoon_cluster::perf::Rates;
use lagoon_protocol::Calibration;
use lagoon_types::MicroBatch;
use std::ops::Range;

/// Weight of the newest step in the mean time of a prompt row.
const NEWEST: f64 = 1.0 / 8.0;
/// Minimum rows of prompts for a step's time to count.
const ROWS_MIN: u32 = 8;

/// Time of a prompt's row: calibrated, with its attention. Where that was not measured, the mean of what steps of prompts alone took
/// (`measured_us`), if it is longer.
fn row_time(calibration: Option<&Calibration>, measured_us: f64) -> RowTime {
    let rate = |of: fn(&Calibration) -> f64| calibration.map_or(0.0, of);
    let row_us = rate(|c| c.prefill_us_per_token);
    // A prompt's rows attend no more slowly than decoding ones.
    let key_us = rate(|c| c.prompt_attention_us_per_ktoken).min(rate(|c| c.attention_us_per_ktoken)) / 1_024.0;
    if row_us > 0.0 && key_us > 0.0 {
        RowTime { row_us, key_us }
    } else {
        RowTime { row_us: row_us.max(measured_us), key_us: 0.0 }
    }
}

/// Positions as attention sees them: a row in a window sees no more tokens before it than that.
fn within_window(rows: &Range<u32>, window: Option<u32>) -> Range<u32> {
    let start = rows.start.min(window.unwrap_or(u32::MAX));
    start..start + (rows.end - rows.start)
}

impl Batch {
    /// Maximum of rows of prompts in the next step of `micro_batch`: of those in the batch, then of a `new` one from a position on. The two
    /// micro-batches share one device: if the other one has prompts too, these take at most half of the time, and only what those in its
    /// step leave.
    pub(super) fn chunk_rows(&self, cx: &Cx, micro_batch: MicroBatch, new: Option<u32>) -> u32 {
        let Some(target_ms) = cx.config.target_step_ms else { return u32::MAX };
        let (mut decoding, mut tokens) = (0, 0.0);
        for seq in self.seqs.values().filter(|seq| seq.is_running() && !computes_prompt(seq)) {
            decoding += 1;
            tokens += f64::from(seq.blocks.local_blocks()) * f64::from(cx.config.block_tokens);
        }
        if decoding == 0 {
            return u32::MAX;
        }
        let calibration = cx.config.calibration.as_ref();
        let decode_us = calibration.and_then(|c| Rates::new(c, true));
        let decode_us = decode_us.map_or(0.0, |rates| rates.other_us(decoding) + tokens * rates.attention_us);
        let us = f64::from(target_ms) * 1_000.0 - decode_us;
        let time = row_time(calibration, self.prefill_us);
        let ready = |seq| self.seqs.get(&seq).is_some_and(Sequence::is_ready);
        let windowed = |rows: Range<u32>| within_window(&rows, cx.config.window);
        let other = MicroBatch::ALL[1 - micro_batch.index()];
        let in_step_us: f64 = self.sched.prompts_in_step(other).map(|rows| time.us(windowed(rows))).sum();
        let share = if self.sched.due_prompts(other, ready).next().is_some() { 0.5 } else { 1.0 };
        let own = self.sched.due_prompts(micro_batch, ready).chain(new.map(|at| at..u32::MAX));
        policy::rows_within((us * share).min(us - in_step_us), time, own.map(windowed))
    }

    /// Adds a step of `rows` prompt rows and nothing else, which took `ms`, to the mean.
    pub(crate) fn prompt_step_took(&mut self, ms: u64, rows: u32) {
        if rows < ROWS_MIN {
            return;
        }
        let us = f64::from(u32::try_from(ms).unwrap_or(u32::MAX)) * 1000.0 / f64::from(rows);
        self.prefill_us = if self.prefill_us > 0.0 { self.prefill_us + (us - self.prefill_us) * NEWEST } else { us };
    }

    /// Time to compute a row of a prompt, in microseconds; 0 before it is known.
    pub(super) fn row_us(&self, cx: &Cx) -> f64 {
        let calibrated = cx.config.calibration.as_ref().map_or(0.0, |c| c.prefill_us_per_token);
        if calibrated > 0.0 { calibrated } else { self.prefill_us }
    }
}

fn computes_prompt(seq: &Sequence) -> bool {
    seq.blocks.written() + 1 < seq.len() || !seq.blocks.lost().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_counts_where_it_was_measured() {
        let calibration = |prefill, prompt, decode| Calibration {
            batches: Vec::new(),
            attention_us_per_ktoken: decode,
            prefill_us_per_token: prefill,
            copy_bytes_per_s: 0.0,
            prompt_attention_us_per_ktoken: prompt,
        };
        let of = |c, measured_us| row_time(Some(&c), measured_us);
        let time = |row_us, key_us| RowTime { row_us, key_us };
        assert_eq!(of(calibration(100.0, 10.24, 20.0), 300.0), time(100.0, 0.01));
        assert_eq!(of(calibration(100.0, 90.0, 10.24), 300.0), time(100.0, 0.01), "no more than decoding rows'");
        assert_eq!(of(calibration(100.0, 0.0, 20.0), 300.0), time(300.0, 0.0));
        assert_eq!(of(calibration(100.0, 0.0, 20.0), 30.0), time(100.0, 0.0));
        assert_eq!(of(calibration(0.0, 10.24, 20.0), 30.0), time(30.0, 0.0));
        assert_eq!(row_time(None, 30.0), time(30.0, 0.0));
    }

    #[test]
    fn a_window_bounds_what_a_row_sees() {
        assert_eq!(within_window(&(900..1_000), None), 900..1_000);
        assert_eq!(within_window(&(900..1_000), Some(64)), 64..164);
        assert_eq!(within_window(&(30..u32::MAX), Some(64)), 30..u32::MAX);
        assert_eq!(within_window(&(900..u32::MAX), Some(64)), 64..u32::MAX - 836);
    }
}
