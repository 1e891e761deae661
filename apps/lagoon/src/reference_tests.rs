//! The reference pages are what the program prints, and the table of metrics is what the program records.

use super::*;
use std::collections::BTreeSet;
use std::path::Path;

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn the_pages_are_what_the_program_prints() {
    for (name, text) in [
        ("flags.md", flags()),
        ("metrics.md", metrics()),
        ("models.md", models()),
        ("requests.md", lagoon_http::openapi::page()),
    ] {
        assert!(page(name) == text, "docs/reference/{name} is stale\nhint: cargo xtask docs");
    }
}

#[test]
fn no_metric_is_declared_twice() {
    let names: Vec<&str> = metrics_table::ALL.iter().flat_map(|(_, table)| *table).map(|m| m.name).collect();
    let once: BTreeSet<&str> = names.iter().copied().collect();
    assert_eq!(names.len(), once.len());
    for table in [metrics_table::INSTANCE, metrics_table::OF_GATEWAY, metrics_table::OF_GMANAGER].concat() {
        assert!(metrics_table::ALL.iter().any(|(_, listed)| listed[0].name == table[0].name), "{}", table[0].name);
    }
}

/// Prometheus' parsers count `x_total` as the counter `x`, and `x_sum` as part of the histogram `x`.
#[test]
fn no_name_is_of_two_kinds() {
    let all = || metrics_table::ALL.iter().flat_map(|(_, table)| *table);
    let mut bases = BTreeSet::new();
    for metric in all() {
        let total = metric.name.strip_suffix("_total");
        assert_eq!(total.is_some(), metric.kind.name() == "counter", "{} is a {}", metric.name, metric.kind.name());
        assert!(bases.insert(total.unwrap_or(metric.name)), "{} is there twice", metric.name);
    }
    for metric in all() {
        for part in ["_bucket", "_sum", "_count"] {
            assert!(metric.name.strip_suffix(part).is_none_or(|base| !bases.contains(base)), "{}", metric.name);
        }
    }
}

/// Kind and name of every metric that a source file records by a literal name.
fn recorded(text: &str) -> Vec<(&'static str, String)> {
    let mut out = Vec::new();
    for kind in ["counter", "gauge", "histogram"] {
        for (at, call) in text.match_indices(&format!("{kind}!(")) {
            let named = text[at + call.len()..].trim_start().strip_prefix('"').and_then(|rest| rest.split_once('"'));
            out.extend(named.map(|(name, _)| (kind, name.to_owned())));
        }
    }
    out
}

#[test]
fn the_table_is_what_this_crate_records() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(&src).unwrap() {
        let path = entry.unwrap().path();
        if !path.to_string_lossy().ends_with("_tests.rs") {
            found.extend(recorded(&std::fs::read_to_string(path).unwrap()));
        }
    }
    // The gateway's counts by instance are rendered from the table's entries themselves.
    let by_instance = [
        &metrics_table::GATEWAY_REQUESTS,
        &metrics_table::GATEWAY_RETRIES,
        &metrics_table::GATEWAY_SCRAPE_FAILURES,
        &metrics_table::GATEWAY_SCRAPED,
    ];
    found.extend(by_instance.map(|metric| (metric.kind.name(), metric.name.to_owned())));
    let http = [lagoon_http::metrics::METRICS, lagoon_http::metrics::HTTPS].map(|table| table[0].name);
    let own = metrics_table::ALL.iter().filter(|(_, table)| !http.contains(&table[0].name));
    let declared: BTreeSet<_> = own.flat_map(|(_, table)| *table).map(|m| (m.kind.name(), m.name.to_owned())).collect();
    assert_eq!(found, declared);
}
