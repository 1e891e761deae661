//! Sizes of prefill chunks under a latency target (`--target-tbt-ms`): while sequences decode here, a step has as many rows of prompts
//! as fit beside the decoding rows within the target.

use super::policy::RowTime;
use super::sequence::Sequence;
use super::{Batch, policy};
use crate::cx::Cx;
use lagoon_cluster::perf::Rates;
use lagoon_protocol::Calibration;
use lagoon_types::{Chunk, MicroBatch};
use std::ops::Range;

/// Weight of the newest step in a mean.
const NEWEST: f64 = 1.0 / 8.0;
/// Minimum rows of a step that counts.
const ROWS_MIN: u32 = 8;

/// What steps of prompts alone took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct PromptPace {
    /// Mean time of a row, its attention included, in microseconds; 0 before the first step.
    pub(super) row_us: f64,
    /// Mean ratio of such steps' times to the calibration's, by micro-batch; 0 before the first one. Greater than 1 where a step waits for
    /// creditors, or reads more weights than the calibration did, as experts' are.
    slowdown: [f64; 2],
}

impl PromptPace {
    /// Adds a step of `rows` rows that took `us`, and `calibrated_us` by the calibration, if there is one.
    fn add(&mut self, micro_batch: MicroBatch, rows: u32, us: f64, calibrated_us: Option<f64>) {
        if rows < ROWS_MIN {
            return;
        }
        let towards = |mean: &mut f64, newest: f64| *mean += (newest - *mean) * if *mean > 0.0 { NEWEST } else { 1.0 };
        towards(&mut self.row_us, us / f64::from(rows));
        if let Some(calibrated_us) = calibrated_us {
            towards(&mut self.slowdown[micro_batch.index()], us / calibrated_us);
        }
    }

    /// Time of a row in a step of `micro_batch`.
    fn row_time(self, micro_batch: MicroBatch, calibrated: Option<RowTime>) -> RowTime {
        let slowdown = self.slowdown[micro_batch.index()].max(1.0);
        let measured = RowTime { row_us: self.row_us, key_us: 0.0 };
        calibrated.map_or(measured, |RowTime { row_us, key_us }| RowTime {
            row_us: row_us * slowdown,
            key_us: key_us * slowdown,
        })
    }
}

/// A row's calibrated time, if there is one. Attention of a prompt's rows takes no longer than that of as many decoding ones; where it was
/// not measured it counts nothing.
fn calibrated(calibration: Option<&Calibration>) -> Option<RowTime> {
    let c = calibration.filter(|c| c.prefill_us_per_token.is_finite() && c.prefill_us_per_token > 0.0)?;
    let key_us = c.prompt_attention_us_per_ktoken.min(c.attention_us_per_ktoken).max(0.0) / 1_024.0;
    Some(RowTime { row_us: c.prefill_us_per_token, key_us })
}

/// Positions as attention sees them: a row in a window sees no more tokens before it than that.
fn within_window(rows: &Range<u32>, window: Option<u32>) -> Range<u32> {
    let start = rows.start.min(window.unwrap_or(u32::MAX));
    start..start + (rows.end - rows.start)
}

impl Batch {
    /// Maximum of rows of prompts in a step, which both micro-batches share ([`policy::prompt_rows`]): they run on one device, so a row
    /// counts as much as in the micro-batch that takes longer. A new prompt, not in the batch yet, counts in its micro-batch from a
    /// position on.
    pub(super) fn chunk_rows(&self, cx: &Cx, new: Option<(MicroBatch, u32)>) -> u32 {
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
        let ready = |seq| self.seqs.get(&seq).is_some_and(Sequence::is_ready);
        let rows = |micro_batch| {
            let new = new.filter(|(of, _)| *of == micro_batch).map(|(_, at)| at..u32::MAX);
            let prompts = self.sched.due_prompts(micro_batch, ready).chain(new);
            let mut prompts = prompts.map(|rows| within_window(&rows, cx.config.window)).peekable();
            prompts.peek()?;
            Some(policy::rows_within(us, self.pace.row_time(micro_batch, calibrated(calibration)), prompts))
        };
        MicroBatch::ALL.into_iter().filter_map(rows).min().unwrap_or(u32::MAX)
    }

    /// Adds a step of prompts and nothing else, which took `ms`, to their pace.
    pub(crate) fn prompt_step_took(&mut self, cx: &Cx, micro_batch: MicroBatch, ms: u64, chunks: &[Chunk]) {
        let calibration = cx.config.calibration.as_ref();
        // However few rows a step has, it reads the weights.
        let least_us = calibration.and_then(|c| c.batches.first()).map_or(0.0, |point| point.step_us);
        let calibrated_us = calibrated(calibration).map(|time| {
            let rows =
                chunks.iter().map(|chunk| within_window(&(chunk.start..chunk.start + chunk.len), cx.config.window));
            rows.map(|rows| time.us(rows)).sum::<f64>().max(least_us)
        });
        let us = f64::from(u32::try_from(ms).unwrap_or(u32::MAX)) * 1_000.0;
        self.pace.add(micro_batch, chunks.iter().map(|chunk| chunk.len).sum(), us, calibrated_us);
    }

    /// Time to compute a row of a prompt, in microseconds; 0 before it is known.
    pub(super) fn row_us(&self, cx: &Cx) -> f64 {
        calibrated(cx.config.calibration.as_ref()).map_or(self.pace.row_us, |time| time.row_us)
    }
}

fn computes_prompt(seq: &Sequence) -> bool {
    seq.blocks.written() + 1 < seq.len() || !seq.blocks.lost().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALIBRATED: RowTime = RowTime { row_us: 100.0, key_us: 0.01 };

    #[test]
    fn a_row_takes_longer_where_steps_do() {
        let mut pace = PromptPace::default();
        let of = |pace: PromptPace, micro_batch| pace.row_time(micro_batch, Some(CALIBRATED));
        assert_eq!(of(pace, MicroBatch::Local), CALIBRATED);
        assert_eq!(pace.row_time(MicroBatch::Local, None), RowTime { row_us: 0.0, key_us: 0.0 }, "not known");
        pace.add(MicroBatch::Local, 100, 30_000.0, Some(10_000.0));
        assert_eq!(of(pace, MicroBatch::Local), RowTime { row_us: 300.0, key_us: 0.03 });
        assert_eq!(of(pace, MicroBatch::Remote), CALIBRATED);
        pace.add(MicroBatch::Local, 100, 11_000.0, Some(10_000.0));
        assert!((of(pace, MicroBatch::Local).row_us - 276.25).abs() < 1e-6, "{pace:?}");
        assert!((pace.row_time(MicroBatch::Local, None).row_us - 276.25).abs() < 1e-6, "{pace:?}");
        // A faster device than calibrated is no reason for longer steps; a few rows tell nothing.
        pace.add(MicroBatch::Remote, 100, 5_000.0, Some(10_000.0));
        assert_eq!(of(pace, MicroBatch::Remote), CALIBRATED);
        let before = pace;
        pace.add(MicroBatch::Local, ROWS_MIN - 1, 90_000.0, Some(10_000.0));
        assert_eq!(pace, before);
    }

    #[test]
    fn attention_counts_where_it_was_measured() {
        let calibration = |prompt, decode| Calibration {
            batches: Vec::new(),
            attention_us_per_ktoken: decode,
            prefill_us_per_token: 100.0,
            copy_bytes_per_s: 0.0,
            prompt_attention_us_per_ktoken: prompt,
        };
        assert_eq!(calibrated(Some(&calibration(10.24, 20.0))), Some(CALIBRATED));
        assert_eq!(calibrated(Some(&calibration(90.0, 10.24))), Some(CALIBRATED), "no more than decoding rows'");
        assert_eq!(calibrated(Some(&calibration(0.0, 20.0))), Some(RowTime { key_us: 0.0, ..CALIBRATED }));
        assert_eq!(calibrated(Some(&Calibration { prefill_us_per_token: 0.0, ..calibration(1.0, 1.0) })), None);
        assert_eq!(calibrated(None), None);
    }

    #[test]
    fn a_window_bounds_what_a_row_sees() {
        assert_eq!(within_window(&(900..1_000), None), 900..1_000);
        assert_eq!(within_window(&(900..1_000), Some(64)), 64..164);
        assert_eq!(within_window(&(30..u32::MAX), Some(64)), 30..u32::MAX);
        assert_eq!(within_window(&(900..u32::MAX), Some(64)), 64..u32::MAX - 836);
    }
}
