//! The borrow guard of running requests (v2 Fig. 6a): KV may lie at a creditor if a step's local work covers its remote part, or if the
//! debtor's memory is short.
//!
//! The planner's offloads use it; the choice of micro-batches uses the same time of a remote part ([`RemotePart::us`]). Mapped creditor
//! KV is local work: the debtor's own device attends to it. A request that waits does not borrow for being covered; it waits for an instance that holds it whole (ADR 35).

use super::crossover::as_f64;
use super::{LinkView, ModelShape};

/// A debtor's KV at one creditor, as a step of the debtor attends to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RemotePart {
    pub tokens: f64,
    /// Sequences with KV there.
    pub rows: u32,
    /// The creditor's time of attention per token (`Rates::attention_us`).
    pub attention_us: f64,
    /// Time that the queries of a step wait, over all layers, until the creditor's device has ended what it computes.
    pub wait_us: f64,
    pub link: LinkView,
    /// Mapped creditor KV: no query crosses the link, and the creditor computes nothing.
    pub mapped: bool,
}

impl RemotePart {
    /// Time from the queries to the last partial, in microseconds: the creditor's micro attention after what it computes, and per layer a
    /// round trip and the rows on the wire, where its rate was measured.
    #[must_use]
    pub fn us(&self, shape: &ModelShape) -> f64 {
        if self.mapped || self.tokens <= 0.0 {
            return 0.0;
        }
        let bytes = f64::from(self.rows) * as_f64(shape.row_bytes);
        let wire = if self.link.bytes_per_s > 0.0 { self.link.transfer_us(bytes) } else { 0.0 };
        self.wait_us + self.tokens * self.attention_us + f64::from(shape.layers) * (self.link.rtt_us + wire)
    }
}

/// Times of a debtor's step, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTimes {
    /// Weights, and attention of its own device: to local and to mapped creditor KV.
    pub local_us: f64,
    /// At the slowest creditor, concurrent with the local work.
    pub remote_us: f64,
}

impl StepTimes {
    /// Whether local work covers the remote part.
    #[must_use]
    pub fn covered(&self) -> bool {
        self.remote_us <= self.local_us
    }

    /// The guard. `is_short`: the debtor lacks memory for the KV.
    #[must_use]
    pub fn may_borrow(&self, is_short: bool) -> bool {
        is_short || self.covered()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_part_may_take_as_long_as_the_local_work_and_mapped_kv_is_local_work() {
        let shape = ModelShape { layers: 10, block_tokens: 16, token_bytes: 1_000, row_bytes: 1_000 };
        let link = LinkView { rtt_us: 5.0, bytes_per_s: 1e9 };
        let part = RemotePart { tokens: 200.0, rows: 2, attention_us: 1.0, wait_us: 0.0, link, mapped: false };
        assert_eq!(part.us(&shape), 200.0 + 10.0 * (5.0 + 2.0));
        let waits = RemotePart { wait_us: 30.0, ..part };
        assert_eq!(waits.us(&shape), part.us(&shape) + 30.0);
        let unmeasured = RemotePart { link: LinkView { bytes_per_s: 0.0, ..link }, ..part };
        assert_eq!(unmeasured.us(&shape), 250.0);
        let step = |part: &RemotePart, local_us| StepTimes { local_us, remote_us: part.us(&shape) };
        assert!(step(&part, 270.0).may_borrow(false));
        assert!(!step(&part, 269.0).may_borrow(false) && step(&part, 269.0).may_borrow(true));
        assert!(step(&RemotePart { mapped: true, ..part }, 0.0).may_borrow(false));
    }
}
