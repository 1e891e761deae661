//! What a node's loop tells Prometheus of its instance: set from its status, twice a second.
//!
//! A process may have two nodes: the instance, and its host memory tier. The second one's names say `host`.

use crate::node::NodeStatus;
use lagoon_instance::MoveStatus;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge};

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
        counter!("lagoon_preemptions_total", "kind" => "recompute").absolute(of.preemptions);
        counter!("lagoon_preemptions_total", "kind" => "parked").absolute(of.offloads);
        gauge!("lagoon_requests_parked").set(as_f64(of.parked));
        counter!("lagoon_preempted_tokens_total").absolute(of.preempted_tokens);
        counter!("lagoon_recoveries_total").absolute(of.recoveries);
        counter!("lagoon_recomputed_tokens_total").absolute(of.recomputed_tokens);
        counter!("lagoon_fences_total").absolute(of.fences);
        counter!("lagoon_guest_steps_shed_total").absolute(of.steps_shed);
        record_moves(&of.moves, of.block_tokens);
        gauge!("lagoon_draining").set(if of.draining { 1.0 } else { 0.0 });
        counter!("lagoon_wire_bytes_sent_total", "class" => "control").absolute(status.control_bytes_sent);
        counter!("lagoon_wire_bytes_sent_total", "class" => "partials").absolute(status.partials_bytes_sent);
        counter!("lagoon_wire_bytes_sent_total", "class" => "bulk").absolute(status.bulk_bytes_sent);
    }
}

fn record_moves(moves: &MoveStatus, block_tokens: u32) {
    gauge!("lagoon_moves_in_progress").set(as_f64(moves.in_progress));
    gauge!("lagoon_move_tokens_per_step").set(moves.tokens_per_step);
    for (reason, direction, blocks) in moves.by_reason.rows() {
        let labels = [("direction", direction), ("reason", reason)];
        counter!("lagoon_moved_blocks_total", &labels).absolute(blocks);
        counter!("lagoon_moved_tokens_total", &labels).absolute(blocks * u64::from(block_tokens));
    }
    counter!("lagoon_moved_bytes_total").absolute(moves.bytes);
    counter!("lagoon_moves_failed_total", "state" => "refused").absolute(moves.refused);
    counter!("lagoon_moves_failed_total", "state" => "cut_short").absolute(moves.cut_short);
    counter!("lagoon_move_blocks_damaged_total").absolute(moves.damaged);
    counter!("lagoon_recalls_total", "state" => "received").absolute(moves.recalls_received);
    counter!("lagoon_recalls_total", "state" => "met").absolute(moves.recalls_met);
    counter!("lagoon_recalls_total", "state" => "missed").absolute(moves.recalls_missed);
    counter!("lagoon_revoked_blocks_total").absolute(moves.blocks_revoked);
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
    describe_counter!(
        "lagoon_preemptions_total",
        "Times that a running sequence gave its memory up: to be computed again (recompute), or with its KV in host \
         memory (parked)."
    );
    describe_counter!("lagoon_preempted_tokens_total", "Tokens whose KV sequences gave up and must compute again.");
    describe_gauge!("lagoon_requests_parked", "Sequences whose KV is in host memory until there is room.");
    describe_counter!("lagoon_recoveries_total", "Times that a sequence lost KV with a creditor.");
    describe_counter!("lagoon_recomputed_tokens_total", "Tokens computed again because their KV was lost.");
    describe_counter!("lagoon_fences_total", "Times that the gManager took this instance for dead.");
    describe_counter!("lagoon_guest_steps_shed_total", "Peers' steps refused to keep the own latency target.");
    describe_moves();
    describe_gauge!("lagoon_draining", "1 while this instance is being drained.");
    describe_counter!("lagoon_wire_bytes_sent_total", "Bytes of frames sent to peers and the gManager, by class.");
}

fn describe_moves() {
    describe_gauge!("lagoon_moves_in_progress", "Moves of rBlocks under way for this instance's requests.");
    describe_gauge!("lagoon_move_tokens_per_step", "Tokens that move in one step beside a sequence that grows.");
    describe_counter!(
        "lagoon_moved_blocks_total",
        "rBlocks of this instance's requests that moved: out to a creditor, home, or between two creditors; by why."
    );
    describe_counter!("lagoon_moved_tokens_total", "Tokens of these rBlocks.");
    describe_counter!("lagoon_moved_bytes_total", "Bytes of KV that moves copied.");
    describe_counter!(
        "lagoon_moves_failed_total",
        "Moves that no target had room for (refused), and that ended before all of their rBlocks had moved (cut_short)."
    );
    describe_counter!("lagoon_move_blocks_damaged_total", "rBlocks whose copy was not what its hash says.");
    describe_counter!(
        "lagoon_recalls_total",
        "Recalls: of creditors, received here; this instance's own, met and missed by its debtors."
    );
    describe_counter!("lagoon_revoked_blocks_total", "rBlocks that this instance took back after a recall was missed.");
    describe_histogram!(
        "lagoon_layer_partials_wait_seconds",
        "Time from when a layer's queries left until the last creditor's partials came."
    );
    describe_histogram!("lagoon_step_partials_wait_seconds", "The sum of these over a step's layers.");
}
