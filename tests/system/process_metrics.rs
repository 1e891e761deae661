//! docs/reference/metrics.md equals the metrics of running processes: names, kinds, labels with their values, help.
//!
//! The page is generated from the program's table, which a test of the program ensures; here it is compared with
//! `/metrics` of an instance with a host tier, a gateway and a gManager.

use crate::process_cluster::{Cluster, certificates, wait_for_pool};
use crate::process_up::golden_prompt;
use lagoon_tests::process::{Client, Server};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// One row of the page.
struct Row {
    section: String,
    kind: String,
    /// Labels and their values; no values if any are allowed.
    labels: BTreeMap<String, BTreeSet<String>>,
    help: String,
}

fn page() -> BTreeMap<String, Row> {
    let text = std::fs::read_to_string(lagoon_tests::root().join("docs/reference/metrics.md")).unwrap();
    let (mut rows, mut section) = (BTreeMap::new(), String::new());
    for line in text.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title.to_owned();
        }
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [name, kind, _unit, labels, help] = cells[..] else { continue };
        let Some(name) = name.strip_prefix('`').and_then(|n| n.strip_suffix('`')) else { continue };
        let label = |text: &str| {
            let (name, values) = text.split_once(": ").unwrap_or((text, ""));
            let values = values.split(", ").filter(|v| !v.is_empty()).map(str::to_owned).collect();
            (name.trim_matches('`').to_owned(), values)
        };
        let labels = labels.split("; ").filter(|l| !l.is_empty()).map(label).collect();
        let row = Row { section: section.clone(), kind: kind.to_owned(), labels, help: help.to_owned() };
        rows.insert(name.to_owned(), row);
    }
    rows
}

/// The labels of a sample line, without `le`.
fn labels(line: &str) -> Vec<(String, String)> {
    let Some((inner, _)) = line.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}')) else { return vec![] };
    let pairs = inner.split("\",").filter_map(|pair| pair.split_once("=\""));
    let pairs = pairs.map(|(name, value)| (name.to_owned(), value.trim_end_matches('"').to_owned()));
    pairs.filter(|(name, _)| name != "le").collect()
}

/// Compares a process's exports with the page; returns their names.
fn compare(page: &BTreeMap<String, Row>, exported: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in exported.lines().filter_map(|l| l.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let row = page.get(name).unwrap_or_else(|| panic!("{name} is exported and not on the page"));
        assert_eq!(row.kind, kind, "{name}");
        assert!(exported.contains(&format!("# HELP {name} {}\n", row.help)), "{name} has another help");
        let of = |line: &&str| {
            let series = line.split(['{', ' ']).next().unwrap();
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| series.strip_suffix(suffix));
            series == name || (kind == "histogram" && base == Some(name))
        };
        for line in exported.lines().filter(|l| !l.starts_with('#')).filter(of) {
            // At a gateway every series of an instance has its name.
            let mut found = labels(line);
            found.retain(|(label, _)| label != "instance" || row.labels.contains_key("instance"));
            let keys: BTreeSet<&String> = found.iter().map(|(label, _)| label).collect();
            assert!(row.labels.keys().collect::<BTreeSet<_>>() == keys, "other labels: {line}");
            for (label, value) in &found {
                let known = &row.labels[label];
                assert!(known.is_empty() || known.contains(value), "{label} has another value: {line}");
            }
        }
        names.insert(name.to_owned());
    }
    names
}

/// The page's metrics of these sections except histograms, which appear with their first observation.
fn expected(page: &BTreeMap<String, Row>, sections: &[&str]) -> BTreeSet<String> {
    let of = |row: &Row| row.kind != "histogram" && sections.contains(&row.section.as_str());
    page.iter().filter(|(_, row)| of(row)).map(|(name, _)| name.clone()).collect()
}

#[test]
fn processes_export_what_the_reference_page_says() {
    let page = page();
    let cluster = Cluster::new();
    let (model, prompt) = golden_prompt();
    let flags =
        ["--backend=cpu", "--kv-tokens=64", "--host-kv-tokens=128", "--host-cache-tokens=64", "--calibrate=off"];
    let instance = cluster.serve("one", &model, &flags);
    let client = instance.client();
    wait_for_pool(&client, 24);
    let [a, b, c] = certificates(&cluster.ca, "gateway");
    let gmanager = cluster.gmanager.announced("quic");
    let flags = ["--listen=127.0.0.1:0", "--block-tokens=8", "--gmanager", &gmanager, &a, &b, &c];
    let gateway = Server::start(&[&["gateway"], &flags[..]].concat());
    assert_eq!(gateway.client().complete(&prompt, 8, &json!({})).status, 200);

    client.wait_for_text("/metrics", "lagoon_host_kv_blocks 16");
    client.wait_for_text("/metrics", "lagoon_draining 0");
    let exported = compare(&page, &client.get("/metrics").text);
    let sections = [
        "HTTP server of an instance",
        "KV memory",
        "Scheduling, preemption, recovery",
        "Prefix cache",
        "Attention over KV of creditors",
        "Movement of KV",
        "Prefill elsewhere",
        "Host memory tier",
        "Certificate of a node",
    ];
    let missing: Vec<_> = expected(&page, &sections).difference(&exported).cloned().collect();
    assert!(missing.is_empty(), "on the page and not exported: {missing:?}");

    let at_gateway = gateway.client().get("/metrics").text;
    let exported_there = compare(&page, &at_gateway);
    let own = ["instance_scraped", "passes_total", "requests_total", "requests_waiting", "wait_seconds"]
        .map(|name| format!("lagoon_gateway_{name}"));
    assert_eq!(exported_there, &exported | &BTreeSet::from(own));
    assert!(at_gateway.contains("\nlagoon_host_kv_blocks{instance=\"one\"} 16\n"), "{at_gateway}");
    assert!(at_gateway.contains("\nlagoon_gateway_instance_scraped{instance=\"one\"} 1\n"), "{at_gateway}");

    let metrics = Client::new(cluster.gmanager.announced("metrics").parse().unwrap());
    metrics.wait_for_text("/metrics", "lagoon_gmanager_instances{state=\"alive\"} 2");
    let exported = compare(&page, &metrics.get("/metrics").text);
    let mut wanted = expected(&page, &["gManager", "Certificate of a node"]);
    // They appear with their first event.
    wanted.retain(|name| !["lagoon_gmanager_refusals_total", "lagoon_role_switches_total"].contains(&name.as_str()));
    let missing: Vec<_> = wanted.difference(&exported).cloned().collect();
    assert!(missing.is_empty(), "on the page and not exported: {missing:?}");
}
