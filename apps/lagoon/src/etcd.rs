//! An etcd client for the election: leases, one key, one transaction, over the JSON form of etcd's v3 API.
//!
//! etcd serves that form at its gRPC address (`/v3/…`, since 3.4), with integers as strings and keys in base64. A call
//! is tried once at every endpoint, the last working one first, each within a time limit.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use std::time::Duration;

/// Errors of a call to etcd.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EtcdError {
    /// No endpoint answered; the last one's error.
    #[error("etcd cannot be reached at {endpoint}: {reason}")]
    Unreachable { endpoint: String, reason: String },
    #[error("etcd refused {path}: {message}")]
    Refused { path: &'static str, message: String },
    /// The endpoint is no etcd.
    #[error("{path} was not answered as etcd's v3 API does: no {field}")]
    Protocol { path: &'static str, field: &'static str },
}

/// Id of a lease in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EtcdLease(i64);

/// A key's value and revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) value: String,
    /// etcd's revision when the key was created: larger for every later creation.
    pub(crate) revision: u64,
}

/// A client. It keeps connections, no state of etcd's.
#[derive(Debug)]
pub(crate) struct Etcd {
    http: reqwest::Client,
    endpoints: Vec<String>,
    /// The endpoint that answered last.
    at: usize,
}

impl Etcd {
    /// A client of `endpoints` (`http://host:port`, at least one), each with `limit` to answer.
    pub(crate) fn new(endpoints: &[String], limit: Duration) -> anyhow::Result<Self> {
        anyhow::ensure!(!endpoints.is_empty(), "--etcd needs an address\nhint: --etcd http://127.0.0.1:2379");
        for endpoint in endpoints {
            anyhow::ensure!(
                endpoint.starts_with("http://") && reqwest::Url::parse(endpoint).is_ok(),
                "{endpoint:?} is no http:// address of etcd\nhint: --etcd http://127.0.0.1:2379; https is not spoken, \
                 put a proxy on this machine in between"
            );
        }
        // No proxy from the environment: etcd is the cluster's own.
        let http = reqwest::Client::builder().no_proxy().timeout(limit).connect_timeout(limit).build()?;
        let endpoints = endpoints.iter().map(|e| e.trim_end_matches('/').to_owned()).collect();
        Ok(Self { http, endpoints, at: 0 })
    }

    /// Requests a lease of about `ttl_s` seconds (etcd may grant more); returns it with its time to live.
    pub(crate) async fn grant(&mut self, ttl_s: u64) -> Result<(EtcdLease, Duration), EtcdError> {
        const PATH: &str = "/v3/lease/grant";
        let reply = self.call(PATH, &json!({ "TTL": ttl_s.to_string() })).await?;
        let lease = integer(&reply["ID"]).ok_or(EtcdError::Protocol { path: PATH, field: "ID" })?;
        let ttl = natural(&reply["TTL"]).ok_or(EtcdError::Protocol { path: PATH, field: "TTL" })?;
        Ok((EtcdLease(lease), Duration::from_secs(ttl)))
    }

    /// Renews a lease; returns its time to live from etcd's receipt, `None` if it has ended.
    pub(crate) async fn keep_alive(&mut self, lease: EtcdLease) -> Result<Option<Duration>, EtcdError> {
        let reply = self.call("/v3/lease/keepalive", &json!({ "ID": lease.0.to_string() })).await?;
        Ok(natural(&reply["result"]["TTL"]).filter(|ttl| *ttl > 0).map(Duration::from_secs))
    }

    /// Ends a lease, and deletes the keys attached to it.
    pub(crate) async fn revoke(&mut self, lease: EtcdLease) -> Result<(), EtcdError> {
        self.call("/v3/lease/revoke", &json!({ "ID": lease.0.to_string() })).await.map(drop)
    }

    /// Creates `key` for the time of `lease`, if it does not exist; returns its holder.
    pub(crate) async fn claim(&mut self, key: &str, value: &str, lease: EtcdLease) -> Result<Claim, EtcdError> {
        const PATH: &str = "/v3/kv/txn";
        let name = STANDARD.encode(key);
        let body = json!({
            "compare": [{ "key": name, "target": "CREATE", "result": "EQUAL", "create_revision": "0" }],
            "success": [{ "request_put": { "key": name, "value": STANDARD.encode(value), "lease": lease.0.to_string() } }],
            "failure": [{ "request_range": { "key": name } }],
        });
        let reply = self.call(PATH, &body).await?;
        if reply["succeeded"] == true {
            let revision = natural(&reply["header"]["revision"]);
            return revision.map(Claim::Ours).ok_or(EtcdError::Protocol { path: PATH, field: "header.revision" });
        }
        let other = held(&reply["responses"][0]["response_range"]["kvs"][0]);
        other.map(Claim::Theirs).ok_or(EtcdError::Protocol { path: PATH, field: "kvs" })
    }

    /// Reads a key with a quorum of etcd's members.
    pub(crate) async fn get(&mut self, key: &str) -> Result<Option<Held>, EtcdError> {
        let reply = self.call("/v3/kv/range", &json!({ "key": STANDARD.encode(key) })).await?;
        Ok(held(&reply["kvs"][0]))
    }

    async fn call(&mut self, path: &'static str, body: &Value) -> Result<Value, EtcdError> {
        let mut failed = None;
        for turn in 0..self.endpoints.len() {
            let at = (self.at + turn) % self.endpoints.len();
            let endpoint = &self.endpoints[at];
            let sent = self.http.post(format!("{endpoint}{path}")).json(body).send().await;
            let answered = match sent {
                Ok(response) => {
                    let status = response.status();
                    response.json::<Value>().await.map(|value| (status, value))
                }
                Err(error) => Err(error),
            };
            match answered {
                Ok((status, value)) if status.is_success() => {
                    self.at = at;
                    return Ok(value);
                }
                // An endpoint without a leader answers so: another may be in the majority.
                Ok((status, value)) if status.is_server_error() => {
                    failed = Some((at, message(&value, status.as_u16())));
                }
                Ok((status, value)) => {
                    return Err(EtcdError::Refused { path, message: message(&value, status.as_u16()) });
                }
                Err(error) => failed = Some((at, error.without_url().to_string())),
            }
        }
        let (at, reason) = failed.unwrap_or_default();
        Err(EtcdError::Unreachable { endpoint: self.endpoints[at].clone(), reason })
    }
}

/// Result of [`Etcd::claim`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Created, at this revision.
    Ours(u64),
    Theirs(Held),
}

fn message(value: &Value, status: u16) -> String {
    value["error"].as_str().map_or_else(|| format!("HTTP status {status}"), str::to_owned)
}

/// An integer field: etcd omits zeros and writes 64-bit integers as strings.
fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

fn natural(value: &Value) -> Option<u64> {
    integer(value).and_then(|n| u64::try_from(n).ok())
}

fn held(kv: &Value) -> Option<Held> {
    let value = STANDARD.decode(kv["value"].as_str().unwrap_or_default()).ok()?;
    Some(Held { value: String::from_utf8(value).ok()?, revision: natural(&kv["create_revision"])? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_strings_and_what_is_no_key_is_none() {
        assert_eq!((integer(&json!("-7")), integer(&json!(7)), integer(&json!("x"))), (Some(-7), Some(7), None));
        assert_eq!(natural(&json!("-7")), None);
        let kv = json!({ "value": STANDARD.encode("1.2.3.4:5"), "create_revision": "9" });
        assert_eq!(held(&kv), Some(Held { value: "1.2.3.4:5".to_owned(), revision: 9 }));
        assert_eq!(held(&Value::Null), None);
    }

    #[test]
    fn addresses_are_checked_first() {
        let error = |e: &str| Etcd::new(&[e.to_owned()], Duration::from_secs(1)).unwrap_err().to_string();
        assert!(error("https://a:1").contains("hint:") && error("a:1").contains("http://"));
        assert!(Etcd::new(&[], Duration::from_secs(1)).is_err());
    }

    #[tokio::test]
    async fn an_endpoint_that_is_not_there_is_named() {
        let mut etcd = Etcd::new(&["http://127.0.0.1:1/".to_owned()], Duration::from_secs(1)).unwrap();
        let error = etcd.grant(3).await.unwrap_err();
        assert!(
            matches!(&error, EtcdError::Unreachable { endpoint, .. } if endpoint == "http://127.0.0.1:1"),
            "{error}"
        );
    }
}
