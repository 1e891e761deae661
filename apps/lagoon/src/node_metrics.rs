//! What a node's loop tells Prometheus of its instance: set from its status, twice a second.
//!
//! A process may have two nodes: the instance, and its host memory tier. The second one's names say `host`.

use crate::node::NodeStatus;
use metrics::{counter, describe_counter, describe_gauge, gauge};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct NodeMetrics {
    host: bool,
}

impl NodeMetrics {
    /// Of a node whose memory is of `tier`, as in [`crate::node::About`].
    pub(crate) fn new(tier: &str) -> Self {
        Self { host: tier == "host" }
    }

    pub(crate) fn record(&self, status: &NodeStatus) {
        let of = &status.instance;
        if self.host {
            gauge!("lagoon_host_kv_blocks_total").set(of.blocks_total);
            gauge!("lagoon_host_kv_blocks_free").set(of.blocks_free);
            gauge!("lagoon_host_kv_blocks_lent").set(of.blocks_lent);
            return;
        }
        gauge!("lagoon_kv_blocks_total").set(of.blocks_total);
        gauge!("lagoon_kv_blocks_free").set(of.blocks_free);
        gauge!("lagoon_kv_blocks_lent").set(of.blocks_lent);
        gauge!("lagoon_kv_blocks_borrowed").set(of.blocks_borrowed);
        gauge!("lagoon_requests_running").set(as_f64(of.running));
        gauge!("lagoon_requests_waiting").set(as_f64(of.waiting));
        counter!("lagoon_preemptions_total").absolute(of.preemptions);
        counter!("lagoon_preempted_tokens_total").absolute(of.preempted_tokens);
        counter!("lagoon_recoveries_total").absolute(of.recoveries);
        counter!("lagoon_recomputed_tokens_total").absolute(of.recomputed_tokens);
        counter!("lagoon_fences_total").absolute(of.fences);
        gauge!("lagoon_draining").set(if of.draining { 1.0 } else { 0.0 });
        counter!("lagoon_wire_bytes_sent_total", "class" => "control").absolute(status.control_bytes_sent);
        counter!("lagoon_wire_bytes_sent_total", "class" => "partials").absolute(status.partials_bytes_sent);
        counter!("lagoon_wire_bytes_sent_total", "class" => "bulk").absolute(status.bulk_bytes_sent);
    }
}

fn as_f64(n: usize) -> f64 {
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

/// Says what the metrics mean. Call it once, after the recorder is installed.
pub(crate) fn describe() {
    describe_gauge!("lagoon_kv_blocks_total", "rBlocks of this instance.");
    describe_gauge!("lagoon_kv_blocks_free", "rBlocks that nobody has.");
    describe_gauge!("lagoon_kv_blocks_lent", "rBlocks that other instances have borrowed here.");
    describe_gauge!("lagoon_kv_blocks_borrowed", "rBlocks that this instance has borrowed elsewhere.");
    describe_gauge!("lagoon_host_kv_blocks_total", "rBlocks in host memory (--host-kv-tokens).");
    describe_gauge!("lagoon_host_kv_blocks_free", "rBlocks in host memory that nobody has.");
    describe_gauge!("lagoon_host_kv_blocks_lent", "rBlocks in host memory that instances have borrowed, this one too.");
    describe_gauge!("lagoon_requests_running", "Sequences in the batch.");
    describe_gauge!("lagoon_requests_waiting", "Sequences that wait for memory.");
    describe_counter!("lagoon_preemptions_total", "Times that a running sequence gave its memory up.");
    describe_counter!("lagoon_preempted_tokens_total", "Tokens whose KV these had and must compute again.");
    describe_counter!("lagoon_recoveries_total", "Times that a sequence lost KV with a creditor.");
    describe_counter!("lagoon_recomputed_tokens_total", "Tokens computed again because their KV was lost.");
    describe_counter!("lagoon_fences_total", "Times that the gManager took this instance for dead.");
    describe_gauge!("lagoon_draining", "1 while this instance is being drained.");
    describe_counter!("lagoon_wire_bytes_sent_total", "Bytes of frames sent to peers and the gManager, by class.");
}
