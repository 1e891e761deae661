//! Sizes of prefill chunks under a latency target (`--target-tbt-ms`): while sequences decode here, a step has as many rows of prompts
//! as fit beside the decoding rows within the target.

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
        // What was measured includes the attention of long prompts.
        let row_us = calibration.map_or(0.0, |c| c.prefill_us_per_token).max(self.prefill_us);
        policy::rows_within(f64::from(target_ms) * 1_000.0, decode_us, row_us)
    }
}

fn computes_prompt(seq: &Sequence) -> bool {
    seq.blocks.written() + 1 < seq.len() || !seq.blocks.lost().is_empty()
}
