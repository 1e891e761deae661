//! A gManager's metrics for Prometheus: the pool in its term, its orders, and whether it leads.

use crate::pool_client::role_name;
use lagoon_cluster::{DgfmStats, GManager, GManagerStats, SwitchedBy};
use lagoon_protocol::{InstanceStatus, Role};
use metrics::{counter, gauge, histogram};
use std::collections::BTreeMap;
use std::time::Duration;

/// Counts of this term that were exported already: counters go on over terms.
#[derive(Debug, Default)]
pub(crate) struct GManagerMetrics {
    stats: GManagerStats,
    dgfm: DgfmStats,
    switches: BTreeMap<(Role, Role, SwitchedBy), u64>,
}

/// Records the duration of a planning round and its tick.
pub(crate) fn round(took: Duration) {
    histogram!("lagoon_gmanager_round_seconds").record(took.as_secs_f64());
}

/// Counts a creditor's refusal that a debtor reported.
pub(crate) fn refusal() {
    counter!("lagoon_gmanager_refusals_total").increment(1);
}

impl GManagerMetrics {
    /// Sets all metrics.
    pub(crate) fn record(&mut self, gmanager: &GManager, now_ms: u64) {
        let rows = gmanager.status(now_ms);
        let count = |of: &dyn Fn(&InstanceStatus) -> bool| {
            f64::from(u32::try_from(rows.iter().filter(|r| of(r)).count()).unwrap_or(u32::MAX))
        };
        let draining = |r: &InstanceStatus| r.heartbeat.as_ref().is_some_and(|h| h.draining);
        gauge!("lagoon_gmanager_instances", "state" => "alive").set(count(&|r| r.alive && !draining(r)));
        gauge!("lagoon_gmanager_instances", "state" => "draining").set(count(&|r| r.alive && draining(r)));
        gauge!("lagoon_gmanager_instances", "state" => "silent").set(count(&|r| !r.alive));

        let (old, new) = (self.stats, gmanager.stats());
        counter!("lagoon_gmanager_rounds_total").increment(new.rounds - old.rounds);
        counter!("lagoon_gmanager_moves_total", "state" => "given").increment(new.moves_given - old.moves_given);
        counter!("lagoon_gmanager_moves_total", "state" => "done").increment(new.moves_done - old.moves_done);
        counter!("lagoon_gmanager_moves_total", "state" => "failed").increment(new.moves_failed - old.moves_failed);
        counter!("lagoon_gmanager_blocks_moved_total").increment(new.blocks_moved - old.blocks_moved);
        counter!("lagoon_gmanager_fenced_total").increment(new.fenced - old.fenced);
        self.stats = new;

        let (old, new) = (self.dgfm, gmanager.dgfm_stats().unwrap_or_default());
        counter!("lagoon_gmanager_cycles_total", "state" => "found").increment(new.cycles - old.cycles);
        counter!("lagoon_gmanager_cycles_total", "state" => "completed").increment(new.completed - old.completed);
        counter!("lagoon_gmanager_cycles_total", "state" => "aborted").increment(new.aborted - old.aborted);
        counter!("lagoon_gmanager_cycle_blocks_total").increment(new.blocks - old.blocks);
        self.dgfm = new;

        for (from, to, by, count) in gmanager.role_switches() {
            let old = self.switches.insert((from, to, by), count).unwrap_or(0);
            let by = match by {
                SwitchedBy::Operator => "operator",
                SwitchedBy::Balancer => "auto",
            };
            let labels = [("from", role_name(from)), ("to", role_name(to)), ("by", by)];
            counter!("lagoon_role_switches_total", &labels).increment(count - old);
        }
    }
}

/// Sets whether this gManager leads, and its term.
pub(crate) fn record_standing(term: Option<u64>) {
    gauge!("lagoon_gmanager_leads").set(if term.is_some() { 1.0 } else { 0.0 });
    #[allow(clippy::cast_precision_loss, reason = "for comparing, and under 2^53 for millennia")]
    gauge!("lagoon_gmanager_term").set(term.unwrap_or(0) as f64);
}
