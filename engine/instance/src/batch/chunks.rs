//! Sizes of prefill chunks under a latency target (`--target-tbt-ms`): while sequences decode here, a step has as many rows of prompts
//! as fit beside the decoding rows within the target.

use super::policy::RowTime;
use super::sequence::Sequence;
use super::{Batch, policy};
use crate::cx::Cx;
use lagoon_cluster::perf::Rates;

impl Batch {
    /// Maximum of rows of prompts in a step, which both micro-batches share ([`policy::prompt_rows`]): they run on one device.
    pub(super) fn chunk_rows(&self, cx: &Cx) -> u32 {
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
        let prompts = self.sched.due_prompts(|seq| self.seqs.get(&seq).is_some_and(Sequence::is_ready));
        policy::rows_within(f64::from(target_ms) * 1_000.0 - decode_us, self.row_time(cx), prompts)
    }

    /// Time of a prompt's row: calibrated, or if its attention was not, the mean of what steps of prompts alone took.
    fn row_time(&self, cx: &Cx) -> RowTime {
        let calibration = cx.config.calibration.as_ref();
        let row_us = calibration.map_or(0.0, |c| c.prefill_us_per_token);
        let token_us = calibration.map_or(0.0, |c| c.prompt_attention_us_per_ktoken) / 1_024.0;
        if row_us > 0.0 && token_us > 0.0 {
            return RowTime { row_us, token_us };
        }
        RowTime { row_us: row_us.max(self.prefill_us), token_us: 0.0 }
    }
}

fn computes_prompt(seq: &Sequence) -> bool {
    seq.blocks.written() + 1 < seq.len() || !seq.blocks.lost().is_empty()
}
