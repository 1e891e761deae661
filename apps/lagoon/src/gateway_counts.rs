//! The gateway's counters by instance. They are dropped once the pool does not know the instance any more: instances
//! come and go while a gateway stays.

use crate::metrics_table::{GATEWAY_REQUESTS, GATEWAY_RETRIES, GATEWAY_SCRAPE_FAILURES};
use lagoon_http::exposition::escaped;
use lagoon_http::metrics::Metric;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

/// Maximum of instances counted between two reads of `/metrics`.
const INSTANCES_MAX: usize = 1024;

/// Counters by instance. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct GatewayCounts(Mutex<BTreeMap<String, Counts>>);

#[derive(Debug, Default)]
struct Counts {
    /// By the response's status, or the request's failure.
    requests: BTreeMap<String, u64>,
    retries: u64,
    scrape_failures: u64,
}

impl GatewayCounts {
    fn change(&self, instance: &str, change: impl FnOnce(&mut Counts)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < INSTANCES_MAX || all.contains_key(instance) {
            change(all.entry(instance.to_owned()).or_default());
        }
    }

    /// Counts a response of an instance, or its loss.
    pub(crate) fn request(&self, instance: &str, status: &str) {
        self.change(instance, |counts| *counts.requests.entry(status.to_owned()).or_default() += 1);
    }

    /// Counts an unreachable instance.
    pub(crate) fn retry(&self, instance: &str) {
        self.change(instance, |counts| counts.retries += 1);
    }

    /// Counts metrics of an instance that could not be read.
    pub(crate) fn scrape_failure(&self, instance: &str) {
        self.change(instance, |counts| counts.scrape_failures += 1);
    }

    /// Drops instances that are not `known`; returns the rest in Prometheus' text format.
    pub(crate) fn render(&self, known: impl Fn(&str) -> bool) -> String {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|instance, _| known(instance));
        let (mut requests, mut retries, mut failures) = (String::new(), String::new(), String::new());
        for (instance, counts) in all.iter() {
            let instance = escaped(instance);
            for (status, count) in &counts.requests {
                let labels = format!("instance=\"{instance}\",status=\"{}\"", escaped(status));
                let _ = writeln!(requests, "{}{{{labels}}} {count}", GATEWAY_REQUESTS.name);
            }
            let lines = [
                (&mut retries, &GATEWAY_RETRIES, counts.retries),
                (&mut failures, &GATEWAY_SCRAPE_FAILURES, counts.scrape_failures),
            ];
            for (text, Metric { name, .. }, count) in lines.into_iter().filter(|(.., count)| *count > 0) {
                let _ = writeln!(text, "{name}{{instance=\"{instance}\"}} {count}");
            }
        }
        let families =
            [(&GATEWAY_REQUESTS, requests), (&GATEWAY_RETRIES, retries), (&GATEWAY_SCRAPE_FAILURES, failures)];
        families.map(|(metric, samples)| family(metric, &samples)).concat()
    }
}

fn family(metric: &Metric, samples: &str) -> String {
    if samples.is_empty() {
        return String::new();
    }
    let Metric { name, kind, help, .. } = metric;
    format!("# HELP {name} {help}\n# TYPE {name} {}\n{samples}\n", kind.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_that_is_gone_is_not_shown_and_begins_anew() {
        let counts = GatewayCounts::default();
        for _ in 0..2 {
            counts.request("i\"1", "200");
        }
        counts.request("i2", "lost");
        counts.retry("i2");
        let all = counts.render(|_| true);
        assert!(all.contains("lagoon_gateway_requests_total{instance=\"i\\\"1\",status=\"200\"} 2\n"), "{all}");
        assert!(all.contains(
            "# TYPE lagoon_gateway_retries_total counter\nlagoon_gateway_retries_total{instance=\"i2\"} 1\n"
        ));
        let left = counts.render(|name| name != "i2");
        assert!(!left.contains("i2") && !left.contains("retries"), "{left}");
        counts.request("i2", "200");
        assert!(counts.render(|_| true).contains("{instance=\"i2\",status=\"200\"} 1\n"));
    }

    #[test]
    fn names_do_not_fill_the_memory() {
        let counts = GatewayCounts::default();
        (0..2 * INSTANCES_MAX).for_each(|i| counts.request(&format!("i{i}"), "200"));
        assert_eq!(counts.0.lock().unwrap().len(), INSTANCES_MAX);
        assert_eq!(counts.render(|_| false), "");
    }
}
