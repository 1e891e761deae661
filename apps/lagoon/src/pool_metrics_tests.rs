//! The metrics of a pool of servers with scripted texts, read back by a strict parser.

use super::*;
use crate::gateway::tests::{backend, broken_server, dead, gateway_with};
use crate::metrics_table;
use crate::replay::ReplayLimits;
use crate::scripted::{self, ScriptedEngine};
use axum::Router;
use axum::routing::get;
use lagoon_http::{Keys, Port};
use tokio::net::TcpListener;

/// A server with this text at `/metrics`, for clients with `key`, if there is one.
async fn server(text: String, key: Option<&str>) -> String {
    let router = Router::new().route(METRICS_PATH, get(move || std::future::ready(text.clone())));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let keys = key.map_or_else(Keys::none, |key| Arc::new(Keys::new(None, Some(key), None).unwrap()));
    tokio::spawn(lagoon_http::serve(Port::plain(listener, keys), router, std::future::pending()));
    url
}

fn instance(running: u32) -> String {
    format!(
        "# HELP lagoon_requests_running Sequences in the batch.\n# TYPE lagoon_requests_running gauge\n\
         lagoon_requests_running {running}\n# TYPE lagoon_model_info gauge\nlagoon_model_info{{model=\"m\"}} 1\n\
         # TYPE lagoon_test_seconds histogram\nlagoon_test_seconds_bucket{{le=\"0.5\"}} 1\n\
         lagoon_test_seconds_bucket{{le=\"+Inf\"}} {running}\nlagoon_test_seconds_sum 3\nlagoon_test_seconds_count {running}\n"
    )
}

fn pool(backends: Vec<Backend>) -> [Arc<Upstreams>; 1] {
    [Arc::new(Upstreams::new(Arc::new(backends), None, lagoon_cluster::dispatch::Mode::default()))]
}

/// The values of a family's samples with this suffix, by instance.
fn values(of: &Exposition, name: &str, suffix: &str) -> BTreeMap<String, f64> {
    let Some(family) = of.families.get(name) else { return BTreeMap::new() };
    let samples = family.samples.iter().filter(|sample| sample.suffix == suffix && sample.label("le") != Some("0.5"));
    samples.filter_map(|sample| Some((sample.label("instance")?.to_owned(), sample.number()))).collect()
}

#[tokio::test]
async fn each_instance_has_its_series_once_and_those_that_do_not_answer_are_counted() {
    let hangs = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let mut open = Vec::new();
            loop {
                open.push(listener.accept().await.unwrap());
            }
        });
        url
    };
    let broken = broken_server("HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n1a 2 3 4\n").await;
    let pools = pool(vec![
        backend("a", &server(instance(1), None).await, 1),
        backend("b", &server(instance(5), Some("key")).await, 1),
        // Two of one name have different labels.
        backend("b", &server(instance(2), None).await, 1),
        backend("dead", &dead(), 1),
        backend("hangs", &hangs, 1),
        backend("invalid", &broken, 1),
        backend(
            "other kind",
            &server("# TYPE lagoon_requests_running counter\nlagoon_requests_running 7\n".to_owned(), None).await,
            1,
        ),
    ]);
    let metrics =
        PoolMetrics { deadline: Duration::from_secs(1), ..PoolMetrics::new(scripted::recorder(), Some(Compat::Vllm)) };
    let text = metrics.text(&pools, Some(&HeaderValue::from_static("Bearer key"))).await.unwrap();
    let parsed = Exposition::parse(&text).unwrap_or_else(|error| panic!("{error} in {text}"));
    for (name, suffix) in
        [("lagoon_requests_running", ""), ("vllm:num_requests_running", ""), ("lagoon_test_seconds", "_count")]
    {
        let found = values(&parsed, name, suffix);
        assert_eq!(found.values().sum::<f64>(), 8.0, "{name}: {found:?}");
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(
            found["a"] == 1.0 && found.keys().filter(|label| label.starts_with("b@127.0.0.1:")).count() == 2,
            "{found:?}"
        );
    }
    let scraped = values(&parsed, "lagoon_gateway_instance_scraped", "");
    let left_out: Vec<&str> =
        scraped.iter().filter(|(_, there)| **there == 0.0).map(|(name, _)| name.as_str()).collect();
    assert_eq!((scraped.len(), left_out), (7, vec!["dead", "hangs", "invalid"]));
    let failures = values(&parsed, "lagoon_gateway_scrape_failures_total", "");
    assert_eq!(failures, ["dead", "hangs", "invalid"].map(|name| (name.to_owned(), 1.0)).into());
    let help = &parsed.families["lagoon_requests_running"].help;
    assert_eq!(help, "Sequences in the batch.");
}

/// A failure is counted under the label that the page shows.
#[tokio::test]
async fn one_of_two_with_a_name_that_does_not_answer_is_counted_under_its_own_label() {
    let gone = backend("b", &dead(), 1);
    let pools = pool(vec![gone.clone(), backend("b", &server(instance(1), None).await, 1)]);
    let metrics = PoolMetrics::new(scripted::recorder(), None);
    let expected: BTreeMap<_, _> = [(format!("b@{}", gone.http_addr), 2.0)].into();
    metrics.text(&pools, None).await.unwrap();
    let parsed = Exposition::parse(&metrics.text(&pools, None).await.unwrap()).unwrap();
    assert_eq!(values(&parsed, "lagoon_gateway_scrape_failures_total", ""), expected);
    let scraped = values(&parsed, "lagoon_gateway_instance_scraped", "");
    assert!(scraped.len() == 2 && expected.keys().all(|label| scraped[label] == 0.0), "{scraped:?}");
}

/// Names, labels, HELP and TYPE of everything that a gateway shows, over servers of the real router.
#[tokio::test]
async fn a_gateways_page_is_valid_in_stable_order_and_every_family_has_help() {
    let mut backends = Vec::new();
    for name in ["i2", "i1"] {
        let url = scripted::spawn(scripted::state(ScriptedEngine::saying("ok"))).await;
        backends.push(backend(name, &url, 1));
    }
    let url = gateway_with(Arc::new(backends), ReplayLimits::default()).await;
    for _ in 0..2 {
        let request = reqwest::Client::new().post(format!("{url}/v1/completions"));
        let answer = request.json(&serde_json::json!({"prompt": "a"})).send().await.unwrap();
        assert_eq!(answer.status(), 200);
    }
    let mut orders = Vec::new();
    for _ in 0..2 {
        let text = reqwest::get(format!("{url}/metrics")).await.unwrap().text().await.unwrap();
        let parsed = Exposition::parse(&text).unwrap_or_else(|error| panic!("{error} in {text}"));
        for (name, family) in &parsed.families {
            // Processes install this crate's tables; the recorder that the tests share has no descriptions of them.
            let tables = metrics_table::INSTANCE.iter().chain(metrics_table::OF_GATEWAY);
            let is_in_a_table = tables.flat_map(|table| *table).any(|metric| metric.name == name);
            let is_described = !family.help.is_empty() || is_in_a_table;
            assert!(is_described && family.kind != FamilyKind::Untyped, "{name}");
            assert_eq!(name.ends_with("_total"), family.kind == FamilyKind::Counter, "{name}");
        }
        let names: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
        assert!(names.is_sorted(), "{names:?}");
        let running = text.lines().filter(|line| line.starts_with("lagoon_prompt_tokens_total{instance="));
        orders.push(running.map(|line| line.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>());
    }
    let expected = ["i1", "i2"].map(|name| format!("lagoon_prompt_tokens_total{{instance=\"{name}\"}}"));
    assert_eq!(orders, [expected.to_vec(), expected.to_vec()]);
}
