//! A node's metrics for Prometheus: set from its instance's status, twice a second.
//!
//! A process may have several nodes: the instance, and its additional memory (`beside.rs`), with metrics of their own
//! names.

use crate::node_status::NodeStatus;
use crate::tier_kind::TierKind;
use crate::transfers::Carried;
use lagoon_backend::{KvCounters, LaunchCounters};
use lagoon_instance::{
    CacheTiersStatus, JointStatus, LastTimes, MoveStatus, PeerAccessStatus, PrefillStatus, PrefixStatus, RelayStatus,
};
use lagoon_transport::Node;
use metrics::{counter, gauge, histogram};
use std::time::Duration;

/// Metrics of one node.
#[derive(Debug, Default)]
pub(crate) struct NodeMetrics {
    beside: Option<TierKind>,
}

/// Sets the expiry of this process's certificate.
pub(crate) fn record_certificate(node: &Node) {
    #[allow(clippy::cast_precision_loss, reason = "seconds, under 2^53")]
    gauge!("lagoon_certificate_expires_timestamp_seconds").set(node.subject().not_after_s as f64);
}

impl NodeMetrics {
    /// Metrics of additional memory.
    pub(crate) fn beside(kind: TierKind) -> Self {
        Self { beside: Some(kind) }
    }

    pub(crate) fn record(&self, status: &NodeStatus) {
        let of = &status.instance;
        match self.beside {
            Some(TierKind::Host) => {
                gauge!("lagoon_host_kv_blocks").set(of.blocks_total);
                gauge!("lagoon_host_kv_blocks_free").set(of.blocks_free);
                gauge!("lagoon_host_kv_blocks_lent").set(of.blocks_lent);
                return;
            }
            Some(TierKind::Lent) => {
                gauge!("lagoon_lent_kv_blocks").set(of.blocks_total);
                gauge!("lagoon_lent_kv_blocks_free").set(of.blocks_free);
                gauge!("lagoon_lent_kv_blocks_lent").set(of.blocks_lent);
                counter!("lagoon_lent_kv_blocks_sealed_total").absolute(of.peer_access.sealed);
                return;
            }
            None => {}
        }
        gauge!("lagoon_kv_blocks").set(of.blocks_total);
        gauge!("lagoon_kv_blocks_free").set(of.blocks_free);
        gauge!("lagoon_kv_blocks_lent").set(of.blocks_lent);
        gauge!("lagoon_kv_blocks_borrowed").set(of.blocks_borrowed);
        counter!("lagoon_kv_borrowed_blocks_total").absolute(of.blocks_borrowed_total);
        gauge!("lagoon_requests_running").set(as_f64(of.running));
        gauge!("lagoon_requests_waiting").set(as_f64(of.waiting));
        counter!("lagoon_preemptions_total", "kind" => "recompute").absolute(of.preemptions);
        counter!("lagoon_preemptions_total", "kind" => "swap").absolute(of.offloads);
        gauge!("lagoon_requests_swapped_out").set(as_f64(of.swapped_out));
        counter!("lagoon_preempted_tokens_total").absolute(of.preempted_tokens);
        counter!("lagoon_recoveries_total").absolute(of.recoveries);
        counter!("lagoon_recomputed_tokens_total").absolute(of.recomputed_tokens);
        counter!("lagoon_drafted_tokens_total").absolute(of.drafted_tokens);
        counter!("lagoon_accepted_tokens_total").absolute(of.accepted_tokens);
        counter!("lagoon_warm_up_tokens_total").absolute(of.warm_up_tokens);
        counter!("lagoon_fences_total").absolute(of.fences);
        counter!("lagoon_remote_steps_shed_total").absolute(of.steps_shed);
        record_moves(&of.moves, of.block_tokens);
        of.memory.iter().for_each(record_memory);
        of.launches.iter().for_each(record_launches);
        record_prefill(&of.prefill);
        record_prefix(&of.prefix);
        record_joint(of.joint);
        record_relays(of.relays);
        of.cache_tiers.iter().for_each(record_cache_tiers);
        record_peer_access(&of.peer_access);
        for row in &status.paths {
            let labels = [("worker", row.worker.to_string()), ("path", row.path.to_owned())];
            gauge!("lagoon_transfer_path_bytes_per_second", &labels).set(row.bytes_per_s);
        }
        status.carried.iter().for_each(record_carried);
        gauge!("lagoon_draining").set(if of.draining { 1.0 } else { 0.0 });
        counter!("lagoon_wire_bytes_sent_total", "class" => "control").absolute(status.control_bytes_sent);
        counter!("lagoon_wire_bytes_sent_total", "class" => "partials").absolute(status.partials_bytes_sent);
        counter!("lagoon_wire_bytes_sent_total", "class" => "bulk").absolute(status.bulk_bytes_sent);
    }
}

fn record_memory(of: &KvCounters) {
    for (state, groups) in [("free", of.free), ("kept", of.kept)] {
        gauge!("lagoon_kv_page_groups", "state" => state).set(as_f64(usize::try_from(groups).unwrap_or(usize::MAX)));
    }
    for (when, groups) in [("in_step", of.in_step), ("ahead", of.ahead), ("eager", of.eager), ("shared", of.shared)] {
        counter!("lagoon_kv_page_groups_mapped_total", "when" => when).absolute(groups);
    }
    counter!("lagoon_kv_page_groups_reused_total").absolute(of.reused);
    counter!("lagoon_kv_page_groups_reclaimed_total").absolute(of.reclaimed);
    counter!("lagoon_kv_mappings_refused_total").absolute(of.refused);
}

fn record_joint(of: JointStatus) {
    for (result, prompts) in [("completed", of.completed), ("ended", of.ended), ("alone", of.alone)] {
        counter!("lagoon_joint_prefills_total", "result" => result).absolute(prompts);
    }
    counter!("lagoon_joint_prefill_tokens_total").absolute(of.computed_tokens);
}

fn record_relays(of: RelayStatus) {
    counter!("lagoon_queries_to_other_hosts_total").absolute(of.queries);
    counter!("lagoon_query_bytes_to_other_hosts_total").absolute(of.query_bytes);
    counter!("lagoon_relayed_layers_total").absolute(of.merged_layers);
    counter!("lagoon_relay_failures_total").absolute(of.failed_steps);
}

fn record_prefix(of: &PrefixStatus) {
    gauge!("lagoon_prefix_cache_blocks").set(of.blocks);
    counter!("lagoon_prefix_cache_evicted_blocks_total").absolute(of.evicted_blocks);
    counter!("lagoon_prefix_cache_shared_blocks_total").absolute(of.shared_blocks);
    counter!("lagoon_prefix_cache_lent_blocks_total").absolute(of.lent_blocks);
    counter!("lagoon_prefix_cache_saved_milliseconds_total").absolute(of.saved_ms);
    for (place, tokens) in of.found.by_place() {
        counter!("lagoon_prefix_cache_hit_tokens_total", "where" => place).absolute(tokens);
    }
    gauge!("lagoon_kv_shared_blocks").set(of.saved_blocks);
    for (state, tokens) in [("looked_up", of.looked_up_tokens), ("hit", of.hit_tokens)] {
        counter!("lagoon_prefix_cache_tokens_total", "state" => state).absolute(tokens);
    }
}

fn record_cache_tiers(of: &CacheTiersStatus) {
    let size = |n: u64| as_f64(usize::try_from(n).unwrap_or(usize::MAX));
    for (tier, of) in [("host", &of.host), ("disk", &of.disk)] {
        gauge!("lagoon_prefix_cache_tier_blocks", "tier" => tier).set(size(of.blocks));
        gauge!("lagoon_prefix_cache_tier_bytes", "tier" => tier).set(size(of.bytes));
        counter!("lagoon_prefix_cache_tier_saved_blocks_total", "tier" => tier).absolute(of.saved_blocks);
        counter!("lagoon_prefix_cache_tier_evicted_blocks_total", "tier" => tier).absolute(of.evicted_blocks);
    }
    let lost = [
        ("evicted_early", of.unsaved_blocks),
        ("not_written", of.disk.lost_blocks),
        ("damaged", of.disk.damaged_blocks),
        ("missing", of.disk.missing_blocks),
    ];
    for (reason, blocks) in lost {
        counter!("lagoon_prefix_cache_tier_lost_blocks_total", "reason" => reason).absolute(blocks);
    }
    for (end, loads) in [("whole", of.whole_loads), ("broken", of.broken_loads), ("declined", of.declined_loads)] {
        counter!("lagoon_prefix_cache_tier_loads_total", "end" => end).absolute(loads);
    }
}

fn record_peer_access(of: &PeerAccessStatus) {
    let ways = [("mapped", of.attended_mapped), ("shipped", of.attended_shipped), ("fetched", of.attended_fetched)];
    ways.iter().for_each(|(how, n)| counter!("lagoon_remote_attentions_total", "how" => *how).absolute(*n));
    gauge!("lagoon_creditors_mapped").set(as_f64(of.mapped));
    counter!("lagoon_creditor_maps_refused_total").absolute(of.refused);
    counter!("lagoon_steps_reused_memory_total").absolute(of.reused);
}

fn record_launches(of: &LaunchCounters) {
    for (how, steps) in [("eager", of.eager), ("captured", of.captured), ("replayed", of.replayed)] {
        counter!("lagoon_steps_launched_total", "how" => how).absolute(steps);
    }
    counter!("lagoon_graphs_evicted_total").absolute(of.evicted);
}

/// Records the times of requests whose prompts were computed elsewhere.
pub(crate) fn record_prefill_times(times: &LastTimes) {
    let seconds = |ms: u64| Duration::from_millis(ms).as_secs_f64();
    for ms in &times.decodes_ms {
        histogram!("lagoon_prefill_phase_seconds", "phase" => "decode").record(seconds(*ms));
    }
    for of in &times.prefills {
        let phases = [
            ("queue", of.queue_ms),
            ("prefill", of.prefill_ms),
            ("decode_queue", of.decode_queue_ms),
            ("transfer", of.transfer_ms),
        ];
        for (phase, ms) in phases {
            histogram!("lagoon_prefill_phase_seconds", "phase" => phase).record(seconds(ms));
        }
    }
}

fn record_prefill(of: &PrefillStatus) {
    gauge!("lagoon_prefill_workers").set(as_f64(of.workers));
    gauge!("lagoon_prefill_away").set(as_f64(of.away));
    gauge!("lagoon_prefill_jobs_held").set(as_f64(of.jobs));
    gauge!("lagoon_prefill_queued_tokens").set(f64::from(u32::try_from(of.queued_tokens).unwrap_or(u32::MAX)));
    let states = [("pulled", of.pulled), ("retried", of.retried), ("own", of.own)];
    states.iter().for_each(|(state, n)| counter!("lagoon_prefill_prompts_total", "state" => *state).absolute(*n));
    counter!("lagoon_prefill_affine_prompts_total").absolute(of.affine);
    counter!("lagoon_prefill_affine_tokens_total").absolute(of.affine_tokens);
    let states = [("done", of.jobs_done), ("refused", of.jobs_refused), ("dropped", of.jobs_dropped)];
    states.iter().for_each(|(state, n)| counter!("lagoon_prefill_jobs_total", "state" => *state).absolute(*n));
    gauge!("lagoon_transfer_stage_blocks_used").set(of.stage_blocks_used);
    counter!("lagoon_transfer_stage_waits_total").absolute(of.stage_waits);
    counter!("lagoon_transfer_reads_total").absolute(of.reads);
    counter!("lagoon_transfer_transactions_total").absolute(of.transactions);
    counter!("lagoon_transfer_bytes_total").absolute(of.bytes);
    counter!("lagoon_transfer_bytes_found_total").absolute(of.found_bytes);
    counter!("lagoon_transfer_busy_microseconds_total").absolute(of.reading_us);
    counter!("lagoon_transfer_blocks_damaged_total").absolute(of.damaged_blocks);
}

fn record_carried(of: &Carried) {
    let paths = of.bytes.iter();
    paths.for_each(|(path, bytes)| counter!("lagoon_transfer_path_bytes_total", "path" => *path).absolute(*bytes));
    gauge!("lagoon_transfer_regions_mapped").set(as_f64(of.regions_mapped));
    counter!("lagoon_transfer_regions_refused_total").absolute(of.regions_refused);
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
