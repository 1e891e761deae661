//! `/metrics` of an endpoint over a pool: this process's metrics, and those of every instance, whose name is the label `instance`.
//!
//! Instances are read at once, within a deadline and in bounded memory. One that does not answer, or whose text breaks a rule of
//! the format, is left out and counted.

use crate::metrics_table::GATEWAY_SCRAPED;
use crate::upstreams::{Backend, Upstreams, render_counts};
use axum::body::Body;
use axum::http::{HeaderValue, Request, StatusCode, header};
use futures::StreamExt as _;
use futures::stream;
use lagoon_http::ApiError;
use lagoon_http::exposition::{Exposition, FamilyKind, Sample};
use lagoon_http::keys::METRICS_PATH;
use lagoon_http::metrics::{Compat, render};
use lagoon_http::vllm_names;
use metrics_exporter_prometheus::PrometheusHandle;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

/// Deadline of one instance's metrics, shorter than the 10 s that Prometheus waits for all.
const INSTANCE_DEADLINE: Duration = Duration::from_secs(3);
/// Deadline of all.
const POOL_DEADLINE: Duration = Duration::from_secs(8);
/// Instances that are read at once.
const AT_ONCE: usize = 32;
/// Longest text of one instance, in bytes.
const INSTANCE_BYTES_MAX: usize = 4 << 20;
/// Longest text of all instances.
const POOL_BYTES_MAX: usize = 64 << 20;
/// Requests for the pool's metrics that are answered at once; others wait.
const READERS_MAX: usize = 2;

/// The metrics of a gateway and its instances.
pub(crate) struct PoolMetrics {
    own: PrometheusHandle,
    compat: Option<Compat>,
    readers: Semaphore,
    /// Of one instance.
    deadline: Duration,
}

impl PoolMetrics {
    pub(crate) fn new(own: PrometheusHandle, compat: Option<Compat>) -> Self {
        Self { own, compat, readers: Semaphore::new(READERS_MAX), deadline: INSTANCE_DEADLINE }
    }

    /// The metrics of this process only.
    pub(crate) fn own(&self) -> PrometheusHandle {
        self.own.clone()
    }

    /// The text of `/metrics`. Servers outside of a pool get `authorization`, if there is one.
    ///
    /// # Errors
    /// 503 while others have read them for too long.
    pub(crate) async fn text(
        &self,
        pools: &[Arc<Upstreams>],
        authorization: Option<&HeaderValue>,
    ) -> Result<String, ApiError> {
        let waited = timeout(POOL_DEADLINE, self.readers.acquire()).await;
        let _reader = waited.map_err(|_elapsed| ApiError::unavailable("others read the metrics of the pool"))?;
        let targets = targets(pools);
        let until = Instant::now() + POOL_DEADLINE;
        let deadline = self.deadline;
        let reading = targets.iter().map(|(name, (upstreams, backend))| async move {
            let read = timeout_at(until, read(upstreams, backend, authorization, deadline)).await;
            (name, upstreams, read.unwrap_or_else(|_elapsed| Err("the deadline has passed".to_owned())))
        });
        let reading: Vec<_> = reading.collect();
        let mut results = stream::iter(reading).buffer_unordered(AT_ONCE);
        let (mut all, mut scraped, mut bytes) = (Exposition::default(), BTreeMap::new(), 0);
        while let Some((name, upstreams, result)) = results.next().await {
            let result = result.and_then(|text| {
                bytes += text.len();
                if bytes > POOL_BYTES_MAX {
                    return Err(format!("all instances have more than {POOL_BYTES_MAX} bytes"));
                }
                self.add(&mut all, name, &text)
            });
            if let Err(why) = &result {
                tracing::warn!(instance = %name, why, "the metrics of an instance are left out");
                upstreams.counts.scrape_failure(name);
            }
            scraped.insert(name.as_str(), result.is_ok());
        }
        let own = render(&self.own, None) + &render_counts(pools);
        self.finish(all, &own, &scraped)
    }

    /// Adds one instance's metrics.
    fn add(&self, all: &mut Exposition, name: &str, text: &str) -> Result<(), String> {
        let mut parsed = Exposition::parse(text).map_err(|error| error.to_string())?;
        self.compat.into_iter().for_each(|Compat::Vllm| vllm_names::add(&mut parsed));
        for family in all.join(name, parsed) {
            tracing::warn!(instance = %name, family, "a metric of an instance has another kind than others': left out");
        }
        Ok(())
    }

    /// Adds this process's metrics, and whether each instance was read.
    fn finish(&self, mut all: Exposition, own: &str, scraped: &BTreeMap<&str, bool>) -> Result<String, ApiError> {
        let own =
            Exposition::parse(own).map_err(|error| ApiError::internal(format!("the gateway's metrics: {error}")))?;
        for (name, family) in own.families {
            match all.families.get_mut(&name) {
                Some(of) if of.kind == family.kind => of.samples.extend(family.samples),
                _ => drop(all.families.insert(name, family)),
            }
        }
        let scraped = scraped.iter().map(|(name, is_there)| {
            Sample::new(vec![("instance".to_owned(), (*name).to_owned())], u8::from(*is_there))
        });
        let of = &GATEWAY_SCRAPED;
        all.insert(of.name, FamilyKind::Gauge, of.help, scraped.collect());
        Ok(all.text())
    }
}

/// The instances to read, by the label of each: its name, with its address where several have the name.
fn targets(pools: &[Arc<Upstreams>]) -> BTreeMap<String, (&Upstreams, Backend)> {
    let all: Vec<(&Upstreams, Backend)> =
        pools.iter().flat_map(|pool| pool.scraped().into_iter().map(|backend| (pool.as_ref(), backend))).collect();
    let names: Vec<String> = all.iter().map(|(_, backend)| backend.name.clone()).collect();
    let label = |backend: &Backend| match names.iter().filter(|name| **name == backend.name).count() {
        1 => backend.name.clone(),
        _ => format!("{}@{}", backend.name, backend.http_addr),
    };
    all.into_iter().map(|(pool, backend)| (label(&backend), (pool, backend))).collect()
}

async fn read(
    upstreams: &Upstreams,
    backend: &Backend,
    authorization: Option<&HeaderValue>,
    deadline: Duration,
) -> Result<String, String> {
    let mut request = Request::get(upstreams.url(backend, METRICS_PATH));
    // In a pool, the gateway's certificate is enough.
    if let Some(key) = authorization.filter(|_| !upstreams.is_pool()) {
        request = request.header(header::AUTHORIZATION, key);
    }
    let request = request.body(Body::empty()).map_err(|error| error.to_string())?;
    let answer = async {
        let response = upstreams.http.send(request).await.map_err(|error| error.to_string())?;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(format!("it answered with status {status}"));
        }
        let bytes = response.bytes(INSTANCE_BYTES_MAX).await.map_err(|error| error.to_string())?;
        String::from_utf8(bytes).map_err(|error| error.to_string())
    };
    let late = |_elapsed| Err(format!("it did not answer within {} s", deadline.as_secs_f32()));
    timeout(deadline, answer).await.unwrap_or_else(late)
}

#[cfg(test)]
#[path = "pool_metrics_tests.rs"]
mod tests;
