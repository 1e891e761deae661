//! A gateway over two pools of scripted servers.

use super::*;
use crate::gateway::tests::{backend, complete, dead};
use crate::gateway::{DispatchArgs, Gateway};
use crate::scripted::{self, ScriptedEngine};
use crate::upstreams::Backends;
use lagoon_http::{Keys, Port};
use tokio::net::TcpListener;

/// A gateway over pools of these servers.
async fn gateway(pools: &[&str]) -> String {
    let pool = |url: &&str| Arc::new(vec![backend("instance-0", url, 1)]) as Arc<dyn Backends>;
    let gateway = Gateway::over(pools.iter().map(pool).collect(), scripted::recorder(), None, DispatchArgs::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(lagoon_http::serve(Port::plain(listener, Keys::none()), gateway.router(), std::future::pending()));
    url
}

async fn get(url: &str) -> (u16, Value) {
    let response = reqwest::get(url).await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// Servers of the same model, distinguished by their other names.
async fn servers() -> [String; 2] {
    let one = scripted::spawn(scripted::state(ScriptedEngine::named("one", &["first/model"]))).await;
    let two = scripted::spawn(scripted::state(ScriptedEngine::named("two", &["second/model"]))).await;
    [one, two]
}

#[tokio::test]
async fn a_requests_model_chooses_its_pool() {
    let [one, two] = servers().await;
    let url = gateway(&[&one, &two]).await;
    for (body, text) in [
        (json!({"prompt": "a", "model": "second/model"}), "two"),
        (json!({"prompt": "a", "model": "first/model"}), "one"),
        (json!({"model": "lagoon/scripted", "prompt": "a"}), "one"),
        (json!({"prompt": "a"}), "one"),
        (
            json!({"prompt": "a".repeat(200), "metadata": "b".repeat(2 * INLINE_BYTES_MAX), "model": "second/model"}),
            "two",
        ),
    ] {
        let (status, instance, answer) = complete(&url, &body).await;
        assert_eq!((status, instance.as_str()), (200, "instance-0"), "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["choices"][0]["text"], text);
        assert_eq!(answer["model"], *body.get("model").unwrap_or(&json!("lagoon/scripted")));
    }
    let (status, _, answer) = complete(&url, &json!({"prompt": "a", "model": "gpt-5"})).await;
    let error: Value = serde_json::from_str(&answer).unwrap();
    let error = &error["error"];
    assert_eq!((status, &error["code"], &error["param"]), (404, &json!("model_not_found"), &json!("model")));
    assert!(error["message"].as_str().unwrap().contains("`second/model`"), "{error}");
}

#[tokio::test]
async fn models_are_those_of_all_pools_each_once() {
    let [one, two] = servers().await;
    let url = gateway(&[&one, &two]).await;
    let (status, models) = get(&format!("{url}/v1/models")).await;
    let ids: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!((status, ids), (200, vec![&json!("lagoon/scripted"), &json!("first/model"), &json!("second/model")]));
    assert_eq!(get(&format!("{url}/v1/models/second/model")).await.1["id"], "second/model");
    assert_eq!(get(&format!("{url}/v1/models/second%2Fmodel")).await.1["id"], "second/model");
    assert_eq!(get(&format!("{url}/v1/models/other")).await.0, 404);
    assert_eq!(get(&format!("{url}/health")).await.1["instances"], 2);
    // Series of instances with one name in two pools have different labels.
    let metrics = reqwest::get(format!("{url}/metrics")).await.unwrap().text().await.unwrap();
    lagoon_http::exposition::Exposition::parse(&metrics).unwrap_or_else(|error| panic!("{error} in {metrics}"));
    let scraped =
        metrics.lines().filter(|line| line.starts_with("lagoon_gateway_instance_scraped{instance=\"instance-0@"));
    assert_eq!(scraped.count(), 2, "{metrics}");
}

#[tokio::test]
async fn a_pool_that_does_not_answer_leaves_others_alone() {
    let [one, _] = servers().await;
    let gone = dead();
    let url = gateway(&[&gone, &one]).await;
    let (status, _, answer) = complete(&url, &json!({"prompt": "a", "model": "first/model"})).await;
    assert_eq!(status, 200, "{answer}");
    // It may be the model of the pool that has not answered.
    let (status, _, answer) = complete(&url, &json!({"prompt": "a", "model": "gpt-5"})).await;
    assert!(status == 503 && answer.contains("has not named its models"), "{answer}");
}
