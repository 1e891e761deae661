//! Sizes of prefill chunks under a latency target (`--target-tbt-ms`): while sequences decode here, a step has as many rows of prompts
//! as fit beside the decoding rows within the target. Both micro-batches run on one device, and share the rows.

use super::Batch;
use super::sequence::Sequence;
use crate::cx::Cx;
use lagoon_cluster::perf::{Rates, whole};
use lagoon_types::MicroBatch;

/// Rows of prompts that a step has in any case, of both micro-batches together: a prompt always advances.
const CHUNK_ROWS_MIN: u32 = 32;

impl Batch {
    /// Maximum of rows of prompts in the next step of a micro-batch.
    pub(super) fn chunk_rows(&self, cx: &Cx, micro_batch: MicroBatch) -> u32 {
        let Some(target_ms) = cx.config.target_step_ms else { return u32::MAX };
        let running = || self.seqs.values().filter(|seq| seq.is_running());
        let (mut decoding, mut tokens, mut shares) = (0, 0.0, 1);
        for seq in running() {
            if !computes_prompt(seq) {
                decoding += 1;
                tokens += f64::from(seq.blocks.local_blocks()) * f64::from(cx.config.block_tokens);
            } else if self.micro_batch_of(seq.id) != micro_batch {
                shares = 2;
            }
        }
        if decoding == 0 {
            return u32::MAX;
        }
        let calibration = cx.config.calibration.as_ref();
        let decode_us = calibration.and_then(|c| Rates::new(c, true));
        let decode_us = decode_us.map_or(0.0, |rates| rates.other_us(decoding) + tokens * rates.attention_us);
        // What was measured includes the attention of long prompts.
        let row_us = calibration.map_or(0.0, |c| c.prefill_us_per_token).max(self.prefill_us);
        rows_within(f64::from(target_ms) * 1_000.0, decode_us, row_us) / shares
    }
}

fn computes_prompt(seq: &Sequence) -> bool {
    seq.blocks.written() + 1 < seq.len() || !seq.blocks.lost().is_empty()
}

/// Rows of `row_us` each within the time that `decode_us` leaves under a target; all if their time was not measured.
fn rows_within(target_us: f64, decode_us: f64, row_us: f64) -> u32 {
    if !(row_us.is_finite() && row_us > 0.0) {
        return u32::MAX;
    }
    let rows = whole((target_us - decode_us).max(0.0) / row_us);
    u32::try_from(rows).unwrap_or(u32::MAX).max(CHUNK_ROWS_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_fill_what_decoding_leaves_under_the_target() {
        assert_eq!(rows_within(50_000.0, 10_000.0, 100.0), 400);
        assert_eq!(rows_within(50_000.0, 49_999.0, 100.0), CHUNK_ROWS_MIN, "a prompt always advances");
        assert_eq!(rows_within(50_000.0, 90_000.0, 100.0), CHUNK_ROWS_MIN);
        assert_eq!(rows_within(50_000.0, 10_000.0, 0.0), u32::MAX, "nothing was measured");
        assert_eq!(rows_within(50_000.0, 10_000.0, f64::NAN), u32::MAX);
    }
}
